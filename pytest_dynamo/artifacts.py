"""Writes for a call that differs a folder with a script that shows it without pytest.

The script holds the graph that Dynamo captured, as code, and compares eager with compiled on inputs
that lie beside it. It is run once: what it prints, the generated code and the trace are kept too.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pprint
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_dynamo import _torch
from pytest_dynamo.judge import Judge
from pytest_dynamo.judge import failed
from pytest_dynamo.settings import Checks
from pytest_dynamo.settings import Tolerances
from pytest_dynamo.start import Arguments
from pytest_dynamo.start import Start
from pytest_dynamo.variants import Variant
from pytest_dynamo.variants import backend_name


#: Seconds that the script may take when it is run once.
RUN_SECONDS = 300


class NoReproError(Exception):
    """Why no script can be written."""


@dataclass
class Captured:
    """A graph and the inputs that it was called with first."""

    graph: torch.fx.GraphModule
    inputs: list[Any]


def folder_of(root: str, nodeid: str) -> Path:
    """Folder of a test: its nodeid without what file systems dislike; unlike nodeids get unlike folders."""
    name = re.sub(r"[^\w.=+-]+", "_", nodeid).strip("_")
    if len(name) > 120 or name != nodeid:
        name = f"{name[:120]}_{hashlib.sha256(nodeid.encode()).hexdigest()[:6]}"
    return Path(root, name)


def write(
    folder: Path, judge: Judge, variant: Variant, arguments: Arguments, title: str, tolerances: Tolerances
) -> str:
    """Write the script for a call that failed and run it; return its path and what came of it.

    Args:
        folder: made if it is not there; files of a former run are replaced.
        judge: knows the call.
        variant: the way of compiling that failed.
        arguments: those of the call, at its start.
        title: the first line of the message that failed.
        tolerances: those of the test.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "repro.py"
    try:
        graphs = capture(judge.start.fn, arguments, variant)
        guilty, number = first_that_differs(graphs, variant, tolerances)
        text = script_text(guilty, number, len(graphs), variant, title, tolerances)
    except NoReproError as error:
        return f"none: {error}"
    _write_whole(folder / "inputs.pt", lambda path: torch.save(_saved(guilty.inputs), path))
    _write_whole(script, lambda path: path.write_text(text, encoding="utf-8"))
    return f"{script} ({run_once(folder)})"


def capture(fn: Callable[..., Any], arguments: Arguments, variant: Variant) -> list[Captured]:
    """Graphs that Dynamo captures in a call, in the order in which they run."""
    found: list[Captured] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        captured: list[Captured] = []

        def run(*args: Any) -> Any:
            if not captured:
                start = Start(graph, (args, {}))
                captured.append(Captured(graph, list(start.clone((args, {}))[0])))
                found.append(captured[0])
            return graph(*args)

        return run

    _torch.reset()
    args, kwargs = arguments
    torch.compile(fn, backend=keep, dynamic=variant.dynamic, fullgraph=variant.fullgraph)(*args, **kwargs)
    if not found:
        raise NoReproError("no graph was captured")
    return found


def first_that_differs(graphs: list[Captured], variant: Variant, tolerances: Tolerances) -> tuple[Captured, int]:
    """The first graph that by itself gives something else when it is compiled; raises NoReproError."""
    for number, captured in enumerate(graphs, 1):
        arguments: Arguments = (tuple(captured.inputs), {})
        start = Start(captured.graph, arguments)
        eager = start.run_eager(differentiate=True)
        if eager.error is not None:
            continue
        judge = Judge(start, eager, tolerances, Checks(), 1, own_random=variant.backend == "inductor")
        _torch.reset()
        compiled = torch.compile(captured.graph, **variant.kwargs)
        for _ in range(3 if variant.uses_cudagraphs and torch.cuda.is_available() else 1):
            start.rewind()
            look = judge.look(compiled, start.clone(arguments), differentiate=eager.gradients is not None)
            differs = failed(judge.settle(look.checks, look.pairs))
            start.rewind()
            if differs or look.outcome.error is not None:
                return captured, number
    raise NoReproError("no captured graph differs by itself: the difference lies in what Dynamo does around the graphs")


# -- the script -----------------------------------------------------------------------------------

