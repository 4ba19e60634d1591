"""Busy time and launches, from made-up events; what the profiler of torch gives, on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from pytest_dynamo import profiling
from pytest_dynamo.measurement import launch_bound
from pytest_dynamo.profiling import Busy
from pytest_dynamo.profiling import Event
from pytest_dynamo.profiling import busy
from pytest_dynamo.profiling import device_events
from pytest_dynamo.profiling import how_many
from pytest_dynamo.profiling import peak_bytes
from pytest_dynamo.profiling import profile


US = 1e-6


def row(*names: str, start: float = 0.0, duration: float = 2.0, gap: float = 1.0) -> list[Event]:
    """Events one after the other, in microseconds."""
    step = duration + gap
    return [Event(name, (start + number * step) * US, duration * US) for number, name in enumerate(names)]


# -- from events to numbers -----------------------------------------------------------------------


def test_what_one_call_does() -> None:
    found = busy(row(*["gemm", "gelu", "Memcpy DtoD"] * 5), 5)
    assert found.device_time == pytest.approx(6 * US)
    assert found.launches == 3
    assert found.kernels is not None
    assert len(found.kernels) == 16
    assert int(found.kernels, 16)
    assert found.notes == ()


def test_the_hash_tells_names_and_their_order() -> None:
    def hashed(*names: str, calls: int = 2) -> str | None:
        return busy(row(*names * calls), calls).kernels

    assert hashed("a", "b") == hashed("a", "b", calls=7)
    assert len({hashed("a", "b"), hashed("b", "a"), hashed("a"), hashed("a", "b", "b"), hashed("ab")}) == 5


def test_events_are_put_in_order_of_time() -> None:
    events = row("a", "b", "a", "b")
    assert busy(events[::-1], 2) == busy(events, 2)


def test_streams_that_overlap_are_busy_once() -> None:
    events = [
        Event("a", 0 * US, 10 * US),
        Event("b", 5 * US, 10 * US),  # half of it beside the first
        Event("c", 7 * US, 2 * US),  # all of it
        Event("d", 20 * US, 1 * US),
    ]
    assert busy(events, 1).device_time == pytest.approx(16 * US)


def test_a_lost_event_leaves_nothing_to_trust() -> None:
    found = busy(row(*["a", "b"] * 5)[:-1], 5)
    assert found == Busy(None, None, None, ("9 launches in 5 calls: not the same number in each",))


def test_calls_that_differ_have_no_hash() -> None:
    """The number of launches is the same by chance; time and launches are told."""
    found = busy(row("a", "b", "b", "a"), 2)
    assert (found.launches, found.kernels) == (2, None)
    assert found.device_time == pytest.approx(4 * US)
    assert found.notes == ("calls launch different kernels, or in another order",)


def test_a_profiler_that_saw_nothing_says_so() -> None:
    assert busy([], 5) == Busy(None, None, None, ("the profiler saw nothing on the GPU",))


# -- from the profiler to events ------------------------------------------------------------------


def of_profiler(name: str, kind: str, *, annotation: bool = False, **more: Any) -> Any:
    device = SimpleNamespace(name=kind)
    interval = SimpleNamespace(start=3.0, elapsed_us=lambda: 2.0)
    return SimpleNamespace(name=name, device_type=device, time_range=interval, is_user_annotation=annotation, **more)


def test_only_work_of_the_device_counts() -> None:
    events = [
        of_profiler("aten::mm", "CPU"),
        of_profiler("cudaLaunchKernel", "CPU"),
        of_profiler("gemm", "CUDA"),  # torch 2.11 does not tell the kind
        of_profiler("gelu", "CUDA", activity_type="kernel"),
        of_profiler("Memset", "CUDA", activity_type="gpu_memset"),
        of_profiler("ProfilerStep*", "CUDA", annotation=True),
        of_profiler("Stream Wait Event", "CUDA", activity_type="cuda_sync"),
    ]
    found = device_events(events)
    assert [event.name for event in found] == ["gemm", "gelu", "Memset"]
    assert found[0].start == pytest.approx(3 * US)
    assert found[0].duration == pytest.approx(2 * US)


def test_the_profiler_of_torch_has_these_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the profiled calls count, not those of the warm-up; on a CPU their operators stand for kernels."""
    seen: list[Any] = []
    monkeypatch.setattr(profiling, "device_events", lambda events: seen.extend(events) or device_events(seen))
    x = torch.ones(3)
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        torch.relu(x)

    assert profiling.recorded(call, 7, torch.device("cpu"), ProfilerActivity.CPU) == []
    assert len(calls) == 7 + 7
    adds = [event for event in seen if event.name == "aten::relu"]
    assert len(adds) == 7
    assert {event.device_type.name for event in seen} == {"CPU"}
    assert {event.is_user_annotation for event in adds} == {False}
    for event in adds:
        event.device_type = SimpleNamespace(name="CUDA")
    found = busy(device_events(seen), 7)
    assert found.launches == 1
    assert found.device_time is not None
    assert 0 < found.device_time < 0.1


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, 5), (0.01, 5), (0.002, 10), (0.001, 20), (1e-6, 50), (0.0, 50)])
def test_how_many_calls_are_profiled(seconds: float, calls: int) -> None:
    assert how_many(seconds) == calls


