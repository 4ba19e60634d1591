"""What parity means on a GPU: TF32, bfloat16, CUDA graphs in training, results that a replay overwrites."""

from __future__ import annotations

import pytest
import torch
from torch import nn


pytestmark = pytest.mark.cuda
MODES = ["default", "reduce-overhead", "max-autotune"]
GRAPHS = ["default", "reduce-overhead"]


def mlp() -> nn.Module:
    """Eight layers of 256 with GELU, which is launch-bound at batch 8."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU()))).cuda()


def checks_of(request: pytest.FixtureRequest) -> list:
    from pytest_dynamo.watch import run_key

    return request.node.stash[run_key].checks


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.compiled(mode=MODES, max_breaks=0)
def test_mlp_float32(compiled, request, precision):
    """A verdict in all modes, with and without TF32."""
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.no_grad():
            compiled(mlp().eval())(torch.randn(8, 256, device="cuda"))
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(check.passed for check in checks_of(request))


@pytest.mark.compiled(mode=MODES, max_breaks=0)
def test_resnet50_bfloat16(compiled, request):
    """Compiled is several times further from float64 than eager, and within the budget of bfloat16."""
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.resnet50().eval().cuda().bfloat16()
    with torch.no_grad():
        compiled(model)(torch.randn(16, 3, 224, 224, device="cuda", dtype=torch.bfloat16))
    told = [check for check in checks_of(request) if check.what == "values"]
    assert told
    assert all(check.passed for check in told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.compiled(mode=GRAPHS)
def test_training(compiled, request, dtype):
    """Forward and backward on clones are recorded and compared; the caller's own backward comes after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    model = model.cuda().to(dtype)
    fast = compiled(model)
    for _ in range(3):
        model.zero_grad()
        x = torch.randn(4, 3, 16, 16, device="cuda", dtype=dtype, requires_grad=True)
        fast(x).float().square().mean().backward()
        assert x.grad is not None
    checks = checks_of(request)
    assert {check.what for check in checks} >= {"values", "grad", "state"}
    assert not any(check.passed is False for check in checks)


def test_kept_results_are_told(project):
    """A result that the caller keeps and a replay overwrites is a hazard that the report names, with the mend."""
    run = project.test(
        """
        import pytest, torch

        @pytest.mark.compiled(mode="reduce-overhead")
        def test_it(compiled):
            fast = compiled(lambda x: x.sin() * 2)
            with torch.no_grad():
                kept = [fast(torch.randn(64, device="cuda")) for _ in range(3)]

        @pytest.mark.compiled(mode="reduce-overhead")
        def test_cloned(compiled):
            fast = compiled(lambda x: x.sin() * 2)
            with torch.no_grad():
                kept = [fast(torch.randn(64, device="cuda")).clone() for _ in range(3)]
        """
    )
    run.result.assert_outcomes(passed=2)
    notes = run.record("test_it[inductor-reduce-overhead]")["notes"]
    assert any("was overwritten by call 2" in note and "clone it" in note for note in notes)
    assert not any("overwritten" in note for note in run.record("test_cloned[inductor-reduce-overhead]")["notes"])


def test_lost_gradients_fail(project):
    """Replays overwrite what backward left in `.grad`: harmless if it is dropped, wrong if it is added to."""
    run = project.test(
        """
        import pytest, torch

        def steps(compiled, between):
            model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).cuda()
            fast = compiled(model)
            for _ in range(4):
                out = fast(torch.randn(8, 16, device="cuda"))
                between(model)
                out.square().mean().backward()
            del out
            with torch.no_grad():
                fast(torch.randn(8, 16, device="cuda"))
            return model

        @pytest.mark.compiled(mode="reduce-overhead")
        def test_dropped(compiled):
            steps(compiled, lambda model: model.zero_grad())

        @pytest.mark.compiled(mode="reduce-overhead")
        def test_added(compiled):
            steps(compiled, lambda model: None)

        @pytest.mark.compiled(mode="default")
        def test_added_without_graphs(compiled):
            steps(compiled, lambda model: None)
        """
    )
    run.result.assert_outcomes(passed=2, failed=1)
    run.result.stdout.fnmatch_lines(["*parameter 0.weight.grad*overwrit*"])
    checks = run.record("test_added[inductor-reduce-overhead]")["parity"]["checks"]
    assert {c["path"] for c in checks if c["passed"] is False} == {
        f"parameter {number}.{name}.grad" for number in (0, 2) for name in ("weight", "bias")
    }


