"""Grammars are compiled beside the engine's steps: nobody's tokens wait for another's schema."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from weakref import finalize

from dayshift.engine.api import InvalidRequestError, SamplingParams
from dayshift.engine.grammar import GrammarCompiler, GrammarMatcher, lark_of
from dayshift.engine.grammar_sandbox import STACK_BYTES, GrammarSandbox, Model
from dayshift.types import DayshiftError

MAX_CHARACTERS = 256 << 10
_MAX_KEPT = 64


class GrammarQueue:
    """Compiles grammars in a thread, one after the other, each in the sandbox first; keeps the latest ones.

    `alarm` is a descriptor that is readable when one has been compiled since `acknowledge`.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sandbox = GrammarSandbox(model)
        self._executor = ThreadPoolExecutor(1, "dayshift-grammar")
        self._outcomes: OrderedDict[tuple[str, str], Future[GrammarMatcher]] = OrderedDict()
        self.alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._close_alarm = finalize(self, os.close, self.alarm)

    def is_ready(self, sampling: SamplingParams) -> bool:
        """Whether `matcher` would answer at once; if not, compiling begins."""
        try:
            return self._outcome(sampling).done()
        except InvalidRequestError:
            return True

    def matcher(self, sampling: SamplingParams) -> GrammarMatcher:
        """A matcher of the request's schema or grammar, one of which is set; waits until it is compiled.

        Raises InvalidRequestError for what cannot be enforced or compiled.
        """
        try:
            return self._outcome(sampling).result().copy()
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error)) from error
        except DayshiftError:  # not the grammar's fault: it is tried again when it is asked for again
            del self._outcomes[lark_of(sampling)]
            raise

    def give_up(self, sampling: SamplingParams) -> None:
        """Nobody waits for this grammar any more: it is not compiled, unless that has begun."""
        with contextlib.suppress(InvalidRequestError):
            key = lark_of(sampling)
            if key in self._outcomes and self._outcomes[key].cancel():
                del self._outcomes[key]

    def acknowledge(self) -> None:
        """Make `alarm` unreadable until the next grammar has been compiled."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.alarm)

    def close(self) -> None:
        """Give up what has not begun, and end the thread and the sandbox."""
        self._executor.shutdown(cancel_futures=True)
        self._sandbox.close()
        self._close_alarm()

    def _outcome(self, sampling: SamplingParams) -> Future[GrammarMatcher]:
        key = lark, name = lark_of(sampling)
        if len(lark) > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"{name}: {len(lark)} characters; at most {MAX_CHARACTERS} are compiled"
            )
        if key not in self._outcomes:
            self._outcomes[key] = self._begin(lark, name)
            while len(self._outcomes) > _MAX_KEPT:
                self._outcomes.popitem(last=False)
        self._outcomes.move_to_end(key)
        return self._outcomes[key]

    def _begin(self, lark: str, name: str) -> Future[GrammarMatcher]:
        # What passed with the sandbox's stack has to pass here; the thread starts with its first grammar.
        usual = threading.stack_size(4 * STACK_BYTES)
        try:
            outcome = self._executor.submit(self._compile, lark, name)
        finally:
            threading.stack_size(usual)
        outcome.add_done_callback(lambda _: os.eventfd_write(self.alarm, 1))
        return outcome

    def _compile(self, lark: str, name: str) -> GrammarMatcher:
        compiler = self._compiler
        self._sandbox.check(lark, name)
        return compiler.compile_text(lark, name)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return self._model.compiler()
