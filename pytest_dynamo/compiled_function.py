"""What ``compiled(fn)`` returns. Importing this module costs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

from pytest_dynamo.record import Observation
from pytest_dynamo.summary import summarize


if TYPE_CHECKING:
    from pytest_dynamo.calls import Checker


class CompiledFunction:
    """A function or module of which every call is run in eager mode, compiled, and compared.

    Call it like what it was made from; it returns compiled's result and raises `ParityError` where
    compiled differs from eager. Attributes of a module pass through, for reading and writing; a
    method that returns the module returns this object.
    """

    def __init__(self, checker: Checker) -> None:
        object.__setattr__(self, "_checker", checker)
        object.__setattr__(self, "_told", set())

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return self._checker(args, kwargs)

    @property
    def observation(self) -> Observation:
        """What the compiler did for this function so far: breaks, recompiles, graphs, CUDA graphs."""
        checker: Checker = self._checker
        run = checker.run
        seen = summarize([(checker.function.group, 0)], run.places)
        return run.with_cudagraphs(seen, [checker.function])

    def __getattr__(self, name: str) -> Any:
        # Found on neither this object nor its class, so it is the module's.
        checker: Checker = object.__getattribute__(self, "_checker")
        value = getattr(checker.fn, name)
        if getattr(value, "__self__", None) is checker.fn and hasattr(checker.fn, "forward"):
            return self._method(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._checker.fn, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._checker.fn, name)

    def __repr__(self) -> str:
        return f"compiled({self._checker.name})"

    def _method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            checker: Checker = self._checker
            with checker.watch_forward() as ran:
                result = method(*args, **kwargs)
            if (ran or name == "forward") and name not in self._told:
                self._told.add(name)
                checker.run.notes[
                    f"{checker.name}.{name}() ran forward in eager mode: only calling the compiled function is compiled"
                ] = None
            return self if result is checker.fn else result

        return call
