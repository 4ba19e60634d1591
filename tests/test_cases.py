"""The cases in ``tests/cases``: inputs from bug reports, each with what torch does and what we have to say.

Every case is found by its file and read by the conventions of the cases' own description; what a case
says only in words, and where torch differs from it, is data in ``cases_expected.py``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import re
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_project import Benches
from cases_expected import CUDA
from cases_expected import DEVIATIONS
from cases_expected import ELSEWHERE
from cases_expected import LATER
from cases_expected import PROJECTS
from cases_expected import TORCH
from cases_expected import Cuda
from cases_expected import Said

from pytest_dynamo import messages
from pytest_dynamo.calls import Checker
from pytest_dynamo.compiled_function import CompiledFunction
from pytest_dynamo.errors import ParityError
from pytest_dynamo.observer import Observer
from pytest_dynamo.places import Places
from pytest_dynamo.record import Observation
from pytest_dynamo.settings import Settings
from pytest_dynamo.summary import Group
from pytest_dynamo.summary import summarize
from pytest_dynamo.testrun import TestRun
from pytest_dynamo.variants import Variant


FOLDER = Path(__file__).parent / "cases"
FALLBACK = "parity judged with fallback_random"
#: Words by which a case says that a difference is only rounding, which the plugin has to find out.
ROUNDING = "closer to an fp64 reference than eager"

#: What the plugin's checks call the kinds of difference that a case names. Kinds without a name here
#: are no failure: a subclass of eager's exception is what ``except`` in user code wants, and second
#: derivatives are compared on demand only.
KINDS = {
    "values": {"values", "mutation", "state"},
    "rng": {"rng", "values"},
    "missing-exception": {"exception"},
    "extra-exception": {"exception"},
    "exception-class": set(),
    "grad": {"grad"},
    "backward": set(),
}


# -- reading cases --------------------------------------------------------------------------------


def load(name: str) -> ModuleType:
    """Import a case anew, so that its module state is that of a fresh process."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


CASES = {path.stem: load(path.stem) for path in sorted(FOLDER.glob("*.py"))}
COUNTED = [name for name, case in CASES.items() if "where" in case.EXPECT]
COMPARED = [(name, backend) for name in COUNTED for backend in CASES[name].EXPECT["parity_by_backend"]]
MEASURED_PROJECTS = [name for name, case in CASES.items() if "pytest" in case.EXPECT]


def expected(name: str) -> dict[str, Any]:
    """What a case expects, with what is known to be different on the installed torch."""
    expect = dict(CASES[name].EXPECT)
    for deviation in DEVIATIONS:
        if deviation.case == name and TORCH in deviation.torch and sys.version_info >= deviation.python:
            for key, value in deviation.expect.items():
                expect[key] = {**expect.get(key, {}), **value} if isinstance(value, dict) else value
    return expect


def prepare(name: str) -> tuple[ModuleType, Any, list[Any]]:
    """Load a case, seed all random numbers as its conventions say, and make its function and calls."""
    case = load(name)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return (case, *case.make())


@contextlib.contextmanager
def config(case: ModuleType) -> Any:
    with contextlib.ExitStack() as stack:
        for part, values in getattr(case, "CONFIG", {}).items():
            stack.enter_context(getattr(torch, f"_{part}").config.patch(**values))
        yield


