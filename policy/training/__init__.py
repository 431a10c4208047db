"""The small default policy: demonstrations of the scripted expert, lerobot's own training, a checkpoint.

    python -m dayshift.policy.training FOLDER        record, train, assemble, evaluate

Reading order: `pipeline.py` (the steps), `demonstrations.py`, `vlm.py`, `train.py`. Each step is skipped when
its result is there already. Training runs in a process of its own, with nothing but lerobot.
"""
