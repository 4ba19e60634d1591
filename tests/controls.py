"""Honest code of many kinds, on which no check may fail: with any backend, at every call, with other values each."""

from __future__ import annotations

import functools
import math
import random
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from faults import BOOL
from faults import COMPLEX64
from faults import FLOAT32
from faults import FLOATS
from faults import INT64
from faults import Call
from faults import data
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Control:
    """A function that compiled code does right."""

    name: str
    #: Makes for a dtype the function and ``call(seed)``, which makes the arguments of a call.
    make: Callable[[torch.dtype], tuple[Callable[..., Any], Callable[[int], Call]]]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    #: Whether something of it can't be compared.
    not_checked: bool = False
    #: Whether it is worth the time that inductor takes.
    telling: bool = False
    #: Versions of torch (major.minor) in which compiled code really is not eager's, and what says so: ``Check.what``.
    wrong_in: Mapping[str, set[str]] = field(default_factory=dict)
    #: Versions of torch that can't compile it and leave the process unusable.
    breaks_torch: tuple[str, ...] = ()


Argument = tuple[int, ...] | Callable[[torch.dtype, int], Any]


def arguments(given: tuple[Argument, ...], dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    """Arguments of one call: shapes become tensors, functions are called with the dtype and a seed."""
    seeds = range(100 * seed, 100 * seed + len(given))
    return tuple(a(dtype, n) if callable(a) else data(dtype, *a, seed=n) for a, n in zip(given, seeds))


def function(fn: Callable[..., Any], *given: Argument, **keywords: Any) -> Any:
    """A ``make`` for a function."""
    return lambda dtype: (fn, lambda seed: (arguments(given, dtype, seed), dict(keywords)))


def module(make: Callable[[], nn.Module], *given: Argument, train: bool = True) -> Any:
    """A ``make`` for a module with parameters of the dtype."""

    def made(dtype: torch.dtype) -> tuple[nn.Module, Callable[[int], Call]]:
        torch.manual_seed(0)
        return make().to(dtype).train(train), lambda seed: (arguments(given, dtype, seed), {})

    return made


# -- arguments ------------------------------------------------------------------------------------


def grad(*shape: int) -> Argument:
    """A leaf that requires grad."""
    return lambda dtype, seed: data(dtype, *shape, seed=seed).requires_grad_()


def non_leaf(*shape: int) -> Argument:
    return lambda dtype, seed: data(dtype, *shape, seed=seed).requires_grad_() * 2


def long(high: int, *shape: int) -> Argument:
    """Indices below ``high``."""
    return lambda dtype, seed: torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def viewed(view: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> Argument:
    return lambda dtype, seed: view(data(dtype, *shape, seed=seed))


def constant(value: Any) -> Argument:
    return lambda dtype, seed: value


def with_nan_and_inf(*shape: int) -> Argument:
    def make(dtype: torch.dtype, seed: int) -> torch.Tensor:
        x = data(dtype, *shape, seed=seed)
        x[0, 0], x[0, 1], x[1, 0] = math.nan, math.inf, -math.inf
        return x

    return make


# -- in-place changes, views and sharing ----------------------------------------------------------


def change_argument(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2).add_(1)
    return x.sum()


def change_part(x: torch.Tensor) -> torch.Tensor:
    x[1:3].fill_(0)
    x[:, 0] = 7
    return x * 2


def copy_into(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    buffer.copy_(x * 2)
    return buffer.mean()


def change_both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    b.add_(1)
    return a.sum() + b.sum()


def two_views(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
    def call(seed: int) -> Call:
        base = data(dtype, 8, seed=seed)
        return (base[:6], base[2:]), {}

    return change_both, call


def same_twice(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
    return change_both, lambda seed: ((data(dtype, 6, seed=seed),) * 2, {})


def replace_items(items: list[torch.Tensor], entries: dict[str, torch.Tensor]) -> torch.Tensor:
    items[0] = items[0] + 1
    items.append(items[0] * 2)
    entries["new"] = items[-1] - entries["old"]
    return items[0].sum()


def views_of_intermediate(x: torch.Tensor) -> Any:
    y = x * 2
    return y, y[0], y.t(), y.view(-1)[3:5]


def through_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.add_(1)
    y[0].mul_(3)
    return torch.sigmoid(y)


def change_non_leaf(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.add_(w)
    return x * w


SHARING = [
    Control("change an argument in place", function(change_argument, (4, 8)), telling=True),
    Control("return the changed argument", function(lambda x: x.add_(1), (4, 8))),
    Control("change parts of an argument", function(change_part, (4, 8))),
    Control("write into a given buffer", function(copy_into, (4, 8), (4, 8))),
    Control("change two views of one base", two_views, telling=True),
    Control("the same tensor twice", same_twice),
    Control(
        "replace items of a list and a dict",
        function(replace_items, lambda d, s: [data(d, 4, seed=s)], lambda d, s: {"old": data(d, 4, seed=s)}),
    ),
    Control("views of an argument", function(lambda x: (x[1:], x.t(), x.view(-1), x[..., None]), (4, 8)), telling=True),
    Control("views of an argument that requires grad", function(lambda x: (x[1:], x.t()), grad(4, 8))),
    Control("views of an intermediate", function(views_of_intermediate, (4, 8)), telling=True),
    Control("views of a differentiable intermediate", function(views_of_intermediate, grad(4, 8))),
    Control("chunks", function(lambda x: x.chunk(3), (6, 4))),
    Control("split and unbind", function(lambda x: (*(x + 1).split(2), *x.unbind(1)), (6, 4))),
    Control("arguments themselves", function(lambda x, y: (x, y, x + y), (4, 8), (4, 8))),
    Control("one output twice", function(lambda x: (y := x * 2, y, [y]), (4, 8))),
    Control("expanded result", function(lambda x: (x * 2).expand(4, 8), (8,))),
    Control("expanded argument", function(lambda x: x * 2 + x.sum(), viewed(lambda x: x.expand(4, 8), 8))),
    Control("transposed argument", function(lambda x: x * 2 + 1, viewed(torch.t, 4, 8))),
    Control("argument with holes", function(lambda x: (x * 2, x[0]), viewed(lambda x: x[1::2, ::3], 8, 9))),
    Control("overlapping argument", function(lambda x: x.sum(-1) * 2, viewed(lambda x: x.unfold(0, 4, 1), 9))),
    Control("change an intermediate in place", function(through_in_place, grad(4, 8))),
    Control("change a non-leaf argument in place", function(change_non_leaf, non_leaf(4, 8), grad(8))),
]


# -- random numbers and unusual values ------------------------------------------------------------


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x) * torch.rand(x.shape) + torch.bernoulli(torch.full(x.shape, 0.3)).to(x.dtype)


def shuffled(x: torch.Tensor) -> torch.Tensor:
    return x[torch.randperm(x.shape[0])] * 2


def random_choice(x: torch.Tensor) -> torch.Tensor:
    return x * random.randint(2, 9)


def from_generator(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + torch.rand(x.shape, generator=generator)


def masked_rows(x: torch.Tensor) -> torch.Tensor:
    """A softmax over nothing but masked values is NaN."""
    return x.masked_fill(x.sum(-1, keepdim=True) > 0, -math.inf).softmax(-1)


CHANCE = [
    Control("dropout", function(lambda x: F.dropout(x, 0.4) * 2, (8, 16)), telling=True),
    Control("dropout with gradients", module(lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5)), (4, 8))),
    Control(
        "dropout in eval mode",
        module(lambda: nn.Dropout(0.5), (4, 8), train=False),
        # Eager returns its argument itself, compiled a copy.
        wrong_in={"2.11": {"alias"}, "2.13": {"alias"}},
    ),
    Control("noise", function(noise, (4, 8))),
    Control("random permutation", function(shuffled, (8, 4))),
    Control("Python's random integers", function(random_choice, (4, 8))),
    Control(
        "generator as an argument",
        function(from_generator, (4, 8), lambda d, s: torch.Generator().manual_seed(s)),
        dtypes=FLOAT32,
    ),
    Control(
        "NaN and infinity",
        function(lambda x: (x * 2, x.relu(), x.sum(0), x.exp()), with_nan_and_inf(4, 8)),
        telling=True,
    ),
    Control("softmax of masked rows", function(masked_rows, (6, 8))),
    Control(
        "large values", function(lambda x: torch.softmax(x * 1e4, -1) + torch.logsumexp(x * 1e4, -1, True), (4, 8))
    ),
    Control("small values", function(lambda x: (x * 1e-8) * 3, (16, 16))),
    Control("empty tensors", function(lambda x, y: (x * 2, x.sum(), torch.cat([x, y])), (0, 4), (3, 4))),
    Control("tensors without dims", function(lambda x, y: (x * y, x + 1, y.reshape(1)), (), ())),
    Control("constant result", function(lambda x: (x * 0, torch.ones_like(x)), (4, 8))),
]


# -- models ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual MLP as in a transformer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 4 * size)
        self.down = nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, size = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, size))


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2))


