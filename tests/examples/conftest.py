"""The examples run on a GPU if there is one, and on a CPU with smaller models."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> str:
    torch.manual_seed(0)
    return "cuda" if torch.cuda.is_available() else "cpu"
