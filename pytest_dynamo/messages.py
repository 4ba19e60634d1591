"""PyTorch's log texts, taken apart. Every pattern that depends on their wording is here."""

from __future__ import annotations

import re
from dataclasses import dataclass


_LOCATION = re.compile(r"in user code at (?P<file>.+?):(?P<line>\d+)\n")
_FRAME = re.compile(r'^ +File "(?P<file>.+?)", line (?P<line>\d+)(?:, in (?P<name>.+))?$', re.MULTILINE)
_REASON_PREFIX = re.compile(r"^(?:Graph break: |Graph Break Reason: |Reason: |skip: )+")
#: Torch wraps the cause into a sentence of its own that ends in a colon; the cause follows.
_WRAPPER = re.compile(r"^(?:Encountered graph break when |Failed to handle graph break gracefully).*:$")
_GB_LINK = re.compile(r"/gb(\d{3,5})\.html")
_GB_TYPE = re.compile(r"^(?! )(.+)\n  Explanation: ", re.MULTILINE)
_HINT = re.compile(r"^  Hint: (.*(?:\n    .*)*)", re.MULTILINE)
#: How a backend failed that Dynamo does without, and where the operation stands on which it did.
_FAILED = re.compile(r"^  Explanation: Backend compiler (.{,200})", re.MULTILINE)
_OPERATION = re.compile(r"Original traceback:\n((?:[ \t]+.*\n)+)")
_SECOND_BREAK = "*** While handling this graph break"
_SKIPPED = ("Skipping the function", "which results in a skip", "Skipping the frame", "cannot properly resume")
_RESUME = re.compile(r"^(?:torch_dynamo_resume_in_)+(.+?)(?:_at_\d+)+$")
_GENERIC_HINTS = ("Please report an issue to PyTorch", "This graph break is fundamental", "It may be possible to")

_GUARD_ENTRY = re.compile(r"^\d+/\d+:\s*")
_OBJECT_ID = re.compile(r"(?<=, )\d{9,}(?=[,)])")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")

DATA_DEPENDENT = "Data-dependent branching"
#: The user's own exception that leaves a frame; Dynamo logs it like a break.
USER_EXCEPTION = "Observed exception"
DISABLED_CALL = "Skip calling `torch.compiler.disable()`d function"


@dataclass(frozen=True)
class StackFrame:
    file: str
    line: int
    function: str


@dataclass(frozen=True)
class BreakText:
    """A graph break as its log record tells it."""

    reason: str
    id: str | None
    hint: str | None
    skipped: bool
    location: StackFrame | None
    #: Traceback of user code, outermost first; starts above the compiled frame.
    stack: tuple[StackFrame, ...]
    #: Of an operation on which the backend failed, outermost first; starts with the compiled frame.
    failed: tuple[StackFrame, ...] = ()


def real_function(name: str) -> str:
    """Name of the function that Dynamo's resume function continues."""
    match = _RESUME.match(name)
    return match[1] if match else name


def parse_break(message: str, detail: str = "") -> BreakText:
    """Take a graph-break record apart; ``detail`` is the exception's text, for records without one."""
    text = message if "Explanation:" in message or "Reason:" in message else f"{detail}\n{message}"
    cause = text.partition(_SECOND_BREAK)[0]
    found = _GB_TYPE.search(cause)
    reason = found[1] if found else _first_cause(cause)
    link = _GB_LINK.search(cause)
    where = _LOCATION.search(message)
    stack = _stack(message.rpartition("User code traceback:")[2] or message)
    failed = _FAILED.search(cause)
    operation = _OPERATION.search(cause) if failed else None
    if failed:
        reason = f"{reason}: {failed[1].replace('`', '').strip()}"
    location = None
    if where:
        file, line = where["file"], int(where["line"])
        same = (f.function for f in reversed(stack) if (f.file, f.line) == (file, line))
        location = StackFrame(file, line, next(same, "?"))
    return BreakText(
        reason=_REASON_PREFIX.sub("", reason).strip(),
        id=f"GB{link[1]}" if link else None,
        hint=_best_hint(cause),
        skipped=message.startswith("Graph break: skip") or any(words in message for words in _SKIPPED),
        location=location,
        stack=stack,
        failed=_stack(operation[1]) if operation else (),
    )


def _stack(text: str) -> tuple[StackFrame, ...]:
    """Frames of a traceback."""
    return tuple(StackFrame(m["file"], int(m["line"]), real_function(m["name"] or "?")) for m in _FRAME.finditer(text))


def _first_cause(text: str) -> str:
    """First line that says something of its own."""
    for line in text.splitlines():
        words = _REASON_PREFIX.sub("", line).strip()
        if words and not _WRAPPER.match(words) and not _LOCATION.search(line + "\n"):
            return words
    return text.strip().partition("\n")[0]


def _best_hint(text: str) -> str | None:
    hints = [" ".join(m.split()) for m in _HINT.findall(text)]
    for hint in hints:
        if not hint.startswith(_GENERIC_HINTS):
            return hint
    return hints[0] if hints else None


def clean_guard(reason: str) -> str:
    """Return a failed guard as one line without what differs from run to run."""
    line = _GUARD_ENTRY.sub("", reason.strip()).partition("\n")[0]
    line = re.split(r"\s{2,}# ", line, maxsplit=1)[0]
    line = _ADDRESS.sub("0x…", _OBJECT_ID.sub("…", line))
    return " ".join(line.split())


def is_backend_change(reason: str) -> bool:
    """Whether a guard failed only because the code was compiled with another backend before."""
    return "BACKEND_MATCH" in reason or _GUARD_ENTRY.sub("", reason.strip()) == ""


def parse_cudagraph_skip(message: str) -> tuple[str, StackFrame | None]:
    """Return the reason of a skipped CUDA graph, and the line that torch blames."""
    found = _FRAME.search(message)
    head = message.partition("\n")[0].partition(". Found from")[0].strip().rstrip(":. ")
    head = re.sub(r"^(?:skipping cudagraphs? due to )+", "", head)
    where = StackFrame(found["file"], int(found["line"]), found["name"] or "?") if found else None
    return _ADDRESS.sub("0x…", head), where
