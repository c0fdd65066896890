"""What kernels share: tables of addresses, machines without Triton, and whole steps of moments and update on a card."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from kernel_cases import (
    DTYPES,
    bits_equal,
    copies_of,
    gradients,
    in_dtypes,
    in_step,
    relative_difference,
    scalar,
    variance_truth,
)
from places import gpu, needs_card, once, poisoned_memory  # noqa: F401

from triaccel_bench.kernels import segments
from triaccel_bench.kernels.backend import require_backend, triton
from triaccel_bench.kernels.moments import GradientMoments
from triaccel_bench.kernels.update import FusedSGD


def test_a_dense_layout_is_told_from_one_with_gaps_or_overlap():
    tensor = torch.zeros(4, 3, 2, 5)
    dense = [tensor, tensor.permute(2, 0, 3, 1), tensor[:2], tensor[:1, :1, :1].mT, torch.zeros(0, 4)]
    loose = [tensor[:, :2], tensor[::2], tensor[:1].expand(2, -1, -1, -1), tensor[..., 1]]
    assert all(map(segments.is_dense, dense)) and not any(map(segments.is_dense, loose))


def test_a_captured_address_table_is_filled_by_flush_and_never_rewritten(monkeypatch):
    table = segments.AddressTable(2, torch.device("cpu"))
    pairs = [[torch.zeros(1), torch.zeros(1)] for _ in range(4)]
    addresses = [[tensor.data_ptr() for tensor in pair] for pair in pairs]
    eager = table.of(pairs[0])
    table.bind(pairs[3])
    with monkeypatch.context() as capture:
        capture.setattr(segments, "_capturing", lambda device: True)
        first = table.of(pairs[1])
        assert table.of(pairs[1]) is first and first.tolist() != addresses[1]
        assert table.of(pairs[3]).tolist() == addresses[3]
        with pytest.raises(RuntimeError, match="flush"):
            table.of(pairs[2])
    table.flush()
    with monkeypatch.context() as capture:
        capture.setattr(segments, "_capturing", lambda device: True)
        second = table.of(pairs[2])
    table.flush()
    assert table.of(pairs[3]) is eager
    assert [first.tolist(), second.tolist(), eager.tolist()] == [addresses[1], addresses[2], addresses[3]]


def test_a_captured_table_keeps_the_dtypes_of_its_capture(monkeypatch):
    table = segments.AddressTable(3, torch.device("cpu"))
    memory = torch.zeros(4)
    tables = {}
    for dtype in DTYPES:
        with monkeypatch.context() as capture:
            capture.setattr(segments, "_capturing", lambda device: True)
            tables[dtype] = table.of([memory, memory.view(dtype), memory])
        table.flush()
    table.of([memory] * 3)
    address = memory.data_ptr()
    for dtype, captured in tables.items():
        assert captured.tolist() == [address, address | segments.CODES[dtype] << segments.CODE_SHIFT, address]
    assert segments.entries([None, memory]) == (0, address)


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_backends_that_cannot_run_are_refused_with_a_way_out():
    with pytest.raises(ValueError, match="backend='cuda': expected 'triton' or 'torch'"):
        require_backend("cuda", torch.device("cpu"))
    with pytest.raises(ValueError, match="expected tensors on cuda, got cpu; move them or pass backend='torch'"):
        GradientMoments([3], 1, "cpu", "triton", 0.9)


IMPORT_AND_USE = """
import torch
from triaccel_bench.kernels import backend, moments, segments, update
one = torch.tensor(1.0)
m = moments.GradientMoments([2], 1, "cpu", "torch", 0.9)
m.update([torch.tensor([1.0, 3.0])], one, one)
w = torch.ones(2)
update.FusedSGD([w], [-1], "torch", 0.9, 0.0).step([torch.ones(2)], one, torch.ones(0), one, m.nonfinite)
assert m.ema.tolist() == [1.0] and w.tolist() == [0.0, 0.0]
try:
    update.FusedSGD([w], [-1], "triton", 0.9, 0.0)
except ValueError as error:
    assert "pass backend='torch'" in str(error), error
else:
    raise AssertionError("the triton backend was accepted")