def matmul_chain(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        x = (x @ weight) * 0.3
    return x


def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, target) + F.mse_loss(x, x.detach() * 0.9) + F.smooth_l1_loss(x, x.roll(1, 0))


def deep_softmax(x: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        x = F.layer_norm(torch.softmax(x, -1) * 3 + x, x.shape[-1:])
    return x


MODELS = [
    Control("deep residual MLP", module(lambda: nn.Sequential(*[Block(16) for _ in range(3)]), (4, 16)), telling=True),
    Control("deep softmax and layer norm", function(deep_softmax, (8, 32)), telling=True),
    Control("chain of matrix products", function(matmul_chain, (8, 16), *[(16, 16)] * 10)),
    Control("attention", module(lambda: Attention(16, 4), (2, 6, 16)), telling=True),
    Control(
        "scaled_dot_product_attention with a mask",
        function(F.scaled_dot_product_attention, *[(2, 2, 5, 4)] * 3, (5, 5)),
    ),
    Control(
        "transformer layer in training",
        module(lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
    ),
    Control(
        "transformer layer in eval mode",
        module(lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16), train=False),
    ),
    Control("convolution and batch norm in training", module(convolution, (4, 3, 9, 9)), telling=True),
    Control("convolution and batch norm in eval mode", module(convolution, (4, 3, 9, 9), train=False)),
    Control(
        "channels_last",
        module(
            lambda: convolution().to(memory_format=torch.channels_last),
            viewed(lambda x: x.contiguous(memory_format=torch.channels_last), 2, 3, 8, 8),
        ),
    ),
    Control("batch norm with a cumulative average", module(lambda: nn.BatchNorm1d(8, momentum=None), (16, 8))),
    Control("group norm and SiLU", module(lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), (4, 8, 5))),
    Control("RMS norm", module(lambda: nn.RMSNorm(16), grad(4, 16))),
    Control(
        "spectral norm",
        module(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)), (4, 6)),
        dtypes=FLOAT32,
    ),
    Control("weight norm", module(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), (4, 6))),
    Control("tied weights", module(Tied, long(11, 3, 5))),
    Control("LSTM", module(lambda: nn.LSTM(6, 5, batch_first=True), (2, 4, 6)), dtypes=FLOAT32),
    Control("GRU", module(lambda: nn.GRU(6, 5), (4, 2, 6)), dtypes=FLOAT32),
    Control("GRU cell", module(lambda: nn.GRUCell(6, 5), (2, 6), (2, 5))),
    Control("losses", function(loss, grad(6, 5), long(5, 6)), telling=True),
    Control(
        "pooling and interpolation",
        function(lambda x: F.interpolate(F.max_pool2d(x, 2), scale_factor=2.0), grad(1, 2, 8, 8)),
    ),
]


