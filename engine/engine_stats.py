"""The engine's numbers, for `/metrics` and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dayshift.engine.api import KVRecall
from dayshift.engine.block_pool import BlockPool
from dayshift.engine.scheduler import Scheduler
from dayshift.engine.sessions.kv_tiers import KVTiers
from dayshift.engine.sessions.manager import SessionManager
from dayshift.engine.sessions.recall_gate import RecallGate
from dayshift.engine.sessions.restore_cost import RestoreCost
from dayshift.engine.sessions.store import SessionStore
from dayshift.engine.sessions.stored_piece import Tier
from dayshift.engine.speculation.speculator import SpeculationCounts
from dayshift.engine.startup import StartupTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters and gauges, for `/metrics` and tests."""

    num_running: int
    num_waiting: int
    num_sessions: int
    num_open_sessions: int  # held by this engine; a drained one has none
    num_parked_sessions: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    num_steps: int
    num_prompt_tokens_computed: int
    num_generated_tokens: int
    num_recalled_tokens: int
    num_restored_tokens: int
    num_drafted_tokens: int  # verified as drafts, and those of them that were kept
    num_accepted_draft_tokens: int
    num_draft_model_tokens: int  # of the drafted ones, those of the draft model; of the accepted ones, too
    num_accepted_draft_model_tokens: int
    num_draft_model_context_tokens: int  # that it had to compute before it could draft
    num_steps_without_drafts: int  # that had drafts, which would not have paid
    num_refused_kv_pieces: int  # could not be read, or not be encoded
    num_lost_kv_pieces: int  # could not be written
    num_dropped_kv_pieces: int  # cheaper to compute again than to write and to read
    num_kv_pieces_written_ahead: int  # to disk, before host memory needed their room
    num_waits_for_kv_writes: int  # a step waited, because the room was needed sooner
    num_late_kv_reads: int  # of the store, given up after the deadline
    num_sessions_evicted: int  # whose KV the store dropped for its quota
    store_bytes: int
    is_store_direct: int  # 1: KV passes the page cache by (O_DIRECT); 0: it cannot, or no store
    num_tokens_from_host: int  # KV of this many tokens came from host memory, and from archives
    num_tokens_from_archive: int
    num_restoring_sessions: int  # whose KV is being read from archives at the moment
    num_fetched_kv_bytes: int  # of KV that was read for calls that are not admitted yet, or is being read
    restore_wait_s: float  # until KV that was asked of archives was there, summed over sessions
    num_host_kv_bytes: int
    max_host_kv_bytes: int
    num_restores_read: int  # parked sessions whose KV was read, computed again, or both
    num_restores_computed: int
    num_restores_of_both: int
    host_read_us_per_token: float  # measured at the start; 0 where nothing was
    archive_read_us_per_token: float
    prefill_us_per_token: float  # in the longest step that was measured
    recall_kl: float  # of recall as KV to recall as text, measured at the first one; 0 until then
    is_kv_recall_allowed: int  # 0: the model garbles recalled KV, and recalls as text or not at all
    num_recalls_switched: int  # calls that asked for turns as KV and got them as text
    startup_s: float  # until the engine served; 0 where nobody took the time
    startup_import_s: float  # parts of it, see StartupTimes
    startup_weights_s: float
    startup_compile_s: float
    startup_graphs_s: float
    startup_host_s: float
    startup_measure_s: float
    num_startup_kernels: int  # compiled, because Triton's cache had not been asked for them yet
    num_startup_graphs: int


def occupancy_stats(scheduler: Scheduler, manager: SessionManager, pool: BlockPool) -> dict[str, int]:
    """The part of EngineStats that is about who is there, and how much room is left."""
    return {
        "num_running": len(scheduler.running),
        "num_waiting": scheduler.num_waiting,
        "num_sessions": manager.num_sessions,
        "num_open_sessions": manager.num_open,
        "num_parked_sessions": manager.num_parked,
        "num_kv_blocks": pool.num_blocks,
        "num_free_kv_blocks": pool.num_free,
    }


def store_stats(store: SessionStore | None) -> dict[str, int]:
    """The part of EngineStats that is about the store."""
    return {
        "num_late_kv_reads": 0 if store is None else store.counters.num_late_reads,
        "num_sessions_evicted": 0 if store is None else store.counters.num_evicted_sessions,
        "store_bytes": 0 if store is None else store.num_bytes,
        "is_store_direct": int(store is not None and store.is_direct),
    }


def speculation_stats(counts: SpeculationCounts) -> dict[str, int]:
    """The part of EngineStats that is about drafts."""
    return {
        "num_drafted_tokens": counts.drafted,
        "num_accepted_draft_tokens": counts.accepted,
        "num_draft_model_tokens": counts.drafted_by_model,
        "num_accepted_draft_model_tokens": counts.accepted_of_model,
        "num_draft_model_context_tokens": counts.model_context_tokens,
        "num_steps_without_drafts": counts.declined_steps,
    }


def startup_stats(times: StartupTimes) -> dict[str, Any]:
    """The part of EngineStats that is about the engine's start."""
    return {
        "startup_s": times.total_s,
        "startup_import_s": times.import_s,
        "startup_weights_s": times.weights_s,
        "startup_compile_s": times.compile_s,
        "startup_graphs_s": times.graphs_s,
        "startup_host_s": times.host_s,
        "startup_measure_s": times.measure_s,
        "num_startup_kernels": times.num_compiled,
        "num_startup_graphs": times.num_graphs,
    }


def recall_stats(gate: RecallGate) -> dict[str, Any]:
    """The part of EngineStats that is about recall as KV."""
    return {
        "recall_kl": 0.0 if gate.gap is None else gate.gap.kl_kv,
        "is_kv_recall_allowed": int(gate.state in (KVRecall.UNTRIED, KVRecall.ALLOWED)),
        "num_recalls_switched": gate.num_switched,
    }


def tier_stats(tiers: KVTiers, num_choices: Mapping[str, int], cost: RestoreCost | None) -> dict[str, Any]:
    """The part of EngineStats that is about KV outside the GPU."""
    num_tokens, prefill_s = (1, 0.0) if cost is None else cost.prefill.points[-1]
    return {
        "num_refused_kv_pieces": tiers.num_refused_pieces,
        "num_lost_kv_pieces": tiers.num_lost_pieces,
        "num_dropped_kv_pieces": tiers.num_dropped_pieces,
        "num_kv_pieces_written_ahead": 0 if tiers.write_behind is None else tiers.write_behind.num_written,
        "num_waits_for_kv_writes": 0 if tiers.write_behind is None else tiers.write_behind.num_waits,
        "num_tokens_from_host": tiers.num_loaded_tokens[Tier.HOST],
        "num_tokens_from_archive": tiers.num_loaded_tokens[Tier.ARCHIVE],
        "num_restoring_sessions": tiers.reader.num_reading,
        "num_fetched_kv_bytes": tiers.reader.num_bytes,
        "restore_wait_s": tiers.reader.wait_s,
        "num_host_kv_bytes": tiers.host.num_used_bytes,
        "max_host_kv_bytes": tiers.host.num_blocks * tiers.host.block_bytes,
        "num_restores_read": num_choices["read"],
        "num_restores_computed": num_choices["compute"],
        "num_restores_of_both": num_choices["both"],
        "host_read_us_per_token": 0.0 if cost is None else cost.read[Tier.HOST].s_per_token * 1e6,
        "archive_read_us_per_token": 0.0 if cost is None else cost.read[Tier.ARCHIVE].s_per_token * 1e6,
        "prefill_us_per_token": prefill_s / num_tokens * 1e6,
    }
