from __future__ import annotations

import pytest

from pytest_dynamo.record import Check
from pytest_dynamo.record import Compile
from pytest_dynamo.record import CudaGraphs
from pytest_dynamo.record import CudaGraphSkip
from pytest_dynamo.record import Diagnosis
from pytest_dynamo.record import Finding
from pytest_dynamo.record import GraphBreak
from pytest_dynamo.record import LimitHit
from pytest_dynamo.record import Observation
from pytest_dynamo.record import Parity
from pytest_dynamo.record import Reason
from pytest_dynamo.record import Recompile
from pytest_dynamo.record import Record
from pytest_dynamo.record import Worst
from pytest_dynamo.report import Report
from pytest_dynamo.settings import Limits
from pytest_dynamo.terminal import PARITY_LINES
from pytest_dynamo.terminal import finding_lines
from pytest_dynamo.terminal import observation_lines
from pytest_dynamo.terminal import parity_lines
from pytest_dynamo.terminal import summary_lines
from pytest_dynamo.variants import Variant
from pytest_dynamo.verdict import Uncompiled
from pytest_dynamo.verdict import judge


BREAK = GraphBreak(
    "a.py", 4, "f", None, (Reason("print", "GB0059", "remove it", 1), Reason("x", None, None, 1)), "break"
)
IGNORED = GraphBreak("a.py", 9, "f", None, (Reason("branch", None, None, 1),), "break", "assert rewriting")
RECOMPILE = Recompile("a.py", 1, "f", ("size", "dtype"), 2)
SKIPS = (CudaGraphSkip("cpu device", None, None), CudaGraphSkip("mutated", "a.py", 5))
HIT = LimitHit("a.py", 1, "f", "recompile_limit", "x == 1")
FULL = Observation(
    frames=1,
    graphs=3,
    ops=4,
    breaks=(BREAK, IGNORED),
    recompiles=(RECOMPILE,),
    limit_hits=(HIT,),
    cudagraphs=CudaGraphs(True, 0, 0, SKIPS),
    compile=Compile(seconds=2.5),
)


def finding(limit: str, seen: float | None, message: str = "why", file: str | None = None, **given: object) -> Finding:
    accept = given.get("accept", f"{limit}={seen}")
    return Finding(limit, 0, seen, message, file, 3 if file else None, accept)  # type: ignore[arg-type]


# -- findings -------------------------------------------------------------------------------------


def test_findings_of_every_limit() -> None:
    """All that a verdict can find, line by line."""
    found = judge(FULL, Limits(0, 0, 0, 0, 0.5), uncompiled=(Uncompiled("g", "g was never called"),), must_compile=True)
    assert finding_lines(found) == [
        "not compiled",
        "  g was never called",
        "  accept with @pytest.mark.compiled(allow_uncompiled=True)",
        "recompile limit hit",
        "  a.py:1  f hit Dynamo's recompile_limit; its further calls run in eager mode",
        "      hint: it was compiled again and again because this changed: x == 1",
        "  accept with @pytest.mark.compiled(allow_uncompiled=True)",
        "1 graph break, 0 allowed",
        "  a.py:4  print  [GB0059]; x",
        "      hint: remove it",
        "  accept with @pytest.mark.compiled(max_breaks=1)",
        "2 recompiles, 0 allowed",
        "  a.py:1  f was compiled again (2 times): size",
        "      and: dtype",
        "  accept with @pytest.mark.compiled(max_recompiles=2)",
        "2 CUDA-graph skips, 0 allowed",
        "  no CUDA graph: cpu device",
        "  a.py:5  no CUDA graph: mutated",
        "  accept with @pytest.mark.compiled(max_cudagraph_skips=2)",
        "3 graphs, 0 allowed",
        "  3 graphs were compiled",
        "  accept with @pytest.mark.compiled(max_graphs=3)",
        "2.5 s of compiling, 0.5 allowed",
        "  compiling took 2.5 s",
        "  accept with @pytest.mark.compiled(max_compile_time=2.5)",
    ]


