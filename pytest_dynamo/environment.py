"""Versions and hardware of a run, for reports."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from pathlib import Path


def environment() -> dict[str, str | None]:
    """Return what can be told without importing torch and without initialising CUDA."""
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_initialized() else None
    return {
        "torch": str(torch.__version__) if torch is not None else _version("torch"),
        "triton": _version("triton"),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if torch is not None else None,
        "gpu": gpu,
        "driver": _driver() if gpu is not None else None,
        "pytest": _version("pytest"),
        "pytest_dynamo": _version("pytest-dynamo"),
    }


def _driver() -> str | None:
    """Version of the NVIDIA driver as Linux tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
