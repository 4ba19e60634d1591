"""What one ``compiled_benchmark`` costs beside its compilation: seconds of a test that passes.

    python tests/benchmarks/benchmark_cost.py [--device cuda] [--out DIR] [--processes 3]

Each process runs pytest on tests of resnet50 and of a small function, each of them twice, with inputs and models made
beforehand. The first of each is told apart: it also loads libraries and compiles with cold caches. From the
time of a test what torch reports as compiling is subtracted; what is left checks parity, warms up, times, and
profiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import sampling


#: Seconds at most, beside compiling, of all but the first of a process.
LIMITS = {"resnet50": 3.0, "small": 1.5}
REPEATS = 2
SUMS = ("test", "compiling", "rest")

TESTS = """
import os

import pytest
import torch
from torch import nn

DEVICE, SMALL = os.environ["COST_DEVICE"], os.environ["COST_DEVICE"] == "cpu"
REPEATS = int(os.environ["COST_REPEATS"])


@pytest.fixture(scope="module")
def resnet50():
    from torchvision import models

    torch.manual_seed(0)
    model = (models.resnet18 if SMALL else models.resnet50)().eval()
    return model.to(DEVICE, torch.float32 if SMALL else torch.bfloat16)


@pytest.fixture(scope="module")
def image():
    shape = (1, 3, 64, 64) if SMALL else (16, 3, 224, 224)
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32 if SMALL else torch.bfloat16)


@pytest.fixture(scope="module")
def x():
    return torch.randn(256, 256, device=DEVICE)


def small_function(x):
    return nn.functional.gelu(x @ x) + x


@pytest.mark.parametrize("number", range(REPEATS))
@pytest.mark.compiled(mode=["default", "reduce-overhead"])
def test_resnet50(compiled_benchmark, resnet50, image, number):
    with torch.no_grad():
        compiled_benchmark(resnet50, image)


@pytest.mark.parametrize("number", range(REPEATS))
@pytest.mark.compiled(mode=["default", "reduce-overhead"])
def test_small(compiled_benchmark, x, number):
    compiled_benchmark(small_function, x)
"""

CONFTEST = """
import functools
import json
import os
import time

from pytest_dynamo import baseline
from pytest_dynamo import benchmark
from pytest_dynamo import profiling
from pytest_dynamo import timing

TIMES, PARTS = {}, {}


def timed(module, name):
    function = getattr(module, name)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            PARTS[name] = PARTS.get(name, 0.0) + time.perf_counter() - began

    setattr(module, name, wrapper)


for module, name in (
    (timing, "measure"), (timing, "_warm_up"), (profiling, "profile"), (profiling, "peak_bytes"),
    (benchmark.Checker, "__call__"), (baseline, "judge"),
):
    timed(module, name)


def pytest_runtest_logreport(report):
    if report.when == "call":
        TIMES[report.nodeid] = (report.outcome, report.duration, dict(PARTS))
        PARTS.clear()


def pytest_sessionfinish():
    with open(os.environ["COST_TIMES"], "w") as file:
        json.dump(TIMES, file)
"""


def process(folder: Path, device: str) -> dict[str, list[dict[str, float]]]:
    """Run the tests once; return the seconds of each test by function and mode."""
    times, told = folder / "times.json", folder / "dynamo.json"
    env = {**os.environ, "COST_DEVICE": device, "COST_TIMES": str(times), "COST_REPEATS": str(REPEATS)}
    words = [sys.executable, "-m", "pytest", "-q", f"--dynamo-json={told}", "--benchmark-autosave", "."]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-6000:] + done.stderr[-2000:])
    compiling = {test["nodeid"]: test["compile"]["seconds"] for test in json.loads(told.read_text())["records"]}
    found: dict[str, list[dict[str, float]]] = {}
    for nodeid, (outcome, seconds, parts) in json.loads(times.read_text()).items():
        if outcome != "passed":
            raise SystemExit(f"{nodeid} {outcome}")
        name, _, words_of = nodeid.partition("::test_")[2].partition("[")
        mode = "reduce-overhead" if "reduce-overhead" in words_of else "default"
        one = {"test": seconds, "compiling": compiling[nodeid], "rest": seconds - compiling[nodeid], **parts}
        found.setdefault(f"{name} {mode}", []).append(one)
    return found


def about(device: str) -> dict[str, Any]:
    facts = sampling.environment()
    if device == "cuda":
        import torch

        from pytest_dynamo.environment import environment

        facts["gpu"], facts["driver"] = torch.cuda.get_device_name(), environment()["driver"]
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found: dict[str, list[list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_cost.py").write_text(TESTS, encoding="utf-8")
        (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        for _ in range(given.processes):
            for key, runs in process(folder, given.device).items():
                found.setdefault(key, []).append(runs)
    facts = about(given.device)
    lines = ["Seconds of one compiled_benchmark on a " + ("GPU" if given.device == "cuda" else "CPU (a trial)"), ""]
    lines += [f"{key}: {value}" for key, value in facts.items()]
    lines += ["", f"{'':32}{'n':>4}{'test':>9}{'compiling':>11}{'rest':>8}{'worst':>8}{'allowed':>9}"]
    failed, details = False, ["", "Seconds of parts (measure holds warm_up; call holds compiling):"]
    for key, processes in found.items():
        for which, runs in (
            ("first", [one[0] for one in processes]),
            ("later", [run for one in processes for run in one[1:]]),
        ):
            middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            worst, allowed = max(run["rest"] for run in runs), LIMITS[key.partition(" ")[0]]
            failed = failed or (which == "later" and worst > allowed)
            parts = ", ".join(
                f"{name.strip('_')} {seconds:.2f}" for name, seconds in middle.items() if name not in SUMS
            )
            details.append(f"{key + ', ' + which:32}{parts}")
            lines.append(
                f"{key + ', ' + which:32}{len(runs):4}{middle['test']:9.2f}{middle['compiling']:11.2f}"
                f"{middle['rest']:8.2f}{worst:8.2f}{allowed:9.1f}" + ("  MORE" if worst > allowed else "")
            )
    data = {"environment": facts, "limits": LIMITS, "seconds": found}
    name = "h200_benchmark_cost" if given.device == "cuda" else "cpu_benchmark_cost"
    sampling.write(given.out, name, data, "\n".join(lines + details) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
