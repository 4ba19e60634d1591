"""What was seen of one variant in one test, as frozen data that knows its JSON form."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import fields
from dataclasses import is_dataclass
from typing import Any
from typing import TypeVar


#: Version of the JSON report; raised when a field changes its meaning or goes away.
FORMAT = 1

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    file: str
    line: int


@dataclass(frozen=True)
class Reason:
    """Why Dynamo broke the graph at a place, in PyTorch's words."""

    reason: str
    #: PyTorch's number of this kind of break, such as ``"GB0059"``; None where torch has none.
    id: str | None
    hint: str | None
    hits: int

    @property
    def text(self) -> str:
        """The reason and its number, as all texts show them."""
        return self.reason + (f"  [{self.id}]" if self.id else "")


@dataclass(frozen=True)
class GraphBreak:
    """One place at which Dynamo split or abandoned a frame, with all its reasons."""

    file: str
    line: int
    function: str
    #: The line of the user's project that led here, if ``file`` is not part of the project.
    called_from: Place | None
    reasons: tuple[Reason, ...]
    #: ``"break"``, ``"skipped_frame"`` or ``"disabled_call"``.
    kind: str
    #: Why this break is not counted, or None.
    ignored: str | None = None

    @property
    def hits(self) -> int:
        return sum(reason.hits for reason in self.reasons)


@dataclass(frozen=True)
class Recompile:
    """Second and later compilations of one code object, with the guards that failed."""

    file: str
    line: int
    function: str
    reasons: tuple[str, ...]
    count: int

    @property
    def first_reasons(self) -> tuple[str, ...]:
        """Some of them, for people: each compilation adds those of all before it."""
        more = len(self.reasons) - 3
        return (*self.reasons[:3], f"{more} more guards") if more > 1 else self.reasons


@dataclass(frozen=True)
class LimitHit:
    """A frame that Dynamo left to eager because it had been compiled too often."""

    file: str
    line: int
    function: str
    limit: str
    reason: str


@dataclass(frozen=True)
class CudaGraphSkip:
    reason: str
    file: str | None
    line: int | None


@dataclass(frozen=True)
class CudaGraphs:
    """CUDA graphs of a test; numbers are None where they could not be observed."""

    expected: bool | None = None
    recorded: int | None = None
    replayed: int | None = None
    skips: tuple[CudaGraphSkip, ...] = ()


@dataclass(frozen=True)
class Compile:
    """Cost of compiling, in seconds, and use of inductor's and AOTAutograd's disk caches."""

    seconds: float | None = None
    cold: bool | None = None
    backward_graphs: int | None = None
    cache_hits: int | None = None
    cache_misses: int | None = None


