"""Where a call starts: arguments, state and random numbers, and the way back to them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from unittest import mock

import torch

from pytest_dynamo import _torch
from pytest_dynamo import aliasing
from pytest_dynamo import gradients
from pytest_dynamo import inputs
from pytest_dynamo.aliasing import Relation
from pytest_dynamo.gradients import Gradients
from pytest_dynamo.gradients import Leaf
from pytest_dynamo.kept import LeftGradients
from pytest_dynamo.state import CopyBeforeWrite
from pytest_dynamo.state import Modes
from pytest_dynamo.state import Random
from pytest_dynamo.state import State
from pytest_dynamo.state import copied
from pytest_dynamo.state import fill
from pytest_dynamo.state import fingerprint
from pytest_dynamo.state import fingerprints
from pytest_dynamo.state import holders
from pytest_dynamo.state import named_state
from pytest_dynamo.state import position


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Outcome:
    """What one run of a call gave: a value or an error, and what it left."""

    value: Any
    error: Exception | None
    #: Positional and keyword arguments after the call.
    arguments: Arguments
    random: Random
    modes: Modes
    #: Which results share memory with what.
    sharing: tuple[Relation, set[str]] = field(default_factory=lambda: ({}, set()))
    #: None: not asked for, or nothing that the call made requires grad.
    gradients: Gradients | None = None


#: Bytes of state that is kept lest later calls change it.
KEPT = 1 << 30


@dataclass
class Written:
    """A tensor from before the call that eager changed, and what it held afterwards."""

    path: str
    after: torch.Tensor
    #: The tensor; None: an attribute of a module that was given another tensor, to be found by its path.
    tensor: torch.Tensor | None = None


class Start:
    """The moment before a call.

    The caller's own arguments are left to the compiled run; eager runs on clones of them.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, *, left: LeftGradients | None = None) -> None:
        self.fn = fn
        self.owners = inputs.owners(fn, arguments)
        self.random = Random()
        self.modes = Modes()
        self.notes: list[str] = []
        #: Tensors that eager changed, and attributes, items and gradients, as eager left them.
        self.written: list[Written] = []
        self.changed: dict[str, Any] = {}
        self._clones = self.clone(arguments)
        #: Storages of the caller's arguments, and those of their clones.
        self._originals = dict(
            zip(
                (_torch.storage_key(tensor) for _, tensor in inputs.named_arguments(arguments)),
                (_torch.storage_key(tensor) for _, tensor in inputs.named_arguments(self._clones)),
            )
        )
        self._clone_state = State(holders(self._clones))
        leaves = [t for t in inputs.walk(self._clones) if isinstance(t, torch.Tensor) and t.is_leaf]
        self._clone_grads = [(tensor, tensor.grad) for tensor in leaves]
        self._clone_contents: dict[int, torch.UntypedStorage] = {}
        self._state = State(self.owners)
        #: Where the caller's generators of random numbers stand before the call, and where eager left them.
        self.positions = self.standing(arguments)
        self.moved: dict[str, Any] = {}
        self._named = dict(named_state(self.owners))
        #: Gradients in memory of CUDA graphs, which is not state: compiled code writes there at will.
        self.left = [] if left is None else left.find(self._named.items())
        fleeting = {id(gradient.left) for gradient in self.left}
        self._tensors = [tensor for tensor in self._state.tensors() if id(tensor) not in fleeting]
        self._names = self._name_tensors()
        self._mode = CopyBeforeWrite()
        #: Whether eager ran under autocast, at least in part.
        self.autocast = False
        self._untouched: dict[int, torch.Tensor] = {}

    def _name_tensors(self) -> dict[int, str]:
        """Names of all tensors of state, by id."""
        names = {id(tensor): path for path, tensor in self._named.items()}
        for path, tensor in self._named.items():
            if tensor.is_leaf and tensor.grad is not None:
                names.setdefault(id(tensor.grad), f"{path}.grad")
        for number, tensor in enumerate(self._tensors):
            names.setdefault(id(tensor), f"tensor {number} that the function holds")
        return names

    def clone(self, arguments: Arguments) -> Arguments:
        """Copy arguments; what could not be copied faithfully is added to ``notes``."""
        copied, notes = inputs.clone(arguments, self.owners)
        self.notes += notes
        return copied  # type: ignore[no-any-return]

    def leaves(self, arguments: Arguments) -> list[Leaf]:
        """What gradients are taken with respect to in a run on ``arguments``; to be called before it."""
        return gradients.leaves(arguments, self._named.items())

    def sharing(self, value: Any, arguments: Arguments) -> tuple[Relation, set[str]]:
        """Which tensors in a result share memory with arguments, state or each other."""
        given = [*inputs.named_arguments(arguments), *named_state(self.owners)]
        return aliasing.relation(given, inputs.named_tensors(value, "out"))

    def run_eager(self, *, differentiate: bool = False, twice: bool = False) -> Outcome:
        """Run eager on the clones and put back all state that it changed, but for random numbers.

        With ``differentiate`` its gradients are taken too, if anything that it made requires grad; with
        ``twice`` those of the gradients as well.
        """
        value, error, found = None, None, None
        args, kwargs = self._clones
        leaves = self.leaves(self._clones) if differentiate else []
        sharing: tuple[Relation, set[str]] = ({}, set())
        try:
            with torch.compiler.set_stance("force_eager"), self._watch_autocast(), self._mode:
                value = self.fn(*args, **kwargs)
        except Exception as raised:
            error = raised
        after, modes = Random(), Modes()
        self.modes.restore()
        try:
            if error is None:
                sharing = self.sharing(value, self._clones)
            self._remember()
            if differentiate and error is None and gradients.differentiable(value, self._clones, leaves)[0]:
                with torch.compiler.set_stance("force_eager"), self._mode:
                    found = gradients.differentiate(value, self._clones, leaves, twice=twice)
        finally:
            value = inputs.detach(value)
            self._clone_contents = self._mode.split_off(self._clones, self.owners)
            self._mode.restore()
            self._state.restore()
        self._untouched = fingerprints(t for t in self._tensors if not self.writes(t))
        return Outcome(value, error, self._clones, after, modes, sharing, found)

    @contextmanager
    def _watch_autocast(self) -> Iterator[None]:
        """Notice whether autocast is on or switched on; below it, operations can't tell."""
        self.autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        enter = torch.autocast.__enter__

        def entered(context: Any) -> Any:
            self.autocast = True
            return enter(context)  # type: ignore[no-untyped-call]

        with mock.patch.object(torch.autocast, "__enter__", entered):
            yield

    def _remember(self) -> None:
        """Keep what eager left in state, before it is put back."""
        named = dict(named_state(self.owners))
        told = set()
        for path, tensor in named.items():
            if tensor is not self._named.get(path):
                self.written.append(Written(path, inputs.detach(tensor)))
            elif _torch.storage_key(tensor) in self._mode.before:
                self.written.append(Written(path, inputs.detach(tensor), tensor))
                told.add(_torch.storage_key(tensor))
        for tensor in self._tensors:
            key = _torch.storage_key(tensor)
            if key in self._mode.before and key not in told:
                self.written.append(Written(self._names[id(tensor)], inputs.detach(tensor), tensor))
                told.add(key)
        self.moved = self.standing(self._clones)
        now = {path: now for path, (_, now) in self._state.changed().items()}
        self.changed = inputs.detach(now)

    def now(self, written: Written) -> torch.Tensor | None:
        """What a changed tensor holds at present; None: there is no such attribute any more."""
        if written.tensor is not None:
            return written.tensor.detach()
        found = dict(named_state(self.owners)).get(written.path)
        return None if found is None else found.detach()

    def then(self, written: Written) -> torch.Tensor | None:
        """The tensor that a changed one was before the call; `before` tells what it held."""
        return self._named.get(written.path) if written.tensor is None else written.tensor

    def before(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a tensor of state, or a clone, held before the call; None: not known."""
        key = _torch.storage_key(tensor)
        if key is None:
            return None
        content = self._mode.before[key][1] if key in self._mode.before else self._clone_contents.get(key)
        if content is None:
            return tensor.detach()  # nobody wrote to it
        if content.nbytes() != tensor.untyped_storage().nbytes():
            return None
        return _torch.view_of(content, tensor)  # type: ignore[no-any-return]

    def differences(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Attributes, items and gradients that eager or the run since `rewind` changed: (path, then, now, eager's)."""
        for path, (then, now) in self._state.changed(self.changed).items():
            yield path, then, now, self.changed.get(path, then)

    def standing(self, arguments: Arguments) -> dict[str, Any]:
        """Where the generators of random numbers in state and arguments stand now, by their names."""
        given = {path: position(value) for path, value in inputs.in_arguments(arguments) if inputs.is_random(value)}
        return {**self._state.positions(), **given}

    def meddled(self) -> Iterator[str]:
        """Names of the tensors of state that differ from the start though eager did not change them."""
        for tensor, before in self._unwritten():
            if not torch.equal(before, fingerprint(tensor.untyped_storage())):
                yield self._names[id(tensor)]

    def _unwritten(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors of state that eager did not write to, one for each storage, with the fingerprint of that."""
        # Of the tensors that share a storage, the first has the name that reports use.
        tensors = {_torch.storage_key(tensor): tensor for tensor in reversed(self._tensors)}
        for key, before in self._untouched.items():
            tensor = tensors.get(key)
            if tensor is not None:
                yield tensor, before

    @property
    def number_dtype(self) -> torch.dtype:
        """The coarsest dtype of the tensors that eager made Python numbers of."""
        numbers = [dtype for dtype in self._mode.numbers if dtype.is_floating_point]
        return max(numbers, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    def carries_graph(self) -> str | None:
        """A tensor of state that ends a graph from before the call, which is not ours to run through."""
        for tensor in self._tensors:
            if tensor.requires_grad and not tensor.is_leaf:
                return self._names[id(tensor)]
        return None

    @property
    def draws(self) -> list[torch.dtype]:
        """Dtypes in which eager drew random numbers, in order."""
        return self._mode.draws

    def writes(self, tensor: torch.Tensor) -> bool:
        """Whether eager wrote to what a tensor from before the call holds, or to the clone of it."""
        key = _torch.storage_key(tensor)
        return key in self._mode.before or self._originals.get(key) in self._clone_contents

    def rewind(self) -> None:
        """Bring state, random numbers and modes of torch back to the start."""
        self._mode.restore()
        self._state.restore()
        self.random.restore()
        self.modes.restore()

    @contextmanager
    def again(self, *, often: bool = False) -> Iterator[Arguments]:
        """Be at the start once more, with fresh arguments; afterwards everything is as it was found.

        ``often``: for many calls, of which later ones may change what the one that eager made did not. Of that
        `KEPT` bytes are put back, and notes tell of the rest.
        """
        random, modes = Random(), Modes()
        contents, state = self._mode.current(), State(self.owners)
        # What changes nothing at all and draws no random numbers is the same in each call.
        later = self._copies() if often and (self._mode.before or self.changed or self._mode.draws) else []
        arguments = self._pristine()
        self.rewind()
        try:
            yield arguments
        finally:
            self._mode.put(contents)
            for tensor, before, content in later:
                storage = tensor.untyped_storage()
                if torch.equal(before, fingerprint(storage)):
                    continue
                if content is None:
                    self.notes.append(f"{self._names[id(tensor)]} is not as one call leaves it: others changed it")
                else:
                    fill(storage, content)
            state.restore()
            random.restore()
            modes.restore()

    def _copies(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.UntypedStorage | None]]:
        """Tensors of state that eager did not write to, each with a fingerprint and, if there is room, a copy."""
        found, room = [], KEPT
        for tensor, before in self._unwritten():
            storage = tensor.untyped_storage()
            room -= storage.nbytes()
            found.append((tensor, before, copied(storage) if room >= 0 else None))
        return found

    def _pristine(self) -> Arguments:
        """Arguments as they were at the start, though eager may have changed its clones."""
        changed = State(holders(self._clones))
        grads = [(tensor, tensor.grad) for tensor, _ in self._clone_grads]
        self._mode.swap(self._clone_contents)
        self._clone_state.restore()
        _give(self._clone_grads)
        try:
            return self.clone(self._clones)
        finally:
            self._mode.swap(self._clone_contents)
            changed.restore()
            _give(grads)


@contextmanager
def put_back(fn: Callable[..., Any], arguments: Arguments) -> Iterator[None]:
    """Put back afterwards what arguments and state hold, whoever changes it."""
    owners = inputs.owners(fn, arguments)
    state = State([*owners, *holders(arguments)])
    tensors = [*state.tensors(), *(value for value in inputs.walk(arguments) if isinstance(value, torch.Tensor))]
    grads = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
    kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    for tensor in (*tensors, *(grad for _, grad in grads if grad is not None)):
        key = _torch.storage_key(tensor)
        if key is not None and key not in kept:
            kept[key] = (tensor.untyped_storage(), copied(tensor.untyped_storage()))
    try:
        yield
    finally:
        for storage, content in kept.values():
            fill(storage, content)
        state.restore()
        _give(grads)


def _give(grads: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Set ``.grad`` of tensors where it is another."""
    for tensor, grad in grads:
        if tensor.grad is not grad:
            tensor.grad = grad
