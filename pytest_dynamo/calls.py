"""One checked call: eager on clones, compiled on the caller's objects, compared."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from typing import NoReturn

import torch

from pytest_dynamo import _torch
from pytest_dynamo import inputs
from pytest_dynamo.errors import LimitError
from pytest_dynamo.errors import ParityError
from pytest_dynamo.events import CompileEvent
from pytest_dynamo.events import Event
from pytest_dynamo.messages import StackFrame
from pytest_dynamo.observer import quiet_trace
from pytest_dynamo.parity import Pairs
from pytest_dynamo.parity import compare
from pytest_dynamo.record import Check
from pytest_dynamo.record import Finding
from pytest_dynamo.reference import BUDGETS
from pytest_dynamo.reference import Float64
from pytest_dynamo.reference import within_rounding
from pytest_dynamo.settings import Tolerances
from pytest_dynamo.start import Arguments
from pytest_dynamo.start import Outcome
from pytest_dynamo.start import Start
from pytest_dynamo.start import Written
from pytest_dynamo.state import Random
from pytest_dynamo.summary import Group
from pytest_dynamo.terminal import finding_lines
from pytest_dynamo.terminal import parity_lines
from pytest_dynamo.testrun import FunctionRun
from pytest_dynamo.testrun import TestRun
from pytest_dynamo.testrun import captures
from pytest_dynamo.variants import Variant
from pytest_dynamo.verdict import break_message


class Checker:
    """Compiles a function once and checks every call of it."""

    def __init__(self, fn: Callable[..., Any], variant: Variant, tolerances: Tolerances, run: TestRun) -> None:
        self.fn = _torch.uncompiled(fn)
        refuse(self.fn)
        self.name = name_of(self.fn)
        self.variant = variant
        self.tolerances = tolerances
        self.run = run
        code = _torch.code_of(self.fn)
        where = StackFrame(code.co_filename, code.co_firstlineno, self.name) if code is not None else None
        self.function = FunctionRun(self.name, where, Group(self.name))
        self._compiled: Callable[..., Any] | None = None
        #: Whether it was looked into why nothing was compiled.
        self._looked = False
        #: Compiled with eager's random numbers, if that was needed.
        self._apart: Callable[..., Any] | None = None

    # -- a call, in the order in which things happen --

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        if torch.compiler.is_dynamo_compiling():
            # Called from code that is being compiled: there is nothing to compare in there.
            return self.fn(*args, **kwargs)
        run, function = self.run, self.function
        if run.ended:
            raise RuntimeError(f"compiled({self.name}) belongs to {run.nodeid}, which has ended: make one in each test")
        function.calls += 1
        if threading.get_ident() in run.in_eager:
            # Part of another compiled function, which is compared as a whole.
            function.inlined = True
            return self.fn(*args, **kwargs)
        run.take_loose()
        begun = len(function.group.events)
        unreadable = _torch.unreadable((args, kwargs))
        if unreadable is not None:
            run.not_checked[f"{self.name}: {unreadable}"] = None
            return self._uncompared(args, kwargs)
        start = Start(self.fn, (args, kwargs))
        run.in_eager.add(threading.get_ident())
        try:
            eager, written = start.run_eager()
        finally:
            run.in_eager.discard(threading.get_ident())
        refuse_result(eager.value, self.name)
        runs = 3 if self._uses_cudagraphs(start, (args, kwargs)) and eager.error is None else 1
        for number in range(1, runs + 1):
            start.rewind()
            given = (args, kwargs) if number == runs else start.clone((args, kwargs))
            compiled = self._run_compiled(*given)
            run.take_for(function)
            if compiled.error is not None or eager.error is not None:
                break
            self._judge(compiled, eager, written, start, number if runs > 1 else None)
            if number < runs:
                del compiled  # an output that is still alive would keep CUDA graphs from being replayed
        run.not_checked.update(dict.fromkeys(start.notes))
        if compiled.error is None and eager.error is None:
            function.returned += 1
            function.captured = function.captured or captures(function.group.events[begun:])
            if not function.captured and not self._looked:
                self._look_apart(start, function.group.events[begun:])
            return compiled.value
        return self._fail_or_raise(compiled.error, eager.error)

    def _uncompared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is compiled and can't be compared."""
        with compiling(self.run):
            value = self._compile()(*args, **kwargs)
        self.run.take_for(self.function)
        self.function.returned += 1
        self.function.captured = True
        return value

    def _look_apart(self, start: Start, told: list[Event]) -> None:
        """Find out whether a function that compiled nothing runs what another one had compiled.

        The same code may have been compiled before in this test, through another ``compiled(...)`` or
        by hand. So Dynamo starts afresh, and the call is made once more on clones. What is seen then
        counts unless the call itself had ``told`` of a compilation.
        """
        self._looked = True
        if self.run.keeps_compiled:
            text = f"whether {self.name} was compiled: --dynamo-reset=never keeps what earlier tests compiled"
            self.run.not_checked[text] = None
            self.function.captured = True
            return
        self.run.observer.reset()
        self.run.take_away()
        with start.again() as (args, kwargs), compiling(self.run):
            try:
                self._compile()(*args, **kwargs)
            except Exception as error:
                self.run.notes[f"{self.name}: a second look at what is compiled ended in {_told(error)}"] = None
        begun = len(self.function.group.events)
        self.run.take_for(self.function)
        self.function.captured = captures(self.function.group.events[begun:])
        if any(isinstance(event, CompileEvent) for event in told):
            del self.function.group.events[begun:]

    def _compile(self) -> Callable[..., Any]:
        if self._compiled is None:
            self._compiled = torch.compile(self.fn, **self.variant.kwargs)
        return self._compiled

    def _judge(
        self, compiled: Outcome, eager: Outcome, written: list[Written], start: Start, number: int | None
    ) -> None:
        """Keep the checks of one compiled run; raise ParityError if one failed and nothing excuses it."""
        __tracebackhide__ = True
        checks, pairs = self._compare(compiled, eager, written, start)
        drew = {"torch", "torch.cuda"}.intersection(eager.random.changed(start.random))
        if drew and self.variant.backend == "inductor" and _failed(checks):
            checks, pairs = self._with_eager_random_numbers(checks, pairs, start, eager, written)
        if _failed(checks):
            checks = self._by_float64(checks, pairs, start, eager, written)
        if _failed(checks):
            checks = self._unless_nondeterministic(checks, start, eager)
        self.run.checks += checks
        self.run.not_checked.update({f"{c.path}: {c.note}": None for c in checks if c.passed is None})
        if _failed(checks):
            self._fail(checks, number)

    def _run_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        value, error = None, None
        if self.variant.uses_cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()
        with compiling(self.run):
            self.function.switched_off = self.function.switched_off or _torch.switched_off()
            compiled = self._compile()
            try:
                value = compiled(*args, **kwargs)
            except Exception as raised:
                error = raised
        if self.function.cudagraphs_expected and self.function.replayed is not None:
            replayed = _torch.last_call_replayed()
            self.function.replayed = None if replayed is None else self.function.replayed + replayed
        return Outcome(value, error, (args, kwargs), Random())

    def _uses_cudagraphs(self, start: Start, arguments: Arguments) -> bool:
        """Whether CUDA graphs are to be recorded and can be: the variant asks, and there is a GPU."""
        if not self.variant.uses_cudagraphs:
            return False
        tensors = [value for value in inputs.walk(arguments) if isinstance(value, torch.Tensor)]
        tensors += [tensor for owner in start.owners for tensor in inputs.state_tensors(owner)]
        if any(tensor.is_cuda for tensor in tensors):
            self.function.cudagraphs_expected = True
            return True
        why = "there is no CUDA" if not torch.cuda.is_available() else "nothing of the call is on a GPU"
        self.run.not_checked[f"CUDA graphs of {self.name}: {why}"] = None
        return False

    @contextmanager
    def watch_forward(self) -> Iterator[list[str]]:
        """Collect whether the module is called while a method of it runs."""
        ran: list[str] = []
        handle = self.fn.register_forward_pre_hook(lambda module, args: ran.append("forward"))
        try:
            yield ran
        finally:
            handle.remove()

    # -- comparing --

    def _compare(
        self, compiled: Outcome, eager: Outcome, written: list[Written], start: Start
    ) -> tuple[list[Check], Pairs]:
        """Compare a run with eager's; also return the tensors that were compared, by path."""
        call, pairs = self.function.calls, Pairs()
        checks = compare(compiled.value, eager.value, tolerances=self.tolerances, call=call, pairs=pairs)
        for number, (actual, expected) in enumerate(zip(compiled.arguments[0], eager.arguments[0])):
            checks += self._mutation(actual, expected, f"args[{number}]", pairs)
        for name, expected in eager.arguments[1].items():
            checks += self._mutation(compiled.arguments[1][name], expected, name, pairs)
        for state in written:
            path = f"{state.path} after the call"
            checks += self._mutation(start.now(state), state.after.detach(), path, pairs)
        for name in compiled.random.changed(eager.random):
            if name in ("random", "numpy.random"):
                note = "its state after the call is not eager's: compiled drew other random numbers from it, or none"
                checks.append(Check("rng", name, call, False, note=note))
        return checks, pairs

    def _mutation(self, actual: Any, expected: Any, path: str, pairs: Pairs) -> list[Check]:
        """Compare what a call left in an argument; what can't be compared there is no one's output."""
        call = self.function.calls
        if actual is expected:
            return []  # an argument that could not be copied: both sides worked on the same object
        found = compare(actual, expected, tolerances=self.tolerances, call=call, path=path, pairs=pairs)
        failed = [replace(check, what="mutation") for check in found if check.passed is False]
        return failed or ([Check("mutation", path, call, True)] if found else [])

    def _by_float64(
        self, checks: list[Check], pairs: Pairs, start: Start, eager: Outcome, written: list[Written]
    ) -> list[Check]:
        """Tell rounding from faults by a run of the same call in float64."""
        doubtful = {check.path for check in checks if check.passed is False and check.max_abs is not None}
        doubtful = {path for path in doubtful & pairs.keys() if pairs[path][1].dtype in BUDGETS}
        if not doubtful or (self.tolerances.rtol, self.tolerances.atol) != (None, None):
            return checks
        references: dict[str, torch.Tensor] = {}
        why = "no float64 reference"
        with start.again() as (args, kwargs):
            try:
                with torch.compiler.set_stance("force_eager"), Float64():
                    value = self.fn(*args, **kwargs)
                met = self._compare(Outcome(value, None, (args, kwargs), Random()), eager, written, start)[1]
                # State is put back when this block ends: copy what it holds.
                references = {path: met[path][0].detach().clone() for path in doubtful & met.keys()}
            except Exception as error:
                why = f"no float64 reference: {_told(error)}"
        return [self._rejudged(c, pairs, references, why) if c.path in doubtful else c for c in checks]

    def _rejudged(self, check: Check, pairs: Pairs, references: dict[str, torch.Tensor], why: str) -> Check:
        reference = references.get(check.path)
        if check.passed is not False or check.max_abs is None:
            return check
        if reference is None or (check.what == "values" and reference.dtype == pairs[check.path][1].dtype):
            return replace(check, note=f"{check.note} ({why})")
        verdict = within_rounding(*pairs[check.path], reference, self.tolerances.max_error_ratio)
        if verdict.passed:
            return replace(check, passed=True, error_ratio=verdict.ratio, note=verdict.note)
        return replace(check, error_ratio=verdict.ratio, note=f"{check.note}; {verdict.note}")

    def _with_eager_random_numbers(
        self, checks: list[Check], pairs: Pairs, start: Start, eager: Outcome, written: list[Written]
    ) -> tuple[list[Check], Pairs]:
        """Judge on code that draws eager's random numbers; its compilation is kept out of all counts."""
        with start.again() as (args, kwargs):
            try:
                with compiling(self.run):
                    if self._apart is None:
                        self._apart = torch.compile(self.fn, **_torch.with_fallback_random(self.variant.kwargs))
                    value = self._apart(*args, **kwargs)
                again, met = self._compare(Outcome(value, None, (args, kwargs), Random()), eager, written, start)
                # State is put back when this block ends: copy what it holds.
                met = {path: (a.detach().clone(), e) for path, (a, e) in met.items()}
            except Exception as error:
                self.run.notes[f"{self.name}: can't be compiled with fallback_random: {_told(error)}"] = None
                return checks, pairs
            finally:
                self.run.take_away()
        # Those of Python and NumPy inductor has not of its own: what was found there stands.
        again = [*(c for c in again if c.what != "rng"), *(c for c in checks if c.what == "rng")]
        if not _failed(again):
            told = f"{self.name}: parity judged with fallback_random, as inductor draws its own random numbers"
            self.run.notes[told] = None
        return again, met

    def _unless_nondeterministic(self, checks: list[Check], start: Start, eager: Outcome) -> list[Check]:
        """Withdraw judgement where eager does not agree with eager on the same arguments."""
        with start.again() as arguments:
            second = Start(self.fn, arguments).run_eager()[0]
        if second.error is not None:
            return checks
        again = compare(second.value, eager.value, tolerances=self.tolerances)
        unstable = {check.path for check in again if check.passed is False}
        note = "not deterministic: eager differs from eager on the same arguments"
        return [replace(c, passed=None, note=note) if c.passed is False and c.path in unstable else c for c in checks]

    # -- ending --

    def _fail(self, checks: list[Check], number: int | None) -> None:
        __tracebackhide__ = True
        graph = {1: " (CUDA-graph warm-up)", 2: " (CUDA-graph recording)", 3: " (CUDA-graph replay)"}
        where = f"call {self.function.calls}{graph[number] if number else ''}"
        lines = [f"compiled {self.name} differs from eager in {where} [{self.variant.id}]", *parity_lines(checks)]
        raise self._kept(ParityError("\n".join(lines)))

    def _kept(self, error: ParityError) -> ParityError:
        self.run.parity_errors.append(error)
        return error

    def _fail_or_raise(self, compiled: Exception | None, eager: Exception | None) -> NoReturn:
        """Raise what the caller has to see where one side raised, or both."""
        __tracebackhide__ = True
        function, call = self.function, self.function.calls
        if compiled is not None:
            self._raise_fullgraph_break(compiled)
        if compiled is not None and eager is not None and isinstance(compiled, type(eager)):
            function.raised += 1
            self.run.checks.append(Check("exception", "raised", call, True))
            # Dynamo gives code up whose first call raised.
            self.run.observer.reset()
            raise compiled
        note = f"compiled {_told(compiled)}, eager {_told(eager)}"
        self.run.checks.append(Check("exception", "raised", call, False, note=note))
        text = f"compiled {self.name} differs from eager in call {call} [{self.variant.id}]\n  {note}"
        raise self._kept(ParityError(text)) from (compiled or eager)

    def _raise_fullgraph_break(self, error: Exception) -> None:
        """Turn the exception of a break under ``fullgraph=True`` into one finding."""
        __tracebackhide__ = True
        event = _torch.break_of_exception(error)
        if event is None:
            return
        self.function.group.events.append(event)
        seen = self.run.observation()
        for found in seen.breaks:
            site = self.run.places.site(event.stack)
            if site is not None and (found.file, found.line) == (self.run.places.relative(site.file), site.line):
                finding = Finding("fullgraph", 0, 1, break_message(found), found.file, found.line, "fullgraph=False")
                self.run.findings.append(finding)
                raise LimitError("\n".join(finding_lines([finding]))) from None


