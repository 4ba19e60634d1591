from __future__ import annotations

import dataclasses

import pytest

from pytest_dynamo.settings import BENCHMARK_LIMITS
from pytest_dynamo.settings import LIMIT_FIELDS
from pytest_dynamo.settings import MARKER_FIELDS
from pytest_dynamo.settings import PARITY_FIELDS
from pytest_dynamo.settings import RUN_FIELDS
from pytest_dynamo.settings import Checks
from pytest_dynamo.settings import Limits
from pytest_dynamo.settings import Run
from pytest_dynamo.settings import Settings
from pytest_dynamo.settings import SettingsError
from pytest_dynamo.settings import Tolerances


COUNTS = ("max_breaks", "max_recompiles", "max_graphs", "max_cudagraph_skips")
NUMBERS = ("max_compile_time", "max_memory_ratio", "min_speedup")


def test_defaults_judge_nothing_and_run_inductor_once() -> None:
    """Without a word from anybody no limit is judged and one default variant runs."""
    settings = Settings()
    assert all(value is None for value in vars(settings.limits).values())
    assert settings.run == Run(("inductor",), ("default",), (None,), (False,), (None,))
    assert settings.tolerances == Tolerances(None, None)
    assert settings.allow_uncompiled is False
    assert settings.marked == frozenset()


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [None, 0, 1, 10**9])
def test_counts_take_whole_numbers_from_zero(name: str, value: int | None) -> None:
    """A limit on a count is None or a whole number of 0 or more."""
    assert getattr(Limits(**{name: value}), name) == value


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "can't be negative: -1"),
        (1.0, "must be a whole number or None, not 1.0"),
        (True, "must be a whole number or None, not True"),
        ("0", "must be a whole number or None, not '0'"),
        ([0], r"must be a whole number or None, not \[0\]"),
    ],
)
def test_counts_refuse_everything_else(name: str, value: object, message: str) -> None:
    """A wrong count is refused with the name of the limit and the value."""
    with pytest.raises(SettingsError, match=f"^{name} {message}$"):
        Limits(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [None, 0, 0.0, 2, 1.5, float("inf")])
def test_measures_take_numbers_from_zero(name: str, value: float | None) -> None:
    """A limit on a measure is None or any number of 0 or more."""
    assert getattr(Limits(**{name: value}), name) == value


@pytest.mark.parametrize("cls", [Limits, Tolerances])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-0.1, "can't be negative: -0.1"),
        (float("nan"), "can't be negative: nan"),
        (False, "must be a number or None, not False"),
        ("1", "must be a number or None, not '1'"),
        (1j, "must be a number or None, not 1j"),
    ],
)
def test_numbers_refuse_everything_else(cls: type, value: object, message: str) -> None:
    """A negative number, NaN, a bool or a text is refused for measures and tolerances."""
    for name in NUMBERS if cls is Limits else ("rtol", "atol", "max_error_ratio"):
        with pytest.raises(SettingsError, match=f"^{name} {message}$"):
            cls(**{name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grad": "triple"}, "grad must be True, False, None or \"double\", not 'triple'"),
        ({"grad": 1}, 'grad must be True, False, None or "double", not 1'),
        ({"check_alias": None}, "check_alias must be True or False, not None"),
        ({"check_stride": 0}, "check_stride must be True or False, not 0"),
    ],
)
def test_what_is_checked_refuses_everything_else(given: dict[str, object], message: str) -> None:
    """Switches are switches: 1, 0 and None are no truth values, and there is no third derivative."""
    with pytest.raises(SettingsError, match=f"^{message}$"):
        Checks(**given)


def test_what_is_checked() -> None:
    """Gradients and aliasing are compared by default, strides on demand."""
    assert Checks() == Checks(grad=None, check_alias=True, check_stride=False)
    assert {Checks(grad=value).grad for value in (None, True, False, "double")} == {None, True, False, "double"}
    assert Settings().override({"check_stride": True, "grad": False}).checks == Checks(grad=False, check_stride=True)


def test_settings_error_is_a_value_error() -> None:
    """Who constructs settings by hand may catch ValueError."""
    assert issubclass(SettingsError, ValueError)


def test_override_replaces_named_fields_only() -> None:
    """Each given field is replaced, every other one stays, and the original is not touched."""
    base = Settings().override({"max_breaks": 3, "max_graphs": 5, "rtol": 0.5, "backend": ("eager",)})
    new = base.override({"max_breaks": 0, "mode": ("default", "max-autotune"), "allow_uncompiled": True})
    assert (new.limits.max_breaks, new.limits.max_graphs) == (0, 5)
    assert new.tolerances == Tolerances(rtol=0.5)
    assert (new.run.backend, new.run.mode) == (("eager",), ("default", "max-autotune"))
    assert new.allow_uncompiled is True
    assert (base.limits.max_breaks, base.allow_uncompiled) == (3, False)


def test_a_nearer_list_replaces_and_never_adds() -> None:
    """Overriding a list gives the nearer list alone."""
    base = Settings().override({"mode": ("default", "max-autotune")})
    assert base.override({"mode": ("reduce-overhead",)}).run.mode == ("reduce-overhead",)


def test_none_lifts_a_limit() -> None:
    """A nearer None means that the number is told and not judged."""
    assert Settings().override({"max_breaks": 0}).override({"max_breaks": None}).limits.max_breaks is None


def test_override_checks_values() -> None:
    """A wrong value is refused where it is given, not where it is used."""
    with pytest.raises(SettingsError, match="max_recompiles can't be negative: -2"):
        Settings().override({"max_recompiles": -2})


def test_override_keeps_what_was_marked() -> None:
    """Which fields a marker gave is not lost when another field is overridden."""
    base = dataclasses.replace(Settings(), marked=frozenset({"mode"}))
    assert base.override({"max_breaks": 1}).marked == {"mode"}


def test_settings_are_frozen() -> None:
    """No one can change the settings of a test while it runs."""
    for value, name in ((Settings(), "run"), (Limits(), "max_breaks"), (Run(), "mode"), (Tolerances(), "rtol")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


def test_marker_fields_are_those_of_the_documentation() -> None:
    """The marker takes exactly these keywords, each once, in the order of the documentation."""
    assert RUN_FIELDS == ("backend", "mode", "dynamic", "fullgraph", "options")
    assert (*COUNTS, *NUMBERS) == LIMIT_FIELDS
    assert set(BENCHMARK_LIMITS) == {"max_memory_ratio", "min_speedup"}
    assert PARITY_FIELDS == ("rtol", "atol", "max_error_ratio", "grad", "check_alias", "check_stride")
    assert (*RUN_FIELDS, *LIMIT_FIELDS, *PARITY_FIELDS, "allow_uncompiled") == MARKER_FIELDS
    assert len(set(MARKER_FIELDS)) == len(MARKER_FIELDS)
