"""The same call in float64, and in other roundings: how far eager itself is from the truth, and is compiled further?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

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
    module nor its inputs need a copy. Gradients come in the dtype of what they belong to, rounded once.

    Args:
        draws: dtypes in which eager drew its random numbers, in order: other dtypes give other numbers.
    """

    supports_higher_order_operators = True

    def __init__(self, draws: Sequence[torch.dtype] = ()) -> None:
        super().__init__()
        self._draws = list(draws)
        #: Met an operator of a higher order, which does not tell what it does inside.
        self.higher_order = False
        #: The call itself took gradients: they are rounded once to what they belong to.
        self.took_gradients = False
        self._called = False
        self._functions: Any = _WideArguments()

    def __enter__(self) -> Any:
        # Recurrent modules compare dtypes of inputs and weights in Python.
        self._unchecked = mock.patch.object(torch.nn.RNNBase, "check_input", return_value=None)
        self._unchecked.start()
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._called = True  # gradients that are taken afterwards are ours
        super().__exit__(*error)
        self._functions.__exit__(*error)
        self._unchecked.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _torch.is_operator(func):
            self.higher_order = True
            return func(*_torch.watched_bodies(self, _torch.map_values(_widened, args)), **kwargs)
        if _torch.reinterprets_bits(func):
            raise NotImplementedError(f"{func} reads the bits of a tensor")
        if _torch.casts(func) and _torch.in_backward():
            # What is wide itself has wide gradients: this one leaves for a tensor that is not.
            self.took_gradients = self.took_gradients or not self._called
            return func(*args, **kwargs)
        if _torch.makes_views(func):
            # What is written through a view has to arrive in its base.
            return func(*args, **kwargs)
        if _torch.draws_random_numbers(func):
            return self._draw(func, args, kwargs)
        written = {id(tensor): tensor for tensor in _torch.written_arguments(func, args, kwargs)}
        wide: dict[int, torch.Tensor] = {}

        def widen(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dtype in _WIDER:
                if id(value) not in wide:
                    wide[id(value)] = value.to(_WIDER[value.dtype])
                return wide[id(value)]
            return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value

        dtypes = {tensor.dtype for tensor in _torch.tensors_in((args, kwargs))}
        out = func(*_torch.map_values(widen, args), **_torch.map_values(widen, kwargs))
        narrow_only = len(dtypes & _WIDER.keys()) == 1 and not dtypes & set(_WIDER.values())
        if narrow_only and not written and _torch.in_backward():
            # Autograd expects what it computes from a narrow gradient to be as narrow.
            (dtype,) = dtypes & _WIDER.keys()
            self.took_gradients = self.took_gradients or not self._called
            return _torch.map_values(lambda v: v.to(dtype) if _is_wide(v) else v, out)
        narrow = {id(wide[key]): tensor for key, tensor in written.items() if key in wide}
        for key, tensor in written.items():
            if key in wide:
                tensor.copy_(wide[key])
        # What is still narrow was made from nothing, in the default dtype.
        made = {id(t): t for t in _torch.tensors_in(out) if t.dtype in _WIDER and id(t) not in narrow}
        wider = {key: tensor.to(_WIDER[tensor.dtype]) for key, tensor in made.items()}
        return _torch.map_values(lambda value: narrow.get(id(value), wider.get(id(value), value)), out)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Draw random numbers in eager's dtype, and go on with them in float64."""
        drawn = self._draws.pop(0) if self._draws else None
        operands = [t for t in _torch.tensors_in((args, kwargs)) if t.dtype in _WIDER.values()]
        if drawn is None or not operands:
            return func(*args, **kwargs)
        narrow = {id(tensor): tensor.to(drawn) for tensor in operands}
        out = func(
            *_torch.map_values(lambda v: narrow.get(id(v), v), args),
            **_torch.map_values(lambda v: narrow.get(id(v), v), kwargs),
        )
        back = {id(narrow[id(tensor)]): tensor for tensor in operands}
        for tensor in _torch.written_arguments(func, args, kwargs):
            if id(tensor) in narrow:
                tensor.copy_(narrow[id(tensor)])
        if _torch.is_dropout(func):
            # The numbers that it lets through keep their precision.
            scale = 0.0 if args[1] >= 1 else 1 / (1 - args[1])
            return args[0] * out[1] * scale, out[1]

        def widen(value: Any) -> Any:
            if id(value) in back:
                return back[id(value)]
            narrow_result = isinstance(value, torch.Tensor) and value.dtype in _WIDER
            return value.to(_WIDER[value.dtype]) if narrow_result else value

        return _torch.map_values(widen, out)


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _WIDER.values()


class _WideArguments(TorchFunctionMode):
    """Widens the arguments of functions that compare dtypes before `Float64` sees an operation of theirs."""

    NAMES = frozenset(
        {
            *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
            *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
            *("prelu", "bilinear", "scaled_dot_product_attention", "linear", "embedding_bag"),
        }
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in self.NAMES:
            return func(*args, **kwargs)

        return func(*_torch.map_values(_widened, args), **_torch.map_values(_widened, kwargs))


def _widened(value: Any) -> Any:
    return value.to(_WIDER[value.dtype]) if isinstance(value, torch.Tensor) and value.dtype in _WIDER else value


class OtherRounding(_torch.dispatch_mode()):  # type: ignore[misc]
    """Lets the result of every floating-point operation round to a neighbour now and then, and adds in another order.

    So does code that is compiled otherwise or keeps more digits in between. Where results of eager
    move much under it, as where a ReLU switches, being further from float64 than eager proves nothing.
    Where TF32 is allowed, all factors of products are rounded to it: which kernels do so is up to heuristics.
    Small whole numbers stay: they are exact, and programs count on it. Equal values at equal places move
    equally, so that a forward pass that is repeated for a checkpoint agrees with the first.

    Args:
        seed: another seed moves other values; random numbers of the call are not touched.
    """

    supports_higher_order_operators = True
    #: Whole numbers up to this are exact in every dtype.
    EXACT = 16
    #: From this seed on float32 moves by so many steps: as far off compiled code honestly is in the middle of a deep
    #: model, where the switch of one ReLU shows in all gradients.
    LATE, FURTHER = 8, 4

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _torch.is_operator(func):
            return func(*_torch.watched_bodies(self, args), **kwargs)
        simpler = _torch.decomposition(func)
        if simpler is not None:
            with self:
                return simpler(*args, **kwargs)
        products = _torch.adds_products(func)
        out = self._added(func, self._rounded_factors(func, args) if products else args, kwargs)
        if _torch.draws_random_numbers(func) or _torch.copies(func):
            return out
        operands = _torch.tensors_in((args, kwargs))
        known = {_torch.storage_key(tensor) for tensor in operands}
        made = [t for t in _torch.tensors_in(out) if operands and _torch.storage_key(t) not in known]
        written = _torch.written_arguments(func, args, kwargs)
        for tensor in {id(t): t for t in (*made, *written)}.values():
            if tensor.dtype in BUDGETS and _torch.storage_key(tensor) is not None:
                with torch.no_grad():
                    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
                    self._jitter(real, all_alike=products)
        return out

    def _added(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do an operation; sums in another order than eager's."""
        out, kind = func(*args, **kwargs), _torch.sums(func)
        if kind == "convolution_backward":
            gradient, mask = args[0], args[-1]
            if mask[2] and gradient.dtype in BUDGETS:
                dims = [0, *range(2, gradient.dim())]
                out = (*out[:2], in_lanes(gradient, dims, self._seed).to(out[2].dtype).view_as(out[2]))
        elif kind is not None and args[0].dtype in BUDGETS and out.dtype in BUDGETS:
            given = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else kwargs.get("dim")
            dims = [dim % args[0].dim() for dim in given] if given else list(range(args[0].dim()))
            operand = args[0].to(kwargs.get("dtype") or args[0].dtype)
            total = in_lanes(operand, dims, self._seed)
            count = operand.numel() // max(total.numel(), 1)
            out = (total / count if kind == "mean" and count else total).to(out.dtype).view(out.shape)
        return out

    def _rounded_factors(self, func: Any, args: Any) -> Any:
        """Arguments of a sum of products, float32 moved by up to half a step of what kernels may round it to."""
        written = {id(tensor) for tensor in _torch.written_arguments(func, args, {})}

        def rounded(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or id(value) in written:
                return value
            step = _torch.factor_step(value.device.type, func)
            if not step or _torch.storage_key(value) is None:
                return value
            wide = value.detach().to(torch.float64)
            moved = (wide * (1 + step / 2 * self._noise(value))).to(value.dtype)
            return torch.where(torch.isfinite(moved), moved, value)

        kept = _torch.addend(func)
        return tuple(value if at == kept else _torch.map_values(rounded, value) for at, value in enumerate(args))

    def _jitter(self, tensor: torch.Tensor, *, all_alike: bool) -> None:
        # The errors of two roundings of one number differ by a step at most. What is left of a sum of products is off
        # by a step of what was added, which is about as large for all elements; 16 bits are added in 32.
        wide = tensor.to(torch.float64)
        added = all_alike and tensor.dtype == torch.float32
        step = wide.abs().clamp_min(_rms(wide[torch.isfinite(wide)])) if added else wide
        further = self.FURTHER if self._seed >= self.LATE and tensor.dtype == torch.float32 else 1
        moved = (wide + further * torch.finfo(tensor.dtype).eps * self._noise(tensor) * step).to(tensor.dtype)
        exact = (wide == wide.round()) & (wide.abs() <= self.EXACT)
        tensor.copy_(torch.where(exact | ~torch.isfinite(moved), tensor, moved))

    def _noise(self, tensor: torch.Tensor) -> torch.Tensor:
        """Numbers from -1 to 1, in float64, that follow from the bits of each element, its place and the seed."""
        integers = {16: torch.int16, 32: torch.int32}[torch.finfo(tensor.dtype).bits]
        bits = tensor.contiguous().view(integers).to(torch.int64)
        place = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
        # The mixing steps of splitmix64; products wrap around.
        mixed = bits * -7046029254386353131 + (place + self._seed * 1000003) * -4658895280553007687
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            mixed = (mixed ^ (mixed >> shift)) * factor
        return ((mixed ^ (mixed >> 31)) & (2**53 - 1)).to(torch.float64) / 2.0**52 - 1


#: Steps at most in which a lane of `in_lanes` adds: more take long, on a GPU much longer.
STEPS = {"cpu": 1024, "cuda": 32}


def in_lanes(tensor: torch.Tensor, dims: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Sum over dimensions as vector instructions do: in lanes, each of which adds one number after the other.

    Eager adds in pairs of pairs, whose errors are smaller. In 16 bits both add in 32.

    Args:
        tensor: of any shape and floating-point or complex dtype.
        dims: at least one, not negative; they are gone in the result.
        seed: gives another number of lanes.
    """
    kept = [dim for dim in range(tensor.dim()) if dim not in dims]
    shape = [tensor.shape[dim] for dim in kept]
    terms = tensor.detach().permute(*dims, *kept).reshape(-1, math.prod(shape))
    if terms.dtype in (torch.float16, torch.bfloat16):
        terms = terms.float()
    steps = STEPS.get(tensor.device.type, STEPS["cuda"])
    lanes = max((16, 8, 32, 24)[seed % 4], -(-len(terms) // steps))
    total = terms.new_zeros(lanes, terms.shape[1])
    for start in range(0, len(terms), lanes):
        part = terms[start : start + lanes]
        total[: len(part)] += part
    return total.sum(0).reshape(shape)


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
#: Eager further than this from float64, relatively: the reference says little.
WEAK = 0.05
#: A reference smaller than this part of eager's error is 0: zeros are right there.
NOTHING = 1e-2


@dataclass(frozen=True)
class Verdict:
    """Whether a difference is rounding. ``passed`` None: the reference can't tell."""

    passed: bool | None
    ratio: float | None
    note: str


def within_rounding(
    compiled: torch.Tensor,
    eager: torch.Tensor,
    reference: torch.Tensor,
    max_error_ratio: float | None = None,
    others: Sequence[torch.Tensor] = (),
    casts_are_free: bool = False,
) -> Verdict:
    """Judge a value by its distance from a float64 run, compared with eager's own distance.

    Args:
        compiled: value of any shape, in the dtype of the computation.
        eager: the same.
        reference: the same, from the run in float64.
        max_error_ratio: replaces the budget of the dtype for the root mean square.
        others: what eager gives in other roundings; the furthest of them counts as eager's distance.
        casts_are_free: the program asks for no particular precision in between, as under autocast: what
            agrees with float64 is right, however far eager is from it.
    """
    budget = BUDGETS.get(eager.dtype)
    if budget is None or reference.shape != eager.shape:
        return Verdict(None, None, "no float64 reference for this dtype or shape")
    wide = torch.complex128 if eager.is_complex() else torch.float64
    c, e, r = (tensor.detach().to(wide).flatten() for tensor in (compiled, eager, reference))
    # Where eager overflowed and compiled did not, compiled is held against the reference alone.
    rounded = reference.detach().to(eager.dtype).to(wide).flatten()
    same = torch.isfinite(c) | (c == e) | (c == rounded) | (torch.isnan(c) & torch.isnan(e))
    if not bool(same.all()) or bool((torch.isfinite(c) & ~torch.isfinite(r)).any()):
        return Verdict(False, None, "NaN or infinity on one side only, and the float64 run does not excuse it")
    finite = torch.isfinite(c)
    overflown = int((finite & ~torch.isfinite(e)).sum().item())
    honest = finite & torch.isfinite(e)
    if not bool(finite.any()):
        return Verdict(None, None, "no finite values")
    runs = [e, *(other.detach().to(wide).flatten() for other in others)]
    eps, least = torch.finfo(eager.dtype).eps, torch.finfo(eager.dtype).smallest_normal * torch.finfo(eager.dtype).eps
    size = _rms(r[finite])
    usable = [honest & torch.isfinite(run) for run in runs]
    errors = [run[where] - r[where] for run, where in zip(runs, usable) if bool(where.any())]
    errors = errors or [torch.zeros_like(r[:1])]  # of an eager that overflows everywhere nothing is excused
    eager_error = max(_rms(error) for error in errors)
    compiled_error = _rms(c[finite] - r[finite])
    near = eps * r[finite].abs() + least + eps * size
    agrees = compiled_error <= budget.rms * (eps * size + least)
    if casts_are_free and agrees and bool(((c - r)[finite].abs() <= budget.element * near).all()):
        rounding = eps * size + least
        name = str(eager.dtype).removeprefix("torch.")
        note = (
            f"within rounding: {compiled_error:.1e} vs eager's {eager_error:.1e} from float64, "
            f"{compiled_error / rounding:.1f} rounding steps of {name}"
        )
        return Verdict(True, compiled_error / (eager_error + eps * size + least), note)
    distance = eager_error / size if size else math.inf if eager_error > least else 0.0
    if distance > min(WEAK, 100 * max(eps, _arithmetic_eps(eager))):
        # Either the float64 run is another computation, or rounding makes up much of the value.
        moved = max((_rms((run - e)[where]) for run, where in zip(runs[1:], usable[1:])), default=0.0)
        better = casts_are_free and _nearer(c[finite], e[finite], r[finite], size)
        if _rms(errors[0]) > 10 * moved and not better:
            return Verdict(None, None, f"the float64 run gives something else (eager is {distance:.1e} away)")
    # Few elements in low precision: eager's own error may be small by luck.
    few = 1 if eps < 1e-4 or c.numel() >= 16 else 5 if c.numel() == 1 else 4
    allowed = few * budget.rms if max_error_ratio is None else max_error_ratio
    for_one = allowed * budget.element / budget.rms
    room = eager_error + eps * size + least
    ratio = compiled_error / room
    step = eps * r[finite].abs() + least
    largest = max(float(error.abs().max()) for error in errors)
    worst = float(((c - r)[finite].abs() / (largest + step + eps * size)).max())
    told = f"{compiled_error:.1e} vs eager's {eager_error:.1e} from float64, {ratio:.1f} times"
    told += " with rounding allowed for" + (", eager's operations rounding otherwise" if others else "")
    if overflown:
        told += f"; eager overflows in {overflown} elements, compiled does not"
    if WEAK < distance < math.inf:
        told += f" (weak: eager itself is {100 * distance:.0f} % off)"
    if ratio > allowed:
        return Verdict(False, ratio, f"beyond rounding: {told}, {allowed:g} allowed")
    if worst > for_one:
        return Verdict(
            False, ratio, f"beyond rounding in single elements: {worst:.1f} times, {for_one:g} allowed: {told}"
        )
    if allowed * room >= size > NOTHING * eager_error:
        return Verdict(None, ratio, f"can't be told from rounding, zeros would pass too: {told}")
    return Verdict(True, ratio, f"within rounding: {told}")


def _nearer(compiled: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor, size: float) -> bool:
    """Whether compiled agrees with the float64 run, and better than eager does: then that has computed the same."""
    ours, theirs = (compiled - reference).abs(), (eager - reference).abs()
    return _rms(ours) <= min(_rms(theirs), WEAK * size) and float(ours.max()) <= float(theirs.max())


def _arithmetic_eps(tensor: torch.Tensor) -> float:
    """One rounding step of the arithmetic on a tensor's device: TF32 keeps 10 bits of float32's 23."""
    single = tensor.dtype in (torch.float32, torch.complex64)
    return _torch.factor_step(tensor.device.type) if single else 0.0


def _rms(tensor: torch.Tensor) -> float:
    return math.sqrt((tensor.abs() ** 2).mean().item()) if tensor.numel() else 0.0
