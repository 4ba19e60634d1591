"""Watches every test: what it compiles in each phase, and which of its expectations are broken."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest

from pytest_dynamo import _torch
from pytest_dynamo import isolation
from pytest_dynamo import options
from pytest_dynamo import terminal
from pytest_dynamo.errors import LimitError
from pytest_dynamo.fixtures import is_ours
from pytest_dynamo.fixtures import uses_ours
from pytest_dynamo.measurement import Run
from pytest_dynamo.observer import Observer
from pytest_dynamo.observer import quiet_trace
from pytest_dynamo.places import Places
from pytest_dynamo.progress import Progress
from pytest_dynamo.record import Finding
from pytest_dynamo.record import Record
from pytest_dynamo.settings import LIMIT_FIELDS
from pytest_dynamo.settings import Limits
from pytest_dynamo.settings import Settings
from pytest_dynamo.settings import SettingsError
from pytest_dynamo.testrun import TestRun
from pytest_dynamo.variants import Variant
from pytest_dynamo.verdict import judge


run_key = pytest.StashKey[TestRun]()
guard_key = pytest.StashKey[isolation.Guard]()

#: The compiler's signal that each cap is judged by.
_SIGNALS = {"max_breaks": "breaks", "max_recompiles": "recompiles", "max_cudagraph_skips": "cudagraph_skips"}


def is_xdist_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


class TestWatcher:
    """Hooks around the phases of each test. Its records travel on pytest's reports."""

    __test__ = False

    def __init__(self, config: pytest.Config, observer: Observer, progress: Progress) -> None:
        self.config = config
        self.base: Settings = options.settings_from_config(config)
        self.observer = observer
        self.progress = progress
        self.places = Places(config.rootpath)
        self.reset = options.option(config, "reset") or "test"
        self.search = options.search_from_config(config)
        self.caps = tuple(cap for cap in options.CAPS if getattr(self.base.limits, cap) is not None)
        #: Records of modules that compiled something while they were imported.
        self.imports: list[Record] = []
        #: What tests with `compiled_benchmark` measured.
        self.benchmarks: list[Run] = []
        #: Of eager code, in seconds, by test.
        self.eager_samples: dict[str, tuple[float, ...]] = {}
        #: Whether some test ran on what an earlier one had compiled.
        self.order_matters = False
        self._usage_error: str | None = None

    def refuse_switched_off(self) -> None:
        """Raise UsageError if there are caps and nothing can be compiled."""
        off = _torch.switched_off()
        if self.caps and off:
            cap = self.caps[0].replace("_", "-")
            raise pytest.UsageError(f"--dynamo-{cap}: compilation is switched off by {off}")

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
        run.search = self.search
        run.progress = self.progress
        run.keeps_compiled = self.reset == "never"
        run.relaxed = tuple(name for name in self.caps if _laxer(settings, self.base, name))
        return run

    def use_fixtures(self, item: pytest.Item, variant: Variant) -> None:
        """A fixture of ours is being set up for this test."""
        run = self.run_of(item)
        run.variant = variant
        if not run.uses_fixtures and self.reset == "test":
            # By getfixturevalue: at its setup nobody could know.
            run.take_loose()
            self.observer.reset()
        run.uses_fixtures = True
        _torch.load()
        info = getattr(item, "_fixtureinfo", None)
        ours = ("compiled", "compiled_benchmark")
        run.named = tuple(name for name in ours if info is not None and name in info.argnames and is_ours(info, name))
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
                self.imports.append(record)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        if not self.config.option.collectonly:
            self.refuse_switched_off()

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
        capped = run.settings.limits.any_given
        if self.reset == "test" and (run.uses_fixtures or (capped and self.observer.dirty)):
            self.observer.reset()
            run.take_away()
        elif self.reset == "never" or not (run.uses_fixtures or capped):
            self.order_matters = True
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
        if run.uses_fixtures or run.settings.limits.any_given:
            item.stash[guard_key] = isolation.Guard(everything=run.uses_fixtures)
        run.body_runs = True
        try:
            with quiet_trace():
                result = yield
        finally:
            run.body_runs = False
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
            self._check_signals(run, limits)
        seen = run.observation()
        run.check_left_gradients()
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

    def _check_signals(self, run: TestRun, limits: Limits) -> None:
        signals = self.observer.check_signals()
        for cap, signal in _SIGNALS.items():
            if getattr(limits, cap) is None or getattr(signals, signal):
                continue
            text = f"{cap}: this torch is not understood, it does not tell {signal}"
            if is_xdist_worker(self.config):
                run.findings.append(Finding("untold", None, None, text, None, None, None))
            else:
                self._usage_error = text

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
        if run is None or run.body_runs:
            return report  # the second: a report within the test, of pytest's subtests
        run.take_loose()
        if report.when == "call" and not run.judged:
            # The plugin came into use while the body ran, by getfixturevalue.
            self.judge(run)
            if report.outcome == "passed" and (run.parity_errors or run.findings):
                report.outcome = "failed"
                report.longrepr = _text_of(run)
        if report.when == "teardown":
            run.ended = True
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
        if run.benchmark is not None:
            assert run.entry is not None
            if (call.excinfo is not None or report.outcome == "failed") and not _only_slower(run, call):
                run.speed = None  # in the storage already: wrong is no baseline, however fast
            if report.when != "setup":
                run.benchmark["verdict"] = run.speed
            if report.when == "teardown":
                self.eager_samples[run.nodeid] = run.eager_samples
                self.benchmarks.append(replace(run.entry, verdict=run.benchmark["verdict"]))
        record = run.record(report.when, run.findings if report.when == "call" else ())
        run.begin_phase()
        report.dynamo = [] if record is None else [record.to_json()]  # type: ignore[attr-defined]
        return report


def _only_slower(run: TestRun, call: pytest.CallInfo[None]) -> bool:
    """Whether nothing is wrong with a test but its speed."""
    told = call.excinfo is not None and isinstance(call.excinfo.value, LimitError)
    return told and {finding.limit for finding in run.findings} == {"max_slowdown"}


def _laxer(settings: Settings, base: Settings, name: str) -> bool:
    own, cap = getattr(settings.limits, name), getattr(base.limits, name)
    return name in settings.marked and (own is None or own > cap)


def _text_of(run: TestRun, told: BaseException | None = None) -> str:
    """What was found in a test, but for what it failed with anyway."""
    parity = [str(error) for error in run.parity_errors[:1] if error is not told]
    return "\n".join([*parity, *terminal.finding_lines(run.findings)])
