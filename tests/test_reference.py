"""Rounding is told from faults by the same call in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_dynamo.reference import Float64
from pytest_dynamo.reference import within_rounding


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 4, 16, 4096])
def test_honest_rounding_passes(dtype, size):
    """A second honest rounding of the same numbers is within the budget, at any size, for 50 seeds."""
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        terms = torch.randn(32, size, generator=generator, dtype=torch.float64).to(dtype)
        order = torch.randperm(32, generator=generator)
        eager, compiled = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
        for number in range(32):
            eager, compiled = eager + terms[number], compiled + terms[order[number]]
        verdict = within_rounding(compiled, eager, terms.double().sum(0))
        assert verdict.passed, (seed, verdict)


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
    run.result.assert_outcomes(failed=2)  # single elements are off too
    (check,) = (c for c in run.record("test_it[off]")["parity"]["checks"] if c["path"] == "out")
    assert check["passed"] is False
    assert check["error_ratio"] > 1000
    assert "beyond rounding: " in run.text
