"""Whose code a file is: the user's project, a library, torch, the compiler, or the standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence

from pytest_dynamo.messages import StackFrame
from pytest_dynamo.record import Place


_STDLIB = tuple(
    {
        os.path.join(os.path.realpath(path), "")
        for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
        if path
    }
)
_COMPILER = tuple(f"/torch/{part}/" for part in ("_dynamo", "_inductor", "_functorch", "fx"))
_OWN = os.path.join(os.path.dirname(os.path.realpath(__file__)), "")


def _is_torch(parent: str) -> bool:
    """Whether PyTorch, and not a folder of its name, lies in ``parent``."""
    return os.path.exists(f"{parent}/torch/_dynamo/convert_frame.py")


#: Functions and modules of torch itself run in wrappers of the compiler's, which are no one's code.
_WRAPPERS = "/torch/_dynamo/external_utils.py"


class Places:
    """Judges files against the root directory of the run."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.join(os.path.realpath(root), "")
        self._kinds: dict[str, str] = {}

    def kind(self, file: str) -> str:
        """Return ``stdlib``, ``compiler``, ``library`` or ``project``; torch counts as a library."""
        kind = self._kinds.get(file)
        if kind is None:
            kind = self._kinds[file] = self._find(file)
        return kind

    def _find(self, file: str) -> str:
        path = file.replace("\\", "/")
        if path.startswith("<"):
            return "stdlib" if path.startswith("<frozen") else "library"
        installed = "/site-packages/" in path or "/dist-packages/" in path
        real = os.path.realpath(file)
        if real.startswith(_OWN):
            return "compiler"  # calls of this plugin are no more the user's than those of torch.compile
        for part in _COMPILER:
            # A project may have a folder of that name; torch itself may lie below the root, as source.
            own = not installed and real.startswith(self.root) and not _is_torch(path.partition(part)[0])
            if part in path and not own:
                return "compiler"
        if installed:
            return "library"
        if real.startswith(_STDLIB):
            return "stdlib"
        if real.startswith(self.root):
            return "project"
        return "library"

    def relative(self, file: str) -> str:
        """Path as reports show it: relative to the root where it lies below it."""
        real = os.path.realpath(file) if not file.startswith("<") else file
        return os.path.relpath(real, self.root).replace(os.sep, "/") if real.startswith(self.root) else file

    def absolute(self, file: str) -> str:
        return file if os.path.isabs(file) else os.path.join(self.root, file)

    def site(self, stack: Sequence[StackFrame]) -> StackFrame | None:
        """Innermost frame that is neither standard library nor the compiler itself."""
        for frame in reversed(stack):
            if self.kind(frame.file) not in ("stdlib", "compiler"):
                return frame
        return None

    def is_wrapper(self, file: str) -> bool:
        """Whether a frame is only the compiler's wrapper around something that isn't Python of the user's."""
        return self.kind(file) == "compiler" and file.replace("\\", "/").endswith(_WRAPPERS)

    def called_from(self, stack: Sequence[StackFrame], callers: Sequence[StackFrame]) -> Place | None:
        """Innermost line of the project that led to a site outside it."""
        for frame in (*reversed(stack), *reversed(callers)):
            if self.kind(frame.file) == "project":
                return Place(self.relative(frame.file), frame.line)
        return None
