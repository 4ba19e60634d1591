"""Cloning of arguments and putting back of state, so that eager and compiled start from the same."""

from __future__ import annotations

import collections
import copy
import functools
import random
import sys
import types
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pytest_dynamo import _torch
from pytest_dynamo._torch import storage_key


#: Objects that hold tensors and are changed in place by a call. They are never cloned: what the eager
#: run changes in them is put back afterwards (`State`).
STATEFUL = (torch.nn.Module, torch.optim.Optimizer)
#: What a copy of an argument or result shares with it.
_SHARED = (*STATEFUL, types.FunctionType)
_FOREIGN = frozenset(
    {
        "_pytest",
        "pytest_dynamo",
        "asyncio",
        "concurrent",
        "logging",
        "multiprocessing",
        "pytest",
        "threading",
        "unittest",
    }
)
#: What every module has in ``__dict__`` besides its own attributes: hooks, parameters, buffers, modules.
OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
CONTAINERS = (dict, list, set, collections.deque)
#: Values that only hold others.
_COMPOUND = (tuple, frozenset, *CONTAINERS)
_ATOMS = (int, float, complex, str, bytes, bool, type(None), type, torch.dtype, torch.device)


def children(value: Any) -> Iterator[Any]:
    """Objects directly inside a container, an object with attributes, a partial or a bound method."""
    return (child for _, child in named_children(value))


