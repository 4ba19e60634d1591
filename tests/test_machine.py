"""What is told of a machine and its state, with NVML and GPUs that are made up."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_dynamo import environment
from pytest_dynamo import machine
from pytest_dynamo.machine import Conditions
from pytest_dynamo.machine import fingerprint
from pytest_dynamo.machine import load_nvml
from pytest_dynamo.machine import machine_id
from pytest_dynamo.machine import run_id
from pytest_dynamo.machine import unstable_reasons


class NVMLError(Exception):
    """As that of pynvml."""


class FakeNvml:
    """The functions of pynvml that are used. ``asked``: those that were called."""

    NVMLError = NVMLError
    GPUS = ("GPU-aaa", "GPU-bbb")
    PID = os.getpid()

    def __init__(self, *, bits: int = 0, pids: tuple[int, ...] = (PID,), broken: tuple[str, ...] = ()) -> None:
        self.bits = bits
        self.pids = pids
        self.asked: list[str] = []
        self.started = 0
        self._broken = broken

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            self.asked.append(name)
            if name in self._broken:
                raise NVMLError(name)
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:  # noqa: N802
        self.started += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.started -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.GPUS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return self.GPUS[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.GPUS:
            raise NVMLError(uuid)
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetName(self, handle: str) -> bytes:  # noqa: N802
        return b"NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=143771 << 20)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.159.04"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        return {"GPU-aaa": {1: 1980, 2: 3201}, "GPU-bbb": {1: 300, 2: 400}}[handle][kind]

    def nvmlDeviceGetTemperature(self, _handle: str, kind: int) -> int:  # noqa: N802
        assert kind == 0
        return 41

    def nvmlDeviceGetPowerUsage(self, _handle: str) -> int:  # noqa: N802
        return 350_500

    def nvmlDeviceGetCurrentClocksEventReasons(self, _handle: str) -> int:  # noqa: N802
        return self.bits

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: str) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self.pids]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU that torch has initialised; its properties, to change."""
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=143771 << 20, uuid="aaa")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: properties.name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(environment, "_driver", lambda: "580.159.03")
    return properties


# -- fingerprint ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
def test_the_fingerprint_of_a_gpu() -> None:
    major, minor = sys.version_info[:2]
    assert fingerprint("inductor-max-autotune", "cuda", "cold") == {
        "device": "cuda",
        "gpu": "NVIDIA H200",
        "memory_mib": "143771",
        "driver": "580.159.03",
        "cuda": "13.0",
        "torch": str(torch.__version__),
        "triton": environment.environment()["triton"] or "unknown",
        "python": f"{major}.{minor}",
        "variant": "inductor-max-autotune",
        "l2": "cold",
    }


def test_what_differs_shows_in_the_fingerprint(gpu: SimpleNamespace) -> None:
    found = fingerprint("inductor", "cuda", "cold")
    assert fingerprint("inductor", "cuda:0", "cold") == found
    assert fingerprint("eager", "cuda", "cold") != found
    assert fingerprint("inductor", "cuda", "warm") != found
    gpu.total_memory -= 1 << 30
    assert fingerprint("inductor", "cuda", "cold") != found


def test_the_fingerprint_of_a_cpu() -> None:
    found = fingerprint("inductor", "cpu", "warm")
    assert found["cpu"]
    assert found["threads"] == str(torch.get_num_threads())
    assert found["device"] == "cpu"
    assert not found.keys() & {"gpu", "memory_mib", "driver", "cuda"}
    assert all(isinstance(value, str) for value in found.values())


def test_the_cpu_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine, "_read", lambda _path: "processor\t: 0\nmodel name\t: Some CPU 9 @ 2 GHz\nflags\t: x\n"
    )
    assert fingerprint("v", "cpu", "warm")["cpu"] == "Some CPU 9 @ 2 GHz"
    monkeypatch.setattr(machine, "_read", lambda _path: "")
    assert fingerprint("v", "cpu", "warm")["cpu"] == (platform.processor() or platform.machine())


def test_what_is_unknown_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    found = fingerprint("v", "cuda", "cold")
    assert found["gpu"] == found["driver"] == found["memory_mib"] == "unknown"


