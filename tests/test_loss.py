"""Cross-entropy, its gradient and right answers: each backend against FP64 truth and torch's own rules."""

from __future__ import annotations

import math

import pytest
import torch
from places import (  # noqa: F401
    assert_passes_in_the_interpreter,
    gpu,
    needs_card,
    on_every_backend,
    once,
    poisoned_memory,
    variants,
)
from torch.nn import functional

from triaccel_bench.kernels import loss as loss_module
from triaccel_bench.kernels.backend import INTERPRETED, triton
from triaccel_bench.kernels.loss import cross_entropy, sampled_gradient

INF, NAN = math.inf, math.nan


def case(rows: int, classes: int, dtype=torch.float32, device: str = "cpu", spread: float = 4.0):
    generator = torch.Generator().manual_seed(100 * rows + classes)
    logits = spread * torch.randn(rows, classes, generator=generator)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    return logits.to(dtype).to(device), labels.to(device)


def scalar(value: float, device: str) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def autograd(logits: torch.Tensor, labels: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and gradient of the scaled mean loss as torch computes them in the dtype of ``logits``."""
    logits = logits.detach().clone().requires_grad_()
    losses = functional.cross_entropy(logits, labels, reduction="none")
    (losses.mean() * scale).backward()
    return losses.detach(), logits.grad


def errors(measured: torch.Tensor, truth: torch.Tensor) -> float:
    return (measured.double() - truth).abs().max().item()


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("rows, classes", [(1, 2), (7, 10), (33, 100), (130, 10), (3, 1000), (2, 1)])
def test_losses_and_gradient_are_as_close_to_the_truth_as_torch_is(place, dtype, rows, classes):
    backend, device = place
    logits, labels = case(rows, classes, dtype, device)
    scale = 1024.0
    losses, correct, gradient = cross_entropy(logits, labels, scalar(scale, device), backend=backend)
    assert (losses.dtype, correct.dtype, gradient.dtype) == (torch.float32, torch.int32, dtype)
    assert losses.shape == correct.shape == labels.shape and gradient.shape == logits.shape
    assert torch.equal(correct.bool(), logits.argmax(1) == labels)

    true_losses, true_gradient = autograd(logits.double(), labels, scale)
    torch_losses, torch_gradient = autograd(logits.float(), labels, scale)
    eps = torch.finfo(torch.float32).eps
    assert errors(losses, true_losses) <= 2 * errors(torch_losses, true_losses) + 4 * eps * logits.abs().max()
    rounding = (torch.finfo(dtype).eps + 4 * eps) * scale / rows
    assert errors(gradient, true_gradient) <= 2 * errors(torch_gradient, true_gradient) + rounding


@on_every_backend
@pytest.mark.parametrize("spread", [0.0, 1e4, 1e37])
def test_logits_of_any_size_neither_overflow_nor_lose_the_loss(place, spread):
    backend, device = place
    logits, labels = case(7, 10, device=device, spread=spread)
    losses, _, gradient = cross_entropy(logits, labels, scalar(1.0, device), backend=backend)
    true_losses, true_gradient = autograd(logits.double(), labels, 1.0)
    torch.testing.assert_close(losses.double(), true_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-5, atol=1e-7)


@on_every_backend
def test_strides_do_not_matter(place):
    backend, device = place
    logits, labels = case(7, 10, device=device)
    scale = scalar(8.0, device)
    expected = cross_entropy(logits, labels, scale, backend=backend)
    wider = torch.full((7, 16), NAN, device=device)
    wider[:, 3:13] = logits
    spaced = torch.full((7, 20), NAN, device=device)
    spaced[:, ::2] = logits
    for view in (wider[:, 3:13], spaced[:, ::2], logits.t().contiguous().t()):
        assert torch.equal(view, logits) and not view.is_contiguous()
        # Where a row's logits lie decides which thread adds which of them, and so the last bit.
        for left, right in zip(cross_entropy(view, labels, scale, backend=backend), expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)
    same_row = logits[:1].expand(7, 10)
    losses, _, gradient = cross_entropy(same_row, labels, scale, backend=backend)
    true_losses, true_gradient = autograd(same_row.double(), labels, 8.0)
    torch.testing.assert_close(losses.double(), true_losses)
    torch.testing.assert_close(gradient.double(), true_gradient)


ROWS = [
    [1.0, 3.0, 3.0, 2.0],
    [0.0, 0.0, 0.0, 0.0],
    [0.0, -0.0, 0.0, -1.0],
    [1.0, NAN, INF, NAN],
    [NAN, 1.0, 2.0, 3.0],
    [INF, 1.0, INF, 0.0],
    [-INF, 1.0, -INF, 0.0],
    [-INF, -INF, -INF, -INF],
    [NAN, NAN, NAN, NAN],
    [5.0, 1.0, 2.0, NAN],
]


@on_every_backend
@pytest.mark.parametrize("label", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_ties_and_non_finite_rows_are_judged_as_torch_judges_them(place, label, dtype):
    """A row is finite, inf or NaN in loss and gradient where torch's is, and leaves the other rows alone."""
    backend, device = place
    logits = torch.tensor(ROWS, dtype=dtype, device=device)
    labels = torch.full((len(ROWS),), label, device=device)
    losses, correct, gradient = cross_entropy(logits, labels, scalar(2.0, device), backend=backend)
    assert torch.equal(correct.bool(), logits.argmax(1) == labels)
    true_losses, true_gradient = autograd(logits.double(), labels, 2.0)
    # One bad row makes torch's mean NaN, but its gradient stays a matter of the rows.
    torch.testing.assert_close(losses.double(), true_losses, equal_nan=True, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), true_gradient, equal_nan=True, rtol=1e-3, atol=1e-6)
    bad = ~true_gradient.isfinite().all(1)
    assert bad.tolist() == [row in (3, 4, 5, 7, 8, 9) for row in range(len(ROWS))]


