"""The object that is registered when this plugin is in use: it watches tests and reports."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Generator
from contextlib import ExitStack
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_dynamo import _torch
from pytest_dynamo import isolation
from pytest_dynamo import jsonreport
from pytest_dynamo import options
from pytest_dynamo import terminal
from pytest_dynamo.errors import LimitError
from pytest_dynamo.fixtures import is_ours
from pytest_dynamo.fixtures import uses_ours
from pytest_dynamo.observer import Observer
from pytest_dynamo.observer import quiet_trace
from pytest_dynamo.places import Places
from pytest_dynamo.progress import Progress
from pytest_dynamo.record import Finding
from pytest_dynamo.record import Record
from pytest_dynamo.report import Report
from pytest_dynamo.settings import LIMIT_FIELDS
from pytest_dynamo.settings import Settings
from pytest_dynamo.settings import SettingsError
from pytest_dynamo.testrun import TestRun
from pytest_dynamo.variants import Variant
from pytest_dynamo.verdict import judge


run_key = pytest.StashKey[TestRun]()
guard_key = pytest.StashKey[isolation.Guard]()
session_key = pytest.StashKey["DynamoSession"]()


def is_xdist_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def activate(config: pytest.Config) -> DynamoSession:
    """Return the session of this run; register it and install the taps if there is none yet."""
    session = config.stash.get(session_key, None)
    if session is None:
        session = config.stash[session_key] = DynamoSession(config)
        config.pluginmanager.register(session, "dynamo_session")
        session.start()
    return session


def _signal_of(cap: str) -> str:
    return {"max_breaks": "breaks", "max_recompiles": "recompiles", "max_cudagraph_skips": "cudagraph_skips"}[cap]


class DynamoSession:
    """Watches every test of this process, keeps all records, writes reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.base: Settings = options.settings_from_config(config)
        self.observer = Observer()
        self.places = Places(config.rootpath)
        self.reset = options.option(config, "reset") or "test"
        self.caps = tuple(cap for cap in options.CAPS if getattr(self.base.limits, cap) is not None)
        #: JSON forms of records, by test and phase; of repeated tests the last.
        self.records: dict[str, dict[str, Record]] = {}
        self.progress = Progress(None)
        self._stack = ExitStack()
        self._order_matters = False
        self._outcomes: dict[str, str] = {}
        self._usage_error: str | None = None
        self._worker_notes: list[str] = []
        #: That of an xdist worker: the controller itself imports no torch.
        self._environment: dict[str, str | None] | None = None

    # -- life --

    def start(self) -> None:
        off = _torch.switched_off()
        if self.caps and off:
            raise pytest.UsageError(f"--dynamo-{self.caps[0].replace('_', '-')}: compilation is switched off by {off}")
        self.observer.install()
        self._stack.callback(self.observer.remove)
        self._stack.enter_context(isolation.without_profile_guided_state())
        if not is_xdist_worker(self.config):
            capture = self.config.pluginmanager.getplugin("capturemanager")
            with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
                self.progress = Progress.of_terminal()
            self._stack.callback(self.progress.close)

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        self._stack.close()

    def run_of(self, item: pytest.Item) -> TestRun:
        """State of a test; made at its setup, or now if the plugin came into use only then."""
        run = item.stash.get(run_key, None)
        if run is None:
            run = item.stash[run_key] = self._new_run(item)
        return run

    def _new_run(self, item: pytest.Item) -> TestRun:
        ours = uses_ours(item)
        try:
            settings = options.settings_for(item, self.base, ours=ours)
        except SettingsError as error:
            pytest.fail(f"@pytest.mark.compiled: {error}", pytrace=False)
        run = TestRun(item.nodeid, settings, self.observer, self.places)
        run.uses_fixtures = ours
        run.progress = self.progress
        run.relaxed = tuple(name for name in self.caps if _laxer(settings, self.base, name))
        return run

    def use_fixtures(self, item: pytest.Item, variant: Variant) -> None:
        """A fixture of ours is being set up for this test."""
        run = self.run_of(item)
        run.variant = variant
        run.uses_fixtures = True
        _torch.load()
        info = getattr(item, "_fixtureinfo", None)
        run.names_compiled = info is not None and "compiled" in info.argnames and is_ours(info, "compiled")
        if guard_key not in item.stash:
            item.stash[guard_key] = isolation.Guard(everything=True)

    # -- import --

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        report = yield
        events = self.observer.take()
        if events:
            run = TestRun(collector.nodeid, self.base, self.observer, self.places)
            run.loose.events += events
            record = run.record("import")
            if record is not None:
                record = replace(record, outcome="passed" if report.outcome == "passed" else "error")
                self.records.setdefault(record.nodeid, {})["import"] = record
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        off = _torch.switched_off()
        if self.caps and off and not self.config.option.collectonly:
            raise pytest.UsageError(f"--dynamo-{self.caps[0].replace('_', '-')}: compilation is switched off by {off}")

    # -- a test --

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        if self._usage_error is not None:
            # Not from within a test, where pytest would take it for the test's own failure.
            raise pytest.UsageError(self._usage_error)
        return result

    # All three wrap within pytest's own log capture, so that `quiet_trace` finds its handlers.

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.observer.take()
        run = item.stash[run_key] = self._new_run(item)
        _torch.switch_profile_guided_state_off()
        capped = any(value is not None for value in vars(run.settings.limits).values())
        if self.reset == "test" and (run.uses_fixtures or (capped and self.observer.dirty)):
            self.observer.reset()
            run.take_away()
        elif self.reset == "never" or not (run.uses_fixtures or capped):
            self._order_matters = True
        with quiet_trace():
            result = yield
        run.take_loose()
        return result

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        __tracebackhide__ = True
        run = self.run_of(item)
        run.take_loose()
        run.begin_phase()
        capped = any(value is not None for value in vars(run.settings.limits).values())
        if run.uses_fixtures or capped:
            item.stash[guard_key] = isolation.Guard(everything=run.uses_fixtures)
        try:
            with quiet_trace():
                result = yield
        finally:
            run.take_loose()
            if guard_key in item.stash:
                item.stash[guard_key].body_ended()
            self.judge(run)
        if run.parity_errors:
            raise run.parity_errors[0]
        if run.findings:
            raise LimitError("\n".join(terminal.finding_lines(run.findings)))
        return result

    def judge(self, run: TestRun) -> None:
        """Find out which expectations of a test are broken. Once for each test, after its body."""
        run.judged = True
        limits = run.settings.limits
        if _torch.dynamo() is not None and not _torch.switched_off():
            self._check_signals(limits)
        seen = run.observation()
        run.check_completeness(seen)
        must = run.uses_fixtures or limits.max_breaks is not None or limits.max_recompiles is not None
        off = _torch.switched_off()
        if off and not run.uses_fixtures and any(name in run.settings.marked for name in LIMIT_FIELDS):
            why = f"this test has limits, and compilation is switched off by {off}"
            run.findings.append(Finding("uncompiled", None, 0, why, None, None, None))
        run.findings += judge(
            seen,
            limits,
            uncompiled=run.uncompiled(),
            must_compile=must,
            allow_uncompiled=run.settings.allow_uncompiled,
        )
        run.findings += self._require_checked(run)

    def _check_signals(self, limits: Any) -> None:
        signals = self.observer.check_signals()
        missing = [
            cap for cap in options.CAPS if getattr(limits, cap) is not None and not getattr(signals, _signal_of(cap))
        ]
        if missing:
            self._usage_error = (
                f"max_{_signal_of(missing[0])}: this torch is not understood, it does not tell {_signal_of(missing[0])}"
            )

    def _require_checked(self, run: TestRun) -> list[Finding]:
        if not options.option(self.config, "require_checked"):
            return []
        return [Finding("not_checked", 0, len(run.not_checked), text, None, None, None) for text in run.not_checked]

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        with quiet_trace():
            result = yield
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        run = item.stash.get(run_key, None)
        if run is None:
            return report
        run.take_loose()
        if report.when == "call" and not run.judged:
            # The plugin came into use while the body ran, by getfixturevalue.
            self.judge(run)
            if report.outcome == "passed" and (run.parity_errors or run.findings):
                report.outcome = "failed"
                report.longrepr = _text_of(run)
        if report.when == "teardown":
            guard = item.stash.get(guard_key, None)
            if guard is not None:
                run.notes.update(dict.fromkeys(guard.restore()))
                del item.stash[guard_key]
        if report.when == "call" and call.excinfo is not None:
            error = call.excinfo.value
            if isinstance(error, LimitError):
                report.longrepr = "\n".join(terminal.finding_lines(run.findings)) or str(error)
            elif text := _text_of(run, told=error):
                report.sections.append(("pytest-dynamo", text))
        record = run.record(report.when, run.findings if report.when == "call" else ())
        run.begin_phase()
        report.dynamo = [] if record is None else [record.to_json()]  # type: ignore[attr-defined]
        return report

    # -- all tests --

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
    def pytest_sessionfinish(self) -> None:
        if is_xdist_worker(self.config):
            imports = [r.to_json() for phases in self.records.values() for p, r in phases.items() if p == "import"]
            output = {"imports": imports, "notes": self._notes(), "environment": environment()}
            self.config.workeroutput["dynamo"] = output  # type: ignore[attr-defined]
            return
        path = options.json_path(self.config)
        if path is not None:
            jsonreport.write(self.report(), path)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {}).get("dynamo", {})
        for data in output.get("imports", ()):
            record = Record.from_json(data)
            self.records.setdefault(record.nodeid, {}).setdefault("import", record)
        self._worker_notes += output.get("notes", ())
        self._environment = self._environment or output.get("environment")

    def _notes(self) -> list[str]:
        notes = list(self._worker_notes)
        hand_compiled = any(r.variant is None for phases in self.records.values() for r in phases.values())
        if hand_compiled and self._order_matters:
            why = "--dynamo-reset=never" if self.reset == "never" else "no cap is set, so compiled code is kept"
            notes.append(f"counts of tests that compile by themselves depend on their order: {why}")
        return notes

    def report(self) -> Report:
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


