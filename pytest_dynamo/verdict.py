"""Which expectations of a test are broken. Pure: an observation and limits in, findings out."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_dynamo.detection import SLOWER
from pytest_dynamo.detection import SpeedVerdict
from pytest_dynamo.measurement import Measurement
from pytest_dynamo.record import Finding
from pytest_dynamo.record import GraphBreak
from pytest_dynamo.record import Observation
from pytest_dynamo.settings import Limits


@dataclass(frozen=True)
class Uncompiled:
    """A function of which nothing was compiled, and what is known about why."""

    name: str
    why: str
    file: str | None = None
    line: int | None = None


def judge(
    observation: Observation,
    limits: Limits,
    *,
    uncompiled: tuple[Uncompiled, ...] = (),
    must_compile: bool = False,
    allow_uncompiled: bool = False,
) -> tuple[Finding, ...]:
    """Return all findings, most telling first.

    Args:
        observation: what the compiler did in the test, setup included.
        limits: what it may do; a limit of None is not judged.
        uncompiled: functions of the ``compiled`` fixture of which nothing was compiled.
        must_compile: the test uses our fixtures, or stands under a cap on breaks or recompiles:
            frames that Dynamo gave up for good fail it.
        allow_uncompiled: accepts code that stays in eager mode.
    """
    findings: list[Finding] = []
    if not allow_uncompiled:
        findings += [_uncompiled(u) for u in uncompiled]
        if must_compile:
            findings += _limit_hits(observation)
            if not uncompiled:
                findings += _rewritten(observation)
    findings += _breaks(observation, limits)
    findings += _recompiles(observation, limits)
    findings += _skips(observation, limits)
    findings += _graphs(observation, limits)
    findings += _compile_time(observation, limits)
    return tuple(findings)


def _uncompiled(found: Uncompiled) -> Finding:
    return Finding("uncompiled", None, 0, found.why, found.file, found.line, "allow_uncompiled=True")


def rewritten_message(found: GraphBreak) -> str:
    return (
        f"nothing was compiled: pytest rewrote the assert at {found.file}:{found.line}; "
        "move the function out of the test module or use --assert=plain"
    )


def _rewritten(observation: Observation) -> Iterator[Finding]:
    for found in observation.breaks:
        if found.ignored is not None and found.kind == "skipped_frame":
            message = rewritten_message(found)
            yield Finding("uncompiled", None, 0, message, found.file, found.line, "allow_uncompiled=True")


def _limit_hits(observation: Observation) -> Iterator[Finding]:
    for hit in observation.limit_hits:
        message = f"{hit.function} hit Dynamo's {hit.limit}; its further calls run in eager mode"
        if hit.reason:
            message += f"\nhint: it was compiled again and again because this changed: {hit.reason}"
        yield Finding("limit_hit", None, 1, message, hit.file, hit.line, "allow_uncompiled=True")


def _breaks(observation: Observation, limits: Limits) -> Iterator[Finding]:
    allowed, seen = limits.max_breaks, observation.break_count
    if allowed is None or seen is None or seen <= allowed:
        return
    for found in observation.breaks:
        if found.ignored is None:
            yield Finding(
                "max_breaks", allowed, seen, break_message(found), found.file, found.line, f"max_breaks={seen}"
            )


def break_message(found: GraphBreak) -> str:
    """Reasons with PyTorch's numbers in the first line, then where it leads and how to mend it."""
    reasons = "; ".join(reason.text for reason in found.reasons)
    lines = [reasons]
    if found.kind == "skipped_frame":
        lines.append(f"all of {found.function} runs in eager mode because of it")
    if found.called_from is not None:
        lines.append(f"called from {found.called_from.file}:{found.called_from.line}")
    hints = dict.fromkeys(reason.hint for reason in found.reasons if reason.hint)
    lines += [f"hint: {hint}" for hint in hints]
    return "\n".join(lines)


def _recompiles(observation: Observation, limits: Limits) -> Iterator[Finding]:
    allowed, seen = limits.max_recompiles, observation.recompile_count
    if allowed is None or seen is None or seen <= allowed:
        return
    for found in observation.recompiles:
        times = f" ({found.count} times)" if found.count > 1 else ""
        message = f"{found.function} was compiled again{times}: {found.reasons[0]}"
        message = "\n".join([message, *(f"and: {reason}" for reason in found.first_reasons[1:])])
        yield Finding("max_recompiles", allowed, seen, message, found.file, found.line, f"max_recompiles={seen}")


def _skips(observation: Observation, limits: Limits) -> Iterator[Finding]:
    allowed, seen = limits.max_cudagraph_skips, len(observation.cudagraphs.skips)
    if allowed is None or seen <= allowed:
        return
    for skip in observation.cudagraphs.skips:
        message = f"no CUDA graph: {skip.reason}"
        accept = f"max_cudagraph_skips={seen}"
        yield Finding("max_cudagraph_skips", allowed, seen, message, skip.file, skip.line, accept)


def _graphs(observation: Observation, limits: Limits) -> Iterator[Finding]:
    allowed, seen = limits.max_graphs, observation.graphs
    if allowed is not None and seen is not None and seen > allowed:
        message = "1 graph was compiled" if seen == 1 else f"{seen} graphs were compiled"
        yield Finding("max_graphs", allowed, seen, message, None, None, f"max_graphs={seen}")


def _compile_time(observation: Observation, limits: Limits) -> Iterator[Finding]:
    allowed, seen = limits.max_compile_time, observation.compile.seconds
    if allowed is not None and seen is not None and seen > allowed:
        accept = f"max_compile_time={round(seen + 0.05, 1)}"
        yield Finding("max_compile_time", allowed, seen, f"compiling took {seen:.1f} s", None, None, accept)


def speed_findings(
    limits: Limits, measured: Measurement, verdict: SpeedVerdict | None, told: Sequence[str]
) -> tuple[Finding, ...]:
    """Return what is wrong with the speed and the memory of one benchmark.

    Args:
        limits: those of the test.
        measured: what this process measured.
        verdict: how that compares with accepted runs; None: not to be judged.
        told: the verdict in words.
    """
    found = []
    if verdict is not None and verdict.verdict == SLOWER:
        change = max(judgement.change for judgement in verdict.judgements if judgement.verdict == SLOWER)
        message = "\n".join(["slower than the accepted runs", *told])
        found.append(Finding("max_slowdown", None, round(100 * change, 1), message, None, None, "--dynamo-accept"))
    floor = limits.min_speedup
    if floor is not None and measured.speedup_low < floor:
        interval = f"{measured.speedup_low:.2f} to {measured.speedup_high:.2f}"
        message = f"compiled is {measured.speedup:.2f} times as fast as eager (95 %: {interval}), {floor:g} wanted"
        accept = f"min_speedup={int(100 * measured.speedup_low) / 100:g}"
        found.append(Finding("min_speedup", floor, round(measured.speedup_low, 3), message, None, None, accept))
    ratio, most = measured.memory_ratio, limits.max_memory_ratio
    if most is not None and ratio is not None and ratio > most:
        peaks = f"{measured.compiled.peak_bytes} and {measured.eager.peak_bytes} bytes"
        message = f"a compiled call needs {ratio:.2f} times the memory of an eager one ({peaks})"
        accept = f"max_memory_ratio={round(ratio + 0.005, 2):g}"
        found.append(Finding("max_memory_ratio", most, round(ratio, 3), message, None, None, accept))
    return tuple(found)
