"""``pytest-dynamo compare BASE..HEAD``: the benchmarks of two revisions, timed alternately on this machine.

Each revision is checked out into a git worktree of its own, so that the working tree is left alone. No history
is needed, and what the machine does meanwhile happens to both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pytest_dynamo import detection
from pytest_dynamo import speedtable
from pytest_dynamo.history import HistoryError
from pytest_dynamo.measurement import Measurement
from pytest_dynamo.measurement import Run
from pytest_dynamo.measurement import middle


#: Processes of each revision.
PROCESSES = 3
#: Names the file in which a process tells what it imported.
IMPORTED = "PYTEST_DYNAMO_IMPORTED"


def main(base: str, head: str, pytest_args: Sequence[str]) -> int:
    """Return 1 if a benchmark of ``head`` is slower than in ``base``, 2 if that can't be found out, 0 otherwise.

    Raises HistoryError for what is no revision, or no repository, or where a revision lacks the current folder.
    """
    top = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel")).resolve()
    inside = Path.cwd().resolve().relative_to(top)
    commits = [_commit(top, name) for name in (base, head)]
    with tempfile.TemporaryDirectory(prefix="pytest-dynamo-") as folder:
        sides: list[list[list[Run]]] = [[], []]
        with _worktree(top, Path(folder, "base"), commits[0]), _worktree(top, Path(folder, "head"), commits[1]):
            for name, place in ((base, "base"), (head, "head")):
                if not Path(folder, place, inside).is_dir():
                    raise HistoryError(f"{name} has no folder {inside}: start in one that both revisions have")
            for number in range(PROCESSES):
                # The order alternates: what drifts meets both.
                for side in (0, 1) if number % 2 == 0 else (1, 0):
                    name = ("base", "head")[side]
                    _tell(f"timing {(base, head)[side]}, process {number + 1} of {PROCESSES}")
                    sides[side].append(_timed(Path(folder), name, top, inside, commits[side], pytest_args))
    return report(sides[0], sides[1], f"{head} ({commits[1][:9]}) against {base} ({commits[0][:9]})")


def report(base: Sequence[Sequence[Run]], head: Sequence[Sequence[Run]], title: str) -> int:
    """Print a block for each test; ``base`` and ``head``: the runs of each process. Return the exit status."""
    lines = [title, ""]
    verdicts = []
    names = dict.fromkeys(run.nodeid for process in (*base, *head) for run in process)
    for name in names:
        then = [run for process in base for run in process if run.nodeid == name]
        now = [run for process in head for run in process if run.nodeid == name]
        if not then or not now:
            lines += [f"{name}: only in {'head' if now else 'base'}", ""]
            continue
        verdict = detection.judge_revisions(then, now)
        last = replace(now[-1], measurement=middle([run.measurement for run in now]), verdict=verdict.verdict)
        lines += speedtable.run_lines(then, last, verdict, [], (), accepted=False)
        verdicts.append(verdict.verdict)
    lines.append(speedtable.totals(verdicts) if verdicts else "nothing was timed in both revisions")
    sys.stdout.write("\n".join(lines) + "\n")
    return int(detection.SLOWER in verdicts) if verdicts else 2


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _git(folder: Path, *words: str) -> str:
    """What git prints. Raises HistoryError with what it complains about."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise HistoryError(f"git can't be run: {error}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise HistoryError(f"git {words[0]}: {last}")
    return done.stdout.strip()


