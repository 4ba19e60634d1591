"""What counts as a break and as a recompile, on small functions that the installed torch compiles.

A line of this file that breaks the graph says so in a comment; the places that are found are compared with
those lines.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

from pytest_dynamo.events import BreakEvent
from pytest_dynamo.events import CompileEvent
from pytest_dynamo.events import CompileResult
from pytest_dynamo.events import CudaGraphRecording
from pytest_dynamo.events import CudaGraphSkipEvent
from pytest_dynamo.events import LimitEvent
from pytest_dynamo.events import ResetEvent
from pytest_dynamo.messages import StackFrame
from pytest_dynamo.observer import Observer
from pytest_dynamo.observer import quiet_trace
from pytest_dynamo.places import Places
from pytest_dynamo.record import Observation
from pytest_dynamo.record import Place
from pytest_dynamo.summary import Group
from pytest_dynamo.summary import summarize


ROOT = Path(__file__).parent.parent
HERE = "tests/test_summary.py"
SOURCE = Path(__file__).read_text().splitlines()
PLACES = Places(ROOT)

Step = Callable[[Callable[..., Any]], Any]


@pytest.fixture
def observer() -> Iterator[Observer]:
    torch._dynamo.reset()
    observer = Observer()
    observer.install()
    try:
        with quiet_trace():
            yield observer
    finally:
        observer.remove()


def seen_by(observer: Observer) -> Observation:
    group = Group()
    group.events += observer.take()
    assert observer.errors == []
    return summarize([(group, 0)], PLACES)


def lines_of(seen: Observation) -> list[int]:
    assert {found.file for found in seen.breaks} <= {HERE}
    return [found.line for found in seen.breaks]


# -- graph breaks: scenarios ----------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    name: str
    fn: Callable[..., Any]
    breaks: int
    calls: tuple[tuple[Any, ...], ...]
    kind: str


SCENARIOS: list[Scenario] = []
X = torch.ones(4)


def scenario(breaks: int, *calls: tuple[Any, ...], kind: str = "break") -> Callable[[Any], Any]:
    """``breaks``: how many places of this file stop the graph; ``calls``: arguments, one tuple a call."""

    def keep(fn: Any) -> Any:
        SCENARIOS.append(Scenario(fn.__name__, fn, breaks, calls or ((X,),), kind))
        return fn

    return keep


def helper(x: Any) -> Any:
    x = x * 2
    torch._dynamo.graph_break()  # breaks
    return x + 3


def deeper(x: Any) -> Any:
    return helper(x.sin()).cos()


def says(x: Any) -> Any:
    print("", end="")  # noqa: T201 - breaks
    return x + 1


@torch.compiler.disable
def disabled(x: Any) -> Any:
    return x + 1


def values(x: Any) -> Iterator[Any]:
    for i in range(2):
        print("", end="")  # noqa: T201 - breaks
        yield x + i


@scenario(0)
def clean(x: Any) -> Any:
    return x.sin() + 1


@scenario(1)
def in_the_middle(x: Any) -> Any:
    x = x + 1
    torch._dynamo.graph_break()  # breaks
    return x * 2


@scenario(2)
def two_in_a_row(x: Any) -> Any:
    x = x + 1
    torch._dynamo.graph_break()  # breaks
    x = x * 2
    torch._dynamo.graph_break()  # breaks
    return x - 1


@scenario(1)
def before_the_first_operation(x: Any) -> Any:
    torch._dynamo.graph_break()  # breaks
    return x * 2


@scenario(1)
def after_the_last_operation(x: Any) -> Any:
    x = x + 1
    torch._dynamo.graph_break()  # breaks
    return x


@scenario(1)
def without_operations(x: Any) -> Any:
    torch._dynamo.graph_break()  # breaks
    return x


@scenario(1)
def one_call_deep(x: Any) -> Any:
    return helper(x + 1) * 2


@scenario(1)
def two_calls_deep(x: Any) -> Any:
    return deeper(x + 1) * 2


@scenario(1)
def one_line_from_two_calls(x: Any) -> Any:
    x = helper(x + 1)
    x = helper(x * 2)
    return x - 1


@scenario(1, kind="skipped_frame")
def in_a_for_loop(x: Any) -> Any:
    for i in range(3):
        x = x + i
        torch._dynamo.graph_break()  # breaks
    return x


@scenario(1, kind="skipped_frame")
def deep_in_a_for_loop(x: Any) -> Any:
    for i in range(3):
        x = helper(x + i)
    return x


@scenario(1, kind="skipped_frame")
def in_a_while_loop(x: Any) -> Any:
    i = 0
    while i < 3:
        x = x + 1
        print("", end="")  # noqa: T201 - breaks
        i += 1
    return x


@scenario(1, kind="skipped_frame")
def in_a_try_block(x: Any) -> Any:
    try:
        x = x + 1
        torch._dynamo.graph_break()  # breaks
        x = x * 2
    except ValueError:
        pass
    return x


@scenario(1)
def in_a_with_block(x: Any) -> Any:
    with torch.no_grad():
        x = x + 1
        torch._dynamo.graph_break()  # breaks
        return x * 2


@scenario(1)
def branch_on_data(x: Any) -> Any:
    x = x + 1
    if x.sum() > 0:  # breaks
        return x * 2
    return x * 3


@scenario(1, kind="skipped_frame")
def branch_on_data_in_a_loop(x: Any) -> Any:
    for _ in range(2):
        if x.sum() > 0:  # breaks
            x = x * 2
    return x


@scenario(1)
def call_of_print(x: Any) -> Any:
    x = x + 1
    print("", end="")  # noqa: T201 - breaks
    return x * 2


@scenario(1, kind="disabled_call")
def call_of_a_disabled_function(x: Any) -> Any:
    x = x + 1
    x = disabled(x)  # breaks
    return x * 2


@scenario(1)
def item(x: Any) -> Any:
    s = x.sum().item()  # breaks
    return x * s


@scenario(1)
def tolist(x: Any) -> Any:
    x = x + 1
    v = x.tolist()  # breaks
    return x * len(v)


@scenario(1)
def nonzero(x: Any) -> Any:
    y = x.nonzero()  # breaks
    return y + 1


@scenario(1, (X,), (X,))
def called_twice(x: Any) -> Any:
    x = x + 1
    torch._dynamo.graph_break()  # breaks
    return x * 2


@scenario(1, (X,), (X.double(),))
def compiled_twice(x: Any) -> Any:
    x = x + 1
    torch._dynamo.graph_break()  # breaks
    return x * 2


# Since Python 3.12 a comprehension is part of the function around it.
@scenario(1, kind="break" if sys.version_info >= (3, 12) else "skipped_frame")
def in_a_list_comprehension(x: Any) -> Any:
    ys = [says(x + i) for i in range(3)]
    return ys[0] + ys[2]


@scenario(1, kind="skipped_frame")
def in_a_generator(x: Any) -> Any:
    return sum(values(x))


@scenario(1)
def two_on_one_line(x: Any) -> Any:
    return says(x) + says(x * 2)


@scenario(2)
def two_kinds(x: Any) -> Any:
    print("", end="")  # noqa: T201 - breaks
    x = x + 1
    s = x.sum().item()  # breaks
    return x * s


@scenario(1, kind="skipped_frame")
def call_of_skip_frame(x: Any) -> Any:
    x = x + 1
    torch._dynamo.skip_frame()  # breaks
    return x * 2


@scenario(1)
def unsupported_function_of_the_standard_library(x: Any) -> Any:
    x = x + 1
    os.stat("/")  # breaks
    return x * 2


@scenario(1)
def in_a_lambda(x: Any) -> Any:
    f = lambda t: (print("", end=""), t + 1)[1]  # noqa: E731, T201 - breaks
    return f(x) * 2


@scenario(1)
def deep_in_an_expression_of_many_lines(x: Any) -> Any:
    return torch.add(
        x,
        torch.mul(
            says(x),
            2,
        ),
    )


@scenario(1)
def call_of_a_logger(x: Any) -> Any:
    x = x + 1
    logging.getLogger("pytest_dynamo.tests").warning("hello")  # breaks
    return x * 2


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        x = self.linear(x)
        torch._dynamo.graph_break()  # breaks
        return x.relu()


def scenario_module(name: str, module: torch.nn.Module) -> None:
    SCENARIOS.append(Scenario(name, module, 1, ((torch.ones(2, 4),),), "break"))


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.inner = Inner()

    def forward(self, x: Any) -> Any:
        return self.inner(self.first(x)) + 1


scenario_module("in_a_submodule", Outer())
scenario_module("in_two_instances_of_a_module", torch.nn.Sequential(Inner(), Inner()))
scenario_module("in_ten_layers", torch.nn.Sequential(*(Inner() for _ in range(10))))


@scenario(1)
def recursion(x: Any, depth: int = 2) -> Any:
    if depth:
        return recursion(x + 1, depth - 1)
    return says(x)


@scenario(0)
def user_exception_that_is_caught(x: Any) -> Any:
    try:
        if x.shape[0] > 1:
            raise ValueError("mine")
    except ValueError:
        x = x + 1
    return x


@scenario(0)
def assert_statement_of_torch(x: Any) -> Any:
    torch._assert(x.shape[0] == 4, "four")
    return x + 1


def test_there_are_as_many_scenarios_as_were_measured() -> None:
    """The table of what a user would call a break is complete: 34 rows and some more."""
    assert len(SCENARIOS) >= 34
    assert len({one.name for one in SCENARIOS}) == len(SCENARIOS)


@pytest.mark.parametrize("one", SCENARIOS, ids=lambda one: one.name)
def test_breaks(one: Scenario, observer: Observer) -> None:
    """Places are counted as a user would: a line that stops the graph, however often it is met."""
    step = torch.compile(one.fn, backend="eager")
    for arguments in one.calls:
        step(*arguments)
    seen = seen_by(observer)
    lines = lines_of(seen)
    assert [line for line in lines if "breaks" not in SOURCE[line - 1]] == [], seen.breaks
    assert len(lines) == one.breaks, seen.breaks
    assert seen.break_count == one.breaks
    assert seen.limit_hits == ()
    for found in seen.breaks:
        assert found.ignored is None
        assert found.called_from is None
        assert found.hits >= 1
        assert all(reason.reason and "\n" not in reason.reason for reason in found.reasons)
        assert all(reason.id and reason.id.startswith("GB") for reason in found.reasons), found.reasons
    # A line that several frames share is skipped where one of them was.
    assert {found.kind for found in seen.breaks} <= {one.kind}


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("call_of_print", ["GB0059"]),
        ("in_a_for_loop", ["GB0025"]),
        ("branch_on_data", ["GB0170"]),
        ("branch_on_data_in_a_loop", ["GB0170"]),
        ("call_of_a_disabled_function", ["GB0098"]),
        ("in_the_middle", ["GB0025"]),
    ],
)
def test_ids(name: str, reasons: list[str], observer: Observer) -> None:
    """The reason is the cause, not the loop or call around it, with PyTorch's number."""
    one = next(one for one in SCENARIOS if one.name == name)
    torch.compile(one.fn, backend="eager")(*one.calls[0])
    (found,) = seen_by(observer).breaks
    assert [reason.id for reason in found.reasons] == reasons


