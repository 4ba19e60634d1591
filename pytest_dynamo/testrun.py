"""What is known of the test that runs now: its settings, groups of events, parity, findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

from pytest_dynamo.errors import ParityError
from pytest_dynamo.events import CompileEvent
from pytest_dynamo.events import CompileResult
from pytest_dynamo.events import CudaGraphRecording
from pytest_dynamo.events import CudaGraphSkipEvent
from pytest_dynamo.events import Event
from pytest_dynamo.events import SkipEvent
from pytest_dynamo.measurement import Run
from pytest_dynamo.messages import StackFrame
from pytest_dynamo.observer import Observer
from pytest_dynamo.places import Places
from pytest_dynamo.record import Check
from pytest_dynamo.record import CudaGraphs
from pytest_dynamo.record import CudaGraphSkip
from pytest_dynamo.record import Diagnosis
from pytest_dynamo.record import Finding
from pytest_dynamo.record import Memory
from pytest_dynamo.record import Observation
from pytest_dynamo.record import Parity
from pytest_dynamo.record import Record
from pytest_dynamo.settings import Search
from pytest_dynamo.settings import Settings
from pytest_dynamo.summary import Group
from pytest_dynamo.summary import summarize
from pytest_dynamo.terminal import parity_lines
from pytest_dynamo.variants import Variant
from pytest_dynamo.verdict import Uncompiled
from pytest_dynamo.verdict import rewritten_message


if TYPE_CHECKING:
    from pytest_dynamo.kept import Kept
    from pytest_dynamo.kept import LeftGradients


@dataclass
class FunctionRun:
    """What one ``CompiledFunction`` did in a test."""

    name: str
    #: Where the function is defined, if that is known.
    where: StackFrame | None = None
    group: Group = field(default_factory=Group)
    calls: int = 0
    #: Calls in which compiled code returned.
    returned: int = 0
    #: Calls in which eager and compiled both raised.
    raised: int = 0
    #: Whether a call that returned captured any operation into a graph.
    captured: bool = False
    #: Called within another compiled function only, which is compared as a whole.
    inlined: bool = False
    #: By what compilation was switched off during a call.
    switched_off: str | None = None
    cudagraphs_expected: bool = False
    #: Calls that ended in a replay; None: this torch does not tell.
    replayed: int | None = 0

    @property
    def recorded(self) -> int:
        return sum(isinstance(event, CudaGraphRecording) for event in self.group.events)


class TestRun:
    """State of one test, from its setup to its teardown."""

    __test__ = False

    def __init__(self, nodeid: str, settings: Settings, observer: Observer, places: Places) -> None:
        self.nodeid = nodeid
        self.settings = settings
        self.observer = observer
        self.places = places
        self.variant: Variant | None = None
        #: Whether the test has one of our fixtures.
        self.uses_fixtures = False
        #: Which of ``compiled`` and ``compiled_benchmark`` the test function itself names: it has to use one of them.
        self.named: tuple[str, ...] = ()
        self.loose = Group()
        self.functions: list[FunctionRun] = []
        self.checks: list[Check] = []
        #: Results of earlier calls; made with the first function, as it needs torch.
        self.kept: Kept | None = None
        #: Gradients that earlier calls left in memory of CUDA graphs.
        self.left: LeftGradients | None = None
        self.parity_errors: list[ParityError] = []
        self.search = Search()
        #: Of the first call that failed.
        self.diagnosis: Diagnosis | None = None
        #: Where its script lies, or why there is none.
        self.repro: str | None = None
        self.findings: list[Finding] = []
        self.not_checked: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.relaxed: tuple[str, ...] = ()
        self.judged = False
        self.body_runs = False
        #: What earlier tests compiled is still there.
        self.keeps_compiled = False
        #: Threads in which an eager run of a compiled function is going on.
        self.in_eager: set[int] = set()
        #: The test is over; what was made in it can't be used any more.
        self.ended = False
        #: Shows on a terminal that something is being compiled for this test.
        self.progress: Callable[..., AbstractContextManager[None]] = lambda nodeid, doing="": nullcontext()
        #: What `compiled_benchmark` measured, as it lies in pytest-benchmark's storage too.
        self.benchmark: dict[str, Any] | None = None
        #: How fast the benchmark was; in what is stored once the test has ended, and not if that is interrupted.
        self.speed: str | None = None
        #: The same, to be judged by and to be accepted.
        self.entry: Run | None = None
        #: Of eager code, in seconds per call.
        self.eager_samples: tuple[float, ...] = ()
        self.memory = Memory()
        self.kernels: int | None = None
        self._starts: dict[int, int] = {}
        self._phase_checks = 0
        self._called: dict[int, int] = {}

    # -- events --

    def take_loose(self) -> None:
        """Put down what was compiled since the last look to code that the test compiles itself."""
        self.loose.events += self.observer.take()

    def take_for(self, function: FunctionRun) -> None:
        """Put down what was compiled since the last look to ``function``."""
        for event in self.observer.take():
            if isinstance(event, CudaGraphSkipEvent) and event.where is None:
                # Torch does not always know the line; the function at least is known.
                event = replace(event, where=function.where)
            function.group.events.append(event)

    def take_away(self) -> None:
        """Forget what was compiled since the last look: the plugin did it for its own ends."""
        self.observer.take()

    @property
    def groups(self) -> list[Group]:
        return [self.loose, *(function.group for function in self.functions)]

    def observation(self, *, phase_only: bool = False) -> Observation:
        """What the compiler did in the whole test, or since the phase began."""
        signals = self.observer.signals
        parts = [(g, self._starts.get(id(g), 0) if phase_only else 0) for g in self.groups]
        seen = summarize(parts, self.places, results=signals is None or signals.results)
        if signals is not None:
            missing = signals.missing()
            lists = ("breaks", "recompiles", "limit_hits")
            untold = tuple(n for n in lists if n in missing or (n == "recompiles" and "results" in missing))
            seen = replace(seen, untold=untold)
        called = self._called if phase_only else {}
        functions = [f for f in self.functions if not phase_only or f.calls > called.get(id(f), 0)]
        return self.with_cudagraphs(seen, functions)

    @staticmethod
    def with_cudagraphs(seen: Observation, functions: Sequence[FunctionRun]) -> Observation:
        """Add what is known of CUDA graphs from the calls of functions."""
        expecting = [function for function in functions if function.cudagraphs_expected]
        graphs = seen.cudagraphs
        if not expecting:
            return replace(seen, cudagraphs=replace(graphs, expected=False if functions else None))
        never = (
            ()
            if graphs.skips
            else tuple(
                CudaGraphSkip(f"never recorded: {function.name}", None, None)
                for function in expecting
                if function.returned and not function.recorded
            )
        )
        counts = [function.replayed for function in expecting]
        replayed = None if None in counts else sum(count or 0 for count in counts)
        return replace(seen, cudagraphs=CudaGraphs(True, graphs.recorded, replayed, (*graphs.skips, *never)))

    # -- verdict --

    def uncompiled(self) -> tuple[Uncompiled, ...]:
        """Functions of which nothing was compiled although they should."""
        found = []
        if self.named and not self.functions:
            how = {
                "compiled": "compiled was never used: pass it a function or module and call what it returns",
                "compiled_benchmark": "compiled_benchmark was never called: give it a function and its arguments",
            }
            found.append(Uncompiled(self.named[0], how[self.named[0]]))
        for function in self.functions:
            if not function.calls and not function.inlined:
                found.append(Uncompiled(function.name, f"compiled({function.name}) was never called"))
            elif function.returned and not function.captured and not function.inlined:
                found.append(self._why(function))
        return tuple(found)

    def _why(self, function: FunctionRun) -> Uncompiled:
        seen = summarize([(function.group, 0)], self.places)
        for found in seen.breaks:
            if found.ignored is not None:
                return Uncompiled(function.name, rewritten_message(found), found.file, found.line)
        why = [f"nothing was compiled: no operation of {function.name} was captured"]
        for found in seen.breaks:
            reason = found.reasons[0]
            why.append(f"{found.file}:{found.line}  {reason.text}")
            if reason.hint:
                why.append(f"hint: {reason.hint}")
        if function.switched_off:
            why.append(f"compilation is switched off by {function.switched_off}")
        elif not seen.breaks:
            skips = [e for e in function.group.events if isinstance(e, SkipEvent)]
            why += dict.fromkeys(f"Dynamo left {s.function} alone: {s.reason}" for s in skips[:3])
        first = seen.breaks[0] if seen.breaks else None
        return Uncompiled(function.name, "\n".join(why), first.file if first else None, first.line if first else None)

    def check_left_gradients(self) -> None:
        """Fail the test if somebody added to gradients after a replay of CUDA graphs had overwritten them."""
        if self.left is None:
            return
        self.left.look()
        note = (
            "call {} overwrote it, as CUDA graphs reuse their memory, and then it was changed in place: what was "
            "accumulated, scaled or clipped is not the gradient. Drop gradients before the next call, by "
            "zero_grad(set_to_none=True), or accumulate in a clone"
        )
        found = [Check("overwritten", path, n, False, note=note.format(n)) for path, n in self.left.used.items()]
        self.checks += found
        if found:
            self.parity_errors.append(ParityError("\n".join(["gradients were lost", *parity_lines(found)])))

    def check_completeness(self, observation: Observation) -> None:
        """Note what this test could not check."""
        for function in self.functions:
            ended = self.parity_errors or any(finding.limit == "fullgraph" for finding in self.findings)
            if function.calls and not function.returned and not function.inlined and not ended:
                self.not_checked[f"{function.name}: all calls raised, in eager mode too"] = None
            if function.recorded and function.replayed == 0:
                self.not_checked[f"CUDA graphs: those of {function.name} were recorded and never replayed"] = None
            if function.cudagraphs_expected and function.replayed is None:
                self.not_checked["CUDA graphs: this torch does not tell whether they were replayed"] = None
        if self.observer.signals is None or self.observer.signals.results:
            lost = unfinished(self.groups)
            if lost:
                self.not_checked[f"counts may be too low: torch told the start of {lost} compilations and no end"] = (
                    None
                )
        for error in self.observer.errors:
            self.not_checked[f"counts may be too low: {error}"] = None
        self.observer.errors.clear()
        if self.observer.signals is not None and (observation.anything or self.functions):
            for name in self.observer.signals.missing():
                self.not_checked[f"{name}: this torch is not understood, it does not tell them"] = None

    # -- records --

    def begin_phase(self) -> None:
        """What follows belongs to the next record."""
        self._starts = {id(group): len(group.events) for group in self.groups}
        self._phase_checks = len(self.checks)
        self._called = {id(function): function.calls for function in self.functions}
        self.not_checked, self.notes = {}, {}

    def record(self, phase: str, findings: Sequence[Finding] = ()) -> Record | None:
        """The record of the phase that ends now; None if nothing happened in it."""
        seen = self.observation(phase_only=True)
        checks = self.checks[self._phase_checks :]
        calls = sum(function.calls for function in self.functions) - sum(self._called.values())
        own = self.variant is not None and phase == "call"
        if not (own or seen.anything or findings or checks or self.notes or self.not_checked):
            return None
        return Record(
            nodeid=self.nodeid,
            phase=phase,
            variant=self.variant.to_json() if self.variant is not None else None,
            observation=seen,
            parity=Parity(_passed(checks), calls, merge_checks(checks), *self._search(phase)),
            findings=tuple(findings),
            not_checked=tuple(self.not_checked),
            notes=tuple(self.notes),
            relaxed=self.relaxed if phase == "call" else (),
            **self._speed(phase),
        )

    def _speed(self, phase: str) -> dict[str, Any]:
        if phase != "call":
            return {}
        return {"benchmark": self.benchmark, "memory": self.memory, "kernels": self.kernels}

    def _search(self, phase: str) -> tuple[Diagnosis | None, str | None]:
        """What was found out about the call that failed, for the record of the phase in which that was."""
        return (self.diagnosis, self.repro) if phase == "call" else (None, None)


def _passed(checks: Sequence[Check]) -> bool | None:
    judged = [check.passed for check in checks if check.passed is not None]
    return all(judged) if judged else None


def captures(events: Sequence[Event]) -> bool:
    """Whether an operation was captured into a graph."""
    return any(isinstance(e, CompileResult) and e.forward and e.fail_type is None and e.ops for e in events)


def unfinished(groups: Sequence[Group]) -> int:
    """Number of compilations whose end was never told, because somebody cleared torch's records."""
    events = [event for group in groups for event in group.events]
    begun = Counter(event.compile_id for event in events if isinstance(event, CompileEvent))
    ended = Counter(event.compile_id for event in events if isinstance(event, CompileResult) and event.forward)
    return (begun - ended).total()


def merge_checks(checks: Sequence[Check]) -> tuple[Check, ...]:
    """Keep every check that did not pass, and of those that did the one furthest off for each path."""
    kept: dict[tuple[str, str], Check] = {}
    others = []
    for check in checks:
        if check.passed is not True:
            others.append(check)
            continue
        before = kept.get((check.what, check.path))
        if before is None or (check.max_abs or 0.0) > (before.max_abs or 0.0):
            kept[check.what, check.path] = check
    return (*kept.values(), *others)
