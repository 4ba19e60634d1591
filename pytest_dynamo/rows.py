"""Further rows for pytest-benchmark: the times of eager code and of compiling, so that its own commands show them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any


def rows(entries: Iterable[Mapping[str, Any]], eager: Mapping[str, Sequence[float]]) -> Iterator[dict[str, Any]]:
    """Yield entries named ``test:eager`` and ``test:compile`` for the entries of tests with ``compiled_benchmark``.

    Args:
        entries: ``benchmarks`` of a file of pytest-benchmark.
        eager: samples of eager code in seconds, by node id.
    """
    for entry in entries:
        ours = (entry.get("extra_info") or {}).get("dynamo")
        if ours is None:
            continue
        seconds = ours["measurement"]["compile_seconds"]
        for what, samples in (("eager", eager.get(ours["nodeid"])), ("compile", [seconds] if seconds else None)):
            if samples:
                names = {name: f"{entry[name]}:{what}" for name in ("name", "fullname")}
                yield {**entry, **names, "extra_info": {}, "stats": {**stats(samples), "iterations": 1}}


def stats(samples: Sequence[float]) -> dict[str, Any]:
    """The statistics that pytest-benchmark stores, of samples in seconds."""
    ordered = sorted(samples)
    mean, median = statistics.fmean(ordered), statistics.median(ordered)
    stddev = statistics.stdev(ordered) if len(ordered) > 1 else 0.0
    q1, _, q3 = statistics.quantiles(ordered, method="inclusive") if len(ordered) > 1 else (median,) * 3
    iqr = q3 - q1
    inside = [sample for sample in ordered if q1 - 1.5 * iqr <= sample <= q3 + 1.5 * iqr] or ordered
    far = sum(abs(sample - mean) > stddev for sample in ordered)
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": stddev,
        "rounds": len(ordered),
        "median": median,
        "iqr": iqr,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": len(ordered) - len(inside),
        "stddev_outliers": far,
        "outliers": f"{far};{len(ordered) - len(inside)}",
        "ld15iqr": inside[0],
        "hd15iqr": inside[-1],
        "ops": 1 / mean if mean else 0.0,
        "total": sum(ordered),
    }
