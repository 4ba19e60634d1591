from __future__ import annotations

import collections
import dataclasses
import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo
import torch.nn.utils.prune
from torch._subclasses import FakeTensorMode

from pytest_dynamo import inputs
from pytest_dynamo._torch import storage_key
from pytest_dynamo.state import CopyBeforeWrite
from pytest_dynamo.state import Random
from pytest_dynamo.state import State


def clone(*arguments: Any, keep: Any = ()) -> Any:
    """Clone arguments; they must be copied faithfully."""
    copied, notes = inputs.clone(arguments, list(keep))
    assert notes == []
    return copied if len(arguments) > 1 else copied[0]


def same_geometry(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.stride(), a.storage_offset(), a.dtype) == (b.shape, b.stride(), b.storage_offset(), b.dtype)


# -- cloning of tensors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0),
        lambda: torch.arange(12.0).reshape(3, 4).t(),
        lambda: torch.arange(12.0)[3:9:2],
        lambda: torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        lambda: torch.arange(3.0).expand(4, 3),
        lambda: torch.arange(5.0).as_strided((3, 3), (1, 1)),
        lambda: torch.tensor(3.0),
        lambda: torch.empty(0, 3),
        lambda: torch.tensor([True, False]),
        lambda: torch.arange(4, dtype=torch.int8)[1:],
        lambda: torch.ones(3, dtype=torch.bfloat16),
        lambda: torch.ones(3, dtype=torch.float8_e4m3fn),
        lambda: torch.tensor([1 + 2j, 3]),
    ],
    ids=[
        *("contiguous", "transposed", "with holes", "channels_last", "expanded", "overlapping", "scalar", "empty"),
        *("bool", "offset", "bfloat16", "float8", "complex"),
    ],
)
def test_geometry_is_kept(make: Callable[[], torch.Tensor]) -> None:
    """A clone has the strides, offset and values of the original, and storage of its own."""
    tensor = make()
    copied = clone(tensor)
    assert type(copied) is torch.Tensor
    assert same_geometry(copied, tensor)
    assert copied.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    assert bytes(copied.untyped_storage()) == bytes(tensor.untyped_storage())
    assert storage_key(copied) != storage_key(tensor)
    assert not copied.requires_grad


