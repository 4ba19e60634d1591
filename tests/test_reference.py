"""Rounding is told from faults by the same call in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_dynamo.reference import Float64
from pytest_dynamo.reference import OtherRounding
from pytest_dynamo.reference import in_lanes
from pytest_dynamo.reference import within_rounding
from pytest_dynamo.state import CopyBeforeWrite


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 4, 16, 4096])
def test_honest_rounding_passes(dtype, size):
    """A second honest rounding of the same numbers is within the budget, at any size, for 50 seeds.

    As in a checked call: where the float64 run alone does not settle it, eager in other roundings does.
    """
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        terms = torch.randn(32, size, generator=generator, dtype=torch.float64).to(dtype)

        def total(order, terms=terms):
            result = torch.zeros(size, dtype=dtype)
            for number in order:
                result = result + terms[number]
            return result

        eager, compiled = total(range(32)), total(torch.randperm(32, generator=generator))
        exact = terms.double().sum(0)
        verdict = within_rounding(compiled, eager, exact)
        if not verdict.passed:
            assert verdict.passed is None, (seed, verdict)
            others = []
            for other in range(5):
                with OtherRounding(other):
                    others.append(total(range(32)))
            verdict = within_rounding(compiled, eager, exact, others=others)
        # A single element that is mostly rounding may be left open.
        assert verdict.passed or (size == 1 and verdict.passed is None), (seed, verdict)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x.index_fill(0, torch.tensor([3]), 5.0),
        lambda x: torch.cat([x[:1], x[:-1]]),
        lambda x: torch.zeros_like(x),
        lambda x: -x,
        lambda x: x * 1.05,
        lambda x: x.index_fill(0, torch.tensor([7]), float("nan")),
    ],
    ids=["one element", "shifted", "zeros", "sign", "five percent", "nan"],
)
def test_faults_fail(dtype, fault):
    """Wrong elements, shifted rows, zeros, signs, scales and NaN are beyond the budget."""
    torch.manual_seed(0)
    exact = torch.randn(256, dtype=torch.float64)
    eager = exact.to(dtype)
    verdict = within_rounding(fault(eager), eager, exact)
    assert verdict.passed is False
    assert within_rounding(eager, eager, exact).passed


def test_a_reference_that_is_something_else_judges_nothing():
    """If eager itself is far from the float64 run, that run computed something else."""
    exact = torch.randn(64, dtype=torch.float64)
    assert within_rounding(exact.float(), exact.float(), exact + 1).passed is None
    assert within_rounding(exact, exact, exact).passed is None  # float64 has no wider reference


def test_the_ratio_can_be_set():
    """``max_error_ratio`` replaces the budget of the dtype."""
    exact = torch.linspace(1, 2, 64, dtype=torch.float64)
    eager = exact.float()
    compiled = eager + 4e-7
    assert within_rounding(compiled, eager, exact).passed
    assert within_rounding(compiled, eager, exact, max_error_ratio=1.0).passed is False


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x @ torch.eye(8) + torch.ones(8),
        lambda x: x.to(torch.bfloat16) * 2,
        lambda x: x.half().float().softmax(-1),
        lambda x: torch.zeros(8, 8).index_add_(0, torch.arange(8), x),
        lambda x: nn.functional.layer_norm(x, (8,)),
        lambda x: torch.empty_like(x).copy_(x).mul_(3),
        lambda x: torch.fft.fft(x).real,
        lambda x: torch.stack(torch.unbind(x)).cumsum(0),
        lambda x: torch.where(x > 0, x, torch.tensor(0.5)),
        lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    ],
)
def test_everything_is_done_in_float64(fn):
    """Constants, factories, explicit casts and in-place code give the float64 result of the same inputs."""
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    with Float64():
        got = fn(x)
    assert got.dtype == torch.float64
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        exact = fn(x.double())
    finally:
        torch.set_default_dtype(default)
    if exact.dtype == torch.float64 and fn(x).dtype == torch.float32:
        assert (got - exact).abs().max() <= (fn(x).double() - exact).abs().max()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 1)),
        lambda: nn.Sequential(nn.Conv1d(8, 4, 3), nn.PReLU(), nn.ConvTranspose1d(4, 2, 2)),
        lambda: nn.LSTM(8, 4),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 4)),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.RNN(8, 4)),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
    ],
    ids=["conv2d", "conv1d", "lstm", "gru", "rnn", "transformer"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_that_check_dtypes(make, dtype):
    """Functions that compare the dtypes of their arguments see wide ones, forward and backward."""
    torch.manual_seed(0)
    net = make().to(dtype)
    x = torch.randn(2, 8, 8).to(dtype)
    exact = copy.deepcopy(net)
    expected = exact.double()(x.double())
    with Float64():
        got = net(x)
        got = got if isinstance(got, torch.Tensor) else got[0]
        grads = torch.autograd.grad(got.sum(), list(net.parameters()))
    expected = expected if isinstance(expected, torch.Tensor) else expected[0]
    assert got.dtype == torch.float64
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)
    for grad, parameter in zip(torch.autograd.grad(expected.sum(), list(exact.parameters())), grads):
        assert (grad - parameter).abs().max() <= torch.finfo(dtype).eps * grad.abs().max()


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand_like(x * 1),
        lambda x: torch.randn_like(x * 1),
        lambda x: torch.empty_like(x * 1).normal_(),
        lambda x: torch.empty(40, dtype=x.dtype).uniform_(),
        lambda x: torch.normal(x * 1, 0.1),
        lambda x: torch.bernoulli((x * 1).sigmoid()),
        lambda x: nn.functional.dropout(x * 1, 0.5),
        lambda x: torch.native_dropout(x * 1, 0.5, True)[0],
        lambda x: torch.randn(40, dtype=x.dtype) + torch.rand_like(x.sin())[0],
        lambda x: nn.init.trunc_normal_(torch.empty_like(x.sin())),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_numbers_are_eagers(draw, dtype):
    """Numbers are drawn in the dtype in which eager drew them, in the same order, and go on in float64."""
    x = torch.linspace(-1, 1, 40).to(dtype)
    recorder = CopyBeforeWrite()
    torch.manual_seed(0)
    with recorder:
        expected = draw(x)
    torch.manual_seed(0)
    with Float64(recorder.draws):
        got = draw(x)
    assert (got.double() - expected.double()).abs().max() <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_stay_views(dtype):
    """What is written through a view arrives in its base, though both are narrow."""
    base = torch.zeros(3, 4, dtype=dtype)
    with Float64():
        base[1] = torch.ones(4, dtype=dtype)
        base.t()[2].add_(2)
        base.unbind()[2].mul_(3)
    assert base.tolist() == [[0, 0, 2, 0], [1, 1, 3, 1], [0, 0, 6, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_through_narrow_tensors(dtype):
    """Gradients pass through tensors that keep their dtype: written ones, and saved for a checkpoint."""
    torch.manual_seed(0)
    w = torch.randn(8).to(dtype).requires_grad_()
    data = torch.randn(4, 8).to(dtype)

    def in_place(x, w):
        x = x * 1 if x.dtype == torch.float64 else x.clone()
        x.add_(w)
        return x * w

    def checkpointed(x, w):
        return checkpoint(lambda a: (a * w).sin() * w.float(), x * w, use_reentrant=False)

    for fn in (in_place, checkpointed):
        with Float64():
            out = fn(data, w)
            (got,) = torch.autograd.grad(out, [w], torch.ones_like(out))
        exact = w.detach().double().requires_grad_()
        with torch.no_grad():
            torch.set_default_dtype(torch.float64)
        try:
            expected = fn(data.double(), exact)
            (reference,) = torch.autograd.grad(expected, [exact], torch.ones_like(expected))
        finally:
            torch.set_default_dtype(torch.float32)
        assert (got.double() - reference).norm() / reference.norm() < 2 * torch.finfo(dtype).eps


def test_other_roundings_move_what_rounds():
    """Results move by about a rounding step, copies and the random numbers of the call not at all."""
    x = torch.linspace(1, 2, 1000)
    outs = []
    for seed in range(2):
        torch.manual_seed(0)
        with OtherRounding(seed):
            outs.append((x * 3, x.flip(0).relu(), torch.rand(4)))
    eps = torch.finfo(torch.float32).eps
    moved = (outs[0][0] - outs[1][0]).abs() / (x * 3)
    assert 0 < moved.max() <= 2.5 * eps
    assert (moved == 0).float().mean() > 0.1
    assert torch.equal(outs[0][1], x.flip(0))
    torch.manual_seed(0)
    assert torch.equal(outs[0][2], torch.rand(4))
    y = torch.ones(1000)
    with OtherRounding(0):
        y.mul_(1.1)
    assert 0 < (y - 1.1).abs().max() <= 2.5 * eps


def test_a_switched_relu_is_rounding(project):
    """Where a unit lies so near to its threshold that rounding switches it, neither side is wrong."""
    run = project.test(
        """
        import pytest, torch
        from torch._dynamo.backends.common import aot_autograd

        def f(x, w):
            return torch.relu((x * 1.5 - x * 0.5) @ w).sum()

        def other(graph, example_inputs):
            # Another honest rounding: x * 1 instead of the difference of two rounded products.
            class Net(torch.nn.Module):
                def forward(self, x, w):
                    return (torch.relu(x @ w).sum(),)
            return aot_autograd(fw_compiler=lambda g, i: g)(torch.fx.symbolic_trace(Net()), example_inputs)

        @pytest.mark.compiled(backend=other)
        @pytest.mark.parametrize("seed", range(10))
        def test_it(compiled, seed):
            torch.manual_seed(seed)
            x = torch.randn(64, 8).to(torch.bfloat16)
            w = torch.randn(8, 16).to(torch.bfloat16).requires_grad_()
            compiled(f)(x, w)
        """
    )
    run.result.assert_outcomes(passed=10)


def test_overflow_of_eager_is_excused():
    """Eager overflows in float16 where compiled keeps more digits: held against the float64 run, it passes."""
    exact = torch.linspace(1, 100, 64, dtype=torch.float64)
    eager = exact.half()
    eager[3] = float("inf")
    verdict = within_rounding(exact.half(), eager, exact)
    assert verdict.passed
    assert "eager overflows in 1 elements" in verdict.note
    wrong = exact.half()
    wrong[3] = 1000.0
    assert within_rounding(wrong, eager, exact).passed is False
    assert within_rounding(eager, exact.half(), exact).passed is False
    nan = exact.half()
    nan[3] = float("nan")
    assert within_rounding(nan, nan, exact).passed
    assert within_rounding(nan, eager, exact).passed is False


def test_eager_may_overflow_everywhere():
    """Compiled code that keeps some elements finite has to be right in them, with nothing of eager's to excuse it."""
    exact = torch.full((64,), 1e6, dtype=torch.float64)
    exact[:3] = torch.tensor([11025.0, 3.0, 60000.0])
    eager = torch.full((64,), float("inf")).half()
    compiled = eager.clone()
    compiled[:3] = exact[:3].half()
    verdict = within_rounding(compiled, eager, exact)
    assert verdict.passed
    assert "eager overflows in 3 elements, compiled does not" in verdict.note
    compiled[1] = 4000.0
    assert within_rounding(compiled, eager, exact).passed is False
    assert within_rounding(eager, eager, exact).note == "no finite values"


