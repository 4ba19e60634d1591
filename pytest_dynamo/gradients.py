"""Gradients of a call for one random cotangent. Nobody's ``.grad``, graph or hooks are touched."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextlib import contextmanager
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch

from pytest_dynamo import _torch
from pytest_dynamo import inputs
from pytest_dynamo.record import Check


@dataclass(frozen=True)
class Leaf:
    """What is differentiated with respect to."""

    path: str
    tensor: torch.Tensor
    #: The tensor, or where the graph of a non-leaf began before the call: the call may change it in place.
    target: Any


@dataclass(frozen=True)
class Output:
    """What is differentiated; the cotangent follows from it."""

    path: str
    shape: torch.Size
    dtype: torch.dtype


@dataclass
class Gradients:
    """Gradients by path of the leaf; None: none reached it."""

    values: dict[str, torch.Tensor | None] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    #: What differentiating raised, and differentiating the gradients.
    error: Exception | None = None
    second_error: Exception | None = None
    #: Outputs that require grad and can't be given a cotangent, with the reason.
    left_out: list[str] = field(default_factory=list)


class CallersHooks:
    """The caller's hooks on what autograd saves, as those of a checkpoint: they are for the caller's own run alone."""

    def __init__(self) -> None:
        self._hooks = _torch.saved_tensors_hooks()

    def set_aside(self) -> AbstractContextManager[Any]:
        """What is saved in here does not reach the hooks."""
        if self._hooks is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)

    def in_force(self) -> AbstractContextManager[Any]:
        """Here the hooks are in force again."""
        return nullcontext() if self._hooks is None else torch.autograd.graph.saved_tensors_hooks(*self._hooks)

    def raised(self, error: Exception | None) -> bool:
        """Whether an exception is that of a hook: a checkpoint ends a call early once it has what it needs."""
        codes = [_torch.code_of(hook) for hook in self._hooks or ()]
        trace = error.__traceback__ if error is not None else None
        return any(frame.f_code in codes for frame, _ in traceback.walk_tb(trace))


def leaves(arguments: tuple[tuple[Any, ...], dict[str, Any]], state: Iterable[tuple[str, torch.Tensor]]) -> list[Leaf]:
    """Tensors of arguments and state that require grad, before the call, each once."""
    found: dict[int, Leaf] = {}
    for path, tensor in [*inputs.named_arguments(arguments), *state]:
        if tensor.requires_grad and id(tensor) not in found and not torch.nn.parameter.is_lazy(tensor):
            target = tensor if tensor.is_leaf else torch.autograd.graph.get_gradient_edge(tensor)
            found[id(tensor)] = Leaf(path.removeprefix("parameter "), tensor, target)
    return list(found.values())


def differentiable(
    value: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]], before: Iterable[Leaf]
) -> tuple[list[tuple[str, torch.Tensor]], list[str]]:
    """What a call made that can be differentiated: outputs, and arguments that it changed in place.

    Returns tensors by path, in the order of the result, and what was left out.
    """
    untouched = {id(leaf.tensor) for leaf in before if leaf.target is leaf.tensor or _same_graph(leaf)}
    outputs = [(path, tensor) for path, tensor in inputs.named_tensors(value, "out") if tensor.requires_grad]
    outputs += [
        (path, t) for path, t in inputs.named_arguments(arguments) if t.requires_grad and id(t) not in untouched
    ]
    usable = [(path, tensor) for path, tensor in outputs if _takes_cotangent(tensor)]
    left_out = [f"{path} ({type(t).__name__}, {t.layout})" for path, t in outputs if not _takes_cotangent(t)]
    return usable, left_out


def differentiate(
    value: Any,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    before: list[Leaf],
    *,
    like: Gradients | None = None,
    twice: bool = False,
) -> Gradients:
    """Gradients of everything a call made, jointly, with a random cotangent that depends on shapes alone.

    Args:
        value: what the call returned.
        arguments: what it was given, as it left them.
        before: `leaves` of the same arguments, from before the call.
        like: eager's gradients, whose dtypes the cotangents have; other outputs than eager's give none.
        twice: take the gradients of the gradients too, again for random cotangents.
    """
    tensors, left_out = differentiable(value, arguments, before)
    found = Gradients(left_out=left_out)
    found.outputs = [Output(path, tensor.shape, tensor.dtype) for path, tensor in tensors]
    if like is not None and [(o.path, o.shape) for o in like.outputs] != [(o.path, o.shape) for o in found.outputs]:
        return found
    drawn = found.outputs if like is None else like.outputs
    if not tensors or not before:
        return found
    with _torch.without_modes():
        cotangents = [
            cotangent(number, output).to(tensor.device, tensor.dtype)
            for number, (output, (_, tensor)) in enumerate(zip(drawn, tensors))
        ]
    targets = [leaf.target for leaf in before]
    try:
        with _without_hooks([leaf.tensor for leaf in before]):
            values = torch.autograd.grad(
                [tensor for _, tensor in tensors], targets, cotangents, allow_unused=True, create_graph=twice
            )
    except Exception as error:
        found.error = error
        return found
    found.values = {leaf.path: grad for leaf, grad in zip(before, values)}
    if twice:
        _differentiate_again(found, before)
    return found


def _differentiate_again(found: Gradients, before: list[Leaf]) -> None:
    """Add gradients of the gradients, and let go of the graph."""
    first = [(path, grad) for path, grad in found.values.items() if grad is not None and grad.requires_grad]
    found.values = {path: None if grad is None else grad.detach() for path, grad in found.values.items()}
    if not first:
        return
    with _torch.without_modes():
        cotangents = [
            cotangent(1000 + number, Output(path, grad.shape, grad.dtype)).to(grad.device)
            for number, (path, grad) in enumerate(first)
        ]
    try:
        with _without_hooks([leaf.tensor for leaf in before]):
            values = torch.autograd.grad(
                [grad for _, grad in first], [leaf.target for leaf in before], cotangents, allow_unused=True
            )
    except Exception as error:
        found.second_error = error
        return
    found.values |= {f"{leaf.path} (second derivative)": grad for leaf, grad in zip(before, values)}


def cotangent(number: int, output: Output) -> torch.Tensor:
    """A standard normal tensor of the shape and dtype of output ``number``, the same at every call."""
    generator = torch.Generator("cpu").manual_seed(0x5EED + number)
    dtype = torch.complex64 if output.dtype.is_complex else torch.float32
    return torch.randn(output.shape, generator=generator, dtype=dtype, device="cpu").to(output.dtype)


def _same_graph(leaf: Leaf) -> bool:
    """Whether a non-leaf argument still ends the graph that it ended before the call."""
    return bool(leaf.tensor.grad_fn is leaf.target.node)


def _takes_cotangent(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not _torch.is_wrapper(tensor)


@contextmanager
def _without_hooks(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Keep the user's hooks on leaves from being called by a gradient that is not theirs."""
    kept = [(hooks, dict(hooks)) for t in tensors if t.is_leaf and (hooks := t._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


def compare_gradients(found: Gradients, eager: Gradients, call: int, compare: Any) -> Iterator[Check]:
    """Checks of compiled's gradients against eager's.

    Args:
        found: compiled's.
        eager: eager's.
        call: number of the call within the test.
        compare: ``compare(actual, expected, path)`` gives the checks of two tensors.
    """
    if found.error is not None:
        yield Check("grad", "backward", call, False, note=f"compiled's raised {_line(found.error)}")
        return
    if found.second_error is not None:
        yield Check("grad", "second derivatives", call, None, note=_line(found.second_error))
    for path, expected in eager.values.items():
        if path not in found.values and found.second_error is not None:
            continue
        where, actual = f"grad of {path}", found.values.get(path)
        if expected is None and actual is None:
            continue
        if expected is None or actual is None:
            present = actual if expected is None else expected
            assert present is not None
            has = "a gradient" if present.layout is not torch.strided or bool(present.count_nonzero()) else "zeros"
            # Asked for single outputs AOTAutograd gives zeros where eager gives none; it never loses any.
            sides = (has, "none") if expected is None else ("none", has)
            passed = expected is None and has == "zeros"
            yield Check("grad", where, call, passed, note=f"compiled has {sides[0]}, eager {sides[1]}")
            continue
        yield from compare(actual, expected, where)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
