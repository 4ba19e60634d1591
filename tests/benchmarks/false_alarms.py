"""How often unchanged code would be called slower: replays processes that ran the same code.

Each file holds runs of the same workloads in fresh processes, as ``data/h200_aa.json`` does: per workload samples of
``event`` and ``host`` time in milliseconds for eager and compiled, ``kernel`` as (busy milliseconds, launches), and
samples of ``canaries``. ``host`` is elapsed until the GPU has finished, or what the host needs to issue the call if the
run says ``"host": "issuing"``. Every run is held against every set of other runs as its window, of every size; "pairs"
are windows of one run. Beside it stands the rule "5 % over the last run" on event medians, and how often code is caught
that takes so much longer (scaled, so no measurement). A second table judges a suspect by the median of itself and two
more runs that are not in its window, as confirming in fresh processes does.

    python tests/benchmarks/false_alarms.py [FILE ...] [--out results/false_alarms.txt]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_dynamo.detection import NO_BASELINE
from pytest_dynamo.detection import SLOWER
from pytest_dynamo.detection import UNSTABLE
from pytest_dynamo.detection import WINDOW
from pytest_dynamo.detection import judge
from pytest_dynamo.measurement import EAGER
from pytest_dynamo.measurement import OF_HOST
from pytest_dynamo.measurement import Measurement
from pytest_dynamo.measurement import Run
from pytest_dynamo.measurement import Side
from pytest_dynamo.measurement import Times
from pytest_dynamo.measurement import launch_bound
from pytest_dynamo.measurement import middle


HERE = Path(__file__).parent
#: Of a window's size at most so many sets of runs are tried, drawn at random.
SETS = 400


def runs_of(data: dict[str, Any]) -> dict[str, list[Run]]:
    """Runs by workload, in the order of the file."""
    found: dict[str, list[Run]] = {}
    for number, run in enumerate(data["runs"]):
        for name, measured in run.items():
            if isinstance(measured, dict) and "event" in measured:
                made = Run(
                    name, str(number), str(run.get("machine", "")), {}, measurement(name, measured, run.get("host"))
                )
                found.setdefault(name, []).append(made)
    return found


def measurement(name: str, measured: dict[str, Any], host: str | None) -> Measurement:
    def side(which: str) -> Side:
        times = [Times.of([sample / 1e3 for sample in measured[kind][which]]) for kind in ("event", "host")]
        busy, launches = measured["kernel"][which]
        return Side(times[0], times[1], busy / 1e3 if busy else None, round(launches) or None)

    eager, compiled = side("eager"), side("compiled")
    speedup = eager.time.median / compiled.time.median
    issuing = compiled.host.median if host == "issuing" and compiled.host is not None else None
    bound = launch_bound(compiled.device_time, compiled.time.median, issuing)
    replayed = "reduce-overhead" in name
    return Measurement(eager, compiled, speedup, speedup, speedup, bound, replayed, ratios=ratios(measured))


def ratios(measured: dict[str, Any]) -> dict[str, float]:
    """Of compiled to eager and to fixed work, round by round; by medians where a file has no samples of that work."""
    found = {}
    for name, samples in {EAGER: measured["host"]["eager"], **measured.get("canaries", {})}.items():
        own = measured["host" if name in OF_HOST else "event"]["compiled"]
        beside = samples if isinstance(samples, list) else [samples] * len(own)
        found[name] = statistics.median(one / two for one, two in zip(own, beside))
    return found


def slowed(run: Run, part: float, what: str) -> Run:
    """A run whose compiled code takes so much more GPU time, or so much more time on the host."""
    compiled = run.measurement.compiled
    factor = 1 + part
    if what == "gpu":
        extra = (compiled.device_time or 0.0) * part if run.measurement.launch_bound else compiled.time.median * part
        time = replace(compiled.time, median=compiled.time.median + extra)
        compiled = replace(compiled, time=time, device_time=(compiled.device_time or 0.0) * factor)
    else:
        assert compiled.host is not None
        compiled = replace(compiled, host=replace(compiled.host, median=compiled.host.median * factor))
        more = {name: ratio * factor for name, ratio in run.measurement.ratios.items() if name in OF_HOST}
        return replace(run, measurement=replace(run.measurement, compiled=compiled, ratios=more))
    return replace(run, measurement=replace(run.measurement, compiled=compiled))


def windows(count: int, size: int) -> Iterator[tuple[int, ...]]:
    """Sets of runs of one size: all, or a sample of them."""
    if math.comb(count, size) <= SETS:
        yield from itertools.combinations(range(count), size)
    else:
        draw = random.Random(size)
        yield from (tuple(sorted(draw.sample(range(count), size))) for _ in range(SETS))


def median_run(runs: Sequence[Run]) -> Run:
    """What confirming in fresh processes judges."""
    return replace(runs[0], measurement=middle([run.measurement for run in runs]))


def replay(
    runs: list[Run], sizes: Sequence[int], *, confirm: bool = False, planted: float = 0.0, what: str = "gpu"
) -> Counter[str]:
    """Verdicts of all comparisons of one workload."""
    told: Counter[str] = Counter()
    for number, run in enumerate(runs):
        others = [other for n, other in enumerate(runs) if n != number]
        for size in sizes:
            for chosen in windows(len(others), size):
                window = [others[n] for n in chosen]
                now = slowed(run, planted, what) if planted else run
                verdict = judge(window, now).verdict
                if verdict == SLOWER and confirm:
                    fresh = [other for n, other in enumerate(others) if n not in chosen][:2]
                    if len(fresh) == 2:
                        more = [slowed(one, planted, what) if planted else one for one in fresh]
                        verdict = judge(window, median_run([now, *more])).verdict
                told[verdict] += 1
    return told


def last_run_rule(runs: list[Run]) -> float:
    """Share of ordered pairs of which the second is 5 % over the first by event median."""
    times = [run.measurement.compiled.time.median for run in runs]
    pairs = list(itertools.permutations(times, 2))
    return sum(now > 1.05 * then for then, now in pairs) / len(pairs)


def table(data: dict[str, Any], confirm: bool) -> Iterator[str]:
    yield data.get("about", "")
    found = runs_of(data)
    count = min(len(runs) for runs in found.values())
    sizes = range(1, min(WINDOW, count - 1) + 1)
    yield ""
    heads = ("judged", "slower", "%", "unstable", "5 % over", "+5 % GPU", "+10 % GPU", "+30 % host")
    below = ("", "", "", "", "the last", "caught", "caught", "caught")
    for line in (heads, below):
        yield f"{'':26}" + "".join(f"{word:>{width}}" for word, width in zip(line, (9, 9, 7, 10, 10, 10, 10, 11)))
    total: Counter[str] = Counter()
    for name, runs in found.items():
        told = replay(runs, sizes, confirm=confirm)
        total += told
        largest = [sizes[-1]]
        power = [
            caught(replay(runs, largest, confirm=confirm, planted=part, what=what))
            for part, what in ((0.05, "gpu"), (0.10, "gpu"), (0.30, "host"))
        ]
        bound = any(run.measurement.launch_bound for run in runs)
        yield (
            f"{name:26}{told.total():9}{told[SLOWER]:9}{100 * told[SLOWER] / told.total():7.2f}"
            f"{told[UNSTABLE] + told[NO_BASELINE]:10}{100 * last_run_rule(runs):9.0f}%"
            f"{power[0]:>10}{power[1]:>10}{power[2] if bound else '-':>11}"
        )
    part = 100 * total[SLOWER] / total.total()
    open_ = 100 * (total[UNSTABLE] + total[NO_BASELINE]) / total.total()
    yield f"{'all':26}{total.total():9}{total[SLOWER]:9}{part:7.2f}{total[UNSTABLE] + total[NO_BASELINE]:10}"
    yield ""
    yield f"slower: {part:.2f} % of all comparisons (1 % allowed)"
    yield f"unstable or without a baseline: {open_:.2f} % (5 % allowed)"
    yield f"caught: of code slowed by scaling its numbers, against windows of {sizes[-1]} runs"


def caught(told: Counter[str]) -> str:
    return f"{100 * told[SLOWER] / told.total():.0f}%"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="*", default=[HERE / "data" / "h200_aa.json"], metavar="FILE")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    lines = []
    for file in given.files:
        data = json.loads(file.read_text(encoding="utf-8"))
        for confirm in (False, True):
            lines += [f"{file.name}, {'suspects confirmed by two more runs' if confirm else 'one process decides'}"]
            lines += [*table(data, confirm), ""]
    text = "\n".join(lines)
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