@pytest.mark.parametrize(
    ("limit", "seen", "title"),
    [
        ("max_breaks", 1, "1 graph break, 0 allowed"),
        ("max_breaks", 2, "2 graph breaks, 0 allowed"),
        ("max_recompiles", 1, "1 recompile, 0 allowed"),
        ("max_cudagraph_skips", 1, "1 CUDA-graph skip, 0 allowed"),
        ("max_graphs", 1, "1 graph, 0 allowed"),
        ("max_compile_time", 1, "1.0 s of compiling, 0 allowed"),
        ("fullgraph", 1, "graph break under fullgraph=True"),
        ("uncompiled", 0, "not compiled"),
        ("limit_hit", 1, "recompile limit hit"),
        ("not_checked", 2, "2 not checked, under --dynamo-require-checked"),
    ],
)
def test_every_limit_has_a_title(limit: str, seen: int, title: str) -> None:
    """The title tells the limit in words, one or many."""
    assert finding_lines([finding(limit, seen)])[0] == title


def test_findings_of_one_limit_stand_together() -> None:
    """A title is written once, and below it all its places in order, then how to accept them."""
    found = [
        finding("max_breaks", 2, "one", "a.py"),
        finding("max_graphs", 4, "four"),
        finding("max_breaks", 2, "two\nhint: mend", "b.py"),
    ]
    assert finding_lines(found) == [
        "2 graph breaks, 0 allowed",
        "  a.py:3  one",
        "  b.py:3  two",
        "      hint: mend",
        "  accept with @pytest.mark.compiled(max_breaks=2)",
        "4 graphs, 0 allowed",
        "  four",
        "  accept with @pytest.mark.compiled(max_graphs=4)",
    ]


def test_a_finding_that_nothing_accepts_says_nothing_about_it() -> None:
    """Not every finding has a keyword that accepts it."""
    assert finding_lines([finding("not_checked", 1, "CUDA graphs: no GPU", accept=None)]) == [
        "1 not checked, under --dynamo-require-checked",
        "  CUDA graphs: no GPU",
    ]


def test_no_findings_no_lines() -> None:
    """Nothing broken, nothing written."""
    assert finding_lines([]) == []


# -- parity ---------------------------------------------------------------------------------------


def test_parity_lines_are_those_of_failed_checks() -> None:
    """Checks that passed, or could not be judged, are not told."""
    checks = [
        Check("values", "out", 1, True),
        Check("dtype", "out[0]", 1, False, note="compiled float64, eager float32"),
        Check("values", "out[1]", 1, None, note="no values"),
    ]
    assert parity_lines(checks) == ["  out[0]  dtype: compiled float64, eager float32"]


def failed_checks(count: int) -> list[Check]:
    return [
        Check("values", f"out[{n}]", 1, False, 0.5, 0.25, note="1 of 2 elements differ\nbeyond rounding", worst=WORST)
        for n in range(count)
    ]


WORST = Worst((0, 1), 1.5, 2.0, 1.9999)


def test_parity_lines_of_one_tensor() -> None:
    """How many elements, how far, the worst of them on all sides, and the float64 verdict."""
    assert parity_lines(failed_checks(1)) == [
        "  out[0]  values: 1 of 2 elements differ (max abs 5.0e-01, max rel 2.5e-01)",
        "      worst at [0, 1]: compiled 1.5, eager 2, float64 1.9999",
        "      beyond rounding",
    ]
    scalar = Check("values", "out", 1, False, note="1 of 1 elements differ", worst=Worst((), "True", "False"))
    assert parity_lines([scalar])[1] == "      worst at its only element: compiled True, eager False"


