"""`dayshift show`: an exported dataset to look at, in the page or as a file for another viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dayshift.experiments.commands.serve import api_key_from
from dayshift.experiments.console import stdout_kept_for_json

DEFAULT_PORT = 8081  # beside `dayshift ui`


def show(
    dataset_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A LeRobot v3.0 dataset.")],
    episode: Annotated[int, typer.Option(min=0, help="The episode to open, or to write.")] = 0,
    rrd: Annotated[Path | None, typer.Option(help="Write it as this Rerun recording instead.")] = None,
    mcap: Annotated[Path | None, typer.Option(help="Write it as this MCAP file for Foxglove.")] = None,
    runs: Annotated[Path, typer.Option(help="The folder of runs, to get from an episode to its run.")] = Path(
        "runs"
    ),
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = DEFAULT_PORT,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the key that the page asks for.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Look at an exported dataset: frames, curves and the planner's words on one time axis."""
    if rrd or mcap:
        _write_files(dataset_dir, episode, rrd, mcap, as_json=as_json)
        return
    from dayshift.dataset_export.looking.dataset import Dataset
    from dayshift.webui.app import PageOptions
    from dayshift.webui.server import serve

    dataset = Dataset(dataset_dir)
    dataset.entry(episode)
    options = PageOptions(
        runs_dir=runs.resolve(),
        is_read_only=True,
        host=host,
        port=port,
        api_key=api_key_from(api_key_env),
        dataset=dataset,
    )
    serve(
        options,
        on_ready=lambda address: typer.echo(f"the dataset is at {address}#episode={episode}", err=True),
    )


def _write_files(
    dataset_dir: Path, episode: int, rrd: Path | None, mcap: Path | None, *, as_json: bool
) -> None:
    from dayshift.dataset_export.looking.dataset import Dataset
    from dayshift.dataset_export.looking.viewer_files import require

    if rrd:
        require("rerun", "rerun-sdk", "--rrd")
    if mcap:
        require("foxglove", "foxglove-sdk", "--mcap")
    with stdout_kept_for_json() as print_json:
        dataset = Dataset(dataset_dir)
        notes: dict[str, None] = {}  # each once, in order
        if rrd:
            from dayshift.dataset_export.looking.rerun_file import write_rrd

            notes |= dict.fromkeys(write_rrd(dataset, episode, rrd))
        if mcap:
            from dayshift.dataset_export.looking.mcap_file import write_mcap

            notes |= dict.fromkeys(write_mcap(dataset, episode, mcap))
        if as_json:
            written = {"rrd": str(rrd) if rrd else None, "mcap": str(mcap) if mcap else None}
            print_json({"dataset": str(dataset_dir), "episode": episode, **written, "notes": list(notes)})
    if not as_json:
        for path, viewer in ((rrd, "rerun"), (mcap, "Foxglove")):
            if path:
                typer.echo(f"{path}: episode {episode}, for {viewer}")
        for note in notes:
            typer.echo(f"note: {note}", err=True)
