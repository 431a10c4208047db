"""The command `dayshift`.

Every mistake ends as one line on stderr and an exit code: 2 for the command line and the
configuration, 130 for Ctrl-C, 1 for everything else. `--json` keeps stdout for one JSON object.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import typer

from dayshift.experiments.commands import (
    bench,
    bench_recording,
    doctor,
    eval,
    export,
    models,
    prerender,
    report,
    router,
    run,
    serve,
    sessions,
    show,
    ui,
)
from dayshift.experiments.errors import StoppedByUserError, traceback_kept_in
from dayshift.experiments.yaml_tree import ConfigError
from dayshift.types import DayshiftError

app = typer.Typer(
    name="dayshift",
    help="Shift/review experiments with robots, and the inference engine that remembers them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("report")(report.report)
app.command("serve")(serve.serve)
app.command("eval")(eval.evaluate)
app.command("router")(router.router)
app.command("export")(export.export)
app.command("prerender")(prerender.prerender)
app.command("verify")(export.verify)
app.command("repair")(export.repair)
app.command("show")(show.show)
app.command("ui")(ui.ui)
app.command("render")(ui.render)
app.command("doctor")(doctor.doctor)
app.add_typer(models.app, name="models")
bench.app.command("record")(bench_recording.record)
bench.app.command("export")(bench_recording.export)
app.add_typer(bench.app, name="bench")
app.add_typer(sessions.app, name="sessions")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command; ends the process."""
    _open_standard_streams()
    sys.exit(guarded(lambda: app(args=arguments, prog_name="dayshift", standalone_mode=False)))


def guarded(command: Callable[[], int | None]) -> int:
    """Runs a command and returns the exit code; says in one line what went wrong."""
    try:
        with traceback_kept_in():
            return _run(command)
    except ConfigError as error:
        return _fail(error, 2)
    except StoppedByUserError as error:
        return _fail(error, 130)
    except DayshiftError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _run(command: Callable[[], int | None]) -> int:
    try:
        return command() or 0
    except typer.TyperException as error:
        return _fail(error.format_message(), error.exit_code)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except BrokenPipeError:  # whoever read our output has gone; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _fail(reason: object, code: int) -> int:
    print(f"dayshift: {' '.join(str(reason).split())}", file=sys.stderr, flush=True)
    return code


def _open_standard_streams() -> None:
    """Opens what the caller closed of stdin, stdout and stderr.

    Otherwise the next socket or file takes the number, and whoever prints writes into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  as long as the process
