from __future__ import annotations

import io
import logging
import logging.config
import threading
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pytest_dynamo import _torch
from pytest_dynamo.events import BreakEvent
from pytest_dynamo.events import CompileEvent
from pytest_dynamo.events import CompileResult
from pytest_dynamo.events import LimitEvent
from pytest_dynamo.events import ResetEvent
from pytest_dynamo.events import SkipEvent
from pytest_dynamo.observer import LoggerTap
from pytest_dynamo.observer import Observer
from pytest_dynamo.observer import quiet_trace
from pytest_dynamo.places import Places
from pytest_dynamo.summary import Group
from pytest_dynamo.summary import summarize


NAME = "pytest_dynamo.tests.tapped"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger(NAME)
    yield logger
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.disabled = False
    logger.propagate = True


@contextmanager
def tapped(level: int = logging.DEBUG, name: str = NAME) -> Iterator[list[str]]:
    seen: list[str] = []
    tap = LoggerTap(name, lambda record: seen.append(record.getMessage()), level)
    tap.install()
    try:
        yield seen
    finally:
        tap.remove()


@contextmanager
def observing() -> Iterator[Observer]:
    observer = Observer()
    observer.install()
    try:
        yield observer
    finally:
        observer.remove()


def breaking(x: Any) -> Any:
    import torch

    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


def plus_one(x: Any) -> Any:
    return x + 1


