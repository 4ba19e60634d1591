"""Stored runs: what is read, what is left out, and what enters the accepted window."""

from __future__ import annotations

import json
import os
import typing
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

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
from pytest_dynamo.detection import judge
from pytest_dynamo.history import MARKS
from pytest_dynamo.history import HistoryError
from pytest_dynamo.measurement import Run


def numbers(runs: tuple[Run, ...]) -> list[int]:
    """Of runs that `series` stored."""
    return [int(run.run.removeprefix("run")) for run in runs]


def window(folder: Path) -> list[int]:
    return numbers(history.window(history.read(folder).runs, TEST, NEW, history.marks(folder)))


# -- reading --------------------------------------------------------------------------------------


def test_a_run_is_read_as_it_was_stored(tmp_path: Path) -> None:
    path = store(tmp_path, 3, entry(measured(2e-3), graph_breaks=2, graphs=None))
    found = history.read(tmp_path)
    assert found.problems == ()
    assert found.runs == (
        Run(
            nodeid=TEST,
            run="aa",
            machine="m",
            fingerprint=NEW,
            measurement=measured(2e-3),
            verdict="not slower",
            datetime="2026-01-04T12:00:00+00:00",
            commit="0000003abcdef",
            source=path.relative_to(tmp_path).as_posix(),
            graphs=None,
            graph_breaks=2,
            recompiles=0,
        ),
    )


def test_runs_are_sorted_by_date_and_then_by_file(tmp_path: Path) -> None:
    """Numbers of two machines' folders say nothing about which was first."""
    for number, days, run in ((1, 5, "c"), (2, 1, "a"), (3, 5, "d"), (4, 2, "b")):
        store(tmp_path, number, entry(run=run), days=days)
    assert [run.run for run in history.read(tmp_path).runs] == ["a", "b", "c", "d"]


def test_a_missing_or_empty_folder_holds_no_runs(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert history.read(folder) == history.Storage()
        assert history.marks(folder) == {}
    assert not (tmp_path / "missing").exists()


def test_a_copied_file_counts_once(tmp_path: Path) -> None:
    path = store(tmp_path, 1, entry())
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / path.name).write_bytes(path.read_bytes())
    assert len(history.read(tmp_path).runs) == 1


def test_dirty_and_unknown_commits(tmp_path: Path) -> None:
    path = store(tmp_path, 1, entry())
    data = json.loads(path.read_text())
    for info, commit in (
        ({"id": "abc", "dirty": True}, "abc-dirty"),
        ({"id": "unversioned", "project": "x"}, ""),
        ({}, ""),
        (None, ""),
    ):
        path.write_text(json.dumps({**data, "commit_info": info}))
        assert [run.commit for run in history.read(tmp_path).runs] == [commit]


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    others = [
        {"fullname": "other", "stats": {}, "extra_info": {}},
        {"fullname": "other", "stats": {}, "extra_info": {"theirs": 1}},
        {"fullname": "old", "stats": {}},
    ]
    store(tmp_path, 1, *others, entry())
    (tmp_path / "notes.txt").write_text("{")
    (tmp_path / "folder.json").mkdir()
    found = history.read(tmp_path)
    assert (len(found.runs), found.problems) == (1, ())


