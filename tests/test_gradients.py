"""Gradients are compared without disturbing anyone: their graph, ``.grad``, hooks and memory are the caller's own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from pytest_dynamo import gradients
from pytest_dynamo.aliasing import relation
from pytest_dynamo.inputs import named_tensors
from pytest_dynamo.kept import Kept


pytestmark = pytest.mark.compiled(backend=["eager", "aot_eager"], max_recompiles=0)


def checks_of(request: pytest.FixtureRequest) -> list[Any]:
    from pytest_dynamo.watch import run_key

    return request.node.stash[run_key].checks


def test_the_callers_backward(compiled, request):
    """After a checked call backward gives what it gives after a plain one, and accumulates."""
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    net.weight.grad = torch.ones_like(net.weight)
    expected = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
    out = compiled(net)(x)
    assert x.grad is None
    assert torch.equal(net.weight.grad, torch.ones(2, 3))
    assert net.bias.grad is None
    out.sum().backward()
    torch.testing.assert_close([x.grad, net.weight.grad - 1, net.bias.grad], list(expected))
    paths = {check.path for check in checks_of(request) if check.what == "grad"}
    assert paths == {"grad of args[0]", "grad of weight", "grad of bias"}


def test_training_steps(compiled):
    """Ten steps with an optimizer outside of the compiled function are those of plain torch."""

    def losses(call, net):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        found = []
        for _ in range(10):
            x, y = torch.randn(8, 4), torch.randn(8, 1)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(call(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
        return found

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    plain, net = make(), make()
    assert losses(compiled(net), net) == pytest.approx(losses(plain, plain), rel=1e-5)
    torch.testing.assert_close(net.state_dict(), plain.state_dict())


def test_hooks_on_tensors(compiled):
    """Hooks that the caller put on leaves run in the caller's backward alone, and stay."""
    net, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    seen: list[str] = []
    net.weight.register_hook(lambda grad: seen.append("weight"))
    x.register_hook(lambda grad: seen.append("x"))
    net.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append("bias"))
    out = compiled(net)(x)
    assert seen == []
    out.sum().backward()
    assert sorted(seen) == ["bias", "weight", "x"]


def test_nothing_is_kept_alive(compiled):
    """The graph goes with the result; neither gradients nor clones outlive the call."""
    net, x = nn.Linear(64, 64), torch.randn(8, 64, requires_grad=True)
    fast = compiled(net)
    fast(x)
    gc.collect()
    before = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    out = fast(x)
    node = weakref.ref(out)
    del out
    gc.collect()
    assert node() is None
    assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) <= before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_and_inference_mode(compiled, request, mode):
    """Where nothing requires grad nothing is differentiated, and nothing is unchecked for it."""
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    with mode():
        compiled(net)(x)
    assert not any(check.what == "grad" for check in checks_of(request))


def test_checkpointed_by_the_caller(compiled):
    """A checkpoint around a checked call saves and recomputes what it does around a plain one."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(net(x).sum(), x)
    torch.utils.checkpoint.checkpoint(compiled(net), x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_hooks_on_what_is_saved(compiled):
    """Hooks of the caller see what the caller's own call saves, and nothing else."""
    seen: list[torch.Tensor] = []

    def keep(tensor):
        seen.append(tensor)
        return tensor

    def refuse(tensor):
        raise ValueError("no room")

    fast = compiled(lambda x: x.sin())
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fast(x)
    assert len(seen) == 1
    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse), pytest.raises(ValueError, match="no room"):
        fast(x)


@pytest.mark.compiled(grad=False)
def test_switched_off(compiled, request):
    """``grad=False`` compares none."""
    compiled(lambda x: x * 2)(torch.ones(2, requires_grad=True))
    assert not any(check.what == "grad" for check in checks_of(request))


def test_not_checked_is_told(project):
    """Wanted and impossible is *not checked*: nothing requires grad, second derivatives, a backward that raises."""
    run = project.test(
        """
        import pytest, torch

        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2
            @staticmethod
            def backward(ctx, grad):
                raise ValueError("no derivative")

        @pytest.mark.compiled(backend="aot_eager", grad=True)
        def test_nothing(compiled):
            compiled(torch.sin)(torch.ones(2))

        @pytest.mark.compiled(backend="aot_eager", grad="double")
        def test_twice(compiled):
            compiled(torch.sin)(torch.ones(2, requires_grad=True))

        @pytest.mark.compiled(backend="eager")
        def test_raises(compiled):
            compiled(lambda x: Broken.apply(x) + x.sin())(torch.ones(2, requires_grad=True))

        @pytest.mark.compiled(backend="eager", grad="double")
        def test_twice_in_eager(compiled):
            compiled(torch.sin)(torch.ones(2, requires_grad=True))
        """
    )
    run.result.assert_outcomes(passed=4)
    told = {r["nodeid"].partition("::")[2]: r["not_checked"] for r in run.report["records"]}
    assert told["test_nothing[aot_eager]"] == ["gradients of sin: nothing that it returns requires grad"]
    (text,) = told["test_twice[aot_eager]"]
    assert text.startswith("second derivatives: RuntimeError: torch.compile with aot_autograd does not currently")
    (text,) = told["test_raises[eager]"]
    assert text == "gradients of <lambda>: eager's own raised ValueError: no derivative"
    assert told["test_twice_in_eager[eager]"] == []


