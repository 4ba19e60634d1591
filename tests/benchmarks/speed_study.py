"""Times unchanged and slowed code in fresh processes on one GPU: what the rule for slower is measured by.

    python tests/benchmarks/speed_study.py run --out FILE.json [--processes 10] [--plan-of FILE.json]
    python tests/benchmarks/speed_study.py show FILE.json...

``run`` starts processes in turn: one runs the workloads as they are (base), one with more work planted in them (head),
as `HEADS` says. Each measures by `pytest_dynamo.timing` with the fixture's default plan, and writes what
``false_alarms.py`` reads, so that the base processes are an A/A set. ``gpu=0.05`` plants an extra pass over memory in
the compiled code, as large as takes that part of the GPU time; ``host=0.3`` runs a Python loop before each call that
takes that part of what the host needs in the same process. ``show`` holds every head process against the base processes
of its file, and tells how much was really added. The first process, with cold caches, and pilots, by which the size of
the passes is set, belong to no set; an earlier file can set it instead of pilots. Some base processes also time by
``triton.testing.do_bench`` and by a plain run of the profiler.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from typing import Any


#: Name, and the mode in which it is compiled.
WORKLOADS = (
    ("resnet50", "default"),
    ("resnet50", "reduce-overhead"),
    ("mlp", "default"),
    ("mlp", "reduce-overhead"),
    ("gemm", "default"),
    ("membound", "default"),
    ("training", "default"),
)
#: What is planted in which of them.
HEADS = {
    "resnet50/default": ("gpu=0.1", "host=0.3"),
    "mlp/default": ("gpu=0.1", "host=0.3"),
    "resnet50/reduce-overhead": ("gpu=0.05",),
    "mlp/reduce-overhead": ("gpu=0.05",),
    "gemm/default": ("gpu=0.05",),
    "membound/default": ("gpu=0.05",),
}
#: Processes by which the size of the passes is set.
PILOTS = 2
#: Base processes, the first ones, that use other timers too.
ACCURATE = 3
#: Sizes on a GPU, and small ones to try this script on a CPU.
SIZES = {"cuda": (16, 224, 4096, 16384), "cpu": (1, 32, 128, 256)}


def workload(name: str, device: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function and its arguments, as in ``data/h200_aa.json``; and a training step."""
    import torch
    from torch import nn
    from torchvision.models import resnet18
    from torchvision.models import resnet50

    batch, pixels, side, rows = SIZES[device]
    torch.manual_seed(0)
    half = torch.bfloat16 if device == "cuda" else torch.float32
    if name == "resnet50":
        model = (resnet50 if device == "cuda" else resnet18)().eval().to(device, half)
        return model, (torch.randn(batch, 3, pixels, pixels, device=device, dtype=half),)
    if name == "mlp":
        layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())]
        return nn.Sequential(*layers).eval().to(device), (torch.randn(8, 256, device=device),)
    if name == "gemm":
        x, w = (torch.randn(side, side, device=device, dtype=half) for _ in range(2))
        return (lambda x, w: nn.functional.gelu(x @ w) + x), (x, w)
    if name == "membound":
        return (lambda x: torch.softmax(x * 2 + 1, -1) * torch.sigmoid(x)), (torch.randn(rows, 4096, device=device),)
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024))]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, (torch.randn(4096 if device == "cuda" else 8, 1024, device=device),)


def planted(fn: Callable[..., Any], elements: int, device: str) -> Callable[..., Any]:
    """The function with a pass over so many elements beside it, whose result is returned too."""
    import torch

    class Planted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fn = fn
            # A buffer: CUDA graphs would copy any other tensor into memory of their own first.
            self.register_buffer("source", torch.ones(elements, device=device))

        def forward(self, *args: Any) -> Any:
            return self.fn(*args), self.source * 1.5

    return Planted().eval()


