"""Camera images from simulator states: live beside the physics, or later from recorded frames.

Both go through `CameraRenderer`, which copies the joint positions into a state of its own. So a
rendered frame never changes the physics, and an image made later is the live image, pixel by pixel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dayshift.sim.faults import Disturbance
from dayshift.sim.libero_setup import load_mujoco
from dayshift.sim.scene import Scene
from dayshift.sim.tasks import find_task
from dayshift.sim.types import CAMERAS, Camera, RolloutSpec, RolloutStart

MUJOCO_CAMERA: Mapping[Camera, str] = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}

# Rendering costs geometry passes and multisampling, not pixels: these three halve it and more.
RENDER_FLAGS = "reflections off, multisampling off, shadows off"

Images = dict[Camera, NDArray[np.uint8]]


class CameraRenderer:
    """Renders a scene's cameras at one image size. Owns an OpenGL context: close it.

    Make it after a fork, never before, and use it in the thread that made it.
    """

    def __init__(self, scene: Scene, image_size: int) -> None:
        mujoco = load_mujoco()
        self._mujoco = mujoco
        self.scene, self.image_size = scene, image_size
        visual = scene.model.vis
        visual.quality.offsamples = 0
        visual.quality.shadowsize = 0
        visual.global_.offwidth = visual.global_.offheight = image_size
        self._data = mujoco.MjData(scene.model)
        self._options = mujoco.MjvOption()
        self._options.geomgroup[0] = 0  # collision shapes
        self._options.geomgroup[1] = 1  # visual shapes
        self._renderer: Any = mujoco.Renderer(scene.model, image_size, image_size)
        self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0

    def render(self, cameras: tuple[Camera, ...] = CAMERAS) -> Images:
        """Camera -> uint8 (image_size, image_size, 3) RGB, rotated as `Observation.images`."""
        model = self.scene.model
        self._data.qpos[:] = self.scene.data.qpos
        self._mujoco.mj_kinematics(model, self._data)
        self._mujoco.mj_comPos(model, self._data)
        self._mujoco.mj_camlight(model, self._data)
        return {camera: self._render_camera(camera) for camera in cameras}

    def _render_camera(self, camera: Camera) -> NDArray[np.uint8]:
        self._renderer.update_scene(self._data, MUJOCO_CAMERA[camera], self._options)
        upright = self._renderer.render()
        # OpenGL's rows come bottom up; turned by 180 degrees that is the upright image mirrored.
        return np.ascontiguousarray(upright[:, ::-1])

    def close(self) -> None:
        """Free the OpenGL context."""
        self._renderer.close()


class FrameRenderer:
    """Renders frames of recorded rollouts, in any process, as they were or would have been live.

    with FrameRenderer() as renderer:
        renderer.load(spec, start)
        images = renderer.render(frame.index, frame.sim_state)
    """

    def __init__(self) -> None:
        self._scene: Scene | None = None
        self._cameras: CameraRenderer | None = None

    def load(self, spec: RolloutSpec, start: RolloutStart) -> None:
        """Take up a rollout; its frames can then be rendered in any order. Seconds for a new scene."""
        task = find_task(spec.task)
        if self._scene is None or not self._scene.can_serve(task):
            self.close()
            self._scene = Scene(task)
        self._scene.set_task(task)
        self._scene.restore(start.fixture_poses, start.sim_state)
        if self._cameras is None or self._cameras.image_size != spec.image_size:
            self._close_cameras()
            self._cameras = CameraRenderer(self._scene, spec.image_size)
        self._disturbance = Disturbance(spec.fault)
        self._wanted = spec.cameras

    def render(
        self, frame_index: int, sim_state: NDArray[np.float64], cameras: tuple[Camera, ...] | None = None
    ) -> Images:
        """The images of one frame, by default of the rollout's cameras. Call `load` first."""
        if self._scene is None or self._cameras is None:
            raise RuntimeError("FrameRenderer.render before load")
        self._scene.set_state(sim_state)
        images = self._cameras.render(self._wanted if cameras is None else cameras)
        return self._disturbance.disturb_images(frame_index, images)

    def close(self) -> None:
        """Free the OpenGL context and the scene."""
        self._close_cameras()
        self._scene = None

    def _close_cameras(self) -> None:
        if self._cameras is not None:
            self._cameras.close()
            self._cameras = None

    def __enter__(self) -> FrameRenderer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
