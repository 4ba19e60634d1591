"""The protocol of timing, with a clock that only moves when the timed code moves it; and both real clocks."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_dynamo import clocks
from pytest_dynamo import profiling
from pytest_dynamo import timing
from pytest_dynamo.clocks import CpuClock
from pytest_dynamo.clocks import CudaClock
from pytest_dynamo.timing import CompiledWhileTiming
from pytest_dynamo.timing import Plan
from pytest_dynamo.timing import interval
from pytest_dynamo.timing import measure


MS = 1e-3
#: No more than the passes that are always made, and one call in a sample.
QUICK = Plan(rounds=6, min_rounds=6, warm_seconds=0.0, sample_seconds=0.0)
#: Calls of each side in the warm-up of QUICK.
WARM = timing.PASSES


class FakeClock:
    """Moves when told to. ``log``: what happened, in order. ``queues``: a device takes ``part`` of the host's time."""

    def __init__(self, *, queues: bool = False, part: float = 1.0) -> None:
        self.time = 0.0
        self.log: list[str] = []
        self.queues = queues
        self._part = part
        self._began = self._sum = 0.0

    def work(self, name: str, seconds: float) -> None:
        self.log.append(name)
        self.time += seconds

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        return lambda: self.work(name, seconds)

    def now(self) -> float:
        return self.time

    def flush(self) -> None:
        self.work("flush", 1.0)  # would be seen in any sample that holds it

    def start(self) -> None:
        self.log.append("start")
        self._began = self.time

    def stop(self) -> None:
        self.log.append("stop")
        self._sum += self.time - self._began

    def elapsed(self) -> float:
        self.log.append("elapsed")
        found, self._sum = self._sum * self._part, 0.0
        return found

    def calls(self, *names: str) -> list[str]:
        return [entry for entry in self.log if entry in names]


def nothing() -> int:
    return 0


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-9)


# -- samples --------------------------------------------------------------------------------------


def test_samples_and_speedup_are_what_the_clock_says() -> None:
    """Every sample is kept, and the speed-up is the median of the quotients of the rounds."""
    clock = FakeClock()
    eager = iter([9, 9, 9, 2, 4, 6, 8, 10, 12])
    compiled = iter([9, 9, 9, 1, 1, 1, 1, 1, 1])
    found = measure(
        lambda: clock.work("e", next(eager) * MS),
        lambda: clock.work("c", next(compiled) * MS),
        clock,
        QUICK,
        compilations=nothing,
    )
    assert found.eager.time == tuple(near(value * MS) for value in (2, 4, 6, 8, 10, 12))
    assert found.compiled.time == (near(MS),) * 6
    assert found.eager.host is found.eager.host_times is None
    assert found.eager.times.median == near(9 * MS - 2 * MS)
    assert found.eager.times.n == 6
    assert found.speedup == near(math.sqrt(6 * 8))
    assert 2 <= found.speedup_low < found.speedup < found.speedup_high <= 12


def test_equal_samples_have_an_interval_without_width() -> None:
    clock = FakeClock()
    found = measure(clock.call("e", 3 * MS), clock.call("c", 2 * MS), clock, QUICK, compilations=nothing)
    assert (found.speedup_low, found.speedup, found.speedup_high) == (near(1.5), near(1.5), near(1.5))


def test_the_host_is_timed_beside_the_device() -> None:
    """In the calls before the sample, in which it need not wait."""
    clock = FakeClock(queues=True, part=2.0)
    plan = Plan(rounds=6, min_rounds=6, warm_seconds=0.0, sample_seconds=0.0)
    found = measure(clock.call("e", 3 * MS), clock.call("c", 1 * MS), clock, plan, compilations=nothing)
    assert found.eager.host == (near(3 * MS),) * 6
    assert found.compiled.host_times is not None
    assert found.compiled.host_times.median == near(1 * MS)
    assert found.eager.time == (near(6 * MS),) * 6
    assert found.compiled.time == (near(2 * MS),) * 6


