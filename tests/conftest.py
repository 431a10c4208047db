"""What holds for all tests."""

import signal
import threading


def pytest_configure() -> None:
    """Ctrl-C works in what tests start: a run in a script's background begins with the signal ignored."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