def process(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all workloads in this process."""
    import torch
    import torchvision.models  # noqa: F401  with all else that takes time before the GPU is needed

    from pytest_dynamo import clocks
    from pytest_dynamo import machine
    from pytest_dynamo import profiling
    from pytest_dynamo import timing
    from pytest_dynamo.measurement import EAGER
    from pytest_dynamo.measurement import OF_HOST

    if sys.stdin.readline() != "go\n":  # the one before this still measures
        raise SystemExit("no longer needed")

    def compilations() -> int:
        return sum(torch._dynamo.utils.counters["stats"].values())

    device = torch.device(given.device)
    plan = json.loads(given.plan)
    found: dict[str, Any] = {"machine": machine.machine_id(), "host": "issuing", "heads": {}}

    def measured(key: str, more: dict[str, Any]) -> dict[str, Any]:
        name, _, mode = key.partition("/")
        fn, args = workload(name, device.type)
        planted_fn = planted(fn, more["elements"], device.type) if more.get("elements") else fn
        fast = torch.compile(planted_fn, mode=None if mode == "default" else mode)
        turns = 0

        def compiled() -> Any:
            if mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            for _ in range(turns):
                pass
            return fast(*args)

        def eager() -> Any:
            return fn(*args)

        def timed_by(plan: timing.Plan) -> timing.Timing:
            clock, canaries = clocks.clock_of(device), clocks.canaries(device)
            return timing.measure(eager, compiled, clock, plan, compilations=compilations, canaries=canaries)

        began = time.perf_counter()
        with torch.set_grad_enabled(name == "training"):
            compiled()
            if device.type == "cuda":
                torch.cuda.synchronize()
            first = time.perf_counter() - began
            if given.compile_only:
                torch._dynamo.reset()
                return {"first_call_s": round(first, 2)}
            if more.get("host"):
                short = timing.Plan(rounds=15, min_rounds=15, warm_seconds=0.1)
                without = timed_by(short)
                needs = without.compiled.host_times or without.compiled.times
                turns = round(more["host"] * needs.median / seconds_of_a_turn())
                # In between other work a turn takes longer or shorter than in a row.
                added = timed_by(short).ratios[EAGER] / without.ratios[EAGER] - 1
                turns = round(turns * min(max(more["host"] / max(added, 1e-6), 0.25), 4.0))
            began = time.perf_counter()
            timed = timed_by(timing.Plan())
            sides = {"eager": timed.eager, "compiled": timed.compiled}
            busy = {
                which: profiling.profile(call, device, sides[which].times.median)
                for which, call in (("eager", eager), ("compiled", compiled))
            }
            cost = time.perf_counter() - began
            result = {
                "first_call_s": round(first, 2),
                "cost_s": round(cost, 2),
                "event": {which: [round(s * 1e3, 5) for s in side.time] for which, side in sides.items()},
                "host": {which: [round(s * 1e3, 5) for s in (side.host or side.time)] for which, side in sides.items()},
                "kernel": {which: [(b.device_time or 0.0) * 1e3, b.launches or 0] for which, b in busy.items()},
                # Round by round, as eager and compiled.
                "canaries": {
                    which: [round(s * 1e3, 5) for s in ((samples.host if which in OF_HOST else None) or samples.time)]
                    for which, samples in timed.canaries.items()
                },
            }
            if turns:
                result["turns"] = turns
            if given.accuracy and device.type == "cuda":
                result["profiler"] = profiler_sum(compiled)
                result["do_bench"] = do_bench(compiled)
        torch._dynamo.reset()
        return result

    for name, mode in WORKLOADS:
        key = f"{name}/{mode}"
        if given.only and key not in given.only:
            continue
        if not plan:
            found[key] = measured(key, {})
        for head, more in plan.get(key, {}).items():
            found["heads"].setdefault(head, {})[key] = measured(key, more)
    return found


def seconds_of_a_turn() -> float:
    """Of the loop that is planted on the host."""
    turns, found = 20_000, []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(turns):
            pass
        found.append((time.perf_counter() - began) / turns)
    return statistics.median(found)


def do_bench(compiled: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds by Triton's own timer, which makes the L2 cache cold before each call.

    With its defaults the GPU works without a pause, in bursts of a few milliseconds about as much as in our alternating
    rounds: code that is limited by power is slower in the first.
    """
    import triton.testing

    def bench(warmup: int, rep: int) -> float:
        return float(triton.testing.do_bench(compiled, warmup=warmup, rep=rep, return_mode="median"))

    bursts = []
    for _ in range(15):
        time.sleep(0.01)
        bursts.append(bench(1, 2))
    return {"bursts": statistics.median(bursts), "defaults": bench(25, 100)}


def profiler_sum(compiled: Callable[[], Any], calls: int = 30) -> float:
    """Milliseconds of all kernels of a call, by a run of the profiler that knows nothing of ours."""
    import torch

    for _ in range(calls):
        compiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            compiled()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / calls / 1e3


def busy_or_elapsed(measured: dict[str, Any]) -> float:
    """Milliseconds of GPU time of a call: busy where it is launch-bound, as the rule judges it."""
    from pytest_dynamo.measurement import launch_bound

    busy = measured["kernel"]["compiled"][0] or None  # none on a CPU
    elapsed, host = (statistics.median(measured[kind]["compiled"]) for kind in ("event", "host"))
    return float(busy if launch_bound(busy, elapsed, host) else elapsed)


def calibrate(first: dict[str, Any], milliseconds: float) -> dict[str, Any]:
    """What to plant in each workload at first: elements of the extra pass, or a part of the host's time."""
    plan: dict[str, Any] = {}
    for key, heads in HEADS.items():
        for head in heads if key in first else ():
            kind, part = kind_and_part(head)
            elements = busy_or_elapsed(first[key]) * part / milliseconds * MANY
            plan.setdefault(key, {})[head] = {"host": part} if kind == "host" else {"elements": rounded(elements)}
    return plan


def corrected(plan: dict[str, Any], base: Sequence[dict[str, Any]], heads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The plan with passes set by what heads really were slower than base."""
    new: dict[str, Any] = {}
    for key, planted_in in plan.items():
        for head, more in planted_in.items():
            kind, part = kind_and_part(head)
            if kind == "gpu":
                then = statistics.median(busy_or_elapsed(one[key]) for one in base)
                now = statistics.median(busy_or_elapsed(one["heads"][head][key]) for one in heads)
                factor = then * part / max(now - then, 1e-6)
                more = {"elements": rounded(more["elements"] * min(max(factor, 0.25), 4.0))}
            else:
                more = {"host": part}
            new.setdefault(key, {})[head] = more
    return new


def rounded(elements: float) -> int:
    """To what kernels like: other numbers are loaded one by one."""
    return max(1, round(elements / 4096)) * 4096


def kind_and_part(head: str) -> tuple[str, float]:
    kind, _, part = head.partition("=")
    return kind, float(part)


#: Elements of a pass that is timed to see how fast the memory is.
MANY = 1 << 24


def pass_over_memory(device: str) -> float:
    """Milliseconds of a pass over `MANY` elements of float32."""
    import torch

    from pytest_dynamo import clocks
    from pytest_dynamo import timing

    source = torch.ones(MANY, device=device)
    call = lambda: source * 1.5  # noqa: E731
    clock = clocks.clock_of(torch.device(device))
    return timing.measure(call, call, clock, timing.Plan(), compilations=int).compiled.times.median * 1e3


class Processes:
    """Runs measuring processes one after the other; the next one loads its libraries meanwhile."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._words = [sys.executable, __file__, "process", "--device", given.device]
        self._words += ["--only", ",".join(given.only)] if given.only else []
        self._env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(prefix="speed-study-")}

    def __call__(self, wanted: Iterable[tuple[dict[str, Any], str]]) -> Iterator[dict[str, Any]]:
        """Yield what each measured. ``wanted``: what to plant; ``compile``, ``cold``, ``warm`` or ``accuracy``."""
        waiting = None
        try:
            for plan, how in wanted:
                current, waiting = waiting, self._start(plan, how)
                if current is not None:
                    yield self._measured(current)
            if waiting is not None:
                yield self._measured(waiting)
        finally:
            if waiting is not None:
                waiting.communicate()  # ends without the word that it waits for

    def _start(self, plan: dict[str, Any], how: str) -> subprocess.Popen[str]:
        words = [*self._words, "--plan", json.dumps(plan)]
        words += {"accuracy": ["--accuracy"], "compile": ["--compile-only"]}.get(how, [])
        # Where all comes from caches, workers of inductor would only disturb.
        env = self._env if how in ("compile", "cold") else {**self._env, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def _measured(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        began = time.monotonic()
        out, err = process.communicate("go\n")
        if process.returncode:
            raise SystemExit(err[-2000:])
        measured: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), **json.loads(out.splitlines()[-1])}
        return measured


def run(given: argparse.Namespace) -> int:
    import torch

    from pytest_dynamo.environment import environment

    end = time.monotonic() + given.seconds
    processes = Processes(given)
    first, pilots = None, []
    if given.plan_of:
        before = json.loads(given.plan_of.read_text(encoding="utf-8"))
        plan = corrected(before["plan"], before["runs"], before["heads"])
        list(processes([({}, "compile")]))
    else:
        (first,) = processes([({}, "cold")])  # not of the set
        plan = calibrate(first, pass_over_memory(given.device))
        for _ in range(PILOTS):
            passes = {
                key: {head: more for head, more in heads.items() if "elements" in more} for key, heads in plan.items()
            }
            pilots += processes([(passes, "cold")])
            plan = corrected(plan, [first], pilots[-1:])
    if given.heads:
        wanted_heads = [head.rpartition(":")[::2] for head in given.heads]
        plan = {key: {head: plan[key][head] for one, head in wanted_heads if one == key} for key, _ in wanted_heads}
    gpu = torch.cuda.get_device_name() if given.device == "cuda" else "none"
    facts = {**environment(), "gpu": gpu}  # in this order: the driver is known once CUDA runs
    data: dict[str, Any] = {
        "about": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC, {facts['gpu']}, driver "
        f"{facts['driver']}, torch {facts['torch']}, triton {facts['triton']}, Python {facts['python']}: fresh "
        "processes, base and heads in turn. Milliseconds.",
        "plan": plan,
        "first": first,
        "pilots": pilots,
        "runs": [],
        "heads": [],
    }

    def wanted() -> Iterator[tuple[dict[str, Any], str]]:
        for number in range(given.processes):
            if time.monotonic() > end:
                return
            yield {}, "accuracy" if number < given.accurate else "warm"
            yield plan, "warm" if number else "cold"  # the passes have another size than in the pilot

    for number, measured in enumerate(processes(wanted())):
        data["heads" if number % 2 else "runs"].append(measured)
        if number % 2:  # whole rounds only
            given.out.write_text(json.dumps(data, separators=(",", ":")), encoding="utf-8")
            seconds = f"{data['runs'][-1]['seconds']} s and {measured['seconds']} s"
            print(f"process {number // 2 + 1} of {given.processes}: {seconds}", file=sys.stderr, flush=True)
    return 0


def show(given: argparse.Namespace) -> int:
    """Print what was planted, what was caught, what it cost, and how near to other timers it is."""
    import false_alarms

    from pytest_dynamo.detection import SLOWER
    from pytest_dynamo.detection import judge

    lines = []
    for file in given.files:
        data = json.loads(file.read_text(encoding="utf-8"))
        base = false_alarms.runs_of(data)
        lines += [f"{file.name}: {data['about']}", ""]
        heads = ("base", "cost s", "bursts", "defaults", "of itself", "profiler")
        lines.append(f"{'':26}" + "".join(f"{word:>10}" for word in heads))
        for name, runs in base.items():
            measured = [one[name] for one in data["runs"]]
            row = f"{name:26}{len(runs):10}{statistics.median(one['cost_s'] for one in measured):10.2f}"
            # Where other timers ran too: ours to theirs, the farthest from 1.
            both = [one for one in measured if one.get("do_bench")]
            for how in ("bursts", "defaults") if both else ():
                told = [statistics.median(one["event"]["compiled"]) / one["do_bench"][how] for one in both]
                bound = any(run.measurement.launch_bound for run in runs[: len(both)])
                row += f"{'-':>10}" if bound else f"{max(told, key=far):10.3f}"
            if both:
                theirs = [one["do_bench"]["defaults"] for one in both]
                row += f"{'-':>10}" if bound else f"{max(theirs) / min(theirs):10.3f}"
                row += f"{max((one['kernel']['compiled'][0] / one['profiler'] for one in both), key=far):10.3f}"
            lines.append(row)
        lines += [
            "bursts, defaults: time to that of do_bench where the GPU is the slower one; profiler: busy time to its.",
            "Of processes the one farthest from 1. of itself: do_bench's longest to its shortest, with its defaults.",
        ]
        for head in sorted({head for heads in HEADS.values() for head in heads}):
            slowed = [{**one, **one["heads"][head]} for one in data["heads"] if head in one["heads"]]
            if not slowed:
                continue
            lines += ["", f"planted: {head}"]
            heads = ("time +", "busy +", "to eager +", "pairs", "caught")
            lines.append(f"{'':26}" + "".join(f"{word:>10}" for word in heads))
            for name, now in false_alarms.runs_of({"runs": slowed}).items():
                row = f"{name:26}"
                for read in (of_time, of_device, of_host):
                    then = middle([run.measurement for run in base[name]], read)
                    row += f"{100 * (middle([run.measurement for run in now], read) / then - 1):9.1f}%"
                # Every head process against the full window, and against each that leaves one base process out.
                windows = [base[name], *([run for run in base[name] if run is not out] for out in base[name])]
                verdicts = [judge(window, one).verdict for window in windows for one in now]
                row += f"{len(verdicts):10}{100 * verdicts.count(SLOWER) / len(verdicts):9.0f}%"
                lines.append(row)
        lines.append("")
    print("\n".join(lines))
    return 0


def far(ratio: float) -> float:
    return abs(ratio - 1)


def of_time(measured: Any) -> Any:
    return measured.compiled.time.median


def of_device(measured: Any) -> Any:
    return measured.compiled.device_time


def of_host(measured: Any) -> Any:
    return measured.ratios["eager"]


def middle(measured: Sequence[Any], read: Callable[[Any], float]) -> float:
    values = [read(one) for one in measured]
    return statistics.median(values) if all(values) else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--processes", type=int, default=10)
    runs.add_argument("--plan-of", type=Path, help="plant what this file did, made larger or smaller by what it added")
    runs.add_argument(
        "--heads", type=lambda text: text.split(","), default=[], help="only these, as gemm/default:gpu=0.05"
    )
    runs.add_argument("--accurate", type=int, default=ACCURATE, help="base processes that use other timers too")
    runs.add_argument("--seconds", type=float, default=float("inf"), help="start no further process after that")
    one = commands.add_parser("process")
    one.add_argument("--plan", default="{}")
    one.add_argument("--accuracy", action="store_true")
    one.add_argument("--compile-only", action="store_true")
    for command in (runs, one):
        command.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
        command.add_argument("--only", type=lambda text: text.split(","), default=[])
    shown = commands.add_parser("show")
    shown.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "process":
        print(json.dumps(process(given)), flush=True)
        os._exit(0)  # what libraries do at exit takes seconds
    return run(given) if given.command == "run" else show(given)


if __name__ == "__main__":
    sys.exit(main())
