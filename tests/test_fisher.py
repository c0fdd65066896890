"""The Fisher's eigenvalues: dense truth in float64, labels drawn from the model, no trace on it."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from curved import assert_no_trace, assert_same, batch, layers_of, network, settings, snapshot, used_network
from torch import nn

from triaccel_bench import curvature, fisher, jacobian
from triaccel_bench.fisher import FisherEstimator
from triaccel_bench.graphs import Pool
from triaccel_bench.jacobian import JacobianEstimator
from triaccel_bench.probe import output_gradients, tapped

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def estimator(module, seed=0, **changes) -> FisherEstimator:
    return FisherEstimator(module, layers_of(module), settings(estimator="fisher", **changes), seed)


@pytest.fixture
def drawn(monkeypatch) -> list[torch.Tensor]:
    """The labels that each pass drew."""
    labels = []
    real = fisher.sampled_gradient

    def watching(logits, draws, backend):
        gradient = real(logits, draws, backend=backend)
        labels.append((gradient - logits.softmax(1)).argmin(1))
        return gradient

    monkeypatch.setattr(fisher, "sampled_gradient", watching)
    return labels


def dense_fisher(module, name, images, labels) -> torch.Tensor:
    """(1/N) sum of outer products of single samples' gradients, in float64, of a copy in evaluation mode."""
    model = copy.deepcopy(module).double().eval()
    weight = model.get_parameter(f"{name}.weight")
    total = torch.zeros(weight.numel(), weight.numel(), dtype=torch.float64)
    for image, label in zip(images.double(), labels, strict=True):
        value = nn.functional.cross_entropy(model(image[None]), label[None])
        gradient = torch.autograd.grad(value, weight)[0].flatten()
        total += gradient.outer(gradient) / len(images)
    return total


@pytest.mark.parametrize("kind", ["plain", "strided", "dilated", "grouped", "depthwise"])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_dense_blocks(kind, dtype, tolerance, activation, drawn):
    module = network(kind, activation, dtype)
    images, labels = batch(dtype)
    probe = estimator(module).probe(images, labels, None)
    assert probe.layers == tuple(layers_of(module)) and probe.products == 1 and probe.seconds > 0
    for name, spectrum in zip(probe.layers, probe.spectra, strict=True):
        truth = torch.linalg.eigvalsh(dense_fisher(module, name, images, drawn[0])).flip(0)[:5]
        errors = (torch.tensor(spectrum.eigenvalues, dtype=torch.float64) - truth).abs() / truth[0]
        assert len(spectrum.eigenvalues) == 5 and errors.max() <= tolerance, name
        assert spectrum.converged and spectrum.iterations == 1


def test_labels_follow_the_models_own_probabilities(drawn):
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 3)
            nn.init.zeros_(self.fc.weight)
            self.fc.bias.data = torch.tensor([0.1, 0.7, 0.2]).log()

        def forward(self, images):
            return self.fc(images)

    module = Fixed()
    reading = FisherEstimator(module, {"fc": module.fc}, settings(), 0)
    for _ in range(20):
        reading.probe(torch.zeros(500, 1), torch.zeros(500, dtype=torch.long), None)
    shares = torch.bincount(torch.cat(drawn), minlength=3) / len(torch.cat(drawn))
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.7, 0.2]), rtol=0, atol=0.02)


def test_given_labels_do_not_matter_and_the_seed_does():
    module, (images, labels) = network(), batch()
    first = estimator(module).probe(images, labels, None).spectra
    assert estimator(module).probe(images, 2 - labels, None).spectra == first
    assert estimator(module, seed=1).probe(images, labels, None).spectra != first
    again = estimator(module)
    assert again.probe(images, labels, None).spectra == first
    assert again.probe(images, labels, None).spectra != first  # the second probe draws anew


def test_more_eigenvalues_than_samples_or_weights():
    module, (images, labels) = network(), batch(count=2)
    probe = estimator(module, k=40).probe(images, labels, None)
    for layer, spectrum in zip(layers_of(module).values(), probe.spectra, strict=True):
        assert len(spectrum.eigenvalues) == min(40, layer.weight.numel())
        assert spectrum.eigenvalues[0] > 0 and set(spectrum.eigenvalues[2:]) == {0.0}


def test_no_curvature_is_zero_and_no_number_is_no_value():
    module, (images, labels) = network(), batch()
    module[-1].weight.data.zero_()
    spectra = estimator(module).probe(images, labels, None).spectra
    assert spectra[0].eigenvalues == (0.0,) * 5 and spectra[-1].eigenvalues[0] > 0
    images[3] = float("nan")
    assert all(s.eigenvalues == () and not s.converged for s in estimator(module).probe(images, labels, None).spectra)


def test_a_layer_that_is_not_called_has_none():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, images):
            return self.used(images.flatten(1))

    module = Spare()
    spectra = estimator(module).probe(torch.randn(6, 1, 2, 2), torch.zeros(6, dtype=torch.long), None).spectra
    assert spectra[0].eigenvalues[0] > 0 and spectra[1].eigenvalues == (0.0,) * 5


