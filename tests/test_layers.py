"""Where what belongs, as data: which module may import what."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parent.parent / "pytest_dynamo"


@dataclass(frozen=True)
class Layer:
    """Modules of one layer; ``knows``: the layers that they may import from, besides their own."""

    name: str
    modules: frozenset[str]
    knows: frozenset[str] = frozenset()


LAYERS = [
    Layer(
        "words",
        frozenset(
            {
                *("settings", "variants", "record", "verdict", "report", "errors"),
                *("events", "messages", "places", "asserts", "summary", "environment"),
                *("measurement", "detection", "history"),
            }
        ),
    ),
    Layer("writers", frozenset({"terminal", "jsonreport", "chart", "speedtable", "rows"}), frozenset({"words"})),
    Layer(
        "engine",
        frozenset(
            {
                *("_torch", "observer", "inputs", "state", "parity", "isolation", "start", "reference"),
                *("gradients", "aliasing", "excuses", "judge", "kept"),
                *("timing", "clocks", "profiling", "machine"),
            }
        ),
        frozenset({"words"}),
    ),
    Layer(
        "pytest layer",
        frozenset(
            {
                *("options", "collection", "fixtures", "watch", "session", "plugin"),
                *("testrun", "calls", "stages", "artifacts", "compiled_function", "progress"),
                *("cli", "__main__", "benchmark", "baseline", "replay", "confirm", "revisions"),
            }
        ),
        frozenset({"words", "writers", "engine"}),
    ),
]
#: Modules that may import torch when they are imported, and those that may import pytest.
TORCH = frozenset(
    {"inputs", "state", "parity", "start", "reference", "calls", "gradients", "aliasing", "excuses", "judge", "kept"}
    | {"stages", "artifacts", "clocks", "profiling", "benchmark", "baseline"}
)
PYTEST = frozenset(
    {"options", "collection", "fixtures", "watch", "session", "plugin", "benchmark", "baseline", "replay", "confirm"}
)
#: Modules that are imported by every run of pytest: they import nothing heavy of ours either.
ALWAYS = frozenset({"plugin", "options", "fixtures"})

MODULES = {module: layer for layer in LAYERS for module in layer.modules}
LAYER_OF = {layer.name: layer for layer in LAYERS}
PRIVATE = re.compile(r"\btorch\._[a-z]|\btorch\.utils\._")


def files() -> list[str]:
    return sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def imports(module: str) -> Iterator[str]:
    """Full names of all that a module imports, wherever in it."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {module}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def of_ours(module: str) -> set[str]:
    parts = (name.split(".") for name in imports(module))
    return {part[1] for part in parts if part[0] == "pytest_dynamo" and len(part) > 1}


def test_every_module_has_its_layer() -> None:
    """A module that is in no row of the table has no place yet."""
    # A new module: write into the table above where it belongs.
    assert set(files()) - set(MODULES) == set()
    assert set(MODULES) - set(files()) == set()
    assert sum(len(layer.modules) for layer in LAYERS) == len(MODULES)


@pytest.mark.parametrize("module", files())
def test_imported_alone(module: str) -> None:
    """Imported by itself with warnings as errors, a module brings neither torch nor pytest where it must not."""
    code = (
        f"import sys, pytest_dynamo.{module}\n"
        "print(*sorted(n for n in ('torch', 'pytest', '_pytest', 'numpy') if n in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    loaded = set(done.stdout.split())
    if module not in TORCH:
        assert not loaded & {"torch", "numpy"}
    if module not in PYTEST:
        assert not loaded & {"pytest", "_pytest"}
    assert ("torch" in loaded) is (module in TORCH)
    assert ("pytest" in loaded) is (module in PYTEST)


@pytest.mark.parametrize("module", files())
def test_layers_know_only_those_below(module: str) -> None:
    """Words know nobody, writers and engine know words and not each other, nobody imports the plugin."""
    layer = MODULES[module]
    for other in of_ours(module):
        if other in MODULES:
            assert MODULES[other].name in {layer.name, *layer.knows}, f"{module} imports {other}"
        assert other != "plugin", f"{module} imports plugin"


@pytest.mark.parametrize("module", sorted(LAYER_OF["words"].modules | LAYER_OF["writers"].modules))
def test_words_and_writers_use_the_standard_library_only(module: str) -> None:
    """Nothing but Python itself is needed to read, judge and write a report."""
    tops = {name.partition(".")[0] for name in imports(module)}
    assert tops - set(sys.stdlib_module_names) - {"pytest_dynamo", "__future__"} == set()


def test_what_every_run_imports_is_little() -> None:
    """A run that doesn't use the plugin imports three modules of it and the package."""
    code = "import sys, pytest_dynamo.plugin\nprint(*(n for n in sys.modules if n.startswith('pytest_dynamo')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    loaded = {name.partition(".")[2] for name in done.stdout.split()}
    assert loaded - {"", "errors"} == ALWAYS


# -- private names of torch -----------------------------------------------------------------------


def private_names(source: str) -> list[str]:
    """Uses of private names of torch in code; comments and docstrings may tell of them."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if PRIVATE.search(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if PRIVATE.search(name)]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if PRIVATE.match(text):
                found.append(text)
    return found


@pytest.mark.parametrize("module", [*(m for m in files() if m != "_torch"), "__init__"])
def test_private_names_of_torch_are_in_one_file(module: str) -> None:
    """Only ``_torch`` uses names that torch does not promise."""
    assert private_names((PACKAGE / f"{module}.py").read_text(encoding="utf-8")) == []


def test_private_names_are_recognised() -> None:
    """The check above finds imports and attributes, and passes over public names, texts and comments."""
    assert private_names("import torch._dynamo") == ["torch._dynamo"]
    assert private_names("from torch._inductor import config") == ["torch._inductor.config"]
    assert private_names("from torch import _dynamo") == ["torch._dynamo"]
    assert private_names("from torch.utils import _pytree") == ["torch.utils._pytree"]
    assert private_names("from torch.utils._pytree import tree_map") == ["torch.utils._pytree.tree_map"]
    assert set(private_names("torch._dynamo.reset()")) == {"torch._dynamo.reset", "torch._dynamo"}
    assert (
        private_names("import torch\ntorch.compile(f)\nfrom torch.utils import data\n'torch._dynamo'  # torch._x") == []
    )
    assert private_names((PACKAGE / "_torch.py").read_text(encoding="utf-8")) != []