@dataclass(frozen=True)
class Observation:
    """What the compiler did; numbers are None where this torch does not tell them."""

    frames: int | None = None
    graphs: int | None = None
    ops: int | None = None
    breaks: tuple[GraphBreak, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    limit_hits: tuple[LimitHit, ...] = ()
    cudagraphs: CudaGraphs = CudaGraphs()
    compile: Compile = Compile()
    #: Names of the lists above that this torch does not tell; they are null in JSON.
    untold: tuple[str, ...] = ()

    @property
    def break_count(self) -> int | None:
        """Breaks that count: those that no rule ignores. None: this torch does not tell."""
        return None if "breaks" in self.untold else sum(b.ignored is None for b in self.breaks)

    @property
    def recompile_count(self) -> int | None:
        return None if "recompiles" in self.untold else sum(r.count for r in self.recompiles)

    @property
    def anything(self) -> bool:
        """Whether the compiler did anything at all."""
        return bool(self.frames or self.breaks or self.limit_hits or self.cudagraphs.skips or self.cudagraphs.recorded)


@dataclass(frozen=True)
class Worst:
    """The element of a tensor that is furthest off; complex and boolean values as text."""

    index: tuple[int, ...]
    compiled: float | int | str
    eager: float | int | str
    #: In the float64 run, if there was one.
    float64: float | str | None = None


@dataclass(frozen=True)
class Check:
    """One comparison of compiled with eager."""

    #: Of results: ``values``, ``structure``, ``type``, ``dtype``, ``device``, ``shape``, ``requires_grad``,
    #: ``alias``, ``stride`` or ``grad``. Of what a call left: ``mutation`` of arguments, ``state``, ``rng``, or
    #: ``overwritten`` results of earlier calls. ``exception``: only one side raised, or another one.
    what: str
    #: Where in the result, such as ``out["logits"][0]``.
    path: str
    #: Number of the call within the test, from 1; of a check that passed, the call that was furthest off.
    call: int
    #: None: could not be judged, ``note`` says why.
    passed: bool | None
    max_abs: float | None = None
    max_rel: float | None = None
    error_ratio: float | None = None
    note: str | None = None
    worst: Worst | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Since which stage of the compiler a call no longer does what eager does."""

    #: The first stage that differs: ``capture``, ``AOTAutograd``, ``decompositions``, ``inductor``,
    #: ``CUDA graphs`` or a backend by name. None: not located, ``note`` says why.
    stage: str | None
    #: Stages before it, which agree with eager.
    agree: tuple[str, ...] = ()
    #: An option of inductor under which it agrees.
    cured_by: str | None = None
    note: str | None = None
    #: What torch's compiler bisector found.
    bisected: str | None = None


@dataclass(frozen=True)
class Parity:
    #: None: nothing was compared.
    passed: bool | None = None
    calls: int = 0
    checks: tuple[Check, ...] = ()
    #: Of the first call that failed.
    diagnosis: Diagnosis | None = None
    #: Its script that shows the difference without pytest, or why there is none.
    repro: str | None = None


@dataclass(frozen=True)
class Finding:
    """One broken expectation."""

    #: Name of the limit, such as ``max_breaks``, or of the rule, such as ``uncompiled``.
    limit: str
    allowed: int | float | None
    seen: int | float | None
    message: str
    file: str | None
    line: int | None
    #: What to write or pass in order to accept it.
    accept_with: str | None


@dataclass(frozen=True)
class Memory:
    eager_bytes: int | None = None
    compiled_bytes: int | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Record:
    """Everything about one variant in one phase of one test."""

    nodeid: str
    #: ``import``, ``setup``, ``call`` or ``teardown``.
    phase: str
    #: ``Variant.to_json()``, or None for a test that compiles by itself.
    variant: Mapping[str, Any] | None
    observation: Observation
    parity: Parity = Parity()
    findings: tuple[Finding, ...] = ()
    not_checked: tuple[str, ...] = ()
    outcome: str | None = None
    #: What a reader should know and no limit judges.
    notes: tuple[str, ...] = ()
    #: Limits that its marker sets laxer than the command line.
    relaxed: tuple[str, ...] = ()
    memory: Memory = Memory()
    kernels: int | None = None
    benchmark: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return primitives only, so that a record can cross to another process."""
        data = asdict(self)
        observation = data.pop("observation")
        observation.update(dict.fromkeys(self.observation.untold))
        return {**data, **observation}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        inner = {f.name: data[f.name] for f in fields(Observation)}
        inner.update(dict.fromkeys(data["untold"], ()))
        outer = {f.name: data[f.name] for f in fields(cls) if f.name != "observation"}
        record: Record = _build(cls, {**outer, "observation": inner})
        return record


def _build(kind: Any, value: Any) -> Any:
    """Make ``kind``, a dataclass or a type built from them, out of its JSON form."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _build(next(a for a in typing.get_args(kind) if a is not type(None)), value)
    if origin is tuple:
        item = typing.get_args(kind)[0]
        return tuple(_build(item, v) for v in value)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{k: _build(hints[k], v) for k, v in value.items()})  # type: ignore[operator]
    return value
