"""What stands before the queue: requests that can never run are refused, in a line that names the reason."""

from __future__ import annotations

from dayshift.engine.api import (
    ContextLengthExceededError,
    GenerateRequest,
    InvalidRequestError,
    SamplingParams,
    TurnRequest,
)
from dayshift.engine.grammar_queue import GrammarQueue
from dayshift.engine.grammar_sandbox import Model
from dayshift.engine.sampler import RequestSampler
from dayshift.engine.tokenizer import Tokenizer


class RequestIntake:
    """Checks requests against the model; compiles their grammars."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size, self._max_context = vocab_size, max_context
        self.grammars = GrammarQueue(Model(tokenizer.json_text, vocab_size, tuple(tokenizer.eos_token_ids)))

    def is_ready(self, request: GenerateRequest | TurnRequest) -> bool:
        """Whether `sampler` has nothing to wait for; if not, the request's grammar is being compiled."""
        return not _has_grammar(request.sampling) or self.grammars.is_ready(request.sampling)

    def sampler(self, request: GenerateRequest | TurnRequest) -> RequestSampler:
        """What sampling keeps for a request. Raises InvalidRequestError for one that can never run."""
        matcher = self.grammars.matcher(request.sampling) if _has_grammar(request.sampling) else None
        sampler = RequestSampler(request.sampling, matcher)
        self._check_token_ids("logit_bias", tuple(token_id for token_id, _ in request.sampling.logit_bias))
        if isinstance(request, TurnRequest):
            self._check_token_ids("token_ids", request.token_ids)
        else:
            self._check_prompt(request)
        return sampler

    def close(self) -> None:
        """End what compiles grammars."""
        self.grammars.close()

    def _check_prompt(self, request: GenerateRequest) -> None:
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise InvalidRequestError("the prompt is empty")
        if num_prompt + request.sampling.max_tokens > self._max_context:
            raise ContextLengthExceededError(
                f"prompt ({num_prompt} tokens) and max_tokens ({request.sampling.max_tokens}) exceed "
                f"the model's context of {self._max_context} tokens"
            )
        self._check_token_ids("prompt", request.prompt_token_ids)

    def _check_token_ids(self, field: str, token_ids: tuple[int, ...]) -> None:
        size = self._vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:  # fast for long prompts
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
            raise InvalidRequestError(f"{field}: token id {wrong} is outside the vocabulary of {size}")


def _has_grammar(sampling: SamplingParams) -> bool:
    return sampling.json_schema is not None or sampling.grammar is not None
