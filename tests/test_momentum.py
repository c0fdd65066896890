"""Momentum in BF16: what stochastic rounding keeps on average, and the reference and the kernel bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from places import (  # noqa: F401
    assert_passes_in_the_interpreter,
    gpu,
    needs_card,
    on_every_backend,
    on_kernels,
    once,
    poisoned_memory,
)
from tiny import engine, settings, trainer

from triaccel_bench.kernels import segments
from triaccel_bench.kernels.backend import triton
from triaccel_bench.kernels.rounding import random_bits, round_stochastically
from triaccel_bench.kernels.update import FusedSGD
from triaccel_bench.schedule import Schedule

FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(33,), (4, 4, 3, 3), (1,), (0,), (7, 10), (64,)]
KEPT_IN = [BF16, BF16, BF16, BF16, FP32, BF16]
LAYER_OF = [0, 1, -1, 0, 1, -1]


def bits(tensors: list[torch.Tensor]) -> list[list[int]]:
    return [
        tensor.cpu().reshape(-1).view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).tolist() for tensor in tensors
    ]


def draw_of(step: int, device: str) -> torch.Tensor:
    return torch.tensor([step], dtype=torch.int32, device=device)


def arguments(device: str, bad: bool = False) -> list[torch.Tensor]:
    """Powers of two, so that no product is rounded and every backend has the same velocity to round."""
    rates = torch.tensor([0.5, 2.0], device=device)
    return [torch.tensor(0.125, device=device), rates, torch.tensor(0.25, device=device), rates.new_full((1,), bad)]


def short_numbers(seed: int, device: str) -> list[torch.Tensor]:
    """Whole numbers of up to 14 bits over 2^12: more than BF16 holds, and FP32 adds them up exactly."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(-(2**14), 2**14, shape, generator=generator) / 4096 for shape in SHAPES]
    made[1] = made[1].contiguous(memory_format=torch.channels_last)
    return [tensor.to(device) for tensor in made]


def new_sgd(
    backend: str, device: str, kept_in=KEPT_IN, weight_decay: float = 0.0
) -> tuple[FusedSGD, list[torch.Tensor]]:
    params = short_numbers(99, device)
    sgd = FusedSGD(params, LAYER_OF, backend, 0.5, weight_decay)
    sgd.set_momentum_dtypes(kept_in)
    return sgd, params


def rounded(values: torch.Tensor, step: int = 1, tensor_index: int = 0) -> torch.Tensor:
    out = torch.empty_like(values, dtype=BF16)
    round_stochastically(values.clone(), random_bits(draw_of(step, "cpu"), tensor_index, values.numel()), out)
    return out


def hashed(word: int) -> int:
    word = (word ^ word >> 16) * 0x7FEB352D & 0xFFFFFFFF
    word = (word ^ word >> 15) * 0x846CA68B & 0xFFFFFFFF
    return word ^ word >> 16


@once
@pytest.mark.parametrize("step", [0, 1, 2**31 - 1, -1])
def test_random_bits_are_the_hash_of_step_tensor_and_element(step):
    key = hashed(hashed((step & 0xFFFFFFFF) ^ 0x2545F491) + 7 & 0xFFFFFFFF)
    assert random_bits(draw_of(step, "cpu"), 7, 50).tolist() == [hashed(index ^ key) & 0xFFFF for index in range(50)]


@once
def test_random_bits_are_even_and_differ_from_step_to_step_and_tensor_to_tensor():
    count = 20_000
    streams = [random_bits(draw_of(step, "cpu"), index, count) for step in (1, 2) for index in (0, 1)]
    for stream in streams:
        ones = (stream[:, None] >> torch.arange(16) & 1).double().mean(0)
        assert (ones - 0.5).abs().max() < 5 * 0.5 / math.sqrt(count)
    table = torch.stack([*streams, streams[0].roll(1), streams[0].roll(32)]).double()
    correlation = torch.corrcoef(table) - torch.eye(len(table))
    assert correlation.abs().max() < 5 / math.sqrt(count)


@once
def test_the_mean_of_many_roundings_is_the_value():
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(200, generator=generator) * torch.logspace(-30, 30, 200)
    draws = 2000
    seen = torch.stack([rounded(values, step).double() for step in range(draws)])
    spacing = (seen.max(0).values - seen.min(0).values).clamp_min(1e-300)
    # A rounding is one of two neighbours, so its deviation is at most half of what lies between them.
    assert ((seen.mean(0) - values.double()).abs() / spacing).max() < 5 * 0.5 / math.sqrt(draws)
    assert (spacing / values.double().abs()).max() <= 2**-7
    fraction = torch.full((draws,), 1 + 2**-7 / 8)
    assert rounded(fraction).double().mean() - 1 == pytest.approx(2**-7 / 8, rel=0.3)