def test_what_the_host_needs_is_the_time_where_that_is_more() -> None:
    """The device began a call long after the host, being busy with earlier ones: its time is too short."""
    clock = FakeClock(queues=True, part=0.1)
    found = measure(clock.call("e", 3 * MS), clock.call("c", 1 * MS), clock, QUICK, compilations=nothing)
    assert found.eager.time == found.eager.host == (near(3 * MS),) * 6
    assert found.compiled.time == found.compiled.host == (near(1 * MS),) * 6


def test_host_samples_are_per_call_too() -> None:
    clock = FakeClock(queues=True, part=2.0)
    plan = Plan(rounds=2, warm_seconds=0.0)
    found = measure(clock.call("e", 10e-6), clock.call("c", 10e-6), clock, plan, compilations=nothing)
    assert found.eager.calls == 10
    assert found.eager.host == (near(10e-6),) * 2
    assert found.eager.time == (near(20e-6),) * 2


def test_code_that_waits_for_the_device_does_not_wait_for_the_cache_to_be_cold() -> None:
    """As with ``.item()``: the host's time is that of calls before which nothing is flushed."""
    clock = FakeClock(queues=True)
    waits: list[float] = []

    def flush() -> None:
        waits.append(1.0)

    def call() -> None:
        clock.work("c", 50e-6 + (waits.pop() if waits else 0.0))

    clock.flush = flush  # type: ignore[method-assign]
    found = measure(call, call, clock, Plan(rounds=2, warm_seconds=0.0), compilations=nothing)
    assert found.compiled.host == (near(50e-6),) * 2


def test_canaries_are_timed_in_every_round() -> None:
    clock = FakeClock()
    canaries = {"matmul": clock.call("m", 0.25 * MS), "copy": clock.call("y", 0.5 * MS)}
    found = measure(
        clock.call("e", MS), clock.call("c", MS), clock, QUICK, compilations=nothing, canaries=canaries
    ).canaries
    assert list(found) == ["matmul", "copy"]
    assert found["matmul"].time == (near(0.25 * MS),) * 6
    assert found["copy"].times.median == near(0.5 * MS)


def test_ratios_are_those_of_the_rounds() -> None:
    """A machine that is three times slower in some rounds changes no ratio, though it changes that of the medians."""
    clock = FakeClock()
    slow = iter([False] * WARM * 3 + [False, True, True, True, True, True, False, False, False] + [False] * 9)
    work = lambda seconds: lambda: clock.work("w", seconds * (3 if next(slow) else 1))  # noqa: E731
    canaries = {"copy": work(0.5 * MS)}
    found = measure(work(4 * MS), work(2 * MS), clock, QUICK, compilations=nothing, canaries=canaries)
    assert found.compiled.times.median / found.canaries["copy"].times.median == near(4.0)
    assert found.ratios == {"eager": near(0.5), "copy": near(4.0)}


def test_of_the_host_are_its_ratios_to_eager_and_to_fixed_launches() -> None:
    """And no others: what a copy takes is the device's affair."""
    clock = FakeClock(queues=True, part=3.0)  # a device that takes three times as long as the host
    canaries = {"copy": clock.call("y", 0.5 * MS), "launches": clock.call("l", 0.2 * MS)}
    plan = Plan(rounds=6, min_rounds=6, warm_seconds=0.0, sample_seconds=0.0, l2="warm")
    found = measure(
        clock.call("e", 4 * MS), clock.call("c", 2 * MS), clock, plan, compilations=nothing, canaries=canaries
    )
    assert found.compiled.time == (near(6 * MS),) * 6
    assert found.compiled.host == (near(2 * MS),) * 6
    changed = replace(
        found,
        compiled=replace(found.compiled, host=(3 * MS,) * 6),
        canaries={**found.canaries, "copy": replace(found.canaries["copy"], host=(7 * MS,) * 6)},
    )
    assert changed.ratios == {"eager": near(3 / 4), "copy": near(6 / 1.5), "launches": near(3 / 0.2)}


# -- rounds ---------------------------------------------------------------------------------------


def test_the_order_alternates() -> None:
    """Eager first, then compiled first; the canaries always last."""
    clock = FakeClock()
    measure(
        clock.call("e", MS),
        clock.call("c", MS),
        clock,
        QUICK,
        compilations=nothing,
        canaries={"m": clock.call("m", MS)},
    )
    order = "".join(clock.calls("e", "c", "m"))
    assert order == "ecm" * WARM + "ecmcem" * 3