def compiled(fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    import torch

    return torch.compile(fn, backend="eager", **kwargs)  # type: ignore[no-any-return]


def told(events: list[Any]) -> list[Any]:
    """Events without those of frames of torch's own that Dynamo left alone."""
    return [event for event in events if not isinstance(event, SkipEvent)]


def ones(size: int = 3, dtype: str = "float32") -> Any:
    import torch

    return torch.ones(size, dtype=getattr(torch, dtype))


# -- a tap on a logger ----------------------------------------------------------------------------


def test_tap_sees_from_its_level_on(logger: logging.Logger) -> None:
    """Records from the level of the tap on are seen, whatever the logger's own level."""
    logger.setLevel(logging.CRITICAL)
    with tapped(logging.INFO) as seen:
        assert logger.isEnabledFor(logging.INFO)
        assert not logger.isEnabledFor(logging.DEBUG)
        logger.debug("debug")
        logger.info("info %s", 1)
        logger.error("error")
    assert seen == ["info 1", "error"]


def test_tap_prints_nothing(logger: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    """What the user did not enable reaches no handler, not even that of last resort."""
    stream = io.StringIO()
    logger.addHandler(logging.StreamHandler(stream))
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    with tapped() as seen:
        logger.debug("debug")
        logger.warning("warning")
        logger.error("error")
    assert seen == ["debug", "warning", "error"]
    assert stream.getvalue() == "error\n"
    assert capfd.readouterr() == ("", "")


def test_users_logging_still_arrives(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    """What the user enabled is handled as without the tap, filters included."""
    logger.addFilter(lambda record: "secret" not in record.getMessage())
    try:
        with tapped() as seen, caplog.at_level(logging.DEBUG, NAME):
            logger.debug("open")
            logger.debug("secret")
    finally:
        logger.filters.clear()
    assert seen == ["open", "secret"]
    assert [record.getMessage() for record in caplog.records] == ["open"]


def test_a_muted_tap_passes_nothing_on(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    """Records that the plugin itself provokes are not shown to the user."""
    seen: list[str] = []
    tap = LoggerTap(NAME, lambda record: seen.append(record.getMessage()), logging.DEBUG)
    tap.install()
    try:
        tap.muted = True
        logger.error("mine")
        tap.muted = False
        logger.error("yours")
    finally:
        tap.remove()
    assert seen == ["mine", "yours"]
    assert [record.getMessage() for record in caplog.records] == ["yours"]


def off_by_disable(logger: logging.Logger) -> None:
    logging.disable(logging.CRITICAL)


def off_by_dict_config(logger: logging.Logger) -> None:
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": True})
    assert logger.disabled


def off_by_attribute(logger: logging.Logger) -> None:
    logger.disabled = True


def off_by_root(logger: logging.Logger) -> None:
    logging.getLogger().setLevel(logging.CRITICAL)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def _logging_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, root.manager.disable
    loggers = {n: one.disabled for n, one in root.manager.loggerDict.items() if isinstance(one, logging.Logger)}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.disable(disabled)
    for name, before in loggers.items():
        logging.getLogger(name).disabled = before


OFF = [off_by_disable, off_by_dict_config, off_by_attribute, off_by_root]


@pytest.mark.usefixtures("_logging_put_back")
@pytest.mark.parametrize("switch_off", OFF)
@pytest.mark.parametrize("first", ["tap", "switch"])
def test_tap_survives_logging_switched_off(
    logger: logging.Logger, switch_off: Callable[[logging.Logger], None], first: str
) -> None:
    """However the user silences logging, before or after, the tap sees and the user does not."""
    stream = io.StringIO()
    if first == "switch":
        switch_off(logger)
    with tapped() as seen:
        if first == "tap":
            switch_off(logger)
        logger.addHandler(logging.StreamHandler(stream))
        logger.debug("quiet")
    assert seen == ["quiet"]
    assert stream.getvalue() == ""


def test_removed_taps_leave_no_trace(logger: logging.Logger) -> None:
    """Afterwards the logger has its own methods again and nothing else."""
    before = dict(vars(logger))
    with tapped():
        assert vars(logger).keys() - before.keys() == {"isEnabledFor", "handle"}
    assert {**vars(logger), "_cache": None} == {**before, "_cache": None}
    with tapped() as seen:
        pass
    logger.error("after")
    assert seen == []
    assert not logger.isEnabledFor(logging.DEBUG)


def test_taps_nest(logger: logging.Logger) -> None:
    """A tap over another one sees, passes on to it, and gives it back."""
    with tapped() as outer:
        with tapped() as inner:
            logger.debug("both")
        logger.debug("outer")
    assert (inner, outer) == (["both"], ["both", "outer"])
    assert not vars(logger).keys() & {"isEnabledFor", "handle"}


def test_taps_respect_methods_of_others(logger: logging.Logger) -> None:
    """Somebody else's method on the logger is used and put back."""
    handled: list[str] = []
    logger.handle = lambda record: handled.append(record.getMessage())  # type: ignore[method-assign, assignment]
    theirs = logger.handle
    try:
        with tapped() as seen:
            logger.debug("not enabled")
            logger.error("enabled")
        assert seen == ["not enabled", "enabled"]
        assert handled == ["enabled"]
        assert vars(logger)["handle"] is theirs
    finally:
        del logger.handle  # type: ignore[method-assign]


# -- the observer ---------------------------------------------------------------------------------


def test_observer_needs_no_torch_to_be_installed() -> None:
    """All taps are on loggers by name, and gone when the observer is."""
    names = [*_torch.BREAK_LOGGERS, _torch.CONVERT_LOGGER, *_torch.CUDAGRAPH_SKIP_LOGGERS]
    names.append(_torch.CUDAGRAPH_RECORD_LOGGER)

    def methods() -> list[dict[str, Any]]:
        found = [vars(logging.getLogger(name)) for name in names]
        return [{key: own.get(key) for key in ("handle", "isEnabledFor")} for own in found]

    before = methods()  # taps of the run that this test is part of, or none
    with observing():
        assert all(own["handle"] not in (None, old["handle"]) for own, old in zip(methods(), before))
    assert methods() == before


def test_observer_sees_a_compilation() -> None:
    """A break and the compilations around it arrive in the order in which they happened."""
    with observing() as observer:
        compiled(breaking)(ones())
        events = observer.take()
        assert observer.take() == []
    events = told(events)
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["CompileEvent", "BreakEvent", "CompileResult", "CompileEvent", "CompileResult"]
    first = events[0]
    assert isinstance(first, CompileEvent)
    assert (first.function, first.compile_id, first.frame, first.attempt) == ("breaking", "0/0", "0", 0)
    assert observer.errors == []


def test_observer_prints_nothing(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Watching a compilation writes nothing and fills no log."""
    with observing() as observer, quiet_trace():
        compiled(breaking)(ones())
        assert any(isinstance(event, BreakEvent) for event in observer.take())
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def set_logs_before(**logs: Any) -> Callable[[], None]:
    def switch() -> None:
        import torch

        torch._logging.set_logs(**logs)

    return switch


@pytest.fixture
def _torch_logs_put_back() -> Iterator[None]:
    yield
    import torch

    torch._logging.set_logs()


@pytest.mark.usefixtures("_logging_put_back", "_torch_logs_put_back")
@pytest.mark.parametrize(
    "switch",
    [
        set_logs_before(),
        set_logs_before(all=logging.ERROR),
        set_logs_before(dynamo=logging.CRITICAL),
        set_logs_before(recompiles=True),
        lambda: logging.disable(logging.CRITICAL),
        lambda: logging.config.dictConfig({"version": 1, "disable_existing_loggers": True}),
    ],
    ids=["set_logs", "all=ERROR", "dynamo=CRITICAL", "recompiles", "disable", "dictConfig"],
)
def test_observer_survives_the_users_logging(switch: Callable[[], None]) -> None:
    """Whatever a test does with logging, breaks and compilations are seen."""
    with observing() as observer:
        compiled(plus_one)(ones())
        switch()
        compiled(breaking)(ones())
        events = observer.take()
    assert sum(isinstance(event, BreakEvent) for event in events) == 1
    assert sum(isinstance(event, CompileEvent) for event in events) == 3


@pytest.mark.usefixtures("_torch_logs_put_back")
def test_users_graph_break_log_still_arrives() -> None:
    """Who asks torch for its log of graph breaks gets it."""
    import torch

    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(_torch.BREAK_LOGGERS[0])
    with observing() as observer:
        torch._logging.set_logs(graph_breaks=True)
        logger.addHandler(handler)
        try:
            compiled(breaking)(ones())
        finally:
            logger.removeHandler(handler)
        assert any(isinstance(event, BreakEvent) for event in observer.take())
    assert len(seen) == 1
    assert seen[0].startswith("Graph break in user code at ")


def test_events_of_threads() -> None:
    """What threads compile is seen, each compilation once, while others take events."""
    functions = [eval(f"lambda x: x + {n}") for n in range(6)]
    taken: list[Any] = []
    stop = threading.Event()
    with observing() as observer:

        def take() -> None:
            while not stop.is_set():
                taken.extend(observer.take())

        taker = threading.Thread(target=take)
        taker.start()
        threads = [threading.Thread(target=compiled(fn), args=(ones(),)) for fn in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        taker.join()
        taken += observer.take()
    assert sum(isinstance(event, CompileEvent) for event in taken) == 6
    assert sum(isinstance(event, CompileResult) for event in taken) == 6
    assert len({event.compile_id for event in taken if isinstance(event, CompileEvent)}) == 6
    assert observer.errors == []


def test_a_break_in_a_thread() -> None:
    """A break in a thread of the user's is told with its place."""
    with observing() as observer:
        thread = threading.Thread(target=compiled(breaking), args=(ones(),))
        thread.start()
        thread.join()
        (found,) = (event for event in observer.take() if isinstance(event, BreakEvent))
    assert (found.stack[-1].file, found.stack[-1].function) == (__file__, "breaking")
    assert found.id == "GB0025"


def test_an_error_in_a_parser_is_kept_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that can't be understood neither stops the compilation nor gets lost silently."""

    def fail(record: logging.LogRecord) -> None:
        raise KeyError("new words")

    monkeypatch.setattr(_torch, "parse_break", fail)
    with observing() as observer:
        assert compiled(breaking)(ones()).tolist() == [4.0, 4.0, 4.0]
        assert not any(isinstance(event, BreakEvent) for event in observer.take())
    assert observer.errors == [f"KeyError: 'new words' in a record of {_torch.BREAK_LOGGERS[0]}"]


def test_reset_is_an_event() -> None:
    """After a reset numbers of frames start again, and the events say so."""
    with observing() as observer:
        compiled(plus_one)(ones())
        observer.reset()
        compiled(plus_one)(ones())
        events = told(observer.take())
    assert [type(event) for event in events] == [CompileEvent, CompileResult, ResetEvent, CompileEvent, CompileResult]
    assert [event.compile_id for event in events if isinstance(event, CompileEvent)] == ["0/0", "0/0"]


def test_earlier_compilations_are_not_told() -> None:
    """What was compiled before the observer was installed is not told."""
    compiled(plus_one)(ones())
    with observing() as observer:
        assert observer.take() == []


# -- what torch keeps of compilations -------------------------------------------------------------


def counts(events: list[Any], root: str) -> tuple[int | None, int | None]:
    group = Group()
    group.events += events
    seen = summarize([(group, 0)], Places(root))
    return seen.frames, seen.recompile_count


def test_more_results_than_torch_keeps() -> None:
    """With far more compilations than the 64 results that torch keeps, each is counted once."""
    with observing() as observer:
        for number in range(70):
            compiled(eval(f"lambda x: x + {number}"))(ones())
        events = observer.take()
        assert observer.take() == []
    assert sum(isinstance(event, CompileResult) for event in events) == 70
    assert sum(isinstance(event, CompileEvent) for event in events) == 70


def test_an_overflow_between_two_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch dropped results before anybody read them, those that are left are read once."""
    import torch._dynamo.utils as utils

    reader = _torch.ResultReader()
    compiled(plus_one)(ones())
    assert len(reader.read()) >= 1
    (metric,) = utils.get_compilation_metrics()[-1:]
    kept = [type(metric)(**vars(metric)) for _ in range(64)]
    monkeypatch.setattr(utils, "get_compilation_metrics", lambda: list(kept))
    assert len(reader.read()) == 64
    assert reader.read() == []
    kept[:] = [*kept[1:], type(metric)(**vars(metric))]
    assert len(reader.read()) == 1


def test_a_test_that_clears_the_results_between_compilations() -> None:
    """Results that the user throws away after they were read are neither lost nor counted twice."""
    import torch._dynamo.utils as utils

    with observing() as observer:
        step = compiled(plus_one)
        step(ones())
        first = observer.take()
        utils.clear_compilation_metrics()
        step(ones(dtype="float64"))
        second = observer.take()
        utils.clear_compilation_metrics()
        assert observer.take() == []
    assert [sum(isinstance(e, CompileResult) for e in events) for events in (first, second)] == [1, 1]


def test_results_that_were_cleared_before_they_were_read(project: Any) -> None:
    """A compilation whose result is gone is not silently one less: the counts are not checked."""
    run = project.test(
        """
        import pytest, torch
        from torch._dynamo.utils import clear_compilation_metrics

        @pytest.mark.parametrize("clears", [True, False])
        def test_it(clears):
            step = torch.compile(lambda x: x + 1, backend="eager")
            step(torch.ones(2))
            step(torch.ones(2, dtype=torch.float64))
            if clears:
                clear_compilation_metrics()
        """,
        "--dynamo-max-recompiles=1",
    )
    run.result.assert_outcomes(passed=2)
    assert run.record("test_it[True]")["not_checked"] == [
        "counts may be too low: torch told the start of 1 compilations and no end"
    ]
    assert run.record("test_it[False]")["not_checked"] == []


# -- does this torch speak the language? ----------------------------------------------------------


def test_this_torch_gives_all_signals() -> None:
    """The installed torch tells everything that the plugin listens to."""
    with observing() as observer:
        signals = observer.check_signals()
        assert observer.check_signals() is signals
        assert observer.errors == []
    assert signals.missing() == ()


def test_the_probe_leaves_no_trace(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Events from before the probe are kept, those of the probe are not told, nothing is printed or counted."""
    import torch._dynamo.utils as utils

    with observing() as observer:
        with quiet_trace():
            compiled(breaking)(ones())
        before = {name: dict(counter) for name, counter in utils.counters.items() if counter}
        observer.check_signals()
        events = observer.take()
        after = {name: dict(counter) for name, counter in utils.counters.items() if counter}
    assert sum(isinstance(event, BreakEvent) for event in events) == 1
    assert sum(isinstance(event, CompileEvent) for event in events) == 2
    assert not any(isinstance(event, LimitEvent) for event in events)
    assert after == before
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_the_probe_works_again_in_one_process() -> None:
    """A second observer, as of a second inner run, hears all signals too."""
    for _ in range(2):
        with observing() as observer:
            assert observer.check_signals().missing() == ()


@pytest.mark.parametrize(
    "hostile",
    [
        {"suppress_errors": True},
        {"fail_on_recompile_limit_hit": True},
        {"error_on_recompile": True},
        {"recompile_limit": 1},
        {"disable": True},
    ],
    ids=lambda hostile: next(iter(hostile)),
)
def test_the_probe_works_under_any_configuration(hostile: dict[str, Any]) -> None:
    """The user's own configuration of Dynamo does not make its signals look missing."""
    import torch._dynamo

    with observing() as observer, torch._dynamo.config.patch(hostile):
        signals = observer.check_signals()
    if "disable" not in hostile:  # nothing is compiled then, and the session does not ask
        assert signals.missing() == ()
        assert observer.errors == []


MISSING = [
    ("BREAK_LOGGERS", ("torch._dynamo.gone.__graph_breaks",), ("breaks",)),
    ("CONVERT_LOGGER", "torch._dynamo.gone", ("compiles", "recompiles", "limit_hits")),
]


@pytest.mark.parametrize(("name", "value", "missing"), MISSING)
def test_missing_signals_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, missing: tuple[str, ...]
) -> None:
    """A logger that torch no longer has is noticed, and what it told is named."""
    monkeypatch.setattr(_torch, name, value)
    with observing() as observer:
        assert observer.check_signals().missing() == missing


SOURCE = """
import torch

def test_it():
    def f(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x
    step = torch.compile(f, backend="eager")
    step(torch.ones(2))
    step(torch.ones(2, dtype=torch.float64))
"""


@pytest.mark.parametrize(("name", "value", "missing"), MISSING)
def test_missing_signals_make_counts_not_checked(
    project: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, missing: tuple[str, ...]
) -> None:
    """Without a limit the test passes, its counts are null, and it is told that they are not known."""
    monkeypatch.setattr(_torch, name, value)
    run = project.test(SOURCE)
    run.result.assert_outcomes(passed=1)
    record = run.record("test_it")
    assert record["not_checked"] == [f"{one}: this torch is not understood, it does not tell them" for one in missing]
    for one in missing:
        if one != "compiles":
            assert record[one] is None
            assert run.report["totals"][one] is None
    run.result.stdout.fnmatch_lines([f"*, {len(missing)} not checked"])


@pytest.mark.parametrize(
    ("name", "value", "cap"),
    [
        ("BREAK_LOGGERS", ("torch._dynamo.gone.__graph_breaks",), "max_breaks"),
        ("CONVERT_LOGGER", "torch._dynamo.gone", "max_recompiles"),
    ],
)
def test_a_cap_on_a_missing_signal_is_refused(
    project: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, cap: str
) -> None:
    """A cap whose signal this torch lacks is a usage error: nothing must pass for want of a count."""
    monkeypatch.setattr(_torch, name, value)
    run = project.test(SOURCE, f"--dynamo-{cap.replace('_', '-')}=5", json_report=False)
    assert run.result.ret == pytest.ExitCode.USAGE_ERROR
    what = cap.removeprefix("max_")
    run.result.stderr.fnmatch_lines([f"ERROR: *{cap}: this torch is not understood, it does not tell {what}"])


def test_a_cap_on_a_signal_that_is_there_is_judged(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other caps go on judging when one signal is missing."""
    monkeypatch.setattr(_torch, "CONVERT_LOGGER", "torch._dynamo.gone")
    run = project.test(SOURCE, "--dynamo-max-breaks=0")
    run.result.assert_outcomes(failed=1)
    run.result.stdout.fnmatch_lines(["1 graph break, 0 allowed"])


# -- pytest's log capture -------------------------------------------------------------------------


def test_quiet_trace_takes_pytests_handlers_off_and_puts_them_back() -> None:
    """While code is compiled pytest does not make torch build its trace; other handlers stay."""
    from _pytest.logging import LogCaptureHandler

    logger = logging.getLogger(_torch.TRACE_LOGGER)
    before = logger.handlers[:]
    theirs, mine = LogCaptureHandler(), logging.NullHandler()
    logger.handlers += [theirs, mine]
    try:
        with quiet_trace():
            assert theirs not in logger.handlers
            assert mine in logger.handlers
        assert theirs in logger.handlers
        with pytest.raises(ValueError, match="mine"), quiet_trace():
            raise ValueError("mine")
        assert logger.handlers.count(theirs) == 1
    finally:
        logger.handlers[:] = before
