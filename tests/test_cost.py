"""Unused means absent, and watching costs a compiled call nothing: counted, not timed."""

from __future__ import annotations

import cProfile
import importlib.metadata
import json
import os
import pstats
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_dynamo.events import BreakEvent
from pytest_dynamo.events import CompileEvent
from pytest_dynamo.observer import Observer
from pytest_dynamo.observer import quiet_trace


#: Runs pytest under a profiler and tells the number of calls.
RUNNER = """
import cProfile, json, pstats, sys
import pytest

profile = cProfile.Profile()
code = profile.runcall(pytest.main, sys.argv[2:])
with open(sys.argv[1], "w") as file:
    json.dump({"code": code, "calls": pstats.Stats(profile).total_calls, "modules": sorted(sys.modules)}, file)
"""


def counted_run(folder: Path, *options: str) -> dict[str, Any]:
    """Run pytest over a folder, all plugins but ours blocked, and count the function calls."""
    others = {entry.name for entry in importlib.metadata.entry_points(group="pytest11")} - {"dynamo"}
    blocked = [word for name in sorted(others) for word in ("-p", f"no:{name}")]
    env = {
        name: value
        for name, value in os.environ.items()
        if name == "PYTHONPATH" or not name.startswith(("PYTEST_", "PYTHON", "COV_"))  # it may be how we are found
    }
    # Byte code has its own place, so that no run but the first compiles anything.
    env |= {"PYTHONHASHSEED": "0", "PYTHONPYCACHEPREFIX": str(folder.parent / "cache")}
    out = folder.parent / "counted.json"
    words = [sys.executable, "-c", RUNNER, str(out), "-q", "-p", "no:cacheprovider", *blocked, *options]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["code"] == 0, done.stdout
    assert "1000 passed" in done.stdout
    return found


def test_a_run_that_does_not_use_the_plugin_makes_hardly_more_calls(tmp_path):
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text("".join(f"def test_{number}():\n    pass\n\n\n" for number in range(1000)))
    counted_run(folder)

    unused = counted_run(folder)
    blocked = counted_run(folder, "-p", "no:dynamo")

    assert "pytest_dynamo.plugin" in unused["modules"]
    assert "pytest_dynamo.plugin" not in blocked["modules"]
    assert "torch" not in unused["modules"]
    ours = {name for name in unused["modules"] if name.startswith("pytest_dynamo.")}
    assert not ours & {f"pytest_dynamo.{name}" for name in ("session", "collection", "observer", "_torch")}
    assert unused["calls"] <= 1.01 * blocked["calls"]


# -- taps ------------------------------------------------------------------------------------------


def calls_of(fn: Callable[..., Any], *args: Any) -> list[tuple[str, ...]]:
    """Every call, of Python and of C functions, that one call of ``fn`` makes."""
    seen: list[tuple[str, ...]] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            # Numbers and hashes in the names of generated code change with each compilation.
            seen.append((event, *(re.sub(r"\d[0-9a-f_]*", "#", word) for word in (code.co_filename, code.co_name))))
        elif event == "c_call":
            seen.append((event, str(arg.__module__), arg.__qualname__))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        fn(*args)
    finally:
        sys.setprofile(before)
    return seen


def compiled_step(backend: Any) -> tuple[Callable[..., Any], Any]:
    """A function with a graph break that has been compiled and called once, and its input."""
    import torch

    def step(x):
        x = torch.sin(x) + 1
        torch._dynamo.graph_break()
        return torch.cos(x) * 2

    torch._dynamo.reset()
    fast = torch.compile(step, backend=backend)
    x = torch.ones(4)
    fast(x)
    return fast, x


def warm(backend: Any) -> tuple[Callable[..., Any], Any]:
    """The same, called often enough that another call compiles nothing."""
    fast, x = compiled_step(backend)
    # Dynamo also looks, once, at the function that records the calls.
    calls_of(fast, x)
    return fast, x


@pytest.fixture
def observer():
    observer = Observer()
    yield observer
    observer.remove()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_taps_leave_no_frame_on_a_hot_call(observer, backend):
    warm(backend)  # fills inductor's cache: what comes from it is called in another way
    fast, x = warm(backend)
    before = calls_of(fast, x)

    observer.install()
    assert calls_of(fast, x) == before
    assert observer.take() == []

    # The same when the taps were there while the function was compiled.
    fast, x = warm(backend)
    assert {BreakEvent, CompileEvent} <= {type(event) for event in observer.take()}
    assert calls_of(fast, x) == before
    assert observer.take() == []

    # What was compared is what runs: torch's wrapper and the code generated for both parts.
    files = [file for event, file, _ in before if event == "call"]
    assert any(file.endswith("eval_frame.py") for file in files)
    assert sum(name == "step" or name.startswith("torch_dynamo_resume_in_step") for _, _, name in before) == 2


def test_one_more_frame_on_a_hot_call_is_seen():
    fast, x = warm("eager")
    before = calls_of(fast, x)

    def wrapped(*args):
        return fast(*args)

    after = calls_of(wrapped, x)

    assert after != before
    assert [call for call in after if call[2] != "wrapped"] == before


def test_a_counter_of_graph_calls_on_a_hot_call_is_seen():
    import torch

    def backend(graph, inputs):
        def counted(*args):
            return graph.forward(*args)

        return counted

    plain, x = warm("eager")
    before = calls_of(plain, x)
    counting, x = warm(backend)

    assert calls_of(counting, x) != before
    assert torch.equal(plain(x), counting(x))


def test_taps_make_hardly_more_calls_while_compiling(observer):
    def count() -> int:
        profile = cProfile.Profile()
        profile.runcall(compiled_step, "eager")
        return pstats.Stats(profile).total_calls

    with quiet_trace():
        compiled_step("eager")
        without = count()
        observer.install()
        compiled_step("eager")
        observer.take()
        watched = count()

    assert BreakEvent in {type(event) for event in observer.take()}
    # Next to nothing is compiled here, so this is about the largest share that the taps can have.
    assert without < watched <= 1.03 * without
