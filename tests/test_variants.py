from __future__ import annotations

import functools
import sys
from typing import Any

import pytest

from pytest_dynamo.settings import Run
from pytest_dynamo.settings import SettingsError
from pytest_dynamo.variants import BUILTIN_BACKENDS
from pytest_dynamo.variants import CUDAGRAPH_MODES
from pytest_dynamo.variants import MODES
from pytest_dynamo.variants import Variant
from pytest_dynamo.variants import backend_name
from pytest_dynamo.variants import check_backend
from pytest_dynamo.variants import check_mode
from pytest_dynamo.variants import expand
from pytest_dynamo.variants import has_modes
from pytest_dynamo.variants import resolve_backend
from pytest_dynamo.variants import suggest


def my_backend(gm: Any, example_inputs: Any) -> Any:
    return gm.forward


def another(name: str) -> Any:
    def backend(gm: Any, example_inputs: Any) -> Any:
        return gm.forward

    backend.__name__ = name
    return backend


class Backend:
    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        return gm.forward

    class Inner:
        compile = staticmethod(my_backend)


not_callable = 3


def ids(**lists: Any) -> list[str]:
    return [variant.id for variant in expand(Run(**lists))]


def never_asked() -> list[str]:
    raise AssertionError("torch was asked for its backends")


# -- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (Variant(), "inductor"),
        (Variant(mode="default"), "inductor"),
        (Variant(mode="max-autotune"), "inductor-max-autotune"),
        (Variant(backend="aot_eager", dynamic=True), "aot_eager-dynamic"),
        (Variant(backend="aot_eager", dynamic=False), "aot_eager-static"),
        (Variant(backend="eager", fullgraph=True), "eager-fullgraph"),
        (Variant("inductor", "reduce-overhead", True, True), "inductor-reduce-overhead-dynamic-fullgraph"),
        (Variant(options={"max_autotune": True}), "inductor"),
        (Variant(number=2), "inductor-2"),
        (Variant("inductor", "lite", False, True, None, 3), "inductor-lite-static-fullgraph-3"),
        (Variant(backend=my_backend), "my_backend"),
        (Variant(backend=Backend()), "Backend"),
        (Variant(backend="some.package:thing"), "thing"),
        (Variant(backend="some.package:Class.method", dynamic=True), "method-dynamic"),
    ],
)
def test_id(variant: Variant, expected: str) -> None:
    """An id tells backend, mode, dynamic, fullgraph and number, and leaves defaults out."""
    assert variant.id == expected


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("inductor", "inductor"),
        ("my.dotted.name", "my.dotted.name"),
        ("package.module:attr", "attr"),
        ("package:A.b.c", "c"),
        (my_backend, "my_backend"),
        (Backend(), "Backend"),
        (functools.partial(my_backend), "partial"),
    ],
)
def test_backend_name(backend: Any, expected: str) -> None:
    """Callables and ``module:attr`` go by their last name, registered backends by their own."""
    assert backend_name(backend) == expected


# -- expand ---------------------------------------------------------------------------------------


def test_modes_multiply_inductor_only() -> None:
    """Every mode belongs to inductor; another backend appears once, in the order of the list."""
    assert ids(backend=("eager", "inductor", "aot_eager"), mode=("default", "max-autotune")) == [
        "eager",
        "inductor",
        "inductor-max-autotune",
        "aot_eager",
    ]


def test_product_keeps_the_order_of_the_lists() -> None:
    """The last lists vary fastest."""
    lists: dict[str, Any] = {"mode": ("default", "lite"), "dynamic": (None, True, False), "fullgraph": (False, True)}
    assert ids(**lists) == [
        f"inductor{mode}{dynamic}{full}"
        for mode in ("", "-lite")
        for dynamic in ("", "-dynamic", "-static")
        for full in ("", "-fullgraph")
    ]


def test_equal_variants_appear_once() -> None:
    """A value that is listed twice makes one variant."""
    assert ids(backend=("eager", "eager"), dynamic=(True, True)) == ["eager-dynamic"]
    assert ids(options=({"a": 1}, {"a": 1})) == ["inductor"]


