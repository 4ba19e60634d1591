"""The README says what happens: its example is run, its commands are those that CI runs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """Contents of the fenced blocks of one language, in their order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def command(name: str) -> str:
    return re.search(rf"<!-- {name} -->\n```\n(.*)\n```\n<!-- end -->", README)[1]


def test_the_first_example_prints_what_it_says(project):
    """The smallest test fails with the lines that stand below it."""
    project.pytester.path.joinpath("test_model.py").write_text(blocks("python")[0])
    run = project.run("test_model.py", json_report=False)
    run.result.assert_outcomes(failed=1)
    shown = textwrap.dedent(blocks("")[0]).splitlines()
    assert shown[0] == "$ pytest test_model.py"
    assert shown[1].strip("_") == " test_normalize[inductor] "
    told = " ".join(" ".join(shown[2:]).split())
    assert told in " ".join(run.text.split())


def test_commands():
    """Two commands, one for the demo and one for the tests; CI takes the second from here."""
    assert command("demo") == 'python -m pip install -e ".[demo]" && python -m pytest tests/examples'
    assert command("test") == 'python -m pip install -e ".[test]" && python -m pytest -n 2'
    assert "<!-- test -->" in (ROOT / ".ci" / "run").read_text()


def test_every_option_and_keyword_is_documented():
    """The tables name all options and all keywords of the marker that can be used."""
    from pytest_dynamo.options import _OPTIONS
    from pytest_dynamo.settings import MARKER_FIELDS

    for name, *_ in _OPTIONS:
        assert f"--dynamo-{name.replace('_', '-')}=" in README
    for name in MARKER_FIELDS:
        assert f"`{name}`" in README
