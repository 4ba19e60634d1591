"""How measured samples get into pytest-benchmark, and why there may be none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_dynamo import replay
from pytest_dynamo.replay import ReplayClock


class Pedantic:
    """What pytest-benchmark's fixture does with a target: a clock is read before and after each round."""

    def __init__(self, clock: ReplayClock, extra_calls: int = 0) -> None:
        self.clock = clock
        self.extra_calls = extra_calls
        self.has_error = False
        self.samples: list[float] = []
        self.results: list[Any] = []

    def pedantic(self, target: Any, setup: Any = lambda: None, rounds: int = 1, iterations: int = 1) -> Any:
        assert iterations == 1
        for _ in range(rounds):
            assert setup() is None
            before = self.clock()
            result = target()
            self.samples.append(self.clock() - before)
        for _ in range(self.extra_calls):
            self.results.append(target())
        return result


def configuration(plugins: Any = ("benchmark",), here: Path | None = None, **given: Any) -> Any:
    """A pytest.Config: plugins by name, and values of options."""
    plugins = plugins if isinstance(plugins, dict) else dict.fromkeys(plugins)
    manager = SimpleNamespace(hasplugin=plugins.__contains__, get_plugin=plugins.get)
    invocation = SimpleNamespace(dir=here or Path("/here"))
    return SimpleNamespace(pluginmanager=manager, getoption=given.get, invocation_params=invocation)


# -- feeding --------------------------------------------------------------------------------------


def test_samples_are_seen_bit_by_bit() -> None:
    """Sums of the small and the large would round: each round begins at zero."""
    samples = [1e-9, 1e9, 0.1 + 0.2, 1 / 3, 5e-324]
    clock = ReplayClock()
    benchmark = Pedantic(clock)
    replay.feed(benchmark, clock, samples, lambda: pytest.fail("called"))
    assert benchmark.samples == samples


def test_a_call_beyond_the_samples_is_a_real_one() -> None:
    clock = ReplayClock()
    benchmark = Pedantic(clock, extra_calls=2)
    replay.feed(benchmark, clock, [1.0, 2.0], lambda: "real")
    assert benchmark.samples == [1.0, 2.0]
    assert benchmark.results == ["real", "real"]
    assert clock() > 2.0  # nothing is replayed any more: it is a clock as others are


def test_the_clock_has_a_name() -> None:
    assert ReplayClock().__name__ == "dynamo_replay"


def test_kept_out_the_fixture_is_used_up() -> None:
    benchmark = Pedantic(ReplayClock())
    replay.keep_out(benchmark)
    assert benchmark.samples == []
    replay.keep_out(None)
    replay.keep_out(SimpleNamespace(pedantic=lambda target: pytest.fail("another plugin measures it")))


# -- markers --------------------------------------------------------------------------------------


class Item:
    def __init__(self, *fixtures: str, **own: Any) -> None:
        self.fixturenames = fixtures
        self.stash = pytest.Stash()
        self.own_markers = [pytest.mark.benchmark(**own).mark] if own else []

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.own_markers if mark.name == name), None)

    def add_marker(self, marker: Any, append: bool = True) -> None:
        self.own_markers.insert(len(self.own_markers) if append else 0, marker.mark)


def test_every_test_has_its_own_clock() -> None:
    """What a marker of the user says stays; tests without the fixture are left alone."""
    plain, marked = Item("compiled_benchmark", "benchmark"), Item("compiled_benchmark", group="mine", timer=float)
    other, foreign = Item("benchmark"), object()
    replay.with_clock(configuration(), [plain, marked, other, foreign])  # type: ignore[list-item]
    clocks = [item.stash[replay.clock_key] for item in (plain, marked)]
    assert clocks[0] is not clocks[1]
    assert plain.get_closest_marker("benchmark").kwargs == {"timer": clocks[0]}
    assert marked.get_closest_marker("benchmark").kwargs == {"group": "mine", "timer": clocks[1]}
    assert other.own_markers == []


@pytest.mark.parametrize(
    ("plugins", "clocks"),
    [
        ({}, 0),
        ({"benchmark": None}, 1),
        ({"pytest_benchmark.plugin": None}, 1),
        ({"benchmark": None, "codspeed_plugin": SimpleNamespace(is_codspeed_enabled=True)}, 0),
        ({"benchmark": None, "codspeed_plugin": SimpleNamespace(is_codspeed_enabled=False)}, 1),
    ],
)
def test_no_clock_where_no_one_takes_it(plugins: dict, clocks: int) -> None:
    item = Item("compiled_benchmark")
    replay.with_clock(configuration(plugins), [item])  # type: ignore[list-item]
    assert len(item.own_markers) == clocks


# -- reasons --------------------------------------------------------------------------------------

CODSPEED = {"codspeed_plugin": SimpleNamespace(is_codspeed_enabled=True)}


@pytest.mark.parametrize(
    ("config", "disabled", "clock", "why"),
    [
        (configuration(), False, True, None),
        (configuration(), None, True, "pytest-benchmark is not active"),
        (configuration(CODSPEED), False, False, "pytest-codspeed measures in its own way"),
        (configuration(), False, False, "compiled_benchmark has to be an argument of the test"),
        (configuration(benchmark_disable=True), True, True, "--benchmark-disable was given"),
        (configuration(dist="load"), True, True, "pytest-benchmark times nothing under pytest-xdist"),
        (configuration(dist="load"), False, True, "pytest-benchmark times nothing under pytest-xdist"),
        (configuration(benchmark_disable=True), False, True, None),  # and --benchmark-enable
        (configuration(dist="no"), True, True, "pytest-benchmark is disabled"),
    ],
)
def test_why_nothing_is_timed(config: Any, disabled: bool | None, clock: bool, why: str | None) -> None:
    benchmark = None if disabled is None else SimpleNamespace(disabled=disabled)
    assert replay.not_timed(config, benchmark, ReplayClock() if clock else None) == why


def test_a_worker_of_xdist_is_told_as_such() -> None:
    config = configuration()
    config.workerinput = {}
    why = replay.not_timed(config, SimpleNamespace(disabled=True), ReplayClock())
    assert why == "pytest-benchmark times nothing under pytest-xdist"


# -- the storage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ("file://./.benchmarks", "/here/.benchmarks"),
        ("file:///kept/runs", "/kept/runs"),
        ("kept", "/here/kept"),
        ("elasticsearch+https://host:1/a/b", None),
        (None, None),
    ],
)
def test_where_runs_are_kept(given: str | None, folder: str | None) -> None:
    found = replay.storage(configuration(benchmark_storage=given))
    assert found == (None if folder is None else Path(folder))


def test_whether_a_run_is_kept() -> None:
    assert replay.saves(configuration(benchmark_save="name"))
    assert replay.saves(configuration(benchmark_autosave="unversioned"))
    assert not replay.saves(configuration(benchmark_json="file"))
