"""The object that is registered when this plugin is in use: keeps records, merges workers, reports."""

from __future__ import annotations

from contextlib import ExitStack
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from pytest_dynamo import history
from pytest_dynamo import isolation
from pytest_dynamo import jsonreport
from pytest_dynamo import machine
from pytest_dynamo import options
from pytest_dynamo import replay
from pytest_dynamo import rows
from pytest_dynamo import terminal
from pytest_dynamo.environment import environment
from pytest_dynamo.observer import Observer
from pytest_dynamo.progress import Progress
from pytest_dynamo.record import Record
from pytest_dynamo.report import Report
from pytest_dynamo.watch import TestWatcher
from pytest_dynamo.watch import is_xdist_worker


session_key = pytest.StashKey["DynamoSession"]()


def activate(config: pytest.Config) -> DynamoSession:
    """Return the session of this run; register it and install the taps if there is none yet."""
    session = config.stash.get(session_key, None)
    if session is None:
        session = config.stash[session_key] = DynamoSession(config)
        config.pluginmanager.register(session, "dynamo_session")
        config.pluginmanager.register(session.watcher, "dynamo_watcher")
    return session


class DynamoSession:
    """Everything about a run: its taps, its watcher, all records, the reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        #: Records by test and phase; of a repeated test the last.
        self.records: dict[str, dict[str, Record]] = {}
        self._outcomes: dict[str, str] = {}
        self._worker_notes: list[str] = []
        #: That of an xdist worker: the controller itself imports no torch.
        self._environment: dict[str, str | None] | None = None
        observer = Observer()
        self._stack = ExitStack()
        self.watcher = TestWatcher(config, observer, self._terminal_progress())
        self.watcher.refuse_switched_off()
        observer.install()
        self._stack.callback(observer.remove)
        self._stack.enter_context(isolation.without_profile_guided_state())

    def _terminal_progress(self) -> Progress:
        if is_xdist_worker(self.config):
            return Progress(None)
        capture = self.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
            progress = Progress.of_terminal()
        self._stack.callback(progress.close)
        return progress

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        self._stack.close()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        records = self.records.setdefault(report.nodeid, {})
        if report.when == "setup":
            records.clear()
            self._outcomes.pop(report.nodeid, None)
        for data in getattr(report, "dynamo", ()):
            records[report.when] = Record.from_json(data)
        outcome = _outcome(report)
        if outcome is not None:
            self._outcomes[report.nodeid] = outcome
        for phase, record in records.items():
            records[phase] = replace(record, outcome=self._outcomes.get(report.nodeid))

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if is_xdist_worker(self.config):
            imports = [record.to_json() for record in self.watcher.imports]
            output = {"imports": imports, "notes": self._notes(), "environment": environment()}
            self.config.workeroutput["dynamo"] = output  # type: ignore[attr-defined]
            return
        path = options.json_path(self.config)
        if path is not None:
            jsonreport.write(self.report(), path)
        if options.option_given(self.config, "accept"):
            self._accept(session)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        # Static facts only: pytest-benchmark warns of every difference. And nothing that initialises CUDA.
        machine_info["gpus"] = machine.gpus(machine.load_nvml())
        machine_info["torch"] = environment()["torch"]

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        if options.option(self.config, "benchmark_rows"):
            output_json["benchmarks"] += list(rows.rows(output_json["benchmarks"], self.watcher.eager_samples))

    def _accept(self, session: pytest.Session) -> None:
        """Let the baselines of all benchmarks of this run begin with it."""
        folder = replay.storage(self.config)
        runs = self.watcher.benchmarks
        if folder is None or not runs:
            self._worker_notes.append("--dynamo-accept: no benchmark was kept in this run")
            return
        try:
            taken = history.accept(folder, runs)
        except history.HistoryError as error:
            # Raised, it would keep pytest from telling which tests failed.
            self._worker_notes.append(f"--dynamo-accept: {error}")
            session.exitstatus = session.exitstatus or pytest.ExitCode.USAGE_ERROR
            return
        self._worker_notes += [f"{run.nodeid}: is the baseline of later runs" for run in taken]
        left = [run for run in runs if run not in taken]
        self._worker_notes += [f"{run.nodeid}: not accepted, it is {run.verdict or 'wrong'}" for run in left]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {}).get("dynamo", {})
        for data in output.get("imports", ()):
            self._add_import(Record.from_json(data))
        self._worker_notes += output.get("notes", ())
        self._environment = self._environment or output.get("environment")

    def _add_import(self, record: Record) -> None:
        # Every worker imports every module: the first one is kept.
        self.records.setdefault(record.nodeid, {}).setdefault("import", record)

    def _notes(self) -> list[str]:
        notes = list(self._worker_notes)
        hand_compiled = any(r.variant is None for phases in self.records.values() for r in phases.values())
        if hand_compiled and self.watcher.order_matters:
            why = "--dynamo-reset=never" if self.watcher.reset == "never" else "no cap is set, so compiled code is kept"
            notes.append(f"counts of tests that compile by themselves depend on their order: {why}")
        return notes

    def report(self) -> Report:
        for record in self.watcher.imports:
            self._add_import(record)
        records = [record for phases in self.records.values() for record in phases.values()]
        return Report.of(records, self._environment or environment(), self._notes())

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        report = self.report()
        if not report.records and not options.any_given(self.config):
            return
        terminalreporter.ensure_newline()
        terminalreporter.section("dynamo", "-")
        for line in terminal.summary_lines(report, self.config.get_verbosity()):
            terminalreporter.write_line(line)


def _outcome(report: pytest.TestReport) -> str | None:
    """Outcome of a test as its report of one phase tells it; None: this phase does not decide."""
    if report.when != "call":
        if report.outcome == "failed":
            return "error"
        return "skipped" if report.outcome == "skipped" else None
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.outcome == "passed" else "xfailed"
    return report.outcome