def test_drift_cancels() -> None:
    """A machine that gets slower all the time does not favour the side that comes first."""
    clock = FakeClock()
    slower = count()
    work = lambda: clock.work("w", 5 * MS + next(slower) * MS)  # noqa: E731
    drifting = measure(work, work, clock, Plan(20, 20, warm_seconds=0, sample_seconds=0), compilations=nothing)
    assert drifting.speedup == pytest.approx(1, abs=0.002)
    one_order = [a / b for a, b in zip(drifting.eager.time[::2], drifting.compiled.time[::2])]
    assert statistics.median(one_order) < 0.98  # what it would be without


def test_rounds_end_with_the_time() -> None:
    clock = FakeClock()
    plan = Plan(rounds=50, min_rounds=4, seconds=0.095, warm_seconds=0.0)
    found = measure(clock.call("e", 6 * MS), clock.call("c", 4 * MS), clock, plan, compilations=nothing)
    assert len(found.eager.time) == len(found.compiled.time) == 10


def test_slow_code_gets_the_fewest_rounds() -> None:
    clock = FakeClock()
    plan = Plan(rounds=50, min_rounds=4, seconds=0.1, warm_seconds=0.0)
    found = measure(clock.call("e", 6.0), clock.call("c", 4.0), clock, plan, compilations=nothing)
    assert len(found.eager.time) == 4


def test_the_warm_up_lasts_until_clocks_have_ramped() -> None:
    clock = FakeClock()
    plan = Plan(rounds=1, min_rounds=1, warm_seconds=0.295, sample_seconds=0.0, l2="warm")
    measure(clock.call("e", 6 * MS), clock.call("c", 4 * MS), clock, plan, compilations=nothing)
    assert len(clock.calls("e")) == 30 + 1


# -- calls in a sample ----------------------------------------------------------------------------


def test_calls_are_put_together_for_each_side() -> None:
    """As many as last 200 µs, and the samples are per call again."""
    clock = FakeClock()
    plan = Plan(rounds=2, warm_seconds=0.0, l2="warm")
    found = measure(
        clock.call("e", 20e-6),
        clock.call("c", 30e-6),
        clock,
        plan,
        compilations=nothing,
        canaries={"m": clock.call("m", 250e-6)},
    )
    assert (found.eager.calls, found.compiled.calls, found.canaries["m"].calls) == (10, 7, 1)
    assert found.eager.time == (near(20e-6),) * 2
    assert found.speedup == near(20 / 30)


def test_calls_that_take_no_time_are_not_put_together_for_ever() -> None:
    clock = FakeClock()
    plan = Plan(rounds=2, warm_seconds=0.0)
    found = measure(clock.call("e", 0.0), clock.call("c", 0.0), clock, plan, compilations=nothing)
    assert found.eager.calls == timing.CALLS
    assert found.speedup == 1


def test_a_call_that_compiles_does_not_count_for_that() -> None:
    """The first call takes long: the second tells how many are needed."""
    clock = FakeClock()
    seconds = iter([5.0])
    found = measure(
        clock.call("e", MS),
        lambda: clock.work("c", next(seconds, 50e-6)),
        clock,
        Plan(rounds=2, warm_seconds=0.0),
        compilations=nothing,
    )
    assert found.compiled.calls == 4


# -- setup, cache, results ------------------------------------------------------------------------


def test_setup_runs_before_each_call_and_is_not_timed() -> None:
    clock = FakeClock()
    plan = Plan(rounds=4, warm_seconds=0.0, l2="warm")
    found = measure(
        clock.call("e", 2e-6),
        clock.call("c", 1e-6),
        clock,
        plan,
        compilations=nothing,
        setup=clock.call("setup", 1.0),
        canaries={"m": clock.call("m", MS)},
    )
    assert found.eager.time == (near(2e-6),) * 4
    assert found.eager.calls == found.compiled.calls == 1  # or the second call would find what the first left
    side = lambda name: ["setup", "start", name, "stop", "elapsed"]  # noqa: E731
    canary = ["start", "m", "stop", "elapsed"]
    assert clock.log[: 2 * 5 + 4] == [*side("e"), *side("c"), *canary]
    assert clock.log[-(2 * 5 + 4) :] == [*side("c"), *side("e"), *canary]


