"""Stored runs and verdicts about them → text for the terminal, as lists of lines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

from pytest_dynamo.chart import chart
from pytest_dynamo.detection import DEVICE_TIME
from pytest_dynamo.detection import TIME
from pytest_dynamo.detection import Judgement
from pytest_dynamo.detection import SpeedVerdict
from pytest_dynamo.detection import limit_of
from pytest_dynamo.history import OtherSeries
from pytest_dynamo.measurement import Run
from pytest_dynamo.terminal import columns


_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def seconds(value: float | None) -> str:
    """Such as ``1.234 ms``: four digits."""
    if value is None:
        return "?"
    unit, scale = next((one for one in _UNITS if value >= one[1]), _UNITS[-1])
    return f"{value / scale:#.4g}".rstrip(".") + f" {unit}"


def times(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}x"


def mebibytes(value: float | None) -> str:
    return "?" if value is None else f"{value / 2**20:.1f} MiB"


def number(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"


def percent(value: float) -> str:
    """Relative change, such as ``+5.5 %``; never a negative zero."""
    return f"{round(value * 100, 1) + 0.0:+.1f} %"


def change_lines(before: Sequence[Run], now: Run) -> list[str]:
    """Return a table of all that is known of a run: what it was, what it is, the relative change.

    Before: the median of several runs; of what is counted, the last. Without runs before, only what it is.
    """
    rows = [
        _row("time", seconds, before, now, lambda run: run.measurement.compiled.time.median),
        _row("device time", seconds, before, now, lambda run: run.measurement.compiled.device_time),
        _row("speed-up", times, before, now, lambda run: run.measurement.speedup),
        _compile_time(before, now),
        _row("peak memory", mebibytes, before, now, lambda run: run.measurement.compiled.peak_bytes),
        _row("breaks", number, before[-1:], now, lambda run: run.graph_breaks),
        _row("recompiles", number, before[-1:], now, lambda run: run.recompiles),
        _row("launches", number, before[-1:], now, lambda run: run.measurement.compiled.launches),
    ]
    known = [row for row in rows if any(cell not in ("", "->", "?") for cell in row[1:])]
    return columns(known if before else [(row[0], row[3]) for row in known])


def _row(
    name: str, show: Callable[[float | None], str], before: Sequence[Run], now: Run, read: Callable[[Run], float | None]
) -> tuple[str, str, str, str, str]:
    after = read(now)
    if not before:
        return name, "", "", show(after), ""
    known = [value for run in before if (value := read(run)) is not None]
    then = statistics.median(known) if known else None
    told = then and after is not None and not (after == then and isinstance(after, int))
    return name, show(then), "->", show(after), percent(after / then - 1) if told and after is not None and then else ""


def _compile_time(before: Sequence[Run], now: Run) -> tuple[str, str, str, str, str]:
    """Compiling from a cache and without one are two things: like is held against like."""
    cold = now.measurement.cold
    name = "compile time" + (", cached" if cold is False else "")

    def read(run: Run) -> float | None:
        return run.measurement.compile_seconds if run.measurement.cold == cold else None

    return _row(name, seconds, before, now, read)


def verdict_lines(verdict: SpeedVerdict, *, accepted: bool = True) -> list[str]:
    """Return one line for each question that was judged and each note."""
    runs = "the run before" if not accepted else f"the middle of {count(verdict.runs, 'accepted run')}"
    return [*(_judgement(judgement, runs) for judgement in verdict.judgements), *verdict.notes]


def _judgement(found: Judgement, runs: str) -> str:
    middle = seconds(found.middle) if found.metric in ("time", "device time") else f"{found.middle:#.3g}"
    change = percent(found.change)
    where = f"{change[1:]} {'below' if change[0] == '-' else 'above'} {runs}"
    limit = "no limit can be told" if math.isinf(found.limit) else f"{percent(found.limit)[1:]} allowed"
    return f"{found.question}: {found.metric} is {where} ({middle}), {limit}: {found.verdict}"


def other_lines(others: Sequence[OtherSeries]) -> list[str]:
    """Tell of the newest series under another fingerprint, which is shown beside and not compared."""
    if not others:
        return []
    first, last = others[0], others[0].runs[-1]
    more = f"; {count(len(others) - 1, 'more series', 'more series')} in pytest-dynamo history" if others[1:] else ""
    measured, device = last.measurement, last.measurement.compiled.device_time
    told = [
        f"time {seconds(measured.compiled.time.median)}",
        *([f"device time {seconds(device)}"] if device is not None else []),
        f"speed-up {times(measured.speedup)}",
    ]
    runs = count(len(first.runs), "run")
    return [
        f"not compared, another fingerprint ({', '.join(first.differs)}):",
        f"  {runs}, the last {date(last)} with {', '.join(told)}{more}",
    ]


def doubt(run: Run) -> str:
    """Why a run is no baseline."""
    return "parity or a limit failed" if run.verdict is None else run.verdict


def run_lines(
    before: Sequence[Run],
    run: Run,
    verdict: SpeedVerdict,
    notes: Sequence[str],
    others: Sequence[OtherSeries],
    *,
    accepted: bool = True,
) -> list[str]:
    """Return a block about one run: its verdict, a table, the reasons, and what it was not compared with.

    ``accepted``: the runs before are accepted ones, and not just others.
    """
    reasons = [*verdict_lines(verdict, accepted=accepted), *notes]
    if run.verdict is None:
        reasons.append("parity or a limit failed in this run: it is never accepted")
    elif run.verdict != verdict.verdict:
        reasons.append(f"when it ran it was told {run.verdict}")
    inner = [*change_lines(before, run), *reasons, *other_lines(others)]
    return [f"{run.nodeid}: {verdict.verdict}", *(f"  {line}" for line in inner), ""]


def totals(verdicts: Iterable[str]) -> str:
    told = list(verdicts)
    parts = [f"{told.count(verdict)} {verdict}" for verdict in dict.fromkeys(told)]
    return f"{count(len(told), 'test')} compared" + (f": {', '.join(parts)}" if parts else "")


def count(n: int, word: str, words: str | None = None) -> str:
    return f"{n} {word if n == 1 else words or word + 's'}"


def date(run: Run) -> str:
    """To the minute, in the time zone in which it is stored."""
    return run.datetime[:16].replace("T", " ")


def commit(run: Run) -> str:
    """Short; a ``+`` stands for changes that were not committed."""
    name, dash, _ = run.commit.partition("-dirty")
    return name[:7] + ("+" if dash else "")


# -- series ---------------------------------------------------------------------------------------

#: Runs that a chart shows at most: a terminal is no wider.
CHART = 60
_HEAD = ("run", "date", "commit", "verdict", "baseline", "time", "device time", "speed-up")
#: Columns of `csv_row`. Times in seconds, memory in bytes.
CSV = (
    *("nodeid", "datetime", "commit", "file", "run", "machine", "verdict", "baseline", "time", "device_time"),
    *("speedup", "eager_time", "compile_seconds", "cold", "peak_bytes", "launches", "graphs", "graph_breaks"),
    *("recompiles", "fingerprint"),
)


def series_lines(series: Sequence[Run], roles: Sequence[str], encoding: str) -> list[str]:
    """Return a table of the runs of one series, and a chart of their times.

    Args:
        series: oldest first.
        roles: for each, ``accepted`` if the baseline begins with it, ``window`` if it is part of it, or nothing.
        encoding: of the terminal.
    """
    rows = [
        (
            *(run_number(run.source), date(run), commit(run), run.verdict or "failed", role),
            seconds(run.measurement.compiled.time.median),
            seconds(run.measurement.compiled.device_time),
            times(run.measurement.speedup),
        )
        for run, role in zip(series, roles)
    ]
    told = [run.measurement.compiled.time.median for run in series[-CHART:]]
    return [
        *columns([_HEAD, *rows], left=5),
        f"time {chart(told, encoding)} {seconds(min(told))} to {seconds(max(told))}",
    ]


def csv_row(run: Run, role: str) -> tuple[object, ...]:
    measured = run.measurement
    return (
        *(run.nodeid, run.datetime, run.commit, run.source, run.run, run.machine, run.verdict or "failed", role),
        *(measured.compiled.time.median, measured.compiled.device_time, measured.speedup, measured.eager.time.median),
        *(measured.compile_seconds, measured.cold, measured.compiled.peak_bytes, measured.compiled.launches),
        *(run.graphs, run.graph_breaks, run.recompiles),
        "; ".join(f"{name}={value}" for name, value in run.fingerprint.items()),
    )


def move(old: Sequence[Run], new: Sequence[Run]) -> str:
    """Tell from where to where the middle of the accepted runs moved; ``new`` is not empty."""
    bound = any(run.measurement.launch_bound for run in (*old, *new))
    question = DEVICE_TIME if bound and all(DEVICE_TIME.read(run.measurement) for run in (*old, *new)) else TIME

    def middle(runs: Sequence[Run]) -> float:
        return limit_of([value for run in runs if (value := question.read(run.measurement)) is not None], question)[0]

    after = middle(new)
    told = f"{seconds(after)} ({count(len(new), 'run')})"
    if old:
        before = middle(old)
        told = f"{seconds(before)} ({count(len(old), 'run')}) -> {told}, {percent(after / before - 1)}"
    return f"middle of the accepted runs, {question.metric}: {told}"


def run_number(source: str) -> str:
    """What pytest-benchmark calls the run: ``0003`` of ``Linux/0003_name.json``."""
    name = source.rpartition("/")[2].removesuffix(".json")
    first = name.partition("_")[0]
    return first if first.isdecimal() else name
