"""What a passing check costs beside the script that one would write by hand: seconds of setup and call of the tests.

Every sample is a pytest process of its own; both arms run under pytest. By hand: eager, `torch.compile`,
`torch.testing.assert_close` of the results and, where asked for, of all gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import sampling


MODEL = """
import pytest, torch
from torch import nn

torch.set_num_threads({threads})

class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.attention = nn.MultiheadAttention(size, 4, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

def make():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128) for _ in range({blocks})), nn.Linear(128, 10))
    return model, torch.randn(8, 32, 128)

GRAD = {grad}
VARIANTS = {variants}
"""

PLUGIN = """
@pytest.mark.compiled(backend={backends}, dynamic={dynamic}, grad={grad})
def test_it(compiled):
    model, x = make()
    with torch.set_grad_enabled(GRAD):
        compiled(model)(x)
"""

BY_HAND = """
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_it(variant):
    model, x = make()
    torch._dynamo.reset()

    def results(fn):
        out = fn(x)
        if not GRAD:
            return [out]
        return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    with torch.set_grad_enabled(GRAD):
        expected = results(model)
        got = results(torch.compile(model, **variant))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
"""

CONFTEST = """
import json
seconds = 0.0
outcomes = []

def pytest_runtest_logreport(report):
    global seconds
    seconds += report.duration
    if report.when == "call":
        outcomes.append(report.outcome)

def pytest_sessionfinish():
    with open("sample.json", "w") as file:
        json.dump({"seconds": seconds, "outcomes": outcomes}, file)
"""

BACKENDS = {"one variant": ["inductor"], "six variants": ["eager", "aot_eager", "inductor"]}
DYNAMIC = {"one variant": [None], "six variants": [None, True]}
LIMITS = {False: 1.15, True: 1.3}
BY_HAND_ARM, PLUGIN_ARM = "by hand", "plugin"
#: Of their caches; the C++ compiler is called with paths that must not hold spaces.
FOLDERS = {BY_HAND_ARM: "hand", PLUGIN_ARM: "plugin"}


def source(arm: str, variants: str, grad: bool, given: argparse.Namespace) -> str:
    """The test file of one arm."""
    backends, dynamic = BACKENDS[variants], DYNAMIC[variants]
    every = [{"backend": b, "dynamic": d} for b in backends for d in dynamic]
    text = MODEL.format(threads=given.threads, blocks=given.blocks, grad=grad, variants=every)
    return text + (PLUGIN.format(backends=backends, dynamic=dynamic, grad=grad) if arm == PLUGIN_ARM else BY_HAND)


def sample(folder: Path, cache: Path, arm: str, variants: str, grad: bool, given: argparse.Namespace) -> float:
    """Run the tests of one arm in a new process; return their seconds."""
    (folder / "test_sample.py").write_text(source(arm, variants, grad, given), encoding="utf-8")
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "test_sample.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = json.loads((folder / "sample.json").read_text(encoding="utf-8"))
    expected = len(BACKENDS[variants]) * len(DYNAMIC[variants])
    if done.returncode or found["outcomes"] != ["passed"] * expected:
        raise SystemExit(f"{arm}, {variants}: not {expected} passed tests\n{done.stdout}")
    return float(found["seconds"])


def measure(variants: str, grad: bool, warm: bool, given: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of both arms, in pairs; warm: code comes from a disk cache, which each arm has filled for itself."""
    seconds: dict[str, list[float]] = {BY_HAND_ARM: [], PLUGIN_ARM: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if warm:
            for arm in seconds:
                sample(folder, folder / FOLDERS[arm], arm, variants, grad, given)
        pairs = given.warm if warm else given.cold
        for number, order in enumerate(sampling.orders(tuple(seconds), pairs, given.seed)):
            for arm in order:
                cache = folder / FOLDERS[arm] if warm else folder / f"{FOLDERS[arm]}{number}"
                seconds[arm].append(sample(folder, cache, arm, variants, grad, given))
    return seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cold", type=int, default=5, help="pairs with an empty disk cache (5)")
    parser.add_argument("--warm", type=int, default=9, help="pairs with a warm disk cache (9)")
    parser.add_argument("--blocks", type=int, default=4, help="attention blocks of the model (4)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args(argv)

    where = sampling.environment()
    rows: dict[str, dict[str, Any]] = {}
    met: dict[str, bool] = {}
    everything: dict[str, Any] = {}
    for grad in (False, True):
        for variants in BACKENDS:
            for warm in (True, False):
                seconds = measure(variants, grad, warm, given)
                name = f"{'grads' if grad else 'no grads'}, {variants}, {'warm' if warm else 'cold'}"
                rows[name] = sampling.summary(seconds[PLUGIN_ARM], seconds[BY_HAND_ARM], seed=given.seed)
                met[name] = rows[name]["median_ratio"] <= LIMITS[grad]
                everything[name] = seconds
                print(name, rows[name], file=sys.stderr)
    where["load_at_end"] = sampling.load()
    missed = [name for name, good in met.items() if not good]
    notes = [
        f"Seconds of setup and call of the tests in a process of its own, {given.threads} thread(s). Model:",
        f"{given.blocks} blocks of attention and MLP of width 128, batch 8 x 32. Ratio: plugin / script by hand",
        "(eager, torch.compile, assert_close; with grads, gradients of all parameters too). Six variants: eager,",
        "aot_eager and inductor, each with dynamic=None and True. Warm: compiled code comes from the disk cache.",
        f"Criterion: median ratio at most {LIMITS[False]} without and {LIMITS[True]} with gradients: "
        + ("met" if not missed else "NOT met: " + "; ".join(missed)),
    ]
    text = sampling.table("Cost of a passing check", where, rows, notes)
    data = {"environment": where, "results": rows, "met": met, "seconds": everything}
    sampling.write(given.out, "check_cost", data, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
