"""What can be given to ``compiled``, and what the object that it returns does. Uses the fixture itself."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn


pytestmark = pytest.mark.compiled(backend="aot_eager")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 1

    def forward(self, x, flag=False):
        return self.linear(x) if flag else self.linear(x).relu() * self.scale

    def generate(self, x):
        return self(x) + 1

    def encode(self, x):
        return self.linear(x).sin()


class Twice:
    def __call__(self, x):
        return x * 2


def test_attributes_pass_through(compiled):
    """Attributes are the module's, for reading, writing and deleting; eval() returns the object."""
    net = Net()
    fast = compiled(net)
    assert fast.eval() is fast
    assert not net.training
    fast.scale = 3
    assert net.scale == 3
    fast.extra = 1
    del fast.extra
    assert not hasattr(net, "extra")
    assert {name for name, _ in fast.named_parameters()} == {"linear.weight", "linear.bias"}
    assert not isinstance(fast, nn.Module)
    assert fast(torch.randn(2, 4)).shape == (2, 4)


def test_a_method_that_runs_forward_is_told(compiled, request):
    """Only calling the object is compiled; the first other method that runs forward leaves a note."""
    from pytest_dynamo.watch import run_key

    fast = compiled(Net())
    fast(torch.randn(2, 4))
    fast.generate(torch.randn(2, 4))
    fast.generate(torch.randn(2, 4))
    fast.state_dict()
    assert list(request.node.stash[run_key].notes) == [
        "Net.generate() ran forward in eager mode: only calling the compiled function is compiled"
    ]


def test_kinds_of_callables(compiled):
    """Functions, lambdas, bound methods, partials, callable objects and compiled things are taken."""
    net = Net()
    fresh_net = Net()
    fresh_net.compile(backend="eager")
    callables = [
        net,
        net.encode,
        functools.partial(net, flag=True),
        functools.partial(torch.add, torch.ones(4)),
        lambda x: x.sin(),
        Twice(),
        torch.compile(lambda x: x.cos(), backend="eager"),
        torch.compile(Net(), backend="eager"),
        fresh_net,
        compiled(lambda x: x - 1),
    ]
    for fn in callables:
        fast = compiled(fn)
        assert fast(torch.randn(2, 4)).shape == (2, 4)
        # The second and third Net run what the first compiled.
        assert fast.observation.graphs == 1 or getattr(fast, "linear", None), fn
    callables[-1](torch.ones(1))


@pytest.mark.compiled(allow_uncompiled=True)
def test_what_is_refused(compiled):
    """Generators, coroutines, classes and what can't be called are TypeErrors with a reason."""

    def numbers(x):
        yield x

    async def later(x):
        return x

    async def later_numbers(x):
        yield x

    class Later(nn.Module):
        async def forward(self, x):
            return x

    for fn, text in [
        (numbers, "can't take the generator function numbers"),
        (later, "can't take the coroutine function later"),
        (later_numbers, "can't take the coroutine function later_numbers"),
        (Later(), "can't take the coroutine function Later"),
        (functools.partial(later, 1), "can't take the coroutine function later"),
        (Net, "takes an instance, not the class Net"),
        (3, "takes a callable or a module, not int"),
    ]:
        with pytest.raises(TypeError, match=text.replace("(", r"\(")):
            compiled(fn)
    with pytest.raises(TypeError, match="returned a generator"):
        compiled(lambda x: (y for y in x))(torch.ones(2))


def test_instances_do_not_recompile_each_other(compiled):
    """Another instance of a module through its own compiled(...) is no recompile; its own second size is."""
    one, two = compiled(Net()), compiled(Net())
    one(torch.randn(2, 4))
    two(torch.randn(2, 4))
    assert (one.observation.recompile_count, two.observation.recompile_count) == (0, 0)
    one(torch.randn(3, 4))
    assert one.observation.recompile_count == 1
    two(torch.randn(5, 4))
    assert two.observation.recompile_count == 0
    one.scale = 2
    one(torch.randn(2, 4))
    assert one.observation.recompile_count == 2


