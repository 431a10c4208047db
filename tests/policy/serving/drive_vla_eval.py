"""Drives a server with vla-eval's own connection. Run by the Python of a venv that has it; prints JSON."""

import asyncio
import json
import sys

import numpy as np
from vla_eval.connection import Connection  # pyright: ignore[reportMissingImports]
from vla_eval.protocol.numpy_codec import set_image_format  # pyright: ignore[reportMissingImports]
from vla_eval.specs import (  # pyright: ignore[reportMissingImports]
    GRIPPER_CLOSE_POS,
    IMAGE_RGB,
    LANGUAGE,
    POSITION_DELTA,
    ROTATION_AA,
    STATE_EEF_POS_AA_GRIP,
    DimSpec,
    check_specs,
)


async def main() -> dict:
    rng = np.random.default_rng(0)
    observation = {
        "images": {
            "agentview": rng.integers(0, 256, (64, 64, 3), dtype=np.uint8),
            "wrist": rng.integers(0, 256, (48, 64, 3), dtype=np.uint8),
        },
        "states": rng.random(8).astype(np.float32),
        "task_description": "turn on the stove",
    }
    async with Connection(sys.argv[1], max_retries=1) as connection:
        info = connection.server_info
        specs = {
            name: {key: DimSpec.from_dict(spec) for key, spec in info[name].items()}
            for name in ("action_spec", "observation_spec")
        }
        # The specs of vla-eval's own LIBERO benchmark.
        mismatches = check_specs(
            specs["action_spec"],
            {"position": POSITION_DELTA, "rotation": ROTATION_AA, "gripper": GRIPPER_CLOSE_POS},
            specs["observation_spec"],
            {
                "agentview": IMAGE_RGB,
                "wrist": IMAGE_RGB,
                "language": LANGUAGE,
                "state": STATE_EEF_POS_AA_GRIP,
            },
        )
        await connection.start_episode({"task": {"name": "turn on the stove"}})
        actions = []
        for image_format in ("png", "raw", "raw"):
            set_image_format(image_format)
            actions.append((await connection.act(observation))["actions"])
        await connection.end_episode({"metrics": {"success": False}, "steps": 3, "elapsed_sec": 1.0})
        try:
            await connection.act({**observation, "states": np.zeros(3)})
            error = None
        except RuntimeError as problem:
            error = str(problem)
        after_error = await connection.act(observation)
    return {
        "observation_params": info["observation_params"],
        "mismatches": mismatches,
        "shapes": [action.shape for action in (*actions, after_error["actions"])],
        "num_different": len({action.tobytes() for action in actions}),
        "error": error,
    }


print(json.dumps(asyncio.run(main())))
