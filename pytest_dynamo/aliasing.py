"""Which results of a call share memory with its arguments, with the state it uses, and with each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pytest_dynamo import _torch
from pytest_dynamo.record import Check


@dataclass(frozen=True)
class Span:
    """Bytes of a storage that a tensor reaches."""

    path: str
    start: int
    stop: int
    output: bool


@dataclass(frozen=True)
class Sharing:
    """How two tensors share a storage: whether what they reach overlaps, and how far apart they start in bytes."""

    overlap: bool
    offset: int


#: By the paths of an argument, state or result, and of a result.
Relation = dict[tuple[str, str], Sharing]


def relation(
    given: Iterable[tuple[str, torch.Tensor]], results: Iterable[tuple[str, torch.Tensor]]
) -> tuple[Relation, set[str]]:
    """Return which results share memory with what, and the paths of all tensors that could be looked at.

    Empty tensors and those without a storage of their own (sparse, nested, wrappers) claim nothing.
    Take it right after the call: later the storages may be others.
    """
    storages: dict[int, list[Span]] = defaultdict(list)
    paths = set()
    for output, tensors in ((False, given), (True, results)):
        for path, tensor in tensors:
            if tensor.numel() == 0 or _torch.storage_key(tensor) is None:
                continue
            address = tensor.untyped_storage().data_ptr()
            if address:
                paths.add(path)
                storages[address].append(Span(path, *_reach(tensor), output))
    found: Relation = {}
    for spans in storages.values():
        for number, one in enumerate(spans):
            for other in spans[number + 1 :]:
                if other.output and one.path != other.path:
                    overlap = one.start < other.stop and other.start < one.stop
                    found[one.path, other.path] = Sharing(overlap, other.start - one.start)
    return found, paths


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    last: int = sum((length - 1) * stride for length, stride in zip(map(int, tensor.shape), map(int, tensor.stride())))
    return start, start + (last + 1) * size


def compare_relations(
    compiled: tuple[Relation, set[str]], eager: tuple[Relation, set[str]], call: int
) -> Iterator[Check]:
    """Checks that compiled's results share memory where eager's do, and nowhere else.

    Only overlaps count: parts of one storage that do not meet can't show in one another.
    """
    both = compiled[1] & eager[1]
    pairs = dict.fromkeys(pair for side in (eager[0], compiled[0]) for pair in side if both.issuperset(pair))
    for pair in pairs:
        actual, expected = compiled[0].get(pair), eager[0].get(pair)
        meets = [sharing is not None and sharing.overlap for sharing in (actual, expected)]
        if meets == [False, False]:
            continue
        path, result = pair
        if meets == [True, False]:
            note = f"compiled's shares memory with {path}, eager's does not: changing one in place changes both"
            yield Check("alias", result, call, False, note=note)
        elif meets == [False, True]:
            note = f"eager's shares memory with {path}, compiled's is a copy: in-place changes don't reach the other"
            yield Check("alias", result, call, False, note=note)
        elif actual is not None and expected is not None and actual.offset != expected.offset:
            note = f"shares memory with {path} from byte {actual.offset} on, eager's from byte {expected.offset} on"
            yield Check("alias", result, call, False, note=note)
        else:
            yield Check("alias", f"{result} and {path}", call, True)