_SCRIPT = '''"""{title}

Graph {number} of {count} that Dynamo captured in the call, with its inputs. Run it with Python: it compares
eager with compiled and ends with status 1 if they differ. Written by pytest-dynamo {version} on
torch {torch}, Python {python}.
"""

from math import inf, nan
from pathlib import Path
import sys
import traceback

import torch
from torch import device
{imports}
NoneType = type(None)
COMPILE = {compile}
TOLERANCES = {tolerances}  # empty: those of torch.testing.assert_close for the dtype

{config}
{graph}

def build(kind):
    """Make a module of a class whose inner classes are its submodules."""
    inner = {{name: value for name, value in vars(kind).items() if isinstance(value, type)}}
    module = kind()
    for name, value in inner.items():
        delattr(kind, name)
        module.add_module(name, build(value))
    return module


def load():
    """Inputs as the call found them, on the devices that they were on."""
    saved = torch.load(Path(__file__).with_name("inputs.pt"), weights_only=True)
    torch.set_rng_state(saved["random"])
    values = [v.to(d) if isinstance(v, torch.Tensor) else v for v, d in zip(saved["inputs"], saved["devices"])]
    return [v.requires_grad_() if wants else v for v, wants in zip(values, saved["requires_grad"])]


def results(function):
    """What a function gives for the inputs: outputs, inputs as it left them, and gradients."""
    inputs = load()
    leaves = [v for v in inputs if isinstance(v, torch.Tensor) and v.requires_grad]
    given = [v.clone() if any(v is leaf for leaf in leaves) else v for v in inputs]
    outputs = [v for v in function(*given) if isinstance(v, torch.Tensor)]
    found = {{f"output {{n}}": v.detach().clone() for n, v in enumerate(outputs)}}
    left = {{f"input {{n}} after the call": v for n, v in enumerate(given) if isinstance(v, torch.Tensor)}}
    found |= {{name: v.detach().clone() for name, v in left.items()}}
    wanted = [v for v in outputs if v.requires_grad]
    if wanted and leaves:
        generator = torch.Generator().manual_seed(0)
        cotangents = [torch.randn(v.shape, generator=generator).to(v.device, v.dtype) for v in wanted]
        grads = torch.autograd.grad(wanted, leaves, cotangents, allow_unused=True)
        found |= {{f"gradient {{n}}": g for n, g in enumerate(grads) if g is not None}}
    return found


def main():
    graph = build(GraphModule)
    eager = results(graph)
    compiled = torch.compile(graph, **COMPILE)
    status = 0
    for run in range({runs}):
        try:
            got = results(compiled)
        except Exception:
            status = 1
            print(f"compiled raised in run {{run + 1}}, eager did not:", traceback.format_exc(), sep="\\n")
            break
        for name, expected in eager.items():
            try:
                torch.testing.assert_close(got.get(name), expected, equal_nan=True, **TOLERANCES)
            except AssertionError as error:
                status = 1
                print(f"{{name}} differs in run {{run + 1}}:", str(error).strip(), sep="\\n")
    print("eager and compiled differ" if status else "eager and compiled agree")
    return status


if __name__ == "__main__":
    sys.exit(main())
'''


def script_text(
    captured: Captured, number: int, count: int, variant: Variant, title: str, tolerances: Tolerances
) -> str:
    """Source of the script for one graph; raises NoReproError if it can't be told in code."""
    from pytest_dynamo import __version__

    graph = captured.graph
    for module in graph.modules():
        if not isinstance(module, torch.fx.GraphModule):
            raise NoReproError(f"the graph holds a {type(module).__name__}, which has no source of its own")
    if any(True for _ in (*graph.parameters(), *graph.buffers())):
        raise NoReproError("the graph holds tensors of its own")
    given = {name: value for name, value in (("rtol", tolerances.rtol), ("atol", tolerances.atol)) if value is not None}
    if given:
        given = {"rtol": 0.0, "atol": 0.0, **given}
    kwargs, loading = _compile_keywords(variant)
    return _SCRIPT.format(
        title=title.replace("\\", "\\\\").replace('"""', "'''"),
        number=number,
        count=count,
        version=__version__,
        torch=torch.__version__,
        python=sys.version.split()[0],
        imports=_imports(graph) + loading,
        compile=kwargs,
        tolerances=given,
        config="".join(f"{line}\n" for line in _torch.changed_config()),
        graph=graph.print_readable(print_output=False).rstrip() + "\n",
        runs=3 if variant.uses_cudagraphs else 1,
    )


