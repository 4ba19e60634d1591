"""The command ``pytest-dynamo``: stored runs compared, listed and accepted. Needs neither torch nor pytest."""

from __future__ import annotations

import argparse
import csv
import difflib
import importlib
import io
import os
import re
import sys
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from pytest_dynamo import detection
from pytest_dynamo import history
from pytest_dynamo import speedtable
from pytest_dynamo.history import HistoryError
from pytest_dynamo.history import Mark
from pytest_dynamo.history import Series
from pytest_dynamo.history import Storage
from pytest_dynamo.measurement import Run
from pytest_dynamo.speedtable import run_number


class UsageError(Exception):
    """The command can't be done as it was given; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if something is slower, 2 for a wrong command, 0 otherwise."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:cut])
    try:
        if options.command == "compare":
            base, dots, head = _revisions(options.run)
            if dots:
                return _compare_revisions(base, head, options, arguments[cut + 1 :])
        if cut < len(arguments):
            raise UsageError("arguments of pytest after -- go with compare BASE..HEAD only")
        return _on_storage(options)
    except (UsageError, HistoryError) as error:
        _write([f"pytest-dynamo: {error}"], sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough; nothing is left for Python to flush on exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pytest-dynamo", description="Speed of compiled code over stored runs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = "number (0003), file or beginning of a run id"
    compare = commands.add_parser(
        "compare",
        usage="pytest-dynamo compare [RUN [RUN]] [--storage DIR]\n"
        "       pytest-dynamo compare BASE..HEAD [-- PYTEST_ARGS]",
        help="a run with its accepted runs, two runs, or two revisions",
        description="Compare the latest or the named run with its accepted runs, a second run with a first, or two "
        "revisions of the repository. Exit status 1: something is slower.",
    )
    compare.add_argument("run", nargs="*", metavar="RUN", help=run)
    listed = commands.add_parser("history", help="all runs of each test, with a chart")
    listed.add_argument("pattern", nargs="?", metavar="NODEID-PATTERN", help="part of a node id; * is anything")
    listed.add_argument("--csv", action="store_true", help="as CSV, times in seconds, memory in bytes")
    accept = commands.add_parser("accept", help="let the baseline begin with a run")
    accept.add_argument("run", nargs="*", metavar="RUN", help=f"{run}; the latest if none is given")
    accept.add_argument("-k", dest="substring", metavar="SUBSTRING", help="only tests with this in their node id")
    for command in (compare, listed, accept):
        command.add_argument("--storage", metavar="DIR", help="folder of pytest-benchmark (default: .benchmarks)")
    return parser


def _on_storage(options: argparse.Namespace) -> int:
    name = (options.storage or ".benchmarks").removeprefix("file://")
    if "://" in name:
        raise UsageError(f"--storage {name}: only a folder can be read")
    folder = Path(name)
    storage = history.read(folder)
    _write(storage.problems, sys.stderr)
    given = getattr(options, "run", None) or []
    if not storage.runs and not any(Path(text).is_file() for text in given):
        raise UsageError(
            f"no runs of pytest-dynamo in {folder}\n"
            "store some with pytest --benchmark-autosave, or name their folder with --storage"
        )
    accepted = history.marks(folder)
    if options.command == "history":
        return _history(storage.runs, accepted, options)
    if len(given) > (2 if options.command == "compare" else 1):
        raise UsageError(
            f"{options.command} takes no more than {speedtable.count(len(given) - 1, 'run')}: {' '.join(given)}"
        )
    chosen = [_choose(storage, folder, text) for text in given] or [_latest(storage.runs)]
    if options.command == "accept":
        return _accept(folder, storage.runs, chosen[0], accepted, options.substring)
    if len(chosen) == 2:
        return _compare_two(*chosen)
    return _compare(storage.runs, chosen[0], accepted)


# -- which run ------------------------------------------------------------------------------------


def _latest(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.source == runs[-1].source]


def _choose(storage: Storage, folder: Path, text: str) -> list[Run]:
    """Runs that a word on the command line stands for: those of one file, or of one process."""
    path = Path(text)
    sources = list(dict.fromkeys(run.source for run in storage.runs))
    if path.is_file():
        inside = [source for source in sources if (folder / source).samefile(path)]
        if inside:
            return [run for run in storage.runs if run.source == inside[0]]
        found = history.read_file(path, text)
        _write(found.problems, sys.stderr)
        if not found.runs:
            raise UsageError(f"{text} holds no run of pytest-dynamo")
        return list(found.runs)
    files = [source for source in sources if _is_named(source, text)]
    if len(files) == 1:
        return [run for run in storage.runs if run.source == files[0]]
    processes = list(dict.fromkeys(run.run for run in storage.runs if text and run.run.startswith(text)))
    processes = [text] if text in processes else processes
    if not files and len(processes) == 1:
        return [run for run in storage.runs if run.run == processes[0]]
    if files or processes:
        several = files or processes
        more = f" and {len(several) - 3} more" if len(several) > 3 else ""
        raise UsageError(f"{text} may be any of {', '.join(several[:3])}{more}: give more of the name")
    nearest = f"; the nearest is {_nearest(text, sources, storage.runs)}" if sources else ""
    raise UsageError(f"no run {text!r} in {folder}{nearest}")


def _is_named(source: str, text: str) -> bool:
    name = source.rpartition("/")[2]
    if text in (source, name, source.removesuffix(".json"), name.removesuffix(".json")):
        return True
    first = run_number(source)
    return text.isdecimal() and first.isdecimal() and int(first) == int(text)


def _nearest(text: str, sources: Sequence[str], runs: Sequence[Run]) -> str:
    numbers = {run_number(source): source for source in sources if run_number(source).isdecimal()}
    if text.isdecimal() and numbers:
        return numbers[min(numbers, key=lambda number: abs(int(number) - int(text)))]
    names = [*sources, *(source.rpartition("/")[2] for source in sources), *(run.run for run in runs)]
    return _close(text, names)


def _close(text: str, names: Iterable[str]) -> str:
    return difflib.get_close_matches(text, list(names), n=1, cutoff=0.0)[0]


# -- compare --------------------------------------------------------------------------------------


def _revisions(given: Sequence[str]) -> tuple[str, str, str]:
    """Split ``BASE..HEAD``; an empty side is ``HEAD``, as git has it. No dots: it is no pair of revisions."""
    for text in given:
        base, dots, head = text.partition("..")
        # No name of a revision begins with a slash or ends in one; a path such as ../a does.
        if dots and text != dots and not (Path(text).exists() or head.startswith("/") or base.endswith("/")):
            if len(given) > 1 or head.startswith(".") or ".." in head:
                raise UsageError(f"{text}: give one BASE..HEAD and no other run")
            return base or "HEAD", dots, head or "HEAD"
    return "", "", ""


def _compare_revisions(base: str, head: str, options: argparse.Namespace, pytest_args: list[str]) -> int:
    if options.storage is not None:
        raise UsageError("--storage goes with stored runs, not with BASE..HEAD")
    return int(importlib.import_module("pytest_dynamo.revisions").main(base, head, pytest_args))


def _compare(runs: Sequence[Run], chosen: Sequence[Run], accepted: Mapping[Series, Mark]) -> int:
    lines = [f"{_title(chosen)} against the accepted runs", ""]
    verdicts = []
    for run in chosen:
        window = history.window(runs, run.nodeid, run.fingerprint, accepted)
        # A run is no evidence about itself.
        others = tuple(other for other in window if other.run != run.run)
        verdict = detection.judge(others, run)
        if verdict.verdict == detection.NO_BASELINE and window:
            verdict = replace(verdict, notes=("this run is the only accepted one",))
        beside = history.older_series(runs, run.nodeid, run.fingerprint)
        lines += speedtable.run_lines(others, run, verdict, [], beside)
        verdicts.append(verdict.verdict)
    _write([*lines, speedtable.totals(verdicts)])
    return int(detection.SLOWER in verdicts)


def _compare_two(first: Sequence[Run], second: Sequence[Run]) -> int:
    lines = [f"{_title(second)} against {_title(first)}", ""]
    verdicts = []
    for run in second:
        key = history.series_of(run.nodeid, run.fingerprint)
        base = [other for other in first if history.series_of(other.nodeid, other.fingerprint) == key][-1:]
        verdict = detection.judge(base, run)
        if verdict.verdict == detection.NO_BASELINE:
            verdict = replace(verdict, notes=("the first run has nothing to compare it with",))
        doubts = [f"the run before: {speedtable.doubt(other)}" for other in base if not history.acceptable(other)]
        beside = history.older_series(first, run.nodeid, run.fingerprint)
        lines += speedtable.run_lines(base, run, verdict, doubts, beside, accepted=False)
        verdicts.append(verdict.verdict)
    names = {run.nodeid for run in second}
    gone = [f"{run.nodeid}: only in {_title(first)}" for run in first if run.nodeid not in names]
    _write([*lines, *gone, speedtable.totals(verdicts)])
    return int(detection.SLOWER in verdicts)


def _title(runs: Sequence[Run]) -> str:
    told = [part for part in (speedtable.date(runs[0]), speedtable.commit(runs[0])) if part]
    return runs[0].source + (f" ({', '.join(told)})" if told else "")


# -- history and accept ---------------------------------------------------------------------------


def _history(runs: Sequence[Run], accepted: Mapping[Series, Mark], options: argparse.Namespace) -> int:
    if options.pattern is not None:
        pattern = re.escape(options.pattern).replace(r"\*", ".*").replace(r"\?", ".")
        found = [run for run in runs if re.search(pattern, run.nodeid)]
        if not found:
            names = {piece: run.nodeid for run in runs for piece in (*re.split(r"::|\[|\.py", run.nodeid), run.nodeid)}
            nearest = names[_close(options.pattern, names)]
            raise UsageError(f"no test matches {options.pattern!r}; the nearest is {nearest}")
        runs = found
    tests: dict[str, dict[Series, list[Run]]] = {}
    for run in runs:
        tests.setdefault(run.nodeid, {}).setdefault(history.series_of(run.nodeid, run.fingerprint), []).append(run)
    lines = []
    rows: list[Sequence[object]] = [speedtable.CSV]
    for nodeid, test in tests.items():
        before = None
        lines.append(nodeid)
        for key, series in test.items():
            window = history.window(series, nodeid, series[0].fingerprint, accepted)
            mark = accepted.get(key)
            roles = [
                "accepted" if mark and run.run == mark.run else "window" if run in window else "" for run in series
            ]
            rows += [speedtable.csv_row(run, role) for run, role in zip(series, roles)]
            if before is not None:
                lines.append(f"  fingerprint: {', '.join(history.differences(before, series[0].fingerprint))}")
            before = series[0].fingerprint
            lines += [f"  {line}" for line in speedtable.series_lines(series, roles, _encoding(sys.stdout))]
        lines.append("")
    if options.csv:
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows(rows)
        lines = table.getvalue().split("\n")
    _write(lines[:-1])
    return 0


def _accept(
    folder: Path, runs: Sequence[Run], chosen: Sequence[Run], accepted: Mapping[Series, Mark], substring: str | None
) -> int:
    wanted = [run for run in chosen if substring is None or substring in run.nodeid]
    if not wanted:
        raise UsageError(f"nothing to accept: no test of {_title(chosen)} has {substring!r} in its node id")
    if any(run not in runs for run in wanted):
        raise UsageError(f"{wanted[0].source} is not in {folder}: copy it there before you accept it")
    refused = [f"not accepted, {speedtable.doubt(run)}: {run.nodeid}" for run in wanted if not history.acceptable(run)]
    _write(refused, sys.stderr)
    taken = history.accept(folder, wanted)
    if not taken:
        raise UsageError(f"nothing to accept in {_title(chosen)}: name an earlier run, or time it again")
    now = history.marks(folder)
    for run in taken:
        old = history.window(runs, run.nodeid, run.fingerprint, accepted)
        new = history.window(runs, run.nodeid, run.fingerprint, now)
        _write([f"accepted {run.nodeid}: {_title([run])}", f"  {speedtable.move(old, new)}"])
    return 0


# -- output ---------------------------------------------------------------------------------------


def _encoding(stream: TextIO) -> str:
    return stream.encoding or "utf-8"


def _write(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Node ids may hold characters that the terminal has no code for: they are escaped."""
    stream = stream or sys.stdout
    encoding = _encoding(stream)
    for line in lines:
        stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()
