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
from typing import Any

import torch

from pytest_dynamo import _torch
from pytest_dynamo._torch import storage_key


#: Objects that hold tensors and are changed in place by a call. They are never cloned: what the eager
#: run changes in them is put back afterwards (`State`).
_STATEFUL = (torch.nn.Module, torch.optim.Optimizer)
_FOREIGN = frozenset(
    {"_pytest", "asyncio", "concurrent", "logging", "multiprocessing", "pytest", "threading", "unittest"}
)
_CONTAINERS = (dict, list, set, collections.deque)
#: Values that only hold others.
_COMPOUND = (tuple, frozenset, *_CONTAINERS)
_ATOMS = (int, float, complex, str, bytes, bool, type(None), type, torch.dtype, torch.device)


def children(value: Any) -> Iterator[Any]:
    """Objects directly inside a container, an object with attributes, a partial or a bound method."""
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        yield from value
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif not isinstance(value, (types.FunctionType, types.ModuleType)) and not is_foreign(value):
        yield from getattr(value, "__dict__", {}).values()
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield getattr(value, name)


def is_foreign(value: Any) -> bool:
    """Whether an object belongs to a framework whose insides are none of a model's state."""
    return type(value).__module__.partition(".")[0] in _FOREIGN


def walk(value: Any, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """Yield ``value`` and everything inside it once; does not look into modules and optimizers."""
    seen = {} if seen is None else seen
    if isinstance(value, _ATOMS) or id(value) in seen:
        return
    seen[id(value)] = value
    yield value
    if not isinstance(value, (torch.Tensor, torch.Generator, *_STATEFUL)):
        for child in children(value):
            yield from walk(child, seen)


def owners(fn: Callable[..., Any], arguments: Any) -> list[Any]:
    """What a call can change and is not cloned for it.

    Modules and optimizers in ``fn``, in what it closes over, and in arguments; objects and containers
    that belong to ``fn``: the instance of a bound method, a callable object, a closure's list.
    """
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    called = getattr(type(fn), "forward" if isinstance(fn, torch.nn.Module) else "__call__", None)
    todo: list[tuple[Any, bool]] = [(arguments, False), (called, False), (fn, True)]
    while todo:
        start, belongs = todo.pop()
        for value in walk(start, seen):
            if isinstance(value, _STATEFUL) or (isinstance(value, torch.Tensor) and start is not arguments):
                found[id(value)] = value
            elif isinstance(value, types.FunctionType):
                cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
                todo += [(held, isinstance(held, _CONTAINERS)) for held in cells]
                used = (value.__globals__.get(name) for name in _names(value.__code__))
                todo += [(held, False) for held in used if isinstance(held, _STATEFUL) or _is_users(held)]
                todo += [(value.__defaults__, True), (value.__kwdefaults__, True)]
            elif isinstance(value, types.MethodType):
                todo.append((value.__func__, False))
            elif belongs and (isinstance(value, _CONTAINERS) or _has_attributes(value)):
                found[id(value)] = value
    return list(found.values())


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that a function looks up, also in the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_users(value: Any) -> bool:
    """Whether a function may use a module of the user's: all may but torch's own."""
    return isinstance(value, types.FunctionType) and str(value.__module__).partition(".")[0] != "torch"


def _has_attributes(value: Any) -> bool:
    """Whether an object keeps state in attributes of its own."""
    return (
        not is_foreign(value)
        and isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, (torch.Tensor, torch.Generator, types.MethodType, functools.partial))
    )


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


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
    views of one storage; containers and objects are copied around them. Modules and optimizers, and
    tensors that share storage with one of ``keep``, stay themselves.
    """
    memo: dict[int, Any] = {}
    notes: list[str] = []
    storages: dict[int, torch.UntypedStorage] = {}
    kept = {s for owner in keep for t in state_tensors(owner) if (s := storage_key(t)) is not None}
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
        elif isinstance(value, (*_STATEFUL, types.FunctionType, types.MethodType)) or _unchangeable(value):
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
        elif isinstance(value, (*_STATEFUL, torch.Generator, types.FunctionType, types.MethodType)):
            memo[id(value)] = value
    try:
        return copy.deepcopy(tree, memo)
    except Exception:
        return tree  # objects that refuse copying are compared as they are


# -- state ----------------------------------------------------------------------------------------


class CopyBeforeWrite(_torch.dispatch_mode()):  # type: ignore[misc]
    """Keeps a copy of every storage from before the first write to it.

    Only for eager runs: a dispatch mode changes what is compiled.
    """

    #: Functions such as flex_attention are operators of a higher order; they run as they are.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        #: Storages made during the run. Only their addresses: a storage from before the run is alive
        #: all the time, so no other can have its address.
        self._born: set[int] = set()
        self._off: dict[int, torch.UntypedStorage] = {}
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _torch.written_arguments(func, args, kwargs):
            key = storage_key(tensor)
            if key is not None and key not in self._born and key not in self.before:
                storage = tensor.untyped_storage()
                self.before[key] = (storage, storage.clone())
        known = {storage_key(tensor) for tensor in _torch.tensors_in((args, kwargs))}
        out = func(*args, **kwargs)
        for tensor in _torch.tensors_in(out):
            key = storage_key(tensor)
            if key is not None and key not in known and key not in self.before:
                self._born.add(key)
        return out

    def restore(self) -> None:
        """Put all changed storages back, without touching autograd's version counters."""
        self.put({key: old for key, (_, old) in self.before.items()})

    def split_off(self, clones: Any, owners: list[Any]) -> dict[int, torch.UntypedStorage]:
        """Take cloned arguments out of what is restored: they show what was changed.

        Returns what their storages held before, by storage. Arguments that share storage with state
        of ``owners`` were not cloned, and stay.
        """
        kept = {storage_key(tensor) for owner in owners for tensor in state_tensors(owner)}
        off = {}
        for value in walk(clones):
            if isinstance(value, torch.Tensor):
                key = storage_key(value)
                if key is not None and key not in kept and key in self.before:
                    storage, off[key] = self.before.pop(key)
                    self._off[key] = storage
        return off

    def swap(self, contents: dict[int, torch.UntypedStorage]) -> None:
        """Exchange what storages that were split off hold with ``contents``."""
        for key, content in contents.items():
            held = self._off[key].clone()
            _fill(self._off[key], content)
            contents[key] = held

    def current(self) -> dict[int, torch.UntypedStorage]:
        """Copy what the storages hold now."""
        return {key: storage.clone() for key, (storage, _) in self.before.items()}

    def put(self, contents: dict[int, torch.UntypedStorage]) -> None:
        for key, content in contents.items():
            _fill(self.before[key][0], content)


