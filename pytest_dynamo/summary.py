"""From events to counts: what is one break, what is a recompile, what is nothing of the user's."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

from pytest_dynamo import messages
from pytest_dynamo.asserts import is_plain_assert
from pytest_dynamo.events import BreakEvent
from pytest_dynamo.events import CompileEvent
from pytest_dynamo.events import CompileResult
from pytest_dynamo.events import CudaGraphRecording
from pytest_dynamo.events import CudaGraphSkipEvent
from pytest_dynamo.events import Event
from pytest_dynamo.events import LimitEvent
from pytest_dynamo.events import ResetEvent
from pytest_dynamo.messages import StackFrame
from pytest_dynamo.places import Places
from pytest_dynamo.record import Compile
from pytest_dynamo.record import CudaGraphs
from pytest_dynamo.record import CudaGraphSkip
from pytest_dynamo.record import GraphBreak
from pytest_dynamo.record import LimitHit
from pytest_dynamo.record import Observation
from pytest_dynamo.record import Reason
from pytest_dynamo.record import Recompile


class Group:
    """Events of one compiled function, or of all code that a test compiles by itself.

    A second compilation counts as a recompile only within one group: another instance of the same
    module, compiled on its own, shares the code object but is no recompile.
    """

    def __init__(self, name: str | None = None) -> None:
        #: Name of the compiled function, for frames that have none of their own.
        self.name = name
        self.events: list[Event] = []

    def recompiles(self, start: int = 0) -> Iterable[tuple[CompileEvent, tuple[str, ...]]]:
        """Yield each recompile among ``events[start:]``, judged by everything before it."""
        compiled: dict[str, list[Any]] = {}
        begun: dict[str, CompileEvent] = {}
        for number, event in enumerate(self.events):
            if isinstance(event, ResetEvent):
                compiled.clear()
                begun.clear()
            elif isinstance(event, CompileEvent):
                begun[event.compile_id] = event
                if event.attempt == 0:
                    compiled[event.frame] = []
            elif isinstance(event, CompileResult) and event.forward and event.fail_type is None:
                first = begun.pop(event.compile_id, None)
                if first is None:
                    continue
                before = compiled.setdefault(first.frame, [])
                reasons = first.reasons or ((event.recompile_reason,) if event.recompile_reason else ())
                if number >= start and _was_compiled(before, first.backend, reasons):
                    yield first, _guards(reasons)
                before.append(first.backend)


def _was_compiled(before: Sequence[Any], backend: Any, reasons: Sequence[str]) -> bool:
    """Whether the same code was compiled before for the same backend."""
    if not before:
        return False
    if backend is None:
        return not (reasons and all(messages.is_backend_change(reason) for reason in reasons))
    return any(earlier is backend or earlier == backend for earlier in before)


def _guards(reasons: Sequence[str]) -> tuple[str, ...]:
    cleaned = (messages.clean_guard(reason) for reason in reasons if not messages.is_backend_change(reason))
    return tuple(dict.fromkeys(cleaned)) or ("no reason given: compiled at the same time in another thread",)


def summarize(parts: Sequence[tuple[Group, int]], places: Places, *, results: bool = True) -> Observation:
    """Count what each group saw from its given event on.

    ``results=False``: this torch does not tell how compilations ended, so what depends on it is None.
    """
    events = [event for group, start in parts for event in group.events[start:]]
    done = [event for event in events if isinstance(event, CompileResult)]
    forward = [event for event in done if event.forward and event.fail_type is None]
    return Observation(
        frames=len(forward) if results else None,
        graphs=sum(bool(event.ops) for event in forward) if results else None,
        ops=sum(event.ops or 0 for event in forward) if results else None,
        breaks=_breaks([event for event in events if isinstance(event, BreakEvent)], places),
        recompiles=_recompiles([(*r, group.name) for group, start in parts for r in group.recompiles(start)], places),
        limit_hits=_limit_hits([event for event in events if isinstance(event, LimitEvent)], places),
        cudagraphs=CudaGraphs(
            recorded=sum(isinstance(event, CudaGraphRecording) for event in events),
            skips=_skips([event for event in events if isinstance(event, CudaGraphSkipEvent)], places),
        ),
        compile=_compile(done) if results else Compile(),
    )


def _breaks(events: Sequence[BreakEvent], places: Places) -> tuple[GraphBreak, ...]:
    sites: dict[tuple[str, int], list[BreakEvent]] = {}
    for event in events:
        # The user's own exception that leaves a frame, and frames of the standard library that
        # Dynamo meets while code runs eagerly after a break, are no breaks of the user's.
        frame = _site(event, places)
        if frame is not None and not event.reason.startswith(messages.USER_EXCEPTION):
            sites.setdefault((frame.file, frame.line), []).append(event)
    return tuple(sorted((_break(hits, places) for hits in sites.values()), key=lambda b: (b.file, b.line)))


def _site(event: BreakEvent, places: Places) -> StackFrame | None:
    """Where a break lies; if nothing but a wrapper was traced, the line that called it."""
    found = places.site(event.stack)
    if found is None and event.stack and places.is_wrapper(event.stack[-1].file):
        return places.site(event.callers)
    return found


def _break(hits: Sequence[BreakEvent], places: Places) -> GraphBreak:
    frame = _site(hits[0], places)
    assert frame is not None
    called_from = None
    if places.kind(frame.file) != "project":
        found = (places.called_from(hit.stack, hit.callers) for hit in hits)
        called_from = next((place for place in found if place is not None), None)
    reasons: dict[str, list[BreakEvent]] = {}
    for hit in hits:
        reasons.setdefault(hit.reason, []).append(hit)
    kind = "break"
    if any(hit.skipped for hit in hits):
        kind = "skipped_frame"
    elif all(hit.reason.startswith(messages.DISABLED_CALL) for hit in hits):
        kind = "disabled_call"
    rewritten = all(
        hit.rewritten and hit.reason.startswith(messages.DATA_DEPENDENT) for hit in hits
    ) and is_plain_assert(frame.file, frame.line)
    return GraphBreak(
        file=places.relative(frame.file),
        line=frame.line,
        function=frame.function,
        called_from=called_from,
        reasons=tuple(Reason(text, same[0].id, same[0].hint, len(same)) for text, same in reasons.items()),
        kind=kind,
        ignored="assert rewriting" if rewritten else None,
    )


def _recompiles(
    found: Sequence[tuple[CompileEvent, tuple[str, ...], str | None]], places: Places
) -> tuple[Recompile, ...]:
    sites: dict[tuple[str, int, str], list[tuple[str, ...]]] = {}
    for event, reasons, name in found:
        key = (places.relative(event.file), event.line, messages.real_function(event.function))
        called_from = places.called_from((), event.callers)
        if places.kind(event.file) == "compiler" and called_from is not None:
            # A module of torch itself runs in a wrapper of Dynamo's: tell the line that called it.
            key = (called_from.file, called_from.line, name or key[2])
        sites.setdefault(key, []).append(reasons)
    return tuple(
        Recompile(*key, reasons=tuple(dict.fromkeys(r for some in reasons for r in some)), count=len(reasons))
        for key, reasons in sorted(sites.items())
    )


def _limit_hits(events: Sequence[LimitEvent], places: Places) -> tuple[LimitHit, ...]:
    sites: dict[tuple[str, int, str], LimitHit] = {}
    for event in events:
        key = (places.relative(event.file), event.line, messages.real_function(event.function))
        sites.setdefault(key, LimitHit(*key, limit=event.limit, reason=messages.clean_guard(event.reason)))
    return tuple(hit for _, hit in sorted(sites.items()))


def _skips(events: Sequence[CudaGraphSkipEvent], places: Places) -> tuple[CudaGraphSkip, ...]:
    skips = []
    for event in events:
        where = event.where
        skips.append(
            CudaGraphSkip(
                event.reason,
                places.relative(where.file) if where else None,
                where.line if where else None,
            )
        )
    return tuple(skips)


def _compile(done: Sequence[CompileResult]) -> Compile:
    hits = [event.cache_hits for event in done if event.cache_hits is not None]
    misses = [event.cache_misses for event in done if event.cache_misses is not None]
    cache_hits = sum(hits) if hits else None
    cache_misses = sum(misses) if misses else None
    cold = None
    if cache_hits or cache_misses:
        cold = bool(cache_misses) and not cache_hits
    return Compile(
        seconds=round(sum(event.seconds or 0.0 for event in done), 6),
        cold=cold,
        backward_graphs=sum(not event.forward for event in done),
        cache_hits=cache_hits,
        cache_misses=cache_misses,
    )
