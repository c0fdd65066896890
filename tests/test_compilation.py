"""Every kernel is compiled for cards that are not here: the interpreter takes much that the compiler does not.

Nothing is launched, so results are whatever lay in memory; it is the compiler that is asked.
"""

from __future__ import annotations

import ast
import contextlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from places import once

from triaccel_bench.assembly import Assembly
from triaccel_bench.configuration import compose
from triaccel_bench.data import DeviceData, ImageSet
from triaccel_bench.hardware import inspect
from triaccel_bench.kernels import backend
from triaccel_bench.kernels.affine import affine_norm_act
from triaccel_bench.kernels.backend import triton
from triaccel_bench.kernels.bookkeeping import StepScalars
from triaccel_bench.kernels.depthwise import depthwise_conv2d
from triaccel_bench.kernels.eigenvalues import largest_eigenvalues
from triaccel_bench.kernels.excite import excite, squeeze
from triaccel_bench.kernels.loss import cross_entropy, sampled_gradient
from triaccel_bench.kernels.moments import GradientMoments
from triaccel_bench.kernels.norm import batch_norm_act
from triaccel_bench.kernels.pool import max_pool2d
from triaccel_bench.kernels.stem import stem_conv2d
from triaccel_bench.kernels.update import FusedSGD

pytestmark = [once, pytest.mark.skipif(triton is None, reason="needs Triton")]
TURING, HOPPER = 75, 90
HALF = {TURING: torch.float16, HOPPER: torch.bfloat16}


class Card:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return 1000 + self._capability  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


@pytest.fixture(params=[TURING, HOPPER], ids=["sm_75", "sm_90"])
def card(request, monkeypatch):
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    compile_only = lambda self, *arguments, grid, warmup, **more: run(self, *arguments, grid=grid, warmup=True, **more)  # noqa: E731
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(backend, "INTERPRETED", True)  # kernels are given tensors of this machine
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # the stem in TF32 too
    driver.set_active(Card(request.param))
    yield HALF[request.param]
    driver.set_active(None)
    with contextlib.suppress(RuntimeError):  # no card at all, as before
        driver.reset_active()


def images(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()


def differentiated(*results: torch.Tensor) -> None:
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])


def norm(half: torch.dtype) -> None:
    channel = lambda: torch.ones(64, requires_grad=True)  # noqa: E731
    statistics = lambda: torch.ones(64)  # noqa: E731
    for size, activation, joined, dtype in [(8, "relu", True, half), (2, "silu", False, torch.float32)]:
        x, residual = images(4, 64, size, size, dtype=dtype), images(4, 64, size, size, dtype=dtype) if joined else None
        both = dict(activation=activation, residual=residual, backend="triton")
        scale = torch.ones(4)
        known = channel(), channel(), statistics(), statistics()
        differentiated(batch_norm_act(x, *known, 0.1, 1e-5, sample_scale=scale, **both))
        frozen = [value.detach() for value in known]
        differentiated(affine_norm_act(x, *frozen, 1e-5, **both))