def _fill(storage: torch.UntypedStorage, content: torch.UntypedStorage) -> None:
    if storage.nbytes() != content.nbytes():
        storage.resize_(content.nbytes())
    storage.copy_(content)


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


def named_state(owners: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of modules, with the names that reports use."""
    for owner in owners:
        if isinstance(owner, torch.nn.Module):
            yield from ((f"parameter {name}", tensor) for name, tensor in owner.named_parameters())
            yield from ((f"buffer {name}", tensor) for name, tensor in owner.named_buffers())


def holders(tree: Any) -> list[Any]:
    """Containers and objects in a tree of arguments that a call can change."""
    return [
        value
        for value in walk(tree)
        if isinstance(value, _CONTAINERS) or (_has_attributes(value) and not _stateful(value))
    ]


def _stateful(value: Any) -> bool:
    return isinstance(value, (*_STATEFUL, types.FunctionType))


class State:
    """Python-side state of owners: attributes, content of containers, gradients, optimizer state."""

    def __init__(self, owners: list[Any]) -> None:
        self.owners = owners
        self._attributes: list[tuple[Any, type, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._optimizers: list[tuple[Any, dict[Any, Any], list[dict[str, Any]]]] = []
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor | None, bool, torch.Tensor]] = {}
        self._lazy: list[tuple[torch.Tensor, type]] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._held: list[torch.Tensor] = []
        seen: dict[int, Any] = {}
        modules = {id(m): m for o in owners if isinstance(o, torch.nn.Module) for m in o.modules()}
        for module in modules.values():
            self._keep(module, seen)
        for owner in owners:
            if isinstance(owner, torch.optim.Optimizer):
                state = {key: dict(value) for key, value in owner.state.items()}
                self._optimizers.append((owner, state, [dict(group) for group in owner.param_groups]))
            elif not isinstance(owner, (torch.nn.Module, torch.Tensor)):
                self._keep(owner, seen)
            for tensor in state_tensors(owner):
                if torch.nn.parameter.is_lazy(tensor):
                    self._lazy.append((tensor, type(tensor)))
                elif tensor.is_leaf:
                    self._tensors[id(tensor)] = (tensor, tensor.grad, tensor.requires_grad, tensor.detach())

    def _keep(self, owner: Any, seen: dict[int, Any]) -> None:
        """Keep what ``owner`` holds, and what containers and objects in it hold, at any depth."""
        if isinstance(owner, _STATEFUL):
            self._attributes.append((owner, type(owner), dict(vars(owner))))
        for value in walk(list(vars(owner).values()) if isinstance(owner, _STATEFUL) else owner, seen):
            if isinstance(value, torch.Tensor):
                self._held.append(value)
            if isinstance(value, _CONTAINERS):
                self._containers.append((value, copy.copy(value)))
            elif isinstance(value, torch.Generator):
                self._generators.append((value, value.get_state()))
            elif not isinstance(value, (*_STATEFUL, types.FunctionType)) and _has_attributes(value):
                self._attributes.append((value, type(value), dict(vars(value))))

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that were there when this was made: of owners, of objects in them, gradients."""
        own = [tensor for owner in self.owners for tensor in state_tensors(owner)]
        grads = [grad for _, grad, _, _ in self._tensors.values() if grad is not None]
        return [*own, *self._held, *grads]

    def restore(self) -> None:
        for container, content in self._containers:
            _refill(container, content)
        for owner, cls, values in self._attributes:
            if type(owner) is not cls:
                owner.__class__ = cls
            own = vars(owner)
            if own.keys() != values.keys() or any(own[k] is not values[k] for k in values):
                own.clear()
                own.update(values)
        for optimizer, state, groups in self._optimizers:
            if list(optimizer.state) != list(state):
                # Dicts that are still right stay the same objects: Dynamo guards on them.
                kept = {key: optimizer.state.get(key, {}) for key in state}
                optimizer.state.clear()
                optimizer.state.update(kept)
            for key, content in state.items():
                _refill(optimizer.state[key], content)
            for group, content in zip(optimizer.param_groups, groups):
                _refill(group, content)
        for generator, position in self._generators:
            generator.set_state(position)
        for tensor, kind in self._lazy:
            if type(tensor) is not kind:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.__class__ = kind
        for tensor, grad, requires_grad, data in self._tensors.values():
            if _torch.geometry(tensor) != _torch.geometry(data):
                tensor.data = data  # somebody gave it other data, by `.data =` or `set_`
            if tensor.grad is not grad:
                tensor.grad = grad
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)


