"""Curvature probes: dense truth from torch.func.hessian, no trace on the model, bounded price."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from curved import assert_same, batch, dense_eigenvalues, layers_of, loss, network, settings, snapshot, used_network
from torch import nn

from triaccel_bench import graphs, hessian
from triaccel_bench.graphs import CaptureError
from triaccel_bench.hessian import HessianEstimator, mean_cross_entropy
from triaccel_bench.lanczos import Spectrum

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Quadratic(nn.Module):
    """w -> diagonal values of a quadratic form of w."""

    def __init__(self, values, dtype=torch.float64):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(len(values), dtype=dtype, generator=torch.Generator().manual_seed(3)))
        self.register_buffer("values", torch.tensor(values, dtype=dtype))

    def forward(self, images):
        return 0.5 * self.values @ self.weight**2


def quadratic_loss(module, images, labels):
    return module(images)


def quadratic_estimator(values, dtype=torch.float64, **changes):
    module = Quadratic(values, dtype)
    return module, HessianEstimator(module, {"form": module}, settings(**changes), 0, loss=quadratic_loss)


EVERY_PRODUCT = 1e-300
"""A tolerance that no layer meets early, so that all k eigenvalues settle and not the largest alone."""
NOTHING = (torch.zeros(1), torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize("kind", ["plain", "strided", "dilated", "grouped", "depthwise"])
@pytest.mark.parametrize(
    "product,activation,dtype,tolerance",
    [
        ("exact", nn.ReLU, torch.float64, 1e-4),
        ("exact", nn.ReLU, torch.float32, 1e-2),
        ("difference", nn.ReLU, torch.float64, 1e-4),
        ("difference", nn.SiLU, torch.float64, 1e-4),
        ("difference", nn.SiLU, torch.float32, 5e-2),
    ],
)
def test_dense_blocks(kind, product, activation, dtype, tolerance):
    module = network(kind, activation, dtype)
    images, labels = batch(dtype)
    chosen = settings(product=product, iterations=80, tolerance=EVERY_PRODUCT)
    probe = HessianEstimator(module, layers_of(module), chosen, 0, loss=loss).probe(images, labels, None)
    assert probe.layers == tuple(layers_of(module))
    for name, spectrum in zip(probe.layers, probe.spectra, strict=True):
        truth = dense_eigenvalues(module, name, images, labels)
        errors = [abs(got - true) / truth[0] for got, true in zip(spectrum.eigenvalues, truth, strict=True)]
        assert max(errors) <= tolerance, name
    assert probe.products == sum(spectrum.iterations for spectrum in probe.spectra)


def test_shipped_iterations_come_close_to_the_largest():
    module = network()
    images, labels = batch()
    probe = HessianEstimator(module, layers_of(module), settings(), 0).probe(images, labels, None)
    for name, spectrum in zip(probe.layers, probe.spectra, strict=True):
        assert spectrum.eigenvalues[0] == pytest.approx(dense_eigenvalues(module, name, images, labels)[0], rel=0.02)
        assert spectrum.converged


def test_default_loss_is_the_mean_cross_entropy_in_float32():
    module, (images, labels) = network(), batch()
    value = mean_cross_entropy(module.half().float(), images, labels)
    assert value.dtype == torch.float32 and value.shape == ()
    assert mean_cross_entropy(lambda x: torch.zeros(len(x), 3, dtype=torch.bfloat16), images, labels) == pytest.approx(
        1.0986123
    )


@pytest.mark.parametrize("product", ["exact", "difference"])
@pytest.mark.parametrize(
    "values,k,expected",
    [
        ([3.0, -10.0, 1.0], 2, (3, 1)),
        ([2.0, 2.0, 1.0], 2, (2, 2)),
        ([4.0, 1.0], 5, (4, 1)),
        ([-3.0, -1.0], 1, (-1,)),
        ([0.0] * 6, 3, (0, 0, 0)),
    ],
)
def test_quadratic_forms(product, values, k, expected):
    _, estimator = quadratic_estimator(values, k=k, product=product)
    spectrum = estimator.probe(*NOTHING, None).spectra[0]
    assert spectrum.eigenvalues == pytest.approx(expected, rel=1e-6, abs=0 if any(values) else 1e-12)
    assert spectrum.converged


@pytest.mark.parametrize("product", ["exact", "difference"])
@pytest.mark.parametrize(
    "form", [lambda m, x, y: m.weight.sum(), lambda m, x, y: torch.zeros(())], ids=["linear", "unused"]
)
def test_layer_without_curvature_is_zero_not_nan(product, form):
    module = Quadratic([1.0] * 4)
    spectrum = (
        HessianEstimator(module, {"form": module}, settings(product=product, k=2), 0, loss=form)
        .probe(*NOTHING, None)
        .spectra[0]
    )
    assert spectrum.eigenvalues == (0.0, 0.0) and spectrum.converged


def test_weight_of_zeros_can_be_differenced():
    module, estimator = quadratic_estimator([3.0, 2.0], product="difference")
    nn.init.zeros_(module.weight)
    assert estimator.probe(*NOTHING, None).spectra[0].eigenvalues == pytest.approx((3, 2))


def test_auto_differences_only_grouped_convolutions_between_smooth_activations():
    def resolved(kind, product="auto", activation=nn.SiLU):
        module = network(kind, activation)
        return HessianEstimator(module, layers_of(module), settings(product=product), 0).product

    assert [resolved(kind) for kind in ("plain", "strided", "grouped", "depthwise")] == [
        "exact", "exact", "difference", "difference",
    ]  # fmt: skip
    for kinked in (nn.ReLU, nn.ReLU6, nn.Hardswish, nn.Identity):  # with none, there may be one in the forward itself
        assert resolved("depthwise", activation=kinked) == "exact"
    assert resolved("plain", "difference") == "difference" and resolved("grouped", "exact") == "exact"
    with pytest.raises(ValueError, match="take JacobianEstimator"):
        resolved("plain", "jacobian")


def test_a_layer_elsewhere_or_in_16_bits_is_named():
    module = network()
    expected = "layer other: expected its weight to be an FP32 or FP64 parameter of the module, got a torch.float32"
    with pytest.raises(ValueError, match=expected):
        HessianEstimator(module, {"other": nn.Linear(2, 2)}, settings(), 0)
    with pytest.raises(ValueError, match="layer pool: .* got no tensor; leave the layer out"):
        HessianEstimator(module, {"pool": nn.Flatten()}, settings(), 0)
    with pytest.raises(ValueError, match="got a torch.bfloat16 tensor"):
        HessianEstimator(module.bfloat16(), layers_of(module), settings(), 0)


def noisy_loss(module, images, labels):
    """Draws from every generator of the device."""
    return loss(module, images + 1e-3 * torch.randn_like(images), labels) + 0 * torch.rand(1).item()


@pytest.mark.parametrize("product", ["exact", "difference"])
def test_no_trace(product):
    module = used_network()
    before = snapshot(module)
    estimator = HessianEstimator(module, layers_of(module), settings(product=product), 0, loss=noisy_loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator.probe(*batch(), None)
    assert_same(before, snapshot(module))


@pytest.mark.parametrize("product", ["exact", "difference"])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_no_trace_when_the_probe_is_interrupted(product, call):
    module = used_network()
    calls = []

    def failing(module, images, labels):
        calls.append(torch.rand(1))
        if len(calls) == call:
            raise KeyboardInterrupt
        return loss(module, images, labels)

    layers = {**layers_of(module), "norm1": module[1], "norm2": module[4]}
    estimator = HessianEstimator(module, layers, settings(product=product), 0, failing)
    before = snapshot(module)
    with pytest.raises(KeyboardInterrupt):
        estimator.probe(*batch(), None)
    assert_same(before, snapshot(module))


def test_probe_in_training_changes_nothing_of_the_training():
    def train(probing):
        module = network("depthwise")
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        estimator = HessianEstimator(module, layers_of(module), settings(), 0)
        torch.manual_seed(5)
        for step in range(6):
            optimizer.zero_grad()
            loss(module, *batch()).backward()
            if probing and step % 2 == 0:
                estimator.probe(*batch(), None)
            optimizer.step()
        return module.state_dict()

    with_probe, without = train(True), train(False)
    assert all(torch.equal(with_probe[key], without[key]) for key in without)


def test_probe_under_no_grad_and_of_frozen_layers():
    module, (images, labels) = network(), batch()
    expected = HessianEstimator(module, layers_of(module), settings(), 0).probe(images, labels, None)
    module.requires_grad_(False)
    with torch.no_grad():
        got = HessianEstimator(module, layers_of(module), settings(), 0).probe(images, labels, None)
    assert got.spectra == expected.spectra


def live_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


@pytest.mark.parametrize("product", ["exact", "difference"])
def test_fifty_probes_leave_only_one_16_bit_vector_a_layer(product):
    module = network("strided")
    images, labels = batch(count=2)
    others = live_tensors()  # kept, so that no later tensor gets the identity of one of them
    before, known = len(others), set(map(id, others))
    estimator = HessianEstimator(module, layers_of(module), settings(product=product, iterations=3, k=1), 0)
    counts = []
    for _ in range(50):
        estimator.probe(images, labels, None)
        counts.append(len(live_tensors()) if len(counts) in (1, 49) else None)
    assert counts[1] == counts[49] == before + len(layers_of(module))
    kept = [tensor for tensor in live_tensors() if id(tensor) not in known and tensor.dtype == torch.float16]
    assert sorted(map(len, kept)) == sorted(layer.weight.numel() for layer in layers_of(module).values())


@pytest.mark.parametrize("product", ["exact", "difference"])
def test_model_is_freed_without_the_collector(product):
    module = network()
    estimator = HessianEstimator(module, layers_of(module), settings(product=product), 0)
    estimator.probe(*batch(), None)
    alive = [weakref.ref(parameter) for parameter in module.parameters()]
    gc.collect()
    gc.disable()
    try:
        del module, estimator
        assert all(reference() is None for reference in alive)
    finally:
        gc.enable()


class PricedLayers(nn.Module):
    """Quadratic layers whose every loss evaluation moves a fake clock."""

    def __init__(self, count):
        super().__init__()
        self.parts = nn.ModuleList(Quadratic([4.0, 3.0, 2.0, 1.0, 0.5, 0.1]) for _ in range(count))
        self.seconds = 0.0
        self.price = 1.0

    def layers(self):
        return {f"layer{index}": part for index, part in enumerate(self.parts)}


def priced_loss(module, images, labels):
    module.seconds += module.price
    return sum(part(images) for part in module.parts)


def priced(count=6, **changes):
    module = PricedLayers(count)
    chosen = settings(**(dict(product="difference", k=2, iterations=6, tolerance=1e-12) | changes))
    return module, HessianEstimator(module, module.layers(), chosen, 0, priced_loss, now=lambda: module.seconds)


def test_budget_bounds_the_seconds_and_all_layers_take_turns():
    module, estimator = priced()
    # A first look takes k = 2 products of 2 gradients of 1 s each: 4 s a layer.
    first = estimator.probe(*NOTHING, 30.0)
    assert first.layers == tuple(module.layers()) and first.seconds == 24.0
    seen = []
    for probe in [estimator.probe(*NOTHING, 30.0) for _ in range(3)]:
        # Later ones take 6 products: 12 s a layer.
        assert probe.seconds == 24.0 and probe.products == 12
        seen += probe.layers
    assert seen == list(module.layers())
    assert estimator.probe(*NOTHING, 36.0).layers == ("layer0", "layer1", "layer2")


@pytest.mark.parametrize("budget", [0.0, 3.0])
def test_one_layer_is_refreshed_however_small_the_budget(budget):
    module, estimator = priced()
    turns = [estimator.probe(*NOTHING, budget).layers for _ in range(7)]
    assert turns == [(f"layer{index % 6}",) for index in range(7)]


def test_prediction_follows_the_newest_price_and_then_each_layers_own():
    module, estimator = priced(3)
    module.price = 100.0
    assert estimator.probe(*NOTHING, 30.0).layers == ("layer0",)
    module.price = 1.0
    # layer0 took 1200 s in its last turn, so it does not fit until it is first again.
    assert estimator.probe(*NOTHING, 40.0).layers == ("layer1", "layer2")
    assert estimator.probe(*NOTHING, 40.0).layers == ("layer0", "layer1", "layer2")


def test_warm_start_converges_in_fewer_products():
    module = network("plain")
    images, labels = batch()
    chosen = settings(k=1, iterations=40, tolerance=1e-3)
    estimator = HessianEstimator(module, layers_of(module), chosen, 0)
    first, second = (estimator.probe(images, labels, None) for _ in range(2))
    assert second.products < first.products
    for cold, warm in zip(first.spectra, second.spectra, strict=True):
        assert warm.converged and warm.eigenvalues[0] == pytest.approx(cold.eigenvalues[0], rel=1e-2)


@pytest.mark.parametrize("product", ["exact", "difference"])
def test_warm_start_is_no_trap_once_another_direction_is_steepest(product):
    module, estimator = quadratic_estimator([5.0, 0.001] + [0.0005] * 30, k=1, product=product)
    assert estimator.probe(*NOTHING, None).spectra[0].eigenvalues == pytest.approx((5,), rel=1e-2)
    module.values[1] = 20.0
    assert estimator.probe(*NOTHING, None).spectra[0].eigenvalues == pytest.approx((20,), rel=1e-2)


def test_same_seed_same_spectra_whatever_was_drawn_in_between():
    module, (images, labels) = network(), batch()

    def spectra(seed):
        torch.rand(seed + 3)
        estimator = HessianEstimator(module, layers_of(module), settings(k=1, iterations=2), seed)
        return [estimator.probe(images, labels, None).spectra for _ in range(2)]

    assert spectra(0) == spectra(0)
    assert spectra(0) != spectra(1)


@pytest.mark.parametrize("product", ["exact", "difference"])
def test_non_finite_product_gives_no_value_and_keeps_the_model(product):
    module, estimator = quadratic_estimator([3.0, 1.0], product=product)
    estimator.probe(*NOTHING, None)
    weight = module.weight.detach().clone()
    module.values[0] = float("nan")
    assert estimator.probe(*NOTHING, None).spectra == (Spectrum((), 1, False),)
    assert torch.equal(module.weight, weight)
    module.values[0] = 3.0
    assert estimator.probe(*NOTHING, None).spectra[0].eigenvalues == pytest.approx((3, 1), rel=1e-2)


class ImmediateGraph:
    """Stands in for a captured graph on a CPU: a replay calls the function into the same outputs."""

    made: list[ImmediateGraph] = []
    peak_bytes = 1000

    def __init__(self, function, pool):
        assert pool is not None
        self.function, self.replays, self.released = function, 0, False
        self.outputs = function()
        ImmediateGraph.made.append(self)

    def replay(self):
        assert not self.released
        self.replays += 1
        for output, value in zip(self.outputs, self.function(), strict=True):
            output.copy_(value)
        return self.outputs

    def release(self):
        self.released, self.outputs, self.function = True, None, None


class NoPool:
    handle = "pool"

    def release(self):
        pass


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(hessian, "_can_capture", lambda device: True)
    monkeypatch.setattr(hessian, "Pool", NoPool)
    monkeypatch.setattr(graphs, "Graph", ImmediateGraph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(ImmediateGraph, "made", [])
    return ImmediateGraph.made


def test_one_graph_serves_all_layers_of_a_probe_and_is_released(capturing):
    module, (images, labels) = network("depthwise", nn.SiLU), batch()
    estimator = HessianEstimator(module, layers_of(module), settings(), 0)
    captured = estimator.probe(images, labels, None)
    (graph,) = capturing
    assert graph.released and graph.replays == 2 * captured.products
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hessian, "_can_capture", lambda device: False)
        eager = HessianEstimator(module, layers_of(module), settings(), 0).probe(images, labels, None)
    assert [spectrum.eigenvalues for spectrum in captured.spectra] == [
        pytest.approx(spectrum.eigenvalues, rel=1e-2, abs=1e-3) for spectrum in eager.spectra
    ]


def test_in_a_lent_pool_one_graph_serves_probe_after_probe(capturing):
    module = network("depthwise", nn.SiLU)
    estimator = HessianEstimator(module, layers_of(module), settings(), 0)
    probes = [estimator.probe(*batch(count=count), None, "lent") for count in (12, 12, 10)]
    first, second = capturing  # one for each count of images
    assert first.released and not second.released
    assert first.replays == 2 * (probes[0].products + probes[1].products)
    assert all(1000 < probe.replayed_bytes < 100_000 for probe in probes)


def test_graph_is_released_and_weight_restored_after_a_fault(capturing, monkeypatch):
    module = network("depthwise", nn.SiLU)
    before = snapshot(module)
    estimator = HessianEstimator(module, layers_of(module), settings(), 0)
    monkeypatch.setattr(ImmediateGraph, "replay", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        estimator.probe(*batch(), None)
    assert capturing[0].released
    assert_same(before, snapshot(module))


def test_failed_capture_falls_back_for_good_and_says_why(capturing, monkeypatch):
    attempts = []

    def refuse(function, pool):
        attempts.append(function)
        raise CaptureError("AcceleratorError: operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "Graph", refuse)
    module = network("depthwise", nn.SiLU)
    estimator = HessianEstimator(module, layers_of(module), settings(), 0)
    assert estimator.eager_reason is None
    probes = [estimator.probe(*batch(), None) for _ in range(2)]
    assert estimator.eager_reason == "AcceleratorError: operation not permitted when stream is capturing"
    assert len(attempts) == 1
    assert all(spectrum.eigenvalues for probe in probes for spectrum in probe.spectra)


def test_exact_products_are_not_captured(capturing):
    module = network()
    HessianEstimator(module, layers_of(module), settings(), 0).probe(*batch(), None)
    assert not capturing


class TestOnACard:
    pytestmark = gpu

    @pytest.mark.parametrize("product", ["exact", "difference"])
    def test_agrees_with_the_cpu_and_with_eager(self, product, monkeypatch):
        spectra = {}
        for place in ("cpu", "eager", "captured"):
            device = "cpu" if place == "cpu" else "cuda"
            module = network("depthwise", nn.SiLU).to(device)
            monkeypatch.setattr(hessian, "_can_capture", lambda device, place=place: place == "captured")
            chosen = settings(product=product, iterations=80, tolerance=EVERY_PRODUCT)
            estimator = HessianEstimator(module, layers_of(module), chosen, 0)
            spectra[place] = [s.eigenvalues for s in estimator.probe(*batch(device=device), None).spectra]
            assert estimator.eager_reason is None
        for place in ("eager", "captured"):
            for got, expected in zip(spectra[place], spectra["cpu"], strict=True):
                assert got == pytest.approx(expected, rel=2e-2, abs=2e-2 * expected[0])

    @pytest.mark.parametrize("product", ["exact", "difference"])
    def test_no_trace(self, product):
        module = used_network("cuda")
        before = snapshot(module, "cuda")
        estimator = HessianEstimator(module, layers_of(module), settings(product=product), 0)
        estimator.probe(*batch(device="cuda"), None)
        assert_same(before, snapshot(module, "cuda"))
        assert torch.rand(2, device="cuda").max() < 1

    @pytest.mark.parametrize("product", ["exact", "difference"])
    def test_memory_is_back_after_each_probe(self, product):
        module = network("depthwise").cuda()
        images, labels = batch(device="cuda")
        estimator = HessianEstimator(module, layers_of(module), settings(product=product), 0)
        readings = []
        for _ in range(10):
            estimator.probe(images, labels, None)
            readings.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        assert readings[1] == readings[9]

    def test_uncapturable_loss_falls_back_and_leaves_torch_usable(self):
        def reading(module, images, labels):
            value = loss(module, images, labels)
            return value + 0 * float(value.detach())

        module = network("depthwise", nn.SiLU).cuda()
        estimator = HessianEstimator(module, layers_of(module), settings(), 0, loss=reading)
        probe = estimator.probe(*batch(device="cuda"), None)
        assert "capturing" in estimator.eager_reason
        assert all(spectrum.eigenvalues for spectrum in probe.spectra)
        assert torch.rand(2, device="cuda").max() < 1