@pytest.mark.parametrize("bit", ["conj", "neg"])
def test_conj_and_neg_bits_are_kept(bit: str) -> None:
    """A lazily conjugated or negated view stays lazy."""
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    tensor = tensor.conj() if bit == "conj" else tensor.conj().imag
    copied = clone(tensor)
    assert (copied.is_conj(), copied.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert copied.is_conj() or copied.is_neg()
    assert torch.equal(copied, tensor)


def test_views_of_one_base_stay_views_of_one_base() -> None:
    """Arguments that share storage share it in the clones too, and only with each other."""
    base = torch.arange(10.0)
    a, b, c = clone(base[:6], base[4:], torch.arange(10.0))
    assert storage_key(a) == storage_key(b) != storage_key(c)
    a[4:].fill_(-1)
    assert b.tolist() == [-1, -1, 6, 7, 8, 9]
    assert base.tolist() == list(range(10))


def test_ties_hold_across_containers() -> None:
    """Sharing is kept however deep the tensors lie."""
    base = torch.arange(4.0)
    copied, keywords = clone([{"x": base}], {"y": base[1:], "z": base})
    assert copied[0]["x"] is keywords["z"]
    assert storage_key(copied[0]["x"]) == storage_key(keywords["y"])


def test_a_leaf_that_requires_grad() -> None:
    """A leaf stays a leaf, with a gradient of its own."""
    x = torch.ones(3, requires_grad=True)
    x.grad = torch.full((3,), 5.0)
    copied = clone(x)
    assert copied.is_leaf
    assert copied.requires_grad
    assert copied.grad.tolist() == [5, 5, 5]
    (copied * 2).sum().backward()
    assert copied.grad.tolist() == [7, 7, 7]
    assert x.grad.tolist() == [5, 5, 5]


def test_a_non_leaf_stays_one() -> None:
    """A tensor with a history has one in the clone: in-place writes to it work, gradients stop at it."""
    leaf = torch.ones(3, requires_grad=True)
    x = leaf * 2
    copied = clone(x)
    assert not copied.is_leaf
    assert copied.requires_grad
    assert copied.grad_fn is not None
    copied.mul_(3)
    assert copied.tolist() == [6, 6, 6]
    assert x.tolist() == [2, 2, 2]
    copied.sum().backward()
    assert leaf.grad is None


def test_gradients_with_respect_to_a_non_leaf() -> None:
    """The clone of a non-leaf can be differentiated with respect to."""
    copied = clone(torch.ones(3, requires_grad=True) * 2)
    (grad,) = torch.autograd.grad((copied * 5).sum(), copied)
    assert grad.tolist() == [5, 5, 5]


def test_non_leaf_views_share_storage() -> None:
    """Views with a history keep strides and their tie."""
    x = torch.ones(6, requires_grad=True) * 2
    a, b = clone(x[:4], x[2:])
    assert storage_key(a) == storage_key(b)
    assert not a.is_leaf
    assert not b.is_leaf
    assert (a.storage_offset(), b.storage_offset()) == (0, 2)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_stay_parameters(requires_grad: bool) -> None:
    """A parameter that is passed as an argument is cloned as one, with its gradient."""
    parameter = torch.nn.Parameter(torch.ones(2, 3).t(), requires_grad)
    parameter.grad = torch.ones(3, 2) if requires_grad else None
    copied = clone(parameter)
    assert type(copied) is torch.nn.Parameter
    assert copied.requires_grad is requires_grad
    assert same_geometry(copied, parameter)
    assert (copied.grad is None) is (parameter.grad is None)
    assert copied.grad is not parameter.grad or not requires_grad


def test_parameters_over_one_buffer_keep_it() -> None:
    """Two parameters over one flat buffer share their clone of it."""
    flat = torch.arange(6.0)
    a, b = clone(torch.nn.Parameter(flat[:3]), torch.nn.Parameter(flat[3:]))
    assert storage_key(a) == storage_key(b)
    assert a.tolist() + b.tolist() == list(range(6))


def test_inference_tensors_stay_inference_tensors() -> None:
    """A tensor of inference mode is cloned as one, a normal tensor as a normal one even inside the mode."""
    normal = torch.ones(2)
    with torch.inference_mode():
        inference = torch.ones(2)
        assert not clone(normal).is_inference()
        assert clone(inference).is_inference()
    assert clone(inference).is_inference()


class Tagged(torch.Tensor):
    pass


def test_subclasses_and_attributes_are_kept() -> None:
    """A plain subclass stays one, and attributes of a tensor go with it."""
    tensor = torch.arange(3.0).as_subclass(Tagged)
    tensor.tag = ["a"]  # type: ignore[attr-defined]
    copied = clone(tensor)
    assert type(copied) is Tagged
    assert copied.tag == ["a"]
    assert copied.as_subclass(torch.Tensor).tolist() == [0, 1, 2]
    plain = torch.ones(2)
    plain.tag = "b"  # type: ignore[attr-defined]
    assert clone(plain).tag == "b"


def test_dynamic_marks_are_kept() -> None:
    """Dimensions that were marked as dynamic are so in the clone: it fits the same guards."""
    x = torch.ones(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    marks = {name: value for name, value in vars(x).items() if "dynamo" in name}
    assert marks
    assert {name: value for name, value in vars(clone(x)).items() if "dynamo" in name} == marks


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.quint8),
        lambda: torch.ones(3, device="meta"),
    ],
    ids=["COO", "CSR", "nested", "jagged", "quantized", "meta"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_a_plain_storage(make: Callable[[], torch.Tensor]) -> None:
    """Sparse, nested, quantized and meta tensors are copied as they are."""
    tensor = make()
    copied = clone(tensor)
    assert copied is not tensor
    assert (type(copied), copied.layout, copied.dtype, copied.device) == (
        *(type(tensor), tensor.layout, tensor.dtype, tensor.device),
    )
    if tensor.is_nested:
        assert [part.tolist() for part in copied.unbind()] == [part.tolist() for part in tensor.unbind()]
    elif not tensor.is_meta:
        dense = (lambda t: t.dequantize()) if tensor.is_quantized else (lambda t: t.to_dense())
        assert dense(copied).tolist() == dense(tensor).tolist()


def test_a_sparse_leaf_keeps_requires_grad() -> None:
    """Also without a plain storage a leaf requires grad."""
    assert clone(torch.eye(3).to_sparse().requires_grad_()).requires_grad


def test_generators_are_cloned_with_their_state() -> None:
    """A generator argument draws the same numbers in both runs, and the original is not advanced."""
    generator = torch.Generator().manual_seed(3)
    copied = clone(generator)
    assert copied is not generator
    assert torch.rand(3, generator=copied).tolist() == torch.rand(3, generator=generator).tolist()


def test_hooks_of_tensors_are_told() -> None:
    """Hooks of a tensor are not copied, and that is said."""
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: grad * 2)
    _, notes = inputs.clone((x,), [])
    assert notes == ["hooks of an argument tensor were not copied to its clone"]


