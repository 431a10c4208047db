"""One module per command of `dayshift`. Heavy imports stay inside the functions, so `--help` is quick."""
