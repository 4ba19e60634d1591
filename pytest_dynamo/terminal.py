"""Report → text for the terminal, as lists of lines."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence

from pytest_dynamo.record import Check
from pytest_dynamo.record import Diagnosis
from pytest_dynamo.record import Finding
from pytest_dynamo.record import Observation
from pytest_dynamo.record import Record
from pytest_dynamo.report import Report


_TITLES = {
    "max_breaks": "{seen} graph break{s}, {allowed} allowed",
    "max_recompiles": "{seen} recompile{s}, {allowed} allowed",
    "max_cudagraph_skips": "{seen} CUDA-graph skip{s}, {allowed} allowed",
    "max_graphs": "{seen} graph{s}, {allowed} allowed",
    "max_compile_time": "{seen:.1f} s of compiling, {allowed:g} allowed",
    "limit_hit": "recompile limit hit",
    "uncompiled": "not compiled",
    "fullgraph": "graph break under fullgraph=True",
    "untold": "this torch is not understood",
    "not_checked": "{seen} not checked, under --dynamo-require-checked",
    "max_slowdown": "slower by {seen:g} %",
    "min_speedup": "{seen:g} times as fast as eager, {allowed:g} wanted",
    "max_memory_ratio": "{seen:g} times the memory of eager, {allowed:g} allowed",
    "compiled_while_timing": "compiled while it was timed",
    "baseline": "no baseline can be read",
}


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return a title for each broken limit, then one line for each place, its hint, how to accept it."""
    lines: list[str] = []
    for limit in dict.fromkeys(finding.limit for finding in findings):
        same = [finding for finding in findings if finding.limit == limit]
        first = same[0]
        plural = "" if first.seen == 1 else "s"
        lines.append(_TITLES[limit].format(seen=first.seen, allowed=first.allowed, s=plural))
        for finding in same:
            head, *rest = finding.message.splitlines()
            lines.append("  " + (f"{finding.file}:{finding.line}  {head}" if finding.file else head))
            lines += [f"      {line}" for line in rest]
        if first.accept_with:
            accept = first.accept_with
            lines.append(f"  accept with {accept if accept[0] == '-' else f'@pytest.mark.compiled({accept})'}")
    return lines


#: Lines of a message about one call that differs; the JSON report has everything.
PARITY_LINES = 20


def parity_lines(checks: Iterable[Check], diagnosis: Diagnosis | None = None, repro: str | None = None) -> list[str]:
    """Return what a call did otherwise than eager: at most `PARITY_LINES` lines with the one above them."""
    after = _diagnosis_lines(diagnosis) if diagnosis is not None else []
    after += [f"  repro: {repro}"] if repro else []
    room = PARITY_LINES - 2 - len(after)
    failed = [check for check in checks if check.passed is False]
    lines: list[str] = []
    for number, check in enumerate(failed):
        own = _check_lines(check)
        rest = len(failed) - number - 1
        if len(lines) + len(own) + rest > room:
            own = own[:1]  # the places of all, rather than everything about some
        if len(lines) + len(own) > room:
            lines.append(f"  and {len(failed) - number} more")
            break
        lines += own
    return lines + after


def _check_lines(check: Check) -> list[str]:
    first, *rest = (check.note or "").splitlines() or [""]
    numbers = [
        f"{name} {value:.1e}" for name, value in (("max abs", check.max_abs), ("max rel", check.max_rel)) if value
    ]
    lines = [f"  {check.path}  {check.what}: {first}" + (f" ({', '.join(numbers)})" if numbers else "")]
    if check.worst is not None:
        worst = check.worst
        where = str(list(worst.index)) if worst.index else "its only element"
        told = f"worst at {where}: compiled {_value(worst.compiled)}, eager {_value(worst.eager)}"
        lines.append(f"      {told}" + (f", float64 {_value(worst.float64)}" if worst.float64 is not None else ""))
    return [*lines, *(f"      {line}" for line in rest)]


def _value(value: float | int | str) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _diagnosis_lines(found: Diagnosis) -> list[str]:
    if found.stage is None:
        return [f"  first diverging stage: {found.note}"]
    agree = f" ({', '.join(found.agree)} agree{'s' if len(found.agree) == 1 else ''} with eager)" if found.agree else ""
    lines = [f"  first diverging stage: {found.stage}{agree}"]
    if found.cured_by:
        lines.append(f"      {found.cured_by} cures it: inductor keeps more precision between operations than eager")
    elif found.note:
        lines.append(f"      {found.note}")
    if found.bisected:
        lines.append(f"      bisected to {found.bisected}")
    return lines


