from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from pytest_dynamo.record import FORMAT
from pytest_dynamo.record import Check
from pytest_dynamo.record import Compile
from pytest_dynamo.record import CudaGraphs
from pytest_dynamo.record import CudaGraphSkip
from pytest_dynamo.record import Finding
from pytest_dynamo.record import GraphBreak
from pytest_dynamo.record import LimitHit
from pytest_dynamo.record import Memory
from pytest_dynamo.record import Observation
from pytest_dynamo.record import Parity
from pytest_dynamo.record import Place
from pytest_dynamo.record import Reason
from pytest_dynamo.record import Recompile
from pytest_dynamo.record import Record
from pytest_dynamo.variants import Variant


BREAK = GraphBreak(
    "lib.py",
    3,
    "f",
    Place("test_a.py", 9),
    (Reason("why", "GB0059", "do this", 2), Reason("other", None, None, 1)),
    "skipped_frame",
    "assert rewriting",
)
FULL = Record(
    nodeid="test_a.py::test[ä]",
    phase="call",
    variant=Variant("inductor", "max-autotune", True, True, None).to_json(),
    observation=Observation(
        frames=2,
        graphs=3,
        ops=40,
        breaks=(BREAK, dataclasses.replace(BREAK, line=4, called_from=None, ignored=None, kind="break")),
        recompiles=(Recompile("a.py", 1, "f", ("size mismatch", "dtype"), 3),),
        limit_hits=(LimitHit("a.py", 1, "f", "recompile_limit", "x == 1"),),
        cudagraphs=CudaGraphs(True, 2, None, (CudaGraphSkip("cpu", None, None), CudaGraphSkip("mutated", "a.py", 5))),
        compile=Compile(1.25, False, 1, 0, 2),
    ),
    parity=Parity(False, 2, (Check("values", "out[0]", 1, False, 0.5, 0.25, 3.0, "off"), Check("rng", "r", 2, None))),
    findings=(
        Finding("max_breaks", 0, 2, "two\nlines", "a.py", 3, "max_breaks=2"),
        Finding("u", None, 1.5, "", *[None] * 3),
    ),
    not_checked=("CUDA graphs: no GPU",),
    outcome="failed",
    notes=("note",),
    relaxed=("max_breaks",),
    memory=Memory(10, 20, 2.0),
    kernels=4,
    benchmark={"median": 1.0, "nested": {"a": [1, 2]}},
)
EMPTY = Record("test_a.py::test_b", "setup", None, Observation())


def primitive(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and primitive(inner) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(primitive, value))
    return value is None or type(value) in (str, int, float, bool)


@pytest.mark.parametrize("record", [FULL, EMPTY], ids=["full", "empty"])
def test_round_trip_through_json(record: Record) -> None:
    """A record comes back from JSON as it was, with its types."""
    data = record.to_json()
    assert primitive(data)
    again = Record.from_json(json.loads(json.dumps(data)))
    assert again == record
    assert repr(again) == repr(record)


def test_round_trip_fills_every_field() -> None:
    """The full record of these tests leaves no field at its default, so that none is forgotten."""

    def fields(value: Any) -> set[str]:
        if isinstance(value, tuple):
            return set().union(*map(fields, value)) if value else set()
        if not dataclasses.is_dataclass(value):
            return set()
        found = {f"{type(value).__name__}.{f.name}" for f in dataclasses.fields(value)}
        return found.union(*(fields(getattr(value, f.name)) for f in dataclasses.fields(value)))

    kinds = {name.partition(".")[0] for name in fields(FULL)}
    assert kinds == {
        *("Record", "Observation", "GraphBreak", "Place", "Reason", "Recompile", "LimitHit", "CudaGraphs"),
        *("CudaGraphSkip", "Compile", "Parity", "Check", "Finding", "Memory"),
    }
    default = Record("", "", None, Observation())
    for field in dataclasses.fields(Record):
        assert getattr(FULL, field.name) != getattr(default, field.name), field.name
    for field in dataclasses.fields(Observation):
        if field.name == "untold":  # excludes one of the others; see test_untold_lists_are_null
            continue
        assert getattr(FULL.observation, field.name) != getattr(Observation(), field.name), field.name


