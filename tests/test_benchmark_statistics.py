"""The arithmetic of the benchmark scripts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from benchmarks import sampling


def test_ratios_are_those_of_pairs():
    assert sampling.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="3 measurements can't be paired with 2"):
        sampling.ratios([1.0, 1.0, 1.0], [1.0, 1.0])


def test_the_interval_of_equal_values_is_a_point():
    assert sampling.bootstrap_interval([1.5] * 10, resamples=100) == (1.5, 1.5)
    with pytest.raises(ValueError, match="no values"):
        sampling.bootstrap_interval([])


def test_the_interval_is_repeatable():
    values = [random.Random(1).gauss(1, 0.1) for _ in range(40)]
    assert sampling.bootstrap_interval(values, resamples=500) == sampling.bootstrap_interval(values, resamples=500)


def test_the_interval_covers_the_true_median_as_often_as_it_says():
    rng = random.Random(3)
    covered = 0
    for trial in range(200):
        low, high = sampling.bootstrap_interval([rng.gauss(1, 0.05) for _ in range(40)], resamples=400, seed=trial)
        covered += low <= 1 <= high
    # Of 200 intervals at 95 %, fewer than 180 cover the truth about once in a thousand.
    assert covered >= 180


def test_a_planted_slowdown_is_found():
    rng = random.Random(5)
    base = [rng.gauss(1, 0.02) for _ in range(40)]
    slow = [1.05 * rng.gauss(1, 0.02) for _ in range(40)]
    found = sampling.summary(slow, base)
    assert found["interval_95"][0] > 1.03
    assert found["median_ratio"] == pytest.approx(1.05, abs=0.015)
    assert found["pairs"] == 40


def test_every_order_comes_up_equally_often():
    found = list(sampling.orders("abc", 12, seed=7))
    assert set(Counter(found).values()) == {2}
    assert found == list(sampling.orders("abc", 12, seed=7))
    assert found != list(sampling.orders("abc", 12, seed=8))


def test_mirroring_cancels_a_linear_drift():
    order = sampling.mirrored(("a", "b", "c"))
    times = Counter()
    for moment, arm in enumerate(order):
        times[arm] += moment
    assert order == ("a", "b", "c", "c", "b", "a")
    assert len(set(times.values())) == 1


def test_the_table_holds_the_numbers():
    row = sampling.summary([1.1, 1.1], [1.0, 1.0])
    text = sampling.table("Title", {"python": "3"}, {"unused": row}, ["note"])
    assert "1.1000   1.1000 … 1.1000" in text
    assert text.startswith("Title\n\npython: 3\n")
    assert text.endswith("\nnote\n")
