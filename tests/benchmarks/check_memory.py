"""Peak memory of a passing check on top of the script that one would write by hand, in a process of its own.

What is large is known to the byte: inputs, outputs, gradients, and state that the call changes. The
peak is that of the resident set, so results are good to a few megabytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import sampling


MEGABYTE = 1 << 20

COMMON = '''
import copy, json, resource, sys
import torch
from torch import nn

torch.set_num_threads(1)
ROWS, SIZE = 4096, 2048  # inputs and outputs of 32 MiB each, a weight of 16 MiB

class Cached(nn.Module):
    """Writes its input into a buffer of 128 MiB."""
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(4 * ROWS, SIZE))
        self.register_buffer("other", torch.zeros(4 * ROWS, SIZE))
    def forward(self, x):
        self.cache[: len(x)].copy_(x)
        return x * 2

def make(kind):
    torch.manual_seed(0)
    if kind == "state":
        return Cached(), torch.randn(ROWS, SIZE)
    layers = [nn.Linear(SIZE, SIZE) for _ in range(8)]
    return nn.Sequential(*layers), torch.randn(ROWS, SIZE, requires_grad=kind == "grads")

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

kind = sys.argv[1]
'''

BY_HAND = (
    COMMON
    + """
model, x = make(kind)
base = peak()
with torch.set_grad_enabled(kind == "grads"):
    other = copy.deepcopy(model) if kind == "state" else model
    leaves = [x, *model.parameters()]
    expected = model(x)
    if kind == "grads":
        cotangent = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, leaves, cotangent)
    expected = expected.detach()
    got = torch.compile(other, backend="eager")(x)
    torch.testing.assert_close(got.detach(), expected)
    if kind == "grads":
        torch.testing.assert_close(torch.autograd.grad(got, leaves, cotangent), wanted)
    if kind == "state":
        torch.testing.assert_close(other.state_dict(), model.state_dict())
print(json.dumps({"base": base, "peak": peak()}))
"""
)

PLUGIN = (
    COMMON
    + """
from pathlib import Path
from pytest_dynamo.calls import Checker
from pytest_dynamo.observer import Observer
from pytest_dynamo.places import Places
from pytest_dynamo.settings import Settings
from pytest_dynamo.testrun import TestRun
from pytest_dynamo.variants import Variant

model, x = make(kind)
base = peak()
observer = Observer()
observer.install()
run = TestRun("test", Settings(), observer, Places(Path(".")))
with torch.set_grad_enabled(kind == "grads"):
    Checker(model, Variant("eager"), run)((x,), {})
kinds = {check.what for check in run.checks}
assert all(check.passed for check in run.checks) and "values" in kinds
assert ("grad" in kinds) is (kind == "grads") and ("state" in kinds) is (kind == "state")
print(json.dumps({"base": base, "peak": peak()}))
"""
)


def allowed(kind: str) -> dict[str, int]:
    """What a check may hold on top of the script by hand, in bytes."""
    rows, size = 4096, 2048
    tensor = 4 * rows * size
    found = {"inputs": tensor, "outputs": tensor}
    if kind == "grads":
        found["a set of gradients"] = tensor + 8 * 4 * (size * size + size)
    if kind == "state":
        found["changed state"] = 4 * tensor
    return found


def peak(source: str, kind: str) -> int:
    """Peak of a process above what it had after making model and inputs, in bytes."""
    done = subprocess.run([sys.executable, "-c", source, kind], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    return int(found["peak"] - found["base"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind; the smallest peak counts (3)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args(argv)
    where = sampling.environment()
    data: dict[str, Any] = {"environment": where, "results": {}}
    lines = ["Peak memory of a passing check on top of the script by hand, MiB", ""]
    lines += [f"{name}: {value}" for name, value in where.items()]
    lines += ["", f"{'':24} {'by hand':>8} {'plugin':>8} {'on top':>8} {'allowed':>8}"]
    met = True
    for kind in ("no grads", "grads", "state"):
        hand = min(peak(BY_HAND, kind) for _ in range(given.repeats))
        plugin = min(peak(PLUGIN, kind) for _ in range(given.repeats))
        limit = sum(allowed(kind).values())
        good = plugin - hand <= limit
        met = met and good
        data["results"][kind] = {"by_hand": hand, "plugin": plugin, "allowed": allowed(kind), "met": good}
        sizes = [value / MEGABYTE for value in (hand, plugin, plugin - hand, limit)]
        lines.append(f"{kind:24} " + " ".join(f"{value:8.0f}" for value in sizes) + ("" if good else "  TOO MUCH"))
    lines += [
        "",
        "Backend eager, so that no compiler is measured. No grads and grads: 8 linear layers of 2048 x 2048; state:",
        "a module that writes a quarter of a buffer of 128 MiB beside one that it leaves alone; by hand that takes a",
        "copy of the module. Allowed: "
        + "; ".join(f"{kind}: {' + '.join(allowed(kind))}" for kind in ("no grads", "grads", "state")),
        f"Criterion: on top at most what is allowed: {'met' if met else 'NOT met'}",
    ]
    data["met"] = met
    sampling.write(given.out, "check_memory", data, "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
