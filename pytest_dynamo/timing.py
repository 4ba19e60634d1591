"""Eager and compiled code, timed in alternating rounds after a warm-up in which nothing is compiled any more."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from typing import NamedTuple
from typing import Protocol

from pytest_dynamo.measurement import EAGER
from pytest_dynamo.measurement import OF_HOST
from pytest_dynamo.measurement import Times


#: Passes of the warm-up at least: with CUDA graphs the first call warms up, the second records, the third replays.
PASSES = 3
#: Passes in a row that compile something before the warm-up gives up.
COMPILING_PASSES = 20
#: Calls in one sample at most, and at most if the L2 cache is made cold before each.
CALLS, COLD_CALLS = 1000, 20
#: Calls that last this long, in seconds, hardly feel whether the L2 cache is cold.
LONG = 2e-3
#: Calls that last this long hardly feel that the device waits for the first launch.
VERY_LONG = 20e-3
#: Resamples of the bootstrap.
RESAMPLES = 500


class CompiledWhileTiming(Exception):  # noqa: N818  it is no error of the code that is timed
    """Something was compiled where only finished code may run; says in which round."""


@dataclass(frozen=True)
class Plan:
    """How long and how often to time. Times in seconds."""

    #: Pairs of samples at most, and at least.
    rounds: int = 50
    min_rounds: int = 10
    #: Of rounds at most, once there are ``min_rounds``.
    seconds: float = 0.7
    #: Of alternating work before the first round, so that clocks ramp.
    warm_seconds: float = 0.3
    #: Calls are put together until a sample lasts this long.
    sample_seconds: float = 200e-6
    #: ``cold``: the L2 cache of a GPU is filled with something else before each call shorter than 2 ms; ``warm``: not.
    l2: str = "cold"

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.min_rounds < 1:
            raise ValueError(f"there must be at least one round, not {self.rounds} and {self.min_rounds}")
        if self.l2 not in ("cold", "warm"):
            raise ValueError(f"l2 must be 'cold' or 'warm', not {self.l2!r}")


class Elapsed(NamedTuple):
    """Seconds of one sample: in all, and in which the host issued its calls (None where that is the same)."""

    time: float
    host: float | None = None


class Clock(Protocol):
    """What `measure` needs of a device."""

    #: The device has a queue, which the host may fill with calls that have not begun, and a cache.
    queues: bool

    def now(self) -> float:
        """Seconds of the host, from anywhere."""

    def flush(self) -> None:
        """Make the L2 cache cold."""

    def start(self) -> None:
        """Begin a part of the sample."""

    def stop(self) -> None:
        """End it."""

    def elapsed(self) -> float:
        """Wait until the device has finished, and add up the seconds of the parts since the last time."""


@dataclass(frozen=True)
class Samples:
    """Of one piece of code, in order, in seconds per call."""

    time: tuple[float, ...]
    #: Those in which the host issued the calls; None on a CPU.
    host: tuple[float, ...] | None
    #: In each sample.
    calls: int

    @property
    def times(self) -> Times:
        return Times.of(self.time)

    @property
    def host_times(self) -> Times | None:
        return None if self.host is None else Times.of(self.host)


@dataclass(frozen=True)
class Timing:
    """What `measure` found. Samples of one index are of one round."""

    eager: Samples
    compiled: Samples
    canaries: Mapping[str, Samples]
    #: Median over the rounds of eager's time divided by compiled's, and the ends of its 95 % bootstrap interval.
    speedup: float
    speedup_low: float
    speedup_high: float

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as long compiled code takes as eager and each canary, as in `Measurement.ratios`."""
        found = {}
        for name, other in {EAGER: self.eager, **self.canaries}.items():
            own, beside = self.compiled.time, other.time
            if name in OF_HOST and self.compiled.host is not None and other.host is not None:
                own, beside = self.compiled.host, other.host
            found[name] = statistics.median(one / max(two, 1e-9) for one, two in zip(own, beside))
        return found


