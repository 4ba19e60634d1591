"""Holds a run of a benchmark against the accepted ones, and times suspects again in fresh processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pytest_dynamo import detection
from pytest_dynamo import history
from pytest_dynamo import options
from pytest_dynamo import replay
from pytest_dynamo import speedtable
from pytest_dynamo.confirm import NotConfirmedError
from pytest_dynamo.confirm import times_again
from pytest_dynamo.detection import NO_BASELINE
from pytest_dynamo.detection import SLOWER
from pytest_dynamo.detection import UNSTABLE
from pytest_dynamo.detection import SpeedVerdict
from pytest_dynamo.measurement import Run
from pytest_dynamo.measurement import middle
from pytest_dynamo.record import Finding
from pytest_dynamo.record import Memory
from pytest_dynamo.testrun import TestRun
from pytest_dynamo.verdict import speed_findings


def judge(config: pytest.Config, run: TestRun, entry: Run, name: str) -> None:
    """Add to ``run`` what ``entry``, the measured run of the function ``name``, is found to be."""
    percent = options.option(config, "max_slowdown")
    allowed = None if percent is None else percent / 100
    folder = replay.storage(config)
    told = [] if folder is not None else ["pytest-benchmark keeps its runs where they are not read: no baseline"]
    stored = history.read(folder) if folder is not None else history.Storage()
    run.notes.update(dict.fromkeys(f"benchmark storage: {problem}" for problem in stored.problems))
    try:
        accepted = history.marks(folder) if folder is not None else {}
    except history.HistoryError as error:
        run.findings.append(Finding("baseline", None, None, str(error), None, None, None))
        return
    window = history.window(stored.runs, entry.nodeid, entry.fingerprint, accepted)
    verdict = detection.judge(window, entry, allowed)
    accepting = options.option_given(config, "accept")
    if verdict.verdict == SLOWER and not accepting:
        verdict = _confirmed(config, run, window, entry, verdict, allowed)
    assert run.benchmark is not None
    run.speed = verdict.verdict
    measured = entry.measurement
    run.memory = Memory(measured.eager.peak_bytes, measured.compiled.peak_bytes, measured.memory_ratio)
    run.kernels = measured.compiled.launches
    told += speedtable.verdict_lines(verdict)
    if verdict.verdict == NO_BASELINE:
        told += speedtable.other_lines(history.older_series(stored.runs, entry.nodeid, entry.fingerprint))
        if not replay.saves(config):
            told.append("this run is not kept: --benchmark-autosave keeps it")
    run.benchmark["told"] = told
    if verdict.verdict in (UNSTABLE, NO_BASELINE):
        run.notes[f"speed of {name}: {verdict.verdict}: {'; '.join(told)}"] = None
    for improved in () if accepting else detection.improved(verdict):
        run.notes[
            f"speed of {name}: {improved.metric} is {-improved.change:.1%} below the accepted runs: "
            "--dynamo-accept makes it the baseline"
        ] = None
    if run.settings.limits.max_memory_ratio is not None and measured.memory_ratio is None:
        device = entry.fingerprint["device"]
        run.not_checked[f"max_memory_ratio of {name}: memory is not measured on {device}"] = None
    if measured.speedup_high < 1:
        run.notes[f"compiled {name} is slower than eager: {measured.speedup:.2f} times as fast"] = None
    run.findings += speed_findings(run.settings.limits, measured, None if accepting else verdict, told)


def _confirmed(
    config: pytest.Config,
    run: TestRun,
    window: Sequence[Run],
    entry: Run,
    suspect: SpeedVerdict,
    allowed: float | None,
) -> SpeedVerdict:
    """Judge a suspect by the median of its run and of some in fresh processes."""
    count = options.option(config, "confirm")
    count = 2 if count is None else count
    if not count:
        return suspect
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the processes need memory too
    try:
        with run.progress(run.nodeid, "confirming"):
            fresh = times_again(config, entry.nodeid, count)
    except NotConfirmedError as error:
        return SpeedVerdict(UNSTABLE, suspect.judgements, (*suspect.notes, str(error)), suspect.runs)
    together = middle([entry.measurement, *fresh])
    assert run.benchmark is not None
    run.benchmark["confirmed"] = [measured.to_json() for measured in fresh]
    judged = replace(entry, measurement=together)
    verdict = detection.judge(window, judged, allowed)
    # Later runs are to be judged by what this one was judged by, not by what this process drew.
    run.benchmark.update(measurement=together.to_json(), first=entry.measurement.to_json())
    run.entry = judged
    if verdict.verdict != SLOWER:
        first = max(judgement.change for judgement in suspect.judgements if judgement.verdict == SLOWER)
        run.notes[
            f"speed of {entry.nodeid}: seemed {first:.1%} slower, which {count} fresh processes did not confirm"
        ] = None
    note = f"judged by the median of this and {count} fresh processes"
    return SpeedVerdict(verdict.verdict, verdict.judgements, (*verdict.notes, note), verdict.runs)
