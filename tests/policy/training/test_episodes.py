"""What is rendered later is what the robot would have seen."""

from __future__ import annotations

import numpy as np

from dayshift.policy.training.demonstrations import Demonstration
from dayshift.policy.training.episodes import render
from dayshift.policy.training.vlm import IMAGE_SIDE
from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.types import CAMERAS


def test_rendered_images_are_the_live_ones(env: LiberoEnv) -> None:
    env.reset(seed=5, options={"task": "turn on the stove", "init_state_id": 2})
    poses = env.scene.fixture_poses()
    live, positions = [], []
    for step in range(4):
        if step % 2 == 1:  # those that a stride of two begins with, in four steps: 0 and 2
            env.step(np.array([0.5, 0.2, -0.5, 0, 0, 0.3, -1], dtype=np.float32))
            positions.append(positions[-1])
            continue
        positions.append(env.scene.data.qpos.astype(np.float32))
        images = env.render_cameras(CAMERAS, IMAGE_SIDE)
        live.append(np.stack([images[camera].transpose(2, 0, 1) for camera in CAMERAS]))
    demonstration = Demonstration(
        task="libero_goal/turn_on_the_stove",
        fixture_poses=poses,
        joint_positions=np.stack(positions),
        robot_states=np.zeros((4, 8), np.float32),
        actions=np.zeros((4, 7), np.float32),
        is_disturbed=np.zeros(4, np.bool_),
    )
    episode = render(demonstration, image_stride=2)
    assert episode.sentence == "turn on the stove"
    assert episode.image_steps.tolist() == [0, 2]
    difference = np.abs(episode.images.astype(int) - np.stack(live).astype(int))
    assert difference.mean() < 0.05  # joint positions were rounded to float32
    assert np.abs(live[0].astype(int) - live[1].astype(int)).mean() > 0.5  # the robot has moved
