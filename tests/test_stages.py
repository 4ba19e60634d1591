"""The first diverging stage: a fault planted in each stage of the compiler is put down to that stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from pytest_dynamo.stages import stages_of
from pytest_dynamo.variants import Variant


FUNCTION = """
    import pytest, torch

    def f(x):
        return torch.relu(x) * 2

    def loss(x):
        return (torch.relu(x) * 2).sum()
"""


def wrong_in(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make one of torch's backends compile something else than it was given."""
    honest = lookup_backend(name)

    def wrong(graph: Any, example_inputs: Any, **kwargs: Any) -> Any:
        run = honest(graph, example_inputs, **kwargs)
        return lambda *args: tuple(v + 1 if isinstance(v, torch.Tensor) else v for v in run(*args))

    registry = torch._dynamo.backends.registry
    monkeypatch.setitem(registry._COMPILER_FNS, name, wrong)


def diagnosis_of(run: Any) -> dict[str, Any]:
    (record,) = (r for r in run.report["records"] if r["phase"] == "call")
    assert record["parity"]["passed"] is False
    return record["parity"]["diagnosis"]  # type: ignore[no-any-return]


def one_test(backend: str, call: str = "compiled(f)(torch.randn(4))") -> str:
    return (
        FUNCTION
        + f"""
    @pytest.mark.compiled(backend={backend!r})
    def test_it(compiled):
        {call}
    """
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_decomp_partition", "inductor"])
def test_capture(project: Any, backend: str) -> None:
    """What Dynamo itself does otherwise shows in all backends and is put down to the capture."""
    source = FUNCTION.replace("return torch.relu(x) * 2", "return x + torch.compiler.is_compiling()")
    run = project.test(
        source
        + f"""
    @pytest.mark.compiled(backend={backend!r})
    def test_it(compiled):
        compiled(f)(torch.zeros(4))
    """
    )
    assert diagnosis_of(run) == {"stage": "capture", "agree": [], "cured_by": None, "note": None, "bisected": None}
    assert "  first diverging stage: capture" in run.text


@pytest.mark.parametrize(
    ("guilty", "stage", "agree"),
    [
        ("aot_eager", "AOTAutograd", ["capture"]),
        ("aot_eager_decomp_partition", "decompositions", ["capture", "AOTAutograd"]),
    ],
)
def test_stages_between(
    project: Any, monkeypatch: pytest.MonkeyPatch, guilty: str, stage: str, agree: list[str]
) -> None:
    """A fault that one of torch's backends brings in is put down to what it adds."""
    wrong_in(monkeypatch, guilty)
    found = diagnosis_of(project.test(one_test(guilty)))
    assert (found["stage"], found["agree"]) == (stage, agree)


@pytest.mark.parametrize("call", ["compiled(f)(torch.randn(4))", "compiled(loss)(torch.randn(4))"])
def test_inductor(project: Any, call: str) -> None:
    """Torch's own planted fault in the code that inductor generates for relu."""
    import torch._inductor.config as config

    with config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        run = project.test(one_test("inductor", call))
    found = diagnosis_of(run)
    assert (found["stage"], found["agree"]) == ("inductor", ["capture", "AOTAutograd", "decompositions"])
    assert (found["cured_by"], found["note"]) == (None, "emulate_precision_casts does not cure it")
    assert "first diverging stage: inductor (capture, AOTAutograd, decompositions agree with eager)" in run.text


def test_precision_casts(project: Any) -> None:
    """A difference that is only inductor's higher precision vanishes when eager's casts are emulated.

    Older versions of torch don't emulate them on a CPU, and then the report says that it does not help.
    """
    run = project.test(
        """
        import pytest, torch

        def f(x):
            return (x + 0.001) - x  # in bfloat16 eager rounds the sum to x

        @pytest.mark.compiled(rtol=0, atol=0)
        def test_it(compiled):
            compiled(f)(torch.full((64,), 3.0, dtype=torch.bfloat16))
        """
    )
    x = torch.full((64,), 3.0, dtype=torch.bfloat16)
    torch._dynamo.reset()
    emulated = torch.compile(lambda x: (x + 0.001) - x, options={"emulate_precision_casts": True})(x)
    cured = torch.equal(emulated, (x + 0.001) - x)
    found = diagnosis_of(run)
    assert (found["stage"], found["cured_by"]) == ("inductor", "emulate_precision_casts" if cured else None)
    assert f"emulate_precision_casts {'cures it' if cured else 'does not cure it'}" in run.text


def test_a_backend_of_the_users(project: Any) -> None:
    """Of a backend that torch does not know only the capture before it is known."""
    run = project.test(
        FUNCTION
        + """
    def wrong(graph, example_inputs):
        return lambda *args: tuple(v + 1 for v in graph(*args))

    @pytest.mark.compiled(backend=wrong)
    def test_it(compiled):
        compiled(f)(torch.randn(4))
    """
    )
    found = diagnosis_of(run)
    assert (found["stage"], found["agree"]) == ("backend wrong", ["capture"])


def test_a_fault_that_needs_the_calls_before(project: Any) -> None:
    """What a fresh compile of the failing call alone does not show is not put down to a stage."""
    run = project.test(
        FUNCTION
        + """
    def stale(graph, example_inputs):
        kept = []
        def run(*args):
            kept.append(tuple(v.clone() for v in graph(*args)))
            return kept[0]
        return run

    @pytest.mark.compiled(backend=stale)
    def test_it(compiled):
        fast = compiled(f)
        fast(torch.ones(4))
        fast(torch.full((4,), 2.0))
    """
    )
    found = diagnosis_of(run)
    assert found["stage"] is None
    assert "calls before it play a part" in found["note"]


def test_gradients(project: Any) -> None:
    """A gradient that only one stage gets wrong is judged in every stage."""
    run = project.test(
        FUNCTION
        + """
    from torch._dynamo.backends.common import aot_autograd

    def doubled(graph, example_inputs):
        return lambda *args: [v * 2 if isinstance(v, torch.Tensor) else v for v in graph(*args)]

    def wrong(graph, example_inputs):
        return aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=doubled)(graph, example_inputs)

    @pytest.mark.compiled(backend=wrong)
    def test_it(compiled):
        compiled(f)(torch.randn(4, requires_grad=True))
    """
    )
    found = diagnosis_of(run)
    assert (found["stage"], found["agree"]) == ("backend wrong", ["capture"])


def test_time_is_bounded(project: Any) -> None:
    """0 looks for nothing; when the time is over the search says so and names what agreed until then."""
    run = project.test(one_test("eager", "compiled(lambda x: x + torch.compiler.is_compiling())(torch.ones(1))"))
    assert diagnosis_of(run)["stage"] == "capture"
    run = project.run("--dynamo-stage-timeout=0")
    assert diagnosis_of(run) is None
    assert "first diverging stage" not in run.text
    project.file(
        "test_it",
        FUNCTION
        + """
    import time

    def slow_and_wrong(graph, example_inputs):
        return lambda *args: tuple(v + 1 for v in graph(*args))

    @pytest.mark.compiled(backend=slow_and_wrong)
    def test_it(compiled):
        def g(x):
            time.sleep(0.2)
            return f(x)
        compiled(g)(torch.ones(1))
    """,
    )
    run = project.run("--dynamo-stage-timeout=0.1")
    found = diagnosis_of(run)
    assert found["stage"] is None
    assert found["note"] == "not located: 0.1 s are over (--dynamo-stage-timeout)"
    assert found["agree"] == ["capture"]


def test_counts_are_those_of_the_test(project: Any) -> None:
    """What the search compiles is in no count, and only the first failing call of a test is looked into."""
    run = project.test(
        FUNCTION
        + """
    def wrong(graph, example_inputs):
        return lambda *args: tuple(v + 1 for v in graph(*args))

    @pytest.mark.compiled(backend=wrong)
    def test_it(compiled):
        for fn in (f, loss):
            with pytest.raises(AssertionError) as caught:
                compiled(fn)(torch.ones(4))
            print(caught.value)
    """,
        "-s",
    )
    (record,) = run.report["records"]
    assert (record["graphs"], record["frames"], record["breaks"], record["recompiles"]) == (2, 2, [], [])
    assert run.result.stdout.str().count("first diverging stage: backend wrong") >= 1
    texts = [str(line) for line in run.result.outlines if "first diverging stage" in line]
    assert all("loss" not in text for text in texts)


def test_stages_of_variants() -> None:
    """CUDA graphs are the last stage where they are used; inductor stands before them without."""
    before, last = stages_of(Variant("inductor", "reduce-overhead"), cudagraphs=True, eager_random=False)
    assert [stage.name for stage in before] == ["capture", "AOTAutograd", "decompositions", "inductor"]
    assert before[-1].kwargs["options"]["triton.cudagraphs"] is False
    assert (last.name, last.kwargs["mode"]) == ("CUDA graphs", "reduce-overhead")
    before, last = stages_of(Variant("inductor", "max-autotune"), cudagraphs=False, eager_random=True)
    assert last.name == "inductor"
    assert last.kwargs["options"]["fallback_random"] is True
    before, last = stages_of(Variant("cudagraphs"), cudagraphs=True, eager_random=False)
    assert ([stage.name for stage in before], last.name) == (["capture", "AOTAutograd"], "CUDA graphs")


def test_time_is_a_number(project: Any) -> None:
    """A time that is none is refused at once."""
    run = project.run("--dynamo-stage-timeout=soon", json_report=False)
    assert "expected a number of seconds of 0 or more, got 'soon'" in run.text