# -- cloning of what holds tensors ----------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    names: list[str]


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("make", "get"),
    [
        (lambda x: [x], lambda v: v[0]),
        (lambda x: (x, 1), lambda v: v[0]),
        (lambda x: {"a": {"b": [x]}}, lambda v: v["a"]["b"][0]),
        (lambda x: {x}, lambda v: next(iter(v))),
        (lambda x: collections.deque([x], maxlen=3), lambda v: v[0]),
        (lambda x: collections.OrderedDict(a=x), lambda v: v["a"]),
        (lambda x: Point(x, 1), lambda v: v.x),
        (lambda x: Batch(x, ["a"]), lambda v: v.x),
        (lambda x: Frozen(x), lambda v: v.x),
        (lambda x: Slots(x), lambda v: v.x),
        (lambda x: functools.partial(max, x), lambda v: v.args[0]),
    ],
    ids=[
        *("list", "tuple", "dict", "set", "deque", "OrderedDict", "namedtuple", "dataclass", "frozen dataclass"),
        *("slots", "partial"),
    ],
)
def test_containers(make: Callable[[Any], Any], get: Callable[[Any], torch.Tensor]) -> None:
    """Containers and objects are copied with their type, and the tensors in them are clones."""
    x = torch.arange(3.0)
    value = make(x)
    copied = clone(value)
    assert type(copied) is type(value)
    assert copied is not value
    assert get(copied) is not x
    assert torch.equal(get(copied), x)
    get(copied).add_(1)
    assert x.tolist() == [0, 1, 2]


def test_cycles_are_copied() -> None:
    """A structure that contains itself is copied as one."""
    value: list[Any] = [torch.ones(2)]
    value.append(value)
    copied = clone(value)
    assert copied[1] is copied
    assert copied[0] is not value[0]


def test_modules_and_optimizers_stay_themselves() -> None:
    """They are not cloned: what eager changes in them is put back. Their parameters stay tied to them."""
    module = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    buffers = {"weight": module.weight, "row": module.weight.data[0], "other": torch.ones(3)}
    copied = clone(module, [optimizer], buffers, keep=[module])
    assert copied[0] is module
    assert copied[1][0] is optimizer
    assert copied[2]["weight"] is module.weight
    assert copied[2]["row"] is buffers["row"]
    assert copied[2]["other"] is not buffers["other"]


def test_functions_stay_themselves() -> None:
    """Functions and bound methods are the same objects in both runs; but objects that hold something are copied."""

    class Owner:
        def method(self) -> None: ...

    owner, holder = Owner(), Owner()
    holder.held = [1]  # type: ignore[attr-defined]
    method = clone(holder.method)
    assert method.__self__ is not holder
    assert method.__self__.held == [1]
    assert clone(holder.method, keep=[holder]).__self__ is holder
    assert clone(random.randint).__self__ is random.randint.__self__  # type: ignore[attr-defined]
    copied = clone([test_cycles_are_copied, owner.method, len])
    assert copied[0] is test_cycles_are_copied
    assert copied[1] == owner.method
    assert copied[2] is len


