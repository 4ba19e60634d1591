"""Times unchanged and slowed code in fresh processes on one GPU: what the rule for slower is measured by.

    python tests/benchmarks/speed_study.py run --out FILE.json [--processes 10] [--head gpu=0.05] [--head host=0.3]
    python tests/benchmarks/speed_study.py show FILE.json...

``run`` starts processes in turn: one runs the workloads as they are (base), one for each ``--head`` with more work
planted. Each measures by `pytest_dynamo.timing` with the fixture's default plan, and writes what ``false_alarms.py``
reads, so that the base processes are an A/A set. ``gpu=0.05`` plants an extra matrix product in the compiled code, as
large as takes that part of the GPU time; ``host=0.3`` spends that part of the call's host time in Python before it.
``show`` holds every head process against the base processes of its file, and tells how much GPU time was really added.
The first process, with cold caches, belongs to no set; it is held against ``triton.testing.do_bench`` and a plain
run of the profiler.
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


def planted(fn: Callable[..., Any], rows: int, device: str) -> Callable[..., Any]:
    """The function with a matrix product of so many rows beside it, whose result is returned too."""
    import torch

    left, right = (torch.randn(n, 1024, device=device) for n in (rows, 1024))

    def more(*args: Any) -> Any:
        return fn(*args), torch.mm(left, right)

    return more


def process(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all workloads in this process."""
    import torch

    from pytest_dynamo import clocks
    from pytest_dynamo import machine
    from pytest_dynamo import profiling
    from pytest_dynamo import timing

    def compilations() -> int:
        return sum(torch._dynamo.utils.counters["stats"].values())

    device = given.device
    plan = json.loads(given.plan)
    found: dict[str, Any] = {"machine": machine.machine_id(), "planted": {}}
    for name, mode in WORKLOADS:
        key = f"{name}/{mode}"
        if given.only and key not in given.only:
            continue
        fn, args = workload(name, device)
        more = plan.get(key, {})
        planted_fn = planted(fn, more["rows"], device) if more.get("rows") else fn
        fast = torch.compile(planted_fn, mode=None if mode == "default" else mode)
        host = more.get("host", 0.0)

        def compiled(fast: Any = fast, args: Any = args, host: float = host, mode: str = mode) -> Any:
            if mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            if host:
                until = time.perf_counter() + host
                while time.perf_counter() < until:
                    pass
            return fast(*args)

        def eager(fn: Any = fn, args: Any = args) -> Any:
            return fn(*args)

        began = time.perf_counter()
        with torch.set_grad_enabled(name == "training"):
            compiled()
            if device == "cuda":
                torch.cuda.synchronize()
            first = time.perf_counter() - began
            began = time.perf_counter()
            clock = clocks.CudaClock() if device == "cuda" else clocks.CpuClock()
            timed = timing.measure(
                eager, compiled, clock, timing.Plan(), compilations=compilations, canaries=clocks.canaries(device)
            )
            busy = {
                which: profiling.profile(call, device) for which, call in (("eager", eager), ("compiled", compiled))
            }
            cost = time.perf_counter() - began
        sides = {"eager": timed.eager, "compiled": timed.compiled}
        found[key] = {
            "first_call_s": round(first, 2),
            "cost_s": round(cost, 2),
            "event": {which: [round(s * 1e3, 5) for s in side.time] for which, side in sides.items()},
            "host": {which: [round(s * 1e3, 5) for s in (side.host or side.time)] for which, side in sides.items()},
            "kernel": {which: [(b.device_time or 0.0) * 1e3, b.launches or 0] for which, b in busy.items()},
            "canaries": {which: samples.times.median * 1e3 for which, samples in timed.canaries.items()},
        }
        if given.accuracy and device == "cuda":
            found[key]["do_bench"] = do_bench(compiled)
            found[key]["profiler"] = profiler_sum(compiled)
        torch._dynamo.reset()
    return found


def do_bench(compiled: Callable[[], Any]) -> float:
    """Milliseconds by Triton's own timer, with its flush of the L2 cache before each call."""
    import torch
    import triton.testing

    with torch.no_grad():
        return float(triton.testing.do_bench(compiled, warmup=100, rep=500, return_mode="median"))