def test_steps_of_subnormal_numbers():
    """Below the smallest normal number a step is absolute."""
    exact = torch.full((64,), 3 * 2.0**-24, dtype=torch.float64)
    assert within_rounding(exact.half() + 2.0**-24, exact.half(), exact).passed
    assert within_rounding(exact.half() + 32 * 2.0**-24, exact.half(), exact).passed is False


def test_a_true_value_of_zero():
    """What is 0 in float64 and noise in eager is judged by how much eager moves in other roundings."""
    exact = torch.full((64,), 1e-18, dtype=torch.float64)
    noise = [torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 1e-3 for seed in range(4)]
    assert within_rounding(noise[0], noise[1], exact).passed is None
    assert within_rounding(noise[0], noise[1], exact, others=noise[2:]).passed
    assert within_rounding(noise[0] + 1, noise[1], exact, others=noise[2:]).passed is False
    assert (
        within_rounding(noise[0], noise[1] + 1, exact, others=[noise[1] + 1 + n * 1e-3 for n in noise]).passed is None
    )


def test_a_weak_reference_does_not_judge():
    """Where eager is so far from float64 that zeros would pass, nothing is said; what is worse still fails."""
    exact = torch.randn(64, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    runs = [
        (exact * (1 + 0.8 * torch.randn(64, generator=torch.Generator().manual_seed(seed)).double())).bfloat16()
        for seed in range(6)
    ]
    verdict = within_rounding(runs[0], runs[1], exact, others=runs[2:])
    assert verdict.passed is None
    assert "zeros would pass too" in verdict.note
    assert "weak: eager itself is" in verdict.note
    assert within_rounding(-3 * runs[0], runs[1], exact, others=runs[2:]).passed is False


def test_a_reference_of_zeros_excuses_nothing():
    """If float64 gives zeros and eager does not, other roundings have to explain it."""
    eager = torch.linspace(1, 2, 64)
    zeros = torch.zeros(64, dtype=torch.float64)
    assert within_rounding(eager * 5, eager, zeros).passed is None
    assert within_rounding(eager * 5, eager, zeros, others=[eager, eager]).passed is None
    assert within_rounding(torch.zeros(64), torch.zeros(64), zeros).passed


def test_infinities_of_other_roundings_prove_nothing():
    """A run that overflows under other rounding neither breaks the verdict nor excuses anything."""
    eager, exact = torch.tensor([1.0, 2.0] * 8), torch.tensor([1.0, 2.0] * 8, dtype=torch.float64)
    bad = torch.full((16,), float("nan"))
    assert within_rounding(eager * 1.02, eager, exact, others=[bad]).passed is False
    bad = eager.clone()
    bad[0] = float("inf")
    assert within_rounding(eager * 1.5, eager, exact * 3, others=[bad]).passed is None


def test_other_roundings_leave_exact_numbers_alone():
    """Masks, whole numbers and infinities are what programs rely on."""
    for dtype in DTYPES:
        mask = torch.tensor([1, 0, 1, 1] * 16).to(dtype)
        least = torch.finfo(dtype).min
        with OtherRounding(0):
            bias = (1.0 - mask) * least
            index = (torch.arange(16).to(dtype) / 2).floor()
        assert torch.equal(bias == 0, mask == 1)
        assert torch.equal(index, (torch.arange(16).to(dtype) / 2).floor())
        assert bool(torch.isfinite(bias).all())


def test_other_roundings_repeat():
    """A forward pass that a checkpoint repeats in the backward pass moves as it did the first time."""
    torch.manual_seed(0)
    x, w = torch.randn(16, 32).bfloat16(), torch.randn(32, 32).bfloat16().requires_grad_()

    def layer(a):
        return torch.relu(a @ w) * 1.7

    grads = []
    for fn in (layer, lambda a: checkpoint(layer, a, use_reentrant=False)):
        with OtherRounding(3):
            out = fn(x * 0.3)
            grads.append(torch.autograd.grad(out.float().square().sum(), [w])[0])
    assert torch.equal(*grads)
    z = torch.view_as_complex(torch.randn(1000, 2))
    with OtherRounding(0):
        moved = z * 3 - 0
    assert ((moved - z * 3).real * (moved - z * 3).imag < 0).any()


def test_state_keeps_its_dtype():
    """Buffers that the call writes are computed wide and rounded once."""
    norm = nn.BatchNorm1d(4)
    x = torch.randn(16, 4)
    with Float64():
        out = norm(x)
    assert out.dtype == torch.float64
    assert norm.running_mean.dtype == torch.float32
    assert torch.allclose(norm.running_mean, 0.1 * x.double().mean(0).float())
    assert norm.num_batches_tracked == 1


def test_bits_are_not_read():
    """Code that looks at the bits of a tensor has no float64 reference."""
    with pytest.raises(NotImplementedError, match="reads the bits"), Float64():
        torch.ones(2).view(torch.int32)


@pytest.mark.compiled(backend="inductor")
def test_fused_bfloat16_passes(compiled, request):
    """A fused kernel that rounds once where eager rounds three times is within rounding, and said so."""
    from pytest_dynamo.watch import run_key

    torch.manual_seed(0)

    def rotate(t):
        half = t.shape[-1] // 2
        return torch.cat((-t[..., half:], t[..., :half]), -1)

    q, cos, sin = (torch.randn(2, 7, 16, dtype=torch.bfloat16) for _ in range(3))
    compiled(lambda q, cos, sin: q * cos + rotate(q) * sin)(q, cos, sin)
    (check,) = (c for c in request.node.stash[run_key].checks if c.path == "out")
    assert check.passed
    assert check.note.startswith("within rounding: ")
    assert check.error_ratio < 1


def test_faults_in_code_fail_and_tell_the_ratio(project):
    """A planted backend that is off by a tenth of a percent fails in float32, with its ratio in the JSON."""
    run = project.test(
        """
        import pytest, torch

        def off(graph, example_inputs):
            return lambda *args: tuple(out * 1.001 for out in graph(*args))

        @pytest.mark.compiled(backend=off)
        def test_it(compiled):
            torch.manual_seed(0)
            compiled(torch.nn.Linear(8, 8))(torch.randn(4, 8))

        @pytest.mark.compiled(backend=off, max_error_ratio=1e6)
        def test_allowed(compiled):
            torch.manual_seed(0)
            compiled(torch.nn.Linear(8, 8))(torch.randn(4, 8))
        """
    )
    run.result.assert_outcomes(failed=1, passed=1)
    (check,) = (c for c in run.record("test_it[off]")["parity"]["checks"] if c["path"] == "out")
    assert check["passed"] is False
    assert check["error_ratio"] > 1000
    assert "beyond rounding: " in run.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_float64(dtype: torch.dtype) -> None:
    """The backward pass is wide too; gradients are rounded once or not at all."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(dtype)
    x = torch.randn(16, 64).to(dtype).requires_grad_()
    wide = copy.deepcopy(net).double()
    exact = x.detach().double().requires_grad_()
    with Float64():
        out = net(x) * x.float().sum().to(dtype)
        grads = torch.autograd.grad(out, [x, *net.parameters()], torch.ones_like(out))
    expected = torch.autograd.grad((wide(exact) * exact.sum()).sum(), [exact, *wide.parameters()])
    assert out.dtype == torch.float64
    for grad, reference in zip(grads, expected):
        error = (grad.double() - reference).norm() / reference.norm()
        assert error < torch.finfo(dtype).eps


# -- sums in another order ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(("shape", "dims"), [((7, 5, 33), [0, 2]), ((100,), [0]), ((0, 3), [0]), ((2000, 2), [0])])
def test_lanes_add_all_numbers_once(shape: tuple[int, ...], dims: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    for seed in range(4):
        found = in_lanes(x, dims, seed)
        assert found.shape == x.sum(dims).shape
        torch.testing.assert_close(found.to(dtype), x.sum(dims), rtol=1e-2, atol=1e-2)


def test_other_roundings_add_in_another_order() -> None:
    """Equal numbers that no float32 holds: eager adds them in pairs, other code one after the other."""
    x = torch.full((10_000,), 0.1)
    exact = 10_000 * float(torch.tensor(0.1))
    with OtherRounding(0):
        found = (x.sum(), x.mean() * 10_000, x.view(100, 100).sum((0, 1)))
    for one in found:
        assert 1e-6 < abs(one.item() - exact) / exact < 1e-4
    assert abs(x.sum().item() - exact) / exact < 1e-6


def test_sums_of_thousands_are_rounding(project):
    """Inductor adds one number after the other in each lane, eager in pairs, whose errors are far smaller."""
    run = project.test(
        """
        import pytest, torch
        from torch import nn

        pytestmark = pytest.mark.compiled(max_breaks=0)

        def test_bias(compiled):
            torch.manual_seed(0)
            m = nn.Linear(16, 4)
            compiled(lambda x: m(x).mean(0))(torch.randn(10000, 16))

        def test_norms(compiled):
            torch.manual_seed(1)
            m = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
            compiled(m)(torch.randn(4, 3, 32, 32))
            m = nn.LayerNorm(16)
            compiled(lambda x: m(x).mean(1))(torch.randn(2, 20000, 16))

        def test_what_is_left_of_a_mean(compiled):
            torch.manual_seed(0)
            compiled(lambda x: (x - x.mean()).sum())(torch.randn(200000))

        def test_small_float16(compiled):
            torch.manual_seed(0)
            compiled(lambda x: (x * x).sum(-1).sqrt())((torch.randn(128, 64) * 1e-4).half())

        def test_float16_that_overflows(compiled):
            compiled(lambda x: x * x * 2 - x * x)(torch.tensor([300.0, 1.0, 2.0]).half())
        """
    )
    run.result.assert_outcomes(passed=5)
    notes = [check["note"] for check in run.record("test_bias[inductor]")["parity"]["checks"]]
    assert any("eager's operations rounding otherwise" in note for note in notes if note)


def test_sums_that_are_wrong_are_no_rounding(project):
    """One number too few of ten thousand."""
    run = project.test(
        """
        import pytest, torch
        from torch import nn

        def misses_one(gm, inputs):
            for node in gm.graph.nodes:
                if node.target == "mean":
                    with gm.graph.inserting_after(node):
                        node.replace_all_uses_with(wrong := gm.graph.call_function(torch.mul, (node, 1 - 1e-4)))
                        wrong.args = (node, 1 - 1e-4)
            gm.recompile()
            return gm.forward

        @pytest.mark.compiled(backend=misses_one)
        def test_sum(compiled):
            torch.manual_seed(0)
            m = nn.Linear(16, 4)
            compiled(lambda x: m(x).mean(0))(torch.randn(10000, 16) + 1)
        """
    )
    run.result.assert_outcomes(failed=1)


def test_whole_numbers_are_no_rounding(project):
    """Results of round are whole in every rounding, and so are the integers made of them."""
    run = project.test(
        """
        import pytest, torch

        def off_by(step):
            def backend(gm, inputs):
                return lambda *args: tuple(out + step for out in gm(*args))
            return backend

        @pytest.mark.compiled(backend=off_by(1))
        def test_int64(compiled):
            torch.manual_seed(0)
            compiled(lambda x, w: (x @ w * 1000).round().long())(torch.randn(64, 64), torch.randn(64, 64))

        @pytest.mark.compiled(backend=off_by(-1))
        def test_int8(compiled):
            torch.manual_seed(0)
            compiled(lambda x: (x / 0.02).round().clamp(-120, 120).to(torch.int8))(torch.rand(64, 64) + 1)
        """
    )
    run.result.assert_outcomes(failed=2)


def test_gradients_that_the_call_takes_itself_have_a_reference(project):
    """By torch.func in grad mode, by autograd.grad without; rounded once, they tell rounding from a fault."""
    run = project.test(
        """
        import pytest, torch
        from torch.func import grad, vmap

        def by_func(x, w):
            return vmap(grad(lambda y: torch.tanh(y @ w).pow(2).sum()))(x)

        def by_hand(x, w):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(torch.tanh(x @ w).pow(2).sum() * 3, x)[0]

        def given(dtype):
            torch.manual_seed(0)
            return torch.randn(16, 20).to(dtype), torch.randn(20, 20).to(dtype)

        def too_large(gm, inputs):
            return lambda *args: tuple(out * 1.1 for out in gm(*args))

        dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
        functions = pytest.mark.parametrize("fn", [by_func, by_hand])

        @dtypes
        @functions
        @pytest.mark.compiled
        def test_rounding(compiled, fn, dtype):
            compiled(fn)(*given(dtype))

        @dtypes
        @pytest.mark.compiled(backend=too_large)
        def test_fault(compiled, dtype):
            compiled(by_func)(*given(dtype))
        """
    )
    run.result.assert_outcomes(passed=4, failed=2)


def test_what_is_left_of_a_sum_of_products_is_as_far_off_as_others() -> None:
    """By a step of what was added: near zero its sign is no one's; exact zeros stay."""
    torch.manual_seed(0)
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    a[3] = 0
    plain = a @ b
    with OtherRounding(0):
        moved = (a @ b - plain).abs()
    eps, size = torch.finfo(torch.float32).eps, plain.square().mean().sqrt()
    small = (plain.abs() < 0.01 * size) & (plain != 0)
    assert 0.3 * eps * size < moved[small].max() <= 1.5 * eps * size
    assert not moved[3].any()


def test_the_last_roundings_of_float32_go_further() -> None:
    """As far off as compiled code honestly is in a deep model; of other dtypes they are as the first."""
    far = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.linspace(1, 2, 1000).to(dtype)
        for seed in (0, OtherRounding.LATE):
            with OtherRounding(seed):
                moved = x * 3
            far[dtype, seed] = ((moved.double() - (x * 3).double()) / (x * 3).double()).abs().max().item()
    assert far[torch.float32, OtherRounding.LATE] > 2 * far[torch.float32, 0]
    assert far[torch.bfloat16, OtherRounding.LATE] < 2 * far[torch.bfloat16, 0]


def rounded_to(x: torch.Tensor, digits: int) -> torch.Tensor:
    """float32 with so many binary digits after the point, rounded half up."""
    step = 2 ** (23 - digits)
    return ((x.contiguous().view(torch.int32) + step // 2) & -step).view(torch.float32)


@pytest.fixture
def coarse_products() -> Iterator[None]:
    """Products of float32 on the CPU may round their factors to bfloat16, by torch's public setting."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def test_factors_round_to_what_the_settings_allow(coarse_products: None) -> None:
    """As far as bfloat16's rounding goes, the addend keeps its digits, and convolutions have a setting of their own."""
    torch.manual_seed(0)
    a, b, large = torch.randn(64, 256), torch.randn(256, 64), torch.full((64,), 1000.1)
    image, kernel = torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3)
    exact, convolved = a.double() @ b.double(), torch.nn.functional.conv2d(image.double(), kernel.double())
    with OtherRounding(0):
        product, added = a @ b, torch.addmm(large, a * 0, b)
        image_out = torch.nn.functional.conv2d(image, kernel)
    rounded = rounded_to(a, 7).double() @ rounded_to(b, 7).double()
    assert 0.5 < (product - exact).norm() / (rounded - exact).norm() < 2, "as far off as factors of bfloat16"
    assert (added - 1000.1).abs().max() < 1e-3, "what is only added keeps its digits"
    assert (image_out - convolved).abs().max() < 1e-4, "the setting of convolutions was not touched"
    torch.set_float32_matmul_precision("highest")
    with OtherRounding(0):
        assert (a @ b - exact).abs().max() < 1e-3


def test_coarser_factors_pass_only_where_the_settings_allow_them(project) -> None:
    """Which kernel rounds its factors is up to heuristics: eager's may keep all digits and compiled not."""
    run = project.test(
        """
        import pytest, torch

        def rounded(x):  # seven binary digits after the point, as bfloat16
            return ((x.contiguous().view(torch.int32) + 2**15) & -(2**16)).view(torch.float32)

        def coarse(graph, example_inputs):
            return lambda a, b: ((rounded(a).double() @ rounded(b).double()).float(),)

        @pytest.mark.parametrize("precision", ["highest", "medium"])
        @pytest.mark.compiled(backend=coarse)
        def test_it(compiled, precision):
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
            try:
                compiled(lambda a, b: a @ b)(torch.randn(32, 64), torch.randn(64, 32))
            finally:
                torch.set_float32_matmul_precision(before)
        """
    )
    run.result.assert_outcomes(passed=1, failed=1)
    run.result.stdout.fnmatch_lines(["FAILED *coarse-highest*"])


def test_settings_of_both_kinds_do_not_disturb_a_check() -> None:
    """Where the newer settings of precision were used, torch raises if the older flags are read."""
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has one kind of settings")
    before = torch.backends.fp32_precision
    exact = torch.randn(64, dtype=torch.float64)
    try:
        torch.backends.fp32_precision = "tf32"
        verdict = within_rounding(exact.float() * (1 + 1e-7), exact.float(), exact)
        with OtherRounding(0):
            torch.randn(8, 8) @ torch.randn(8, 8)
    finally:
        torch.backends.fp32_precision = before
    assert verdict.passed