def _refill(container: Any, content: Any) -> None:
    """Give a dict, list, set or deque its former content, in place and only if it differs."""
    if isinstance(container, dict):
        if list(container) != list(content) or any(container[k] is not content[k] for k in content):
            container.clear()
            container.update(content)
    elif isinstance(container, set):
        if container != content:
            container.clear()
            container.update(content)
    elif len(container) != len(content) or any(a is not b for a, b in zip(container, content)):
        container.clear()
        container.extend(content)


# -- random numbers -------------------------------------------------------------------------------


class Random:
    """State of all random number generators that a call can draw from."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for number, state in enumerate(self._cuda):
            torch.cuda.set_rng_state(state, number)

    def changed(self, since: Random) -> tuple[str, ...]:
        """Names of the generators whose state differs from ``since``."""
        names = []
        if self._python != since._python:
            names.append("random")
        if self._numpy is not None and since._numpy is not None and not _same_numpy(self._numpy, since._numpy):
            names.append("numpy.random")
        if not torch.equal(self._cpu, since._cpu):
            names.append("torch")
        # If CUDA was initialised in between there is nothing to compare with.
        if any(not torch.equal(a, b) for a, b in zip(self._cuda, since._cuda)):
            names.append("torch.cuda")
        return tuple(names)


def _same_numpy(a: Any, b: Any) -> bool:
    return all((x == y).all() if hasattr(x, "all") and hasattr(x, "shape") else x == y for x, y in zip(a, b))
