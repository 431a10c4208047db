"""Scripts of requests that come, run together and are cancelled, and what each of them got."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import strategies as st

from dayshift.engine import Engine
from dayshift.engine.api import (
    FinishReason,
    GenerateRequest,
    Message,
    SamplingParams,
    SessionConfig,
    TokenLogprob,
    TurnRequest,
)


@dataclass
class Call:
    """One request, when it is submitted and when it is cancelled, in steps."""

    sampling: SamplingParams
    prompt: list[int]
    submit_at: int
    cancel_after: int | None
    is_turn: bool


calls = st.builds(
    Call,
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 0.0, 0.8]),
        seed=st.integers(0, 99),
        ignore_eos=st.booleans(),
        stop=st.sampled_from([(), ("e",), (" ",)]),
        logprobs=st.sampled_from([None, None, 2]),
        json_schema=st.sampled_from([None, None, None, {"type": "integer", "minimum": 0, "maximum": 999}]),
    ),
    prompt=st.lists(st.integers(3, 500), min_size=1, max_size=70),
    submit_at=st.integers(0, 12),
    cancel_after=st.none() | st.integers(0, 8),
    is_turn=st.booleans(),
)


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list, compare=False)


def play(engine: Engine, script: list[Call]) -> dict[str, Outcome]:
    """Run a script to its end; what every request got."""
    outcomes: dict[str, Outcome] = defaultdict(Outcome)
    waiting, step = list(enumerate(script)), 0
    cancels: dict[int, list[str]] = defaultdict(list)
    sessions: list[str] = []
    while waiting or engine.has_work:
        for number, call in [item for item in waiting if item[1].submit_at <= step]:
            request_id = f"call-{number}"
            if call.is_turn:
                sessions.append(f"session-{number}")
                engine.open_session(SessionConfig(session_id=sessions[-1]))
                request = TurnRequest(
                    request_id=request_id,
                    session_id=sessions[-1],
                    at=0.0,
                    messages=(Message("user", f"step {number}"),),
                    sampling=call.sampling,
                )
            else:
                request = GenerateRequest(
                    request_id=request_id, prompt_token_ids=tuple(call.prompt), sampling=call.sampling
                )
            engine.submit(request)
            if call.cancel_after is not None:
                cancels[step + call.cancel_after].append(request_id)
        waiting = [item for item in waiting if item[1].submit_at > step]
        for request_id in cancels.pop(step, []):
            engine.cancel(request_id)
        for chunk in engine.step():
            outcome = outcomes[chunk.request_id]
            outcome.token_ids += chunk.token_ids
            outcome.text += chunk.text
            outcome.logprobs += chunk.logprobs
            assert outcome.reason is None, "nothing follows the last chunk"
            outcome.reason = chunk.finish_reason
        step += 1
        assert step < 2000
    for session_id in sessions:
        engine.close_session(session_id)
    return outcomes