def test_calls_before_a_sample_keep_a_device_with_a_queue_busy() -> None:
    """So that it need not wait for the first launch; they are not timed, and have a setup of their own."""
    clock = FakeClock(queues=True)
    plan = Plan(rounds=2, min_rounds=2, warm_seconds=0.0, sample_seconds=0.0, l2="warm")
    found = measure(
        clock.call("e", 30 * MS),
        clock.call("c", 10 * MS),
        clock,
        plan,
        compilations=nothing,
        setup=clock.call("s", 1.0),
    )
    assert found.eager.time == (near(30 * MS),) * 2
    assert found.compiled.time == (near(10 * MS),) * 2
    eager = ["s", "e", "s", "start", "e", "stop", "elapsed"]  # such long calls hardly feel it
    compiled = ["s", "c", "s", "c", "s", "start", "c", "stop", "elapsed"]
    assert clock.log[-2 * (7 + 9) :] == [*eager, *compiled, *compiled, *eager]


def test_a_device_without_a_queue_needs_no_calls_before_a_sample() -> None:
    clock = FakeClock()
    measure(clock.call("e", MS), clock.call("c", MS), clock, QUICK, compilations=nothing)
    assert clock.calls("e") == ["e"] * (WARM + 6)


def test_the_cache_is_flushed_before_short_calls_only() -> None:
    """Outside of them: the fake flush takes a second. The first pass can't know what is short."""
    clock = FakeClock(queues=True)
    found = measure(clock.call("e", 5 * MS), clock.call("c", MS), clock, QUICK, compilations=nothing)
    assert found.compiled.time == (near(MS),) * 6
    rounds = clock.log[-6 * (6 + 7) :]
    assert rounds[:6] == ["e", "e", "start", "e", "stop", "elapsed"]
    assert rounds[6:13] == ["c", "c", "flush", "start", "c", "stop", "elapsed"]
    assert clock.calls("flush") == ["flush"] * (1 + WARM + 6)


def test_the_cache_is_flushed_before_each_call_of_a_sample() -> None:
    """Or all but the first would find their data in it."""
    clock = FakeClock(queues=True)
    plan = Plan(rounds=2, warm_seconds=0.0)
    found = measure(clock.call("e", 50e-6), clock.call("c", 1e-6), clock, plan, compilations=nothing)
    assert (found.eager.calls, found.compiled.calls) == (4, timing.COLD_CALLS)
    assert found.eager.time == (near(50e-6),) * 2
    assert found.compiled.time == (near(1e-6),) * 2
    last = clock.log[-(8 + 4 * 4 + 1) :]
    assert last == [*["e"] * 8, *["flush", "start", "e", "stop"] * 4, "elapsed"]


@pytest.mark.parametrize(("queues", "l2"), [(True, "warm"), (False, "cold")])
def test_a_cache_is_left_alone(queues: bool, l2: str) -> None:
    """Where that is wanted, and on a CPU."""
    clock = FakeClock(queues=queues)
    plan = Plan(rounds=2, warm_seconds=0.0, l2=l2)
    found = measure(clock.call("e", 50e-6), clock.call("c", MS), clock, plan, compilations=nothing)
    assert "flush" not in clock.log
    assert found.eager.calls == 4
    assert clock.log[-7:] == ["start", "e", "e", "e", "e", "stop", "elapsed"]


class Result:
    """Takes long to be freed."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def __del__(self) -> None:
        self._clock.work("free", 1.0)


def test_freeing_is_not_timed_and_nothing_outlives_its_sample() -> None:
    clock = FakeClock()

    def call() -> Result:
        clock.work("e", MS)
        return Result(clock)

    found = measure(call, clock.call("c", MS), clock, QUICK, compilations=nothing)
    assert found.eager.time == (near(MS),) * 6
    assert "".join(entry[0] for entry in clock.calls("e", "stop", "free", "start")[:5]) == "sesfs"
    assert len(clock.calls("free")) == WARM + 6


def test_a_result_is_gone_before_the_next_call_of_its_sample() -> None:
    """CUDA graphs can't replay into results that are alive."""
    clock = FakeClock()
    alive: list[int] = []
    results = set()

    class Counted:
        def __init__(self) -> None:
            results.add(id(self))

        def __del__(self) -> None:
            results.discard(id(self))

    def call() -> Counted:
        alive.append(len(results))
        clock.work("e", 50e-6)
        return Counted()

    found = measure(call, clock.call("c", MS), clock, Plan(rounds=2, warm_seconds=0.0), compilations=nothing)
    assert found.eager.calls == 4
    assert set(alive) == {0}


