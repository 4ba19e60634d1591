"""The examples run on a GPU if there is one, and on a CPU with smaller models."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    torch.manual_seed(0)
    # Without it a GPU computes float32 convolutions in TF32, with 10 bits of mantissa.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return "cuda" if torch.cuda.is_available() else "cpu"
