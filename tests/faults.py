"""Planted miscompilations: backends, each of which does one thing wrong, and functions that show it.

Most backends run the graph that Dynamo captured as it stands (``graph``) and spoil one thing: what an operation
does (`swap`), what comes out (`on_outputs`), what goes in, a gradient (`on_gradients`). What no backend can do wrong,
because it is Dynamo's byte code that does it, is planted in the function itself: it does something else when
compiled (`Fault.compiled_as`).
"""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from pytest_dynamo.calls import Checker
from pytest_dynamo.compiled_function import CompiledFunction
from pytest_dynamo.errors import ParityError
from pytest_dynamo.observer import Observer
from pytest_dynamo.places import Places
from pytest_dynamo.settings import Search
from pytest_dynamo.settings import Settings
from pytest_dynamo.testrun import TestRun
from pytest_dynamo.variants import Variant


Call = tuple[tuple[Any, ...], dict[str, Any]]
Backend = Callable[..., Any]

FLOATS = (torch.float32, torch.bfloat16)
FLOAT32 = (torch.float32,)
BFLOAT16 = (torch.bfloat16,)
INT64 = (torch.int64,)
INT8 = (torch.int8,)
BOOL = (torch.bool,)
COMPLEX64 = (torch.complex64,)


@dataclass(frozen=True)
class Fault:
    """One miscompilation and a function that shows it."""

    name: str
    #: What the failing checks must say: ``Check.what``.
    kind: str
    #: Makes the function and the calls of it for a dtype; everything is new each time.
    make: Callable[[torch.dtype], tuple[Callable[..., Any], list[Call]]]
    #: The backend that miscompiles.
    backend: Backend | str = "aot_eager"
    #: Makes, from the honest function, what compiled code does instead of it; the backend is honest then.
    compiled_as: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    #: Keywords of the marker that the fault needs.
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    dynamic: bool | None = None
    #: Number of the first call that shows it; None: it is not fixed.
    call: int | None = 1
    #: Kinds that can't but fail together with ``kind``.
    also: frozenset[str] = frozenset()
    #: Versions of torch (major.minor) in which honest compiled code is not eager's either, and what says so.
    wrong_in: Mapping[str, set[str]] = field(default_factory=dict)

    @property
    def kinds(self) -> set[str]:
        return {self.kind, *self.also}

    def planted(self, dtype: torch.dtype) -> tuple[Callable[..., Any], list[Call]]:
        """The function that shows the fault, and its calls."""
        fn, calls = self.make(dtype)
        if self.compiled_as is None:
            return fn, calls
        other = self.compiled_as(fn)

        def either(*args: Any, **kwargs: Any) -> Any:
            return other(*args, **kwargs) if torch.compiler.is_compiling() else fn(*args, **kwargs)

        return either, calls


def drive(
    fn: Callable[..., Any],
    calls: Sequence[Call],
    backend: Backend | str,
    *,
    dynamic: bool | None = None,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> TestRun:
    """Make checked calls as a test with the fixture ``compiled`` would, and go on after failures.

    Before each call all generators are seeded with ``seed`` plus the number of the call, from 0.
    """
    torch._dynamo.reset()
    observer = Observer()
    observer.install()
    try:
        own = Settings().override(dict(settings or {}))
        run = TestRun("test", own, observer, Places(Path(__file__).parent))
        checker = Checker(fn, Variant(backend, dynamic=dynamic), run)
        run.functions.append(checker.function)
        run.search = Search(stage_timeout=0)  # where in the compiler a fault sits is none of our questions
        fast = CompiledFunction(checker)
        kept = []  # as a test may, so that what is overwritten is still there
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number, (args, kwargs) in enumerate(calls):
                seed_all(seed + number)
                try:
                    kept.append(fast(*args, **kwargs))
                except ParityError:
                    pass
                except Exception as error:  # raised by both sides
                    kept.append(error)
        return run
    finally:
        observer.remove()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def failing(run: TestRun) -> set[str]:
    """Kinds of the checks that failed."""
    return {check.what for check in run.checks if check.passed is False}


# -- backends -------------------------------------------------------------------------------------


def graph(change: Callable[..., Any]) -> Backend:
    """A backend whose code is ``change(graph, *inputs)`` and runs at each call."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        return lambda *inputs: tuple(change(gm, *inputs))

    return backend


def swap(name: str, new: Callable[..., Any]) -> Backend:
    """A backend in which ``new`` stands in place of the function or method ``name``."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        found = [
            node
            for node in gm.graph.nodes
            if node.op.startswith("call_") and getattr(node.target, "__name__", node.target) == name
        ]
        assert found, f"no {name} in {gm.graph}"
        for node in found:
            node.op, node.target = "call_function", new
        gm.recompile()
        return gm.forward

    return backend


def on_outputs(change: Callable[..., Any]) -> Backend:
    """A backend whose code returns ``change(*outputs)`` instead of its outputs."""
    return graph(lambda gm, *inputs: change(*gm(*inputs)))


def on_output(change: Callable[[torch.Tensor], Any]) -> Backend:
    """A backend that spoils the first output."""
    return on_outputs(lambda first, *others: (change(first), *others))