@once
def test_values_that_bf16_holds_stay_as_they_are():
    held = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    held = held[~held.isnan()]
    assert bits([rounded(held.float())]) == bits([held])
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32).view(FP32)
    assert bits([rounded(nan)]) == [[0x7FC0] * 4]


@on_every_backend
def test_both_backends_give_the_same_bits(place, monkeypatch):
    """Full chunks and rests, dtypes mixed in one launch, and 16-bit gradients and copies beside them."""
    monkeypatch.setattr(segments, "CHUNK_ELEMENTS", 32)
    device = place[1]
    (sgd, params), (reference, theirs) = new_sgd(*place), new_sgd("torch", device)
    for made, own in ((sgd, params), (reference, theirs)):
        made.set_copies([own[0].half(), own[1].bfloat16(), *[None] * 4])
    for step in range(3):
        grads = short_numbers(step, device)
        grads[0], grads[5] = grads[0].bfloat16(), grads[5].half()
        for made in (sgd, reference):
            made.step([grad.clone() for grad in grads], *arguments(device), draw_of(step, device))
        assert bits(sgd.momenta) == bits(reference.momenta) and bits(params) == bits(theirs)
        assert [momentum.dtype for momentum in sgd.momenta] == KEPT_IN
    wide, _ = new_sgd("torch", device, [FP32] * 6)
    wide.step(short_numbers(0, device), *arguments(device))
    sgd, params = new_sgd(*place)
    sgd.step(short_numbers(0, device), *arguments(device), draw_of(1, device))
    for momentum, exact in zip(sgd.momenta, wide.momenta):
        assert ((momentum.float() - exact).abs() <= exact.abs() * (2**-7 if momentum.dtype == BF16 else 0)).all()


@on_every_backend
def test_fp32_momenta_and_all_weights_do_not_see_the_rounding_of_a_step(place):
    device = place[1]
    (mixed, params), (plain, theirs) = new_sgd(*place), new_sgd(*place, [FP32] * 6)
    for made in (mixed, plain):
        made.step(short_numbers(0, device), *arguments(device), draw_of(1, device))
    assert bits(params) == bits(theirs)
    mixed.step(short_numbers(1, device), *arguments(device), draw_of(2, device))
    plain.step(short_numbers(1, device), *arguments(device))
    assert bits(mixed.momenta[4:5] + params[4:5]) == bits(plain.momenta[4:5] + theirs[4:5])
    assert bits(params[:2]) != bits(theirs[:2])


@on_every_backend
def test_another_draw_rounds_anew_and_the_same_one_alike(place):
    device = place[1]
    seen = []
    for step in (1, 1, 2):
        sgd, _ = new_sgd(*place)
        sgd.step(short_numbers(0, device), *arguments(device), draw_of(step, device))
        seen.append(bits(sgd.momenta))
    assert seen[0] == seen[1] and seen[0] != seen[2]
    assert seen[0][4] == seen[2][4]


@on_every_backend
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_step_leaves_bf16_momenta_bit_for_bit(place, value):
    device = place[1]
    sgd, params = new_sgd(*place)
    sgd.step(short_numbers(0, device), *arguments(device), draw_of(1, device))
    before = bits([*params, *sgd.momenta])
    sgd.step([torch.full_like(param, value) for param in params], *arguments(device, bad=True), draw_of(2, device))
    assert bits([*params, *sgd.momenta]) == before


@on_every_backend
def test_velocities_that_are_not_finite_stay_so(place):
    device = place[1]
    sgd, _ = new_sgd(*place)
    grads = short_numbers(0, device)
    grads[0][:4] = torch.tensor([math.nan, math.inf, -math.inf, -3.4e38])
    sgd.step(grads, *arguments(device), draw_of(1, device))
    assert bits(sgd.momenta)[0][:3] == [0x7FC0, 0x7F80, 0xFF80 - 2**16]
    assert sgd.momenta[0][3:].isfinite().all()