def test_json_has_the_documented_keys() -> None:
    """The keys of a record in the report are those of the documentation, at least."""
    data = json.loads(json.dumps(FULL.to_json()))
    assert {
        *("nodeid", "phase", "variant", "outcome", "frames", "graphs", "ops", "breaks", "recompiles", "limit_hits"),
        *("cudagraphs", "compile", "memory", "kernels", "parity", "benchmark", "findings", "not_checked"),
    } <= set(data)
    assert set(data["breaks"][0]) == {"file", "line", "function", "called_from", "reasons", "kind", "ignored"}
    assert data["breaks"][0]["reasons"][0] == {"reason": "why", "id": "GB0059", "hint": "do this", "hits": 2}
    assert data["breaks"][0]["called_from"] == {"file": "test_a.py", "line": 9}
    assert data["breaks"][1]["called_from"] is None
    assert set(data["recompiles"][0]) == {"file", "line", "function", "reasons", "count"}
    assert set(data["limit_hits"][0]) == {"file", "line", "function", "limit", "reason"}
    assert set(data["cudagraphs"]) == {"expected", "recorded", "replayed", "skips"}
    assert data["cudagraphs"]["skips"][0] == {"reason": "cpu", "file": None, "line": None}
    assert set(data["compile"]) == {"seconds", "cold", "backward_graphs", "cache_hits", "cache_misses"}
    assert set(data["memory"]) == {"eager_bytes", "compiled_bytes", "ratio"}
    assert set(data["parity"]) == {"passed", "calls", "checks", "diagnosis", "repro"}
    assert set(data["parity"]["checks"][0]) == {
        *("what", "path", "call", "passed", "max_abs", "max_rel", "error_ratio", "note", "worst")
    }
    assert set(data["findings"][0]) == {"limit", "allowed", "seen", "message", "file", "line", "accept_with"}
    assert set(data["variant"]) == {"id", "backend", "mode", "dynamic", "fullgraph", "options"}


def test_unobserved_numbers_are_null() -> None:
    """What nobody saw is None, never 0."""
    data = EMPTY.to_json()
    assert [data[name] for name in ("frames", "graphs", "ops", "kernels", "variant", "outcome", "benchmark")] == [
        None
    ] * 7
    assert set(data["compile"].values()) == {None}
    assert set(data["memory"].values()) == {None}
    assert [data["cudagraphs"][name] for name in ("expected", "recorded", "replayed")] == [None] * 3
    assert data["parity"]["passed"] is None


@pytest.mark.parametrize("name", ["breaks", "recompiles", "limit_hits"])
def test_untold_lists_are_null(name: str) -> None:
    """A list that this torch does not tell is null, not an empty list, and comes back as untold."""
    record = dataclasses.replace(EMPTY, observation=Observation(frames=1, untold=(name,)))
    data = json.loads(json.dumps(record.to_json()))
    assert data[name] is None
    assert Record.from_json(data) == record


def test_untold_counts_are_none() -> None:
    """Counts of lists that this torch does not tell are None, those of the others are not."""
    assert Observation(untold=("breaks",)).break_count is None
    assert Observation(untold=("breaks",)).recompile_count == 0
    assert Observation(untold=("recompiles",)).recompile_count is None
    assert Observation(untold=("recompiles",)).break_count == 0


def test_a_record_without_a_field_is_refused() -> None:
    """A record of another format is not read as if it were one of this."""
    data = FULL.to_json()
    del data["breaks"]
    with pytest.raises(KeyError):
        Record.from_json(data)


def test_observation_counts() -> None:
    """Ignored breaks are not counted, a recompile counts as often as it happened."""
    seen = FULL.observation
    assert seen.break_count == 1
    assert seen.recompile_count == 3
    assert BREAK.hits == 3


@pytest.mark.parametrize(
    ("seen", "anything"),
    [
        (Observation(), False),
        (Observation(frames=0, graphs=0, ops=0), False),
        (Observation(frames=1), True),
        (Observation(breaks=(BREAK,)), True),
        (Observation(limit_hits=FULL.observation.limit_hits), True),
        (Observation(cudagraphs=CudaGraphs(skips=(CudaGraphSkip("cpu", None, None),))), True),
        (Observation(cudagraphs=CudaGraphs(recorded=0)), False),
        (Observation(cudagraphs=CudaGraphs(recorded=1)), True),
    ],
)
def test_anything(seen: Observation, anything: bool) -> None:
    """A test compiled something if a frame, a break, a limit hit or a CUDA graph was seen."""
    assert seen.anything is anything


def test_format_is_one() -> None:
    """The version of the report stays until a field changes its meaning."""
    assert FORMAT == 1
