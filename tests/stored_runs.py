"""Folders of pytest-benchmark with runs of ours in them, made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from datetime import timedelta
from datetime import timezone
from pathlib import Path
from typing import Any

from pytest_dynamo.measurement import Measurement
from pytest_dynamo.measurement import Side
from pytest_dynamo.measurement import Times


TEST = "test_a.py::test[inductor]"
OLD = {"gpu": "H200", "torch": "2.13.0"}
NEW = {"gpu": "H200", "torch": "2.14.1"}
START = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


def measured(time: float = 1e-3, **fields: Any) -> Measurement:
    """GPU-bound code that takes ``time`` seconds."""
    compiled = Side(Times(time, 1e-6, 50), None, time * 0.95, 7, "k", 2**20)
    eager = Side(Times(2e-3, 1e-6, 50))
    speedup = 2e-3 / time
    fields = {"launch_bound": False, "compile_seconds": 3.0, "cold": True, **fields}
    return Measurement(eager, compiled, speedup, speedup * 0.99, speedup * 1.01, **fields)


def entry(
    measurement: Measurement | Mapping[str, Any] | None = None,
    verdict: str | None = "not slower",
    nodeid: str = TEST,
    fingerprint: Mapping[str, str] = NEW,
    run: str = "aa",
    **fields: Any,
) -> dict[str, Any]:
    """What the fixture leaves in one benchmark of a file."""
    measurement = measured() if measurement is None else measurement
    if isinstance(measurement, Measurement):
        if verdict == "unstable" and not measurement.unstable:
            measurement = replace(measurement, unstable=("GPU: thermal slowdown by hardware",))
        measurement = measurement.to_json()
    dynamo = {
        "schema": 1,
        "nodeid": nodeid,
        "run": run,
        "machine": "m",
        "fingerprint": dict(fingerprint),
        "measurement": measurement,
        "verdict": verdict,
        "graphs": 1,
        "graph_breaks": 0,
        "recompiles": 0,
        **fields,
    }
    return {"fullname": nodeid, "name": nodeid, "stats": {}, "extra_info": {"dynamo": dynamo}}


def store(folder: Path, number: int, *entries: dict[str, Any], days: int | None = None, name: str = "run") -> Path:
    """Write a file of pytest-benchmark: a day later for each number. ``run`` of the entries stays as it is."""
    when = START + timedelta(days=number if days is None else days)
    data = {
        "datetime": when.isoformat(),
        "machine_info": {"node": "here"},
        "version": "5.3.1",
        "commit_info": {"id": f"{number:07x}abcdef", "dirty": False},
        "benchmarks": list(entries),
    }
    path = folder / "Linux-CPython-3.12-64bit" / f"{number:04}_{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def series(folder: Path, times: list[float], verdicts: list[str | None] | None = None, **fields: Any) -> None:
    """Store one run of one test for each time, numbered from 1, with run ids such as ``run0001``."""
    for number, time in enumerate(times, 1):
        verdict = verdicts[number - 1] if verdicts is not None else "not slower"
        store(folder, number, entry(measured(time), verdict, run=f"run{number:04}", **fields))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