def profiler_sum(compiled: Callable[[], Any], calls: int = 30) -> float:
    """Milliseconds of all kernels of a call, by a run of the profiler that knows nothing of ours."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            compiled()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / calls / 1e3


def calibrate(kind: str, part: float, base: dict[str, Any], device: str) -> dict[str, Any]:
    """What to plant in each workload: rows of the extra product, or seconds on the host."""
    plan: dict[str, Any] = {}
    for key, measured in base.items():
        if not isinstance(measured, dict) or "kernel" not in measured:
            continue
        busy, elapsed = measured["kernel"]["compiled"][0], statistics.median(measured["event"]["compiled"])
        if kind == "gpu":
            work = (busy if busy and busy < 0.8 * elapsed else elapsed) * part / 1e3
            plan[key] = {"rows": rows_for(work, device)}
        else:
            plan[key] = {"host": statistics.median(measured["host"]["compiled"]) * part / 1e3}
    return plan


def rows_for(seconds: float, device: str) -> int:
    """Rows of a product with 1024 x 1024 in float32 that takes so long."""
    import torch

    from pytest_dynamo import clocks
    from pytest_dynamo import timing

    right = torch.randn(1024, 1024, device=device)
    clock = clocks.CudaClock() if device == "cuda" else clocks.CpuClock()
    best, nearest = 0, float("inf")
    for rows in (8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192):
        left = torch.randn(rows, 1024, device=device)
        call = lambda left=left: torch.mm(left, right)  # noqa: E731
        found = timing.measure(
            call, call, clock, timing.Plan(rounds=20, seconds=0.1, warm_seconds=0.02), compilations=int
        )
        off = abs(found.compiled.times.median - seconds)
        if off < nearest:
            best, nearest = rows, off
    return best


def run(given: argparse.Namespace) -> int:
    from pytest_dynamo.environment import environment

    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(prefix="speed-study-")}
    end = time.monotonic() + given.seconds

    def one(plan: dict[str, Any], accuracy: bool = False) -> dict[str, Any]:
        words = [sys.executable, __file__, "process", "--device", given.device, "--plan", json.dumps(plan)]
        words += ["--accuracy"] if accuracy else []
        words += ["--only", ",".join(given.only)] if given.only else []
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return measured

    first = one({}, accuracy=True)  # with cold caches: not of the set
    plans = {f"{kind}={part:g}": calibrate(kind, part, first, given.device) for kind, part in given.head}
    import torch

    facts = {**environment(), "gpu": torch.cuda.get_device_name() if given.device == "cuda" else "none"}
    data: dict[str, Any] = {
        "about": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC, {facts['gpu']}, driver "
        f"{facts['driver']}, torch {facts['torch']}, triton {facts['triton']}, Python {facts['python']}: fresh "
        "processes, base and heads in turn. Milliseconds.",
        "plans": plans,
        "first": first,
        "runs": [],
        "heads": {name: [] for name in plans},
    }
    for number in range(given.processes):
        if time.monotonic() > end:
            break
        data["runs"].append(one({}))
        for name, plan in plans.items():
            data["heads"][name].append(one(plan))
        given.out.write_text(json.dumps(data, separators=(",", ":")), encoding="utf-8")
        print(f"process {number + 1} of {given.processes}", file=sys.stderr, flush=True)
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
        heads = ("base", "cost s", "do_bench", "profiler")
        lines.append(f"{'':26}" + "".join(f"{word:>10}" for word in heads))
        for name, runs in base.items():
            costs, first = [one[name]["cost_s"] for one in data["runs"]], data["first"][name]
            row = f"{name:26}{len(runs):10}{statistics.median(costs):10.2f}"
            if first.get("do_bench"):
                row += f"{statistics.median(first['event']['compiled']) / first['do_bench']:10.3f}"
                row += f"{first['kernel']['compiled'][0] / first['profiler']:10.3f}"
            lines.append(row)
        for planted_kind, planted_runs in data["heads"].items():
            lines += ["", f"planted: {planted_kind}"]
            heads = ("time +", "busy +", "ratio +", "pairs", "caught")
            lines.append(f"{'':26}" + "".join(f"{word:>10}" for word in heads))
            for name, now in false_alarms.runs_of({"runs": planted_runs}).items():
                row = f"{name:26}"
                for read in (lambda m: m.compiled.time.median, lambda m: m.compiled.device_time, lambda m: m.ratio):
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


def middle(measured: Sequence[Any], read: Callable[[Any], float]) -> float:
    values = [read(one) for one in measured]
    return statistics.median(values) if all(values) else float("nan")


def head(text: str) -> tuple[str, float]:
    kind, _, part = text.partition("=")
    if kind not in ("gpu", "host"):
        raise argparse.ArgumentTypeError(f"gpu or host, not {kind!r}")
    return kind, float(part)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--processes", type=int, default=10)
    runs.add_argument("--head", type=head, action="append", default=[], metavar="gpu=PART|host=PART")
    runs.add_argument("--seconds", type=float, default=float("inf"), help="start no further process after that")
    one = commands.add_parser("process")
    one.add_argument("--plan", default="{}")
    one.add_argument("--accuracy", action="store_true")
    for command in (runs, one):
        command.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
        command.add_argument("--only", type=lambda text: text.split(","), default=[])
    shown = commands.add_parser("show")
    shown.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "process":
        print(json.dumps(process(given)))
        return 0
    return run(given) if given.command == "run" else show(given)


if __name__ == "__main__":
    sys.exit(main())