@on_every_backend
def test_a_half_precision_gradient_out_of_range_is_not_finite(place):
    backend, device = place
    logits = torch.tensor([[8.0, -8.0]], dtype=torch.float16, device=device)
    labels = torch.tensor([1], device=device)
    _, _, gradient = cross_entropy(logits, labels, scalar(2.0**17, device), backend=backend)
    assert gradient.dtype == torch.float16 and gradient.tolist() == [[INF, -INF]]


@on_every_backend
def test_backward_from_the_gradient_is_backward_from_the_scaled_mean_loss(place):
    backend, device = place
    inputs, labels = case(33, 10, device=device)
    torch.manual_seed(0)
    layer = torch.nn.Linear(10, 10).to(device)
    logits = layer(inputs)
    _, _, gradient = cross_entropy(logits, labels, scalar(65536.0, device), backend=backend)
    assert not gradient.requires_grad
    logits.backward(gradient)
    measured = [parameter.grad.double() for parameter in layer.parameters()]
    layer.double().zero_grad()
    (functional.cross_entropy(layer(inputs.double()), labels) * 65536.0).backward()
    for grad, parameter in zip(measured, layer.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-5, atol=1e-6 * parameter.grad.abs().max().item())


@on_every_backend
def test_double_precision_takes_the_reference(place):
    backend, device = place
    logits, labels = case(7, 10, torch.float64, device)
    losses, _, gradient = cross_entropy(logits, labels, scalar(3.0, device), backend=backend)
    true_losses, true_gradient = autograd(logits, labels, 3.0)
    torch.testing.assert_close(losses, true_losses)
    torch.testing.assert_close(gradient, true_gradient, rtol=1e-6, atol=0.0)


@on_every_backend
def test_a_label_that_names_no_class_is_not_passed_over(place):
    backend, device = place
    if backend == "torch":
        if device == "cpu":  # on the card the assertion of torch.gather ends the process's CUDA context
            with pytest.raises((IndexError, RuntimeError)):
                cross_entropy(torch.zeros(2, 3), torch.tensor([0, -100]), scalar(1.0, device), backend=backend)
        return
    logits = torch.zeros(4, 3, device=device)
    labels = torch.tensor([-100, 0, 3, 2], device=device)
    losses, correct, gradient = cross_entropy(logits, labels, scalar(1.0, device), backend=backend)
    assert losses.isnan().tolist() == [True, False, True, False] and correct.tolist() == [0, 1, 0, 0]
    assert gradient.isnan().all(1).tolist() == [True, False, True, False]
    assert gradient.isnan().any(1).tolist() == [True, False, True, False]


def test_what_does_not_fit_is_refused():
    backend = "triton" if INTERPRETED else "torch"
    logits, labels = case(3, 4)
    one = scalar(1.0, "cpu")
    for match, arguments in {
        "logits: expected floating point": (logits.int(), labels, one),
        "pass one row of class scores": (logits[0], labels, one),
        "with elements": (logits[:0], labels[:0], one),
        r"labels: expected torch.int64 \[3\]": (logits, labels[:2], one),
        "pass one class index": (logits, labels.int(), one),
        "labels: expected stride 1": (logits, torch.zeros(6, dtype=torch.int64)[::2], one),
        "scale: expected a torch.float32 scalar": (logits, labels, one.double()),
        "pass the loss scale": (logits, labels, one[None]),
    }.items():
        with pytest.raises(ValueError, match=match):
            cross_entropy(*arguments, backend=backend)
    with pytest.raises(ValueError, match="backend='cuda'"):
        cross_entropy(logits, labels, one, backend="cuda")


