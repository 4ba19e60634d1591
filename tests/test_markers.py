from __future__ import annotations

import textwrap

import pytest

from pytest_dynamo.settings import MARKER_FIELDS


def outcomes(run) -> dict[str, str]:
    """Outcome of each inner test by its name, as ``-rA`` tells it."""
    words = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
    told = (line.split() for line in run.result.outlines if line.split(" ")[0] in words and "::" in line)
    return {parts[1].partition("::")[2]: parts[0] for parts in told}


def ids(run) -> list[str]:
    """Names of the inner tests that ``--collect-only -q`` lists, without their file."""
    return [line.partition("::")[2] for line in run.result.outlines if "::" in line]


# -- misuse that stops the collection of a file ----------------------------------------------------

KEYWORDS = ", ".join(repr(name) for name in sorted(MARKER_FIELDS))

MISUSE = {
    "max_break=0": "unknown keyword 'max_break'; did you mean 'max_breaks'?",
    "Backend='eager'": "unknown keyword 'Backend'; did you mean 'backend'?",
    "xyzzy=0": f"unknown keyword 'xyzzy'; known: {KEYWORDS}",
    "backend='inducter'": "unknown backend 'inducter'; did you mean 'inductor'?",
    "backend=['eager', 'aot_eagr']": "unknown backend 'aot_eagr'; did you mean 'aot_eager'?",
    "backend=''": "unknown backend ''; known: *'aot_eager', *'eager', *'inductor'*",
    "backend=3": "backend must be a name, 'package.module:attribute' or a callable, not 3",
    "backend='no_such:run'": "backend 'no_such:run' can't be imported: No module named 'no_such'",
    "backend='math:xyz'": "backend 'math:xyz' can't be imported: module 'math' has no attribute 'xyz'",
    "backend='math:pi'": "backend 'math:pi' is not callable",
    "mode='max-autotun'": "unknown mode 'max-autotun'; did you mean 'max-autotune'?",
    "mode=['default', 'reduce_overhead']": "unknown mode 'reduce_overhead'; did you mean 'reduce-overhead'?",
    "mode='0'": "unknown mode '0'; known: 'default', 'lite', 'max-autotune', 'max-autotune-no-cudagraphs', "
    "'reduce-overhead'",
    "mode=None": "mode must be a name or a list of such, not None",
    "backend='eager', mode='max-autotune'": "mode 'max-autotune' on backend 'eager', which has no modes; "
    "known: 'inductor'",
    "backend='eager', mode='default'": "mode 'default' on backend 'eager', which has no modes; known: 'inductor'",
    "backend=['eager', 'aot_eager'], mode='default'": "mode 'default' on backend 'eager', 'aot_eager', which has no "
    "modes; known: 'inductor'",
    "backend='math:sqrt', mode='default'": "mode 'default' on backend 'sqrt', which has no modes; known: 'inductor'",
    "mode='max-autotune', options={'a': 1}": "mode and options exclude each other in torch.compile",
    "dynamic='yes'": "dynamic must be True, False or None or a list of such, not 'yes'",
    "fullgraph=None": "fullgraph must be True or False or a list of such, not None",
    "options=3": "options must be a dict or a list of such, not 3",
    "max_breaks=1.5": "max_breaks must be a whole number or None, not 1.5",
    "max_breaks=True": "max_breaks must be a whole number or None, not True",
    "max_breaks='0'": "max_breaks must be a whole number or None, not '0'",
    "max_compile_time='fast'": "max_compile_time must be a number or None, not 'fast'",
    "rtol=-0.1": "rtol can't be negative: -0.1",
    "atol='small'": "atol must be a number or None, not 'small'",
    "allow_uncompiled=1": "allow_uncompiled must be True or False, not 1",
    "min_speedup=1.3": "min_speedup needs the fixture compiled_benchmark",
    "max_memory_ratio=1": "max_memory_ratio needs the fixture compiled_benchmark",
    "'eager'": "takes keywords only, not 'eager'",
    "'eager', max_breaks=0": "takes keywords only, not 'eager'",
    **{
        f"{name}=[]": f"{name} is an empty list; leave it out for the default"
        for name in ("backend", "mode", "dynamic", "fullgraph", "options")
    },
    "backend=()": "backend is an empty list; leave it out for the default",
    **{
        f"{name}=-1": f"{name} can't be negative: -1"
        for name in ("max_breaks", "max_recompiles", "max_graphs", "max_cudagraph_skips", "max_compile_time")
    },
}


@pytest.mark.parametrize("arguments", MISUSE)
def test_a_wrong_marker_stops_the_collection_of_its_file(project, arguments):
    """A wrong marker is an error at collection, in one line that names the test and the right word."""
    project.file("test_other", "def test_other(): pass")
    run = project.test(
        f"""
        import pytest

        def test_before(): pass

        @pytest.mark.compiled({arguments})
        def test_it(compiled): pass
        """
    )
    assert run.result.ret == pytest.ExitCode.INTERRUPTED == 2
    run.result.assert_outcomes(errors=1)
    # The message is all that stands below the heading.
    run.result.stdout.fnmatch_lines(
        [
            "*_ ERROR collecting test_it.py _*",
            "test_it.py::test_it: @pytest.mark.compiled: " + MISUSE[arguments].replace("[", "[[]"),
            "[=-]*",
        ],
        consecutive=True,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((f"{name}={value}", f"{name} needs the fixture compiled or compiled_variant") for name, value in (
            ("backend", "'eager'"),
            ("mode", "'max-autotune'"),
            ("dynamic", "True"),
            ("fullgraph", "True"),
            ("options", "{}"),
            ("rtol", "0.1"),
            ("atol", "0.1"),
        )),
        ("max_breaks=-1", "max_breaks can't be negative: -1"),
        ("max_breaks=0, max_recompile=0", "unknown keyword 'max_recompile'; did you mean 'max_recompiles'?"),
        ("'eager', max_breaks=0", "takes keywords only, not 'eager'"),
        ("min_speedup=1", "min_speedup needs the fixture compiled_benchmark"),
    ],
)  # fmt: skip
def test_a_wrong_marker_on_a_test_without_our_fixtures(project, arguments, message):
    """Without our fixtures only limits make sense: keywords about variants and parity are an error."""
    run = project.test(
        f"""
        import pytest

        @pytest.mark.compiled({arguments})
        def test_it(): pass
        """
    )
    assert run.result.ret == 2
    assert f"test_it.py::test_it: @pytest.mark.compiled: {message}" in run.result.outlines


