"""Ways in which the plugin was once made to lie: each stays a test."""

from __future__ import annotations


HEAD = """
import copy, functools, threading, time
import pytest, torch
from torch import nn

X = torch.arange(4.0) + 1
eager = pytest.mark.compiled(backend="eager")

@torch.compiler.disable
def off(x):
    return x + 1

def breaks(x):
    x = x + 1
    print("a")
    return x * 2
"""


def outcomes(run) -> dict[str, str]:
    return {r["nodeid"].rpartition("::")[2]: r["outcome"] for r in run.report["records"] if r["phase"] == "call"}


def test_what_was_compiled_is_judged_for_each_function(project):
    """A function that captures nothing fails, whatever was compiled of the same code by others."""
    project.file(
        "test_it",
        HEAD
        + """
class M(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f
    def forward(self, x):
        return self.f(x)

def g(x):
    return off(x)

@eager
def test_second_captures_nothing(compiled):
    compiled(M(torch.sin))(X)
    compiled(M(off))(X)

@eager
def test_by_hand_first(compiled):
    torch.compile(g, backend="eager")(X)
    compiled(g)(X)

@pytest.mark.parametrize("n", [1, 2])
def test_by_name(request, n):
    request.getfixturevalue("compiled")(g)(X)

@eager
def test_raised_after_capturing(compiled):
    def f(x, bad):
        if bad:
            y = x + 1
            torch._dynamo.graph_break()
            raise ValueError
        return off(x)
    fast = compiled(f)
    with pytest.raises(ValueError):
        fast(X, True)
    fast(X, False)
""",
    )
    run = project.run("--dynamo-backends=eager")
    assert set(outcomes(run).values()) == {"failed"}
    assert run.text.count("nothing was compiled: no operation of ") == 5


def test_the_same_code_twice(project):
    """Copies of a module, callable objects and decorated functions may be compiled several times."""
    project.file(
        "test_it",
        HEAD
        + """
@eager
def test_copies(compiled):
    one = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled(one)(X)
    compiled(copy.deepcopy(one))(X)

@eager
def test_decorated(compiled):
    @torch.no_grad()
    def infer(x):
        return x + 1
    for _ in range(3):
        compiled(infer)(X)

@eager
def test_objects(compiled):
    class Step:
        def __call__(self, x):
            return x + 1
    compiled(Step())(X)
    compiled(Step())(X)

@eager
def test_torchs_own(compiled):
    for fn in (torch.sin, torch.relu, nn.ReLU(), functools.partial(torch.add, X)):
        compiled(fn)(X)
        compiled(fn)(X)
""",
    )
    run = project.run()
    assert set(outcomes(run).values()) == {"passed"}, run.text
    assert all(record["recompiles"] == [] for record in run.report["records"])


def test_breaks_in_wrappers_of_the_compiler_count(project):
    """A disabled method, partial or decorated function and a bare operator break at the line that calls them."""
    source = (
        HEAD
        + """
class D(nn.Module):
    @torch.compiler.disable
    def forward(self, x):
        return x + 1

def test_module():
    torch.compile(D(), backend="eager")(X)  # here

def test_partial():
    torch.compile(functools.partial(off), backend="eager")(X)  # here

def test_decorated():
    torch.compile(torch.no_grad()(off), backend="eager")(X)  # here

def test_operator():
    torch.compile(torch.nonzero, backend="eager")(X)  # here
"""
    )
    project.file("test_it", source)
    run = project.run("--dynamo-max-breaks=0")
    lines = [n for n, line in enumerate(source.strip().splitlines(), 1) if line.endswith("# here")]
    found = {r["nodeid"].rpartition("::")[2]: [b["line"] for b in r["breaks"]] for r in run.report["records"]}
    names = ("test_module", "test_partial", "test_decorated", "test_operator")
    assert found == {name: [line] for name, line in zip(names, lines)}
    run.result.assert_outcomes(failed=4)


def test_suppressed_errors_are_breaks(project):
    """With suppress_errors a backend that fails leaves the frame to eager mode: that is told."""
    project.file(
        "test_it",
        HEAD
        + """
count = [0]

def flaky(graph, example_inputs):
    count[0] += 1
    if count[0] % 2 == 0:
        raise RuntimeError("not this one")
    return graph.forward

@pytest.mark.compiled(backend=flaky, max_breaks=0)
def test_ours(compiled):
    torch._dynamo.config.suppress_errors = True
    fast = compiled(lambda x: x + 1)
    fast(X)
    fast(X.double())

def test_by_hand():
    def bad(graph, example_inputs):
        raise RuntimeError("never")
    with torch._dynamo.config.patch(suppress_errors=True):
        torch.compile(lambda x: x + 1, backend=bad)(X)

def test_told_to_the_user():
    def bad(graph, example_inputs):
        raise RuntimeError("never")
    with pytest.raises(Exception, match="never"):
        torch.compile(lambda x: x + 1, backend=bad)(X)
""",
    )
    run = project.run("--dynamo-max-breaks=0")
    run.result.assert_outcomes(failed=2, passed=1)
    (found,) = run.record("test_by_hand")["breaks"]
    assert found["kind"] == "skipped_frame"
    assert "BackendCompilerFailed" in found["reasons"][0]["reason"]


