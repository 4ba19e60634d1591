"""State that a function reaches is, after checked calls, exactly as after the same calls of plain torch.compile."""

from __future__ import annotations

import dataclasses
import random
import time
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


pytestmark = pytest.mark.compiled(backend="eager")

#: Compiles a function, checked or plainly.
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
CALLS = 4


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def seed_all() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def copied(value: Any) -> Any:
    """Tensors, containers and numbers, in a form that ``==`` compares exactly."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.requires_grad, value.detach().tolist()
    if isinstance(value, nn.Module):
        return copied([*value.named_parameters(), *value.named_buffers(), *(p.grad for p in value.parameters())])
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return [(str(key) if not isinstance(key, int) else key, copied(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    assert isinstance(value, int | float | str | None), value
    return value


class Plain:
    """Attributes and nothing else."""


CACHE: dict[Any, Any] = {}
HOLDER = Plain()


def model_and_sgd(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


# -- scenarios: each makes its calls with what ``wrap`` makes, and returns all that there is to see ----


def scheduler(wrap: Wrap) -> Any:
    model, optimizer = model_and_sgd()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = squares(model, x)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    fast = wrap(step)
    losses = [fast(torch.randn(6, 4)) for _ in range(CALLS)]
    return losses, model, schedule.last_epoch, schedule._last_lr, optimizer.state_dict()


class Scaler:
    """Scales a loss as a GradScaler does, by what it keeps in attributes."""

    def __init__(self) -> None:
        self.scale = torch.full((), 8.0)
        self.growth = 0
        self.per_optimizer: dict[int, list[int]] = {}

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= self.scale
        optimizer.step()
        self.per_optimizer.setdefault(0, []).append(self.growth)

    def update(self) -> None:
        self.growth += 1
        if self.growth == 2:
            self.scale = self.scale * 2
            self.growth = 0


def scaling_step(wrap: Wrap, scaler: Any, scaled: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    model, optimizer = model_and_sgd()

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = squares(model, x)
        scaled(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    fast = wrap(step)
    return [fast(torch.randn(6, 4)) for _ in range(CALLS)], model, optimizer.state_dict()


def own_scaler(wrap: Wrap) -> Any:
    scaler = Scaler()
    seen = scaling_step(wrap, scaler, lambda loss: loss * scaler.scale)
    return seen, scaler.scale, scaler.growth, scaler.per_optimizer


def grad_scaler(wrap: Wrap) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return scaling_step(wrap, scaler, scaler.scale), scaler.state_dict()


@torch._dynamo.disable  # inside a graph Dynamo takes the first number for a constant
def integer(numbers: random.Random) -> int:
    return numbers.randint(1, 1000)


def generator_in_closure(wrap: Wrap) -> Any:
    generator = torch.Generator().manual_seed(1)
    fast = wrap(lambda x: x + torch.rand(3, generator=generator))
    return [fast(torch.ones(3)) for _ in range(CALLS)], generator.get_state()


def python_random_in_closure(wrap: Wrap) -> Any:
    numbers = random.Random(1)
    fast = wrap(lambda x: x * integer(numbers))
    return [fast(torch.ones(3)) for _ in range(CALLS)], numbers.random()


def numpy_random_in_closure(wrap: Wrap) -> Any:
    numbers = np.random.default_rng(1)
    fast = wrap(lambda x: x * float(numbers.random()))
    return [fast(torch.ones(3)) for _ in range(CALLS)], float(numbers.random())


class Drawing(nn.Module):
    """Draws from the generator that it keeps."""

    def __init__(self, generator: Any, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.generator = generator
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.draw(self.generator)


def drawn(wrap: Wrap, generator: Any, draw: Callable[[Any], Any]) -> Any:
    model = Drawing(generator, draw)
    fast = wrap(model)
    return [fast(torch.ones(3)) for _ in range(CALLS)], draw(generator)


def generator_as_attribute(wrap: Wrap) -> Any:
    return drawn(wrap, torch.Generator().manual_seed(1), lambda generator: torch.rand(3, generator=generator))


def python_random_as_attribute(wrap: Wrap) -> Any:
    return drawn(wrap, random.Random(1), integer)


def numpy_random_as_attribute(wrap: Wrap) -> Any:
    return drawn(wrap, np.random.default_rng(1), lambda generator: float(generator.random()))


class Decaying(torch.optim.Optimizer):
    """Counts its steps by itself."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.t = 0

    @torch._dynamo.disable  # Dynamo loses what an optimizer's step sets
    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / self.t)


