"""The fixture ``compiled_benchmark``: what is stored, judged, left out, and left as it was."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from benchmark_project import NAME
from benchmark_project import STORE
from benchmark_project import Benches

from pytest_dynamo import _torch
from pytest_dynamo import history
from pytest_dynamo.observer import GeneratedCode


#: pytest-benchmark warns of fixtures that were not used.
STRICT = ("-W", "error:Benchmark fixture was not used")


@pytest.fixture
def benches(project) -> Benches:
    return Benches(project)


@pytest.fixture
def baseline(benches) -> Benches:
    """A project with one stored run of 1 ms: less than 30 % beyond it is not slower."""
    benches.run(STORE).result.assert_outcomes(passed=1)
    assert benches.verdicts() == ["no baseline"]
    return benches


def marks(benches: Benches) -> dict:
    return history.marks(benches.path / ".benchmarks")


# -- what is stored -------------------------------------------------------------------------------


def test_an_entry(benches):
    """Samples are stored bit by bit; beside them lies all that is needed to judge later runs."""
    benches.times(0.1 + 0.2)
    run = benches.run(STORE, "--benchmark-save-data")
    run.result.assert_outcomes(passed=1)
    (entry,) = benches.entries()
    assert entry["stats"]["data"] == [(0.1 + 0.2) * (1 + 1e-3 * (7 * n % 5 - 2)) for n in range(20)]
    assert entry["stats"]["rounds"] == 20
    assert entry["stats"]["iterations"] == 1
    assert entry["stats"]["median"] == 0.1 + 0.2
    assert entry["options"]["timer"] == "dynamo_replay"
    (dynamo,) = benches.dynamo()
    assert (dynamo["schema"], dynamo["nodeid"]) == (1, f"test_it.py::{NAME}")
    assert len(dynamo["run"]) == len(dynamo["machine"]) == 12
    fingerprint = dynamo["fingerprint"]
    assert {"device": "cpu", "variant": "eager", "l2": "cold"}.items() <= fingerprint.items()
    assert all(isinstance(value, str) for value in fingerprint.values())
    assert {"torch", "triton", "python", "cpu", "threads"} <= set(fingerprint)
    measured = dynamo["measurement"]
    assert measured["compiled"]["time"] == {"median": 0.1 + 0.2, "mad": pytest.approx(3e-4), "n": 20}
    assert measured["eager"]["time"]["median"] == 2e-3
    assert measured["speedup"] == pytest.approx(2e-3 / 0.3)
    assert measured["speedup_low"] < measured["speedup"] < measured["speedup_high"]
    assert measured["canaries"] == {"matmul": 1e-4, "copy": 1e-4}
    of_time = {"eager": 0.3 / 2e-3, "matmul": 0.3 / 1e-4, "copy": 0.3 / 1e-4}
    assert measured["ratios"] == {name: pytest.approx(ratio) for name, ratio in of_time.items()}
    assert measured["compile_seconds"] > 0
    assert (dynamo["verdict"], dynamo["graphs"], dynamo["graph_breaks"], dynamo["recompiles"]) == (
        "no baseline",
        1,
        0,
        0,
    )
    (stored,) = history.read(benches.path / ".benchmarks").runs
    assert (stored.run, stored.graphs) == (dynamo["run"], 1)


def test_the_record(benches):
    """The JSON report has the benchmark, the memory and the kernels of a call."""
    (benches.path / "peaks").write_text("4096 6144")
    record = benches.run(STORE).record(NAME)
    (dynamo,) = benches.dynamo()
    assert record["benchmark"] == dynamo
    assert record["memory"] == {"eager_bytes": 4096, "compiled_bytes": 6144, "ratio": 1.5}
    assert record["kernels"] is None  # on a CPU
    assert record["parity"]["passed"] is True


def test_a_run_that_is_not_stored_says_so(benches):
    (note,) = benches.run().record(NAME)["notes"]
    assert note == (
        "speed of step: no baseline: no accepted run with this fingerprint; "
        "this run is not kept: --benchmark-autosave keeps it"
    )
    assert not benches.files


def test_commands_of_pytest_benchmark_read_the_files(baseline, tmp_path):
    """Also a file without entries, which a run leaves in which nothing was right."""

    def command(*words: str, where: Path = baseline.path) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "pytest_benchmark", *words], cwd=where, capture_output=True, text=True
        )

    if command("list", where=tmp_path).returncode:
        pytest.skip("the command of this pytest-benchmark does not work with this pytest")  # 5.1.0 with pytest 9.1
    baseline.times(1.2e-3)
    baseline.run(STORE).result.assert_outcomes(passed=1)
    baseline.test(
        """
        import torch
        def test_wrong(compiled_benchmark):
            compiled_benchmark(lambda x: x + int(torch.compiler.is_compiling()), torch.ones(8))
        """
    )
    baseline.run(STORE, "--dynamo-backends=eager", "--dynamo-stage-timeout=0").result.assert_outcomes(failed=1)
    assert len(baseline.files) == 3
    assert command("list").returncode == 0
    done = command("compare", "--columns=median,rounds")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test_speed[eager]") == 2
    assert "(1.20)" in done.stdout


def test_compared_by_pytest_benchmark(baseline):
    """``--benchmark-compare`` and its table show our samples."""
    baseline.times(1.25e-3)
    run = baseline.run("--benchmark-compare", "--benchmark-columns=median")
    run.result.assert_outcomes(passed=1)
    assert "(1.25)" in run.text


@pytest.mark.parametrize("profiled", ["function", "setup"])
def test_profiled_by_pytest_benchmark(benches, profiled):
    """``--benchmark-cprofile`` calls once more than there are samples: the compiled function, with its arguments."""
    call = {
        "function": "compiled_benchmark(step, torch.ones(3), torch.ones(3))",
        "setup": "compiled_benchmark.pedantic(step, setup=lambda: ((torch.ones(3), torch.ones(3)), {}))",
    }[profiled]
    benches.test(
        f"""
        import torch
        seen = []
        def step(x, y):
            seen.append(x.shape)
            return x + y
        def test_it(compiled_benchmark):
            {call}
        """
    )
    run = benches.run(STORE, "--benchmark-cprofile=tottime", "--dynamo-backends=eager")
    run.result.assert_outcomes(passed=1)
    assert "cProfile" in run.text
    assert len(benches.dynamo()) == 1


def test_the_code_that_inductor_generates_is_told_apart(project):
    """Its hash is the same in another process that takes it from the cache, and that of other code is another."""
    benches = Benches(project)
    source = """
        import torch
        def test_it(compiled_benchmark):
            compiled_benchmark(lambda x: x.{name}() * 2 + 1, torch.ones(64))
    """
    for name, options in (("sin", {}), ("sin", {"subprocess": True}), ("cos", {})):
        benches.test(source.format(name=name))
        benches.run(STORE, **options).result.assert_outcomes(passed=1)
    one, same, other = (dynamo["measurement"] for dynamo in benches.dynamo())
    assert one["code"] == same["code"] != other["code"]
    assert len(one["code"]) == 16
    assert same["cold"] is False


@pytest.mark.parametrize("name", _torch.OUTPUT_CODE_LOGGERS)
def test_where_code_lies_is_no_part_of_it(name):
    """Paths, names of caches and addresses are others in each process; unmeant, nothing is hashed."""

    def hashed(*codes: str) -> str | None:
        with (found := GeneratedCode()):
            for code in codes:
                logging.getLogger(name).debug("Output code: \n%s", code)
            logging.getLogger(name).debug("Output code written to: %s", "/somewhere")
        return found.hash

    one = hashed("# /tmp/a/b.py\nx = 1", f"load('c{'a' * 51}')  # 0x7f00")
    assert one == hashed("# /home/c.py\nx = 1", f"load('c{'b' * 51}')  # 0x7fff")
    assert len({one, hashed("x = 1"), hashed("x = 2"), hashed()}) == 4
    assert hashed() is None


def test_each_variant_is_a_benchmark(benches):
    benches.test(
        """
        import pytest, torch
        @pytest.mark.compiled(backend=["eager", "aot_eager"])
        def test_it(compiled_benchmark):
            compiled_benchmark(torch.sin, torch.ones(8))
        """
    )
    benches.run(STORE).result.assert_outcomes(passed=2)
    assert [entry["name"] for entry in benches.entries()] == ["test_it[eager]", "test_it[aot_eager]"]
    assert [dynamo["fingerprint"]["variant"] for dynamo in benches.dynamo()] == ["eager", "aot_eager"]


# -- what is wrong is no baseline -----------------------------------------------------------------


def test_what_differs_from_eager_is_not_stored(benches):
    """It is not timed either; and pytest-benchmark does not complain that its fixture was not used."""
    benches.test(
        """
        import torch
        def wrong(x):
            return x + int(torch.compiler.is_compiling())
        def test_wrong(compiled_benchmark):
            compiled_benchmark(wrong, torch.ones(8))
        def test_right(compiled_benchmark):
            compiled_benchmark(torch.sin, torch.ones(8))
        """
    )
    given = (STORE, "--benchmark-json=all.json", "--dynamo-backends=eager", "--dynamo-stage-timeout=0")
    run = benches.run(*given, *STRICT)
    run.result.assert_outcomes(failed=1, passed=1)
    assert "ParityError: compiled wrong differs from eager in call 1 [eager]" in run.text
    assert len(benches.processes) == 1
    assert [entry["name"] for entry in benches.entries()] == ["test_right[eager]"]
    everything = json.loads((benches.path / "all.json").read_text())["benchmarks"]
    assert [entry["name"] for entry in everything] == ["test_right[eager]"]
    table = run.text.partition(" benchmark: 1 tests ")[2]
    assert "test_right" in table
    assert "test_wrong" not in table.partition("Legend")[0]
    assert run.record("test_wrong[eager]")["benchmark"] is None
    assert "not used at all" not in run.text


WRONG = {
    "assert": "compiled_benchmark(step, x); assert 0",
    "break": "compiled_benchmark(broken, x)",
    "compiled": "compiled_benchmark(step, x); torch.compile(broken, backend='eager')(x)",
    "xfail": "request.applymarker(pytest.mark.xfail); compiled_benchmark(step, x); assert 0",
    "skip": "compiled_benchmark(step, x); pytest.skip('not today')",
    "teardown": "compiled_benchmark(step, x); late.append(1)",
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_fails_afterwards_is_no_baseline(baseline, kind):
    """It is stored without a verdict, and --dynamo-accept does not take it either, though it is fast."""
    baseline.test(
        f"""
        import pytest, torch
        late = []

        def step(x):
            return x.sin() + 1

        def broken(x):
            print("a break")
            return x.sin() + 1

        @pytest.fixture
        def fails_late():
            yield
            assert not late

        @pytest.mark.compiled(backend="eager", max_breaks=0)
        def test_speed(compiled_benchmark, request, fails_late):
            x = torch.ones(8)
            {WRONG[kind]}
        """
    )
    outcome = {
        "xfail": {"xfailed": 1},
        "skip": {"skipped": 1},
        "teardown": {"passed": 1, "errors": 1},
    }.get(kind, {"failed": 1})
    for options in ((), ("--dynamo-accept",)):
        run = baseline.run(STORE, *options)
        run.result.assert_outcomes(**outcome)
    assert baseline.verdicts() == ["no baseline", None, None]
    assert marks(baseline) == {}
    assert f"test_it.py::{NAME}: not accepted, it is wrong" in run.text
    stored = history.read(baseline.path / ".benchmarks").runs
    assert history.window(stored, stored[0].nodeid, stored[0].fingerprint, {}) == stored[:1]


def test_what_is_slower_and_wrong_is_not_accepted(baseline):
    baseline.times(2e-3)
    baseline.append("test_it.py", "    assert 0\n")
    run = baseline.run(STORE, "--dynamo-accept")
    run.result.assert_outcomes(failed=1)
    assert baseline.verdicts() == ["no baseline", None]
    assert marks(baseline) == {}


def test_an_interrupted_timing_leaves_nothing(baseline):
    """Ctrl-C while it is timed: what had been stored is as it was."""
    before = [file.read_bytes() for file in baseline.files]
    baseline.lines("1 1 1 0 ctrl-c")
    run = baseline.run(STORE, subprocess=True)
    assert run.result.ret == pytest.ExitCode.INTERRUPTED
    assert [file.read_bytes() for file in baseline.files][:1] == before
    assert baseline.verdicts() == ["no baseline"]
    assert "not used at all" not in run.text


def test_an_interrupted_confirmation_leaves_no_verdict(baseline):
    baseline.times(2e-3)
    baseline.append(
        "conftest.py",
        "\nfrom pytest_dynamo import confirm\n"
        "def interrupted(*args):\n    raise KeyboardInterrupt\n"
        "confirm._once = interrupted\n",
    )
    run = baseline.run(STORE, subprocess=True)
    assert run.result.ret == pytest.ExitCode.INTERRUPTED
    assert baseline.verdicts() == ["no baseline", None]
    stored = history.read(baseline.path / ".benchmarks")
    assert stored.problems == ()
    assert len(history.window(stored.runs, stored.runs[0].nodeid, stored.runs[0].fingerprint, {})) == 1


# -- verdicts -------------------------------------------------------------------------------------


def test_a_test_interrupted_after_its_benchmark_leaves_no_verdict(baseline):
    """Nobody knows what the rest of it would have found."""
    baseline.append("test_it.py", "    raise KeyboardInterrupt\n")
    baseline.run(STORE, json_report=False, subprocess=True)
    assert baseline.verdicts() == ["no baseline", None]


def test_not_slower(baseline):
    """Within the limits a run passes and becomes part of the window."""
    for time in (1.1e-3, 1.2e-3):
        baseline.times(time)
        run = baseline.run(STORE, *STRICT)
        run.result.assert_outcomes(passed=1)
        assert run.record(NAME)["notes"] == []
    assert baseline.verdicts() == ["no baseline", "not slower", "not slower"]
    assert baseline.dynamo()[2]["told"][0].startswith("CPU work: time")
    assert "above the middle of 2 accepted runs" in baseline.dynamo()[2]["told"][0]


def test_slower(baseline):
    """It fails, names what became slower, by how much, how much is allowed, and what accepts it."""
    baseline.times(1.5e-3)
    run = baseline.run(STORE, "--dynamo-confirm=0")
    run.result.assert_outcomes(failed=1)
    run.result.stdout.fnmatch_lines(
        [
            "slower by 50 %",
            "  slower than the accepted runs",
            "      CPU work: time is 50.0 % above the middle of 1 accepted run (1.000 ms), 30.0 % allowed: slower",
            "      CPU work: time to that of a fixed matmul is 50.0 % above *",
            "      CPU work: time to that of a fixed copy is 50.0 % above *",
            "  accept with --dynamo-accept",
        ]
    )
    (finding,) = run.record(NAME)["findings"]
    assert (finding["limit"], finding["seen"], finding["accept_with"]) == ("max_slowdown", 50.0, "--dynamo-accept")
    assert baseline.verdicts() == ["no baseline", "slower"]
    assert len(baseline.processes) == 1
    assert "fresh processes" not in run.text
    # It is no part of what later runs are held against.
    baseline.times(1.5e-3)
    assert "middle of 1 accepted run" in baseline.run(STORE, "--dynamo-confirm=0").text
    assert baseline.verdicts() == ["no baseline", "slower", "slower"]


def test_a_slow_machine_is_no_slow_code(baseline):
    """Where fixed work takes longer too, nobody knows: it passes and is no baseline."""
    baseline.times(1.5e-3, canary=1.5e-4)
    run = baseline.run(STORE)
    run.result.assert_outcomes(passed=1)
    assert "time and its ratios to fixed work disagree: the machine is busy with something else" in run.text
    assert len(baseline.processes) == 1
    assert baseline.verdicts() == ["no baseline", "unstable"]


def test_the_window_is_full(baseline):
    """Ten accepted runs make a window, which allows less; later ones do not move it."""
    baseline.fill(10)
    baseline.times(1.09e-3)
    for _ in range(2):
        baseline.run(STORE).result.assert_outcomes(passed=1)
    assert baseline.verdicts()[10:] == ["not slower"] * 2
    baseline.times(1.12e-3)
    run = baseline.run(STORE, "--dynamo-confirm=0")
    run.result.assert_outcomes(failed=1)
    assert "time is 12.0 % above the middle of 10 accepted runs (1.000 ms), 10.0 % allowed: slower" in run.text


def test_a_suspect_is_confirmed(baseline):
    """Fresh processes agree: it fails."""
    baseline.times(1.5e-3, 1.6e-3, 1.4e-3)
    run = baseline.run(STORE)
    run.result.assert_outcomes(failed=1)
    assert "judged by the median of this and 2 fresh processes" in run.text
    assert len(set(baseline.processes)) == len(baseline.processes) == 3
    assert baseline.processes[0] == str(os.getpid())
    dynamo = baseline.dynamo()[1]
    assert dynamo["verdict"] == "slower"
    assert [found["compiled"]["time"]["median"] for found in dynamo["confirmed"]] == [1.6e-3, 1.4e-3]
    assert dynamo["measurement"]["compiled"]["time"]["median"] == 1.5e-3
    assert len(baseline.files) == 2


def test_a_suspect_is_not_confirmed(baseline):
    """Fresh processes are as fast as ever: this one drew a bad lot, and passes."""
    baseline.times(1.5e-3, 1e-3, 1e-3)
    run = baseline.run(STORE, "-n0", "--junitxml=report.xml")
    run.result.assert_outcomes(passed=1)
    assert baseline.verdicts() == ["no baseline", "not slower"]
    assert len(baseline.processes) == 3
    assert len(baseline.files) == 2
    assert "seemed 50.0% slower, which 2 fresh processes did not confirm" in run.text
    # Later runs are judged by what this one was judged by.
    dynamo = baseline.dynamo()[1]
    assert dynamo["measurement"]["compiled"]["time"]["median"] == 1e-3
    assert dynamo["first"]["compiled"]["time"]["median"] == 1.5e-3
    assert 'tests="1"' in (baseline.path / "report.xml").read_text()


def test_a_suspect_that_can_not_run_alone_is_unstable(baseline):
    """It passes with a note that tells why, and is no baseline."""
    baseline.test(
        """
        import pytest, torch
        order = []
        def test_first():
            order.append(1)
        @pytest.mark.compiled(backend="eager")
        def test_speed(compiled_benchmark):
            assert order
            compiled_benchmark(torch.sin, torch.ones(8))
        """
    )
    baseline.times(1.5e-3)
    run = baseline.run(STORE, "--dynamo-confirm=1")
    run.result.assert_outcomes(passed=2)
    assert baseline.verdicts() == ["no baseline", "unstable"]
    (note,) = run.record(NAME)["notes"]
    assert note.startswith("speed of sin: unstable: CPU work: time")
    assert f"; it can't be timed alone: exit status 1, FAILED test_it.py::{NAME} - assert []" in note


def test_more_may_be_allowed(baseline):
    baseline.times(1.5e-3)
    baseline.run("--dynamo-confirm=0", "--dynamo-max-slowdown=51").result.assert_outcomes(passed=1)
    baseline.run("--dynamo-confirm=0", "--dynamo-max-slowdown=40").result.assert_outcomes(failed=1)
    (baseline.path / "pytest.ini").write_text("[pytest]\ndynamo_max_slowdown = 51%\n")
    baseline.run("--dynamo-confirm=0").result.assert_outcomes(passed=1)


def test_faster_is_told(baseline):
    baseline.times(0.5e-3)
    run = baseline.run(STORE)
    run.result.assert_outcomes(passed=1)
    notes = run.record(NAME)["notes"]
    assert "speed of step: time is 50.0% below the accepted runs: --dynamo-accept makes it the baseline" in notes
    assert baseline.verdicts() == ["no baseline", "not slower"]


def test_another_fingerprint_has_no_baseline(baseline, monkeypatch):
    """The runs of before are shown beside it."""
    monkeypatch.setenv("PRETENDED_TORCH", "9.9.9")
    baseline.times(5e-3)
    run = baseline.run(STORE)
    run.result.assert_outcomes(passed=1)
    assert baseline.verdicts() == ["no baseline", "no baseline"]
    (note,) = [note for note in run.record(NAME)["notes"] if "no baseline" in note]
    assert "-> 9.9.9" in note
    assert "1.000 ms" in note


def test_a_storage_of_another_name(benches):
    """As the current folder of the test, a way to write the storage must not hide the baseline."""
    benches.test(
        """
        import pytest, torch
        @pytest.mark.compiled(backend="eager")
        def test_speed(compiled_benchmark, tmp_path, monkeypatch):
            monkeypatch.chdir(tmp_path)
            compiled_benchmark(torch.sin, torch.ones(8))
        """
    )
    for given in ("file://kept", "kept"):
        run = benches.run(STORE, f"--benchmark-storage={given}")
    assert run.record(NAME)["benchmark"]["verdict"] == "not slower"
    run = benches.run("--benchmark-storage=elasticsearch+http://localhost:1/a/b", "--dynamo-confirm=0")
    if run.report is not None:  # its client is there
        assert "pytest-benchmark keeps its runs where they are not read" in str(run.record(NAME)["notes"])


def test_damaged_files(baseline):
    """A damaged run is told and left out; a damaged file of accepted runs fails, and stays as it is."""
    folder = baseline.files[0].parent
    (folder / "0002_damaged.json").write_text("{")
    run = baseline.run()
    run.result.assert_outcomes(passed=1)
    assert any("0002_damaged.json: left out, it is not whole JSON" in note for note in run.record(NAME)["notes"])
    (baseline.path / ".benchmarks" / history.MARKS).write_text("{")
    for options in ((), (STORE, "--dynamo-accept")):
        run = baseline.run(*options)
        run.result.assert_outcomes(failed=1)
        run.result.stdout.fnmatch_lines(["no baseline can be read", "*line 1 is damaged*"])
    assert (baseline.path / ".benchmarks" / history.MARKS).read_text() == "{"
    assert "--dynamo-accept: " in run.text.rpartition("- dynamo -")[2]


# -- accepting ------------------------------------------------------------------------------------


def test_accepting_moves_the_baseline(baseline):
    """A slower run passes, and later ones are held against it."""
    baseline.times(2e-3)
    run = baseline.run(STORE, "--dynamo-accept")
    run.result.assert_outcomes(passed=1)
    assert f"test_it.py::{NAME}: is the baseline of later runs" in run.text
    assert len(baseline.processes) == 1
    (mark,) = marks(baseline).values()
    assert mark.run == baseline.dynamo()[1]["run"]
    baseline.times(2.1e-3)
    baseline.run(STORE).result.assert_outcomes(passed=1)
    baseline.times(3e-3)
    run = baseline.run(STORE, "--dynamo-confirm=0")
    run.result.assert_outcomes(failed=1)
    assert "time is 46.4 % above the middle of 2 accepted runs (2.049 ms)" in run.text


def test_accepting_a_faster_run(baseline):
    baseline.times(0.5e-3)
    run = baseline.run("--benchmark-save=faster", "--dynamo-accept")
    run.result.assert_outcomes(passed=1)
    assert run.record(NAME)["notes"] == []
    baseline.times(1e-3)
    baseline.run("--dynamo-confirm=0").result.assert_outcomes(failed=1)


def test_accepting_what_is_not_kept(benches):
    """Without an option that keeps the run there is nothing to accept."""
    for options in ((), ("--benchmark-json=all.json",), ("-p", "no:benchmark")):
        run = benches.run("--dynamo-accept", *options)
        assert run.result.ret == pytest.ExitCode.USAGE_ERROR
        assert "--dynamo-accept: nothing of this run would be kept" in run.text
    assert benches.processes == []


def test_accepting_where_nothing_is_timed(benches):
    for options in ((), ("--benchmark-disable",)):
        if not options:
            benches.test("def test_nothing(): pass")
        else:
            Benches(benches.project)
        run = benches.run(STORE, "--dynamo-accept", *options, json_report=False)
        run.result.assert_outcomes(passed=1)
        assert "--dynamo-accept: no benchmark was kept in this run" in run.text
    assert not (benches.path / ".benchmarks" / history.MARKS).exists()


# -- where nothing is timed -----------------------------------------------------------------------

UNTIMED = [
    pytest.param(("-p", "no:benchmark"), "pytest-benchmark is not active", id="blocked"),
    pytest.param(("--benchmark-disable",), "--benchmark-disable was given", id="disabled"),
    pytest.param(("-n", "2"), "pytest-benchmark times nothing under pytest-xdist", id="xdist"),
]


@pytest.mark.parametrize(("options", "why"), UNTIMED)
def test_where_nothing_is_timed(benches, options, why):
    """Parity and breaks are checked; that the speed is not, is told, and fails where everything has to be."""
    if "-n" in options:
        pytest.importorskip("xdist")
    benches.test(
        """
        import pytest, torch

        def broken(x):
            print("a break")
            return x.sin() + 1

        @pytest.mark.compiled(backend="eager")
        def test_speed(compiled_benchmark):
            assert torch.equal(compiled_benchmark(torch.sin, torch.ones(8)), torch.ones(8).sin())

        @pytest.mark.compiled(backend="eager", max_breaks=0)
        def test_broken(compiled_benchmark):
            compiled_benchmark(broken, torch.ones(8))

        @pytest.mark.compiled(backend="eager")
        def test_wrong(compiled_benchmark):
            compiled_benchmark(lambda x: x + int(torch.compiler.is_compiling()), torch.ones(8))

        @pytest.mark.compiled(backend="eager")
        def test_pedantic(compiled_benchmark):
            compiled_benchmark.pedantic(torch.sin, setup=lambda: ((torch.ones(8),), {}), rounds=5)
        """
    )
    spread = "-n" in options
    given = (*options, "--dynamo-stage-timeout=0", *STRICT)
    run = benches.run(*given, subprocess=spread)
    run.result.assert_outcomes(passed=2, failed=2)
    for name in (NAME, "test_pedantic[eager]"):
        record = run.record(name)
        assert record["not_checked"] == [f"speed of sin: {why}"]
        assert record["benchmark"] is None
        assert (record["parity"]["passed"], record["graphs"], record["recompiles"]) == (True, 1, [])
    assert run.record("test_broken[eager]")["findings"][0]["limit"] == "max_breaks"
    assert run.record("test_wrong[eager]")["parity"]["passed"] is False
    assert "3 not checked" in run.text
    assert "not used at all" not in run.text
    assert benches.processes == []
    run = benches.run(*given, "--dynamo-require-checked", "-k", "speed or pedantic", subprocess=spread)
    run.result.assert_outcomes(failed=2)
    assert "1 not checked, under --dynamo-require-checked" in run.text
    assert f"speed of sin: {why}" in run.text


def test_code_on_several_gpus_is_not_timed(benches):
    """The clock of one tells nothing of the other."""
    benches.append(
        "conftest.py",
        """
