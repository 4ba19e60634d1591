"""Finds the first stage of the compiler after which a call no longer does what eager does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from pytest_dynamo import _torch
from pytest_dynamo.judge import Judge
from pytest_dynamo.judge import failed
from pytest_dynamo.record import Diagnosis
from pytest_dynamo.variants import Variant
from pytest_dynamo.variants import backend_name


#: What each of torch's own backends adds to those before it.
STAGES = {"eager": "capture", "aot_eager": "AOTAutograd", "aot_eager_decomp_partition": "decompositions"}
PRECISION_CASTS = "emulate_precision_casts"


@dataclass(frozen=True)
class Stage:
    """A way to compile that stops after some stage of the compiler."""

    name: str
    kwargs: dict[str, Any]


def stages_of(variant: Variant, *, cudagraphs: bool, eager_random: bool) -> tuple[list[Stage], Stage]:
    """Return the stages before a variant, in the compiler's order, and the variant itself as the last.

    Args:
        variant: the way of compiling that gave something else than eager.
        cudagraphs: whether the calls are recorded in CUDA graphs.
        eager_random: whether inductor has to draw eager's random numbers to be compared at all.
    """
    common = {"dynamic": variant.dynamic, "fullgraph": variant.fullgraph}
    plain = [Stage(name, {**common, "backend": backend}) for backend, name in STAGES.items()]
    if variant.backend in STAGES:
        number = list(STAGES).index(str(variant.backend))
        return plain[:number], Stage(plain[number].name, variant.kwargs)
    if variant.backend == "cudagraphs":
        return plain[:2], Stage("CUDA graphs", variant.kwargs)
    if variant.backend != "inductor":
        return plain[:1], Stage(f"backend {backend_name(variant.backend)}", variant.kwargs)
    kwargs = _torch.with_fallback_random(variant.kwargs) if eager_random else variant.kwargs
    if eager_random or not cudagraphs:
        return plain, Stage("inductor", kwargs)
    without = _torch.with_options(variant.kwargs, {"triton.cudagraphs": False})
    return [*plain, Stage("inductor", without)], Stage("CUDA graphs", kwargs)


def locate(
    judge: Judge,
    variant: Variant,
    *,
    cudagraphs: bool,
    eager_random: bool,
    seconds: float,
    bisect: bool,
    around: Callable[[], AbstractContextManager[None]],
    reset: Callable[[], None],
) -> Diagnosis:
    """Compile a call that failed again, stage by stage, each judged like the call itself.

    Args:
        judge: knows the call and what eager did in it.
        variant: the way of compiling that failed.
        cudagraphs: whether the call was recorded in CUDA graphs, which takes three runs.
        eager_random: whether it was judged under ``fallback_random``.
        seconds: no further stage is begun after this time.
        bisect: have torch's bisector look for the pass or operation if inductor is the stage; takes longer.
        around: entered around everything that compiles.
        reset: throws away what was compiled; a changed configuration alone compiles nothing again.
    """
    end = time.monotonic() + seconds
    before, last = stages_of(variant, cudagraphs=cudagraphs, eager_random=eager_random)
    differentiate = judge.eager.gradients is not None and bool(judge.eager.gradients.values)

    def differs(stage: Stage) -> bool:
        reset()
        compiled = torch.compile(judge.start.fn, **stage.kwargs)
        for _ in range(3 if stage is last and cudagraphs else 1):
            with around(), judge.start.again() as arguments:
                look = judge.look(compiled, arguments, differentiate=differentiate)
                if not judge.raised_alike(look.outcome.error):
                    return True
                if failed(judge.settle(look.checks, look.pairs)):
                    return True
        return False

    agree: list[str] = []
    for stage in before:
        if time.monotonic() > end:
            return Diagnosis(None, tuple(agree), None, f"not located: {seconds:g} s are over (--dynamo-stage-timeout)")
        if differs(stage):
            return Diagnosis(stage.name, tuple(agree))
        agree.append(stage.name)
    if time.monotonic() > end:
        return Diagnosis(None, tuple(agree), None, f"not located: {seconds:g} s are over (--dynamo-stage-timeout)")
    if not differs(last):
        note = "not located: compiled afresh this call alone agrees with eager, so calls before it play a part"
        return Diagnosis(None, (*agree, last.name), None, note)
    if variant.backend != "inductor" or last.name != "inductor":
        return Diagnosis(last.name, tuple(agree))
    found = _torch.bisect(lambda: not differs(last)) if bisect else None
    if time.monotonic() > end and not bisect:
        return Diagnosis(last.name, tuple(agree), None, f"{PRECISION_CASTS} not tried: {seconds:g} s are over")
    emulated = Stage("inductor", _torch.with_options(last.kwargs, {PRECISION_CASTS: True}))
    cured = PRECISION_CASTS if not differs(emulated) else None
    return Diagnosis(last.name, tuple(agree), cured, None if cured else f"{PRECISION_CASTS} does not cure it", found)
