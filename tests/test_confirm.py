"""Timing a test again in fresh processes: their command, and what they answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stored_runs import measured

from pytest_dynamo import confirm
from pytest_dynamo.confirm import NotConfirmedError
from pytest_dynamo.confirm import kept
from pytest_dynamo.measurement import Measurement
from pytest_dynamo.measurement import Side
from pytest_dynamo.measurement import Times
from pytest_dynamo.measurement import middle


# -- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("", ""),
        ("-x -vv -W error --tb=short", "-x -vv -W error --tb=short"),
        ("tests/test_a.py -x tests", "-x"),
        ("-k test_a.py tests/test_a.py test_a.py", "-k test_a.py"),
        ("-m tests tests", "-m tests"),
        ("-p tests -n 4 tests", "-p tests"),
        ("-n 4 -x", "-x"),
        ("-n4 -x", "-x"),
        ("-nauto -x", "-x"),
        ("-n=4 --numprocesses 4 --numprocesses=auto --dist loadfile --tx=popen --maxprocesses 3 -x", "-x"),
        ("-p no:cacheprovider", "-p no:cacheprovider"),
        ("--benchmark-autosave --benchmark-save name --benchmark-save=name -x", "-x"),
        ("--benchmark-json file --benchmark-storage=file://x --benchmark-histogram=y -x", "-x"),
        ("--benchmark-compare --benchmark-compare=0001 --benchmark-compare-fail=mean:5% -x", "-x"),
        ("--benchmark-min-rounds=3 --benchmark-disable-gc", "--benchmark-min-rounds=3 --benchmark-disable-gc"),
        ("--dynamo-json x --dynamo-confirm 3 --dynamo-accept --dynamo-modes a,b", "--dynamo-modes a,b"),
        ("--junitxml=x --junit-xml y --report-log z --basetemp b -x", "-x"),
        ("--lf --last-failed --ff --nf --sw --stepwise --pdb --trace -x", "-x"),
        ("-novel", "-novel"),
    ],
)
def test_kept_words(words: str, left: str) -> None:
    positional = ["tests/test_a.py", "tests", "test_a.py"]
    assert kept(words.split(), positional) == left.split()


def test_paths_as_words() -> None:
    assert kept([Path("tests"), "-x"], ["tests"]) == ["-x"]


@pytest.mark.parametrize(
    ("words", "positional", "left"),
    [
        ("--rootdir . .", ".", "--rootdir ."),
        (". --rootdir .", ".", "--rootdir ."),
        ("-x . --rootdir .", ".", "-x --rootdir ."),
        (". -x --rootdir . .", ". .", "-x --rootdir ."),
        ("--rootdir .", "", "--rootdir ."),
        ("--rootdir=. .", ".", "--rootdir=."),
        ("--unknown tests tests", "tests", "--unknown tests"),
        ("tests --unknown tests -x", "tests", "--unknown tests -x"),
        ("-x tests --unknown tests", "tests", "-x --unknown tests"),
        ("--unknown-flag tests", "tests", "--unknown-flag"),
        ("--ignore tests/old tests --deselect tests/old", "tests", "--ignore tests/old --deselect tests/old"),
        ("--dynamo-json tests tests", "tests", ""),
        ("-x tests --junitxml tests", "tests", "-x"),
        ("-q a b a", "a b a", "-q"),
    ],
)
def test_a_value_that_is_equal_to_a_positional_word(words: str, positional: str, left: str) -> None:
    """Each positional word goes once: the option's value stays."""
    assert kept(words.split(), positional.split()) == left.split()


def configuration(*words: str, plugins: tuple[str, ...] = ("xdist", "cacheprovider"), ini: bool = True) -> Any:
    return SimpleNamespace(
        invocation_params=SimpleNamespace(args=words, dir=Path("/project/sub")),
        option=SimpleNamespace(file_or_dir=[word for word in words if not word.startswith("-")]),
        rootpath=Path("/project"),
        inipath=Path("/project/pytest.ini") if ini else None,
        pluginmanager=SimpleNamespace(hasplugin=plugins.__contains__),
    )


def test_the_command() -> None:
    """One test by its whole path, in this interpreter, with all that it writes in a folder of its own."""
    config = configuration("test_a.py", "-x")
    found = confirm.command(config, "sub/test_a.py::Test::test[a b]", Path("/new"))
    assert found == [
        *(sys.executable, "-m", "pytest", "-x", "--rootdir=/project", "-c", "/project/pytest.ini", "-n0"),
        *("-o", "cache_dir=/new/cache", "--dynamo-confirm=0", "--dynamo-json=/new/report.json"),
        *(
            "--benchmark-storage=file:///new/runs",
            "--basetemp=/new/tmp",
            "-q",
            "/project/sub/test_a.py::Test::test[a b]",
        ),
    ]


