"""`dayshift eval`: how often a policy succeeds, under LIBERO's protocol.

Reading order: `plan.py` (which episodes), `runner.py` (runs them), `records.py` (what is kept of each),
`statistics.py` and `tables.py` (what they say), `policies.py` (who is evaluated), `videos.py`.
"""