BLOCKS = {
    "conv": lambda: (nn.Conv2d(3, 8, 3), (2, 3, 16, 16)),
    "conv, batch norm": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), (2, 3, 16, 16)),
    "two convs": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)), (2, 3, 16, 16)),
    "channels_last": lambda: (nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), (2, 4, 16, 16)),
    "pool": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(3)), (2, 3, 16, 16)),
    "attention": lambda: (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), (2, 7, 32)),
    "conv1d": lambda: (nn.Conv1d(8, 5, 3), (2, 8, 31)),
    "transposed conv": lambda: (nn.ConvTranspose2d(3, 5, 2, stride=2), (2, 3, 9, 9)),
    "group norm": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()), (2, 3, 16, 16)),
    "upsample": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2)), (2, 3, 9, 9)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.compiled(mode=["default", "max-autotune-no-cudagraphs"], check_stride=True, grad=False)
def test_strides(compiled, name, dtype):
    """Layout optimisation and padding stay inside: results have eager's strides."""
    torch.manual_seed(0)
    module, shape = BLOCKS[name]()
    with torch.no_grad():
        compiled(module.cuda().to(dtype).eval())(torch.randn(shape, device="cuda").to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.compiled(mode=["default", "max-autotune-no-cudagraphs"], grad=False)
def test_padded_rows_pass(compiled, request, dtype):
    """Inductor pads the rows of a linear layer if its own timing says so: why strides are not judged by default."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 17)).cuda().to(dtype).eval()
    with torch.no_grad():
        out = compiled(module)(torch.randn(5, 33, device="cuda").to(dtype))
    assert out.stride() in {(17, 1), (20, 1), (24, 1)}
    assert all(check.passed for check in checks_of(request) if check.what in ("values", "stride"))


def test_tf32_in_other_convolutions_than_eagers(project):
    """Which kernels use TF32 is up to heuristics: eager's depthwise convolution does not, another one may."""
    run = project.test(
        """
        import pytest, torch
        from torch.nn.functional import conv2d

        def rounded(x):  # ten binary digits after the point
            return ((x.contiguous().view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)

        def tf32(graph, example_inputs):
            def run(x, w):
                return (conv2d(rounded(x).double(), rounded(w).double(), groups=16).float(),)
            return run

        @pytest.mark.parametrize("allowed", [True, False])
        @pytest.mark.compiled(backend=tf32)
        def test_it(compiled, allowed):
            x, w = torch.randn(4, 16, 16, 16, device="cuda"), torch.randn(16, 1, 3, 3, device="cuda")
            before = torch.backends.cudnn.allow_tf32
            torch.backends.cudnn.allow_tf32 = allowed
            try:
                compiled(lambda x, w: conv2d(x, w, groups=16))(x, w)
            finally:
                torch.backends.cudnn.allow_tf32 = before
        """
    )
    run.result.assert_outcomes(passed=1, failed=1)
    run.result.stdout.fnmatch_lines(["FAILED *tf32-False*"])


def test_another_device_and_other_values(project):
    """Both are told: a result on the CPU is compared with eager's on the GPU all the same."""
    run = project.test(
        """
        import pytest, torch

        def elsewhere(graph, example_inputs):
            return lambda *args: tuple(out.cpu() + 1 for out in graph(*args))

        @pytest.mark.compiled(backend=elsewhere)
        def test_it(compiled):
            compiled(lambda x: x * 2)(torch.randn(64, device="cuda"))
        """
    )
    run.result.assert_outcomes(failed=1)
    told = "*out  device: compiled device(type='cpu'), eager device(type='cuda', index=0)"
    run.result.stdout.fnmatch_lines([told, "*out  values: 64 of 64 elements*"])