def test_what_cannot_be_copied_is_shared_and_told() -> None:
    """A lock is the same in both runs and named; everything beside it is there and cloned."""
    lock = threading.Lock()
    one, two = torch.ones(2), torch.zeros(2)
    value = {"first": one, "list": [one, lock, two], "tuple": (lock, two), "last": 3}
    copied, notes = inputs.clone(((value,), {"key": [lock, value]}), [])
    assert len(notes) == 1
    assert notes[0].startswith("an argument can't be copied and is shared by both runs: TypeError: cannot pickle")
    inner = copied[0][0]
    assert list(inner) == ["first", "list", "tuple", "last"]
    assert [len(inner["list"]), len(inner["tuple"]), inner["last"]] == [3, 2, 3]
    assert inner["list"][1] is lock
    assert inner["tuple"][0] is lock
    assert inner["first"] is inner["list"][0]
    assert inner["first"] is not one
    assert inner["list"][2] is inner["tuple"][1]
    assert inner["list"][2] is not two
    assert copied[1]["key"][0] is lock
    assert copied[1]["key"][1] is inner


def test_a_result_is_detached_from_later_calls() -> None:
    """A kept result shares no storage with what may be overwritten, and keeps what parity looks at."""
    base = torch.arange(6.0)
    weight = torch.nn.Parameter(torch.ones(2))
    value = {
        "view": base[::2],
        "grad": torch.ones(2, requires_grad=True) * 2,
        "parameter": weight,
        "batch": Batch(base, ["a"]),
        "int": 3,
    }
    kept = inputs.detach(value)
    base.fill_(-1)
    weight.data.fill_(-1)
    assert kept["view"].tolist() == [0, 2, 4]
    assert same_geometry(kept["view"], base[::2])
    assert kept["batch"].x.tolist() == list(range(6))
    assert storage_key(kept["view"]) == storage_key(kept["batch"].x)
    assert kept["grad"].requires_grad
    assert kept["grad"].tolist() == [2, 2]
    assert type(kept["parameter"]) is torch.nn.Parameter
    assert kept["parameter"].tolist() == [1, 1]
    assert kept["int"] == 3
    assert value["view"].tolist() == [-1, -1, -1]


def test_detach_keeps_what_it_cannot_copy() -> None:
    """A result that refuses to be copied is compared as it is."""
    value = [threading.Lock(), torch.ones(2)]
    assert inputs.detach(value) is value


# -- whose state a call can change ----------------------------------------------------------------


GLOBAL = torch.nn.Linear(2, 2)
HOLDER = torch.nn.ReLU()


def uses_a_global(x: Any) -> Any:
    return GLOBAL(x)


def uses_a_global_in_a_lambda(x: Any) -> Any:
    return (lambda y: GLOBAL(y))(x)


def calls_what_uses_a_global(x: Any) -> Any:
    return uses_a_global(x) + 1


class Trainer:
    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def step(self, x: Any) -> Any:
        return GLOBAL(self.module(x))

    def __call__(self, x: Any) -> Any:
        return self.module(x)


def over(module: torch.nn.Module) -> Callable[[Any], Any]:
    def closure(x: Any) -> Any:
        return module(x)

    return closure


def with_default(x: Any, module: Any = HOLDER) -> Any:
    return module(x)


MINE = torch.nn.Linear(2, 2)
SGD = torch.optim.SGD(MINE.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("fn", "arguments", "expected"),
    [
        (MINE, (), [MINE]),
        (MINE.forward, (), [MINE]),
        (len, ([MINE, {"o": SGD}],), [MINE, SGD]),
        (uses_a_global, (), [GLOBAL]),
        (uses_a_global_in_a_lambda, (), [GLOBAL]),
        (calls_what_uses_a_global, (), [GLOBAL]),
        (over(MINE), (), [MINE]),
        (functools.partial(over(MINE)), (), [MINE]),
        (functools.partial(with_default, module=MINE), (), [MINE, HOLDER]),
        (with_default, (), [HOLDER]),
        (Trainer(MINE), (), [MINE]),
        (Trainer(MINE).step, (), [MINE, GLOBAL]),
        (functools.wraps(uses_a_global)(lambda x: uses_a_global(x)), (), [GLOBAL]),
        (torch.sin, (torch.ones(2),), []),
        (lambda x: x + 1, (), []),
    ],
    ids=[
        *("module", "method of a module", "arguments", "global", "global in a lambda", "global of a callee"),
        *("closure", "partial", "argument of a partial", "default", "callable object", "method", "decorated"),
        *("builtin", "nothing"),
    ],
)
def test_owners(fn: Any, arguments: Any, expected: list[Any]) -> None:
    """Modules and optimizers are found wherever a function can reach them."""
    found = inputs.owners(fn, (arguments, {}))
    modules = [one for one in found if isinstance(one, (torch.nn.Module, torch.optim.Optimizer))]
    assert {id(one) for one in modules} == {id(one) for one in expected}
    assert len(modules) == len(expected)