def test_functions_have_their_name_in_the_source(observer: Observer) -> None:
    """A break in a resume function is told under the name of the user's function."""
    torch.compile(two_in_a_row, backend="eager")(X)
    assert [found.function for found in seen_by(observer).breaks] == ["two_in_a_row", "two_in_a_row"]


def test_repeated_records_keep_the_function(observer: Observer) -> None:
    """Torch tells the stack of a place once; the function is known in spite of it."""
    step = torch.compile(branch_on_data, backend="eager")
    step(X)
    observer.take()
    step(X.double())
    assert [found.function for found in seen_by(observer).breaks] == ["branch_on_data"]


def test_hits_count_how_often(observer: Observer) -> None:
    """Layers that break at one line are one break with several hits: in each frame that leads there."""
    one = next(one for one in SCENARIOS if one.name == "in_ten_layers")
    torch.compile(one.fn, backend="eager")(*one.calls[0])
    (found,) = seen_by(observer).breaks
    assert found.hits >= 2


def test_nested_graph_breaks_count_the_same(observer: Observer) -> None:
    """With Dynamo's config nested_graph_breaks the places are the same."""
    if not hasattr(torch._dynamo.config, "nested_graph_breaks"):
        pytest.skip("this torch has no nested_graph_breaks")
    with torch._dynamo.config.patch(nested_graph_breaks=True):
        torch.compile(one_line_from_two_calls, backend="eager")(X)
    assert len(lines_of(seen_by(observer))) == 1


