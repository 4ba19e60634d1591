"""The fixture ``compiled_benchmark``: parity first, then times, then how they compare with accepted runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from datetime import datetime
from datetime import timezone
from typing import Any

import pytest
import torch

from pytest_dynamo import _torch
from pytest_dynamo import baseline
from pytest_dynamo import clocks
from pytest_dynamo import inputs
from pytest_dynamo import machine
from pytest_dynamo import profiling
from pytest_dynamo import replay
from pytest_dynamo import timing
from pytest_dynamo.calls import Checker
from pytest_dynamo.calls import compiling
from pytest_dynamo.events import CompileEvent
from pytest_dynamo.events import CudaGraphRecording
from pytest_dynamo.measurement import SCHEMA
from pytest_dynamo.measurement import Measurement
from pytest_dynamo.measurement import Run
from pytest_dynamo.measurement import Side
from pytest_dynamo.measurement import launch_bound
from pytest_dynamo.observer import GeneratedCode
from pytest_dynamo.record import Finding
from pytest_dynamo.record import Observation
from pytest_dynamo.start import Arguments
from pytest_dynamo.start import Start
from pytest_dynamo.start import put_back
from pytest_dynamo.testrun import TestRun
from pytest_dynamo.variants import Variant


class CompiledBenchmark:
    """Compares a function with eager once, then times both. Once in each test."""

    def __init__(self, config: pytest.Config, run: TestRun, variant: Variant, benchmark: Any, clock: Any) -> None:
        self._config = config
        self._run = run
        self._variant = variant
        #: That of pytest-benchmark, or what stands in its place; None: there is none.
        self._benchmark = benchmark
        self._clock: replay.ReplayClock | None = clock
        self._used = False

    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Check and time ``fn(*args, **kwargs)``; return what compiled gave."""
        __tracebackhide__ = True
        return self._all(fn, args, kwargs, None, timing.Plan())

    def pedantic(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        setup: Callable[[], Any] | None = None,
        rounds: int = 50,
    ) -> Any:
        """As calling it, with an untimed ``setup()`` before each call, which may return ``(args, kwargs)``.

        ``rounds``: pairs of samples, eager and compiled, that are taken whatever the time.
        """
        __tracebackhide__ = True
        return self._all(fn, tuple(args), dict(kwargs or {}), setup, timing.Plan(rounds=rounds, min_rounds=rounds))

    # -- a benchmark, in the order in which things happen --

    def _all(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        setup: Callable[[], Any] | None,
        plan: timing.Plan,
    ) -> Any:
        __tracebackhide__ = True
        if self._used:
            raise RuntimeError("compiled_benchmark can be used once in a test: make a test of each")
        self._used = True
        run = self._run
        checker = Checker(fn, self._variant, run, called="compiled_benchmark")
        if setup is not None:
            given = _given(setup())
            if given is not None and (args or kwargs):
                raise TypeError("give arguments or let setup return them, not both")
            args, kwargs = given or (args, kwargs)
        run.functions.append(checker.function)
        code = GeneratedCode()
        try:
            with code, self._caches():
                result = checker(args, kwargs)
        except BaseException:
            replay.keep_out(self._benchmark)  # what is wrong has no speed
            raise
        # The results too: what makes its tensors itself takes none.
        gpus = inputs.gpus((args, kwargs, result), inputs.owners(checker.fn, (args, kwargs)))
        device = gpus[0] if gpus else torch.device("cpu")
        if self._variant.uses_cudagraphs and gpus:
            result = inputs.detach(result)  # timing replays into its memory
        why = replay.not_timed(self._config, self._benchmark, self._clock)
        if why is None and len(gpus) > 1:
            why = f"its tensors are on {len(gpus)} GPUs, and one alone is timed"
        if why is None:
            entry = self._time(checker, (args, kwargs), setup, plan, device, code.hash)
            if entry is not None:
                baseline.judge(self._config, run, entry, checker.name)
        else:
            run.not_checked[f"speed of {checker.name}: {why}"] = None
            self._let_it_run(checker, (args, kwargs))
        return result

    @contextlib.contextmanager
    def _caches(self) -> Iterator[None]:
        """Compile with caches of its own if the time that it takes is limited: a warm cache would pass anything."""
        if self._run.settings.limits.max_compile_time is None:
            yield
        else:
            with _torch.fresh_caches():
                yield

    def _let_it_run(self, checker: Checker, arguments: Arguments) -> None:
        """Hand the compiled function to whatever stands in the place of pytest-benchmark's fixture."""
        if self._benchmark is None:
            return
        if self._clock is not None and not self._benchmark.disabled:
            replay.keep_out(self._benchmark)  # an old pytest-benchmark: it would time beside other workers
            return
        with _again(checker, arguments, self._run) as (args, kwargs), compiling(self._run):
            self._benchmark(_marked(checker.compiled(), self._variant), *args, **kwargs)
            self._run.take_for(checker.function)

    def _time(
        self,
        checker: Checker,
        arguments: Arguments,
        setup: Callable[[], Any] | None,
        plan: timing.Plan,
        device: torch.device,
        code: str | None,
    ) -> Run | None:
        """Time both sides from the state of before the call, which is put back afterwards, and keep the samples."""
        run = self._run
        with _again(checker, arguments, run, setup) as given, compiling(run, "timing"):
            calls = _Calls(checker.fn, _marked(checker.compiled(), self._variant), given, setup)
            try:
                measured, samples = self._measure(checker, calls, plan, device, code)
            except timing.CompiledWhileTiming as error:
                replay.keep_out(self._benchmark)
                run.take_for(checker.function)
                run.findings.append(Finding("compiled_while_timing", 0, 1, str(error), None, None, None))
                return None
            except BaseException:
                replay.keep_out(self._benchmark)
                raise
            entry = Run(
                nodeid=run.nodeid,
                run=machine.run_id(),
                machine=machine.machine_id(machine.load_nvml()),
                fingerprint={**machine.fingerprint(self._variant.id, str(device), plan.l2), **_root(self._config)},
                measurement=measured,
                datetime=datetime.now(timezone.utc).isoformat(),
            )
            # In the storage without a verdict until there is one: an interrupted run is no baseline.
            run.entry = entry
            run.benchmark = self._benchmark.extra_info["dynamo"] = _stored(entry, run.observation())
            assert self._clock is not None
            replay.feed(self._benchmark, self._clock, samples, calls.compiled)
        return entry

    def _measure(
        self, checker: Checker, calls: _Calls, plan: timing.Plan, device: torch.device, code: str | None
    ) -> tuple[Measurement, tuple[float, ...]]:
        run, function = self._run, checker.function
        compiled_seconds = run.observation().compile

        def compilations() -> int:
            run.take_for(function)
            return sum(isinstance(event, (CompileEvent, CudaGraphRecording)) for event in function.group.events)

        conditions = self._conditions(device)
        found = timing.measure(
            calls.eager,
            calls.compiled,
            clocks.clock_of(device),
            plan,
            compilations=compilations,
            setup=None if calls.setup is None else calls.before,
            around_eager=_eagerly,
            canaries=clocks.canaries(device),
        )
        after = self._conditions(device)
        timed = (
            (found.eager, calls.eager, _eagerly),
            (found.compiled, calls.compiled, contextlib.nullcontext),
        )
        busy, peaks = [], []
        for samples, call, around in timed:
            with around():
                known = calls.setup is None
                seconds = samples.times.median
                busy.append(profiling.profile(call, device, seconds) if known else profiling.Busy(None, None, None))
        with timing.no_garbage_collection():
            for _, call, around in timed:
                if calls.setup is not None:
                    calls.before()
                with around():
                    peaks.append(profiling.peak_bytes(call, device))
        sides = []
        for (samples, _, _), one, peak in zip(timed, busy, peaks):
            run.notes.update(dict.fromkeys(f"{checker.name}: {note}" for note in one.notes))
            times = (samples.times, samples.host_times)
            sides.append(Side(*times, one.device_time, one.launches, one.kernels, peak))
        replayed = bool(_torch.last_call_replayed()) if self._variant.uses_cudagraphs else False
        compilations()
        measured = Measurement(
            eager=sides[0],
            compiled=sides[1],
            speedup=found.speedup,
            speedup_low=found.speedup_low,
            speedup_high=found.speedup_high,
            launch_bound=launch_bound(
                sides[1].device_time, sides[1].time.median, sides[1].host.median if sides[1].host is not None else None
            ),
            replayed=replayed,
            code=code,
            compile_seconds=compiled_seconds.seconds,
            cold=compiled_seconds.cold,
            canaries={name: samples.times.median for name, samples in found.canaries.items()},
            ratios=found.ratios,
            conditions={"before": conditions.to_json(), "after": after.to_json()},
            unstable=machine.unstable_reasons(conditions, after),
        )
        run.eager_samples = found.eager.time
        return measured, found.compiled.time

    def _conditions(self, device: torch.device) -> machine.Conditions:
        # Where this confirms what another process found, that one waits for us, and may hold memory of the GPU.
        return machine.Conditions.read(machine.load_nvml(), gpu=device.index, ours=(os.getppid(),))


