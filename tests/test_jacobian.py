"""The Hessian of ReLU networks in one go: dense truth of torch.func.hessian, and refusal of everything else."""

from __future__ import annotations

import copy

import pytest
import torch
from curved import (
    assert_no_trace,
    assert_same,
    batch,
    dense_eigenvalues,
    layers_of,
    network,
    settings,
    snapshot,
)
from torch import nn

from triaccel_bench import curvature, jacobian, models
from triaccel_bench.configuration import compose
from triaccel_bench.fisher import FisherEstimator
from triaccel_bench.graphs import Pool
from triaccel_bench.hessian import HessianEstimator
from triaccel_bench.jacobian import JacobianEstimator, piecewise_linear
from triaccel_bench.lanczos import projections

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def estimator(module, **changes) -> JacobianEstimator:
    return JacobianEstimator(module, layers_of(module), settings(product="jacobian", **changes))


@pytest.mark.parametrize("kind", ["plain", "strided", "dilated", "grouped", "depthwise"])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-2)])
def test_dense_blocks(kind, dtype, tolerance):
    module = network(kind, nn.ReLU, dtype)
    images, labels = batch(dtype)
    probe = estimator(module).probe(images, labels, None)
    for name, spectrum in zip(probe.layers, probe.spectra, strict=True):
        truth = dense_eigenvalues(module, name, images, labels)
        errors = [abs(got - true) / truth[0] for got, true in zip(spectrum.eigenvalues, truth, strict=True)]
        assert max(errors) <= tolerance, name
        assert spectrum.converged


@pytest.mark.parametrize("limit, groups", [(0, 3), (3_000, 2), (10**9, 1)])
def test_layers_go_in_groups(limit, groups, monkeypatch):
    module, (images, labels) = network("strided"), batch()
    expected = estimator(module).probe(images, labels, None).spectra
    passes = []
    real = jacobian.output_gradients
    monkeypatch.setattr(jacobian, "GROUP_BYTES", limit)
    monkeypatch.setattr(jacobian, "output_gradients", lambda *arguments: passes.append(1) or real(*arguments))
    found = estimator(module).probe(images, labels, None).spectra
    assert len(passes) == 3 * groups  # three classes
    assert found == expected


def test_projections_serve_where_no_dense_solver_is_fast(monkeypatch):
    module, (images, labels) = network(), batch()
    expected = estimator(module).probe(images, labels, None).spectra
    monkeypatch.setattr(jacobian, "_projected", lambda matrices: projections(matrices, 24))
    found = estimator(module).probe(images, labels, None).spectra
    for got, truth in zip(found, expected, strict=True):
        assert got.eigenvalues == pytest.approx(truth.eigenvalues, rel=1e-3)


def test_a_residual_network_with_pooling():
    network = models.build(compose(["model=resnet8"]).model, 10)
    module = network.module.double()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.arange(6)
    for _ in range(3):
        module(images)
    names = ["conv1", "layer2.downsample.0", "fc"]
    layers = {name: network.layers[name] for name in names}
    found = JacobianEstimator(module, layers, settings(k=3)).probe(images, labels, None)
    exact = HessianEstimator(
        module, layers, settings(product="exact", k=3, iterations=60, tolerance=1e-9), 0, _mean_loss
    ).probe(images, labels, None)
    for got, truth in zip(found.spectra, exact.spectra, strict=True):
        assert got.eigenvalues[0] == pytest.approx(truth.eigenvalues[0], rel=1e-6)


def _mean_loss(module, images, labels):
    return nn.functional.cross_entropy(module(images), labels)


@pytest.mark.parametrize("name,expected", [("resnet8", True), ("resnet18", True), ("efficientnet_b0", False)])
def test_which_models_qualify(name, expected):
    assert piecewise_linear(models.build(compose([f"model={name}"]).model, 10).module) is expected


def test_unknown_parts_do_not_qualify():
    class Squared(nn.Conv2d):
        def forward(self, images):
            return super().forward(images) ** 2

    for part in (nn.SiLU(), nn.Softmax(1), Squared(2, 2, 1)):
        module = nn.Sequential(nn.Conv2d(2, 2, 1), part)
        assert not piecewise_linear(module)
        with pytest.raises(ValueError, match="product=jacobian: expected a network of"):
            estimator(module)


