"""On which machine a benchmark ran, and in which state that was."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import platform
import re
import secrets
import sys
from collections.abc import Collection
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_dynamo.environment import environment


#: Stands for a fact that can't be told.
UNKNOWN = "unknown"

#: Why clocks are lower than they could be, by NVML's bits. Idle GPUs and clocks that somebody set are no reason.
POWER_CAP = "power cap"
THROTTLE = {
    0x04: POWER_CAP,
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}


def fingerprint(variant_id: str, device: str, l2: str) -> dict[str, str]:
    """Return static facts that must be equal for two runs to be comparable.

    ``device``: as torch writes it, ``cpu`` or ``cuda``; ``l2``: the policy of the timing. Call it when the
    code has run: before, CUDA may not be initialised and the GPU is unknown.
    """
    found = environment()
    kind = device.partition(":")[0]
    names = ("torch", "triton", *(("cuda", "driver") if kind == "cuda" else ()))
    facts = {name: found[name] or UNKNOWN for name in names}
    major, minor, _ = platform.python_version_tuple()
    of_device = _gpu(device) if kind == "cuda" else _cpu()
    return {"device": kind, **of_device, **facts, "python": f"{major}.{minor}", "variant": variant_id, "l2": l2}


def _gpu(device: str) -> dict[str, str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {"gpu": UNKNOWN, "memory_mib": UNKNOWN}
    properties = torch.cuda.get_device_properties(device)
    return {"gpu": str(properties.name), "memory_mib": str(properties.total_memory >> 20)}


def _cpu() -> dict[str, str]:
    torch = sys.modules.get("torch")
    threads = str(torch.get_num_threads()) if torch is not None else UNKNOWN
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    # On ARM Linux tells no name.
    return {"cpu": found[1].strip() if found else platform.processor() or platform.machine(), "threads": threads}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def machine_id(nvml: Any = None) -> str:
    """Return what two runs have in common that ran on one machine, on the same GPUs, without a boot in between."""
    parts = [*(_torch_uuids() or _nvml_uuids(nvml)), platform.node(), _read("/proc/sys/kernel/random/boot_id")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def run_id() -> str:
    """Return what names this process, and no other."""
    return _random_id(os.getpid())


@functools.cache
def _random_id(_pid: int) -> str:
    return secrets.token_hex(6)  # not of `random`, which tests seed


def _torch_uuids() -> list[str]:
    """GPUs that this process sees, as NVML names them."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [uuid for found in properties if (uuid := _uuid(found)) is not None]


def _uuid(properties: Any) -> str | None:
    uuid = getattr(properties, "uuid", None)  # older torch has none
    return None if uuid is None else str(uuid) if str(uuid).startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def gpus(nvml: Any) -> list[dict[str, str]]:
    """Return name, memory and driver of all GPUs of this machine, as NVML tells them; CUDA is left alone."""
    found = []
    with _started(nvml) as usable:
        count = (_ask(nvml, "nvmlDeviceGetCount") or 0) if usable else 0
        for index in range(count):
            handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
            name, memory = _ask(nvml, "nvmlDeviceGetName", handle), _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
            driver = _ask(nvml, "nvmlSystemGetDriverVersion")
            mib = UNKNOWN if memory is None else str(memory.total >> 20)
            found.append({"name": _words(name), "memory_mib": mib, "driver": _words(driver)})
    return found


def _words(told: Any) -> str:
    """A text of NVML, which old releases give as bytes."""
    return UNKNOWN if told is None else told.decode() if isinstance(told, bytes) else str(told)


def load_nvml() -> Any:
    """Return the module of nvidia-ml-py; None: not installed."""
    try:
        return importlib.import_module("pynvml")
    except ModuleNotFoundError as error:
        if error.name != "pynvml":
            raise
        return None


