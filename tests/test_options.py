from __future__ import annotations

import json
import os
import re
import textwrap

import pytest


def outcomes(run) -> dict[str, str]:
    """Outcome of each inner test by its name, as ``-rA`` tells it."""
    words = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
    told = (line.split() for line in run.result.outlines if line.split(" ")[0] in words and "::" in line)
    return {parts[1].partition("::")[2]: parts[0] for parts in told}


def ids(run) -> list[str]:
    """Names of the inner tests that ``--collect-only -q`` lists, without their file."""
    return [line.partition("::")[2] for line in run.result.outlines if "::" in line]


def summary(run) -> list[str]:
    """Lines of the plugin's own summary."""
    lines = run.result.outlines
    start = next(n for n, line in enumerate(lines) if re.fullmatch("-+ dynamo -+", line))
    stop = next(n for n, line in enumerate(lines) if n > start and (line.startswith(("=", "-"))))
    return lines[start + 1 : stop]


#: A function that breaks as often as it is told.
BREAKS = """
    import pytest, torch

    def breaks(n, backend="eager"):
        def f(x):
            x = x + 1
            if n > 0:
                print()
            if n > 1:
                print()
            if n > 2:
                print()
            return x * 2
        return f

    def again(n):
        g = torch.compile(lambda x, k: x * k, backend="eager", dynamic=False)
        for k in range(n + 1):
            g(torch.ones(2), k + 2)
"""


def suite(source: str) -> str:
    return textwrap.dedent(BREAKS) + textwrap.dedent(source)


# -- limits ----------------------------------------------------------------------------------------

LIMITS = suite(
    """
    @pytest.mark.parametrize("n", [0, 1, 2])
    @pytest.mark.compiled(backend="eager")
    def test_fixture(compiled, n):
        compiled(breaks(n))(torch.ones(2))

    @pytest.mark.parametrize("n", [0, 1, 2])
    def test_breaks(n):
        torch.compile(breaks(n), backend="eager")(torch.ones(2))

    @pytest.mark.parametrize("n", [0, 1, 2])
    def test_recompiles(n):
        again(n)
    """
)


def failed(run) -> set[str]:
    return {name for name, outcome in outcomes(run).items() if outcome == "FAILED"}


def test_no_limit_by_default(project):
    """Without a limit breaks and recompiles are told and judge nothing."""
    run = project.test(LIMITS, "-rA", "-k", "2")
    run.result.assert_outcomes(passed=3, deselected=6)
    assert len(run.record("test_fixture[eager-2]")["breaks"]) == 2
    assert run.record("test_recompiles[2]")["recompiles"][0]["count"] == 2
    assert summary(run)[-1] == "2 tests compiled, 5 graphs, 2 graph breaks, 2 recompiles, 0 not checked"

    run = project.run("-rA", "test_it.py::test_breaks[2]")
    run.result.assert_outcomes(passed=1)
    assert len(run.record("test_breaks[2]")["breaks"]) == 2


@pytest.mark.parametrize("way", ["option", "ini", "option over ini"])
def test_a_cap_on_breaks(project, way):
    """`--dynamo-max-breaks` and its ini judge every test; the command line wins over the ini file."""
    args = {
        "option": ["--dynamo-max-breaks=1"],
        "ini": ["-o", "dynamo_max_breaks=1"],
        "option over ini": ["-o", "dynamo_max_breaks=0", "--dynamo-max-breaks=1"],
    }[way]
    run = project.test(LIMITS, "-rA", *args)
    assert failed(run) == {"test_fixture[eager-2]", "test_breaks[2]"}
    assert run.result.outlines.count("2 graph breaks, 1 allowed") == 2
    assert run.record("test_breaks[2]")["findings"][0]["accept_with"] == "max_breaks=2"


@pytest.mark.parametrize("way", ["option", "ini", "option over ini"])
def test_a_cap_on_recompiles(project, way):
    """`--dynamo-max-recompiles` and its ini judge every test; the command line wins over the ini file."""
    args = {
        "option": ["--dynamo-max-recompiles=1"],
        "ini": ["-o", "dynamo_max_recompiles=1"],
        "option over ini": ["-o", "dynamo_max_recompiles=0", "--dynamo-max-recompiles=1"],
    }[way]
    run = project.test(LIMITS, "-rA", *args)
    assert failed(run) == {"test_recompiles[2]"}
    assert run.result.outlines.count("2 recompiles, 1 allowed") == 1


