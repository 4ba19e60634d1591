"""Statistics of interleaved measurements, and the files that hold them."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import random
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any


def ratios(measured: Sequence[float], base: Sequence[float]) -> list[float]:
    """Ratio of each pair."""
    if len(measured) != len(base):
        raise ValueError(f"{len(measured)} measurements can't be paired with {len(base)}")
    return [m / b for m, b in zip(measured, base)]


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the median of ``values``, drawn with replacement."""
    if not values:
        raise ValueError("no values")
    rng = random.Random(seed)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(resamples))
    tail = (1 - level) / 2
    return medians[int(tail * resamples)], medians[min(int((1 - tail) * resamples), resamples - 1)]


def summary(measured: Sequence[float], base: Sequence[float], *, seed: int = 0) -> dict[str, Any]:
    """Median ratio of pairs with its interval, and the medians of both sides in seconds."""
    values = ratios(measured, base)
    low, high = bootstrap_interval(values, seed=seed)
    return {
        "pairs": len(values),
        "median_ratio": round(median(values), 5),
        "interval_95": [round(low, 5), round(high, 5)],
        "median_seconds": round(median(measured), 5),
        "median_seconds_base": round(median(base), 5),
    }


def orders(arms: Sequence[str], rounds: int, seed: int = 0) -> Iterator[tuple[str, ...]]:
    """Orders of the arms, one a round; each possible order comes up equally often, shuffled."""
    rng = random.Random(seed)
    possible = list(itertools.permutations(arms))
    pending: list[tuple[str, ...]] = []
    for _ in range(rounds):
        if not pending:
            pending = rng.sample(possible, k=len(possible))
        yield pending.pop()


def mirrored(order: Sequence[str]) -> tuple[str, ...]:
    """Make ABC into ABCCBA: a drift of the machine that is linear in time then favours no arm."""
    return (*order, *reversed(order))


def cpu_model() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def load() -> list[float]:
    return [round(value, 2) for value in os.getloadavg()]


def environment() -> dict[str, Any]:
    """Date, versions and processor; nothing that tells which machine it was."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "pytest", "pytest-dynamo")},
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "load_at_start": load(),
    }


def table(title: str, environment: dict[str, Any], rows: dict[str, dict[str, Any]], notes: Sequence[str]) -> str:
    """The results as text."""
    lines = [title, ""]
    lines += [f"{name}: {value}" for name, value in environment.items()]
    lines += ["", f"{'':32} {'pairs':>5} {'median ratio':>12}   {'95 % interval':17} {'median s':>9} {'base s':>9}"]
    for name, row in rows.items():
        low, high = row["interval_95"]
        lines.append(
            f"{name:32} {row['pairs']:>5} {row['median_ratio']:>12.4f}   {low:.4f} … {high:.4f} "
            f"{row['median_seconds']:>10.4f} {row['median_seconds_base']:>9.4f}"
        )
    return "\n".join([*lines, "", *notes]) + "\n"


def write(out: Path, name: str, data: dict[str, Any], text: str) -> None:
    """Write ``name.json`` and ``name.txt`` into a folder, and print the text."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / f"{name}.txt").write_text(text, encoding="utf-8")
    print(text, end="")