def test_a_field_given_twice_on_one_node(project):
    """The same field twice on one function, class or module is an error, whatever the values."""
    wrong = {
        "function": """
            @pytest.mark.compiled(max_breaks=0)
            @pytest.mark.compiled(max_breaks=0)
            def test_it(compiled): pass
            """,
        "on_class": """
            @pytest.mark.compiled(backend="eager")
            class TestIt:
                pytestmark = [pytest.mark.compiled(max_graphs=1), pytest.mark.compiled(max_graphs=2)]
                def test_it(self, compiled): pass
            """,
        "module": """
            pytestmark = [pytest.mark.compiled(rtol=1), pytest.mark.compiled(rtol=2)]
            def test_it(compiled): pass
            """,
        "hand_compiled": """
            @pytest.mark.compiled(max_breaks=0)
            @pytest.mark.compiled(max_breaks=1)
            def test_it(): pass
            """,
    }
    for name, source in wrong.items():
        project.file(f"test_{name}", "import pytest\n" + textwrap.dedent(source))
    run = project.run()
    assert run.result.ret == 2
    run.result.assert_outcomes(errors=4)
    for line in (
        "test_function.py::test_it: @pytest.mark.compiled: max_breaks is given twice",
        "test_on_class.py::TestIt::test_it: @pytest.mark.compiled: max_graphs is given twice",
        "test_module.py::test_it: @pytest.mark.compiled: rtol is given twice",
        "test_hand_compiled.py::test_it: @pytest.mark.compiled: max_breaks is given twice",
    ):
        assert line in run.result.outlines


def test_a_mode_must_not_meet_a_farther_backend_without_modes(project):
    """A mode is an error if the backend of its own node or a wider one has none."""
    run = project.test(
        """
        import pytest

        @pytest.mark.compiled(backend="aot_eager")
        class TestIt:
            @pytest.mark.compiled(mode="max-autotune")
            def test_it(self, compiled): pass
        """
    )
    assert run.result.ret == 2
    message = "mode 'max-autotune' on backend 'aot_eager', which has no modes; known: 'inductor'"
    assert f"test_it.py::TestIt::test_it: @pytest.mark.compiled: {message}" in run.result.outlines


def test_a_mode_meets_a_nearer_backend_without_modes(project):
    """A mode for a whole module leaves tests alone that ask for another backend by themselves."""
    run = project.test(
        """
        import pytest

        pytestmark = pytest.mark.compiled(mode=["default", "max-autotune"])

        def test_inductor(compiled): pass

        @pytest.mark.compiled(backend="aot_eager")
        def test_other(compiled): pass

        @pytest.mark.compiled(backend=["aot_eager", "inductor"])
        def test_both(compiled): pass

        @pytest.mark.compiled(mode="lite")
        class Base:
            def test_class(self, compiled): pass

        @pytest.mark.compiled(backend="eager")
        class TestDerived(Base): pass
        """,
        "--collect-only",
        "-q",
        json_report=False,
    )
    assert ids(run) == [
        "test_inductor[inductor]",
        "test_inductor[inductor-max-autotune]",
        "test_other[aot_eager]",
        "test_both[aot_eager]",
        "test_both[inductor]",
        "test_both[inductor-max-autotune]",
        "TestDerived::test_class[eager]",
    ]


# -- a fixture `compiled` of somebody else ---------------------------------------------------------

FOREIGN = """
    import pytest

    @pytest.fixture(params=["gcc", "clang"])
    def compiled(request):
        return request.param
"""


@pytest.mark.parametrize("argument", ["backend='eager'", "mode='default'", "dynamic=True", "rtol=0.1"])
def test_our_keywords_where_a_foreign_fixture_hides_ours(project, argument):
    """A keyword that needs our fixture says which foreign fixture stands in its place."""
    project.file("conftest", FOREIGN)
    run = project.test(
        f"""
        import pytest

        @pytest.mark.compiled({argument})
        def test_it(compiled): pass
        """
    )
    name = argument.partition("=")[0]
    assert run.result.ret == 2
    message = f"{name} needs the fixture compiled, and this test uses another fixture of that name, from conftest"
    assert f"test_it.py::test_it: @pytest.mark.compiled: {message}" in run.result.outlines


@pytest.mark.parametrize("args", [(), ("--dynamo-modes=max-autotune", "--dynamo-backends=inductor,eager")])
def test_a_foreign_fixture_without_our_keywords_is_left_alone(project, args):
    """Tests with another suite's fixture `compiled` run as before, also when variants are chosen."""
    project.file("conftest", FOREIGN)
    run = project.test(
        """
        import pytest

        def test_plain(compiled):
            assert compiled in ("gcc", "clang")

        @pytest.mark.compiled
        def test_bare(compiled): pass

        @pytest.mark.compiled("fast", level=3)
        def test_their_words(compiled): pass

        @pytest.mark.parametrize("compiled", ["a", "b"])
        def test_parametrized(compiled):
            assert compiled in "ab"
        """,
        "-rA",
        *args,
    )
    assert run.result.ret == 0
    assert outcomes(run) == {
        f"{test}[{param}]": "PASSED"
        for test in ("test_plain", "test_bare", "test_their_words", "test_parametrized")
        for param in (("a", "b") if test == "test_parametrized" else ("gcc", "clang"))
    }
    assert run.report is None or run.report["records"] == []


