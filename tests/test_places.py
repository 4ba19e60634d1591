from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from pytest_dynamo.messages import StackFrame
from pytest_dynamo.places import Places
from pytest_dynamo.record import Place


STDLIB = sysconfig.get_path("stdlib")
OWN = str(Path(__file__).parent.parent / "pytest_dynamo" / "calls.py")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "tests").mkdir(parents=True)
    return root


def frame(file: str | Path, line: int = 1) -> StackFrame:
    return StackFrame(str(file), line, "f")


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("{root}/test_a.py", "project"),
        ("{root}/tests/deep/test_a.py", "project"),
        ("{root}/site.py", "project"),
        ("{root}/logging/__init__.py", "project"),
        ("{root}/../other/a.py", "library"),
        ("{root}-2/a.py", "library"),
        ("{root}/.venv/lib/python3.11/site-packages/lib/a.py", "library"),
        ("/usr/lib/python3/dist-packages/lib/a.py", "library"),
        ("/x/site-packages/torch/optim/optimizer.py", "library"),
        ("/x/site-packages/torch/nn/modules/module.py", "library"),
        ("/x/site-packages/torch/_dynamo/eval_frame.py", "compiler"),
        ("/x/site-packages/torch/_inductor/compile_fx.py", "compiler"),
        ("/x/site-packages/torch/_functorch/aot_autograd.py", "compiler"),
        ("/x/site-packages/torch/fx/graph.py", "compiler"),
        ("/x/src/torch/_dynamo/eval_frame.py", "compiler"),
        ("C:\\x\\site-packages\\torch\\_dynamo\\eval_frame.py", "compiler"),
        (f"{STDLIB}/logging/__init__.py", "stdlib"),
        (f"{STDLIB}/typing.py", "stdlib"),
        ("<frozen importlib._bootstrap>", "stdlib"),
        ("<string>", "library"),
        ("<eval_with_key>.1", "library"),
        (OWN, "compiler"),
    ],
)
def test_kind(root: Path, file: str, kind: str) -> None:
    """A file belongs to the project, a library, the compiler or the standard library."""
    places = Places(root)
    assert places.kind(file.format(root=root)) == kind
    assert places.kind(file.format(root=root)) == kind


def test_this_plugin_is_no_project_even_in_its_own_repository() -> None:
    """Lines of the plugin are never told as lines of the user's."""
    root = Path(OWN).parent.parent
    places = Places(root)
    assert places.kind(OWN) == "compiler"
    stack = [frame(root / "tests" / "test_places.py", 7), frame(OWN)]
    assert places.site(stack) == stack[0]
    assert places.kind(str(root / "tests" / "test_places.py")) == "project"


def test_a_project_may_have_folders_that_are_named_like_torchs(root: Path) -> None:
    """The compiler is where torch is installed; a folder of the user's by such a name is the user's."""
    assert Places(root).kind(str(root / "torch" / "fx" / "model.py")) == "project"


def test_links_are_followed(root: Path, tmp_path: Path) -> None:
    """A project that is reached through a link is the same project."""
    link = tmp_path / "link"
    link.symlink_to(root, target_is_directory=True)
    for places, base in ((Places(link), root), (Places(root), link)):
        assert places.kind(str(base / "a.py")) == "project"
        assert places.relative(str(base / "a.py")) == "a.py"


def test_relative(root: Path, tmp_path: Path) -> None:
    """Paths below the root are relative, with slashes; others stay as they are."""
    places = Places(root)
    assert places.relative(str(root / "tests" / "test_a.py")) == "tests/test_a.py"
    assert places.relative(str(root / "tests" / ".." / "test_a.py")) == "test_a.py"
    assert places.relative(str(tmp_path / "other.py")) == str(tmp_path / "other.py")
    assert places.relative("<string>") == "<string>"


def test_absolute_undoes_relative(root: Path) -> None:
    """A path of a report leads back to the file."""
    places = Places(root)
    file = os.path.realpath(root / "tests" / "test_a.py")
    assert places.absolute(places.relative(file)) == file
    assert places.absolute("/x/a.py") == "/x/a.py"


def test_site_is_the_innermost_frame_of_the_users_or_a_library(root: Path) -> None:
    """Frames of the standard library and of the compiler inside of it are passed over."""
    places = Places(root)
    mine, lib = frame(root / "a.py", 3), frame("/x/site-packages/lib/a.py", 4)
    std, dynamo = frame(f"{STDLIB}/logging/__init__.py"), frame("/x/site-packages/torch/_dynamo/a.py")
    assert places.site([mine, std, dynamo]) is mine
    assert places.site([mine, lib, std]) is lib
    assert places.site([lib, mine]) is mine
    assert places.site([std, dynamo]) is None
    assert places.site([]) is None


def test_called_from_is_the_innermost_line_of_the_project(root: Path) -> None:
    """The compiled frames come first, then the frames that ran when Dynamo began to compile."""
    places = Places(root)
    outer, inner, lib = frame(root / "a.py", 3), frame(root / "b.py", 7), frame("/x/site-packages/lib/a.py", 4)
    assert places.called_from([outer, inner, lib], []) == Place("b.py", 7)
    assert places.called_from([lib], [outer, inner, lib]) == Place("b.py", 7)
    assert places.called_from([outer, lib], [inner]) == Place("a.py", 3)
    assert places.called_from([lib], [lib]) is None
