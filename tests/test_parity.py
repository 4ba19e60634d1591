from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import math
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any
from typing import NamedTuple

import numpy as np
import pytest
import torch

from pytest_dynamo.parity import DTYPE_TOLERANCES
from pytest_dynamo.parity import compare
from pytest_dynamo.record import Check
from pytest_dynamo.record import Worst
from pytest_dynamo.settings import Tolerances


NAN, INF = math.nan, math.inf


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Batch:
    logits: Any
    names: Any = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


class Output(collections.OrderedDict[str, Any]):
    """A dict with attributes, as model libraries return it."""


class Plain:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class WithSlots:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Both(WithSlots):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(x)
        self.y = y


class Opaque:
    pass


class Lazy:
    @property
    def broken(self) -> Any:
        raise RuntimeError("not ready")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Tagged(torch.Tensor):
    pass


class Listed(list[Any]):
    pass


def t(*values: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(list(values), **kwargs)


def output(x: Any, **attributes: Any) -> Output:
    made = Output(x=x)
    vars(made).update(attributes)
    return made


def both(actual: Any, expected: Any, **given: Any) -> list[Check]:
    """Checks that did not pass."""
    checks = compare(actual, expected, tolerances=Tolerances(**given))
    return [check for check in checks if check.passed is not True]


def quantized(values: list[float], scale: float = 0.5, zero: int = 1) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.tensor(values), scale, zero, torch.quint8)


def jagged(*parts: list[float]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(part) for part in parts], layout=torch.jagged)


def strided(*parts: list[float]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(part) for part in parts])