def test_a_foreign_fixture_beside_our_variant(project):
    """A test may take `compiled` from its own suite and `compiled_variant` from here."""
    project.file("conftest", FOREIGN)
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(backend=["eager", "aot_eager"])
        def test_it(compiled, compiled_variant):
            assert compiled in ("gcc", "clang")
            torch.compile(lambda x: x + 1, **compiled_variant.kwargs)(torch.ones(2))

        class TestIt:
            @pytest.fixture
            def compiled(self, compiled_variant):
                return lambda fn: torch.compile(fn, **compiled_variant.kwargs)

            @pytest.mark.compiled(backend="eager")
            def test_built_upon(self, compiled):
                assert compiled(lambda x: x + 1)(torch.ones(1)) == 2
        """,
        "-rA",
    )
    assert outcomes(run) == {
        **{f"test_it[{variant}-{param}]": "PASSED" for variant in ("eager", "aot_eager") for param in ("gcc", "clang")},
        "TestIt::test_built_upon[eager]": "PASSED",
    }


def test_a_foreign_variant_fixture_is_left_alone(project):
    """Another suite may use the name `compiled_variant` for itself, too."""
    run = project.test(
        """
        import pytest

        @pytest.fixture(params=["gcc", "clang"])
        def compiled_variant(request):
            return request.param

        def test_it(compiled_variant):
            assert compiled_variant in ("gcc", "clang")
        """,
        "-rA",
        "--dynamo-modes=max-autotune",
    )
    assert outcomes(run) == {"test_it[gcc]": "PASSED", "test_it[clang]": "PASSED"}


def test_a_fixture_that_wraps_ours(project):
    """A suite may override `compiled` and build upon ours: the variants are still made."""
    run = project.test(
        """
        import pytest, torch

        @pytest.fixture
        def compiled(compiled):
            return lambda fn: compiled(fn)

        @pytest.mark.compiled(backend=["eager", "aot_eager"])
        def test_it(compiled):
            assert compiled(lambda x: x + 1)(torch.ones(1)) == 2
        """,
        "-rA",
    )
    assert outcomes(run) == {"test_it[eager]": "PASSED", "test_it[aot_eager]": "PASSED"}


# -- legal uses ------------------------------------------------------------------------------------


def test_lists_make_variants_and_ids_come_first(project):
    """The product of the lists makes the tests; the id stands first in the brackets, also a single one."""
    run = project.test(
        """
        import pytest

        def my_backend(gm, inputs):
            return gm.forward

        def test_default(compiled): pass

        def test_variant_alone(compiled_variant): pass

        @pytest.mark.parametrize("size", [1, 2])
        @pytest.mark.compiled(backend=["eager", "aot_eager"])
        def test_params(size, compiled): pass

        @pytest.mark.compiled(backend="eager")
        @pytest.mark.parametrize("size", [3])
        def test_other_order(compiled, size): pass

        @pytest.mark.compiled(mode=["default", "max-autotune"], dynamic=[None, True, False], fullgraph=True)
        def test_product(compiled): pass

        @pytest.mark.compiled(backend=["inductor", "eager"], mode=["default", "reduce-overhead", "lite"])
        def test_modes_belong_to_inductor(compiled): pass

        @pytest.mark.compiled(options=[{"a": 1}, {"a": 2}, {"a": 1}])
        def test_options(compiled): pass

        @pytest.mark.compiled(backend=[my_backend, "test_it:my_backend", ("torch._dynamo.backends.debugging:eager")])
        def test_by_reference(compiled): pass

        class TestIt:
            @pytest.mark.compiled(backend=("eager", "eager"))
            def test_method(self, compiled): pass
        """,
        "--collect-only",
        "-q",
        json_report=False,
    )
    assert ids(run) == [
        "test_default[inductor]",
        "test_variant_alone[inductor]",
        "test_params[eager-1]",
        "test_params[eager-2]",
        "test_params[aot_eager-1]",
        "test_params[aot_eager-2]",
        "test_other_order[eager-3]",
        *(
            f"test_product[inductor{mode}{dynamic}-fullgraph]"
            for mode in ("", "-max-autotune")
            for dynamic in ("", "-dynamic", "-static")
        ),
        "test_modes_belong_to_inductor[inductor]",
        "test_modes_belong_to_inductor[inductor-reduce-overhead]",
        "test_modes_belong_to_inductor[inductor-lite]",
        "test_modes_belong_to_inductor[eager]",
        "test_options[inductor]",
        "test_options[inductor-2]",
        "test_by_reference[my_backend]",
        "test_by_reference[my_backend-2]",
        "test_by_reference[eager]",
        "TestIt::test_method[eager]",
    ]


def test_every_variant_is_what_its_id_says(project):
    """The fixture hands each test the variant of its own id, with torch.compile's own keywords."""
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(
            backend=["eager", "aot_eager"], dynamic=[None, True], fullgraph=[False, True], allow_uncompiled=True
        )
        def test_it(compiled, compiled_variant, request):
            parts = request.node.name.partition("[")[2].rstrip("]").split("-")
            assert compiled_variant.kwargs == {
                "backend": parts[0], "dynamic": True if "dynamic" in parts else None, "fullgraph": "fullgraph" in parts
            }
            assert compiled_variant.id == request.node.name.partition("[")[2].rstrip("]")

        @pytest.mark.compiled(options={"triton.cudagraphs": False})
        def test_options(compiled_variant):
            assert compiled_variant.kwargs == {
                "backend": "inductor", "dynamic": None, "fullgraph": False, "options": {"triton.cudagraphs": False}
            }
        """
    )
    run.result.assert_outcomes(passed=9)
    variant = run.record("test_it[aot_eager-dynamic-fullgraph]")["variant"]
    assert variant == {
        "id": "aot_eager-dynamic-fullgraph",
        "backend": "aot_eager",
        "mode": None,
        "dynamic": True,
        "fullgraph": True,
        "options": None,
    }


def test_the_nearest_marker_wins_field_by_field(project):
    """Module, class and function each give fields; per field the nearest counts, and a list replaces."""
    run = project.test(
        """
        import pytest, torch

        pytestmark = [
            pytest.mark.compiled(backend=["eager", "aot_eager"], max_breaks=1), pytest.mark.compiled(dynamic=True)
        ]

        def breaks(n):
            def f(x):
                for _ in range(n):
                    x = x + 1
                if n > 0:
                    print()
                if n > 1:
                    print()
                return x * 2
            return f

        def test_module(compiled):
            compiled(breaks(1))(torch.ones(3))

        def test_module_too_many(compiled):
            compiled(breaks(2))(torch.ones(3))

        @pytest.mark.compiled(backend="aot_eager", max_breaks=0)
        class TestClass:
            def test_class(self, compiled):
                compiled(breaks(1))(torch.ones(3))

            @pytest.mark.compiled(max_breaks=2)
            def test_function(self, compiled):
                compiled(breaks(2))(torch.ones(3))

            @pytest.mark.compiled(max_breaks=None, dynamic=[False])
            def test_told_not_judged(self, compiled):
                compiled(breaks(2))(torch.ones(3))

            @pytest.mark.compiled(backend="eager")
            class TestNested:
                def test_nested(self, compiled):
                    compiled(breaks(1))(torch.ones(3))
        """,
        "-rA",
    )
    assert outcomes(run) == {
        "test_module[eager-dynamic]": "PASSED",
        "test_module[aot_eager-dynamic]": "PASSED",
        "test_module_too_many[eager-dynamic]": "FAILED",
        "test_module_too_many[aot_eager-dynamic]": "FAILED",
        "TestClass::test_class[aot_eager-dynamic]": "FAILED",
        "TestClass::test_function[aot_eager-dynamic]": "PASSED",
        "TestClass::test_told_not_judged[aot_eager-static]": "PASSED",
        "TestClass::TestNested::test_nested[eager-dynamic]": "FAILED",
    }
    assert len(run.record("test_told_not_judged[aot_eager-static]")["breaks"]) == 2
    assert run.result.outlines.count("2 graph breaks, 1 allowed") == 2
    assert run.result.outlines.count("1 graph break, 0 allowed") == 2


def test_a_marked_class_inherits_markers(project):
    """Fields on a base class and again on a derived one are not given twice: the derived class is nearer."""
    run = project.test(
        """
        import pytest, torch

        def f(x):
            x = x + 1
            print()
            return x * 2

        @pytest.mark.compiled(backend=["eager", "aot_eager"], max_breaks=0)
        class Base:
            def test_it(self, compiled):
                compiled(f)(torch.ones(2))

        class Mixin:
            pytestmark = pytest.mark.compiled(backend="aot_eager", max_breaks=5, max_graphs=0)

        @pytest.mark.compiled(max_breaks=1)
        class TestDerived(Base): pass

        class TestPlain(Base): pass

        @pytest.mark.compiled(backend="eager")
        class TestBoth(Base, Mixin): pass

        class TestMixin(Mixin, Base): pass
        """,
        "-rA",
    )
    assert outcomes(run) == {
        "TestDerived::test_it[eager]": "PASSED",
        "TestDerived::test_it[aot_eager]": "PASSED",
        "TestPlain::test_it[eager]": "FAILED",
        "TestPlain::test_it[aot_eager]": "FAILED",
        "TestBoth::test_it[eager]": "FAILED",
        "TestMixin::test_it[aot_eager]": "FAILED",
    }
    assert (
        run.result.outlines.count("1 graph break, 0 allowed") == 3
    )  # TestPlain twice and TestBoth: the first base is nearer
    assert run.result.outlines.count("2 graphs, 0 allowed") == 2  # TestBoth and TestMixin


def test_one_marker_object_at_several_places(project):
    """A marker kept in a variable may stand on a class and its base, a function and its parameters, and in a hook."""
    project.file(
        "conftest",
        """
        import pytest

        strict = pytest.mark.compiled(max_breaks=0)

        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(strict)
        """,
    )
    run = project.test(
        """
        import pytest, torch
        from conftest import strict

        def f(x):
            x = x + 1
            print()
            return x * 2

        eager = pytest.mark.compiled(backend="eager")

        @eager
        @strict
        class Base:
            @eager
            @strict
            @pytest.mark.parametrize("x", [pytest.param(1, marks=strict), 2])
            def test_it(self, compiled, x):
                compiled(f)(torch.ones(2))

        @eager
        @strict
        class TestDerived(Base): pass
        """,
        "-rA",
    )
    assert outcomes(run) == {"TestDerived::test_it[eager-1]": "FAILED", "TestDerived::test_it[eager-2]": "FAILED"}
    assert run.result.outlines.count("1 graph break, 0 allowed") == 2


@pytest.mark.parametrize("marker", ["", "(1)", "('fast', level=3)", "(level=3)"])
def test_the_word_of_another_suite_is_ignored(project, marker):
    """Bare, with positional arguments only or with only unknown keywords, `compiled` isn't our marker."""
    run = project.test(
        f"""
        import pytest

        @pytest.mark.compiled{marker}
        def test_function(): pass

        @pytest.mark.compiled{marker}
        class TestIt:
            @pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.compiled{marker})])
            def test_method(self, x): pass
        """,
        "--strict-markers",
        "-rA",
        json_report=False,
    )
    assert run.result.ret == 0
    assert outcomes(run) == {
        f"{n}": "PASSED" for n in ("test_function", "TestIt::test_method[1]", "TestIt::test_method[2]")
    }
    assert (
        "dynamo" not in run.text.partition("test session starts")[2].partition("rootdir")[2].partition("collected")[2]
    )
    assert "graph break" not in run.text


