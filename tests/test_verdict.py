from __future__ import annotations

from typing import Any

import pytest

from pytest_dynamo.record import Compile
from pytest_dynamo.record import CudaGraphs
from pytest_dynamo.record import CudaGraphSkip
from pytest_dynamo.record import Finding
from pytest_dynamo.record import GraphBreak
from pytest_dynamo.record import LimitHit
from pytest_dynamo.record import Observation
from pytest_dynamo.record import Place
from pytest_dynamo.record import Reason
from pytest_dynamo.record import Recompile
from pytest_dynamo.settings import Limits
from pytest_dynamo.verdict import Uncompiled
from pytest_dynamo.verdict import break_message
from pytest_dynamo.verdict import judge
from pytest_dynamo.verdict import rewritten_message


def a_break(line: int = 1, *, ignored: str | None = None, kind: str = "break", **given: Any) -> GraphBreak:
    reasons = given.pop("reasons", (Reason("print", "GB0059", "remove it", 1),))
    return GraphBreak("a.py", line, "f", given.pop("called_from", None), reasons, kind, ignored)


def recompiled(count: int = 1, *reasons: str, line: int = 1) -> Recompile:
    return Recompile("a.py", line, "f", reasons or ("size changed",), count)


HIT = LimitHit("a.py", 1, "f", "recompile_limit", "x == 1")
SKIP = CudaGraphSkip("cpu device", "a.py", 7)

BREAKS = Observation(breaks=(a_break(1), a_break(2)))
RECOMPILES = Observation(recompiles=(recompiled(2), recompiled(1, "dtype", line=5)))
SKIPS = Observation(cudagraphs=CudaGraphs(True, 0, 0, (SKIP, CudaGraphSkip("mutated", None, None))))
GRAPHS = Observation(graphs=3)
TIME = Observation(compile=Compile(seconds=2.04))


@pytest.mark.parametrize(
    ("seen", "limit", "just_allowed", "one_over", "count", "places"),
    [
        (BREAKS, "max_breaks", 2, 1, 2, 2),
        (RECOMPILES, "max_recompiles", 3, 2, 3, 2),
        (SKIPS, "max_cudagraph_skips", 2, 1, 2, 2),
        (GRAPHS, "max_graphs", 3, 2, 3, 1),
        (TIME, "max_compile_time", 2.04, 2.03, 2.04, 1),
    ],
)
def test_a_limit_allows_up_to_its_number(
    seen: Observation, limit: str, just_allowed: float, one_over: float, count: float, places: int
) -> None:
    """As many as allowed pass, one more fails, with a finding for each place."""
    assert judge(seen, Limits(**{limit: just_allowed})) == ()
    found = judge(seen, Limits(**{limit: one_over}))
    assert [(f.limit, f.allowed, f.seen) for f in found] == [(limit, one_over, count)] * places


def test_many_guards_are_told_in_short() -> None:
    """Each compilation adds the guards of all before it."""
    guards = tuple(f"size {number}" for number in range(30))
    seen = Observation(recompiles=(Recompile("a.py", 1, "f", guards, 9),))
    (finding,) = judge(seen, Limits(max_recompiles=2))
    assert finding.message.splitlines()[1:] == ["and: size 1", "and: size 2", "and: 27 more guards"]
    assert Recompile("a.py", 1, "f", guards[:4], 4).first_reasons == guards[:4]


@pytest.mark.parametrize("seen", [BREAKS, RECOMPILES, SKIPS, GRAPHS, TIME])
def test_a_limit_of_none_judges_nothing(seen: Observation) -> None:
    """Without a limit nothing is broken."""
    assert judge(seen, Limits()) == ()


@pytest.mark.parametrize("limit", ["max_breaks", "max_recompiles", "max_cudagraph_skips", "max_graphs"])
def test_zero_of_nothing_passes(limit: str) -> None:
    """A test in which nothing happened keeps a limit of 0."""
    assert judge(Observation(frames=1, graphs=0), Limits(**{limit: 0})) == ()