def test_a_break_in_a_library_tells_who_called(observer: Observer) -> None:
    """A break inside torch is identified by its own line; the user's line stands beside it."""
    linear = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    linear(X).sum().backward()
    observer.take()

    def step() -> None:
        optimizer.step()

    torch.compile(step, backend="eager")()
    found = seen_by(observer).breaks
    line = step.__code__.co_firstlineno + 1
    for one in found:
        assert "torch/optim/" in one.file
        assert one.called_from == Place(HERE, line)


def test_an_exception_of_the_users_is_no_break(observer: Observer) -> None:
    """A function that raises, as in a test of its errors, has no break for it."""

    def f(x: Any) -> Any:
        x = x + 1
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        torch.compile(f, backend="eager")(X)
    assert seen_by(observer).breaks == ()


@pytest.mark.parametrize("how", ["disable", "stance"])
def test_code_that_is_not_compiled_has_no_breaks(how: str, observer: Observer) -> None:
    """With compilation switched off nothing is seen."""
    if how == "disable":
        torch.compile(in_the_middle, backend="eager", disable=True)(X)
    else:
        with torch.compiler.set_stance("force_eager"):
            torch.compile(in_the_middle, backend="eager")(X)
    seen = seen_by(observer)
    assert (seen.anything, seen.frames, seen.graphs, seen.breaks) == (False, 0, 0, ())


