from __future__ import annotations

import re

import pytest


def outcomes(run) -> dict[str, str]:
    """Outcome of each inner test by its name, as ``-rA`` tells it."""
    words = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
    told = (line.split() for line in run.result.outlines if line.split(" ")[0] in words and "::" in line)
    return {parts[1].partition("::")[2]: parts[0] for parts in told}


def failure(run, name: str) -> list[str]:
    """What the terminal tells of one failed test, without blank lines."""
    lines = run.result.outlines
    start = next(n for n, line in enumerate(lines) if line.startswith("_") and f" {name} " in line)
    stop = next(n for n in range(start + 1, len(lines)) if re.match("___|===|-+ dynamo -", lines[n]))
    return [line for line in lines[start + 1 : stop] if line.strip()]


#: A backend that gives wrong values, and a function that breaks.
WRONG = """
    import threading
    import pytest, torch
    from pytest_dynamo import LimitError, ParityError

    def wrong(gm, inputs):
        return lambda *args: tuple(out + 1 if torch.is_tensor(out) else out for out in gm.forward(*args))

    def double(x):
        return x * 2

    def breaks(x):
        x = x + 1
        print()
        return x * 2
"""
OWN_FILES = ("calls.py", "compiled_function.py", "session.py", "fixtures.py", "testrun.py", "plugin.py", "pluggy")


# -- ParityError -----------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["auto", "long", "short"])
def test_a_mismatch_raises_at_the_call(project, style):
    """A mismatch raises ParityError at the call, and is printed without our frames."""
    run = project.test(
        WRONG
        + """
    @pytest.mark.compiled(backend=wrong)
    def test_it(compiled):
        fast = compiled(double)
        fast(torch.ones(3))
        raise RuntimeError("not reached")
    """,
        f"--tb={style}",
    )
    run.result.assert_outcomes(failed=1)
    told = failure(run, "test_it[wrong]")
    if style != "short":
        assert ">       fast(torch.ones(3))" in told
    assert any(line.startswith("test_it.py:19: ") for line in told)
    text = "\n".join(told)
    assert "pytest_dynamo.errors.ParityError: compiled double differs from eager in call 1 [wrong]" in text
    assert "out  values: 3 of 3 elements differ" in text
    assert not [name for name in OWN_FILES if name in text]
    assert "not reached" not in [line.strip() for line in text.splitlines() if line.startswith("E")]
    assert run.record("test_it[wrong]")["outcome"] == "failed"
    assert run.record("test_it[wrong]")["parity"]["passed"] is False


def test_parity_error_is_an_assertion_error():
    """Both exceptions are public, and assertion errors to whoever handles those."""
    import pytest_dynamo

    assert issubclass(pytest_dynamo.ParityError, AssertionError)
    assert issubclass(pytest_dynamo.LimitError, AssertionError)


CAUGHT = (
    WRONG
    + """
    @pytest.mark.compiled(backend=wrong)
    class TestIt:
        def test_broad_except(self, compiled):
            try:
                compiled(double)(torch.ones(3))
            except Exception:
                pass

        def test_bare_except(self, compiled):
            try:
                compiled(double)(torch.ones(3))
            except:
                pass

        def test_raises(self, compiled):
            with pytest.raises(ParityError):
                compiled(double)(torch.ones(3))

        def test_raises_assertion_error(self, compiled):
            with pytest.raises(AssertionError, match="differs from eager"):
                compiled(double)(torch.ones(3))

        @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
        def test_thread(self, compiled):
            thread = threading.Thread(target=compiled(double), args=(torch.ones(3),))
            thread.start()
            thread.join()

        def test_the_first_of_several(self, compiled):
            fast = compiled(double)
            for n in (1, 2, 3):
                with pytest.raises(ParityError):
                    fast(torch.ones(3, dtype=[torch.float, torch.double, torch.half][n - 1]))

        def test_in_a_callback(self, compiled):
            fast = compiled(double)
            done = []

            class Net(torch.nn.Module):
                def forward(self, x):
                    try:
                        return fast(x)
                    except AssertionError:
                        done.append(True)
                        return x

            Net()(torch.ones(3))
            assert done == [True]

    @pytest.mark.compiled(backend="eager")
    def test_correct(compiled):
        compiled(double)(torch.ones(3))
"""
)