"""


def run_python(arguments: list[str], **environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments], env=inherited | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@once
def test_kernels_import_and_run_where_triton_is_absent():
    run_python(["-c", "import sys; sys.modules['triton'] = None\n" + IMPORT_AND_USE + "assert backend.triton is None"])


@once
def test_kernels_import_and_run_where_triton_is_broken(tmp_path):
    """A half-installed Triton raises what it likes; ``hardware`` then chooses torch, and its kernels must be there."""
    (tmp_path / "triton.py").write_text("raise OSError('libtriton.so: undefined symbol')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + IMPORT_AND_USE + "assert backend.triton is None"
    run_python(["-c", code])


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_kernels_import_and_run_where_triton_finds_no_gpu():
    run_python(["-c", IMPORT_AND_USE + "assert backend.triton is not None"], CUDA_VISIBLE_DEVICES="")


def card_case(backend: str):
    """A step on the card: gradients are computed (2 x input x weight), measured and applied."""
    shapes = [(512, 256, 3, 3), (64, 32, 1, 1), (1000,), (63,), (1,)]
    params = gradients(7, "cuda", shapes)
    moments = GradientMoments([param.numel() for param in params], 2, "cuda", backend, 0.9)
    sgd = FusedSGD(params, [0, 1, -1, -1, -1], backend, 0.9, 5e-4)
    factor, scale = scalar(1.0, "cuda"), scalar(1 / 1024, "cuda")
    lr, rates = scalar(0.01, "cuda"), torch.tensor([1.0, 0.5], device="cuda")

    def step(inputs: torch.Tensor) -> None:
        grads = [inputs * param for param in params]
        moments.update(grads, scale, factor)
        sgd.step(grads, lr, rates, scale, moments.nonfinite)

    return params, moments, sgd, step


INPUTS = [1024.0, 2048.0, math.inf, 512.0, math.nan, 1024.0]


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_graph_replays_equal_eager_steps(backend):
    params, moments, sgd, step = card_case(backend)
    fixed = scalar(math.inf, "cuda")
    graphs = []
    for _ in range(2):
        # The warm-up compiles what a capture cannot; its inf leaves the state as it was.
        step(fixed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(fixed)
        moments.flush()
        sgd.flush()
        graphs.append(graph)
    for index, value in enumerate(INPUTS):
        fixed.fill_(value)
        graphs[index % 2].replay()
    expected_params, expected, expected_sgd, eager_step = card_case("torch")
    for value in INPUTS:
        eager_step(scalar(value, "cuda"))
    assert moments.updates.tolist() == expected.updates.tolist() == [4]
    assert moments.nonfinite.tolist() == [0.0]
    torch.testing.assert_close(moments.ema, expected.ema, rtol=1e-5, atol=0.0)
    assert relative_difference(params, expected_params) < 1e-6
    assert relative_difference(sgd.momenta, expected_sgd.momenta) < 1e-6


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_graph_keeps_the_copies_and_dtypes_of_its_capture(backend):
    params = gradients(7, "cuda", [(64, 32, 3, 3), (1000,), (63,)])
    sizes = [param.numel() for param in params]
    moments = GradientMoments(sizes, 3, "cuda", backend, 0.9)
    copies = [copies_of(params), copies_of(params, shift=1)]
    sgd = FusedSGD(params, [0, -1, -1], backend, 0.9, 5e-4, copies[0])
    rest = [scalar(0.05, "cuda"), torch.ones(1, device="cuda"), scalar(1.0, "cuda")]
    factor = scalar(math.nan, "cuda")

    def step(shift: int) -> None:
        gathered = sgd.gather([grad * factor.to(grad.dtype) for grad in in_dtypes(params, shift)])
        moments.update(gathered, rest[-1], rest[-1])
        sgd.step(gathered, *rest, moments.nonfinite)

    graphs = []
    for shift in range(2):
        sgd.set_copies(copies[shift])
        step(shift)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            step(shift)
        sgd.flush()
    twins = [param.clone() for param in params]
    reference = FusedSGD(twins, [0, -1, -1], "torch", 0.9, 5e-4)
    factor.fill_(0.5)
    for shift in (0, 1, 0):
        others = [copy.clone() for copy in copies[1 - shift] if copy is not None]
        graphs[shift].replay()
        assert in_step(copies[shift], params)
        assert bits_equal([copy for copy in copies[1 - shift] if copy is not None], others)
        grads = [grad * 0.5 for grad in in_dtypes(twins, shift)]
        truth = [variance_truth(grad) for grad in grads]
        torch.testing.assert_close(moments.variance.cpu(), torch.tensor(truth), rtol=1e-5, atol=0.0)
        reference.step(grads, *rest, moments.nonfinite)
        torch._foreach_copy_(twins, params)
    assert relative_difference(sgd.momenta, reference.momenta) < 1e-6
    graphs[1].replay()
    assert in_step(copies[1], params) and moments.updates.tolist() == [4]


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_steps_never_wait_for_the_device(backend):
    params, moments, sgd, step = card_case(backend)
    inputs = [scalar(value, "cuda") for value in INPUTS]
    before = [param.clone() for param in params]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for value in inputs:
            step(value)
        moments.flush()
        sgd.set_copies(copies_of(params))
        sgd.step(
            in_dtypes([param * 1 for param in params]),
            inputs[0],
            torch.ones(2, device="cuda"),
            inputs[0],
            moments.nonfinite,
        )
        sgd.flush()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moments.updates.tolist() == [4] and not torch.equal(params[0], before[0])
