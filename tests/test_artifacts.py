"""Scripts that show a difference without pytest: they hold the graph, find the fault, and say when they can't."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config

from pytest_dynamo.artifacts import folder_of


RELU_BUG = {"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}


def written(project: Any) -> Path:
    (folder,) = (project.pytester.path / "out").iterdir()
    return folder


def rerun(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in another folder, with an environment of its own."""
    return subprocess.run(
        [sys.executable, str(folder / "repro.py")],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, **environment},
    )


def parity_of(run: Any) -> dict[str, Any]:
    (record,) = (r for r in run.report["records"] if r["phase"] == "call")
    return record["parity"]  # type: ignore[no-any-return]


def test_script_shows_the_difference(project: Any) -> None:
    """Values and gradients of the guilty graph of two; generated code and trace lie beside it."""
    with torch._inductor.config.patch(RELU_BUG):
        run = project.test(
            """
            import pytest, torch

            def f(x, net, scale):
                x = x * scale
                torch._dynamo.graph_break()
                return torch.relu(net(x)), 3

            @pytest.mark.compiled(grad=True)
            def test_it(compiled):
                x = torch.randn(3, 4).t()[1:]
                compiled(f)(x, torch.nn.Linear(3, 2), 1.5)
            """,
            "--dynamo-artifacts=out",
            "--dynamo-stage-timeout=0",
        )
    folder = written(project)
    assert parity_of(run)["repro"] == f"{folder / 'repro.py'} (run once: it shows the difference)"
    assert f"  repro: {folder / 'repro.py'}" in run.text
    source = (folder / "repro.py").read_text()
    assert "Graph 2 of 2" in source
    assert "torch.relu" in source
    assert "inject_relu_bug_TESTING_ONLY = 'accuracy'" in source
    assert "pytest_dynamo" not in [n.name for node in ast.walk(ast.parse(source)) for n in getattr(node, "names", ())]
    saved = torch.load(folder / "inputs.pt", weights_only=True)
    assert sum(saved["requires_grad"]) == 2
    assert "output 0 differs in run 1:" in (folder / "output.txt").read_text()
    assert "cpp_fused" in (folder / "output_code.log").read_text()
    assert len(list((folder / "trace").iterdir())) >= 1
    assert not list(folder.glob("*.tmp"))
    done = rerun(folder)
    assert done.returncode == 1
    assert "eager and compiled differ" in done.stdout
    # Without torch's planted fault the same script agrees: it is no constant answer.
    honest = folder / "repro.py"
    honest.write_text(
        source.replace("inject_relu_bug_TESTING_ONLY = 'accuracy'", "inject_relu_bug_TESTING_ONLY = None")
    )
    done = rerun(folder)
    assert (done.returncode, done.stdout) == (0, "eager and compiled agree\n")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"cpp.inject_relu_bug_TESTING_ONLY": "compile_error"}, "CppCompileError"),
        ({"cpp.inject_log1p_bug_TESTING_ONLY": "compile_error"}, None),
    ],
)
def test_compiled_raises(project: Any, fault: dict[str, str], told: str | None) -> None:
    """What the backend can't compile is located and has a script, as a wrong value has; what it can is not told."""
    with torch._inductor.config.patch(fault):
        run = project.test(
            """
            import pytest, torch

            @pytest.mark.compiled
            def test_it(compiled):
                compiled(lambda x: torch.relu(x * 2))(torch.randn(64))
            """,
            "--dynamo-artifacts=out",
        )
    if told is None:
        run.result.assert_outcomes(passed=1)
        return
    run.result.assert_outcomes(failed=1)
    folder = written(project)
    assert "  first diverging stage: inductor (capture, AOTAutograd, decompositions agree with eager)" in run.text
    assert parity_of(run)["repro"] == f"{folder / 'repro.py'} (run once: it shows the difference)"
    done = rerun(folder)
    assert done.returncode == 1
    assert done.stdout.startswith("compiled raised in run 1, eager did not:")
    assert told in done.stdout
    assert done.stdout.endswith("eager and compiled differ\n")


