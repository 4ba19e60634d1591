from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from pytest_dynamo import jsonreport
from pytest_dynamo.record import Check
from pytest_dynamo.record import Observation
from pytest_dynamo.record import Parity
from pytest_dynamo.record import Record
from pytest_dynamo.report import Report


def report(nodeid: str = "test_a.py::test[ä<&]", *checks: Check) -> Report:
    return Report.of([Record(nodeid, "call", None, Observation(), Parity(None, 1, checks))], {"torch": None})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def strict(text: str) -> object:
    def refuse(word: str) -> object:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_file_holds_the_report(tmp_path: Path) -> None:
    """The file is UTF-8 JSON of the report, ends in a newline, and nothing else is left beside it."""
    path = tmp_path / "new" / "folder" / "report.json"
    jsonreport.write(report(), path)
    text = path.read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert "ä<&" in text
    assert strict(text) == json.loads(json.dumps(report().to_json()))
    assert names(path.parent) == ["report.json"]


def test_an_old_file_is_replaced(tmp_path: Path) -> None:
    """A report of an earlier run is gone afterwards."""
    path = tmp_path / "report.json"
    path.write_text("x" * 100_000)
    jsonreport.write(report(), path)
    assert strict(path.read_text())
    assert names(tmp_path) == ["report.json"]


@pytest.mark.parametrize("function", ["replace", "chmod", "fdopen"])
def test_a_write_error_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """If writing fails, the old report is still whole and no temporary file is left."""
    path = tmp_path / "report.json"
    path.write_text("old")
    real = os.fdopen

    def planted(first: int, *args: object, **kwargs: object) -> object:
        if function != "fdopen":
            raise OSError(28, "No space left on device")
        file = real(first, *args, **kwargs)  # type: ignore[call-overload]

        class Full:
            def __enter__(self) -> Full:
                return self

            def __exit__(self, *error: object) -> None:
                file.close()

            def write(self, text: str) -> None:
                file.write(text[:10])
                raise OSError(28, "No space left on device")

        return Full()

    monkeypatch.setattr(os, function, planted)
    with pytest.raises(OSError, match="No space left on device"):
        jsonreport.write(report(), path)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["report.json"]


def test_an_interrupt_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also Ctrl-C while writing leaves the old report whole."""
    path = tmp_path / "report.json"
    path.write_text("old")

    def planted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", planted)
    with pytest.raises(KeyboardInterrupt):
        jsonreport.write(report(), path)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["report.json"]


def test_a_folder_in_its_place_is_an_error(tmp_path: Path) -> None:
    """A path that is a folder is refused and left alone."""
    path = tmp_path / "report.json"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        jsonreport.write(report(), path)
    assert names(tmp_path) == ["report.json"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_mode_is_that_of_any_new_file(tmp_path: Path, mask: int, mode: int) -> None:
    """Others may read the report as they may read any file that the user makes."""
    before = os.umask(mask)
    try:
        jsonreport.write(report(), tmp_path / "report.json")
        assert (tmp_path / "report.json").stat().st_mode & 0o777 == mode
        assert os.umask(mask) == mask
    finally:
        os.umask(before)


def test_text_that_is_no_unicode_is_written(tmp_path: Path) -> None:
    """Undecodable bytes in names, which Python holds as lone surrogates, come back as they were."""
    path = tmp_path / "report.json"
    jsonreport.write(report("test_\udcff.py::test"), path)
    data = strict(path.read_text(encoding="utf-8"))
    assert data["records"][0]["nodeid"] == "test_\udcff.py::test"  # type: ignore[index]


def test_numbers_that_json_has_no_word_for_are_null(tmp_path: Path) -> None:
    """An infinite error does not make a file that other programs can't read."""
    path = tmp_path / "report.json"
    jsonreport.write(report("a", Check("values", "out", 1, False, math.inf, math.nan, 2.5)), path)
    data = strict(path.read_text())
    check = data["records"][0]["parity"]["checks"][0]  # type: ignore[index]
    assert (check["max_abs"], check["max_rel"], check["error_ratio"]) == (None, None, 2.5)
