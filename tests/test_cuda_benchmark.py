"""``compiled_benchmark`` on a real GPU, with real times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmark_project import STORE
from benchmark_project import Benches


pytestmark = pytest.mark.cuda

GEMM = """
import pytest, torch
from pathlib import Path

TIMES = int((Path(__file__).parent / "products").read_text())

def work(a, b):
    for _ in range(TIMES):
        b = a @ b
    return torch.nn.functional.gelu(b)

@pytest.mark.compiled({marker})
def test_speed(compiled_benchmark):
    torch.manual_seed(0)
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(2))
    with torch.no_grad():
        compiled_benchmark(work, a, b)
"""


@pytest.fixture
def benches(project: Any) -> Benches:
    benches = Benches(project)
    benches.real_times()
    products(benches, 8)
    benches.test(GEMM.format(marker=""))
    return benches


def products(benches: Benches, count: int) -> None:
    (benches.path / "products").write_text(str(count))


def measured(benches: Benches) -> dict[str, Any]:
    found: dict[str, Any] = benches.dynamo()[-1]["measurement"]
    return found


def test_an_entry_of_a_gpu(benches: Benches) -> None:
    """What a CPU does not tell: the GPU's time and launches, memory, and on which GPU it was."""
    run = benches.run(STORE)
    run.result.assert_outcomes(passed=1)
    (dynamo,) = benches.dynamo()
    assert dynamo["verdict"] == "no baseline"
    assert {"device", "gpu", "memory_mib", "driver", "cuda", "torch", "triton"} <= set(dynamo["fingerprint"])
    assert "unknown" not in dynamo["fingerprint"].values()
    found = dynamo["measurement"]
    compiled, eager = found["compiled"], found["eager"]
    assert found["launch_bound"] is False
    assert found["replayed"] is False
    assert compiled["device_time"] == pytest.approx(compiled["time"]["median"], rel=0.1)
    assert compiled["host"]["median"] < compiled["time"]["median"]
    assert compiled["launches"] == eager["launches"] >= 8 + 1  # cuBLAS may fill memory for a product
    assert compiled["kernels"] != eager["kernels"]
    size = 4096 * 4096 * 2
    assert 2 * size <= compiled["peak_bytes"] <= 3 * size
    assert set(found["canaries"]) == {"matmul", "copy", "launches"}
    record = run.record("test_speed[inductor]")
    assert record["kernels"] == compiled["launches"]
    assert record["memory"]["compiled_bytes"] == compiled["peak_bytes"]


def test_replays_of_cuda_graphs_are_timed(benches: Benches) -> None:
    benches.test(GEMM.format(marker="mode='reduce-overhead'"))
    run = benches.run(STORE)
    run.result.assert_outcomes(passed=1)
    found = measured(benches)
    assert found["replayed"] is True
    assert found["launch_bound"] is False
    assert found["compiled"]["host"]["median"] < found["compiled"]["time"]["median"]


def test_slower_code_is_confirmed_by_fresh_processes(benches: Benches) -> None:
    """One product more of eight is 12 %: four accepted runs allow 15, two more are 25."""
    for _ in range(4):
        benches.run(STORE).result.assert_outcomes(passed=1)
    assert benches.verdicts() == ["no baseline", *["not slower"] * 3]
    products(benches, 10)
    run = benches.run(STORE)
    run.result.assert_outcomes(failed=1)
    assert "slower" in run.text
    assert benches.verdicts()[-1] == "slower"
    slow = benches.dynamo()[-1]
    assert len(slow["confirmed"]) == 2
    for one in [slow["first"], *slow["confirmed"]]:
        assert one["compiled"]["time"]["median"] == pytest.approx(
            1.25 * benches.dynamo()[0]["measurement"]["compiled"]["time"]["median"], rel=0.08
        )


def test_a_training_step_on_a_gpu(benches: Benches) -> None:
    benches.test(
        """
        import pytest, torch

        @pytest.mark.compiled(max_breaks=3)  # zero_grad, backward and step, in releases that trace none of them
        def test_speed(compiled_benchmark):
            torch.manual_seed(0)
            model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            x = torch.randn(4096, 1024, device="cuda")
            before = [parameter.detach().clone() for parameter in model.parameters()]

            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            compiled_benchmark(step, x)
            moved = [(a - b).abs().max().item() for a, b in zip(before, model.parameters())]
            assert max(moved) < 1e-2  # as one step leaves it, and not hundreds
            assert min(moved) > 0
        """
    )
    run = benches.run(STORE)
    run.result.assert_outcomes(passed=1)
    assert measured(benches)["compiled"]["launches"] > 8


def test_setup_before_each_call_on_a_gpu(benches: Benches) -> None:
    """It is not timed, though it works on the GPU too."""
    benches.test(
        """
        import pytest, torch

        @pytest.mark.compiled
        def test_speed(compiled_benchmark):
            a = torch.randn(4096, 4096, device="cuda")

            def setup():
                b = a
                for _ in range(5):
                    b = b @ a
                return (b,), {}

            compiled_benchmark.pedantic(lambda b: b + 1, setup=setup, rounds=10)
        """
    )
    run = benches.run(STORE)
    run.result.assert_outcomes(passed=1)
    # 128 MB are moved within 0.05 ms; five products take over 10.
    assert measured(benches)["compiled"]["time"]["median"] < 1e-3


def test_what_makes_its_tensors_itself_is_timed_on_the_gpu(benches: Benches) -> None:
    """Or the launches alone would be."""
    benches.test(
        """
        import pytest, torch

        def work():
            a = torch.ones(4096, 4096, device="cuda")
            return a @ a @ a

        @pytest.mark.compiled
        def test_speed(compiled_benchmark):
            compiled_benchmark(work)
        """
    )
    run = benches.run(STORE)
    run.result.assert_outcomes(passed=1)
    (dynamo,) = benches.dynamo()
    assert dynamo["fingerprint"]["device"] == "cuda"
    assert dynamo["measurement"]["compiled"]["time"]["median"] > 1e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu_is_timed_where_the_work_is_there(benches: Benches) -> None:
    benches.test(GEMM.format(marker="").replace('device="cuda"', 'device="cuda:1"'))
    run = benches.run(STORE)
    run.result.assert_outcomes(passed=1)
    found = measured(benches)
    assert found["launch_bound"] is False
    assert found["compiled"]["device_time"] == pytest.approx(found["compiled"]["time"]["median"], rel=0.1)
    assert found["compiled"]["peak_bytes"] >= 4096 * 4096 * 2
