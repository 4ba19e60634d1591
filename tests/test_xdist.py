"""With pytest-xdist everything arrives at the controller, which writes one file."""

from __future__ import annotations

import copy

import pytest


pytest.importorskip("xdist")

SUITE = """
import pytest, torch

def chatty(x):
    print(x.shape)
    return x + 1

by_hand = torch.compile(chatty, backend="eager")
torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))

def test_breaks():
    by_hand(torch.ones(2))

def test_breaks_too():
    by_hand(torch.ones(2))

def test_clean():
    torch.compile(lambda x: x - 1, backend="eager")(torch.ones(2))

def test_nothing():
    pass

@pytest.mark.compiled(backend=["eager", "aot_eager"])
@pytest.mark.parametrize("n", [2, 3])
def test_variants(compiled, n):
    fast = compiled(torch.nn.Linear(4, 4))
    fast(torch.randn(n, 4))
    fast(torch.randn(n + 5, 4))

@pytest.mark.compiled(backend="eager")
def test_parity_fails(compiled):
    import random
    compiled(lambda x: x + len(str(random.seed(0) or x.shape)) if torch.compiler.is_compiling() else x)(torch.ones(2))

@pytest.mark.skip(reason="not now")
def test_skipped(compiled):
    pass

@pytest.mark.xfail
def test_xfails():
    by_hand(torch.ones(2))
    assert False
"""


def comparable(report):
    report = copy.deepcopy(report)
    for record in report["records"]:
        del record["compile"]
    return report


def test_the_report_is_the_same(project):
    """One process and two workers give the same JSON but for compile times, and fail the same tests."""
    project.file("test_suite", SUITE)
    alone = project.run("--dynamo-max-breaks=0", subprocess=True)
    spread = project.run("--dynamo-max-breaks=0", "-n", "2", subprocess=True)
    assert comparable(alone.report) == comparable(spread.report)
    for run in (alone, spread):
        run.result.assert_outcomes(failed=3, passed=6, skipped=1, xfailed=1)
        run.result.stdout.fnmatch_lines_random(
            [
                "FAILED test_suite.py::test_breaks - 1 graph break, 0 allowed",
                "FAILED test_suite.py::test_breaks_too - 1 graph break, 0 allowed",
                "FAILED test_suite.py::test_parity_fails*",
            ]
        )
    outcomes = {(r["nodeid"].rpartition("::")[2], r["phase"]): r["outcome"] for r in alone.report["records"]}
    assert outcomes["test_suite.py", "import"] == "passed"
    assert outcomes["test_xfails", "call"] == "xfailed"
    assert outcomes["test_breaks", "call"] == "failed"
    assert outcomes["test_clean", "call"] == "passed"
    assert ("test_nothing", "call") not in outcomes


def test_the_summary_is_printed_once(project):
    """The controller prints the summary; workers print nothing."""
    project.file("test_suite", SUITE)
    run = project.run("-n", "2", subprocess=True)
    assert run.text.count("tests compiled, ") == 1


def test_markers_alone_reach_the_controller(project):
    """Without any option only workers know that the plugin is in use; the summary is printed all the same."""
    project.file("test_suite", SUITE)
    run = project.run("-n", "2", json_report=False, subprocess=True)
    assert "8 tests compiled, " in run.text
    run = project.run("-n", "2", "-k", "test_nothing", json_report=False, subprocess=True)
    assert "dynamo" not in run.text.partition("test session starts")[2].partition("\n\n")[2]
