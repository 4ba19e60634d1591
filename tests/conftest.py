"""Shared by all tests: inner pytest runs that keep torch, and their JSON reports."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import pytest
from _pytest.pytester import SysModulesSnapshot


pytest_plugins = ["pytester"]

#: Packages that can't be imported twice in one process, and what hangs on them. An inner run in this
#: process must leave them in ``sys.modules``.
KEPT = frozenset({"torch", "functorch", "triton", "sympy", "mpmath", "numpy", "networkx", "jinja2", "pytest_dynamo"})


@pytest.fixture(autouse=True)
def _keep_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = SysModulesSnapshot.restore

    def restore_but_keep(self: SysModulesSnapshot) -> None:
        kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in KEPT}
        restore(self)
        sys.modules.update(kept)

    monkeypatch.setattr(SysModulesSnapshot, "restore", restore_but_keep)


@pytest.fixture(autouse=True)
def _inner_runs_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner runs don't belong to the pytest-xdist run that this test may be part of, and print what pytest prints
    at a desk: on CI it repeats every message whole in its short summary."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Any:
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "reset"):
        dynamo.reset()


@dataclass
class Run:
    """One finished inner run."""

    result: pytest.RunResult
    report: dict[str, Any] | None

    @property
    def text(self) -> str:
        return self.result.stdout.str() + self.result.stderr.str()

    def record(self, name: str, phase: str = "call") -> dict[str, Any]:
        """The record of the test whose nodeid ends in ``name``."""
        assert self.report is not None
        found = [r for r in self.report["records"] if r["nodeid"].endswith(name) and r["phase"] == phase]
        assert len(found) == 1, [(r["nodeid"], r["phase"]) for r in self.report["records"]]
        return found[0]


class Project:
    """A folder with tests, and runs of pytest over it."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester

    def file(self, name: str, source: str) -> None:
        self.pytester.makepyfile(**{name: source})

    def run(self, *args: str, json_report: bool = True, subprocess: bool = False) -> Run:
        """Run pytest with ``args``; reads the JSON report unless told not to ask for one."""
        path = self.pytester.path / "report.json"
        path.unlink(missing_ok=True)
        given = [*args, *([f"--dynamo-json={path}"] if json_report else [])]
        given = ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:hypothesispytest", *given]
        if not entry_points(group="pytest11", name="dynamo"):
            given = ["-p", "pytest_dynamo.plugin", *given]  # run from a checkout that is not installed
        run = self.pytester.runpytest_subprocess if subprocess else self.pytester.runpytest_inprocess
        result = run(*given)
        report = json.loads(path.read_text()) if path.exists() else None
        return Run(result, report)

    def test(self, source: str, *args: str, **options: Any) -> Run:
        """Run pytest over one file of tests."""
        self.file("test_it", source)
        return self.run(*args, **options)


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "TORCH_COMPILE_JOB_ID", "TORCH_LOGS", "TORCH_TRACE"):
        monkeypatch.delenv(name, raising=False)
    return Project(pytester)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU say so with ``@pytest.mark.cuda`` and are skipped without one."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
