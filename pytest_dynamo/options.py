"""Command line, ini and markers → `Settings`. Imported by every run, so it imports little."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest


if TYPE_CHECKING:
    from pytest_dynamo.settings import Run
    from pytest_dynamo.settings import Search
    from pytest_dynamo.settings import Settings

CAPS = ("max_breaks", "max_recompiles", "max_cudagraph_skips")


def parse_count(text: str) -> int:
    """Parse a limit: a whole number, not negative."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of 0 or more, got {text!r}")
    return value


def parse_names(text: str) -> tuple[str, ...]:
    """Parse a list such as ``a,b``."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError("expected one or more names, separated by commas")
    return names


_DYNAMIC = {"none": None, "true": True, "false": False}


def parse_dynamic(text: str) -> tuple[bool | None, ...]:
    """Parse a list of torch.compile's values of ``dynamic``."""
    names = parse_names(text.lower())
    unknown = [name for name in names if name not in _DYNAMIC]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(_DYNAMIC)}, got {unknown[0]!r}")
    return tuple(_DYNAMIC[name] for name in names)


def parse_reset(text: str) -> str:
    if text not in ("test", "never"):
        raise argparse.ArgumentTypeError(f"expected test or never, got {text!r}")
    return text


def parse_seconds(text: str) -> float:
    """Parse a number of seconds of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds of 0 or more, got {text!r}")
    return value


def parse_percent(text: str) -> float:
    """Parse a number of percent, such as ``5`` or ``2.5``."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of percent of 0 or more, got {text!r}")
    return value


def parse_path(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r}")
    return text


#: Name without ``dynamo_``, parser, metavar, help. Every one is an option and an ini value.
_OPTIONS: tuple[tuple[str, Callable[[str], Any], str, str], ...] = (
    ("max_breaks", parse_count, "N", "fail every test that compiles with more than N graph breaks"),
    ("max_recompiles", parse_count, "N", "fail every test that compiles with more than N recompiles"),
    ("max_cudagraph_skips", parse_count, "N", "fail every test in which more than N graphs miss their CUDA graph"),
    ("backends", parse_names, "A,B", "run the tests that use `compiled` with these backends"),
    ("modes", parse_names, "A,B", "run the tests that use `compiled` in these modes of inductor"),
    ("dynamic", parse_dynamic, "A,B", "values of torch.compile's `dynamic`: some of none, true, false"),
    ("reset", parse_reset, "test|never", "when compiled code is thrown away (default: test)"),
    ("stage_timeout", parse_seconds, "S", "look for the first diverging stage for S seconds at most (60; 0: don't)"),
    ("max_slowdown", parse_percent, "P", "how many percent slower than its accepted runs a benchmark may be at least"),
    ("confirm", parse_count, "N", "time a benchmark that seems slower again in N fresh processes (2)"),
    ("json", parse_path, "FILE", "write a report as JSON"),
    ("artifacts", parse_path, "DIR", "for calls that differ from eager write scripts that show it without pytest"),
)


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("dynamo", "regressions of torch.compile")
    for name, parse, metavar, text in _OPTIONS:
        option = f"--dynamo-{name.replace('_', '-')}"
        group.addoption(option, dest=f"dynamo_{name}", type=parse, metavar=metavar, default=None, help=text)
        parser.addini(f"dynamo_{name}", f"default for {option}", default=None)
    text = "fail tests in which something could not be checked"
    group.addoption("--dynamo-require-checked", action="store_true", default=None, help=text)
    parser.addini("dynamo_require_checked", "default for --dynamo-require-checked", type="bool", default=None)
    text = "go on from the first diverging stage to the pass or operation, with torch's compiler bisector"
    group.addoption("--dynamo-bisect", action="store_true", default=None, help=text)
    parser.addini("dynamo_bisect", "default for --dynamo-bisect", type="bool", default=None)
    text = "keep the times of eager code and of compiling as benchmarks of their own, NAME:eager and NAME:compile"
    group.addoption("--dynamo-benchmark-rows", action="store_true", default=None, help=text)
    parser.addini("dynamo_benchmark_rows", "default for --dynamo-benchmark-rows", type="bool", default=None)
    text = "make the benchmarks of this run the baseline of later ones"
    group.addoption("--dynamo-accept", action="store_true", default=False, help=text)


def option(config: pytest.Config, name: str) -> Any:
    """Value of an option from the command line, else from the ini file, else None."""
    value = config.getoption(f"dynamo_{name}", None)
    return _ini(config, name) if value is None else value


def option_given(config: pytest.Config, name: str) -> bool:
    """Whether one of the options that are no ini value too was given."""
    return bool(config.getoption(f"dynamo_{name}", False))


def _ini(config: pytest.Config, name: str) -> Any:
    try:
        text = config.getini(f"dynamo_{name}")
    except (ValueError, pytest.UsageError) as error:  # a truth value that is none
        raise pytest.UsageError(f"dynamo_{name}: {error}") from None
    if text is None or not isinstance(text, str):
        return text
    parse = next(parse for own, parse, _, _ in _OPTIONS if own == name)
    try:
        return parse(text)
    except argparse.ArgumentTypeError as error:
        raise pytest.UsageError(f"dynamo_{name}: {error}") from None