def _told(error: Exception | None) -> str:
    if error is None:
        return "returned a value"
    text = " ".join(str(error).split())
    return f"raised {type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"


def _failed(checks: list[Check]) -> bool:
    return any(check.passed is False for check in checks)


def name_of(fn: Any) -> str:
    """Name of a function or module for messages."""
    if inspect.isbuiltin(fn):
        return fn.__name__  # those of torch have the name of a private class before it
    name = getattr(fn, "__qualname__", None) or getattr(getattr(fn, "func", None), "__qualname__", None)
    return str(name or type(fn).__name__).rpartition("<locals>.")[2]


def refuse(fn: Any) -> None:
    """Raise TypeError for what can't be compared call by call."""
    if not callable(fn):
        raise TypeError(f"compiled() takes a callable or a module, not {type(fn).__name__}")
    if isinstance(fn, type):
        raise TypeError(f"compiled() takes an instance, not the class {fn.__name__}")
    inner = getattr(fn, "func", fn)
    inner = inner.forward if isinstance(inner, torch.nn.Module) else inner
    for one in (inner, type(inner).__call__):
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            raise TypeError(
                f"compiled() can't take the coroutine function {name_of(fn)}: torch.compile runs it in eager mode"
            )
        if inspect.isgeneratorfunction(one):
            raise TypeError(f"compiled() can't take the generator function {name_of(fn)}: its values exist only once")


def refuse_result(value: Any, name: str) -> None:
    if inspect.isgenerator(value) or inspect.iscoroutine(value) or inspect.isasyncgen(value):
        raise TypeError(
            f"compiled({name}) returned a {type(value).__name__}: its values exist only once, so they can't be compared"
        )


@contextmanager
def compiling(run: TestRun) -> Iterator[None]:
    """Around every call that may compile: a live line, and none of the side effects of pytest."""
    with run.progress(run.nodeid), quiet_trace(), warnings.catch_warnings():
        # Under -W error Dynamo's own one-time warnings become internal errors while it traces.
        warnings.filterwarnings("default", module=r"torch(\.|$)")
        yield
