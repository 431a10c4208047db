"""SmolVLA in plain torch: loads lerobot's checkpoints unchanged and computes what lerobot computes.

Reading order: `policy.py` (requests in, action chunks out), `model.py` (prefix, then denoising), `text.py`,
`expert.py`, `vision.py`; `config.py`, `processors.py` and `weights.py` read a checkpoint folder.
Nothing here imports lerobot or transformers, except the parity check in `parity.py` and its files.
"""