@on_every_backend
def test_momenta_change_their_dtype_and_keep_their_values(place):
    device = place[1]
    sgd, params = new_sgd(*place, [FP32] * 6)
    sgd.step(short_numbers(0, device), *arguments(device))
    exact, held = [momentum.clone() for momentum in sgd.momenta], sgd.momenta
    addresses = [momentum.data_ptr() for momentum in held]
    tensors = list(held)
    sgd.set_momentum_dtypes([FP32] * 6)
    assert sgd.momenta is held and all(a is b for a, b in zip(held, tensors))
    sgd.set_momentum_dtypes(KEPT_IN)
    nearest = [momentum.to(dtype) for momentum, dtype in zip(exact, KEPT_IN)]
    assert sgd.momenta is held and bits(held) == bits(nearest)
    assert held[4].data_ptr() == addresses[4]
    assert [momentum.stride() for momentum in held] == [param.stride() for param in params]
    sgd.set_momentum_dtypes([FP32] * 6)
    assert bits(held) == bits([momentum.float() for momentum in nearest])
    sgd.step(short_numbers(1, device), *arguments(device))
    expected = [0.5 * momentum.float() + 0.25 * grad for momentum, grad in zip(nearest, short_numbers(1, device))]
    assert bits(held) == bits(expected)


@on_kernels
def test_a_table_of_momenta_is_never_rewritten(place):
    sgd, _ = new_sgd(*place, [FP32] * 6)
    table = sgd._momentum_table
    before = table.tolist()
    sgd.set_momentum_dtypes([FP32] * 6)
    assert sgd._momentum_table is table
    sgd.set_momentum_dtypes(KEPT_IN)
    assert sgd._momentum_table is not table and table.tolist() == before


@on_every_backend
def test_wrong_momentum_dtypes_and_draws_are_refused(place):
    device = place[1]
    sgd, params = new_sgd(*place)
    grads = short_numbers(0, device)
    before = bits([*params, *sgd.momenta])
    with pytest.raises(ValueError, match="momentum dtypes: expected 6, got 1; pass one for every parameter"):
        sgd.set_momentum_dtypes([BF16])
    with pytest.raises(
        ValueError, match="momentum dtype 5: expected torch.float32 or torch.bfloat16, got torch.float16"
    ):
        sgd.set_momentum_dtypes([BF16] * 5 + [torch.float16])
    with pytest.raises(ValueError, match="draw: expected torch.int32 with 1 element on .*, got None; pass a count"):
        sgd.step(grads, *arguments(device))
    for wrong, got in ((draw_of(1, device).long(), "torch.int64"), (draw_of(1, device).repeat(2), "with 2 elements")):
        with pytest.raises(ValueError, match=f"draw: expected .*, got .*{got}"):
            sgd.step(grads, *arguments(device), wrong)
    assert bits([*params, *sgd.momenta]) == before


def loss_after(steps: int, momentum: float, lr: float, kind: str) -> float:
    """Of half a squared distance in 256 dimensions, with momenta in FP32, or in BF16 rounded in either way."""
    target = torch.randn(256, generator=torch.Generator().manual_seed(0))
    weight = torch.zeros(256)
    sgd = FusedSGD([weight], [-1], "torch", momentum, 0.0)
    if kind == "stochastic":
        sgd.set_momentum_dtypes([BF16])
    one, flag = torch.tensor(1.0), torch.zeros(1)
    for step in range(steps):
        sgd.step([weight - target], lr * one, flag, one, flag, draw_of(step, "cpu"))
        if kind == "nearest":
            sgd.momenta[0].copy_(sgd.momenta[0].to(BF16))
    return (weight - target).square().mean().item()


@once
def test_descent_is_as_fast_as_with_fp32_where_rounding_to_nearest_stalls():
    """With a momentum of 0.998 a velocity is 500 gradients: more than BF16 can add one to."""
    exact, stochastic, nearest = (loss_after(1000, 0.998, 2.5e-6, kind) for kind in ("fp32", "stochastic", "nearest"))
    assert 0.95 * exact < stochastic < 1.05 * exact
    assert nearest > 1.5 * exact
    assert loss_after(200, 0.9, 2e-3, "stochastic") == pytest.approx(loss_after(200, 0.9, 2e-3, "fp32"), rel=0.05)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 10, (16,), generator=generator)


def narrow_weights(made) -> list[bool]:
    """Of each layer; nothing but layers' weights may be narrow."""
    dtypes = [momentum.dtype for momentum in made.sgd.momenta]
    layers = len(made.network.layers)
    assert set(dtypes) <= {FP32, BF16} and set(dtypes[layers:]) == {FP32}
    return [dtype == BF16 for dtype in dtypes[:layers]]