def test_a_folder_that_is_an_option_and_selected() -> None:
    config = configuration("--rootdir", ".", ".")
    config.option.file_or_dir = ["."]
    found = confirm.command(config, "test_a.py::test", Path("/new"))
    assert found[3:7] == ["--rootdir", ".", "--rootdir=/project", "-c"]


def test_the_command_without_other_plugins() -> None:
    """Options of plugins that are not there would be refused."""
    found = confirm.command(configuration(plugins=(), ini=False), "test_a.py::test", Path("/new"))
    assert not {"-n0", "-o", "-c"} & set(found)


# -- answers --------------------------------------------------------------------------------------

NODEID = "test_a.py::test[inductor]"


def answer(monkeypatch: pytest.MonkeyPatch, text: str | None, *output: str, code: int = 0) -> None:
    """Let every process write this report and end."""

    def run(words: list[str], **options: Any) -> Any:
        assert options["cwd"] == Path("/project/sub")
        (report,) = (word.partition("=")[2] for word in words if word.startswith("--dynamo-json="))
        if text is not None:
            Path(report).write_text(text)
        return subprocess.CompletedProcess(words, code, *output)

    monkeypatch.setattr(subprocess, "run", run)


def report(**record: Any) -> str:
    own = {"nodeid": NODEID, "benchmark": {"measurement": measured(3e-3).to_json()}, **record}
    return json.dumps({"records": [{"nodeid": "other", "benchmark": None}, {**own, "benchmark": None}, own]})


def test_measurements_of_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the records of the test, that of the phase in which it was timed."""
    answer(monkeypatch, report(), "", "")
    assert confirm.times_again(configuration(), NODEID, 2) == [measured(3e-3)] * 2


@pytest.mark.parametrize(
    ("text", "stdout", "stderr", "told"),
    [
        (None, "", "ERROR: usage: pytest\nERROR: no such option\n", "ERROR: no such option"),
        (None, "", "", "no output"),
        ("{", "...\nFAILED test_a.py::test - assert 0\n1 failed in 1 s\n\n", "", "FAILED test_a.py::test - assert 0"),
        ("{}", "1 passed in 1 s", "", "1 passed in 1 s"),
        ("[]", "1 passed in 1 s", "", "1 passed in 1 s"),
        (report(nodeid="test_b.py::test"), "1 passed", "", "1 passed"),
        (report(benchmark=None), "1 passed", "", "1 passed"),
        (report(benchmark={}), "1 passed", "", "1 passed"),
        (report(benchmark={"measurement": {"eager": 1}}), "1 passed", "", "1 passed"),
    ],
)
def test_no_measurement(monkeypatch: pytest.MonkeyPatch, text: Any, stdout: str, stderr: str, told: str) -> None:
    """Whatever the process says instead, the reason is told."""
    answer(monkeypatch, text, stdout, stderr, code=3)
    with pytest.raises(NotConfirmedError) as caught:
        confirm.times_again(configuration(), NODEID, 2)
    assert str(caught.value) == f"it can't be timed alone: exit status 3, {told}"


def test_a_process_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: list[str], timeout: float, **options: Any) -> Any:
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(NotConfirmedError, match="timing it alone took more than 600 s"):
        confirm.times_again(configuration(), NODEID, 1)


# -- several processes as one ---------------------------------------------------------------------


def one_of_several(time: float, copy: float) -> Measurement:
    eager, compiled = Side(Times(1.0, 0.0, 9)), Side(Times(time, 0.0, 9))
    ratios = {"eager": time, "copy": time / copy}
    return Measurement(eager, compiled, 1.0, 1.0, 1.0, canaries={"copy": copy}, ratios=ratios)


def test_the_middle_is_that_of_the_ratios_too() -> None:
    """Of a process whose machine was slow in both, time and fixed work belong together."""
    found = middle([one_of_several(2.0, 1.0), one_of_several(9.0, 9.0), one_of_several(1.2, 1.0)])
    assert found.compiled.time.median == 2.0
    assert found.canaries == {"copy": 1.0}
    assert found.ratios == {"eager": 2.0, "copy": 1.2}


@pytest.mark.parametrize(
    ("args", "positional", "expected"),
    [
        (["--benchmark-compare", "0001", "test_d.py"], ["test_d.py"], []),
        (["--benchmark-compare", "test_d.py"], ["test_d.py"], []),
        (["--benchmark-compare", "--dynamo-max-breaks=0"], [], ["--dynamo-max-breaks=0"]),
        (["--benchmark-histogram", "-k", "test_f"], [], ["-k", "test_f"]),
        (["--benchmark-histogram=x", "-v"], [], ["-v"]),
    ],
)
def test_options_with_a_word_that_may_be_left_out(args: list[str], positional: list[str], expected: list[str]) -> None:
    assert confirm.kept(args, positional) == expected
