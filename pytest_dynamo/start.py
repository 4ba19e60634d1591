"""Where a call starts: arguments, state and random numbers, and the way back to them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pytest_dynamo import _torch
from pytest_dynamo import inputs
from pytest_dynamo.state import CopyBeforeWrite
from pytest_dynamo.state import Random
from pytest_dynamo.state import State
from pytest_dynamo.state import holders
from pytest_dynamo.state import named_state


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Outcome:
    """What one run of a call gave: a value or an error, and what it left."""

    value: Any
    error: Exception | None
    #: Positional and keyword arguments after the call.
    arguments: Arguments
    random: Random


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

    def __init__(self, fn: Callable[..., Any], arguments: Arguments) -> None:
        self.fn = fn
        self.owners = inputs.owners(fn, arguments)
        self.random = Random()
        self.notes: list[str] = []
        self._clones = self.clone(arguments)
        self._clone_state = State(holders(self._clones))
        self._clone_contents: dict[int, torch.UntypedStorage] = {}
        self._state = State(self.owners)
        self._named = dict(named_state(self.owners))
        self._tensors = self._state.tensors()
        self._mode = CopyBeforeWrite()

    def clone(self, arguments: Arguments) -> Arguments:
        """Copy arguments; what could not be copied faithfully is added to ``notes``."""
        copied, notes = inputs.clone(arguments, self.owners)
        self.notes += notes
        return copied  # type: ignore[no-any-return]

    def run_eager(self) -> tuple[Outcome, list[Written]]:
        """Run eager on the clones and put back all state that it changed, but for random numbers."""
        value, error = None, None
        args, kwargs = self._clones
        try:
            with torch.compiler.set_stance("force_eager"), self._mode:
                value = self.fn(*args, **kwargs)
        except Exception as raised:
            error = raised
        finally:
            after = Random()
            value = inputs.detach(value)
            self._clone_contents = self._mode.split_off(self._clones, self.owners)
            written = self._written()
            self._mode.restore()
            self._state.restore()
        return Outcome(value, error, self._clones, after), written

    def _written(self) -> list[Written]:
        found = []
        named = dict(named_state(self.owners))
        told = set()
        for path, tensor in named.items():
            if tensor is not self._named.get(path):
                found.append(Written(path, inputs.detach(tensor)))
            elif _torch.storage_key(tensor) in self._mode.before:
                found.append(Written(path, inputs.detach(tensor), tensor))
                told.add(_torch.storage_key(tensor))
        for tensor in self._tensors:
            key = _torch.storage_key(tensor)
            if key in self._mode.before and key not in told:
                found.append(Written("a tensor that the function holds,", inputs.detach(tensor), tensor))
                told.add(key)
        return found

    def now(self, written: Written) -> torch.Tensor | None:
        """What a changed tensor holds at present; None: there is no such attribute any more."""
        if written.tensor is not None:
            return written.tensor.detach()
        found = dict(named_state(self.owners)).get(written.path)
        return None if found is None else found.detach()

    def rewind(self) -> None:
        """Bring state and random numbers back to the start."""
        self._mode.restore()
        self._state.restore()
        self.random.restore()

    @contextmanager
    def again(self) -> Iterator[Arguments]:
        """Be at the start once more, with fresh arguments; afterwards everything is as it was found."""
        random, contents, state = Random(), self._mode.current(), State(self.owners)
        arguments = self._pristine()
        self.rewind()
        try:
            yield arguments
        finally:
            self._mode.put(contents)
            state.restore()
            random.restore()

    def _pristine(self) -> Arguments:
        """Arguments as they were at the start, though eager may have changed its clones."""
        changed = State(holders(self._clones))
        self._mode.swap(self._clone_contents)
        self._clone_state.restore()
        try:
            return self.clone(self._clones)
        finally:
            self._mode.swap(self._clone_contents)
            changed.restore()
