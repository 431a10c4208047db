"""All commands of `dayshift`."""

from __future__ import annotations

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
