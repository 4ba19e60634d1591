"""What cases in ``tests/cases`` say only in words, and where torch differs from what they say.

The only place that names cases, as data for ``test_cases.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch


#: Version of torch, as deviations name it.
TORCH = ".".join(torch.__version__.split(".")[:2])


@dataclass(frozen=True)
class Deviation:
    """An expectation of a case that does not hold on some versions of torch; what is seen instead."""

    case: str
    #: Versions (major.minor) on which it was seen.
    torch: tuple[str, ...]
    #: Replaces fields of the case's ``EXPECT``; fields that are dicts are merged.
    expect: Mapping[str, Any]
    #: Torch alone, without this plugin, and what it told.
    command: str
    output: str
    #: The oldest Python on which it was seen, if it is not the same on all.
    python: tuple[int, int] = (3, 0)


def calling(case: str, backend: str, environment: str = "") -> str:
    """Command that compiles a case with torch alone and makes its calls."""
    code = (
        f"import {case} as case, torch; fn, calls = case.make(); step = torch.compile(fn, backend='{backend}'); "
        "[print(step(*args)) for args, _ in calls]"
    )
    return f'{environment}python -c "{code}"'


DEVIATIONS: list[Deviation] = [
    Deviation(
        "a06_numpy_branch_in_loop",
        torch=("2.11",),
        python=(3, 12),
        expect={"breaks": 3, "skipped_frame": False, "graphs": 3, "recompiles": 1, "recompiles_logged": 1},
        command=calling("a06_numpy_branch_in_loop", "eager", "TORCH_LOGS=graph_breaks "),
        output="three times Graph break in user code at a06_numpy_branch_in_loop.py:18, in [0/0], [1/0] and [1/1]: "
        "the frame is left in the loop, not skipped",
    ),
    Deviation(
        "b13_fresh_function_object_every_call",
        torch=("2.11",),
        expect={
            "reasons": [
                (
                    "fn | - 0/0: ___check_obj_id(score_mod.__code__, 140492236064640), "
                    'type=<code object mod at 0x7fc6e5d30780, file "<string>", line 1>'
                )
            ]
        },
        command=calling("b13_fresh_function_object_every_call", "eager", "TORCH_LOGS=recompiles "),
        output="Recompiling function fn, triggered by 0/0: ___check_obj_id(score_mod.__code__, 140492236064640), "
        'type=<code object mod at 0x7fc6e5d30780, file "<string>", line 1>',
    ),
    Deviation(
        "c11_select_out_of_range",
        torch=("2.11",),
        expect={
            "graphs": 1,
            "parity_by_backend": {"inductor": "DIFF: missing-exception"},
            "raises": {"inductor": {"call0": "eager IndexError / compiled ok"}},
        },
        command=calling("c11_select_out_of_range", "inductor"),
        output="a tensor, where eager raises IndexError; with backend eager the captured graph raises when it runs",
    ),
    Deviation(
        "c13_caught_index_error_path",
        torch=("2.11",),
        expect={
            "raises": {
                backend: {"call0": "eager ok / compiled TorchRuntimeError"}
                for backend in ("eager", "aot_eager", "inductor")
            }
        },
        command=calling("c13_caught_index_error_path", "eager"),
        output="TorchRuntimeError: RuntimeError when making fake tensor call",
    ),
    Deviation(
        "c40_out_dtype_cast_div_out",
        torch=("2.11",),
        expect={
            "graphs": 1,
            "parity_by_backend": {
                "eager": "equal",
                "aot_eager": "DIFF: missing-exception",
                "inductor": "DIFF: missing-exception",
            },
            "raises": {
                "eager": {"call0": "same RuntimeError"},
                "aot_eager": {"call0": "eager RuntimeError / compiled ok"},
                "inductor": {"call0": "eager RuntimeError / compiled ok"},
            },
        },
        command=calling("c40_out_dtype_cast_div_out", "aot_eager"),
        output="a tensor, where eager raises RuntimeError; with backend eager that RuntimeError when the graph runs",
    ),
    Deviation(
        "c45_param_requires_grad_toggled",
        torch=("2.11",),
        expect={"graphs": 1, "recompiles": 0, "recompiles_logged": 0, "reasons": []},
        command=calling("c45_param_requires_grad_toggled", "eager", "TORCH_LOGS=recompiles ")
        + ", with before_call(i, fn, args, {}) before each call",
        output="four tensors from one graph, and no recompile: the flag of a parameter is not guarded",
    ),
    Deviation(
        "a20_filter_and_collections",
        torch=("2.11", "2.13"),
        expect={
            "breaks": 1,
            "where": ["a20_filter_and_collections.py:14 sort with non-constant keys"],
        },
        command='TORCH_LOGS=graph_breaks python -c "import a20_filter_and_collections as case, torch; '
        "fn, calls = case.make(); torch.compile(fn, backend='eager')(*calls[0][0])\"",
        output="Graph break in user code at a20_filter_and_collections.py:14, sort with non-constant keys, GB0207: "
        "the items of a dict, which are tuples, are sorted",
    ),
    Deviation(
        "c06_random_shuffle_frozen",
        torch=("2.11", "2.13"),
        expect={
            "breaks": 1,
            "graphs": 3,
            "recompiles": 2,
            "recompiles_logged": 2,
            "where": ["c06_random_shuffle_frozen.py:22 Attempted to call function marked as skipped"],
            "reasons": ["fn | - 1/0: order[1] == 2", "fn | - 1/1: order[0] == 4 | - 1/0: order[1] == 2"],
            # The break leaves the shuffle to Python, so nothing is frozen.
            "parity_by_backend": {"eager": "equal", "aot_eager": "equal", "inductor": "equal"},
        },
        command='TORCH_LOGS=graph_breaks,recompiles python -c "import c06_random_shuffle_frozen as case, random, '
        "torch; random.seed(0); fn, calls = case.make(); step = torch.compile(fn, backend='eager'); "
        '[print(step(*args)) for args, _ in calls]"',
        output="Graph break in user code at c06_random_shuffle_frozen.py:22, Attempted to call function marked as "
        "skipped, GB0007; Recompiling function torch_dynamo_resume_in_fn_at_22: 1/0: order[1] == 2, then "
        "1/1: order[0] == 4; the three results and Python's random state equal eager's, with every backend",
    ),
    Deviation(
        "c28_integer_division_by_zero",
        torch=("2.11",),
        expect={"killed_by_backend": {"inductor": "SIGFPE"}},
        command='python -c "import c28_integer_division_by_zero as case, torch; fn, calls = case.make(); '
        "torch.compile(fn, backend='inductor')(*calls[0][0])\"",
        output="Floating point exception: the process ends by signal 8 (CPU, Python 3.12); newer versions raise",
    ),
]


@dataclass(frozen=True)
class Cuda:
    """CUDA graphs of a case, read from its description."""

    recompiles: int = 0
    breaks: int = 0
    #: None: some, the case does not tell how many.
    recorded: int | None = None
    #: Reason and code of the line to blame, for each graph that is not recorded.
    skips: tuple[tuple[str, str], ...] = ()
    #: Whether the case lets one expect that values agree.
    parity: bool = True
    #: Whether an output of the first call holds the numbers of the last, if it is read after that.
    overwritten: bool = False


CUDA: dict[str, Cuda] = {
    # Four calls of one size. Outputs that were kept and overwritten must not look like wrong values.
    # Torch 2.11 does not raise when they are read: all four show the last one's numbers.
    "d01_output_overwritten_by_next_run": Cuda(recorded=1, overwritten=True),
    # One recording for each of 12 sizes of one compiled graph.
    "d03_one_recording_per_size": Cuda(recorded=12),
    # Torch 2.11 breaks the graph at `cache[pos] = x` (GB0033: the position is a tensor), so nothing that is
    # mutated is left to record, and what follows is recorded. tests/test_cudagraphs.py has a mutation that stays.
    "d05_mutated_input_is_skipped": Cuda(breaks=1, recorded=1),
    # A new parameter before each of 6 calls: recorded again, far from the limit of 128.
    # Six addresses, each with a graph of the forward and one of the backward.
    "d06_static_address_changes_rerecord": Cuda(recorded=12),
    # Split around the operator, not skipped.
    "d08_nonzero_is_not_capturable": Cuda(),
    # One recording for each of 8 sizes. A sum over millions of elements may be rounded otherwise.
    "d10_memory_grows_with_recordings": Cuda(recorded=8, parity=False),
}


@dataclass(frozen=True)
class Said:
    """One run of a mini project with this plugin."""

    args: tuple[str, ...]
    outcomes: Mapping[str, int]
    #: Name of the case's arguments.
    key: str = "ARGS"
    exit_code: int = 0
    #: Files of our own beside those of the case, for what it asks of a fixture; run with them.
    files: Mapping[str, str] = field(default_factory=dict)
    #: Words of the output.
    output: tuple[str, ...] = ()
    #: Number of tests with a record.
    records: int | None = None
    #: What every record says, and what those of single tests say.
    every: Mapping[str, Any] = field(default_factory=dict)
    each: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


CLEAN: Mapping[str, Any] = {"breaks": [], "recompiles": 0, "limit_hits": 0, "findings": []}

_WERROR = """
import functools, zlib, torch, pytest

