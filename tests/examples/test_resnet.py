"""A model from torchvision, with and without CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torchvision.models import resnet18
from torchvision.models import resnet50


# On a CPU nothing can be recorded into CUDA graphs: the mode that uses them says "not checked".
# Through fifty layers rounding shows in the third digit: a float64 run tells it from a fault.
@pytest.mark.compiled(mode=["default", "reduce-overhead"], max_breaks=0, max_recompiles=0, max_cudagraph_skips=0)
def test_resnet(compiled, device):
    if device == "cuda":
        model, x = resnet50(), torch.randn(16, 3, 224, 224, device=device)
    else:
        model, x = resnet18(), torch.randn(2, 3, 64, 64)
    fast = compiled(model.eval().to(device))
    with torch.no_grad():
        logits = fast(x)
    assert logits.shape == (len(x), 1000)
