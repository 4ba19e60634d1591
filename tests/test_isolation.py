"""§4.2: tests don't influence each other, and who leaves global state changed is named."""

from __future__ import annotations

import pytest


def test_config_that_the_body_left_changed_is_put_back_and_named(project):
    """Dynamo's configuration and stance are as before the test, and the summary says who changed them."""
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(backend="eager")
        def test_a(compiled):
            compiled(lambda x: x + 1)(torch.ones(1))
            torch._dynamo.config.recompile_limit = 3
            torch.compiler.set_stance("eager_on_recompile")

        def test_b():
            from torch._dynamo.eval_frame import _stance
            assert torch._dynamo.config.recompile_limit == 8
            assert _stance.stance == "default"
        """
    )
    run.result.assert_outcomes(passed=2)
    told = [note for record in run.report["records"] for note in record["notes"]]
    assert "left torch._dynamo.config.recompile_limit changed from 8 to 3; it was put back" in told
    assert any(note.startswith("left torch.compiler.stance changed from") for note in told)
    run.result.stdout.fnmatch_lines(["test_it.py::test_a[[]eager]: left torch._dynamo.config.recompile_limit*"])


def test_config_of_fixtures_is_left_alone(project):
    """What a wider fixture sets up stays, and what a test's own fixture takes back is no one's leftover."""
    run = project.test(
        """
        import pytest, torch

        @pytest.fixture(scope="module", autouse=True)
        def small_limit():
            torch._dynamo.config.recompile_limit = 5
            yield
            torch._dynamo.config.recompile_limit = 8

        @pytest.fixture
        def change():
            def change(name, value):
                before.append((name, getattr(torch._dynamo.config, name)))
                setattr(torch._dynamo.config, name, value)
            before = []
            yield change
            for name, value in before:
                setattr(torch._dynamo.config, name, value)

        @pytest.mark.compiled(backend="eager")
        def test_a(compiled, change):
            change("verbose", True)
            compiled(lambda x: x + 1)(torch.ones(1))

        @pytest.mark.compiled(backend="eager")
        def test_b(compiled):
            assert torch._dynamo.config.recompile_limit == 5
            compiled(lambda x: x + 1)(torch.ones(1))
        """
    )
    run.result.assert_outcomes(passed=2)
    assert [note for record in run.report["records"] for note in record["notes"]] == []
    import torch

    assert torch._dynamo.config.recompile_limit == 8


def test_random_state_and_grad_mode(project):
    """Random numbers and grad mode are after a test as before it; seeds of wider fixtures hold."""
    run = project.test(
        """
        import random
        import pytest, torch

        seen = []

        @pytest.fixture(scope="module", autouse=True)
        def seed():
            torch.manual_seed(7)
            random.seed(7)

        def draw():
            state = torch.get_rng_state(), random.getstate()
            value = torch.rand(()).item(), random.random()
            torch.set_rng_state(state[0]), random.setstate(state[1])
            return value

        @pytest.mark.compiled(backend="eager")
        @pytest.mark.parametrize("n", [1, 2])
        def test_a(compiled, n):
            seen.append(draw())
            assert torch.is_grad_enabled()
            torch.rand(5), random.random()
            torch.set_grad_enabled(False)
            compiled(lambda x: x + torch.rand(1))(torch.ones(1))

        def test_b():
            seen.append(draw())
            torch.manual_seed(7)
            random.seed(7)
            assert seen == [draw()] * 3
            assert torch.is_grad_enabled()
        """
    )
    run.result.assert_outcomes(passed=3)


def test_each_test_starts_uncompiled(project):
    """Ten tests over one function stay below the limit, and each reports its own break."""
    run = project.test(
        """
        import pytest, torch

        def shared(x, name):
            print(name)
            return x + len(name)

        @pytest.mark.compiled(backend="eager")
        @pytest.mark.parametrize("n", range(10))
        def test_it(compiled, n):
            compiled(shared)(torch.ones(1), "n" * n)
        """
    )
    run.result.assert_outcomes(passed=10)
    assert [(len(r["breaks"]), r["graphs"], r["limit_hits"]) for r in run.report["records"]] == [(1, 1, [])] * 10


def test_profile_guided_state_is_off(project, monkeypatch):
    """With a job id in the environment the second run counts what the first did."""
    monkeypatch.setenv("TORCH_COMPILE_JOB_ID", "nightly")
    monkeypatch.setenv("TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(project.pytester.path / "cache"))
    source = """
        import torch

        def test_two_sizes():
            f = torch.compile(lambda x: x.sin(), backend="eager")
            f(torch.ones(8)), f(torch.ones(9))
        """
    counts = []
    for _ in range(2):
        run = project.test(source, "--dynamo-max-recompiles=1", subprocess=True)
        run.result.assert_outcomes(passed=1)
        counts.append(run.record("test_two_sizes")["recompiles"][0]["count"])
    assert counts == [1, 1]


@pytest.mark.parametrize(
    ("environment", "setup", "by"),
    [
        ({"TORCHDYNAMO_DISABLE": "1"}, "", "TORCHDYNAMO_DISABLE=1"),
        ({"TORCH_COMPILE_DISABLE": "1"}, "", "TORCH_COMPILE_DISABLE=1"),
        ({}, 'torch.compiler.set_stance("force_eager")', 'torch.compiler.set_stance("force_eager")'),
        ({}, "torch._dynamo.config.disable = True", "torch._dynamo.config.disable"),
    ],
)
def test_switched_off_is_told(project, monkeypatch, environment, setup, by):
    """A test that must compile fails where compilation is switched off, and says by what."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run = project.test(
        f"""
        import pytest, torch, torch._dynamo

        @pytest.mark.compiled(backend="eager")
        def test_it(compiled):
            {setup}
            compiled(lambda x: x + 1)(torch.ones(1))
        """,
        subprocess=True,
    )
    run.result.assert_outcomes(failed=1)
    assert f"compilation is switched off by {by}" in run.text
