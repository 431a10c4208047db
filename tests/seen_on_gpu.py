"""A plugin for pytest that notes which models have run on this machine's GPU, for docs/models.md.

    pytest -m gpu -p tests.seen_on_gpu --seen-on-gpu benchmarks/seen_on_gpu.json

The record is written after every test that adds to it, so that a run that is cut short leaves what it saw.
It holds the models of tests that passed; with pytest-xdist the workers' reports carry them to the writer.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from pathlib import Path

import msgspec
import pytest
import torch

from dayshift.engine.bench.model_watch import watched_models
from dayshift.engine.models.seen_on_gpu import SeenModel, SeenRun, commit_of, machine_name, put_run, today

_PROPERTY = "models seen on a GPU"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seen-on-gpu", type=Path, metavar="FILE", help="Note in FILE which models the tests ran on a GPU."
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--seen-on-gpu")
    if path is None:
        return
    config.pluginmanager.register(Watch())
    if "PYTEST_XDIST_WORKER" not in os.environ and torch.cuda.is_available():
        device = machine_name(torch.cuda.get_device_name())
        command = f"pytest {' '.join(config.invocation_params.args)}"
        config.pluginmanager.register(Recorder(path, new_run(command, device, config.rootpath)))


def new_run(command: str, device: str, root: Path) -> SeenRun:
    """The run before its first test; what every run has in its command is left out of the record's."""
    words = command.partition(" -p tests.seen_on_gpu")[0]
    return SeenRun(command=words, machine=device, commit=commit_of(root), date=today(), num_passed=0)


class Watch:
    """Hands the models of each test on with its report."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with watched_models() as self._seen:
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        result = yield
        if self._seen:
            item.user_properties.append((_PROPERTY, msgspec.to_builtins(sorted(self._seen))))
        return result


class Recorder:
    """Writes down what the reports say."""

    def __init__(self, path: Path, run: SeenRun) -> None:
        self._path, self.run = path, run

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.run = msgspec.structs.replace(self.run, failed=(*self.run.failed, report.nodeid))
        if report.when != "call" or not report.passed:
            return
        self.run = msgspec.structs.replace(self.run, num_passed=(self.run.num_passed or 0) + 1)
        for name, models in report.user_properties:
            if name == _PROPERTY:
                self._add(report.nodeid, msgspec.convert(models, list[SeenModel]))

    def pytest_sessionfinish(self) -> None:
        if self.run.num_passed:
            put_run(self._path, self.run)

    def _add(self, nodeid: str, models: Iterable[SeenModel]) -> None:
        test = nodeid.partition("[")[0]
        before = self.run.models
        self.run = self.run.with_models(msgspec.structs.replace(model, seen_in=(test,)) for model in models)
        if self.run.models != before:
            put_run(self._path, self.run)