def observation_lines(observation: Observation) -> Iterator[str]:
    """Tell what was seen though no limit judges it."""
    for found in observation.breaks:
        reasons = "; ".join(reason.text for reason in found.reasons)
        ignored = f"  (ignored: {found.ignored})" if found.ignored else ""
        yield f"{found.file}:{found.line}  graph break: {reasons}{ignored}"
    for again in observation.recompiles:
        yield f"{again.file}:{again.line}  recompile: {'; '.join(again.first_reasons)}"
    for hit in observation.limit_hits:
        why = f": {hit.reason}" if hit.reason else ""
        yield f"{hit.file}:{hit.line}  recompile limit hit: {hit.function} stays in eager mode ({hit.limit}){why}"
    for skip in observation.cudagraphs.skips:
        place = f"{skip.file}:{skip.line}  " if skip.file else ""
        yield f"{place}no CUDA graph: {skip.reason}"


def summary_lines(report: Report, verbosity: int) -> list[str]:
    """Return the summary at the end of a run: a table with ``-v``, totals always."""
    lines: list[str] = []
    if verbosity > 0:
        lines += _table(report.records)
        for record in report.records:
            told = list(observation_lines(record.observation))
            told += [f"not checked: {text}" for text in record.not_checked]
            told += [f"note: {text}" for text in record.notes]
            if told:
                lines += [f"{record.nodeid} ({record.phase})", *(f"    {line}" for line in told)]
    for record in report.records:
        for name in record.relaxed:
            lines.append(f"{record.nodeid}: {name} allowed by its marker")
        if verbosity <= 0:
            lines += [f"{record.nodeid}: {text}" for text in record.notes]
    lines += report.notes
    lines.append(_totals(report))
    return lines


def _table(records: Sequence[Record]) -> list[str]:
    head = ("test", "variant", "graphs", "breaks", "recompiles", "CUDA graphs", "parity error", "compile s")
    rows = [head, *(_row(record) for record in records)]
    return columns(rows, left=2)


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Align cells; the first ``left`` columns to the left."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(w) if n < left else cell.rjust(w) for n, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]


def _row(record: Record) -> tuple[str, ...]:
    seen = record.observation
    name = record.nodeid.rpartition("::")[2].partition("[")[0] if "::" in record.nodeid else record.nodeid
    if record.phase != "call":
        name += f" ({record.phase})"
    seconds = seen.compile.seconds
    return (
        name,
        (record.variant or {}).get("id") or "-",
        _number(seen.graphs),
        _number(seen.break_count),
        _number(seen.recompile_count),
        _cudagraphs(record),
        _error(record),
        "?" if seconds is None else f"{seconds:.1f}",
    )


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _cudagraphs(record: Record) -> str:
    seen = record.observation.cudagraphs
    if seen.skips:
        return f"{len(seen.skips)} skipped"
    if not seen.expected and not seen.recorded:
        return "-"
    return f"{_number(seen.recorded)} recorded, {_number(seen.replayed)} replayed"


def _error(record: Record) -> str:
    parity = record.parity
    if parity.passed is None:
        return "-" if not parity.calls else "not checked"
    errors = [check.max_abs for check in parity.checks if check.max_abs is not None]
    worst = f"{max(errors):.1e}" if errors else "0"
    return worst if parity.passed else f"{worst} FAILED"


def _totals(report: Report) -> str:
    t = report.totals
    parts = [
        _count(t["tests"], "test") + " compiled",
        _count(t["graphs"], "graph"),
        _count(t["breaks"], "graph break") + (f" (and {t['ignored_breaks']} ignored)" if t["ignored_breaks"] else ""),
        _count(t["recompiles"], "recompile"),
    ]
    if t["limit_hits"] != 0:
        parts.append(_count(t["limit_hits"], "limit hit"))
    if t["cudagraph_skips"]:
        parts.append(_count(t["cudagraph_skips"], "CUDA-graph skip"))
    parts.append(f"{t['not_checked']} not checked")
    return ", ".join(parts)


def _count(number: int | None, word: str) -> str:
    return f"{_number(number)} {word}" + ("" if number == 1 else "s")