@pytest.mark.parametrize("seen", [BREAKS, RECOMPILES, SKIPS, GRAPHS, TIME])
def test_accepting_what_was_seen_passes(seen: Observation) -> None:
    """What a finding says to write is enough to pass."""
    strict = Limits(0, 0, 0, 0, 0)
    for finding in judge(seen, strict):
        assert finding.accept_with is not None
        name, _, value = finding.accept_with.partition("=")
        assert name == finding.limit
        assert judge(seen, Limits(**{name: float(value) if "." in value else int(value)})) == ()


@pytest.mark.parametrize("seconds", [0.001, 0.05, 0.1, 0.149, 0.15, 1.0, 1.04, 1.05, 9.96, 123.4567])
def test_accepting_a_compile_time_passes(seconds: float) -> None:
    """The time to write is never below the time that was seen."""
    seen = Observation(compile=Compile(seconds=seconds))
    (finding,) = judge(seen, Limits(max_compile_time=0))
    assert finding.accept_with is not None
    accepted = float(finding.accept_with.partition("=")[2])
    assert judge(seen, Limits(max_compile_time=accepted)) == ()
    assert accepted <= seconds + 0.1


def test_ignored_breaks_are_not_counted() -> None:
    """A break that a rule ignores neither counts nor is told as a finding."""
    seen = Observation(breaks=(a_break(1, ignored="assert rewriting"), a_break(2)))
    assert judge(seen, Limits(max_breaks=1)) == ()
    found = judge(seen, Limits(max_breaks=0))
    assert [(f.line, f.seen, f.accept_with) for f in found] == [(2, 1, "max_breaks=1")]


@pytest.mark.parametrize("limit", ["max_breaks", "max_recompiles"])
def test_untold_counts_are_not_judged(limit: str) -> None:
    """A count that this torch does not tell breaks no limit."""
    untold = limit.removeprefix("max_")
    assert judge(Observation(untold=(untold,)), Limits(**{limit: 0})) == ()


def test_unknown_numbers_are_not_judged() -> None:
    """A number of graphs or a time that could not be observed breaks no limit."""
    assert judge(Observation(), Limits(max_graphs=0, max_compile_time=0)) == ()


# -- limit hits and uncompiled code ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("must_compile", "allowed", "fails"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_limit_hits_fail_tests_that_must_compile(must_compile: bool, allowed: bool, fails: bool) -> None:
    """Code that Dynamo gave up for good fails a test that has to compile, unless it is accepted."""
    seen = Observation(limit_hits=(HIT,))
    found = judge(seen, Limits(), must_compile=must_compile, allow_uncompiled=allowed)
    assert [f.limit for f in found] == ["limit_hit"] * fails
    for finding in found:
        assert finding == Finding(
            "limit_hit",
            None,
            1,
            "f hit Dynamo's recompile_limit; its further calls run in eager mode\n"
            "hint: it was compiled again and again because this changed: x == 1",
            "a.py",
            1,
            "allow_uncompiled=True",
        )


def test_a_limit_hit_without_a_reason_has_no_hint() -> None:
    """Nothing is said about a reason that torch does not give."""
    seen = Observation(limit_hits=(LimitHit("a.py", 1, "f", "recompile_limit", ""),))
    (finding,) = judge(seen, Limits(), must_compile=True)
    assert finding.message == "f hit Dynamo's recompile_limit; its further calls run in eager mode"


def test_a_limit_hit_is_no_break_and_no_recompile() -> None:
    """Limits on breaks and recompiles don't see limit hits."""
    assert judge(Observation(limit_hits=(HIT,)), Limits(max_breaks=0, max_recompiles=0)) == ()


def test_uncompiled_functions_fail_unless_allowed() -> None:
    """A function of which nothing was compiled is a finding with what is known about why."""
    nothing = Uncompiled("f", "nothing was compiled: why", "a.py", 3)
    expected = Finding("uncompiled", None, 0, "nothing was compiled: why", "a.py", 3, "allow_uncompiled=True")
    assert judge(Observation(), Limits(), uncompiled=(nothing,)) == (expected,)
    assert judge(Observation(), Limits(), uncompiled=(nothing,), must_compile=True) == (expected,)
    assert judge(Observation(), Limits(), uncompiled=(nothing,), allow_uncompiled=True) == ()


