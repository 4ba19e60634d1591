"""Times a test again in fresh processes: whether it is slower, or this process drew a bad lot."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_dynamo.measurement import Measurement


class NotConfirmedError(Exception):
    """The test could not be timed in a process of its own; the text says why."""


#: Options that save, compare or spread a run, with the number of words that follow each without ``=``.
_LEFT_OUT = {
    **dict.fromkeys(("--benchmark-save", "--benchmark-json", "--benchmark-storage"), 1),
    **dict.fromkeys(("--benchmark-compare-fail", "--dynamo-json", "--dynamo-confirm", "--junitxml", "--junit-xml"), 1),
    **dict.fromkeys(("-n", "--numprocesses", "--dist", "--tx", "--maxprocesses", "--report-log", "--basetemp"), 1),
    **dict.fromkeys(("--benchmark-autosave", "--dynamo-accept", "--lf", "--last-failed"), 0),
    **dict.fromkeys(("--ff", "--failed-first", "--sw", "--stepwise", "--nf", "--pdb", "--trace", "-d"), 0),
}
#: Options that are left out with the next word, if that is no option and selects no tests.
_MAY_TAKE = frozenset({"--benchmark-compare", "--benchmark-histogram"})
#: pytest's own options that take the next word, which may be the name of a file too.
_TAKING = {
    *("-k", "-m", "-p", "-c", "-o", "-W", "-r", "--rootdir", "--confcutdir", "--config-file", "--log-file"),
    *("--ignore", "--ignore-glob", "--deselect"),
}
#: Such as ``-n4``, in one word.
_SPREAD = re.compile(r"-n(\d+|auto|logical)")
REPORT = "report.json"
#: Seconds until a process is given up.
PATIENCE = 600.0


def command(config: pytest.Config, nodeid: str, folder: Path) -> list[str]:
    """The command that runs one test alone, with the options of this run; what it writes is in ``folder``."""
    words = list(kept(config.invocation_params.args, _positional(config)))
    words += [f"--rootdir={config.rootpath}", *(["-c", str(config.inipath)] if config.inipath else [])]
    alone = ["-n0"] if config.pluginmanager.hasplugin("xdist") else []
    file, _, rest = nodeid.partition("::")
    nodeid = f"{config.rootpath / file}::{rest}"
    if config.pluginmanager.hasplugin("cacheprovider"):
        alone += ["-o", f"cache_dir={folder / 'cache'}"]  # ours keeps what failed last, and `--lf` may be in the ini
    ours = ["--dynamo-confirm=0", f"--dynamo-json={folder / REPORT}", f"--benchmark-storage=file://{folder / 'runs'}"]
    return [sys.executable, "-m", "pytest", *words, *alone, *ours, f"--basetemp={folder / 'tmp'}", "-q", nodeid]


def _positional(config: pytest.Config) -> Sequence[str]:
    return getattr(config.option, "file_or_dir", None) or ()


def kept(args: Sequence[str | os.PathLike[str]], positional: Sequence[str]) -> list[str]:
    """Options of a command line without what it selects by position, saves, or spreads."""
    words = [str(word) for word in args]
    selecting = _selecting(words, positional)
    found: list[str] = []
    skip = 0
    before = ""
    for place, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if skip:
            skip -= 1
        elif before in _MAY_TAKE and not word.startswith("-") and place not in selecting:
            word = ""
        elif name in _MAY_TAKE:
            pass
        elif name in _LEFT_OUT:
            skip = 0 if equals else _LEFT_OUT[name]
        elif before in _TAKING or not (_SPREAD.fullmatch(word) or place in selecting):
            found.append(word)
        before = word
    return found


def _selecting(words: Sequence[str], positional: Sequence[str]) -> set[int]:
    """Places of positional words: as many of equal words as there are, for the others are values of options."""
    left = Counter(positional)
    places: set[int] = set()
    before = ["", *words]
    # What follows a long option may be its value. Otherwise the last are taken: options mostly come first.
    for place in sorted(range(len(words)), key=lambda n: (before[n].startswith("--") and "=" not in before[n], -n)):
        valued = before[place] in _TAKING or _LEFT_OUT.get(before[place]) == 1
        if left[words[place]] and not valued:
            left[words[place]] -= 1
            places.add(place)
    return places


def times_again(config: pytest.Config, nodeid: str, count: int) -> list[Measurement]:
    """Measurements of one test in ``count`` fresh processes. Raises NotConfirmedError."""
    return [_once(config, nodeid) for _ in range(count)]


def _once(config: pytest.Config, nodeid: str) -> Measurement:
    with tempfile.TemporaryDirectory() as folder:
        words = command(config, nodeid, Path(folder))
        arguments: dict[str, Any] = {"cwd": config.invocation_params.dir, "stdin": subprocess.DEVNULL}
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE, **arguments)
        except subprocess.TimeoutExpired:
            raise NotConfirmedError(f"timing it alone took more than {PATIENCE:.0f} s") from None
        try:
            records = json.loads(Path(folder, REPORT).read_text(encoding="utf-8"))["records"]
            measured = next(r["benchmark"]["measurement"] for r in records if r["nodeid"] == nodeid and r["benchmark"])
            return Measurement.from_json(measured)
        except (OSError, ValueError, KeyError, TypeError, StopIteration):
            why = f"exit status {done.returncode}, {_reason(done.stdout, done.stderr)}"
            raise NotConfirmedError(f"it can't be timed alone: {why}") from None


def _reason(*output: str) -> str:
    """The line of a run's output that tells most: a failure, or else the last."""
    lines = [line.strip() for text in output for line in reversed(text.splitlines()) if line.strip()]
    told = (line for line in lines if line.startswith(("FAILED ", "ERROR")))
    return next(told, lines[0] if lines else "no output")
