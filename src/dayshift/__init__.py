"""Dayshift: a robotics planning platform with its own LLM engine.

The packages live in the top-level folders of the repository and are linked in here:
`engine`, `planner`, `sim`, `policy`, `dataset_export`, `webui` and `experiments`.
"""
