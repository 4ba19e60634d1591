"""What this plugin and a comparison by hand find: planted miscompilations, and alarms on honest code.

By hand means ``torch.testing.assert_close`` of what compiled and eager code return. For faults it is written with
care: both sides have a function, arguments and random numbers of their own. For honest code it is written as it
mostly is: one function, the same arguments for both sides, no seed in between.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import platform
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sampling
import torch


sys.path.insert(0, str(Path(__file__).parent.parent))

from controls import CONTROLS
from controls import Control
from faults import FAULTS
from faults import Fault
from faults import drive
from faults import failing
from faults import seed_all


def plain(value: Any) -> Any:
    """A result in terms of what ``assert_close`` knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, str) else value


def differ(actual: Any, expected: Any) -> bool:
    """What a test by hand asserts."""
    try:
        torch.testing.assert_close(plain(actual), plain(expected), equal_nan=True)
    except Exception:  # also what it can't compare at all
        return True
    return False


def outcome(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
    try:
        return fn(*args, **kwargs), None
    except Exception as error:
        return None, error


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- faults ---------------------------------------------------------------------------------------


def caught_by_hand(fault: Fault, dtype: torch.dtype) -> bool:
    """Whether a comparison of results finds a fault at any of its calls. Tests of exceptions are not written so."""
    torch._dynamo.reset()
    fn, calls = fault.planted(dtype)
    compiled = torch.compile(fn, backend=fault.backend, dynamic=fault.dynamic)
    other, other_calls = fault.planted(dtype)
    for number, ((args, kwargs), (other_args, other_kwargs)) in enumerate(zip(calls, other_calls)):
        seed_all(number)
        expected, raised = outcome(other, other_args, other_kwargs)
        seed_all(number)
        actual, error = outcome(compiled, args, kwargs)
        if raised is None and (error is not None or differ(actual, expected)):
            return True
    return False


def fault_lines(names: str) -> Iterator[str]:
    found: dict[str, list[tuple[bool, bool, bool]]] = defaultdict(list)
    yield f"{'fault':58} {'kind':14} {'dtype':10} {'plugin':28} by hand"
    for fault in FAULTS:
        if names not in fault.name:
            continue
        for dtype in fault.dtypes:
            fn, calls = fault.planted(dtype)
            run = drive(fn, calls, fault.backend, dynamic=fault.dynamic, settings=fault.settings)
            kinds, hand = failing(run), caught_by_hand(fault, dtype)
            found[fault.kind].append((bool(kinds), kinds == fault.kinds, hand))
            reason = ", ".join(sorted(kinds)) or "-"
            yield f"{fault.name:58} {fault.kind:14} {short(dtype):10} {reason:28} {'yes' if hand else '-'}"
    yield ""
    yield f"{'kind':14} {'faults':>7} {'plugin':>7} {'for its reason':>15} {'by hand':>8}"
    everything = [row for rows in found.values() for row in rows]
    for kind, rows in [*found.items(), ("all", everything)]:
        caught, right, hand = (sum(column) for column in zip(*rows))
        yield f"{kind:14} {len(rows):7} {caught:7} {right:15} {hand:8}"


# -- honest code ----------------------------------------------------------------------------------


def alarms(control: Control, dtype: torch.dtype, backend: str, seeds: int) -> tuple[int, set[str]]:
    """Calls at which this plugin raises an alarm, and the kinds of checks that failed."""
    fn, call = control.make(dtype)
    run = drive(fn, [call(seed) for seed in range(seeds)], backend)
    return len({check.call for check in run.checks if check.passed is False}), failing(run)


def alarms_by_hand(control: Control, dtype: torch.dtype, backend: str, seeds: int) -> int:
    """Calls at which ``assert_close`` does, with the same arguments for both sides and no seed between them."""
    torch._dynamo.reset()
    fn, call = control.make(dtype)
    compiled = torch.compile(fn, backend=backend)
    count = 0
    for seed in range(seeds):
        args, kwargs = call(seed)
        seed_all(seed)
        expected, raised = outcome(fn, args, kwargs)
        actual, error = outcome(compiled, args, kwargs)
        count += raised is None and (error is not None or differ(actual, expected))
    return count


def control_lines(names: str, backends: list[str], seeds: int) -> Iterator[str]:
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    yield f"{'honest code':50} {'dtype':10} {'backend':10} {'calls':>5} {'plugin':>7} {'by hand':>8}"
    for control in CONTROLS:
        if names not in control.name:
            continue
        for dtype in control.dtypes:
            for backend in backends:
                ours, kinds = alarms(control, dtype, backend, seeds)
                hand = alarms_by_hand(control, dtype, backend, seeds)
                total = totals[backend, short(dtype)]
                total[:] = [total[0] + seeds, total[1] + ours, total[2] + hand]
                reason = f"  {', '.join(sorted(kinds))}" if kinds else ""
                yield f"{control.name:50} {short(dtype):10} {backend:10} {seeds:5} {ours:7} {hand:8}{reason}"
    yield ""
    for (backend, dtype), (calls, ours, hand) in totals.items():
        yield f"{'all':50} {dtype:10} {backend:10} {calls:5} {ours:7} {hand:8}"


# -- the table ------------------------------------------------------------------------------------


def lines(given: argparse.Namespace) -> Iterator[str]:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    yield f"{time.strftime('%Y-%m-%d')}, {versions}, CPU ({sampling.cpu_model()}), {torch.get_num_threads()} threads"
    yield ""
    if not given.no_faults:
        yield from fault_lines(given.names)
        yield ""
    if not given.no_controls:
        yield from control_lines(given.names, given.backends.split(","), given.seeds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="calls of each piece of honest code (20)")
    parser.add_argument("--backends", default="aot_eager,inductor", help="for honest code (aot_eager,inductor)")
    parser.add_argument("--names", default="", help="only faults and controls whose name contains this")
    parser.add_argument("--no-faults", action="store_true", help="leave out the planted faults")
    parser.add_argument("--no-controls", action="store_true", help="leave out honest code")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    given = parser.parse_args(argv)

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    written = []
    for line in lines(given):
        print(line, flush=True)
        written.append(line.rstrip())
    if given.out is not None:
        partial = given.out.with_suffix(f".{os.getpid()}")
        partial.write_text("\n".join(written) + "\n")
        partial.replace(given.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