def test_limits_on_tests_that_compile_by_themselves(project):
    """Limits and `allow_uncompiled` on a test without our fixtures judge what it compiles itself."""
    run = project.test(
        """
        import pytest, torch

        def f(x):
            x = x + 1
            print()
            return x * 2

        def again(x, n):
            return x + n

        def limit(x, n):
            return x * n

        @pytest.mark.compiled(max_breaks=0)
        def test_breaks():
            torch.compile(f, backend="eager")(torch.ones(2))

        @pytest.mark.compiled(max_breaks=1)
        def test_breaks_allowed():
            torch.compile(f, backend="eager")(torch.ones(2))

        @pytest.mark.compiled(max_graphs=0)
        def test_graphs():
            torch.compile(f, backend="eager")(torch.ones(2))

        @pytest.mark.compiled(max_compile_time=0)
        def test_time():
            torch.compile(f, backend="eager")(torch.ones(2))

        @pytest.mark.compiled(max_recompiles=0)
        def test_recompiles():
            g = torch.compile(again, backend="eager")
            g(torch.ones(2), 1.5), g(torch.ones(2, dtype=torch.int32), 1.5)

        def hit_the_limit():
            g = torch.compile(limit, backend="eager", dynamic=False)
            for n in range(torch._dynamo.config.recompile_limit + 2):
                g(torch.ones(2), n)

        @pytest.mark.compiled(max_breaks=0)
        def test_limit_hit():
            hit_the_limit()

        @pytest.mark.compiled(max_breaks=0, allow_uncompiled=True)
        def test_limit_hit_allowed():
            hit_the_limit()

        @pytest.mark.compiled(max_graphs=100)
        def test_limit_hit_without_a_cap():
            hit_the_limit()

        @pytest.mark.compiled(max_breaks=0)
        def test_compiles_nothing(): pass
        """,
        "-rA",
    )
    assert outcomes(run) == {
        "test_breaks": "FAILED",
        "test_breaks_allowed": "PASSED",
        "test_graphs": "FAILED",
        "test_time": "FAILED",
        "test_recompiles": "FAILED",
        "test_limit_hit": "FAILED",
        "test_limit_hit_allowed": "PASSED",
        "test_limit_hit_without_a_cap": "PASSED",
        "test_compiles_nothing": "PASSED",
    }
    run.result.stdout.fnmatch_lines(
        [
            "1 graph break, 0 allowed",
            "  test_it.py:5  Failed to trace builtin operator  [[]GB0059]",
            "  accept with @pytest.mark.compiled(max_breaks=1)",
            "2 graphs, 0 allowed",
            "* s of compiling, 0 allowed",
            "1 recompile, 0 allowed",
            "recompile limit hit",
            "  test_it.py:11  limit hit Dynamo's recompile_limit*; its further calls run in eager mode",
            "  accept with @pytest.mark.compiled(allow_uncompiled=True)",
        ]
    )
    assert run.record("test_breaks")["variant"] is None


