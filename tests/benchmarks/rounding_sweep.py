"""How far compiled and eager code are from a float64 run of the same call, for many models.

Confirms or corrects the budgets of `pytest_dynamo.reference`. Judges as `pytest_dynamo.judge` does:
by the float64 run what fails ``assert_close``, and with eager in other roundings what that does not excuse.
One row is a model, a dtype and a phase: "forward" is one call in eval mode without gradients; "training" is
a forward in train mode and one joint backward with fixed random cotangents, judged by outputs, gradients of
parameters and inputs, and the running statistics that the call changed.

    PYTHONPATH=. python tests/benchmarks/rounding_sweep.py --device cpu --out results/cpu_rounding

writes ``results/cpu_rounding.json`` and ``.txt`` after every row; ``--resume`` keeps the rows that are there.
Needs torchvision; no network and no pretrained weights.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import importlib.util
import json
import math
import os
import platform
import random
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sampling
import torch
import torchvision
from torch import nn
from torch.utils._pytree import tree_leaves
from torchvision.models.maxvit import MaxVit
from torchvision.ops import StochasticDepth

from pytest_dynamo.judge import OTHER_ROUNDINGS
from pytest_dynamo.parity import DTYPE_TOLERANCES
from pytest_dynamo.reference import BUDGETS
from pytest_dynamo.reference import WEAK
from pytest_dynamo.reference import Float64
from pytest_dynamo.reference import OtherRounding
from pytest_dynamo.reference import within_rounding


CASES = Path(__file__).parent.parent / "cases"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PHASES = ("forward", "training")
#: Tensors with fewer elements are looked at apart: a ratio of few errors says little.
FEW = 16
#: Larger tensors are judged by this many of their elements, evenly spaced.
LARGEST = 1 << 22
#: Ratios that are kept of each row, the largest; enough for the 99th percentile of all rows together.
KEPT = 40
#: Tensors that are kept of each row with all their numbers.
WORST = 3
#: Two float64 results that differ by more, relative to their size, have computed different things.
AGREE = 1e-9


# -- what is measured -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A model with random weights and the shape of one input, without the batch."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: tuple[int, int] = (2, 4)  # of the forward and of the training phase
    #: Times that it is measured, each with other weights and inputs, by the same compiled code.
    repeats: int = 1
    note: str = ""

    def inputs(self, phase: str) -> tuple[torch.Tensor, ...]:
        size = self.batch[PHASES.index(phase)]
        x = torch.randn(size, *self.shape)
        return (x, torch.randint(0, 10, (size,))) if self.name == "loss" else (x,)


class Residual(nn.Module):
    """Many pre-norm blocks, as the MLP half of a transformer."""

    def __init__(self, size: int = 128, blocks: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


class Attention(nn.Module):
    """Two causal attention blocks by ``scaled_dot_product_attention``."""

    def __init__(self, size: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(size, 3 * size) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(size, size) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, qkv, out in zip(self.norms, self.qkv, self.out):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv(norm(x)).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(mixed.transpose(1, 2).flatten(2))
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


class Loss(nn.Module):
    """A classifier that returns its loss and the mean of a score: outputs of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.net(x)
        return nn.functional.cross_entropy(logits, target), logits.softmax(-1).square().sum(-1).mean()


def _mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())))


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def _maxvit() -> nn.Module:
    return MaxVit((64, 64), 64, 2, [64, 128, 256, 512], [2, 2, 5, 2], head_dim=32, stochastic_depth_prob=0.0)


def _torchvision(name: str, **kwargs: Any) -> nn.Module:
    return torchvision.models.get_model(name, weights=None, **kwargs)


def _vision(name: str, size: int = 64, note: str = "", **kwargs: Any) -> Workload:
    return Workload(name, partial(_torchvision, name, **kwargs), (3, size, size), note=note)


#: What is no model of torchvision.
BLOCKS = ("mlp", "loss", "attention", "transformer_encoder", "lstm", "residual_mlp")
#: Cheap ones first.
WORKLOADS = (
    Workload("mlp", _mlp, (256,), (8, 8), 10, "8 x (Linear(256, 256), GELU), as the MLP of the A/A study"),
    Workload("loss", Loss, (32,), (8, 8), 20),
    Workload("attention", Attention, (16, 64), repeats=10),
    Workload("transformer_encoder", _transformer, (16, 64), repeats=10),
    Workload("lstm", Recurrent, (12, 32), repeats=10),
    Workload("residual_mlp", Residual, (128,), (8, 8), 5),
    _vision("resnet18"),
    _vision("squeezenet1_1"),
    _vision("mobilenet_v3_small"),
    _vision("shufflenet_v2_x0_5"),
    _vision("mnasnet0_5"),
    _vision("vit_b_16", note="64 x 64", image_size=64),
    _vision("regnet_y_400mf"),
    _vision("mobilenet_v2"),
    _vision("convnext_tiny", note="layer_scale 0.1 instead of 1e-6, which hides the blocks"),
    _vision("resnet50"),
    _vision("efficientnet_b0"),
    _vision("swin_t"),
    _vision("googlenet", init_weights=True),
    _vision("densenet121"),
    _vision("vgg11"),
    Workload("maxvit_t", _maxvit, (3, 64, 64), note="partitions of 2 x 2, which 64 x 64 allows"),
    _vision("inception_v3", 299, init_weights=True),
)