def test_no_capture_of_a_skipped_frame(observer: Observer) -> None:
    """A frame that was skipped whole gives no graph and no operation."""
    torch.compile(in_a_for_loop, backend="eager")(X)
    seen = seen_by(observer)
    assert (seen.graphs, seen.ops) == (0, 0)


def sparse_argument(x: Any) -> Any:
    return torch.sparse.mm(x, torch.ones(4, 2))


def test_what_dynamo_does_not_know_yet_is_not_asked(observer: Observer) -> None:
    """A value of Dynamo's that raises when it is looked at stands in a frame of the compiler: the break counts."""
    torch.compile(sparse_argument, backend="eager")(torch.eye(4).to_sparse())
    seen = seen_by(observer)
    assert seen.break_count == 1
    assert [found.kind for found in seen.breaks] == ["skipped_frame"]
    assert "sparse" in seen.breaks[0].reasons[0].text


table = torch.zeros(4, 2)


def by_number(i: Any, x: Any) -> Any:
    y = x + 1
    table[i] = x  # breaks
    return table.sum() + y


def calls_by_number(i: Any, x: Any) -> Any:
    return by_number(i, x * 2) + 1


@pytest.mark.parametrize("fn", [by_number, calls_by_number])
def test_an_operation_that_the_backend_fails_on_is_one_break_at_its_line(
    observer: Observer, fn: Callable[..., Any]
) -> None:
    """Dynamo does without the backend then, and logs it several times, at other lines."""
    torch.compile(fn, backend="aot_eager")(torch.tensor(1), torch.ones(2))
    seen = seen_by(observer)
    assert lines_of(seen) == [line_that("table[i] = x  # breaks")]
    (reason,) = seen.breaks[0].reasons
    assert reason.reason == "Backend compiler exception: aot_eager failed with aten._local_scalar_dense.default"


def line_that(ends: str) -> int:
    (number,) = (number for number, line in enumerate(SOURCE, 1) if line.endswith(ends) and "line_that" not in line)
    return number


def test_graphs_and_operations(observer: Observer) -> None:
    """Graphs with operations are counted, and their operations."""
    torch.compile(in_the_middle, backend="eager")(X)
    seen = seen_by(observer)
    assert (seen.frames, seen.graphs) == (2, 2)
    assert seen.ops is not None
    assert seen.ops >= 2
    assert seen.compile.seconds is not None
    assert seen.compile.seconds > 0


# -- recompiles -----------------------------------------------------------------------------------


def times_two(x: Any) -> Any:
    return x * 2


def times(x: Any, n: Any) -> Any:
    return x * n


def plus_length(x: Any, s: str) -> Any:
    return x + len(s)


def total(xs: list[Any]) -> Any:
    return sum(xs)


def plus_length_after_a_break(x: Any, s: str) -> Any:
    x = x + 1
    torch._dynamo.graph_break()
    return x + len(s)


class Scale(torch.nn.Module):
    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.n = n
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.linear(x) * self.n


def make(n: int) -> Callable[[Any], Any]:
    def inner(x: Any) -> Any:
        return x + n

    return inner


def call(module: Any, x: Any) -> Any:
    return module(x)


def eager(fn: Any, **kwargs: Any) -> Any:
    return torch.compile(fn, backend="eager", **kwargs)


def my_backend(graph: Any, inputs: Any) -> Any:
    return graph.forward


