"""`dayshift sessions`: what an engine's session store holds, without an engine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dayshift.engine.api import SessionLockedError, SessionNotFoundError
from dayshift.engine.sessions.inspect import SessionReport, inspect_session, try_inspect
from dayshift.engine.sessions.session_file import StoreCorruptError, StoreError
from dayshift.engine.sessions.store import SessionStore
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.yaml_tree import ConfigError

app = typer.Typer(help="Look into a store of sessions, check, mend and move them.", no_args_is_help=True)

StoreDir = Annotated[
    Path, typer.Option("--store", metavar="DIR", help="The store: --store-dir of dayshift serve.")
]
SessionId = Annotated[str, typer.Argument(metavar="ID", help="A session's id.")]
SessionIds = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Default: all sessions.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.command("ls")
def list_sessions(store: StoreDir, as_json: AsJson = False) -> None:
    """List the sessions of a store."""
    opened = _open(store)
    found = {id_: try_inspect(opened.path(id_)) for id_ in opened.list_session_ids()}
    # An engine may delete one while this looks.
    found = {id_: report for id_, report in found.items() if opened.path(id_).exists()}
    if as_json:
        _print_json({"sessions": [_summary(id_, report) for id_, report in found.items()]})
        return
    table = Table("session", "turns", "tokens", "KV pieces", "size", "written", "state", box=None)
    for column in table.columns[1:5]:
        column.justify = "right"
    for session_id, report in found.items():
        if isinstance(report, StoreError):
            state = "damaged" if isinstance(report, StoreCorruptError) else "unreadable"
            table.add_row(_shown(session_id), "", "", "", "", "", f"[red]{state}[/]")
            continue
        table.add_row(
            _shown(session_id),
            str(len(report.turns)),
            f"{report.num_tokens:,}",
            str(sum(kv.num_pieces for kv in report.kv)),
            _size(report.num_bytes),
            _time(report.modified_at),
            "[red]damaged[/]" if report.problems else "open" if report.is_open else "closed",
        )
    Console().print(table)


@app.command("show")
def show(session_id: SessionId, store: StoreDir, as_json: AsJson = False) -> None:
    """Show a session: its turns, what is in its window, and what KV is kept."""
    report = inspect_session(_existing(_open(store), session_id))
    if as_json:
        _print_json(
            _summary(session_id, report) | {"turns": [_turn(report, i) for i in range(len(report.turns))]}
        )
        return
    record = report.session
    facts = Table("", "", box=None, show_header=False)
    facts.add_row("session", _shown(record.session_id))
    facts.add_row("system", _shown(record.system or ""))
    facts.add_row("window", f"{record.window} tokens; recall budget {record.recall_budget}")
    facts.add_row("file", f"{_size(report.num_bytes)}, epoch {report.epoch}, {report.num_models} model(s)")
    for kv in report.kv:
        kept = f"{kv.num_pieces} pieces, {kv.num_tokens:,} tokens, {_size(kv.num_bytes)}"
        facts.add_row("KV", f"{kv.codec} of {kv.dtype}: {kept}")
    for problem in report.problems:
        facts.add_row("[red]problem[/]", escape(problem))
    table = Table("turn", "at", "tokens", "where", "text", box=None)
    for index in range(len(report.turns)):
        turn = _turn(report, index)
        text = "\n".join(f"{message['role']}: {message['content']}" for message in turn["messages"])
        table.add_row(str(index), f"{turn['at']:g}", str(turn["num_tokens"]), turn["where"], _shown(text))
    Console().print(facts)
    Console().print(table)


@app.command("verify")
def verify(store: StoreDir, session_ids: SessionIds = None, as_json: AsJson = False) -> int:
    """Check every checksum; exit code 1 when something is damaged."""
    opened = _open(store)
    bodies = []
    for session_id in session_ids or opened.list_session_ids():
        report = try_inspect(_existing(opened, session_id), checks_kv=True)
        problems = [str(report)] if isinstance(report, StoreError) else list(report.problems)
        bodies.append({"session": session_id, "ok": not problems, "problems": problems})
    is_ok = all(body["ok"] for body in bodies)
    if as_json:
        _print_json({"ok": is_ok, "sessions": bodies})
    else:
        for body in bodies:
            print(f"{body['session']}: {'; '.join(body['problems']) or 'whole'}")
    return 0 if is_ok else 1


@app.command("repair")
def repair(
    store: StoreDir,
    session_ids: SessionIds = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Also take sessions from an engine that hangs with them.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Keep what is whole of damaged sessions; the damaged file stays beside the mended one.

    Exit code 1 when one cannot be mended; the others are.
    """
    opened = _open(store)
    bodies = [_repaired(opened, id_, take_over=take_over) for id_ in session_ids or opened.list_session_ids()]
    if as_json:
        _print_json({"sessions": bodies})
    else:
        for body in bodies:
            print(f"{body['session']}: {body['outcome']}")
    return 0 if all(body["ok"] for body in bodies) else 1