def test_non_leaf_and_changed_arguments(compiled, request):
    """Gradients reach non-leaf arguments as they were before the call changed them in place."""
    w = torch.randn(3, requires_grad=True)

    def f(x, y):
        x.add_(y)
        return x * 2

    x, y = w * 1, torch.randn(3, requires_grad=True)
    compiled(f)(x, y)
    grads = {check.path for check in checks_of(request) if check.what == "grad"}
    assert grads == {"grad of args[0]", "grad of args[1]"}


# -- the parts ------------------------------------------------------------------------------------


def none_and_zeros(compiled: Any, eager: Any) -> list[tuple[bool | None, str | None]]:
    sides = [
        gradients.Gradients({"w": value}, [gradients.Output("out", torch.Size([1]), torch.float32)])
        for value in (compiled, eager)
    ]
    compare = lambda a, e, path: iter(())  # noqa: E731
    return [(check.passed, check.note) for check in gradients.compare_gradients(*sides, 1, compare)]


def test_none_is_not_zeros():
    """Zeros for none are AOTAutograd's habit and told; everything else is a difference."""
    zeros, ones = torch.zeros(2), torch.ones(2)
    assert none_and_zeros(None, None) == []
    assert none_and_zeros(zeros, None) == [(True, "compiled has zeros, eager none")]
    assert none_and_zeros(ones, None) == [(False, "compiled has a gradient, eager none")]
    assert none_and_zeros(None, zeros) == [(False, "compiled has none, eager zeros")]
    assert none_and_zeros(None, ones) == [(False, "compiled has none, eager a gradient")]


def test_cotangents_are_the_same_every_time():
    """They depend on number and shape, not on the state of any generator, and leave it alone."""
    output = gradients.Output("out", torch.Size([4, 3]), torch.bfloat16)
    state = torch.get_rng_state()
    first, second = gradients.cotangent(0, output), gradients.cotangent(0, output)
    assert torch.equal(first, second)
    assert first.dtype == torch.bfloat16
    assert not torch.equal(first, gradients.cotangent(1, output))
    assert torch.equal(state, torch.get_rng_state())
    assert gradients.cotangent(0, gradients.Output("out", torch.Size([2]), torch.complex64)).dtype == torch.complex64


def test_relation_of_memory():
    """Who shares memory with whom, from which byte on; empty and sparse tensors claim nothing."""
    x = torch.arange(6.0)
    given = [("x", x), ("empty", x[:0])]
    results = [*named_tensors([x[1:3], x.view(2, 3), x + 1, x[4:], x.to_sparse()], "out")]
    found, paths = relation(given, results)
    assert paths == {"x", "out[0]", "out[1]", "out[2]", "out[3]"}
    assert found == {
        ("x", "out[0]"): 4,
        ("x", "out[1]"): 0,
        ("x", "out[3]"): 16,
        ("out[0]", "out[1]"): -4,
        ("out[1]", "out[3]"): 16,
    }


def test_relation_of_many_parts():
    """Thousands of results over one storage take a moment, as only those that meet are paired."""
    found, paths = relation([], named_tensors(list(torch.zeros(5000, 2).unbind()), "out"))
    assert (found, len(paths)) == ({}, 5000)


def test_kept_results():
    """A result that lives and changes is told, one that died or stayed is not; nothing is kept alive by it."""
    kept = Kept()
    value = {"a": torch.zeros(4), "b": [torch.ones(3)]}
    gone = torch.zeros(2)
    kept.add("f", 1, (value, gone))
    del gone
    before = kept.before()
    assert [result.path for result, _ in before] == ["out[0]['a']", "out[0]['b'][0]"]
    assert list(Kept.changed(before)) == []
    value["b"][0].data.add_(1)
    ((result, tensor),) = Kept.changed(before)
    assert (result.path, result.call, result.name) == ("out[0]['b'][0]", 1, "f")
    assert tensor is value["b"][0]
    for number in range(2 * Kept.LIMIT):
        value[number] = torch.zeros(1)
        kept.add("f", number, value[number])
    assert len(kept.before()) == Kept.LIMIT
