"""Drives a server with openpi's own client. Run by the Python of a venv that has it; prints JSON."""

import json
import sys

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy  # pyright: ignore[reportMissingImports]

host, port, api_key = sys.argv[1], int(sys.argv[2]) if sys.argv[2] else None, sys.argv[3] or None
client = WebsocketClientPolicy(host, port, api_key)
rng = np.random.default_rng(0)
observation = {
    "observation/image": rng.integers(0, 256, (64, 64, 3), dtype=np.uint8),
    "observation/wrist_image": rng.integers(0, 256, (48, 64, 3), dtype=np.uint8),
    "observation/state": rng.random(8),
    "prompt": "turn on the stove",
}
reply = client.infer(observation)
try:
    client.infer({**observation, "observation/state": rng.random(3)})
    error = None
except RuntimeError as problem:
    error = str(problem)
again = client.infer(observation)  # the connection goes on after an error
report = {
    "numpy": np.__version__,
    "metadata": client.get_server_metadata(),
    "shape": reply["actions"].shape,
    "dtype": str(reply["actions"].dtype),
    "is_finite": bool(np.isfinite(reply["actions"]).all()),
    "timing": sorted(reply["server_timing"]),
    "error": error,
    "shape_again": again["actions"].shape,
}
print(json.dumps(report))