def test_damaged_foreign_and_future_files_are_named_and_left_as_they_are(tmp_path: Path) -> None:
    good = store(tmp_path, 1, entry(run="good"))
    text = good.read_text()
    data = json.loads(text)
    folder = good.parent

    def changed(**fields: Any) -> str:
        return json.dumps({**data, "benchmarks": [entry(run="good2"), entry(nodeid="bad", **fields)]})

    damaged = measured().to_json()
    files = {
        "0002_cut.json": (text[:-30], "left out, it is not whole JSON (Unterminated string"),
        "0003_empty.json": ("", "left out, it is not whole JSON (Expecting value"),
        "0004_list.json": ("[1]", "left out, it is not a file of pytest-benchmark"),
        "0005_foreign.json": ('{"results": []}', "left out, it is not a file of pytest-benchmark"),
        "0006_deep.json": ("[" * 100_000, "left out, it is not whole JSON ("),
        "0007_schema.json": (
            changed(schema=2),
            "bad: left out, a newer pytest-dynamo wrote it (schema 2, this one reads 1)",
        ),
        "0008_type.json": (
            changed(measurement={**damaged, "speedup": "fast"}),
            "bad: left out, 'fast' is not float",
        ),
        "0009_key.json": (changed(measurement={"eager": {}}), "bad: left out, "),
        "0010_zero.json": (
            changed(measurement={**damaged, "speedup": 0}),
            "bad: left out, a time or a speed-up of 0 is impossible",
        ),
        "0011_nan.json": (
            changed(measurement={**damaged, "speedup": float("nan")}),
            "bad: left out, a time or a speed-up of nan is impossible",
        ),
        "0012_print.json": (changed(fingerprint={"gpu": 1}), "bad: left out, fingerprint is {'gpu': 1}"),
        "0013_run.json": (changed(run=None), "bad: left out, run is None"),
        "0014_count.json": (changed(recompiles=True), "bad: left out, recompiles is True"),
        "0015_list.json": (changed(measurement=[1]), "bad: left out, "),
        "0020_canary.json": (changed(measurement={**damaged, "canaries": {"copy": "x"}}), "bad: left out, 'x' is not"),
        "0021_canary.json": (
            changed(measurement={**damaged, "canaries": {"copy": -1.0}}),
            "bad: left out, a time or a speed-up of -1.0 is impossible",
        ),
        "0023_ratio.json": (
            changed(measurement={**damaged, "ratios": {"eager": 0.0}}),
            "bad: left out, a time or a speed-up of 0.0 is impossible",
        ),
        "0022_huge.json": (changed(measurement={**damaged, "speedup": 10**400}), "bad: left out, int too large"),
    }
    for name, (content, _) in files.items():
        (folder / name).write_text(content)
    (folder / "0016_bytes.json").write_bytes(b"\xff\xfe")
    (folder / "0017_date.json").write_text(json.dumps({**data, "datetime": "yesterday"}))
    (folder / "0018_entry.json").write_text(json.dumps({**data, "benchmarks": [3]}))
    (folder / "0019_verdict.json").write_text(json.dumps({**data, "benchmarks": [entry(verdict="fine")] * 3}))
    before = contents(tmp_path)
    found = history.read(tmp_path)
    assert contents(tmp_path) == before
    # What is whole in a file with a damaged entry is used.
    assert {run.run for run in found.runs} == {"good", "good2"}
    told = {line.partition(": ")[0].rpartition("/")[2]: line.partition(": ")[2] for line in found.problems}
    assert len(told) == len(found.problems) == len(files) + 4
    for name, (_, message) in files.items():
        assert told[name].startswith(message), told[name]
        assert "\n" not in told[name]
    assert told["0016_bytes.json"].startswith("left out, it is not whole JSON ('utf-8' codec")
    assert told["0017_date.json"] == f"{TEST}: left out, Invalid isoformat string: 'yesterday'"
    assert told["0018_entry.json"].startswith("benchmark 1: left out, ")
    assert told["0019_verdict.json"] == f"{TEST} and 2 more: left out, schema 1 has no verdict 'fine'"


# -- reading again --------------------------------------------------------------------------------


@pytest.fixture
def files_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read from now on. All count as written long ago."""
    names: list[str] = []
    real = history.read_file

    def read_file(path: Path, source: str) -> history.Storage:
        names.append(path.name)
        return real(path, source)

    monkeypatch.setattr(history, "read_file", read_file)
    monkeypatch.setattr(history, "SETTLED", -1)
    return names


def test_files_are_read_once_until_one_changes(tmp_path: Path, files_read: list[str]) -> None:
    series(tmp_path, [1e-3] * 3)
    (tmp_path / "0009_damaged.json").write_text("{")
    first = history.read(tmp_path)
    assert (len(first.runs), len(first.problems), len(files_read)) == (3, 1, 4)
    # What is damaged is named again.
    assert history.read(tmp_path) == first
    assert len(files_read) == 4


def test_types_of_fields_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding them for each entry took most of the time of reading."""
    store(tmp_path, 1, entry(run="aa"))
    history.read(tmp_path)

    def fail(*_: object) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(typing, "get_type_hints", fail)
    store(tmp_path, 2, entry(run="bb"))
    assert [run.run for run in history.read(tmp_path).runs] == ["aa", "bb"]