def test_a_frame_skipped_by_assert_rewriting_fails() -> None:
    """An ignored break that took the whole frame with it means that nothing was compiled."""
    skipped = a_break(4, ignored="assert rewriting", kind="skipped_frame")
    seen = Observation(breaks=(skipped,))
    (finding,) = judge(seen, Limits(max_breaks=0), must_compile=True)
    assert (finding.limit, finding.file, finding.line) == ("uncompiled", "a.py", 4)
    assert finding.message == rewritten_message(skipped)
    assert finding.message == (
        "nothing was compiled: pytest rewrote the assert at a.py:4; "
        "move the function out of the test module or use --assert=plain"
    )
    assert judge(seen, Limits(), must_compile=True, allow_uncompiled=True) == ()
    assert judge(seen, Limits(max_breaks=0)) == ()


def test_a_rewritten_assert_that_only_broke_is_no_finding() -> None:
    """Code around a rewritten assert that was compiled in two parts passes."""
    seen = Observation(breaks=(a_break(4, ignored="assert rewriting"),))
    assert judge(seen, Limits(max_breaks=0), must_compile=True) == ()


def test_a_skipped_frame_is_told_once() -> None:
    """Where the function itself is known as uncompiled, its skipped frame is not told again."""
    seen = Observation(breaks=(a_break(4, ignored="assert rewriting", kind="skipped_frame"),))
    found = judge(seen, Limits(), uncompiled=(Uncompiled("f", "why"),), must_compile=True)
    assert [f.message for f in found] == ["why"]


# -- order and texts ------------------------------------------------------------------------------


def test_most_telling_first() -> None:
    """Code that was not compiled comes before what was compiled badly."""
    seen = Observation(
        graphs=1,
        breaks=BREAKS.breaks[:1],
        recompiles=RECOMPILES.recompiles[:1],
        limit_hits=(HIT,),
        cudagraphs=CudaGraphs(skips=(SKIP,)),
        compile=Compile(seconds=1.0),
    )
    found = judge(seen, Limits(0, 0, 0, 0, 0), uncompiled=(Uncompiled("g", "why"),), must_compile=True)
    assert [f.limit for f in found] == [
        *("uncompiled", "limit_hit", "max_breaks", "max_recompiles", "max_cudagraph_skips"),
        *("max_graphs", "max_compile_time"),
    ]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (a_break(), "print  [GB0059]\nhint: remove it"),
        (a_break(reasons=(Reason("why", None, None, 1),)), "why"),
        (
            a_break(reasons=(Reason("a", "GB0001", "mend", 1), Reason("b", None, "mend", 2))),
            "a  [GB0001]; b\nhint: mend",
        ),
        (
            a_break(kind="skipped_frame", called_from=Place("test_a.py", 9)),
            "print  [GB0059]\nall of f runs in eager mode because of it\ncalled from test_a.py:9\nhint: remove it",
        ),
    ],
)
def test_break_message(found: GraphBreak, expected: str) -> None:
    """A break tells all reasons with torch's numbers, what it costs, who called, each hint once."""
    assert break_message(found) == expected


def test_messages_of_the_other_limits() -> None:
    """Each finding names the place and, in PyTorch's words, the reason."""
    seen = Observation(
        graphs=3,
        recompiles=(recompiled(1), recompiled(3, "one", "two", line=5)),
        cudagraphs=CudaGraphs(skips=(SKIP,)),
        compile=Compile(seconds=1.25),
    )
    found = judge(seen, Limits(0, 0, 0, 0, 0))
    assert [(f.message, f.file, f.line, f.accept_with) for f in found] == [
        ("f was compiled again: size changed", "a.py", 1, "max_recompiles=4"),
        ("f was compiled again (3 times): one\nand: two", "a.py", 5, "max_recompiles=4"),
        ("no CUDA graph: cpu device", "a.py", 7, "max_cudagraph_skips=1"),
        ("3 graphs were compiled", None, None, "max_graphs=3"),
        ("compiling took 1.2 s", None, None, "max_compile_time=1.3"),
    ]
