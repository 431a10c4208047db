"""A planner on any OpenAI-compatible server, through plain /chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from dayshift.engine.api import FinishReason, RecallRange, TokenLedger
from dayshift.planner.clients.api import PlannerReply
from dayshift.planner.errors import PlannerCallError
from dayshift.planner.memory import MemoryArm
from dayshift.planner.records import Exchange

PASSING_STATUSES = {408, 409, 429}

Messages = list[dict[str, str]]


class ChatClient:
    """The memory arms full (the whole history goes with every call) and off (none of it does).

    `base_url` ends in /v1, as for the openai package. `extra_body` is merged into each request, for
    what a server wants beyond the standard (such as `chat_template_kwargs`).
    """

    def __init__(
        self,
        base_url: str,
        *,
        arm: MemoryArm,
        model: str,
        system: str,
        temperature: float = 0.0,
        seed: int | None = None,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        if arm not in (MemoryArm.FULL, MemoryArm.OFF):
            raise ValueError(f"memory arm {arm} needs a session")
        self._resends_history = arm is MemoryArm.FULL
        self._model = model
        self._system = {"role": "system", "content": system}
        self._options: dict[str, Any] = {"temperature": temperature}
        if seed is not None:
            self._options["seed"] = seed
        self._options |= extra_body or {}
        self._history: Messages = []
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Servers elsewhere may need the environment's proxy; a local one is never behind it.
        is_local = httpx.URL(base_url).host in ("localhost", "127.0.0.1", "::1")
        self._http = httpx.Client(
            base_url=base_url, headers=headers, timeout=timeout_s, trust_env=not is_local
        )

    def open(self, robot: str, history: Sequence[Exchange]) -> None:
        self._history = []
        for exchange in history:
            self._remember(exchange.message, exchange.reply)

    def ask(
        self,
        message: str,
        *,
        at: float,
        schema: dict[str, Any],
        max_tokens: int,
        recall_range: RecallRange | None = None,
    ) -> PlannerReply:
        messages = [self._system, *self._history, {"role": "user", "content": message}]
        body = self._post(
            {
                "model": self._model,
                "messages": messages,
                "max_tokens": max_tokens,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "reply", "strict": True, "schema": schema},
                },
                **self._options,
            }
        )
        reply = _read_completion(body)
        self._remember(message, reply.text)
        return reply

    def close(self) -> None:
        self._http.close()

    def _remember(self, message: str, reply: str) -> None:
        if self._resends_history:
            self._history += [
                {"role": "user", "content": message},
                {"role": "assistant", "content": reply},
            ]

    def _post(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            response = self._http.post("chat/completions", json=request)
            response.raise_for_status()
            return response.json()
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            raise PlannerCallError(
                f"{error.request.url} answered {status}: {error.response.text[:200]!r}",
                is_transient=status >= 500 or status in PASSING_STATUSES,
            ) from error
        except httpx.TransportError as error:
            raise PlannerCallError(
                f"{self._http.base_url}: {type(error).__name__} {error}".rstrip(), is_transient=True
            ) from error
        except ValueError as error:
            raise PlannerCallError(
                f"{self._http.base_url} answered with something that is not JSON", is_transient=False
            ) from error


def _read_completion(body: dict[str, Any]) -> PlannerReply:
    """The first choice. Raises PlannerCallError when the body is not a chat completion."""
    try:
        choice = body["choices"][0]
        text = choice["message"]["content"] or ""
        finish_reason = choice["finish_reason"]
        ledger = _read_usage(body["usage"])
    except (KeyError, IndexError, TypeError) as error:
        raise PlannerCallError(
            f"the server's answer is not a chat completion ({error!r})", is_transient=False
        ) from error
    reasons = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
    return PlannerReply(
        text=text, finish_reason=reasons.get(finish_reason, FinishReason.ERROR), ledger=ledger
    )


def _read_usage(usage: dict[str, Any]) -> TokenLedger:
    """Our engine's own ledger; from other servers: cached prompt tokens were reused, the others computed."""
    if "dayshift" in usage:
        return TokenLedger(**usage["dayshift"])
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return TokenLedger(
        computed=usage["prompt_tokens"] - cached, reused=cached, generated=usage["completion_tokens"]
    )
