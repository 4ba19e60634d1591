"""A training step: compiled forward and backward, eager optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.mark.compiled(max_breaks=0, max_recompiles=0)
def test_training_step(compiled, device):
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4)).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(256, 32, device=device), torch.randint(4, (256,), device=device)
    fast = compiled(model)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(fast(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    # Ten calls advanced the running statistics ten times: eager's runs were taken back.
    assert model[1].num_batches_tracked == 10
    assert fast.observation.compile.backward_graphs is not None