def test_backend_of_the_users_is_loaded(project: Any) -> None:
    """A backend that can be imported from its file is; inner graphs become inner modules."""
    run = project.test(
        """
        import pytest, torch
        from torch.utils.checkpoint import checkpoint

        def wrong(graph, example_inputs):
            return lambda *args: tuple(v + 1 for v in graph(*args))

        def f(x):
            return checkpoint(torch.sin, x, use_reentrant=False) * float("inf")

        @pytest.mark.compiled(backend=wrong)
        def test_it(compiled):
            compiled(lambda x: torch.sin(x))(torch.randn(3))
        """,
        "--dynamo-artifacts=out",
    )
    assert parity_of(run)["repro"].endswith("(run once: it shows the difference)")


@pytest.mark.parametrize(
    ("test", "why"),
    [
        (
            """
            def local(graph, example_inputs):
                return lambda *args: tuple(v + 1 for v in graph(*args))

            @pytest.mark.compiled(backend=functools.partial(local))
            def test_it(compiled):
                compiled(lambda x: x.sin())(torch.randn(3))
            """,
            "none: backend partial can't be imported by name",
        ),
        (
            """
            @pytest.mark.compiled(backend="eager")
            def test_it(compiled):
                compiled(lambda x: x.sin() + torch.compiler.is_compiling())(torch.zeros(3))
            """,
            "none: no captured graph differs by itself: the difference lies in what Dynamo does around the graphs",
        ),
    ],
    ids=["backend", "capture"],
)
def test_no_script(project: Any, test: str, why: str) -> None:
    """Where no script can be written, the report says why."""
    import textwrap

    run = project.test("import functools, pytest, torch\n" + textwrap.dedent(test), "--dynamo-artifacts=out")
    assert parity_of(run)["repro"] == why
    assert f"  repro: {why}" in run.text
    assert not (written(project) / "repro.py").exists()


def test_only_where_something_differs(project: Any) -> None:
    """A run without differences writes nothing, and a test without the option has no script."""
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(backend="eager")
        def test_it(compiled):
            compiled(torch.sin)(torch.randn(3))
        """,
        "--dynamo-artifacts=out",
    )
    assert parity_of(run)["repro"] is None
    assert not (project.pytester.path / "out").exists()


def test_counts_are_those_of_the_test(project: Any) -> None:
    """What the script's making compiles is in no count."""
    run = project.test(
        """
        import pytest, torch

        def wrong(graph, example_inputs):
            return lambda *args: tuple(v + 1 for v in graph(*args))

        @pytest.mark.compiled(backend=wrong)
        def test_it(compiled):
            compiled(torch.nn.Linear(2, 2))(torch.randn(3, 2))
        """,
        "--dynamo-artifacts=out",
    )
    (record,) = run.report["records"]
    assert (record["graphs"], record["frames"], record["breaks"], record["recompiles"]) == (1, 1, [], [])


def test_folders() -> None:
    """Names fit every file system, and unlike tests have unlike folders."""
    names = [
        *("a.py::test[x]", "a.py::test[y]", "a.py::test_x_", "a.py::test x", "a.py::test/x"),
        *("a.py::" + "x" * 300, "a.py::" + "x" * 301),
    ]
    folders = [folder_of("out", name) for name in names]
    assert len(set(folders)) == len(names)
    assert all(len(folder.name) < 140 and folder.parent == Path("out") for folder in folders)
    assert all(character not in folder.name for folder in folders for character in '[]:/ <>"|?*')


def test_bisect(project: Any) -> None:
    """Torch's bisector goes on from inductor to the lowering of one operation."""
    with torch._inductor.config.patch(RELU_BUG):
        run = project.test(
            """
            import pytest, torch

            @pytest.mark.compiled()
            def test_it(compiled):
                compiled(lambda x: torch.relu(x.sin()))(torch.randn(8))
            """,
            "--dynamo-bisect",
        )
    assert parity_of(run)["diagnosis"]["bisected"] == "inductor, lowerings, number 1 (relu)"
    assert "bisected to inductor, lowerings, number 1 (relu)" in run.text