@pytest.mark.parametrize("way", ["option", "ini", "option over ini"])
def test_a_cap_on_cudagraph_skips(project, way):
    """`--dynamo-max-cudagraph-skips` and its ini judge every test; the command line wins."""
    args = {
        "option": ["--dynamo-max-cudagraph-skips=1"],
        "ini": ["-o", "dynamo_max_cudagraph_skips=1"],
        "option over ini": ["-o", "dynamo_max_cudagraph_skips=0", "--dynamo-max-cudagraph-skips=1"],
    }[way]
    # Without a GPU nothing is to be recorded, so the records that torch would log are made by hand.
    source = """
        import logging
        import pytest, torch

        @pytest.mark.parametrize("n", [0, 1, 2])
        def test_skips(n):
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
            for k in range(n):
                logger = logging.getLogger("torch._inductor.cudagraph_utils.__cudagraphs")
                logger.warning("skipping cudagraphs due to reason %s", k)
        """
    run = project.test(source, "-rA", *args)
    assert failed(run) == {"test_skips[2]"}
    assert run.result.outlines.count("2 CUDA-graph skips, 1 allowed") == 1


def test_the_ini_file_sets_limits(project):
    """The ini names are those of the options with underscores, in every kind of configuration file."""
    project.file("test_it", LIMITS)
    config = {
        "pytest.ini": "[pytest]\ndynamo_max_breaks = 0\ndynamo_max_recompiles = 0\n",
        "pyproject.toml": '[tool.pytest]\ndynamo_max_breaks = "0"\ndynamo_max_recompiles = "0"\n',
    }
    for name, text in config.items():
        (project.pytester.path / name).write_text(text)
        run = project.run("-rA")
        assert failed(run) == {
            f"test_{what}[{n}]" for n in (1, 2) for what in ("breaks", "recompiles")
        } | {"test_fixture[eager-1]", "test_fixture[eager-2]"}  # fmt: skip
        (project.pytester.path / name).unlink()


def test_a_marker_wins_over_the_command_line(project):
    """Default < ini < command line < marker; the summary names each test whose marker is laxer."""
    run = project.test(
        suite(
            """
            @pytest.mark.compiled(backend="eager")
            class TestIt:
                @pytest.mark.compiled(max_breaks=2)
                def test_laxer(self, compiled):
                    compiled(breaks(2))(torch.ones(2))

                @pytest.mark.compiled(max_breaks=None)
                def test_lax_without_end(self, compiled):
                    compiled(breaks(3))(torch.ones(2))

                @pytest.mark.compiled(max_breaks=0)
                def test_stricter(self, compiled):
                    compiled(breaks(1))(torch.ones(2))

                @pytest.mark.compiled(max_breaks=1)
                def test_equal(self, compiled):
                    compiled(breaks(1))(torch.ones(2))

                def test_unmarked(self, compiled):
                    compiled(breaks(2))(torch.ones(2))

            @pytest.mark.compiled(max_breaks=2, max_recompiles=5)
            def test_by_hand():
                torch.compile(breaks(2), backend="eager")(torch.ones(2))

            @pytest.mark.compiled(max_breaks=2)
            def test_compiles_nothing(): pass
            """
        ),
        "-rA",
        "-o",
        "dynamo_max_breaks=0",
        "--dynamo-max-breaks=1",
        "--dynamo-max-recompiles=1",
    )
    assert outcomes(run) == {
        "TestIt::test_laxer[eager]": "PASSED",
        "TestIt::test_lax_without_end[eager]": "PASSED",
        "TestIt::test_stricter[eager]": "FAILED",
        "TestIt::test_equal[eager]": "PASSED",
        "TestIt::test_unmarked[eager]": "FAILED",
        "test_by_hand": "PASSED",
        "test_compiles_nothing": "PASSED",
    }
    assert summary(run)[:-1] == [
        "test_it.py::TestIt::test_lax_without_end[eager]: max_breaks allowed by its marker",
        "test_it.py::TestIt::test_laxer[eager]: max_breaks allowed by its marker",
        "test_it.py::test_by_hand: max_breaks allowed by its marker",
        "test_it.py::test_by_hand: max_recompiles allowed by its marker",
    ]
    assert "1 graph break, 0 allowed" in run.result.outlines
    assert "2 graph breaks, 1 allowed" in run.result.outlines


# -- variants --------------------------------------------------------------------------------------

VARIANTS = """
    import pytest

    def test_unmarked(compiled): pass

    @pytest.mark.compiled(backend=["eager", "aot_eager"])
    def test_backends(compiled): pass

    @pytest.mark.compiled(mode=["default", "max-autotune"])
    def test_modes(compiled): pass

    @pytest.mark.compiled(backend=["inductor", "eager"], dynamic=[None, True])
    @pytest.mark.parametrize("x", [1, 2])
    def test_both(compiled_variant, x): pass

    def test_without(): pass
"""

