"""What the compiler reported, one value per report, in the order in which it happened."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from typing import Any

from pytest_dynamo.messages import StackFrame


@dataclass(frozen=True)
class BreakEvent:
    """A graph break. Frames are outermost first, the first of ``stack`` is the compiled frame."""

    stack: tuple[StackFrame, ...]
    #: Python frames that ran when Dynamo began to compile, outermost first.
    callers: tuple[StackFrame, ...]
    reason: str
    id: str | None
    hint: str | None
    skipped: bool
    #: Whether pytest rewrote an assert in the code that broke.
    rewritten: bool = False


@dataclass(frozen=True)
class CompileEvent:
    """Dynamo began to compile a frame."""

    #: ``frame/attempt``, such as ``"0/1"``: the number of the code object and of its compilation.
    compile_id: str
    file: str
    line: int
    function: str
    #: What generates code for this frame; compared with ``==``, as Dynamo's own guard does.
    backend: Any = field(default=None, compare=False)
    reasons: tuple[str, ...] = ()
    #: Python frames that led here, outermost first; only where the frame is the compiler's own
    #: wrapper around a module of torch.
    callers: tuple[StackFrame, ...] = ()

    @property
    def frame(self) -> str:
        return self.compile_id.rpartition("/")[0]

    @property
    def attempt(self) -> int:
        number = self.compile_id.rpartition("/")[2].partition("_")[0]
        return int(number) if number.isdigit() else 0


@dataclass(frozen=True)
class CompileResult:
    """A compilation ended."""

    compile_id: str
    #: None: Dynamo gave code to run; else why not.
    fail_type: str | None
    ops: int | None
    seconds: float | None
    forward: bool
    recompile_reason: str | None = None
    cache_hits: int | None = None
    cache_misses: int | None = None


@dataclass(frozen=True)
class LimitEvent:
    limit: str
    value: int
    file: str
    line: int
    function: str
    reason: str


@dataclass(frozen=True)
class SkipEvent:
    """Dynamo left a frame alone without looking into it."""

    function: str
    reason: str
    file: str


@dataclass(frozen=True)
class CudaGraphSkipEvent:
    reason: str
    where: StackFrame | None


@dataclass(frozen=True)
class CudaGraphRecording:
    pass


@dataclass(frozen=True)
class ResetEvent:
    """All compiled code was thrown away; numbers of frames start again."""


Event = (
    BreakEvent
    | CompileEvent
    | CompileResult
    | LimitEvent
    | SkipEvent
    | CudaGraphSkipEvent
    | CudaGraphRecording
    | ResetEvent
)
