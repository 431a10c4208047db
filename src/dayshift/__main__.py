"""`python -m dayshift` is the command `dayshift`."""

from dayshift.experiments.cli import main

if __name__ == "__main__":
    main()