def sizes(*numbers: int, **kwargs: Any) -> None:
    step = eager(times_two, **kwargs)
    for number in numbers:
        step(torch.ones(number))


def dtypes() -> None:
    step = eager(times_two)
    step(X)
    step(X.double())


def grad_mode() -> None:
    step = eager(times_two)
    step(X)
    with torch.no_grad():
        step(X)


def requires_grad() -> None:
    step = eager(times_two)
    step(torch.ones(3))
    step(torch.ones(3, requires_grad=True))


def strides() -> None:
    step = eager(times_two)
    step(torch.ones(3, 4))
    step(torch.ones(4, 3).t())


def arguments(fn: Any, *values: Any) -> None:
    step = eager(fn)
    for value in values:
        step(X, value)


def lengths() -> None:
    step = eager(total)
    for number in (1, 2, 3):
        step([X] * number)


def two_instances() -> None:
    for module in (Scale(), Scale()):
        eager(module)(X)


def attribute() -> None:
    module = Scale()
    step = eager(module)
    step(X)
    module.n = 4
    step(X)


def train_to_eval() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    step = eager(module)
    step(X)
    module.eval()
    step(X)


def four_modules() -> None:
    step = eager(call)
    for n in range(4):
        step(Scale(n), X)


def closures() -> None:
    for n in (1, 2, 3):
        eager(make(n))(X)


def backends() -> None:
    for backend in (my_backend, "eager", "aot_eager"):
        torch.compile(times_two, backend=backend)(X)


def two_wrappers() -> None:
    for _ in range(2):
        eager(times_two)(X)


def backends_and_dtypes() -> None:
    for backend in ("eager", "aot_eager"):
        step = torch.compile(times_two, backend=backend)
        step(X)
        step(X.double())


def eager_stance() -> None:
    step = eager(times_two)
    step(X)
    with torch.compiler.set_stance("eager_on_recompile"):
        step(X.double())


def backward() -> None:
    step = torch.compile(times_two, backend="aot_eager")
    for _ in range(2):
        step(torch.ones(3, requires_grad=True)).sum().backward()


def after_a_reset() -> None:
    eager(times_two)(X)
    torch._dynamo.reset()
    eager(times_two)(X.double())


def with_break_twice() -> None:
    step = eager(plus_length_after_a_break)
    step(X, "a")
    step(X, "a")


@pytest.mark.parametrize(
    ("run", "compiles", "recompiles"),
    [
        (dtypes, 2, 1),
        (grad_mode, 2, 1),
        (requires_grad, 2, 1),
        (strides, 2, 1),
        (lambda: sizes(3, 4, 5, 6), 2, 1),
        (lambda: sizes(3, 4, 1, 0, 7), 4, 3),
        (lambda: sizes(3, 4, 5, 6, dynamic=False), 4, 3),
        (lambda: sizes(3, 4, 5, 6, dynamic=True), 1, 0),
        (lambda: arguments(times, 2, 3, 4, 5), 2, 1),
        (lambda: arguments(times, 2.0, 3.5, 4.5, 5.5), 2, 1),
        (lambda: arguments(plus_length, "a", "bb", "ccc"), 3, 2),
        (lambda: arguments(plus_length_after_a_break, "a", "bb"), 3, 1),
        (with_break_twice, 2, 0),
        (lengths, 3, 2),
        (two_instances, 1, 0),
        (attribute, 2, 1),
        (four_modules, 4, 3),
        (closures, 2, 1),
        (backends, 3, 0),
        (backends_and_dtypes, 4, 2),
        (two_wrappers, 1, 0),
        (eager_stance, 1, 0),
        (backward, 1, 0),
        (after_a_reset, 2, None),
    ],
    ids=[
        *("dtype", "grad mode", "requires_grad", "stride", "sizes", "sizes 0 and 1", "static sizes", "dynamic sizes"),
        *("int", "float", "str", "only after the break", "with a break", "lengths", "two instances", "attribute"),
        *("four modules", "closures", "backends", "backends and dtypes", "two wrappers"),
        *("eager stance", "backward", "after a reset"),
    ],
)
def test_recompiles(run: Callable[[], None], compiles: int, recompiles: int | None, observer: Observer) -> None:
    """A second compilation of the same code for the same backend counts, whatever guard failed."""
    run()
    seen = seen_by(observer)
    assert seen.frames == compiles
    if recompiles is not None:
        assert seen.recompile_count == recompiles, seen.recompiles
    for found in seen.recompiles:
        assert found.file == HERE
        assert found.reasons
        assert all("BACKEND_MATCH" not in reason and "\n" not in reason for reason in found.reasons)
    assert seen.limit_hits == ()