@pytest.mark.parametrize("recovers", [True, False])
def test_both_sides_raise(compiled, request, recovers):
    """The caller gets the exception; the function starts afresh; if all calls raise it is not checked."""
    from pytest_dynamo.watch import run_key

    def fussy(x):
        if x.shape[0] == 3:
            raise ValueError("three")
        return x + 1

    fast = compiled(fussy)
    with pytest.raises(ValueError, match="three"):
        fast(torch.ones(3))
    if recovers:
        fast(torch.ones(2))
        assert fast.observation.graphs == 1
        assert fast.observation.recompile_count == 0
    run = request.node.stash[run_key]
    run.check_completeness(run.observation())
    expected = [] if recovers else ["test_both_sides_raise.<locals>.fussy: all calls raised, in eager mode too"]
    assert [text.rpartition("<locals>.")[2] for text in run.not_checked] == [
        text.rpartition("<locals>.")[2] for text in expected
    ]


def test_callers_objects_are_used_once(compiled):
    """Arguments, gradients and module state are afterwards as after one call."""
    past = [torch.ones(1, 2)]

    def remember(x, past):
        past.append(x)
        return torch.cat(past).sum()

    fast = compiled(remember)
    fast(torch.ones(1, 2), past)
    assert len(past) == 2
    fast(torch.ones(1, 2), past)
    assert len(past) == 3

    norm = nn.BatchNorm1d(4)
    compiled(lambda x: norm(x))(torch.randn(8, 4))
    assert norm.num_batches_tracked == 1

    class Model:
        def __init__(self):
            self.calls, self.seen = 0, []

        def step(self, x):
            self.calls += 1
            self.seen.append(self.calls)
            return x * self.calls

    model = Model()
    fast = compiled(model.step)
    fast(torch.ones(2))
    assert torch.equal(fast(torch.ones(2)), torch.full((2,), 2.0))
    assert (model.calls, model.seen) == (2, [1, 2])

    state = {"n": 0}

    def count(x):
        state["n"] += 1
        return x * state["n"]

    compiled(count)(torch.ones(2))
    assert state == {"n": 1}

    counter = torch.zeros(())
    compiled(lambda x: x + counter.add_(1))(torch.ones(2))
    assert counter == 1

    x = torch.randn(3, requires_grad=True)
    compiled(lambda x: (x * 2).sum())(x * 3).backward()
    assert torch.equal(x.grad, torch.full((3,), 6.0))


def test_training_step_inside(compiled):
    """A function that runs backward and the optimizer advances both once."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())

    def step(net, optimizer, x):
        optimizer.zero_grad()
        loss = net(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = compiled(step)
    for number in (1, 2):
        fast(net, optimizer, torch.randn(2, 4))
        assert int(optimizer.state[net.linear.weight]["step"]) == number


def test_random_numbers_agree(compiled):
    """Dropout draws the same mask on both sides and leaves the generator as after one call."""
    fast = compiled(lambda x: nn.functional.dropout(x, 0.5))
    torch.manual_seed(3)
    got = fast(torch.ones(64))
    after = torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(got, nn.functional.dropout(torch.ones(64), 0.5))
    assert after == torch.rand(())


def test_modes_of_calling(compiled):
    """Inference mode, no_grad, threads and lazy modules work."""
    with torch.inference_mode():
        assert compiled(Net())(torch.randn(2, 4)).is_inference()
    with torch.no_grad():
        assert not compiled(Net())(torch.randn(2, 4)).requires_grad
    assert compiled(nn.LazyLinear(3))(torch.randn(2, 5)).shape == (2, 3)
    done = []
    fast = compiled(lambda x: x + 1)
    thread = threading.Thread(target=lambda: done.append(fast(torch.ones(2))))
    thread.start()
    thread.join()
    assert len(done) == 1
