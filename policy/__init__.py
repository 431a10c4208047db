"""Policies: SmolVLA, the scripted expert, recorded actions. Each is a `dayshift.sim.types.Policy`."""
