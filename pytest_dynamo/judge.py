"""Compares runs of one call with eager's, and tells rounding and chance from faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Any

import torch

from pytest_dynamo import _torch
from pytest_dynamo import aliasing
from pytest_dynamo import gradients
from pytest_dynamo import inputs
from pytest_dynamo.excuses import apart
from pytest_dynamo.excuses import follows_from_rounding
from pytest_dynamo.excuses import is_dropped
from pytest_dynamo.excuses import is_whole
from pytest_dynamo.excuses import size_follows_from_rounding
from pytest_dynamo.excuses import unless_dropped
from pytest_dynamo.excuses import unless_made_up
from pytest_dynamo.parity import Pairs
from pytest_dynamo.parity import compare
from pytest_dynamo.record import Check
from pytest_dynamo.reference import BUDGETS
from pytest_dynamo.reference import Float64
from pytest_dynamo.reference import OtherRounding
from pytest_dynamo.reference import within_rounding
from pytest_dynamo.settings import Checks
from pytest_dynamo.settings import Tolerances
from pytest_dynamo.start import Arguments
from pytest_dynamo.start import Outcome
from pytest_dynamo.start import Start
from pytest_dynamo.state import GONE
from pytest_dynamo.state import Modes
from pytest_dynamo.state import Random
from pytest_dynamo.state import same_position


#: Eager runs in other roundings at most, where the float64 run alone does not excuse a difference: a unit that
#: lies near its threshold switches in some of them only.
OTHER_ROUNDINGS = 16
#: Of those, so many for a size that may follow from rounding.
_OTHER_SIZES = 8
#: Eager runs more at most, where eager does not agree with itself, and how much further compiled may be from it.
_EAGER_RUNS, _NOISE = 5, 10.0
_OTHER_NUMBERS = "its state after the call is not eager's: compiled drew other random numbers from it, or none"
_NOT_DRAWN = "eager drew from it, compiled did not: the next call gets the same random numbers again"


@dataclass
class Look:
    """One run of a call and how it compares with eager's."""

    outcome: Outcome
    checks: list[Check] = field(default_factory=list)
    #: Tensors that were compared, this run's and eager's, by path.
    pairs: Pairs = field(default_factory=Pairs)
    #: What is told and not judged.
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return failed(self.checks)