def named_children(value: Any) -> Iterator[tuple[str, Any]]:
    """`children`, each with what leads to it: ``["key"]``, ``[0]`` or ``.name``."""
    if isinstance(value, dict):
        yield from (("'s key", key) for key in value)
        yield from ((f"[{_word(key)}]", held) for key, held in value.items())
    elif isinstance(value, (list, tuple, collections.deque)):
        names = getattr(value, "_fields", None)
        yield from ((f".{names[n]}" if names else f"[{n}]", held) for n, held in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (("'s element", held) for held in value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif not isinstance(value, (types.FunctionType, types.ModuleType)) and not is_foreign(value):
        yield from ((f".{name}", held) for name, held in attributes(value).items())


def slots(value: Any) -> list[str]:
    """Names of the slots that the classes of an object declare."""
    declared = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for given in declared for name in ((given,) if isinstance(given, str) else given)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def attributes(value: Any) -> dict[str, Any]:
    """What an object holds in its ``__dict__`` and in slots."""
    in_slots = {name: getattr(value, name) for name in slots(value) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **in_slots}


def _word(key: object) -> str:
    text = repr(key) if isinstance(key, (str, int, float, bool, tuple, type(None))) else type(key).__name__
    return text if len(text) <= 80 else text[:77] + "..."


def named(value: Any, path: str, seen: dict[int, Any] | None = None) -> Iterator[tuple[str, Any]]:
    """`walk` with the path to everything; a tensor that is there twice comes twice."""
    seen = {} if seen is None else seen
    if isinstance(value, _ATOMS) or (id(value) in seen and not isinstance(value, torch.Tensor)):
        return
    seen[id(value)] = value
    yield path, value
    if not isinstance(value, (torch.Tensor, torch.Generator, *STATEFUL)):
        for step, child in named_children(value):
            yield from named(child, path + step, seen)


def named_tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a result or argument, with their paths."""
    return ((where, held) for where, held in named(value, path) if isinstance(held, torch.Tensor))


def is_foreign(value: Any) -> bool:
    """Whether an object belongs to a framework whose insides are none of a model's state."""
    home = type(value).__module__
    return home.partition(".")[0] in _FOREIGN or home.startswith("torch._")


def walk(value: Any, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """Yield ``value`` and everything inside it once; does not look into modules and optimizers."""
    seen = {} if seen is None else seen
    if isinstance(value, _ATOMS) or id(value) in seen:
        return
    seen[id(value)] = value
    yield value
    if not isinstance(value, (torch.Tensor, torch.Generator, *STATEFUL)):
        for child in children(value):
            yield from walk(child, seen)


def owners(fn: Callable[..., Any], arguments: Any) -> list[Any]:
    """What a call can change and is not cloned for it.

    Modules and optimizers in ``fn``, in what it closes over, in globals that it names and in arguments; so
    for what the modules in turn call, which are the forward functions and hooks of all their submodules;
    tensors, generators of random numbers, objects and containers there, but for those in arguments;
    variables of enclosing functions themselves.
    """
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    called = getattr(type(fn), "forward" if isinstance(fn, torch.nn.Module) else "__call__", None)
    todo: list[tuple[Any, bool]] = [(arguments, False), (called, False), (fn, True)]
    while todo:
        start, belongs = todo.pop()
        for value in walk(start, seen):
            if isinstance(value, STATEFUL) or (is_random(value) and start is not arguments):
                found[id(value)] = value
                if isinstance(value, torch.nn.Module):
                    own = (vars(module).items() for module in value.modules())
                    todo += [(held, True) for items in own for name, held in items if name not in OF_EVERY_MODULE]
                    todo += [(called, True) for module in value.modules() for called in _called(module)]
                    classes = {type(module) for module in value.modules()}
                    todo += [(held, True) for cls in classes for held in _members(cls, {"forward"})]
            elif isinstance(value, torch.Tensor) and start is not arguments:
                found[id(value)] = value
            elif isinstance(value, types.FunctionType):
                cells = zip(value.__code__.co_freevars, value.__closure__ or ())
                filled = [Variable(name, cell) for name, cell in cells if is_filled(cell)]
                found |= {id(variable.cell): variable for variable in filled}
                todo += [(variable.cell.cell_contents, True) for variable in filled]
                names = set(_names(value.__code__))
                used = [value.__globals__[name] for name in names if name in value.__globals__]
                todo += [(held, True) for held in used if not isinstance(held, types.FunctionType) or _is_users(held)]
                homes = [*used, *(variable.cell.cell_contents for variable in filled)]
                todo += [(held, True) for home in homes for held in _members(home, names)]
                todo += [(value.__defaults__, True), (value.__kwdefaults__, True)]
            elif isinstance(value, types.MethodType):
                todo.append((value.__func__, False))
                todo += [(held, True) for held in _members(value.__self__, {value.__func__.__name__})]
            elif belongs and (isinstance(value, CONTAINERS) or has_attributes(value)):
                found[id(value)] = value
    return list(found.values())


@dataclass(frozen=True)
class Variable:
    """A variable of an enclosing function, which a function may give another value (``nonlocal``)."""

    name: str
    cell: types.CellType


def is_random(value: Any) -> bool:
    """Whether a value is a generator of random numbers of torch, Python or NumPy."""
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)  # which has no state
    return type(value).__module__.startswith("numpy.random") and hasattr(value, "bytes")


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that a function looks up, also in the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _members(home: Any, names: set[str]) -> list[Any]:
    """What a user's class, an instance of one, or a Python module holds by these names, or by those its methods use.

    Of classes functions and what is not a function; attributes of instances are found elsewhere.
    """
    if isinstance(home, types.ModuleType):
        root = home.__name__.partition(".")[0]
        return [] if _is_library(root) else [vars(home)[name] for name in names if name in vars(home)]
    if isinstance(home, (*_ATOMS[:-3], torch.Tensor, types.FunctionType)):
        return []
    cls = home if isinstance(home, type) else type(home)
    spaces = [vars(base) for base in cls.__mro__ if not _is_library(str(base.__module__).partition(".")[0])]
    found, todo, seen = [], [*names, "__call__"], set()
    while todo and spaces:
        name = todo.pop()
        held = next((space[name] for space in spaces if name in space), None)
        if name in seen or held is None:
            continue
        seen.add(name)
        if isinstance(held, (staticmethod, classmethod)):
            held = held.__func__
        elif isinstance(held, property):
            held = held.fget
        found.append(held)
        if isinstance(held, types.FunctionType):
            todo += _names(held.__code__)
    return found


def _is_library(root: str) -> bool:
    """Whether a top-level module is Python's, torch's, NumPy's or a framework's own."""
    return root in ("torch", "numpy") or root in _FOREIGN or root in sys.stdlib_module_names


def _called(module: torch.nn.Module) -> Iterator[Any]:
    """What a call of a module runs: its forward function and hooks."""
    return (found for found in (type(module).forward, *_torch.hooks(module)) if _is_users(found))


def _is_users(called: Any) -> bool:
    """Whether a function, or what is called like one, may use state of the user's: all may but torch's own."""
    return str(getattr(called, "__module__", "")).partition(".")[0] not in ("torch", "pytest_dynamo")


def has_attributes(value: Any) -> bool:
    """Whether an object keeps state in attributes of its own."""
    return (
        not is_foreign(value)
        and not isinstance(value, (torch.Tensor, torch.Generator, types.MethodType, functools.partial))
        and not isinstance(value, (type, types.ModuleType))
        and (isinstance(getattr(value, "__dict__", None), dict) or (bool(slots(value)) and not _of_a_library(value)))
    )


def _of_a_library(value: Any) -> bool:
    """Whether an object is of Python's or torch's own."""
    home = type(value).__module__.partition(".")[0]
    return home == "torch" or home in sys.stdlib_module_names


def is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


def state_tensors(owner: Any) -> Iterator[torch.Tensor]:
    """Parameters and buffers of a module; of an optimizer, parameters and state; a tensor itself."""
    if isinstance(owner, torch.Tensor):
        yield owner
    elif isinstance(owner, torch.nn.Module):
        yield from owner.parameters()
        yield from owner.buffers()
    elif isinstance(owner, torch.optim.Optimizer):
        for group in owner.param_groups:
            yield from group["params"]
        for state in owner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def gpus(values: Any, owners: list[Any]) -> list[torch.device]:
    """The GPUs on which tensors of a call are, among its arguments, its results or in its state; by their numbers."""
    tensors = [value for value in walk(values) if isinstance(value, torch.Tensor)]
    tensors += [tensor for owner in owners for tensor in state_tensors(owner)]
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=lambda device: device.index)


def named_arguments(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in positional and keyword arguments, with their paths."""
    return ((where, held) for where, held in in_arguments(arguments) if isinstance(held, torch.Tensor))


def in_arguments(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Everything in positional and keyword arguments, with its path."""
    args, kwargs = arguments
    seen: dict[int, Any] = {}
    for path, value in [*((f"args[{n}]", v) for n, v in enumerate(args)), *kwargs.items()]:
        yield from named(value, path, seen)


# -- arguments ------------------------------------------------------------------------------------


class _NonLeaf(torch.autograd.Function):
    """Gives a tensor over cloned storage a ``grad_fn``, as the argument had one."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def clone(tree: Any, keep: list[Any]) -> tuple[Any, list[str]]:
    """Copy a tree of arguments; return it, and what could not be copied faithfully.

    Tensors keep strides, offsets, ``requires_grad``, class and attributes; views of one storage stay
    views of one storage; containers and objects are copied around them, also the objects of bound methods.
    Modules and optimizers, objects in ``keep``, methods of them or of a library, and tensors that share
    storage with one of ``keep``, stay themselves.
    """
    memo: dict[int, Any] = {}
    notes: list[str] = []
    storages: dict[int, torch.UntypedStorage] = {}
    kept = {s for owner in keep for t in state_tensors(owner) if (s := storage_key(t)) is not None}
    keeping = {id(owner) for owner in keep}
    found = list(walk(tree))
    for value in found:
        if isinstance(value, torch.Tensor):
            if storage_key(value) in kept:
                memo[id(value)] = value
            else:
                memo[id(value)] = clone_tensor(value, storages)
                if value._backward_hooks:
                    notes.append("hooks of an argument tensor were not copied to its clone")
        elif isinstance(value, torch.Generator):
            memo[id(value)] = value.clone_state()
        elif isinstance(value, types.GeneratorType):
            raise TypeError(
                "an argument is or holds a generator: its values exist only once, so eager and compiled can't both "
                "have them; give a list"
            )
        elif isinstance(value, types.MethodType):
            owner = value.__self__
            if is_foreign(owner) or _of_a_library(owner) or id(owner) in keeping:
                memo[id(value)] = value
        elif id(value) in keeping or isinstance(value, _SHARED) or _unchangeable(value):
            memo[id(value)] = value
    # Each attempt on a copy: one that fails leaves half-filled containers in its memo.
    try:
        return copy.deepcopy(tree, dict(memo)), notes
    except Exception as error:
        notes.append(f"an argument can't be copied and is shared by both runs: {type(error).__name__}: {error}")
    # First only what refuses by itself is shared (locks, files, objects of C), then all objects.
    for refuses in (_refuses_copying, lambda value: not isinstance(value, _COMPOUND)):
        for value in found:
            if id(value) not in memo and refuses(value):
                memo[id(value)] = value
        try:
            return copy.deepcopy(tree, dict(memo)), notes
        except Exception:  # told above
            continue
    return tree, notes


def _unchangeable(value: Any) -> bool:
    """Whether an object holds nothing that a call could change: a sentinel, whose identity may matter."""
    if isinstance(value, types.ModuleType) or type(value) is object:
        return True
    if isinstance(value, _COMPOUND) or any(True for _ in children(value)):
        return False
    # Only objects of Python: what one of C keeps inside (an array, an iterator) can't be seen.
    return isinstance(getattr(value, "__dict__", None), dict)


def _refuses_copying(value: Any) -> bool:
    if isinstance(value, _COMPOUND) or any(True for _ in children(value)):
        return False
    try:
        copy.deepcopy(value)
    except Exception:
        return True
    return False


def clone_tensor(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Copy a tensor; ``storages`` maps storages that were copied before, to keep views views."""
    with torch.inference_mode(tensor.is_inference()):
        key = storage_key(tensor)
        if key is None:
            with torch.no_grad():
                copied = tensor.detach().clone()
            return copied.requires_grad_(tensor.requires_grad)
        if key not in storages:
            storages[key] = tensor.untyped_storage().clone()

        def make() -> torch.Tensor:
            view: torch.Tensor = _torch.view_of(storages[key], tensor)
            return view

        if isinstance(tensor, torch.nn.Parameter):
            new: torch.Tensor = torch.nn.Parameter(make(), requires_grad=tensor.requires_grad)
        elif tensor.requires_grad and not tensor.is_leaf:
            with torch.enable_grad():
                leaf = torch.zeros((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)
                new = _NonLeaf.apply(leaf.expand(tensor.shape), make)
        else:
            new = make().requires_grad_(tensor.requires_grad)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            new = new.as_subclass(type(tensor))
        if tensor.is_leaf and tensor.grad is not None:
            new.grad = tensor.grad.detach().clone()
        vars(new).update(vars(tensor))
        return new


def detach(tree: Any) -> Any:
    """Copy a result so that later calls, and CUDA graphs, can't overwrite it. Shares no storage."""
    memo: dict[int, Any] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for value in walk(tree):
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                copied = clone_tensor(value.detach(), storages)
            if isinstance(value, torch.nn.Parameter):
                memo[id(value)] = torch.nn.Parameter(copied, value.requires_grad)
            else:
                memo[id(value)] = copied.requires_grad_(value.requires_grad)
        elif isinstance(value, (*STATEFUL, torch.Generator, types.FunctionType, types.MethodType)) or _unchangeable(
            value
        ):
            memo[id(value)] = value
    try:
        return copy.deepcopy(tree, memo)
    except Exception:
        return tree  # objects that refuse copying are compared as they are