def test_equal_ids_are_numbered() -> None:
    """Variants that differ only in options get numbers from the second on."""
    made = expand(Run(options=(None, {"max_autotune": True}, {"max_autotune": False}), dynamic=(None, True)))
    assert [variant.id for variant in made] == [
        "inductor",
        "inductor-dynamic",
        "inductor-2",
        "inductor-dynamic-2",
        "inductor-3",
        "inductor-dynamic-3",
    ]
    assert [variant.options for variant in made[::2]] == [None, {"max_autotune": True}, {"max_autotune": False}]


def test_callables_of_one_name_are_numbered() -> None:
    """Two backends that have the same name are two variants."""
    one, two = another("twin"), another("twin")
    made = expand(Run(backend=(one, two, "package:twin")))
    assert [variant.id for variant in made] == ["twin", "twin-2", "twin-3"]
    assert made[0].backend is one
    assert made[1].backend is two


def test_ids_are_unique_even_where_a_name_ends_in_a_number() -> None:
    """A number never makes an id that another variant has by its name."""
    made = ids(backend=(another("b"), another("b-2"), another("b")))
    assert len(set(made)) == 3


def test_options_exclude_a_mode() -> None:
    """torch.compile refuses mode and options together, so the mode is left out."""
    (variant,) = expand(Run(options=({"max_autotune": True},)))
    assert variant.mode is None
    assert "mode" not in variant.kwargs


def test_options_do_not_multiply_backends_that_ignore_them() -> None:
    """Torch's other backends ignore options with a warning: they appear once, without them."""
    made = expand(Run(backend=("inductor", "eager"), options=(None, {"max_autotune": True})))
    assert [(variant.id, variant.options) for variant in made] == [
        ("inductor", None),
        ("inductor-2", {"max_autotune": True}),
        ("eager", None),
    ]


def test_options_reach_backends_of_others() -> None:
    """A callable may take options, so they are passed to it."""
    made = expand(Run(backend=(my_backend,), options=({"level": 1}, {"level": 2})))
    assert [(variant.id, variant.options) for variant in made] == [
        ("my_backend", {"level": 1}),
        ("my_backend-2", {"level": 2}),
    ]


# -- kwargs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (Variant(), {"backend": "inductor", "dynamic": None, "fullgraph": False}),
        (Variant(mode="default"), {"backend": "inductor", "dynamic": None, "fullgraph": False}),
        (
            Variant("inductor", "max-autotune", True, True),
            {"backend": "inductor", "dynamic": True, "fullgraph": True, "mode": "max-autotune"},
        ),
        (
            Variant(options={"epilogue_fusion": True}),
            {"backend": "inductor", "dynamic": None, "fullgraph": False, "options": {"epilogue_fusion": True}},
        ),
        (Variant(backend=my_backend), {"backend": my_backend, "dynamic": None, "fullgraph": False}),
        (
            Variant(backend=f"{__name__}:Backend.Inner.compile"),
            {"backend": my_backend, "dynamic": None, "fullgraph": False},
        ),
    ],
)
def test_kwargs(variant: Variant, expected: dict[str, Any]) -> None:
    """The keywords are those of torch.compile, with what was left out left out."""
    assert variant.kwargs == expected


def test_kwargs_copy_options() -> None:
    """Whoever changes the keywords does not change the variant."""
    variant = Variant(options={"a": 1})
    variant.kwargs["options"]["a"] = 2
    assert variant.options == {"a": 1}


def test_torch_takes_the_keywords() -> None:
    """torch.compile accepts the keywords of every kind of variant."""
    import torch

    for variant in (*expand(Run(mode=MODES, dynamic=(None, True, False), fullgraph=(False, True))), Variant("eager")):
        assert callable(torch.compile(lambda x: x, **variant.kwargs))


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (Variant(mode="default"), False),
        (Variant(mode="max-autotune-no-cudagraphs"), False),
        (Variant(mode="reduce-overhead"), True),
        (Variant(mode="max-autotune"), True),
        (Variant(backend="cudagraphs"), True),
        (Variant(backend="eager"), False),
        (Variant(backend=my_backend), False),
        (Variant(options={"triton.cudagraphs": True}), True),
        (Variant(options={"triton.cudagraphs": False}), False),
        (Variant(options={"max_autotune": True}), False),
    ],
)
def test_uses_cudagraphs(variant: Variant, expected: bool) -> None:
    """Two modes, one option and one backend ask for CUDA graphs."""
    assert variant.uses_cudagraphs is expected