# -- a whole class or module -----------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["backend='eager'", "dynamic=True", "rtol=0.1", "atol=0.1"])
def test_a_wide_marker_none_of_whose_tests_can_use_it(project, argument):
    """A keyword about variants or parity on a class or module none of whose tests uses ours is an error."""
    name = argument.partition("=")[0]
    project.file(
        "test_class",
        f"""
        import pytest

        def test_with(compiled): pass

        @pytest.mark.compiled({argument})
        class TestIt:
            def test_without(self): pass
        """,
    )
    project.file(
        "test_module",
        f"""
        import pytest

        pytestmark = pytest.mark.compiled({argument})

        def test_without(): pass
        """,
    )
    for file, test, what in (
        ("test_class.py", "TestIt::test_without", "class test_class.py::TestIt"),
        ("test_module.py", "test_without", "module test_module.py"),
    ):
        run = project.run(file)
        assert run.result.ret == pytest.ExitCode.USAGE_ERROR == 4
        message = f"{name} on {what}, none of whose tests uses the fixture compiled"
        assert f"ERROR: {file}::{test}: @pytest.mark.compiled: {message}" in run.result.errlines


def test_a_wide_marker_some_of_whose_tests_use_it(project):
    """Tests without our fixtures in a marked class or module ignore variants and obey limits."""
    run = project.test(
        """
        import pytest, torch

        pytestmark = pytest.mark.compiled(backend=["eager", "aot_eager"], rtol=0.1, max_breaks=0)

        def f(x):
            x = x + 1
            print()
            return x * 2

        def test_plain(): pass

        def test_by_hand():
            torch.compile(f, backend="eager")(torch.ones(2))

        class TestIt:
            def test_plain(self): pass

            @pytest.mark.compiled(max_breaks=1)
            def test_with(self, compiled):
                compiled(f)(torch.ones(2))
        """,
        "-rA",
    )
    assert outcomes(run) == {
        "test_plain": "PASSED",
        "test_by_hand": "FAILED",
        "TestIt::test_plain": "PASSED",
        "TestIt::test_with[eager]": "PASSED",
        "TestIt::test_with[aot_eager]": "PASSED",
    }


def test_a_part_of_a_marked_file_can_be_run(project):
    """Selecting tests without our fixtures by nodeid does not make the marker of their module wrong."""
    run = project.test(
        """
        import pytest

        pytestmark = pytest.mark.compiled(backend="eager")

        class TestPlain:
            def test_plain(self): pass

        class TestWith:
            def test_with(self, compiled): pass
        """,
        "test_it.py::TestPlain",
    )
    assert run.result.ret == 0
    run.result.assert_outcomes(passed=1)


def test_a_wide_marker_whose_only_user_is_deselected(project):
    """`-k` does not make the marker of a module wrong."""
    run = project.test(
        """
        import pytest

        pytestmark = pytest.mark.compiled(backend="eager")

        def test_plain(): pass

        def test_with(compiled): pass
        """,
        "-k",
        "plain",
    )
    assert run.result.ret == 0
    run.result.assert_outcomes(passed=1, deselected=1)


# -- markers that come late ------------------------------------------------------------------------


def test_limits_and_tolerances_of_single_parameters(project):
    """`pytest.param(marks=...)` sets limits and tolerances for its parameter alone, nearest of all."""
    run = project.test(
        """
        import pytest, torch

        def f(x):
            x = x + 1
            print()
            return x * 2

        lax = pytest.param("lax", marks=pytest.mark.compiled(max_breaks=1))
        told = pytest.param("told", marks=pytest.mark.compiled(max_breaks=None))

        @pytest.mark.compiled(backend="eager", max_breaks=0)
        @pytest.mark.parametrize("x", ["strict", lax, told])
        def test_it(compiled, x):
            compiled(f)(torch.ones(2))

        @pytest.mark.parametrize("x", ["free", pytest.param("strict", marks=pytest.mark.compiled(max_breaks=0)), lax])
        def test_by_hand(x):
            torch.compile(f, backend="eager")(torch.ones(2))

        def off(gm, inputs):
            return lambda *args: [gm.forward(*args)[0] + 0.25]

        @pytest.mark.compiled(backend=off)
        @pytest.mark.parametrize("x", ["exact", pytest.param("wide", marks=pytest.mark.compiled(atol=1.0, rtol=0))])
        def test_parity(compiled, x):
            compiled(lambda x: x + 1)(torch.ones(2))
        """,
        "-rA",
    )
    assert outcomes(run) == {
        "test_it[eager-strict]": "FAILED",
        "test_it[eager-lax]": "PASSED",
        "test_it[eager-told]": "PASSED",
        "test_by_hand[free]": "PASSED",
        "test_by_hand[strict]": "FAILED",
        "test_by_hand[lax]": "PASSED",
        "test_parity[off-exact]": "FAILED",
        "test_parity[off-wide]": "PASSED",
    }


