"""Training with lerobot's own code, and a checkpoint that needs no other files.

Policy, processors, optimizer, schedule, update step and checkpoint are lerobot's; what is ours is where
batches come from (`samples.py`) and when training ends.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from lerobot.common.train_utils import get_step_checkpoint_dir, save_checkpoint, update_last_checkpoint
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.optim.factory import make_optimizer_and_scheduler
from lerobot.policies import make_policy, make_pre_post_processors
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.scripts.lerobot_train import update_policy
from lerobot.utils.logging_utils import AverageMeter, MetricsTracker
from lerobot.utils.random_utils import set_seed

from dayshift.policy.training.dataset import episodes_of, sentences_of
from dayshift.policy.training.episodes import Episode
from dayshift.policy.training.lerobot_config import TrainingOptions, processor_arguments, training_config
from dayshift.policy.training.samples import Samples, filling
from dayshift.types import DayshiftError

_SHOW_EVERY_S = 5.0
_NUM_SLOW_UPDATES = 3  # the first ones compile


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Of a training, every few seconds; `loss` is the mean since the last time."""

    step: int
    loss: float
    learning_rate: float
    num_control_steps: int  # that are there to be drawn from
    elapsed_s: float


OnProgress = Callable[[Progress], None]


def train(
    dataset: LeRobotDataset,
    episodes: Iterable[Episode],
    vlm: Path,
    folder: Path,
    options: TrainingOptions,
    *,
    num_control_steps: int,
    on_progress: OnProgress,
) -> Path:
    """Train on `episodes`, which have `num_control_steps` in all; lerobot's last checkpoint.

    `dataset` gives the sentences and the statistics for normalisation. Training begins when a part of the
    episodes is there.
    """
    training = _Training(dataset, vlm, folder / "lerobot", options, num_control_steps)
    with filling(training.samples, episodes) as episodes_left:
        episodes_left.wait_for(int(options.begin_at * num_control_steps))
        shown_at = saved_at = time.monotonic()
        while not training.is_over():
            training.update()
            now = time.monotonic()
            if now - shown_at > _SHOW_EVERY_S:
                shown_at = now
                episodes_left.check()
                on_progress(training.progress())
            if now - saved_at > options.save_every_s:
                saved_at = now
                training.save()
    return training.save()


def train_on(
    datasets: Sequence[LeRobotDataset],
    vlm: Path,
    folder: Path,
    options: TrainingOptions,
    *,
    image_stride: int = 1,
    parallel: int,
    on_progress: OnProgress,
) -> Path:
    """`train` on all episodes of datasets, their images rendered or decoded as training goes on.

    Sentences and statistics are those of the first dataset. Raises DayshiftError if another one has a
    sentence that it has not.
    """
    first, *others = datasets
    for other in others:
        if unknown := set(sentences_of(other)) - set(sentences_of(first)):
            raise DayshiftError(
                f"{other.root}: found {', '.join(sorted(unknown))}, allowed: the sentences of {first.root}"
            )

    def episodes() -> Iterator[Episode]:
        for dataset in datasets:
            yield from episodes_of(dataset, image_stride=image_stride, parallel=parallel, seed=options.seed)

    return train(
        first,
        episodes(),
        vlm,
        folder,
        options,
        num_control_steps=sum(dataset.num_frames for dataset in datasets),
        on_progress=on_progress,
    )


def trained(folder: Path) -> Path:
    """Where `train` leaves lerobot's last checkpoint, which a further training can start from."""
    return folder / "lerobot" / "checkpoints" / "last" / "pretrained_model"