def test_a_layer_that_is_called_twice_or_an_output_that_is_none_is_named():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, images):
            return self.layer(self.layer(images.flatten(1)))

    module = Twice()
    with pytest.raises(ValueError, match="layer layer: expected one call .* got a second"):
        estimator(module).probe(torch.randn(6, 1, 2, 2), torch.zeros(6, dtype=torch.long), None)
    module = nn.Conv2d(1, 2, 1)
    with pytest.raises(ValueError, match=r"logits: expected \[6, classes\], got \[6, 2, 2, 2\]"):
        FisherEstimator(module, {"conv": module}, settings(), 0).probe(torch.randn(6, 1, 2, 2), torch.zeros(6), None)


def test_in_place_activations_right_after_a_layer_are_no_hindrance(drawn):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 3))
    images, labels = batch()
    probe = estimator(module).probe(images, labels, None)
    truth = torch.linalg.eigvalsh(dense_fisher(module, "0", images, drawn[0])).flip(0)
    assert probe.spectra[0].eigenvalues == pytest.approx(truth[:5].tolist(), rel=1e-4)


@pytest.mark.parametrize("kind", [FisherEstimator, JacobianEstimator])
def test_views_that_are_overwritten_in_place_are_read(kind):
    """As 1x1 convolutions are on a card: products whose result is permuted; and any layer on (N, T, F)."""

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 5, 1), nn.Linear(5, 3)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, images):
            x = self.relu(self.first(images))
            x = self.relu(self.second(x)).flatten(2).transpose(1, 2)
            return self.relu(self.third(x)).mean(1)

    class Permuted(nn.Conv2d):
        def forward(self, x):
            product = nn.functional.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias)
            return product.permute(0, 3, 1, 2)

    torch.manual_seed(0)
    plain = Views().double()
    viewed = copy.deepcopy(plain)
    viewed.second.__class__ = Permuted
    images, labels = batch(torch.float64)
    spectra = []
    for module in (plain, viewed):
        layers = {name: getattr(module, name) for name in ("first", "second", "third")}
        if kind is FisherEstimator:
            reading = FisherEstimator(module, layers, settings(), 0)
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(jacobian, "piecewise_linear", lambda module: True)
                reading = JacobianEstimator(module, layers, settings())
        spectra.append(reading.probe(images, labels, None).spectra)
    for one, other in zip(*spectra, strict=True):
        assert one.eigenvalues[0] > 0
        assert other.eigenvalues == pytest.approx(one.eigenvalues, rel=1e-8, abs=1e-14)


def test_a_call_that_autograd_does_not_record_is_named():
    class Unrecorded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, images):
            with torch.no_grad():
                return self.layer(images.flatten(1))

    with pytest.raises(ValueError, match="layer layer: expected a call that autograd records"):
        estimator(Unrecorded()).probe(torch.randn(6, 1, 2, 2), torch.zeros(6, dtype=torch.long), None)


class Scaled(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, 3 * self.weight, self.bias)


def tied() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    module[3].weight = module[1].weight
    return module


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    module[1].register_forward_hook(lambda layer, inputs, output: 2 * output)
    return module


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, images):
        return nn.functional.linear(images.flatten(1), self.layer.weight, self.layer.bias)


@pytest.mark.parametrize(
    "module, name",
    [(nn.Sequential(nn.Flatten(), Scaled(4, 3)), "1"), (tied(), "1"), (Functional(), "layer")],
    ids=["scaled", "tied", "functional"],
)
def test_a_weight_that_its_layers_call_does_not_explain_is_named(module, name):
    images = torch.randn(6, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=f"layer {name}: expected its weight to be used as it is and by its own call"):
        estimator(module).probe(images, torch.zeros(6, dtype=torch.long), None)
    layers = layers_of(module)
    trusted = FisherEstimator(module, layers, settings(), 0, trusted=True)
    assert len(trusted.probe(images, torch.zeros(6, dtype=torch.long), None).layers) == len(layers)