def function_with(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    return inner


def recursive(value: float) -> list[Any]:
    made: list[Any] = [torch.tensor(value)]
    made.append({"again": made})
    return made


# -- what must pass -------------------------------------------------------------------------------

#: Each is made twice: nothing may differ.
SAME: dict[str, Callable[[], Any]] = {
    "float32": lambda: t(1.0, 2.0),
    "float64": lambda: t(1.0, dtype=torch.float64),
    "float16": lambda: t(1.0, dtype=torch.float16),
    "bfloat16": lambda: t(1.0, dtype=torch.bfloat16),
    "float8": lambda: t(1.0).to(torch.float8_e4m3fn),
    "complex64": lambda: t(1 + 2j),
    "complex32": lambda: t(1 + 2j).to(torch.complex32),
    "bool": lambda: t(True, False),
    "uint8": lambda: t(1, dtype=torch.uint8),
    "uint16": lambda: t(1, 2, dtype=torch.uint16),
    "uint32": lambda: t(1, 2, dtype=torch.uint32),
    "uint64": lambda: t(1, 2, dtype=torch.uint64),
    "int64": lambda: t(2**62),
    "scalar tensor": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
    "NaN": lambda: t(NAN, INF, -INF, 1.0),
    "requires grad": lambda: t(1.0, requires_grad=True),
    "non-leaf": lambda: t(1.0, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(t(1.0)),
    "subclass": lambda: t(1.0).as_subclass(Tagged),
    "conj": lambda: t(1 + 2j).conj(),
    "expanded": lambda: t(1.0).expand(3, 1),
    "COO": lambda: torch.eye(3).to_sparse(),
    "CSR": lambda: torch.eye(3).to_sparse_csr(),
    "sparse int": lambda: torch.eye(3, dtype=torch.int64).to_sparse(),
    "nested": lambda: strided([1.0], [2.0, 3.0]),
    "jagged": lambda: jagged([1.0], [2.0, 3.0]),
    "quantized": lambda: quantized([1.0, 2.0]),
    "quantized by channel": lambda: torch.quantize_per_channel(torch.ones(2, 2), t(0.1, 0.2), t(0, 0), 0, torch.qint8),
    "None": lambda: None,
    "int": lambda: 3,
    "float": lambda: 0.1 + 0.2,
    "NaN number": lambda: float("nan"),
    "inf number": lambda: float("inf"),
    "complex": lambda: complex(1, 2),
    "str": lambda: "".join(["a", "b"]),
    "bytes": lambda: bytes([1, 2]),
    "bytearray": lambda: bytearray(b"ab"),
    "bool number": lambda: True,
    "enum": lambda: Colour.RED,
    "dtype": lambda: torch.float32,
    "device": lambda: torch.device("cpu"),
    "size": lambda: torch.Size([1, 2]),
    "layout": lambda: torch.strided,
    "memory format": lambda: torch.channels_last,
    "type": lambda: int,
    "module of Python": lambda: math,
    "builtin": lambda: len,
    "range": lambda: range(3),
    "slice": lambda: slice(1, 2),
    "Fraction": lambda: Fraction(1, 3),
    "Decimal": lambda: decimal.Decimal("0.1"),
    "date": lambda: datetime.date(2020, 1, 1),
    "list": lambda: [t(1.0), [t(2)]],
    "tuple": lambda: (t(1.0), ()),
    "dict": lambda: {"a": t(1.0), 2: {"b": t(2)}},
    "set": lambda: {1, "a"},
    "frozenset": lambda: frozenset({1}),
    "deque": lambda: collections.deque([t(1.0)]),
    "defaultdict": lambda: collections.defaultdict(list, a=[1]),
    "Counter": lambda: collections.Counter("aab"),
    "namedtuple": lambda: Point(t(1.0), 2),
    "dataclass": lambda: Batch(t(1.0), ["a"]),
    "slotted dataclass": lambda: Slotted(t(1.0)),
    "dict with attributes": lambda: output(t(1.0), loss=t(2.0)),
    "list with attributes": lambda: Listed([t(1.0)]),
    "return type of torch": lambda: torch.max(t(1.0, 2.0), dim=0),
    "object": lambda: Plain(x=t(1.0), y=Plain(z=3)),
    "slots": lambda: WithSlots(t(1.0)),
    "slots and attributes": lambda: Both(t(1.0), 2),
    "cycle": lambda: recursive(1.0),
    "closure": lambda: (t(1.0), function_with(3)),
    "numpy array": lambda: np.arange(3.0),
    "numpy int": lambda: np.arange(3),
    "numpy bool": lambda: np.array([True]),
    "numpy complex": lambda: np.array([1j]),
    "numpy NaN": lambda: np.array([NAN, 1.0]),
    "numpy scalar": lambda: np.float32(1.5),
    "numpy float64": lambda: np.float64(1.5),
    "numpy str": lambda: np.array(["a", "b"]),
    "numpy object": lambda: np.array([1, "a", None], dtype=object),
    "numpy date": lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
    "numpy big endian": lambda: np.arange(3, dtype=">f4"),
    "numpy longdouble": lambda: np.arange(3, dtype=np.longdouble),
    "numpy reversed": lambda: np.arange(3.0)[::-1],
    "numpy records": lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
    "numpy masked": lambda: np.ma.array([1.0, 2.0], mask=[True, False]),
    "numpy 0-d": lambda: np.array(1.0),
    "numpy empty": lambda: np.zeros((0, 2)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", SAME.values(), ids=SAME.keys())
def test_equal_results_pass(make: Callable[[], Any]) -> None:
    """Two results of the same function agree, and something was compared."""
    checks = compare(make(), make(), tolerances=Tolerances())
    assert checks
    assert {check.passed for check in checks} == {True}, checks


@pytest.mark.parametrize("make", SAME.values(), ids=SAME.keys())
@pytest.mark.filterwarnings("ignore")
def test_a_result_agrees_with_itself(make: Callable[[], Any]) -> None:
    """One object that both runs returned agrees with itself."""
    value = make()
    (check,) = compare(value, value, tolerances=Tolerances())
    assert (check.what, check.path, check.passed) == ("values", "out", True)


# -- planted differences --------------------------------------------------------------------------

X = t(1.0, 2.0)

#: name: (compiled, eager, what, path)
DIFFERENT: dict[str, tuple[Any, Any, str, str]] = {
    "value": (t(1.0, 2.5), X, "values", "out"),
    "value of float64": (t(1.0 + 1e-6, dtype=torch.float64), t(1.0, dtype=torch.float64), "values", "out"),
    "value of int": (t(1, 3), t(1, 2), "values", "out"),
    "value of bool": (t(True), t(False), "values", "out"),
    "value of uint16": (t(1, dtype=torch.uint16), t(2, dtype=torch.uint16), "values", "out"),
    "value of uint64": (t(1, dtype=torch.uint64), t(2, dtype=torch.uint64), "values", "out"),
    "value of complex": (t(1 + 2j), t(1 + 3j), "values", "out"),
    "value of float8": (t(2.0).to(torch.float8_e5m2), t(1.0).to(torch.float8_e5m2), "values", "out"),
    "value of a scalar": (torch.tensor(1.0), torch.tensor(2.0), "values", "out"),
    "value of a large int": (t(2**53 + 1), t(2**53), "values", "out"),
    "NaN": (t(NAN, 2.0), X, "values", "out"),
    "NaN in eager": (X, t(NAN, 2.0), "values", "out"),
    "NaN elsewhere": (t(NAN, 2.0), t(1.0, NAN), "values", "out"),
    "inf": (t(INF, 2.0), X, "values", "out"),
    "sign of inf": (t(INF), t(-INF), "values", "out"),
    "inf for NaN": (t(INF), t(NAN), "values", "out"),
    "dtype": (X.double(), X, "dtype", "out"),
    "int dtype": (t(1, dtype=torch.int32), t(1), "dtype", "out"),
    "shape": (t(1.0), X, "shape", "out"),
    "broadcastable shape": (torch.ones(1, 2), torch.ones(2, 2), "shape", "out"),
    "scalar for one element": (torch.tensor(1.0), t(1.0), "shape", "out"),
    "requires_grad": (X.clone().requires_grad_(), X.clone(), "requires_grad", "out"),
    "no requires_grad": (X.clone(), X.clone().requires_grad_(), "requires_grad", "out"),
    "layout": (torch.eye(2), torch.eye(2).to_sparse(), "type", "out"),
    "device": (torch.ones(2), torch.ones(2, device="meta"), "device", "out"),
    "device meta": (torch.ones(2, device="meta"), torch.ones(2), "device", "out"),
    "parameter": (t(1.0, requires_grad=True), torch.nn.Parameter(t(1.0)), "type", "out"),
    "subclass": (t(1.0), t(1.0).as_subclass(Tagged), "type", "out"),
    "COO value": (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse(), "values", "out.to_dense()"),
    "COO place": (torch.eye(2).to_sparse(), torch.eye(2).flip(0).to_sparse(), "values", "out.to_dense()"),
    "CSR value": (torch.eye(2).to_sparse_csr(), (2 * torch.eye(2)).to_sparse_csr(), "values", "out.to_dense()"),
    "sparse shape": (torch.eye(2).to_sparse(), torch.eye(3).to_sparse(), "shape", "out"),
    "quantized value": (quantized([1.0, 2.0]), quantized([1.0, 3.0]), "values", "out.int_repr()"),
    "quantized type": (X, quantized([1.0, 2.0]), "dtype", "out"),
    "None for a tensor": (None, X, "type", "out"),
    "tensor for a number": (torch.tensor(1.0), 1.0, "type", "out"),
    "int for a float": (1, 1.0, "type", "out"),
    "bool for an int": (True, 1, "type", "out"),
    "list for a tuple": ([X], (X,), "type", "out"),
    "dict for OrderedDict": ({"a": 1}, collections.OrderedDict(a=1), "type", "out"),
    "number": (1.5, 1.0, "values", "out"),
    "NaN number": (NAN, 1.0, "values", "out"),
    "complex number": (1 + 2j, 1 + 3j, "values", "out"),
    "int": (1, 2, "values", "out"),
    "str": ("a", "b", "values", "out"),
    "enum": (Colour.RED, Colour.BLUE, "values", "out"),
    "dtype object": (torch.float32, torch.float64, "values", "out"),
    "device object": (torch.device("cpu"), torch.device("meta"), "values", "out"),
    "size object": (torch.Size([1]), torch.Size([2]), "values", "out[0]"),
    "function": (len, abs, "values", "out"),
    "class": (int, float, "values", "out"),
    "range": (range(3), range(4), "values", "out"),
    "slice": (slice(1), slice(2), "values", "out"),
    "Fraction": (Fraction(1, 3), Fraction(1, 2), "values", "out._denominator"),
    "Decimal": (decimal.Decimal("0.1"), decimal.Decimal("0.2"), "values", "out"),
    "date": (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2), "values", "out"),
    "bytearray": (bytearray(b"a"), bytearray(b"b"), "values", "out"),
    "set": ({1, 2}, {1, 3}, "values", "out"),
    "item of a list": ([X, t(1)], [X, t(2)], "values", "out[1]"),
    "length of a list": ([X, X], [X], "structure", "out"),
    "item of a tuple": ((1, (X, 2)), (1, (X, 3)), "values", "out[1][1]"),
    "item of a deque": (collections.deque([1]), collections.deque([2]), "values", "out[0]"),
    "value of a dict": ({"a": X, "b": t(1)}, {"a": X, "b": t(2)}, "values", "out['b']"),
    "key of a dict": ({"a": 1}, {"b": 1}, "structure", "out"),
    "missing key": ({}, {"b": 1}, "structure", "out"),
    "further key": ({"a": 1, "b": 1}, {"a": 1}, "structure", "out"),
    "order of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "structure", "out"),
    "deep": ({"a": [Point(X, {"z": t(1)})]}, {"a": [Point(X, {"z": t(2)})]}, "values", "out['a'][0].y['z']"),
    "field of a namedtuple": (Point(1, 2), Point(1, 3), "values", "out.y"),
    "field of a dataclass": (Batch(t(1.0)), Batch(t(2.0)), "values", "out.logits"),
    "field of a slotted dataclass": (Slotted(t(1.0)), Slotted(t(2.0)), "values", "out.x"),
    "type in a dataclass": (Batch(t(1.0), ["a"]), Batch(t(1.0), ("a",)), "type", "out.names"),
    "attribute of a dict": (output(X, loss=t(1)), output(X, loss=t(2)), "values", "out.loss"),
    "missing attribute of a dict": (output(X), output(X, loss=t(2)), "structure", "out.loss"),
    "item of a dict with attributes": (output(t(1)), output(t(2)), "values", "out['x']"),
    "return type of torch": (torch.max(t(1, 2), 0), torch.max(t(2, 1), 0), "values", "out[1]"),
    "attribute": (Plain(x=t(1.0)), Plain(x=t(2.0)), "values", "out.x"),
    "missing attribute": (Plain(x=1), Plain(x=1, y=2), "structure", "out.y"),
    "further attribute": (Plain(x=1, y=2), Plain(x=1), "structure", "out.y"),
    "slot": (WithSlots(t(1.0)), WithSlots(t(2.0)), "values", "out.x"),
    "slot beside attributes": (Both(t(1.0), 2), Both(t(2.0), 2), "values", "out.x"),
    "attribute beside slots": (Both(t(1.0), 2), Both(t(1.0), 3), "values", "out.y"),
    "cycle": (recursive(1.0), recursive(2.0), "values", "out[0]"),
    "closure": (function_with(t(1.0)), function_with(t(2.0)), "values", "out.value"),
    "numpy value": (np.array([1.0]), np.array([2.0]), "values", "out"),
    "numpy int": (np.array([1]), np.array([2]), "values", "out"),
    "numpy dtype": (np.zeros(1, "f4"), np.zeros(1, "f8"), "dtype", "out"),
    "numpy shape": (np.zeros(1), np.zeros(2), "shape", "out"),
    "numpy scalar": (np.float32(1), np.float32(2), "values", "out"),
    "numpy scalar type": (np.float32(1), np.float64(1), "type", "out"),
    "numpy for a tensor": (np.ones(2), torch.ones(2), "type", "out"),
    "numpy str": (np.array(["a"]), np.array(["b"]), "values", "out"),
    "numpy str shape": (np.array(["a"]), np.array(["a", "a"]), "shape", "out"),
    "numpy object": (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object), "values", "out[1]"),
    "numpy object of arrays": (
        np.array([np.zeros(2), 1], dtype=object),
        np.array([np.ones(2), 1], dtype=object),
        *("values", "out[0]"),
    ),
    "numpy longdouble": (np.zeros(1, np.longdouble), np.ones(1, np.longdouble), "values", "out"),
    "numpy big endian": (np.zeros(1, ">f4"), np.ones(1, ">f4"), "values", "out"),
    "numpy byte order": (np.zeros(1, ">f4"), np.zeros(1, "<f4"), "dtype", "out"),
    "numpy masked value": (np.ma.array([1.0]), np.ma.array([2.0]), "values", "out"),
    "numpy masked mask": (
        np.ma.array([1.0], mask=[True]),
        np.ma.array([1.0], mask=[False]),
        *("values", "out._mask"),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("actual", "expected", "what", "path"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_planted_differences_are_found(actual: Any, expected: Any, what: str, path: str) -> None:
    """Each difference is named by kind and place, with a note, and raises nothing."""
    failed = [check for check in both(actual, expected) if check.passed is False]
    assert [(check.what, check.path) for check in failed] == [(what, path)]
    assert failed[0].note


@pytest.mark.parametrize(
    ("actual", "expected", "path"),
    [
        (strided([1.0], [2.0, 3.0]), strided([1.0], [2.0, 4.0]), "out[1]"),
        (jagged([1.0], [2.0, 3.0]), jagged([1.0], [2.0, 4.0]), "out"),
    ],
    ids=["strided", "jagged"],
)
@pytest.mark.filterwarnings("ignore")
def test_values_of_nested_tensors(actual: Any, expected: Any, path: str) -> None:
    """A difference in one part of a nested tensor is found."""
    (check,) = both(actual, expected)
    assert (check.what, check.passed) == ("values", False)
    assert check.path.startswith(path)


@pytest.mark.parametrize("make", [strided, jagged])
@pytest.mark.filterwarnings("ignore")
def test_shapes_of_nested_tensors(make: Callable[..., Any]) -> None:
    """Other lengths of the parts, or another number of them, are a difference of shape."""
    for actual in (make([1.0, 2.0], [3.0]), make([1.0, 2.0, 3.0]), make([1.0], [2.0], [3.0])):
        failed = both(actual, make([1.0], [2.0, 3.0]))
        assert {check.passed for check in failed} == {False}
        assert any(check.what == "shape" for check in failed)


@pytest.mark.parametrize(("scale", "zero"), [(0.25, 1), (0.5, 0)])
@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_of_other_parameters(scale: float, zero: int) -> None:
    """The same stored integers with another scale or zero point are other values."""
    expected = quantized([1.0, 2.0])
    actual = torch._make_per_tensor_quantized_tensor(expected.int_repr(), scale, zero)
    assert torch.equal(actual.int_repr(), expected.int_repr())
    assert [check.what for check in both(actual, expected)] == ["values"]


def test_several_differences_are_all_told() -> None:
    """Not only the first: each tensor is judged for itself."""
    failed = both([t(1.0), t(2), X], [t(1.5), t(2), X.double()])
    assert [(check.path, check.what) for check in failed] == [("out[0]", "values"), ("out[2]", "dtype")]


def test_several_facts_of_one_tensor() -> None:
    """A tensor of another dtype and shape is told as both, and its values are not compared."""
    failed = both(torch.ones(2, dtype=torch.float64, requires_grad=True), torch.ones(3))
    assert [check.what for check in failed] == ["dtype", "shape", "requires_grad"]


def test_values_are_compared_where_only_requires_grad_differs() -> None:
    """A lost gradient does not hide a wrong value."""
    failed = both(t(1.0, requires_grad=True), t(2.0))
    assert [check.what for check in failed] == ["requires_grad", "values"]


# -- what can't be judged -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actual", "expected", "what", "note"),
    [
        (torch.ones(2, device="meta"), torch.ones(2, device="meta"), "values", "tensors on the meta device have no"),
        ({t(1.0)}, {t(1.0)}, "structure", "tensors in a set have no order to compare them by"),
        (Opaque(), Opaque(), "structure", "don't know how to compare objects of "),
        (threading.Lock(), threading.Lock(), "structure", "don't know how to compare objects of _thread.lock"),
        (Lazy(), Lazy(), "structure", "don't know how to compare objects of "),
        (torch.Generator(), torch.Generator(), "structure", "don't know how to compare objects of "),
        ((i for i in ()), (i for i in ()), "structure", "don't know how to compare objects of builtins.generator"),
    ],
    ids=["meta", "set", "object", "lock", "property", "generator of torch", "generator"],
)
def test_not_judged(actual: Any, expected: Any, what: str, note: str) -> None:
    """What can't be compared is neither passed nor failed, and says why."""
    (check,) = both(actual, expected)
    assert (check.what, check.passed) == (what, None)
    assert check.note is not None
    assert check.note.startswith(note)


def test_facts_of_meta_tensors_are_judged() -> None:
    """A meta tensor has no values, but a shape and a dtype."""
    failed = both(torch.ones(2, device="meta"), torch.ones(3, device="meta"))
    assert [check.what for check in failed] == ["shape"]


def test_an_object_whose_comparison_raises_is_not_judged() -> None:
    """A comparison of the user's that raises stops nothing."""

    class Hostile:
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no")

        __hash__ = None  # type: ignore[assignment]

    (check,) = both(Hostile(), Hostile())
    assert check.passed is None


# -- tolerances -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPE_TOLERANCES, ids=str)
def test_tolerances_are_those_of_torch(dtype: torch.dtype) -> None:
    """The table is what torch.testing.assert_close takes by default."""
    one = torch.ones(1, dtype=dtype)
    rtol, atol = DTYPE_TOLERANCES[dtype]
    try:
        torch.testing.assert_close(one, one * 2)
    except AssertionError as error:
        text = str(error)
    assert f"(up to {atol} allowed)" in text
    assert f"(up to {rtol} allowed)" in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_just_within_and_just_beyond(dtype: torch.dtype) -> None:
    """Values may be off by atol + rtol * |eager| and no more."""
    rtol, atol = DTYPE_TOLERANCES[dtype]
    expected = torch.full((1,), 100.0, dtype=dtype)
    allowed = atol + rtol * 100.0
    step = torch.finfo(dtype).eps * 64
    near = torch.tensor([100.0 + allowed - step], dtype=torch.float64).to(dtype)
    while (near.double() - 100.0).abs().item() > allowed:
        near = torch.nextafter(near.float(), torch.zeros(1)).to(dtype)
    far = torch.tensor([100.0 + 2 * allowed + step], dtype=torch.float64).to(dtype)
    assert both(near, expected) == []
    assert [check.what for check in both(far, expected)] == ["values"]


def test_given_tolerances() -> None:
    """What the test allows replaces the default of the dtype, each for itself; integers stay bitwise."""
    assert both(t(1.1), t(1.0), rtol=0.2) == []
    assert both(t(1.1), t(1.0), atol=0.2) == []
    assert both(t(1.1), t(1.0), rtol=0.01) != []
    assert both(t(1.0 + 1e-6), t(1.0), rtol=0, atol=0) != []
    assert both(t(2), t(1), rtol=10, atol=10) != []
    assert both(1.1, 1.0, rtol=0.2) == []
    assert both([np.array([1.1])], [np.array([1.0])], atol=0.2) == []


def test_numbers_have_the_tolerance_of_float32() -> None:
    """A Python number may come from float32 arithmetic."""
    assert both(1.0 + 1e-6, 1.0) == []
    assert both(1.0 + 1e-4, 1.0) != []
    assert both(np.float64(1.0 + 1e-6), np.float64(1.0)) == []


def test_the_tolerance_is_relative_to_eager() -> None:
    """As in assert_close, eager's value is the reference."""
    assert both(t(1.9), t(1.0), rtol=0.5, atol=0) != []
    assert both(t(1.0), t(1.9), rtol=0.5, atol=0) == []


def test_infinite_tolerance_still_wants_nan_and_inf_where_eager_has_them() -> None:
    """NaN and infinity are no matter of tolerance."""
    for actual in (t(NAN), t(INF)):
        assert both(actual, t(1.0), rtol=1e9, atol=INF) != []


# -- numbers and notes ----------------------------------------------------------------------------


def test_small_numbers_have_a_tolerance_of_their_size() -> None:
    """A learning rate of 1e-5 that was not halved is no rounding."""
    assert both(1e-5, 5e-6) != []
    assert both(9e-6, 1e-6) != []
    assert both(1e-9 * (1 + 1e-6), 1e-9) == []
    assert both(0.0, 0.0) == []
    assert both(1e-5, 5e-6, rtol=0, atol=1e-5) == []


def test_numbers_of_a_check_that_passed() -> None:
    """Also a check that passed says how far off it was."""
    (check,) = compare(t(1.0, 2.0 + 2**-20), t(1.0, 2.0), tolerances=Tolerances())
    assert check.passed is True
    assert check.max_abs == 2**-20
    assert check.max_rel == 2**-21


def test_note_of_floating_point_values() -> None:
    """How many, by which measure, and the worst element with both values."""
    (check,) = both(torch.tensor([[1.0, 2.0], [3.5, 14.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert check.note == "2 of 4 elements differ by more than atol=1e-05 + rtol=1.3e-06 * |eager|"
    assert check.worst == Worst((1, 1), 14.0, 4.0)
    assert (check.max_abs, check.max_rel) == (10.0, 2.5)


def test_note_of_integers() -> None:
    """The element that is furthest off; of bools the first."""
    (check,) = both(torch.tensor([[1, 2], [5, 4]]), torch.tensor([[1, 2], [3, 7]]))
    assert check.note == "2 of 4 elements differ"
    assert (check.worst, check.max_abs) == (Worst((1, 1), 4, 7), 3.0)
    (check,) = both(torch.tensor([True, True]), torch.tensor([True, False]))
    assert check.note == "1 of 2 elements differ"
    assert check.worst == Worst((1,), "True", "False")
    (check,) = both(torch.tensor(2**62 + 1), torch.tensor(2**62))
    assert check.worst == Worst((), 2**62 + 1, 2**62)


def test_note_prefers_nan_over_large() -> None:
    """A NaN is worse than any finite difference, and the numbers stay finite."""
    (check,) = both(t(100.0, NAN), t(1.0, 2.0))
    assert check.worst == Worst((1,), "nan", 2.0)
    assert check.max_abs == 99.0


@pytest.mark.parametrize(
    ("actual", "expected", "note"),
    [
        (X.double(), X, "compiled torch.float64, eager torch.float32"),
        (t(1.0), X, "compiled torch.Size([1]), eager torch.Size([2])"),
        (None, X, "compiled NoneType, eager torch.Tensor"),
        ([1], [1, 2], "compiled has 1 items, eager 2"),
        ({"a": 1}, {"b": 1}, "compiled ['a'], eager ['b']"),
        (3, 4, "compiled 3, eager 4"),
        (Plain(), Plain(x=1), "compiled has no such attribute"),
        (Plain(x=1, y=1), Plain(x=1), "eager has no such attribute"),
        (t(1.0, requires_grad=True), t(1.0), "compiled True, eager False"),
        ("a" * 100, "b" * 100, f"compiled '{'a' * 76}..., eager '{'b' * 76}..."),
    ],
)
def test_notes(actual: Any, expected: Any, note: str) -> None:
    """Compiled's fact and eager's, in that order."""
    (check,) = both(actual, expected)
    assert check.note == note


def test_call_and_path_are_passed_on() -> None:
    """Checks name the call and the thing that was compared."""
    (check,) = compare([t(1)], [t(2)], tolerances=Tolerances(), call=3, path="args[0]")
    assert (check.call, check.path) == (3, "args[0][0]")


def test_shared_objects_are_compared_once() -> None:
    """A tensor that occurs twice is judged once."""
    a, b = t(1.0), t(2.0)
    assert [check.path for check in both([a, a], [b, b])] == ["out[0]"]


def test_keys_that_are_tensors() -> None:
    """Tensors as keys are matched by order and shape."""
    assert both({t(1.0): 1}, {t(1.0): 1}) == []
    assert [check.what for check in both({t(1.0): 1}, {t(1.0, 2.0): 1})] == ["structure"]
    assert [check.what for check in both({t(1.0): 1}, {t(1.0): 2})] == ["values"]


def test_bound_methods_are_compared_by_their_objects() -> None:
    """Those of a copy agree with those of the original, unless one of the objects was changed."""
    assert both(Both(1, 2).__init__, Both(1, 2).__init__) == []  # type: ignore[misc]
    (check,) = both(Both(1, 2).__init__, Both(1, 3).__init__)  # type: ignore[misc]
    assert (check.path, check.passed) == ("out.__self__.y", False)
    (check,) = both([].append, [].clear)
    assert check.passed is False