@pytest.fixture(autouse=True)
def _global_state(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Cases may leave another grad mode, other random numbers, and their modules."""
    for name, module in CASES.items():
        monkeypatch.setitem(sys.modules, name, module)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    torch._dynamo.reset()
    yield
    torch.set_grad_enabled(True)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture
def observer() -> Any:
    watching = Observer()
    watching.install()
    yield watching
    watching.remove()
    assert watching.errors == []


# -- counting -------------------------------------------------------------------------------------


def sites(where: list[str]) -> dict[tuple[str, int], set[str]]:
    """Reasons by place, from the lines in which a case lists records of the log."""
    found: dict[tuple[str, int], set[str]] = {}
    for entry in where:
        place, _, reason = entry.partition(" ")
        file, _, line = place.rpartition(":")
        reason = reason.removeprefix("SKIPPED FRAME: ").removesuffix(" [dup]")
        found.setdefault((file, int(line)), set()).add(reason)
    return found


def check_breaks(seen: Observation, expect: dict[str, Any]) -> None:
    """Compare places, reasons and kinds of breaks.

    What the log saw in a file that is not a case lies in the standard library: we name the line of the
    case that led there, which the case does not tell.
    """
    wanted = sites(expect["where"])
    inside = {site: reasons for site, reasons in wanted.items() if (FOLDER / site[0]).exists()}
    outside = {reason for site, reasons in wanted.items() if site not in inside for reason in reasons}
    got = {(b.file, b.line): {reason.reason for reason in b.reasons} for b in seen.breaks}
    assert {site: got.get(site) for site in inside} == inside
    rest = {site: reasons for site, reasons in got.items() if site not in inside}
    assert {reason for reasons in rest.values() for reason in reasons} == outside
    assert sum(b.hits for b in seen.breaks) == expect["breaks"]
    assert seen.break_count == len(got)
    assert any(b.kind == "skipped_frame" for b in seen.breaks) is expect["skipped_frame"]


def check_counts(seen: Observation, expect: dict[str, Any]) -> None:
    assert seen.recompile_count == expect["recompiles"]
    assert seen.recompile_count + len(seen.limit_hits) == expect["recompiles_logged"]
    assert bool(seen.limit_hits) is expect["limit_hit"]
    assert seen.graphs == expect["graphs"]


def check_reasons(seen: Observation, entries: list[str]) -> None:
    """Find the first guard of each entry, which reads ``function | - 0/0: guard | - 0/1: guard``."""
    told = {(r.function, reason) for r in seen.recompiles for reason in r.reasons}
    told |= {(hit.function, hit.reason) for hit in seen.limit_hits}
    for entry in entries:
        function, first, *others = entry.split(" | ")
        guard = messages.clean_guard(first.removeprefix("- "))
        if others or len(entry) < 140:
            assert (function, guard) in told
        else:  # cut off
            assert any(f == function and reason.startswith(guard) for f, reason in told), (guard, told)


def errors_of(expect: dict[str, Any], backend: str) -> dict[str, str]:
    """Names of the exceptions that compiled raises, by call."""
    raised = (expect["raises"] or {}).get(backend, {})
    return {call: text.split()[-1] for call, text in raised.items() if not text.endswith(" ok")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COUNTED)
def test_counts(name: str, observer: Observer) -> None:
    """Code that is compiled by hand shows the breaks and recompiles that the case names."""
    case, fn, calls = prepare(name)
    expect = expected(name)
    kwargs = {"backend": "eager", **getattr(case, "COMPILE", {})}
    compiled = torch.compile(fn, **kwargs)
    raised = {}
    with config(case):
        for number, (args, keywords) in enumerate(calls):
            if hasattr(case, "before_call"):
                case.before_call(number, fn, args, keywords)
            try:
                compiled(*args, **keywords)
            except Exception as error:
                raised[f"call{number}"] = type(error).__name__
    group = Group()
    group.events += observer.take()
    seen = summarize([(group, 0)], Places(FOLDER))
    check_breaks(seen, expect)
    check_counts(seen, expect)
    check_reasons(seen, expect["reasons"])
    assert raised == errors_of(expect, kwargs["backend"])


# -- parity ---------------------------------------------------------------------------------------


@dataclass
class Compared:
    """What came of the checked calls of a case."""

    run: TestRun
    seen: Observation
    #: What the calls returned; where both sides raised, compiled's exception.
    results: list[Any]
    failed: list[ParityError]


def compare(name: str, variant: Variant, observer: Observer) -> Compared:
    """Make the calls of a case as a test with the fixture ``compiled`` would, and go on after failures.

    Eager and compiled alternate within each call, so there is no moment for a case's ``between()``.
    """
    case, fn, calls = prepare(name)
    run = TestRun(name, Settings(), observer, Places(FOLDER))
    checker = Checker(fn, variant, run)
    run.functions.append(checker.function)
    fast = CompiledFunction(checker)
    results: list[Any] = []
    failed = []
    with config(case), warnings.catch_warnings(record=True):
        for number, (args, keywords) in enumerate(calls):
            if hasattr(case, "before_call"):
                case.before_call(number, fn, args, keywords)
            try:
                results.append(fast(*args, **keywords))
            except ParityError as error:
                failed.append(error)
            except Exception as error:
                results.append(error)
    assert failed == run.parity_errors
    return Compared(run, fast.observation, results, failed)


def drawn_by_inductor_only(kinds: set[str], backend: str, by_backend: dict[str, str]) -> bool:
    """Whether compiled differs only because inductor has random numbers of its own."""
    return "rng" in kinds and backend == "inductor" and by_backend.get("aot_eager") == "equal"


def dies(name: str, backend: str) -> int:
    """Exit status of a process in which torch alone compiles a case and calls it."""
    code = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import torch, {name} as case; "
        f"fn, calls = case.make(); torch.compile(fn, backend={backend!r})(*calls[0][0])"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode


@pytest.mark.parametrize(("name", "backend"), COMPARED)
def test_parity(name: str, backend: str, observer: Observer) -> None:
    """A checked call fails where the case says that compiled differs, and nowhere else."""
    expect = expected(name)
    if signal_name := expect.get("killed_by_backend", {}).get(backend):
        assert dies(name, backend) == -getattr(signal, signal_name)
        return
    by_backend = expect["parity_by_backend"]
    variant = Variant(**{**getattr(CASES[name], "COMPILE", {}), "backend": backend})
    compared = compare(name, variant, observer)
    run, seen, errors = compared.run, compared.seen, compared.failed
    found = {check.what for check in run.checks if check.passed is False}
    assert bool(errors) is bool(found)
    raised = {type(result).__name__ for result in compared.results if isinstance(result, Exception)}
    assert raised == (set() if found else set(errors_of(expect, backend).values()))
    told = by_backend[backend]
    kinds = set(told.removeprefix("DIFF: ").split(", ")) if told.startswith("DIFF: ") else set()
    if not kinds:
        assert told in ("equal", "close")
        assert errors == []
        if told == "equal" and backend != "inductor":  # which code inductor generates depends on the processor
            assert {check.max_abs for check in run.checks} <= {None, 0.0}
    elif drawn_by_inductor_only(kinds, backend, by_backend):
        assert errors == []
        assert any(FALLBACK in note for note in run.notes)
    elif ROUNDING in " ".join((CASES[name].__doc__ or "").split()):
        assert errors == []
        assert any(check.passed and check.error_ratio is not None for check in run.checks)
    else:
        wanted = [KINDS[kind] for kind in kinds if KINDS[kind]]
        assert bool(errors) is bool(wanted)
        assert all(found & kind for kind in wanted)
        assert found <= set().union(*wanted)
    if backend == "eager":
        check_breaks(seen, expect)
        check_counts(seen, expect)
    if variant.uses_cudagraphs:  # on the CPU
        assert any(text.startswith("CUDA graphs of ") for text in run.not_checked)


# -- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "wanted"), CUDA.items(), ids=list(CUDA))
def test_cuda_graphs(name: str, wanted: Cuda, observer: Observer) -> None:
    """What a case says of recordings and skips; outputs are kept over all calls, as a user may."""
    variant = Variant(**{"backend": "inductor", **CASES[name].COMPILE})
    compared = compare(name, variant, observer)
    seen, graphs = compared.seen, compared.seen.cudagraphs
    assert graphs.expected is True
    if wanted.parity:
        assert compared.failed == []
        assert not any(isinstance(result, Exception) for result in compared.results)
    assert seen.break_count == wanted.breaks
    assert seen.recompile_count == wanted.recompiles
    assert wanted.recorded is None or graphs.recorded == wanted.recorded
    assert bool(graphs.recorded) is not bool(wanted.skips)
    assert bool(graphs.replayed) is not bool(wanted.skips)
    assert len(graphs.skips) == len(wanted.skips)
    source = (FOLDER / f"{name}.py").read_text().splitlines()
    for skip, (reason, code) in zip(graphs.skips, wanted.skips):
        assert reason in skip.reason
        assert skip.file == f"{name}.py"
        assert skip.line is not None
        assert code in source[skip.line - 1]
    if wanted.overwritten:
        assert torch.equal(compared.results[0], compared.results[-1])


# -- speed ----------------------------------------------------------------------------------------


def test_what_is_timed_was_warmed_up_in_the_same_way(project: Any) -> None:
    """A case calls its model with gradients and a small batch first, and then times a larger one without."""
    name = "e03_warmed_with_another_signature"
    benches = Benches(project)
    shutil.copy(FOLDER / f"{name}.py", benches.path)
    benches.test(
        f"""
        import pytest, torch
        import {name} as case

        @pytest.mark.compiled(backend="eager")
        def test_speed(compiled_benchmark):
            fn, calls = case.make()
            torch.compile(fn, backend="eager")(*calls[0][0])
            with torch.no_grad():
                compiled_benchmark(fn, *calls[1][0])
        """
    )
    benches.real_times()
    run = benches.run("--benchmark-autosave")
    run.result.assert_outcomes(passed=1)
    (dynamo,) = benches.dynamo()
    assert dynamo["verdict"] == "no baseline"
    record = run.record("test_speed[eager]")
    assert record["findings"] == []
    assert record["graphs"] == 2  # its own and that of the benchmark
    assert record["recompiles"] == []


# -- mini projects --------------------------------------------------------------------------------


OUTCOMES = ("passed", "failed", "skipped", "errors")
#: Options that an inner run in this process does not get rid of, or does not reach.
APART = {"-W", "--assert=plain"}


def outcomes(text: str) -> dict[str, int]:
    """Counts in words such as ``1 failed (why), 2 passed``; a case without numbers passes."""
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed)\b", text)}


def counts_of(result: pytest.RunResult) -> dict[str, int]:
    if not re.search(r"\d+ \w+.* in [\d.]+s", result.stdout.str()):
        return {}
    return {word: number for word, number in result.parseoutcomes().items() if word in OUTCOMES}


@pytest.fixture
def start(project: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write the files of a case and its environment; return its module."""

    def start(name: str) -> ModuleType:
        case = CASES[name]
        for needed in getattr(case, "NEEDS", ()):
            pytest.importorskip(needed)
        for file, source in case.FILES.items():
            (project.pytester.path / file).write_text(source)
        for variable, value in getattr(case, "ENV", {}).items():
            monkeypatch.setenv(variable, value)
        if hasattr(case, "RUNS"):
            # Its runs find what earlier ones left in the cache.
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(project.pytester.path / "cache"))
        return case

    return start


