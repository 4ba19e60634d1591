from __future__ import annotations

import json
import random

import pytest

from pytest_dynamo.record import FORMAT
from pytest_dynamo.record import CudaGraphs
from pytest_dynamo.record import CudaGraphSkip
from pytest_dynamo.record import Finding
from pytest_dynamo.record import GraphBreak
from pytest_dynamo.record import LimitHit
from pytest_dynamo.record import Observation
from pytest_dynamo.record import Parity
from pytest_dynamo.record import Recompile
from pytest_dynamo.record import Record
from pytest_dynamo.report import Report
from pytest_dynamo.variants import Variant


BREAK = GraphBreak("a.py", 1, "f", None, (), "break")
IGNORED = GraphBreak("a.py", 2, "f", None, (), "break", "assert rewriting")
FINDING = Finding("max_breaks", 0, 1, "", None, None, None)


def record(nodeid: str, phase: str = "call", mode: str | None = "", seen: Observation | None = None) -> Record:
    variant = None if mode is None else Variant(mode=mode or None).to_json()
    return Record(nodeid, phase, variant, seen or Observation(frames=1, graphs=1, ops=1))


IN_ORDER = [
    record("test_a.py", "import", None),
    record("test_a.py::test_a", "setup", None),
    record("test_a.py::test_a", "call", None),
    record("test_a.py::test_a", "teardown", None),
    record("test_a.py::test_b[inductor-lite]", "call", "lite"),
    record("test_a.py::test_b[inductor]", "setup"),
    record("test_a.py::test_b[inductor]", "call"),
    record("test_b.py::test_a[x]", "call"),
    record("test_b.py::test_a[x]", "call", "lite"),
]


@pytest.mark.parametrize("seed", range(5))
def test_order(seed: int) -> None:
    """Records are in the order of nodeid, variant and phase, however they arrived."""
    shuffled = random.Random(seed).sample(IN_ORDER, len(IN_ORDER))
    assert list(Report.of(shuffled, {}).records) == IN_ORDER


def test_notes_are_told_once() -> None:
    """A note of several workers appears once, in the order in which it came first."""
    assert Report.of([], {}, ["b", "a", "b"]).notes == ("b", "a")


def test_totals() -> None:
    """Totals are sums over all records; tests are counted by nodeid, imports are none."""
    first = Record(
        "a::t[inductor]",
        "call",
        None,
        Observation(
            graphs=2,
            breaks=(BREAK, IGNORED),
            recompiles=(Recompile("a.py", 1, "f", ("why",), 3),),
            limit_hits=(LimitHit("a.py", 1, "f", "recompile_limit", ""),),
            cudagraphs=CudaGraphs(skips=(CudaGraphSkip("why", None, None),)),
        ),
        parity=Parity(True, 4),
        findings=(FINDING, FINDING),
        not_checked=("one", "two"),
    )
    setup = Record("a::t[inductor]", "setup", None, Observation(graphs=5, breaks=(BREAK,)))
    imported = Record("a", "import", None, Observation(graphs=1))
    assert Report.of([first, setup, imported], {}).totals == {
        "records": 3,
        "tests": 1,
        "graphs": 8,
        "breaks": 2,
        "ignored_breaks": 1,
        "recompiles": 3,
        "limit_hits": 1,
        "cudagraph_skips": 1,
        "parity_calls": 4,
        "findings": 2,
        "not_checked": 2,
    }


def test_totals_of_nothing_are_zero() -> None:
    """A run in which nothing was compiled has seen 0 of everything."""
    assert set(Report.of([], {}).totals.values()) == {0}


def test_totals_of_untold_numbers_are_null() -> None:
    """A number that could be observed nowhere is null in the totals too, not 0."""
    untold = Observation(untold=("breaks", "recompiles", "limit_hits"))
    totals = Report.of([record("a::t", seen=untold)], {}).totals
    names = ("graphs", "breaks", "ignored_breaks", "recompiles", "limit_hits")
    assert [totals[name] for name in names] == [None] * 5
    assert (totals["records"], totals["tests"], totals["findings"]) == (1, 1, 0)


def test_totals_sum_what_was_told() -> None:
    """Where only some records have a number, the total is that of those."""
    untold = Observation(untold=("breaks",))
    totals = Report.of([record("a::t", seen=untold), record("a::u", seen=Observation(graphs=2, breaks=(BREAK,)))], {})
    assert (totals.totals["graphs"], totals.totals["breaks"]) == (2, 1)


def test_json() -> None:
    """The report says its format and environment, then records, totals and notes; null stays null."""
    report = Report.of([record("a::t", seen=Observation())], {"torch": "2.8", "gpu": None}, ["note"])
    data = json.loads(json.dumps(report.to_json()))
    assert list(data) == ["format", "environment", "records", "totals", "notes"]
    assert data["format"] == FORMAT
    assert data["environment"] == {"torch": "2.8", "gpu": None}
    assert data["notes"] == ["note"]
    assert [(r["nodeid"], r["graphs"], r["compile"]["seconds"]) for r in data["records"]] == [("a::t", None, None)]
    assert data["totals"] == report.totals
    assert Record.from_json(data["records"][0]) == report.records[0]