import torch
from pytest_dynamo import inputs

patch.setattr(inputs, "gpus", lambda values, owners: [torch.device("cuda:0"), torch.device("cuda:1")])
""",
    )
    run = benches.run(STORE)
    run.result.assert_outcomes(passed=1)
    record = run.record(NAME)
    assert record["not_checked"] == ["speed of step: its tensors are on 2 GPUs, and one alone is timed"]
    assert record["parity"]["passed"] is True
    assert benches.dynamo() == []


def test_skipped_by_pytest_benchmark(benches):
    run = benches.run("--benchmark-skip")
    run.result.assert_outcomes(skipped=1)
    assert benches.processes == []


def test_only_benchmarks(benches):
    """``--benchmark-only`` knows ours; it refuses pytest-xdist by itself."""
    benches.append("test_it.py", "\ndef test_other():\n    assert 0\n")
    run = benches.run("--benchmark-only")
    run.result.assert_outcomes(passed=1, skipped=1)
    assert len(benches.processes) == 1
    pytest.importorskip("xdist")
    run = benches.run("--benchmark-only", "-n", "2", subprocess=True)
    assert run.result.ret == pytest.ExitCode.USAGE_ERROR
    assert "Can't have both --benchmark-only and --benchmark-disable options" in run.text


def test_asked_for_too_late(benches):
    """By ``getfixturevalue`` the clock can't be given to pytest-benchmark any more."""
    benches.test(
        """
        import torch
        def test_it(request):
            request.getfixturevalue("compiled_benchmark")(torch.sin, torch.ones(8))
        """
    )
    run = benches.run("--dynamo-backends=eager", "--benchmark-max-time=0.01")
    run.result.assert_outcomes(passed=1)
    assert run.record("test_it")["not_checked"] == [
        "speed of sin: compiled_benchmark has to be an argument of the test"
    ]
    assert benches.processes == []


