"""CUDA graphs: recordings, replays and skips on a GPU; "not checked" without one."""

from __future__ import annotations

import pytest


@pytest.mark.cuda
def test_one_call_records_and_replays(project):
    """A single ``fast(x)`` warms up, records and replays, and is compared each time."""
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(mode=["reduce-overhead", "max-autotune-no-cudagraphs"], max_cudagraph_skips=0)
        def test_it(compiled):
            model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).cuda()
            fast = compiled(model)
            with torch.no_grad():
                out = fast(torch.randn(8, 64, device="cuda"))
            assert out.shape == (8, 64)
        """
    )
    run.result.assert_outcomes(passed=2)
    graphs = run.record("test_it[inductor-reduce-overhead]")["cudagraphs"]
    assert graphs == {"expected": True, "recorded": 1, "replayed": 1, "skips": []}
    graphs = run.record("test_it[inductor-max-autotune-no-cudagraphs]")["cudagraphs"]
    assert (graphs["expected"], graphs["recorded"]) == (False, 0)


@pytest.mark.cuda
def test_a_mutated_input_is_a_skip_with_its_line(project):
    """The skip names torch's reason and the line that writes to the input."""
    run = project.test(
        """
        import pytest, torch

        def put(cache, x):
            cache.add_(x)
            return cache.sum(0)

        @pytest.mark.compiled(mode="reduce-overhead", max_cudagraph_skips=0)
        def test_it(compiled):
            compiled(put)(torch.zeros(4, 8, device="cuda"), torch.ones(8, device="cuda"))
        """
    )
    run.result.assert_outcomes(failed=1)
    (skip,) = run.record("test_it[inductor-reduce-overhead]")["cudagraphs"]["skips"]
    assert "mutated inputs" in skip["reason"]
    assert (skip["file"], skip["line"]) == ("test_it.py", 4)
    run.result.stdout.fnmatch_lines(["1 CUDA-graph skip, 0 allowed", "  test_it.py:4  no CUDA graph: mutated inputs*"])


@pytest.mark.cuda
def test_each_size_is_recorded_and_compared(project):
    """Outputs of earlier calls stay what they were when compared, for every size and call."""
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(mode="reduce-overhead", dynamic=True)
        def test_it(compiled):
            w = torch.randn(64, 64, device="cuda")
            fast = compiled(lambda x, w: (x @ w).relu())
            for n in (10, 20, 30):
                fast(torch.randn(n, 64, device="cuda"), w)
        """
    )
    run.result.assert_outcomes(passed=1)
    record = run.record("test_it[inductor-reduce-overhead-dynamic]")
    assert record["cudagraphs"]["recorded"] == 3
    assert record["cudagraphs"]["replayed"] == 3
    assert record["recompiles"] == []
    assert record["parity"]["calls"] == 3


@pytest.mark.cuda
def test_a_fault_in_the_replay_only_is_caught(project):
    """A planted backend that answers right twice and wrong from the third call on is found."""
    run = project.test(
        """
        import pytest, torch

        def stale(gm, example_inputs):
            calls = []
            def run(*args):
                calls.append(1)
                out = gm(*args)
                return tuple(o + 1 for o in out) if len(calls) > 2 else out
            return run

        @pytest.mark.compiled(backend=stale)
        def test_it(compiled):
            from dataclasses import replace
            fast = compiled(lambda x: x * 2)
            fast._checker._uses_cudagraphs = lambda *a: True
            fast(torch.randn(4, device="cuda"))
        """
    )
    run.result.assert_outcomes(failed=1)
    assert "differs from eager in call 1 (CUDA-graph replay) [stale]" in run.text


@pytest.mark.cuda
def test_training_with_cuda_graphs(project):
    """Forward and backward of a training step pass, and the user's backward works."""
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(mode="reduce-overhead", max_breaks=0, rtol=1e-3, atol=1e-3)
        def test_it(compiled):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4))
            model.cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            fast = compiled(model)
            x = torch.randn(16, 32, device="cuda")
            losses = []
            for _ in range(4):
                optimizer.zero_grad()
                loss = fast(x).pow(2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert losses[-1] < losses[0]
            assert model[1].num_batches_tracked == 4
        """
    )
    run.result.assert_outcomes(passed=1)


def test_without_cuda_it_is_not_checked(project):
    """On a CPU a mode with CUDA graphs passes, and says that they were not checked."""
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(mode="reduce-overhead", max_cudagraph_skips=0)
        def test_it(compiled):
            compiled(lambda x: x * 2)(torch.ones(3))
        """
    )
    run.result.assert_outcomes(passed=1)
    record = run.record("test_it[inductor-reduce-overhead]")
    assert len(record["not_checked"]) == 1
    assert record["not_checked"][0].startswith("CUDA graphs of <lambda>: ")
    run.result.stdout.fnmatch_lines(["1 test compiled, 1 graph, *, 1 not checked"])