@dataclass(frozen=True)
class Conditions:
    """State of the GPU at one moment; None: not known."""

    #: In MHz.
    sm_clock: int | None = None
    memory_clock: int | None = None
    #: In °C.
    temperature: int | None = None
    #: In watts.
    power: float | None = None
    #: Why clocks are lower than they could be.
    throttle: tuple[str, ...] | None = None
    #: Number of other processes that compute on this GPU.
    other_processes: int | None = None

    @classmethod
    def read(cls, nvml: Any, *, gpu: int | None = None, ours: Collection[int] = ()) -> Conditions:
        """Read them of a GPU. Never raises, never sets anything.

        ``nvml``: the module, or None. ``gpu``: torch's number of it; None: torch's current one. ``ours``:
        processes that are no others besides this one, such as the one that started it.
        """
        with _started(nvml) as usable:
            handle = _handle(nvml, gpu) if usable else None
            if handle is None:
                return cls()
            power = _ask(nvml, "nvmlDeviceGetPowerUsage", handle)
            return cls(
                sm_clock=_ask(nvml, "nvmlDeviceGetClockInfo", handle, 1),
                memory_clock=_ask(nvml, "nvmlDeviceGetClockInfo", handle, 2),
                temperature=_ask(nvml, "nvmlDeviceGetTemperature", handle, 0),
                power=None if power is None else power / 1000,
                throttle=_throttle(nvml, handle),
                other_processes=_others(nvml, handle, ours),
            )

    def to_json(self) -> dict[str, Any]:
        """Return primitives only, without what is not known."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}


def unstable_reasons(before: Conditions, after: Conditions) -> tuple[str, ...]:
    """Return why times that were taken in between can't be trusted."""
    reasons = {
        f"GPU: {reason}": None
        for found in (before, after)
        for reason in found.throttle or ()
        if reason != POWER_CAP  # normal under load
    }
    others = max(before.other_processes or 0, after.other_processes or 0)
    if others:
        reasons[f"{others} other process{'es' if others > 1 else ''} on the GPU"] = None
    return tuple(reasons)


@contextlib.contextmanager
def _started(nvml: Any) -> Iterator[bool]:
    """Start NVML; whether that worked. NVML counts, so that other users of it are not disturbed."""
    try:
        if nvml is not None:
            nvml.nvmlInit()
    except _errors(nvml):
        nvml = None
    try:
        yield nvml is not None
    finally:
        if nvml is not None:
            _ask(nvml, "nvmlShutdown")


def _errors(nvml: Any) -> tuple[type[Exception], ...]:
    """What NVML raises, and Python where a release of nvidia-ml-py lacks a function."""
    found = (getattr(nvml, name, None) for name in ("NVMLError", "NVMLLibraryMismatchError"))
    return (AttributeError, *(error for error in found if error is not None))


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """Call a function of NVML; None: this release, driver or GPU does not tell."""
    try:
        return getattr(nvml, name)(*arguments)
    except _errors(nvml):
        return None


def _handle(nvml: Any, gpu: int | None) -> Any:
    """NVML's handle of the GPU with torch's number, or of torch's current one; None: not told."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    # By UUID: CUDA_VISIBLE_DEVICES gives torch other numbers than NVML.
    uuid = _uuid(torch.cuda.get_device_properties(torch.cuda.current_device() if gpu is None else gpu))
    if uuid is not None:
        return _ask(nvml, "nvmlDeviceGetHandleByUUID", uuid)
    return _ask(nvml, "nvmlDeviceGetHandleByIndex", 0) if _ask(nvml, "nvmlDeviceGetCount") == 1 else None


def _nvml_uuids(nvml: Any) -> list[str]:
    with _started(nvml) as usable:
        count = (_ask(nvml, "nvmlDeviceGetCount") or 0) if usable else 0
        handles = (_ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(count))
        found = [_ask(nvml, "nvmlDeviceGetUUID", handle) for handle in handles if handle is not None]
    return [uuid for uuid in found if uuid is not None]


def _throttle(nvml: Any, handle: Any) -> tuple[str, ...] | None:
    bits = _ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:  # its name before 2024
        bits = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return None if bits is None else tuple(reason for bit, reason in THROTTLE.items() if bits & bit)


def _others(nvml: Any, handle: Any, ours: Collection[int]) -> int | None:
    processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    pids = {process.pid for process in processes or ()}
    # This process has initialised CUDA. If it is not among them, NVML counts as the host does and this is a
    # container: nobody can tell which of them it is.
    return len(pids - {os.getpid(), *ours}) if os.getpid() in pids else None