@once
def test_only_weights_of_layers_in_16_bits_have_narrow_momenta_whatever_the_plan():
    made = engine("method.update.momentum_dtype=bf16")
    wide_bytes = made.state_bytes
    weights = [2 * layer.weight.numel() for layer in made.network.layers.values()]
    for seed, plan in enumerate(
        (["fp32"] * 10, ["bf16", "fp32", "fp16", "fp32", "bf16"] * 2, ["fp16"] * 10, ["fp32"] * 10)
    ):
        before = [momentum.float() for momentum in made.sgd.momenta]
        made.set_plan(plan)
        assert narrow_weights(made) == [level != "fp32" for level in plan]
        assert made.state_bytes == wide_bytes - sum(size for size, level in zip(weights, plan) if level != "fp32")
        for held, value in zip(made.sgd.momenta, before, strict=True):
            assert torch.equal(held, value.to(held.dtype))
        held = [momentum.data_ptr() for momentum in made.sgd.momenta]
        made.step(*batch(seed))
        assert [momentum.data_ptr() for momentum in made.sgd.momenta] == held
    assert made.read().samples_applied == 64
    plain = engine("method.update.momentum_dtype=fp32", plan=["fp16"] * 10)
    assert not any(narrow_weights(plain)) and plain.state_bytes == wide_bytes


@once
@pytest.mark.parametrize("plan", [["fp32", "bf16"] * 5, ["bf16"] * 10])
def test_losses_follow_those_of_fp32_momenta(plan):
    losses = {}
    for dtype in ("fp32", "bf16"):
        made = engine(f"method.update.momentum_dtype={dtype}", plan=plan, schedule=Schedule(0.02, 0, 10_000))
        for seed in range(24):
            made.step(*batch(seed % 4))
            if seed == 15:
                sum_before = made.read().loss_sum
        losses[dtype] = (made.read().loss_sum - sum_before) / 128
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05) and losses["bf16"] < 2.0


@once
def test_a_step_that_failed_is_repeated_with_the_same_roundings():
    """Memory runs out after the statistics, whose count is the draw: it is put back with them."""
    results = []
    for fails in (False, True):
        made = engine("method.update.momentum_dtype=bf16", plan=["bf16"] * 10)
        made.step(*batch(0))
        if fails:
            advance = made.scalars.advance
            made.scalars.advance = None
            with pytest.raises(TypeError):
                made.step(*batch(1))
            made.scalars.advance = advance
            made.recover()
        made.step(*batch(1))
        results.append(bits([*made.sgd.momenta, *(parameter.detach() for parameter in made._parameters)]))
    assert results[0] == results[1]


@once
def test_the_tensor_meter_counts_the_momenta_of_the_plan_in_force():
    made, _ = trainer(settings("method=fp32", "memory.meter=tensors", "method.update.momentum_dtype=bf16"))
    peaks = []
    for level in ("fp32", "bf16"):
        made.engine.set_plan([level] * 10)
        made.meter.begin_window()
        with made.meter.recording():
            pass
        peaks.append(made.meter.window_peak_bytes())
    assert peaks[0] - peaks[1] == 2 * sum(layer.weight.numel() for layer in made.network.layers.values())


@once
def test_other_dtypes_of_momentum_are_refused():
    with pytest.raises(ValueError, match="method.update.momentum_dtype=fp16: expected 'fp32' or 'bf16'"):
        settings("method.update.momentum_dtype=fp16")


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_the_kernel_passes_this_file_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_replayed_graph_rounds_anew_and_never_waits(backend):
    sgd, params = new_sgd(backend, "cuda")
    grads, rest, draw = short_numbers(0, "cuda"), arguments("cuda"), draw_of(1, "cuda")

    def step() -> None:
        sgd.step([grad.clone() for grad in grads], *rest, draw)

    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        draw.add_(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        draw.add_(1)
    sgd.flush()
    twin, theirs = new_sgd("torch", "cpu")
    twin.step(short_numbers(0, "cpu"), *arguments("cpu"), draw_of(1, "cpu"))
    for replay in range(3):
        graph.replay()
        twin.step(short_numbers(0, "cpu"), *arguments("cpu"), draw_of(2 + replay, "cpu"))
        assert bits(sgd.momenta) == bits(twin.momenta) and bits(params) == bits(theirs)


@gpu
@needs_card
def test_whole_chunks_on_a_card_equal_the_reference():
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randint(-(2**14), 2**14, (size,), generator=generator) / 4096 for size in (9000, 4096, 8193, 4096)]
    results = []
    for backend, device in (("torch", "cpu"), ("triton", "cuda")):
        params = [grad.clone().to(device) for grad in grads]
        sgd = FusedSGD(params, [-1] * 4, backend, 0.5, 0.0)
        sgd.set_momentum_dtypes([BF16, BF16, FP32, FP32])
        for step in range(3):
            sgd.step([grad.to(device, copy=True) for grad in grads], *arguments(device), draw_of(step, device))
        results.append(bits([*params, *sgd.momenta]))
    assert results[0] == results[1]
