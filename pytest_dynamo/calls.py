"""One checked call: eager on clones, compiled on the caller's objects, compared."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import nullcontext
from typing import Any
from typing import NoReturn

import torch

from pytest_dynamo import _torch
from pytest_dynamo import artifacts
from pytest_dynamo import gradients
from pytest_dynamo import inputs
from pytest_dynamo.errors import LimitError
from pytest_dynamo.errors import ParityError
from pytest_dynamo.events import CompileEvent
from pytest_dynamo.events import Event
from pytest_dynamo.judge import Judge
from pytest_dynamo.judge import Look
from pytest_dynamo.judge import failed
from pytest_dynamo.judge import told
from pytest_dynamo.kept import Kept
from pytest_dynamo.kept import LeftGradients
from pytest_dynamo.kept import Result
from pytest_dynamo.messages import StackFrame
from pytest_dynamo.observer import quiet_trace
from pytest_dynamo.record import Check
from pytest_dynamo.record import Diagnosis
from pytest_dynamo.record import Finding
from pytest_dynamo.stages import locate
from pytest_dynamo.start import Arguments
from pytest_dynamo.start import Outcome
from pytest_dynamo.start import Start
from pytest_dynamo.summary import Group
from pytest_dynamo.terminal import finding_lines
from pytest_dynamo.terminal import parity_lines
from pytest_dynamo.testrun import FunctionRun
from pytest_dynamo.testrun import TestRun
from pytest_dynamo.testrun import captures
from pytest_dynamo.variants import Variant
from pytest_dynamo.verdict import break_message


#: Held while a call is compared, by its thread, and for how many seconds other threads wait for it.
_COMPARING, _WAIT = threading.RLock(), 60


class Checker:
    """Compiles a function once and checks every call of it."""

    def __init__(self, fn: Callable[..., Any], variant: Variant, run: TestRun, *, called: str = "compiled") -> None:
        __tracebackhide__ = True
        self.fn = _torch.uncompiled(fn)
        refuse(self.fn, called)
        self.name = name_of(self.fn)
        self.variant = variant
        self.run = run
        self._wanted = run.settings.checks
        self._kept = run.kept = run.kept or Kept()
        self._left = run.left = run.left or LeftGradients()
        code = _torch.code_of(self.fn)
        where = StackFrame(code.co_filename, code.co_firstlineno, self.name) if code is not None else None
        self.function = FunctionRun(self.name, where, Group(self.name))
        self._compiled: Callable[..., Any] | None = None
        #: Whether it was looked into why nothing was compiled.
        self._looked = False
        #: Results of which it was told that a later call overwrites them.
        self._told: set[tuple[str, str]] = set()
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
        unreadable = _torch.unreadable((args, kwargs))
        if unreadable is not None:
            run.not_checked[f"{self.name}: {unreadable}"] = None
            return self._uncompared(args, kwargs)
        hooks = gradients.CallersHooks()
        with self._alone(), hooks.set_aside():
            return self._compared(args, kwargs, hooks)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One call at a time: stance, state and random numbers, which a comparison moves, are those of the process."""
        # Not for ever: a function may itself wait for a thread that calls another one.
        alone = _COMPARING.acquire(timeout=_WAIT)
        if not alone:
            text = f"{self.name}: a call in another thread was compared for more than {_WAIT} s meanwhile"
            self.run.not_checked[text] = None
        try:
            yield
        finally:
            if alone:
                _COMPARING.release()

    def _compared(self, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: gradients.CallersHooks) -> Any:
        """A call that is compared with eager."""
        __tracebackhide__ = True
        run, function = self.run, self.function
        begun = len(function.group.events)
        self._compile()  # marks a module, so before its state is taken down
        graphs = self.variant.uses_cudagraphs and torch.cuda.is_initialized()
        start = Start(self.fn, (args, kwargs), left=self._left if graphs else None)
        run.in_eager.add(threading.get_ident())
        try:
            grad, carries = self._wanted.grad, start.carries_graph()
            eager = start.run_eager(differentiate=grad is not False and carries is None, twice=grad == "double")
        finally:
            run.in_eager.discard(threading.get_ident())
        refuse_result(eager.value, self.name)
        if carries is not None and grad is not False and torch.is_grad_enabled():
            text = (
                f"gradients of {self.name}: {carries} carries a graph from before the call, which is the caller's own"
            )
            run.not_checked[text] = None
        own_random = self.variant.backend == "inductor"
        judge = Judge(start, eager, run.settings.tolerances, self._wanted, function.calls, own_random=own_random)
        value = self._run_all(judge, (args, kwargs), hooks)
        run.not_checked.update(dict.fromkeys(start.notes))
        function.returned += 1
        function.captured = function.captured or captures(function.group.events[begun:])
        if not function.captured and not self._looked:
            self._look_apart(start, function.group.events[begun:])
        self._left.overwritten(start.left, function.calls)
        self._kept.add(self.name, function.calls, value)
        return value

    def _run_all(self, judge: Judge, arguments: Arguments, hooks: gradients.CallersHooks) -> Any:
        """Run compiled as often as it takes, the last time on the caller's own arguments; return what it gave.

        Gradients are taken on clones, so that the caller's own graph stays as a single call leaves it.
        """
        __tracebackhide__ = True
        start, eager = judge.start, judge.eager
        graphs = self._uses_cudagraphs(start, arguments) and eager.error is None
        differentiate = self._gradients_comparable(eager)
        runs = 3 if graphs else 2 if differentiate else 1
        kept = self._kept.before()
        if self._kept.unwatched is not None:
            self.run.not_checked[self._kept.unwatched] = None
        for number in range(1, runs + 1):
            start.rewind()
            last = number == runs
            given = arguments if last else start.clone(arguments)
            with hooks.in_force() if last else nullcontext():
                look = self._run_compiled(judge, given, differentiate=differentiate and not last)
            self.run.take_for(self.function)
            if look.outcome.error is not None and hooks.raised(look.outcome.error):
                raise look.outcome.error
            if last:
                overwritten = list(self._overwritten(kept, start))
                look.checks += overwritten or self._returned_again(kept, judge, look)
            if look.outcome.error is not None or eager.error is not None:
                self._fail_or_raise(judge, look)
            self._judge(judge, look, number if graphs else None)
            if not last:
                del look  # an output that is still alive would keep CUDA graphs from being replayed
        return look.outcome.value

    def _gradients_comparable(self, eager: Outcome) -> bool:
        """Whether gradients are to be compared; notes where they are wanted and can't be."""
        found, asked = eager.gradients, self._wanted.grad
        if eager.error is not None or asked is False:
            return False
        what = f"gradients of {self.name}"
        if found is None:
            if asked:
                self.run.not_checked[f"{what}: nothing that it returns requires grad"] = None
            return False
        for path in found.left_out:
            self.run.not_checked[f"{what}: no cotangent for {path}"] = None
        if found.error is not None:
            # Code that calls backward itself has used its graph up; what it left in `.grad` is compared.
            if "backward through the graph a second time" not in str(found.error):
                self.run.not_checked[f"{what}: eager's own {told(found.error)}"] = None
            return False
        if found.second_error is not None:
            self.run.not_checked[f"second derivatives of {self.name}: eager's own {told(found.second_error)}"] = None
        if found.outputs and not found.values:
            self.run.not_checked[f"{what}: no argument, parameter or tensor that it holds requires grad"] = None
        return bool(found.values)

    def _overwritten(self, kept: list[tuple[Result, torch.Tensor]], start: Start) -> Iterator[Check]:
        """Checks of results of earlier calls that this call changed, though eager does not."""
        for result, tensor in Kept.changed(kept):
            if start.writes(tensor):
                continue
            where = f"{result.path} of call {result.call} of {result.name}"
            if self.function.cudagraphs_expected:
                if (result.name, result.path) not in self._told:
                    self._told.add((result.name, result.path))
                    self.run.notes[
                        f"{where} was overwritten by call {self.function.calls}, as CUDA graphs reuse their memory: "
                        "clone it before the next call, in the code too that calls the compiled function"
                    ] = None
            else:
                note = f"call {self.function.calls} changed what an earlier call had returned; eager does not"
                yield Check("overwritten", where, self.function.calls, False, note=note)

    def _returned_again(self, kept: list[tuple[Result, torch.Tensor]], judge: Judge, look: Look) -> Iterator[Check]:
        """Checks of results in the memory of earlier ones, though eager returns memory of its own."""
        if self.function.cudagraphs_expected:
            return
        alive = [(result.tensor(), result) for result, _ in reversed(kept)]
        earlier = {_torch.storage_key(tensor): result for tensor, result in alive if tensor is not None}
        for _, tensor in inputs.named_arguments(look.outcome.arguments):
            earlier.pop(_torch.storage_key(tensor), None)
        results = inputs.named_tensors(look.outcome.value, "out")
        found = [(path, key) for path, tensor in results if (key := _torch.storage_key(tensor)) in earlier]
        if not found:
            return
        # Eager may return a tensor that it keeps, as a parameter or one of a cache.
        with judge.start.again() as arguments, torch.compiler.set_stance("force_eager"):
            value = judge.look(judge.start.fn, arguments).outcome.value
            eager = {_torch.storage_key(tensor) for _, tensor in inputs.named_tensors(value, "out")}
        for path, key in found:
            if key is not None and key not in eager:
                result = earlier[key]
                note = (
                    f"compiled's shares memory with {result.path} of call {result.call} of {result.name}, eager's does "
                    "not: changing one in place changes both"
                )
                yield Check("alias", path, self.function.calls, False, note=note)

    def _uncompared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is compiled and can't be compared."""
        with compiling(self.run):
            value = self._compile()(*args, **kwargs)
        self.run.take_for(self.function)
        self.function.returned += 1
        self.function.captured = True
        return value

    def _look_apart(self, start: Start, seen: list[Event]) -> None:
        """Find out whether a function that compiled nothing runs what another one had compiled.

        The same code may have been compiled before in this test, through another ``compiled(...)`` or
        by hand. So Dynamo starts afresh, and the call is made once more on clones. What is seen then
        counts unless a compilation was ``seen`` in the call itself.
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
                self.run.notes[f"{self.name}: a second look at what is compiled ended in {told(error)}"] = None
        begun = len(self.function.group.events)
        self.run.take_for(self.function)
        self.function.captured = captures(self.function.group.events[begun:])
        if any(isinstance(event, CompileEvent) for event in seen):
            del self.function.group.events[begun:]

    def compiled(self) -> Callable[..., Any]:
        """The compiled function itself, whose calls nobody checks."""
        return self._compile()

    def _compile(self) -> Callable[..., Any]:
        __tracebackhide__ = True
        if self._compiled is None:
            with default_torch_warnings():  # torch.compile imports inductor
                self._compiled = torch.compile(self.fn, **self.variant.kwargs)
        return self._compiled

    def _judge(self, judge: Judge, look: Look, number: int | None) -> None:
        """Keep the checks of one compiled run; raise ParityError if one failed and nothing excuses it."""
        __tracebackhide__ = True
        drew = {"torch", "torch.cuda"}.intersection(judge.eager.random.changed(judge.start.random))
        apart = bool(drew) and self.variant.backend == "inductor" and look.failed
        if apart:
            look = self._with_eager_random_numbers(judge, look)
        checks = judge.settle(look.checks, look.pairs)
        self.run.checks += checks
        self.run.not_checked.update({f"{c.path}: {c.note}": None for c in checks if c.passed is None})
        self.run.notes.update(dict.fromkeys(look.notes))
        if failed(checks):
            self._fail(judge, checks, number, self._locate(judge, apart))

    def _run_compiled(self, judge: Judge, arguments: Arguments, *, differentiate: bool) -> Look:
        if self.variant.uses_cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()
        with compiling(self.run):
            self.function.switched_off = self.function.switched_off or _torch.switched_off()
            look = judge.look(self._compile(), arguments, differentiate=differentiate)
        if self.function.cudagraphs_expected and self.function.replayed is not None:
            replayed = _torch.last_call_replayed()
            self.function.replayed = None if replayed is None else self.function.replayed + replayed
        return look

    def _uses_cudagraphs(self, start: Start, arguments: Arguments) -> bool:
        """Whether CUDA graphs are to be recorded and can be: the variant asks, and there is a GPU."""
        if not self.variant.uses_cudagraphs:
            return False
        if inputs.gpus(arguments, start.owners):
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

    def _with_eager_random_numbers(self, judge: Judge, look: Look) -> Look:
        """Judge on code that draws eager's random numbers; its compilation is kept out of all counts."""
        differentiate = look.outcome.gradients is not None
        with judge.start.again() as arguments:
            try:
                with compiling(self.run):
                    if self._apart is None:
                        self._apart = torch.compile(self.fn, **_torch.with_fallback_random(self.variant.kwargs))
                    again = judge.look(self._apart, arguments, differentiate=differentiate)
            finally:
                self.run.take_away()
            # State is put back when this block ends: copy what it holds.
            again.pairs = {path: (a.detach().clone(), e) for path, (a, e) in again.pairs.items()}
        if not judge.raised_alike(again.outcome.error):
            self.run.notes[f"{self.name}: can't be compiled with fallback_random: {told(again.outcome.error)}"] = None
            return look
        # Inductor has none of Python's and NumPy's numbers of its own, and where results lie is no matter of numbers.
        own = ("rng", "overwritten", "alias")
        again.checks = [*(c for c in again.checks if c.what not in own), *(c for c in look.checks if c.what in own)]
        if not again.failed:
            text = f"{self.name}: parity judged with fallback_random, as inductor draws its own random numbers"
            self.run.notes[text] = None
        return again

    # -- ending --

    def _locate(self, judge: Judge, eager_random: bool) -> Diagnosis | None:
        """Look for the first diverging stage, once in a test."""
        run = self.run
        if run.diagnosis is not None or not run.search.stage_timeout:
            return None
        if judge.damaged:
            what = ", ".join(sorted(judge.damaged)).replace(" after the call", "")
            run.diagnosis = Diagnosis(None, (), None, f"not located: {what} can't be put back for another look")
            return run.diagnosis
        try:
            run.diagnosis = locate(
                judge,
                self.variant,
                cudagraphs=self.function.cudagraphs_expected,
                eager_random=eager_random,
                seconds=run.search.stage_timeout,
                bisect=run.search.bisect,
                around=lambda: compiling(run),
                reset=run.observer.reset,
            )
        finally:
            run.take_away()
        return run.diagnosis

    def _write_repro(self, judge: Judge, title: str) -> str | None:
        """Write a script for the first call of a test that failed, if that is asked for."""
        run = self.run
        if run.search.artifacts is None or run.repro is not None or judge.damaged:
            return None
        folder = artifacts.folder_of(run.search.artifacts, run.nodeid)
        try:
            with compiling(run), judge.start.again() as arguments:
                run.repro = artifacts.write(
                    folder, judge, self.variant, arguments, f"{title} of {run.nodeid}", run.settings.tolerances
                )
        except Exception as error:
            run.repro = f"none: {told(error)}"
        finally:
            run.observer.reset()
            run.take_away()
        return run.repro

    def _fail(self, judge: Judge, checks: list[Check], number: int | None, diagnosis: Diagnosis | None) -> None:
        __tracebackhide__ = True
        graph = {1: " (CUDA-graph warm-up)", 2: " (CUDA-graph recording)", 3: " (CUDA-graph replay)"}
        where = f"call {self.function.calls}{graph[number] if number else ''}"
        head = f"compiled {self.name} differs from eager in {where} [{self.variant.id}]"
        repro = self._write_repro(judge, head)
        raise self._noted(ParityError("\n".join([head, *parity_lines(checks, diagnosis, repro)])))

    def _noted(self, error: ParityError) -> ParityError:
        self.run.parity_errors.append(error)
        return error

    def _fail_or_raise(self, judge: Judge, look: Look) -> NoReturn:
        """Raise what the caller has to see where one side raised, or both."""
        __tracebackhide__ = True
        function, call = self.function, self.function.calls
        compiled, eager = look.outcome.error, judge.eager.error
        if compiled is not None:
            self._raise_fullgraph_break(compiled)
        if compiled is not None and judge.raised_alike(compiled):
            function.raised += 1
            self.run.checks.append(Check("exception", "raised", call, True))
            if type(eager).__module__ == "builtins" and str(compiled) != str(eager):
                # A class of many meanings.
                self.run.notes[f"call {call} of {self.name}: compiled {told(compiled)}, eager {told(eager)}"] = None
            # Dynamo gives code up whose first call raised.
            self.run.observer.reset()
            try:
                self._judge(judge, look, None)
            except ParityError as error:
                raise error from compiled
            raise compiled
        note = f"compiled {told(compiled)}, eager {told(eager)}"
        self.run.checks.append(Check("exception", "raised", call, False, note=note))
        head = f"compiled {self.name} differs from eager in call {call} [{self.variant.id}]"
        lines = [head, f"  {note}"]
        if eager is None:
            lines += parity_lines((), self._locate(judge, eager_random=False), self._write_repro(judge, head))
        raise self._noted(ParityError("\n".join(lines))) from (compiled or eager)

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


