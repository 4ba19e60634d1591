"""The command ``pytest-dynamo`` on stored runs."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from stored_runs import NEW
from stored_runs import OLD
from stored_runs import TEST
from stored_runs import contents
from stored_runs import entry
from stored_runs import measured
from stored_runs import series
from stored_runs import store

from pytest_dynamo import history
from pytest_dynamo import speedtable
from pytest_dynamo.chart import ASCII
from pytest_dynamo.chart import BLOCKS
from pytest_dynamo.chart import chart
from pytest_dynamo.cli import main
from pytest_dynamo.detection import judge
from pytest_dynamo.history import MARKS
from pytest_dynamo.measurement import Run


FOLDER = "Linux-CPython-3.12-64bit"


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command reads by itself."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".benchmarks"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a command."""
    status = main(arguments)
    return status, *capsys.readouterr()


def first_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith(" ")]


# -- compare --------------------------------------------------------------------------------------


def test_output_of_a_comparison(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(storage, 1, entry(measured(1.2e-3), fingerprint=OLD, run="old"))
    for number in range(2, 12):
        store(storage, number, entry(measured(1e-3), run=f"run{number}"))
    store(storage, 12, entry(measured(1.1e-3, compile_seconds=3.3), "slower", run="now", graph_breaks=1))
    assert told(capsys, "compare") == (
        1,
        f"""\
{FOLDER}/0012_run.json (2026-01-13 12:00, 000000c) against the accepted runs

{TEST}: slower
  time          1.000 ms  ->  1.100 ms  +10.0 %
  device time   950.0 us  ->  1.045 ms  +10.0 %
  speed-up         2.00x  ->     1.82x   -9.1 %
  compile time   3.000 s  ->   3.300 s  +10.0 %
  peak memory    1.0 MiB  ->   1.0 MiB
  breaks               0  ->         1
  recompiles           0  ->         0
  launches             7  ->         7
  GPU work: time is 10.0 % above the middle of 10 accepted runs (1.000 ms), 2.0 % allowed: slower
  code and kernels are those of an accepted run: what calls them changed, or the machine
  not compared, another fingerprint (torch 2.13.0 -> 2.14.1):
    1 run, the last 2026-01-02 12:00 with time 1.200 ms, device time 1.140 ms, speed-up 1.67x

1 test compared: 1 slower
""",
        "",
    )


def test_output_of_two_runs(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(storage, 1, entry(run="a"), entry(run="a", nodeid="gone"), entry(run="a", nodeid="moved", fingerprint=OLD))
    store(storage, 2, entry(measured(1.1e-3), None, run="b"), entry(run="b", nodeid="moved"))
    first = f"{FOLDER}/0001_run.json (2026-01-02 12:00, 0000001)"
    status, out, err = told(capsys, "compare", "1", "2")
    assert (status, err) == (0, "")
    assert first_lines(out) == [
        f"{FOLDER}/0002_run.json (2026-01-03 12:00, 0000002) against {first}",
        f"{TEST}: not slower",
        "moved: no baseline",
        f"gone: only in {first}",
        "2 tests compared: 1 not slower, 1 no baseline",
    ]
    assert "  GPU work: time is 10.0 % above the run before (1.000 ms), 15.0 % allowed: not slower\n" in out
    assert "  parity or a limit failed in this run: it is never accepted\n" in out
    assert "  the first run has nothing to compare it with\n" in out
    assert "  not compared, another fingerprint (torch 2.13.0 -> 2.14.1):\n    1 run, the last 2026-01-02" in out
    # The other way round the run before is the doubtful one.
    status, out, _ = told(capsys, "compare", "2", "1")
    assert status == 0
    assert "  the run before: parity or a limit failed\n" in out


@pytest.mark.parametrize(("now", "status"), [(1.0e-3, 0), (1.1e-3, 1), (0.5e-3, 0)])
def test_exit_status_is_one_if_something_is_slower(
    storage: Path, capsys: pytest.CaptureFixture[str], now: float, status: int
) -> None:
    series(storage, [1e-3] * 10 + [now])
    assert told(capsys, "compare")[0] == status
    # An earlier run is held against the same accepted runs, without itself.
    code, out, _ = told(capsys, "compare", "0005")
    assert code == 0
    assert "the middle of 9 accepted runs" in out


def test_unstable_runs_and_windows_do_not_fail(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series(storage, [1e-3] * 10)
    store(storage, 11, entry(measured(2e-3, unstable=("the GPU was throttled",)), "unstable", run="now"))
    status, out, _ = told(capsys, "compare")
    assert (status, "  the GPU was throttled\n" in out) == (0, True)
    series(storage, [1e-3, 2e-3] * 5 + [3e-3])
    status, out, _ = told(capsys, "compare")
    assert (status, "no limit can be told: unstable" in out) == (0, True)


def test_the_only_accepted_run_has_no_baseline(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series(storage, [1e-3], ["no baseline"])
    status, out, _ = told(capsys, "compare")
    assert status == 0
    assert first_lines(out)[1:] == [f"{TEST}: no baseline", "1 test compared: 1 no baseline"]
    assert out.splitlines()[3] == "  time          1.000 ms"
    assert "  this run is the only accepted one\n" in out


@pytest.mark.parametrize(
    "name",
    [
        *("2", "0002", "0002_run", "0002_run.json", f"{FOLDER}/0002_run", f"{FOLDER}/0002_run.json"),
        *(f".benchmarks/{FOLDER}/0002_run.json", "bb", "bbb"),
    ],
)
def test_names_of_a_run(storage: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    for number, run in enumerate(("aaa", "bbb", "abc"), 1):
        store(storage, number, entry(run=run))
    status, out, _ = told(capsys, "compare", name)
    assert (status, out.partition(" ")[0]) == (0, f"{FOLDER}/0002_run.json")


def test_a_file_outside_of_the_storage_is_compared_and_not_accepted(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    series(storage, [1e-3] * 10)
    other = store(tmp_path / "artifact", 1, entry(measured(2e-3), run="other"))
    status, out, _ = told(capsys, "compare", str(other))
    assert (status, first_lines(out)[1]) == (1, f"{TEST}: slower")
    assert told(capsys, "accept", str(other)) == (
        2,
        "",
        f"pytest-dynamo: {other} is not in .benchmarks: copy it there before you accept it\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "9"), f"no run '9' in .benchmarks; the nearest is {FOLDER}/0003_run.json"),
        (("compare", "0001_rum"), "no run '0001_rum' in .benchmarks; the nearest is 0001_run.json"),
        (("compare", "1", "abd"), "no run 'abd' in .benchmarks; the nearest is abc"),
        (("compare", "a"), "a may be any of aaa, abc: give more of the name"),
        (("compare", "1", "2", "3"), "compare takes no more than 2 runs: 1 2 3"),
        (("accept", "1", "2"), "accept takes no more than 1 run: 1 2"),
        (("compare", "1", "--", "-x"), "arguments of pytest after -- go with compare BASE..HEAD only"),
        (("compare", "a..b", "1"), "a..b: give one BASE..HEAD and no other run"),
        (("compare", "a...b"), "a...b: give one BASE..HEAD and no other run"),
        (("compare", "a..b", "--storage", "x"), "--storage goes with stored runs, not with BASE..HEAD"),
        (
            ("compare", "--storage", "elasticsearch+https://x"),
            "--storage elasticsearch+https://x: only a folder can be read",
        ),
        (("history", "inductr"), f"no test matches 'inductr'; the nearest is {TEST}"),
        (("compare", "pyproject.toml"), "pyproject.toml holds no run of pytest-dynamo"),
    ],
)
def test_usage_errors(
    storage: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    for number, run in enumerate(("aaa", "bbb", "abc"), 1):
        store(storage, number, entry(run=run))
    Path("pyproject.toml").write_text("")
    status, out, err = told(capsys, *arguments)
    assert (status, out, err.splitlines()[-1]) == (2, "", f"pytest-dynamo: {message}")


def test_without_runs(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("compare", "history", "accept"):
        assert told(capsys, command) == (
            2,
            "",
            (
                "pytest-dynamo: no runs of pytest-dynamo in .benchmarks\n"
                "store some with pytest --benchmark-autosave, or name their folder with --storage\n"
            ),
        )
    assert not storage.exists()


def test_storage_is_named_as_for_pytest_benchmark(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    series(tmp_path / "other", [1e-3])
    for name in ("other", "file://other", "file://./other", str(tmp_path / "other")):
        assert told(capsys, "compare", "--storage", name)[0] == 0


def test_problems_are_told_and_change_no_status(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series(storage, [1e-3] * 3)
    (storage / "0009_cut.json").write_text("{")
    (storage / "other.json").write_text("{}")
    for command in ("compare", "history", "accept"):
        status, _, err = told(capsys, command)
        assert status == 0
        assert [line.partition(": ")[0] for line in err.splitlines()] == ["0009_cut.json", "other.json"]


def test_a_damaged_marks_file_ends_the_command(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series(storage, [1e-3])
    (storage / MARKS).write_text("{")
    for command in ("compare", "history", "accept"):
        status, out, err = told(capsys, command)
        assert (status, out) == (2, "")
        assert err.startswith(f"pytest-dynamo: .benchmarks/{MARKS}, line 1 is damaged (")


def test_two_revisions_are_the_part_of_another_module(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []
    module = types.ModuleType("pytest_dynamo.revisions")
    module.main = lambda *arguments: calls.append(arguments) or 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pytest_dynamo.revisions", module)
    assert main(["compare", "main..fix/a", "--", "-k", "x", "--", "y"]) == 1
    assert main(["compare", "v1.0.."]) == 1
    assert calls == [("main", "fix/a", ["-k", "x", "--", "y"]), ("v1.0", "HEAD", [])]
    # A file, and a path that is none, are no revisions.
    series(storage, [1e-3])
    Path("a..b").write_bytes((storage / FOLDER / "0001_run.json").read_bytes())
    assert main(["compare", "a..b"]) == 0
    assert told(capsys, "compare", "../0001_run.json")[2].startswith("pytest-dynamo: no run '../0001_run.json'")
    assert len(calls) == 2


# -- history --------------------------------------------------------------------------------------


def test_output_of_the_history(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(storage, 1, entry(measured(1.2e-3), "no baseline", fingerprint=OLD, run="a"))
    store(storage, 2, entry(measured(1.0e-3), "no baseline", run="b"), entry(run="b", nodeid="other"))
    store(storage, 3, entry(measured(1.5e-3), "slower", run="c"))
    store(storage, 4, entry(measured(1.5e-3), run="d"))
    store(storage, 5, entry(measured(0.8e-3), None, run="e"))
    main(["accept", "3"])
    capsys.readouterr()
    assert told(capsys, "history", "test_?.py::test[ind*]") == (
        0,
        f"""\
{TEST}
  run   date              commit   verdict      baseline      time  device time  speed-up
  0001  2026-01-02 12:00  0000001  no baseline  window    1.200 ms     1.140 ms     1.67x
  time ▁ 1.200 ms to 1.200 ms
  fingerprint: torch 2.13.0 -> 2.14.1
  run   date              commit   verdict      baseline      time  device time  speed-up
  0002  2026-01-03 12:00  0000002  no baseline            1.000 ms     950.0 us     2.00x
  0003  2026-01-04 12:00  0000003  slower       accepted  1.500 ms     1.425 ms     1.33x
  0004  2026-01-05 12:00  0000004  not slower   window    1.500 ms     1.425 ms     1.33x
  0005  2026-01-06 12:00  0000005  failed                 800.0 us     760.0 us     2.50x
  time ▃██▁ 800.0 us to 1.500 ms
""",
        "",
    )
    status, out, _ = told(capsys, "history")
    assert (status, first_lines(out)) == (0, [TEST, "other"])


def test_history_as_csv(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(storage, 1, entry(run="a", nodeid='test_a.py::test["a,b"]', graphs=None))
    store(storage, 2, entry(measured(2e-3), "slower", fingerprint=OLD))
    status, out, _ = told(capsys, "history", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert (status, len(rows)) == (0, 2)
    assert rows[0] == {
        "nodeid": 'test_a.py::test["a,b"]',
        "datetime": "2026-01-02T12:00:00+00:00",
        "commit": "0000001abcdef",
        "file": f"{FOLDER}/0001_run.json",
        "run": "a",
        "machine": "m",
        "verdict": "not slower",
        "baseline": "window",
        "time": "0.001",
        "device_time": "0.00095",
        "speedup": "2.0",
        "eager_time": "0.002",
        "compile_seconds": "3.0",
        "cold": "True",
        "peak_bytes": "1048576",
        "launches": "7",
        "graphs": "",
        "graph_breaks": "0",
        "recompiles": "0",
        "fingerprint": "gpu=H200; torch=2.14.1",
    }
    assert (rows[1]["verdict"], rows[1]["baseline"], rows[1]["fingerprint"]) == ("slower", "", "gpu=H200; torch=2.13.0")


# -- accept ---------------------------------------------------------------------------------------


def test_accept_moves_the_baseline_and_says_so(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series(storage, [1e-3] * 10 + [1.2e-3], ["not slower"] * 10 + ["slower"])
    before = contents(storage)
    assert told(capsys, "compare")[0] == 1
    assert told(capsys, "accept") == (
        0,
        (
            f"accepted {TEST}: {FOLDER}/0011_run.json (2026-01-12 12:00, 000000b)\n"
            "  middle of the accepted runs, time: 1.000 ms (10 runs) -> 1.200 ms (1 run), +20.0 %\n"
        ),
        "",
    )
    after = contents(storage)
    del after[MARKS]
    assert after == before
    store(storage, 12, entry(measured(1.21e-3), run="next"))
    status, out, _ = told(capsys, "compare")
    assert (status, "the middle of 1 accepted run (1.200 ms)" in out) == (0, True)


def test_accept_takes_a_run_and_a_part_of_its_tests(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bound = {"launch_bound": True}
    for number in (1, 2, 3):
        others = [
            entry(measured(**bound), run=f"{number}", nodeid="b"),
            entry(verdict=None, run=f"{number}", nodeid="wrong"),
        ]
        store(storage, number, entry(run=f"{number}"), *others)
    status, out, err = told(capsys, "accept", "2", "-k", "b")
    assert (status, err) == (0, "")
    assert "middle of the accepted runs, device time: 950.0 us (3 runs) -> 950.0 us (2 runs), +0.0 %" in out
    assert [mark.nodeid for mark in history.marks(storage).values()] == ["b"]
    # What can't be accepted is told, the rest is accepted.
    status, out, err = told(capsys, "accept")
    assert (status, err) == (0, "not accepted, parity or a limit failed: wrong\n")
    assert first_lines(out) == [
        f"accepted {name}: {FOLDER}/0003_run.json (2026-01-04 12:00, 0000003)" for name in (TEST, "b")
    ]


def test_nothing_to_accept(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(storage, 1, entry(verdict="unstable"))
    title = f"{FOLDER}/0001_run.json (2026-01-02 12:00, 0000001)"
    assert told(capsys, "accept", "-k", "x") == (
        2,
        "",
        f"pytest-dynamo: nothing to accept: no test of {title} has 'x' in its node id\n",
    )
    assert told(capsys, "accept") == (
        2,
        "",
        (
            f"not accepted, unstable: {TEST}\n"
            f"pytest-dynamo: nothing to accept in {title}: name an earlier run, or time it again\n"
        ),
    )
    assert not (storage / MARKS).exists()


# -- charts and words -----------------------------------------------------------------------------


def test_chart() -> None:
    assert chart([1, 2, 3, 4, 5, 6, 7, 8]) == BLOCKS
    assert chart([1, 2, 3, 4, 5, 6, 7, 8], "ascii") == ASCII == chart([1, 2, 3, 4, 5, 6, 7, 8], "no such encoding")
    assert chart([8, None, 1, float("nan")]) == "█ ▁ "
    assert chart([]) == ""
    assert chart([None, None]) == "  "
    assert chart([0, 0]) == "▁▁"
    # Noise of a percent is not drawn as high as a change of ten.
    assert chart([1.0, 1.01]) == "▁▂"
    assert chart([1.0, 1.01], least=0.0) == "▁█"
    assert chart([1.0, 1.1]) == "▁█"


def test_numbers_in_words() -> None:
    shown = [speedtable.seconds(value) for value in (12.3456, 1.0, 0.0123456, 1.5e-6, 2.5e-10, 999.96e-6, None)]
    assert shown == ["12.35 s", "1.000 s", "12.35 ms", "1.500 us", "0.2500 ns", "1000 us", "?"]
    assert [speedtable.percent(value) for value in (0.0512, -0.00001, -0.5)] == ["+5.1 %", "+0.0 %", "-50.0 %"]


def test_what_is_not_known_has_no_row() -> None:
    """Of code on a CPU; compiling from a cache is not held against compiling without one."""
    data = measured().to_json()
    for side in ("eager", "compiled"):
        data[side].update(device_time=None, launches=None, peak_bytes=None)
    runs = [Run(TEST, "r", "m", NEW, type(measured()).from_json({**data, "cold": cold})) for cold in (True, False)]
    assert speedtable.run_lines(runs[:1], runs[1], judge(runs[:1], runs[1]), [], [])[1:4] == [
        "  time                  1.000 ms  ->  1.000 ms  +0.0 %",
        "  speed-up                 2.00x  ->     2.00x  +0.0 %",
        "  compile time, cached         ?  ->   3.000 s",
    ]


# -- as a process ---------------------------------------------------------------------------------

BENCHMARK = """
import json

def test_a(benchmark):
    benchmark.extra_info["dynamo"] = json.loads({dynamo!r})
    benchmark.pedantic(lambda: None, rounds=3)

def test_theirs(benchmark):
    benchmark.pedantic(lambda: None, rounds=3)
"""


def run(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(__file__).parent.parent)
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": source, "PATH": "/usr/bin:/bin", **environment},
    )


def test_pytest_benchmark_and_we_read_the_same_folder(tmp_path: Path) -> None:
    """Files that pytest-benchmark wrote are read by us, and our marks are no concern of its."""
    for number, verdict in enumerate(("no baseline", "not slower"), 1):
        dynamo = entry(verdict=verdict, nodeid="test_it.py::test_a", run=f"r{number}")["extra_info"]["dynamo"]
        (tmp_path / "test_it.py").write_text(BENCHMARK.format(dynamo=json.dumps(dynamo)))
        stored = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-autosave", folder=tmp_path)
        assert stored.returncode == 0, stored.stdout + stored.stderr
    before = contents(tmp_path / ".benchmarks")
    accepted = run("-m", "pytest_dynamo", "accept", folder=tmp_path)
    assert (accepted.returncode, accepted.stderr) == (0, "")
    assert accepted.stdout.startswith("accepted test_it.py::test_a: ")
    listed = run("-m", "pytest_dynamo", "history", folder=tmp_path, PYTHONIOENCODING="ascii")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "  accepted  1.000 ms" in listed.stdout
    assert f"  time {ASCII[0] * 2} 1.000 ms to 1.000 ms" in listed.stdout
    after = contents(tmp_path / ".benchmarks")
    assert MARKS in after
    del after[MARKS]
    assert after == before
    (tmp_path / "empty").mkdir()
    if run("-m", "pytest_benchmark", "list", folder=tmp_path / "empty").returncode:
        pytest.skip("the command of this pytest-benchmark does not work with this pytest")  # 5.1.0 with pytest 9.1
    compared = run("-m", "pytest_benchmark", "compare", "--columns=median", folder=tmp_path)
    assert compared.returncode == 0, compared.stderr
    assert "Failed" not in compared.stdout + compared.stderr
    shown = [sum(name in line for line in compared.stdout.splitlines()) for name in ("test_a ", "test_theirs ")]
    assert shown == [2, 2]


def test_the_command_imports_neither_torch_nor_pytest(tmp_path: Path) -> None:
    series(tmp_path / ".benchmarks", [1e-3] * 3)
    code = (
        "import sys\nfrom pytest_dynamo.cli import main\n"
        "main(['compare']), main(['history']), main(['accept'])\n"
        "sys.exit(str({'torch', 'pytest', '_pytest'} & set(sys.modules)))"
    )
    assert run("-c", code, folder=tmp_path).stderr == "set()\n"


def test_names_that_the_terminal_can_not_show(tmp_path: Path) -> None:
    store(tmp_path / ".benchmarks", 1, entry(nodeid="test[ä]"))
    shown = run("-m", "pytest_dynamo", "compare", folder=tmp_path, PYTHONIOENCODING="ascii")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "test[\\xe4]: no baseline" in shown.stdout


def test_a_wrong_command_is_told_by_argparse(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["compere"], ["history", "--cvs"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
        assert capsys.readouterr().err.startswith("usage: pytest-dynamo")
