"""Our times of a GPU beside those of other timers, taken in turns in one process.

    PYTHONPATH=.:tests/benchmarks python tests/benchmarks/accuracy.py --out results/h200_accuracy [--turns 7]

For each workload of `speed_study` that a GPU limits, or whose launches are replayed, a turn is: our timing, the same
compiled function by ``triton.testing.do_bench`` in bursts of 2 ms and with its defaults, our profile, and a run of the
profiler that knows nothing of ours. In turns, because a GPU that is limited by power is not as fast a minute later; in
bursts too, because our rounds do other work in between, and ``do_bench`` with its defaults does not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import speed_study
import torch
import triton

from pytest_dynamo import clocks
from pytest_dynamo import profiling
from pytest_dynamo import timing


WORKLOADS = (("resnet50", "reduce-overhead"), ("gemm", "default"), ("membound", "default"))
#: How far the median of the turns may be from another timer's.
LIMIT = 0.02
PAIRS = (("time", "bursts"), ("time", "do_bench"), ("busy", "profiler"))


def turns(name: str, mode: str, number: int) -> list[dict[str, float]]:
    """Milliseconds by each timer, turn by turn."""
    device = torch.device("cuda")
    fn, args = speed_study.workload(name, "cuda")
    fast = torch.compile(fn, mode=None if mode == "default" else mode)

    def eager() -> Any:
        return fn(*args)

    def compiled() -> Any:
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        return fast(*args)

    def compilations() -> int:
        return sum(torch._dynamo.utils.counters["stats"].values())

    found = []
    with torch.no_grad():
        compiled()
        for _ in range(number):
            clock, canaries = clocks.clock_of(device), clocks.canaries(device)
            timed = timing.measure(
                eager, compiled, clock, timing.Plan(), compilations=compilations, canaries=canaries
            ).compiled
            turn = {"time": timed.times.median * 1e3}
            theirs = speed_study.do_bench(compiled)
            turn |= {"bursts": theirs["bursts"], "do_bench": theirs["defaults"]}
            busy = profiling.profile(compiled, device, timed.times.median)
            turn["busy"] = (busy.device_time or 0.0) * 1e3
            turn["profiler"] = speed_study.profiler_sum(compiled)
            found.append(turn)
    torch._dynamo.reset()
    return found


def rows(name: str, found: list[dict[str, float]]) -> list[str]:
    """Lines of the table: a workload by each other timer."""
    lines = []
    for ours, theirs in PAIRS:
        ratios = [turn[ours] / turn[theirs] for turn in found]
        middle = statistics.median(ratios)
        line = f"{name:26}{ours + ' to ' + theirs:18}"
        line += "".join(f"{statistics.median(turn[which] for turn in found):9.4f}" for which in (ours, theirs))
        line += f"{middle:8.3f}{min(ratios):8.3f}{max(ratios):8.3f}"
        lines.append(line + ("" if abs(middle - 1) <= LIMIT else f"  over {100 * LIMIT:.0f} %"))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="path of the results, without a suffix")
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    about = {
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    measured = {f"{name}/{mode}": turns(name, mode, given.turns) for name, mode in WORKLOADS}
    given.out.with_suffix(".json").write_text(json.dumps({"about": about, "turns": measured}, indent=1) + "\n")
    heads = ("ours", "theirs", "ratio", "least", "largest")
    lines = [
        *(f"{name}: {value}" for name, value in about.items()),
        "",
        f"{'':44}{heads[0]:>9}{heads[1]:>9}" + "".join(f"{word:>8}" for word in heads[2:]),
        *(line for name, found in measured.items() for line in rows(name, found)),
        f"Milliseconds, medians of {given.turns} turns; ratios turn by turn: their median, least and largest.",
        "bursts, do_bench: Triton's timer in bursts of 2 ms, and with its defaults.",
    ]
    given.out.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