def test_a_caught_mismatch_fails_the_test(project):
    """Whatever caught the ParityError, the test fails with it when it returns."""
    run = project.test(CAUGHT, "-rA")
    told = outcomes(run)
    assert told.pop("test_correct[eager]") == "PASSED"
    assert set(told.values()) == {"FAILED"}, told
    assert len(told) == 7
    for name in told:
        text = "\n".join(failure(run, name.replace("::", ".")))
        assert "pytest_dynamo.errors.ParityError: compiled double differs from eager in call 1 [wrong]" in text, name
        assert not [own for own in OWN_FILES if own in text], (name, text)
        assert run.record(name)["parity"]["passed"] is False
    assert run.record("test_the_first_of_several[wrong]")["parity"]["calls"] == 3


def test_a_mismatch_in_a_thread_of_another_file(project):
    """A ParityError from a thread, none of whose frames is the test's, is printed without ours."""
    project.file(
        "helper",
        """
        import threading

        def in_thread(fn, *args):
            def work():
                try:
                    fn(*args)
                except BaseException:
                    pass
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        """,
    )
    run = project.test(
        WRONG
        + """
    from helper import in_thread

    @pytest.mark.compiled(backend=wrong)
    def test_it(compiled):
        in_thread(compiled(double), torch.ones(3))
    """
    )
    run.result.assert_outcomes(failed=1)
    text = "\n".join(failure(run, "test_it[wrong]"))
    assert "compiled double differs from eager in call 1 [wrong]" in text
    assert "helper.py:6" in text
    assert not [name for name in OWN_FILES if name in text], text


def test_an_expected_mismatch(project):
    """`xfail(raises=ParityError, strict=True)` is how to expect one, caught or not."""
    run = project.test(
        WRONG
        + """
    known = pytest.mark.xfail(raises=ParityError, strict=True)

    @known
    @pytest.mark.compiled(backend=wrong)
    def test_raised(compiled):
        compiled(double)(torch.ones(3))

    @known
    @pytest.mark.compiled(backend=wrong)
    def test_caught(compiled):
        with pytest.raises(ParityError):
            compiled(double)(torch.ones(3))

    @known
    @pytest.mark.compiled(backend="eager")
    def test_no_mismatch(compiled):
        compiled(double)(torch.ones(3))

    @known
    @pytest.mark.compiled(backend="eager")
    def test_other_error(compiled):
        compiled(double)(torch.ones(3))
        raise KeyError("other")

    @known
    @pytest.mark.compiled(backend="eager", max_breaks=0)
    def test_other_finding(compiled):
        compiled(breaks)(torch.ones(3))

    @pytest.mark.xfail(raises=AssertionError, strict=True)
    @pytest.mark.compiled(backend=wrong)
    def test_base_class(compiled):
        compiled(double)(torch.ones(3))
    """,
        "-rA",
    )
    assert outcomes(run) == {
        "test_raised[wrong]": "XFAIL",
        "test_caught[wrong]": "XFAIL",
        "test_no_mismatch[eager]": "FAILED",
        "test_other_error[eager]": "FAILED",
        "test_other_finding[eager]": "FAILED",
        "test_base_class[wrong]": "XFAIL",
    }
    assert "[XPASS(strict)]" in run.text
    assert run.record("test_raised[wrong]")["outcome"] == "xfailed"
    assert run.record("test_caught[wrong]")["outcome"] == "xfailed"


# -- LimitError ------------------------------------------------------------------------------------