def test_on_a_cpu_nothing_is_called() -> None:
    def call() -> None:
        raise AssertionError

    assert profile(call, torch.device("cpu"), 1e-3) == Busy(None, None, None)
    assert peak_bytes(call, torch.device("cpu")) is None


# -- what is made of it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_time", "time", "expected"),
    [(0.79, 1.0, True), (0.81, 1.0, False), (0.8, 1.0, False), (1.2, 1.0, False), (None, 1.0, None), (1.0, 0.0, None)],
)
def test_launch_bound(device_time: float | None, time: float, expected: bool | None) -> None:
    assert launch_bound(device_time, time) is expected


def test_code_is_launch_bound_where_the_host_is_slower_than_the_gpu() -> None:
    """Though the GPU is busy most of the time: the time is that of the host."""
    assert launch_bound(2.15e-3, 2.4e-3, host=2.2e-3) is True
    assert launch_bound(2.15e-3, 2.4e-3, host=2.1e-3) is False
    assert launch_bound(None, 2.4e-3, host=2.2e-3) is None


def test_the_peak_is_what_a_call_holds_beyond_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def asked(name: str, answer: int | None = None) -> Any:
        return lambda *device: (order.append(f"{name}{[*map(str, device)]}"), answer)[1]

    for name, answer in {"synchronize": None, "reset_peak_memory_stats": None}.items():
        monkeypatch.setattr(torch.cuda, name, asked(name, answer))
    monkeypatch.setattr(torch.cuda, "memory_allocated", asked("memory_allocated", 100))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", asked("max_memory_allocated", 350))
    assert peak_bytes(asked("call"), torch.device("cuda:1")) == 250
    names = "synchronize", "reset_peak_memory_stats", "memory_allocated", "call", "synchronize", "max_memory_allocated"
    assert order == [f"{name}[]" if name == "call" else f"{name}['cuda:1']" for name in names]


@pytest.mark.cuda
def test_kernels_on_a_gpu() -> None:
    x = torch.rand(1024, 1024, device="cuda")
    found = profile(lambda: (x + 1).sin(), torch.device("cuda"), 1e-5)
    assert found.launches == 2
    assert found.device_time is not None
    assert 1e-6 < found.device_time < 1e-3
    assert found.notes == ()
    assert found.kernels == profile(lambda: (x + 2).sin(), torch.device("cuda"), 1e-5).kernels
    assert found.kernels != profile(lambda: (x + 1).cos(), torch.device("cuda"), 1e-5).kernels


@pytest.mark.cuda
def test_kernels_of_a_replayed_graph() -> None:
    compiled = torch.compile(lambda x: (x.sin() @ x).cos(), mode="reduce-overhead")
    x = torch.rand(256, 256, device="cuda")

    def replay() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x)

    for _ in range(3):
        replay()
    found = profile(replay, torch.device("cuda"), 1e-4)
    assert found.launches is not None
    assert 3 <= found.launches <= 8
    assert found.notes == ()


@pytest.mark.cuda
def test_the_peak_on_a_gpu() -> None:
    x = torch.rand(1 << 20, device="cuda")
    assert peak_bytes(lambda: x + 1, torch.device("cuda")) == 4 << 20
    assert peak_bytes(lambda: (x + 1) + 1, torch.device("cuda")) == 8 << 20
    assert peak_bytes(lambda: x.add_(1), torch.device("cuda")) == 0
