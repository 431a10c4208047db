"""Experiments from YAML: configuration, the composition root that builds and runs them, the command line.

Reading order: `config` and `loading` (the YAML), `runner` (what is built), `robots`, `results`, `cli`.
"""