def test_modes_are_no_recompiles(observer: Observer) -> None:
    """One function compiled in two modes of inductor is compiled twice and recompiled never."""
    for mode in ("default", "max-autotune-no-cudagraphs"):
        torch.compile(times_two, mode=mode)(X)
    seen = seen_by(observer)
    assert (seen.frames, seen.recompiles) == (2, ())


def test_a_recompile_tells_its_place_and_guard(observer: Observer) -> None:
    """Where the code is, and in one line which guard failed."""
    dtypes()
    (found,) = seen_by(observer).recompiles
    assert (found.file, found.line, found.function) == (HERE, times_two.__code__.co_firstlineno, "times_two")
    assert (found.count, found.reasons) == (1, ("tensor 'x' dtype mismatch. expected Float, actual Double",))


def test_a_recompiled_resume_function_has_the_users_name(observer: Observer) -> None:
    """A guard that is needed only after a break recompiles the rest of the function."""
    arguments(plus_length_after_a_break, "a", "bb")
    (found,) = seen_by(observer).recompiles
    assert found.function == "plus_length_after_a_break"


def test_a_recompile_of_a_module_of_torchs_tells_a_place(observer: Observer) -> None:
    """A torch.nn module that is compiled again is told by a place that says something to the user."""
    train_to_eval()
    seen = seen_by(observer)
    assert (seen.frames, seen.recompile_count) == (2, 1)
    (found,) = seen.recompiles
    assert PLACES.kind(found.file) != "compiler"


def test_another_instance_through_its_own_group_is_no_recompile(observer: Observer) -> None:
    """Two modules of one class, each compiled on its own, don't recompile each other."""
    groups = []
    for n in (3, 4):
        group = Group()
        eager(Scale(n))(X)
        group.events += observer.take()
        groups.append(group)
    seen = summarize([(group, 0) for group in groups], PLACES)
    assert (seen.frames, seen.recompiles) == (2, ())
    together = Group()
    together.events += [event for group in groups for event in group.events]
    assert summarize([(together, 0)], PLACES).recompile_count == 1


def test_only_what_is_new_is_told(observer: Observer) -> None:
    """A recompile is told in the phase in which it happened, judged by all that was before."""
    group = Group()
    step = eager(times_two)
    step(X)
    group.events += observer.take()
    start = len(group.events)
    assert summarize([(group, 0)], PLACES).recompiles == ()
    step(X.double())
    group.events += observer.take()
    assert summarize([(group, start)], PLACES).recompile_count == 1
    assert summarize([(group, start)], PLACES).frames == 1
    assert summarize([(group, len(group.events))], PLACES).recompiles == ()


def test_reset_by_the_plugin_starts_again(observer: Observer) -> None:
    """Code that is compiled again only because the plugin threw it away is not recompiled."""
    eager(times_two)(X)
    observer.reset()
    eager(times_two)(X.double())
    seen = seen_by(observer)
    assert (seen.frames, seen.recompiles) == (2, ())


def test_reset_by_the_user_starts_again(observer: Observer) -> None:
    """Code that the test itself threw away is compiled for the first time afterwards."""
    after_a_reset()
    assert seen_by(observer).recompiles == ()


