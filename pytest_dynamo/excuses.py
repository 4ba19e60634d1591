"""Differences that are no faults, or are faults however small: rounding of whole numbers and sizes, dropped changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from pytest_dynamo.parity import DTYPE_TOLERANCES
from pytest_dynamo.parity import Pairs
from pytest_dynamo.record import Check


#: How the note of a check starts where compiled left a tensor as it was before the call.
_DROPPED = "eager changed it, by "


def unless_dropped(check: Check, actual: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> Check:
    """Fail a check where eager changed a tensor by more than rounding and compiled left it as it was before."""
    if not _equal(actual, before) or not _beyond_rounding(before, expected):
        return check
    note = f"{_DROPPED}{check.max_abs:.2g} at most, and compiled did not"
    return replace(check, passed=False, note=note)


def apart(check: Check, pairs: Pairs) -> float:
    """How far the two sides of a failed check are apart: a root mean square, infinite for what has no distance."""
    if check.max_abs is None or check.path not in pairs:
        return math.inf
    actual, expected = (tensor.detach() for tensor in pairs[check.path])
    plain = all(t.layout is torch.strided and not (t.is_quantized or t.is_nested) for t in (actual, expected))
    if not plain or actual.shape != expected.shape:
        return math.inf
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.to(wide), expected.to(wide)
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(actual), finite):
        return math.inf
    off = (actual - expected)[finite]
    return math.sqrt(float((off.abs() ** 2).mean())) if off.numel() else math.inf


def is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)


def _equal(actual: torch.Tensor, before: torch.Tensor) -> bool:
    facts = ("layout", "device", "shape", "dtype")
    return all(getattr(actual, fact) == getattr(before, fact) for fact in facts) and torch.equal(actual, before)


def _beyond_rounding(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether some element of a tensor moved by two rounding steps of its dtype or more."""
    if after.dtype not in DTYPE_TOLERANCES or not bool(torch.isfinite(after).all()):
        return False
    wide = torch.promote_types(after.dtype, torch.float32)
    moved = (after.to(wide) - before.to(wide)).abs()
    return bool((moved > torch.finfo(after.dtype).eps * after.to(wide).abs()).any())


def is_dropped(check: Check) -> bool:
    return (check.note or "").startswith(_DROPPED)


def unless_made_up(check: Check, before: torch.Tensor, eager: torch.Tensor, others: Sequence[torch.Tensor]) -> Check:
    """Excuse compiled, which left a tensor as it was, where another rounding of eager is nearer to that than eager."""
    wide = torch.promote_types(eager.dtype, torch.float64)
    b, e = before.detach().to(wide), eager.detach().to(wide)
    for other in (other.to(wide) for other in others if other.shape == eager.shape):
        if float((b - other).abs().max()) < float((e - other).abs().max()):
            return replace(check, passed=True, note="within rounding: in other roundings eager hardly changes it")
    return check


#: Of the whole numbers that differ, this part may lie where no other rounding moved eager's as far.
_UNSEEN = 0.05


def follows_from_rounding(
    check: Check, compiled: torch.Tensor, eager: torch.Tensor, others: Sequence[torch.Tensor]
) -> Check:
    """Excuse whole numbers that differ where eager's own do in other roundings, and no more than they do."""
    c, e = compiled.to(torch.float64), eager.to(torch.float64)
    off = (c - e).abs()
    reached = torch.zeros_like(off)
    for other in others:
        if other.shape == eager.shape:
            reached = torch.maximum(reached, (other.to(torch.float64) - e).abs())
    count, unseen = int((off > 0).sum().item()), int((off > reached).sum().item())
    if unseen > _UNSEEN * count or float(off.max()) > float(reached.max()):
        return check
    note = f"within rounding: {count} of {eager.numel()} elements differ, as eager's own do in other roundings"
    return replace(check, passed=True, note=note)


def size_follows_from_rounding(
    check: Check, compiled: torch.Tensor, eager: torch.Tensor, others: Sequence[torch.Tensor]
) -> Check:
    """Withdraw judgement of a size that is no further from eager's than its own in other roundings."""
    if compiled.is_nested or eager.is_nested:
        return check
    sizes = [tuple(tensor.shape) for tensor in (eager, *others) if tensor.dim() == compiled.dim() == eager.dim()]
    reached = [set(dim) for dim in zip(*sizes)]
    if not sizes or not all(min(dim) <= size <= max(dim) for dim, size in zip(reached, compiled.shape)):
        return check
    found = f"compiled {tuple(compiled.shape)}, eager {tuple(eager.shape)}"
    other = next(size for size in sizes if size != sizes[0])
    note = f"its size follows from rounding: {found}, and {other} where its operations round otherwise"
    return replace(check, passed=None, note=note)
