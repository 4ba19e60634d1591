"""What one test must not leave to the next: configuration, random numbers, grad mode."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytest_dynamo import _torch


_MISSING = object()


class Guard:
    """Compares global state around a test and puts back what the test left changed.

    A value counts as left changed by the test if its body changed it and the teardown of the test's
    own fixtures did not change it again: what a fixture of a class or module sets up stays.
    """

    def __init__(self, *, everything: bool) -> None:
        self._everything = everything
        self._before = _config()
        self._after: dict[tuple[str, str], Any] | None = None
        self._random = _random() if everything else None
        self._grad = _grad_enabled() if everything else None

    def body_ended(self) -> None:
        self._after = _config()
        if self._random is not None:
            self._random.restore()
        if self._grad is not None and _grad_enabled() != self._grad:
            sys.modules["torch"].set_grad_enabled(self._grad)

    def restore(self) -> list[str]:
        """Put configuration back after teardown; return what was changed, in words."""
        told = []
        after = self._after or {}
        now = _config()
        for key, value in self._before.items():
            left = after.get(key, _MISSING)
            if left is not _MISSING and _differs(left, value) and not _differs(now.get(key), left):
                part, name = key
                _torch.restore_config(part, name, value)
                told.append(f"left {part}.{name} changed from {value!r} to {left!r}; it was put back")
        return told


def _config() -> dict[tuple[str, str], Any]:
    return {(part, name): value for part, values in _torch.config_values().items() for name, value in values.items()}


def _differs(a: Any, b: Any) -> bool:
    return a is not b and bool(a != b)


def _random() -> Any:
    if "torch" not in sys.modules:
        return None
    from pytest_dynamo.state import Random

    return Random()


def _grad_enabled() -> bool | None:
    torch = sys.modules.get("torch")
    return None if torch is None else bool(torch.is_grad_enabled())


@contextmanager
def without_profile_guided_state() -> Iterator[None]:
    """Switch profile-guided compilation off: with it, counts depend on earlier runs."""
    before = {name: os.environ.get(name) for name in _torch.PGO_ENVIRONMENT}
    os.environ.update(dict.fromkeys(before, "0"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
