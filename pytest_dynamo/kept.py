"""Results of earlier calls that the caller still holds, and whether a later call changed them."""

from __future__ import annotations

import weakref
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


class Kept:
    """Watches results of earlier calls while they are alive, without keeping them alive."""

    #: How many of the latest results are watched, and how many bytes of them: each call reads them twice.
    LIMIT = 100
    BYTES = 1 << 26

    def __init__(self) -> None:
        self._results: list[Result] = []

    def add(self, name: str, call: int, value: Any) -> None:
        """Watch the tensors of a result that is about to be returned to the caller."""
        for path, tensor in inputs.named_tensors(value, "out"):
            if _torch.storage_key(tensor) is not None and tensor.numel():
                self._results.append(Result(name, call, path, weakref.ref(tensor)))
        room, watched = self.BYTES, []
        for result in reversed(self._results[-self.LIMIT :]):
            held = result.tensor()
            if held is None:
                continue
            room -= held.untyped_storage().nbytes()
            if room >= 0:
                watched.append(result)
        self._results = watched[::-1]

    def before(self) -> list[tuple[Result, torch.Tensor]]:
        """What the results hold now, in short."""
        found = []
        for result in self._results:
            tensor = result.tensor()
            if tensor is not None:
                try:
                    found.append((result, fingerprint(tensor.untyped_storage())))
                except RuntimeError:  # of a CUDA graph that was replayed: torch forbids to look at it
                    continue
        return found

    @staticmethod
    def changed(before: list[tuple[Result, torch.Tensor]]) -> Iterator[tuple[Result, torch.Tensor]]:
        """Results that hold something else than `before`, or may not be looked at any more."""
        for result, held in before:
            tensor = result.tensor()
            if tensor is None:
                continue
            try:
                same = torch.equal(held, fingerprint(tensor.untyped_storage()))
            except RuntimeError:
                same = False
            if not same:
                yield result, tensor