class _Timed:
    """A piece of code with its samples."""

    def __init__(
        self,
        call: Callable[[], Any],
        setup: Callable[[], None] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._call = call
        self._setup = setup
        self._around = around
        self._calls = self._lead = 1
        self._long = False
        self._kept: list[Elapsed] = []

    def sample(self, clock: Clock, l2: str) -> Elapsed:
        cold = clock.queues and l2 == "cold" and not self._long
        if cold:
            self._calls = min(self._calls, COLD_CALLS)
        # The device would wait for the first launch of a sample if it had nothing to do before: that is no part of
        # a loop in which it is the slower one. Calls before the sample keep it busy meanwhile, and tell what the host
        # needs: in the sample it may wait for the device to make its cache cold.
        host = None
        for _ in range(self._lead if clock.queues else 0):
            self._set_up()
            with self._around():
                began = clock.now()
                for _ in range(self._calls):
                    self._call()
                host = clock.now() - began
        self._set_up()
        call, result = self._call, None
        parts, calls = (self._calls, 1) if cold else (1, self._calls)
        with self._around():
            for _ in range(parts):
                result = None
                if cold:
                    clock.flush()
                clock.start()
                for _ in range(calls):
                    result = None  # a CUDA graph can't replay into results that are alive
                    result = call()
                clock.stop()
            elapsed = clock.elapsed()
        del result  # not sooner: to free it takes time as well
        # Where the host is slower, the device spent the first part of a call on what was issued before it.
        return Elapsed(elapsed if host is None else max(elapsed, host), host)

    def _set_up(self) -> None:
        if self._setup is not None:
            self._setup()

    def adapt(self, elapsed: Elapsed, seconds: float) -> None:
        """Put as many calls into a sample as last ``seconds``, judged by a sample of the warm-up."""
        one = elapsed.time / self._calls
        self._long = one >= LONG
        self._lead = 2 if one < VERY_LONG else 1
        if self._setup is None:
            # A clock that counts 199.9999 µs for 200 does not need one call more.
            enough = math.ceil(seconds / max(one, 1e-12) - 1e-3)
            self._calls = min(max(self._calls, enough), CALLS)

    def keep(self, elapsed: Elapsed) -> None:
        self._kept.append(elapsed)

    def samples(self) -> Samples:
        host = [elapsed.host / self._calls for elapsed in self._kept if elapsed.host is not None]
        time = tuple(elapsed.time / self._calls for elapsed in self._kept)
        return Samples(time, tuple(host) if host else None, self._calls)


def measure(
    eager: Callable[[], Any],
    compiled: Callable[[], Any],
    clock: Clock,
    plan: Plan,
    *,
    compilations: Callable[[], int],
    setup: Callable[[], None] | None = None,
    around_eager: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    canaries: Mapping[str, Callable[[], Any]] | None = None,
) -> Timing:
    """Time two pieces of code in alternating rounds, and the canaries in each of them.

    ``compilations`` counts what was compiled until now. ``setup`` runs before each sample of both,
    untimed; a sample is one call then. ``around_eager`` is entered around each sample of eager code,
    untimed. Results are dropped, those of several calls in a sample one by one. Raises
    `CompiledWhileTiming`, and whatever the code raises.
    """
    sides = {"eager": _Timed(eager, setup, around_eager), "compiled": _Timed(compiled, setup)}
    others = {name: _Timed(call) for name, call in (canaries or {}).items()}
    _warm_up([*sides.values(), *others.values()], clock, plan, compilations)
    with no_garbage_collection():
        began = clock.now()
        for number in range(plan.rounds):
            if number >= plan.min_rounds and clock.now() - began >= plan.seconds:
                break
            # The order changes from round to round: drift and what a slot does to its sample cancel out.
            order = list(sides.items()) if number % 2 == 0 else list(sides.items())[::-1]
            for name, timed in (*order, *others.items()):
                before = compilations()
                elapsed = timed.sample(clock, plan.l2)
                if compilations() != before:
                    raise CompiledWhileTiming(f"the {name} call compiled in timed round {number + 1}")
                timed.keep(elapsed)
            gc.collect(0)  # of what the calls left; cheap, and outside of the samples
    found = {name: timed.samples() for name, timed in sides.items()}
    logs = [
        math.log(max(slow, 1e-9) / max(fast, 1e-9)) for slow, fast in zip(found["eager"].time, found["compiled"].time)
    ]
    low, high = interval(logs)
    middle = statistics.median(logs)
    beside = {name: timed.samples() for name, timed in others.items()}
    return Timing(found["eager"], found["compiled"], beside, math.exp(middle), math.exp(low), math.exp(high))


def _warm_up(everything: Sequence[_Timed], clock: Clock, plan: Plan, compilations: Callable[[], int]) -> None:
    """Call everything in turn until a whole pass compiles nothing and the clocks have had time to ramp."""
    began = clock.now()
    passes = in_a_row = 0
    while True:
        before = compilations()
        for timed in everything:
            timed.adapt(timed.sample(clock, plan.l2), plan.sample_seconds)
        passes += 1
        in_a_row = in_a_row + 1 if compilations() != before else 0
        if in_a_row == COMPILING_PASSES:
            raise CompiledWhileTiming(f"compiles in every call: each of {COMPILING_PASSES} rounds of the warm-up did")
        if passes >= PASSES and not in_a_row and clock.now() - began >= plan.warm_seconds:
            return


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect no garbage until the end. What is there stays: to search all objects takes tenths of a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Ends of the 95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    outside = round(0.025 * RESAMPLES)
    return medians[outside], medians[-1 - outside]