def test_a_limit_fails_after_the_body(project):
    """A broken limit is FAILED, never an ERROR, and comes after the body and before teardown."""
    project.file(
        "conftest",
        """
        import pytest

        def pytest_runtest_logreport(report):
            if report.failed:
                print("FAILED PHASE", report.nodeid, report.when)
        """,
    )
    run = project.test(
        WRONG
        + """
    @pytest.fixture
    def order():
        print("setup")
        yield
        print("teardown")

    @pytest.mark.compiled(backend="eager", max_breaks=0)
    def test_fixture(compiled, order):
        compiled(breaks)(torch.ones(3))
        print("body ended")

    @pytest.mark.compiled(max_graphs=1)
    def test_by_hand(order):
        torch.compile(breaks, backend="eager")(torch.ones(3))

    @pytest.mark.compiled(backend="eager")
    def test_never_called(compiled):
        compiled(breaks)

    @pytest.mark.compiled(backend="eager")
    def test_never_used(compiled):
        pass
    """,
        "-rA",
        "-s",
    )
    run.result.assert_outcomes(failed=4)
    assert "body ended" in run.text
    told = [line for line in run.text.splitlines() if "FAILED PHASE" in line]
    assert [line.partition("FAILED PHASE")[2].split()[1] for line in told] == ["call"] * 4
    hint = (
        "Avoid calling builtin `print` with argument types []. Consider using an equivalent alternative function/method"
    )
    assert failure(run, "test_fixture[eager]") == [
        "1 graph break, 0 allowed",
        "  test_it.py:13  Failed to trace builtin operator  [GB0059]",
        f"      hint: {hint} to `print`.",
        "  accept with @pytest.mark.compiled(max_breaks=1)",
    ]
    assert failure(run, "test_by_hand") == [
        "2 graphs, 1 allowed",
        "  2 graphs were compiled",
        "  accept with @pytest.mark.compiled(max_graphs=2)",
    ]
    accept = "  accept with @pytest.mark.compiled(allow_uncompiled=True)"
    assert failure(run, "test_never_called[eager]") == [
        "not compiled",
        "  compiled(breaks) was never called",
        accept,
    ]
    assert failure(run, "test_never_used[eager]") == [
        "not compiled",
        "  compiled was never used: pass it a function or module and call what it returns",
        accept,
    ]


def test_one_graph_is_singular(project):
    """Messages count in grammatical English."""
    run = project.test(
        WRONG
        + """
    @pytest.mark.compiled(max_graphs=0)
    def test_it():
        torch.compile(double, backend="eager")(torch.ones(3))
    """
    )
    assert failure(run, "test_it") == [
        "1 graph, 0 allowed",
        "  1 graph was compiled",
        "  accept with @pytest.mark.compiled(max_graphs=1)",
    ]


def test_an_expected_limit(project):
    """`xfail(raises=LimitError)` expects a broken limit, with strict=True also its end."""
    run = project.test(
        WRONG
        + """
    known = pytest.mark.xfail(raises=LimitError, strict=True)

    @known
    @pytest.mark.compiled(backend="eager", max_breaks=0)
    def test_broken(compiled):
        compiled(breaks)(torch.ones(3))

    @known
    @pytest.mark.compiled(max_breaks=0)
    def test_by_hand():
        torch.compile(breaks, backend="eager")(torch.ones(3))

    @known
    @pytest.mark.compiled(backend="eager", fullgraph=True)
    def test_fullgraph(compiled):
        compiled(breaks)(torch.ones(3))

    @known
    @pytest.mark.compiled(backend="eager", max_breaks=0)
    def test_mended(compiled):
        compiled(double)(torch.ones(3))

    @known
    @pytest.mark.compiled(backend=wrong, max_breaks=0)
    def test_mismatch(compiled):
        compiled(double)(torch.ones(3))

    @pytest.mark.xfail(reason="any failure")
    @pytest.mark.compiled(backend="eager", max_breaks=0)
    def test_any(compiled):
        compiled(breaks)(torch.ones(3))

    @pytest.mark.xfail(raises=ValueError)
    @pytest.mark.compiled(backend="eager", max_breaks=0)
    def test_other(compiled):
        compiled(breaks)(torch.ones(3))
    """,
        "-rA",
    )
    assert outcomes(run) == {
        "test_broken[eager]": "XFAIL",
        "test_by_hand": "XFAIL",
        "test_fullgraph[eager-fullgraph]": "XFAIL",
        "test_mended[eager]": "FAILED",
        "test_mismatch[wrong]": "FAILED",
        "test_any[eager]": "XFAIL",
        "test_other[eager]": "FAILED",
    }
    assert len(run.record("test_broken[eager]")["findings"]) == 1