def _laxer(settings: Settings, base: Settings, name: str) -> bool:
    own, cap = getattr(settings.limits, name), getattr(base.limits, name)
    return name in settings.marked and (own is None or own > cap)


def _text_of(run: TestRun, told: BaseException | None = None) -> str:
    """What was found in a test, but for what it failed with anyway."""
    parity = [str(error) for error in run.parity_errors[:1] if error is not told]
    return "\n".join([*parity, *terminal.finding_lines(run.findings)])


def _outcome(report: pytest.TestReport) -> str | None:
    """Outcome of a test as its report of one phase tells it; None: this phase does not decide."""
    if report.when != "call":
        if report.outcome == "failed":
            return "error"
        return "skipped" if report.outcome == "skipped" else None
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.outcome == "passed" else "xfailed"
    return report.outcome


def environment() -> dict[str, str | None]:
    """Versions and hardware, without initialising CUDA."""
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_initialized() else None
    return {
        "torch": str(torch.__version__) if torch is not None else _version("torch"),
        "triton": _version("triton"),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if torch is not None else None,
        "gpu": gpu,
        "driver": _driver() if gpu is not None else None,
        "pytest": pytest.__version__,
        "pytest_dynamo": _version("pytest-dynamo"),
    }


def _driver() -> str | None:
    """Version of the NVIDIA driver as Linux tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
