"""The planner: shifts of jobs, reviews from memory, and the planner model's clients.

Reading order: `jobs` (the words) · `protocol` (what the model is told) · `shift` (the main loop) ·
`review` · `operation` · `rules` · `clients` · `records` and `store` (what is durable) · `scores`.
"""
