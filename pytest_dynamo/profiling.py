"""How long the GPU is busy in a call, what it launches and how much memory it holds at most."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


#: Profiled calls last so many seconds, within these bounds. To read the events of a call takes longer than the call.
SECONDS = 0.02
LEAST, MOST = 5, 50
#: Kinds of events on the device in which it does nothing.
IDLE = frozenset({"gpu_user_annotation", "cuda_sync", "overhead", "cuda_profiler_range"})


@dataclass(frozen=True)
class Event:
    """A kernel, a copy or a fill of memory on the device. Times in seconds."""

    name: str
    start: float
    duration: float


@dataclass(frozen=True)
class Busy:
    """What the device does in one call; None: not known."""

    #: Seconds in which at least one stream is busy.
    device_time: float | None
    #: Kernels, copies and fills.
    launches: int | None
    #: A hash of their names, in order.
    kernels: str | None
    #: Why something is not known.
    notes: tuple[str, ...] = ()


def profile(call: Callable[[], Any], device: torch.device, seconds: float) -> Busy:
    """Profile some warm calls that last ``seconds`` each, as many as last about 20 ms.

    On a CPU nothing is called. The calls must not compile and must all launch the same.
    """
    if device.type != "cuda":
        return Busy(None, None, None)
    calls = how_many(seconds)
    return busy(recorded(call, calls, device, torch.profiler.ProfilerActivity.CUDA), calls)


def how_many(seconds: float) -> int:
    """How many calls that last ``seconds`` are profiled."""
    return min(max(math.ceil(SECONDS / max(seconds, 1e-9)), LEAST), MOST)


def recorded(
    call: Callable[[], Any], calls: int, device: torch.device, activity: torch.profiler.ProfilerActivity
) -> list[Event]:
    """Return what ``calls`` calls did on the device."""
    # To turn the profiler on takes long enough for a GPU to cool down: five cold calls of a matmul spread by 23 %
    # between processes. In its own warm-up it forgets all events; the profiled calls then follow others closely.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    # Without acc_events some releases of torch warn, although there is one cycle only.
    with torch.profiler.profile(activities=[activity], schedule=schedule, acc_events=True) as profiler:
        _repeat(call, calls, device)
        profiler.step()
        _repeat(call, calls, device)
    return device_events(profiler.events())


def _repeat(call: Callable[[], Any], calls: int, device: torch.device) -> None:
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_events(events: Iterable[Any]) -> list[Event]:
    """Pick what the device worked on out of ``torch.profiler.profile().events()``."""
    return [
        # The profiler counts in microseconds.
        Event(event.name, event.time_range.start * 1e-6, event.time_range.elapsed_us() * 1e-6)
        for event in events
        if event.device_type.name == "CUDA"
        and not event.is_user_annotation
        and getattr(event, "activity_type", None) not in IDLE
    ]


def busy(events: Sequence[Event], calls: int) -> Busy:
    """Put together what ``calls`` equal calls did."""
    if not events:
        return Busy(None, None, None, ("the profiler saw nothing on the GPU",))
    if len(events) % calls:
        # Events were lost, or calls differ: then the mean is that of no call.
        return Busy(None, None, None, (f"{len(events)} launches in {calls} calls: not the same number in each",))
    events = sorted(events, key=lambda event: event.start)
    launches = len(events) // calls
    names = [event.name for event in events]
    notes: tuple[str, ...] = ()
    kernels: str | None = None
    if names == names[:launches] * calls:
        kernels = hashlib.sha256("\n".join(names[:launches]).encode()).hexdigest()[:16]
    else:
        notes = ("calls launch different kernels, or in another order",)
    return Busy(_covered(events) / calls, launches, kernels, notes)


def _covered(events: Sequence[Event]) -> float:
    """Seconds covered by events that are sorted by their start; those of several streams overlap."""
    total, until = 0.0, -math.inf
    for event in events:
        end = event.start + event.duration
        total += max(0.0, end - max(event.start, until))
        until = max(until, end)
    return total


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes that a call holds at most beyond those allocated before it; None on a CPU.

    Allocated, not reserved. A replayed CUDA graph owns its memory from before and so holds little. Garbage that is
    collected in the call would be counted against it: no collection may happen.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return max(peak, 0)