def build(workload: Workload, seed: int, phase: str, calibrate: bool) -> nn.Module:
    """Make the model in float32 on the CPU, with random weights and no dropout."""
    torch.manual_seed(seed)
    model = workload.build()
    for module in model.modules():
        if isinstance(module, (nn.Dropout, StochasticDepth)):
            module.p = 0.0
        if isinstance(module, nn.Linear) and not module.weight.std() > 0:
            nn.init.normal_(module.weight, std=0.02)  # a head of zeros makes the output constant
        if hasattr(module, "layer_scale"):
            nn.init.constant_(module.layer_scale, 0.1)
    if calibrate:
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad():
            model.train()(*workload.inputs("training"))
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum
    return model.train(phase == "training")


# -- running --------------------------------------------------------------------------------------


class Stopped(BaseException):
    """A row takes too long."""


class RowError(Exception):
    """A row can't be measured; the text says why."""


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise Stopped

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def float64_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def told(error: BaseException) -> str:
    """One line of an exception, without paths."""
    text = " ".join(str(error).split())
    text = re.sub(r"(?<![\w.])/[\w.+-]+(/[\w.+-]+)+", lambda found: ".../" + found[0].rpartition("/")[2], text)
    return f"{type(error).__name__}: {text[:200]}"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def set_state(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(state[name])


def run(
    function: Callable[..., Any],
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    phase: str,
    cotangents: list[torch.Tensor],
    mode: Any = nullcontext,
) -> dict[str, torch.Tensor]:
    """Call ``function``, which is ``model`` or the compiled model, and collect all that it computes.

    Forward and backward run under ``mode``. Where ``cotangents`` is empty it is filled, so that later runs
    use the same.
    """
    training = phase == "training"
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    inputs = tuple(x.detach().clone().requires_grad_(training and x.is_floating_point()) for x in inputs)
    leaves = {f"input[{number}]": x for number, x in enumerate(inputs) if x.requires_grad}
    leaves.update({name: p for name, p in model.named_parameters() if p.requires_grad})
    gradients: tuple[torch.Tensor | None, ...] = ()
    torch.manual_seed(0)
    with torch.set_grad_enabled(training), mode():
        outs = [out for out in tree_leaves(function(*inputs)) if out.is_floating_point()]
        if training:
            if not cotangents:
                generator = torch.Generator().manual_seed(1)
                cotangents += [torch.randn(out.shape, generator=generator).to(out) for out in outs]
            wide = [cotangent.to(out.dtype) for cotangent, out in zip(cotangents, outs)]
            gradients = torch.autograd.grad(outs, list(leaves.values()), wide, allow_unused=True)
    found = {f"out[{number}]": out.detach().clone() for number, out in enumerate(outs)}
    found.update({f"grad of {n}": g.detach().clone() for n, g in zip(leaves, gradients) if g is not None})
    for name, buffer in model.named_buffers():
        # Of a training step all: rounding may leave one as it was in one of the runs that are compared.
        if buffer.is_floating_point() and (training or not torch.equal(buffer, before[name])):
            found[name] = buffer.detach().clone()
    return found


# -- measuring ------------------------------------------------------------------------------------


def rms(tensor: torch.Tensor) -> float:
    return math.sqrt(tensor.square().mean().item())


def distance(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """Root mean square of the difference, relative to the reference's."""
    size = rms(reference)
    apart = rms(tensor - reference)
    return apart / size if size else (math.inf if apart else 0.0)


def spaced(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.flatten()
    return flat[:: -(-flat.numel() // LARGEST)] if flat.numel() > LARGEST else flat


def numbers(value: Any, digits: int = 3) -> Any:
    """Round all floating-point numbers for JSON, which has no infinity."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
    return value


def ratio(of: float, to: float) -> float:
    return of / to if to else (math.inf if of else 0.0)


def judged(c: torch.Tensor, runs: list[torch.Tensor], r: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    """What `within_rounding` holds against its budgets; ``runs`` are of eager, the plain one first."""
    eps = torch.finfo(dtype).eps
    least = torch.finfo(dtype).smallest_normal * eps
    finite = torch.isfinite(c)
    honest = finite & torch.isfinite(runs[0])
    errors = [(run - r)[honest & torch.isfinite(run)] for run in runs]
    errors = [error for error in errors if error.numel()]
    size, eager = rms(r[finite]), max(rms(error) for error in errors)
    largest = max(error.abs().max() for error in errors)
    away, step = (c - r)[finite].abs(), eps * r[finite].abs() + least
    few = 1 if eps < 1e-4 or c.numel() >= FEW else 5 if c.numel() == 1 else 4
    found = {
        "eager": ratio(eager, size),
        "R": ratio(rms(away), eager + eps * size + least),
        "P": (away / (largest + step + eps * size)).max().item(),
        "P_bare": (away / (largest + step)).max().item(),
    }
    #: Of the budget; above 1 it fails.
    found["share"] = max(found["R"] / (few * BUDGETS[dtype].rms), found["P"] / (few * BUDGETS[dtype].element))
    return found


def measure(
    path: str,
    compiled: torch.Tensor,
    eager: torch.Tensor,
    reference: torch.Tensor,
    exact: torch.Tensor | None,
    others: list[torch.Tensor],
) -> dict[str, Any]:
    """All numbers of one tensor.

    Args:
        path: its name.
        compiled: what compiled code computed.
        eager: what eager computed.
        reference: what was computed under `Float64`.
        exact: what a copy of the model in float64 computed.
        others: what eager computed under `OtherRounding`, where that was needed.
    """
    c, e, r = compiled.double(), eager.double(), reference.double()
    eps, (rtol, atol) = torch.finfo(eager.dtype).eps, DTYPE_TOLERANCES[eager.dtype]
    alone = within_rounding(compiled, eager, reference)
    verdict = within_rounding(compiled, eager, reference, None, others) if others else alone
    finite = torch.isfinite(c) & torch.isfinite(e) & torch.isfinite(r)
    found: dict[str, Any] = {
        "path": path,
        "numel": eager.numel(),
        "eps": eps,
        "close": bool(torch.isclose(c, e, rtol=rtol, atol=atol, equal_nan=True).all()),
        "alone": alone.passed,
        "passed": verdict.passed,
        "undecided": verdict.passed is None and verdict.ratio is not None,
        "note": verdict.note,
        "constant": bool((r == r.flatten()[0]).all()) if r.numel() > 1 else False,
        "not_finite": int((~finite).sum()),
    }
    excused = torch.isfinite(r) & torch.isfinite(c) | (c == e) | (c.isnan() & e.isnan())
    if not finite.any() or not excused.all():
        # Infinite where only one side is finite: that is no rounding.
        apart = 0.0 if excused.all() else math.inf
        names = ("compiled", "R", "P", "P_bare", "share", "R_others", "P_others", "share_others")
        return {**found, "eager": 0.0, "eager_others": 0.0, **dict.fromkeys(names, apart)}
    found |= judged(c, [e], r, eager.dtype)
    found["compiled"] = distance(c[finite], r[finite])
    after = judged(c, [e, *(other.double() for other in others)], r, eager.dtype)
    found |= {f"{name}_others": after[name] for name in ("eager", "R", "P", "share")}
    if exact is not None:
        x, e, r, c = exact[finite], e[finite], r[finite], c[finite]
        # Where the true value is zero both hold only their own rounding.
        found["gap"] = ratio(rms(r - x), max(rms(x), rms(e)))
        found["gap_is_rounding"] = not path.startswith("out[")
        found["eager_exact"] = distance(e, x)
    return found


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, maxima, the largest ratios and the worst tensors of a row."""
    failing = [t for t in rows if not t["close"]]
    count = {
        "tensors": len(rows),
        "constant": sum(t["constant"] for t in rows),
        "not_close": len(failing),
        # What the plugin would report if the float64 run were all, and what it does report.
        "beyond_alone": sum(not t["alone"] for t in failing),
        "beyond": sum(not t["passed"] and not t["undecided"] for t in failing),
        "undecided": sum(t["undecided"] for t in failing),
        "weak": sum(bool(t["passed"]) and t["eager_others"] > WEAK for t in failing),
        # Of all tensors, though what is close is not judged.
        "beyond_of_all": sum(t["alone"] is not True for t in rows),
        "not_finite": sum(t["not_finite"] > 0 for t in rows),
    }
    outs = [t for t in rows if t["path"].startswith("out[")]
    largest = {
        "eager_out": max((t["eager"] for t in outs), default=0.0),
        "compiled_out": max((t["compiled"] for t in outs), default=0.0),
        **{name: max(t[name] for t in rows) for name in ("eager", "R", "P", "P_bare")},
        **{name: max((t[name] for t in failing), default=0.0) for name in ("R_others", "P_others", "share_others")},
        # Relative distance of the two references; of gradients and statistics in rounding steps.
        "gap_float64": max((t["gap"] for t in rows if t.get("gap_is_rounding") is False), default=0.0),
        "gap_rounded_eps": max((t["gap"] / t["eps"] for t in rows if t.get("gap_is_rounding")), default=0.0),
    }
    groups: dict[str, Any] = {}
    for name, few in (("many", False), ("few", True)):
        members = [t for t in rows if (t["numel"] < FEW) == few]
        groups[name] = {"tensors": len(members), "failing": sum(not t["close"] for t in members)}
        for key in ("R", "P"):
            values = sorted((numbers(t[key]) for t in members if math.isfinite(t[key])), reverse=True)
            groups[name][key] = values[:KEPT]
            after = (t[f"{key}_others"] for t in members if not t["close"])
            groups[name][f"{key}_others"] = numbers(max(after, default=0.0))
    worst = sorted(failing, key=lambda t: (not t["passed"], t["share_others"]), reverse=True)[:WORST]
    apart = [t for t in rows if "gap" in t and t["gap"] > (t["eps"] if t["gap_is_rounding"] else AGREE)]
    apart = sorted(apart, key=lambda t: t["gap"], reverse=True)
    keep = ("path", "shape", "alone", "passed", "eager", "eager_others", "compiled", "R", "P", "share")
    keep += ("R_others", "P_others", "share_others", "note")
    told = [{name: numbers(t[name]) for name in keep if name != "note" or not t["passed"]} for t in worst]
    return {
        **count,
        **{name: numbers(value) for name, value in largest.items()},
        "ratios": groups,
        "worst": told,
        "references_disagree": {
            "tensors": len(apart),
            "worst": [{n: numbers(t[n]) for n in ("path", "gap", "eager", "eager_exact", "numel")} for t in apart[:1]],
        },
    }


def compare(
    compiled: dict[str, torch.Tensor],
    eager: dict[str, torch.Tensor],
    reference: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor],
    other: Callable[[int], dict[str, torch.Tensor]],
) -> list[dict[str, Any]]:
    """Measure all tensors of a run.

    Args:
        compiled: what compiled code computed, by path.
        eager: what eager computed.
        reference: what was computed under `Float64`.
        exact: what a copy of the model in float64 computed, or nothing.
        other: runs eager under `OtherRounding`, given its seed.
    """
    rows = {}
    for path, value in eager.items():
        if path not in compiled or path not in reference:
            raise RowError(f"{path} is missing in {'compiled' if path not in compiled else 'the float64 run'}")
        if not value.numel() or value.dtype not in BUDGETS or value.is_complex():
            continue
        sides = [spaced(side[path]) for side in (compiled, eager, reference)]
        rows[path] = [path, *sides, spaced(exact[path]) if path in exact else None]
    measured = {path: measure(*row, []) for path, row in rows.items()}
    doubtful = [path for path, row in measured.items() if not row["close"] and not row["alone"]]
    others: dict[str, list[torch.Tensor]] = {path: [] for path in doubtful}
    for seed in range(OTHER_ROUNDINGS):
        # As in a checked call: until nothing is beyond rounding any more.
        still = [path for path in doubtful if not measured[path]["passed"] and not measured[path]["undecided"]]
        if not still:
            break
        found = attempt("other rounding", partial(other, seed))
        for path in still:
            others[path].append(spaced(found[path]))
            measured[path] = measure(*rows[path], others[path])
        del found
    for path, row in measured.items():
        row["shape"] = list(eager[path].shape)
    return list(measured.values())


# -- rows -----------------------------------------------------------------------------------------


@contextmanager
def counting(row: dict[str, Any]) -> Iterator[None]:
    """Write how often and for how long code was compiled."""
    from torch._dynamo.utils import counters

    counters.clear()
    start = time.perf_counter()
    try:
        yield
    finally:
        row["compile_seconds"] = row.get("compile_seconds", round(time.perf_counter() - start, 1))
        row["graphs"] = counters["stats"]["unique_graphs"]
        row["breaks"] = sum(counters["graph_break"].values())
        row["from_cache"] = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def attempt(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RowError:
        raise
    except Exception as error:
        raise RowError(f"{what}: {told(error)}") from error


def model_row(workload: Workload, dtype: torch.dtype, phase: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure one model in one dtype and phase."""
    row: dict[str, Any] = {"reference": "float64 mode"}
    model = build(workload, given.seed, phase, given.calibrate).to(given.device, dtype)
    compiled = torch.compile(model, dynamic=False, mode=None if given.mode == "default" else given.mode)
    # The first calls of CUDA graphs warm up and record; the third one replays.
    calls = 1 if given.mode == "default" else 3
    rows: list[dict[str, Any]] = []
    repeats = workload.repeats if given.repeats is None else given.repeats
    unsteady = 0
    with counting(row):
        for number in range(repeats):
            fresh = build(workload, given.seed + number, phase, given.calibrate).to(given.device, dtype)
            state = fresh.state_dict()
            inputs = workload.inputs(phase)
            inputs = tuple(x.to(given.device, dtype if x.is_floating_point() else None) for x in inputs)
            cotangents: list[torch.Tensor] = []
            once = partial(run, inputs=inputs, phase=phase, cotangents=cotangents)
            set_state(model, state)
            eager = attempt("eager", lambda: once(model, model))  # noqa: B023
            set_state(model, state)
            again = once(model, model)
            unsteady += sum(not torch.equal(again[name], eager[name]) for name in eager)
            del again
            double = copy.deepcopy(fresh).double()
            with float64_default():
                wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
                exact = run(double, double, wide, phase, cotangents)
            del double, fresh
            set_state(model, state)
            try:
                reference = once(model, model, mode=Float64)
            except Exception as error:
                row["reference"], row["float64_mode"] = "double copy", told(error)
                reference, exact = exact, {}
            start = time.perf_counter()
            for _ in range(calls):
                set_state(model, state)
                if given.mode != "default":
                    torch.compiler.cudagraph_mark_step_begin()
                result = attempt("compiled", lambda: once(compiled, model))  # noqa: B023
            synchronize(given.device)
            row.setdefault("compile_seconds", round(time.perf_counter() - start, 1))

            def other(seed: int) -> dict[str, torch.Tensor]:
                set_state(model, state)  # noqa: B023
                return once(model, model, mode=partial(OtherRounding, seed))  # noqa: B023

            rows += compare(result, eager, reference, exact, other)
            del result, eager, reference, exact
            gc.collect()
    return {**row, "repeats": repeats, "eager_not_deterministic": unsteady, **summarize(rows)}


def load_case(path: Path) -> Any:
    """Import a case anew, with the seeds by which the cases are run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    return module


def case_run(path: Path, device: str, compiled: bool = False, mode: Any = nullcontext) -> dict[str, torch.Tensor]:
    """Do all calls of a case, and collect the floating-point results."""
    case = load_case(path)
    with torch.device(device):
        fn, calls = case.make()
    for args, kwargs in calls:
        floats = [isinstance(value, torch.Tensor) and value.is_floating_point() for value in (*args, *kwargs.values())]
        if not floats or not all(floats):
            raise RowError("its arguments are not floating-point tensors only")
    function = torch.compile(fn) if compiled else fn
    random.seed(0)
    torch.manual_seed(0)
    found = {}
    for number, (args, kwargs) in enumerate(calls):
        if hasattr(case, "before_call"):
            case.before_call(number, function, args, kwargs)
        with mode():
            value = function(*args, **kwargs)
        # Sparse results are read as dense ones.
        outs = [out for out in tree_leaves(value) if isinstance(out, torch.Tensor) and out.is_floating_point()]
        for position, out in enumerate(outs):
            found[f"out[{number}][{position}]"] = out.detach().to_dense().clone()
    if hasattr(case, "between"):
        case.between()
    return found


def case_row(path: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Measure a parity case as it is."""
    row: dict[str, Any] = {"reference": "float64 mode", "case": True}
    run_it = partial(case_run, path, given.device)
    eager = attempt("eager", run_it)
    reference = attempt("float64 mode", partial(run_it, mode=Float64))
    with counting(row):
        compiled = attempt("compiled", partial(run_it, compiled=True))
    rows = compare(compiled, eager, reference, {}, lambda seed: run_it(mode=partial(OtherRounding, seed)))
    if not rows:
        raise RowError("no floating-point results")
    return {**row, "repeats": 1, **summarize(rows)}


# -- results --------------------------------------------------------------------------------------


def header(given: argparse.Namespace) -> dict[str, Any]:
    """When, with what and how it was measured."""
    cuda = given.device == "cuda"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "device": torch.cuda.get_device_name() if cuda else sampling.cpu_model(),
        "compile mode": given.mode,
        "threads": torch.get_num_threads(),
        "TF32": f"cuDNN {torch.backends.cudnn.allow_tf32}, matmul {torch.backends.cuda.matmul.allow_tf32}"
        if cuda
        else "-",
        "reduced-precision reduction": f"bf16 {torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction}, "
        f"fp16 {torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction}"
        if cuda
        else "-",
        "seed": given.seed,
        "statistics calibrated": given.calibrate,
    }


def budgets() -> dict[str, list[float]]:
    return {name: [BUDGETS[dtype].rms, BUDGETS[dtype].element] for name, dtype in DTYPES.items()}


NOTES = (
    "eager, comp.: relative error (root mean square) of the outputs against float64, the largest; all: of all tensors.",
    "R: RMS error of compiled / (that of eager + one rounding step of the RMS), the largest of all tensors.",
    "P: an element's error in compiled / (eager's largest error + a step of the element + a step of the RMS), as",
    "   within_rounding judges it, the largest of all tensors.",
    "R', P': of what fails assert_close; where the float64 run alone does not excuse it, the furthest of",
    f"   up to {OTHER_ROUNDINGS} other roundings counts as eager's distance.",
    "n: tensors. close: those that fail assert_close's defaults; of these: alone: beyond rounding, or without a",
    "   verdict, by the float64 run alone; beyond: still after other roundings, which a user sees as a failure;",
    "   open: not checked, as zeros would pass for rounding too; weak: excused though eager itself is over 5 % off.",
    "apart: the float64 mode and a copy of the model in float64 disagree",
    "   (float64 results by more than 1e-9, rounded ones by more than one step). s: first call, with compiling.",
    "Random weights; dropout and stochastic depth are set to 0; batch 2 forward and 4 training (blocks: 8), 64 x 64",
    "pixels where nothing else is said. Blocks are measured several times, with other weights and inputs each.",
    f"Of tensors with more than {LARGEST} elements only so many, evenly spaced, are compared.",
    "Gradients and running statistics of the float64 run are rounded once to the dtype of the parameter or buffer.",
)


def shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and (value >= 1000 or 0 < value < 0.01):
        return f"{value:.1e}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(data: dict[str, Any]) -> str:
    """All rows as text, and what they say about the budgets."""
    lines = ["Distance of compiled and eager code from float64", ""]
    lines += [f"{name}: {value}" for name, value in data["header"].items()]
    lines += ["", *NOTES, ""]
    columns = ("eager", "comp.", "eager all", "R", "P", "R'", "P'", "n", "close", "alone", "beyond", "open", "weak")
    columns += ("apart", "s")
    widths = (8, 8, 9, 7, 7, 6, 6, 4, 5, 5, 6, 4, 4, 5, 6)
    titles = " ".join(f"{name:>{width}}" for name, width in zip(columns, widths))
    rows = data["rows"]
    for title, cases in (("models and blocks", False), ("cases", True)):
        lines.append(f"{title:39} {titles}")
        for key, row in rows.items():
            name, dtype, phase = key.split("|")
            if (dtype == "own") is not cases:
                continue
            start = f"{name[:20]:20} {dtype:9} {phase:8}"
            if "error" in row:
                lines.append(f"{start} {row['error']}")
                continue
            fields = (
                *(row[n] for n in ("eager_out", "compiled_out", "eager", "R", "P", "R_others", "P_others", "tensors")),
                *(row[n] for n in ("not_close", "beyond_alone", "beyond", "undecided", "weak")),
                row["references_disagree"]["tensors"],
                row["compile_seconds"],
            )
            texts = [shown(v) for v in fields]
            extra = []
            if row.get("float64_mode"):
                extra.append(f"reference: copy in float64, as the mode raises {row['float64_mode'][:90]}")
            if row["from_cache"]:
                extra.append("compiled code came from the cache")
            if row["breaks"]:
                extra.append(f"{row['breaks']} graph breaks")
            if row.get("eager_not_deterministic"):
                extra.append(f"{row['eager_not_deterministic']} tensors differ between two eager runs")
            end = f"  ({'; '.join(extra)})" if extra else ""
            lines.append(f"{start} " + " ".join(f"{t:>{w}}" for t, w in zip(texts, widths)) + end)
        lines.append("")
    lines += [*budget_lines(data), ""]
    lines += worst_lines(rows)
    if data["not_run"]:
        lines += ["", "not run: " + ", ".join(data["not_run"])]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def measured(data: dict[str, Any], dtype: str, phase: str) -> list[dict[str, Any]]:
    """Rows of all models and blocks in a dtype and phase."""
    rows = [(key.split("|")[1:], row) for key, row in data["rows"].items()]
    return [row for which, row in rows if which == [dtype, phase] and "error" not in row and not row.get("case")]


def group(data: dict[str, Any], dtype: str, phase: str, size: str, key: str) -> tuple[list[float], int, str]:
    """Largest ratios of all models of a dtype and phase, how many tensors there are, and the model of the largest."""
    values: list[tuple[float, str]] = []
    total = 0
    for name, row in data["rows"].items():
        model, *which = name.split("|")
        if "error" in row or row.get("case") or which != [dtype, phase]:
            continue
        total += row["ratios"][size]["tensors"]
        values += [(value, model) for value in row["ratios"][size][key]]
    values.sort(reverse=True)
    return [value for value, _ in values], total, values[0][1] if values else "-"


def budget_lines(data: dict[str, Any]) -> list[str]:
    """Largest ratio and 99th percentile of each dtype, phase and size, without and with other roundings."""
    lines = ["Models and blocks together; room: budget / largest with other roundings, of what fails assert_close"]
    columns = "".join(f"   {n:>7} {'99 %':>6} {n + chr(39):>6} {'budget':>6} {'room':>6}" for n in ("R max", "P max"))
    lines.append(f"{'':27} {'tensors':>7} {'failing':>7}{columns}  worst P in")
    for dtype, limits in data["budgets"].items():
        for phase in PHASES:
            for size, words in (("many", f"n >= {FEW}"), ("few", f"n < {FEW}")):
                line, total, failing, model = "", 0, 0, ""
                for key, budget in zip(("R", "P"), limits):
                    values, total, model = group(data, dtype, phase, size, key)
                    if not total:
                        break
                    members = [row["ratios"][size] for row in measured(data, dtype, phase)]
                    after = max(float(member[f"{key}_others"]) for member in members)
                    failing = sum(member["failing"] for member in members)
                    allowed = budget * (4 if size == "few" and dtype != "float32" else 1)
                    rank = min(max(math.ceil(0.01 * total), 1), len(values))
                    room = f"{ratio(allowed, after):6.1f}" if after else f"{'-':>6}"
                    line += f"   {shown(values[0]):>7} {shown(values[rank - 1]):>6} {after:6.2f} {allowed:6g} {room}"
                if total:
                    lines.append(f"{dtype:8} {phase:8} {words:9} {total:>7} {failing:>7}{line}  {model}")
    lines.append(f"(fewer than {FEW} elements in 16 bits: 4 times the budget, 5 times for one element)")
    lines.append("")
    lines.append(f"{'':27} {'tensors':>7} {'failing assert_close':>20} {'beyond alone':>12} {'beyond':>6} {'weak':>6}")
    for dtype in data["budgets"]:
        for phase in PHASES:
            rows = measured(data, dtype, phase)
            if rows:
                n = {k: sum(r[k] for r in rows) for k in ("tensors", "not_close", "beyond_alone", "beyond", "weak")}
                lines.append(
                    f"{dtype:8} {phase:8} {len(rows):3} rows  {n['tensors']:>7} {n['not_close']:>20} "
                    f"{n['beyond_alone']:>12} {n['beyond']:>6} {n['weak']:>6}"
                )
    return lines


def worst_lines(rows: dict[str, Any]) -> list[str]:
    """Tensors that use most of their budget, over all models, and those beyond it."""
    found = [(t["share_others"], key, t) for key, row in rows.items() for t in row.get("worst", ())]
    found.sort(key=lambda one: (not one[2]["passed"], float(one[0])), reverse=True)
    lines = [
        "Tensors beyond rounding (!), and those that use most of their budget, which 1 is; alone > with other roundings"
    ]
    for _, key, t in found[:40]:
        lines.append(
            f"{'!' if not t['passed'] else ' '} {shown(t['share']):>7} > {shown(t['share_others']):>5}  "
            f"{key.replace('|', ' '):36} {t['path'][:48]:48} {t['shape']!s:18} R {shown(t['R_others']):>5} "
            f"P {shown(t['P_others']):>5}  eager {shown(t['eager'])} others {shown(t['eager_others'])} "
            f"compiled {shown(t['compiled'])}"
        )
    return lines


def save(prefix: Path, data: dict[str, Any]) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in data.items() if name != "rows"]
    rows = ",\n".join(f"{json.dumps(k)}: {json.dumps(r, separators=(',', ':'))}" for k, r in data["rows"].items())
    text = "{\n" + ",\n".join(parts) + ',\n"rows": {\n' + rows + "\n}\n}\n"
    # Whole or not at all: a reader may look at any time.
    for suffix, content in ((".json", text), (".txt", table(data))):
        scratch = prefix.parent / f"{prefix.name}{suffix}.part"
        scratch.write_text(content, encoding="utf-8")
        os.replace(scratch, prefix.parent / f"{prefix.name}{suffix}")


def todo(given: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """All rows that were asked for: blocks, then each model's forward, then cases, gradients and float16."""
    rows: list[tuple[int, str, Callable[[], dict[str, Any]]]] = []
    for workload in WORKLOADS:
        if workload.name not in given.models:
            continue
        for dtype in given.dtypes:
            for phase in given.phases:
                if workload.name in BLOCKS:
                    stage = 4 if (workload.name, phase) == ("lstm", "training") else 0  # unrolled: compiles for minutes
                else:
                    stage = 4 if dtype == "float16" else 3 if phase == "training" else 1
                key = f"{workload.name}|{dtype}|{phase}"
                rows.append((stage, key, partial(model_row, workload, DTYPES[dtype], phase, given)))
    cases = {path.stem: path for path in sorted(CASES.glob("c*.py"))}
    rows += [(2, key, row) for key, row in case_rows(cases, given).items()]
    return {key: row for _, key, row in sorted(rows, key=lambda one: one[0])}


def case_rows(cases: dict[str, Path], given: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    if "forward" not in given.phases or "cases" not in given.models:
        return {}
    return {f"{name}|own|forward": partial(case_row, path, given) for name, path in cases.items()}


def listed(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return names

    return parse


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    models = (*(workload.name for workload in WORKLOADS), "cases")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", type=listed(models), default=list(models), metavar="A,B", help="also: cases")
    parser.add_argument("--dtypes", type=listed(tuple(DTYPES)), default=list(DTYPES), metavar="A,B")
    parser.add_argument("--phases", type=listed(PHASES), default=list(PHASES), metavar="A,B")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rounding", metavar="PREFIX")
    parser.add_argument("--mode", choices=("default", "max-autotune"), default="default", help="of torch.compile")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further row after that")
    parser.add_argument("--row-seconds", type=int, default=1200, help="give up a row after that (1200)")
    parser.add_argument("--repeats", type=int, help="weights and inputs per row (blocks 5 to 20, others 1)")
    parser.add_argument("--tf32", choices=("default", "on", "off"), default="default")
    parser.add_argument("--calibrate", action="store_true", help="running statistics from a batch, not 0 and 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="keep the rows that PREFIX.json has")
    parser.add_argument(
        "--missing", action="store_true", help="print rows of models that are missing or failed, and end"
    )
    parser.add_argument("--rows-of", type=Path, nargs="+", default=[], metavar="FILE", help="rows measured elsewhere")
    given = parser.parse_args(argv)
    if given.mode != "default" and given.device == "cpu":
        parser.error("--mode max-autotune needs --device cuda")

    end = time.monotonic() + given.seconds
    warnings.simplefilter("ignore")
    configure(given)
    rows = todo(given)
    data: dict[str, Any] = {"header": header(given), "budgets": budgets(), "not_run": [], "rows": {}}
    file = given.out.parent / f"{given.out.name}.json"
    if given.resume and file.exists():
        data["rows"] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    for measured in given.rows_of:
        data["rows"] |= json.loads(measured.read_text(encoding="utf-8"))["rows"]
    if given.missing:
        for key in reversed(rows):  # those that take longest first
            model, dtype, phase = key.split("|")
            if dtype != "own" and "error" in data["rows"].get(key, {"error": "not run"}):
                print(model, dtype, phase)
        return 0
    for key, row in rows.items():
        if key in data["rows"]:
            continue
        if time.monotonic() > end:
            break
        start = time.monotonic()
        try:
            with limit(given.row_seconds):
                data["rows"][key] = row()
        except Stopped:
            data["rows"][key] = {"error": f"given up after {given.row_seconds} s"}
        except RowError as error:
            data["rows"][key] = {"error": str(error)}
        except Exception as error:
            data["rows"][key] = {"error": told(error)}
        data["rows"][key]["row_seconds"] = round(time.monotonic() - start, 1)
        torch._dynamo.reset()
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()
        data["not_run"] = [name for name in rows if name not in data["rows"]]
        save(given.out, data)
        print(f"{key}: {data['rows'][key].get('error') or 'measured'}", file=sys.stderr, flush=True)
    data["not_run"] = [name for name in rows if name not in data["rows"]]
    save(given.out, data)
    print(table(data), end="")
    return 0


def configure(given: argparse.Namespace) -> None:
    import torch._dynamo.config

    if given.device == "cpu":
        torch.set_num_threads(1)
        torch._inductor.config.compile_threads = 1
    if given.tf32 != "default":
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = given.tf32 == "on"
    # Without it recurrent layers are left to eager.
    if hasattr(torch._dynamo.config, "allow_rnn"):
        torch._dynamo.config.allow_rnn = True


if __name__ == "__main__":
    sys.exit(main())