LATE = "comes too late to make variants: put it on the function, class or module"


@pytest.mark.parametrize("argument", ["backend='aot_eager'", "backend='eager'", "dynamic=True", "dynamic=None"])
@pytest.mark.parametrize("way", ["param", "hook"])
def test_variants_of_single_parameters_are_refused(project, way, argument):
    """What to run can't be said by `pytest.param(marks=...)` or a hook, not even what is so anyway."""
    name = argument.partition("=")[0]
    if way == "hook":
        project.file(
            "conftest",
            f"""
            import pytest

            def pytest_collection_modifyitems(items):
                items[0].add_marker(pytest.mark.compiled({argument}))
            """,
        )
    mark = f"marks=pytest.mark.compiled({argument})" if way == "param" else ""
    run = project.test(
        f"""
        import pytest

        @pytest.mark.compiled(backend="eager", dynamic=None)
        @pytest.mark.parametrize("x", [pytest.param(1, {mark}), 2])
        def test_it(compiled, x): pass
        """
    )
    assert run.result.ret == 4
    assert f"ERROR: test_it.py::test_it[eager-1]: @pytest.mark.compiled: {name} {LATE}" in run.result.errlines


@pytest.mark.parametrize("argument", ["backend='eager'", "rtol=0.1"])
@pytest.mark.parametrize("way", ["param", "hook"])
def test_late_keywords_on_tests_without_our_fixtures(project, way, argument):
    """A late marker about variants or parity is an error too where nothing of ours is used."""
    name = argument.partition("=")[0]
    if way == "hook":
        project.file(
            "conftest",
            f"""
            import pytest

            def pytest_collection_modifyitems(items):
                items[0].add_marker(pytest.mark.compiled({argument}))
            """,
        )
    mark = f"marks=pytest.mark.compiled({argument})" if way == "param" else ""
    run = project.test(
        f"""
        import pytest

        @pytest.mark.parametrize("x", [pytest.param(1, {mark}), 2])
        def test_it(x): pass
        """
    )
    assert run.result.ret == 4
    message = f"{name} needs the fixture compiled or compiled_variant"
    assert f"ERROR: test_it.py::test_it[1]: @pytest.mark.compiled: {message}" in run.result.errlines


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("max_breaks=-1", "max_breaks can't be negative: -1"),
        ("max_break=1", "unknown keyword 'max_break'; did you mean 'max_breaks'?"),
        ("0", "takes keywords only, not 0"),
    ],
)
def test_wrong_values_in_late_markers(project, argument, message):
    """A wrong value in a late marker is a usage error that names the single test."""
    run = project.test(
        f"""
        import pytest

        @pytest.mark.compiled(backend="eager")
        @pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.compiled({argument}))])
        def test_it(compiled, x): pass
        """
    )
    assert run.result.ret == 4
    assert f"ERROR: test_it.py::test_it[eager-2]: @pytest.mark.compiled: {message}" in run.result.errlines


def test_markers_that_a_hook_adds(project):
    """Limits and tolerances added in `pytest_collection_modifyitems` count, nearer than the function's."""
    project.file(
        "conftest",
        """
        import pytest

        def pytest_collection_modifyitems(items):
            for item in items:
                if "strict" in item.name:
                    item.add_marker(pytest.mark.compiled(max_breaks=0))
                if "lax" in item.name:
                    item.add_marker(pytest.mark.compiled(max_breaks=1))
                if "wide" in item.name:
                    item.add_marker(pytest.mark.compiled(atol=1.0, rtol=0.0))
        """,
    )
    run = project.test(
        """
        import pytest, torch

        def f(x):
            x = x + 1
            print()
            return x * 2

        def off(gm, inputs):
            return lambda *args: [gm.forward(*args)[0] + 0.25]

        @pytest.mark.compiled(backend="eager", max_breaks=5)
        def test_strict(compiled):
            compiled(f)(torch.ones(2))

        @pytest.mark.compiled(backend="eager", max_breaks=0)
        def test_lax(compiled):
            compiled(f)(torch.ones(2))

        def test_strict_by_hand():
            torch.compile(f, backend="eager")(torch.ones(2))

        @pytest.mark.compiled(backend=off)
        def test_wide(compiled):
            compiled(lambda x: x + 1)(torch.ones(2))

        @pytest.mark.compiled(backend=off)
        def test_exact(compiled):
            compiled(lambda x: x + 1)(torch.ones(2))
        """,
        "-rA",
    )
    assert outcomes(run) == {
        "test_strict[eager]": "FAILED",
        "test_lax[eager]": "PASSED",
        "test_strict_by_hand": "FAILED",
        "test_wide[off]": "PASSED",
        "test_exact[off]": "FAILED",
    }


# -- unittest --------------------------------------------------------------------------------------


def test_limits_on_testcase_methods(project):
    """A `unittest.TestCase` method under a marker with limits is judged like any other test."""
    run = project.test(
        """
        import unittest
        import pytest, torch

        def f(x):
            x = x + 1
            print()
            return x * 2

        class TestIt(unittest.TestCase):
            @pytest.mark.compiled(max_breaks=0)
            def test_strict(self):
                torch.compile(f, backend="eager")(torch.ones(2))

            @pytest.mark.compiled(max_breaks=1)
            def test_lax(self):
                torch.compile(f, backend="eager")(torch.ones(2))

        @pytest.mark.compiled(max_graphs=0)
        class TestClass(unittest.TestCase):
            def test_it(self):
                torch.compile(f, backend="eager")(torch.ones(2))
        """,
        "-rA",
    )
    assert outcomes(run) == {
        "TestIt::test_strict": "FAILED",
        "TestIt::test_lax": "PASSED",
        "TestClass::test_it": "FAILED",
    }
    run.result.stdout.fnmatch_lines(["1 graph break, 0 allowed", "2 graphs, 0 allowed"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("backend='eager'", "backend can't make variants of a unittest.TestCase method"),
        ("dynamic=None", "dynamic can't make variants of a unittest.TestCase method"),
        ("max_breaks=-1", "max_breaks can't be negative: -1"),
        ("rtol=0.1", "rtol needs the fixture compiled or compiled_variant"),
        ("max_breaks=1, max_graph=1", "unknown keyword 'max_graph'; did you mean 'max_graphs'?"),
    ],
)
def test_wrong_markers_on_testcase_methods(project, argument, message):
    """`pytest_generate_tests` never sees a TestCase method, so its marker is checked later."""
    run = project.test(
        f"""
        import unittest
        import pytest

        class TestIt(unittest.TestCase):
            @pytest.mark.compiled({argument})
            def test_it(self): pass
        """
    )
    assert run.result.ret == 4
    assert f"ERROR: test_it.py::TestIt::test_it: @pytest.mark.compiled: {message}" in run.result.errlines