def test_state_is_compared_and_put_back(project):
    """Reassigned buffers, weights through an optimizer, held tensors, nested caches, `.data`."""
    project.file(
        "test_it",
        HEAD
        + """
def wrong(graph, example_inputs):
    return lambda *args: tuple(out + 1 if out.is_floating_point() else out for out in graph(*args))

def wrong_in_place(graph, example_inputs):
    def run(*args):
        known = [*args, *graph.parameters()]
        before = [arg.detach().clone() for arg in known]
        out = graph(*args)
        for old, arg in zip(before, known):
            if not torch.equal(old, arg.detach()):
                arg.detach().add_(1)
        return out
    return run

class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
    def forward(self, x):
        self.mean = self.mean * 0.9 + x * 0.1
        return x > 0

bad = pytest.mark.xfail(raises=__import__("pytest_dynamo").ParityError, strict=True)

@bad
@pytest.mark.compiled(backend=wrong)
def test_reassigned_buffer(compiled):
    compiled(Average())(X)

@bad
@pytest.mark.compiled(backend=wrong_in_place)
def test_optimizer(compiled):
    model = nn.Linear(4, 4)
    model.weight.grad = torch.ones(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(x):
        optimizer.step()
        return x > 0
    compiled(step)(X)

@bad
@pytest.mark.compiled(backend=wrong_in_place)
@pytest.mark.parametrize("where", ["closure", "object", "list"])
def test_held_tensor(compiled, where):
    held = torch.zeros(4)
    class Holder:
        pass
    holder = Holder()
    holder.held = held
    class Call:
        def __init__(self):
            self.inner = holder
            self.list = [held]
        def __call__(self, x):
            (self.inner.held if where == "object" else self.list[0]).add_(1)
            return x > 0
    def closure(x):
        held.add_(1)
        return x > 0
    compiled(closure if where == "closure" else Call())(X)

@eager
def test_nested_state(compiled):
    class Cache:
        n = 0
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.kv = [[], []]
            self.cache = Cache()
            self.weight = nn.Parameter(torch.ones(4))
        def forward(self, x):
            self.kv[0].append(x)
            self.cache.n += 1
            self.weight.data = self.weight.data * 0.5
            return torch.cat(self.kv[0]) * self.cache.n
    model = M()
    compiled(model)(X)
    assert len(model.kv[0]) == 1
    assert model.cache.n == 1
    assert torch.equal(model.weight.detach(), torch.full((4,), 0.5))
""",
    )
    run = project.run()
    run.result.assert_outcomes(passed=1, xfailed=5)


def test_small_changes_that_compiled_drops(project):
    """Changes within the tolerances of what they change must not be lost; those within rounding may."""
    project.file(
        "test_it",
        HEAD
        + """
def drops(graph, example_inputs):
    return lambda *args: graph(*[arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args])

bad = pytest.mark.xfail(raises=__import__("pytest_dynamo").ParityError, strict=True)
dropping = pytest.mark.compiled(backend=drops)

@bad
@eager
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_moving_average(compiled, how):
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.ones(4))
        def forward(self, x):
            if not torch.compiler.is_compiling():
                if how == "in place":
                    self.mean.lerp_(x, 1e-6)
                else:
                    self.mean = self.mean.lerp(x, 1e-6)
            return x + 1
    compiled(Average())(X)

@bad
@eager
def test_optimizer(compiled):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    def step(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        if not torch.compiler.is_compiling():
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    compiled(step)(X)

@bad
@dropping
@pytest.mark.parametrize("start, by", [(torch.ones(4), 5e-6), (torch.tensor([100.0]).bfloat16(), 1.0)])
def test_argument(compiled, start, by):
    compiled(lambda x, y: (x.add_(by), y + 1)[1])(start, X)

@bad
@pytest.mark.compiled(backend=drops, atol=0.1)
def test_own_tolerances(compiled):
    compiled(lambda x, y: (x.add_(1e-3), y + 1)[1])(torch.ones(4), X)

@dropping
def test_one_step_of_rounding(compiled):
    compiled(lambda x, y: (x.add_(1.2e-7), y + 1)[1])(torch.ones(4), X)

@dropping
def test_made_up_by_rounding(compiled):
    torch.manual_seed(0)
    y = torch.randn(100) * 1000
    compiled(lambda x, y: (x.add_((y + 1 - y - 1).sum()), y + 1)[1])(torch.ones(1), y)

@dropping
def test_unchanged(compiled):
    compiled(lambda x, y: (x.mul_(1), y + 1)[1])(torch.ones(4), X)
""",
    )
    run = project.run()
    run.result.assert_outcomes(passed=3, xfailed=6)
    assert "eager changed it, by " in project.run("-k test_own_tolerances", "--runxfail").text