def test_hooks_and_patched_calls_do_not_qualify():
    for tamper in (
        lambda module: module[0].register_forward_hook(lambda part, inputs, output: output**2),
        lambda module: module.register_forward_pre_hook(lambda part, inputs: None),
        lambda module: module[1].__dict__.update(forward=torch.sigmoid),
    ):
        module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
        assert piecewise_linear(module)
        tamper(module)
        assert not piecewise_linear(module)


def test_parts_in_two_places_other_padding_and_batch_statistics_do_not_qualify():
    layer = nn.Linear(4, 4)
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    for module in (
        nn.Sequential(layer, nn.ReLU(), layer),
        tied,
        nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")),
        nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2, track_running_stats=False)),
    ):
        assert not piecewise_linear(module)
    relu = nn.ReLU()
    assert not piecewise_linear(nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu))  # careful, not wrong


def test_what_is_no_classifier_is_named():
    module = nn.Sequential(nn.Conv2d(1, 2, 1))
    with pytest.raises(ValueError, match=r"logits: expected \[6, classes\], got \[6, 2, 2, 2\]"):
        estimator(module).probe(torch.randn(6, 1, 2, 2), torch.zeros(6), None)


def test_which_estimator_serves_which_settings():
    relu, smooth, grouped = network(), network(activation=nn.SiLU), network("depthwise", nn.SiLU)

    def built(module, rows=36, **changes):
        return curvature.build(module, layers_of(module), settings(**changes), 0, rows=rows)

    assert isinstance(built(relu), JacobianEstimator)
    assert isinstance(built(relu, product="exact"), HessianEstimator)
    assert built(relu, rows=513).product == built(relu, rows=None).product == "exact"
    assert built(smooth).product == "exact" and built(grouped).product == "difference"
    assert isinstance(built(smooth, estimator="fisher"), FisherEstimator)
    with pytest.raises(ValueError, match="product=jacobian"):
        built(smooth, product="jacobian")
    with pytest.raises(ValueError, match="expected at most 512 rows .* got 513; lower"):
        built(relu, product="jacobian", rows=513)


def test_too_many_rows_are_refused_where_nobody_knew_their_number_before(monkeypatch):
    module, (images, labels) = network(), batch()
    monkeypatch.setattr(jacobian, "MOST_JACOBIAN_ROWS", 35)
    with pytest.raises(ValueError, match="expected at most 35 rows .* got 36"):
        estimator(module).probe(images, labels, None)


def test_a_layer_alone_and_in_any_order_is_read_alike():
    module, (images, labels) = network(), batch()
    layers = layers_of(module)
    first = next(iter(layers))
    whole = curvature.eigenvalues(module, layers, images, labels, settings())
    alone = curvature.eigenvalues(module, {first: layers[first]}, images, labels, settings())
    backwards = curvature.eigenvalues(module, dict(reversed(layers.items())), images, labels, settings())
    torch.testing.assert_close(alone.values[0], whole.values[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(backwards.values.flip(0), whole.values, rtol=1e-5, atol=0)


@pytest.mark.parametrize("changes", [{}, {"product": "exact"}, {"estimator": "fisher"}], ids=str)
def test_one_function_for_all(changes):
    module, (images, labels) = network(), batch()
    before = snapshot(module)
    found = curvature.eigenvalues(module, layers_of(module), images, labels, settings(k=100, **changes))
    assert_same(before, snapshot(module))
    assert found.values.shape == (3, 100) and found.values.dtype == torch.float64 and found.seconds > 0
    for row, layer, converged in zip(found.values, layers_of(module).values(), found.converged, strict=True):
        size = min(100, layer.weight.numel())
        assert row[:size].isfinite().all() and row[size:].isnan().all() and converged.dtype == torch.bool
        assert (row[:size].diff() <= 0).all()


def test_no_trace():
    assert_no_trace(estimator)


class TestOnACard:
    pytestmark = gpu

    def test_a_replay_is_the_hessian(self):
        pool = Pool()
        module = network("strided").cuda()
        images, labels = batch(device="cuda")
        reading = estimator(module)
        for _ in range(3):
            probe = reading.probe(images, labels, None, pool.handle)
            assert reading.eager_reason is None
            for name, spectrum in zip(probe.layers, probe.spectra, strict=True):
                truth = dense_eigenvalues(copy.deepcopy(module).cpu(), name, images.cpu(), labels.cpu())
                assert spectrum.eigenvalues[0] == pytest.approx(truth[0], rel=2e-2)
