"""The clocks of CPU and GPU, and fixed work that tells the state of the machine."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from pytest_dynamo.measurement import HOST_CANARY


class CpuClock:
    """Times by ``perf_counter``; caches stay as they are."""

    queues = False

    def __init__(self) -> None:
        self._began = self._sum = 0.0

    def now(self) -> float:
        return perf_counter()

    def flush(self) -> None:
        pass

    def start(self) -> None:
        self._began = perf_counter()

    def stop(self) -> None:
        self._sum += perf_counter() - self._began

    def elapsed(self) -> float:
        found, self._sum = self._sum, 0.0
        return found


#: Launches of the fixed work that is bound by the host.
LAUNCHES = 30
#: The buffer that makes the L2 cache cold is so many times as large as that: on an H200 about the 256 MB that
#: ``triton.testing.do_bench`` takes.
TIMES_L2 = 4


class CudaClock:
    """Times by pairs of events on the current stream of a GPU."""

    queues = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._used = 0
        size = TIMES_L2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def now(self) -> float:
        return perf_counter()

    def flush(self) -> None:
        # Nobody waits for it: it runs while the host launches the first kernels, outside of the events.
        self._buffer.zero_()

    def start(self) -> None:
        if self._used == len(self._pairs):
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for event in pair:
                self._record(event)  # torch makes an event when it is recorded for the first time
            self._pairs.append(pair)
        self._record(self._pairs[self._used][0])

    def stop(self) -> None:
        self._record(self._pairs[self._used][1])
        self._used += 1

    def elapsed(self) -> float:
        torch.cuda.synchronize(self._device)
        used, self._used = self._used, 0
        milliseconds: float = sum(first.elapsed_time(last) for first, last in self._pairs[:used])
        return milliseconds / 1000

    def _record(self, event: torch.cuda.Event) -> None:
        event.record(torch.cuda.current_stream(self._device))


def clock_of(device: torch.device) -> CpuClock | CudaClock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def canaries(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Fixed small work, by name, which tells the state of the machine: of its cores, of its memory and of its host.

    ``launches``, beside a GPU only, is bound by the host.
    """
    on_gpu = device.type == "cuda"
    side, dtype, size = (2048, torch.bfloat16, 64 << 20) if on_gpu else (256, torch.float32, 1 << 20)
    # Not the global generator: tests may have seeded it.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.rand(side, side, dtype=dtype, device=device, generator=generator) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found: dict[str, Callable[[], Any]] = {
        "matmul": lambda: torch.mm(left, right, out=product),
        "copy": lambda: target.copy_(source),
    }
    if on_gpu:
        tiny = torch.zeros(8, device=device)

        def launches() -> None:
            for _ in range(LAUNCHES):
                tiny.add_(1)

        found[HOST_CANARY] = launches
    return found
