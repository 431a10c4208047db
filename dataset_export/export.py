"""Export of recorded runs as a LeRobot v3.0 dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.card import dataset_card
from dayshift.dataset_export.dataset_draft import FileSizes
from dayshift.dataset_export.dataset_files import DatasetMeta
from dayshift.dataset_export.dataset_writer import DatasetSpec, DatasetWriter
from dayshift.dataset_export.dense_video import (
    LazyRenderer,
    MakeRenderer,
    dense_path,
    make_dense,
    simulator_renderer,
)
from dayshift.dataset_export.episodes import read_episode
from dayshift.dataset_export.errors import BROKEN_FILE_ERRORS, first_line, raise_if_disk_full
from dayshift.dataset_export.run_folder import RunFolder, open_run
from dayshift.dataset_export.selection import Candidate, candidates, select
from dayshift.dataset_export.video import H264, Codec
from dayshift.sim.types import CAMERAS, Camera
from dayshift.types import DayshiftError, Outcome

ROBOT_OUTCOMES = (Outcome.DONE, Outcome.FAILED)  # infra attempts show broken simulators, not robots


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Which attempts are exported, and how.

    `only` and `where` choose attempts (see `selection.select`). Cameras may be none. Without `language`
    the planner's talk is left out, for tools that do not know LeRobot's language columns. `append`
    adds to a dataset that is there already the attempts that it lacks.
    """

    only: tuple[Outcome, ...] = ROBOT_OUTCOMES
    where: str | None = None
    cameras: tuple[Camera, ...] = CAMERAS
    codec: Codec = H264
    language: bool = True
    append: bool = False
    sizes: FileSizes = field(default_factory=FileSizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """An attempt that could not be exported, and why in one line."""

    attempt_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export did. The dataset is complete when `skipped` is empty."""

    dataset: Path
    num_selected: int
    num_added: int
    num_present: int  # were in the dataset before
    num_frames: int
    num_rendered: int  # attempts whose pictures had to be rendered
    skipped: tuple[Skipped, ...]


@dataclass(slots=True)
class _Progress:
    num_added: int = 0
    num_present: int = 0
    num_frames: int = 0
    num_rendered: int = 0
    skipped: list[Skipped] = field(default_factory=list)


def export_dataset(
    runs: Sequence[Path],
    to: Path,
    options: ExportOptions = ExportOptions(),
    *,
    open_folder: Callable[[Path], RunFolder] = open_run,
    make_renderer: MakeRenderer = simulator_renderer,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Write the attempts of `runs` as a LeRobot v3.0 dataset in the folder `to`, in one pass.

    Pictures that were not rendered live are rendered from the recorded states; `make_renderer` is only
    called then. Works while a run goes on: it
    takes the attempts that have ended. An attempt with broken files is skipped and reported. Raises
    DayshiftError for a wrong filter, no attempts, or a dataset that is there without `append`.
    """
    if to.exists() and not options.append:
        raise DayshiftError(f"{to} exists already: choose another folder, or append to it")
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open_folder(path)) for path in runs]
        found = [candidate for run in opened for candidate in candidates(run)]
        chosen = select(found, only=options.only, where=options.where)
        if not chosen:
            raise DayshiftError(f"nothing to export: none of {len(found)} recorded attempts was selected")
        spec = DatasetSpec(
            fps=_common_fps(chosen),
            cameras=options.cameras,
            codec=options.codec,
            language=options.language,
        )
        protocols = _protocols(chosen)

        def make_card(meta: DatasetMeta) -> str:
            return dataset_card(meta, protocols)

        done = _Progress()
        writer = stack.enter_context(DatasetWriter(to, spec, options.sizes, make_card=make_card))
        renderer = stack.enter_context(LazyRenderer(make_renderer))
        known = writer.known_attempts
        for number, candidate in enumerate(chosen, start=1):
            if candidate.identity in known:
                done.num_present += 1
            else:
                _add(candidate, writer, spec, renderer, done)
            on_progress(number, len(chosen))
    return ExportReport(
        dataset=to,
        num_selected=len(chosen),
        num_added=done.num_added,
        num_present=done.num_present,
        num_frames=done.num_frames,
        num_rendered=done.num_rendered,
        skipped=tuple(done.skipped),
    )


def _add(
    candidate: Candidate, writer: DatasetWriter, spec: DatasetSpec, renderer: LazyRenderer, done: _Progress
) -> None:
    recorded = candidate.recorded
    try:
        done.num_rendered += make_dense(recorded, spec.cameras, renderer.get, spec.codec)
        videos = {v3.VIDEO_KEYS[camera]: dense_path(recorded, camera, spec.codec) for camera in spec.cameras}
        episode = read_episode(candidate, videos)
    except BROKEN_FILE_ERRORS as error:
        raise_if_disk_full(error, recorded.folder)
        reason = first_line(error)
        done.skipped.append(Skipped(attempt_id=candidate.facts.attempt_id, reason=reason))
        return
    writer.add_episode(episode)
    done.num_added += 1
    done.num_frames += episode.length


def _common_fps(chosen: Sequence[Candidate]) -> int:
    rates = sorted({candidate.recorded.fps for candidate in chosen})
    if len(rates) > 1:
        raise DayshiftError(f"these runs were recorded at different rates: {rates} Hz; export them apart")
    return rates[0]


def _protocols(chosen: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Each protocol that an attempt was simulated with, once."""
    protocols: list[dict[str, Any]] = []
    for candidate in chosen:
        protocol = candidate.recorded.recording.protocol
        if protocol not in protocols:
            protocols.append(protocol)
    return protocols