def test_pytest_benchmark_loaded_by_hand(benches, monkeypatch):
    """Without entry points, plugins have the names of their modules."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    run = benches.run("-p", "pytest_benchmark.plugin", "-p", "pytest_dynamo.plugin", STORE, subprocess=True)
    run.result.assert_outcomes(passed=1)
    assert len(benches.dynamo()) == 1


def test_codspeed_pretended(benches):
    """Where pytest-codspeed is in charge, it gets the compiled function, and no clock in its marker."""
    benches.append(
        "conftest.py",
        "\nfrom types import SimpleNamespace\n"
        "def pytest_sessionstart(session):\n"
        "    codspeed = SimpleNamespace(is_codspeed_enabled=True)\n"
        "    session.config.pluginmanager.register(codspeed, 'codspeed_plugin')\n"
        "def pytest_runtest_call(item):\n"
        "    assert not item.get_closest_marker('benchmark')\n",
    )
    run = benches.run("--benchmark-disable", "-p", "no:codspeed", *STRICT)
    run.result.assert_outcomes(passed=1)
    assert run.record(NAME)["not_checked"] == ["speed of step: pytest-codspeed measures in its own way"]
    assert run.record(NAME)["parity"]["passed"] is True


def test_codspeed(benches):
    pytest.importorskip("pytest_codspeed")
    run = benches.run("--codspeed", "--codspeed-max-time=0.1", subprocess=True)
    run.result.assert_outcomes(passed=1)
    assert "1 benchmarked" in run.text
    assert run.record(NAME)["not_checked"] == ["speed of step: pytest-codspeed measures in its own way"]
    assert benches.processes == []


# -- limits ---------------------------------------------------------------------------------------


def test_min_speedup(project):
    """The lower end of the interval has to reach it."""
    benches = Benches(project, ", min_speedup=1.9")
    benches.times(1e-3, spread=0.04)
    benches.run(STORE).result.assert_outcomes(passed=1)
    benches.times(1e-3, spread=0.06)
    run = benches.run(STORE)
    run.result.assert_outcomes(failed=1)
    run.result.stdout.fnmatch_lines(
        [
            "1.88 times as fast as eager, 1.9 wanted",
            "  compiled is 2.00 times as fast as eager (95 %: 1.88 to 2.12), 1.9 wanted",
            "  accept with @pytest.mark.compiled(min_speedup=1.8*)",
        ]
    )
    assert benches.verdicts() == ["no baseline", None]


def test_max_memory_ratio(project):
    benches = Benches(project, ", max_memory_ratio=1.5")
    for compiled, outcome in ((1500, {"passed": 1}), (1600, {"failed": 1})):
        (benches.path / "peaks").write_text(f"1000 {compiled}")
        run = benches.run()
        run.result.assert_outcomes(**outcome)
    run.result.stdout.fnmatch_lines(
        [
            "1.6 times the memory of eager, 1.5 allowed",
            "  a compiled call needs 1.60 times the memory of an eager one (1600 and 1000 bytes)",
            "  accept with @pytest.mark.compiled(max_memory_ratio=1.6*)",
        ]
    )


def test_what_a_cpu_does_not_tell_of_memory_is_not_checked(project):
    """A limit on what is not measured must not pass unseen."""
    run = Benches(project, ", max_memory_ratio=1.5").run()
    run.result.assert_outcomes(passed=1)
    (told,) = run.record(NAME)["not_checked"]
    assert told == "max_memory_ratio of step: memory is not measured on cpu"


def test_compile_time_is_that_of_a_cold_cache(project):
    """Where it is limited, what an earlier run left in the caches does not help."""
    source = """
        import pytest, torch
        @pytest.mark.compiled(max_compile_time={limit})
        def test_it(compiled_benchmark):
            compiled_benchmark(lambda x: x.exp() * 3 + 1, torch.ones(64))
    """
    benches = Benches(project)
    for limit in (1000, 1000, 0.001, None):
        benches.test(source.format(limit=limit))
        run = benches.run(STORE)
    run.result.assert_outcomes(passed=1)
    assert [dynamo["measurement"]["cold"] for dynamo in benches.dynamo()[:3]] == [True] * 3
    assert all(dynamo["measurement"]["compile_seconds"] > 0.001 for dynamo in benches.dynamo())
    assert benches.verdicts()[2] is None


def test_slower_than_eager_is_a_note(benches):
    benches.times(4e-3)
    run = benches.run()
    run.result.assert_outcomes(passed=1)
    assert "compiled step is slower than eager: 0.50 times as fast" in run.record(NAME)["notes"]


def test_compiled_while_timing(benches):
    """It is a finding, and nothing of it is stored."""
    benches.lines("1 1 1 0 compiled")
    run = benches.run(STORE, *STRICT)
    run.result.assert_outcomes(failed=1)
    run.result.stdout.fnmatch_lines(["compiled while it was timed", "  the compiled call compiled in timed round 3"])
    assert benches.dynamo() == []


def test_compiled_while_timing_for_real(benches):
    """A function that compiles something in every call can't be timed."""
    benches.test(
        """
        import pytest, torch

        def fresh(x):
            return torch.compile(eval("lambda x: x + 1"), backend="eager")(x)

        @pytest.mark.compiled(backend="eager")
        def test_speed(compiled_benchmark):
            compiled_benchmark(torch.compiler.disable(fresh), torch.ones(8))
        """
    )
    benches.real_times()
    run = benches.run(STORE)
    run.result.assert_outcomes(failed=1)
    assert "compiles in every call" in run.text
    assert benches.dynamo() == []