@pytest.mark.parametrize("change", ["written", "replaced", "new", "gone", "moved"])
def test_a_change_is_seen(tmp_path: Path, files_read: list[str], change: str) -> None:
    """Also where size and time of writing are the same."""
    path = store(tmp_path, 1, entry(run="aa"))
    store(tmp_path, 2, entry(run="bb"))
    assert [run.run for run in history.read(tmp_path).runs] == ["aa", "bb"]
    before = path.stat()
    if change == "written":
        sleep(0.05)  # longer than the times of files are coarse
        path.write_text(path.read_text().replace('"aa"', '"cc"'))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
    elif change == "replaced":
        other = tmp_path / "other"
        other.write_text(path.read_text().replace('"aa"', '"cc"'))
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(other, path)
    elif change == "new":
        store(tmp_path, 3, entry(run="cc"))
    elif change == "gone":
        path.unlink()
    else:
        path.rename(path.with_name("0008_run.json"))
    told = {"written": ["cc", "bb"], "replaced": ["cc", "bb"], "new": ["aa", "bb", "cc"], "gone": ["bb"]}
    found = history.read(tmp_path).runs
    assert [run.run for run in found] == told.get(change, ["aa", "bb"])
    assert all((tmp_path / run.source).is_file() for run in found)


def test_another_folder_is_another_storage(tmp_path: Path, files_read: list[str]) -> None:
    for name in ("a", "b", "a"):
        store(tmp_path / name, 1, entry(run=name))
        assert [run.run for run in history.read(tmp_path / name).runs] == [name]


def test_a_file_that_was_just_written_is_read_again(tmp_path: Path) -> None:
    """It may be written again before the clock of the file system goes on."""
    path = store(tmp_path, 1, entry(run="aa"))
    text, before = path.read_text(), path.stat()
    for name in ("bb", "cc", "dd"):
        path.write_text(text.replace('"aa"', f'"{name}"'))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert [run.run for run in history.read(tmp_path).runs] == [name]


# -- the window -----------------------------------------------------------------------------------


def test_slower_unstable_and_wrong_runs_never_enter(tmp_path: Path) -> None:
    verdicts = ["no baseline", "slower", None, "not slower", "unstable", None, "slower", "not slower"]
    series(tmp_path, [1e-3] * 8, verdicts)
    assert window(tmp_path) == [1, 4, 8]


def test_the_window_fills_and_then_is_frozen(tmp_path: Path) -> None:
    series(tmp_path, [1e-3] * 9)
    assert window(tmp_path) == list(range(1, 10))
    series(tmp_path, [1e-3] * 25)
    assert window(tmp_path) == list(range(1, 11))


def test_other_tests_and_fingerprints_have_windows_of_their_own(tmp_path: Path) -> None:
    for number in range(1, 5):
        other = entry(nodeid="other", run=f"run{number:04}")
        store(tmp_path, number, entry(run=f"run{number:04}", fingerprint=(OLD, NEW)[number > 2]), other)
    assert window(tmp_path) == [3, 4]