@pytest.mark.parametrize("count", [*range(1, 25), 500])
def test_parity_lines_are_limited(count: int) -> None:
    """A message has at most 20 lines; where room is short it names all places before it tells all of one."""
    diagnosis = Diagnosis("inductor", ("capture",), None, "no", "lowerings")
    for more in ((), (diagnosis,), (diagnosis, "repro.py")):
        lines = parity_lines(failed_checks(count), *more)
        assert len(lines) + 1 <= PARITY_LINES
        named = [line for line in lines if line.startswith("  out[")]
        left = [line for line in lines if line.endswith(" more")]
        assert len(named) + sum(int(line.split()[1]) for line in left) == count
        assert lines[1].startswith("      worst at" if count < 13 else "  out[1]") or 12 < count < 17
        assert (lines[-1] == "  repro: repro.py") is (len(more) == 2)


@pytest.mark.parametrize(
    ("diagnosis", "lines"),
    [
        (Diagnosis("capture"), ["  first diverging stage: capture"]),
        (
            Diagnosis("AOTAutograd", ("capture",)),
            ["  first diverging stage: AOTAutograd (capture agrees with eager)"],
        ),
        (
            Diagnosis("inductor", ("capture", "AOTAutograd"), "emulate_precision_casts"),
            [
                "  first diverging stage: inductor (capture, AOTAutograd agree with eager)",
                "      emulate_precision_casts cures it: inductor keeps more precision between operations than eager",
            ],
        ),
        (Diagnosis(None, (), None, "not located: why"), ["  first diverging stage: not located: why"]),
    ],
)
def test_diagnosis_lines(diagnosis: Diagnosis, lines: list[str]) -> None:
    """The guilty stage, those before it, and what cures it."""
    assert parity_lines([], diagnosis) == lines


# -- observation and summary ----------------------------------------------------------------------


def test_observation_lines() -> None:
    """What no limit judges is told in one line each."""
    assert list(observation_lines(FULL)) == [
        "a.py:4  graph break: print  [GB0059]; x",
        "a.py:9  graph break: branch  (ignored: assert rewriting)",
        "a.py:1  recompile: size; dtype",
        "a.py:1  recompile limit hit: f stays in eager mode (recompile_limit): x == 1",
        "no CUDA graph: cpu device",
        "a.py:5  no CUDA graph: mutated",
    ]


def test_observation_lines_tell_limit_hits() -> None:
    """A frame that Dynamo gave up for good is told also where nothing judges it."""
    silent = LimitHit("b.py", 2, "g", "recompile_limit", "")
    assert list(observation_lines(Observation(limit_hits=(HIT, silent)))) == [
        "a.py:1  recompile limit hit: f stays in eager mode (recompile_limit): x == 1",
        "b.py:2  recompile limit hit: g stays in eager mode (recompile_limit)",
    ]


def a_record(nodeid: str = "test_a.py::test_mlp[inductor]", seen: Observation = FULL, **given: object) -> Record:
    return Record(nodeid, "call", Variant().to_json(), seen, **given)  # type: ignore[arg-type]


def test_summary_without_verbosity_is_one_line() -> None:
    """Totals, with what is rare left out where there is none of it."""
    calm = a_record(seen=Observation(frames=1, graphs=1, ops=1))
    assert summary_lines(Report.of([calm], {}), 0) == [
        "1 test compiled, 1 graph, 0 graph breaks, 0 recompiles, 0 not checked"
    ]
    assert summary_lines(Report.of([], {}), 0) == [
        "0 tests compiled, 0 graphs, 0 graph breaks, 0 recompiles, 0 not checked"
    ]


def test_summary_tells_what_is_rare() -> None:
    """Ignored breaks, limit hits and skips appear where there are some."""
    report = Report.of([a_record(not_checked=("one",)), a_record("test_a.py::test_b")], {})
    assert summary_lines(report, 0) == [
        (
            "2 tests compiled, 6 graphs, 2 graph breaks (and 2 ignored), 4 recompiles, 2 limit hits, "
            "4 CUDA-graph skips, 1 not checked"
        )
    ]


def test_summary_says_what_this_torch_does_not_tell() -> None:
    """A number that could not be observed is a question mark, never 0."""
    untold = Observation(untold=("breaks", "recompiles", "limit_hits"))
    assert summary_lines(Report.of([a_record(seen=untold)], {}), 0) == [
        "1 test compiled, ? graphs, ? graph breaks, ? recompiles, ? limit hits, 0 not checked"
    ]