# -- as the user wants it, and as it was found ----------------------------------------------------


def test_the_own_marker_is_honoured(benches):
    benches.append("test_it.py", "test_speed = pytest.mark.benchmark(group='mine', disable_gc=True)(test_speed)\n")
    run = benches.run(STORE)
    run.result.assert_outcomes(passed=1)
    (entry,) = benches.entries()
    assert (entry["group"], entry["options"]["disable_gc"]) == ("mine", True)
    assert entry["options"]["timer"] == "dynamo_replay"
    assert "benchmark 'mine': 1 tests" in run.text


def test_a_second_use_in_a_test_raises(benches):
    benches.append("test_it.py", "    compiled_benchmark(step, torch.ones(8))\n")
    run = benches.run(STORE)
    run.result.assert_outcomes(failed=1)
    assert "RuntimeError: compiled_benchmark can be used once in a test: make a test of each" in run.text
    assert benches.verdicts() == [None]


@pytest.mark.parametrize("way", ["timed", "disabled"])
def test_pedantic(benches, way):
    """``setup`` runs before each call, untimed, and gives its arguments; rounds are those that were asked for."""
    benches.test(
        """
        import time, torch
        made = []
        def setup():
            made.append(len(made))
            time.sleep(0.08)  # all rounds take longer than what is meant for rounds whose number is free
            return (torch.full((3,), float(len(made))),), {"scale": 2.0}
        def step(x, scale):
            return x.mul_(scale)
        def test_speed(compiled_benchmark):
            out = compiled_benchmark.pedantic(step, setup=setup, rounds=7)
            assert torch.equal(out, torch.full((3,), 2.0))
            print(len(made), "made")
        """
    )
    benches.real_times()
    options = ("--benchmark-disable",) if way == "disabled" else (STORE, "--benchmark-save-data")
    run = benches.run("--dynamo-backends=eager", "-s", *options)
    run.result.assert_outcomes(passed=1)
    if way == "disabled":
        assert "1 made" in run.text
    else:
        (entry,) = benches.entries()
        assert entry["stats"]["rounds"] == len(entry["stats"]["data"]) == 7
        made = int(run.text.partition(" made")[0].split()[-1].strip("."))
        assert made > 2 * 7


