"""`dayshift sessions`: a store looked into, checked, mended and moved from the command line."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from dayshift.engine.api import Message
from dayshift.engine.sessions.records import TurnRecord
from dayshift.engine.sessions.store import SessionStore
from dayshift.experiments.cli import run as run_command
from tests.engine.store.samples import make_turn, page_after, path_of, same_piece, write_sample


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def dayshift(tmp_path: Path, monkeypatch, capfd) -> Callable[..., Ended]:
    """Run the command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Ended:
        code = run_command(arguments)
        return Ended(code, *capfd.readouterr())

    return run


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    """A store of one session, in the folder `store`."""
    store = SessionStore(tmp_path / "store")
    write_sample(store)
    return store


def test_ls_and_show(dayshift, store):
    with store.open("s") as file:  # an engine has it
        ended = dayshift("sessions", "ls", "--store", "store", "--json")
        assert ended.returncode == 0, ended.stderr
        (session,) = json.loads(ended.stdout)["sessions"]
        assert session["num_turns"] == len(file.turns)
        assert session["is_open"]
        assert session["problems"] == []
        (kv,) = session["kv"]
        assert (kv["codec"], kv["dtype"], kv["num_pieces"], kv["num_tokens"]) == ("raw", "float32", 1, 100)
        assert "open" in dayshift("sessions", "ls", "--store", "store").stdout

    shown = json.loads(dayshift("sessions", "show", "s", "--store", "store", "--json").stdout)
    assert not shown["is_open"]
    assert [turn["where"] for turn in shown["turns"]] == ["recalled", "window", "window"]
    assert [message["role"] for message in shown["turns"][2]["messages"]] == ["user", "assistant"]
    table = dayshift("sessions", "show", "s", "--store", "store").stdout
    assert "You lead a robot." in table
    assert "raw of float32" in table


def test_verify_and_repair(dayshift, store):
    assert dayshift("sessions", "verify", "--store", "store").stdout == "s: whole\n"
    whole = path_of(store).read_bytes()
    headers = [at for at in range(0, len(whole), 4096) if whole[at : at + 4] == b"DSSR"]

    flip(path_of(store), headers[3] + 4096 + 5)  # in the KV's payload
    ended = dayshift("sessions", "verify", "s", "--store", "store", "--json")
    assert ended.returncode == 1
    (body,) = json.loads(ended.stdout)["sessions"]
    assert body["problems"] == [
        f"KV of turn 1 at byte {headers[3] + 4096}: wrong checksum; it is computed again when needed"
    ]

    flip(path_of(store), headers[2] + 20)  # a turn's header, with records behind it
    ended = dayshift("sessions", "verify", "--store", "store")
    assert ended.returncode == 1
    assert f"damaged at byte {headers[2]}" in ended.stdout
    ended = dayshift("sessions", "repair", "s", "--store", "store")
    assert ended.returncode == 0, ended.stderr
    assert (
        "mended; 2 turns kept, lost: 1; the damaged file is kept as store/s.session.damaged-1" in ended.stdout
    )
    with store.open("s") as file:
        assert [turn.messages for turn in file.turns] == [make_turn(0).messages, make_turn(2).messages]
    assert dayshift("sessions", "verify", "--store", "store").stdout == "s: whole\n"
    assert dayshift("sessions", "repair", "--store", "store").stdout == "s: was whole\n"


def test_one_session_that_cannot_be_read_is_one_line_of_the_list(dayshift, store):
    (store.root / "other.session").write_bytes(b"no session")
    (store.root / "a folder.session").mkdir()
    assert "damaged" in dayshift("sessions", "ls", "--store", "store").stdout
    listed = json.loads(dayshift("sessions", "ls", "--store", "store", "--json").stdout)["sessions"]
    assert [body["session"] for body in listed] == ["other", "s"]
    assert "not a session file" in listed[0]["problems"][0]
    ended = dayshift("sessions", "repair", "--store", "store")
    assert ended.returncode == 1
    assert ended.stdout.endswith("\ns: was whole\n")
    assert dayshift("sessions", "rm", "s", "nobody", "--store", "store").returncode == 1
    assert store.list_session_ids() == ["other", "s"]