#: Arguments, the tests that are left, and how many are deselected.
CHOICES = {
    "": (
        ["unmarked[inductor]", "backends[eager]", "backends[aot_eager]"]
        + ["modes[inductor]", "modes[inductor-max-autotune]"]
        + [f"both[{v}-{x}]" for v in ("inductor", "inductor-dynamic", "eager", "eager-dynamic") for x in (1, 2)],
        0,
    ),
    "--dynamo-backends=eager": (
        ["unmarked[eager]", "backends[eager]", "modes[eager]"]
        + [f"both[eager{d}-{x}]" for d in ("", "-dynamic") for x in (1, 2)],
        5,
    ),
    "--dynamo-backends=aot_eager, cudagraphs": (
        ["unmarked[aot_eager]", "unmarked[cudagraphs]", "backends[aot_eager]", "modes[aot_eager]", "modes[cudagraphs]"],
        9,
    ),
    "--dynamo-modes=max-autotune": (
        ["unmarked[inductor-max-autotune]", "backends[eager]", "backends[aot_eager]", "modes[inductor-max-autotune]"]
        + [f"both[inductor-max-autotune{d}-{x}]" for d in ("", "-dynamic") for x in (1, 2)]
        + [f"both[eager{d}-{x}]" for d in ("", "-dynamic") for x in (1, 2)],
        1,
    ),
    "--dynamo-modes=reduce-overhead,lite": (
        ["unmarked[inductor-reduce-overhead]", "unmarked[inductor-lite]", "backends[eager]", "backends[aot_eager]"]
        + [f"both[inductor-{m}{d}-{x}]" for m in ("reduce-overhead", "lite") for d in ("", "-dynamic") for x in (1, 2)]
        + [f"both[eager{d}-{x}]" for d in ("", "-dynamic") for x in (1, 2)],
        2,
    ),
    "--dynamo-dynamic=true": (
        ["unmarked[inductor-dynamic]", "backends[eager-dynamic]", "backends[aot_eager-dynamic]"]
        + ["modes[inductor-dynamic]", "modes[inductor-max-autotune-dynamic]"]
        + [f"both[{b}-dynamic-{x}]" for b in ("inductor", "eager") for x in (1, 2)],
        4,
    ),
    "--dynamo-dynamic=False,NONE --dynamo-backends=eager": (
        [f"{test}[{v}]" for test in ("unmarked", "backends", "modes") for v in ("eager-static", "eager")]
        + [f"both[eager-{x}]" for x in (1, 2)],
        8,
    ),
    "--dynamo-backends=cudagraphs --dynamo-dynamic=false": (
        ["unmarked[cudagraphs-static]", "modes[cudagraphs-static]"],
        10,
    ),
    "-o dynamo_backends=eager -o dynamo_dynamic=true": (
        ["unmarked[eager-dynamic]", "backends[eager-dynamic]", "backends[aot_eager-dynamic]", "modes[eager-dynamic]"]
        + [f"both[{v}-{x}]" for v in ("inductor", "inductor-dynamic", "eager", "eager-dynamic") for x in (1, 2)],
        0,
    ),
    "-o dynamo_modes=lite,default": (
        ["unmarked[inductor-lite]", "unmarked[inductor]", "backends[eager]", "backends[aot_eager]", "modes[inductor]"]
        + ["modes[inductor-max-autotune]"]
        + [f"both[inductor-lite{d}-{x}]" for d in ("", "-dynamic") for x in (1, 2)]
        + [f"both[inductor{d}-{x}]" for d in ("", "-dynamic") for x in (1, 2)]
        + [f"both[eager{d}-{x}]" for d in ("", "-dynamic") for x in (1, 2)],
        0,
    ),
    "-o dynamo_backends=eager --dynamo-backends=aot_eager": (
        ["unmarked[aot_eager]", "backends[aot_eager]", "modes[aot_eager]"],
        9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("arguments", CHOICES)
def test_variants_from_the_command_line(project, arguments):
    """Per field a marked list is narrowed by the command line and an unmarked one replaced; ini sets defaults."""
    left, deselected = CHOICES[arguments]
    args = re.sub(", ", ",", arguments).split()
    run = project.test(VARIANTS, "--collect-only", "-q", *args, json_report=False)
    assert sorted(ids(run)) == sorted([f"test_{name}" for name in left] + ["test_without"])
    total = len(left) + 1 + deselected
    told = f"{total - deselected}/{total} tests collected ({deselected} deselected)" if deselected else f"{total} tests"
    assert run.result.outlines[-1].startswith(told)


def test_nothing_left_is_deselected_as_by_k(project):
    """A run whose every variant is deselected ends as with `-k`: no tests ran."""
    run = project.test(
        """
        import pytest

        @pytest.mark.compiled(backend=["eager", "aot_eager"])
        def test_it(compiled): pass
        """,
        "--dynamo-backends=cudagraphs",
    )
    assert run.result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    run.result.assert_outcomes(deselected=2)


def test_a_chosen_mode_on_a_backend_without_modes(project):
    """`--dynamo-modes` is for inductor; a test marked with another backend runs once, as ever."""
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(backend="eager")
        def test_it(compiled):
            compiled(lambda x: x + 1)(torch.ones(2))
        """,
        "--dynamo-modes=default,max-autotune",
        "-rA",
    )
    assert outcomes(run) == {"test_it[eager]": "PASSED"}
    assert run.record("test_it[eager]")["variant"]["mode"] is None


def test_a_backend_by_reference_is_chosen_by_reference_or_name(project, monkeypatch):
    """A marked callable is left by `--dynamo-backends` under its `module:attribute`."""
    project.file("mybackends", "def mine(gm, inputs):\n    return gm.forward\n")
    monkeypatch.syspath_prepend(str(project.pytester.path))
    source = """
        import pytest
        from mybackends import mine

        @pytest.mark.compiled(backend=[mine, "eager"])
        def test_callable(compiled): pass

        @pytest.mark.compiled(backend=["mybackends:mine", "eager"])
        def test_reference(compiled): pass

        def test_unmarked(compiled): pass
        """
    run = project.test(source, "--collect-only", "-q", "--dynamo-backends=mybackends:mine", json_report=False)
    assert ids(run) == ["test_callable[mine]", "test_reference[mine]", "test_unmarked[mine]"]


# -- bad values ------------------------------------------------------------------------------------

COUNT = "expected a whole number of 0 or more, got {!r}"
BAD = {
    **{
        (name, value): COUNT.format(value)
        for name in ("max-breaks", "max-recompiles", "max-cudagraph-skips")
        for value in ("-1", "1.5", "few", "")
    },
    ("backends", ","): "expected one or more names, separated by commas",
    ("modes", ""): "expected one or more names, separated by commas",
    ("dynamic", "maybe"): "expected some of none, true, false, got 'maybe'",
    ("dynamic", "true,yes"): "expected some of none, true, false, got 'yes'",
    ("dynamic", ""): "expected one or more names, separated by commas",
    ("reset", "always"): "expected test or never, got 'always'",
    ("json", ""): "expected a path, got ''",
}


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value(project, name, value):
    """A bad value of an option or of its ini is a usage error that says what is expected."""
    project.file("test_it", "def test_it(): pass")
    run = project.run(f"--dynamo-{name}={value}", json_report=False)
    assert run.result.ret == pytest.ExitCode.USAGE_ERROR == 4
    assert run.text.splitlines()[-1].endswith(f"error: argument --dynamo-{name}: {BAD[name, value]}") or any(
        line.endswith(f": error: argument --dynamo-{name}: {BAD[name, value]}") for line in run.result.errlines
    )
    ini = f"dynamo_{name.replace('-', '_')}"
    run = project.run("-o", f"{ini}={value}", json_report=False)
    assert run.result.ret == 4
    assert f"ERROR: {ini}: {BAD[name, value]}" in run.result.errlines


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("backends", "eager,inducter", "unknown backend 'inducter'; did you mean 'inductor'?"),
        ("backends", "no_such:run", "backend 'no_such:run' can't be imported: No module named 'no_such'"),
        ("modes", "max-autotun", "unknown mode 'max-autotun'; did you mean 'max-autotune'?"),
    ],
)  # fmt: skip
def test_an_unknown_backend_or_mode(project, name, value, message):
    """An unknown backend or mode is a usage error with the nearest valid word, before any test runs."""
    project.file("test_it", "def test_it(): pass")
    for args in ([f"--dynamo-{name}={value}"], ["-o", f"dynamo_{name}={value}"]):
        run = project.run(*args, json_report=False)
        assert run.result.ret == 4
        assert f"ERROR: pytest-dynamo: {message}" in run.result.errlines


def test_a_bad_truth_value(project):
    """`dynamo_require_checked` takes a truth value."""
    project.file("test_it", "def test_it(): pass")
    run = project.run("-o", "dynamo_require_checked=maybe", json_report=False)
    assert run.result.ret == 4
    assert "invalid truth value 'maybe'" in run.text
    assert "Traceback" not in run.text


# -- the JSON report -------------------------------------------------------------------------------


def test_where_the_json_report_goes(project, monkeypatch):
    """A path on the command line counts from the current folder, one in the ini file from rootdir."""
    root = project.pytester.path
    (root / "sub").mkdir()
    (root / "pytest.ini").write_text("[pytest]\n")
    project.file("sub/test_it", "def test_it(): pass")
    monkeypatch.chdir(root / "sub")

    run = project.run("--dynamo-json=new/one.json", json_report=False)
    run.result.assert_outcomes(passed=1)
    assert json.loads((root / "sub/new/one.json").read_text())["format"] == 1

    (root / "pytest.ini").write_text("[pytest]\ndynamo_json = out/two.json\n")
    project.run(json_report=False)
    assert json.loads((root / "out/two.json").read_text())["records"] == []
    assert not (root / "sub/out").exists()

    project.run(f"--dynamo-json={root / 'three.json'}", json_report=False)
    assert (root / "three.json").exists()
    assert sorted(os.listdir(root / "out")) == ["two.json"]  # the command line won, and nothing is left over


@pytest.mark.parametrize("way", ["option", "ini"])
def test_a_json_report_in_place_of_a_folder(project, way):
    """A path that is a folder is a usage error before the tests run, not a loss of the report after them."""
    project.file("test_it", "def test_it(): pass")
    (project.pytester.path / "folder").mkdir()
    args = ["--dynamo-json=folder"] if way == "option" else ["-o", "dynamo_json=folder"]
    run = project.run(*args, json_report=False)
    assert run.result.ret == 4
    name = "--dynamo-json" if way == "option" else "dynamo_json"
    assert f"ERROR: {name}: folder is a folder" in run.result.errlines


# -- not checked -----------------------------------------------------------------------------------

UNCHECKED = """
    import pytest, torch

    @pytest.mark.compiled(backend="eager")
    def test_it(compiled):
        def f(x):
            x = x + 1
            raise KeyError("no")
        with pytest.raises(KeyError):
            compiled(f)(torch.ones(2))

    @pytest.mark.compiled(backend="eager")
    def test_good(compiled):
        compiled(lambda x: x + 1)(torch.ones(2))
"""


@pytest.mark.parametrize("args", [["--dynamo-require-checked"], ["-o", "dynamo_require_checked=true"]])
def test_require_checked(project, args):
    """What could not be checked passes and is counted; with `--dynamo-require-checked` it fails."""
    message = "f: all calls raised, in eager mode too"
    run = project.test(UNCHECKED)
    run.result.assert_outcomes(passed=2)
    assert run.record("test_it[eager]")["not_checked"] == [message]
    assert summary(run)[-1].endswith(", 1 not checked")

    run = project.test(UNCHECKED, "-rA", *args)
    assert outcomes(run) == {"test_it[eager]": "FAILED", "test_good[eager]": "PASSED"}
    assert [f["message"] for f in run.record("test_it[eager]")["findings"]] == [message]
    run.result.stdout.fnmatch_lines(["*1 not checked*", f"  {message}"])
    assert "KeyError" not in run.text.partition("= FAILURES =")[2].replace('KeyError("no")', "")


def test_require_checked_switched_off(project):
    """A false value in the ini file is the default."""
    run = project.test(UNCHECKED, "-o", "dynamo_require_checked=false")
    run.result.assert_outcomes(passed=2)


# -- reset -----------------------------------------------------------------------------------------

SHARED = """
    import pytest, torch

    def f(x):
        x = x + 1
        print()
        return x * 2

    fast = torch.compile(f, backend="eager")

    def test_one():
        fast(torch.ones(2))

    def test_two():
        fast(torch.ones(2))

    @pytest.mark.compiled(max_breaks=0)
    def test_three():
        fast(torch.ones(2))
"""


@pytest.mark.parametrize("args", [(), ("--dynamo-reset=test",), ("-o", "dynamo_reset=never", "--dynamo-reset=test")])
def test_reset_before_each_test(project, args):
    """Under a cap each test compiles anew, so that counts depend on no order."""
    run = project.test(SHARED, "-rA", "--dynamo-max-breaks=0", *args)
    assert outcomes(run) == {"test_one": "FAILED", "test_two": "FAILED", "test_three": "FAILED"}
    assert summary(run) == ["3 tests compiled, 6 graphs, 3 graph breaks, 0 recompiles, 0 not checked"]


@pytest.mark.parametrize("args", [["--dynamo-reset=never"], ["-o", "dynamo_reset=never"]])
def test_no_reset(project, args):
    """With `--dynamo-reset=never` breaks are told at the first test that meets them, and the summary says so."""
    run = project.test(SHARED, "-rA", "--dynamo-max-breaks=0", *args)
    assert outcomes(run) == {"test_one": "FAILED", "test_two": "PASSED", "test_three": "PASSED"}
    assert summary(run) == [
        "counts of tests that compile by themselves depend on their order: --dynamo-reset=never",
        "1 test compiled, 2 graphs, 1 graph break, 0 recompiles, 0 not checked",
    ]


def test_no_reset_where_nothing_is_judged(project):
    """A run that only writes a report changes nothing in the tests, and says that counts depend on the order."""
    run = project.test(SHARED.replace("(max_breaks=0)", ""), "-rA")
    assert outcomes(run) == {"test_one": "PASSED", "test_two": "PASSED", "test_three": "PASSED"}
    assert len(run.record("test_one")["breaks"]) == 1
    assert summary(run)[0] == (
        "counts of tests that compile by themselves depend on their order: no cap is set, so compiled code is kept"
    )


def test_no_reset_between_tests_that_use_the_fixture(project):
    """`--dynamo-reset=never` leaves compiled code to tests that use `compiled`, too: nothing is compiled twice."""
    run = project.test(
        """
        import pytest, torch

        def f(x):
            x = x + 1
            print()
            return x * 2

        pytestmark = pytest.mark.compiled(backend="eager")

        def test_one(compiled):
            compiled(f)(torch.ones(2))

        def test_two(compiled):
            compiled(f)(torch.ones(2))
        """,
        "-rA",
        "--dynamo-reset=never",
    )
    assert outcomes(run) == {"test_one[eager]": "PASSED", "test_two[eager]": "PASSED"}
    assert [len(run.record(f"test_{n}[eager]")["breaks"]) for n in ("one", "two")] == [1, 0]


# -- caps on suites that know nothing of the plugin ------------------------------------------------

INNOCENT = """
    import threading, unittest
    import pytest, torch
    from mylib import library

    def f(x):
        x = x + 1
        print()
        return x * 2

    module_level = torch.compile(f, backend="eager")

    @torch.compile(backend="eager")
    def decorated(x):
        x = x + 1
        print()
        return x * 2

    class Model(torch.nn.Module):
        def forward(self, x):
            x = x + 1
            print()
            return x * 2

    @pytest.fixture(scope="module")
    def shared():
        return torch.compile(f, backend="eager")

    @pytest.fixture(scope="module")
    def called():
        fast = torch.compile(f, backend="eager")
        fast(torch.ones(2))
        return fast

    @pytest.fixture
    def in_setup():
        torch.compile(f, backend="eager")(torch.ones(2))

    def test_module_level():
        module_level(torch.ones(2))

    def test_decorator():
        decorated(torch.ones(2))

    def test_model_compile():
        model = Model()
        model.compile(backend="eager")
        model(torch.ones(2))

    def test_compiled_module():
        torch.compile(Model(), backend="eager")(torch.ones(2))

    def test_thread():
        thread = threading.Thread(target=lambda: torch.compile(f, backend="eager")(torch.ones(2)))
        thread.start()
        thread.join()

    def test_shared(shared):
        shared(torch.ones(2))

    def test_shared_again(shared):
        shared(torch.ones(2))

    def test_called(called):
        pass

    def test_called_again(called):
        called(torch.ones(2))

    def test_setup(in_setup):
        pass

    def test_library():
        library(torch.ones(2))

    @pytest.mark.parametrize("n", [1, 2])
    def test_parametrized(n):
        module_level(torch.ones(n))

    class TestIt:
        def setup_method(self):
            module_level(torch.ones(2))

        def test_method(self):
            pass

    class TestCase(unittest.TestCase):
        def setUp(self):
            self.fast = torch.compile(f, backend="eager")

        def test_case(self):
            self.fast(torch.ones(2))

    def test_nothing():
        assert torch.ones(1) == 1
"""

LIBRARY = """
    import torch

    def inner(x):
        x = x + 1
        print()
        return x * 2

    def library(x):
        return torch.compile(inner, backend="eager")(x)
"""


def test_caps_on_a_suite_that_knows_nothing_of_the_plugin(project):
    """A cap judges every way in which a test comes to compile something, each with its own line."""
    project.file("mylib", LIBRARY)
    run = project.test(INNOCENT, "-rA", "--dynamo-max-breaks=0")
    told = outcomes(run)
    assert told.pop("test_nothing") == "PASSED"
    assert set(told.values()) == {"FAILED"}, told
    assert run.result.outlines.count("1 graph break, 0 allowed") == len(told) == 15
    lines = {name: run.record(name)["findings"][0] for name in ("test_module_level", "test_decorator", "test_library")}
    assert {name: (f["file"], f["line"]) for name, f in lines.items()} == {
        "test_module_level": ("test_it.py", 7),
        "test_decorator": ("test_it.py", 15),
        "test_library": ("mylib.py", 5),
    }
    assert run.record("test_model_compile")["findings"][0]["line"] == 21
    assert run.record("test_thread")["breaks"][0]["line"] == 7

    allowed = project.run("-rA", "--dynamo-max-breaks=1")
    assert allowed.result.ret == 0
    allowed.result.assert_outcomes(passed=16)


def test_phases(project):
    """Import and teardown are told and not judged; setup is judged with its test."""
    run = project.test(
        """
        import pytest, torch

        def run(n):
            def f(x):
                x = x + n
                print()
                return x * 2

            torch.compile(f, backend="eager")(torch.ones(2))

        run(1)

        @pytest.fixture
        def before():
            run(2)

        @pytest.fixture
        def after():
            yield
            run(3)

        @pytest.fixture
        def broken():
            run(4)
            raise KeyError("broken fixture")

        def test_import():
            pass

        def test_before(before):
            pass

        def test_after(after):
            pass

        def test_broken(broken):
            pass
        """,
        "-rA",
        "--dynamo-max-breaks=0",
    )
    assert outcomes(run) == {
        "test_import": "PASSED",
        "test_before": "FAILED",
        "test_after": "PASSED",
        "test_broken": "ERROR",
    }
    assert [(r["nodeid"], r["phase"], len(r["breaks"]), len(r["findings"])) for r in run.report["records"]] == [
        ("test_it.py", "import", 1, 0),
        ("test_it.py::test_after", "teardown", 1, 0),
        ("test_it.py::test_before", "setup", 1, 0),
        ("test_it.py::test_before", "call", 0, 1),
        ("test_it.py::test_broken", "setup", 1, 0),
    ]
    outcome = {(r["nodeid"].rpartition("::")[2], r["phase"]): r["outcome"] for r in run.report["records"]}
    assert outcome["test_before", "setup"] == outcome["test_before", "call"] == "failed"
    assert outcome["test_broken", "setup"] == "error"
    assert "broken fixture" in run.text
    assert run.result.outlines.count("1 graph break, 0 allowed") == 1
    assert run.record("test_it.py", "import")["variant"] is None


def test_a_teardown_or_a_failed_setup_leaves_nothing_to_the_next_test(project):
    """Under a cap a test compiles anew what another compiled in its teardown or before its setup failed."""
    run = project.test(
        """
        import pytest, torch

        def f(x):
            x = x + 1
            print()
            return x * 2

        fast = torch.compile(f, backend="eager")

        @pytest.fixture
        def after():
            yield
            fast(torch.ones(2))

        @pytest.fixture
        def broken():
            fast(torch.ones(2, dtype=torch.int32))
            raise KeyError("broken fixture")

        def test_teardown(after):
            pass

        def test_after_teardown():
            fast(torch.ones(2))

        def test_nothing():
            pass

        def test_setup(broken):
            pass

        def test_after_setup():
            fast(torch.ones(2, dtype=torch.int32))
        """,
        "-rA",
        "--dynamo-max-breaks=0",
    )
    assert outcomes(run) == {
        "test_teardown": "PASSED",
        "test_after_teardown": "FAILED",
        "test_nothing": "PASSED",
        "test_setup": "ERROR",
        "test_after_setup": "FAILED",
    }


def test_the_outcome_of_a_teardown_record(project):
    """A record of teardown has the outcome of its test, as those of setup and call have."""
    run = project.test(
        """
        import pytest, torch

        @pytest.fixture
        def after():
            yield
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))

        def test_passes(after):
            pass

        def test_fails(after):
            assert False
        """,
        "--dynamo-max-breaks=0",
    )
    assert run.record("test_passes", "teardown")["outcome"] == "passed"
    assert run.record("test_fails", "teardown")["outcome"] == "failed"


def test_import_of_several_files(project):
    """What a module compiles while it is imported stands under its own file."""
    project.file("mylib", LIBRARY + "\n    library(torch.ones(2))\n")
    project.file("test_a", "import torch, mylib\n\ndef test_a(): pass")
    project.file(
        "test_b", "import torch, mylib\n\nmylib.library(torch.ones(3, dtype=torch.int32))\n\ndef test_b(): pass"
    )
    run = project.run("--dynamo-max-breaks=0")
    run.result.assert_outcomes(passed=2)
    assert [(r["nodeid"], r["phase"]) for r in run.report["records"]] == [
        ("test_a.py", "import"),
        ("test_b.py", "import"),
    ]


# -- compilation switched off ----------------------------------------------------------------------

OFF = """
    import pytest, torch

    {code}

    def f(x):
        return x + 1

    @pytest.mark.compiled(backend="eager")
    def test_fixture(compiled):
        compiled(f)(torch.ones(2))

    @pytest.mark.compiled(backend="eager", allow_uncompiled=True)
    def test_allowed(compiled):
        compiled(f)(torch.ones(2))

    def test_by_hand():
        torch.compile(f, backend="eager")(torch.ones(2))
