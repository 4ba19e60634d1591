"""The fixtures. Everything that needs torch is imported when a test calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

import pytest


if TYPE_CHECKING:
    from pytest_dynamo.benchmark import CompiledBenchmark
    from pytest_dynamo.compiled_function import CompiledFunction
    from pytest_dynamo.variants import Variant


@pytest.fixture
def compiled_variant(request: pytest.FixtureRequest) -> Variant:
    """The way in which this test compiles, for code that calls ``torch.compile`` by itself.

    Use it as ``torch.compile(fn, **compiled_variant.kwargs)``.
    """
    from pytest_dynamo.session import activate
    from pytest_dynamo.variants import expand

    item = request.node
    watcher = activate(request.config).watcher
    run = watcher.run_of(item)
    variants = expand(run.settings.run)
    name = getattr(request, "param", None)
    if name is None:
        if len(variants) != 1:
            pytest.fail(
                f"this test has {len(variants)} variants, and getfixturevalue can give only one: "
                "name the fixture compiled or compiled_variant as an argument of the test",
                pytrace=False,
            )
        variant = variants[0]
    else:
        variant = next(one for one in variants if one.id == name)
    watcher.use_fixtures(item, variant)
    return variant


@pytest.fixture
def compiled(request: pytest.FixtureRequest, compiled_variant: Variant) -> Callable[..., CompiledFunction]:
    """Compile a function or module so that every call of it is compared with eager mode.

    ``compiled(fn)`` takes any callable or ``torch.nn.Module`` and returns a `CompiledFunction` that
    is called like ``fn``. The test runs once for each variant of its marker ``compiled``.
    """
    from pytest_dynamo.session import activate

    run = activate(request.config).watcher.run_of(request.node)

    def compiled(fn: Callable[..., Any]) -> CompiledFunction:
        __tracebackhide__ = True
        from pytest_dynamo.calls import Checker
        from pytest_dynamo.compiled_function import CompiledFunction

        if isinstance(fn, CompiledFunction):
            fn._checker.function.inlined = True
            fn = fn._checker.fn
        checker = Checker(fn, compiled_variant, run)
        run.functions.append(checker.function)
        return CompiledFunction(checker)

    return compiled


def uses_ours(item: pytest.Item | Any) -> bool:
    """Whether our variant fixture, and no foreign one of its name, is in the closure of a test."""
    info = getattr(item, "_fixtureinfo", None)
    return info is not None and is_ours(info, "compiled_variant")


def is_ours(info: Any, name: str) -> bool:
    """Whether the fixture that a test gets under ``name`` is the one of this plugin."""
    found = info.name2fixturedefs.get(name)
    return bool(found) and getattr(found[-1].func, "__module__", None) == __name__


def has_benchmark(config: pytest.Config) -> bool:
    """Whether pytest-benchmark is there: under the name of its entry point, or as somebody loads it with ``-p``."""
    return any(config.pluginmanager.hasplugin(name) for name in ("benchmark", "pytest_benchmark.plugin"))


class WithBenchmark:
    """Registered where pytest-benchmark is: its fixture has to be in the closure of ours for its options to work."""

    @pytest.fixture
    def compiled_benchmark(
        self, request: pytest.FixtureRequest, compiled_variant: Variant, benchmark: Any
    ) -> CompiledBenchmark:
        """Check a function against eager mode, time both, and compare with accepted runs.

        ``compiled_benchmark(fn, *args, **kwargs)`` returns what compiled gave; ``compiled_benchmark.pedantic(fn,
        args, kwargs, setup, rounds)`` has an untimed ``setup`` before each call. Once in a test. The times are
        those of pytest-benchmark's table, files and commands.
        """
        return _benchmark(request, compiled_variant, benchmark)


class WithoutBenchmark:
    """Registered where pytest-benchmark is missing or blocked: parity and breaks are checked, nothing is timed."""

    @pytest.fixture
    def compiled_benchmark(self, request: pytest.FixtureRequest, compiled_variant: Variant) -> CompiledBenchmark:
        """Check a function against eager mode; to time it takes pytest-benchmark."""
        return _benchmark(request, compiled_variant, None)


def _benchmark(request: pytest.FixtureRequest, variant: Variant, benchmark: Any) -> CompiledBenchmark:
    from pytest_dynamo.benchmark import CompiledBenchmark
    from pytest_dynamo.replay import clock_key
    from pytest_dynamo.session import activate

    run = activate(request.config).watcher.run_of(request.node)
    return CompiledBenchmark(request.config, run, variant, benchmark, request.node.stash.get(clock_key, None))
