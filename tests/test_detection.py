"""The rule that calls a run slower, on made-up numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pytest_dynamo import detection
from pytest_dynamo.detection import NO_BASELINE
from pytest_dynamo.detection import NOT_SLOWER
from pytest_dynamo.detection import SLOWER
from pytest_dynamo.detection import UNSTABLE
from pytest_dynamo.detection import judge
from pytest_dynamo.measurement import Measurement
from pytest_dynamo.measurement import Run
from pytest_dynamo.measurement import Side
from pytest_dynamo.measurement import Times
from pytest_dynamo.measurement import launch_bound


def run(time: float, busy: float | None = None, *, ratio: float = 0.5, machine: str = "a", **fields: object) -> Run:
    """A run of compiled code that takes ``time`` and keeps the GPU busy for ``busy`` seconds, ``ratio`` to eager."""
    times, host = Times(time, 0.0, 50), Times(time, 0.0, 50)
    compiled = Side(times, host, busy, launches=fields.pop("launches", 7), kernels=fields.pop("kernels", "k"))  # type: ignore[arg-type]
    eager = Side(Times(2 * time, 0.0, 50), Times(time / ratio, 0.0, 50))
    bound = launch_bound(busy, time)
    ratios = {"eager": ratio, **fields.pop("ratios", {})}  # type: ignore[dict-item]
    measured = Measurement(eager, compiled, 2.0, 1.9, 2.1, bound, ratios=ratios, **fields)  # type: ignore[arg-type]
    return Run("t", "r", machine, {}, measured)


def steady(count: int = 10, busy: float | None = 1.0, **fields: object) -> list[Run]:
    return [run(1.0 + 0.0002 * (number % 5), busy, **fields) for number in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "time", "verdict"),
    [
        (0, 1.0, NO_BASELINE),
        (1, 1.14, NOT_SLOWER),
        (1, 1.16, SLOWER),
        (4, 1.14, NOT_SLOWER),
        (5, 1.045, NOT_SLOWER),
        (5, 1.055, SLOWER),
        (8, 1.015, NOT_SLOWER),
        (8, 1.025, SLOWER),
        (10, 1.025, SLOWER),
        (10, 0.5, NOT_SLOWER),
    ],
)
def test_how_far_a_run_may_lie_beyond_the_window(count: int, time: float, verdict: str) -> None:
    assert judge(steady(count), run(time, 1.0)).verdict == verdict


def test_noise_of_the_history_widens_the_limit() -> None:
    noisy = [run(1.0 + 0.01 * n, 1.0) for n in (0, 1, 2, 3, 4, 5, 0, 2, 3, 4)]
    assert judge(steady(), run(1.05, 1.0)).verdict == SLOWER
    assert judge(noisy, run(1.05, 1.0)).verdict == NOT_SLOWER
    assert judge(noisy, run(1.15, 1.0)).verdict == SLOWER


def test_two_speeds_are_not_a_change() -> None:
    """Code that draws one of two speeds in each process: the slow one is no regression, slower than both is."""
    window = [run(time, 1.0) for time in (1.0, 1.037, 1.001, 1.0, 1.038, 1.0, 1.001, 1.0, 1.037, 1.0)]
    assert judge(window, run(1.039, 1.0)).verdict == NOT_SLOWER
    assert judge(window, run(1.055, 1.0)).verdict == SLOWER


def test_one_outlier_does_not_hide_a_regression() -> None:
    assert judge([*steady(9), run(1.3, 1.3)], run(1.05, 1.0)).verdict == SLOWER


def test_what_is_allowed_is_not_slower() -> None:
    assert judge(steady(), run(1.08, 1.0), allowed=0.10).verdict == NOT_SLOWER
    assert judge(steady(), run(1.12, 1.0), allowed=0.10).verdict == SLOWER


def test_another_machine_has_more_room_if_the_window_knows_one() -> None:
    assert judge(steady(), run(1.05, 1.0, machine="b")).verdict == NOT_SLOWER
    assert judge(steady(), run(1.09, 1.0, machine="b")).verdict == SLOWER
    several = [replace(one, machine="ab"[n % 2]) for n, one in enumerate(steady())]
    assert judge(several, run(1.05, 1.0, machine="c")).verdict == SLOWER


def test_launch_bound_code_is_judged_by_busy_time_and_by_the_ratio_to_eager() -> None:
    window = steady(busy=0.3)
    assert judge(window, run(1.6, 0.3)).verdict == NOT_SLOWER  # elapsed time alone says nothing
    told = judge(window, run(1.0, 0.33))
    assert told.verdict == SLOWER
    assert [(j.question, j.metric, j.verdict) for j in told.judgements] == [
        ("GPU work", "device time", SLOWER),
        ("host overhead", "ratio to eager", NOT_SLOWER),
    ]
    told = judge(window, run(1.0, 0.3, ratio=0.65))
    assert [(j.question, j.verdict) for j in told.judgements] == [("GPU work", NOT_SLOWER), ("host overhead", SLOWER)]


def test_host_overhead_has_to_show_against_fixed_launches_too() -> None:
    """A ratio to eager moves with the machine as well; two ratios at once hardly do."""

    def beside(launches: float, ratio: float = 0.5, busy: float = 0.3) -> Run:
        return run(1.0, busy, ratio=ratio, ratios={"launches": 1.0 / launches})

    window = [beside(0.1) for _ in range(10)]
    told = judge(window, beside(0.1 / 1.3, ratio=0.65))
    assert told.verdict == SLOWER
    assert [j.metric for j in told.judgements] == ["device time", "ratio to eager", "ratio to fixed launches"]
    for alone in (beside(0.1, ratio=0.65), beside(0.1 / 1.3)):
        told = judge(window, alone)
        assert told.verdict == NOT_SLOWER
        assert {j.verdict for j in told.judgements} == {NOT_SLOWER}
        assert told.notes == ("the metrics of host overhead disagree: the machine or eager code changed as well",)
        told = judge(
            window, replace(alone, measurement=replace(alone.measurement, compiled=run(1.0, 0.36).measurement.compiled))
        )
        assert [j.metric for j in told.judgements if j.verdict == SLOWER] == ["device time"]
    told = judge([*window[:-1], run(1.0, 0.3)], beside(0.1 / 1.3, ratio=0.65))
    assert told.verdict == SLOWER  # by the ratio to eager alone, as the launches were not timed in all runs
    assert len(told.judgements) == 2


def test_fixed_launches_only_have_to_bear_out_what_the_ratio_to_eager_says() -> None:
    """Between processes they move by a third: a limit that regards that would let all else pass."""

    def beside(ratio: float, to_launches: float) -> Run:
        return run(1.0, 0.3, ratio=ratio, ratios={"launches": to_launches})

    window = [beside(0.5, 10 * (1 + 0.05 * number)) for number in range(-3, 7)]
    middle = 10.75
    assert judge(window, beside(0.65, 1.12 * middle)).verdict == SLOWER
    assert judge(window, beside(0.65, 1.08 * middle)).verdict == NOT_SLOWER
    assert judge(window, beside(0.52, 3 * middle)).verdict == NOT_SLOWER
    few = [beside(0.5, 10.0)]
    assert judge(few, beside(0.64, 20.0)).verdict == NOT_SLOWER
    assert judge(few, beside(0.66, 11.2)).verdict == SLOWER
    base = [beside(0.5, 10.0), beside(0.5, 13.0), beside(0.5, 11.0)]
    head = [beside(0.65, 12.5), beside(0.65, 12.0), beside(0.65, 16.0)]
    assert detection.judge_revisions(base, head).verdict == SLOWER
    assert detection.judge_revisions(base, [beside(0.65, 12.0)] * 3).verdict == NOT_SLOWER


def test_what_was_not_measured_is_told() -> None:
    window = [replace(one, measurement=replace(one.measurement, ratios={})) for one in steady(busy=0.3)]
    told = judge(window, run(1.0, 0.3))
    assert [j.metric for j in told.judgements] == ["device time"]
    assert told.notes == ("ratio to eager was not measured in all runs: host overhead is not judged",)


def test_another_eager_is_no_measure_of_host_overhead() -> None:
    """Eager code that launches less makes compiled code look slower, and one that launches more hides it."""

    def beside(host: float, eager: float, launches: int) -> Run:
        found = run(host, 0.3, ratio=host / eager, ratios={"launches": host / 0.1})
        return replace(
            found,
            measurement=replace(found.measurement, eager=replace(found.measurement.eager, launches=launches)),
        )

    window = [beside(1.0, 4.0, 30) for _ in range(10)]
    assert judge(window, beside(1.0, 2.0, 15)).verdict == NOT_SLOWER
    told = judge(window, beside(1.5, 8.0, 60))
    assert told.verdict == SLOWER
    assert [j.metric for j in told.judgements] == ["device time", "ratio to fixed launches"]


def test_gpu_work_of_launch_bound_code_without_a_profiler_is_not_judged() -> None:
    told = judge([run(1.0, 0.3)], replace(run(1.0, 0.3), measurement=run(1.0, None).measurement))
    assert [j.question for j in told.judgements] == ["host overhead"]
    assert told.notes == ("device time was not measured in all runs: GPU work is not judged",)


def test_what_can_not_be_trusted_is_unstable() -> None:
    told = judge(steady(), run(2.0, 1.0, unstable=("another process uses the GPU",)))
    assert (told.verdict, told.notes) == (UNSTABLE, ("another process uses the GPU",))


def test_a_history_that_is_all_over_the_place_judges_nothing() -> None:
    wild = [run(1.0 + 0.2 * (number % 3), 1.2) for number in range(10)]
    told = judge(wild, run(1.1, 1.2))
    assert (told.verdict, told.notes) == (
        UNSTABLE,
        ("the accepted runs lie too far apart to judge by: --dynamo-accept begins anew",),
    )


def test_launches_are_exact_and_kernels_tell_code_from_machine() -> None:
    told = judge(steady(), run(1.05, 1.0, launches=8, kernels="k", code="x"))
    assert told.notes == ("8 kernels are launched per call, 7 before", "other kernels run than in the accepted runs")
    told = judge(steady(), run(1.05, 1.0))
    assert "what calls them changed, or the machine" in told.notes[0]
    assert judge(steady(), run(1.0, 1.0, code="x")).notes == ()


def test_improvements_are_told() -> None:
    assert [j.metric for j in detection.improved(judge(steady(), run(0.9, 1.0)))] == ["time"]
    assert detection.improved(judge(steady(), run(0.999, 1.0))) == ()


@pytest.mark.parametrize(("noise", "most"), [(0.001, 0.0), (0.005, 0.003), (0.01, 0.012)])
def test_few_false_alarms_and_much_power_at_normal_noise(noise: float, most: float) -> None:
    draw = random.Random(0)

    def drawn(shift: float = 0.0) -> Run:
        return run((1.0 + shift) * (1.0 + draw.gauss(0, noise)), 1.0)

    def share(shift: float) -> float:
        return sum(judge([drawn() for _ in range(10)], drawn(shift)).verdict == SLOWER for _ in range(2000)) / 2000

    assert share(0.0) <= most
    assert share(0.05) >= 0.9


def on_cpu(time: float, canary: float = 1.0) -> Run:
    """A run on a CPU, where the host's time is the time, beside fixed work."""
    sides = Side(Times(2 * time, 0.0, 50)), Side(Times(time, 0.0, 50))
    ratios = {"eager": 0.5, "matmul": time / canary, "copy": time / canary}
    return Run("t", "r", "a", {}, Measurement(*sides, 2.0, 2.0, 2.0, ratios=ratios))