class Judge:
    """Knows what eager did in one call, and judges by it any other run of that call."""

    def __init__(
        self,
        start: Start,
        eager: Outcome,
        tolerances: Tolerances,
        wanted: Checks,
        call: int,
        *,
        own_random: bool = False,
    ) -> None:
        self.start = start
        self.eager = eager
        self.call = call
        #: Compiled code draws other random numbers of torch than eager, as inductor's does.
        self._own_random = own_random
        self._tolerances = tolerances
        self._wanted = wanted
        self._references: dict[str, torch.Tensor] = {}
        self._no_reference = "no float64 reference"
        #: Part of the call ran where the float64 run does not reach.
        self._hidden = False
        #: The float64 run gives gradients that the call itself took, rounded once.
        self._rounded = False
        #: By path, how far eager was from itself at most: a root mean square, infinite for what has no distance.
        self._spread: dict[str, float] = {}
        self._eager_runs = 0
        #: State that a run changed and that can't be put back, as nobody keeps copies of what eager leaves alone.
        self.damaged: set[str] = set()

    # -- one run --

    def look(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        *,
        differentiate: bool = False,
        mode: AbstractContextManager[Any] | None = None,
    ) -> Look:
        """Run ``fn`` on ``arguments``, everything being at the start, and compare.

        Args:
            fn: the function, compiled in one way or another.
            arguments: the caller's own, or clones of them.
            differentiate: take and compare gradients too. Not on the caller's own arguments: the graph
                of what they gave is gone afterwards.
            mode: entered while ``fn`` runs and while gradients are taken, not while comparing.
        """
        __tracebackhide__ = True
        args, kwargs = arguments
        before = self.start.leaves(arguments) if differentiate else []
        mode = nullcontext() if mode is None else mode
        try:
            with mode:
                value = fn(*args, **kwargs)
        except Exception as error:
            look = Look(Outcome(None, error, arguments, Random(), Modes()))
            if self.raised_alike(error):
                look.checks = list(self._left_by_exception(look))
            return look
        look = Look(Outcome(value, None, arguments, Random(), Modes(), self.start.sharing(value, arguments)))
        if self.eager.error is not None:
            return look
        look.checks = list(self._compare(look))
        if differentiate and self.eager.gradients is not None:
            with mode:
                found = gradients.differentiate(
                    value, arguments, before, like=self.eager.gradients, twice=self._wanted.grad == "double"
                )
            look.outcome.gradients = found
            look.checks += self._gradients(found, look.pairs)
        return look

    def raised_alike(self, error: Exception | None) -> bool:
        """Whether a run raised what eager raised; where neither raised, too."""
        eager = self.eager.error
        if error is None or eager is None:
            return error is eager
        return isinstance(error, type(eager)) and not _torch.is_compiler_error(error)

    def _compare(self, look: Look) -> Iterator[Check]:
        yield from self._values(look.outcome.value, self.eager.value, "out", look)
        yield from self._everything_left(look)
        if self._wanted.check_alias:
            yield from aliasing.compare_relations(look.outcome.sharing, self.eager.sharing, self.call)

    def _left_by_exception(self, look: Look) -> Iterator[Check]:
        """Compare what a run had changed when it raised."""
        in_graph = _torch.from_a_graph(look.outcome.error)
        for check in self._everything_left(look):
            if in_graph and check.passed is False:
                note = "the exception came out of a compiled graph, which makes its changes only when it ends"
                yield replace(check, passed=None, note=note)
            else:
                yield check

    def _everything_left(self, look: Look) -> Iterator[Check]:
        """Compare what a run left in arguments, in state and in generators of random numbers."""
        outcome, eager = look.outcome, self.eager
        for number, (actual, expected) in enumerate(zip(outcome.arguments[0], eager.arguments[0])):
            yield from self._left(actual, expected, f"args[{number}]", look.pairs, "mutation")
        grads = zip(inputs.named_arguments(outcome.arguments), inputs.named_arguments(eager.arguments))
        for (_, actual), (path, expected) in grads:
            if actual is not expected and actual.is_leaf and (actual.grad, expected.grad) != (None, None):
                yield from self._left(actual.grad, expected.grad, f"{path}.grad", look.pairs, "mutation")
        for name, expected in eager.arguments[1].items():
            yield from self._left(outcome.arguments[1][name], expected, name, look.pairs, "mutation")
        for state in self.start.written:
            path = f"{state.path} after the call"
            then = self.start.then(state)
            yield from self._left(self.start.now(state), state.after.detach(), path, look.pairs, "state", then)
        for path, then, now, expected in self.start.differences():
            if now is GONE or expected is GONE:
                if now is not expected:
                    sides = ("nothing", "something") if now is GONE else ("something", "nothing")
                    note = f"compiled left {sides[0]} there, eager {sides[1]}"
                    yield Check("state", f"{path} after the call", self.call, False, note=note)
            else:
                yield from self._left(now, expected, f"{path} after the call", look.pairs, "state", then)
        for path in self.start.meddled():
            self.damaged.add(f"{path} after the call")
            note = "compiled changed it, eager left it alone"
            yield Check("state", f"{path} after the call", self.call, False, note=note)
        yield from self._random(outcome)
        for name, now, expected in outcome.modes.differences(eager.modes):
            note = f"compiled left {now}, eager {expected}"
            yield Check("state", f"{name} after the call", self.call, False, note=note)

    def _random(self, outcome: Outcome) -> Iterator[Check]:
        """Compare where the generators of random numbers stand after the call."""
        advanced = outcome.random.changed(self.start.random)
        for name in outcome.random.changed(self.eager.random):
            if name in ("random", "numpy.random") or (name == "torch" and not self._own_random):
                yield Check("rng", name, self.call, False, note=_OTHER_NUMBERS)
            elif name == "torch" and name not in advanced:
                yield Check("rng", name, self.call, False, note=_NOT_DRAWN)
        now = self.start.standing(outcome.arguments)
        for name in (name for name in self.start.moved if name in now):
            eager = self.start.moved[name]
            if same_position(now[name], eager):
                continue
            if not (self._own_random and isinstance(eager, torch.Tensor)):
                yield Check("rng", name, self.call, False, note=_OTHER_NUMBERS)
            elif same_position(now[name], self.start.positions[name]):
                yield Check("rng", name, self.call, False, note=_NOT_DRAWN)

    def _close(self, actual: Any, expected: Any, path: str, pairs: Pairs) -> list[Check]:
        return compare(
            actual,
            expected,
            tolerances=self._tolerances,
            call=self.call,
            path=path,
            pairs=pairs,
            number_dtype=self.start.number_dtype,
        )

    def _values(self, actual: Any, expected: Any, path: str, look: Look) -> Iterator[Check]:
        yield from self._close(actual, expected, path, look.pairs)
        for where, (a, e) in list(look.pairs.items()):
            if self._wanted.check_alias and aliasing.overlaps_itself(a) and not aliasing.overlaps_itself(e):
                note = "its elements share memory, eager's do not: changing one in place changes others"
                yield Check("alias", where, self.call, False, note=note)
            if not _strides_differ(a, e):
                continue
            told = f"compiled's strides are {tuple(a.stride())}, eager's {tuple(e.stride())}"
            if self._wanted.check_stride:
                yield Check("stride", where, self.call, False, note=told)
            elif a.is_contiguous() != e.is_contiguous():
                look.notes.append(f"{where}: {told}")

    def _left(
        self, actual: Any, expected: Any, path: str, pairs: Pairs, what: str, then: Any = None
    ) -> Iterator[Check]:
        """Compare what a run left in an argument or in state, where ``then`` stood before the call."""
        if actual is expected:
            return  # an object that could not be copied: both sides worked on the same
        found = self._close(actual, expected, path, pairs)
        judged = [
            self._unless_dropped(replace(check, what=what), pairs, then) for check in found if check.passed is not None
        ]
        different = [check for check in judged if not check.passed]
        if different:
            yield from different
        elif judged:
            worst = max(judged, key=lambda check: check.max_abs or 0.0)
            yield replace(worst, path=path)
        if what == "state":
            yield from (check for check in found if check.passed is None)

    def _unless_dropped(self, check: Check, pairs: Pairs, then: Any) -> Check:
        """Fail a check where eager changed a tensor and compiled left it as it was, however small the change is.

        ``then``: the tensor of state; of an argument, eager's clone shows what it held before.
        """
        if not check.max_abs or check.path not in pairs:
            return check
        actual, expected = (tensor.detach() for tensor in pairs[check.path])
        before = self.start.before(then if isinstance(then, torch.Tensor) else expected)
        return check if before is None else unless_dropped(check, actual, expected, before)

    def _gradients(self, found: gradients.Gradients, pairs: Pairs) -> Iterator[Check]:
        def close(actual: torch.Tensor, expected: torch.Tensor, path: str) -> Iterator[Check]:
            return (replace(check, what="grad") for check in self._close(actual, expected, path, pairs))

        assert self.eager.gradients is not None
        if found.error is None and not found.values:
            return  # other outputs require grad than eager's: told already
        yield from gradients.compare_gradients(found, self.eager.gradients, self.call, close)

    # -- the verdict --

    def settle(self, checks: list[Check], pairs: Pairs) -> list[Check]:
        """Excuse what is only rounding, or what eager does not agree with itself about."""
        if failed(checks) and not self.damaged:
            # First: what eager itself does not repeat would be taken for rounding.
            checks = self._unless_nondeterministic(checks, pairs)
        if failed(checks) and not self.damaged:
            checks = self._by_float64(checks, pairs)
        return checks

    def _by_float64(self, checks: list[Check], pairs: Pairs) -> list[Check]:
        """Tell rounding from faults by a run of the same call in float64."""
        doubtful = {check.path for check in checks if check.passed is False and check.max_abs is not None}
        eager = {path: pairs[path][1] for path in doubtful & pairs.keys()}
        doubtful = {path for path, tensor in eager.items() if tensor.dtype in BUDGETS or is_whole(tensor)}
        if (self._tolerances.rtol, self._tolerances.atol) != (None, None):
            doubtful &= {check.path for check in checks if is_dropped(check)}
        sizes = {check.path for check in checks if check.passed is False and check.what == "shape"} & pairs.keys()
        doubtful |= sizes
        if not doubtful:
            return checks
        if not doubtful <= self._references.keys():
            wide = Float64(self.start.draws)
            self._references |= self._rerun(wide, doubtful)
            self._hidden = wide.higher_order
            self._rounded = wide.took_gradients
        checks = [self._rejudged(c, pairs) if c.path in doubtful else c for c in checks]
        others: dict[str, list[torch.Tensor]] = {}
        for seed in range(OTHER_ROUNDINGS):
            still = {check.path for check in checks if check.passed is False} & self._references.keys()
            still -= sizes if seed >= _OTHER_SIZES else set()
            if not still:
                break
            for path, value in self._rerun(OtherRounding(seed), still).items():
                others.setdefault(path, []).append(value)
            checks = [self._rejudged(c, pairs, others.get(c.path, ())) if c.path in still else c for c in checks]
        return checks

    def _rerun(self, mode: Any, paths: set[str]) -> dict[str, torch.Tensor]:
        """Tensors at ``paths`` from an eager run under a dispatch mode."""
        differentiate = any(path.startswith("grad of ") for path in paths)
        with self.start.again() as arguments:
            with torch.compiler.set_stance("force_eager"):
                look = self.look(self.start.fn, arguments, differentiate=differentiate, mode=mode)
            found = look.outcome.gradients
            error = look.outcome.error or (found.error if found is not None else None)
            if error is not None:
                self._no_reference = f"no float64 reference: {told(error)}"
            # State is put back when this block ends: copy what it holds.
            return {path: look.pairs[path][0].detach().clone() for path in paths & look.pairs.keys()}

    def _rejudged(self, check: Check, pairs: Pairs, others: Sequence[torch.Tensor] = ()) -> Check:
        reference = self._references.get(check.path)
        seen = [*others, *([] if reference is None else [reference])]
        if check.passed is False and check.what == "shape":
            return size_follows_from_rounding(check, *pairs[check.path], seen)
        if check.passed is not False or check.max_abs is None:
            return check
        first = (check.note or "").partition("\n")[0]
        if is_dropped(check):
            return unless_made_up(check, *pairs[check.path], seen)
        if is_whole(pairs[check.path][1]):
            return follows_from_rounding(check, *pairs[check.path], seen)
        narrow = reference is not None and reference.dtype == pairs[check.path][1].dtype
        if reference is None or (check.what == "values" and narrow and not self._rounded):
            passed = None if self._hidden else False
            return replace(check, passed=passed, note=f"{first}\n{self._no_reference}")
        if any(tensor.shape != pairs[check.path][1].shape for tensor in (reference, *others)):
            note = f"{first}\nits size follows from rounding: where operations round otherwise eager has another"
            return replace(check, passed=None, note=note)
        verdict = within_rounding(
            *pairs[check.path],
            reference,
            self._tolerances.max_error_ratio,
            others,
            casts_are_free=self.start.autocast or pairs[check.path][1].dtype in (torch.bfloat16, torch.float16),
        )
        worst = check.worst
        if worst is not None and reference.shape == pairs[check.path][1].shape:
            value = reference[worst.index].item()
            worst = replace(worst, float64=value if isinstance(value, float) and math.isfinite(value) else str(value))
        if verdict.passed or (verdict.passed is None and others and verdict.ratio is not None):
            return replace(check, passed=verdict.passed, error_ratio=verdict.ratio, note=verdict.note, worst=worst)
        return replace(check, error_ratio=verdict.ratio, note=f"{first}\n{verdict.note}", worst=worst)

    def _unless_nondeterministic(self, checks: list[Check], pairs: Pairs) -> list[Check]:
        """Withdraw judgement where eager is about as far from eager, on the same arguments, as compiled is."""

        def beyond(check: Check) -> bool:
            return apart(check, pairs) > _NOISE * self._spread[check.path]

        def noisy() -> list[Check]:
            return [check for check in checks if check.passed is False and check.path in self._spread]

        while self._eager_runs == 0 or (self._eager_runs < _EAGER_RUNS and any(beyond(check) for check in noisy())):
            self._run_eager_again()
        excused = {id(check) for check in noisy() if not beyond(check)}
        note = "not deterministic: eager differs from eager on the same arguments"
        return [replace(check, passed=None, note=note) if id(check) in excused else check for check in checks]

    def _run_eager_again(self) -> None:
        with self.start.again() as arguments, torch.compiler.set_stance("force_eager"):
            again = self.look(self.start.fn, arguments, differentiate=self.eager.gradients is not None)
        self._eager_runs += 1
        for check in (check for check in again.checks if check.passed is False):
            self._spread[check.path] = max(self._spread.get(check.path, 0.0), apart(check, again.pairs))


def _strides_differ(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two strided tensors of one shape have other strides in dimensions that hold more than one element."""
    if actual.layout is not torch.strided or expected.layout is not torch.strided or actual.shape != expected.shape:
        return False
    if actual.is_nested or not actual.numel():
        return False
    return any(n > 1 and a != e for n, a, e in zip(actual.shape, actual.stride(), expected.stride()))


def failed(checks: Sequence[Check]) -> bool:
    """Whether anything was judged and found different."""
    return any(check.passed is False for check in checks)


def told(error: Exception | None) -> str:
    """What came of a run, in one line."""
    if error is None:
        return "returned a value"
    text = " ".join(str(error).split())
    return f"raised {type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"
