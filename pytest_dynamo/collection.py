"""From markers to variants while tests are collected, and what can be wrong with markers."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_dynamo import options
from pytest_dynamo.fixtures import uses_ours
from pytest_dynamo.session import activate
from pytest_dynamo.settings import PARITY_FIELDS
from pytest_dynamo.settings import RUN_FIELDS
from pytest_dynamo.settings import Settings
from pytest_dynamo.settings import SettingsError
from pytest_dynamo.variants import expand


#: Nodes below which some collected test uses our fixtures.
users_key = pytest.StashKey[set[str]]()
#: Settings with which the variants of a function were made, by its nodeid without brackets.
made_key = pytest.StashKey[dict[str, Settings]]()

_NEEDS_FIXTURE = (*RUN_FIELDS, *PARITY_FIELDS)


def generate(metafunc: pytest.Metafunc) -> None:
    """Make one test for each variant; fail the collection of a file whose marker is wrong."""
    definition = metafunc.definition
    config = definition.config
    ours = uses_ours(definition)
    if not ours and not any(options.is_ours(m) for m in definition.iter_markers("compiled")):
        return  # the word "compiled" belongs to somebody else here
    base = activate(config).watcher.base
    try:
        settings = options.settings_for(definition, base, ours=ours)
        if not ours:
            _refuse_without_fixture(definition)
    except SettingsError as error:
        # "from None": without it pytest prints the message twice, as a chain of exceptions.
        raise pytest.fail.Exception(_told(definition, error), pytrace=False) from None
    if not ours:
        return
    users = config.stash.setdefault(users_key, set())
    users.update(node.nodeid for node in definition.listchain())
    config.stash.setdefault(made_key, {})[_function_id(definition)] = settings
    ids = [variant.id for variant in expand(settings.run)]
    metafunc.parametrize("compiled_variant", ids, indirect=True, ids=ids)


def _told(item: Any, error: SettingsError) -> str:
    return f"{item.nodeid}: @pytest.mark.compiled: {error}"


def _refuse_without_fixture(item: Any) -> None:
    """A test without our fixtures can't have variants, so a keyword about them is a mistake."""
    for name in _NEEDS_FIXTURE:
        if any(name in mark.kwargs for mark in _own_markers(item)):
            raise SettingsError(f"{name} needs the fixture compiled{_hidden(item)}")


def _own_markers(item: Any) -> list[pytest.Mark]:
    return [mark for node, marks in options.marker_layers(item) if node is item for mark in marks]


def _hidden(item: Any) -> str:
    info = getattr(item, "_fixtureinfo", None)
    foreign = info.name2fixturedefs.get("compiled") if info is not None else None
    if not foreign:
        return " or compiled_variant"
    func = foreign[-1].func
    return f", and this test uses another fixture of that name, from {getattr(func, '__module__', '?')}"


def _function_id(item: Any) -> str:
    parent = item.parent.nodeid if item.parent is not None else ""
    return f"{parent}::{getattr(item, 'originalname', None) or item.name}"


def check(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check what could not be checked before: late markers, TestCase methods, whole classes and modules."""
    marked = [i for i in items if uses_ours(i) or any(options.is_ours(m) for m in i.iter_markers("compiled"))]
    if not marked:
        return
    base = activate(config).watcher.base
    # Methods of a unittest.TestCase never came by `generate`.
    users = config.stash.setdefault(users_key, set())
    users.update(node.nodeid for item in marked if uses_ours(item) for node in item.listchain())
    deselected = []
    for item in marked:
        try:
            settings = _check_item(config, item, base)
        except SettingsError as error:
            raise pytest.UsageError(_told(item, error)) from None
        if settings is not None and not _chosen(config, item, settings):
            deselected.append(item)
    if deselected:
        gone = set(map(id, deselected))
        items[:] = [item for item in items if id(item) not in gone]
        config.hook.pytest_deselected(items=deselected)


def _check_item(config: pytest.Config, item: pytest.Item, base: Settings) -> Settings | None:
    ours = uses_ours(item)
    settings = options.settings_for(item, base, ours=ours)
    made = config.stash.get(made_key, {}).get(_function_id(item))
    for name in RUN_FIELDS:
        if _is_testcase(item) and any(name in mark.kwargs for mark in _own_markers(item)):
            raise SettingsError(f"{name} can't make variants of a unittest.TestCase method")
        late = any(name in mark.kwargs for mark in options.late_markers(item))
        if made is not None and (late or getattr(made.run, name) != getattr(settings.run, name)):
            raise SettingsError(f"{name} comes too late to make variants: put it on the function, class or module")
    if ours:
        return settings
    _refuse_without_fixture(item)
    _check_wide_markers(config, item)
    return None


def _is_testcase(item: pytest.Item) -> bool:
    from _pytest.unittest import TestCaseFunction

    return isinstance(item, TestCaseFunction)


def _check_wide_markers(config: pytest.Config, item: pytest.Item) -> None:
    """A keyword about variants on a class or module none of whose tests can have any is a mistake."""
    if any("::" in str(argument) for argument in config.args):
        return  # only a part of the file was collected
    users = config.stash.get(users_key, set())
    for node, marks in options.marker_layers(item):
        if node is item or node.nodeid in users:
            continue
        for name in _NEEDS_FIXTURE:
            if any(name in mark.kwargs for mark in marks):
                what = "class" if isinstance(node, pytest.Class) else "module"
                raise SettingsError(f"{name} on {what} {node.nodeid}, none of whose tests uses the fixture compiled")


def _chosen(config: pytest.Config, item: Any, settings: Settings) -> bool:
    """Whether the command line leaves this variant of the test."""
    chosen = options.chosen_run(config)
    callspec = getattr(item, "callspec", None)
    if not chosen or callspec is None or "compiled_variant" not in callspec.params:
        return True
    left = options.narrowed(settings.run, settings.marked, chosen)
    if left is None:
        return False
    full = {variant.id: variant for variant in expand(settings.run)}
    variant = full[callspec.params["compiled_variant"]]
    from dataclasses import replace

    return any(replace(variant, number=None) == replace(one, number=None) for one in expand(left))
