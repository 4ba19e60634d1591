"""A pytest plugin for compile-regression testing of PyTorch code."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from pytest_dynamo.errors import LimitError
from pytest_dynamo.errors import ParityError


if TYPE_CHECKING:
    from pytest_dynamo.compiled_function import CompiledFunction
    from pytest_dynamo.record import Observation
    from pytest_dynamo.variants import Variant

__all__ = ["CompiledFunction", "LimitError", "Observation", "ParityError", "Variant"]

_WHERE = {"CompiledFunction": "compiled_function", "Observation": "record", "Variant": "variants"}


def __getattr__(name: str) -> Any:
    # pytest imports this package in every run: what only users of the names need comes later.
    if name == "__version__":
        from importlib.metadata import version

        return version("pytest-dynamo")
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(f"pytest_dynamo.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