def test_on_a_cpu_fixed_work_beside_it_has_to_agree() -> None:
    window = [on_cpu(1.0 + 0.002 * (number % 3)) for number in range(10)]
    told = judge(window, on_cpu(1.5, canary=1.5))
    assert told.verdict == UNSTABLE
    (note,) = told.notes
    assert note.startswith("time and its ratios to fixed work disagree: the machine is busy with something else")
    assert "--dynamo-accept begins anew" in note  # where the accepted runs are the odd ones it stays so
    told = judge(window, on_cpu(0.5, canary=0.7))
    assert (told.verdict, len(detection.improved(told))) == (NOT_SLOWER, 3)
    assert detection.improved(judge(window, on_cpu(1.0, canary=2.0))) == ()  # not of the code
    told = judge(window, on_cpu(1.3))
    assert told.verdict == SLOWER
    assert [j.metric for j in told.judgements] == [
        "time",
        "time to that of a fixed matmul",
        "time to that of a fixed copy",
    ]


def test_few_runs_that_lie_apart_still_judge() -> None:
    """Or the window would never fill: what is unstable does not enter it."""
    apart = [run(1.0, 1.2), run(1.3, 1.2)]
    assert judge(apart, run(1.2, 1.2)).verdict == NOT_SLOWER
    assert judge(apart, run(2.0, 2.0)).verdict == SLOWER