def test_json_holds_primitives_only() -> None:
    """Options and callables are told as text, so that a record can cross to another process."""
    variant = Variant(my_backend, None, True, False, {"b": my_backend, "a": 1})
    told = variant.to_json()
    assert list(told) == ["id", "backend", "mode", "dynamic", "fullgraph", "options"]
    assert told["id"] == "my_backend-dynamic"
    assert told["backend"] == "my_backend"
    assert told["options"] == {"a": "1", "b": repr(my_backend)}
    assert list(told["options"]) == ["a", "b"]
    assert Variant().to_json()["options"] is None


# -- checking names -------------------------------------------------------------------------------


def test_module_attribute_is_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``module:attribute`` names what stands in the module."""
    (tmp_path / "mine_for_this_test.py").write_text("def compile(gm, inputs):\n    return gm.forward\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = resolve_backend("mine_for_this_test:compile")
    assert found is sys.modules.pop("mine_for_this_test").compile
    assert resolve_backend("eager") == "eager"
    assert resolve_backend(my_backend) is my_backend


@pytest.mark.parametrize("backend", [*BUILTIN_BACKENDS, my_backend, Backend(), f"{__name__}:my_backend"])
def test_known_backends_need_no_torch(backend: Any) -> None:
    """Built-in names, callables and ``module:attr`` are accepted without asking torch."""
    check_backend(backend, never_asked)


def test_a_name_that_only_torch_knows_asks_torch() -> None:
    """Any other name is looked up in torch's own list."""
    check_backend("special", lambda: ["special"])


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("inducto", "unknown backend 'inducto'; did you mean 'inductor'?"),
        ("aot-eager", "unknown backend 'aot-eager'; did you mean 'aot_eager'?"),
        (3, "backend must be a name, 'package.module:attribute' or a callable, not 3"),
        (None, "backend must be a name, 'package.module:attribute' or a callable, not None"),
        ("no_such_package_here:x", "backend 'no_such_package_here:x' can't be imported: No module named"),
        (
            f"{__name__}:missing",
            f"backend '{__name__}:missing' can't be imported: module '{__name__}' has no attribute",
        ),
        (f"{__name__}:not_callable", f"backend '{__name__}:not_callable' is not callable"),
        (":x", "backend ':x' can't be imported: "),
    ],
)
def test_wrong_backends(backend: object, message: str) -> None:
    """A wrong backend is refused in one line that tells the nearest right word."""
    with pytest.raises(SettingsError) as caught:
        check_backend(backend, list)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_name_like_no_other_lists_all() -> None:
    """Where nothing is near, all known words are told."""
    with pytest.raises(SettingsError, match="unknown backend 'zzz'; known: 'aot_eager', 'aot_eager_decomp"):
        check_backend("zzz", list)
    assert suggest("zzz", ("b", "a")) == "; known: 'a', 'b'"


def test_modes() -> None:
    """A mode is one of inductor's; anything else is refused with the nearest word."""
    for mode in MODES:
        check_mode(mode)
    with pytest.raises(SettingsError, match=r"^unknown mode 'max-autotun'; did you mean 'max-autotune'\?$"):
        check_mode("max-autotun")
    with pytest.raises(SettingsError, match=r"^unknown mode None; "):
        check_mode(None)


def test_only_inductor_has_modes() -> None:
    """Other backends, and callables, have no modes."""
    assert has_modes("inductor")
    assert not any(has_modes(backend) for backend in ("eager", "cudagraphs", my_backend, "package:inductor"))


# -- the tables against torch ---------------------------------------------------------------------


def test_builtin_backends_are_torchs() -> None:
    """Every backend of the table is one that the installed torch registers by itself."""
    import torch

    assert set(BUILTIN_BACKENDS) <= set(torch.compiler.list_backends(exclude_tags=()))
    assert len(set(BUILTIN_BACKENDS)) == len(BUILTIN_BACKENDS)


def test_modes_are_torchs() -> None:
    """The table of modes is that of the installed torch."""
    import torch._inductor

    assert set(torch._inductor.list_mode_options()) == set(MODES)


def test_cudagraph_modes_are_torchs() -> None:
    """The modes that record CUDA graphs are those that switch inductor's option on."""
    import torch._inductor

    on = {mode for mode, options in torch._inductor.list_mode_options().items() if options.get("triton.cudagraphs")}
    assert on == CUDAGRAPH_MODES