def _root(config: pytest.Config) -> dict[str, str]:
    """The folder that node ids are relative to, where it lies below the one in which pytest was started.

    Several such folders may have tests of the same node id, and one storage.
    """
    root, started = config.rootpath, config.invocation_params.dir
    return {"root": root.relative_to(started).as_posix()} if root != started and root.is_relative_to(started) else {}


def _given(returned: Any) -> Arguments | None:
    """What ``setup`` returned, if it is what the documentation says."""
    if returned is None:
        return None
    if isinstance(returned, (tuple, list)) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return tuple(returned[0]), dict(returned[1])
    raise TypeError(f"setup returns None or (args, kwargs), not {type(returned).__name__}: wrap them as ((x,), {{}})")


def _eagerly() -> contextlib.AbstractContextManager[Any]:
    """Also what is compiled already within the function runs in eager mode, as in the comparison."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


class _Calls:
    """Eager and compiled code as calls without arguments, and what comes before each of them."""

    def __init__(
        self, slow: Callable[..., Any], fast: Callable[..., Any], given: Arguments, setup: Callable[[], Any] | None
    ) -> None:
        self._slow, self._fast, self._given = slow, fast, given
        self.setup = setup

    def before(self) -> None:
        assert self.setup is not None
        self._given = _given(self.setup()) or self._given

    def eager(self) -> Any:
        args, kwargs = self._given
        return self._slow(*args, **kwargs)

    def compiled(self) -> Any:
        args, kwargs = self._given
        return self._fast(*args, **kwargs)


def _stored(entry: Run, seen: Observation) -> dict[str, Any]:
    """What lies in pytest-benchmark's storage beside the samples."""
    return {
        "schema": SCHEMA,
        "nodeid": entry.nodeid,
        "run": entry.run,
        "machine": entry.machine,
        "fingerprint": dict(entry.fingerprint),
        "measurement": entry.measurement.to_json(),
        "verdict": None,
        "graphs": seen.graphs,
        "graph_breaks": seen.break_count,
        "recompiles": seen.recompile_count,
    }


def _marked(fast: Callable[..., Any], variant: Variant) -> Callable[..., Any]:
    """A compiled function whose calls each begin a step of CUDA graphs, where it uses them."""
    if not variant.uses_cudagraphs:
        return fast

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return fast(*args, **kwargs)

    return call


@contextlib.contextmanager
def _again(
    checker: Checker, arguments: Arguments, run: TestRun, setup: Callable[[], Any] | None = None
) -> Iterator[Arguments]:
    """Arguments to call with as often as one likes; all is put back afterwards.

    They are clones; with a setup they are its own or the caller's, in which it may change something before each call.
    """
    with contextlib.ExitStack() as stack:
        if setup is not None:
            stack.enter_context(put_back(checker.fn, arguments))
            arguments = _given(setup()) or arguments
        start = Start(checker.fn, arguments)
        start.run_eager()  # finds out what the call changes
        start.rewind()  # random numbers too, which that has drawn
        known = len(start.notes)
        with start.again(often=True) as clones:
            yield clones if setup is None else arguments
        run.notes.update(dict.fromkeys(f"{checker.name}: {note}" for note in start.notes[known:]))
