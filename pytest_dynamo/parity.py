"""Compares what compiled code did with what eager did. Never raises on a difference."""

from __future__ import annotations

import collections
import enum
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch

from pytest_dynamo import _torch
from pytest_dynamo.inputs import attributes
from pytest_dynamo.record import Check
from pytest_dynamo.record import Worst
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
_IDENTITY = (type, types.BuiltinFunctionType, types.ModuleType)
_PLAIN = (
    *(str, bytes, bool, int, type(None), enum.Enum, range),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)


#: Strided tensors that were compared, compiled's and eager's, by path.
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def compare(
    actual: Any,
    expected: Any,
    *,
    tolerances: Tolerances,
    call: int = 1,
    path: str = "out",
    pairs: Pairs | None = None,
    number_dtype: torch.dtype = torch.float32,
) -> list[Check]:
    """Compare two results: structure, types, and every tensor and number in them.

    Args:
        actual: what compiled code returned.
        expected: what eager returned.
        tolerances: ``rtol`` and ``atol`` for floating-point values; integers and bools are compared
            bitwise. Where they are None, those of ``torch.testing.assert_close`` for the dtype.
        call: number of the call within the test, for the checks.
        path: name of the result, for the checks.
        pairs: filled with the tensors that were met, and with Python numbers as tensors.
        number_dtype: dtype of the arithmetic that Python numbers come from, as by ``.item()``.
    """
    checks: list[Check] = []
    comparison = _Comparison(tolerances, call, {} if pairs is None else pairs, number_dtype)
    try:
        for check in comparison.values(actual, expected, path):
            checks.append(check)
    except Exception as error:  # from a method of the user's, or an operation that a tensor lacks
        note = f"comparing stopped at {type(error).__name__}: {error}"
        checks.append(Check("structure", path, call, None, note=note))
    return checks