class _Training:
    """lerobot's objects, put together as its own training script does."""

    def __init__(
        self,
        dataset: LeRobotDataset,
        vlm: Path,
        output: Path,
        options: TrainingOptions,
        num_control_steps: int,
    ) -> None:
        self._began_at = time.monotonic()
        self._options, self._output = options, output
        shutil.rmtree(output, ignore_errors=True)  # of a training that was stopped
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        set_seed(options.seed)
        torch.backends.cuda.matmul.allow_tf32 = True
        is_cuda = options.device == "cuda"
        is_compiled = is_cuda and options.is_compiled
        self._accelerator = Accelerator(
            step_scheduler_with_optimizer=False,
            mixed_precision="bf16" if is_compiled else "no",
            cpu=not is_cuda,
        )
        self._config = training_config(vlm, output, options)
        policy_config = self._config.policy
        assert isinstance(policy_config, SmolVLAConfig)
        policy = make_policy(policy_config, ds_meta=dataset.meta)
        assert isinstance(policy, SmolVLAPolicy)
        self._preprocess, self._postprocess = make_pre_post_processors(
            policy_config,
            None if options.start_from is None else str(options.start_from),
            **processor_arguments(policy_config, dataset),
        )
        optimizer, self._schedule = make_optimizer_and_scheduler(self._config, policy)
        if is_compiled:
            _compile(policy)
        self._policy, self._optimizer = self._accelerator.prepare(policy, optimizer)
        self.samples = Samples(
            self._preprocess,
            sentences_of(dataset),
            capacity=num_control_steps,
            image_side=policy_config.resize_imgs_with_padding[0],
            chunk_size=policy_config.chunk_size,
            device=self._accelerator.device,
            seed=options.seed,
        )
        meters = {name: AverageMeter(name) for name in ("loss", "grad_norm", "lr", "update_s", "gpu_mem_gb")}
        self._metrics = MetricsTracker(options.batch_size, num_control_steps, dataset.num_episodes, meters)
        self._num_updates = self._num_scheduled = 0
        self._timed_from: float | None = None

    def is_over(self) -> bool:
        """Whether the schedule of the learning rate has come to its end."""
        return self._num_scheduled >= self._options.num_steps

    def update(self) -> None:
        """One of lerobot's updates; the schedule goes on by one step, or by more if time is short."""
        batch = self.samples.draw(self._options.batch_size)
        assert self._config.optimizer is not None
        assert self._schedule is not None
        self._metrics, _ = update_policy(
            self._metrics,
            self._policy,
            batch,
            self._optimizer,
            self._config.optimizer.grad_clip_norm,
            self._accelerator,
        )
        self._num_updates += 1
        if self._num_updates == _NUM_SLOW_UPDATES:
            self._timed_from = time.monotonic()
        due = max(self._num_scheduled + 1, int(self._share_of_time() * self._options.num_steps))
        for _ in range(due - self._num_scheduled):
            self._schedule.step()
        self._num_scheduled = due

    def _share_of_time(self) -> float:
        """That has gone by, of all that there is from the first quick update on."""
        if self._timed_from is None:
            return 0.0
        until = self._began_at + self._options.max_s
        return (time.monotonic() - self._timed_from) / max(1e-3, until - self._timed_from)

    def progress(self) -> Progress:
        """Since the last call."""
        loss, rate = self._metrics.metrics["loss"].avg, self._metrics.metrics["lr"].val
        self._metrics.reset_averages()
        return Progress(
            step=self._num_updates,
            loss=loss,
            learning_rate=rate,
            num_control_steps=self.samples.num_control_steps,
            elapsed_s=time.monotonic() - self._began_at,
        )

    def save(self) -> Path:
        """lerobot's checkpoint of now; the folder of the policy in it."""
        checkpoint = get_step_checkpoint_dir(self._output, self._options.num_steps, self._num_updates)
        save_checkpoint(
            checkpoint,
            self._num_updates,
            self._config,
            self._accelerator.unwrap_model(self._policy),
            self._optimizer,
            self._schedule,
            self._preprocess,
            self._postprocess,
        )
        update_last_checkpoint(checkpoint)
        return checkpoint / "pretrained_model"


def _compile(policy: SmolVLAPolicy) -> None:
    """Compile the two parts that launch most of the kernels; a small policy is bound by launches."""
    layers = policy.model.vlm_with_expert
    layers.vlm.model.vision_model.encoder.compile()
    layers.forward = torch.compile(layers.forward)
