"""`python -m dayshift.policy.training`."""

from dayshift.policy.training.pipeline import main

if __name__ == "__main__":
    main()