def test_accept_moves_the_window_and_nothing_else(tmp_path: Path) -> None:
    verdicts = ["not slower"] * 10 + ["slower"] * 2 + ["not slower"] * 2
    series(tmp_path, [1e-3] * 10 + [1.2e-3] * 4, [*verdicts])
    runs = history.read(tmp_path).runs
    before = contents(tmp_path)
    assert history.accept(tmp_path, runs[10:11]) == runs[10:11]
    after = contents(tmp_path)
    marks = after.pop(MARKS)
    assert after == before
    assert json.loads(marks) == {
        "format": 1,
        "nodeid": TEST,
        "fingerprint": NEW,
        "run": "run0011",
        "datetime": "2026-01-12T12:00:00+00:00",
    }
    # The marked run itself though it was slower, the next slower one not.
    assert window(tmp_path) == [11, 13, 14]
    # The last mark counts, also where it goes back.
    history.accept(tmp_path, runs[3:4])
    assert window(tmp_path) == [4, 5, 6, 7, 8, 9, 10, 13, 14]
    assert len((tmp_path / MARKS).read_text().splitlines()) == 2


def test_wrong_and_unstable_runs_are_not_accepted(tmp_path: Path) -> None:
    series(tmp_path, [1e-3] * 4, ["not slower", None, "unstable", "not slower"])
    runs = history.read(tmp_path).runs
    assert history.accept(tmp_path, runs[1:3]) == ()
    assert not (tmp_path / MARKS).exists()
    assert history.accept(tmp_path, runs[1:]) == runs[3:]
    # Not by a mark that was written by hand either.
    for number in (1, 2):
        mark = {"format": 1, "nodeid": TEST, "fingerprint": NEW, "run": runs[number].run, "datetime": ""}
        (tmp_path / MARKS).write_text(json.dumps(mark))
        assert window(tmp_path) == [4]


def test_a_mark_outlives_the_file_of_its_run(tmp_path: Path) -> None:
    """Old files are removed, by CI for one: the window does not fall back to what was before the mark."""
    series(tmp_path, [1e-3] * 6)
    history.accept(tmp_path, history.read(tmp_path).runs[3:4])
    for path in tmp_path.glob("*/0004_*"):
        path.unlink()
    assert window(tmp_path) == [5, 6]
    for path in tmp_path.glob("*/000[56]_*"):
        path.unlink()
    assert window(tmp_path) == []


def test_a_mark_counts_for_its_series_only(tmp_path: Path) -> None:
    for number in range(1, 4):
        entries = [
            entry(run=f"run{number:04}", nodeid=nodeid, fingerprint=fp) for nodeid in (TEST, "b") for fp in (OLD, NEW)
        ]
        store(tmp_path, number, *entries)
    runs = history.read(tmp_path).runs
    history.accept(
        tmp_path, [run for run in runs if run.run == "run0002" and run.nodeid == TEST and run.fingerprint == NEW]
    )
    marks = history.marks(tmp_path)
    found = {(n, fp["torch"]): numbers(history.window(runs, n, fp, marks)) for n in (TEST, "b") for fp in (OLD, NEW)}
    assert found.pop((TEST, "2.14.1")) == [2, 3]
    assert set(map(tuple, found.values())) == {(1, 2, 3)}


# -- the marks file -------------------------------------------------------------------------------

LINE = json.dumps({"format": 1, "nodeid": "t", "fingerprint": {}, "run": "r", "datetime": "2026-01-01T00:00:00"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LINE + "\n" + LINE[:-4], "line 2 is damaged (.*): mend the line or take it out"),
        (LINE.replace('"format": 1', '"format": 2'), r"is of a newer pytest-dynamo \(format 2\): update pytest-dynamo"),
        (LINE.replace('"run": "r"', '"run": 1'), "line 1 is damaged .run is 1.: mend"),
        (LINE.replace('"run"', '"walk"'), "line 1 is damaged .'run' is missing.: mend"),
        (LINE.replace("2026-01-01T", "soon"), "line 1 is damaged .Invalid isoformat"),
        ("3", "line 1 is damaged"),
    ],
)
def test_a_damaged_or_newer_marks_file_changes_nothing(tmp_path: Path, text: str, message: str) -> None:
    series(tmp_path, [1e-3])
    (tmp_path / MARKS).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(HistoryError, match=message):
        history.accept(tmp_path, history.read(tmp_path).runs)
    with pytest.raises(HistoryError, match=message):
        history.marks(tmp_path)
    assert contents(tmp_path) == before