def test_generators_that_compiled_does_not_advance(project):
    """Generators of random numbers of the caller's own stand afterwards where eager leaves them."""
    project.file(
        "test_it",
        HEAD
        + """
import random
import numpy as np

DRAWS = {
    "torch": (lambda: torch.Generator().manual_seed(0), lambda g: torch.rand(4, generator=g)),
    "python": (lambda: random.Random(0), lambda g: g.random()),
    "numpy": (lambda: np.random.default_rng(0), lambda g: float(g.random())),
    "old numpy": (lambda: np.random.RandomState(0), lambda g: float(g.rand())),
}
bad = pytest.mark.xfail(raises=__import__("pytest_dynamo").ParityError, strict=True)

@pytest.fixture(params=DRAWS.values(), ids=DRAWS)
def drawing(request):
    return request.param

@bad
@pytest.mark.compiled(backend="aot_eager")
@pytest.mark.parametrize("where", ["closure", "argument"])
def test_not_advanced(compiled, drawing, where):
    make, draw = drawing
    held = make()
    def step(x, generator):
        if not torch.compiler.is_compiling():
            draw(held if where == "closure" else generator)
        return x + 1
    compiled(step)(X, make())

@pytest.mark.compiled(backend="aot_eager")
def test_advanced(compiled, drawing):
    make, draw = drawing
    held, given = make(), make()
    outside = torch.compiler.disable(draw)
    fast = compiled(lambda x, generator: x + outside(held) + outside(generator))
    fast(X, given), fast(X, given)

@pytest.mark.compiled(backend="aot_eager")
def test_in_the_graph(compiled):
    held, given = torch.Generator(), torch.Generator()
    fast = compiled(lambda x, g: x + torch.rand(4, generator=held) + torch.rand(4, generator=g))
    fast(X, given), fast(X, given)

@pytest.mark.compiled(backend="aot_eager")
def test_without_a_state(compiled):
    system = random.SystemRandom()
    compiled(lambda x: x + 1 if system else x)(X)
""",
    )
    run = project.run()
    run.result.assert_outcomes(passed=6, xfailed=8)
    text = project.run("-k test_not_advanced", "--runxfail").text
    assert text.count("rng: its state after the call is not eager's") == 8


def test_arguments_that_are_hard_to_copy(project):
    """Sentinels keep their identity; locks and modules among the arguments don't leave state changed."""
    project.file(
        "test_it",
        HEAD
        + """
@eager
def test_sentinel(compiled):
    unset = object()
    compiled(lambda x, value: x + 1 if value is unset else x)(X, unset)

@eager
def test_key_of_a_registry(compiled):
    class Kind:
        pass
    kind = Kind()
    factors = {kind: 2}
    compiled(lambda x, kind: x * factors[kind])(X, kind)

@eager
@pytest.mark.parametrize("held", [torch, threading.Lock()], ids=["module", "lock"])
def test_state_with_something_that_refuses(compiled, held):
    class State:
        def __init__(self):
            self.held, self.n = held, 0
    def f(state, x):
        state.n += 1
        return x * state.n
    state = State()
    compiled(f)(state, X)
    assert state.n == 1

@eager
def test_module_as_argument(compiled):
    compiled(lambda x, m: m.sin(x))(X, torch)
""",
    )
    run = project.run()
    assert set(outcomes(run).values()) == {"passed"}, run.text


def test_functions_in_functions(project):
    """A compiled function within another is part of it; a wrapper that copies attributes stays a wrapper."""
    project.file(
        "test_it",
        HEAD
        + """
@eager
def test_nested(compiled):
    inner = compiled(lambda x: x + 1)
    compiled(lambda x: inner(x) * 2)(X)

@eager
def test_compiled_of_compiled(compiled):
    compiled(compiled(lambda x: x + 1))(X)

@eager
def test_transforms(compiled):
    assert torch.equal(torch.func.vmap(compiled(lambda x: x * 2))(X), X * 2)
    assert torch.equal(torch.func.grad(compiled(lambda x: (x * x).sum()))(X), X * 2)

@eager
def test_fake_tensors(compiled):
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        compiled(lambda x: x * 2)(torch.ones(4))
""",
    )
    run = project.run()
    assert set(outcomes(run).values()) == {"passed"}, run.text
    assert run.record("test_fake_tensors[eager]")["not_checked"] == ["<lambda>: FakeTensors have no values"]


def test_wrappers_that_copy_attributes(project):
    """A wrapper made with functools.wraps is not thrown away; if torch itself does so, that is told."""
    run = project.test(
        HEAD
        + """
@eager
def test_it(compiled):
    inner = torch.compile(lambda x: x + 1, backend="eager")
    @functools.wraps(inner)
    def wrapper(x):
        return inner(x) * 10
    if hasattr(wrapper, "get_compiler_config"):
        del wrapper.get_compiler_config  # some versions of torch refuse it for this
    assert torch.equal(compiled(wrapper)(X), (X + 1) * 10)
"""
    )
    assert run.result.ret == 0 or "compiled wrapper differs from eager" in run.text


