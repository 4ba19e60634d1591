"""Rows for eager and compile times, by pytest-benchmark's own statistics and in its own comparison."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from pytest_benchmark.stats import Stats

from pytest_dynamo import rows


@pytest.mark.parametrize("count", [1, 2, 3, 10, 50])
def test_statistics_are_those_of_pytest_benchmark(count: int) -> None:
    draw = random.Random(count)
    samples = [draw.lognormvariate(0, 1) for _ in range(count)]
    theirs = Stats()
    for sample in samples:
        theirs.update(sample)
    ours = rows.stats(samples)
    names = ("min", "max", "mean", "stddev", "rounds", "median", "ops", "total", "stddev_outliers")
    for name in names:
        assert ours[name] == pytest.approx(getattr(theirs, name)), name
    assert ours.keys() == theirs.as_dict().keys()


def test_eager_and_compile_are_compared_by_pytest_benchmark(project) -> None:
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(backend="aot_eager")
        def test_it(compiled_benchmark):
            compiled_benchmark(torch.sin, torch.ones(8))
        """,
        "--benchmark-autosave",
        "--dynamo-benchmark-rows",
    )
    run.result.assert_outcomes(passed=1)
    words = [sys.executable, "-m", "pytest_benchmark", "compare", "--columns=median"]
    done = subprocess.run(words, cwd=project.pytester.path, capture_output=True, text=True, check=True)
    for name in ("test_it[aot_eager] ", "test_it[aot_eager]:eager ", "test_it[aot_eager]:compile "):
        assert name in done.stdout
