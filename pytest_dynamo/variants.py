"""One way to call ``torch.compile``: its parameters, its id, and the product of a test's settings."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from pytest_dynamo.settings import Backend
from pytest_dynamo.settings import Run
from pytest_dynamo.settings import SettingsError


#: Backends that come with PyTorch and can be named without importing it.
#: ``tests/test_variants.py`` compares both tables with the installed torch.
BUILTIN_BACKENDS = (
    "inductor",
    "eager",
    "aot_eager",
    "aot_eager_decomp_partition",
    "aot_eager_default_partitioner",
    "cudagraphs",
    "eager_debug",
    "eager_noexcept",
    "pre_dispatch_eager",
)
#: Modes of the inductor backend.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite")
CUDAGRAPH_MODES = frozenset({"reduce-overhead", "max-autotune"})
BACKEND_ENTRY_POINTS = "torch_dynamo_backends"


@dataclass(frozen=True)
class Variant:
    """One way to call ``torch.compile``, with exactly its parameters."""

    backend: Backend = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    options: Mapping[str, Any] | None = None
    #: Tells apart variants that would otherwise have the same id.
    number: int | None = None

    @property
    def id(self) -> str:
        parts = [backend_name(self.backend)]
        if self.mode not in (None, "default"):
            parts.append(str(self.mode))
        if self.dynamic is not None:
            parts.append("dynamic" if self.dynamic else "static")
        if self.fullgraph:
            parts.append("fullgraph")
        if self.number is not None:
            parts.append(str(self.number))
        return "-".join(parts)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keywords for ``torch.compile``; importing a ``"module:attribute"`` backend if need be."""
        kwargs: dict[str, Any] = {
            "backend": resolve_backend(self.backend),
            "dynamic": self.dynamic,
            "fullgraph": self.fullgraph,
        }
        if self.mode not in (None, "default"):
            kwargs["mode"] = self.mode
        if self.options is not None:
            kwargs["options"] = dict(self.options)
        return kwargs

    @property
    def uses_cudagraphs(self) -> bool:
        """Whether the compiled code is meant to be recorded into CUDA graphs on a GPU."""
        if self.backend == "cudagraphs":
            return True
        if self.backend != "inductor":
            return False
        if self.options is not None:
            return bool(self.options.get("triton.cudagraphs", False))
        return self.mode in CUDAGRAPH_MODES

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "backend": backend_name(self.backend),
            "mode": self.mode,
            "dynamic": self.dynamic,
            "fullgraph": self.fullgraph,
            "options": None if self.options is None else {k: repr(v) for k, v in sorted(self.options.items())},
        }


def backend_name(backend: Backend) -> str:
    """Name of a backend as it stands in ids: callables and ``module:attr`` by their last name."""
    if isinstance(backend, str):
        return backend.rpartition(":")[2].rpartition(".")[2] if ":" in backend else backend
    return str(getattr(backend, "__name__", None) or type(backend).__name__)


def resolve_backend(backend: Backend) -> Backend:
    """Return what ``torch.compile`` takes as ``backend``."""
    if not isinstance(backend, str) or ":" not in backend:
        return backend
    module, _, attribute = backend.partition(":")
    found: Any = importlib.import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def check_backend(backend: object, torch_names: Any) -> None:
    """Raise SettingsError unless ``backend`` can be used.

    ``torch_names`` is called, and imports torch, only for a name that is neither built in nor an
    entry point.
    """
    if not isinstance(backend, str):
        if not callable(backend):
            raise SettingsError(f"backend must be a name, 'package.module:attribute' or a callable, not {backend!r}")
        return
    if ":" in backend:
        try:
            found = resolve_backend(backend)
        except (ImportError, AttributeError, ValueError) as error:
            raise SettingsError(f"backend {backend!r} can't be imported: {error}") from None
        if not callable(found):
            raise SettingsError(f"backend {backend!r} is not callable")
        return
    if backend in BUILTIN_BACKENDS:
        return
    installed = {point.name for point in importlib.metadata.entry_points(group=BACKEND_ENTRY_POINTS)}
    if backend in installed:
        return
    known = {*BUILTIN_BACKENDS, *installed, *torch_names()}
    if backend not in known:
        raise SettingsError(f"unknown backend {backend!r}{suggest(backend, known)}")


def check_mode(mode: object) -> None:
    if mode not in MODES:
        raise SettingsError(f"unknown mode {mode!r}{suggest(str(mode), MODES)}")


def suggest(word: str, known: Any) -> str:
    """Say the nearest valid word, or all of them if none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(map(repr, names))}"


def has_modes(backend: Backend) -> bool:
    """Modes belong to inductor; other backends ignore them with a warning or fail on them."""
    return backend == "inductor"


def takes_options(backend: Backend) -> bool:
    """Torch's own backends but inductor ignore options with a warning; those of others may take them."""
    return has_modes(backend) or backend not in BUILTIN_BACKENDS


def expand(run: Run) -> tuple[Variant, ...]:
    """Return the variants of a test in the order in which its lists were written.

    Modes multiply inductor only, options also backends that don't come with torch; any other backend
    appears once for each ``dynamic`` and ``fullgraph``. Equal variants appear once.
    """
    made: list[Variant] = []
    for backend in run.backend:
        for mode in run.mode if has_modes(backend) else (None,):
            for options in run.options if takes_options(backend) else (None,):
                for dynamic in run.dynamic:
                    for fullgraph in run.fullgraph:
                        # torch.compile refuses mode and options together, also mode="default".
                        real_mode = mode if options is None else None
                        variant = Variant(backend, real_mode, dynamic, fullgraph, options)
                        if variant not in made:
                            made.append(variant)
    return _numbered(made)


def _numbered(variants: list[Variant]) -> tuple[Variant, ...]:
    taken = {variant.id for variant in variants}
    seen: set[str] = set()
    out = []
    for variant in variants:
        one = variant
        if variant.id in seen:
            # A name may itself end in a number.
            numbered = (replace(variant, number=number) for number in itertools.count(2))
            one = next(candidate for candidate in numbered if candidate.id not in taken)
            taken.add(one.id)
        seen.add(one.id)
        out.append(one)
    return tuple(out)
