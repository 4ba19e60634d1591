"""Gives measured times to pytest-benchmark by what it documents: a timer, `pedantic`, `extra_info`.

pytest-benchmark reads its timer before and after each round. The timer that we put into its marker stands still,
but for what the replayed call adds to it: a sample that was measured before. So its table, JSON,
histogram and comparison show our samples, and its own machinery is left as it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_dynamo.fixtures import has_benchmark


class ReplayClock:
    """A clock that shows what it is told. Its name stands in pytest-benchmark's JSON as ``options.timer``."""

    __name__ = "dynamo_replay"

    def __init__(self) -> None:
        #: In seconds; None: nothing is replayed, and it shows the time as other clocks do.
        self.now: float | None = None

    def __call__(self) -> float:
        return time.perf_counter() if self.now is None else self.now


clock_key = pytest.StashKey[ReplayClock]()


def with_clock(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Put a clock into the marker ``benchmark`` of every test that uses ``compiled_benchmark``.

    Before pytest-benchmark makes its fixture. What the user's own marker says stays.
    """
    if not has_benchmark(config) or _codspeed(config):
        return
    for item in items:
        if "compiled_benchmark" in getattr(item, "fixturenames", ()):
            own = item.get_closest_marker("benchmark")
            item.stash[clock_key] = clock = ReplayClock()
            item.add_marker(pytest.mark.benchmark(**{**(own.kwargs if own else {}), "timer": clock}), append=False)


def _codspeed(config: pytest.Config) -> bool:
    """Whether pytest-codspeed replaces the fixture; its marker takes no timer."""
    plugin = config.pluginmanager.get_plugin("codspeed_plugin")
    return bool(getattr(plugin, "is_codspeed_enabled", False))


def feed(benchmark: Any, clock: ReplayClock, samples: Sequence[float], call: Callable[[], Any]) -> None:
    """Let pytest-benchmark measure the samples, in seconds, one a round.

    ``call`` is what runs if it calls once more than there are samples, as for cProfile.
    """
    left = iter(samples)

    def rewind() -> None:
        clock.now = 0.0  # so that what is stored is the sample, without rounding

    def replay() -> Any:
        sample = next(left, None)
        if sample is None:
            return call()
        clock.now = (clock.now or 0.0) + sample
        return None

    try:
        benchmark.pedantic(replay, setup=rewind, rounds=len(samples), iterations=1)
    finally:
        clock.now = None


class _KeptOutError(Exception):
    pass


def keep_out(benchmark: Any) -> None:
    """Use pytest-benchmark's fixture up without a sample: it keeps nothing, and does not warn that nobody used it."""
    if not hasattr(benchmark, "has_error"):
        return  # there is none, or it is another plugin's

    def fail() -> None:
        raise _KeptOutError

    with contextlib.suppress(_KeptOutError):
        benchmark.pedantic(fail)


def not_timed(config: pytest.Config, benchmark: Any, clock: ReplayClock | None) -> str | None:
    """Why nothing is to be timed in this run, or None."""
    if benchmark is None:
        return "pytest-benchmark is not active"
    if clock is None:
        return (
            "pytest-codspeed measures in its own way"
            if _codspeed(config)
            else "compiled_benchmark has to be an argument of the test"
        )
    if benchmark.disabled and config.getoption("benchmark_disable", False):
        return "--benchmark-disable was given"
    if _xdist(config):
        return "pytest-benchmark times nothing under pytest-xdist"  # of old ones that holds for the controller only
    if benchmark.disabled:
        return "pytest-benchmark is disabled"
    return None


def _xdist(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput") or config.getoption("dist", "no") != "no"


def storage(config: pytest.Config) -> Path | None:
    """The folder in which pytest-benchmark keeps runs; None: it keeps them elsewhere, or is not active."""
    given = config.getoption("benchmark_storage", None)
    if not isinstance(given, str):
        return None
    kind, separator, path = given.rpartition("://")
    if separator and kind != "file":
        return None
    # Tests may have changed the current folder.
    return Path(config.invocation_params.dir, path)


def saves(config: pytest.Config) -> bool:
    """Whether this run is kept in the storage."""
    return bool(config.getoption("benchmark_save", None) or config.getoption("benchmark_autosave", None))