def convolutions(half: torch.dtype) -> None:
    for dtype in (half, torch.float32):
        for kernel, stride in ((3, 1), (5, 2)):
            weight = torch.randn(32, 1, kernel, kernel).to(dtype).requires_grad_()
            differentiated(
                depthwise_conv2d(images(4, 32, 8, 8, dtype=dtype), weight, stride, kernel // 2, backend="triton")
            )
    for dtype in (half, torch.float32):
        weight = images(64, 3, 7, 7, dtype=dtype)
        differentiated(stem_conv2d(images(4, 3, 32, 32, dtype=dtype).detach(), weight, 2, 3, backend="triton"))


def pooling(half: torch.dtype) -> None:
    for layout in (torch.channels_last, torch.contiguous_format):
        x = torch.randn(4, 64, 16, 16).to(half).contiguous(memory_format=layout).requires_grad_()
        differentiated(max_pool2d(x, 3, 2, 1, backend="triton"))
        max_pool2d(x.detach(), 3, 2, 1, backend="triton")


def excitation(half: torch.dtype) -> None:
    for size in (1, 8):
        pooled, x = squeeze(images(4, 32, size, size, dtype=half), backend="triton")
        differentiated(excite(x, images(4, 32, 1, 1, dtype=half), out_dtype=torch.float32, backend="triton"), pooled)


def losses(half: torch.dtype) -> None:
    logits, labels = torch.randn(8, 10), torch.arange(8)
    cross_entropy(logits, labels, torch.ones(()), backend="triton")
    sampled_gradient(logits, torch.rand(8), backend="triton")
    largest_eigenvalues(torch.eye(32).repeat(3, 1, 1), 5, backend="triton")


def updates(half: torch.dtype) -> None:
    weights = [torch.randn(shape) for shape in ((16, 8), (300_000,), (7,))]
    copies = [weights[0].to(half), weights[1].to(half), None]
    gradients = [weights[0].to(half), weights[1].to(half), weights[2].clone()]
    one = torch.ones(1)
    for narrow in (torch.bfloat16, torch.float32):
        scalars = StepScalars(0.1, 64, 640, 1024.0, 2.0, 0.5, 3, weights[0].device, "triton")
        moments = GradientMoments([w.numel() for w in weights], 2, weights[0].device, "triton", 0.9, True)
        sgd = FusedSGD(weights, [0, 1, -1], "triton", 0.9, 5e-4)
        sgd.set_momentum_dtypes([narrow, narrow, torch.float32])
        sgd.set_copies(copies)
        scalars.set_scaled(True)
        scalars.begin(8)
        gathered = sgd.gather(gradients)
        moments.update(gathered, scalars.inverse_scale, torch.ones(()))
        sgd.step(
            gathered, scalars.learning_rate, torch.ones(2), scalars.inverse_scale, moments.nonfinite, moments.updates
        )
        scalars.advance(torch.ones(8), torch.ones(8, dtype=torch.int32), one, True)


def resident() -> DeviceData:
    pixels = torch.zeros(64, 3, 32, 32, dtype=torch.uint8)
    held = ImageSet(pixels, torch.arange(64) % 10, pixels[:8], torch.arange(8), tuple("0123456789"), "0" * 16, "x")
    return DeviceData(held, compose(["dataset=synthetic"]).dataset, 32, torch.device("cpu"), "triton", True)


def batches(half: torch.dtype) -> None:
    data = resident()
    sampler = data.begin_epoch(0, 0)
    for dtype in (half, torch.float32):
        indices = sampler.take(8)
        data.fill(*data.input_buffers(8, dtype), indices)
    data.plain_batch(torch.arange(8))


CALLS = norm, convolutions, pooling, excitation, losses, updates, batches


@pytest.mark.parametrize("calls", CALLS)
def test_kernels_compile(card, calls):
    calls(card)


@pytest.fixture
def bare(card, monkeypatch, tmp_path):
    """A card that nothing was compiled for, neither in this process nor on disk: the names of what is compiled since."""
    from triton.runtime.driver import driver

    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("this Triton compiles one kernel at a time")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    capability = driver.active.get_current_target().arch
    fresh = Card(capability)
    fresh.get_current_device = lambda: hash(tmp_path)
    driver.set_active(fresh)
    return lambda: Counter(path.stem for path in tmp_path.rglob("*.cubin"))


def test_kernels_are_compiled_together_and_stay(card, bare, monkeypatch):
    submitted = []

    class Pool(ThreadPoolExecutor):
        def submit(self, *arguments):
            submitted.append(arguments)
            return super().submit(*arguments)

    monkeypatch.setattr(backend, "ThreadPoolExecutor", Pool)
    run = triton.JITFunction.run
    with backend.compiled_together():
        pooling(card)
    assert triton.JITFunction.run is run and len(submitted) == bare().total() >= 4
    found = bare()
    pooling(card)
    assert bare() == found, "none was left to be compiled by its first launch"


def test_launches_are_real_again_where_calls_that_are_compiled_together_fail(card):
    run = triton.JITFunction.run
    with pytest.raises(RuntimeError, match="no room"), backend.compiled_together():
        raise RuntimeError("no room")
    assert triton.JITFunction.run is run
    with backend.compiled_together():
        pass


def test_a_warm_up_compiles_all_of_its_kernels_together(card, bare, monkeypatch):
    sizes = "method.batch.initial=8", "method.batch.min=8"
    settings = compose(["dataset=synthetic", "model=resnet8", "device=cpu", "memory.meter=tensors", *sizes])
    together, after = backend.compiled_together, []

    @contextlib.contextmanager
    def watched():
        with together():
            yield
        after.append(bare())

    monkeypatch.setattr(backend, "compiles_together", lambda: True)
    monkeypatch.setattr(backend, "compiled_together", watched)
    Assembly(0, inspect("cpu", "torch"), resident(), "triton").try_out(["fp32", "fp32"], 1, settings)
    assert len(after) == 1 and after[0].total() >= 5 and bare() == after[0]


def test_no_kernel_is_left_out(monkeypatch):
    from triton.runtime.jit import JITFunction

    asked = set()
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *_, **__: asked.add((self.fn.__module__.split(".")[-1], self.fn.__name__))
    )
    monkeypatch.setattr(backend, "INTERPRETED", True)
    for calls in CALLS:
        calls(torch.bfloat16)
    found = set()
    for path in (Path(__file__).parent.parent / "kernels").glob("*.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        found |= {(path.stem, node.name) for node in functions if node.name.endswith("_kernel")}
    assert asked == found
