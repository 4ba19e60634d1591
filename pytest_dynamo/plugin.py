"""Hooks, each a few lines. Imported by every pytest run, so it imports next to nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_dynamo import options
from pytest_dynamo.fixtures import WithBenchmark
from pytest_dynamo.fixtures import WithoutBenchmark
from pytest_dynamo.fixtures import compiled
from pytest_dynamo.fixtures import compiled_variant
from pytest_dynamo.fixtures import has_benchmark


if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["compiled", "compiled_variant"]

_MARKER = (
    "compiled(backend='inductor', mode='default', dynamic=None, fullgraph=False, options=None, "
    "max_breaks=None, max_recompiles=None, max_graphs=None, max_cudagraph_skips=None, max_compile_time=None, "
    "min_speedup=None, max_memory_ratio=None, rtol=None, atol=None, max_error_ratio=None, grad=None, "
    "check_alias=True, check_stride=False, allow_uncompiled=False): run the test once for each way of "
    "compiling, compared with eager mode; lists make the variants (pytest-dynamo)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    timed = WithBenchmark() if has_benchmark(config) else WithoutBenchmark()
    config.pluginmanager.register(timed, "dynamo_benchmark")
    if options.option_given(config, "accept"):
        from pytest_dynamo import replay

        if not replay.saves(config):
            raise pytest.UsageError("--dynamo-accept: nothing of this run would be kept; add --benchmark-autosave")
    if options.any_given(config):
        from pytest_dynamo.session import activate

        options.json_path(config)  # a path that can't be written to is told now, not after the tests
        activate(config)
    elif config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        # Only the workers collect tests, and so learn that a marker asks for this plugin.
        config.pluginmanager.register(_Controller(config), "dynamo_controller")


class _Controller:
    """Waits on pytest-xdist's controller for the first report with records."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if getattr(report, "dynamo", None) is not None:
            from pytest_dynamo.session import activate

            self.config.pluginmanager.unregister(self)
            activate(self.config).pytest_runtest_logreport(report)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # The one hook that runs for every test function of a run that doesn't use this plugin.
    if "compiled_variant" in metafunc.fixturenames or "compiled" in metafunc.definition.keywords:
        from pytest_dynamo import collection

        collection.generate(metafunc)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    if config.pluginmanager.hasplugin("dynamo_session"):  # else no test can have come by `collection.generate`
        from pytest_dynamo import replay

        replay.with_clock(config, items)
    yield
    if any("compiled" in item.keywords or "compiled_variant" in getattr(item, "fixturenames", ()) for item in items):
        from pytest_dynamo import collection

        collection.check(config, items)
