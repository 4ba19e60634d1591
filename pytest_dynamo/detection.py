"""Whether a run is slower than the accepted ones. Pure: measurements in, a verdict out.

Two questions are asked apart. *GPU work* is judged by elapsed time, or by the time that the GPU is busy where code
is launch-bound: elapsed time of such code moves by half between processes though nothing changed. *Host
overhead* is judged for launch-bound code only, by what the host needs to issue a call: by its ratio to that of eager
code, timed in the same process, which that to fixed launches has to bear out. On a CPU elapsed time decides, if its
ratio to the times of fixed work beside it agrees.

A run is slower when it lies beyond the middle of the accepted ones by more than a floor, and beyond the slowest of
them by more than their own noise. The second keeps code that has two speeds, one of which each process
draws, from failing; the floors are those that hold on measured processes (``tests/benchmarks/false_alarms.py``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from functools import partial

from pytest_dynamo.measurement import EAGER
from pytest_dynamo.measurement import HOST_CANARY
from pytest_dynamo.measurement import Measurement
from pytest_dynamo.measurement import Run


SLOWER, NOT_SLOWER, UNSTABLE, NO_BASELINE = "slower", "not slower", "unstable", "no baseline"

#: Accepted runs that make up a full window; later ones do not enter.
WINDOW = 10
#: Beyond the slowest accepted run: at least this, and this many times the noise.
MARGIN, NOISES = 0.005, 2.5
#: Two leases of one GPU model differed by up to 4.9 %: what all comes from one machine knows nothing of others.
ONE_MACHINE = 0.05


@dataclass(frozen=True)
class Question:
    """What is judged, by which metric."""

    name: str
    metric: str
    read: Callable[[Measurement], float | None]
    #: How far a run may lie beyond the middle of the window, with fewer than 5, fewer than 8, and more accepted runs.
    floors: tuple[float, float, float]
    #: An accepted run this far from the middle does not count; if a quarter of them do so, nothing can be judged.
    outlier: float
    #: How far processes of two revisions may lie apart that ran alternately on one machine.
    together: float
    #: Asked beside another metric of the same question, which it only has to bear out: its noise does not count.
    bears_out: bool = False


def _time(measured: Measurement) -> float:
    return measured.compiled.time.median


def _ratio_to(name: str) -> Callable[[Measurement], float | None]:
    return lambda measured: measured.ratios.get(name)


_gpu = partial(Question, "GPU work", floors=(0.15, 0.05, 0.02), outlier=0.10, together=0.03)
_cpu = partial(Question, "CPU work", floors=(0.30, 0.20, 0.10), outlier=0.30, together=0.10)
TIME = _gpu("time", _time)
DEVICE_TIME = _gpu("device time", lambda measured: measured.compiled.device_time)
_host = partial(Question, "host overhead", floors=(0.30, 0.20, 0.10), outlier=0.30, together=0.15)
HOST = _host("ratio to eager", _ratio_to(EAGER))
HOST_TO_LAUNCHES = _host("ratio to fixed launches", _ratio_to(HOST_CANARY))
HOST_TO_LAUNCHES_TOO = replace(HOST_TO_LAUNCHES, floors=(0.10, 0.10, 0.10), together=0.10, bears_out=True)
#: On a CPU other work disturbs more: the time has to be longer by itself and relatively to fixed work beside it.
ON_CPU = (
    _cpu("time", _time),
    _cpu("time to that of a fixed matmul", _ratio_to("matmul")),
    _cpu("time to that of a fixed copy", _ratio_to("copy")),
)


@dataclass(frozen=True)
class Judgement:
    """One question: how far this run lies from the middle of the accepted ones, and how far it may."""

    #: ``GPU work`` or ``host overhead``.
    question: str
    #: What was compared: ``time``, ``device time`` or ``ratio to eager``.
    metric: str
    now: float
    middle: float
    #: Relative, such as 0.031.
    change: float
    limit: float
    verdict: str


@dataclass(frozen=True)
class SpeedVerdict:
    verdict: str
    judgements: tuple[Judgement, ...] = ()
    #: In words: why it is unstable or has no baseline, what else changed.
    notes: tuple[str, ...] = ()
    #: Accepted runs that it was held against.
    runs: int = 0


def judge(window: Sequence[Run], now: Run, allowed: float | None = None) -> SpeedVerdict:
    """Hold a run against accepted ones of the same fingerprint and variant.

    Args:
        window: accepted runs, oldest first.
        now: the run in question.
        allowed: relative slow-down that is accepted at least, where that is more than the floor.
    """
    measured = now.measurement
    if measured.unstable:
        return SpeedVerdict(UNSTABLE, notes=measured.unstable, runs=len(window))
    if not window:
        return SpeedVerdict(NO_BASELINE, notes=("no accepted run with this fingerprint",))
    questions = _questions([*window, now])
    told, notes = _agreed(questions, [_judge(question, window, now, allowed) for question in questions])
    notes = [*_launches(window, measured), *_code(window, measured, told), *notes]
    verdict = _together(questions, told, notes, len(window))
    if verdict.verdict != SLOWER and any(judgement.verdict == UNSTABLE for judgement in verdict.judgements):
        note = "the accepted runs lie too far apart to judge by: --dynamo-accept begins anew"
        return replace(verdict, notes=(*verdict.notes, note))
    return verdict


def judge_revisions(base: Sequence[Run], head: Sequence[Run], allowed: float | None = None) -> SpeedVerdict:
    """Hold processes of one revision against those of another that ran alternately on this machine.

    Slower: the middles lie apart by more than a few percent, and every process of ``head`` is slower than
    every one of ``base``; unstable: only the first. No history is needed.
    """
    unstable = dict.fromkeys(reason for run in (*base, *head) for reason in run.measurement.unstable)
    if unstable:
        return SpeedVerdict(UNSTABLE, notes=tuple(unstable), runs=len(base))
    if not base or not head:
        return SpeedVerdict(NO_BASELINE, notes=("it was timed in one of the revisions only",))
    questions = _questions([*base, *head])
    judged: list[Judgement | None] = []
    for question in questions:
        sides = [[question.read(run.measurement) for run in runs] for runs in (base, head)]
        then, now = ([value for value in side if value is not None] for side in sides)
        if len(then) < len(base) or len(now) < len(head):
            judged.append(None)
            continue
        middle, limit = statistics.median(then), max(question.together, allowed or 0.0)
        change = statistics.median(now) / middle - 1
        apart = question.bears_out or min(now) > max(then)
        verdict = NOT_SLOWER if change <= limit else SLOWER if apart else UNSTABLE
        judged.append(Judgement(question.name, question.metric, statistics.median(now), middle, change, limit, verdict))
    measured = head[-1].measurement
    told, notes = _agreed(questions, judged)
    notes = [*_launches(base, measured), *_code(base, measured, told), *notes]
    if any(judgement.verdict == UNSTABLE for judgement in told):
        notes.append("some processes of the two revisions were as fast: the machine is too restless")
    return _together(questions, told, notes, len(base))


def _questions(runs: Sequence[Run]) -> tuple[Question, ...]:
    """What is to be judged, which is the same for all runs of a comparison."""
    if all(run.measurement.launch_bound is None and run.measurement.compiled.host is None for run in runs):
        return ON_CPU
    if not any(run.measurement.launch_bound for run in runs):
        return (TIME,)
    if not all(HOST_CANARY in run.measurement.ratios for run in runs):
        return (DEVICE_TIME, HOST)
    # A ratio to eager tells nothing where eager launches something else than before.
    same = len({(run.measurement.eager.launches, run.measurement.eager.kernels) for run in runs}) == 1
    return (DEVICE_TIME, HOST, HOST_TO_LAUNCHES_TOO) if same else (DEVICE_TIME, HOST_TO_LAUNCHES)


def _agreed(questions: Sequence[Question], judged: Sequence[Judgement | None]) -> tuple[list[Judgement], list[str]]:
    """What was judged, where a metric calls slower only what the others of its question do too; and notes of that."""
    told, notes = [judgement for judgement in judged if judgement is not None], []
    for name in dict.fromkeys(judgement.question for judgement in told) if questions is not ON_CPU else ():
        if {one.verdict for one in told if one.question == name} >= {SLOWER, NOT_SLOWER}:
            told = [replace(one, verdict=NOT_SLOWER) if one.question == name else one for one in told]
            notes.append(f"the metrics of {name} disagree: the machine or eager code changed as well")
    return told, notes


def _together(
    questions: Sequence[Question], told: Sequence[Judgement], notes: Sequence[str], runs: int
) -> SpeedVerdict:
    """One verdict of all questions. On a CPU, where all ask the same, nobody knows if they disagree."""
    verdicts = {judgement.verdict for judgement in told}
    notes = list(notes)
    if questions is ON_CPU and verdicts >= {SLOWER, NOT_SLOWER}:
        verdicts = {UNSTABLE}
        notes.append(
            "time and its ratios to fixed work disagree: the machine is busy with something else, "
            "or was when runs were accepted (then --dynamo-accept begins anew)"
        )
    judged = {judgement.question for judgement in told}
    for name in dict.fromkeys(question.name for question in questions if question.name not in judged):
        metrics = " and ".join(question.metric for question in questions if question.name == name)
        notes.append(f"{metrics} was not measured in all runs: {name} is not judged")
    verdict = next((one for one in (SLOWER, UNSTABLE, NOT_SLOWER) if one in verdicts), UNSTABLE)
    return SpeedVerdict(verdict, tuple(told), tuple(notes), runs)


def limit_of(values: Sequence[float], question: Question, *, elsewhere: bool = False) -> tuple[float, float]:
    """The middle of accepted values, and how far beyond it a value may lie, relatively; infinite: not to be judged.

    Args:
        values: of accepted runs, at least one.
        question: floors and what counts as an outlier.
        elsewhere: all of them come from one machine, and what is judged from another.
    """
    logs = sorted(math.log(value) for value in values)
    few = question.floors[0] if len(logs) < 5 else question.floors[1] if len(logs) < 8 else question.floors[2]
    middle = statistics.median(logs)
    if question.bears_out:
        return math.exp(middle), few
    near = [value for value in logs if abs(value - middle) <= question.outlier] or [middle]
    if len(logs) >= 5 and len(logs) - len(near) > len(logs) / 4:
        return math.exp(middle), math.inf
    # Of code with two speeds the median may be the slow one.
    middle = min(middle, (near[0] + near[-1]) / 2)
    beyond = max(math.log1p(few), near[-1] - middle + max(MARGIN, NOISES * _noise(logs)))
    return math.exp(middle), math.expm1(beyond + (math.log1p(ONE_MACHINE) if elsewhere else 0.0))


def _noise(logs: Sequence[float]) -> float:
    """Standard deviation by the densest half of sorted values: of two speeds it sees one."""
    half = (len(logs) + 1) // 2
    return min(logs[n + half - 1] - logs[n] for n in range(len(logs) - half + 1)) / 1.35


def _judge(question: Question, window: Sequence[Run], now: Run, allowed: float | None) -> Judgement | None:
    value = question.read(now.measurement)
    accepted = [found for run in window if (found := question.read(run.measurement))]
    if not value or not accepted:
        return None
    machines = {run.machine for run in window}
    middle, limit = limit_of(accepted, question, elsewhere=len(machines) == 1 and now.machine not in machines)
    limit = max(limit, allowed or 0.0)
    change = value / middle - 1
    verdict = UNSTABLE if math.isinf(limit) else SLOWER if change > limit else NOT_SLOWER
    return Judgement(question.name, question.metric, value, middle, change, limit, verdict)


def _launches(window: Sequence[Run], measured: Measurement) -> list[str]:
    """What became of the number of launches, which is exact."""
    now, then = measured.compiled.launches, window[-1].measurement.compiled.launches
    return [f"{now} kernels are launched per call, {then} before"] if None not in (now, then) and now != then else []


def _code(window: Sequence[Run], measured: Measurement, told: Sequence[Judgement]) -> list[str]:
    """Whether a move comes with other kernels, or with the machine."""
    if not any(judgement.verdict == SLOWER or judgement.change < -judgement.limit for judgement in told):
        return []
    known = [(run.measurement.code, run.measurement.compiled.kernels) for run in window]
    now = (measured.code, measured.compiled.kernels)
    if now == (None, None) or all(pair == (None, None) for pair in known):
        return []
    if now in known:
        return ["code and kernels are those of an accepted run: what calls them changed, or the machine"]
    return ["other kernels run than in the accepted runs"]


def improved(verdict: SpeedVerdict) -> tuple[Judgement, ...]:
    """Questions in which a run is faster than its baseline by more than it might be slower; by all their metrics."""

    def faster(judgement: Judgement) -> bool:
        return judgement.change < -judgement.limit / (1 + judgement.limit)

    told = verdict.judgements
    return tuple(one for one in told if all(faster(other) for other in told if other.question == one.question))
