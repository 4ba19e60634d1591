"""Stored runs: what the files of pytest-benchmark hold of ours, and which of them are accepted.

Nothing here changes or removes a file of pytest-benchmark. The one file that is ours is `MARKS`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

from pytest_dynamo.detection import NO_BASELINE
from pytest_dynamo.detection import NOT_SLOWER
from pytest_dynamo.detection import SLOWER
from pytest_dynamo.detection import UNSTABLE
from pytest_dynamo.detection import WINDOW
from pytest_dynamo.measurement import SCHEMA
from pytest_dynamo.measurement import Measurement
from pytest_dynamo.measurement import Run


#: Not ``.json``: pytest-benchmark takes every such file in its folder for a run.
MARKS = "dynamo-accepted.jsonl"
#: Of each line in `MARKS`.
FORMAT = 1
_VERDICTS = (SLOWER, NOT_SLOWER, UNSTABLE, NO_BASELINE, None)
#: Nanoseconds after which a file's times tell whether it was written again: they are coarse.
SETTLED = 2_000_000_000
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)

#: Test and fingerprint: the runs that may be compared with each other.
Series = tuple[str, tuple[tuple[str, str], ...]]


class HistoryError(Exception):
    """The file of accepted runs can't be read or written. It is as it was."""


@dataclass(frozen=True)
class Storage:
    #: Oldest first.
    runs: tuple[Run, ...] = ()
    #: What was left out and why, one line each.
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mark:
    """The baseline of a series begins with this run."""

    nodeid: str
    fingerprint: Mapping[str, str]
    run: str
    #: Of the run: where the window begins when its file is gone.
    datetime: str


@dataclass(frozen=True)
class OtherSeries:
    """Runs of a test under another fingerprint, oldest first."""

    runs: tuple[Run, ...]
    #: In words, such as ``torch 2.13.0 -> 2.14.1``.
    differs: tuple[str, ...]


def series_of(nodeid: str, fingerprint: Mapping[str, str]) -> Series:
    return nodeid, tuple(sorted(fingerprint.items()))


# -- reading --------------------------------------------------------------------------------------


def read(folder: Path) -> Storage:
    """Read all runs below a storage folder of pytest-benchmark; what can't be read becomes a problem.

    Every benchmark of a process asks for them, so that files are not read again until one is another.
    """
    now = time.time_ns()
    files = {
        path: _state(path) for path in sorted({*folder.glob("*.json"), *folder.glob("*/*.json")}) if path.is_file()
    }
    known, storage = _known.get(folder, (None, Storage()))
    if known == files:
        return storage
    storage = _read(folder, files)
    _known.clear()
    if all(state is not None and now - max(state[-2:]) > SETTLED for state in files.values()):
        _known[folder] = files, storage
    return storage


_State = tuple[int, ...]
#: The folder that was read last, unless one of its files had just been written.
_known: dict[Path, tuple[dict[Path, _State | None], Storage]] = {}


def _state(path: Path) -> _State | None:
    """What is another once a file has been written or replaced, its times last; None: not known."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(folder: Path, files: Iterable[Path]) -> Storage:
    runs: list[Run] = []
    problems: list[str] = []
    for path in files:
        found = read_file(path, path.relative_to(folder).as_posix())
        runs += found.runs
        problems += found.problems
    runs.sort(key=lambda run: (_when(run.datetime), run.source.rpartition("/")[2], run.source))
    first: dict[tuple[Series, str, str], str] = {}  # a copy of a file does not count twice
    once = [
        run
        for run in runs
        if first.setdefault((series_of(run.nodeid, run.fingerprint), run.run, run.datetime), run.source) == run.source
    ]
    return Storage(tuple(once), tuple(problems))


def read_file(path: Path, source: str) -> Storage:
    """Read one file of pytest-benchmark. Benchmarks that are not ours are left alone."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return Storage(problems=(f"{source}: left out, {error.strerror or error}",))
    except (ValueError, RecursionError) as error:
        return Storage(problems=(f"{source}: left out, it is not whole JSON ({_reason(error)})",))
    if not isinstance(data, dict) or not isinstance(data.get("benchmarks"), list):
        return Storage(problems=(f"{source}: left out, it is not a file of pytest-benchmark",))
    runs: list[Run] = []
    why: dict[str, list[str]] = {}
    for number, entry in enumerate(data["benchmarks"], 1):
        try:
            found = _run(entry, data, source)
        except _DAMAGE as error:
            name = entry.get("fullname") if isinstance(entry, dict) else None
            why.setdefault(_reason(error), []).append(name if isinstance(name, str) else f"benchmark {number}")
        else:
            runs += [found] if found is not None else []
    problems = [
        f"{source}: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: left out, {reason}"
        for reason, names in why.items()
    ]
    return Storage(tuple(runs), tuple(problems))


def _run(entry: dict[str, Any], data: dict[str, Any], source: str) -> Run | None:
    extra = entry.get("extra_info") or {}
    if "dynamo" not in extra:
        return None
    dynamo = extra["dynamo"]
    schema = _typed(dynamo["schema"], int, "schema")
    if schema > SCHEMA:
        raise ValueError(f"a newer pytest-dynamo wrote it (schema {schema}, this one reads {SCHEMA})")
    if schema < 1 or dynamo["verdict"] not in _VERDICTS:
        raise ValueError(f"schema {schema} has no verdict {dynamo['verdict']!r}")
    measurement = Measurement.from_json(dynamo["measurement"])
    _check(measurement)
    _when(data["datetime"])
    commit = data.get("commit_info") or {}
    name = commit.get("id") or ""
    counts = {name: dynamo.get(name) for name in ("graphs", "graph_breaks", "recompiles")}
    return Run(
        nodeid=_typed(dynamo["nodeid"], str, "nodeid"),
        run=_typed(dynamo["run"], str, "run"),
        machine=_typed(dynamo["machine"], str, "machine"),
        fingerprint=_fingerprint(dynamo["fingerprint"]),
        measurement=measurement,
        verdict=dynamo["verdict"],
        datetime=data["datetime"],
        commit="" if name == "unversioned" else f"{name}{'-dirty' if commit.get('dirty') else ''}",
        source=source,
        **{name: None if value is None else _typed(value, int, name) for name, value in counts.items()},
    )


