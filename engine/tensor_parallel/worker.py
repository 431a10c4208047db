"""A worker's process: loads its part of the model, and does what rank 0 does.

Started by `workers`, with the number of its socket.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait

import msgspec
import torch
import torch.distributed as dist

from dayshift.engine.backend import device_of, open_runner
from dayshift.engine.block_pool import BlockPool
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.models.shard import Shard
from dayshift.engine.tensor_parallel.group import find_store, join_group
from dayshift.engine.tensor_parallel.messages import (
    CopyBlock,
    Failed,
    OpenRunner,
    Ping,
    Pong,
    ReadKV,
    Ready,
    RunStep,
    Started,
    Stop,
    ToWorker,
    WriteKV,
)
from dayshift.engine.tensor_parallel.sharded import gather_heads, scatter_heads
from dayshift.engine.tensor_parallel.workers import WorkerTask
from dayshift.types import DayshiftError

logger = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()


def main() -> None:
    """Work until told to stop, or until the engine has ended."""
    connection = Connection(int(sys.argv[1]))
    task = connection.recv()
    assert isinstance(task, WorkerTask)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        _work(task, connection)
    except EOFError:
        pass  # the engine has ended
    except Exception as error:
        logger.exception("rank %d failed", task.rank)
        reason = str(error) if isinstance(error, DayshiftError) else f"{type(error).__name__}, see the log"
        connection.send_bytes(_encoder.encode(Failed(reason)))
        raise SystemExit(1) from error


def _work(task: WorkerTask, connection: Connection) -> None:
    shard = Shard(task.rank, task.config.tensor_parallel)
    device = device_of(task.config, shard.rank)
    store = find_store(task.store_port)
    connection.send_bytes(_encoder.encode(Started()))
    join_group(store, shard.rank, shard.size, device)
    runners = {0: open_runner(task.config, task.model, shard)}
    connection.send_bytes(_encoder.encode(Ready()))
    for command in _commands(connection):
        match command:
            case Ping():
                if device.type == "cuda":
                    torch.cuda.synchronize()
                connection.send_bytes(_encoder.encode(Pong()))
            case OpenRunner(number, num_tokens):
                runners[number] = runners[0].with_small_pool(num_tokens)
            case RunStep():
                _run_step(runners[command.runner], command)
            case ReadKV(number, slots):
                gather_heads(runners[number].pool.read_slots(slots), shard.size)
            case WriteKV(number, slots):
                _write_kv(runners[number].pool, slots)
            case CopyBlock(number, source, target):
                runners[number].pool.copy_block(source, target)
    dist.destroy_process_group()


def _commands(connection: Connection) -> Iterator[ToWorker]:
    """Until Stop. Raises EOFError when the engine has ended."""
    decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
    while not isinstance(command := decoder.decode(connection.recv_bytes()), Stop):
        yield command


@torch.inference_mode()
def _run_step(runner: ModelRunner, step: RunStep) -> None:
    for row, block_ids in step.tables:
        runner.tables.put(row, block_ids)
    token_ids = None
    if step.has_token_ids:
        token_ids = torch.empty(len(step.inputs.rows), dtype=torch.int64, device=runner.device)
        dist.broadcast(token_ids, src=0)
    runner.compute(step.inputs, step.shape, token_ids)


def _write_kv(pool: BlockPool, slots: list[int]) -> None:
    config = pool.config
    shape = (2, config.num_layers, len(slots), config.num_kv_heads, config.head_dim)
    pool.write_slots(slots, scatter_heads(torch.empty(shape, dtype=pool.dtype, device=pool.device)))


def _end_with(parent_id: int) -> None:
    """End with the engine's process, even where this one hangs in a call of the device."""
    with suppress(ProcessLookupError):  # it has ended already
        wait([os.pidfd_open(parent_id)])
    os._exit(1)


if __name__ == "__main__":
    main()
