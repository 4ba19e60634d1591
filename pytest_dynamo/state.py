"""State that a call can change: kept before it, put back after it. Random numbers belong to it."""

from __future__ import annotations

import collections
import copy
import random
import sys
import types
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import torch

from pytest_dynamo import _torch
from pytest_dynamo._torch import storage_key
from pytest_dynamo.inputs import CONTAINERS
from pytest_dynamo.inputs import OF_EVERY_MODULE
from pytest_dynamo.inputs import STATEFUL
from pytest_dynamo.inputs import Variable
from pytest_dynamo.inputs import attributes
from pytest_dynamo.inputs import has_attributes
from pytest_dynamo.inputs import is_filled
from pytest_dynamo.inputs import is_random
from pytest_dynamo.inputs import named
from pytest_dynamo.inputs import slots
from pytest_dynamo.inputs import state_tensors
from pytest_dynamo.inputs import walk


class CopyBeforeWrite(_torch.dispatch_mode()):  # type: ignore[misc]
    """Keeps a copy of every storage from before the first write to it.

    Only for eager runs: a dispatch mode changes what is compiled.
    """

    #: Such as flex_attention: the functions that they are given show here what they do.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        #: Storages made during the run. Only their addresses: a storage from before the run is alive
        #: all the time, so no other can have its address.
        self._born: set[int] = set()
        self._off: dict[int, torch.UntypedStorage] = {}
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        #: Dtypes in which random numbers were drawn, in order.
        self.draws: list[torch.dtype] = []
        #: Dtypes of tensors that became Python numbers.
        self.numbers: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _torch.is_operator(func):
            return func(*_torch.watched_bodies(self, args), **kwargs)
        for tensor in _torch.written_arguments(func, args, kwargs):
            key = storage_key(tensor)
            if key is not None and key not in self._born and key not in self.before:
                storage = tensor.untyped_storage()
                self.before[key] = (storage, storage.clone())
        known = {storage_key(tensor) for tensor in _torch.tensors_in((args, kwargs))}
        out = func(*args, **kwargs)
        if _torch.makes_number(func):
            self.numbers.add(args[0].dtype)
        if _torch.draws_random_numbers(func):
            self.draws.append(_torch.tensors_in(out)[0].dtype)
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
        tensors = [value for value in walk(clones) if isinstance(value, torch.Tensor)]
        grads = [grad for value in tensors if value.is_leaf and (grad := value.grad) is not None]
        for tensor in (*tensors, *grads):
            key = storage_key(tensor)
            if key is not None and key not in kept and key in self.before:
                storage, off[key] = self.before.pop(key)
                self._off[key] = storage
        return off

    def swap(self, contents: dict[int, torch.UntypedStorage]) -> None:
        """Exchange what storages that were split off hold with ``contents``."""
        for key, content in contents.items():
            held = self._off[key].clone()
            fill(self._off[key], content)
            contents[key] = held

    def current(self) -> dict[int, torch.UntypedStorage]:
        """Copy what the storages hold now."""
        return {key: storage.clone() for key, (storage, _) in self.before.items()}

    def put(self, contents: dict[int, torch.UntypedStorage]) -> None:
        for key, content in contents.items():
            fill(self.before[key][0], content)


def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy in the memory of the host, which is no burden for a GPU."""
    found: torch.UntypedStorage = storage.clone() if storage.device.type == "cpu" else storage.cpu()
    return found


def fill(storage: torch.UntypedStorage, content: torch.UntypedStorage) -> None:
    """Let a storage hold what another one holds, without touching autograd's version counters."""
    if storage.nbytes() != content.nbytes():
        storage.resize_(content.nbytes())
    storage.copy_(content)


