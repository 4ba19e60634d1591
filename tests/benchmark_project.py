"""Inner projects with benchmarks whose times are made up, so that verdicts depend on no clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from datetime import timedelta
from pathlib import Path
from typing import Any


#: Takes times from a file that all processes share, one line for each measurement; the last line stays.
CONFTEST = """
import os
import secrets
from pathlib import Path

import pytest

from pytest_dynamo import machine, profiling, timing

HERE = Path(__file__).parent
patch = pytest.MonkeyPatch()


def take(path):
    lines = path.read_text().splitlines()
    path.write_text("\\n".join(lines[1:] or lines))
    with (HERE / "taken").open("a") as file:
        file.write(f"{os.getpid()} {lines[0]}\\n")
    return lines[0].split()


def measure(eager, compiled, clock, plan, *, compilations, setup=None, around_eager=None, canaries=None):
    for call in (eager, compiled) * 2:
        if setup is not None:
            setup()
        call()
    slow, fast, canary, spread, *event = take(HERE / "times")
    if event == ["ctrl-c"]:
        raise KeyboardInterrupt
    if event == ["compiled"]:
        raise timing.CompiledWhileTiming("the compiled call compiled in timed round 3")
    slow, fast, canary, spread = float(slow), float(fast), float(canary), float(spread)

    def samples(value, jitter=1e-3):
        return timing.Samples(tuple(value * (1 + jitter * (7 * n % 5 - 2)) for n in range(20)), None, 1)

    ratio = slow / fast
    beside = {name: samples(canary, 0) for name in canaries}
    return timing.Timing(samples(slow), samples(fast), beside, ratio, ratio * (1 - spread), ratio * (1 + spread))


def pytest_configure(config):
    if (HERE / "times").exists():
        patch.setattr(timing, "measure", measure)
    name = secrets.token_hex(6)  # one process may hold several runs here
    patch.setattr(machine, "run_id", lambda: name)
    if "PRETENDED_TORCH" in os.environ:
        facts = machine.environment
        patch.setattr(machine, "environment", lambda: {**facts(), "torch": os.environ["PRETENDED_TORCH"]})
    if (HERE / "peaks").exists():
        peaks = [int(peak) for peak in (HERE / "peaks").read_text().split()]
        patch.setattr(profiling, "peak_bytes", lambda call, device: peaks.pop(0))


def pytest_unconfigure(config):
    patch.undo()


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_generate_machine_info(config):
    return {"node": "here"}  # to ask what CPU this is takes a second
"""

BENCHMARK = """
import pytest, torch

def step(x):
    return x.sin() + 1

@pytest.mark.compiled(backend="eager"{marker})
def test_speed(compiled_benchmark):
    compiled_benchmark(step, torch.ones(8))
"""
NAME = "test_speed[eager]"
STORE = "--benchmark-autosave"


class Benches:
    """A project, the times that its benchmarks will take, and what was stored."""

    def __init__(self, project: Any, marker: str = "") -> None:
        self.project = project
        self.path: Path = project.pytester.path
        (self.path / "conftest.py").write_text(CONFTEST)
        self.test(BENCHMARK.replace("{marker}", marker))
        self.times(1e-3)

    def test(self, source: str) -> None:
        self.project.file("test_it", source)

    def append(self, file: str, source: str) -> None:
        with (self.path / file).open("a") as stream:
            stream.write("\n" + source)

    def times(self, *compiled: float, eager: float = 2e-3, canary: float = 1e-4, spread: float = 0.01) -> None:
        """Seconds of each measurement to come; of those beyond the last one too."""
        self.lines(*(f"{eager!r} {time!r} {canary!r} {spread!r}" for time in compiled))

    def lines(self, *lines: str) -> None:
        (self.path / "times").write_text("\n".join(lines))
        (self.path / "taken").write_text("")

    @property
    def processes(self) -> list[str]:
        """Of each measurement since the last `times`, in which process it was made."""
        return [line.split()[0] for line in (self.path / "taken").read_text().splitlines()]

    def real_times(self) -> None:
        (self.path / "times").unlink()

    def run(self, *args: str, **options: Any) -> Any:
        return self.project.run(*args, **options)

    # -- what is stored --

    @property
    def files(self) -> list[Path]:
        return sorted((self.path / ".benchmarks").glob("*/*.json"))

    def entries(self) -> Iterator[dict[str, Any]]:
        for file in self.files:
            yield from json.loads(file.read_text())["benchmarks"]

    def dynamo(self) -> list[dict[str, Any]]:
        """What is ours of each stored benchmark, the oldest first."""
        return [entry["extra_info"]["dynamo"] for entry in self.entries()]

    def verdicts(self) -> list[str | None]:
        return [dynamo["verdict"] for dynamo in self.dynamo()]

    def fill(self, count: int) -> None:
        """Let the one stored run be the first of several."""
        (first,) = self.files
        data = json.loads(first.read_text())
        for number in range(2, count + 1):
            when = datetime.fromisoformat(data["datetime"]) + timedelta(milliseconds=number)
            data["benchmarks"][0]["extra_info"]["dynamo"]["run"] = f"run{number}"
            copy = {**data, "datetime": when.isoformat()}
            (first.parent / f"{number:04}_copy.json").write_text(json.dumps(copy))
