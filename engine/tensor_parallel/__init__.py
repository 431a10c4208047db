"""One model over several devices of a host: rank 0 is the engine, the others are workers that compute along.

A worker has the same part of everything that touches the model: its heads, columns and rows of the weights
(`models.shard`), its heads of the KV pool, the same block tables. The engine tells it what to do before it
does so itself, and both meet in the collective operations. Scheduler, sampler, sessions and files are the
engine's alone, and know nothing of it.
"""