def any_given(config: pytest.Config) -> bool:
    """Whether the command line or the ini file asks for anything of this plugin."""
    return any(option(config, name) is not None for name, _, _, _ in _OPTIONS) or bool(
        option(config, "require_checked") or option_given(config, "accept")
    )


def path_of(config: pytest.Config, name: str) -> Path | None:
    """Path that an option or ini value names: ini from rootdir, command line from the current folder."""
    given, ini = config.getoption(f"dynamo_{name}", None), _ini(config, name)
    if given is None and ini is None:
        return None
    return Path(config.rootpath, ini) if given is None else Path(config.invocation_params.dir, given)


def json_path(config: pytest.Config) -> Path | None:
    """Where the JSON report goes; raises UsageError if there is a folder already."""
    path = path_of(config, "json")
    if path is not None and path.is_dir():
        given = config.getoption("dynamo_json", None)
        name = "dynamo_json" if given is None else "--dynamo-json"
        raise pytest.UsageError(f"{name}: {given or _ini(config, 'json')} is a folder")
    return path


# -- settings -------------------------------------------------------------------------------------


def settings_from_config(config: pytest.Config) -> Settings:
    """Settings of a test without a marker; raises UsageError."""
    from pytest_dynamo.settings import Settings
    from pytest_dynamo.settings import SettingsError

    values = {name: option(config, name) for name in CAPS}
    for name, field in (("backends", "backend"), ("modes", "mode"), ("dynamic", "dynamic")):
        values[field] = option(config, name)
    try:
        _check_run(values)
        return Settings().override({name: value for name, value in values.items() if value is not None})
    except SettingsError as error:
        raise pytest.UsageError(f"pytest-dynamo: {error}") from None


def search_from_config(config: pytest.Config) -> Search:
    """How far to look into calls that fail."""
    from pytest_dynamo.settings import Search

    seconds, folder = option(config, "stage_timeout"), path_of(config, "artifacts")
    return Search(
        stage_timeout=Search().stage_timeout if seconds is None else seconds,
        bisect=bool(option(config, "bisect")),
        artifacts=None if folder is None else str(folder),
    )


def chosen_run(config: pytest.Config) -> dict[str, tuple[Any, ...]]:
    """What-to-run fields that the command line, not the ini file, chooses."""
    names = {"backend": "dynamo_backends", "mode": "dynamo_modes", "dynamic": "dynamo_dynamic"}
    chosen = {field: config.getoption(name, None) for field, name in names.items()}
    return {field: value for field, value in chosen.items() if value is not None}


def _check_run(values: dict[str, Any]) -> None:
    from pytest_dynamo import variants

    for backend in values.get("backend") or ():
        variants.check_backend(backend, _torch_backends)
    for mode in values.get("mode") or ():
        variants.check_mode(mode)


def _torch_backends() -> list[str]:
    import torch

    return list(torch.compiler.list_backends(exclude_tags=()))


# -- markers --------------------------------------------------------------------------------------


def marker_layers(node: pytest.Item | Any) -> Iterator[tuple[pytest.Item | Any, list[pytest.Mark]]]:
    """Yield the markers on each node, the nearest node first.

    Within an item: those that a hook added, those of its ``pytest.param``, those of the function.
    A class yields one layer for each class that it inherits from.
    """
    for level in reversed(node.listchain()):
        marks = [mark for mark in level.own_markers if mark.name == "compiled"]
        if not marks:
            continue
        if isinstance(level, pytest.Item):
            layers = _item_layers(level, marks)
        elif isinstance(level, pytest.Class):
            layers = _split(marks, [_written(cls, own=True) for cls in level.obj.__mro__])
        else:
            layers = [marks]
        for layer in layers:
            if layer:
                yield level, layer


def late_markers(item: pytest.Item | Any) -> list[pytest.Mark]:
    """Markers on a test that came after its variants were made: from a hook or its ``pytest.param``."""
    *late, _ = _item_layers(item, [mark for mark in item.own_markers if mark.name == "compiled"])
    return [mark for layer in late for mark in layer]


def _item_layers(item: pytest.Item | Any, marks: list[pytest.Mark]) -> list[list[pytest.Mark]]:
    param = [getattr(mark, "mark", mark) for mark in getattr(getattr(item, "callspec", None), "marks", ())]
    return _split(marks, [param, _written(getattr(item, "obj", None))])


def _split(marks: list[pytest.Mark], known: list[list[Any]]) -> list[list[pytest.Mark]]:
    """Sort markers into those that a hook added and the ``known`` layers.

    By identity, each once: one marker object may stand on a class and again on its base class.
    """
    left = list(marks)
    layers = []
    for layer in known:
        layers.append([mark for mark in layer if any(mark is one for one in left)])
        for mark in layers[-1]:
            del left[next(n for n, one in enumerate(left) if one is mark)]
    return [left, *layers]