def test_nothing_is_imported_for_it() -> None:
    code = (
        "import sys\nfrom pytest_dynamo import machine as m\n"
        "m.fingerprint('v', 'cuda', 'cold'), m.fingerprint('v', 'cpu', 'cold'), m.machine_id(), m.run_id()\n"
        "m.Conditions.read(None)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# -- identities -----------------------------------------------------------------------------------


def test_the_machine_is_told_by_its_gpus_name_and_boot(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine_id()
    assert machine_id() == machine_id(FakeNvml()) == found  # torch knows which of the GPUs it uses
    assert len(found) == 12
    gpu.uuid = "bbb"
    assert machine_id() != found
    gpu.uuid = "aaa"
    with monkeypatch.context() as patch:
        patch.setattr(platform, "node", lambda: "elsewhere")
        assert machine_id() != found
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_read", lambda _path: "another boot")
        assert machine_id() != found
    assert machine_id() == found


def test_before_cuda_is_initialised_nvml_knows_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    assert machine_id(nvml) != machine_id()
    assert nvml.started == 0
    assert machine_id(FakeNvml(broken=("nvmlInit",))) == machine_id()
    assert machine_id(FakeNvml(broken=("nvmlDeviceGetUUID",))) == machine_id()
    monkeypatch.setattr(FakeNvml, "GPUS", ("GPU-aaa",))
    assert machine_id(FakeNvml()) != machine_id(nvml := FakeNvml(broken=("nvmlDeviceGetCount",)))
    assert nvml.started == 0


def test_a_process_has_one_id_of_its_own() -> None:
    assert run_id() == run_id()
    code = "from pytest_dynamo.machine import run_id; import random; random.seed(0); print(run_id())"
    others = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    assert len({*others, f"{run_id()}\n".encode()}) == 3


# -- conditions -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
def test_conditions_of_the_gpu_that_torch_uses() -> None:
    nvml = FakeNvml(bits=0x04, pids=(os.getpid(), 1, 2))
    found = Conditions.read(nvml)
    assert found == Conditions(1980, 3201, 41, 350.5, ("power cap",), 2)
    assert nvml.started == 0
    assert not [name for name in nvml.asked if "Set" in name]
    assert json.loads(json.dumps(found.to_json())) == {
        "sm_clock": 1980,
        "memory_clock": 3201,
        "temperature": 41,
        "power": 350.5,
        "throttle": ["power cap"],
        "other_processes": 2,
    }


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x00, ()),
        (0x01 | 0x02 | 0x10 | 0x100, ()),  # idle, clocks that somebody set, sync boost, display
        (0x04, ("power cap",)),
        (0x08 | 0x40, ("hardware slowdown", "thermal slowdown by hardware")),
        (0x20, ("thermal slowdown by software",)),
        (0x80, ("power brake",)),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_why_clocks_are_low(bits: int, words: tuple[str, ...]) -> None:
    assert Conditions.read(FakeNvml(bits=bits)).throttle == words


@pytest.mark.usefixtures("gpu")
def test_processes_that_belong_to_the_run_are_no_others() -> None:
    pids = (os.getpid(), os.getppid(), 1)
    assert Conditions.read(FakeNvml(pids=pids)).other_processes == 2
    assert Conditions.read(FakeNvml(pids=pids), ours=[os.getppid()]).other_processes == 1
    assert Conditions.read(FakeNvml()).other_processes == 0


@pytest.mark.parametrize("pids", [(), (123456789,)])
@pytest.mark.usefixtures("gpu")
def test_in_a_container_others_are_unknown(pids: tuple[int, ...]) -> None:
    """The host gives this process another number: taken for another, it would make every run unstable."""
    assert Conditions.read(FakeNvml(pids=pids)).other_processes is None


@pytest.mark.usefixtures("gpu")
def test_what_nvml_does_not_tell_is_missing() -> None:
    asked = FakeNvml()
    Conditions.read(asked)
    for name in {name for name in asked.asked if name.startswith("nvmlDeviceGet")}:
        found = Conditions.read(nvml := FakeNvml(broken=(name,)))
        assert None in vars(found).values(), name
        assert nvml.started == 0
    assert Conditions.read(FakeNvml(broken=("nvmlInit",))) == Conditions()
    assert Conditions.read(FakeNvml(broken=("nvmlShutdown",))).temperature == 41
    assert Conditions.read(SimpleNamespace()) == Conditions()
    assert Conditions.read(None) == Conditions()
    assert Conditions().to_json() == {}


@pytest.mark.usefixtures("gpu")
def test_older_releases_have_another_name_for_the_reasons() -> None:
    nvml = FakeNvml(broken=("nvmlDeviceGetCurrentClocksEventReasons",))
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda _handle: 0x40  # type: ignore[attr-defined]
    assert Conditions.read(nvml).throttle == ("thermal slowdown by hardware",)


def test_a_gpu_without_uuid_is_found_if_it_is_the_only_one(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    del gpu.uuid
    assert Conditions.read(FakeNvml()) == Conditions()
    monkeypatch.setattr(FakeNvml, "GPUS", ("GPU-aaa",))
    assert Conditions.read(FakeNvml()).sm_clock == 1980


def test_without_cuda_nothing_is_read() -> None:
    if not torch.cuda.is_initialized():
        assert Conditions.read(FakeNvml()) == Conditions()


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch, gpu: SimpleNamespace) -> None:
    def broken(_handle: str) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetPowerUsage", lambda _self, handle: broken(handle))
    nvml = FakeNvml()
    with pytest.raises(ZeroDivisionError):
        Conditions.read(nvml)
    assert nvml.started == 0
    assert gpu.uuid == "aaa"


# -- unstable -------------------------------------------------------------------------------------


def test_a_quiet_gpu_is_stable() -> None:
    quiet = Conditions(throttle=("power cap",), other_processes=0)
    assert unstable_reasons(quiet, quiet) == ()
    assert unstable_reasons(Conditions(), Conditions()) == ()


def test_why_times_can_not_be_trusted() -> None:
    quiet = Conditions(throttle=(), other_processes=0)
    hot = Conditions(throttle=("power cap", "thermal slowdown by hardware"), other_processes=0)
    assert unstable_reasons(quiet, hot) == ("GPU: thermal slowdown by hardware",)
    assert unstable_reasons(hot, hot) == ("GPU: thermal slowdown by hardware",)
    assert unstable_reasons(Conditions(other_processes=1), quiet) == ("1 other process on the GPU",)
    shared = Conditions(throttle=("hardware slowdown",), other_processes=3)
    assert unstable_reasons(Conditions(), shared) == ("GPU: hardware slowdown", "3 other processes on the GPU")


# -- the module of NVML ---------------------------------------------------------------------------


def test_a_missing_module_is_none_and_other_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str | None) -> Any:
        def load(_name: str) -> Any:
            raise ModuleNotFoundError(name=name)

        return load

    monkeypatch.setattr(importlib, "import_module", fails("pynvml"))
    assert load_nvml() is None
    monkeypatch.setattr(importlib, "import_module", fails("something_else"))
    with pytest.raises(ModuleNotFoundError):
        load_nvml()
    monkeypatch.setattr(importlib, "import_module", lambda name: name)
    assert load_nvml() == "pynvml"


def test_the_real_module_answers_or_not() -> None:
    """Whatever this machine has: no exception."""
    assert isinstance(Conditions.read(load_nvml()), Conditions)


@pytest.mark.cuda
def test_a_real_gpu_is_told() -> None:
    torch.ones(1, device="cuda")
    found = fingerprint("inductor", "cuda", "cold")
    assert found["gpu"] == torch.cuda.get_device_name()
    assert "unknown" not in (found["memory_mib"], found["cuda"], found["torch"])
    nvml = load_nvml()
    if nvml is not None:
        conditions = Conditions.read(nvml)
        assert conditions.sm_clock is not None
        assert conditions.throttle is not None


def test_gpus_are_told_without_cuda() -> None:
    nvml = FakeNvml()
    assert machine.gpus(None) == []
    assert machine.gpus(nvml) == [{"name": "NVIDIA H200", "memory_mib": "143771", "driver": "580.159.04"}] * 2
    assert nvml.started == 0
    broken = FakeNvml(broken=("nvmlDeviceGetMemoryInfo",))
    assert {gpu["memory_mib"] for gpu in machine.gpus(broken)} == {"unknown"}