def _commit(top: Path, name: str) -> str:
    try:
        return _git(top, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except HistoryError:
        raise HistoryError(f"{name} is no revision of {top}") from None


@contextmanager
def _worktree(top: Path, folder: Path, commit: str) -> Iterator[None]:
    """A checkout of a commit, which is gone afterwards, also after Ctrl-C."""
    try:
        _git(top, "worktree", "add", "--detach", "--force", str(folder), commit)
        yield
    finally:
        subprocess.run(
            ["git", "-C", str(top), "worktree", "remove", "--force", str(folder)], capture_output=True, check=False
        )


def _timed(scratch: Path, name: str, top: Path, inside: Path, commit: str, pytest_args: Sequence[str]) -> list[Run]:
    """Run the benchmarks of a worktree in a fresh process."""
    root = scratch / name
    file, imported = scratch / f"{name}.json", scratch / f"{name}.imported.json"
    for old in (file, imported):
        old.unlink(missing_ok=True)
    # Before what is installed, which may be the working tree of somebody.
    ours = [root / place for entry in sys.path if (place := _place(Path(entry), top)) is not None]
    paths = [str(path) for path in dict.fromkeys((root / "src", root / inside, root, *ours)) if path.is_dir()]
    before = os.environ.get("PYTHONPATH")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *([before] if before else [])])}
    words = [sys.executable, "-m", "pytest", "--benchmark-only", *(_moved(word, top, root) for word in pytest_args)]
    words += ["-q", "-p", "no:cacheprovider", "-p", __name__, f"--dynamo-json={file}", "--dynamo-confirm=0"]
    words += [f"--benchmark-storage=file://{scratch / 'storage'}"]
    env[IMPORTED] = str(imported)
    done = subprocess.run(words, cwd=root / inside, env=env, capture_output=True, text=True, check=False)
    strays = _strays(imported, top, root)
    if strays:
        more = f" and {len(strays) - 1} more" if len(strays) > 1 else ""
        raise HistoryError(
            f"{name} can't be timed: {strays[0]}{more} came from the working tree, not from the revision "
            "(by an absolute path, a link or an editable install)"
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        found = [record for record in data["records"] if record["benchmark"]]
        runs = [
            _run(record["nodeid"], record["benchmark"], commit) for record in found if record["outcome"] == "passed"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "no output")
        raise HistoryError(f"{name} can't be timed: exit status {done.returncode}, {last} ({error})") from None
    for record in data["records"]:
        if record["outcome"] not in ("passed", "skipped", "xfailed"):
            _tell(f"{name}: {record['nodeid']} {record['outcome']}: it is not compared")
    return runs


def _place(path: Path, top: Path) -> Path | None:
    """Where a path is below the top folder, as it is written or by its links; None: elsewhere."""
    for found in (Path(os.path.normpath(path)), path.resolve()):
        if found.is_relative_to(top):
            return found.relative_to(top)
    return None


def _moved(word: str, top: Path, root: Path) -> str:
    """A word for pytest, with an absolute path below the top folder moved into a worktree.

    From an absolute path pytest takes the conftest files and the folder for imports too.
    """
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    path, colons, node = value.partition("::")
    place = _place(Path(path), top) if os.path.isabs(path) else None
    return word if place is None else f"{option}{equals}{root / place}{colons}{node}"


def pytest_unconfigure() -> None:
    """In the process of a revision, whose plugin this is: tell the files of all modules."""
    if IMPORTED in os.environ:
        modules = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
        files = {found["__file__"] for found in modules if isinstance(found.get("__file__"), str)}
        Path(os.environ[IMPORTED]).write_text(json.dumps(sorted(files)), encoding="utf-8")


def _strays(imported: Path, top: Path, root: Path) -> list[Path]:
    """Files that were imported from the working tree though the worktree has them, as places below the top folder."""
    # It is not there if pytest did not start, or if the revision is one of this plugin that can't tell yet.
    files = json.loads(imported.read_text(encoding="utf-8")) if imported.is_file() else []
    found = [path for path in map(Path.resolve, map(Path, files)) if not path.is_relative_to(root.resolve())]
    places = [path.relative_to(top) for path in found if path.is_relative_to(top)]
    return [place for place in places if (root / place).exists()]


def _run(nodeid: str, benchmark: dict[str, object], commit: str) -> Run:
    measured = Measurement.from_json(benchmark["measurement"])  # type: ignore[arg-type]
    fields = {name: benchmark.get(name) for name in ("graphs", "graph_breaks", "recompiles")}
    return Run(nodeid, str(benchmark["run"]), "", {}, measured, "not slower", commit=commit, **fields)  # type: ignore[arg-type]