def own_optimizer(wrap: Wrap) -> Any:
    model = nn.Linear(4, 2)
    optimizer = Decaying(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = squares(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = wrap(step)
    return [fast(torch.randn(6, 4)) for _ in range(CALLS)], model, optimizer.t


def lbfgs(wrap: Wrap) -> Any:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def step(x: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = squares(model, x)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    fast = wrap(step)
    losses = [fast(torch.randn(6, 4)) for _ in range(CALLS)]
    return losses, model, optimizer.state_dict()


class CountingCalls(nn.Module):
    """Counts in Python, and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return self.norm(x) * self.n


class Unregistered(nn.Module):
    """Keeps modules in a list, where torch does not find them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [CountingCalls(), nn.Linear(4, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def modules_in_a_list(wrap: Wrap) -> Any:
    model = Unregistered()
    fast = wrap(model)
    outputs = []
    for _ in range(CALLS):
        outputs.append(fast(torch.randn(8, 4)))
        outputs[-1].pow(2).sum().backward()
    return outputs, model.layers[0].n, model.layers


def nonlocal_names(wrap: Wrap) -> Any:
    cell = nn.GRUCell(3, 3)
    hidden, n = torch.zeros(2, 3), 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal hidden, n
        n += 1
        hidden = cell(x, hidden).detach()
        return hidden * n

    fast = wrap(fn)
    return [fast(torch.randn(2, 3)) for _ in range(CALLS)], hidden, n


def count_in_cache(x: torch.Tensor) -> torch.Tensor:
    if "n" not in CACHE:
        CACHE["n"] = 0
        CACHE["total"] = torch.zeros(3)
    CACHE["n"] += 1
    CACHE["total"] = CACHE["total"] + x
    return CACHE["total"] * CACHE["n"]


def global_dict(wrap: Wrap) -> Any:
    CACHE.clear()
    fast = wrap(count_in_cache)
    return [fast(torch.randn(3)) for _ in range(CALLS)], dict(CACHE)


def count_in_holder(x: torch.Tensor) -> torch.Tensor:
    HOLDER.n += 1
    HOLDER.total = HOLDER.total * 0.5 + x
    HOLDER.seen.append(HOLDER.n)
    return HOLDER.total * HOLDER.n


def global_object(wrap: Wrap) -> Any:
    HOLDER.n, HOLDER.total, HOLDER.seen = 0, torch.zeros(3), []
    fast = wrap(count_in_holder)
    return [fast(torch.randn(3)) for _ in range(CALLS)], vars(HOLDER)


def state_fed_back(wrap: Wrap) -> Any:
    def add(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        c.add_(x)
        return c

    first = c = torch.zeros(4)
    fast = wrap(add)
    for _ in range(CALLS):
        c = fast(torch.randn(4), c)
    return c, first, c is first


def pairs_fed_back(wrap: Wrap) -> Any:
    def append(x: torch.Tensor, cache: list[Any]) -> Any:
        cache.append((x * 2, x + 1))
        return torch.cat([k for k, _ in cache]), cache

    first: list[Any] = []
    cache, outputs = first, []
    fast = wrap(append)
    for _ in range(CALLS):
        out, cache = fast(torch.randn(1, 4), cache)
        outputs.append(out)
    return outputs, cache, cache is first


def dict_fed_back(wrap: Wrap) -> Any:
    def extend(x: torch.Tensor, cache: dict[str, torch.Tensor]) -> Any:
        cache["keys"] = torch.cat([cache["keys"], x]) if "keys" in cache else x * 1
        return x @ cache["keys"].t(), cache

    cache: dict[str, torch.Tensor] = {}
    outputs = []
    fast = wrap(extend)
    for _ in range(CALLS):
        out, cache = fast(torch.randn(1, 4), cache)
        outputs.append(out)
    return outputs, cache


class Recurrent(nn.Module):
    """Carries its hidden state, with its graph, from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.h: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.h is None:
            self.h = torch.zeros(x.shape[0], 4)
        self.h = self.cell(x, self.h)
        return self.h


def hidden_state(wrap: Wrap) -> Any:
    model = Recurrent()
    fast = wrap(model)
    for _ in range(CALLS):
        y = fast(torch.randn(2, 3))
    y.sum().backward()
    model.h = model.h.detach()
    return y, model, fast(torch.randn(2, 3))


def loss_with_graph(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    fast = wrap(step)
    return [fast(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(CALLS)], model, optimizer.state_dict()


def gradients_left_in_an_argument(wrap: Wrap) -> Any:
    def fn(x: torch.Tensor) -> torch.Tensor:
        (x**2).sum().backward()
        return x.detach() * 2

    x = torch.randn(4, requires_grad=True)
    fast = wrap(fn)
    return [fast(x) for _ in range(CALLS)], x.grad


def batch_norm_in_inference_mode(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fast = wrap(model)
    with torch.inference_mode():
        outputs = [fast(torch.randn(5, 4)) for _ in range(CALLS)]
    return [out.clone() for out in outputs], model


class Counting:
    """Counts the calls of its methods."""

    def __init__(self) -> None:
        self.calls = 0
        self.total = torch.zeros(3)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.total += x
        return x * self.calls

    def step(self, method: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return method(x) + self.calls


def method_as_argument(wrap: Wrap) -> Any:
    own, other = Counting(), Counting()
    fast = wrap(own.step)
    outputs = [fast(method, torch.randn(3)) for method in (own.scaled, other.scaled) for _ in range(CALLS)]
    return outputs, own.calls, own.total, other.calls, other.total


@dataclasses.dataclass(slots=True)
class Slotted:
    calls: int = 0


COUNTS = {"calls": 0}


class Scales(nn.Module):
    """Counts in a global, in a default, in a closure and in slots; a module within another one."""

    def __init__(self) -> None:
        super().__init__()
        self.slotted = Slotted()

    def forward(self, x: torch.Tensor, counts: list[int] = [0]) -> torch.Tensor:  # noqa: B006
        COUNTS["calls"] += 1
        counts[0] += 1
        self.slotted.calls += 1
        return x * (COUNTS["calls"] + counts[0] + self.slotted.calls)


def submodule_and_hooks(wrap: Wrap) -> Any:
    defaults: Any = Scales.forward.__defaults__
    COUNTS["calls"] = defaults[0][0] = 0
    model = nn.Sequential(nn.Linear(3, 3), Scales())
    before, after, slotted = [0], [0], Slotted()

    def pre_hook(module: nn.Module, args: Any) -> Any:
        before[0] += 1
        return (args[0] + before[0],)

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        after[0] += 1
        slotted.calls += 1
        return out + after[0] * slotted.calls

    model[0].register_forward_pre_hook(pre_hook)
    model[0].register_forward_hook(hook)
    fast = wrap(model)
    outputs = [fast(torch.randn(2, 3)) for _ in range(CALLS)]
    return outputs, COUNTS, defaults[0], model[1].slotted.calls, before, after, slotted.calls


SCENARIOS = [
    *(scheduler, own_scaler, grad_scaler, own_optimizer, lbfgs, loss_with_graph),
    *(generator_in_closure, python_random_in_closure, numpy_random_in_closure),
    *(generator_as_attribute, python_random_as_attribute, numpy_random_as_attribute),
    *(modules_in_a_list, nonlocal_names, global_dict, global_object),
    *(state_fed_back, pairs_fed_back, dict_fed_back, method_as_argument, submodule_and_hooks),
    *(hidden_state, gradients_left_in_an_argument, batch_norm_in_inference_mode),
]
#: What the report says of a scenario; of all others, nothing.
NOT_CHECKED = {"hidden_state": "gradients"}


@pytest.mark.parametrize("scenario", [pytest.param(one, id=one.__name__) for one in SCENARIOS])
def test_as_after_plain_calls(
    scenario: Callable[[Wrap], Any], compiled: Any, compiled_variant: Any, request: pytest.FixtureRequest
) -> None:
    """Outputs, state and random numbers are exactly those of torch.compile."""
    from pytest_dynamo.watch import run_key

    def all_seen(wrap: Wrap) -> Any:
        torch._dynamo.reset()
        seed_all()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = copied(scenario(wrap))
        return seen, torch.rand(3).tolist(), random.random(), float(np.random.rand())

    plain = all_seen(lambda fn: torch.compile(fn, **compiled_variant.kwargs))
    assert all_seen(compiled) == plain
    told = " ".join(request.node.stash[run_key].not_checked)
    assert NOT_CHECKED.get(scenario.__name__, "") in told
    assert bool(told) is (scenario.__name__ in NOT_CHECKED)


def test_default_device(compiled: Any) -> None:
    """A default device that is set around a call stays, and new tensors are on it."""
    fast = compiled(lambda x: x + torch.ones(3))
    before = torch.get_default_device()
    torch.set_default_device("cpu")
    try:
        assert fast(torch.ones(3)).tolist() == [2.0] * 3
        assert torch.get_default_device() == torch.device("cpu")
    finally:
        torch.set_default_device(None)
    assert torch.get_default_device() == before


def test_call_under_the_meta_device(compiled: Any) -> None:
    """Copies and references that a check makes are on the devices of the tensors."""
    fast = compiled(nn.Linear(4, 4))
    with torch.device("meta"):
        out = fast(torch.ones(2, 4, device="cpu"))
    assert out.device == torch.device("cpu")


def test_many_outputs_of_one_storage(compiled: Any) -> None:
    """How outputs share memory is found in time that does not grow with the square of their number."""
    fast = compiled(lambda x: (x * 2).unbind(0))
    x = torch.randn(2000, 4)
    start = time.perf_counter()
    assert len(fast(x)) == 2000
    assert time.perf_counter() - start < 30