def test_arguments_and_setup_that_returns_them(benches):
    benches.test(
        """
        import torch
        made = []
        def setup():
            made.append(1)
            return (torch.ones(3),), {}
        def test_speed(compiled_benchmark):
            try:
                compiled_benchmark.pedantic(torch.sin, (torch.ones(3),), setup=setup)
            finally:
                assert len(made) == 1
        """
    )
    run = benches.run("--dynamo-backends=eager")
    run.result.assert_outcomes(failed=1)
    assert "TypeError: give arguments or let setup return them, not both" in run.text


@pytest.mark.parametrize("options", [(), ("--benchmark-disable",), ("-p", "no:benchmark")])
def test_all_is_as_one_call_leaves_it(benches, options):
    """State, arguments and random numbers, whether it was timed or not."""
    benches.test(
        """
        import copy, random
        import pytest, torch

        def run(model, x, counter):
            counter.add_(1)
            return model(x) + torch.rand(8, 4)

        @pytest.mark.compiled(backend="eager")
        def test_speed(compiled_benchmark):
            model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout()).train()
            x, counter = torch.randn(8, 4), torch.zeros(1)
            own = copy.deepcopy(model)
            torch.manual_seed(1)
            expected = run(own, x, torch.zeros(1))
            random_numbers, pythons = torch.get_rng_state(), random.getstate()
            torch.manual_seed(1)
            out = compiled_benchmark(run, model, x, counter)
            assert torch.equal(out, expected)
            assert torch.equal(torch.get_rng_state(), random_numbers)
            assert random.getstate() == pythons
            assert counter.item() == 1
            assert model[0].num_batches_tracked == 1
            assert torch.equal(model[0].running_mean, own[0].running_mean)
            assert all(parameter.grad is None for parameter in model.parameters())
            out.sum().backward()
        """
    )
    benches.real_times()
    benches.run(*options).result.assert_outcomes(passed=1)


