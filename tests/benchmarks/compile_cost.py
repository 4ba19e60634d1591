"""What the taps cost a compilation: CPU seconds with and without them, alternating in one process a backend.

A round holds each of three arms twice, in mirrored order: no taps, taps, and no taps once more. So
each pair of arms forms a sequence ABBA, and the two arms without taps are the control.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sampling


BASE, TAPS, AGAIN = "no taps", "taps", "no taps again"
ARMS = (BASE, TAPS, AGAIN)
#: Compilations of one sample. Each compiles three frames: two, and one of them again.
REPEATS = {"eager": 2, "inductor": 1}
#: Python frames above the compiled call; about as many as pytest has.
DEPTH = 40
CRITERION = 1.03


def model_and_inputs() -> tuple[Any, list[Any]]:
    """Three blocks of an MLP with one graph break; the second input makes the first part compile again."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(size)
            self.up = torch.nn.Linear(size, 2 * size)
            self.down = torch.nn.Linear(2 * size, size)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = Block(32), Block(32), Block(32)

        def forward(self, x: Any) -> Any:
            x = self.second(self.first(x)).mean(0)
            torch._dynamo.graph_break()
            return self.third(x).sum()

    torch.manual_seed(0)
    return Model().eval(), [torch.randn(8, 32), torch.randn(12, 32)]


def at_depth(depth: int, call: Callable[[], Any]) -> Any:
    return call() if depth == 0 else at_depth(depth - 1, call)


def compile_seconds(backend: str, model: Any, inputs: list[Any]) -> float:
    """CPU time of this process, all threads, for compiling everything once; resetting is not in it."""
    import torch

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)

    def calls() -> None:
        with torch.no_grad():
            for x in inputs:
                compiled(x)

    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        at_depth(DEPTH, calls)
        return time.process_time() - start
    finally:
        gc.enable()


def measure(backend: str, rounds: int, minutes: float, seed: int) -> tuple[dict[str, list[float]], Counter[str]]:
    """Seconds of each arm and round, and how many events of each kind the taps saw per compilation."""
    configure()
    from pytest_dynamo.observer import Observer

    model, inputs = model_and_inputs()
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    seen: Counter[str] = Counter()

    def sample(arm: str) -> float:
        spent = 0.0
        observer = Observer()
        if arm == TAPS:
            observer.install()
        try:
            for _ in range(REPEATS[backend]):
                spent += compile_seconds(backend, model, inputs)
                if arm == TAPS:
                    start = time.process_time()
                    events = observer.take()
                    spent += time.process_time() - start
                    seen.clear()
                    seen.update(type(event).__name__ for event in events)
        finally:
            observer.remove()
        return spent

    for arm in (*ARMS, *ARMS):
        sample(arm)
    # What is there by now stays: collections between samples need not look at it.
    gc.collect()
    gc.freeze()
    end = time.monotonic() + 60 * minutes
    for number, order in enumerate(sampling.orders(ARMS, rounds, seed), 1):
        if time.monotonic() > end:
            break
        spent = dict.fromkeys(ARMS, 0.0)
        for arm in sampling.mirrored(order):
            spent[arm] += sample(arm)
        for arm in ARMS:
            seconds[arm].append(spent[arm])
        print(f"{backend}: round {number} of {rounds}", file=sys.stderr)
    if not (seen["BreakEvent"] and seen["CompileEvent"] == 3 and seen["CompileResult"]):
        raise SystemExit(f"the taps did not see what was compiled: {dict(seen)}")
    return seconds, seen


def configure() -> None:
    """Take every compilation through code generation; only the C++ of the warm-up is used again."""
    import torch
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    torch._dynamo.config.automatic_dynamic_local_pgo = False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40, help="rounds, one pair ABBA of each kind in a round (40)")
    parser.add_argument("--minutes", type=float, default=120, help="begin no further round after that (120)")
    parser.add_argument("--backends", default="eager,inductor", help="each in a process of its own")
    parser.add_argument("--jobs", type=int, default=1, help="how many of these processes at once (1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args(argv)

    where = sampling.environment()
    rows: dict[str, dict[str, Any]] = {}
    asked = {name: getattr(given, name) for name in ("pairs", "minutes", "jobs", "seed")}
    data: dict[str, Any] = {"environment": where, "asked": asked, "results": rows, "events": {}, "seconds": {}}
    backends = given.backends.split(",")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(given.jobs, maxtasksperchild=1) as pool:
            jobs = [
                pool.apply_async(measure, (backend, given.pairs, given.minutes, given.seed)) for backend in backends
            ]
            for backend, job in zip(backends, jobs):
                seconds, seen = job.get()
                rows[f"{backend}: taps / none"] = sampling.summary(seconds[TAPS], seconds[BASE], seed=given.seed)
                control = sampling.summary(seconds[AGAIN], seconds[BASE], seed=given.seed)
                rows[f"{backend}: control, none / none"] = control
                data["events"][backend] = dict(seen)
                data["seconds"][backend] = seconds
    where["load_at_end"] = sampling.load()
    highs = {name: row["interval_95"][1] for name, row in rows.items() if "control" not in name}
    data["criterion"] = {"upper_end_below": CRITERION, "met": all(high < CRITERION for high in highs.values())}
    notes = [
        "CPU seconds of the process (not wall time: others use the machine) for compiling a model of three MLP blocks",
        f"with a graph break and a recompile: 3 frames compiled; {REPEATS['eager']} times a sample with backend eager,",
        f"once with inductor; 2 samples a round. {DEPTH} frames above the call, as under pytest. The garbage collector",
        "is off inside a sample. Graph caches are off; the C++ libraries of the warm-up are used again.",
        f"{given.pairs} pairs asked for, no round begun after {given.minutes:g} minutes; {given.jobs} process(es)",
        "at once. Medians of ratios of pairs, bootstrapped intervals.",
        f"Criterion: upper end of the interval below {CRITERION}: {'met' if data['criterion']['met'] else 'NOT met'}",
    ]
    text = sampling.table("Cost of the taps while compiling", where, rows, notes)
    sampling.write(given.out, "compile_cost", data, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
