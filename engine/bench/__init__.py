"""Measurements of the engine, behind `dayshift bench`."""
