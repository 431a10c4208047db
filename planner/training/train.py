r"""Train the default planner model from scratch, seeded.

    python -m dayshift.planner.training.train --out planner/weights --steps 2300 --minutes 4.75 --workers 12

Windows over which more than 30 shifts are spread came later, from the exported folder:

    python -m dayshift.planner.training.train --out planner/weights --start-from planner/weights \
        --minutes 2.8 --learning-rate 1e-3 --workers 14 --seed 1

The committed weights are these two commands' (301M tokens in 274 s and 133M in 168 s, on one H200).

Data comes from worker processes that play synthetic operations; batch n depends on the seed, n and
the stage of the curriculum at which it was ordered, 2 x workers batches ahead. Progress, and with it
curriculum and learning rate, is the larger of steps done / `--steps` and time spent / `--minutes`;
with `--steps` alone a run depends on no clock.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from tokenizers import Tokenizer

from dayshift.planner.training import export
from dayshift.planner.training.documents import REVIEW_WEIGHT, Rows, TurnEncoder, make_rows
from dayshift.planner.training.model import ModelConfig, PlannerModel, Visibility, predictions, weighted_loss
from dayshift.planner.training.tokenizer import train_tokenizer


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of the curriculum, up to `until` of the progress."""

    until: float
    max_window: int
    max_document: int