def _check(measured: Measurement) -> None:
    """What is divided by, or has its logarithm taken, is positive and finite."""
    values: list[float | None] = [measured.speedup, measured.compiled.device_time]
    values += [*measured.canaries.values(), *measured.ratios.values()]
    for side in (measured.eager, measured.compiled):
        values += [side.time.median, side.host.median if side.host is not None else None]
    for value in values:
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"a time or a speed-up of {value} is impossible")


def _typed(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}")
    return value


def _fingerprint(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(inner, str) for inner in value.values()):
        raise TypeError(f"fingerprint is {value!r}")
    return value


def _when(text: str) -> datetime:
    when = datetime.fromisoformat(text) if text else datetime.min
    return when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc)


def _reason(error: BaseException) -> str:
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."


# -- accepted runs --------------------------------------------------------------------------------


def marks(folder: Path) -> dict[Series, Mark]:
    """Return the accepted mark of each series that has one. Raises HistoryError."""
    return _marks(folder / MARKS, _text(folder / MARKS))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise HistoryError(f"{path} can't be read ({_reason(error)}): mend it, or restore it from a copy") from error


def _marks(path: Path, text: str) -> dict[Series, Mark]:
    found: dict[Series, Mark] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            form = _typed(data["format"], int, "format")
            if form > FORMAT:
                raise HistoryError(f"{path} is of a newer pytest-dynamo (format {form}): update pytest-dynamo")
            mark = Mark(
                _typed(data["nodeid"], str, "nodeid"),
                _fingerprint(data["fingerprint"]),
                _typed(data["run"], str, "run"),
                _typed(data["datetime"], str, "datetime"),
            )
            _when(mark.datetime)
        except _DAMAGE as error:
            raise HistoryError(
                f"{path}, line {number} is damaged ({_reason(error)}): mend the line or take it out"
            ) from error
        found[series_of(mark.nodeid, mark.fingerprint)] = mark
    return found


def acceptable(run: Run) -> bool:
    """Wrong runs are no baseline, nor are those of a disturbed machine, whoever asks for it.

    A run that is unstable because earlier ones lie too far apart is the way out of that.
    """
    return run.verdict is not None and not run.measurement.unstable


def accept(folder: Path, runs: Sequence[Run]) -> tuple[Run, ...]:
    """Let the baselines of the runs' series begin with them; return those that are `acceptable`.

    The marks file is replaced by a whole new one, or stays. Raises HistoryError.
    """
    path = folder / MARKS
    text = _text(path)
    _marks(path, text)
    taken = tuple(run for run in runs if acceptable(run))
    if not taken:
        return ()
    text += "\n" if text and not text.endswith("\n") else ""
    for run in taken:
        mark = {"nodeid": run.nodeid, "fingerprint": dict(run.fingerprint), "run": run.run, "datetime": run.datetime}
        text += json.dumps({"format": FORMAT, **mark}) + "\n"
    temporary = folder / f"{MARKS}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    except OSError as error:
        raise HistoryError(f"{path} can't be written ({_reason(error)}): nothing is accepted") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return taken


def window(
    runs: Sequence[Run], nodeid: str, fingerprint: Mapping[str, str], accepted: Mapping[Series, Mark]
) -> tuple[Run, ...]:
    """Return the accepted runs of a series, oldest first: it fills up to `WINDOW` runs and then stays.

    Args:
        runs: all stored runs, oldest first.
        accepted: what `marks` returns. The window begins with the marked run, or with the first run.
    """
    key = series_of(nodeid, fingerprint)
    series = [run for run in runs if run.nodeid == nodeid and series_of(nodeid, run.fingerprint) == key]
    mark = accepted.get(key)
    if mark is not None:
        places = [n for n, run in enumerate(series) if run.run == mark.run]
        later = [n for n, run in enumerate(series) if _when(run.datetime) >= _when(mark.datetime)]
        series = series[(places or later or [len(series)])[0] :]
    entering = [
        run
        for run in series
        if run.verdict in (NOT_SLOWER, NO_BASELINE) or (mark is not None and run.run == mark.run and acceptable(run))
    ]
    return tuple(entering[:WINDOW])


def older_series(runs: Sequence[Run], nodeid: str, fingerprint: Mapping[str, str]) -> tuple[OtherSeries, ...]:
    """Return the runs of the same test under other fingerprints, the series with the newest run first."""
    found: dict[Series, list[Run]] = {}
    for run in runs:
        if run.nodeid == nodeid:
            found.setdefault(series_of(nodeid, run.fingerprint), []).append(run)
    found.pop(series_of(nodeid, fingerprint), None)
    newest = sorted(found.values(), key=lambda series: _when(series[-1].datetime), reverse=True)
    return tuple(OtherSeries(tuple(series), differences(series[-1].fingerprint, fingerprint)) for series in newest)


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Tell how two fingerprints differ, in words."""
    names = [*before, *(name for name in now if name not in before)]
    return tuple(
        f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in names
        if before.get(name) != now.get(name)
    )
