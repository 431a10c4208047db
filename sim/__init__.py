"""Robots in MuJoCo: LIBERO's tasks, rollouts, faults, cameras, one supervised process per robot.

Reading order: `rollout.py` (the loop), `libero_env.py` and `scene.py` (the environment), `render.py`,
`faults.py`, `worker.py`. Border types are in `types.py`.
"""