def test_limits_cannot_be_caught_by_the_body(project):
    """A limit is judged after the body, so nothing in the body can hide it."""
    run = project.test(
        WRONG
        + """
    @pytest.mark.compiled(backend="eager", fullgraph=True)
    def test_fullgraph(compiled):
        with pytest.raises(AssertionError):
            compiled(breaks)(torch.ones(3))

    @pytest.mark.compiled(backend="eager", max_breaks=0)
    def test_thread(compiled):
        thread = threading.Thread(target=compiled(breaks), args=(torch.ones(3),))
        thread.start()
        thread.join()
    """,
        "-rA",
    )
    assert outcomes(run) == {"test_fullgraph[eager-fullgraph]": "FAILED", "test_thread[eager]": "FAILED"}
    assert failure(run, "test_fullgraph[eager-fullgraph]")[:2] == [
        "graph break under fullgraph=True",
        "  test_it.py:13  Failed to trace builtin operator  [GB0059]",
    ]
    assert "1 graph break, 0 allowed" in failure(run, "test_thread[eager]")


# -- a test that did not pass anyway ---------------------------------------------------------------


def test_findings_of_a_test_that_failed_anyway(project):
    """A test that failed by itself keeps its own failure, and the findings stand in a section below."""
    run = project.test(
        WRONG
        + """
    @pytest.mark.compiled(backend="eager", max_breaks=0)
    def test_own_failure(compiled):
        result = compiled(breaks)(torch.ones(1))
        assert result == 5

    @pytest.mark.compiled(max_breaks=0)
    def test_by_hand():
        torch.compile(breaks, backend="eager")(torch.ones(1))
        raise KeyError("mine")

    @pytest.mark.compiled(backend=wrong, max_breaks=0)
    def test_parity_as_well(compiled):
        compiled(breaks)(torch.ones(1))

    @pytest.mark.compiled(backend="eager", max_breaks=0)
    def test_no_finding(compiled):
        compiled(double)(torch.ones(1))
        assert False
    """,
        "-rA",
    )
    assert set(outcomes(run).values()) == {"FAILED"}
    for name, own in (
        ("test_own_failure[eager]", "E       assert tensor([4.]) == 5"),
        ("test_by_hand", "E       KeyError: 'mine'"),
        ("test_parity_as_well[wrong]", "E       pytest_dynamo.errors.ParityError: compiled breaks differs from eager*"),
    ):
        told = failure(run, name)
        at = next(n for n, line in enumerate(told) if line.startswith("---") and " pytest-dynamo " in line)
        assert any(line.startswith(own.rstrip("*")) for line in told[:at]), (name, told)
        assert told[at + 1 : at + 3] == [
            "1 graph break, 0 allowed",
            "  test_it.py:13  Failed to trace builtin operator  [GB0059]",
        ]
    assert not [line for line in failure(run, "test_no_finding[eager]") if " pytest-dynamo " in line]
    assert run.record("test_own_failure[eager]")["outcome"] == "failed"
    assert len(run.record("test_own_failure[eager]")["findings"]) == 1


SKIPS = (
    WRONG
    + """
    @pytest.mark.compiled(backend="eager", max_breaks=0)
    def test_skips_itself(compiled):
        compiled(breaks)(torch.ones(1))
        pytest.skip("by itself")

    @pytest.mark.compiled(backend="eager", max_breaks=0)
    def test_xfails_itself(compiled):
        compiled(breaks)(torch.ones(1))
        pytest.xfail("by itself")

    @pytest.mark.compiled(backend="eager", max_breaks=0)
    @pytest.mark.skip(reason="never ran")
    def test_skipped(compiled):
        compiled(breaks)(torch.ones(1))
"""
)


