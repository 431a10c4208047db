"""Recording of runs and their export as LeRobot datasets.

`recorder` writes attempts as they happen, `store` keeps the facts in a database, `run_folder` reads
both back. Nothing here knows the planner: its records arrive as plain rows.
"""