@on_every_backend
def test_a_row_too_long_for_a_program_is_refused(place, monkeypatch):
    monkeypatch.setattr(loss_module, "MAX_CLASSES", 9)
    backend, device = place
    logits, labels = case(3, 10, device=device)
    if backend == "triton":
        with pytest.raises(ValueError, match="at most 9 classes"):
            cross_entropy(logits, labels, scalar(1.0, device), backend=backend)
    else:
        cross_entropy(logits, labels, scalar(1.0, device), backend=backend)


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_the_triton_kernel_passes_this_file_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_captured_launch_replays_and_waits_for_nothing(backend):
    logits, labels = case(130, 10, torch.float16, "cuda")
    fixed, scale = torch.zeros_like(logits), scalar(1.0, "cuda")
    cross_entropy(fixed, labels, scale, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cross_entropy(fixed, labels, scale, backend=backend)
    fixed.copy_(logits)
    scale.fill_(512.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay()
        expected = cross_entropy(logits, labels, scale, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for left, right in zip(captured, expected, strict=True):
        assert torch.equal(left, right)


@gpu
@needs_card
def test_batch_sizes_share_one_compiled_kernel():
    kernel = loss_module._cross_entropy_kernel
    cross_entropy(*case(96, 10, device="cuda"), scalar(1.0, "cuda"), backend="triton")
    before = variants(kernel)
    for rows in (1, 2, 7, 16, 33, 128, 1000):
        cross_entropy(*case(rows, 10, device="cuda"), scalar(1.0, "cuda"), backend="triton")
    assert variants(kernel) == before


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("rows, classes", [(1, 2), (7, 10), (33, 100), (3, 1000), (2, 1)])
def test_a_sampled_gradient_is_that_of_the_class_where_the_distribution_passes_the_draw(place, dtype, rows, classes):
    backend, device = place
    logits, _ = case(rows, classes, dtype, device)
    draws = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(device, torch.float32)
    probabilities = logits.double().softmax(1)
    steps = probabilities.cumsum(1)
    assert (steps - draws[:, None].double()).abs().min() > 1e-5  # no draw so near a step that rounding would decide
    labels = (steps <= draws[:, None]).sum(1)
    expected = probabilities - functional.one_hot(labels, classes)
    gradient = sampled_gradient(logits, draws, backend=backend)
    assert gradient.dtype == dtype and gradient.shape == logits.shape
    rounding = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert errors(gradient, expected) <= rounding


@on_every_backend
def test_sampled_labels_at_the_ends_and_in_any_strides(place):
    backend, device = place
    logits = torch.tensor([[0.0, -200.0, 0.0], [5.0, 5.0, -200.0]], device=device).T.contiguous().T
    assert logits.stride() == (1, 2)
    largest = torch.tensor([1 - 2.0**-24] * 2, device=device)
    smallest = torch.zeros(2, device=device)
    for draws, labels in ((largest, [2, 1]), (smallest, [0, 0])):
        found = sampled_gradient(logits, draws, backend=backend).argmin(1)
        assert found.tolist() == labels
    assert sampled_gradient(logits.double(), smallest, backend=backend).dtype == torch.float64
    logits[0, 1] = NAN
    assert sampled_gradient(logits, smallest, backend=backend)[0].isnan().all()


@on_every_backend
def test_a_sampled_gradient_of_an_all_but_certain_class_keeps_its_digits(place):
    backend, device = place
    logits = torch.tensor([[0.0, -17.0, -18.0]], device=device)
    truth = logits.double().softmax(1)
    found = sampled_gradient(logits, torch.tensor([0.5], device=device), backend=backend)
    expected = torch.stack((-truth[0, 1] - truth[0, 2], truth[0, 1], truth[0, 2]))
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=0)


def test_draws_that_do_not_fit_are_refused():
    logits, _ = case(3, 4)
    for draws, message in (
        (torch.zeros(2), r"draws: expected torch.float32 \[3\]"),
        (torch.zeros(3, dtype=torch.float16), "got torch.float16"),
        (torch.zeros(6)[::2], "expected a contiguous tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            sampled_gradient(logits, draws, backend="torch")