def test_other_peoples_hooks_come_after_ours(drawn):
    module = hooked()
    images = torch.randn(6, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    probe = estimator(module).probe(images, torch.zeros(6, dtype=torch.long), None)
    truth = torch.linalg.eigvalsh(dense_fisher(module, "1", images, drawn[-1])).flip(0)
    assert probe.spectra[0].eigenvalues == pytest.approx(truth[:5].tolist(), rel=1e-4, abs=1e-6)


def test_integer_images_are_read_in_the_dtype_of_the_weights(drawn):
    class FromBytes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, images):
            return self.layer(images.flatten(1).float() / 255)

    module = FromBytes()
    images = torch.randint(0, 256, (6, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    probe = estimator(module).probe(images, torch.zeros(6, dtype=torch.long), None)
    gradients = []
    for image, label in zip(images, drawn[-1], strict=True):
        value = nn.functional.cross_entropy(module(image[None]), label[None])
        gradients.append(torch.autograd.grad(value, module.layer.weight)[0].flatten())
    truth = torch.linalg.eigvalsh(torch.stack(gradients).double().T @ torch.stack(gradients).double() / 6).flip(0)
    assert probe.spectra[0].eigenvalues == pytest.approx(truth[:5].tolist(), rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("product", ["fisher", "exact", "difference", "jacobian"])
def test_autocast_and_inference_mode_around_a_probe_do_not_matter(product):
    module = network("plain", nn.ReLU if product == "jacobian" else nn.SiLU)
    images, labels = batch()
    changes = {"estimator": "fisher"} if product == "fisher" else {"product": product}

    def read():
        return curvature.eigenvalues(module, layers_of(module), images, labels, settings(**changes)).values

    expected = read()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(read(), expected)
    with torch.inference_mode():
        assert torch.equal(read(), expected)


def test_layers_of_another_kind_are_named_at_once():
    module = nn.Sequential(nn.Conv1d(1, 2, 1), nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="layer 0: expected nn.Linear, or nn.Conv2d with zero padding, got Conv1d"):
        FisherEstimator(module, {"0": module[0]}, settings(), 0)
    padded = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")
    with pytest.raises(ValueError, match="layer 0: .* got Conv2d with padding_mode='circular'"):
        FisherEstimator(nn.Sequential(padded), {"0": padded}, settings(), 0)
    with pytest.raises(ValueError, match="expected at least one, got none"):
        FisherEstimator(module, {}, settings(), 0)


def test_no_trace():
    assert_no_trace(estimator)


def test_no_trace_of_an_interrupted_probe():
    module = used_network()
    before = snapshot(module)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = module[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        estimator(module).probe(*batch(), None)
    handle.remove()
    assert_same(before, snapshot(module))
    assert not any(part._forward_hooks for part in module.modules())


def test_fifty_probes_keep_nothing_and_the_model_goes_without_the_collector():
    module = network("depthwise")
    images, labels = batch(count=3)
    reading = estimator(module)
    counts = []
    for _ in range(50):
        reading.probe(images, labels, None)
        if len(counts) in (1, 49):
            gc.collect()
            counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        else:
            counts.append(None)
    assert counts[1] == counts[49]
    alive = [weakref.ref(parameter) for parameter in module.parameters()]
    gc.collect()
    gc.disable()
    try:
        del module, reading
        assert all(reference() is None for reference in alive)
    finally:
        gc.enable()


def test_taps_show_each_layer_and_form_no_gradient_of_a_weight():
    module = network("grouped").double()
    images, _ = batch(torch.float64)
    module.eval()
    with tapped(layers_of(module), len(images)) as taps:
        logits = module(images)
    assert list(taps) == list(layers_of(module))
    returned = output_gradients(logits, torch.ones_like(logits), taps.values())
    for (name, layer), dy in zip(layers_of(module).items(), returned, strict=True):
        x = taps[name].x
        assert not x.requires_grad and layer.weight.grad is None and taps[name].output_elements == dy[0].numel()
        expected = torch.autograd.grad(module(images).sum(), layer.weight)[0]
        found = torch.autograd.grad(layer(x), layer.weight, dy)[0]
        torch.testing.assert_close(found, expected)


class TestOnACard:
    pytestmark = gpu

    @pytest.mark.parametrize("kind", ["plain", "depthwise"])
    def test_a_replay_agrees_with_the_cpu_and_follows_weights_and_images(self, kind):
        pool = Pool()
        module = network(kind, nn.SiLU)
        on_card = copy.deepcopy(module).cuda()
        here, there = estimator(module), estimator(on_card)
        for round_ in range(4):
            images, labels = batch(count=12)
            images = images + round_
            expected = here.probe(images, labels, None).spectra
            probe = there.probe(images.cuda(), labels.cuda(), None, pool.handle)
            assert there.eager_reason is None and probe.replayed_bytes > 0
            for got, truth in zip(probe.spectra, expected, strict=True):
                assert got.eigenvalues == pytest.approx(truth.eigenvalues, rel=2e-2, abs=1e-4 * truth.eigenvalues[0])
            with torch.no_grad():
                for target in (module, on_card):
                    for parameter in target.parameters():
                        parameter.mul_(1.1)

    def test_no_trace(self):
        pool = Pool()
        module = used_network("cuda")
        before = snapshot(module, "cuda")
        reading = estimator(module)
        for _ in range(3):
            reading.probe(*batch(device="cuda"), None, pool.handle)
        assert_same(before, snapshot(module, "cuda"))
        gc.collect()  # what other tests left
        held = torch.cuda.memory_allocated()
        for _ in range(10):
            reading.probe(*batch(device="cuda"), None, pool.handle)
        assert torch.cuda.memory_allocated() == held
