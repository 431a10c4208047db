"""Lets a model recall turns as KV only if its own weights answer from KV about as well as from text.

Measured once for a model and a codec (`recall_probe`), when a call first asks for turns as KV; a store
keeps the result for the next start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from dayshift.engine.api import InvalidRequestError, KVRecall, RecallMode
from dayshift.engine.backend import Backend
from dayshift.engine.config import EngineConfig, RecallGateAction
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.sessions.recall_probe import RecallGap, measure_recall_gap, probe_id
from dayshift.engine.sessions.store import SessionStore
from dayshift.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class RecallGate:
    """Decides how turns that are asked for as KV are recalled.

    Args:
        measure: the gap of this model; None: recall as KV is always allowed.
        max_kl: nats for each token, see `RecallGap.kl_kv`.
        action: what happens to calls when the gap is larger: "text" or "refuse".
        path: where the gap is kept; None: it is measured at every start.

    Attributes:
        gap: None until it was needed.
        num_switched: calls that asked for turns as KV and got them as text.
    """

    def __init__(
        self,
        measure: Callable[[], RecallGap] | None,
        *,
        max_kl: float,
        action: RecallGateAction,
        path: Path | None,
    ) -> None:
        self.gap: RecallGap | None = None
        self.num_switched = 0
        self._measure = measure
        self._max_kl = max_kl
        self._action = action
        self._path = path

    @property
    def state(self) -> KVRecall:
        """What becomes of calls that ask for turns as KV, as far as is known."""
        if self._measure is None:
            return KVRecall.ALLOWED
        if self.gap is None:
            return KVRecall.UNTRIED
        if self.gap.kl_kv <= self._max_kl:  # not if it is NaN
            return KVRecall.ALLOWED
        return KVRecall.REFUSED if self._action == "refuse" else KVRecall.AS_TEXT

    def check(self) -> None:
        """A call asks for turns as KV. Raises InvalidRequestError where that is refused."""
        if self._decide() is KVRecall.REFUSED:
            raise InvalidRequestError(
                f"recall_mode kv is refused: {self._reason()}; ask with recall_mode text"
            )

    def mode_for(self, asked: RecallMode) -> RecallMode:
        """How turns are recalled that are asked for as `asked`."""
        is_switched = asked is RecallMode.KV and self._decide() is not KVRecall.ALLOWED
        return RecallMode.TEXT if is_switched else asked

    def _decide(self) -> KVRecall:
        """The state, measured if it was not."""
        if self._measure is not None and self.gap is None:
            self.gap = self._kept() or self._measured(self._measure)
        return self.state

    def _measured(self, measure: Callable[[], RecallGap]) -> RecallGap:
        self.gap = gap = measure()
        if self.state is KVRecall.ALLOWED:
            logger.info("recall as KV: KL %.3f to recall as text, %.3f allowed", gap.kl_kv, self._max_kl)
        else:
            logger.warning("turns are recalled as text only: %s", self._reason())
        if self._path is not None:
            _write(self._path, msgspec.json.encode(gap))
        return gap

    def _kept(self) -> RecallGap | None:
        if self._path is None or not self._path.exists():
            return None
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=RecallGap)
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("%s: measured again: %s", self._path, error)
            return None

    def _reason(self) -> str:
        assert self.gap is not None
        return (
            "with this model, recalled KV predicts otherwise than recalled text "
            f"(KL {self.gap.kl_kv:.3f} on a fixed conversation, at most {self._max_kl:g} is allowed)"
        )


def open_recall_gate(
    config: EngineConfig, backend: Backend, tokenizer: Tokenizer, codec: str, store: SessionStore | None
) -> RecallGate:
    """The gate as an engine is configured; it lets all pass for random weights, whose words mean nothing."""
    runner, measure, path = backend.runner, None, None
    if isinstance(runner, ModelRunner) and config.recall_gate != "off" and config.load_format != "dummy":
        measure = partial(measure_recall_gap, runner, tokenizer, codec)
    if store is not None:
        path = store.root / f"recall-{store.identity.hex()[:16]}-{codec}-{probe_id()}.json"
    return RecallGate(measure, max_kl=config.recall_max_kl, action=config.recall_gate, path=path)


def _write(path: Path, data: bytes) -> None:
    """At once: other engines on the same store may read it. It is only a saving: a full disk is no error."""
    part = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        logger.warning("%s: could not be kept: %s", path, error)