# -- two revisions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        ((1.0, 1.01, 0.99), (1.04, 1.05, 1.06), SLOWER),
        ((1.0, 1.01, 0.99), (1.02, 1.02, 1.02), NOT_SLOWER),
        ((1.0, 1.2, 0.99), (1.1, 1.1, 1.1), UNSTABLE),
        ((1.0, 1.0, 1.0), (0.5, 0.5, 0.5), NOT_SLOWER),
        ((1.0, 1.0, 1.0), (), NO_BASELINE),
    ],
)
def test_every_process_of_a_slower_revision_is_slower(
    base: tuple[float, ...], head: tuple[float, ...], verdict: str
) -> None:
    then, now = ([run(time, time) for time in times] for times in (base, head))
    assert detection.judge_revisions(then, now).verdict == verdict


def test_revisions_of_launch_bound_code_are_judged_by_both_questions() -> None:
    base = [run(1.0, 0.3, ratio=ratio) for ratio in (0.5, 0.52, 0.51)]
    told = detection.judge_revisions(base, [run(1.0, 0.3, ratio=0.65)] * 3)
    assert [(j.question, j.verdict) for j in told.judgements] == [("GPU work", NOT_SLOWER), ("host overhead", SLOWER)]
    assert detection.judge_revisions(base, [run(1.0, 0.32, ratio=0.5)] * 3).verdict == SLOWER


def test_revisions_on_a_restless_machine_are_not_judged() -> None:
    told = detection.judge_revisions([run(1.0, 1.0)], [run(2.0, 2.0, unstable=("GPU: power brake",))])
    assert (told.verdict, told.notes) == (UNSTABLE, ("GPU: power brake",))