def test_variants_on_a_testcase_class(project):
    """Keywords about variants on a TestCase class none of whose tests uses ours are an error."""
    run = project.test(
        """
        import unittest
        import pytest

        @pytest.mark.compiled(backend="eager")
        class TestIt(unittest.TestCase):
            def test_it(self): pass
        """
    )
    assert run.result.ret == 4
    message = "backend on class test_it.py::TestIt, none of whose tests uses the fixture compiled"
    assert f"ERROR: test_it.py::TestIt::test_it: @pytest.mark.compiled: {message}" in run.result.errlines


TESTCASE = """
    import unittest
    import pytest, torch

    def f(x):
        x = x + 1
        print()
        return x * 2

    {decorator}
    class TestIt(unittest.TestCase):
        @pytest.fixture(autouse=True)
        def pull(self, compiled):
            self.compiled = compiled

        @pytest.mark.compiled(max_breaks=0)
        def test_strict(self):
            self.compiled(f)(torch.ones(2))

        def test_lax(self):
            self.compiled(f)(torch.ones(2))

        def test_never_called(self):
            self.compiled(f)

    def test_plain(): pass
"""


def test_a_testcase_that_pulls_our_fixture(project):
    """An autouse fixture that takes `compiled` gives TestCase methods one default variant."""
    run = project.test(TESTCASE.format(decorator=""), "-rA", "-o", "dynamo_backends=eager")
    assert outcomes(run) == {
        "TestIt::test_strict": "FAILED",
        "TestIt::test_lax": "PASSED",
        "TestIt::test_never_called": "FAILED",
        "test_plain": "PASSED",
    }
    assert run.record("TestIt::test_lax")["variant"]["id"] == "eager"
    run.result.stdout.fnmatch_lines(["  compiled(f) was never called", "1 graph break, 0 allowed"])


def test_a_marked_testcase_that_pulls_our_fixture(project):
    """A marker on its class chooses the variant, if it names one; one for the module is in use too."""
    decorator = "pytestmark = pytest.mark.compiled(atol=0.1)\n    @pytest.mark.compiled(backend='aot_eager')"
    run = project.test(TESTCASE.format(decorator=decorator), "-rA")
    assert outcomes(run) == {
        "TestIt::test_strict": "FAILED",
        "TestIt::test_lax": "PASSED",
        "TestIt::test_never_called": "FAILED",
        "test_plain": "PASSED",
    }
    assert run.record("TestIt::test_lax")["variant"]["id"] == "aot_eager"


def test_a_testcase_that_pulls_several_variants(project):
    """A TestCase can't have several variants, and says so in each test."""
    decorator = "@pytest.mark.compiled(backend=['eager', 'aot_eager'])"
    run = project.test(TESTCASE.format(decorator=decorator), "-rA")
    assert outcomes(run) == {
        "TestIt::test_strict": "ERROR",
        "TestIt::test_lax": "ERROR",
        "TestIt::test_never_called": "ERROR",
        "test_plain": "PASSED",
    }
    assert "this test has 2 variants, and getfixturevalue can give only one" in run.text


# -- async -----------------------------------------------------------------------------------------


def test_async_tests(project):
    """Async tests have variants and limits like others, and never pass without having run."""
    pytest.importorskip("pytest_asyncio")
    run = project.test(
        """
        import asyncio
        import pytest, torch

        def f(x):
            x = x + 1
            print()
            return x * 2

        @pytest.mark.asyncio
        @pytest.mark.compiled(backend=["eager", "aot_eager"])
        async def test_good(compiled):
            fast = compiled(f)
            await asyncio.sleep(0)
            assert fast(torch.ones(1)) == 4

        @pytest.mark.asyncio
        @pytest.mark.compiled(backend="eager", max_breaks=0)
        async def test_limit(compiled):
            await asyncio.sleep(0)
            compiled(f)(torch.ones(1))

        @pytest.mark.asyncio
        @pytest.mark.compiled(backend="eager")
        async def test_never_called(compiled):
            compiled(f)

        @pytest.mark.asyncio
        @pytest.mark.compiled(max_breaks=0)
        async def test_by_hand_in_a_thread():
            await asyncio.to_thread(torch.compile(f, backend="eager"), torch.ones(1))

        def wrong(gm, inputs):
            return lambda *args: [gm.forward(*args)[0] + 1]

        @pytest.mark.asyncio
        @pytest.mark.compiled(backend=wrong)
        async def test_parity(compiled):
            await asyncio.gather(asyncio.to_thread(compiled(lambda x: x * 2), torch.ones(1)), return_exceptions=True)

        @pytest.mark.compiled(backend="eager")
        async def test_without_a_plugin(compiled):
            compiled(f)(torch.ones(1))
        """,
        "-rA",
    )
    assert outcomes(run) == {
        "test_good[eager]": "PASSED",
        "test_good[aot_eager]": "PASSED",
        "test_limit[eager]": "FAILED",
        "test_never_called[eager]": "FAILED",
        "test_by_hand_in_a_thread": "FAILED",
        "test_parity[wrong]": "FAILED",
        "test_without_a_plugin[eager]": "FAILED",
    }
    assert run.result.outlines.count("1 graph break, 0 allowed") == 2
    run.result.stdout.fnmatch_lines(
        ["  compiled(f) was never called", "*compiled <lambda> differs from eager in call 1 [[]wrong]*"]
    )
    assert "async def functions are not natively supported" in run.text


# -- getfixturevalue -------------------------------------------------------------------------------