@pytest.mark.parametrize("optimizer", ["SGD(model.parameters(), lr=0.1, momentum=0.9)", "Adam(model.parameters())"])
def test_a_training_step(benches, optimizer):
    """Parameters, gradients and the optimizer are those of one step."""
    benches.test(
        f"""
        import copy
        import pytest, torch

        def made():
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 4)
            optimizer = torch.optim.{optimizer}

            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            return model, optimizer, step

        @pytest.mark.compiled(backend="eager")
        def test_speed(compiled_benchmark):
            x = torch.randn(8, 4)
            model, optimizer, step = made()
            step(x)
            found, own, fast = made()
            compiled_benchmark(fast, x)
            for one, other in zip(model.parameters(), found.parameters()):
                torch.testing.assert_close(one, other)
                torch.testing.assert_close(one.grad, other.grad)
            for one, other in zip(optimizer.state.values(), own.state.values()):
                assert one.keys() == other.keys()
                torch.testing.assert_close(one, other)
        """
    )
    benches.real_times()
    run = benches.run(STORE)
    run.result.assert_outcomes(passed=1)
    assert len(benches.dynamo()) == 1


@pytest.mark.parametrize(
    "model",
    [
        # Writes to another buffer from the third call on.
        """
        @torch.compiler.disable
        def follow(self, y):
            self.calls += 1
            if self.calls > 2:
                self.center.copy_(y.detach().mean(0))

        def forward(self, x):
            y = self.linear(x)
            self.follow(y)
            return y - self.center
        """,
        # Steps each fourth call, with gradients that it gathers.
        """
        @torch.compiler.disable
        def step(self):
            self.calls += 1
            if self.calls % 4 == 0:
                with torch.no_grad():
                    self.linear.weight -= self.linear.weight.grad

        def forward(self, x):
            self.linear(x).square().mean().backward()
            self.step()
            return x + 1
        """,
        # Now and then, and nothing else.
        """
        @torch.compiler.disable
        def maybe(self):
            if torch.rand(()) > 0.9:
                self.center += 1

        def forward(self, x):
            self.maybe()
            return x + 1
        """,
    ],
    ids=["later", "gathers", "random"],
)
def test_what_only_later_calls_change_is_put_back(benches, model):
    benches.test(
        f"""
        import pytest, torch

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(8, 8)
                self.register_buffer("calls", torch.zeros((), dtype=torch.long))
                self.register_buffer("center", torch.zeros(8))
{textwrap.indent(textwrap.dedent(model), 12 * " ")}
        @pytest.mark.compiled(backend="eager", max_breaks=None)
        def test_speed(compiled_benchmark):
            torch.manual_seed(0)
            model = Model()
            weight = model.linear.weight.detach().clone()
            torch.manual_seed(0)  # none of the first numbers is above 0.9
            compiled_benchmark(model, torch.ones(4, 8))
            assert model.calls <= 1
            assert not model.center.any()
            assert torch.equal(model.linear.weight, weight)
        """
    )
    benches.real_times()
    run = benches.run(STORE)
    run.result.assert_outcomes(passed=1)
    assert len(benches.dynamo()) == 1


