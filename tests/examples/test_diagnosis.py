"""What the plugin says about code that does not compile in one piece."""

from __future__ import annotations

import pytest
import torch

import pytest_dynamo


def clip(x: torch.Tensor, limit: float) -> torch.Tensor:
    norm = x.norm()
    print("norm is", norm.shape)
    if norm > limit:
        x = x * (limit / norm)
    return x.sin()


@pytest.mark.compiled(backend="eager", max_breaks=2)
def test_breaks_are_told(compiled, device):
    """Both places are known with line, reason and PyTorch's number, though the test accepts them."""
    fast = compiled(clip)
    fast(torch.randn(8, device=device), 1.0)
    seen = {b.line: b.reasons[0] for b in fast.observation.breaks}
    first = clip.__code__.co_firstlineno
    assert seen[first + 2].id == "GB0059"
    assert seen[first + 3].reason == "Data-dependent branching"


# `pytest -rx tests/examples` shows the text with which this test would fail without the mark.
@pytest.mark.xfail(raises=pytest_dynamo.LimitError, strict=True, reason="shows the diagnosis of two graph breaks")
@pytest.mark.compiled(backend="eager", max_breaks=0)
def test_breaks_fail(compiled, device):
    compiled(clip)(torch.randn(8, device=device), 1.0)