def test_findings_of_a_test_that_skipped_itself(project):
    """A test that skipped itself stays skipped, and its findings are a section of its report."""
    project.file(
        "conftest",
        """
        def pytest_runtest_logreport(report):
            for title, text in report.sections:
                if title == "pytest-dynamo":
                    print("SECTION", report.nodeid.partition("::")[2], report.outcome, text.splitlines()[0])
        """,
    )
    run = project.test(SKIPS, "-rA", "-s")
    run.result.assert_outcomes(skipped=2, xfailed=1)
    sections = [line.partition("SECTION ")[2] for line in run.text.splitlines() if "SECTION " in line]
    assert sections == [
        "test_skips_itself[eager] skipped 1 graph break, 0 allowed",
        "test_xfails_itself[eager] skipped 1 graph break, 0 allowed",
    ]
    assert run.record("test_skips_itself[eager]")["outcome"] == "skipped"
    assert run.record("test_xfails_itself[eager]")["outcome"] == "xfailed"
    assert len(run.record("test_skips_itself[eager]")["findings"]) == 1


def test_a_caught_mismatch_in_a_test_that_ended_otherwise(project):
    """A ParityError that something caught is told in the section too where the test ends by another error."""
    run = project.test(
        WRONG
        + """
    @pytest.mark.compiled(backend=wrong)
    def test_it(compiled):
        try:
            compiled(double)(torch.ones(3))
        except AssertionError:
            pass
        raise KeyError("mine")
    """
    )
    run.result.assert_outcomes(failed=1)
    told = failure(run, "test_it[wrong]")
    assert "E       KeyError: 'mine'" in told
    at = next(n for n, line in enumerate(told) if line.startswith("---") and " pytest-dynamo " in line)
    assert told[at + 1] == "compiled double differs from eager in call 1 [wrong]"


# -- all together ----------------------------------------------------------------------------------


def test_several_findings_together(project):
    """All broken limits of a test are told at once, each with its places and the flag that accepts it."""
    run = project.test(
        WRONG
        + """
    def breaks_twice(x):
        x = x + 1
        print()
        x = x + 2
        print("again")
        return x * 2

    def again(x, n):
        return x * n

    @pytest.mark.compiled(backend="eager", dynamic=False)
    @pytest.mark.compiled(max_breaks=0, max_recompiles=0, max_graphs=1, max_compile_time=0)
    def test_it(compiled):
        compiled(breaks_twice)(torch.ones(2))
        fast = compiled(again)
        fast(torch.ones(2), 2), fast(torch.ones(2), 3)
        compiled(double)

    def test_by_hand():
        torch.compile(breaks_twice, backend="eager")(torch.ones(2))
        fast = torch.compile(again, backend="eager", dynamic=False)
        fast(torch.ones(2), 2), fast(torch.ones(2), 3), fast(torch.ones(2), 4)
    """,
        "--dynamo-max-breaks=1",
        "--dynamo-max-recompiles=1",
    )
    run.result.assert_outcomes(failed=2)
    told = failure(run, "test_it[eager-static]")
    titles = [line for line in told if not line.startswith(" ")]
    assert titles[:4] == [
        "not compiled",
        "2 graph breaks, 0 allowed",
        "1 recompile, 0 allowed",
        "5 graphs, 1 allowed",
    ]
    assert titles[4].endswith(" s of compiling, 0 allowed")
    accepts = [line.partition("compiled(")[2].rstrip(")") for line in told if "accept with" in line]
    assert accepts[:4] == ["allow_uncompiled=True", "max_breaks=2", "max_recompiles=1", "max_graphs=5"]
    assert accepts[4].startswith("max_compile_time=")
    for line in (
        "  compiled(double) was never called",
        "  test_it.py:18  Failed to trace builtin operator  [GB0059]",
        "  test_it.py:20  Failed to trace builtin operator  [GB0059]",
        "  test_it.py:23  again was compiled again: n == 2",
    ):
        assert line in told
    findings = run.record("test_it[eager-static]")["findings"]
    limits = ["uncompiled", "max_breaks", "max_breaks", "max_recompiles", "max_graphs", "max_compile_time"]
    assert [f["limit"] for f in findings] == limits
    assert [(f["allowed"], f["seen"], f["line"]) for f in findings[1:4]] == [(0, 2, 18), (0, 2, 20), (0, 1, 23)]

    told = failure(run, "test_by_hand")
    assert [line for line in told if not line.startswith((" ", "-"))] == [
        "2 graph breaks, 1 allowed",
        "2 recompiles, 1 allowed",
        "again",
    ]


