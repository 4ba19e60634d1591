"""What one run of a benchmark measured, as data. Times in seconds, memory in bytes."""

from __future__ import annotations

import functools
import statistics
import types
import typing
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from dataclasses import is_dataclass
from dataclasses import replace
from typing import Any


#: Of ``extra_info["dynamo"]`` in the files of pytest-benchmark. Files with another number are left alone.
SCHEMA = 1


#: The GPU is busy for less than this part of the elapsed time: the code is launch-bound.
LAUNCH_BOUND = 0.8


#: Names of what compiled code is held against: eager code, and the fixed work that the host takes longer to issue than
#: the GPU to do. Both tell of the host.
EAGER, HOST_CANARY = OF_HOST = ("eager", "launches")


def launch_bound(device_time: float | None, time: float, host: float | None = None) -> bool | None:
    """Whether the GPU waits for the host in a good part of a call; None: not known.

    Args:
        device_time: seconds in which the GPU is busy in a call.
        time: seconds that a call takes.
        host: seconds that the host needs to issue a call; None: not known.
    """
    if device_time is None or time <= 0:
        return None
    return device_time < LAUNCH_BOUND * time or (host is not None and host > device_time)


@dataclass(frozen=True)
class Times:
    """Samples of one quantity in one process, in short."""

    median: float
    #: Median distance from the median.
    mad: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Times:
        median = statistics.median(samples)
        return cls(median, statistics.median(abs(sample - median) for sample in samples), len(samples))


@dataclass(frozen=True)
class Side:
    """Eager or compiled code in one process."""

    #: Elapsed per call. On a GPU between CUDA events, or what the host needs to issue a call where that is longer.
    time: Times
    #: In which the host issues a call, without waiting for the GPU; None on a CPU.
    host: Times | None = None
    #: In which the GPU is busy, per call; None: not measured.
    device_time: float | None = None
    #: Kernels launched per call.
    launches: int | None = None
    #: A hash of the names of the kernels, in order.
    kernels: str | None = None
    #: Most memory that a call holds beyond what was allocated before it.
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Measurement:
    """Eager and compiled code, timed in alternating rounds in one process."""

    eager: Side
    compiled: Side
    #: Eager's time divided by compiled's, and the ends of its 95 % bootstrap interval within this process.
    speedup: float
    speedup_low: float
    speedup_high: float
    #: The GPU waits for the host in a good part of each compiled call; None on a CPU.
    launch_bound: bool | None = None
    #: Calls replay CUDA graphs.
    replayed: bool = False
    #: A hash of the generated code; None: not known.
    code: str | None = None
    #: Seconds of compiling, and whether nothing came from a cache; None: not known.
    compile_seconds: float | None = None
    cold: bool | None = None
    #: Medians of fixed small kernels, which tell the state of the machine.
    canaries: Mapping[str, float] = field(default_factory=dict)
    #: How many times as long compiled code takes as `EAGER` and as each of these does: medians over the rounds, so that
    #: a machine that changes its speed in between changes both. Times of the host for `OF_HOST`, where there are any.
    ratios: Mapping[str, float] = field(default_factory=dict)
    #: Clocks in MHz, power limits and the like, for people.
    conditions: Mapping[str, Any] = field(default_factory=dict)
    #: Why these numbers can't be trusted: throttling, another process on the GPU, noise.
    unstable: tuple[str, ...] = ()

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory of compiled over that of eager; None: not measured, or eager needs none."""
        eager, compiled = self.eager.peak_bytes, self.compiled.peak_bytes
        return compiled / eager if eager and compiled is not None else None

    def to_json(self) -> dict[str, Any]:
        """Return primitives only."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """Raises KeyError, TypeError or ValueError for what `to_json` does not give."""
        made: Measurement = _build(cls, data)
        return made


def middle(measurements: Sequence[Measurement]) -> Measurement:
    """The first of several measurements, with the median of all in each number that is judged."""
    first = measurements[0]

    def median(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def times(all_times: Sequence[Times]) -> Times:
        return replace(all_times[0], median=statistics.median(one.median for one in all_times))

    def side(sides: Sequence[Side]) -> Side:
        host = [one.host for one in sides if one.host is not None]
        return replace(
            sides[0],
            time=times([one.time for one in sides]),
            host=times(host) if host else None,
            device_time=median([one.device_time for one in sides]),
        )

    def named(mappings: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {name: statistics.median(one[name] for one in mappings if name in one) for name in mappings[0]}

    return replace(
        first,
        eager=side([one.eager for one in measurements]),
        compiled=side([one.compiled for one in measurements]),
        canaries=named([one.canaries for one in measurements]),
        ratios=named([one.ratios for one in measurements]),
    )


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Types of a dataclass's fields. Python compiles them from their text each time, which takes most of reading."""
    return typing.get_type_hints(kind)


def _build(kind: Any, value: Any) -> Any:
    """Make ``kind`` out of its JSON form, and refuse values of other types."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        return None if value is None and type(None) in typing.get_args(kind) else _build(options[0], value)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{value!r} is not a list")
        return tuple(_build(typing.get_args(kind)[0], item) for item in value)
    if origin is not None:
        if not isinstance(value, Mapping):
            raise TypeError(f"{value!r} is not a dict")
        inner = typing.get_args(kind)[1]
        return {name: item if inner is Any else _build(inner, item) for name, item in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise TypeError(f"{value!r} is not a dict")
        hints = _hints(kind)
        known = {name: _build(hints[name], item) for name, item in value.items() if name in hints}
        return kind(**known)
    if kind in (int, float, str, bool):
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or isinstance(value, bool) is not (kind is bool):
            raise TypeError(f"{value!r} is not {kind.__name__}")
    return value


@dataclass(frozen=True)
class Run:
    """One benchmark of one stored run: what is needed to judge another by it."""

    nodeid: str
    #: Of the process that measured, and of the machine as it was booted.
    run: str
    machine: str
    #: What must be equal for two runs to be comparable: GPU, driver, versions, variant, L2 policy.
    fingerprint: Mapping[str, str]
    measurement: Measurement
    #: As it was told: ``not slower``, ``slower``, ``unstable``, ``no baseline``; None: parity or a limit failed.
    verdict: str | None = None
    #: For people: when, and of which commit.
    datetime: str = ""
    commit: str = ""
    #: The file that holds it, relative to the storage folder.
    source: str = ""
    #: Counted while the test ran; None: not known.
    graphs: int | None = None
    graph_breaks: int | None = None
    recompiles: int | None = None
