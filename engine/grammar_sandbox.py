"""A helper process in which grammars are compiled first: some take for ever, all memory, or the process.

A schema of 2 KB can take minutes to compile, and a few thousand rules, each of which names the next, overflow
the library's stack, which ends its process. What the helper does not survive is refused, and it is started
anew for the next grammar.

python -m dayshift.engine.grammar_sandbox DESCRIPTOR
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from weakref import finalize

import msgspec

from dayshift.engine.api import InvalidRequestError
from dayshift.engine.grammar import GrammarCompiler
from dayshift.processes import ctrl_c_blocked
from dayshift.types import DayshiftError

CPU_LIMIT_S = 1.0  # of computing, so that a busy machine refuses nothing that an idle one takes
STACK_BYTES = 8 << 20
_MEMORY_BYTES = 1 << 30  # beside what the helper takes by itself
_READY = b"ready"


class Model(msgspec.Struct, frozen=True):
    """The arguments of a GrammarCompiler."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer_json, self.vocab_size, self.eos_token_ids)


class GrammarSandbox:
    """The helper of one model, started when it is needed. Used by one thread at a time."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._helper: _Helper | None = None

    def check(self, lark: str, name: str) -> None:
        """Return if the grammar can be compiled. `name`: what the request calls it.

        Raises:
            InvalidRequestError: it is wrong, or takes more time, memory or stack than it may.
            DayshiftError: the helper could not be started.
        """
        if self._helper is None:
            self._helper = _Helper(self._model)
        try:
            refusal = self._helper.ask(lark, name)
        except EOFError:
            number = self._helper.end()
            self._helper = None
            reason = (
                "it takes too long to compile" if number == signal.SIGPROF else "it is too large to compile"
            )
            raise InvalidRequestError(f"{name}: {reason}; make it smaller or simpler") from None
        if refusal:
            raise InvalidRequestError(refusal)

    def close(self) -> None:
        """End the helper."""
        if self._helper is not None:
            self._helper.end()
            self._helper = None


class _Helper:
    def __init__(self, model: Model) -> None:
        ours, its = socket.socketpair()
        with its:
            command = [sys.executable, "-m", "dayshift.engine.grammar_sandbox", str(its.fileno())]
            with ctrl_c_blocked():
                self._process = subprocess.Popen(
                    command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
        self._connection = Connection(ours.detach())
        self._end = finalize(self, _end, self._process, self._connection)
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(model))
            self._connection.recv_bytes()  # that it is ready
        except (EOFError, OSError):
            raise DayshiftError(
                f"the helper that compiles grammars did not start (exit code {self._process.wait()})"
            ) from None

    def ask(self, lark: str, name: str) -> str:
        """Why a grammar is refused, empty if it is not. Raises EOFError if that ended the helper."""
        try:
            self._connection.send_bytes(msgspec.msgpack.encode((lark, name)))
            return self._connection.recv_bytes().decode()
        except OSError as error:  # it ended while it read
            raise EOFError from error

    def end(self) -> int:
        """End the process; the signal that had ended it before, 0: none."""
        self._end()
        return max(0, -self._process.returncode)


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()  # it ends by that, unless it is computing; then its time ends it
    process.wait()


def _serve(connection: Connection) -> None:
    """Answer until the other side closes the connection."""
    compiler = msgspec.msgpack.decode(connection.recv_bytes(), type=Model).compiler()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES)
    connection.send_bytes(_READY)
    while True:
        try:
            lark, name = msgspec.msgpack.decode(connection.recv_bytes(), type=tuple[str, str])
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # the signal's default is to end the process
        refusal = _refusal(compiler, lark, name)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(refusal.encode())


def _refusal(compiler: GrammarCompiler, lark: str, name: str) -> str:
    try:
        compiler.compile_text(lark, name)
    except InvalidRequestError as error:
        return str(error)
    return ""


def _limit(what: int, num_bytes: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard), hard))


def main(arguments: Iterable[str]) -> None:
    """Serve on the descriptor that is named."""
    (descriptor,) = arguments
    _limit(resource.RLIMIT_STACK, STACK_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    _serve(Connection(int(descriptor)))


if __name__ == "__main__":
    main(sys.argv[1:])