def test_large_state_that_later_calls_change_is_told(benches):
    """A model of many gigabytes is not copied because of a cache beside it; that it stays as it is can be seen."""
    benches.append("conftest.py", "from pytest_dynamo import start\npatch.setattr(start, 'KEPT', 0)\n")
    benches.test(
        """
        import pytest, torch

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                for name in ("calls", "center", "large"):
                    self.register_buffer(name, torch.zeros(8))

            def forward(self, x):
                self.calls += 1
                self.center += torch.relu(self.calls[0] - 2)
                return x + self.large

        class Later(Model):
            @torch.compiler.disable
            def follow(self):
                if self.calls[0] > 2:
                    self.center += 1

            def forward(self, x):
                self.calls += 1
                self.follow()
                return x + self.large

        @pytest.mark.compiled(backend="eager", max_breaks=None)
        @pytest.mark.parametrize("model", [Model, Later])
        def test_speed(compiled_benchmark, model):
            compiled_benchmark(model(), torch.ones(8))
        """
    )
    benches.real_times()
    run = benches.run(STORE)
    run.result.assert_outcomes(passed=2)
    told = "buffer center is not as one call leaves it: others changed it"
    assert not any(told in note for note in run.record("test_speed[eager-Model]")["notes"])
    assert f"Later: {told}" in run.record("test_speed[eager-Later]")["notes"]