def test_threads_that_compile_one_function(observer: Observer) -> None:
    """Three threads with three dtypes make one first compilation and two recompiles."""
    step = eager(times_two)
    threads = [threading.Thread(target=step, args=(X.to(d),)) for d in (torch.float32, torch.float64, torch.float16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = seen_by(observer)
    assert (seen.frames, seen.recompile_count) == (3, 2)
    assert all(reason for found in seen.recompiles for reason in found.reasons)


def test_the_attempt_at_the_limit_is_no_recompile(observer: Observer) -> None:
    """Eight compilations are allowed: seven recompiles, one limit hit, then silence."""
    arguments(plus_length, *("a" * n for n in range(1, 13)))
    seen = seen_by(observer)
    assert (seen.frames, seen.recompile_count, seen.breaks) == (8, 7, ())
    (hit,) = seen.limit_hits
    assert (hit.file, hit.line, hit.function) == (HERE, plus_length.__code__.co_firstlineno, "plus_length")
    assert hit.limit == "recompile_limit"
    assert hit.reason.startswith("len(s) == ") or "s" in hit.reason


def test_the_limit_under_fullgraph_raises(observer: Observer) -> None:
    """With fullgraph=True the refused compilation raises, and is no recompile either."""
    step = eager(plus_length, fullgraph=True)
    for n in range(1, 9):
        step(X, "a" * n)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        step(X, "a" * 9)
    seen = seen_by(observer)
    assert (seen.frames, seen.recompile_count, seen.breaks) == (8, 7, ())


def test_a_refused_recompile_is_none(observer: Observer) -> None:
    """Under error_on_recompile the second compilation does not happen, so it is not counted."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        step = eager(times_two)
        step(X)
        with pytest.raises(torch._dynamo.exc.RecompileError):
            step(X.double())
    seen = seen_by(observer)
    assert (seen.frames, seen.recompiles) == (1, ())


def test_a_backend_that_raises_compiles_nothing(observer: Observer) -> None:
    """A failed compilation is neither a frame nor a graph nor, the second time, a recompile."""

    def bad(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("bad backend")

    step = torch.compile(times_two, backend=bad)
    for x in (X, X.double()):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
            step(x)
    seen = seen_by(observer)
    assert (seen.frames, seen.graphs, seen.recompiles) == (0, 0, ())


def test_backward_graphs_are_counted_apart(observer: Observer) -> None:
    """A backward graph is no frame of Dynamo's and is told as such."""
    backward()
    seen = seen_by(observer)
    assert seen.compile.backward_graphs == 1
    assert seen.frames == 1


# -- events by hand -------------------------------------------------------------------------------


def compiling(compile_id: str, backend: Any = "b", reasons: tuple[str, ...] = (), forward: bool = True) -> list[Any]:
    return [
        CompileEvent(compile_id, str(ROOT / HERE), 7, "f", backend, reasons),
        CompileResult(compile_id, None, 3, 0.5, forward),
    ]


def count(*events: Any) -> int | None:
    group = Group()
    group.events += events
    return summarize([(group, 0)], PLACES).recompile_count


def test_recompiles_of_events() -> None:
    """Same frame and backend again counts; another frame, another backend, or a reset between does not."""
    assert count(*compiling("0/0"), *compiling("0/1", reasons=("0/0: x",))) == 1
    assert count(*compiling("0/0"), *compiling("1/0")) == 0
    assert count(*compiling("0/0"), *compiling("0/1", backend="c")) == 0
    assert count(*compiling("0/0"), *compiling("0/1", backend="c"), *compiling("0/2")) == 1
    assert count(*compiling("0/0"), ResetEvent(), *compiling("0/1")) == 0
    assert count(*compiling("0/0"), *compiling("0/0")) == 0
    assert count(*compiling("0/1", reasons=("0/0: x",))) == 0


def test_recompiles_of_events_without_a_backend() -> None:
    """Where torch does not show the backend, the failed guard tells whether only the backend changed."""
    first = compiling("0/0", None)
    assert count(*first, *compiling("0/1", None, ("0/0: BACKEND_MATCH failure",))) == 0
    assert count(*first, *compiling("0/1", None, ("0/0: x == 1",))) == 1
    assert count(*first, *compiling("0/1", None, ("0/0: BACKEND_MATCH failure", "0/0: x == 1"))) == 1
    assert count(*first, *compiling("0/1", None)) == 1


def test_an_interrupted_compilation_counts_by_its_result() -> None:
    """Only compilations that gave code count; one that failed is no first one either."""
    failed = [CompileEvent("0/0", "a.py", 1, "f", "b"), CompileResult("0/0", "Unsupported", None, 0.1, True)]
    assert count(*failed, *compiling("0/1")) == 0
    group = Group()
    group.events += failed
    seen = summarize([(group, 0)], PLACES)
    assert (seen.frames, seen.graphs, seen.ops) == (0, 0, 0)


def test_numbers_without_results_are_null() -> None:
    """Where torch does not tell how compilations ended, what depends on it is None."""
    group = Group()
    group.events += compiling("0/0")
    seen = summarize([(group, 0)], PLACES, results=False)
    assert (seen.frames, seen.graphs, seen.ops, seen.compile.seconds) == (None, None, None, None)


def a_break(line: int = 3, reason: str = "why", file: str = HERE, **given: Any) -> BreakEvent:
    frame = StackFrame(str(ROOT / file), line, given.pop("function", "f"))
    stack = given.pop("stack", (frame,))
    return BreakEvent(
        stack, given.pop("callers", ()), reason, given.pop("id", None), None, given.pop("skipped", False), **given
    )


def breaks_of(*events: Any) -> Any:
    group = Group()
    group.events += events
    return summarize([(group, 0)], PLACES).breaks


def test_several_reasons_at_one_place_are_one_break() -> None:
    """Reasons are told in the order in which they came, with how often each was met."""
    (found,) = breaks_of(a_break(reason="a"), a_break(reason="b", id="GB0001"), a_break(reason="a"))
    assert [(r.reason, r.id, r.hits) for r in found.reasons] == [("a", None, 2), ("b", "GB0001", 1)]
    assert found.hits == 3


def test_breaks_are_sorted_by_place() -> None:
    """The order does not depend on which was met first."""
    found = breaks_of(a_break(9), a_break(2), a_break(5, file="tests/a.py"))
    assert [(one.file, one.line) for one in found] == [("tests/a.py", 5), (HERE, 2), (HERE, 9)]


def test_kinds_of_events() -> None:
    """One skipped frame makes a place skipped; only all disabled calls make it a disabled call."""
    disabled_call = "Skip calling `torch.compiler.disable()`d function"
    assert [b.kind for b in breaks_of(a_break(), a_break(skipped=True))] == ["skipped_frame"]
    assert [b.kind for b in breaks_of(a_break(reason=disabled_call))] == ["disabled_call"]
    assert [b.kind for b in breaks_of(a_break(reason=disabled_call), a_break())] == ["break"]


def test_breaks_of_torchs_own_doing_are_dropped() -> None:
    """Frames of the standard library and the compiler that Dynamo meets on its way are nobody's breaks."""
    own = StackFrame("/x/site-packages/torch/_dynamo/eval_frame.py", 1, "f")
    std = StackFrame(logging.__file__, 1, "warning")
    assert breaks_of(a_break(stack=(own,)), a_break(stack=(std,)), a_break(reason="Observed exception")) == ()


def test_a_library_break_takes_the_first_caller_that_is_known() -> None:
    """The user's line may stand in the stack or among the frames that ran."""
    lib = StackFrame("/x/site-packages/lib/a.py", 4, "g")
    mine = StackFrame(str(ROOT / HERE), 8, "f")
    (found,) = breaks_of(a_break(stack=(lib,)), a_break(stack=(lib,), callers=(mine,)))
    assert (found.file, found.line, found.called_from) == (lib.file, 4, Place(HERE, 8))


def test_limit_hits_are_told_once_for_each_frame() -> None:
    """The same frame that hits its limit again is one hit."""
    hits = [LimitEvent("recompile_limit", 8, str(ROOT / HERE), line, "f", "0/0: x == 1") for line in (9, 3, 9)]
    group = Group()
    group.events += hits
    seen = summarize([(group, 0)], PLACES)
    assert [(hit.line, hit.reason) for hit in seen.limit_hits] == [(3, "x == 1"), (9, "x == 1")]


def test_cuda_graph_events() -> None:
    """Recordings are counted, skips are told with torch's reason and line."""
    group = Group()
    group.events += [
        CudaGraphRecording(),
        CudaGraphRecording(),
        CudaGraphSkipEvent("mutated", StackFrame(str(ROOT / HERE), 3, "f")),
        CudaGraphSkipEvent("cpu", None),
    ]
    graphs = summarize([(group, 0)], PLACES).cudagraphs
    assert graphs.recorded == 2
    assert [(s.reason, s.file, s.line) for s in graphs.skips] == [("mutated", HERE, 3), ("cpu", None, None)]


@pytest.mark.parametrize(
    ("hits", "misses", "cold"), [(None, None, None), (0, 0, None), (0, 2, True), (2, 0, False), (1, 1, False)]
)
def test_cold(hits: int | None, misses: int | None, cold: bool | None) -> None:
    """A compilation was cold if caches were asked and gave nothing."""
    group = Group()
    group.events.append(CompileResult("0/0", None, 1, 0.1, True, cache_hits=hits, cache_misses=misses))
    seen = summarize([(group, 0)], PLACES).compile
    assert (seen.cold, seen.cache_hits, seen.cache_misses) == (cold, hits, misses)
