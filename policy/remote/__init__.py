"""The robot's side of a served policy: chunks asked for in time, blended, and never stale.

Reading order: `policy.py` (one control step), `chunk_queue.py` (which action when), `connections.py`.
"""