def named_state(owners: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of modules and tensors that a function holds, with the names that reports use."""
    for prefix, owner in named_owners(owners):
        if isinstance(owner, torch.nn.Module):
            yield from ((f"parameter {prefix}{name}", tensor) for name, tensor in owner.named_parameters())
            yield from ((f"buffer {prefix}{name}", tensor) for name, tensor in owner.named_buffers())
        elif isinstance(owner, torch.Tensor):
            yield f"{prefix.rstrip('.')} that the function holds", owner


def named_owners(owners: list[Any]) -> Iterator[tuple[str, Any]]:
    """Owners with what stands before the names in them: nothing for the only module, else class and number."""
    modules = [owner for owner in owners if isinstance(owner, torch.nn.Module)]
    counts: collections.Counter[str] = collections.Counter()
    for owner in owners:
        name = "tensor" if isinstance(owner, torch.Tensor) else type(owner).__name__
        counts[name] += 1
        number = str(counts[name]) if counts[name] > 1 else ""
        yield "" if len(modules) == 1 and owner is modules[0] else f"{name}{number}.", owner


def holders(tree: Any) -> list[Any]:
    """Containers, objects and generators of random numbers in a tree of arguments that a call can change."""
    return [
        value
        for value in walk(tree)
        if isinstance(value, CONTAINERS) or is_random(value) or (has_attributes(value) and not _stateful(value))
    ]


def _stateful(value: Any) -> bool:
    return isinstance(value, (*STATEFUL, types.FunctionType))


class Gone:
    """Stands for what is not there; there is one, which copies as itself."""

    def __repr__(self) -> str:
        return "nothing"

    def __deepcopy__(self, memo: object) -> Gone:
        return self


GONE = Gone()

#: What every optimizer has besides its own attributes, and what wraps its methods; told apart from them.
_OF_EVERY_OPTIMIZER = frozenset({"state", "param_groups", "defaults", "step", "profile_hook_step"})


class State:
    """Python-side state of owners: attributes, content of containers, gradients, optimizer state."""

    def __init__(self, owners: list[Any]) -> None:
        self.owners = owners
        self._attributes: list[tuple[str, Any, type, dict[str, Any]]] = []
        self._containers: list[tuple[str, Any, Any]] = []
        self._optimizers: list[tuple[Any, dict[Any, Any], list[dict[str, Any]]]] = []
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor | None, bool, torch.Tensor]] = {}
        self._lazy: list[tuple[torch.Tensor, type]] = []
        self._generators: list[tuple[str, Any, Any]] = []
        self._variables: list[tuple[Variable, Any]] = []
        self._held: list[torch.Tensor] = []
        seen: dict[int, Any] = {}
        kept: set[int] = set()
        for prefix, owner in named_owners(owners):
            if isinstance(owner, torch.nn.Module):
                for name, module in owner.named_modules():
                    if id(module) not in kept:
                        kept.add(id(module))
                        self._keep(module, f"{prefix}{name}." if name else prefix, seen)
        for prefix, owner in named_owners(owners):
            if isinstance(owner, torch.optim.Optimizer):
                state = {key: dict(value) for key, value in owner.state.items()}
                self._optimizers.append((owner, state, [dict(group) for group in owner.param_groups]))
                self._attributes.append((prefix, owner, type(owner), attributes(owner)))
                for name, held in vars(owner).items():
                    if name not in _OF_EVERY_OPTIMIZER:
                        self._keep(held, f"{prefix}{name}", seen)
                for number, content in enumerate(owner.state.values()):
                    for name, held in content.items():
                        self._keep(held, f"{prefix}state {number}.{name}", seen)
            elif isinstance(owner, Variable):
                self._variables.append((owner, owner.cell.cell_contents))
            elif not isinstance(owner, (torch.nn.Module, torch.Tensor)):
                self._keep(owner, prefix, seen)
            for tensor in state_tensors(owner):
                if torch.nn.parameter.is_lazy(tensor):
                    self._lazy.append((tensor, type(tensor)))
                elif tensor.is_leaf:
                    self._tensors[id(tensor)] = (tensor, tensor.grad, tensor.requires_grad, tensor.detach())

    def _keep(self, owner: Any, prefix: str, seen: dict[int, Any]) -> None:
        """Keep what ``owner`` holds, and what containers and objects in it hold, at any depth."""
        inside: Iterator[tuple[str, Any]]
        if isinstance(owner, STATEFUL):
            self._attributes.append((prefix, owner, type(owner), attributes(owner)))
            inside = (found for name, held in vars(owner).items() for found in named(held, prefix + name, seen))
        else:
            inside = named(owner, prefix.rstrip("."), seen)
        for path, value in inside:
            if isinstance(value, torch.Tensor):
                self._held.append(value)
            if isinstance(value, CONTAINERS):
                self._containers.append((path, value, copy.copy(value)))
            if is_random(value):
                self._generators.append((path, value, position(value)))
            elif not isinstance(value, (*STATEFUL, types.FunctionType)) and has_attributes(value):
                self._attributes.append((f"{path}.", value, type(value), attributes(value)))

    def changed(self, also: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
        """What Python-side state differs from the start, and what is asked for: (then, now) by path.

        Parameters and buffers of modules are tensors and not told here; `named_state` knows them.
        """
        wanted = set(also)
        found: dict[str, tuple[Any, Any]] = {}
        for prefix, owner, _, values in self._attributes:
            own = attributes(owner)
            ours: frozenset[str] = frozenset()
            if isinstance(owner, STATEFUL):
                ours = OF_EVERY_MODULE if isinstance(owner, torch.nn.Module) else _OF_EVERY_OPTIMIZER
            for name in {**values, **own}:
                then, now = values.get(name, GONE), own.get(name, GONE)
                if (
                    name not in ours
                    and not _torch.is_compilers(name)
                    and (then is not now or (wanted and f"{prefix}{name}" in wanted))
                ):
                    found[f"{prefix}{name}"] = (then, now)
        for path, container, content in self._containers:
            if path in found or path.rpartition(".")[2] in OF_EVERY_MODULE:
                continue  # another container is there now
            if path in wanted or _differs(container, content):
                found[path] = (content, container)
        names = {id(tensor): path for path, tensor in named_state(self.owners)}
        prefixes = {id(owner): prefix for prefix, owner in named_owners(self.owners)}
        for optimizer, state, groups in self._optimizers:
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                path = f"{prefixes[id(optimizer)]}state of {names.get(id(parameter), f'parameter {number}')}"
                kept, held = state.get(parameter, {}), optimizer.state.get(parameter, {})
                if path in wanted or _differs(held, kept):
                    found[path] = (kept, held)
            for number, (group, was) in enumerate(zip(optimizer.param_groups, groups)):
                path = f"{prefixes[id(optimizer)]}param_groups[{number}]"
                # Dynamo itself makes the optimizers that it traces capturable.
                then, now = ({k: v for k, v in g.items() if k not in ("params", "capturable")} for g in (was, group))
                if path in wanted or _differs(now, then):
                    found[path] = (then, now)
        for variable, value in self._variables:
            now = variable.cell.cell_contents if is_filled(variable.cell) else GONE
            if now is not value or variable.name in wanted:
                found[variable.name] = (value, now)
        for key, (tensor, grad, requires_grad, _) in self._tensors.items():
            name = names.get(key, "a tensor that the function holds")
            flags = (requires_grad, tensor.requires_grad)
            for what, then, now in (("grad", grad, tensor.grad), ("requires_grad", *flags)):
                if then is not now or (wanted and f"{name}.{what}" in wanted):
                    found[f"{name}.{what}"] = (GONE if then is None else then, GONE if now is None else now)
        return found

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that were there when this was made: of owners, of objects in them, gradients."""
        own = [tensor for owner in self.owners for tensor in state_tensors(owner)]
        grads = [grad for _, grad, _, _ in self._tensors.values() if grad is not None]
        return [*own, *self._held, *grads]

    def positions(self) -> dict[str, Any]:
        """Where generators of random numbers stand now, by path."""
        return {path: position(generator) for path, generator, _ in self._generators}

    def restore(self) -> None:
        for _, container, content in self._containers:
            _refill(container, content)
        for _, owner, cls, values in self._attributes:
            if type(owner) is not cls:
                owner.__class__ = cls
            own = attributes(owner)
            if own.keys() != values.keys() or any(own[k] is not values[k] for k in values):
                _give_attributes(owner, values)
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
        for variable, value in self._variables:
            if not is_filled(variable.cell) or variable.cell.cell_contents is not value:
                variable.cell.cell_contents = value
        for _, generator, former in self._generators:
            _put(generator, former)
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


def _give_attributes(owner: Any, values: dict[str, Any]) -> None:
    """Let an object hold ``values`` and nothing else, whatever its class says about setting attributes."""
    in_slots = set(slots(owner))
    for name in in_slots:
        if name in values:
            object.__setattr__(owner, name, values[name])
        elif hasattr(owner, name):
            object.__delattr__(owner, name)
    if hasattr(owner, "__dict__"):
        vars(owner).clear()
        vars(owner).update({name: value for name, value in values.items() if name not in in_slots})


def position(generator: Any) -> Any:
    """Where a generator of random numbers stands."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.get_state()


def _put(generator: Any, former: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(former)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = former
    else:
        generator.set_state(former)


def same_position(a: Any, b: Any) -> bool:
    """Whether two positions of one generator are the same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_position(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(same_position(x, y) for x, y in zip(a, b))
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)


#: What containers are changed and read by: their own classes may forbid or count it. The first that fits is used.
_BASES = (collections.OrderedDict, *CONTAINERS)


def _base(container: Any) -> Any:
    return next(base for base in _BASES if isinstance(container, base))


def _differs(container: Any, content: Any) -> bool:
    """Whether a dict, list, set or deque holds other objects than ``content``, or in another order."""
    if isinstance(container, set):
        return bool(container != content)
    held, kept = (list(_base(side).__iter__(side)) for side in (container, content))
    if isinstance(container, dict):
        if held != kept:
            return True
        held, kept = (list(_base(side).values(side)) for side in (container, content))
    return len(held) != len(kept) or any(a is not b for a, b in zip(held, kept))


def _refill(container: Any, content: Any) -> None:
    """Give a dict, list, set or deque its former content, in place and only if it differs."""
    if not _differs(container, content):
        return
    base = _base(container)
    base.clear(container)
    if isinstance(container, dict):
        for key, value in _base(content).items(content):
            base.__setitem__(container, key, value)
    elif isinstance(container, set):
        base.update(container, content)
    else:
        base.extend(container, content)


# -- what nobody wrote to ------------------------------------------------------------------------------


def fingerprints(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Sums over the bytes of every storage, by storage: a change of a storage shows in them.

    They take a thousandth of the memory of a copy.
    """
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        key = storage_key(tensor)
        if key is not None and key not in found:
            found[key] = fingerprint(tensor.untyped_storage())
    return found


#: Words of 8 bytes in a row; rows and columns are summed, so that an exchange of two words shows too.
_ROW = 1024
#: Rows at a time: as many as a cache holds, and on a GPU enough to be worth a launch.
_ROWS = {"cpu": 256, "cuda": 2048}
#: Each word is mixed with itself shifted so far, lest changes of its highest bit cancel: the signs of float64.
_SHIFT = 29


def fingerprint(storage: torch.UntypedStorage) -> torch.Tensor:
    """Sums of a storage's words, mixed, over the rows and columns of a table."""
    with torch.no_grad(), torch.inference_mode(False):
        raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        whole = len(raw) // (8 * _ROW) * 8 * _ROW
        rest = raw[whole:].clone()
        if not whole:
            return rest
        table = raw[:whole].view(torch.int64).view(-1, _ROW)
        parts = table.split(_ROWS.get(storage.device.type, _ROWS["cuda"]))
        mixed, columns, rows = torch.empty_like(parts[0]), torch.zeros_like(table[0]), []
        for part in parts:
            words = torch.bitwise_right_shift(part, _SHIFT, out=mixed[: len(part)]).bitwise_xor_(part)
            columns += words.sum(0)
            rows.append(words.sum(1))
        return torch.cat([columns.view(torch.uint8), torch.cat(rows).view(torch.uint8), rest])


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
        if self._numpy is not None and since._numpy is not None and not same_position(self._numpy, since._numpy):
            names.append("numpy.random")
        if not torch.equal(self._cpu, since._cpu):
            names.append("torch")
        # If CUDA was initialised in between there is nothing to compare with.
        if any(not torch.equal(a, b) for a, b in zip(self._cuda, since._cuda)):
            names.append("torch.cuda")
        return tuple(names)


# -- modes ----------------------------------------------------------------------------------------


class Modes:
    """What a call can switch in torch for all that comes after it."""

    def __init__(self) -> None:
        self._grad, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()

    def restore(self) -> None:
        torch.set_grad_enabled(self._grad)
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)

    def differences(self, other: Modes) -> Iterator[tuple[str, object, object]]:
        """What is otherwise: (name, here, there)."""
        if self._grad != other._grad:
            yield "the grad mode", self._grad, other._grad
        if self._dtype != other._dtype:
            yield "the default dtype", self._dtype, other._dtype
