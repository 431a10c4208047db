"""Episodes with their camera images, as training wants them.

Nothing of lerobot or torch here, so that the processes that render start fast.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dayshift.policy.training.demonstrations import Demonstration
from dayshift.policy.training.vlm import IMAGE_SIDE
from dayshift.sim.render import CameraRenderer
from dayshift.sim.scene import Scene
from dayshift.sim.tasks import find_task
from dayshift.sim.types import CAMERAS

CAMERA_FEATURES = ("observation.images.image", "observation.images.image2")  # in the order of CAMERAS


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a policy learns from. `is_disturbed`: something else than the action was executed."""

    sentence: str
    image_steps: NDArray[np.int64]  # (num_images,): control steps that were seen by the cameras
    images: NDArray[np.uint8]  # (num_images, num_cameras, 3, side, side)
    states: NDArray[np.float32]  # (num_steps, 8)
    actions: NDArray[np.float32]  # (num_steps, 7)
    is_disturbed: NDArray[np.bool_]  # (num_steps,)


def rendered(
    demonstrations: Iterable[Demonstration], *, image_stride: int, parallel: int
) -> Iterator[Episode]:
    """Demonstrations with both cameras rendered, as the robot would have seen them."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parallel, mp_context=context) as pool:
        yield from pool.map(partial(render, image_stride=image_stride), demonstrations)


def render(demonstration: Demonstration, *, image_stride: int = 1) -> Episode:
    """In a process that keeps a renderer. The first step that is seen depends on the demonstration."""
    scene, cameras = _renderer(demonstration.task)
    num_joints = demonstration.joint_positions.shape[1]
    sim_state = scene.state()
    sim_state[1 : 1 + num_joints] = demonstration.joint_positions[0]
    scene.restore(demonstration.fixture_poses, sim_state)
    steps = np.arange(len(demonstration.actions) % image_stride, len(demonstration.actions), image_stride)
    images = np.empty((len(steps), len(CAMERAS), 3, IMAGE_SIDE, IMAGE_SIDE), dtype=np.uint8)
    for views, step in zip(images, steps, strict=True):
        scene.data.qpos[:] = demonstration.joint_positions[step]
        rendered_views = cameras.render(CAMERAS)
        for view, name in zip(views, CAMERAS, strict=True):
            view[:] = rendered_views[name].transpose(2, 0, 1)
    return Episode(
        sentence=scene.task.sentence,
        image_steps=steps,
        images=images,
        states=demonstration.robot_states,
        actions=demonstration.actions,
        is_disturbed=demonstration.is_disturbed,
    )


_kept: list[
    tuple[Scene, CameraRenderer]
] = []  # of this process of the pool; a scene takes seconds to compile


def _renderer(task_name: str) -> tuple[Scene, CameraRenderer]:
    task = find_task(task_name)
    if not _kept or not _kept[0][0].can_serve(task):
        scene = Scene(task)
        scene.set_task(task)
        scene.reset(init_state_id=0, seed=0)
        _kept[:] = [(scene, CameraRenderer(scene, IMAGE_SIDE))]
    scene, cameras = _kept[0]
    scene.set_task(task)
    return scene, cameras