def test_other_threads_and_other_tests(project):
    """A compilation in another thread excuses no call; a function kept from another test is refused."""
    project.file(
        "test_it",
        HEAD
        + """
def slow(graph, example_inputs):
    time.sleep(1)
    return graph.forward

def wrong(graph, example_inputs):
    return lambda *args: tuple(out + 1 for out in graph(*args))

@pytest.mark.compiled(backend=wrong)
def test_checked_meanwhile(compiled):
    fast = compiled(lambda x: x * 2)
    thread = threading.Thread(target=lambda: torch.compile(lambda x: x + 1, backend=slow)(X))
    thread.start()
    time.sleep(0.5)
    try:
        fast(X)
    finally:
        thread.join()

kept = {}

@eager
def test_keeps(compiled):
    kept["fast"] = compiled(lambda x: x + 1)
    kept["fast"](X)

def test_uses_what_was_kept():
    torch.compile(breaks, backend="eager")(X)
    with pytest.raises(RuntimeError, match="which has ended: make one in each test"):
        kept["fast"](X)
""",
    )
    run = project.run("--dynamo-max-breaks=0")
    run.result.assert_outcomes(failed=2, passed=1)
    assert "compiled <lambda> differs from eager in call 1 [wrong]" in run.text
    assert len(run.record("test_uses_what_was_kept")["breaks"]) == 1


def test_calls_that_end_early_are_not_checked(project):
    """An exception that is no Exception, such as SystemExit, ends a call without a comparison."""
    project.file(
        "test_it",
        HEAD
        + """
class Stop(BaseException):
    pass

@eager
def test_it(compiled):
    def f(x):
        raise Stop
    with pytest.raises(Stop):
        compiled(f)(X)
""",
    )
    run = project.run("--dynamo-require-checked")
    run.result.assert_outcomes(failed=1)
    assert "all calls raised" in run.text


def test_subtests_are_not_the_test(project):
    """A subtest within a test neither judges it nor takes its counts."""
    project.file(
        "test_it",
        HEAD
        + """
@eager
def test_ours(compiled, subtests):
    fast = compiled(lambda x: x + 1)
    with subtests.test("prepare"):
        pass
    with subtests.test("call"):
        fast(X)

def test_by_hand(subtests):
    torch.compile(breaks, backend="eager")(X)
    with subtests.test("one"):
        pass
""",
    )
    run = project.run("--dynamo-max-breaks=0")
    assert run.record("test_ours[eager]")["outcome"] == "passed"
    assert run.record("test_ours[eager]")["graphs"] == 1
    assert len(run.record("test_by_hand")["breaks"]) == 1
    assert run.text.count("1 graph break, 0 allowed") == 2  # the failure, and its line in the short summary


def test_zeros_and_large_tensors(project):
    """Eager's exact zeros don't end in a division by zero; comparing takes little memory."""
    project.file(
        "test_it",
        HEAD
        + """
import resource

def wrong(graph, example_inputs):
    return lambda *args: tuple(out + 1 for out in graph(*args))

@pytest.mark.compiled(backend=wrong)
def test_zeros(compiled):
    compiled(torch.relu)(-torch.ones(4))

@eager
def test_memory(compiled):
    fast = compiled(lambda x: x.sum())
    fast(torch.ones(4))
    large = torch.ones(32 * 1024 * 1024)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fast(large)
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert used < 2.5 * 128, used
""",
    )
    run = project.run(subprocess=True)
    run.result.assert_outcomes(failed=1, passed=1)
    assert "ParityError: compiled relu differs from eager" in run.text


RAISING = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = 0
        self.register_buffer("b", torch.zeros(4))
        self.table = nn.Embedding(3, 4)
    def forward(self, x, i, how):
        return how(self, x, i)

def change(m, x):
    m.n += 1
    m.b += 1
    x.mul_(2)

@torch.compiler.disable
def refuse(message="no"):
    raise ValueError(message)
"""


def test_what_an_exception_leaves_is_compared(project):
    """Where both raise, arguments, state and random numbers have to be as eager leaves them."""
    project.file(
        "test_it",
        HEAD
        + RAISING
        + """
def state(m, x, i):
    y = x + 1
    if not torch.compiler.is_compiling():
        m.n += 1
        m.b += 1
    refuse()

def argument(m, x, i):
    y = x + 1
    if not torch.compiler.is_compiling():
        x.mul_(2)
    refuse()

def random_numbers(m, x, i):
    y = x + 1
    if not torch.compiler.is_compiling():
        torch.rand(3)
    refuse()

@pytest.mark.compiled(backend="aot_eager")
@pytest.mark.parametrize("how", [state, argument, random_numbers])
def test_it(compiled, how):
    with pytest.raises(ValueError):
        compiled(M())(torch.ones(4), torch.tensor([0]), how)
""",
    )
    run = project.run()
    assert list(outcomes(run).values()) == ["failed"] * 3
    for line in ("*b after the call*", "*args?0?  mutation*", "*torch  rng: its state after the call is not*"):
        run.result.stdout.fnmatch_lines([line])


def test_honest_exceptions(project):
    """What raises before, between or after its changes leaves the same, or raises in a graph and is not judged."""
    project.file(
        "test_it",
        HEAD
        + RAISING
        + """