def on_gradients(change: Callable[..., Any]) -> Backend:
    """A backend whose backward returns ``change(*gradients)``, in the order of the graph's inputs."""

    def forward(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        return make_boxed_func(gm.forward)

    def backward(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        return make_boxed_func(lambda *inputs: tuple(change(*gm(*inputs))))

    return aot_autograd(fw_compiler=forward, bw_compiler=backward)


class ScaledGradient(torch.autograd.Function):
    """Does nothing; scales the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


class IgnoredCotangent(torch.autograd.Function):
    """Does nothing; takes whatever gradient comes in for ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return torch.ones_like(grad)


class StraightThrough(torch.autograd.Function):
    """A ReLU whose backward forgot the mask."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad


def written(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """A copy of a tensor with other values at ``index``."""
    copied = tensor.clone()
    copied[index] = value
    return copied


# -- data and functions ---------------------------------------------------------------------------


def data(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """The same values each time."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.randint(-9, 10, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def leaf(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return data(dtype, *shape, seed=seed).requires_grad_()


def on(fn: Callable[..., Any], *shapes: tuple[int, ...], calls: int = 1, grad: bool = False) -> Any:
    """A ``make`` for a function of tensors of these shapes; each call has values of its own."""

    def make(dtype: torch.dtype) -> tuple[Callable[..., Any], list[Call]]:
        one = leaf if grad else data
        return fn, [
            (tuple(one(dtype, *shape, seed=10 * call + n) for n, shape in enumerate(shapes)), {})
            for call in range(calls)
        ]

    return make


def of(fn: Callable[..., Any], *arguments: Callable[[torch.dtype], Any]) -> Any:
    """A ``make`` for a function that is called once; each argument is made for the dtype."""
    return lambda dtype: (fn, [(tuple(argument(dtype) for argument in arguments), {})])


def with_module(
    make: Callable[..., nn.Module], *shapes: tuple[int, ...], calls: int = 1, train: bool = True, grad: bool = False
) -> Any:
    """A ``make`` for a module; unless ``grad``, its parameters are frozen."""

    def made(dtype: torch.dtype) -> tuple[Callable[..., Any], list[Call]]:
        torch.manual_seed(0)
        module = make().to(dtype).train(train).requires_grad_(grad)
        return module, on(module, *shapes, calls=calls)(dtype)[1]

    return made


def affine(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias)


#: Shapes of the arguments of `linear`, square so that a transposed result still fits.
LINEAR = ((4, 4), (4, 4), (4,))


def plus_and_minus(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x - 1


# -- faults of values -----------------------------------------------------------------------------


def masked_softmax(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape, dtype=torch.bool).triu(1)
    return x.masked_fill(mask, float("-inf")).softmax(-1)


def tile_of_32(out: torch.Tensor) -> torch.Tensor:
    """Only whole tiles were computed."""
    return written(out, slice(out.shape[0] // 32 * 32, None), 0)


def as_if_contiguous(gm: torch.fx.GraphModule, x: torch.Tensor) -> Any:
    strides = torch.empty(x.shape).stride()
    return gm(x.as_strided(x.shape, strides))


def without_maximum(x: torch.Tensor, dim: int) -> torch.Tensor:
    e = x.exp()
    return e / e.sum(dim, keepdim=True)


def low_precision_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Adds one element after the other, without a wider accumulator."""
    total = torch.zeros_like(x.select(dim, 0))
    for part in x.unbind(dim):
        total = total + part
    return total


def zero_padded_pool(x: torch.Tensor, size: int, stride: int, padding: int, **_: Any) -> torch.Tensor:
    return F.max_pool2d(F.pad(x, (padding,) * 4), size, stride)


def batch_statistics(x: torch.Tensor, mean: Any, var: Any, weight: Any, bias: Any, *_: Any) -> torch.Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def frozen(change: Callable[..., list[Any]]) -> Backend:
    """A backend whose later calls run on ``change(inputs, inputs of the first call)``."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        first: list[Any] = []

        def code(*inputs: Any) -> Any:
            if not first:
                first.extend(i.clone() if isinstance(i, torch.Tensor) else i for i in inputs)
            return gm(*change(list(inputs), first))

        return code

    return backend


def stale(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Replays what the first call returned."""
    first: list[torch.Tensor] = []

    def code(*inputs: Any) -> Any:
        if not first:
            first.extend(gm(*inputs))
        return tuple(out.clone() for out in first)

    return code


def from_run(number: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Backend:
    """A backend that spoils the first output from its ``number``-th run on."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        runs = [0]

        def code(*inputs: Any) -> Any:
            runs[0] += 1
            first, *others = gm(*inputs)
            return (change(first) if runs[0] >= number else first, *others)

        return code

    return backend


def grid_of_first_call(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Computes as many rows as the first call had."""
    rows: list[int] = []

    def code(*inputs: Any) -> Any:
        out = gm(*inputs)
        rows.append(out[0].shape[0])
        return tuple(written(o, slice(rows[0], None), 0) for o in out)

    return code


def kernel_of_first_shape(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Indexes all inputs with the row length of the first call."""
    length: list[int] = []

    def code(*inputs: Any) -> Any:
        out = gm(*inputs)
        length.append(out[0].shape[-1])
        return tuple(o if o.shape[-1] == length[0] else o.flatten().roll(1).view(o.shape) for o in out)

    return code


def frozen_mask(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Draws the random numbers of the first call at every call; the generator goes on as it should."""
    state: list[torch.Tensor] = []

    def code(*inputs: Any) -> Any:
        state.append(torch.get_rng_state())
        honest = gm(*inputs)
        after = torch.get_rng_state()
        torch.set_rng_state(state[0])
        out = gm(*inputs)
        torch.set_rng_state(after)
        return out if len(state) > 1 else honest

    return code


def random_scale(x: torch.Tensor) -> torch.Tensor:
    return x * random.randint(2, 1_000)


def first_random_scale(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The number that the first call draws is a constant of the graph; a number is drawn all the same."""
    number = random.Random(0).randint(2, 1_000)

    def compiled(x: torch.Tensor) -> torch.Tensor:
        random.randint(2, 1_000)
        return x * number

    return compiled


def different_shapes(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    """A ``make`` with one call for each shape."""
    return lambda dtype: (fn, [((data(dtype, *shape, seed=n),), {}) for n, shape in enumerate(shapes)])


def behind_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention weights as model libraries mask them: by adding the lowest number."""
    return (x + (1.0 - mask.to(x.dtype)) * torch.finfo(x.dtype).min).softmax(-1)


def left_half(dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(4, 8, dtype=torch.int64)
    mask[:, :4] = 1
    return mask


VALUES = [
    Fault(
        "row twice as large behind a mask",
        "values",
        of(behind_mask, lambda dtype: data(dtype, 4, 8), left_half),
        on_output(lambda out: written(out, 1, out[1] * 2)),
    ),
    Fault("wrong operation", "values", on(lambda x: torch.relu(x) + 1, (4, 8)), swap("relu", torch.sigmoid)),
    Fault("bias dropped", "values", on(linear, *LINEAR), swap("linear", lambda x, w, b: F.linear(x, w))),
    Fault("wrong constant", "values", on(affine, (4, 8)), swap("add", lambda x, one: x + 1.5)),
    Fault("rows off by one", "values", on(affine, (4, 8)), on_output(lambda out: out.roll(1, 0))),
    Fault("column zeroed", "values", on(linear, *LINEAR), on_output(lambda out: written(out, (..., -1), 0))),
    Fault("one element wrong", "values", on(affine, (64, 64)), on_output(lambda out: written(out, (63, 17), 9.0))),
    Fault(
        "NaN lost",
        "values",
        of(lambda x: x * 2, lambda dtype: written(data(dtype, 4, 8), (1, 2), float("nan"))),
        on_output(torch.nan_to_num),
    ),
    Fault("NaN invented", "values", on(affine, (4, 8)), on_output(lambda out: written(out, (1, 2), float("nan")))),
    Fault(
        "sign of infinity",
        "values",
        of(lambda x: x * 2, lambda dtype: written(data(dtype, 4, 8), (1, 2), float("inf"))),
        on_output(lambda out: torch.where(out.isinf(), -out, out)),
    ),
    Fault("infinity saturated", "values", on(lambda x: x / 0, (4, 8)), on_output(lambda out: out.nan_to_num())),
    Fault("wrong reduction dim", "values", on(lambda x: x.sum(0), (8, 8)), swap("sum", lambda x, dim: x.sum(1))),
    Fault("transposed square result", "values", on(linear, *LINEAR), on_output(lambda out: out.t().contiguous())),
    Fault("integer off by one", "values", on(affine, (4, 8)), on_output(lambda out: out + 1), dtypes=INT64),
    Fault(
        "one integer off by one", "values", on(affine, (64,)), on_output(lambda out: written(out, 9, 0)), dtypes=INT64
    ),
    Fault("bool inverted", "values", on(lambda x: x & x.roll(1), (16,)), on_output(torch.logical_not), dtypes=BOOL),
    Fault(
        "stored in float16",
        "values",
        on(linear, *LINEAR),
        on_output(lambda out: out.half().float()),
        dtypes=FLOAT32,
    ),
    Fault(
        "operands rounded to bfloat16",
        "values",
        on(lambda x, y: x @ y, (16, 64), (64, 16)),
        graph(lambda gm, *inputs: gm(*(i.bfloat16().float() for i in inputs))),
        dtypes=FLOAT32,
    ),
    Fault("scaled by 1.01", "values", on(affine, (4, 8)), on_output(lambda out: out * 1.01), dtypes=FLOAT32),
    Fault(
        "low precision accumulator",
        "values",
        of(lambda x: x.sum(1), lambda dtype: data(dtype, 2, 600).abs() + 0.5),
        swap("sum", low_precision_sum),
        dtypes=BFLOAT16,
    ),
    Fault(
        "another output in its place",
        "values",
        on(plus_and_minus, (4, 8)),
        on_outputs(lambda a, b: (a, a.clone())),
    ),
    Fault("outputs exchanged", "values", on(plus_and_minus, (4, 8)), on_outputs(lambda a, b: (b, a))),
    Fault("mask dropped", "values", on(masked_softmax, (6, 6)), swap("masked_fill", lambda x, mask, value: x.clone())),
    Fault(
        "causal mask dropped",
        "values",
        on(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *[(2, 2, 8, 4)] * 3),
        swap("scaled_dot_product_attention", lambda q, k, v, **_: F.scaled_dot_product_attention(q, k, v)),
    ),
    Fault("last partial tile not computed", "values", on(affine, (70,)), on_output(tile_of_32)),
    Fault(
        "strides of the input ignored",
        "values",
        of(affine, lambda dtype: data(dtype, 8, 8).t()),
        graph(lambda gm, x: tuple(out.t().contiguous().t() for out in as_if_contiguous(gm, x))),
    ),
    Fault(
        "offset of the input ignored",
        "values",
        of(affine, lambda dtype: data(dtype, 8, 8)[2:6]),
        graph(lambda gm, x: gm(x.as_strided(x.shape, x.stride(), 0))),
    ),
    Fault(
        "broadcast along the wrong dim",
        "values",
        on(lambda x, b: x + b, (8, 8), (8,)),
        swap("add", lambda x, b: x + b[:, None]),
    ),
    Fault(
        "small values replaced by zeros",
        "values",
        of(lambda x: x * 3, lambda dtype: data(dtype, 16, 16) * 1e-8),
        on_output(torch.zeros_like),
    ),
    Fault("result without dims wrong", "values", on(lambda x: x.mean(), (4, 8)), on_output(lambda out: out * 8)),
    Fault(
        "conjugation dropped",
        "values",
        on(lambda x, y: x.conj() * y, (8,), (8,)),
        swap("conj", lambda x: x),
        dtypes=COMPLEX64,
    ),
    Fault(
        "phase dropped", "values", on(lambda x: x * 2, (8,)), on_output(lambda out: out.abs() + 0j), dtypes=COMPLEX64
    ),
    Fault(
        "sorted the other way",
        "values",
        on(lambda x: x.sort(-1).values, (4, 8)),
        swap("sort", lambda x, dim: x.sort(dim, descending=True)),
    ),
    Fault("argmax is argmin", "values", on(lambda x: x.argmax(-1), (4, 8)), swap("argmax", torch.argmin)),
    Fault(
        "upper bound of clamp dropped",
        "values",
        on(lambda x: x.clamp(-1, 1), (4, 8)),
        swap("clamp", lambda x, low, high: x.clamp(low)),
    ),
    Fault(
        "softmax without its maximum",
        "values",
        of(lambda x: torch.softmax(x, -1), lambda dtype: data(dtype, 4, 8) + 200),
        swap("softmax", without_maximum),
    ),
    Fault(
        "variance without correction",
        "values",
        on(lambda x: x.var(-1), (8, 4)),
        swap("var", lambda x, dim: x.var(dim, correction=0)),
    ),
    Fault(
        "sum wraps around in int8",
        "values",
        of(lambda x: x.sum(), lambda dtype: torch.full((64,), 9, dtype=dtype)),
        swap("sum", lambda x: x.sum(dtype=torch.int8).long()),
        dtypes=INT8,
    ),
    Fault(
        "division rounds to zero",
        "values",
        on(lambda x: x // 4, (32,)),
        swap("floordiv", lambda x, by: torch.div(x, by, rounding_mode="trunc")),
        dtypes=INT64,
    ),
    Fault(
        "cast rounds",
        "values",
        on(lambda x: (x * 4).to(torch.int64), (32,)),
        swap("to", lambda x, dtype: x.round().to(dtype)),
    ),
    Fault(
        "sum up to the element before",
        "values",
        on(lambda x: x.cumsum(0), (8,)),
        swap("cumsum", lambda x, dim: x.cumsum(dim) - x),
    ),
    Fault(
        "colliding writes lost",
        "values",
        of(
            lambda x, index: torch.zeros(4, dtype=x.dtype).scatter_add(0, index, x),
            lambda dtype: data(dtype, 12).abs() + 1,
            lambda dtype: torch.arange(12) % 4,
        ),
        swap("scatter_add", lambda out, dim, index, x: out.scatter(dim, index, x)),
    ),
    Fault(
        "approximate gelu",
        "values",
        on(F.gelu, (16, 16)),
        swap("gelu", lambda x: F.gelu(x, approximate="tanh")),
        dtypes=FLOAT32,
    ),
    Fault(
        "padding takes part in the maximum",
        "values",
        of(lambda x: torch.max_pool2d(x, 3, 2, 1), lambda dtype: -data(dtype, 1, 2, 6, 6).abs() - 1),
        swap("max_pool2d", zero_padded_pool),
    ),
    Fault(
        "wrong epsilon",
        "values",
        of(lambda x: F.layer_norm(x, (8,)), lambda dtype: data(dtype, 4, 8) * 0.01),
        swap("layer_norm", lambda x, shape, *_: F.layer_norm(x, shape, eps=1e-2)),
    ),
    Fault(
        "statistics of the batch in eval mode",
        "values",
        with_module(lambda: nn.BatchNorm1d(4), (8, 4), train=False),
        swap("batch_norm", batch_statistics),
    ),
    Fault(
        "condition inverted",
        "values",
        on(lambda x: torch.where(x > 0, x, x * 3), (4, 8)),
        swap("where", lambda condition, a, b: torch.where(~condition, a, b)),
    ),
    Fault(
        "input of the first call baked in",
        "values",
        on(lambda x, scale: x * scale, (4, 8), (8,), calls=2),
        frozen(lambda inputs, first: [inputs[0], first[1]]),
        call=2,
    ),
    Fault("stale output", "values", on(affine, (4, 8), calls=3), stale, call=2),
    Fault(
        "wrong from the third run on",
        "values",
        on(affine, (4, 8), calls=3),
        from_run(3, lambda out: out.roll(1, 0)),
        call=3,
    ),
    Fault(
        "grid of the first call",
        "values",
        different_shapes(affine, (5, 8), (9, 8)),
        grid_of_first_call,
        dynamic=True,
        call=2,
    ),
    Fault(
        "row length of the first call",
        "values",
        different_shapes(affine, (5, 8), (5, 6)),
        kernel_of_first_shape,
        dynamic=True,
        call=2,
    ),
    Fault(
        "the same dropout mask at every call",
        "values",
        on(lambda x: F.dropout(x, 0.5), (8, 8), calls=2),
        frozen_mask,
        call=2,
    ),
    Fault(
        "Python's random number baked in",
        "values",
        on(random_scale, (4, 8), calls=2),
        compiled_as=first_random_scale,
        call=2,
    ),
    Fault(
        "scalar argument baked in",
        "values",
        lambda dtype: (lambda x, by: x * by, [((data(dtype, 4, 8), by), {}) for by in (1.5, 2.5, 3.5)]),
        frozen(lambda inputs, first: [inputs[0], *first[1:]]),
        dynamic=True,
        call=2,
    ),
]


# -- faults of what a result is -------------------------------------------------------------------


class Pair(NamedTuple):
    """A result with names."""

    plus: Any
    minus: Any


@dataclass
class Result:
    """A result with attributes."""

    plus: Any
    minus: Any


def pair(x: torch.Tensor) -> Pair:
    return Pair(x + 1, x - 1)


def dictionary(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"plus": x + 1, "minus": x - 1}


def then(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """For ``compiled_as``: compiled code returns ``change(result)``."""
    return lambda fn: lambda *args, **kwargs: change(fn(*args, **kwargs))


RESULTS = [
    Fault("None for a tensor", "type", on(plus_and_minus, (4, 8)), on_outputs(lambda a, b: (a, None))),
    Fault("list for a tuple", "type", on(plus_and_minus, (4, 8)), compiled_as=then(list)),
    Fault("tuple for a namedtuple", "type", on(pair, (4, 8)), compiled_as=then(lambda out: (out[0], out[1]))),
    Fault(
        "namedtuple for a dataclass",
        "type",
        on(lambda x: Result(x + 1, x - 1), (4, 8)),
        compiled_as=then(lambda out: Pair(out.plus, out.minus)),
    ),
    Fault("ordered dict for a dict", "type", on(dictionary, (4, 8)), compiled_as=then(OrderedDict)),
    Fault(
        "tensor for a number",
        "type",
        on(lambda x: (x + 1, 3), (4, 8)),
        compiled_as=then(lambda out: (out[0], torch.tensor(3))),
    ),
    Fault("number for a bool", "type", on(lambda x: (x + 1, True), (4, 8)), compiled_as=then(lambda out: (out[0], 1))),
    Fault(
        "tensor for None",
        "type",
        on(lambda x: (x + 1, None), (4, 8)),
        compiled_as=then(lambda out: (out[0], out[0] * 2)),
    ),
    Fault("sparse", "type", on(affine, (4, 8)), on_output(lambda out: out.to_sparse())),
    Fault("parameter", "type", on(affine, (4, 8)), on_output(lambda out: nn.Parameter(out, requires_grad=False))),
    Fault("one item more", "structure", on(plus_and_minus, (4, 8)), compiled_as=then(lambda out: (*out, out[0] * 2))),
    Fault("one item less", "structure", on(lambda x: [x, x + 1, x + 2], (4, 8)), compiled_as=then(lambda out: out[:2])),
    Fault(
        "order of keys", "structure", on(dictionary, (4, 8)), compiled_as=then(lambda out: dict(reversed(out.items())))
    ),
    Fault(
        "key more", "structure", on(dictionary, (4, 8)), compiled_as=then(lambda out: {**out, "more": out["plus"] * 2})
    ),
    Fault("key less", "structure", on(dictionary, (4, 8)), compiled_as=then(lambda out: {"plus": out["plus"]})),
    Fault(
        "other keys",
        "structure",
        on(dictionary, (4, 8)),
        compiled_as=then(lambda out: {"plus": out["plus"], "less": out["minus"]}),
    ),
    Fault("promoted to float64", "dtype", on(affine, (4, 8)), on_output(lambda out: out.double())),
    Fault("autocast forgotten", "dtype", on(linear, *LINEAR), on_output(lambda out: out.half())),
    Fault("indices in int32", "dtype", on(lambda x: x.argmax(-1), (4, 8)), on_output(lambda out: out.int())),
    Fault("bool as uint8", "dtype", on(lambda x: x > 0, (4, 8)), on_output(lambda out: out.to(torch.uint8))),
    Fault(
        "dim lost", "shape", on(lambda x: x.sum(0, keepdim=True), (4, 8)), on_output(lambda out: out.squeeze(0).clone())
    ),
    Fault("not broadcast", "shape", on(lambda x, y: x + 0 * y, (1, 8), (4, 8)), on_output(lambda out: out[:1].clone())),
    Fault("padded to a multiple of 8", "shape", on(affine, (4, 7)), on_output(lambda out: F.pad(out, (0, 1)))),
    Fault("transposed", "shape", on(affine, (4, 8)), on_output(lambda out: out.t().contiguous())),
    Fault(
        "size of the first call",
        "shape",
        different_shapes(affine, (5, 8), (9, 8)),
        frozen(
            lambda inputs, first: [i[: f.shape[0]] if isinstance(i, torch.Tensor) else i for i, f in zip(inputs, first)]
        ),
        dynamic=True,
        call=2,
    ),
    Fault("on another device", "device", on(affine, (4, 8)), on_output(lambda out: out.to("meta"))),
    Fault("output detached", "requires_grad", on(linear, *LINEAR, grad=True), on_output(lambda out: out.detach())),
    Fault(
        "one of two outputs detached",
        "requires_grad",
        on(plus_and_minus, (4, 8), grad=True),
        on_outputs(lambda a, b: (a, b.detach())),
    ),
    Fault(
        "detach dropped",
        "requires_grad",
        on(lambda x: torch.sigmoid(x).detach() * 2, (4, 8), grad=True),
        swap("detach", lambda x: x),
    ),
    Fault(
        "no_grad dropped",
        "requires_grad",
        on(torch.no_grad()(lambda x: torch.sigmoid(x)), (4, 8), grad=True),
        on_output(lambda out: out.requires_grad_()),
    ),
]


# -- faults of aliasing and strides ---------------------------------------------------------------


class Table(nn.Module):
    """Returns rows of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.weight[1:3], x + 1


ALIASES = [
    Fault("slice of the input copied", "alias", on(lambda x: x[1:], (4, 8)), on_output(torch.clone)),
    Fault("view of the input copied", "alias", on(lambda x: x.view(-1), (4, 8)), on_output(torch.clone)),
    Fault("transposed input copied", "alias", on(lambda x: x.t(), (4, 8)), on_output(torch.clone)),
    Fault("detached input copied", "alias", on(lambda x: x.detach(), (4, 8), grad=True), on_output(torch.clone)),
    Fault(
        "view of an input that requires grad copied",
        "alias",
        on(lambda x: x.view(-1), (4, 8), grad=True),
        on_output(torch.clone),
    ),
    Fault(
        "one of three chunks copied",
        "alias",
        on(lambda x: x.chunk(3), (6, 8)),
        on_outputs(lambda a, b, c: (a, b.clone(), c)),
    ),
    Fault("view of a changed input copied", "alias", on(lambda x: x.add_(1).view(-1), (4, 8)), on_output(torch.clone)),
    Fault("rows of a parameter copied", "alias", with_module(Table, (4, 8)), on_output(torch.clone)),
    Fault("x + 0 is x", "alias", on(lambda x: x + 0, (4, 8)), swap("add", lambda x, zero: x)),
    Fault("clone dropped", "alias", on(lambda x: x[1:].clone(), (4, 8)), swap("clone", lambda x: x)),
    Fault("contiguous copy is a view", "alias", on(lambda x: x[1:] * 1, (4, 8)), swap("mul", lambda x, one: x)),
    Fault("two outputs merged", "alias", on(lambda x: (x * 2, x * 2), (4, 8)), on_outputs(lambda a, b: (a, a))),
    Fault(
        "part of another output", "alias", on(lambda x: (y := x * 2, y[0].clone()), (4, 8)), swap("clone", lambda x: x)
    ),
    Fault(
        "view of another output copied",
        "alias",
        on(lambda x: (y := x * 2, y[0]), (4, 8)),
        on_outputs(lambda a, b: (a, b.clone())),
    ),
    Fault(
        "view at another offset",
        "alias",
        of(lambda x: x[1:3], lambda dtype: data(dtype, 8).expand(4, 8).clone()),
        graph(lambda gm, x: (x[0:2],)),
    ),
    Fault(
        "view of the other input",
        "alias",
        of(lambda x, y: (x[1:], y + 1), *[lambda dtype: data(dtype, 4, 8)] * 2),
        graph(lambda gm, *inputs: (inputs[1][1:], gm(*inputs)[1])),
    ),
]

STRICT = {"check_stride": True}


def transposed_memory(out: torch.Tensor) -> torch.Tensor:
    return out.t().contiguous().t()


STRIDES = [
    Fault(
        "contiguous for transposed",
        "stride",
        of(affine, lambda dtype: data(dtype, 4, 8).t()),
        on_output(lambda out: out.contiguous()),
        settings=STRICT,
    ),
    Fault("transposed for contiguous", "stride", on(affine, (4, 8)), on_output(transposed_memory), settings=STRICT),
    Fault(
        "channels_last lost",
        "stride",
        of(
            lambda x, w: F.conv2d(x, w),
            lambda dtype: data(dtype, 1, 3, 6, 6).contiguous(memory_format=torch.channels_last),
            lambda dtype: data(dtype, 4, 3, 3, 3, seed=1).contiguous(memory_format=torch.channels_last),
        ),
        on_output(lambda out: out.contiguous()),
        settings=STRICT,
    ),
    Fault(
        "expanded result written out",
        "stride",
        on(lambda x: (x * 2).expand(4, 8), (8,)),
        on_output(lambda out: out.contiguous()),
        settings=STRICT,
    ),
    Fault(
        "rows padded",
        "stride",
        on(affine, (4, 7)),
        on_output(lambda out: F.pad(out, (0, 1))[:, :7]),
        settings=STRICT,
    ),
]


# -- faults of what a call changes ----------------------------------------------------------------


def add_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y * 2


def on_copies(gm: torch.fx.GraphModule, *inputs: Any) -> Any:
    """Writes to copies of its inputs, and not back."""
    return gm(*(i.clone() if isinstance(i, torch.Tensor) else i for i in inputs))


def afterwards(change: Callable[..., Any]) -> Backend:
    """A backend that calls ``change(*inputs)`` after its code has run."""

    def code(gm: torch.fx.GraphModule, *inputs: Any) -> Any:
        out = gm(*inputs)
        with torch.no_grad():
            change(*inputs)
        return out

    return graph(code)


def two_views(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    b.add_(1)
    return y * 2


def make_two_views(dtype: torch.dtype) -> tuple[Callable[..., Any], list[Call]]:
    base = data(dtype, 6)
    return two_views, [((base[:4], base[2:], data(dtype, 4, seed=1)), {})]


def replace_item(items: list[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    items[0] = items[0] + 1
    return y * 2


def fill_entry(entries: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    entries["sum"] = y.sum()
    return y * 2


def set_attribute(holder: Result, y: torch.Tensor) -> torch.Tensor:
    holder.minus = y - 1
    return y * 2


def only_double(fn: Callable[..., Any]) -> Callable[..., Any]:
    """For ``compiled_as``: compiled code does nothing but return its result."""
    return lambda held, y: y * 2


def only_double_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    """For ``compiled_as``: the same for functions of one argument."""
    return lambda x: x * 2


def write_out(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out.copy_(y + 1)
    return y * 2


def write_row(cache: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    cache[1] = y[0]
    return y * 2


def tensors(*shapes: tuple[int, ...]) -> list[Callable[[torch.dtype], torch.Tensor]]:
    return [lambda dtype, n=n, shape=shape: data(dtype, *shape, seed=n) for n, shape in enumerate(shapes)]


def writes_input_later(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Overwrites its input from the second run on."""
    runs = [0]

    def code(x: torch.Tensor) -> Any:
        runs[0] += 1
        out = gm(x)
        if runs[0] > 1:
            x.zero_()
        return out

    return code


X_AND_Y = ((4, 8), (4, 8))

MUTATIONS = [
    Fault("in-place change dropped", "mutation", on(add_in_place, *X_AND_Y), graph(on_copies)),
    Fault("in-place change made twice", "mutation", on(add_in_place, *X_AND_Y), afterwards(lambda x, y: x.add_(1))),
    Fault("wrong values written", "mutation", on(add_in_place, *X_AND_Y), swap("add_", lambda x, one: x.add_(3))),
    Fault("input overwritten", "mutation", on(affine, (4, 8)), afterwards(lambda x: x.mul_(2))),
    Fault(
        "input used as scratch memory",
        "mutation",
        on(lambda x, y: x @ y, (4, 4), (4, 4)),
        afterwards(lambda x, y: y.zero_()),
    ),
    Fault(
        "one element of an input overwritten",
        "mutation",
        on(affine, (64, 64)),
        afterwards(lambda x: x[63, 63].fill_(7)),
    ),
    Fault(
        "one of two views not changed",
        "mutation",
        make_two_views,
        graph(lambda gm, a, b, y: gm(a, b.clone(), y)),
    ),
    Fault("given output not written", "mutation", on(write_out, *X_AND_Y), graph(on_copies)),
    Fault(
        "wrong row written",
        "mutation",
        on(write_row, *X_AND_Y),
        swap("setitem", lambda x, row, value: x[2].copy_(value)),
    ),
    Fault(
        "integers not changed",
        "mutation",
        on(add_in_place, *X_AND_Y),
        graph(on_copies),
        dtypes=INT64,
    ),
    Fault(
        "item of a list not replaced",
        "mutation",
        of(replace_item, lambda dtype: [data(dtype, 4)], lambda dtype: data(dtype, 4, seed=1)),
        compiled_as=only_double,
    ),
    Fault(
        "entry of a dict not added",
        "mutation",
        of(fill_entry, lambda dtype: {"sum": data(dtype) + 9}, lambda dtype: data(dtype, 4, seed=1)),
        compiled_as=only_double,
    ),
    Fault(
        "attribute of an argument not set",
        "mutation",
        of(set_attribute, lambda dtype: Result(data(dtype, 4), None), lambda dtype: data(dtype, 4, seed=1)),
        compiled_as=only_double,
    ),
    Fault(
        "input overwritten from the second run on", "mutation", on(affine, (4, 8), calls=2), writes_input_later, call=2
    ),
]


# -- faults of state ------------------------------------------------------------------------------


class Counter(nn.Module):
    """Counts its calls in a buffer and in an attribute, and keeps a list and a buffer that it only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.calls += 1
        self.seen.append(x.shape[0])
        return x * self.weight * self.scale


class Rebinding(nn.Module):
    """Gives its buffer another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.5 + x.mean(0)
        return x * 2


class Cache(nn.Module):
    """Keeps a row of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(6, 8))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.index_copy_(0, self.position, x)
        self.position.add_(1)
        return x * 2


class Lazily(nn.Module):
    """Makes a table at its first call."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(8, dtype=x.dtype)
        return x + self.table


def without(attribute: str) -> Callable[..., Any]:
    """For ``compiled_as``: what the call did to an attribute of the module is forgotten."""

    def planted(module: nn.Module) -> Callable[..., Any]:
        def compiled(*args: Any) -> Any:
            before = getattr(module, attribute)
            before = list(before) if isinstance(before, list) else before
            out = module(*args)
            setattr(module, attribute, before)
            return out

        return compiled

    return planted


def then_forgotten(module: nn.Module) -> Callable[..., Any]:
    """For ``compiled_as``: the list of the module loses what was appended."""

    def compiled(x: torch.Tensor) -> torch.Tensor:
        out = module(x)
        module.seen.pop()
        return out

    return compiled


def clone_inputs(*names: str) -> Backend:
    """A backend that writes to copies of the inputs in whose names one of ``names`` occurs."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        placeholders = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        copied = {n for n, name in enumerate(placeholders) if any(part in name for part in names)}
        assert copied, placeholders
        return lambda *inputs: gm(*(value.clone() if n in copied else value for n, value in enumerate(inputs)))

    return backend


def afterwards_on(name: str, change: Callable[[torch.Tensor], Any]) -> Backend:
    """A backend that changes the input in whose name ``name`` occurs after its code has run."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        placeholders = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        found = [n for n, placeholder in enumerate(placeholders) if name in placeholder]
        assert len(found) == 1, placeholders

        def code(*inputs: Any) -> Any:
            out = gm(*inputs)
            with torch.no_grad():
                change(inputs[found[0]])
            return out

        return code

    return backend


def other_momentum(*args: Any) -> torch.Tensor:
    x, mean, var, weight, bias, training, momentum, eps = args
    return F.batch_norm(x, mean, var, weight, bias, training, momentum * 3, eps)


def closure_counter(dtype: torch.dtype) -> tuple[Callable[..., Any], list[Call]]:
    count = torch.zeros(1, dtype=dtype)

    def fn(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * 2

    return fn, [((data(dtype, 4, 8),), {})]


def closure_list(dtype: torch.dtype) -> tuple[Callable[..., Any], list[Call]]:
    seen: list[int] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return x * 2

    return fn, [((data(dtype, 4, 8),), {})]


class Holding(nn.Module):
    """Keeps a batch norm where torch does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.BatchNorm1d(32, momentum=0.5)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


class Schedule:
    """Sets the learning rate of an optimizer in each call."""

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.set_rate()
        return x * 2

    @torch._dynamo.disable  # Dynamo adds an entry "capturable" to groups that it sees
    def set_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.5


counting = with_module(Counter, (4, 8), calls=2)
counting_once = with_module(Counter, (4, 8))
normalizing = with_module(lambda: nn.BatchNorm1d(32, momentum=0.5), (16, 32))
caching = with_module(Cache, (1, 8), calls=2)

STATES = [
    Fault("running statistics not updated", "state", normalizing, clone_inputs("running_mean", "running_var")),
    Fault("running variance not updated", "state", normalizing, clone_inputs("running_var")),
    Fault("number of batches not counted", "state", normalizing, clone_inputs("num_batches")),
    Fault("other momentum", "state", normalizing, swap("batch_norm", other_momentum)),
    Fault(
        "running statistics not updated while gradients are asked for",
        "state",
        with_module(lambda: nn.BatchNorm1d(32, momentum=0.5), (16, 32), grad=True),
        clone_inputs("running_mean", "running_var"),
    ),
    Fault("counter not incremented", "state", counting, clone_inputs("count")),
    Fault("counter incremented twice", "state", counting, afterwards_on("count", lambda count: count.add_(1))),
    Fault(
        "buffer written that is only read", "state", counting_once, afterwards_on("scale", lambda scale: scale.mul_(2))
    ),
    Fault("parameter written", "state", counting_once, afterwards_on("weight", lambda weight: weight[0].add_(1))),
    Fault("Python counter not incremented", "state", counting, compiled_as=without("calls")),
    Fault("list of the module not appended to", "state", counting, compiled_as=then_forgotten),
    Fault("list of the module replaced by a copy from before", "state", counting, compiled_as=without("seen")),
    Fault(
        "other momentum in a module that is not registered",
        "state",
        with_module(Holding, (16, 32)),
        swap("batch_norm", other_momentum),
        dtypes=FLOAT32,
    ),
    Fault(
        "learning rate not set",
        "state",
        lambda dtype: (Schedule(), [((data(dtype, 4, 8),), {})]),
        compiled_as=only_double_one,
    ),
    Fault(
        "wrong value for a new buffer", "state", with_module(Rebinding, (4, 8)), swap("mean", lambda x, dim: x.sum(dim))
    ),
    Fault("new buffer lost", "state", with_module(Rebinding, (4, 8)), compiled_as=without("mean")),
    Fault("row not written to the cache", "state", caching, clone_inputs("rows")),
    Fault(
        "row written at another position",
        "state",
        caching,
        swap("index_copy_", lambda rows, dim, position, x: rows.index_copy_(dim, position + 1, x)),
    ),
    Fault("position of the cache not advanced", "state", caching, clone_inputs("position")),
    Fault("table made at the first call lost", "state", with_module(Lazily, (4, 8)), compiled_as=without("table")),
    Fault("tensor of a closure not changed", "state", closure_counter, graph(on_copies)),
    Fault("list of a closure not appended to", "state", closure_list, compiled_as=only_double_one),
]


# -- faults of gradients --------------------------------------------------------------------------


def layers(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w1) @ w2


def branches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return torch.relu(y) + torch.sigmoid(y)


def two_outputs(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x @ w
    return torch.tanh(y), torch.sigmoid(y)


def use_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w) @ w.t()


def through_in_place(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Changes ``x`` so that it depends on ``w``."""
    x.add_(w)
    return y * w


def detached_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.detach() * w


def scaled(name: str, by: float) -> Backend:
    """A backend in which the gradient through ``name`` is scaled."""
    function = getattr(torch, name)
    return swap(name, lambda *args: ScaledGradient.apply(function(*args), by))


def stale_gradients() -> Backend:
    """A backend whose backward replays the gradients of its first run."""
    first: list[Any] = []

    def change(*gradients: Any) -> Any:
        if not first:
            first.extend(None if g is None else g.clone() for g in gradients)
        return [None if g is None else g.clone() for g in first]

    return on_gradients(change)


def with_own_memory(make: Callable[[], Backend]) -> Backend:
    """A backend that is made anew for each compilation, because it remembers."""
    return lambda gm, example_inputs: make()(gm, example_inputs)


def embedding(weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return F.embedding(index, weight)


def first_row_only(bias: torch.Tensor) -> torch.Tensor:
    """Zeros, through which a bias gets the gradient of the first of four rows."""
    zeros = torch.zeros_like(bias)
    return torch.stack([bias - bias.detach(), zeros, zeros, zeros])


def last_write_wins(index: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    """An embedding whose backward loses all but one contribution to a row."""
    return LossyEmbedding.apply(index, weight)


class LossyEmbedding(torch.autograd.Function):
    """Looks rows up; in its backward colliding contributions overwrite each other."""

    @staticmethod
    def forward(ctx: Any, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.shape = weight.shape
        return weight[index]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return None, grad.new_zeros(ctx.shape).scatter(0, index[:, None].expand_as(grad), grad)


class Trainer:
    """Holds a module, as code does that is no module itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


class Unregistered(nn.Module):
    """Keeps modules in a list, where torch does not find them."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.list = [*modules]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.list:
            x = module(x)
        return x


#: Where functions keep modules.
GLOBAL_LIST: list[nn.Module] = []
GLOBAL_DICT: dict[str, nn.Module] = {}


def held(hold: Callable[[nn.Module], Callable[..., Any]]) -> Any:
    """A ``make`` for what ``hold`` makes of a linear layer."""

    def made(dtype: torch.dtype) -> tuple[Callable[..., Any], list[Call]]:
        torch.manual_seed(0)
        return hold(nn.Linear(4, 4).to(dtype)), [((data(dtype, 2, 4),), {})]

    return made


def in_closure(model: nn.Module) -> Callable[..., Any]:
    trainer = Trainer(model)
    return lambda x: trainer.model(x)


def in_global_list(model: nn.Module) -> Callable[..., Any]:
    GLOBAL_LIST[:] = [model]
    return lambda x: GLOBAL_LIST[0](x)


def in_global_dict(model: nn.Module) -> Callable[..., Any]:
    GLOBAL_DICT["model"] = model
    return lambda x: GLOBAL_DICT["model"](x)


def half_as_large_again(*gradients: Any) -> Any:
    return [None if g is None else g * 1.5 for g in gradients]


def backward_inside(x: torch.Tensor) -> torch.Tensor:
    (x**2).sum().backward()
    return x.detach() * 2


def backward_inside_nested(entries: dict[str, torch.Tensor]) -> torch.Tensor:
    return backward_inside(entries["x"])


#: Of `linear`: gradients come in the order x, weight, bias.
trained = on(linear, *LINEAR, grad=True)
perceptron = with_module(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (6, 4), grad=True)

GRADIENTS = [
    *[
        Fault(f"gradient of a module {where}", "grad", held(hold), on_gradients(half_as_large_again))
        for where, hold in [
            ("in a list", Unregistered),
            ("in an object in a closure", in_closure),
            ("in a global list", in_global_list),
            ("in a global dict", in_global_dict),
        ]
    ],
    Fault(
        "gradient left in an argument",
        "mutation",
        on(backward_inside, (4,), grad=True),
        on_gradients(half_as_large_again),
    ),
    Fault(
        "gradient left in an item of an argument",
        "mutation",
        of(backward_inside_nested, lambda dtype: {"x": leaf(dtype, 4)}),
        on_gradients(half_as_large_again),
    ),
    Fault("gradient of a weight lost", "grad", trained, on_gradients(lambda x, w, b: (x, None, b))),
    Fault("gradient of a weight zero", "grad", trained, on_gradients(lambda x, w, b: (x, torch.zeros_like(w), b))),
    Fault("sign of a gradient", "grad", trained, on_gradients(lambda x, w, b: (x, -w, b))),
    Fault("gradient twice as large", "grad", trained, on_gradients(lambda x, w, b: (x, 2 * w, b))),
    Fault("gradient transposed", "grad", trained, on_gradients(lambda x, w, b: (x, w.t().contiguous(), b))),
    Fault("gradient of an input wrong", "grad", trained, on_gradients(lambda x, w, b: (x.roll(1, 0), w, b))),
    Fault("row of a gradient zeroed", "grad", trained, on_gradients(lambda x, w, b: (written(x, -1, 0), w, b))),
    Fault("gradients exchanged", "grad", trained, on_gradients(lambda x, w, b: (w, x, b))),
    Fault("NaN in a gradient", "grad", trained, on_gradients(lambda x, w, b: (x, written(w, (0, 0), float("nan")), b))),
    Fault("gradient of a bias is a mean", "grad", trained, on_gradients(lambda x, w, b: (x, w, b / 4))),
    Fault(
        "gradient of a bias from one row",
        "grad",
        trained,
        swap("linear", lambda x, w, b: F.linear(x, w, b.detach()) + first_row_only(b)),
    ),
    Fault(
        "gradient stored in float16",
        "grad",
        trained,
        on_gradients(lambda x, w, b: (x, w.half().float(), b)),
        dtypes=FLOAT32,
    ),
    Fault(
        "gradient of a parameter zero",
        "grad",
        perceptron,
        on_gradients(lambda first, *g: (torch.zeros_like(first), *g)),
    ),
    Fault(
        "branch forgotten",
        "grad",
        on(branches, (4, 4), (4, 4), grad=True),
        swap("sigmoid", lambda y: torch.sigmoid(y.detach())),
    ),
    Fault(
        "detached midway",
        "grad",
        on(layers, (4, 4), (4, 4), (4, 4), grad=True),
        swap("tanh", lambda y: torch.tanh(y).detach()),
    ),
    Fault(
        "mask of ReLU forgotten",
        "grad",
        on(branches, (4, 4), (4, 4), grad=True),
        swap("relu", lambda y: StraightThrough.apply(y)),
    ),
    Fault("only one of two outputs wrong", "grad", on(two_outputs, (4, 4), (4, 4), grad=True), scaled("sigmoid", 3.0)),
    Fault(
        "cotangent ignored",
        "grad",
        on(branches, (4, 4), (4, 4), grad=True),
        graph(lambda gm, *inputs: tuple(IgnoredCotangent.apply(out) for out in gm(*inputs))),
    ),
    Fault(
        "second use of a weight forgotten",
        "grad",
        on(use_twice, (4, 4), (4, 4), grad=True),
        swap("t", lambda w: w.detach().t()),
    ),
    Fault(
        "through an argument changed in place",
        "grad",
        of(
            through_in_place,
            lambda dtype: data(dtype, 4, 4),
            lambda dtype: leaf(dtype, 4, 4, seed=1),
            lambda dtype: leaf(dtype, 4, 4, seed=2),
        ),
        swap("add_", lambda x, w: x.add_(ScaledGradient.apply(w, 2.0))),
    ),
    Fault(
        "gradient where eager has none",
        "grad",
        on(detached_input, (4, 4), (4, 4), grad=True),
        swap("detach", lambda x: x * 1),
    ),
    Fault(
        "colliding contributions lost",
        "grad",
        of(
            embedding,
            lambda dtype: leaf(dtype, 3, 4),
            lambda dtype: torch.tensor([0, 1, 1, 2, 1]),
        ),
        swap("embedding", last_write_wins),
    ),
    Fault(
        "gradients of the first call replayed",
        "grad",
        on(linear, *LINEAR, calls=2, grad=True),
        with_own_memory(stale_gradients),
        call=2,
    ),
    Fault("backward raises", "grad", trained, on_gradients(lambda *gradients: 1 / 0)),
]


# -- faults of random numbers, exceptions and memory ----------------------------------------------


def keeping_generator(gm: torch.fx.GraphModule, *inputs: Any) -> Any:
    """Draws the right numbers, and puts the generator back."""
    state = torch.get_rng_state()
    out = gm(*inputs)
    torch.set_rng_state(state)
    return out


def sometimes_flipped(draw: Callable[[], float], probability: float) -> Callable[..., Any]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        if draw() < probability:
            return x.flip(-1)
        return x * 2

    return fn


def draws_twice(fn: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(x: torch.Tensor) -> torch.Tensor:
        random.randint(2, 1_000)
        return fn(x)

    return compiled


def clamped_index(index: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return weight[index.clamp(0, len(weight) - 1)]


def raising(error: Exception) -> Backend:
    def code(gm: torch.fx.GraphModule, *inputs: Any) -> Any:
        raise error

    return graph(code)


def other_error(gm: torch.fx.GraphModule, *inputs: Any) -> Any:
    try:
        return gm(*inputs)
    except Exception as error:
        raise KeyError("index") from error


def raises_later(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Raises from its second run on."""
    runs = [0]

    def code(*inputs: Any) -> Any:
        runs[0] += 1
        if runs[0] > 1:
            raise RuntimeError("no memory left")
        return gm(*inputs)

    return code


def not_compiling(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    raise NotImplementedError("an operation is missing")


def not_compiling_at_runtime(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("the backend is broken")


def raises_after_graph(x: torch.Tensor) -> torch.Tensor:
    """Raises a RuntimeError after something that can be compiled."""
    y = x * 2
    torch._dynamo.graph_break()
    raise RuntimeError(f"{y.dim()} dims")


def inverse_of_zero(x: torch.Tensor) -> torch.Tensor:
    """Raises a RuntimeError that shows at run time only."""
    return torch.linalg.inv(x * 0)


def one_buffer(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Writes all results into the memory of the first."""
    buffers: list[torch.Tensor] = []

    def code(*inputs: Any) -> Any:
        outs = gm(*inputs)
        if not buffers:
            buffers.extend(out.clone() for out in outs)
        for buffer, out in zip(buffers, outs):
            buffer.copy_(out)
        return tuple(buffers)

    return code


def two_buffers(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Takes turns between the memory of the first two results."""
    buffers: list[torch.Tensor] = []

    def code(*inputs: Any) -> Any:
        (out,) = gm(*inputs)
        if len(buffers) < 2:
            buffers.append(out.clone())
            return (buffers[-1],)
        buffers.append(buffers.pop(0))
        return (buffers[-1].copy_(out),)

    return code


def clears_last(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Takes what it returned last for scratch memory."""
    last: list[torch.Tensor] = []

    def code(*inputs: Any) -> Any:
        outs = gm(*inputs)
        for out in last:
            out.zero_()
        last[:] = outs
        return outs

    return code


def view_of_buffer(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Returns views of one pool of memory."""
    pool: list[torch.Tensor] = []

    def code(*inputs: Any) -> Any:
        (out,) = gm(*inputs)
        if not pool:
            pool.append(torch.empty(1024, dtype=out.dtype))
        part = pool[0][: out.numel()].view(out.shape)
        return (part.copy_(out),)

    return code


def outside(dtype: torch.dtype) -> tuple[Callable[..., Any], list[Call]]:
    """A call that looks up a row that is not there."""
    return embedding, [((data(dtype, 3, 4), torch.tensor([0, 3])), {})]


OTHERS = [
    Fault("generator not advanced", "rng", on(lambda x: F.dropout(x, 0.5), (8, 8)), graph(keeping_generator)),
    Fault(
        "Python draw left out", "rng", on(sometimes_flipped(random.random, 0.0), (4, 8)), compiled_as=only_double_one
    ),
    Fault(
        "NumPy draw left out", "rng", on(sometimes_flipped(np.random.rand, 0.0), (4, 8)), compiled_as=only_double_one
    ),
    Fault(
        "Python's numbers drawn twice",
        "rng",
        on(random_scale, (4, 8)),
        compiled_as=draws_twice,
        also=frozenset({"values"}),
    ),
    Fault("index out of range clamped", "exception", outside, swap("embedding", clamped_index)),
    Fault("raises where eager returns", "exception", on(affine, (4, 8)), raising(RuntimeError("launch failed"))),
    Fault("another class of exception", "exception", outside, graph(other_error)),
    Fault("raises from the second run on", "exception", on(affine, (4, 8), calls=2), raises_later, call=2),
    Fault("does not compile", "exception", on(affine, (4, 8)), not_compiling),
    Fault("does not compile where eager raises", "exception", on(raises_after_graph, (2, 4)), not_compiling_at_runtime),
    Fault(
        "does not compile what raises at run time",
        "exception",
        on(inverse_of_zero, (4, 4)),
        not_compiling_at_runtime,
        dtypes=FLOAT32,
        # Compiled lets the error of the operation out as another type than eager.
        wrong_in={"2.11": {"exception"}},
    ),
    Fault("output buffer used again", "overwritten", on(affine, (4, 8), calls=2), one_buffer, call=2),
    Fault("one of two buffers used again", "overwritten", on(affine, (4, 8), calls=3), two_buffers, call=3),
    Fault("earlier output cleared", "overwritten", on(plus_and_minus, (4, 8), calls=2), clears_last, call=2),
    Fault("outputs are views of one pool", "overwritten", on(affine, (4, 8), calls=2), view_of_buffer, call=2),
    Fault(
        "output buffer of integers used again",
        "overwritten",
        on(affine, (4, 8), calls=2),
        one_buffer,
        call=2,
        dtypes=INT64,
    ),
]

FAULTS = [*VALUES, *RESULTS, *ALIASES, *STRIDES, *MUTATIONS, *STATES, *GRADIENTS, *OTHERS]