def test_what_findings_accept_is_enough(project):
    """The marker that a failure names makes the test pass."""
    source = """
    @pytest.mark.compiled(backend="eager", dynamic=False, {limits})
    def test_it(compiled):
        compiled(breaks)(torch.ones(2))
        fast = compiled(lambda x, n: x * n)
        fast(torch.ones(2), 2), fast(torch.ones(2), 3)
        {never}
    """
    strict = "max_breaks=0, max_recompiles=0, max_graphs=0"
    never = "compiled(double)"
    run = project.test(WRONG + source.format(limits=strict, never=never))
    run.result.assert_outcomes(failed=1)
    accepted = {f["accept_with"] for f in run.record("test_it[eager-static]")["findings"]}
    assert accepted == {"allow_uncompiled=True", "max_breaks=1", "max_recompiles=1", "max_graphs=4"}
    run = project.test(WRONG + source.format(limits=", ".join(accepted), never=never))
    run.result.assert_outcomes(passed=1)


def test_findings_beside_a_break_under_fullgraph(project):
    """The break that ended a test under `fullgraph=True` does not hide its other findings."""
    run = project.test(
        WRONG
        + """
    @pytest.mark.compiled(backend="eager", fullgraph=True, max_graphs=0)
    def test_it(compiled):
        compiled(double)(torch.ones(2))
        compiled(breaks)(torch.ones(2))
    """
    )
    run.result.assert_outcomes(failed=1)
    titles = [line for line in failure(run, "test_it[eager-fullgraph]") if not line.startswith(" ")]
    assert titles[:2] == ["graph break under fullgraph=True", "1 graph, 0 allowed"]


def test_findings_beside_a_caught_mismatch(project):
    """A test that fails by a caught ParityError tells its broken limits in a section."""
    run = project.test(
        WRONG
        + """
    @pytest.mark.compiled(backend=wrong, max_breaks=0)
    def test_it(compiled):
        with pytest.raises(ParityError):
            compiled(breaks)(torch.ones(2))
    """
    )
    run.result.assert_outcomes(failed=1)
    told = failure(run, "test_it[wrong]")
    assert any("ParityError: compiled breaks differs from eager in call 1 [wrong]" in line for line in told)
    at = next(n for n, line in enumerate(told) if line.startswith("---") and " pytest-dynamo " in line)
    assert told[at + 1] == "1 graph break, 0 allowed"


def test_failures_in_a_junit_report(project):
    """A broken limit and a mismatch are failures, not errors, to tools that read JUnit's XML."""
    import xml.etree.ElementTree as ElementTree

    run = project.test(
        WRONG
        + """
    @pytest.mark.compiled(backend="eager", max_breaks=0)
    def test_limit(compiled):
        compiled(breaks)(torch.ones(2))

    @pytest.mark.compiled(backend=wrong)
    def test_parity(compiled):
        compiled(double)(torch.ones(2))
    """,
        "--junitxml=junit.xml",
    )
    run.result.assert_outcomes(failed=2)
    suite = ElementTree.parse(project.pytester.path / "junit.xml").getroot()[0]
    assert (suite.get("failures"), suite.get("errors")) == ("2", "0")
    limit, parity = suite.findall("testcase/failure")
    assert limit.get("message").startswith("1 graph break, 0 allowed")
    assert "accept with @pytest.mark.compiled(max_breaks=1)" in limit.text
    assert "compiled double differs from eager in call 1 [wrong]" in parity.get("message")


def test_the_short_summary_names_the_finding(project):
    """The last lines of a run tell what failed, not only where."""
    run = project.test(
        WRONG
        + """
    @pytest.mark.compiled(backend="eager", max_breaks=0)
    def test_limit(compiled):
        compiled(breaks)(torch.ones(2))

    @pytest.mark.compiled(backend=wrong)
    def test_parity(compiled):
        compiled(double)(torch.ones(2))
    """
    )
    run.result.stdout.fnmatch_lines(
        [
            "FAILED test_it.py::test_limit[[]eager] - 1 graph break, 0 allowed",
            "FAILED test_it.py::test_parity[[]wrong] - pytest_dynamo.errors.ParityError: compiled double differs*",
        ]
    )
