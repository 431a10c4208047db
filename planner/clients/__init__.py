"""Planner clients: a session of our engine, any OpenAI-compatible server, a script."""