# -- compilations ---------------------------------------------------------------------------------


class Compiler:
    """Counts what it compiles."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self) -> int:
        return self.compiled


@pytest.mark.parametrize(("side", "number"), [("eager", 1), ("compiled", 1), ("compiled", 4)])
def test_a_compilation_in_a_round_is_an_error(side: str, number: int) -> None:
    clock, compiler, calls = FakeClock(), Compiler(), count(1)

    def recompiles() -> None:
        clock.work("x", MS)
        compiler.compiled += next(calls) in (1, WARM + number)

    both = {"eager": clock.call("e", MS), "compiled": clock.call("c", MS)} | {side: recompiles}
    with pytest.raises(CompiledWhileTiming, match=rf"^the {side} call compiled in timed round {number}$"):
        measure(both["eager"], both["compiled"], clock, QUICK, compilations=compiler)


def test_code_that_compiles_in_every_call_is_given_up() -> None:
    clock, compiler = FakeClock(), Compiler()

    def compiled() -> None:
        compiler.compiled += 1
        clock.work("c", MS)

    with pytest.raises(CompiledWhileTiming, match=r"^compiles in every call: each of 20 rounds of the warm-up did$"):
        measure(clock.call("e", MS), compiled, clock, QUICK, compilations=compiler)
    assert len(clock.calls("c")) == 20


def test_the_warm_up_goes_on_while_something_is_compiled() -> None:
    """Nineteen compilations are no reason to give up, and none of their calls is a sample."""
    clock, compiler, left = FakeClock(), Compiler(), iter(range(19))

    def compiled() -> None:
        compiles = next(left, None) is not None
        compiler.compiled += compiles
        clock.work("c", 1.0 if compiles else MS)

    found = measure(clock.call("e", MS), compiled, clock, QUICK, compilations=compiler)
    assert found.compiled.time == (near(MS),) * 6
    assert len(clock.calls("c")) == 20 + 6


# -- garbage collection, exceptions ---------------------------------------------------------------


@pytest.fixture
def _collecting() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.usefixtures("_collecting")
@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_in_rounds(enabled: bool) -> None:
    clock, seen = FakeClock(), []

    def call() -> None:
        seen.append(gc.isenabled())
        clock.work("e", MS)

    (gc.enable if enabled else gc.disable)()
    measure(call, clock.call("c", MS), clock, QUICK, compilations=nothing)
    assert seen == [enabled] * WARM + [False] * 6
    assert gc.isenabled() is enabled


@pytest.mark.usefixtures("_collecting")
@pytest.mark.parametrize("calls", [0, WARM - 1, WARM, WARM + 2])
def test_exceptions_come_through(calls: int) -> None:
    """From the warm-up and from a round; garbage is collected as before."""
    clock, left = FakeClock(), iter(range(calls))

    def call() -> None:
        if next(left, None) is None:
            raise OSError("planted")
        clock.work("c", MS)

    with pytest.raises(OSError, match="planted"):
        measure(clock.call("e", MS), call, clock, QUICK, compilations=nothing)
    assert gc.isenabled()


@pytest.mark.usefixtures("_collecting")
def test_cycles_that_calls_leave_are_freed_between_rounds() -> None:
    clock = FakeClock()

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            clock.log.append("free")

    def call() -> None:
        Cycle()
        clock.work("e", MS)

    measure(call, clock.call("c", MS), clock, QUICK, compilations=nothing)
    assert len(clock.calls("free")) == WARM + 6


# -- plan, interval -------------------------------------------------------------------------------


def test_a_plan_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="'cold' or 'warm', not 'hot'"):
        Plan(l2="hot")
    with pytest.raises(ValueError, match="at least one round"):
        Plan(rounds=0)
    with pytest.raises(ValueError, match="at least one round"):
        Plan(min_rounds=0)


def test_the_interval_is_always_the_same_and_holds_the_median() -> None:
    values = [0.01 * number for number in range(50)]
    low, high = interval(values)
    assert (low, high) == interval(values)
    assert low < statistics.median(values) < high
    # Order statistics 18 and 33 of 50 hold the median with 95 %.
    assert low == pytest.approx(values[17], abs=0.03)
    assert high == pytest.approx(values[32], abs=0.03)


def test_one_odd_round_does_not_move_the_interval() -> None:
    assert interval([*[1.0] * 49, 100.0]) == (1.0, 1.0)


def test_intervals_cover_what_they_should() -> None:
    """Of a hundred sets of noise, about 95 hold the true median."""
    noise = random.Random(1)
    sets = [[noise.gauss(0, 1) for _ in range(30)] for _ in range(100)]
    assert 88 <= sum(low <= 0 <= high for low, high in map(interval, sets)) <= 100


# -- real clocks ----------------------------------------------------------------------------------


def test_the_clock_of_the_cpu_times_sleeps() -> None:
    found = measure(
        lambda: time.sleep(2 * MS),
        lambda: time.sleep(1 * MS),
        CpuClock(),
        Plan(rounds=20, seconds=0.3, warm_seconds=0.01),
        compilations=nothing,
    )
    assert found.speedup == pytest.approx(2, rel=0.2)
    assert found.speedup_low <= found.speedup <= found.speedup_high
    assert found.eager.times.median == pytest.approx(2 * MS, rel=0.3)
    assert found.eager.host is None


def counted_backend() -> tuple[Compiler, Callable[..., Any]]:
    compiler = Compiler()

    def backend(graph: Any, _inputs: Any) -> Any:
        compiler.compiled += 1
        return graph.forward

    return compiler, backend


def test_torch_that_recompiles_in_every_call_is_told() -> None:
    compiler, backend = counted_backend()
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    x = torch.ones(3)

    def call() -> torch.Tensor:
        torch.compiler.reset()
        return compiled(x)

    with pytest.raises(CompiledWhileTiming, match="compiles in every call"):
        measure(lambda: x + 1, call, CpuClock(), QUICK, compilations=compiler)
    assert compiler.compiled == 20


def test_torch_that_recompiles_in_a_round_is_told() -> None:
    compiler, backend = counted_backend()
    compiled = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
    shapes = (torch.ones(4 if number == WARM + 2 else 3) for number in count(1))

    with pytest.raises(CompiledWhileTiming, match=r"^the compiled call compiled in timed round 2$"):
        measure(lambda: None, lambda: compiled(next(shapes)), CpuClock(), QUICK, compilations=compiler)
    assert compiler.compiled == 2


def test_torch_that_compiles_once_is_timed() -> None:
    compiler, backend = counted_backend()
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    x = torch.ones(3)
    found = measure(lambda: x + 1, lambda: compiled(x), CpuClock(), QUICK, compilations=compiler)
    assert compiler.compiled == 1
    assert len(found.compiled.time) == 6


def test_canaries_leave_random_numbers_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    found = clocks.canaries(torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state())
    assert list(found) == ["matmul", "copy"]
    assert found["matmul"]().shape == (256, 256)
    assert found["copy"]().nbytes == 1 << 20


class FakeCuda:
    """Stands for torch.cuda; ``log``: what was asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.milliseconds = 1500.0

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        return SimpleNamespace(record=self.record, elapsed_time=lambda _last: self.milliseconds)

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:1"
        self.log.append("record")

    def synchronize(self, device: torch.device) -> None:
        assert str(device) == "cuda:1"
        self.log.append("synchronize")

    def properties(self, device: torch.device) -> Any:
        assert str(device) == "cuda:1"
        return SimpleNamespace(L2_cache_size=123)

    def fill(self) -> None:
        self.log.append("zero")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Stands in place of torch.cuda; the GPU with number 1 has an L2 cache of 123 bytes."""
    cuda = FakeCuda()

    def empty(size: int, **_: Any) -> Any:
        assert size == clocks.TIMES_L2 * 123
        return SimpleNamespace(zero_=cuda.fill)

    monkeypatch.setattr(torch.cuda, "Event", cuda.event)
    monkeypatch.setattr(torch.cuda, "synchronize", cuda.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", cuda.properties)
    monkeypatch.setattr(torch, "empty", empty)
    return cuda


def test_the_clock_of_the_gpu_asks_for_the_right_things(cuda: FakeCuda) -> None:
    """One event before and one after each part, one synchronisation in a sample, milliseconds made seconds."""
    clock = CudaClock(torch.device("cuda:1"))
    part = ["zero", "record", "work", "record"]
    for number in range(2):
        cuda.log.clear()
        for _ in range(2):
            clock.flush()
            clock.start()
            cuda.log.append("work")
            clock.stop()
        assert clock.elapsed() == near(3.0)
        if number:  # events are made in the first sample
            assert cuda.log == [*part, *part, "synchronize"]


@pytest.mark.cuda
def test_the_clock_of_the_gpu_times_matmuls() -> None:
    big, small = (torch.rand(size, size, device="cuda", dtype=torch.bfloat16) for size in (4096, 2048))
    found = measure(
        lambda: big @ big,
        lambda: small @ small,
        CudaClock(torch.device("cuda")),
        Plan(),
        compilations=nothing,
        canaries=clocks.canaries(torch.device("cuda")),
    )
    assert 4 < found.speedup < 14
    assert found.speedup_low <= found.speedup <= found.speedup_high
    assert found.eager.host is not None
    assert found.eager.host_times is not None
    # To launch one product takes the host a fraction of what the GPU needs for it.
    assert 1e-6 < found.eager.host_times.median < found.eager.times.median / 2
    assert 1e-5 < found.canaries["matmul"].times.median < 1e-3
    assert found.canaries["matmul"].times.median == pytest.approx(found.compiled.times.median, rel=0.3)
    assert 1e-5 < found.canaries["copy"].times.median < 1e-3


@pytest.mark.cuda
def test_cuda_graphs_are_timed() -> None:
    # With few layers the launches that a graph saves cost no more than what surrounds a replay.
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(64))).cuda()
    compiled = torch.compile(layers, mode="reduce-overhead")
    x = torch.rand(8, 64, device="cuda")

    def replay() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(x)

    with torch.no_grad():
        found = measure(
            lambda: layers(x), replay, CudaClock(torch.device("cuda")), Plan(sample_seconds=2e-3), compilations=nothing
        )
    assert found.speedup_low > 1.2
    assert found.compiled.calls > 1


@pytest.mark.cuda
def test_work_is_timed_and_not_its_launch() -> None:
    """Ten products that take milliseconds each, launched within microseconds."""
    a = torch.rand(4096, 4096, device="cuda")

    def work() -> torch.Tensor:
        b = a
        for _ in range(10):
            b = b @ a
        return b

    found = measure(work, work, CudaClock(torch.device("cuda")), Plan(seconds=0.2), compilations=nothing)
    busy = profiling.profile(work, torch.device("cuda"), found.compiled.times.median).device_time
    assert busy is not None
    assert found.compiled.host_times is not None
    assert found.compiled.times.median == pytest.approx(busy, rel=0.05)
    assert found.compiled.times.median > 5 * found.compiled.host_times.median


@pytest.mark.cuda
def test_a_small_input_is_read_from_memory_each_time() -> None:
    """16 MB fit into the L2 cache of a large GPU: what was just read is read faster, unless a flush lies between."""
    x = torch.rand(4 << 20, device="cuda")
    clock = CudaClock(torch.device("cuda"))

    def seconds(*, warm: bool) -> float:
        found = []
        for _ in range(30):
            clock.flush()  # in both, so that the GPU is busy while the host launches the sum
            if warm:
                x.sum()
            clock.start()
            x.sum()
            clock.stop()
            found.append(clock.elapsed())
        return statistics.median(found)

    seconds(warm=True)
    assert seconds(warm=False) > 1.1 * seconds(warm=True)
