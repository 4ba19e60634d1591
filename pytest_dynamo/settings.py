"""What a test allows and how it is compiled: frozen values, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields
from dataclasses import replace
from typing import Any


#: A backend as users write it: a name, ``"package.module:attribute"``, or a callable.
Backend = str | Callable[..., Any]


class SettingsError(ValueError):
    """A value that a setting can't have; the text says which and what would be right."""


#: Limits on what only ``compiled_benchmark`` measures.
BENCHMARK_LIMITS = ("max_memory_ratio", "min_speedup")


def _check_number(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise SettingsError(f"{name} must be a number or None, not {value!r}")
    if not value >= 0:
        raise SettingsError(f"{name} can't be negative: {value!r}")


@dataclass(frozen=True)
class Limits:
    """What a test may cost; ``None`` means that the number is told and not judged."""

    max_breaks: int | None = None
    max_recompiles: int | None = None
    max_graphs: int | None = None
    max_cudagraph_skips: int | None = None
    #: Seconds of compilation in the test.
    max_compile_time: float | None = None
    #: These two need the fixture ``compiled_benchmark``.
    max_memory_ratio: float | None = None
    min_speedup: float | None = None

    @property
    def any_given(self) -> bool:
        """Whether anything is judged."""
        return any(value is not None for value in vars(self).values())

    def __post_init__(self) -> None:
        for name in ("max_breaks", "max_recompiles", "max_graphs", "max_cudagraph_skips"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise SettingsError(f"{name} must be a whole number or None, not {value!r}")
            if value < 0:
                raise SettingsError(f"{name} can't be negative: {value!r}")
        for name in ("max_compile_time", *BENCHMARK_LIMITS):
            _check_number(name, getattr(self, name))


@dataclass(frozen=True)
class Tolerances:
    """How far compiled values may be from eager's; ``None`` takes the default of the dtype."""

    #: Given by the user these are final; otherwise a float64 run decides where they are exceeded.
    rtol: float | None = None
    atol: float | None = None
    #: How many times as far from the float64 result as eager compiled may be.
    max_error_ratio: float | None = None

    def __post_init__(self) -> None:
        for name in ("rtol", "atol", "max_error_ratio"):
            _check_number(name, getattr(self, name))


#: Values of `Checks.grad`.
GRAD = (None, True, False, "double")


@dataclass(frozen=True)
class Checks:
    """What is compared besides values and state."""

    #: Gradients for one random cotangent. None: whenever an output requires grad. ``"double"``: those of
    #: the gradients too.
    grad: bool | str | None = None
    #: Which results share memory with arguments and with each other.
    check_alias: bool = True
    #: Strides of results, in dimensions with more than one element.
    check_stride: bool = False

    def __post_init__(self) -> None:
        if not any(self.grad is value for value in GRAD[:3]) and self.grad != "double":
            raise SettingsError(f'grad must be True, False, None or "double", not {self.grad!r}')
        for name in ("check_alias", "check_stride"):
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(f"{name} must be True or False, not {getattr(self, name)!r}")


@dataclass(frozen=True)
class Run:
    """What to run: every field is a tuple, and their product makes the variants."""

    backend: tuple[Backend, ...] = ("inductor",)
    mode: tuple[str, ...] = ("default",)
    dynamic: tuple[bool | None, ...] = (None,)
    fullgraph: tuple[bool, ...] = (False,)
    options: tuple[Mapping[str, Any] | None, ...] = (None,)


@dataclass(frozen=True)
class Search:
    """How far to look into a call that failed."""

    #: Seconds to look for the first diverging stage; 0: don't.
    stage_timeout: float = 60.0
    #: Go on to the pass with torch's compiler bisector.
    bisect: bool = False
    #: Folder for scripts that show the difference without pytest.
    artifacts: str | None = None


@dataclass(frozen=True)
class Settings:
    """Everything that options, ini and markers say about one test."""

    run: Run = Run()
    limits: Limits = Limits()
    tolerances: Tolerances = Tolerances()
    checks: Checks = Checks()
    allow_uncompiled: bool = False
    #: Names of the fields that a marker gave, for "allowed by its marker" and for narrowing.
    marked: frozenset[str] = frozenset()

    def override(self, values: Mapping[str, Any]) -> Settings:
        """Return a copy in which each named field has the given value."""
        parts: dict[str, Any] = {}
        for part in ("run", "limits", "tolerances", "checks"):
            own = getattr(self, part)
            given = {k: v for k, v in values.items() if k in field_names(type(own))}
            if given:
                parts[part] = replace(own, **given)
        if "allow_uncompiled" in values:
            parts["allow_uncompiled"] = values["allow_uncompiled"]
        return replace(self, **parts)


def field_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


RUN_FIELDS = field_names(Run)
LIMIT_FIELDS = field_names(Limits)
#: Fields that say how parity is judged.
PARITY_FIELDS = (*field_names(Tolerances), *field_names(Checks))
#: Keywords of the marker, in the order in which the documentation lists them.
MARKER_FIELDS = (*RUN_FIELDS, *LIMIT_FIELDS, *PARITY_FIELDS, "allow_uncompiled")
