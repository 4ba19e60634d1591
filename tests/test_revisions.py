"""Two revisions of a repository, timed alternately in worktrees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from stored_runs import measured

from pytest_dynamo import cli
from pytest_dynamo import revisions
from pytest_dynamo.measurement import Run


#: Times are made up from a number in the module that is benchmarked, so that they say which revision ran.
FILES = {
    "mod.py": "MILLISECONDS = 1.0\n\ndef double(x):\n    return x * 2\n",
    "conftest.py": """
from pytest_dynamo import timing

import mod

def made_up(*args, **kwargs):
    seconds = mod.MILLISECONDS / 1000
    side = timing.Samples((seconds,) * 10, None, 1)
    fixed = {name: timing.Samples((1e-4,) * 10, None, 1) for name in ("matmul", "copy")}
    return timing.Timing(timing.Samples((2e-3,) * 10, None, 1), side, fixed, 2.0, 1.9, 2.1)

timing.measure = made_up
""",
    "test_mod.py": """
import mod
import pytest
import torch

@pytest.mark.compiled(backend="eager")
def test_double(compiled_benchmark):
    compiled_benchmark(mod.double, torch.ones(3))

def test_no_benchmark():
    raise AssertionError("benchmarks only")
""",
}


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", *words],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(revisions, "PROCESSES", 1)
    # That of the working tree must not be what is timed.
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def test_a_slower_revision(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "mod.py").write_text(FILES["mod.py"].replace("1.0", "1.5"))
    git(repository, "commit", "-qam", "slower")
    (repository / "mod.py").write_text("not committed, and no Python either")
    assert cli.main(["compare", "HEAD~1..HEAD"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[2] == "test_mod.py::test_double[eager]: slower"
    assert lines[3].split() == ["time", "1.000", "ms", "->", "1.500", "ms", "+50.0", "%"]
    assert "CPU work: time is 50.0 % above the run before (1.000 ms), 10.0 % allowed: slower" in out
    assert lines[-1] == "1 test compared: 1 slower"
    assert err.splitlines() == ["timing HEAD~1, process 1 of 1", "timing HEAD, process 1 of 1"]
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_an_absolute_path_is_that_of_each_revision(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "mod.py").write_text(FILES["mod.py"].replace("1.0", "12.0"))
    git(repository, "commit", "-qam", "slower")
    assert cli.main(["compare", "HEAD~1..HEAD", "--", f"{repository / 'test_mod.py'}::test_double"]) == 1
    assert "1.000 ms -> 12.00 ms" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("word", "moved"),
    [
        ("{top}/tests", "{root}/tests"),
        ("{top}", "{root}"),
        ("{top}/a/../tests/test_a.py::Test::test[a=b]", "{root}/tests/test_a.py::Test::test[a=b]"),
        ("{link}/tests", "{root}/tests"),
        ("--rootdir={top}/tests", "--rootdir={root}/tests"),
        ("--deselect={top}/tests/test_a.py::test", "--deselect={root}/tests/test_a.py::test"),
        ("{top}-other/tests", "{top}-other/tests"),
        ("tests/test_a.py::test", "tests/test_a.py::test"),
        ("-x", "-x"),
        ("--tb=short", "--tb=short"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_words_for_pytest(tmp_path: Path, word: str, moved: str) -> None:
    top = tmp_path.resolve() / "top"
    (top / "tests").mkdir(parents=True)
    names = {"top": top, "root": tmp_path / "root", "link": tmp_path / "link"}
    names["link"].symlink_to(top)
    assert revisions._moved(word.format(**names), top, names["root"]) == moved.format(**names)


def test_the_working_tree_is_not_timed_instead(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever way its path gets to pytest."""
    monkeypatch.setenv("PYTEST_ADDOPTS", str(repository / "test_mod.py"))
    assert cli.main(["compare", "HEAD..HEAD"]) == 2
    assert (
        "pytest-dynamo: base can't be timed: conftest.py and 2 more came from the working tree, not from the revision"
    ) in capsys.readouterr().err
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_folders_for_imports_are_those_of_each_revision(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one that an editable install adds."""
    folder = repository / "python"
    folder.mkdir()
    git(repository, "mv", "mod.py", "python/mod.py")
    git(repository, "commit", "-qm", "moved")
    (folder / "mod.py").write_text(FILES["mod.py"].replace("1.0", "1.5"))
    git(repository, "commit", "-qam", "slower")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)
    assert cli.main(["compare", "HEAD~1..HEAD"]) == 1
    assert "1.000 ms -> 1.500 ms" in " ".join(capsys.readouterr().out.split())


def test_what_is_no_revision(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "HEAD..nowhere"]) == 2
    assert capsys.readouterr().err == f"pytest-dynamo: nowhere is no revision of {repository.resolve()}\n"


@pytest.mark.parametrize("names", ["HEAD~1..HEAD", "HEAD..HEAD~1"])
def test_a_folder_that_one_revision_lacks(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], names: str
) -> None:
    folder = repository / "new" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_new.py").write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "new")
    monkeypatch.chdir(folder)
    assert cli.main(["compare", names]) == 2
    assert capsys.readouterr().err == (
        "pytest-dynamo: HEAD~1 has no folder new/tests: start in one that both revisions have\n"
    )
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert cli.main(["compare", "a..b"]) == 2
    assert "not a git repository" in capsys.readouterr().err


def test_a_revision_that_can_not_be_timed(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "HEAD..HEAD", "--", "--no-such-option"]) == 2
    assert "base can't be timed: exit status 4" in capsys.readouterr().err
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_worktrees_are_gone_after_an_interruption(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> list[Run]:
        assert len(git(repository, "worktree", "list").splitlines()) == 3
        raise KeyboardInterrupt

    monkeypatch.setattr(revisions, "_timed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        revisions.main("HEAD", "HEAD", [])
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_tests_of_one_revision_only(capsys: pytest.CaptureFixture[str]) -> None:
    base, head = (Run(name, "r", "", {}, measured(), "not slower") for name in ("old", "new"))
    assert revisions.report([[base]], [[head]], "title") == 2
    assert capsys.readouterr().out.splitlines() == [
        *("title", "", "old: only in base", "", "new: only in head", "", "nothing was timed in both revisions"),
    ]


def test_the_order_of_processes_alternates(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def timed(scratch: Path, name: str, *others: object) -> list[Run]:
        order.append(name)
        return [Run("t", "r", "", {}, measured(), "not slower")]

    monkeypatch.setattr(revisions, "_timed", timed)
    monkeypatch.setattr(revisions, "PROCESSES", 3)
    assert revisions.main("HEAD", "HEAD", []) == 0
    assert order == ["base", "head", "head", "base", "base", "head"]


def test_the_module_runs_as_the_command(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_dynamo", "compare", "x..y"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "x is no revision of" in done.stderr
