"""How right curvature probes are: beside converged eigenvalues, beside each other, and beside curvlinops."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import pandas
import torch
from bench_parts import plain_model
from bench_rig import SEED, Bench, Figures
from torch import Tensor, nn

from triaccel_bench import curvature, precision
from triaccel_bench.meters import Clock
from triaccel_bench.probe import Borrow, Estimator, Probe
from triaccel_bench.records import RunRecord, finite
from triaccel_bench.settings import CurvatureSettings
from triaccel_bench.trainer import Trainer

METHOD = "triaccel_precision_curvature"
REFERENCE = {"estimator": "hessian", "k": 1, "iterations": 100, "tolerance": 1e-3}
"""Lanczos until it has converged, for the largest eigenvalue alone."""
REFERENCE_SEED = SEED + 1
"""Of the references' start vectors: not those of the probes."""
CHECK_SECONDS, TRUTH_SECONDS = 60.0, 120.0
"""After which no further layer is begun."""
RANKED_BATCHES, RANKED_TOLERANCE = 4, 1e-2
NO_CURVLINOPS = "curvlinops is not installed; pip install -e '.[curvature-truth]'"


def settings_of(model: str, estimator: str, epochs: int) -> tuple[str, ...]:
    """The overrides of a run: B stands still, precision and rates follow the signals."""
    return f"model={model}", f"method={METHOD}", f"method.curvature.estimator={estimator}", f"epochs={epochs}"


class TrainedModels:
    """Weights that earlier jobs trained; what none has left yet is trained over ``epochs``, by Fisher probes."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._states: dict[str, dict[str, Tensor]] = {}

    def keep(self, model: str, made: Trainer) -> None:
        state = made.network.module.state_dict()
        self._states[model] = {key: value.detach().cpu().clone() for key, value in state.items()}

    def trainer(self, bench: Bench, model: str) -> Trainer:
        """A trainer whose network is trained."""
        made = bench.trainer(*settings_of(model, "fisher", self._epochs))
        if model in self._states:
            made.network.module.load_state_dict(self._states[model])
        else:
            made.train()
            self.keep(model, made)
        return made


def probe_images(made: Trainer, draw: int) -> tuple[Tensor, Tensor]:
    """As many training images as a probe reads, and their labels."""
    count = min(made.settings.method.curvature.batch, made.data.train_count)
    drawn = random.Random(f"images {draw}").sample(range(made.data.train_count), count)
    return made.data.plain_batch(torch.tensor(drawn, device=made.hardware.device))


def changed(made: Trainer, **changes: Any) -> CurvatureSettings:
    """The run's curvature settings but for ``changes``."""
    return made.settings.method.curvature.model_copy(update=changes)


def estimator_of(made: Trainer, **changes: Any) -> Estimator:
    """As the run's own, but for ``changes`` of its settings."""
    module, layers = made.network.module, made.network.layers
    settings = changed(made, **changes)
    rows = settings.batch * made.network.classes
    return curvature.build(module, layers, settings, SEED, _borrow_of(made), made.hardware.kernels, rows)


def _borrow_of(made: Trainer) -> Borrow:
    return partial(precision.strict_fp32, made.network)