def _repaired(store: SessionStore, session_id: str, *, take_over: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"session": session_id, "ok": True, "damaged_file": None, "lost_turns": []}
    report = try_inspect(_existing(store, session_id), checks_kv=True)
    try:
        if take_over and not isinstance(report, StoreError) and report.is_open:
            store.take_over(session_id)
            report = inspect_session(store.path(session_id), checks_kv=True)
        if not isinstance(report, StoreError) and not report.problems:
            return body | {"outcome": "was whole"}
        mended = store.repair(session_id)
    except (StoreError, SessionLockedError) as error:
        return body | {"ok": False, "outcome": str(error)}
    if mended is None:
        return body | {"outcome": "was whole"}
    lost = ", ".join(map(str, mended.lost_turns))
    outcome = (
        f"mended; {mended.num_turns} turns kept{f', lost: {lost}' if lost else ''}; "
        f"the damaged file is kept as {mended.kept}"
    )
    return body | {"outcome": outcome, "damaged_file": str(mended.kept), "lost_turns": mended.lost_turns}


@app.command("export")
def export(
    session_id: SessionId,
    store: StoreDir,
    to: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")],
    kv: Annotated[bool, typer.Option(help="With keys and values, for the same model; text always.")] = True,
    as_json: AsJson = False,
) -> None:
    """Write a session as one file, which `import` takes into any store."""
    _open(store).export(session_id, to, with_kv=kv)
    body = {"session": session_id, "file": str(to), "num_bytes": to.stat().st_size, "with_kv": kv}
    _print_json(body) if as_json else print(f"{to}: session {session_id}, {_size(body['num_bytes'])}")


@app.command("import")
def import_session(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `export` wrote.")],
    store: StoreDir,
    session_id: Annotated[
        str | None, typer.Option("--as", metavar="ID", help="Another id than the session's own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take an exported session into a store."""
    taken = SessionStore(store, is_direct=False).import_file(file, session_id)
    _print_json({"session": taken}) if as_json else print(f"{store}: session {taken} imported")


@app.command("rm")
def remove(
    session_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Sessions' ids.")],
    store: StoreDir,
    as_json: AsJson = False,
) -> None:
    """Delete closed sessions for good, text and all."""
    opened = _open(store)
    for session_id in session_ids:
        _existing(opened, session_id)  # all are looked for before one is gone
    for session_id in session_ids:
        opened.delete(session_id)
        if not as_json:
            print(f"{session_id}: deleted")
    if as_json:
        _print_json({"deleted": session_ids})


def _open(folder: Path) -> SessionStore:
    if not folder.is_dir():
        raise ConfigError(f"--store: {folder} is not a folder")
    return SessionStore(folder, is_direct=False)  # a full or read-only disk can be looked into


def _existing(store: SessionStore, session_id: str) -> Path:
    path = store.path(session_id)
    if not path.is_file():
        raise SessionNotFoundError(f"no session {session_id!r} in {store.root}")
    return path


def _summary(session_id: str, report: SessionReport | StoreError) -> dict[str, Any]:
    if isinstance(report, StoreError):
        return {"session": session_id, "problems": [str(report)]}
    return {
        "session": session_id,
        "num_turns": len(report.turns),
        "num_tokens": report.num_tokens,
        "window": report.session.window,
        "kv": [
            {
                "codec": kv.codec,
                "dtype": kv.dtype,
                "num_pieces": kv.num_pieces,
                "num_tokens": kv.num_tokens,
                "num_bytes": kv.num_bytes,
            }
            for kv in report.kv
        ],
        "num_bytes": report.num_bytes,
        "num_torn_bytes": report.num_torn_bytes,
        "num_models": report.num_models,
        "epoch": report.epoch,
        "modified_at": report.modified_at,
        "is_open": report.is_open,
        "problems": list(report.problems),
    }


def _turn(report: SessionReport, index: int) -> dict[str, Any]:
    turn, layout = report.turns[index], report.layout
    where = "window"
    if layout is not None and index <= max((*layout.window_turns, *layout.recalled_turns), default=-1):
        where = "window" if index in layout.window_turns else "archive"
        where = "recalled" if index in layout.recalled_turns else where
    messages = [{"role": message.role, "content": message.content} for message in turn.messages]
    return {"at": turn.at, "num_tokens": len(turn.token_ids), "where": where, "messages": messages}


def _print_json(body: dict[str, Any]) -> None:
    with stdout_kept_for_json() as print_json:
        print_json(body)


def _shown(text: str) -> str:
    """Text for a table: nothing in it is markup, and nothing moves the terminal's cursor."""
    return escape("".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 1024:.0f} KiB"


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