pytestmark = pytest.mark.compiled(backend="eager")

@functools.lru_cache
def table(n):
    return n + 1

@pytest.mark.compiled(backend=["eager", "inductor"])
def test_first_site(compiled):
    assert compiled(lambda x: x * table(3))(torch.ones(1)).item() == 4

def test_same_site_again(compiled):
    assert compiled(lambda x: x * table(3))(torch.ones(1)).item() == 4

def test_c_extension(compiled):
    compiled(lambda x: x * (zlib.crc32(b"a") % 3))(torch.ones(1))
"""

_VACUOUS = """
import torch, pytest

@pytest.mark.compiled(backend="eager")
def test_fixture(compiled):
    compiled(lambda x: x * 2)(torch.ones(2))
"""

PROJECTS: dict[str, tuple[Said, ...]] = {
    "f01_no_reset_second_test_hits_limit": (
        Said(
            ("--dynamo-max-breaks=0", "--dynamo-max-recompiles=0"),
            {"passed": 10},
            records=10,
            every={**CLEAN, "frames": 1},
        ),
    ),
    "f03_counters_leak_between_tests": (
        Said(
            (),
            {"passed": 1, "failed": 1},
            exit_code=1,
            each={
                "test_counters.py::test_a_has_a_break": {"breaks": [("test_counters.py", 6, None)]},
                "test_counters.py::test_b_has_none": {"breaks": [], "frames": 1},
            },
        ),
    ),
    "f05_unittest_testcase_and_class_scope": (
        # Nothing is capped, so nothing is reset: the outcomes are those without this plugin.
        Said((), {"passed": 3, "failed": 1}, exit_code=1, every=CLEAN),
        # Under a cap what a class compiled is compiled again in its second test, which is no recompile.
        Said(
            ("--dynamo-max-recompiles=0",),
            {"passed": 2, "failed": 2},
            exit_code=1,
            records=4,
            every={**CLEAN, "frames": 1},
        ),
    ),
    "f06_async_test_and_threads": (
        Said(
            (),
            {"passed": 2, "failed": 1},
            exit_code=1,
            # Torch 2.11 raises the same AssertionError without a text.
            output=(
                "AssertionError" if TORCH == "2.11" else "Cannot generate resume function for generator, coroutine",
            ),
            each={
                "test_async.py::test_sync_model_inside_coroutine_compiles": {**CLEAN, "frames": 1},
                "test_async.py::test_stance_is_per_thread_or_process": {**CLEAN, "frames": 1},
            },
        ),
    ),
    "f08_doctest_and_assert_rewrite": (
        Said(
            ("--dynamo-max-breaks=0",),
            {"passed": 1, "failed": 1},
            exit_code=1,
            each={
                "mod.py::mod.double": CLEAN,
                "test_rewrite.py::test_assert_rewriting_changes_the_graph": {
                    "breaks": [("test_rewrite.py", 8, "assert rewriting")],
                    "findings": [],
                },
            },
        ),
        Said(("--dynamo-max-breaks=0",), {"passed": 1}, key="ARGS_PLAIN", records=1, every=CLEAN),
    ),
    "f10_warnings_as_errors": (
        # Code that a test compiles by itself stays under the test's own filters.
        Said((), {"failed": 3}, exit_code=1),
        Said(
            ("--deselect=test_werror.py",),
            {"passed": 4},
            files={"test_ours.py": _WERROR},
            records=4,
            output=(
                "UserWarning: Dynamo detected a call to a `functools.lru_cache`-wrapped function",
                "UserWarning: Dynamo does not know how to trace the builtin `zlib.crc32.`",
            ),
        ),
    ),
    "f11_xdist_shared_cache_dir": (
        Said(("--dynamo-max-breaks=0",), {"passed": 6}, records=4, every={**CLEAN, "frames": 1}),
    ),
    "f13_job_id_pgo_changes_recompile_count": (
        Said((), {"passed": 1}, records=1, every={"recompiles": 1, "frames": 2}),
    ),
    "f15_parametrize_explosion_time": (
        Said(("--dynamo-max-breaks=0",), {"passed": 36}, records=36, every={**CLEAN, "frames": 1, "timed": True}),
    ),
    "f16_compile_workers_outlive_tests": (Said((), {"passed": 1}, output=("after reset 0",)),),
    "f18_compile_disabled_in_ci_passes_vacuously": (
        Said(
            ("--dynamo-max-breaks=0",),
            {},
            exit_code=4,
            output=("--dynamo-max-breaks: compilation is switched off by TORCHDYNAMO_DISABLE=1",),
        ),
        Said(
            (),
            {"passed": 1, "failed": 1},
            exit_code=1,
            files={"test_ours.py": _VACUOUS},
            output=("compilation is switched off by TORCHDYNAMO_DISABLE=1",),
        ),
    ),
}

#: Cases about speed, with the tests of what they ask for: no input of theirs is needed for that.
ELSEWHERE: dict[str, str] = {
    "e01_no_synchronize": "test_timing.py::test_work_is_timed_and_not_its_launch",
    "e05_benchmark_under_xdist": "test_benchmark.py::test_where_nothing_is_timed",
    "e06_machine_info_knows_no_gpu": "test_benchmark.py::test_another_fingerprint_has_no_baseline",
    "e08_outputs_freed_and_gc_inside_timing": "test_timing.py::test_garbage_is_not_collected_in_rounds",
    "e10_autotune_choice_differs_between_runs": "test_detection.py::test_two_speeds_are_not_a_change",
    "e11_same_input_stays_in_l2": "test_timing.py::test_a_small_input_is_read_from_memory_each_time",
}

#: Cases that ask for something that this version does not have.
LATER: dict[str, str] = {
    "d10_memory_grows_with_recordings": "memory of CUDA graphs is not measured yet",
    "f15_parametrize_explosion_time": "needs --dynamo-capture-only",
}