def test_the_fixture_by_getfixturevalue(project):
    """`getfixturevalue` gives one default variant; limits and parity are judged as ever."""
    run = project.test(
        """
        import pytest, torch

        def f(x):
            x = x + 1
            print()
            return x * 2

        def wrong(gm, inputs):
            return lambda *args: [gm.forward(*args)[0] + 1]

        def test_first_of_all(request):
            assert request.getfixturevalue("compiled")(f)(torch.ones(1)) == 4
            assert request.getfixturevalue("compiled_variant").id == "eager"

        @pytest.mark.compiled(max_breaks=0)
        def test_limit(request):
            request.getfixturevalue("compiled")(f)(torch.ones(1))

        def test_never_called(request):
            request.getfixturevalue("compiled")(f)

        def test_parity(request, monkeypatch):
            monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
            fast = request.getfixturevalue("compiled")(f)
            object.__setattr__(fast._checker.variant, "backend", wrong)
            with pytest.raises(AssertionError):
                fast(torch.ones(1))

        def test_nothing(): pass
        """,
        "-rA",
        "-o",
        "dynamo_backends=eager",
    )
    assert outcomes(run) == {
        "test_first_of_all": "PASSED",
        "test_limit": "FAILED",
        "test_never_called": "FAILED",
        "test_parity": "FAILED",
        "test_nothing": "PASSED",
    }
    assert run.record("test_first_of_all")["variant"]["id"] == "eager"
    run.result.stdout.fnmatch_lines(
        ["1 graph break, 0 allowed", "  compiled(f) was never called", "*compiled f differs from eager in call 1*"]
    )


GETFIXTUREVALUE = """
    import pytest, torch

    def f(x):
        x = x + 1
        print()
        return x * 2

    {body}
"""


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ("max_breaks=0", ["1 graph break, 0 allowed"]),
        ("max_graphs=0", ["2 graphs, 0 allowed"]),
        ("never called", ["not compiled", "  compiled(f) was never called"]),
    ],
)
def test_a_first_use_by_getfixturevalue(project, arguments, lines):
    """A run that comes to use this plugin only in the body of a test fails that test all the same."""
    never = arguments == "never called"
    marker = "" if never else f"@pytest.mark.compiled({arguments})"
    call = "" if never else "(torch.ones(1))"
    body = f"""
    {marker}
    def test_it(request):
        request.getfixturevalue("compiled")(f){call}
    """
    run = project.test(GETFIXTUREVALUE.format(body=body), "-rA", json_report=False)
    assert outcomes(run) == {"test_it": "FAILED"}
    run.result.stdout.fnmatch_lines(lines)


def test_several_variants_by_getfixturevalue(project):
    """Where the test's marker names several variants, `getfixturevalue` fails and says what to do."""
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(backend=["eager", "aot_eager"])
        class TestIt:
            def test_named(self, compiled):
                compiled(lambda x: x + 1)(torch.ones(1))

            def test_by_request(self, request):
                request.getfixturevalue("compiled")

            @pytest.mark.parametrize("name", ["compiled", "compiled_variant"])
            def test_other(self, request, name):
                request.getfixturevalue(name)
        """,
        "-rA",
    )
    assert outcomes(run) == {
        "TestIt::test_named[eager]": "PASSED",
        "TestIt::test_named[aot_eager]": "PASSED",
        "TestIt::test_by_request": "FAILED",
        "TestIt::test_other[compiled]": "FAILED",
        "TestIt::test_other[compiled_variant]": "FAILED",
    }
    message = (
        "this test has 2 variants, and getfixturevalue can give only one: "
        "name the fixture compiled or compiled_variant as an argument of the test"
    )
    assert run.text.count(message) >= 3


def test_a_wider_fixture_cannot_use_ours(project):
    """The fixtures belong to one test: a fixture of a module that takes them is pytest's scope error."""
    run = project.test(
        """
        import pytest

        @pytest.fixture(scope="module")
        def fast(compiled):
            return compiled(abs)

        def test_it(fast): pass
        """
    )
    run.result.assert_outcomes(errors=1)
    assert "ScopeMismatch: You tried to access the function scoped fixture compiled with a module scoped" in run.text


# -- costs -----------------------------------------------------------------------------------------

TORCH_AT_THE_END = """
    import sys

    def pytest_unconfigure(config):
        print("torch imported:", "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--collect-only", "-q"), "False"),
        (("--collect-only", "-q", "--dynamo-max-breaks=0", "--dynamo-modes=default,max-autotune"), "False"),
        (("--collect-only", "-q", "--dynamo-backends=eager,cudagraphs"), "False"),
        (("-q",), "True"),
    ],
)
def test_collecting_imports_no_torch(project, args, expected):
    """Listing tests is cheap: torch is imported when the first test needs it."""
    project.file("conftest", TORCH_AT_THE_END)
    run = project.test(
        """
        import unittest
        import pytest

        def f(x):
            return x + 1

        @pytest.mark.compiled(backend=["eager", "aot_eager"], max_breaks=0)
        def test_it(compiled):
            import torch
            compiled(f)(torch.ones(1))

        @pytest.mark.compiled(max_breaks=0)
        def test_by_hand(): pass

        class TestCase(unittest.TestCase):
            @pytest.mark.compiled(max_recompiles=0)
            def test_method(self): pass
        """,
        *args,
        subprocess=True,
        json_report=False,
    )
    assert run.result.ret == 0
    assert f"torch imported: {expected}" in run.text


def test_a_run_that_uses_nothing_imports_no_torch(project):
    """A suite that only has the plugin installed pays nothing for it."""
    project.file("conftest", TORCH_AT_THE_END)
    run = project.test("def test_it(): pass", subprocess=True, json_report=False)
    assert run.result.ret == 0
    assert "torch imported: False" in run.text
    assert "pytest_dynamo.session" not in run.text


def test_the_marker_and_fixtures_are_documented(project):
    """`--markers` and `--fixtures` tell what there is."""
    markers = project.run("--markers", json_report=False)
    line = next(line for line in markers.result.outlines if line.startswith("@pytest.mark.compiled("))
    for name in ("backend", "mode", "dynamic", "fullgraph", "options", "max_breaks", "max_graphs", "allow_uncompiled"):
        assert name in line
    fixtures = project.run("--fixtures", json_report=False)
    fixtures.result.stdout.fnmatch_lines(["compiled_variant -- *", "compiled -- *"])
