"""A backend of one's own that looks into the captured graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pytest_dynamo


def no_casts(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> object:
    """Run the graph as it is, but refuse one that changes dtypes behind the user's back."""
    casts = [node for node in graph.graph.nodes if node.target in ("to", "float", "half", "bfloat16", "double")]
    assert not casts, f"the graph casts: {casts}"
    return graph.forward


@pytest.mark.compiled(backend=no_casts, max_breaks=0, max_graphs=1)
def test_graph_has_no_casts(compiled, device):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    compiled(model)(torch.randn(4, 8, device=device))


# A backend that raises is a failure, never a skip: "compiled raised ..., eager returned a value".
@pytest.mark.xfail(raises=pytest_dynamo.ParityError, strict=True, reason="shows a graph that the backend refuses")
@pytest.mark.compiled(backend=no_casts)
def test_a_cast_is_found(compiled, device):
    compiled(lambda x: x.half().float() + 1)(torch.randn(4, 8, device=device))
