from __future__ import annotations


def test_a_break_fails_with_its_line(project):
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(backend="eager", max_breaks=0)
        def test_it(compiled):
            def f(x):
                print("hello")
                return x + 1
            compiled(f)(torch.ones(2))
        """
    )
    run.result.assert_outcomes(failed=1)
    run.result.stdout.fnmatch_lines(
        ["1 graph break, 0 allowed", "  test_it.py:6  Failed to trace builtin operator  [[]GB0059]"]
    )
    assert run.record("test_it[eager]")["breaks"][0]["line"] == 6