def before(m, x, i):
    y = x + 1
    refuse()
    change(m, x)

def traced(m, x, i):
    change(m, x)
    raise ValueError("a")

def drawn(m, x, i):
    x.add_(torch.rand(4))
    m.b += torch.rand(4)
    refuse()

def in_a_block(m, x, i):
    with torch.no_grad():
        change(m, x)
        if x.sum() > 0:
            raise ValueError("w")

def nested(m, x, i):
    def inner(y):
        m.n += 1
        y.mul_(2)
        raise ValueError("k")
    m.b += 1
    inner(x)

def caught(m, x, i):
    try:
        change(m, x)
        refuse()
    except ValueError:
        m.b += 1
    raise ValueError("after")

def at_last(m, x, i):
    try:
        change(m, x)
        refuse()
    finally:
        m.b += 1

def out_of_range(m, x, i):
    change(m, x)
    return x + m.table(i + 7)

def trained(m, x, i):
    loss = (m.table(i) * x).sum()
    loss.backward()
    with torch.no_grad():
        m.table.weight.sub_(m.table.weight.grad)
    m.n += 1
    refuse()

HOWS = [before, traced, drawn, in_a_block, nested, caught, at_last, trained]

@pytest.mark.compiled(backend=["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("how", HOWS)
def test_outside(compiled, how):
    compiled(M())(X, torch.tensor([0]), lambda m, x, i: x + 1)
    with pytest.raises(ValueError):
        compiled(M())(torch.ones(4), torch.tensor([0]), how)

@pytest.mark.compiled(backend=["eager", "aot_eager"])
def test_in_a_graph(compiled):
    with pytest.raises(IndexError):
        compiled(M())(torch.ones(4), torch.tensor([0]), out_of_range)

def fails(gm, inputs):
    def run(*a):
        raise RuntimeError("launch failed")
    return run

@torch.compiler.disable
def too_few():
    raise RuntimeError("expected 4 rows")

@pytest.mark.compiled(backend=fails)
def test_other_message(compiled):
    def step(x):
        y = x + 1
        too_few()
        return y
    with pytest.raises(RuntimeError, match="launch failed"):
        compiled(step)(torch.randn(3))
""",
    )
    run = project.run()
    assert set(outcomes(run).values()) == {"passed"}, run.text
    in_graph = [r["not_checked"] for r in run.report["records"] if "test_in_a_graph" in r["nodeid"]]
    assert all("which makes its changes only when it ends" in str(texts) for texts in in_graph)
    assert "compiled raised RuntimeError: launch failed, eager raised RuntimeError: expected 4 rows" in run.text


def test_results_whose_rows_share_memory(project):
    """Only where eager's do not; what eager expands may stay expanded or become dense."""
    project.file(
        "test_it",
        HEAD
        + """
def expanded(gm, inputs):
    return lambda *args: (gm(*args)[0][:1].expand(4, 4),)

def dense(gm, inputs):
    return lambda *args: (gm(*args)[0].contiguous(),)

repeat = lambda x: (x[None] + 1).repeat(4, 1)
expand = lambda x: (x[None] + 1).expand(4, 4)
FNS = [repeat, expand, lambda x: torch.zeros_like(expand(x)), lambda x: expand(x).contiguous(), lambda x: expand(x) * 2]

@pytest.mark.compiled(backend=expanded)
def test_shared(compiled):
    compiled(repeat)(X)

@pytest.mark.compiled(backend=expanded, check_alias=False)
def test_not_asked(compiled):
    compiled(repeat)(X)

@pytest.mark.compiled(backend=[expanded, dense])
def test_eagers_too(compiled):
    compiled(expand)(X)

@pytest.mark.compiled(backend=["aot_eager", "inductor"])
@pytest.mark.parametrize("fn", FNS)
def test_honest(compiled, fn):
    compiled(fn)(X)
""",
    )
    run = project.run()
    assert [name for name, outcome in outcomes(run).items() if outcome != "passed"] == ["test_shared[expanded]"]
    run.result.stdout.fnmatch_lines(["*out  alias: its elements share memory, eager's do not*"])


def test_results_in_the_memory_of_earlier_ones(project):
    """Only where eager returns new memory: what it keeps or was given comes back in each call."""
    project.file(
        "test_it",
        HEAD
        + """
KEPT, CACHE = torch.ones(4), {}

def folded(gm, inputs):
    kept = []
    def run(*args):
        kept.extend(() if kept else gm(*args))
        return tuple(kept)
    return run

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.ones(4))
        self.w = nn.Parameter(torch.ones(4))
        self.cached = None
    def forward(self, x):
        if self.cached is None:
            self.cached = x * 2
        return x + 1, self.b, self.w[1:], self.w.detach(), self.cached, KEPT

@functools.lru_cache
def table(n):
    return torch.arange(n)

@torch.compiler.disable
def hidden(n):
    return CACHE.setdefault(n, torch.arange(n)), table(n)

def cached(x):
    return x + 1, hidden(len(x))

def new(x):
    return torch.ones(4), torch.tensor([1, 2]), torch.tensor(3.0), x + 1, torch.ones(4) * 2

@pytest.mark.compiled(backend=folded)
def test_constant(compiled):
    fast = compiled(lambda x: torch.ones(4) * 2 + 0 * x.shape[0])
    held = fast(torch.zeros(3))
    fast(torch.zeros(3))

@pytest.mark.compiled(backend=["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("make", [M, lambda: cached, lambda: new, lambda: lambda x: (x.view(2, 2), x.add_(1))])
def test_honest(compiled, make):
    fast, x = compiled(make()), X.clone()
    held = [fast(x), fast(x), fast(X.clone()), fast(held_tensor)]

held_tensor = X.clone()
""",
    )
    run = project.run()
    assert [name for name, outcome in outcomes(run).items() if outcome != "passed"] == ["test_constant[folded]"]
    run.result.stdout.fnmatch_lines(["*out  alias: compiled's shares memory with out of call 1 of *"])


def test_eager_that_varies_excuses_no_more_than_it_varies(project):
    """What is far further from eager than eager is from itself is judged, by the float64 run where there is one."""
    project.file(
        "test_it",
        HEAD
        + """
@torch.library.custom_op("varies::noise", mutates_args=())
def noise(x: torch.Tensor, size: float) -> torch.Tensor:
    return x * (1 + size * torch.rand(x.shape, generator=FRESH))

@noise.register_fake
def _(x, size):
    return torch.empty_like(x)

FRESH = torch.Generator()

def spoiled(change):
    def backend(graph, example_inputs):
        return lambda *args: tuple(change(out) for out in graph(*args))
    return backend

def f(x, size):
    FRESH.seed()
    return noise(x, size) + 1, (noise(x, size) * 1000).long()

@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
@pytest.mark.compiled(backend="aot_eager")
def test_honest(compiled, size):
    for _ in range(10):
        compiled(f)(torch.randn(16), size)

@pytest.mark.compiled(backend="aot_eager")
def test_one_number(compiled):
    for _ in range(10):
        compiled(f)(torch.randn(1), 1.0)

@pytest.mark.compiled(backend=["eager", "inductor"])
def test_time(compiled):
    compiled(lambda x: (x + 1, x + time.perf_counter()))(X)

@pytest.mark.compiled(backend=spoiled(torch.zeros_like))
def test_zeros(compiled):
    compiled(f)(torch.randn(16), 1e-4)

@pytest.mark.compiled(backend=spoiled(lambda out: out * float("nan") if out.is_floating_point() else out))
def test_nan(compiled):
    compiled(f)(torch.randn(16), 1.0)

@pytest.mark.compiled(backend=spoiled(lambda out: out.double() if out.is_floating_point() else out))
def test_dtype(compiled):
    compiled(f)(torch.randn(16), 1.0)
""",
    )
    found = outcomes(project.run())
    assert found == {
        "test_honest[aot_eager-0.0001]": "passed",
        "test_honest[aot_eager-0.01]": "passed",
        "test_honest[aot_eager-1.0]": "passed",
        "test_one_number[aot_eager]": "passed",
        "test_time[eager]": "passed",
        "test_time[inductor]": "passed",
        "test_zeros[backend]": "failed",
        "test_nan[backend]": "failed",
        "test_dtype[backend]": "failed",
    }


def test_modes_that_a_call_switches(project):
    """What eager leaves switched is not on while compiled runs, and compiled has to switch it too."""
    project.file(
        "test_it",
        HEAD
        + """
COMPILES = torch.compiler.is_compiling

@pytest.fixture(autouse=True)
def modes():
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)

def grad(x, wrong=False):
    y = x * 2
    if not (wrong and COMPILES()):
        torch.set_grad_enabled(False)
    return y

def dtype(x, wrong=False):
    y = x + torch.ones(4)
    if not (wrong and COMPILES()):
        torch.set_default_dtype(torch.float64)
    return y

@pytest.mark.parametrize("fn", [grad, dtype])
@eager
def test_honest(compiled, fn):
    compiled(fn)(torch.randn(4, requires_grad=True))
    assert not torch.is_grad_enabled() if fn is grad else torch.get_default_dtype() is torch.float64

@pytest.mark.parametrize("fn", [grad, dtype])
@eager
def test_wrong(compiled, fn):
    compiled(fn)(torch.randn(4), True)
""",
    )
    run = project.run()
    assert outcomes(run) == {
        "test_honest[eager-grad]": "passed",
        "test_honest[eager-dtype]": "passed",
        "test_wrong[eager-grad]": "failed",
        "test_wrong[eager-dtype]": "failed",
    }
    run.result.stdout.fnmatch_lines(
        [
            "*the grad mode after the call  state: compiled left True, eager False",
            "*the default dtype after the call  state: compiled left torch.float32, eager torch.float64",
        ]
    )


def test_sizes_that_follow_from_rounding(project):
    """A size that eager too has otherwise in other roundings is not judged; one that it never has fails."""
    project.file(
        "test_it",
        HEAD
        + """
def bins(x):
    return torch.bincount((x.abs() * 3).long().flatten())

def one_more(graph, example_inputs):
    return lambda *args: tuple(torch.cat([out, out[:1]]) for out in graph(*args))

@pytest.mark.compiled
def test_bins(compiled):
    fast = compiled(bins)
    for seed in range(6):
        torch.manual_seed(seed)
        fast(torch.randn(8, 16).bfloat16())

def gate(x, y):
    return (x * y + x.exp() * y.sin()).sigmoid()

def counts(x, y):
    held = gate(x, y) > 0.5
    kept = gate(x, y)[held]
    return held.sum().item(), len(kept), kept.shape, gate(x, y).argmax(-1).tolist(), bool(held[0].sum() > 20)

@pytest.mark.compiled
def test_counts(compiled):
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compiled(counts)(*(torch.randn(100, 50, dtype=torch.bfloat16) for _ in range(2)))

def selected(x, y):
    z = (x * y + x.sin() * y.cos()).tanh()
    return z.masked_select(z > 0.3)

@pytest.mark.compiled
def test_same_size_by_chance(compiled):
    fast = compiled(selected)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for seed in range(4):
            torch.manual_seed(seed)
            fast(*(torch.randn(60, 50, dtype=torch.bfloat16) for _ in range(2)))

@pytest.mark.compiled(backend=one_more)
def test_one_more(compiled):
    compiled(lambda x: x * 1.5)(torch.randn(8))

def off_by_one(x):
    count = (x > 0).sum().item()
    return x + 1, count + int(torch.compiler.is_compiling()), count

@eager
def test_off_by_one(compiled):
    compiled(off_by_one)(X)

@eager
def test_equal_numbers(compiled):
    compiled(lambda x: (x + 1, [2, 3, 2 + int(torch.compiler.is_compiling()), 3]))(X)
""",
    )
    run = project.run()
    assert outcomes(run) == {
        "test_bins[inductor]": "passed",
        "test_counts[inductor]": "passed",
        "test_same_size_by_chance[inductor]": "passed",
        "test_one_more[one_more]": "failed",
        "test_off_by_one[eager]": "failed",
        "test_equal_numbers[eager]": "failed",
    }
    bins = next(r for r in run.report["records"] if r["phase"] == "call")
    (check,) = (c for c in bins["parity"]["checks"] if c["passed"] is None)
    assert "its size follows from rounding: compiled (10,), eager (11,)" in check["note"]


def test_an_argument_that_the_function_also_knows_is_one_object(project):
    """It is not cloned: functions compare it by identity, and change it through either name."""
    project.file(
        "test_it",
        HEAD
        + """
class Config:
    def __init__(self):
        self.calls = 0

DEFAULT = Config()

def f(x, config, wrong=False):
    if config is not DEFAULT:
        return x * 2
    config.calls += 1
    if wrong and torch.compiler.is_compiling():
        config.calls += 1
    return x * 3 + DEFAULT.calls

@eager
def test_honest(compiled):
    fast = compiled(f)
    assert torch.equal(fast(X, DEFAULT), X * 3 + 1)
    assert torch.equal(fast(X, DEFAULT), X * 3 + 2)

@eager
def test_wrong(compiled):
    compiled(f)(X, DEFAULT, True)
""",
    )
    assert outcomes(project.run()) == {"test_honest[eager]": "passed", "test_wrong[eager]": "failed"}


def test_negated_state_shows(project):
    """Signs of float64 are the highest bits, which cancel in plain sums."""
    project.file(
        "test_it",
        HEAD
        + """
def negates(graph, example_inputs):
    def run(*args):
        out = graph(*args)
        for tensor in args:
            if isinstance(tensor, nn.Parameter):
                tensor.data.neg_()
        return out
    return run

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128])
@pytest.mark.parametrize("size", [64, 700])
@pytest.mark.compiled(backend=negates)
def test_it(compiled, dtype, size):
    model = nn.Linear(size, size, bias=False).to(dtype)
    with torch.no_grad():
        compiled(model)(torch.randn(2, size, dtype=dtype))
""",
    )
    run = project.run()
    run.result.assert_outcomes(failed=6)
    run.result.stdout.fnmatch_lines(
        ["*parameter weight after the call  state: compiled changed it, eager left it alone"]
    )


def test_state_of_classes_and_modules(project):
    """What a function names of classes, instances and Python modules is put back and compared, also in methods."""
    project.file("its_lib", "import torch\nAUX = []\nLINEAR = torch.nn.Linear(4, 4)\ndef record(x): AUX.append(x)\n")
    project.file(
        "test_it",
        HEAD
        + """
import its_lib

EMA = {}

class Tracker:
    losses = {}

class Meter:
    def add(self, x):
        EMA["v"] = EMA.get("v", 0) + x.sum()
    @staticmethod
    def log(x):
        Tracker.losses["n"] = Tracker.losses.get("n", 0) + x.sum()

METER = Meter()

class Router(nn.Module):
    aux = []
    def forward(self, x):
        self.keep(x * 2)
        return x + 1
    def keep(self, x):
        type(self).aux.append(x)

def pops(x):
    return x + Tracker.losses.pop("aux")

def by_class(x):
    Tracker.losses["n"] = x * 3
    return x + 1

def by_method(x):
    METER.add(x * 2)
    return x + 1

def by_static(x):
    METER.log(x * 2)
    return x + 1

def by_local(x):
    Meter().add(x * 2)
    return x + 1

def by_module(x):
    its_lib.record(x * 2)
    return x + 1

FUNCTIONS = [by_class, by_method, by_static, by_local, by_module, Router()]

def spoiled(graph, example_inputs):
    return lambda *args: tuple(out * 1.5 if n else out for n, out in enumerate(graph(*args)))

def scaled(graph, example_inputs):
    class Scaled(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.view_as(x))
        backward = staticmethod(lambda ctx, g: g * 1.5)
    return lambda *args: tuple(Scaled.apply(out) for out in graph(*args))

@pytest.fixture(autouse=True)
def fresh():
    for held in (EMA, Tracker.losses, Router.aux, its_lib.AUX):
        held.clear()

@pytest.mark.compiled(backend="aot_eager")
def test_popped(compiled):
    Tracker.losses["aux"] = X
    assert torch.equal(compiled(pops)(X), X + X)
    assert not Tracker.losses

@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.compiled(backend="aot_eager")
def test_honest(compiled, fn):
    compiled(fn)(X)
    found = [*EMA.values(), *Tracker.losses.values(), *Router.aux, *its_lib.AUX]
    assert len(found) == 1 and torch.equal(found[0].sum(), X.sum() * (3 if fn is by_class else 2))

@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.compiled(backend=spoiled)
def test_wrong(compiled, fn):
    compiled(fn)(X)

@pytest.mark.compiled(backend=scaled)
def test_wrong_gradients(compiled):
    compiled(lambda x: its_lib.LINEAR(x))(X)
""",
    )
    found = outcomes(project.run())
    assert len(found) == 14
    assert {name for name, outcome in found.items() if outcome == "failed"} == {
        *(name for name in found if name.startswith("test_wrong"))
    }


def test_what_a_call_deletes_and_sentinels(project):
    """What is gone afterwards, and objects without state, are compared and not taken for other ones."""
    project.file(
        "test_it",
        HEAD
        + """
MISSING = object()

class Warm(nn.Module):
    def __init__(self, wrong=False):
        super().__init__()
        self.first, self.wrong = True, wrong
    def forward(self, x):
        if hasattr(self, "first"):
            if not (self.wrong and torch.compiler.is_compiling()):
                del self.first
            return x * 2
        return x * 3

@eager
def test_deleted(compiled):
    compiled(Warm())(X)

@eager
def test_not_deleted(compiled):
    compiled(Warm(True))(X)

@eager
def test_sentinel(compiled):
    assert compiled(lambda x, mask=MISSING: (x * 2, mask))(X)[1] is MISSING

@eager
def test_another_sentinel(compiled):
    compiled(lambda x: (x * 2, object() if torch.compiler.is_compiling() else MISSING))(X)
""",
    )
    run = project.run("--dynamo-require-checked")
    assert outcomes(run) == {
        "test_deleted[eager]": "passed",
        "test_not_deleted[eager]": "failed",
        "test_sentinel[eager]": "passed",
        "test_another_sentinel[eager]": "failed",
    }


def test_calls_of_several_threads(project):
    """They wait for each other: what a comparison moves is the process's."""
    project.file(
        "test_it",
        HEAD
        + """
net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

@pytest.mark.compiled(backend="aot_eager")
def test_it(compiled):
    fast, out, start = compiled(lambda x: net(x).sin() + 1), [], threading.Barrier(4)

    def work(x):
        start.wait()
        out.append((fast(x), x))

    threads = [threading.Thread(target=work, args=(torch.randn(32, 64),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(out) == 4
    assert all(torch.allclose(y, net(x).sin() + 1) for y, x in out)
""",
    )
    run = project.run()
    run.result.assert_outcomes(passed=1)
    assert "note:" not in run.text


def test_generators_as_arguments_are_refused(project):
    """Their values exist only once: one of both runs would go without."""
    project.file(
        "test_it",
        HEAD
        + """
@eager
def test_it(compiled):
    with pytest.raises(TypeError, match="an argument is or holds a generator.*give a list"):
        compiled(lambda x, more: x + sum(p.sum() for p in more))(X, nn.Linear(2, 2).parameters())
    compiled(lambda x, more: x + sum(p.sum() for p in more))(X, list(nn.Linear(2, 2).parameters()))
""",
    )
    run = project.run()
    run.result.assert_outcomes(passed=1)


def test_fullgraph_is_one_failure(project):
    """Compiled raised and eager did not: nothing says that it did."""
    project.file(
        "test_it",
        HEAD
        + """
@pytest.mark.compiled(backend="aot_eager", fullgraph=True)
def test_it(compiled):
    compiled(breaks)(X)
""",
    )
    run = project.run()
    run.result.assert_outcomes(failed=1)
    assert "in eager mode too" not in run.text
