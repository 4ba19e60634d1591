"""Results and gradients of earlier calls that the caller still holds, and whether a later call changed them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pytest_dynamo import _torch
from pytest_dynamo import inputs
from pytest_dynamo.state import fingerprint


@dataclass(frozen=True)
class Result:
    """A tensor that an earlier call returned."""

    name: str
    call: int
    path: str
    tensor: weakref.ref[torch.Tensor]
    #: Of its storage.
    key: int | None

    @property
    def held(self) -> torch.Tensor | None:
        """The tensor, if anybody but the CUDA graph that made it still has it."""
        if self.tensor() is None or (self.key is not None and _torch.held_by_cudagraphs_only(self.key)):
            return None
        return self.tensor()


class Kept:
    """Watches results of earlier calls while they are alive, without keeping them alive."""

    #: How many of the latest results are watched, and how many bytes of them: each call reads them twice.
    LIMIT = 1000
    BYTES = 1 << 28

    def __init__(self) -> None:
        self._results: list[Result] = []
        #: What is said of results beyond the limits, if there were any before the latest call.
        self.unwatched: str | None = None

    def add(self, name: str, call: int, value: Any) -> None:
        """Watch the tensors of a result that is about to be returned to the caller."""
        for path, tensor in inputs.named_tensors(value, "out"):
            key = _torch.storage_key(tensor)
            if key is not None and tensor.numel():
                self._results.append(Result(name, call, path, weakref.ref(tensor), key))

    def before(self) -> list[tuple[Result, torch.Tensor]]:
        """What the results hold now, in short, the earliest first."""
        self._results = [result for result in self._results if result.held is not None]
        found: list[tuple[Result, torch.Tensor]] = []
        contents: dict[int | None, torch.Tensor | None] = {}
        room, self.unwatched = self.BYTES, None
        for result in reversed(self._results):
            tensor = result.tensor()
            if tensor is None:
                continue
            if result.key not in contents:
                room -= tensor.untyped_storage().nbytes()
            if room < 0 or len(found) == self.LIMIT:
                self.unwatched = (
                    "whether calls overwrite results of earlier ones: of those that the test holds, "
                    f"the latest {self.LIMIT} in {self.BYTES >> 20} MiB are watched"
                )
                break
            if result.key not in contents:
                contents[result.key] = _content(tensor)
            content = contents[result.key]
            if content is not None:
                found.append((result, content))
        return found[::-1]

    @staticmethod
    def changed(before: list[tuple[Result, torch.Tensor]]) -> Iterator[tuple[Result, torch.Tensor]]:
        """Results that hold something else than `before`, or may not be looked at any more."""
        same: dict[int | None, bool] = {}
        for result, held in before:
            tensor = result.tensor()
            if tensor is None:
                continue
            if result.key not in same:
                now = _content(tensor)
                same[result.key] = now is not None and torch.equal(held, now)
            if not same[result.key]:
                yield result, tensor


@dataclass(frozen=True)
class Gradient:
    """A gradient that backward left in memory of a CUDA graph."""

    path: str
    parameter: weakref.ref[torch.Tensor]
    tensor: weakref.ref[torch.Tensor]
    content: torch.Tensor | None

    @property
    def left(self) -> torch.Tensor | None:
        """The gradient, if it still is that of its parameter."""
        parameter, tensor = self.parameter(), self.tensor()
        return tensor if parameter is not None and tensor is not None and parameter.grad is tensor else None


class LeftGradients:
    """Watches gradients in memory of CUDA graphs. Later calls overwrite them, which is harmless if nobody reads them.

    Backward of a recorded graph leaves its own memory in ``.grad``. Who drops that before the next
    backward, as ``zero_grad()`` does, never notices; who adds to it or clips it gets a wrong sum.
    """

    def __init__(self) -> None:
        #: Overwritten, with the call that did it and the version that the tensor had then.
        self._overwritten: list[tuple[Gradient, int, int]] = []
        #: Those that were changed in place afterwards, with the call that had overwritten them.
        self.used: dict[str, int] = {}

    def find(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[Gradient]:
        """Gradients of tensors that lie in memory of a CUDA graph at present."""
        self.look()
        grads = [(path, tensor, tensor.grad) for path, tensor in named if tensor.is_leaf]
        grads = [found for found in grads if found[2] is not None]
        pools = private_pools() if grads else []
        return [
            Gradient(f"{path}.grad", weakref.ref(tensor), weakref.ref(grad), _content(grad))
            for path, tensor, grad in grads
            if grad is not None and _lies_in(grad, pools)
        ]

    def overwritten(self, before: list[Gradient], call: int) -> None:
        """Find out which gradients ``call`` has overwritten."""
        for gradient in before:
            tensor = gradient.left
            if tensor is None:
                continue
            now = _content(tensor)
            if gradient.content is None or now is None or not torch.equal(gradient.content, now):
                self._overwritten.append((gradient, call, tensor._version))

    def look(self) -> None:
        """Find out which of the overwritten gradients were used since."""
        for gradient, call, version in self._overwritten:
            tensor = gradient.left
            if tensor is not None and tensor._version != version:
                self.used.setdefault(gradient.path, call)
        self._overwritten.clear()


def private_pools() -> list[tuple[int, int]]:
    """Addresses at which memory of CUDA graphs begins and ends."""
    segments = torch.cuda.memory_snapshot()
    return [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in segments
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    ]


def _lies_in(tensor: torch.Tensor, pools: list[tuple[int, int]]) -> bool:
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # of a CUDA graph that was replayed: torch forbids to look at it
        return True
    return any(begin <= address < end for begin, end in pools)


def _content(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a tensor holds, in short; None: torch forbids to look at it."""
    try:
        return fingerprint(tensor.untyped_storage())
    except RuntimeError:
        return None