# -- state ----------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls in a buffer, in an attribute and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.calls += 1
        self.sizes.append(x.shape[0])
        return x * self.count


class Averaging(nn.Module):
    """Gives its buffer another tensor at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Caching(nn.Module):
    """Keeps a row of each call in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("rows", torch.zeros(32, 8))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.rows.index_copy_(0, self.position, self.project(x))
        self.position.add_(1)
        return x @ self.rows.t()


def attend(x: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:
    """Appends to a cache that the caller holds."""
    cache["keys"] = torch.cat([cache["keys"], x])
    return x @ cache["keys"].t()


def attend_at(x: torch.Tensor, keys: torch.Tensor, position: int) -> torch.Tensor:
    keys[position] = x[0]
    return x @ keys.t()


def attend_over_calls(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
    keys = torch.zeros(30, 8, dtype=dtype)
    return attend_at, lambda seed: ((data(dtype, 1, 8, seed=seed), keys, seed % 30), {})


class Lazily(nn.Module):
    """Makes what it needs at its first call."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[-1], dtype=x.dtype)
            self.register_buffer("ones", torch.ones_like(x))
        return x * self.table + self.ones


def closures(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
    weight, seen, total = data(dtype, 8, seed=1), [], torch.zeros(1, dtype=dtype)

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        total.add_(1)
        return x * weight + total

    return fn, lambda seed: ((data(dtype, 4, 8, seed=seed),), {})


def with_forward_hooks() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


def with_backward_hooks() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[0].register_full_backward_hook(
        lambda module, grad_in, grad_out: tuple(g * 2 if g is not None else None for g in grad_in)
    )
    return model


def with_parameter_hooks() -> nn.Module:
    model = nn.Linear(8, 8)
    model.weight.register_hook(lambda g: g * 3)
    return model


def hooked_inside(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda g: g * 3)
    return torch.sigmoid(y)


def training_step(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = F.mse_loss(model(x), y)
        value.backward()
        optimizer.step()
        return value.detach()

    return step, lambda seed: (arguments(((6, 8), (6, 4)), dtype, seed), {})


class PartlyUsed(nn.Module):
    """Has a frozen parameter and one that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.used.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


STATES = [
    Control("counters", module(Counting, (4, 8)), telling=True),
    Control("average that is rebound", module(Averaging, (4, 8))),
    Control("cache in the module", module(Caching, (1, 8))),
    Control("cache in a dict of the caller", function(attend, (1, 8), lambda d, s: {"keys": data(d, 3, 8, seed=s)})),
    Control("cache over calls", attend_over_calls),
    Control("state made at the first call", module(Lazily, (4, 8))),
    Control("closure over tensors and a list", closures),
    Control("forward hooks", module(with_forward_hooks, (4, 8))),
    Control("backward hooks", module(with_backward_hooks, grad(4, 8))),
    Control("hook of a parameter", module(with_parameter_hooks, (4, 8))),
    Control("hook inside", function(hooked_inside, grad(4, 8))),
    Control("training step", training_step),
    Control("frozen and unused parameters", module(PartlyUsed, (4, 8))),
    Control("parameters in eval mode", module(lambda: nn.Linear(8, 8), (4, 8), train=False)),
]


# -- results and arguments of many types ----------------------------------------------------------


class Pair(NamedTuple):
    """A result with names."""

    first: Any
    second: Any


@dataclass
class Result:
    """A result with attributes."""

    logits: Any
    loss: Any = None


class Output(OrderedDict):  # type: ignore[type-arg]
    """A dict that is also read by attributes, as model libraries return it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def many_kinds(x: torch.Tensor) -> Any:
    return {"pair": Pair(x + 1, None), "result": Result(x * 2), "list": [x - 1, (x.sum(), 3)], "text": "ok"}


def model_output(x: torch.Tensor) -> Output:
    return Output(logits=x * 2, hidden=(x + 1, x - 1))


def numbers(x: torch.Tensor) -> Any:
    return x * 2, x.shape[0], x.dim() * 0.5, x.is_floating_point(), None


def keywords_only(x: torch.Tensor, *, scale: float = 1.0, shift: torch.Tensor | None = None) -> torch.Tensor:
    return x * scale if shift is None else x * scale + shift


def with_keywords(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
    def call(seed: int) -> Call:
        shift = data(dtype, 8, seed=seed + 1) if seed % 2 else None
        return (data(dtype, 4, 8, seed=seed),), {"scale": 0.5, "shift": shift}

    return keywords_only, call


def by_name(x: torch.Tensor, kind: str, flag: bool) -> torch.Tensor:
    y = {"relu": torch.relu, "tanh": torch.tanh}[kind](x)
    return -y if flag else y


def sizes(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
    return lambda x: (x.softmax(-1), x.sum(0), x.shape[0]), lambda seed: (
        (data(dtype, 3 + seed % 7, 8, seed=seed),),
        {},
    )


class Callables:
    """Something with a method, and that can be called."""

    def __init__(self) -> None:
        self.scale = 3

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale


def raises(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.shape[0] > 3:
        raise ValueError("at most three rows")
    return y


def raises_sometimes(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
    return raises, lambda seed: ((data(dtype, 4 if seed % 3 == 1 else 3, 8, seed=seed),), {})


def broken_graph(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y.sum() + x


TYPES = [
    Control("results of many kinds", function(many_kinds, (4, 8))),
    Control("dict with attributes", function(model_output, (4, 8))),
    Control("numbers and None", function(numbers, (4, 8))),
    Control("keywords", with_keywords),
    Control("text and bool as arguments", function(by_name, (4, 8), kind="tanh", flag=True)),
    Control(
        "nested arguments",
        function(
            lambda a, b: a["x"][0] + b[1],
            lambda d, s: {"x": [data(d, 4, seed=s)]},
            lambda d, s: (None, data(d, 4, seed=s)),
        ),
    ),
    Control("other sizes at each call", sizes, telling=True),
    Control("partial", function(functools.partial(keywords_only, scale=2.0), (4, 8))),
    Control("bound method", function(Callables().method, (4, 8))),
    Control("object that can be called", function(Callables(), (4, 8))),
    Control("exception at some calls", raises_sometimes),
    Control("graph break", function(broken_graph, (4, 8))),
]


# -- operations -----------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    """x³ with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * x**2


def integers(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x + y, x * y - 3, x // (y.abs() + 1), x % 5, x & y, x << 2, x > y, x.sum(), x.abs().max()


def bytes_that_wrap(x: torch.Tensor) -> Any:
    b = (x.abs() * 90).to(torch.uint8)
    return b + 200, b * 3, b.sum(), ~b


def masks(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x & y, x | ~y, x ^ y, x.any(), x.all(0), torch.where(x, 1, 2), x.sum()


def complex_numbers(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x * y.conj(), x.abs(), torch.view_as_real(x + y), x.real + y.imag


def spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1])


def orders(x: torch.Tensor) -> Any:
    return x.sort(-1), x.topk(3), x.argmax(-1), x.argsort(0), x.max(0), x.median(-1).values


def scattered(x: torch.Tensor, index: torch.Tensor) -> Any:
    zeros = torch.zeros(4, x.shape[1], dtype=x.dtype)
    added = zeros.index_add(0, index, x)
    put = zeros.index_put((index,), x, accumulate=True)
    return added, put, zeros.scatter_add(0, index[:, None].expand_as(x), x)


def autocasted(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
    return y, y.float().sum()


def partly_no_grad(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.no_grad():
        scale = (x * w).sum()
    return x * scale, scale, (x * w).detach()


@torch.no_grad()
def grad_inside(x: torch.Tensor) -> Any:
    y = x * 2
    with torch.enable_grad():
        z = x * 3
    return y, z


def inferring(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.tanh(x) * 2


def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x, w: torch.tanh(x @ w), x, w, use_reentrant=False) @ w


def rounded(x: torch.Tensor) -> Any:
    return x.round(), x.floor(), x.trunc(), x.sign(), x.clamp(-0.5, 0.5), x.abs().sqrt(), (x * 4).to(torch.int32)


OPERATIONS = [
    Control("integers", function(integers, (4, 8), (4, 8)), dtypes=INT64, telling=True),
    Control("bytes that wrap around", function(bytes_that_wrap, (4, 8)), dtypes=FLOAT32),
    Control("masks", function(masks, (4, 8), (4, 8)), dtypes=BOOL),
    Control("complex numbers", function(complex_numbers, (6,), (6,)), dtypes=COMPLEX64),
    Control("gradients of complex numbers", function(lambda x: (x * x.conj()).real.sum(), grad(6)), dtypes=COMPLEX64),
    Control("Fourier transform", function(spectrum, (4, 16)), dtypes=FLOAT32),
    Control("sorting", function(orders, (4, 8))),
    Control(
        "cumulative sums and products", function(lambda x: (x.cumsum(0), x.cumprod(1), x.cummax(0).values), grad(6, 5))
    ),
    Control("embedding", function(lambda w, i: F.embedding(i, w), grad(5, 4), long(5, 3, 2))),
    Control("einsum", function(lambda a, b: torch.einsum("bij,bkj->bik", a, b), grad(2, 3, 4), grad(2, 5, 4))),
    Control("scattered writes", function(scattered, grad(9, 3), long(4, 9)), telling=True),
    Control("where", function(lambda x, y: torch.where(x > 0, x, y * 2), grad(4, 8), grad(4, 8))),
    Control("own autograd function", function(lambda x: Cube.apply(x) + 1, grad(4, 8))),
    Control("checkpoint", function(checkpointed, grad(4, 4), grad(4, 4))),
    Control("autocast", function(autocasted, grad(4, 8), grad(8, 4)), dtypes=FLOAT32),
    Control("no_grad for a part", function(partly_no_grad, grad(4, 8), grad(4, 8))),
    Control("enable_grad within no_grad", function(grad_inside, grad(4, 8))),
    Control("inference mode", function(inferring, (4, 8))),
    Control("non-leaf arguments", function(lambda x, w: torch.tanh(x) * w, non_leaf(4, 8), non_leaf(8))),
    Control("detached results", function(lambda x: (x.detach(), torch.sigmoid(x).detach(), x * 2), grad(4, 8))),
    Control("rounding", function(rounded, (4, 8))),
    Control(
        "shapes", function(lambda x: (x.flip(0), x.roll(1, 1), F.pad(x, (1, 2)), x.repeat(2, 1), x.tril()), grad(4, 8))
    ),
    Control("statistics", function(lambda x: (x.var(-1), x.std(0), x.mean(), x.norm(), x.prod(-1)), grad(6, 5))),
    Control("factories", function(lambda x: x + torch.arange(8) + torch.full((8,), 0.5) + torch.eye(8)[0], (4, 8))),
]

# -- state of real size, low precision and operators of a higher order ------------------------------


def wide(dtype: torch.dtype) -> nn.Module:
    """A block with more than 8 KB of parameters, made alike each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64)).to(dtype)


def wide_convolution() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU()),
    )


def after_wide(fn: Callable[..., Any], *given: Argument) -> Any:
    """A ``make`` for a function of what `wide` gives, whose state is in a closure."""

    def made(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
        model = wide(dtype)
        return lambda x, *others: fn(model(x), *others), lambda seed: (arguments(given, dtype, seed), {})

    return made


def branching(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(
        x.sum() > 0,
        lambda x: F.layer_norm(F.gelu(x) * x, (64,)),
        lambda x: (F.silu(x) * x).softmax(-1),
        (x,),
    )


def branching_to_tuples(x: torch.Tensor) -> Any:
    """Branches that give a tensor alone can't be differentiated while Dynamo is off."""
    return torch.cond(x.sum() > 0, lambda x: (F.layer_norm(F.gelu(x), (64,)),), lambda x: (x.softmax(-1),), (x,))


def looping(x: torch.Tensor) -> Any:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))


def with_distance(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
    return score + (j - i) * 0.1


def attend_flexibly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flex_attention(q, k, v, score_mod=with_distance)


def causal(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
    return torch.where(i >= j, score, -float("inf"))


def attend_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flex_attention(q, k, v, score_mod=causal)


def mixed_precision(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
    """A loss under autocast with weights in float32."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(2)]
    model = nn.Sequential(*blocks).to(dtype)

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(x), y)

    return fn, lambda seed: (arguments(((16, 32), (16, 32)), dtype, seed), {})


def mixed_normalised(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
    """A model under autocast whose last bias eager sums in bfloat16, and compiled code in more digits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)).to(dtype)

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    return fn, lambda seed: (arguments(((16, 32),), dtype, seed), {})


def step_with_loss(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
    """A training step whose loss still has the graph that backward has freed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = F.mse_loss(model(x), y)
        value.backward()
        optimizer.step()
        return value

    return step, lambda seed: (arguments(((6, 4), (6, 2)), dtype, seed), {})


def overflowing(x: torch.Tensor) -> Any:
    return (x * x).sum(-1).sqrt(), (x * 300 * x) / 300, F.normalize(x * 100, dim=-1)


def growing(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The later the call, the larger, up to the sixth; it overflows float16 from the third on."""
    return (data(torch.float32, 8, 64, seed=seed) * 10.0 ** min(seed // 100 * 2, 10) / 10).to(dtype)


def thresholds(x: torch.Tensor) -> Any:
    return (x * 1.7).sigmoid() * x > 0.3, (x.tanh() * 4 * x).round().int()


def quantized(x: torch.Tensor) -> Any:
    x = F.silu(x) * 1.3
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def choices(x: torch.Tensor) -> Any:
    return x.topk(5), x.argmax(-1), x > 0.3


def normalizing_inferring(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(dtype)

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return model(x)

    return fn, lambda seed: (arguments(((5, 4),), dtype, seed), {})


class Recurrent(nn.Module):
    """Carries its hidden state, with its graph, from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hidden is None:
            self.hidden = torch.zeros(x.shape[0], 4, dtype=x.dtype)
        self.hidden = self.cell(x, self.hidden)
        return self.hidden


def fed_back(fn: Callable[..., Any], make: Callable[[torch.dtype], Any]) -> Any:
    """A ``make`` for a function that changes what the caller holds, each time the same object."""

    def made(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[[int], Call]]:
        held = make(dtype)
        return fn, lambda seed: ((data(dtype, 4, seed=seed), held), {})

    return made


def add_to(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    c.add_(x)
    return c


def append_pair(x: torch.Tensor, cache: list[Any]) -> Any:
    cache.append((x * 2, x + 1))
    return torch.stack([k + v for k, v in cache]).sum(0), cache


def write_pairs(x: torch.Tensor, cache: list[Any]) -> Any:
    for k, v in cache:
        k[:, 1] = x
        v[:, 1] = x * 2
    return x + cache[0][0].sum(), cache


def extend_entry(x: torch.Tensor, cache: dict[str, torch.Tensor]) -> Any:
    cache["keys"] = torch.cat([cache["keys"], x[None]])
    return cache["keys"] @ x, cache


def zero_pairs(dtype: torch.dtype) -> list[Any]:
    return [(torch.zeros(4, 4, dtype=dtype), torch.zeros(4, 4, dtype=dtype)) for _ in range(3)]


REAL = [
    Control("block of real size", module(lambda: wide(torch.float32), grad(32, 64)), telling=True),
    Control("convolutions of real size in training", module(wide_convolution, (4, 3, 16, 16)), telling=True),
    Control("changed state returned", fed_back(add_to, lambda dtype: torch.zeros(4, dtype=dtype)), telling=True),
    Control("list of pairs appended to", fed_back(append_pair, lambda dtype: [])),
    Control("list of pairs written to", fed_back(write_pairs, zero_pairs), telling=True),
    Control("dict as a cache", fed_back(extend_entry, lambda dtype: {"keys": torch.zeros(1, 4, dtype=dtype)})),
    Control("cond", function(branching, (8, 64)), telling=True),
    Control("cond with gradients", function(branching_to_tuples, grad(8, 64)), telling=True),
    Control("while_loop", function(looping, (4,)), telling=True),
    Control("flex_attention", function(attend_flexibly, *[(1, 2, 128, 32)] * 3), telling=True),
    Control("causal flex_attention", function(attend_causally, *[(1, 2, 16, 16)] * 3), telling=True),
    Control("hidden state with its graph", module(Recurrent, (2, 3)), not_checked=True),
    Control("autocast with gradients", mixed_precision, dtypes=FLOAT32, telling=True),
    Control("autocast with gradients of a layer norm", mixed_normalised, dtypes=FLOAT32, telling=True),
    Control("overflow", function(overflowing, growing), dtypes=(torch.float16,), telling=True),
    Control("choices from a model", after_wide(choices, (64, 64)), telling=True),
    Control("thresholds", function(thresholds, (64, 64)), telling=True),
    Control("quantization", function(quantized, (64, 512)), telling=True),
    Control(
        "loss as a number",
        after_wide(lambda y, target: F.mse_loss(y, target).item(), (8, 64), (8, 64)),
        telling=True,
    ),
    Control(
        "batch norm in training within inference mode",
        normalizing_inferring,
        telling=True,
        # BackendCompilerFailed, after which torch asserts within itself at every operation, with torch alone too.
        breaks_torch=("2.11",),
    ),
    Control("training step that returns its loss", step_with_loss),
]

CONTROLS = [*SHARING, *CHANCE, *MODELS, *STATES, *TYPES, *OPERATIONS, *REAL]