CURRICULUM = (
    Stage(0.15, 512, 1_024),
    Stage(0.35, 2_048, 4_096),
    Stage(1.0, 8_192, 16_384),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything a training run depends on. At least one of `steps` and `minutes` is set."""

    model: ModelConfig = field(default_factory=ModelConfig)
    curriculum: tuple[Stage, ...] = CURRICULUM
    num_rows: int = 8
    row_length: int = 16_384
    steps: int | None = None
    minutes: float | None = None
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    constant_until: float = 0.4  # then linearly down to nothing
    weight_decay: float = 0.05
    seed: int = 0
    num_workers: int = 8
    device: str = "cuda"
    report_every_s: float = 30.0

    def stage(self, progress: float) -> Stage:
        """The curriculum's stage at `progress` in [0, 1]."""
        return next((stage for stage in self.curriculum if progress < stage.until), self.curriculum[-1])

    def learning_rate_at(self, step: int, progress: float) -> float:
        """Linear warm-up, constant, linear decay to zero."""
        decay = min(1.0, (1.0 - progress) / (1.0 - self.constant_until))
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * max(0.0, decay)


@dataclass(slots=True)
class Score:
    """How many taught replies a model reproduces token for token, by kind."""

    right: dict[str, int] = field(default_factory=lambda: {"action": 0, "review": 0})
    total: dict[str, int] = field(default_factory=lambda: {"action": 0, "review": 0})

    def add(self, rows: Rows, predicted: np.ndarray) -> None:
        """Count the replies of a batch; `predicted[:, t]` is the token expected after position t."""
        for row in range(rows.ids.shape[0]):
            reply, weight = rows.reply[row, 1:], rows.weight[row, 1:]
            is_wrong = predicted[row, :-1] != rows.ids[row, 1:]
            num_wrong = np.bincount(reply, weights=is_wrong, minlength=int(reply.max()) + 1)
            for kind, kind_weight in (("action", 1), ("review", REVIEW_WEIGHT)):
                replies = np.unique(reply[(reply > 0) & (weight == kind_weight)])
                self.total[kind] += len(replies)
                self.right[kind] += int((num_wrong[replies] == 0).sum())

    def __str__(self) -> str:
        return ", ".join(f"{kind}s {self.right[kind]}/{self.total[kind]}" for kind in self.right)


class Trainer:
    """Model, optimisers and one training step on batches of a fixed shape."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.manual_seed(config.seed)
        self.model = PlannerModel(config.model).to(self.device)
        self.visibility = Visibility(config.num_rows, config.row_length, self.device)
        self._loss, self._predictions = weighted_loss, predictions
        if self.device.type == "cuda":
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)  # one graph, used by every layer
            self._loss = torch.compile(weighted_loss, dynamic=False)
            self._predictions = torch.compile(predictions, dynamic=False)
        matrices = [p for p in self.model.model.layers.parameters() if p.dim() == 2]
        others = [p for p in self.model.parameters() if all(p is not m for m in matrices)]
        self.optimizers = (
            torch.optim.Muon(
                matrices, config.learning_rate, config.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, rows: Rows, learning_rate: float) -> torch.Tensor:
        """One update; returns the loss (on the device, so that nothing waits for it)."""
        ids, hidden = self._forward(rows)
        loss = self._loss(hidden, self.model.model.embed_tokens.weight, ids, self._to_device(rows.weight))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def predict(self, rows: Rows) -> np.ndarray:
        """Greedy next token after each position of a batch."""
        _, hidden = self._forward(rows)
        return self._predictions(hidden, self.model.model.embed_tokens.weight).cpu().numpy()

    def _forward(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self._to_device(rows.ids).long()
        self.visibility.update(self._to_device(rows.expiry), self._to_device(rows.group))
        return ids, self.model(ids, self.visibility.attend, self.dtype)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


class BatchSource:
    """Batches made ahead by worker processes, in order."""

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer, pool: ProcessPoolExecutor) -> None:
        self._config, self._pool = config, pool
        self._tokenizer_json = tokenizer.to_str()
        self._pending: deque[Future[Rows]] = deque()
        self._next = 0

    def get(self, progress: float) -> Rows:
        """The next batch; new ones are ordered at the curriculum's present stage."""
        while len(self._pending) < 2 * self._config.num_workers:
            self._pending.append(self.order(self._next, self._config.stage(progress)))
            self._next += 1
        return self._pending.popleft().result()

    def order(self, number: int, stage: Stage) -> Future[Rows]:
        """Have batch `number` made at `stage`; negative numbers are never used for training."""
        return self._pool.submit(_make_batch, self._tokenizer_json, self._config, number, stage)


def _make_batch(tokenizer_json: str, config: TrainConfig, number: int, stage: Stage) -> Rows:
    encoder = _encoders.get(tokenizer_json)
    if encoder is None:
        encoder = _encoders[tokenizer_json] = TurnEncoder(Tokenizer.from_str(tokenizer_json))
    return make_rows(
        config.seed * 1_000_003 + number,
        encoder,
        num_rows=config.num_rows,
        row_length=config.row_length,
        max_window=stage.max_window,
        max_document=stage.max_document,
    )


_encoders: dict[str, TurnEncoder] = {}  # one per worker process, kept for its text cache


@contextmanager
def _worker_pool(num_workers: int) -> Iterator[ProcessPoolExecutor]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


def train(config: TrainConfig, out: Path, start_from: Path | None = None) -> list[float]:
    """Train, export to `out` at the end and at every report; returns the losses seen at reports.

    `start_from` continues from an exported folder, with its tokenizer.
    """
    if start_from is None:
        tokenizer = train_tokenizer(vocab_size=config.model.vocab_size, seed=config.seed)
    else:
        tokenizer = Tokenizer.from_file(str(start_from / "tokenizer.json"))
    with _worker_pool(config.num_workers) as pool:
        source = BatchSource(config, tokenizer, pool)
        held_out = [source.order(-1 - n, stage) for n, stage in enumerate(config.curriculum)]
        trainer = Trainer(config)
        if start_from is not None:
            export.load(trainer.model, start_from)
        losses: list[float] = []
        step, progress, start_s = 0, 0.0, time.monotonic()
        last_report_s = start_s
        while progress < 1.0:
            loss = trainer.step(source.get(progress), config.learning_rate_at(step, progress))
            step += 1
            progress = _progress(config, step, time.monotonic() - start_s)
            if progress >= 1.0 or time.monotonic() - last_report_s > config.report_every_s:
                losses.append(loss.item())
                elapsed_s = time.monotonic() - start_s
                typer.echo(_report(config, trainer, held_out, step, elapsed_s, losses[-1]))
                export.export(trainer.model, tokenizer, out)
                last_report_s = time.monotonic()
    return losses


def _progress(config: TrainConfig, step: int, elapsed_s: float) -> float:
    by_steps = step / config.steps if config.steps else 0.0
    by_time = elapsed_s / (60 * config.minutes) if config.minutes else 0.0
    return max(by_steps, by_time)


def _report(
    config: TrainConfig,
    trainer: Trainer,
    held_out: list[Future[Rows]],
    step: int,
    elapsed_s: float,
    loss: float,
) -> str:
    parts = [
        f"{elapsed_s:.0f} s, step {step}, {step * config.num_rows * config.row_length / 1e6:.0f}M tokens"
    ]
    parts.append(f"loss {loss:.5f}")
    for stage, future in zip(config.curriculum, held_out, strict=True):
        score, rows = Score(), future.result()
        score.add(rows, trainer.predict(rows))
        parts.append(f"windows to {stage.max_window}: {score}")
    return " | ".join(parts)


def main(
    out: Annotated[Path, typer.Option(help="Folder for the exported model.")],
    minutes: Annotated[float | None, typer.Option(help="Time limit of the schedule.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length of the schedule in steps.")] = None,
    start_from: Annotated[Path | None, typer.Option(help="Continue from this exported folder.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Seed of data and weights.")] = 0,
    workers: Annotated[int, typer.Option(help="Data processes.")] = 8,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
) -> None:
    """Train the default planner model."""
    if minutes is None and steps is None:
        raise typer.BadParameter("give --minutes, --steps or both")
    config = TrainConfig(
        steps=steps,
        minutes=minutes,
        learning_rate=learning_rate,
        seed=seed,
        num_workers=workers,
        device=device,
        curriculum=CURRICULUM if start_from is None else CURRICULUM[-1:],
    )
    train(config, out, start_from)


if __name__ == "__main__":
    typer.run(main)