def test_summary_with_verbosity_has_a_table() -> None:
    """With -v each record has a row, and what was seen in it follows."""
    records = [
        a_record(not_checked=("CUDA graphs: no GPU",), notes=("it is slow",), parity=Parity(False, 1, ())),
        Record("test_a.py::test_mlp[inductor]", "setup", None, Observation(graphs=12, compile=Compile(seconds=0.04))),
        Record("test_a.py", "import", None, Observation()),
    ]
    assert summary_lines(Report.of(records, {}), 1) == [
        "test                variant   graphs  breaks  recompiles  CUDA graphs  parity error  compile s",
        "test_a.py (import)  -              ?       0           0            -             -          ?",
        "test_mlp (setup)    -             12       0           0            -             -        0.0",
        "test_mlp            inductor       3       1           2    2 skipped      0 FAILED        2.5",
        "test_a.py::test_mlp[inductor] (call)",
        *(f"    {line}" for line in observation_lines(FULL)),
        "    not checked: CUDA graphs: no GPU",
        "    note: it is slow",
        (
            "1 test compiled, 15 graphs, 1 graph break (and 1 ignored), 2 recompiles, 1 limit hit, "
            "2 CUDA-graph skips, 1 not checked"
        ),
    ]


@pytest.mark.parametrize(
    ("graphs", "cell"),
    [
        (CudaGraphs(), "-"),
        (CudaGraphs(expected=False, recorded=0, replayed=0), "-"),
        (CudaGraphs(True, 2, 3), "2 recorded, 3 replayed"),
        (CudaGraphs(True, None, None), "? recorded, ? replayed"),
        (CudaGraphs(None, 1, None), "1 recorded, ? replayed"),
        (CudaGraphs(True, 1, 1, SKIPS[:1]), "1 skipped"),
    ],
)
def test_cuda_graph_cell(graphs: CudaGraphs, cell: str) -> None:
    """What became of CUDA graphs in one cell."""
    head, row = summary_lines(Report.of([a_record(seen=Observation(cudagraphs=graphs))], {}), 1)[:2]
    end = head.index("CUDA graphs") + len("CUDA graphs")
    assert row[: max(end, row.index(cell) + len(cell))].endswith(f" {cell}")


@pytest.mark.parametrize(
    ("parity", "cell"),
    [
        (Parity(), "-"),
        (Parity(None, 2), "not checked"),
        (Parity(True, 1, (Check("structure", "out", 1, True),)), "0"),
        (Parity(True, 1, (Check("values", "out", 1, True, 0.0), Check("values", "b", 1, True, 1.25e-7))), "1.2e-07"),
        (Parity(False, 1, (Check("values", "out", 1, False, 0.5),)), "5.0e-01 FAILED"),
    ],
)
def test_parity_cell(parity: Parity, cell: str) -> None:
    """The largest difference that was seen, and whether it was too large."""
    row = summary_lines(Report.of([a_record(seen=Observation(), parity=parity)], {}), 1)[1]
    assert row.split("  ")[-1].strip() == "?"
    assert row.removesuffix("?").rstrip().endswith(f" {cell}")


def test_relaxed_limits_and_notes_are_told_without_verbosity() -> None:
    """A marker that allows more than the command line is named in every summary, so are notes."""
    record = a_record(
        seen=Observation(graphs=1), relaxed=("max_breaks", "max_recompiles"), notes=("left config changed",)
    )
    assert summary_lines(Report.of([record], {}, ["counts depend on the order"]), 0) == [
        "test_a.py::test_mlp[inductor]: max_breaks allowed by its marker",
        "test_a.py::test_mlp[inductor]: max_recompiles allowed by its marker",
        "test_a.py::test_mlp[inductor]: left config changed",
        "counts depend on the order",
        "1 test compiled, 1 graph, 0 graph breaks, 0 recompiles, 0 not checked",
    ]