def name_of(fn: Any) -> str:
    """Name of a function or module for messages."""
    if inspect.isbuiltin(fn):
        return fn.__name__  # those of torch have the name of a private class before it
    name = getattr(fn, "__qualname__", None) or getattr(getattr(fn, "func", None), "__qualname__", None)
    return str(name or type(fn).__name__).rpartition("<locals>.")[2]


def refuse(fn: Any, called: str) -> None:
    """Raise TypeError for what can't be compared call by call."""
    __tracebackhide__ = True
    if not callable(fn):
        raise TypeError(f"{called}() takes a callable or a module, not {type(fn).__name__}")
    if isinstance(fn, type):
        raise TypeError(f"{called}() takes an instance, not the class {fn.__name__}")
    inner = getattr(fn, "func", fn)
    inner = inner.forward if isinstance(inner, torch.nn.Module) else inner
    for one in (inner, type(inner).__call__):
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            raise TypeError(
                f"{called}() can't take the coroutine function {name_of(fn)}: torch.compile runs it in eager mode"
            )
        if inspect.isgeneratorfunction(one):
            raise TypeError(f"{called}() can't take the generator function {name_of(fn)}: its values exist only once")


def refuse_result(value: Any, name: str) -> None:
    if inspect.isgenerator(value) or inspect.iscoroutine(value) or inspect.isasyncgen(value):
        raise TypeError(
            f"compiled({name}) returned a {type(value).__name__}: its values exist only once, so they can't be compared"
        )


@contextmanager
def compiling(run: TestRun, doing: str = "compiling") -> Iterator[None]:
    """Around every call that may compile: a live line, and none of the side effects of pytest."""
    with run.progress(run.nodeid, doing), quiet_trace(), default_torch_warnings():
        yield


@contextmanager
def default_torch_warnings() -> Iterator[None]:
    """Under ``-W error`` torch's own warnings become internal errors while it imports its parts and traces."""
    with warnings.catch_warnings():
        warnings.filterwarnings("default", module=r"torch(\.|$)")
        yield