def _compile_keywords(variant: Variant) -> tuple[str, str]:
    """Keywords of ``torch.compile`` as code, and what has to be imported for them."""
    kwargs = variant.kwargs
    backend = kwargs["backend"]
    if isinstance(backend, str):
        return pprint.pformat(kwargs), ""
    module = sys.modules.get(getattr(backend, "__module__", "") or "")
    name = getattr(backend, "__qualname__", "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or getattr(module, name, None) is not backend:
        raise NoReproError(f"backend {backend_name(backend)} can't be imported by name")
    loading = (
        "import importlib.util\n"
        f"_spec = importlib.util.spec_from_file_location({module.__name__!r}, {file!r})\n"
        "_module = importlib.util.module_from_spec(_spec)\n"
        f"sys.modules[{module.__name__!r}] = _module\n"
        "_spec.loader.exec_module(_module)\n"
    )
    rest = {key: value for key, value in kwargs.items() if key != "backend"}
    return f'{{"backend": _module.{name}, **{rest!r}}}', loading


def _imports(graph: torch.fx.GraphModule) -> str:
    """Import lines for what the code of a graph and of those within it names."""
    known = {"inf", "nan", "torch", "device", "NoneType", "fx_pytree", "pytree"}
    lines = []
    for module in graph.modules():
        assert isinstance(module, torch.fx.GraphModule)
        for name, value in module.graph.python_code("self").globals.items():
            if name in known:
                continue
            home, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
            if isinstance(value, type(sys)):
                lines.append(f"import {value.__name__} as {name}\n")
            elif home and own and getattr(importlib.import_module(home), own, None) is value:
                lines.append(f"from {home} import {own} as {name}\n")
            else:
                raise NoReproError(f"the graph uses {name}, which can't be imported by name")
    return "".join(sorted(set(lines)))


def _saved(values: list[Any]) -> dict[str, Any]:
    """Inputs as primitives and tensors, which can be loaded with ``weights_only=True``."""
    for value in values:
        if not isinstance(value, (torch.Tensor, int, float, bool, str, type(None))):
            raise NoReproError(f"an input of the graph is a {type(value).__name__}")
    plain = [v.detach().cpu() if isinstance(v, torch.Tensor) else v for v in values]
    return {
        "inputs": [v.as_subclass(torch.Tensor) if isinstance(v, torch.Tensor) else v for v in plain],
        "devices": [str(v.device) if isinstance(v, torch.Tensor) else None for v in values],
        "requires_grad": [isinstance(v, torch.Tensor) and v.requires_grad for v in values],
        "random": torch.get_rng_state(),
    }


# -- files ----------------------------------------------------------------------------------------


def _write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write to a temporary file and rename it, so that no one finds half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    os.close(handle)
    try:
        write(Path(name))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def run_once(folder: Path) -> str:
    """Run the script in a process of its own, keep its output, the generated code and the trace; say what it showed."""
    trace = folder / "trace"
    trace.mkdir(exist_ok=True)
    for old in trace.iterdir():
        old.unlink()
    environment = {
        **{
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PYTEST_", "TORCH_LOGS", "TORCH_TRACE"))
        },
        "TORCH_LOGS": "output_code",
        "TORCH_LOGS_OUT": str(folder / "output_code.log"),
        "TORCH_TRACE": str(trace),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }
    command = [sys.executable, str((folder / "repro.py").resolve())]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=RUN_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"not finished after {RUN_SECONDS} s"
    # Standard error has the generated code too; it tells something new only where the script broke.
    text = done.stdout + (done.stderr if done.returncode not in (0, 1) else "")
    _write_whole(folder / "output.txt", lambda path: path.write_text(text, encoding="utf-8"))
    if done.returncode == 1 and "eager and compiled differ" in done.stdout:
        return "run once: it shows the difference"
    if done.returncode == 0:
        return "run once: by itself the graph agrees, so something around it matters"
    return f"run once: it ended with status {done.returncode}, see output.txt"