def run_project(project: Any, case: ModuleType, args: list[str], *, json_report: bool = True) -> Any:
    """Run pytest as a case says: in a process of its own if it is about what a process keeps."""
    apart = hasattr(case, "ENV") or not APART.isdisjoint(args)
    torch._dynamo.utils.counters.clear()
    # Other plugins that happen to be installed warn, which is an error under -W error.
    return project.run("-p", "no:asyncio", *args, json_report=json_report, subprocess=apart)


@pytest.mark.parametrize("name", MEASURED_PROJECTS)
def test_project_without_plugin(name: str, project: Any, start: Any) -> None:
    """Pytest without this plugin gives the outcomes that the case tells."""
    case = start(name)
    for key, text in expected(name)["pytest"].items():
        args = getattr(case, key.partition(" ")[0])
        run = run_project(project, case, ["-p", "no:dynamo", *args], json_report=False)
        counts = counts_of(run.result)
        wanted = outcomes(text)
        assert counts == wanted if wanted else set(counts) == {"passed"}, run.text


def facts(record: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a record that a case can speak of."""
    return {
        "breaks": [(b["file"], b["line"], b["ignored"]) for b in record["breaks"]],
        "recompiles": sum(r["count"] for r in record["recompiles"]),
        "limit_hits": len(record["limit_hits"]),
        "frames": record["frames"],
        "findings": [f["limit"] for f in record["findings"]],
        "timed": record["compile"]["seconds"] > 0,
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [pytest.param(name, said, id=f"{name}-{n}") for name, runs in PROJECTS.items() for n, said in enumerate(runs)],
)
def test_project_with_plugin(name: str, said: Said, project: Any, start: Any) -> None:
    """With this plugin the mini project shows what the case asks for."""
    case = start(name)
    for file, source in said.files.items():
        (project.pytester.path / file).write_text(source)
    for _ in range(getattr(case, "RUNS", 1)):
        run = run_project(project, case, [*getattr(case, said.key), *said.args, *said.files])
        assert run.result.ret == said.exit_code, run.text
        assert counts_of(run.result) == said.outcomes, run.text
        for words in said.output:
            assert words in run.text
        if said.exit_code != pytest.ExitCode.USAGE_ERROR:
            check_records(run.report, said)


def check_records(report: dict[str, Any], said: Said) -> None:
    records = {r["nodeid"]: facts(r) for r in report["records"] if r["phase"] == "call"}
    if said.records is not None:
        assert len(records) == said.records
    for found in records.values():
        assert {key: found[key] for key in said.every} == dict(said.every)
    for nodeid, wanted in said.each.items():
        assert {key: records[nodeid][key] for key in wanted} == dict(wanted)


# -- the data -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_case_is_checked(name: str) -> None:
    """Every case has a check, or a reason why it can't have one yet."""
    if name in ELSEWHERE:
        file, _, test = ELSEWHERE[name].partition("::")
        assert f"\ndef {test}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")
    elif not (name in COUNTED or name in CUDA or name in PROJECTS):
        pytest.skip(LATER[name])
    if name in LATER:
        pytest.skip(f"in part: {LATER[name]}")


@pytest.mark.parametrize("deviation", DEVIATIONS, ids=lambda d: f"{d.case}-{'-'.join(d.torch)}")
def test_deviation_deviates(deviation: Any) -> None:
    """A deviation names a case and differs from what the case says; the tests above assert its values."""
    expect = CASES[deviation.case].EXPECT
    assert deviation.expect
    assert all(expect.get(key) != value for key, value in deviation.expect.items())
    assert deviation.command
    assert deviation.output
