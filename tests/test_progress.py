"""The live line of long compilations: on a terminal only, gone when it is over."""

from __future__ import annotations

import os
import time

from pytest_dynamo.progress import Progress


def written(delay: float, seconds: float) -> str:
    reader, writer = os.pipe()
    progress = Progress(writer, delay=delay)
    with progress("tests/test_it.py::test_x[inductor-max-autotune]"):
        time.sleep(seconds)
    progress.close()
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read().decode()


def test_a_long_compilation_shows_a_line_that_goes_away():
    """After the delay the line names the test and the seconds, and it is erased at the end."""
    text = written(delay=0.05, seconds=0.3)
    assert text.startswith("\r\x1b[Kcompiling test_x[inductor-max-autotune] 0 s")
    assert text.endswith("\r\x1b[K")


def test_a_short_compilation_shows_nothing():
    """Before the delay nothing is written."""
    assert written(delay=5.0, seconds=0.0) == ""


def test_it_reaches_the_terminal_past_the_capture(pytester, monkeypatch):
    """In a real terminal the line appears although pytest captures the test's output."""
    import pty
    import sys

    pytester.makeconftest(
        """
        from pytest_dynamo import progress
        progress.Progress.__init__.__defaults__ = (0.05,)
        """
    )
    path = pytester.makepyfile(
        """
        import time
        import pytest, torch

        def slow(graph, example_inputs):
            time.sleep(0.5)
            return graph.forward

        @pytest.mark.compiled(backend=slow)
        def test_it(compiled):
            compiled(lambda x: x + 1)(torch.ones(1))
        """
    )
    monkeypatch.chdir(pytester.path)
    monkeypatch.setenv("TERM", "xterm")
    output = []

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 1024)
        output.append(data)
        return data

    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(path)]
    assert pty.spawn(command, read) == 0
    assert b"compiling test_it[slow] " in b"".join(output)
