"""Driving an engine in tests: run it until it has no work, and put chunks together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from itertools import count

from dayshift.engine import Engine
from dayshift.engine.api import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    Message,
    RecallMode,
    RecallPresent,
    RecallRange,
    SamplingParams,
    TokenLedger,
    TurnRequest,
)

_ids = count()


def run(engine: Engine) -> dict[str, list[GenerateChunk]]:
    """Step until nothing is left to do; chunks by request id."""
    chunks: dict[str, list[GenerateChunk]] = {}
    while engine.has_work:
        for chunk in engine.step():
            chunks.setdefault(chunk.request_id, []).append(chunk)
    return chunks


def finish_reads() -> None:
    """Return when no read of KV is under way in this process, not even one that nobody waits for."""
    while any(thread.name == "dayshift-kv-read" for thread in threading.enumerate()):
        time.sleep(0.001)


def joined(chunks: Iterable[GenerateChunk]) -> GenerateResult:
    """The result of one request; fails if it ended with an error."""
    parts = list(chunks)
    last = parts[-1]
    assert last.finish_reason is not None
    assert last.finish_reason is not FinishReason.ERROR, last.error
    return GenerateResult(
        request_id=last.request_id,
        text="".join(part.text for part in parts),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        finish_reason=last.finish_reason,
        ledger=last.ledger or TokenLedger(),
        num_prompt_tokens=last.num_prompt_tokens,
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        recalled_turns=last.recalled_turns,
        kept_turns=last.kept_turns,
        present_turns=last.present_turns,
        not_fitting_turns=last.not_fitting_turns,
        is_repeated=last.is_repeated,
    )


def generate(engine: Engine, prompt: Iterable[int], sampling: SamplingParams) -> GenerateResult:
    """One stateless request, run to its end."""
    request = GenerateRequest(request_id=f"r{next(_ids)}", prompt_token_ids=tuple(prompt), sampling=sampling)
    engine.submit(request)
    return joined(run(engine)[request.request_id])


def turn_request(
    session_id: str,
    text: str,
    at: float,
    *,
    max_tokens: int = 8,
    recall: tuple[float, float] | None = None,
    mode: RecallMode = RecallMode.KV,
    present: RecallPresent = RecallPresent.IGNORE,
    ignore_eos: bool = True,
) -> TurnRequest:
    """A turn with one user message; by default it generates exactly `max_tokens`."""
    return TurnRequest(
        request_id=f"t{next(_ids)}",
        session_id=session_id,
        at=at,
        messages=(Message("user", text),),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        recall_range=None if recall is None else RecallRange(*recall),
        recall_mode=mode,
        recall_present=present,
    )


def take_turn(engine: Engine, request: TurnRequest) -> GenerateResult:
    """One turn, run to its end."""
    engine.submit(request)
    return joined(run(engine)[request.request_id])
