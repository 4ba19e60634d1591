"""The clocks of CPU and GPU, and fixed work that tells the state of the machine."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from pytest_dynamo.timing import Elapsed


class CpuClock:
    """Times by ``perf_counter``; caches stay as they are."""

    def __init__(self) -> None:
        self._began = 0.0

    def now(self) -> float:
        return perf_counter()

    def settle(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def start(self) -> None:
        self._began = perf_counter()

    def stop(self) -> Elapsed:
        return Elapsed(perf_counter() - self._began)


class CudaClock:
    """Times by a pair of events on the current stream of the current device, and by the host around the same calls."""

    def __init__(self) -> None:
        self._first = torch.cuda.Event(enable_timing=True)
        self._last = torch.cuda.Event(enable_timing=True)
        size = torch.cuda.get_device_properties().L2_cache_size
        self._buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._began = 0.0
        # torch makes an event when it is recorded for the first time: not in a sample.
        self._first.record()
        self._last.record()
        self.settle()

    def now(self) -> float:
        return perf_counter()

    def settle(self) -> None:
        torch.cuda.synchronize()

    def flush(self) -> None:
        # Nobody waits for it: it runs while the host launches the first kernels, outside of the events.
        self._buffer.zero_()

    def start(self) -> None:
        self._began = perf_counter()
        self._first.record()

    def stop(self) -> Elapsed:
        self._last.record()
        torch.cuda.synchronize()
        host = perf_counter() - self._began
        return Elapsed(self._first.elapsed_time(self._last) / 1000, host)  # milliseconds


def canaries(device: str) -> dict[str, Callable[[], Any]]:
    """Fixed small work, by name, which tells the state of the machine: of its cores and of its memory."""
    on_gpu = torch.device(device).type == "cuda"
    side, dtype, size = (2048, torch.bfloat16, 64 << 20) if on_gpu else (256, torch.float32, 1 << 20)
    # Not the global generator: tests may have seeded it.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.rand(side, side, dtype=dtype, device=device, generator=generator) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"matmul": lambda: torch.mm(left, right, out=product), "copy": lambda: target.copy_(source)}
