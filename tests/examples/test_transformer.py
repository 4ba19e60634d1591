"""A transformer layer in all modes of inductor. Max-autotune takes minutes for convolutions, seconds for this."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.mark.compiled(
    mode=["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"],
    max_breaks=0,
    max_recompiles=0,
    max_cudagraph_skips=0,
)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_transformer(compiled, device, train):
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True).to(device).train(train)
    fast = compiled(layer)
    x = torch.randn(2, 16, 128, device=device)
    with torch.set_grad_enabled(train):
        out = fast(x)
    assert out.shape == x.shape
