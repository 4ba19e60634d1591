"""The same call in float64: how far eager itself is from the truth, and whether compiled is further."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from pytest_dynamo import _torch


#: Dtypes whose operations are done in float64 or complex128 instead.
_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


class Float64(_torch.dispatch_mode()):  # type: ignore[misc]
    """Does every operation in float64: operands are widened, dtypes that are asked for are replaced.

    What an operation writes to keeps its dtype: it is computed wide and rounded once. So neither the
    module nor its inputs need a copy. Random numbers are drawn in their own dtype.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _torch.is_operator(func):
            return func(*args, **kwargs)
        if _torch.reinterprets_bits(func):
            raise NotImplementedError(f"{func} reads the bits of a tensor")
        random = _torch.draws_random_numbers(func)
        written = {id(tensor): tensor for tensor in _torch.written_arguments(func, args, kwargs)}
        wide: dict[int, torch.Tensor] = {}

        def widen(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dtype in _WIDER:
                if id(value) not in wide:
                    wide[id(value)] = value.to(_WIDER[value.dtype])
                return wide[id(value)]
            if isinstance(value, torch.dtype) and not random:
                return _WIDER.get(value, value)
            return value

        if random and not any(t.dtype in _WIDER.values() for t in _torch.tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        out = func(*_torch.map_values(widen, args), **_torch.map_values(widen, kwargs))
        narrow = {id(wide[key]): tensor for key, tensor in written.items() if key in wide}
        for key, tensor in written.items():
            if key in wide:
                tensor.copy_(wide[key])
        # What is still narrow was made from nothing, in the default dtype.
        made = (
            {id(t): t for t in _torch.tensors_in(out) if t.dtype in _WIDER and id(t) not in narrow}
            if not random
            else {}
        )
        wider = {key: tensor.to(_WIDER[tensor.dtype]) for key, tensor in made.items()}
        return _torch.map_values(lambda value: narrow.get(id(value), wider.get(id(value), value)), out)


@dataclass(frozen=True)
class Budget:
    """How much further than eager compiled may be from the float64 result."""

    #: Of the root mean squares, with a floor of one rounding step of the dtype.
    rms: float
    #: Of the largest single errors, with a floor of one step of each element.
    element: float


#: Measured on torchvision models, forward and training: honest rounding in float32 reaches 6.3 and 7.9
#: (running statistics), faults begin at 170; in bfloat16 it reaches 1.1 and 2.2.
BUDGETS = {
    torch.float32: Budget(10.0, 16.0),
    torch.complex64: Budget(10.0, 16.0),
    torch.bfloat16: Budget(2.0, 3.0),
    torch.float16: Budget(2.0, 3.0),
    torch.complex32: Budget(2.0, 3.0),
}
#: Eager further than this from float64: the reference says little.
WEAK = 0.05


@dataclass(frozen=True)
class Verdict:
    """Whether a difference is rounding. ``passed`` None: the reference can't tell."""

    passed: bool | None
    ratio: float | None
    note: str


def within_rounding(
    compiled: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor, max_error_ratio: float | None = None
) -> Verdict:
    """Judge a value by its distance from a float64 run, compared with eager's own distance.

    Args:
        compiled: value of any shape, in the dtype of the computation.
        eager: the same.
        reference: the same, from the run in float64.
        max_error_ratio: replaces the budget of the dtype for the root mean square.
    """
    budget = BUDGETS.get(eager.dtype)
    if budget is None or reference.shape != eager.shape:
        return Verdict(None, None, "no float64 reference for this dtype or shape")
    wide = torch.complex128 if eager.is_complex() else torch.float64
    c, e, r = (tensor.detach().to(wide).flatten() for tensor in (compiled, eager, reference))
    same = (torch.isfinite(c) & torch.isfinite(e) & torch.isfinite(r)) | (c == e) | (torch.isnan(c) & torch.isnan(e))
    if not bool(same.all()):
        return Verdict(False, None, "NaN or infinity where eager has none")
    finite = torch.isfinite(c) & torch.isfinite(r)
    c, e, r = c[finite], e[finite], r[finite]
    if not c.numel():
        return Verdict(None, None, "no finite values")
    eps = torch.finfo(eager.dtype).eps
    size = _rms(r)
    eager_error, compiled_error = _rms(e - r), _rms(c - r)
    distance = eager_error / size if size else 0.0
    if distance > 100 * max(eps, _arithmetic_eps(eager)):
        return Verdict(None, None, f"the float64 run gives something else (eager is {distance:.1e} away)")
    # Few elements in low precision: eager's own error may be small by luck.
    few = 1 if eps < 1e-4 or c.numel() >= 16 else 5 if c.numel() == 1 else 4
    allowed = few * budget.rms if max_error_ratio is None else max_error_ratio
    room = eager_error + eps * size
    ratio = 0.0 if not compiled_error else compiled_error / room if room else math.inf
    step = eps * r.abs()
    single = few * budget.element * ((e - r).abs().max() + step + eps * size)
    excess = bool(((c - r).abs() > single).any())
    told = (
        f"{compiled_error:.1e} vs eager's {eager_error:.1e} from float64, {ratio:.1f} times with rounding allowed for"
    )
    if distance > WEAK:
        told += f" (weak: eager itself is {100 * distance:.0f} % off)"
    if ratio > allowed:
        return Verdict(False, ratio, f"beyond rounding: {told}, {allowed:g} allowed")
    if excess:
        return Verdict(False, ratio, f"beyond rounding in single elements: {told}")
    return Verdict(True, ratio, f"within rounding: {told}")


def _arithmetic_eps(tensor: torch.Tensor) -> float:
    """One rounding step of the arithmetic on a tensor's device: TF32 keeps 10 bits of float32's 23."""
    tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return 2.0**-10 if tensor.is_cuda and tf32 and tensor.dtype in (torch.float32, torch.complex64) else 0.0


def _rms(tensor: torch.Tensor) -> float:
    return math.sqrt((tensor.abs() ** 2).mean().item())