def test_what_was_said_is_shown_as_it_is(dayshift, store):
    turn = TurnRecord(index=3, at=1.0, messages=(Message("user", "[red]no[/] [/b] \x1b[2J\\"),), token_ids=())
    with store.open("s") as file:
        file.append_turn(turn)
    ended = dayshift("sessions", "show", "s", "--store", "store")
    assert ended.returncode == 0, ended.stderr
    assert "user: [red]no[/] [/b] \\x1b[2J\\" in ended.stdout


def test_a_disk_that_takes_nothing_can_be_looked_into(dayshift, store, monkeypatch):
    def refuse(*args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        patch.setattr(tempfile, "mkstemp", refuse)
        for command in (["ls"], ["show", "s"], ["verify"], ["repair"]):
            assert dayshift("sessions", *command, "--store", "store").returncode == 0, command


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("with_kv", [True, False])
def test_export_and_import(dayshift, store, tmp_path, with_kv):
    with store.open("s") as file:
        turns, layout, piece = list(file.turns), file.layout, file.read_kv(1)
        option = "--kv" if with_kv else "--no-kv"
        ended = dayshift("sessions", "export", "s", "--store", "store", "--to", "s.export", option, "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["num_bytes"] == (tmp_path / "s.export").stat().st_size
    (tmp_path / "other").mkdir()
    ended = dayshift("sessions", "import", "s.export", "--store", "other", "--as", "robot 7", "--json")
    assert json.loads(ended.stdout) == {"session": "robot 7"}, ended.stderr
    with SessionStore(tmp_path / "other").open("robot 7") as file:
        assert file.session.session_id == "robot 7"
        assert (file.turns, file.layout) == (turns, layout)
        assert file.has_kv(1) == with_kv
        if with_kv:
            assert same_piece(file.read_kv(1), piece)
        file.append_turn(make_turn(3))
    ended = dayshift("sessions", "import", "s.export", "--store", "store")
    assert (ended.returncode, ended.stderr) == (1, "dayshift: session 's' exists already\n")


def test_rm_and_take_over(dayshift, store):
    with store.open("s") as file:
        ended = dayshift("sessions", "rm", "s", "--store", "store")
        assert ended.returncode == 1
        assert "open already" in ended.stderr
        ended = dayshift("sessions", "repair", "s", "--take-over", "--store", "store")
        assert (ended.returncode, ended.stdout) == (0, "s: was whole\n"), ended.stderr
        assert not file.is_lost  # it learns it at its next append
    assert json.loads(dayshift("sessions", "rm", "s", "--store", "store", "--json").stdout) == {
        "deleted": ["s"]
    }
    assert store.list_session_ids() == []
    assert json.loads(dayshift("sessions", "ls", "--store", "store", "--json").stdout) == {"sessions": []}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["ls", "--store", "none"], 2, "--store: none is not a folder"),
        (["show", "x", "--store", "store"], 1, "no session 'x' in store"),
        (["verify", "x", "--store", "store"], 1, "no session 'x' in store"),
        (["rm", "x", "--store", "store"], 1, "no session 'x' in store"),
        (["import", "none", "--store", "store"], 1, "none: No such file or directory"),
        (["export", "s", "--store", "store", "--to", "store"], 1, "store: File exists"),
    ],
)
def test_mistakes_are_one_line(dayshift, store, arguments, code, says):
    ended = dayshift("sessions", *arguments)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", f"dayshift: {says}\n")


def test_a_file_of_something_else_is_damaged_and_is_not_imported(dayshift, store, tmp_path):
    path_of(store, "junk").write_bytes(b"junk" * 2000)
    ended = dayshift("sessions", "verify", "--store", "store", "--json")
    bodies = {body["session"]: body for body in json.loads(ended.stdout)["sessions"]}
    assert bodies["s"]["ok"]
    assert "not a session file" in bodies["junk"]["problems"][0]
    assert "damaged" in dayshift("sessions", "ls", "--store", "store").stdout
    cut = path_of(store).read_bytes()
    (tmp_path / "cut").write_bytes(cut[: page_after(len(cut)) - 4096 + 60])
    ended = dayshift("sessions", "import", "cut", "--as", "t", "--store", "store")
    assert ended.returncode == 1
    assert "cut: damaged at byte" in ended.stderr
    assert "t" not in store.list_session_ids()
