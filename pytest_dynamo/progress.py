"""A line on the terminal while something takes long: compiling, timing, confirming."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Writes to a copy of the terminal's file descriptor, past pytest's capture.

    Args:
        descriptor: where to write, or None to stay silent.
        delay: seconds before the first line.
    """

    def __init__(self, descriptor: int | None, delay: float = 5.0) -> None:
        self._descriptor = descriptor
        self._delay = delay

    @classmethod
    def of_terminal(cls) -> Progress:
        """Take standard output if it is a terminal; call it while nothing is captured."""
        stream = sys.__stdout__
        if stream is None or not stream.isatty():
            return cls(None)
        return cls(os.dup(stream.fileno()))

    @contextmanager
    def __call__(self, nodeid: str, doing: str = "compiling") -> Iterator[None]:
        if self._descriptor is None:
            yield
            return
        done = threading.Event()
        name = nodeid.rpartition("::")[2]
        thread = threading.Thread(
            target=self._show, args=(f"{doing} {name}", done), name="pytest-dynamo-progress", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _show(self, text: str, done: threading.Event) -> None:
        begun = time.monotonic()
        if done.wait(self._delay):
            return
        while True:
            self._write(f"\r\x1b[K{text} {time.monotonic() - begun:.0f} s")
            if done.wait(1.0):
                self._write("\r\x1b[K")
                return

    def _write(self, text: str) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, text.encode(errors="replace"))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
