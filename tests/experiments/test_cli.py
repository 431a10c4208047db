"""The command line: exit codes, one line per mistake, and what goes to which stream."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys

import pytest
import yaml

from dayshift.experiments import cli
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.yaml_tree import ConfigError
from dayshift.types import DayshiftError


def test_a_mistake_in_the_file_is_one_line_and_exit_2(dayshift, tmp_path):
    (tmp_path / "x.yaml").write_text("planner:\n  memry: off\n")
    ended = dayshift("run", "x.yaml", "--json")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert re.fullmatch(
        r"dayshift: x\.yaml:2: planner\.memry: unknown key; did you mean 'memory'\? .*\n", ended.stderr
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "No such command 'fly'."),
        (["run"], "run: found neither, allowed: an experiment's file, or --resume RUN_DIR"),
        (["run", "quickstart", "--resume", "x"], "run: found both, allowed"),
        (["run", "quickstart", "--fast"], "No such option: --fast"),
        (["run", "--resume", "x", "--dry-run"], "--resume: a run goes on with its own configuration"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(capfd, arguments, message):
    assert cli.run(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"dayshift: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("group", [[], ["sessions"], ["models"], ["bench"]])
def test_without_a_command_the_usage_is_all_that_is_said(capfd, group):
    assert cli.run(group) == 2
    said = "".join(capfd.readouterr())
    assert "COMMAND [ARGS]" in said
    assert "dayshift: " not in said


def test_dry_run_shows_origins_and_runs_nothing(dayshift, tmp_path):
    (tmp_path / "x.yaml").write_text("seed: 7\nmatrix: {planner.memory: [off, full]}\n")
    ended = dayshift("run", "x.yaml", "--set", "sim.camera_hz=4", "--dry-run")
    assert ended.returncode == 0, ended.stderr
    first, second = yaml.safe_load_all(ended.stdout)
    assert (first["planner"]["memory"], second["planner"]["memory"]) == ("off", "full")
    assert re.search(r"^seed: 7 +# x\.yaml:1$", ended.stdout, re.M)
    assert re.search(r"^ +camera_hz: 4\.0 +# --set sim\.camera_hz$", ended.stdout, re.M)
    assert re.search(r"^ +max_steps: 300 +# default$", ended.stdout, re.M)
    assert os.listdir(tmp_path) == ["x.yaml"]


def test_dry_run_as_json_is_one_object(dayshift, tmp_path):
    (tmp_path / "x.yaml").write_text("seed: 7\n")
    ended = dayshift("run", "x.yaml", "--dry-run", "--json")
    (run,) = json.loads(ended.stdout)["runs"]
    assert run["config"]["seed"] == 7
    assert run["origins"] == {"seed": "x.yaml:1"}


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("x.yaml:3: seed: no"), 2, "dayshift: x.yaml:3: seed: no\n"),
        (DayshiftError("the disk\nis full"), 1, "dayshift: the disk is full\n"),
        (KeyboardInterrupt(), 130, "dayshift: interrupted\n"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(capsys, error, code, text):
    def fail():
        raise error

    assert cli.guarded(fail) == code
    assert capsys.readouterr().err == text


def test_an_unexpected_exception_is_one_line_that_names_the_traceback(capsys):
    def fail():
        raise ZeroDivisionError("three\nlines\nlong")

    assert cli.guarded(fail) == 1
    line = capsys.readouterr().err
    found = re.fullmatch(r"dayshift: internal error: ZeroDivisionError: three \(traceback in (.+)\)\n", line)
    assert found
    with open(found[1], encoding="utf-8") as file:
        assert "raise ZeroDivisionError" in file.read()
    os.unlink(found[1])


def test_only_the_json_object_reaches_stdout(capfd):
    with stdout_kept_for_json() as print_json:
        print("progress")
        subprocess.run([sys.executable, "-c", "print('child')"], check=True)
        os.write(1, b"native\n")
        print_json({"answer": "grün"})
    print("afterwards")
    out, err = capfd.readouterr()
    assert out == '{"answer": "grün"}\nafterwards\n'
    assert {"progress", "child", "native"} == set(err.split())


def test_doctor_reports_every_finding(dayshift):
    ended = dayshift("doctor", "--json")
    report = json.loads(ended.stdout)
    assert [finding["name"] for finding in report["findings"]] == [
        "python", "packages", "rendering", "gpu", "memory", "disk", "open files",
    ]  # fmt: skip
    assert report["ok"] == all(finding["is_ok"] for finding in report["findings"])
    assert ended.returncode == (0 if report["ok"] else 1)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "/no/such"], 1, "model folder /no/such does not exist"),
        (["--host", "0.0.0.0"], 1, "listening on 0.0.0.0 needs an API key"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], 2, "--api-key-env: the environment has no NO_SUCH_VARIABLE"),
        (["--draft-model", "default", "--speculation", "off"], 1, "draft_model is of no use"),
        (["--port", "70000"], 2, "Invalid value for '--port'"),
    ],
)
def test_serve_refuses_in_one_line(dayshift, arguments, code, message):
    ended = dayshift("serve", "--port", "0", *arguments)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.startswith(f"dayshift: {message}")
    assert ended.stderr.count("\n") == 1


def test_a_port_in_use_is_one_line_for_serve_and_for_run(dayshift, tmp_path, tiny_model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        served = dayshift("serve", "--port", str(port))
        (tmp_path / "x.yaml").write_text(f"planner: {{model: {tiny_model}}}\nengine: {{port: {port}}}\n")
        ran = dayshift("run", "x.yaml", "--json")
    assert (served.returncode, ran.returncode) == (1, 1)
    reason = f"address 127.0.0.1, port {port} is in use; give another port"
    assert served.stderr == f"dayshift: {reason}\n"
    assert ran.stderr.splitlines()[-1].startswith(f"dayshift: the engine cannot start: {reason}")
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""


def test_a_command_does_not_wait_for_libraries_of_others():
    """They would take a second of every command, `--help` included."""
    program = (
        "import sys\n"
        "import dayshift.experiments.commands.app\n"
        "others = ('torch', 'sqlalchemy', 'pyarrow', 'av', 'mujoco', 'matplotlib', 'fastapi')\n"
        "print([name for name in others if name in sys.modules])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "[]", ended.stderr
