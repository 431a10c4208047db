"""What holds for all tests."""

import signal
import threading

from hypothesis import settings

# A busy machine fails no test. All else is as in the default profile, which is another one where CI is set.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")


def pytest_configure() -> None:
    """Ctrl-C works in what tests start: a run in a script's background begins with the signal ignored."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