def test_owners_of_a_method_and_of_a_closure() -> None:
    """The object of a bound method, a callable object and a closure's containers belong to the function."""
    trainer = Trainer(MINE)
    results: list[Any] = []

    def collect(x: Any) -> None:
        results.append(x)

    assert any(one is trainer for one in inputs.owners(trainer.step, ()))
    assert any(one is trainer for one in inputs.owners(trainer, ()))
    assert any(one is results for one in inputs.owners(collect, ()))
    assert inputs.owners(torch.sin, ([1], {"a": [2]})) == []


# -- state: what eager changes is put back --------------------------------------------------------


def eager(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``fn`` as the eager run of a checked call does, and put everything back."""
    owners = inputs.owners(fn, (arguments, {}))
    state, mode = State(owners), CopyBeforeWrite()
    with mode:
        value = fn(*arguments)
    mode.restore()
    state.restore()
    return value


COUNTER = torch.zeros(2)


def test_tensors_of_closures_and_globals_and_arguments() -> None:
    """Every storage that existed before the call holds afterwards what it held."""
    count = torch.zeros(())
    x = torch.ones(3)

    def f(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        COUNTER[0] = 7
        x.mul_(2)
        x[1:].add_(1)
        return x + count + COUNTER.sum()

    assert eager(f, x).tolist() == [10, 11, 11]
    assert (count.item(), COUNTER.tolist(), x.tolist()) == (0, [0, 0], [1, 1, 1])


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.data.add_(1),
        lambda x: x.__setitem__(0, 9),
        lambda x: x.view(-1)[1:].zero_(),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: x.index_put_((torch.tensor([1]),), torch.tensor(5.0)),
        lambda x: x.uniform_(),
        lambda x: torch._foreach_add_([x, x[:1]], 1.0),
        lambda x: x.detach().fill_(4),
        lambda x: torch.nn.functional.relu_(x.neg_()),
        lambda x: x.resize_(8).fill_(2),
    ],
    ids=[
        "add_",
        "data",
        "setitem",
        "view",
        "out",
        "copy_",
        "index_put_",
        "random",
        "foreach",
        "detach",
        "relu_",
        "resize_",
    ],
)
def test_every_kind_of_write(write: Callable[[torch.Tensor], Any]) -> None:
    """However a tensor is written to, its content is put back."""
    x = torch.ones(3)
    eager(write, x)
    assert x.flatten()[:3].tolist() == [1, 1, 1]


def test_restoring_leaves_autograd_alone() -> None:
    """A graph that was recorded before the call can still be run backward."""
    w = torch.ones(3, requires_grad=True)
    saved = torch.full((3,), 2.0)
    loss = (w * saved).sum()
    version = saved._version

    def f() -> torch.Tensor:
        return saved + 1

    eager(f)
    assert saved._version == version
    loss.backward()
    assert w.grad is not None
    assert w.grad.tolist() == [2, 2, 2]


def test_tensors_born_in_the_call_are_not_kept() -> None:
    """Only storages from before the call are copied."""
    mode = CopyBeforeWrite()
    with mode:
        y = torch.ones(3)
        y.add_(1)
        y.view(1, 3).mul_(2)
        (y + 1).zero_()
    assert mode.before == {}
    mode.restore()
    assert y.tolist() == [4, 4, 4]


def test_views_of_old_tensors_are_not_born_in_the_call() -> None:
    """A view that the call makes of an old tensor writes to the old storage."""
    x = torch.ones(4)
    eager(lambda: x[1:3].t().contiguous().view(-1).add_(1))
    eager(lambda: x.view(2, 2)[0].add_(1))
    assert x.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("make", [torch.nn.BatchNorm1d, functools.partial(torch.nn.BatchNorm1d, momentum=None)])
def test_batch_normalisation(make: Callable[[int], torch.nn.Module]) -> None:
    """Running statistics, whose writes no schema tells, are put back."""
    norm = make(3)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    out = eager(norm, torch.randn(8, 3) * 5)
    assert out.shape == (8, 3)
    assert before.keys() == {"running_mean", "running_var", "num_batches_tracked"}
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("warm", [False, True])
def test_a_training_step(kind: Any, warm: bool) -> None:
    """Parameters, gradients and the optimizer's state are as before the step."""
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 1)
    optimizer = kind(module.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = module(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(2, 3)
    if warm:
        step(x)
    before = [p.detach().clone() for p in module.parameters()]
    grads = [None if p.grad is None else (p.grad, p.grad.clone()) for p in module.parameters()]
    state = {
        id(k): {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in s.items()}
        for k, s in optimizer.state.items()
    }

    eager(step, x)

    assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    for parameter, grad in zip(module.parameters(), grads, strict=True):
        if grad is None:
            assert parameter.grad is None
        else:
            assert parameter.grad is grad[0]
            assert torch.equal(parameter.grad, grad[1])
    assert {id(key) for key in optimizer.state} == state.keys()
    for key, values in optimizer.state.items():
        assert values.keys() == state[id(key)].keys()
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(state[id(key)][name])), name


def test_gradients_that_accumulate() -> None:
    """A gradient that was there before the call holds what it held."""
    module = torch.nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    grad = module.weight.grad
    assert grad is not None
    eager(lambda: module(torch.ones(1, 2)).sum().backward())
    assert module.weight.grad is grad
    assert grad.tolist() == [[1, 1]]


def test_learning_rates_are_put_back() -> None:
    """Parameter groups have their values of before the call, in the same dicts."""
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    group = optimizer.param_groups[0]

    def f() -> None:
        optimizer.param_groups[0]["lr"] = 5.0
        optimizer.param_groups[0]["new"] = 1

    eager(f)
    assert optimizer.param_groups[0] is group
    assert group["lr"] == 0.1
    assert "new" not in group


class Stateful(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.cache: Any = None
        self.seen: list[int] = []
        self.by_name: dict[str, int] = {"a": 1}
        self.unique = {1}
        self.last = collections.deque([1, 2], maxlen=2)
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("steps", torch.zeros(()))
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.cache = x * 2
        self.seen.append(self.calls)
        self.by_name["b"] = 2
        self.by_name["a"] = 5
        self.unique.add(2)
        self.last.append(3)
        self.steps += 1  # type: ignore[operator]
        self.inner.extra = x  # type: ignore[assignment]
        self.lazily = torch.ones(2)
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(2))
            self.register_parameter("grown", torch.nn.Parameter(torch.ones(2)))
            self.add_module("child", torch.nn.ReLU())
        return self.inner(x) + self.late  # type: ignore[no-any-return]


def test_python_state_of_modules() -> None:
    """Counters, caches, containers and whatever a module made of itself are as before the call."""
    module = Stateful()
    seen, by_name, last = module.seen, module.by_name, module.last
    names = set(vars(module))

    eager(module, torch.ones(1, 2))

    assert set(vars(module)) == names
    assert (module.calls, module.cache) == (0, None)
    assert module.seen is seen
    assert seen == []
    assert module.by_name is by_name
    assert by_name == {"a": 1}
    assert module.unique == {1}
    assert module.last is last
    assert list(last) == [1, 2]
    assert last.maxlen == 2
    assert module.steps.item() == 0  # type: ignore[operator]
    assert not hasattr(module.inner, "extra")
    assert [name for name, _ in module.named_buffers()] == ["steps"]
    assert [name for name, _ in module.named_parameters()] == ["inner.weight", "inner.bias"]
    assert [name for name, _ in module.named_children()] == ["inner"]


def test_generators_of_modules_draw_the_same_numbers_again() -> None:
    """A generator that a module holds stands afterwards where it stood before the call."""

    class Noise(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(2, generator=self.generator)

    module = Noise()
    generator = module.generator
    first = eager(module, torch.zeros(2))
    assert module.generator is generator
    assert eager(module, torch.zeros(2)).tolist() == first.tolist()
    assert module(torch.zeros(2)).tolist() == first.tolist()


def test_state_of_objects_and_closures() -> None:
    """Attributes of the object of a method, and lists that a closure fills, are as before the call."""

    class Counter:
        def __init__(self) -> None:
            self.calls = 0
            self.seen: list[Any] = []

        def step(self, x: Any) -> Any:
            self.calls += 1
            self.seen.append(x)
            return x

    results: list[Any] = []
    counter = Counter()

    def closure(x: Any) -> Any:
        results.append(x)
        return x

    eager(counter.step, 1)
    eager(closure, 2)
    assert (counter.calls, counter.seen) == (0, [])
    assert results == []


def test_order_of_a_dict_is_put_back() -> None:
    """Also a dict of which only the order changed."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = {"a": 1, "b": 2}

        def forward(self) -> None:
            self.table["a"] = self.table.pop("a")

    module = Module()
    eager(module)
    assert list(module.table) == ["a", "b"]


class Output(collections.OrderedDict[str, Any]):
    """Forbids changes of its own, as outputs of transformers do."""

    name: str

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError

    clear = pop = update


class Tally(collections.Counter[str]):
    """Adds what it is given."""


class Log(list[Any]):
    def clear(self) -> None:
        raise TypeError

    def extend(self, items: Any) -> None:
        raise TypeError


def test_containers_that_forbid_changes_are_put_back() -> None:
    """Their own methods are not called for it; attributes of theirs are put back too."""
    output, log, tally = Output(a=1, b=2), Log([1, 2]), Tally(a=3)

    output.name = "first"

    def change() -> None:
        output["c"] = output["a"]
        output.name = "second"
        output.move_to_end("a")
        log.append(3)
        tally["a"] += 1

    eager(change)
    assert list(output.items()) == [("a", 1), ("b", 2)]
    assert output.name == "first"
    assert log == [1, 2]
    assert tally == {"a": 3}


class SlotsAndMore:
    __slots__ = ("__dict__", "given", "late")


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    value: int


def test_slots_are_put_back() -> None:
    """Those that were filled, emptied or changed, beside attributes; also where the class forbids it."""
    held, frozen = SlotsAndMore(), FrozenSlots(1)
    held.given, held.plain = 1, 2  # type: ignore[attr-defined]

    def change() -> None:
        del held.given  # type: ignore[attr-defined]
        held.late, held.plain = 3, 4  # type: ignore[attr-defined]
        object.__setattr__(frozen, "value", 5)

    eager(change)
    assert (held.given, held.plain, hasattr(held, "late")) == (1, 2, False)  # type: ignore[attr-defined]
    assert frozen.value == 1


def test_requires_grad_is_put_back() -> None:
    """A parameter that the call froze is not frozen afterwards."""
    module = torch.nn.Linear(2, 2)
    eager(lambda: module.requires_grad_(False))
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_train_flag_is_put_back() -> None:
    """A module that the call put to eval mode trains afterwards."""
    module = torch.nn.Sequential(torch.nn.Dropout())
    eager(lambda: module.eval())
    assert module.training
    assert module[0].training


def test_replaced_parameters_are_put_back() -> None:
    """A parameter that the call replaced is the old one afterwards, by identity."""
    module = torch.nn.Linear(2, 2)
    weight = module.weight

    def f() -> None:
        module.weight = torch.nn.Parameter(torch.zeros(2, 2))

    eager(f)
    assert module.weight is weight


def test_lazy_modules() -> None:
    """A lazy module is lazy again, so that compiled code initialises it as eager did."""
    module = torch.nn.LazyLinear(3)
    start = Random()
    eager(module, torch.ones(2, 4))
    assert type(module) is torch.nn.LazyLinear
    assert module.has_uninitialized_params()
    start.restore()
    first = module(torch.ones(2, 4))
    assert type(module) is torch.nn.Linear
    again = torch.nn.LazyLinear(3)
    start.restore()
    assert torch.equal(again(torch.ones(2, 4)), first)


def test_hooked_modules() -> None:
    """Modules that set their weight in a hook at each call, as pruning and weight_norm do, work."""
    module = torch.nn.utils.prune.l1_unstructured(torch.nn.Linear(4, 4), "weight", 0.5)
    x = torch.ones(1, 4)
    expected = module(x)
    assert torch.equal(eager(module, x), expected)
    assert torch.equal(module(x), expected)


def test_spectral_norm() -> None:
    """The power iteration of the old spectral_norm, in buffers, starts again where it started."""
    module = torch.nn.utils.spectral_norm(torch.nn.Linear(4, 4))
    module(torch.ones(1, 4))
    before = module.weight_u.clone()
    eager(module, torch.ones(1, 4))
    assert torch.equal(module.weight_u, before)


def test_what_eager_left_can_be_kept_for_comparison() -> None:
    """Clones of arguments keep what eager wrote to them; state of modules does not."""
    module = torch.nn.BatchNorm1d(2)
    x = torch.ones(4, 2)
    clones, _ = inputs.clone((x, module), [module])
    mode = CopyBeforeWrite()
    with mode:
        clones[0].add_(1)
        module(torch.randn(4, 2))
    after = mode.current()
    off = mode.split_off(clones, [module])
    mode.restore()
    assert clones[0].tolist() == [[2, 2]] * 4
    assert module.running_mean is not None
    assert module.running_mean.tolist() == [0, 0]
    key = storage_key(module.running_mean)
    assert key is not None
    assert bytes(after[key]) != bytes(module.running_mean.untyped_storage())
    mode.put({key: after[key]})
    assert module.running_mean.tolist() != [0, 0]

    assert off.keys() == {storage_key(clones[0])}
    mode.swap(off)
    assert clones[0].tolist() == [[1, 1]] * 4
    mode.swap(off)
    assert clones[0].tolist() == [[2, 2]] * 4


def test_arguments_that_are_state_are_put_back() -> None:
    """An argument that shares storage with a parameter is not split off: it was not cloned."""
    module = torch.nn.Linear(2, 2)
    before = module.weight.detach().clone()
    clones, _ = inputs.clone((module.weight.data,), [module])
    mode = CopyBeforeWrite()
    with mode:
        clones[0].add_(1)
    assert mode.split_off(clones, [module]) == {}
    mode.restore()
    assert torch.equal(module.weight, before)


def test_an_exception_in_the_call_does_not_hinder_restoring() -> None:
    """What was written before the exception is put back."""
    x = torch.ones(2)
    mode = CopyBeforeWrite()

    def fail() -> None:
        x.add_(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), mode:
        fail()
    mode.restore()
    assert x.tolist() == [1, 1]


# -- random numbers -------------------------------------------------------------------------------


def draw() -> tuple[Any, ...]:
    return random.random(), float(numpy.random.rand()), torch.rand(2).tolist(), torch.randperm(5).tolist()


def test_random_states_are_put_back() -> None:
    """Afterwards every generator gives the numbers that it gave before."""
    start = Random()
    first = draw()
    assert draw() != first
    start.restore()
    assert draw() == first


def test_half_used_normal_numbers_are_put_back() -> None:
    """Generators that keep a second normal number for the next call keep it."""
    random.gauss(0, 1)
    numpy.random.standard_normal()
    start = Random()
    first = random.gauss(0, 1), float(numpy.random.standard_normal())
    start.restore()
    assert (random.gauss(0, 1), float(numpy.random.standard_normal())) == first


@pytest.mark.parametrize(
    ("use", "names"),
    [
        (lambda: None, ()),
        (lambda: torch.ones(2), ()),
        (lambda: random.random(), ("random",)),
        (lambda: numpy.random.rand(), ("numpy.random",)),
        (lambda: torch.rand(1), ("torch",)),
        (lambda: torch.default_generator.manual_seed(torch.initial_seed() + 1), ("torch",)),
        (draw, ("random", "numpy.random", "torch")),
        (lambda: torch.rand(1, generator=torch.Generator()), ()),
    ],
    ids=["nothing", "no random", "random", "numpy", "torch", "seed", "all", "own generator"],
)
def test_which_generators_were_used(use: Callable[[], Any], names: tuple[str, ...]) -> None:
    """A generator whose state differs is named."""
    start = Random()
    use()
    assert Random().changed(start) == names
    start.restore()
    assert Random().changed(start) == ()


def test_gpus_of_a_call() -> None:
    """Of arguments, results and state, each once, by their numbers; on a machine without any."""
    with FakeTensorMode():
        second, first, again = (torch.empty(2, device=f"cuda:{number}") for number in (1, 0, 1))
        model = torch.nn.Linear(2, 2, device="cuda:3")
        assert inputs.gpus(((second, [again]), {"x": torch.empty(2)}), []) == [torch.device("cuda:1")]
        found = inputs.gpus(((second,), {}, {"result": first}), [model])
    assert found == [torch.device(f"cuda:{number}") for number in (0, 1, 3)]
    assert inputs.gpus((torch.ones(2),), [torch.nn.Linear(2, 2)]) == []
