"""What earlier calls left and later ones overwrite, with memory of CUDA graphs replaced by what a CPU has."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from pytest_dynamo import _torch
from pytest_dynamo import kept
from pytest_dynamo.kept import Kept
from pytest_dynamo.kept import LeftGradients


def overwrite(tensor: torch.Tensor) -> None:
    """Write as a replay does: autograd's version counter does not see it."""
    tensor.untyped_storage().copy_((tensor.detach() + 1).untyped_storage())


def test_a_result_that_is_kept_is_told() -> None:
    watched = Kept()
    result = torch.ones(3)
    watched.add("f", 1, result)
    before = watched.before()
    overwrite(result)
    assert [(found.name, found.path, found.call) for found, _ in Kept.changed(before)] == [("f", "out", 1)]


def test_a_result_that_only_the_graph_still_holds_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed graph returns one tensor object each time, and keeps it."""
    watched = Kept()
    result = torch.ones(3)
    watched.add("f", 1, result)
    key = result.untyped_storage()._cdata
    monkeypatch.setattr(_torch, "held_by_cudagraphs_only", lambda found: found == key)
    assert watched.before() == []


@pytest.mark.parametrize(("limit", "value"), [("LIMIT", 1), ("BYTES", 40)])
def test_results_beyond_the_limits_are_told_while_they_live(monkeypatch, limit: str, value: int) -> None:
    monkeypatch.setattr(Kept, limit, value)
    watched = Kept()
    first, second = torch.ones(8), torch.ones(8)
    watched.add("f", 1, first)
    assert [result.call for result, _ in watched.before()] == [1]
    assert watched.unwatched is None
    watched.add("f", 2, second)
    assert [result.call for result, _ in watched.before()] == [2]
    assert watched.unwatched is not None
    del first
    assert [result.call for result, _ in watched.before()] == [2]
    assert watched.unwatched is None


def test_parts_of_one_storage_count_once(monkeypatch) -> None:
    monkeypatch.setattr(Kept, "BYTES", 40)
    watched = Kept()
    parts = list(torch.ones(8).unbind())
    watched.add("f", 1, parts)
    before = watched.before()
    assert watched.unwatched is None
    parts[0].data.zero_()
    assert len(list(Kept.changed(before))) == 8


def test_the_latest_results_that_live_are_watched(monkeypatch) -> None:
    """Results that are gone take no room."""
    monkeypatch.setattr(Kept, "LIMIT", 2)
    watched = Kept()
    result = torch.ones(3)
    watched.add("f", 1, result)
    watched.add("f", 2, [torch.ones(3) for _ in range(3)])
    watched.add("f", 3, torch.ones(3))
    assert [result.call for result, _ in watched.before()] == [1]


def test_what_is_not_watched_is_not_checked(project) -> None:
    run = project.test(
        """
        import pytest
        import torch
        from pytest_dynamo.kept import Kept

        def in_buffer(gm, inputs):
            kept = []
            def run(*args):
                out = list(gm(*args))
                if not kept:
                    kept.append(torch.empty_like(out[0]))
                out[0] = kept[0].copy_(out[0])
                return tuple(out)
            return run

        @pytest.mark.compiled(backend=in_buffer)
        @pytest.mark.parametrize("limit", [200, 100])
        def test_it(compiled, monkeypatch, limit):
            monkeypatch.setattr(Kept, "LIMIT", limit)
            fast = compiled(lambda x: [x * n for n in range(1, 123)])
            held = fast(torch.ones(8))
            fast(torch.zeros(8))
        """
    )
    run.result.assert_outcomes(failed=1, passed=1)
    run.result.stdout.fnmatch_lines(["*out?0? of call 1 of *overwritten*"])
    told = [record["not_checked"] for record in run.report["records"]]
    assert "the latest 100 in 256 MiB are watched" in str(told)


class Leaf:
    """A parameter whose gradient lies in what is taken for memory of a CUDA graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensor = torch.nn.Parameter(torch.ones(4))
        self.grad = torch.ones(4)
        self.tensor.grad = self.grad
        begin = self.grad.data_ptr()
        monkeypatch.setattr(kept, "private_pools", lambda: [(begin, begin + 16)])
        self.left = LeftGradients()

    def replay(self, call: int) -> None:
        before = self.left.find([("parameter w", self.tensor)])
        assert [found.path for found in before] == ["parameter w.grad"]
        overwrite(self.grad)
        self.left.overwritten(before, call)


def test_an_overwritten_gradient_that_is_added_to_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = Leaf(monkeypatch)
    leaf.replay(2)
    leaf.grad += 1
    leaf.left.look()
    assert leaf.left.used == {"parameter w.grad": 2}


def test_an_overwritten_gradient_that_is_dropped_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = Leaf(monkeypatch)
    leaf.replay(2)
    leaf.tensor.grad = torch.zeros(4)
    leaf.tensor.grad += 1
    leaf.left.look()
    assert leaf.left.used == {}


def test_a_gradient_that_no_call_overwrites_may_be_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = Leaf(monkeypatch)
    before = leaf.left.find([("parameter w", leaf.tensor)])
    leaf.left.overwritten(before, 2)
    leaf.grad += 1
    leaf.left.look()
    assert leaf.left.used == {}


def test_a_gradient_elsewhere_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "private_pools", list)
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    assert LeftGradients().find([("parameter w", parameter)]) == []


def test_a_test_whose_gradients_were_lost_fails(project) -> None:
    run = project.test(
        """
        from pytest_dynamo.kept import LeftGradients

        def test_it(compiled, request):
            import torch
            from pytest_dynamo.watch import run_key

            compiled(torch.sin)(torch.ones(3))
            left = request.node.stash[run_key].left
            assert isinstance(left, LeftGradients)
            left.used["parameter w.grad"] = 2
        """
    )
    run.result.assert_outcomes(failed=1)
    run.result.stdout.fnmatch_lines(["*gradients were lost*", "*parameter w.grad  overwritten: call 2 overwrote it*"])


# -- torch's own graphs, pretended ----------------------------------------------------------------


class Output:
    """An output of a graph, as torch refers to it."""

    def __init__(self, key: int, *, gone: bool) -> None:
        self.ref = SimpleNamespace(cdata=key)
        self.expired = lambda: gone


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What manages graphs: one root with a child, whose outputs are 1, 2 and 3; nobody holds 2 any more."""
    child = SimpleNamespace(outputs_weakrefs=[Output(3, gone=False)], children={})
    outputs = [None, Output(1, gone=False), Output(2, gone=True)]
    root = SimpleNamespace(outputs_weakrefs=outputs, children={0: [child]})
    made = SimpleNamespace(roots={0: [root]}, path_state="execution")
    states = SimpleNamespace(EXECUTION="execution")
    trees = SimpleNamespace(ExecutionState=states, get_manager=lambda device, create_if_none_exists: made)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return made


def test_who_holds_an_output_of_a_graph(manager: SimpleNamespace) -> None:
    assert [_torch.held_by_cudagraphs_only(key) for key in (1, 2, 3, 4)] == [False, True, False, False]
    del manager.roots  # a torch that we do not understand
    assert not _torch.held_by_cudagraphs_only(2)


def test_whether_the_last_call_was_replayed(manager: SimpleNamespace) -> None:
    assert _torch.last_call_replayed() is True
    manager.path_state = "recording"
    assert _torch.last_call_replayed() is False
    del manager.path_state
    assert _torch.last_call_replayed() is None


def test_without_cuda_there_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert _torch.last_call_replayed() is False
    assert not _torch.held_by_cudagraphs_only(2)
