"""Every planted miscompilation is caught for the right reason, and honest code raises no alarm."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from cases_expected import TORCH
from controls import CONTROLS
from controls import Control
from faults import FAULTS
from faults import Fault
from faults import drive
from faults import failing


KINDS = {
    *("values", "structure", "type", "dtype", "shape", "device", "requires_grad", "alias", "stride"),
    *("mutation", "state", "grad", "rng", "exception", "overwritten"),
}
SEEDS = range(3)


@pytest.fixture(autouse=True)
def _generators() -> Any:
    """Calls are seeded; other tests are not to notice."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture(autouse=True)
def _guards_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch times the guards of all that it compiles, with cold caches: a third of the time of these tests."""
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *args: 0.0, raising=False)


def each_dtype(cases: list[Any]) -> list[Any]:
    """Parameters of a test: every case with each of its dtypes."""
    return [
        pytest.param(case, dtype, id=f"{case.name}-{str(dtype).removeprefix('torch.')}")
        for case in cases
        for dtype in case.dtypes
    ]


@pytest.mark.parametrize(("fault", "dtype"), each_dtype(FAULTS))
def test_fault_is_caught(fault: Fault, dtype: torch.dtype) -> None:
    """The call that first shows a fault fails, by checks of its kind and no others."""
    fn, calls = fault.planted(dtype)
    run = drive(fn, calls, fault.backend, dynamic=fault.dynamic, settings=fault.settings)
    assert failing(run) == fault.kinds
    assert run.parity_errors
    first = min(check.call for check in run.checks if check.passed is False)
    assert fault.call in (None, first)


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
def test_function_of_fault_is_honest(fault: Fault) -> None:
    """The same function passes with an honest backend, so it is the fault that fails."""
    fn, calls = fault.make(fault.dtypes[0])
    run = drive(fn, calls, "aot_eager", dynamic=fault.dynamic, settings=fault.settings)
    assert failing(run) == fault.wrong_in.get(TORCH, set())
    assert bool(run.parity_errors) is bool(failing(run))


def check_control(control: Control, dtype: torch.dtype, backend: str) -> None:
    if TORCH in control.breaks_torch:
        pytest.skip("compiling it breaks this torch for the rest of the process")
    fn, call = control.make(dtype)
    run = drive(fn, [call(seed) for seed in SEEDS], backend)
    wrong = control.wrong_in.get(TORCH, set())
    assert failing(run) == wrong, [check for check in run.checks if check.passed is False]
    assert bool(run.parity_errors) is bool(wrong)
    assert run.checks
    if wrong:
        return
    unjudged = [check for check in run.checks if check.passed is None]
    assert bool(unjudged or run.not_checked) is control.not_checked


@pytest.mark.parametrize(("control", "dtype"), each_dtype(CONTROLS))
def test_no_alarm(control: Control, dtype: torch.dtype) -> None:
    """Honest code passes three calls with other values each."""
    check_control(control, dtype, "aot_eager")


@pytest.mark.parametrize(("control", "dtype"), each_dtype([control for control in CONTROLS if control.telling]))
def test_no_alarm_with_inductor(control: Control, dtype: torch.dtype) -> None:
    """The same with a backend that rounds otherwise than eager."""
    check_control(control, dtype, "inductor")


def test_every_kind_has_faults() -> None:
    assert {fault.kind for fault in FAULTS} == KINDS
    for cases in (FAULTS, CONTROLS):
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