class StoppableClock(Clock):
    """A clock that stands still while the run is looked at by somebody else."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stopped_seconds = 0.0

    def read(self) -> float:
        return super().read() - self.stopped_seconds

    def now(self) -> float:
        return super().now() - self.stopped_seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        began = self.read()
        try:
            yield
        finally:
            self.stopped_seconds += self.read() - began


class Checks:
    """Follows every probe of a run by references of layers it refreshed, at the same weights and on the same images.

    The trainer's clock stands still meanwhile, and the estimator has stopped its own: neither training time,
    the probe's price nor what probes may take later is touched.

    Args:
        exact: layers whose first reference is by double backward, or ``None``: all references are; others
            are by gradient differences, which share a probe's way but not its few iterations.
        most: references in all, spread evenly over the probes, layers checked least often first.
    """

    def __init__(self, made: Trainer, exact: Collection[str] | None, most: int) -> None:
        self._made, self._exact, self._most = made, exact, most
        made.clock = self._clock = StoppableClock(made.hardware.device)
        self._probe = made.method.probe
        made.method.probe = self.probe
        batch, every = made.settings.method.batch.initial, made.settings.method.curvature.every
        self._probes_left = made.settings.epochs * math.ceil(made.data.train_count / batch) // every
        self._looks: Counter[str] = Counter()
        self._checked: Counter[str] = Counter()
        self.found: list[dict[str, Any]] = []

    def probe(self, images: Tensor, labels: Tensor, step: int, *arguments: Any) -> Probe | None:
        """In the place of ``Method.probe``."""
        probe = self._probe(images, labels, step, *arguments)
        quota = math.ceil((self._most - len(self.found)) / max(1, self._probes_left))
        self._probes_left -= 1
        if probe is not None:
            self._looks.update(probe.layers)
            with self._clock.stopped():
                self._check(probe, images, labels, step, quota)
        return probe

    def _check(self, probe: Probe, images: Tensor, labels: Tensor, step: int, quota: int) -> None:
        found = {name: spectrum.eigenvalues for name, spectrum in zip(probe.layers, probe.spectra, strict=True)}
        names = sorted((name for name in found if found[name]), key=self._order)[:quota]
        products: dict[str, list[str]] = {"exact": [], "difference": []}
        for name in names:
            first = self._exact is None or (name in self._exact and not self._checked[name])
            products["exact" if first else "difference"].append(name)
        for product, chosen in products.items():
            if not chosen or self._clock.stopped_seconds > CHECK_SECONDS:
                continue
            values, converged, _ = references(self._made, chosen, images, labels, product)
            for name in chosen:
                self._checked[name] += 1
                self.found.append({
                    "layer": name, "step": step, "look": self._looks[name], "product": product,
                    "error": _relative(found[name][0], values[name]), "converged": converged[name],
                    "over": found[name][0] - values[name],
                })  # fmt: skip

    def _order(self, name: str) -> tuple[int, bool]:
        return self._checked[name], self._exact is not None and name not in self._exact

    def figure(self) -> dict[str, Any]:
        """Median relative error over the references that converged, and how it is spread."""
        columns = ["layer", "step", "look", "product", "error", "converged", "over"]
        table = pandas.DataFrame(self.found, columns=columns)
        good = table[table.converged.astype(bool) & table.error.notna()]
        if good.empty:
            raise RuntimeError(f"none of {len(table)} references converged; train longer or look at a probe alone")
        worst = good.loc[good.error.idxmax()]
        exact = good[good["product"] == "exact"]
        return {
            "value": good.error.median(),
            "p90": good.error.quantile(0.9),
            "worst": worst.error,
            "worst_layer": f"{worst.layer} at step {worst.step}, look {worst.look}",
            "too_large": float((good.over > 0).mean()),
            "first_looks": _median(good[good.look == 1].error),
            "later_looks": _median(good[good.look > 1].error),
            "beside_exact": _median(exact.error),
            "checks": len(good),
            "exact_checks": len(exact),
            "layers": good.layer.nunique(),
            "left_out": len(table) - len(good),
            "check_s": self._clock.stopped_seconds,
        }


def error(bench: Bench, model: str, epochs: int, most: int, exact: Collection[str] | None) -> Figures:
    """How far the largest eigenvalues of a run's Hessian probes are from converged ones."""
    made = bench.trainer(*settings_of(model, "hessian", epochs))
    checks = Checks(made, exact, most)
    made.train()
    probing, whole = probing_and_training(made.run)
    return {f"hessian/error/{model}": checks.figure() | {"probe_share": probing / whole}}


def probing_and_training(run: RunRecord) -> tuple[float, float]:
    """Seconds of a run's probes, and of its training, which they are part of."""
    return tuple(sum(getattr(epoch, key) for epoch in run.epochs) for key in ("probe_seconds", "train_seconds"))


def references(
    made: Trainer, names: Sequence[str], images: Tensor, labels: Tensor, product: str, **changes: Any
) -> tuple[dict[str, float], dict[str, bool], float]:
    """By layer: its Hessian block's largest eigenvalue, and whether that converged; and the seconds it all took."""
    layers = {name: made.network.layers[name] for name in names}
    settings = changed(made, **(REFERENCE | {"product": product} | changes))
    found = curvature.eigenvalues(
        made.network.module, layers, images, labels, settings, REFERENCE_SEED, _borrow_of(made)
    )
    values = dict(zip(names, found.values[:, 0].tolist(), strict=True))
    return values, dict(zip(names, found.converged.tolist(), strict=True)), found.seconds


