"""Compares what compiled code did with what eager did. Never raises on a difference."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import types
from collections.abc import Iterator
from typing import Any

import torch

from pytest_dynamo import _torch
from pytest_dynamo.record import Check
from pytest_dynamo.settings import Tolerances


#: (rtol, atol) as ``torch.testing.assert_close`` documents them.
DTYPE_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, torch.dtype, torch.device)
_PLAIN = (str, bytes, bool, int, type(None), torch.Size, torch.layout, torch.memory_format, enum.Enum, range)


def compare(actual: Any, expected: Any, *, tolerances: Tolerances, call: int = 1, path: str = "out") -> list[Check]:
    """Compare two results: structure, types, and every tensor and number in them.

    Args:
        actual: what compiled code returned.
        expected: what eager returned.
        tolerances: ``rtol`` and ``atol`` for floating-point values; integers and bools are compared
            bitwise. Where they are None, those of ``torch.testing.assert_close`` for the dtype.
        call: number of the call within the test, for the checks.
        path: name of the result, for the checks.
    """
    return list(_Comparison(tolerances, call).values(actual, expected, path))


class _Comparison:
    def __init__(self, tolerances: Tolerances, call: int) -> None:
        self._tolerances = tolerances
        self._call = call
        self._seen: set[tuple[int, int]] = set()

    def _check(self, what: str, path: str, passed: bool | None, note: str | None = None, **numbers: Any) -> Check:
        return Check(what=what, path=path, call=self._call, passed=passed, note=note, **numbers)

    def _same(self, what: str, path: str, actual: object, expected: object) -> Check | None:
        if actual == expected:
            return None
        return self._check(what, path, False, f"compiled {_short(actual)}, eager {_short(expected)}")

    def values(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        if (id(actual), id(expected)) in self._seen:
            return
        self._seen.add((id(actual), id(expected)))
        if actual is expected:
            yield self._check("values", path, True)
        elif type(actual) is not type(expected):
            names = [
                f"{type(v).__module__}.{type(v).__qualname__}".removeprefix("builtins.") for v in (actual, expected)
            ]
            yield self._check("type", path, False, f"compiled {names[0]}, eager {names[1]}")
        elif isinstance(expected, torch.Tensor):
            yield from self._tensor(actual, expected, path)
        elif isinstance(expected, (float, complex)):
            yield self._number(actual, expected, path)
        elif isinstance(expected, _PLAIN):
            difference = self._same("values", path, actual, expected)
            yield difference or self._check("values", path, True)
        elif isinstance(expected, _IDENTITY):
            if actual is not expected:
                yield self._check("values", path, False, f"compiled {actual!r}, eager {expected!r}")
        elif isinstance(expected, dict):
            yield from self._mapping(actual, expected, path)
        elif isinstance(expected, (list, tuple, collections.deque)):
            yield from self._sequence(actual, expected, path)
        elif isinstance(expected, (set, frozenset)):
            yield from self._set(actual, expected, path)
        elif type(expected).__module__ == "numpy" and hasattr(expected, "dtype"):
            yield from self._numpy(actual, expected, path)
        else:
            yield from self._object(actual, expected, path)

    def _mapping(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        keys = [[_key(k) for k in mapping] for mapping in (actual, expected)]
        difference = self._same("structure", path, *keys)
        if difference:
            yield difference
            return
        for (_, a), (key, e) in zip(actual.items(), expected.items()):
            yield from self.values(a, e, f"{path}[{_short(key)}]")
        yield from self._attributes(actual, expected, path, getattr(expected, "__dict__", {}))

    def _sequence(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        if len(actual) != len(expected):
            yield self._check("structure", path, False, f"compiled has {len(actual)} items, eager {len(expected)}")
            return
        names = getattr(expected, "_fields", None)
        for number, (a, e) in enumerate(zip(actual, expected)):
            yield from self.values(a, e, f"{path}.{names[number]}" if names else f"{path}[{number}]")

    def _set(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        if any(isinstance(v, torch.Tensor) for v in (*actual, *expected)):
            yield self._check("structure", path, None, "tensors in a set have no order to compare them by")
        else:
            yield self._same("values", path, actual, expected) or self._check("values", path, True)

    def _numpy(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        if expected.dtype.hasobject or expected.dtype.kind not in "biufc":
            same = actual.shape == expected.shape and bool((actual == expected).all())
            yield self._check("values", path, same)
            return
        difference = self._same("dtype", path, actual.dtype, expected.dtype)
        if difference:
            yield difference
        else:
            yield from self._tensor(torch.as_tensor(actual.copy()), torch.as_tensor(expected.copy()), path)

    def _object(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        if dataclasses.is_dataclass(expected):
            given = [f.name for f in dataclasses.fields(expected) if hasattr(expected, f.name)]
            yield from self._attributes(actual, expected, path, {n: getattr(expected, n) for n in given})
        elif getattr(expected, "__dict__", None):
            yield from self._attributes(actual, expected, path, vars(expected))
        elif _compares_itself(expected) and isinstance(same := actual == expected, bool):
            yield self._check("values", path, same)
        else:
            kind = f"{type(expected).__module__}.{type(expected).__qualname__}"
            yield self._check("structure", path, None, f"don't know how to compare objects of {kind}")

    def _attributes(self, actual: Any, expected: Any, path: str, wanted: dict[str, Any]) -> Iterator[Check]:
        for name, value in wanted.items():
            if not hasattr(actual, name):
                yield self._check("structure", f"{path}.{name}", False, "compiled has no such attribute")
            elif not callable(value) or isinstance(value, torch.Tensor):
                yield from self.values(getattr(actual, name), value, f"{path}.{name}")

    def _number(self, actual: Any, expected: Any, path: str) -> Check:
        # A Python number may come from float32 arithmetic, as by `.item()`: its tolerance holds.
        a, e = (
            torch.tensor(v, dtype=torch.complex128 if isinstance(v, complex) else torch.float64)
            for v in (actual, expected)
        )
        return self._close(a, e, path, *self._limits(torch.float32))

    # -- tensors --

    def _tensor(self, actual: torch.Tensor, expected: torch.Tensor, path: str) -> Iterator[Check]:
        facts = ["layout", "dtype", "device", "shape", "requires_grad"]
        failed = False
        for fact in facts:
            difference = self._same(
                fact if fact != "layout" else "type", path, getattr(actual, fact), getattr(expected, fact)
            )
            if difference:
                failed = failed or fact not in ("requires_grad", "device")
                yield difference
        if failed:
            return
        if expected.is_meta:
            yield self._check("values", path, None, "tensors on the meta device have no values")
            return
        parts = _torch.plain_parts(actual, expected)
        if parts is None:
            yield self._check("values", path, None, f"can't read values of {type(expected).__name__}")
            return
        for name, a, e in parts:
            if a.shape != e.shape or a.dtype != e.dtype:
                yield self._check("shape", path + name, False, f"compiled {tuple(a.shape)}, eager {tuple(e.shape)}")
            else:
                yield self._plain(a, e, path + name)

    def _plain(self, actual: torch.Tensor, expected: torch.Tensor, path: str) -> Check:
        if not (expected.is_floating_point() or expected.is_complex()):
            return self._exact(actual, expected, path)
        return self._close(actual, expected, path, *self._limits(expected.dtype))

    def _limits(self, dtype: torch.dtype) -> tuple[float, float]:
        default = DTYPE_TOLERANCES.get(dtype)
        if default is None:  # float8 and the like: one step of the format
            default = (torch.finfo(dtype).eps, 1e-5)
        rtol, atol = self._tolerances.rtol, self._tolerances.atol
        return (default[0] if rtol is None else rtol, default[1] if atol is None else atol)

    def _exact(self, actual: torch.Tensor, expected: torch.Tensor, path: str) -> Check:
        if torch.equal(actual, expected):
            return self._check("values", path, True, max_abs=0.0)
        wrong = actual != expected
        where = _index(wrong.flatten().nonzero()[0].item(), expected.shape)
        a, e = actual[where].item(), expected[where].item()
        note = f"{_share(wrong)} differ; first at {_at(where)}: compiled {a}, eager {e}"
        return self._check("values", path, False, note, max_abs=float(abs(a - e)))

    def _close(self, actual: torch.Tensor, expected: torch.Tensor, path: str, rtol: float, atol: float) -> Check:
        if expected.numel() == 0:
            return self._check("values", path, True, max_abs=0.0)
        wide = torch.complex128 if expected.is_complex() else torch.float64
        a, e = actual.detach().to(wide), expected.detach().to(wide)
        finite = torch.isfinite(a) & torch.isfinite(e)
        same = (a == e) | (torch.isnan(a) & torch.isnan(e))
        off = torch.where(finite, (a - e).abs(), 0.0)
        wrong = ~same & (~finite | (off > atol + rtol * e.abs()))
        max_abs = off.max().item()
        relative = torch.where(finite & (e != 0), off / e.abs(), 0.0)
        numbers: dict[str, Any] = {"max_abs": max_abs, "max_rel": relative.max().item()}
        if not wrong.any():
            return self._check("values", path, True, **numbers)
        score = torch.where(wrong, torch.where(finite, off, math.inf), -1.0)
        where = _index(int(score.flatten().argmax().item()), expected.shape)
        note = (
            f"{_share(wrong)} differ by more than atol={atol:g} + rtol={rtol:g} * |eager|; "
            f"worst at {_at(where)}: compiled {actual[where].item():.6g}, eager {expected[where].item():.6g}"
        )
        return self._check("values", path, False, note, **numbers)


def _compares_itself(value: object) -> bool:
    return vars(object)["__eq__"] is not getattr(type(value), "__eq__", None)


def _key(key: object) -> object:
    return f"tensor {tuple(key.shape)}" if isinstance(key, torch.Tensor) else key


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, torch.Tensor) else f"tensor{tuple(value.shape)}"
    return text if len(text) <= 80 else text[:77] + "..."


def _share(wrong: torch.Tensor) -> str:
    count = int(wrong.sum().item())
    return f"{count} of {wrong.numel()} elements"


def _index(flat: int | float, shape: torch.Size) -> tuple[int, ...]:
    out: list[int] = []
    rest = int(flat)
    for size in reversed(shape):
        out.append(rest % size)
        rest //= size
    return tuple(reversed(out))


def _at(where: tuple[int, ...]) -> str:
    return "its only element" if not where else str(list(where))
