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
    #: In the order in which tensors were given.
    number: int


#: How many bytes after the first the second of two overlapping tensors starts, by the paths of an argument,
#: state or result, and of a result.
Relation = dict[tuple[str, str], int]


def relation(
    given: Iterable[tuple[str, torch.Tensor]], results: Iterable[tuple[str, torch.Tensor]]
) -> tuple[Relation, set[str]]:
    """Return which results share memory with what, and the paths of all tensors that could be looked at.

    Parts of one storage that do not meet can't show in one another, and are not told.
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
                storages[address].append(Span(path, *_reach(tensor), output, len(paths)))
    found: Relation = {}
    for spans in storages.values():
        spans.sort(key=lambda span: span.start)
        for number, one in enumerate(spans):
            for other in spans[number + 1 :]:
                if other.start >= one.stop:
                    break
                if one.path != other.path and (one.output or other.output):
                    # The result comes last; of two results the one that is named first comes first.
                    first, last = (
                        (one, other) if (one.output, one.number) < (other.output, other.number) else (other, one)
                    )
                    found[first.path, last.path] = last.start - first.start
    return found, paths


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    last: int = sum((length - 1) * stride for length, stride in zip(map(int, tensor.shape), map(int, tensor.stride())))
    return start, start + (last + 1) * size


def compare_relations(
    compiled: tuple[Relation, set[str]], eager: tuple[Relation, set[str]], call: int
) -> Iterator[Check]:
    """Checks that compiled's results share memory where eager's do, and nowhere else."""
    both = compiled[1] & eager[1]
    pairs = dict.fromkeys(pair for side in (eager[0], compiled[0]) for pair in side if both.issuperset(pair))
    for path, result in pairs:
        actual, expected = compiled[0].get((path, result)), eager[0].get((path, result))
        if expected is None:
            note = f"compiled's shares memory with {path}, eager's does not: changing one in place changes both"
            yield Check("alias", result, call, False, note=note)
        elif actual is None:
            note = f"eager's shares memory with {path}, compiled's is a copy: in-place changes don't reach the other"
            yield Check("alias", result, call, False, note=note)
        elif actual != expected:
            note = (
                f"starts {actual} bytes after {path} in the memory that they share, eager's {expected} bytes after it"
            )
            yield Check("alias", result, call, False, note=note)
        else:
            yield Check("alias", f"{result} and {path}", call, True)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, as those of an expanded one do."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))