"""


@pytest.fixture
def default_stance():
    yield
    import torch

    torch.compiler.set_stance("default")


@pytest.mark.parametrize(
    "cap", ["--dynamo-max-breaks=0", "--dynamo-max-recompiles=3", "--dynamo-max-cudagraph-skips=0"]
)
@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_a_cap_without_compilation(project, monkeypatch, cap, variable):
    """A cap where compilation is switched off by the environment is a usage error."""
    monkeypatch.setenv(variable, "1")
    run = project.test(OFF.format(code=""), cap)
    assert run.result.ret == 4
    name = cap.partition("=")[0]
    assert f"ERROR: {name}: compilation is switched off by {variable}=1" in run.result.errlines


@pytest.mark.parametrize("where", ["conftest", "test module"])
@pytest.mark.usefixtures("default_stance")
def test_a_cap_under_a_stance(project, where):
    """A stance of force_eager that a conftest or a test module leaves behind is a usage error under a cap."""
    stance = 'torch.compiler.set_stance("force_eager")'
    if where == "conftest":
        project.file("conftest", f"import torch\n{stance}\n")
    code = stance if where == "test module" else ""
    run = project.test(OFF.format(code=code), "--dynamo-max-recompiles=0")
    assert run.result.ret == 4
    assert f"ERROR: --dynamo-max-recompiles: compilation is switched off by {stance}" in run.result.errlines


@pytest.mark.usefixtures("default_stance")
def test_the_fixture_under_a_stance(project):
    """Without a cap, tests that must compile fail and say by what compilation is switched off."""
    stance = 'torch.compiler.set_stance("force_eager")'
    run = project.test(OFF.format(code=stance), "-rA")
    assert outcomes(run) == {
        "test_fixture[eager]": "FAILED",
        "test_allowed[eager]": "PASSED",
        "test_by_hand": "PASSED",
    }
    run.result.stdout.fnmatch_lines(["not compiled", f"*compilation is switched off by {stance}"])


def test_the_fixture_without_compilation(project, monkeypatch):
    """TORCHDYNAMO_DISABLE=1 fails every test that uses `compiled`, and is named."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    run = project.test(OFF.format(code=""), "-rA", subprocess=True)
    assert outcomes(run) == {
        "test_fixture[eager]": "FAILED",
        "test_allowed[eager]": "PASSED",
        "test_by_hand": "PASSED",
    }
    run.result.stdout.fnmatch_lines(["not compiled", "*compilation is switched off by TORCHDYNAMO_DISABLE=1"])


