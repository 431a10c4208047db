"""The inference engine. `Engine.step` is the main loop: admit, schedule, run, postprocess."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from multiprocessing.connection import Connection
from weakref import finalize

import torch
from torch import Tensor

from dayshift.engine.api import (
    EngineOverloadedError,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    InvalidRequestError,
    OnMatch,
    RequestIdInUseError,
    SessionConfig,
    SessionFileError,
    SessionInfo,
    TokenLogprob,
    TurnRequest,
)
from dayshift.engine.backend import device_of, open_backend
from dayshift.engine.block_pool import Chunk, Context
from dayshift.engine.config import EngineConfig
from dayshift.engine.engine_stats import (
    EngineStats,
    occupancy_stats,
    recall_stats,
    speculation_stats,
    startup_stats,
    store_stats,
    tier_stats,
)
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.models.folder import resolve_model
from dayshift.engine.models.loader import model_identity
from dayshift.engine.output import OutputText
from dayshift.engine.request_intake import RequestIntake
from dayshift.engine.run_ahead import RunAhead
from dayshift.engine.sampler import sample, sample_in_every_way
from dayshift.engine.scheduler import Scheduler, SequenceChunk
from dayshift.engine.sequence import Sequence, SequenceStatus
from dayshift.engine.sessions.kv_tiers import open_tiers
from dayshift.engine.sessions.manager import SessionManager
from dayshift.engine.sessions.recall_gate import open_recall_gate
from dayshift.engine.sessions.restore_measurement import measure_restore_cost
from dayshift.engine.sessions.similarity import TurnSimilarity
from dayshift.engine.sessions.store import SessionStore
from dayshift.engine.speculation.draft_model import open_draft_model
from dayshift.engine.speculation.speculator import Speculator
from dayshift.engine.speculation.verify import Draws, kept_draws, rows_of
from dayshift.engine.startup import StartupTimes, phase
from dayshift.engine.tokenizer import Tokenizer
from dayshift.engine.trace import RequestPhase, Trace
from dayshift.types import DayshiftError

logger = logging.getLogger(__name__)


class Engine:
    """One model, one KV pool, many requests and sessions. Not thread-safe: one thread steps it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        folder = resolve_model(config.model)
        self.tokenizer = Tokenizer(folder)
        is_cuda = device_of(config).type == "cuda"
        self.max_num_batched_tokens = config.max_num_batched_tokens or (32_768 if is_cuda else 2_048)
        # Before the model's pool, which takes most of the memory that is left.
        draft_model = open_draft_model(
            config, folder, self.tokenizer, max_step_tokens=self.max_num_batched_tokens
        )
        self._backend = backend = open_backend(config, folder)
        finalize(self, backend.close)  # where what follows fails, or nobody closes the engine
        self.model_config, self.pool, self.runner = backend.model_config, backend.pool, backend.runner
        self.max_context = backend.max_context
        self.intake = RequestIntake(
            self.tokenizer, vocab_size=self.model_config.vocab_size, max_context=self.max_context
        )
        self.scheduler = Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_tokens_beside_decodes=config.max_num_tokens_beside_decodes,
        )
        self.speculator = Speculator(self.tokenizer, is_on=backend.has_drafts, draft_model=draft_model)
        self._run_ahead = RunAhead(self.scheduler, backend.run_ahead, self.speculator.would_draft)
        store = None
        if config.store_dir is not None:
            store = SessionStore(
                config.store_dir,
                model_identity(folder, dtype=backend.dtype),
                quota_bytes=config.store_quota_bytes,
                read_deadline_s=config.store_read_deadline_s,
            )
        with phase("host"):
            self.tiers = open_tiers(config, backend)
        if is_cuda:
            with phase("compile"):
                sample_in_every_way(self.model_config.vocab_size, backend.dtype, self.pool.device)
        with phase("host"):
            self.tiers.host.wait()
        self.restore_cost = None
        is_restore_chosen = config.restore == "cheapest" and not config.deterministic
        if is_restore_chosen and isinstance(self.runner, ModelRunner):
            with phase("measure"):
                self.tiers.cost = self.restore_cost = measure_restore_cost(
                    self.runner,
                    self.tiers,
                    store,
                    max_context=self.max_context,
                    max_step_tokens=self.scheduler.max_num_batched_tokens,
                )
        self.session_manager = SessionManager(
            self.pool,
            self.tokenizer,
            default_window=config.window,
            max_context=self.max_context,
            store=store,
            tiers=self.tiers,
            cost=self.restore_cost,
            waits_by_layer=backend.waits_by_layer,
            step_tokens=lambda: self.scheduler.num_prompt_tokens_in_step,
            similarity=TurnSimilarity(self.runner, self.pool, self.tiers),
            recall_gate=open_recall_gate(config, backend, self.tokenizer, self.tiers.codec, store),
        )
        self._sequences: dict[str, Sequence] = {}
        self._recorded_replies: dict[str, GenerateChunk] = {}  # to be sent by the next step
        self.trace = Trace()
        self.startup = StartupTimes(total_s=0.0)  # set by who has started the engine
        self._num_steps = 0
        self._totals: Counter[str] = Counter()  # TokenLedger fields of finished requests, summed

    # --- requests ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Steps are needed; where `can_step` is false, the next one waits for KV that is being read."""
        return self._is_active or bool(self.scheduler.num_waiting or self.tiers.reader.num_reading)

    @property
    def can_step(self) -> bool:
        """A step would do something now."""
        return self._is_active or bool(self.scheduler.next_waiting() or self.tiers.reader.has_finished)

    @property
    def _is_active(self) -> bool:
        """There is something that waits for nobody."""
        return bool(self.scheduler.running or self._recorded_replies or self.session_manager.can_release)

    @property
    def read_alarm(self) -> int:
        """A descriptor that is readable when KV has come from an archive, for the next step to take up."""
        return self.tiers.reader.alarm

    def submit(self, request: GenerateRequest | TurnRequest) -> None:
        """Queue a request; its chunks come from `step`.

        A turn that was taken already is not run again: its recorded reply comes from the next step.

        Raises InvalidRequestError for what can never run, RequestIdInUseError, SessionNotFoundError,
        SessionBusyError, EngineOverloadedError, EngineDrainingError.
        """
        self.session_manager.check_not_draining()
        if request.request_id in self._sequences or request.request_id in self._recorded_replies:
            raise RequestIdInUseError(f"request id {request.request_id} is in use")
        if isinstance(request, TurnRequest):
            reply = self.session_manager.recorded_reply(request)
            if reply is not None:
                self._recorded_replies[request.request_id] = reply
                return
        if self.scheduler.num_waiting >= self.config.max_waiting:
            raise EngineOverloadedError(f"{self.config.max_waiting} requests are waiting already; try later")
        sampler = self.intake.sampler(request)
        output = OutputText(
            self.tokenizer,
            request.sampling.stop,
            skip_special_tokens=request.sampling.skip_special_tokens,
        )
        if isinstance(request, TurnRequest):
            session, token_ids = self.session_manager.begin(request)
            sequence = Sequence(request, session.context, token_ids, output, sampler, session)
        else:
            sequence = Sequence(request, Context(), list(request.prompt_token_ids), output, sampler)
        sampler.see_prompt(sequence.new_token_ids)
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        self._note(sequence, RequestPhase.QUEUED, sequence.submitted_at)

    def cancel(self, request_id: str) -> None:
        """Stop a request; a session turn is rolled back. Unknown or finished ids are ignored."""
        self._recorded_replies.pop(request_id, None)
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._discard(sequence)

    def step(self) -> list[GenerateChunk]:
        """Run one step; the chunks that it produced, one for each token.

        It waits only if there is nothing to do until KV has been read for a call.
        """
        waits = self.has_work and not self.can_step
        self._totals["restored"] += self.session_manager.take_up(waits=waits)
        if self.session_manager.can_release:
            self.session_manager.release_next()
        output = [*self._recorded_replies.values(), *self._admit()]
        self._recorded_replies.clear()
        began_at = time.monotonic()
        chunks, logits = self._run_ahead.take() or self._run()
        if not chunks:
            return output
        rows = [rows_of(chunk) for chunk in chunks]
        draw = sample(logits, [*chain.from_iterable(rows)])
        self._run_ahead.launch(chunks, draw.token_ids)
        self._num_steps += 1
        draws = kept_draws(chunks, rows, draw.read())
        self.check()
        output += self._postprocess(chunks, draws)
        self.speculator.record(chunks, time.monotonic() - began_at)
        return output

    # --- sessions ------------------------------------------------------------------------------

    def open_session(self, config: SessionConfig) -> SessionInfo:
        """Create a session. Raises InvalidRequestError, SessionExistsError."""
        return self.session_manager.open(config)

    def session(self, session_id: str) -> SessionInfo:
        """Raises SessionNotFoundError."""
        return self.session_manager.info(session_id)

    def sessions(self) -> list[SessionInfo]:
        """All sessions, those that only lie in the store included."""
        return list(self.session_manager.infos())

    def fork_session(self, session_id: str, new_id: str | None = None) -> SessionInfo:
        """A new session with the same past. Raises SessionBusyError, SessionExistsError."""
        self._complete_turn(session_id)
        return self.session_manager.fork(session_id, new_id)

    def park_session(self, session_id: str) -> None:
        """Give the session's blocks back; its next call restores it. Raises SessionBusyError."""
        self._complete_turn(session_id)
        self.session_manager.park(session_id)

    def prefetch_session(self, session_id: str) -> SessionInfo:
        """A hint that the session will be called soon: restore it if that takes no blocks from others."""
        self._complete_turn(session_id)
        self._totals["restored"] += self.session_manager.prefetch(session_id).restored
        return self.session(session_id)

    def close_session(self, session_id: str) -> None:
        """Delete a session and its records. A call in flight ends with an error."""
        for sequence in list(self._sequences.values()):
            if sequence.session is not None and sequence.session.session_id == session_id:
                over = InvalidRequestError(f"session {session_id} was deleted while the call ran")
                self._recorded_replies[sequence.request_id] = self._fail(sequence, over)
        self._complete_turn(session_id)
        self.session_manager.close(session_id)

    def drain(self) -> None:
        """Take no more work, finish what runs, and release every session for other engines.

        The steps that follow do it. Raises InvalidRequestError without a store.
        """
        self.session_manager.drain()

    def set_triggers(self, session_id: str, triggers: tuple[OnMatch, ...]) -> None:
        """Replace a session's recall triggers. Raises InvalidRequestError."""
        self._complete_turn(session_id)
        self.session_manager.set_triggers(session_id, triggers)

    def stats(self) -> EngineStats:
        """Counters since the start, and gauges of now."""
        return EngineStats(
            num_steps=self._num_steps,
            num_prompt_tokens_computed=self._totals["computed"] + self._totals["recomputed"],
            num_generated_tokens=self._totals["generated"],
            num_recalled_tokens=self._totals["recalled"],
            num_restored_tokens=self._totals["restored"],
            **occupancy_stats(self.scheduler, self.session_manager, self.pool),
            **speculation_stats(self.speculator.counts),
            **tier_stats(self.tiers, self.session_manager.builder.num_choices, self.restore_cost),
            **recall_stats(self.session_manager.recall_gate),
            **store_stats(self.session_manager.store),
            **startup_stats(self.startup),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if the engine's parts disagree; for soak tests, between steps. It compares
        every block, sequence and kept piece with who says to hold it."""
        contexts = {sequence.context: None for sequence in self.scheduler.running}
        contexts |= dict.fromkeys(self.session_manager.contexts())
        self.pool.check(contexts)
        if self.speculator.draft_model is not None:
            self.speculator.draft_model.check()
        self.tiers.host.check()
        self.session_manager.check(self._sequences.values())
        waiting = [sequence.request_id for sequence in self.scheduler.waiting]
        running = [s.request_id for s in self.scheduler.running if not s.is_closing]
        assert sorted(waiting + running) == sorted(self._sequences), "a request is queued nowhere or twice"

    @property
    def alarm(self) -> Connection | None:
        """Readable when the model's other processes have ended, and `check` raises; None: there are none."""
        return self._backend.alarm

    def check(self) -> None:
        """Raise EngineDiedError if a part of the model has ended."""
        self._backend.check()

    def close(self) -> None:
        """Cancel what runs, park every session, close the store, and end the model's other processes."""
        try:
            for request_id in list(self._sequences):
                self.cancel(request_id)
            while self.can_step:
                self.step()
            self.session_manager.shut_down()
        finally:
            self.intake.close()
            self._backend.close()

    # --- parts of a step -----------------------------------------------------------------------

    def _admit(self) -> list[GenerateChunk]:
        """Admit waiting sequences while there is room; error chunks of those that could not start."""
        failed: list[GenerateChunk] = []
        while (sequence := self.scheduler.next_waiting()) is not None:
            try:
                if not self._start(sequence):
                    break
            except DayshiftError as error:
                failed.append(self._fail(sequence, error))
        return failed

    def _start(self, sequence: Sequence) -> bool:
        """Reserve a sequence's blocks and lay out its context, or let its KV be read first; False if there is
        no room yet."""
        manager, context = self.session_manager, sequence.context
        began_at = time.monotonic()
        if sequence.session is not None:
            plan = manager.plan(sequence)
            if plan is None:  # its turn comes again when its KV has been read
                self._note_restore(sequence, began_at)
                return True
            if not manager.make_room(sequence, plan):
                return False
            manager.admit(sequence, plan)
            self._note_restore(sequence, began_at)
        else:
            num_tokens = len(sequence.new_token_ids) + sequence.sampling.max_tokens
            if not manager.free_blocks(self.pool.num_missing(context, num_tokens)):
                return False
            self.pool.reserve(context, num_tokens)
            context.token_ids = list(sequence.new_token_ids)
            sequence.counts.computed = len(context.token_ids)
        sequence.num_prompt_tokens = len(context.token_ids)
        sequence.admitted_at = time.monotonic()
        self._note(sequence, RequestPhase.PREFILL, sequence.admitted_at)
        self.scheduler.admit(sequence)
        return True

    def _run(self) -> tuple[list[SequenceChunk], Tensor]:
        """Schedule and run a step: its chunks, and logits of those that need sampling."""
        chunks = self.speculator.add_drafts(self.scheduler.schedule(), self.scheduler.max_num_batched_tokens)
        return chunks, self.runner.run(chunks) if chunks else torch.empty(0)

    def _postprocess(self, chunks: list[SequenceChunk], draws: list[Draws]) -> list[GenerateChunk]:
        """Append the sampled tokens, finish what is complete, and close answered turns."""
        output: list[GenerateChunk] = []
        for chunk, kept in zip(chunks, draws, strict=True):
            sequence = chunk.sequence
            if chunk.needs_sampling:
                try:
                    output.extend(self._take(sequence, kept))
                except DayshiftError as error:
                    output.append(self._fail(sequence, error))
            elif sequence.is_closing and sequence.num_uncomputed == 0:
                self._close_turn(sequence)
        return output

    def _take(self, sequence: Sequence, draws: Draws) -> Iterator[GenerateChunk]:
        """Append tokens until the output is complete; all but the last were drafts, whose KV is there."""
        for place, (token_id, logprob) in enumerate(draws):
            if place > 0:
                sequence.context.num_computed += 1
                self.speculator.accept(sequence)
            chunk = self._append(sequence, token_id, logprob)
            yield chunk
            if chunk.finish_reason is not None:
                break

    def _append(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> GenerateChunk:
        """Take a sampled token into the sequence; the chunk for the client."""
        if (grammar := sequence.sampler.grammar) is not None:
            grammar.check()
        if not sequence.output_ids:
            sequence.first_token_at = time.monotonic()
            self._note(sequence, RequestPhase.DECODE, sequence.first_token_at)
        sequence.output_ids.append(token_id)
        sequence.context.token_ids.append(token_id)
        chunk = GenerateChunk(
            request_id=sequence.request_id,
            text=sequence.output.push(token_id),
            token_ids=(token_id,),
            logprobs=() if logprob is None else (logprob,),
        )
        reason = self._finish_reason(sequence, token_id)
        return chunk if reason is None else self._finish(sequence, reason, chunk)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling, grammar = sequence.sampling, sequence.sampler.grammar
        if token_id in self.tokenizer.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if grammar is not None:
            grammar.accept(token_id)
            if grammar.is_complete:
                return FinishReason.STOP
        if sequence.output.is_stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.output_ids) >= sampling.max_tokens else None

    def _finish(self, sequence: Sequence, reason: FinishReason, chunk: GenerateChunk) -> GenerateChunk:
        """Answer a request: its last chunk, with the ledger. A session's turn is committed first."""
        text = chunk.text + sequence.output.finish()
        if sequence.session is None:
            self.pool.release(sequence.context)
            self.scheduler.remove(sequence)
        else:
            self.session_manager.commit(sequence, sequence.output.text, reason)
            sequence.status = SequenceStatus.CLOSING
        del self._sequences[sequence.request_id]
        ledger = sequence.ledger()
        self._totals.update(asdict(ledger))
        self._note(sequence, RequestPhase.DONE, time.monotonic())
        return replace(
            chunk,
            text=text,
            finish_reason=reason,
            ledger=ledger,
            num_prompt_tokens=sequence.num_prompt_tokens,
            recalled_turns=sequence.recalled_turns,
            kept_turns=sequence.kept_turns,
            present_turns=sequence.present_turns,
            not_fitting_turns=sequence.not_fitting_turns,
        )

    def _fail(self, sequence: Sequence, error: DayshiftError) -> GenerateChunk:
        """End a request with an error; a session turn is rolled back."""
        if isinstance(error, SessionFileError):  # what the client is not told
            logger.warning("request %s: %s", sequence.request_id, error)
        del self._sequences[sequence.request_id]
        self._discard(sequence)
        return GenerateChunk.failed(sequence.request_id, error)

    def _discard(self, sequence: Sequence) -> None:
        self._note(sequence, RequestPhase.FAILED, time.monotonic())
        self.scheduler.remove(sequence)
        if sequence.session is None:
            self.pool.release(sequence.context)
        else:
            self.session_manager.roll_back(sequence)

    def _note_restore(self, sequence: Sequence, began_at: float) -> None:
        """Its KV is brought back from now on, unless that has begun before."""
        if not sequence.restore_began_at:
            sequence.restore_began_at = began_at
            self._note(sequence, RequestPhase.RESTORE, began_at)

    def _note(self, sequence: Sequence, phase: RequestPhase, t: float) -> None:
        session_id = None if sequence.session is None else sequence.session.session_id
        self.trace.add(t, sequence.request_id, session_id, phase)

    def _close_turn(self, sequence: Sequence) -> None:
        assert sequence.session is not None
        self.scheduler.remove(sequence)
        self.session_manager.close_turn(sequence.session)

    def _complete_turn(self, session_id: str) -> None:
        """Compute the last KV of an answered turn now instead of in the next step."""
        for sequence in list(self.scheduler.running):
            is_its = sequence.session is not None and sequence.session.session_id == session_id
            if is_its and sequence.is_closing:
                if sequence.num_uncomputed:
                    chunk = Chunk(
                        context=sequence.context,
                        num_tokens=sequence.num_uncomputed,
                        needs_sampling=False,
                    )
                    self.runner.run([chunk])
                self._close_turn(sequence)
