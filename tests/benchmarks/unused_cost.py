"""What the plugin costs a run that does not use it: CPU seconds of pytest over trivial tests.

Three arms in each round, in changing order: plugin installed and unused, plugin blocked, and plugin
blocked once more. The last two are the control: how far two equal things are apart.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

import sampling


BLOCKED = ("-p", "no:dynamo")
ARMS = {"unused": (), "blocked": BLOCKED, "blocked again": BLOCKED}


def environment(cache: Path) -> dict[str, str]:
    """Environment of the runs: equal for all arms, byte code is kept from the first run on."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
    return {**env, "PYTHONHASHSEED": "0", "PYTHONPYCACHEPREFIX": str(cache)}


def other_plugins() -> list[str]:
    """Block all other installed plugins: the less a run does, the more ours would show."""
    names = {entry.name for entry in importlib.metadata.entry_points(group="pytest11")} - {"dynamo"}
    return [word for name in sorted(names) for word in ("-p", f"no:{name}")]


def cpu_seconds(folder: Path, env: dict[str, str], options: tuple[str, ...]) -> float:
    """User and system time of one run of pytest, and of nothing else."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *other_plugins(), *options, "test_it.py"]
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.execve(words[0], words, env)
    _, status, usage = os.wait4(pid, 0)
    if status != 0:
        raise SystemExit(f"pytest {' '.join(options)} ended with status {status}")
    return usage.ru_utime + usage.ru_stime


def measure(rounds: int, tests: int, seed: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "suite")
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n")
        source = "\n\n\n".join(f"def test_{number}():\n    pass" for number in range(tests))
        (folder / "test_it.py").write_text(source + "\n")
        env = environment(Path(name, "cache"))
        for options in ARMS.values():
            cpu_seconds(folder, env, options)
        for order in sampling.orders(tuple(ARMS), rounds, seed):
            for arm in order:
                seconds[arm].append(cpu_seconds(folder, env, ARMS[arm]))
    return seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40, help="rounds, one pair of each kind in a round (40)")
    parser.add_argument("--tests", type=int, default=1000, help="tests in the suite (1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args(argv)

    where = sampling.environment()
    seconds = measure(given.pairs, given.tests, given.seed)
    where["load_at_end"] = sampling.load()
    rows = {
        "unused / blocked": sampling.summary(seconds["unused"], seconds["blocked"], seed=given.seed),
        "control: blocked / blocked": sampling.summary(seconds["blocked again"], seconds["blocked"], seed=given.seed),
    }
    notes = [
        f"CPU seconds (user and system) of a run of pytest over {given.tests} trivial tests, other plugins blocked.",
        "blocked: -p no:dynamo. Medians of ratios of pairs, bootstrapped intervals.",
    ]
    text = sampling.table("Cost of the plugin in a run that does not use it", where, rows, notes)
    data = {"environment": where, "tests": given.tests, "seed": given.seed, "results": rows, "seconds": seconds}
    sampling.write(given.out, "unused_cost", data, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