class _Comparison:
    def __init__(self, tolerances: Tolerances, call: int, pairs: Pairs, number_dtype: torch.dtype) -> None:
        self._number_dtype = number_dtype
        self._tolerances = tolerances
        self._pairs = pairs
        self._call = call
        self._seen: set[tuple[int, int]] = set()

    def _check(self, what: str, path: str, passed: bool | None, note: str | None = None, **numbers: Any) -> Check:
        return Check(what=what, path=path, call=self._call, passed=passed, note=note, **numbers)

    def _same(self, what: str, path: str, actual: object, expected: object) -> Check | None:
        if actual == expected:
            return None
        return self._check(what, path, False, f"compiled {_short(actual)}, eager {_short(expected)}")

    def values(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        if not isinstance(expected, (*_PLAIN, float, complex)):  # Python has some numbers once only
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
        elif _is_numpy(expected):
            yield from self._numpy(actual, expected, path)
        elif isinstance(expected, int) and not isinstance(expected, enum.Enum):
            yield self._integer(actual, expected, path)
        elif isinstance(expected, torch.Size):
            yield from self._sequence(actual, expected, path)
        elif isinstance(expected, _PLAIN):
            difference = self._same("values", path, actual, expected)
            yield difference or self._check("values", path, True)
        elif isinstance(expected, types.FunctionType):
            yield from self._function(actual, expected, path)
        elif isinstance(expected, types.MethodType):
            yield from self.values(actual.__func__, expected.__func__, path)
            yield from self.values(actual.__self__, expected.__self__, f"{path}.__self__")
        elif isinstance(expected, _IDENTITY):
            yield self._check("values", path, False, f"compiled {_short(actual)}, eager {_short(expected)}")
        elif isinstance(expected, dict):
            yield from self._mapping(actual, expected, path)
        elif isinstance(expected, (list, tuple, collections.deque)):
            yield from self._sequence(actual, expected, path)
        elif isinstance(expected, (set, frozenset)):
            yield from self._set(actual, expected, path)
        else:
            yield from self._object(actual, expected, path)

    def _mapping(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        keys = [[_key(k) for k in mapping] for mapping in (actual, expected)]
        difference = self._same("structure", path, *keys)
        if difference:
            yield difference
            return
        for a, e in zip(actual, expected):
            if isinstance(e, torch.Tensor):
                yield from self.values(a, e, f"{path}'s key {_key(e)}")
        for (_, a), (key, e) in zip(actual.items(), expected.items()):
            yield from self.values(a, e, f"{path}[{_short(key)}]")
        yield from self._attributes(actual, expected, path)

    def _sequence(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        if len(actual) != len(expected):
            yield self._check("structure", path, False, f"compiled has {len(actual)} items, eager {len(expected)}")
            return
        names = getattr(expected, "_fields", None)
        for number, (a, e) in enumerate(zip(actual, expected)):
            yield from self.values(a, e, f"{path}.{names[number]}" if names else f"{path}[{number}]")
        yield from self._attributes(actual, expected, path)

    def _set(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        if any(isinstance(v, torch.Tensor) for v in (*actual, *expected)):
            yield self._check("structure", path, None, "tensors in a set have no order to compare them by")
        else:
            yield self._same("values", path, actual, expected) or self._check("values", path, True)

    def _function(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        """Functions that a call makes are new objects each time: they agree if their code and closures do."""
        if actual.__code__ != expected.__code__:
            yield self._check("values", path, False, f"compiled {_short(actual)}, eager {_short(expected)}")
            return
        yield self._check("values", path, True)
        for name, a, e in zip(expected.__code__.co_freevars, actual.__closure__ or (), expected.__closure__ or ()):
            yield from self.values(a.cell_contents, e.cell_contents, f"{path}.{name}")

    def _numpy(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        numpy = sys.modules["numpy"]
        a, e = numpy.asarray(actual), numpy.asarray(expected)
        difference = self._same("dtype", path, a.dtype, e.dtype) or self._same("shape", path, a.shape, e.shape)
        if difference:
            yield difference
        elif e.dtype.kind == "O":
            for where in numpy.ndindex(e.shape):
                yield from self.values(a[where], e[where], f"{path}{list(where)}")
        elif e.dtype.kind in "biufc":
            # Torch has neither the other byte order nor longer floating-point numbers.
            native = e.dtype.newbyteorder("=")
            if native.char in "gG":
                native = {"g": numpy.dtype("f8"), "G": numpy.dtype("c16")}[native.char]
            yield from self._tensor(torch.as_tensor(a.astype(native)), torch.as_tensor(e.astype(native)), path)
        else:
            same = numpy.array_equal(a, e, equal_nan=e.dtype.kind in "mM")
            yield self._check("values", path, same, None if same else f"compiled {_short(a)}, eager {_short(e)}")
        yield from self._attributes(actual, expected, path)

    def _object(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        kind = f"{type(expected).__module__}.{type(expected).__qualname__}"
        if attributes(actual) or attributes(expected):
            yield from self._attributes(actual, expected, path)
            return
        same = None
        if _compares_itself(expected):
            try:
                same = actual == expected
            except Exception as error:
                note = f"comparing objects of {kind} raised {type(error).__name__}: {error}"
                yield self._check("structure", path, None, note)
                return
        if isinstance(same, bool):
            yield self._check(
                "values", path, same, None if same else f"compiled {_short(actual)}, eager {_short(expected)}"
            )
        else:
            yield self._check("structure", path, None, f"don't know how to compare objects of {kind}")

    def _attributes(self, actual: Any, expected: Any, path: str) -> Iterator[Check]:
        own, wanted = attributes(actual), attributes(expected)
        for name, value in wanted.items():
            if name not in own:
                yield self._check("structure", f"{path}.{name}", False, "compiled has no such attribute")
            elif not callable(value) or isinstance(value, torch.Tensor):
                yield from self.values(own[name], value, f"{path}.{name}")
        if not _copies_itself(expected):
            for name in own.keys() - wanted.keys():
                yield self._check("structure", f"{path}.{name}", False, "eager has no such attribute")

    def _number(self, actual: Any, expected: Any, path: str) -> Check:
        """Compare Python numbers, which may come from arithmetic in the dtype of a tensor."""
        dtype = torch.complex64 if isinstance(expected, complex) else self._number_dtype
        wide = torch.complex128 if isinstance(expected, complex) else torch.float64
        a, e = (torch.tensor(v, dtype=wide, device="cpu") for v in (actual, expected))
        self._pairs[path] = (a.to(dtype), e.to(dtype))
        return self._close(a, e, path, *self._scaled(dtype, e))

    def _integer(self, actual: int, expected: int, path: str) -> Check:
        """Compare whole numbers of Python, which may come from a tensor: a count, a size, an index."""
        difference = self._same("values", path, actual, expected)
        if difference is None:
            return self._check("values", path, True)
        if max(abs(actual), abs(expected)) < 2**53:
            a, e = (torch.tensor(int(value), device="cpu") for value in (actual, expected))
            self._pairs[path] = (a, e)
            difference = replace(difference, max_abs=float(abs(actual - expected)))
        return difference

    # -- tensors --

    def _tensor(self, actual: torch.Tensor, expected: torch.Tensor, path: str) -> Iterator[Check]:
        self._pairs[path] = (actual, expected)
        failed = False
        for what, read in _FACTS:
            difference = self._same(what, path, read(actual), read(expected))
            if difference:
                failed = failed or what not in ("requires_grad", "device")
                yield difference
        if failed:
            return
        if actual.device != expected.device:
            if actual.is_meta or expected.is_meta:
                return
            actual = actual.to(expected.device)
            self._pairs[path] = (actual, expected)
        if expected.is_meta:
            yield self._check("values", path, None, "tensors on the meta device have no values")
            return
        if expected.is_nested:
            for number, (a, e) in enumerate(zip(actual.unbind(), expected.unbind())):
                yield self._plain(a, e, f"{path}[{number}]")
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
        if expected.is_quantized and torch.equal(actual.int_repr(), expected.int_repr()):
            yield self._exact(actual.dequantize(), expected.dequantize(), path)

    def _plain(self, actual: torch.Tensor, expected: torch.Tensor, path: str) -> Check:
        if not (expected.is_floating_point() or expected.is_complex()):
            return self._exact(actual, expected, path)
        if expected.numel() == 0 or _bitwise(actual, expected):
            return self._check("values", path, True, max_abs=0.0, max_rel=0.0)
        return self._close(actual, expected, path, *self._scaled(expected.dtype, expected))

    def _scaled(self, dtype: torch.dtype, expected: torch.Tensor) -> tuple[float, float]:
        """Limits of a dtype. An absolute tolerance says nothing about numbers that are smaller than it."""
        rtol, atol = self._limits(dtype)
        return rtol, atol * min(1.0, _size(expected)) if self._tolerances.atol is None else atol

    def _limits(self, dtype: torch.dtype) -> tuple[float, float]:
        default = DTYPE_TOLERANCES.get(dtype)
        if default is None:
            # float8 and the like: one step of the format, where that is less than the value itself.
            eps = torch.finfo(dtype).eps
            default = (eps, 1e-5) if eps < 0.5 else (0.0, 0.0)
        rtol, atol = self._tolerances.rtol, self._tolerances.atol
        return (default[0] if rtol is None else rtol, default[1] if atol is None else atol)

    def _exact(self, actual: torch.Tensor, expected: torch.Tensor, path: str) -> Check:
        if torch.equal(actual, expected):
            return self._check("values", path, True, max_abs=0.0)
        wrong = actual != expected
        off = (actual.to(torch.float64) - expected.to(torch.float64)).abs()
        where = _index(torch.where(wrong, off, -1.0).argmax().item(), expected.shape)
        worst = Worst(where, _plain(actual[where].item()), _plain(expected[where].item()))
        note = f"{_share(int(wrong.sum().item()), expected)} differ"
        return self._check("values", path, False, note, max_abs=off.max().item(), worst=worst)

    def _close(self, actual: torch.Tensor, expected: torch.Tensor, path: str, rtol: float, atol: float) -> Check:
        if expected.numel() == 0 or _bitwise(actual, expected):
            return self._check("values", path, True, max_abs=0.0, max_rel=0.0)
        a, e = actual.detach().reshape(-1), expected.detach().reshape(-1)
        # In parts: float64 copies of a large tensor would not fit beside it.
        parts = [_distance(a[n : n + _PART], e[n : n + _PART], rtol, atol) for n in range(0, len(e), _PART)]
        numbers: dict[str, Any] = {
            "max_abs": max(part.max_abs for part in parts),
            "max_rel": max(part.max_rel for part in parts),
        }
        wrong = sum(part.wrong for part in parts)
        if not wrong:
            return self._check("values", path, True, **numbers)
        number, worst = max(enumerate(parts), key=lambda part: part[1].score)
        where = _index(number * _PART + worst.index, expected.shape)
        note = f"{_share(wrong, expected)} differ by more than atol={atol:g} + rtol={rtol:g} * |eager|"
        found = Worst(where, _plain(actual[where].item()), _plain(expected[where].item()))
        return self._check("values", path, False, note, worst=found, **numbers)


def _bitwise(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all values are equal; False also where torch can't compare the dtype without widening it."""
    try:
        return torch.equal(actual, expected)
    except RuntimeError:
        return False


def _plain(value: Any) -> float | int | str:
    """A number as JSON knows it; others, infinite ones and NaN as text."""
    if isinstance(value, (bool, complex)) or not math.isfinite(value):
        return str(value)
    return value  # type: ignore[no-any-return]


#: Elements that are compared at a time.
_PART = 1 << 22


def _size(tensor: torch.Tensor) -> float:
    """Root mean square of the finite elements."""
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.dtype in DTYPE_TOLERANCES else torch.float32
    values = tensor.detach().reshape(-1).to(dtype)
    total = float(torch.linalg.vector_norm(values))
    if math.isfinite(total):
        return total / math.sqrt(len(values))
    finite = values[torch.isfinite(values)].to(torch.complex128 if tensor.is_complex() else torch.float64)
    return float(torch.linalg.vector_norm(finite)) / math.sqrt(max(len(finite), 1))


@dataclass(frozen=True)
class _Distance:
    wrong: int
    max_abs: float
    max_rel: float
    #: Of the worst element: its distance, infinite where only one side is finite, and its place.
    score: float
    index: int


def _distance(actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> _Distance:
    dtype = _NATIVE.get(expected.dtype, torch.float32)
    found = _distance_in(dtype, actual, expected, rtol, atol)
    if dtype is torch.float32 and not math.isfinite(found.max_abs):
        return _distance_in(torch.float64, actual, expected, rtol, atol)  # differences of huge numbers
    return found


#: What distances are computed in, where that is not float32: differences of close numbers are exact in their dtype.
_NATIVE = {
    torch.float64: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}


def _distance_in(
    dtype: torch.dtype, actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float
) -> _Distance:
    a, e = actual.to(dtype), expected.to(dtype)
    off, size = (a - e).abs(), e.abs()
    limit = size * rtol + atol
    largest = float(off.max())
    if math.isfinite(largest) and bool((off <= limit).all()):
        return _Distance(0, largest, float(torch.where(size == 0, 0.0, off / size).max()), -1.0, 0)
    finite = torch.isfinite(a) & torch.isfinite(e)
    same = (a == e) | (torch.isnan(a) & torch.isnan(e))
    off = torch.where(finite, (a - e).abs(), 0.0)
    wrong = ~same & (~finite | (off > limit))
    relative = torch.where(finite & (e != 0), off / e.abs(), 0.0)
    score = torch.where(wrong, torch.where(finite, off, math.inf), -1.0)
    index = int(score.argmax().item())
    return _Distance(int(wrong.sum().item()), off.max().item(), relative.max().item(), score[index].item(), index)


def _shape(tensor: torch.Tensor) -> Any:
    # A nested tensor has none, or one that holds a number of its own for the ragged dimension.
    return [tuple(part.shape) for part in tensor.unbind()] if tensor.is_nested else tensor.shape


_FACTS = (
    ("type", lambda tensor: tensor.layout),
    ("dtype", lambda tensor: tensor.dtype),
    ("device", lambda tensor: tensor.device),
    ("shape", _shape),
    ("requires_grad", lambda tensor: tensor.requires_grad),
)


def _is_numpy(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _copies_itself(value: object) -> bool:
    """Whether a type decides what its copies hold, so that eager's copy may lack something."""
    names = ("__copy__", "__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")
    return any(name in vars(cls) for cls in type(value).__mro__[:-1] for name in names)


def _compares_itself(value: object) -> bool:
    return vars(object)["__eq__"] is not getattr(type(value), "__eq__", None)


def _key(key: object) -> object:
    return f"tensor {tuple(key.shape)}" if isinstance(key, torch.Tensor) else key


def _short(value: object) -> str:
    try:
        text = repr(value) if not isinstance(value, torch.Tensor) else f"tensor{tuple(value.shape)}"
    except Exception:  # a method of the user's
        text = f"an object of {type(value).__qualname__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _share(wrong: int, of: torch.Tensor) -> str:
    return f"{wrong} of {of.numel()} elements"


def _index(flat: int | float, shape: torch.Size) -> tuple[int, ...]:
    out: list[int] = []
    rest = int(flat)
    for size in reversed(shape):
        out.append(rest % size)
        rest //= size
    return tuple(reversed(out))
