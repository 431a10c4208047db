"""`python -m dayshift.policy.training`."""

if __name__ == "__main__":  # processes that simulate and render import this module as well, without lerobot
    from dayshift.policy.training.pipeline import main

    main()
