"""What holds for all tests."""

import signal
import threading

from hypothesis import settings

# A busy machine fails no test. All else is as in the default profile, which is another one where CI is set.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")


def pytest_configure() -> None:
    """Signals work in what tests start: Ctrl-C is ignored at first in a script's background, and the end of
    the terminal under nohup."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