def test_bytes_that_are_no_text_are_damage_too(tmp_path: Path) -> None:
    (tmp_path / MARKS).write_bytes(b"\xff")
    with pytest.raises(HistoryError, match="can't be read"):
        history.marks(tmp_path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_accept_leaves_the_old_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    series(tmp_path, [1e-3] * 2)
    runs = history.read(tmp_path).runs
    history.accept(tmp_path, runs[:1])
    before = contents(tmp_path)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    expected = HistoryError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as raised:
        history.accept(tmp_path, runs[1:])
    assert contents(tmp_path) == before
    if isinstance(error, OSError):
        assert str(raised.value) == (
            f"{tmp_path / MARKS} can't be written ([Errno 28] No space left on device): nothing is accepted"
        )


def test_a_last_line_without_a_newline_is_kept_whole(tmp_path: Path) -> None:
    series(tmp_path, [1e-3])
    (tmp_path / MARKS).write_text(LINE)
    history.accept(tmp_path, history.read(tmp_path).runs)
    lines = (tmp_path / MARKS).read_text().splitlines()
    assert (lines[0], len(lines)) == (LINE, 2)


# -- other fingerprints ---------------------------------------------------------------------------


def test_other_series_come_with_what_differs(tmp_path: Path) -> None:
    older = {"gpu": "A100", "torch": "2.12.0"}
    for number, fingerprint in enumerate((older, older, OLD, NEW, {"gpu": "H200"}), 1):
        store(tmp_path, number, entry(fingerprint=fingerprint, run=f"run{number:04}"))
    found = history.older_series(history.read(tmp_path).runs, TEST, NEW)
    assert [(numbers(one.runs), one.differs) for one in found] == [
        ([5], ("torch none -> 2.14.1",)),
        ([3], ("torch 2.13.0 -> 2.14.1",)),
        ([1, 2], ("gpu A100 -> H200", "torch 2.12.0 -> 2.14.1")),
    ]
    assert history.older_series((), TEST, NEW) == ()


# -- creep ----------------------------------------------------------------------------------------

#: Changes of no meaning, in thousandths, which runs of the same code differ by.
NOISE = (0, 2, -1, 1, -2, 2, 0, -1, 1, -2)


def creep(times: list[float]) -> list[tuple[str, int]]:
    """Judge each run by the window that those before it left; return verdicts, and how many were in the window."""
    runs: list[Run] = []
    told = []
    for number, time in enumerate(times):
        now = Run(TEST, f"run{number:04}", "m", NEW, measured(time), datetime=f"2026-01-01T00:00:{number:02}")
        accepted = history.window(runs, TEST, NEW, {})
        verdict = judge(accepted, now).verdict
        runs.append(replace(now, verdict=verdict))
        told.append((verdict, len(accepted)))
    return told


@pytest.mark.parametrize("noisy", [False, True])
def test_creep_after_steady_runs_is_found(noisy: bool) -> None:
    """Half a percent a run is slower at the fourth of them, and stays so: the window does not go with it."""
    steady = [1e-3 * (1 + noisy * noise / 1000) for noise in NOISE]
    told = creep([*steady, *(1e-3 * 1.005**n for n in range(1, 21))])
    assert [verdict for verdict, _ in told[:10]] == ["no baseline"] + ["not slower"] * 9
    crept = [verdict for verdict, _ in told[10:]]
    first = crept.index("slower")
    assert first + 1 == 4
    assert crept == ["not slower"] * first + ["slower"] * (20 - first)
    assert {size for _, size in told[10:]} == {10}


def test_creep_from_the_first_run_on_is_found() -> None:
    told = [verdict for verdict, _ in creep([1e-3 * 1.005**n for n in range(25)])]
    first = told.index("slower")
    assert first + 1 == 18
    assert told == ["no baseline"] + ["not slower"] * (first - 1) + ["slower"] * (25 - first)