def test_a_stance_within_a_test_is_its_own_affair(project):
    """A test under a cap may run a part of itself in eager mode."""
    run = project.test(
        """
        import torch

        def f(x):
            print()
            return x + 1

        def test_it():
            with torch.compiler.set_stance("force_eager"):
                torch.compile(f, backend="eager")(torch.ones(2))

        def test_after():
            torch.compile(f, backend="eager")(torch.ones(2))
        """,
        "-rA",
        "--dynamo-max-breaks=0",
    )
    assert outcomes(run) == {"test_it": "PASSED", "test_after": "FAILED"}


# -- unused means absent ---------------------------------------------------------------------------


def without_times(run) -> list[str]:
    return [
        re.sub(r"\d+\.\d+s", "", line) for line in run.result.outlines if not line.startswith(("plugins:", "rootdir:"))
    ]


def test_unused_means_absent(project):
    """A suite that asks for nothing sees nothing, also where it compiles and breaks."""
    project.file("test_it", SHARED.replace("(max_breaks=0)", "('theirs')"))
    # Another marker of that name has to be known somewhere where the plugin is not.
    (project.pytester.path / "pytest.ini").write_text("[pytest]\nmarkers = compiled: theirs\n")
    with_plugin = project.run("-v", json_report=False)
    without = project.run("-v", "-p", "no:dynamo", json_report=False)
    assert with_plugin.result.ret == without.result.ret == 0
    assert without_times(with_plugin) == without_times(without)


@pytest.mark.parametrize("args", [["--dynamo-max-breaks=0"], ["-o", "dynamo_max_breaks=0"], ["--dynamo-json=r.json"]])
def test_used_means_a_summary(project, args):
    """A run that asks for something is told the totals, also where nothing was compiled."""
    run = project.test("def test_it(): pass", *args, json_report=False)
    assert summary(run) == ["0 tests compiled, 0 graphs, 0 graph breaks, 0 recompiles, 0 not checked"]


def test_every_option_is_documented(project):
    """`--help` tells every option and the ini value of the same name."""
    project.file("test_it", "")
    run = project.run("--help", json_report=False)
    for name, metavar in (
        ("max-breaks", "N"),
        ("max-recompiles", "N"),
        ("max-cudagraph-skips", "N"),
        ("backends", "A,B"),
        ("modes", "A,B"),
        ("dynamic", "A,B"),
        ("reset", "test|never"),
        ("json", "FILE"),
        ("require-checked", None),
    ):
        assert f"--dynamo-{name}" + (f"={metavar}" if metavar else "") in run.text
        assert re.search(rf"^  dynamo_{name.replace('-', '_')} \(", run.text, re.MULTILINE)
