"""Keeps an encoder from taking the processors.

SVT-AV1, run as root, gives its threads and the one that opens it the highest real-time priority, and leaves
it to them: simulators and engines on the same machine then wait for it, and so does what the process
starts later.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def scheduling_kept() -> Iterator[None]:
    """What a library changes inside about the scheduling of this process's threads is undone at the end."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        for thread_id in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if os.sched_getscheduler(thread_id) != policy:
                    os.sched_setscheduler(thread_id, policy, parameters)