def test_setup_fills_what_the_call_uses_up(benches):
    """It may do so in the arguments that were given; they end as the one compared call left them."""
    benches.test(
        """
        import pytest, torch

        @torch.compiler.disable
        def note(todo):
            with open("seen", "a") as file:
                file.write(f"{len(todo)} ")

        def drain(todo, x):
            note(todo)
            while todo:
                x = x * todo.pop()
            return x

        @pytest.mark.compiled(backend="eager", max_breaks=None)
        def test_speed(compiled_benchmark):
            todo, x = [], torch.ones(4)
            def setup():
                todo[:] = [2.0] * 3
            compiled_benchmark.pedantic(drain, (todo, x), setup=setup, rounds=5)
            assert todo == []
        """
    )
    benches.real_times()
    benches.run(STORE).result.assert_outcomes(passed=1)
    assert set((benches.path / "seen").read_text().split()) == {"3"}


def test_what_setup_returns_is_as_one_call_left_it(benches):
    benches.test(
        """
        import pytest, torch

        def count(x):
            return x.add_(1)

        @pytest.mark.compiled(backend="eager")
        def test_speed(compiled_benchmark):
            x = torch.zeros(4)
            compiled_benchmark.pedantic(count, setup=lambda: ((x,), {}), rounds=5)
            assert x.tolist() == [1.0] * 4
        """
    )
    benches.real_times()
    benches.run(STORE).result.assert_outcomes(passed=1)


def test_setup_comes_before_the_call_whose_memory_is_measured(benches):
    """As on a GPU, where that calls once more."""
    benches.append("conftest.py", "patch.setattr(profiling, 'peak_bytes', lambda call, device: (call(), 1)[1])\n")
    benches.test(
        """
        import pytest, torch

        def take(queue, x):
            return x * queue.pop()

        @pytest.mark.compiled(backend="eager")
        def test_speed(compiled_benchmark):
            compiled_benchmark.pedantic(take, setup=lambda: (([2.0], torch.ones(4)), {}), rounds=5)
        """
    )
    benches.real_times()
    benches.run(STORE).result.assert_outcomes(passed=1)


# -- without use ----------------------------------------------------------------------------------


def test_unused_it_is_not_imported(benches):
    """Neither torch nor what benchmarks need, with pytest-benchmark in use for other tests."""
    benches.test(
        """
        import sys
        def test_it(benchmark):
            benchmark(sum, [1])
            heavy = {"torch", *(f"pytest_dynamo.{name}" for name in ("benchmark", "replay", "detection", "history"))}
            assert not heavy & set(sys.modules)
        """
    )
    (benches.path / "conftest.py").unlink()
    run = benches.run("--benchmark-max-time=0.01", json_report=False, subprocess=True)
    run.result.assert_outcomes(passed=1)
    assert "dynamo" not in run.text.partition("test session starts")[2].partition("collected")[2]


def test_a_benchmark_that_is_never_called_fails(project) -> None:
    run = project.test(
        """
        def test_it(compiled_benchmark):
            pass
        """,
        "-p",
        "no:benchmark",
    )
    run.result.assert_outcomes(failed=1)
    run.result.stdout.fnmatch_lines(["*compiled_benchmark was never called: give it a function and its arguments*"])


def test_eager_is_eager_where_a_part_is_compiled(project) -> None:
    """What is compiled within the function runs in eager mode on eager's side, as in the comparison."""
    run = project.test(
        """
        import pytest, torch

        ran = []

        def counting(graph, inputs):
            def code(*args):
                ran.append(1)
                return graph(*args)
            return code

        part = torch.compile(torch.sin, backend=counting)

        @pytest.mark.compiled(backend="eager")
        def test_it(compiled_benchmark):
            compiled_benchmark(lambda x: part(x) + 1, torch.ones(8))
            assert ran == []
            part(torch.ones(8))
            assert ran == [1]
        """
    )
    run.result.assert_outcomes(passed=1)


def test_the_fixture_of_pytest_benchmark_still_keeps_time(project) -> None:
    """A test may name ours and use theirs: until samples are replayed the clock is one."""
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(backend="eager")
        def test_it(compiled_benchmark, benchmark):
            benchmark(lambda: 1)
            assert benchmark.stats.stats.min > 0
        """
    )
    run.result.assert_outcomes(failed=1)
    run.result.stdout.fnmatch_lines(["*compiled_benchmark was never called*"])


@pytest.mark.parametrize("returned", ["(x,)", "x", "3"])
def test_what_setup_may_not_return(project, returned: str) -> None:
    run = project.test(
        f"""
        import pytest, torch

        @pytest.mark.compiled(backend="eager")
        def test_it(compiled_benchmark):
            x = torch.ones(8)
            with pytest.raises(TypeError, match=r"setup returns None or \\(args, kwargs\\), not"):
                compiled_benchmark.pedantic(torch.sin, setup=lambda: {returned})
            torch.compile(torch.cos, backend="eager")(x)
        """,
        "-W",
        "ignore",
    )
    assert "TypeError" not in run.text


def test_a_keyword_named_fn_is_the_functions_own(project) -> None:
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(backend="eager")
        def test_it(compiled_benchmark):
            assert compiled_benchmark(lambda x, fn: x * fn, torch.ones(1), fn=5).item() == 5
        """
    )
    run.result.assert_outcomes(passed=1)


def test_what_can_not_be_compiled_is_refused_in_its_own_name(project) -> None:
    run = project.test(
        """
        import pytest, torch

        def test_it(compiled_benchmark):
            compiled_benchmark(torch.ones(3))
        """
    )
    run.result.stdout.fnmatch_lines(["*compiled_benchmark() takes a callable or a module, not Tensor*"])


def test_projects_below_the_current_folder_have_series_of_their_own(benches) -> None:
    """Two of them, each with an ini file, may have tests of one node id and one storage."""
    for name in ("a", "b"):
        folder = benches.path / name
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n")
        for file in ("conftest.py", "test_it.py", "times"):
            (folder / file).write_text((benches.path / file).read_text())
    for name in ("a", "b"):
        benches.run(STORE, name)
    fingerprints = [dynamo["fingerprint"] for dynamo in benches.dynamo()]
    assert [found.get("root") for found in fingerprints] == ["a", "b"]
    assert benches.verdicts() == ["no baseline", "no baseline"]
