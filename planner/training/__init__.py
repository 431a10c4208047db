"""Training of the default planner model: synthetic operations, tokenizer, training loop, gate.

Reading order: `operations` (what is said) → `memory` (what is visible at each call) → `documents`
(token rows for the GPU) → `model` and `train` → `gate` (the finished model through our engine).
"""