def _written(obj: Any, own: bool = False) -> list[pytest.Mark]:
    """Markers of ours in the source code of a function or class."""
    found: Any = vars(obj).get("pytestmark", []) if own else getattr(obj, "pytestmark", [])
    marks: list[Any] = [getattr(mark, "mark", mark) for mark in (found if isinstance(found, list) else [found])]
    return [mark for mark in marks if mark.name == "compiled"]


def is_ours(mark: pytest.Mark) -> bool:
    """Whether a marker names a keyword of ours: others may use the word ``compiled`` for themselves."""
    from pytest_dynamo.settings import MARKER_FIELDS

    return any(name in MARKER_FIELDS for name in mark.kwargs)


def marker_values(node: pytest.Item | Any, *, ours: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the values that markers give, and how far away the marker of each is: 0 is nearest.

    ``ours``: the test uses our fixtures, so every marker ``compiled`` is meant for us.
    Raises SettingsError.
    """
    from pytest_dynamo.settings import MARKER_FIELDS
    from pytest_dynamo.settings import RUN_FIELDS
    from pytest_dynamo.settings import SettingsError
    from pytest_dynamo.variants import suggest

    values: dict[str, Any] = {}
    distances: dict[str, int] = {}
    for distance, (_, marks) in enumerate(marker_layers(node)):
        here: dict[str, Any] = {}
        for mark in marks:
            if not ours and not is_ours(mark):
                continue
            if mark.args:
                raise SettingsError(f"takes keywords only, not {mark.args[0]!r}")
            for name, value in mark.kwargs.items():
                if name not in MARKER_FIELDS:
                    raise SettingsError(f"unknown keyword {name!r}{suggest(name, MARKER_FIELDS)}")
                if name in here:
                    raise SettingsError(f"{name} is given twice")
                here[name] = _listed(name, value) if name in RUN_FIELDS else value
        for name, value in here.items():
            if name not in values:
                values[name], distances[name] = value, distance
    return values, distances


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    from pytest_dynamo.settings import SettingsError

    listed = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not listed:
        raise SettingsError(f"{name} is an empty list; leave it out for the default")
    allowed = {"dynamic": (bool, type(None)), "fullgraph": (bool,), "options": (dict, type(None)), "mode": (str,)}
    for one in listed:
        if name in allowed and not isinstance(one, allowed[name]):
            wanted = {
                "dynamic": "True, False or None",
                "fullgraph": "True or False",
                "options": "a dict",
                "mode": "a name",
            }
            raise SettingsError(f"{name} must be {wanted[name]} or a list of such, not {one!r}")
    return listed


def settings_for(node: pytest.Item | Any, base: Settings, *, ours: bool) -> Settings:
    """Settings of a test: those of the run, overridden by its markers. Raises SettingsError."""
    from dataclasses import replace

    from pytest_dynamo.settings import BENCHMARK_LIMITS
    from pytest_dynamo.settings import SettingsError

    values, distances = marker_values(node, ours=ours)
    _check_run(values)
    if not isinstance(values.get("allow_uncompiled", False), bool):
        raise SettingsError(f"allow_uncompiled must be True or False, not {values['allow_uncompiled']!r}")
    settings = replace(base.override(values), marked=frozenset(values))
    _check_combination(settings.run, values, distances)
    for name in BENCHMARK_LIMITS:
        if values.get(name) is not None and "compiled_benchmark" not in getattr(node, "fixturenames", ()):
            raise SettingsError(f"{name} needs the fixture compiled_benchmark")
    return settings


def _check_combination(run: Run, values: dict[str, Any], distances: dict[str, int]) -> None:
    from pytest_dynamo.settings import SettingsError
    from pytest_dynamo.variants import backend_name
    from pytest_dynamo.variants import has_modes

    if "mode" not in values:
        return
    # A mode for a whole module leaves a test alone that asks for another backend by itself.
    meant_for_it = "backend" in values and distances["mode"] <= distances["backend"]
    if meant_for_it and not any(has_modes(backend) for backend in run.backend):
        names = ", ".join(repr(backend_name(backend)) for backend in run.backend)
        raise SettingsError(f"mode {run.mode[0]!r} on backend {names}, which has no modes; known: 'inductor'")
    if any(mode != "default" for mode in run.mode) and any(options is not None for options in run.options):
        raise SettingsError("mode and options exclude each other in torch.compile")


def narrowed(run: Run, marked: frozenset[str], chosen: dict[str, tuple[Any, ...]]) -> Run | None:
    """What the command line leaves of a test's lists; None: nothing.

    Fields without a marker have been replaced already.
    """
    from dataclasses import replace

    from pytest_dynamo.variants import backend_name
    from pytest_dynamo.variants import resolve_backend

    left: dict[str, tuple[Any, ...]] = {}
    for field, wanted in chosen.items():
        if field in marked:
            own = getattr(run, field)
            if field == "backend":
                # A test may hold the callable that the command line names as "module:attribute".
                same = [resolve_backend(backend) for backend in wanted]
                left[field] = tuple(b for b in own if resolve_backend(b) in same or backend_name(b) in wanted)
            else:
                left[field] = tuple(value for value in own if value in wanted)
            if not left[field]:
                return None
    return replace(run, **left)
