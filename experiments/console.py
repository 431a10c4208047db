"""Where a command's words go: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

PrintJson = Callable[[dict[str, Any]], None]


@contextmanager
def stdout_kept_for_json() -> Iterator[PrintJson]:
    """Gives the one function that writes to stdout; what anybody else prints goes to stderr.

    This holds for child processes and native libraries too: file descriptor 1 is redirected.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield lambda body: _write_all(kept, json.dumps(body, ensure_ascii=False) + "\n")
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _write_all(descriptor: int, text: str) -> None:
    data = text.encode()
    while data:
        data = data[os.write(descriptor, data) :]