def ranks(bench: Bench, model: str, trained: TrainedModels, product: str) -> Figures:
    """Spearman's correlation over layers of the Fisher blocks' largest eigenvalues and the Hessian blocks'."""
    made = trained.trainer(bench, model)
    names = list(made.network.layers)
    fisher, hessian = [], []
    for draw in range(RANKED_BATCHES):
        images, labels = probe_images(made, draw)
        found = curvature.eigenvalues(
            made.network.module,
            made.network.layers,
            images,
            labels,
            changed(made, estimator="fisher", k=1),
            draw,
            _borrow_of(made),
        )
        fisher.append(pandas.Series(found.values[:, 0].tolist(), names))
        hessian.append(pandas.Series(references(made, names, images, labels, product, tolerance=RANKED_TOLERANCE)[0]))
    single = [spearman(a, b) for a, b in zip(fisher, hessian)]
    a, b = (pandas.concat(each, axis=1).mean(axis=1) for each in (fisher, hessian))
    farthest = (a.rank() - b.rank()).abs().idxmax()
    besides = {
        "single_batch": finite(sum(single) / len(single)),
        "spread": [finite(min(single)), finite(max(single))],
        "layers": len(names),
        "median_fisher_over_hessian": finite((a / b).median()),
        "farthest": f"{farthest}: {a.rank()[farthest]:.0f} and {b.rank()[farthest]:.0f}",
    }
    return {f"rank/fisher_hessian/{model}": {"value": spearman(a, b), **besides}}


def spearman(a: pandas.Series, b: pandas.Series) -> float:
    return a.rank().corr(b.rank())


def beside_curvlinops(
    bench: Bench, model: str, trained: TrainedModels, limits: Mapping[str, float], names: Sequence[str] | None = None
) -> Figures:
    """Share of layers whose largest eigenvalue is that of curvlinops' Hessian, within ``limits`` by our product."""
    rows = [f"time/curvlinops/{model}", *(f"truth/curvlinops/{model}/{product}" for product in limits)]
    try:
        import curvlinops  # noqa: F401
    except ImportError:
        return {row: {"value": None, "error": NO_CURVLINOPS} for row in rows}
    made = trained.trainer(bench, model)
    images, labels = probe_images(made, 0)
    plain = plain_copy(made, model)
    truth: dict[str, float] = {}
    seconds: list[float] = []
    with precision.strict_fp32(made.network):
        for name in names or tuple(made.network.layers):
            if sum(seconds) > TRUTH_SECONDS:
                break
            began = time.perf_counter()
            truth[name] = curvlinops_largest(plain, f"{name}.weight", images.contiguous(), labels)
            seconds.append(time.perf_counter() - began)
    ours = {product: references(made, list(truth), images, labels, product) for product in limits}
    taken = {f"ours_{product}_s": spent for product, (_, _, spent) in ours.items()}
    figures = {rows[0]: {"value": sum(seconds), "layers": len(truth), "longest": max(seconds), **taken}}
    for product, limit in limits.items():
        errors = {name: _relative(ours[product][0][name], truth[name]) for name in truth}
        outside = {name: finite(round(each, 4)) for name, each in errors.items() if not each <= limit}
        figures[f"truth/curvlinops/{model}/{product}"] = {
            "value": 1 - len(outside) / len(truth),
            "within": limit,
            "layers": len(truth),
            "median_error": finite(pandas.Series(errors).median()),
            "outside": outside or None,
        }
    return figures


def plain_copy(made: Trainer, model: str) -> nn.Module:
    """torchvision's own module with the network's weights, in evaluation mode."""
    plain = plain_model(model, made.settings.dataset.num_classes)
    plain.load_state_dict(made.network.module.state_dict())
    return with_other_silu(plain).to(made.hardware.device).eval()


def with_other_silu(module: nn.Module) -> nn.Module:
    """The module, its ``nn.SiLU`` made of operations whose backward has a forward derivative, as curvlinops needs."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.SiLU):
                setattr(part, name, _OtherSiLU())
    return module


class _OtherSiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


def curvlinops_largest(module: nn.Module, parameter: str, images: Tensor, labels: Tensor) -> float:
    """The algebraically largest eigenvalue of the mean cross-entropy's Hessian block, by curvlinops and ARPACK."""
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import eigsh

    weight = module.get_parameter(parameter)
    # Its check of determinism multiplies twice and compares bit for bit, as convolutions on a GPU may not be.
    operator = HessianLinearOperator(
        module, nn.CrossEntropyLoss(), [weight], [(images, labels)], check_deterministic=False
    ).to_scipy()
    start = numpy.random.default_rng(REFERENCE_SEED).standard_normal(weight.numel())
    if not operator.matvec(start).any():
        # Of a block of zeros ARPACK can make no start.
        return 0.0
    return float(eigsh(operator, 1, which="LA", v0=start, tol=REFERENCE["tolerance"], return_eigenvectors=False)[0])


def _relative(found: float, reference: float) -> float:
    """NaN beside a reference of 0, unless it is 0 too."""
    if found == reference:
        return 0.0
    return abs(found - reference) / abs(reference) if reference else math.nan


def _median(values: pandas.Series) -> float | None:
    return None if values.empty else float(values.median())
