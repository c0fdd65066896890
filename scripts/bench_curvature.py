#!/usr/bin/env python3
"""What curvature probes cost on this GPU, how right they are, and what other ways to read curvature would take.

python scripts/bench_curvature.py [--quick] [--only TEXT ...] [--data FILE.npz] [--out FILE] [--epochs N]

Rows, for each model: ``share`` is seconds of probes over seconds of training with its probes, all
epochs and the first probe's capture included; ``vram`` the larger of an epoch's training peak and
its probes' peak over the training peak, in the worst epoch; ``rounds`` how often each layer was
refreshed; ``error`` the median distance of probes from converged eigenvalues; ``rank`` Spearman's
correlation of Fisher and Hessian; ``truth`` the share of layers that agree with curvlinops after two
epochs (it is an extra: ``pip install -e '.[curvature-truth]'``). The file is written anew after each job. Exit
code 0 only if no target was missed and nothing failed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import curvature_truth
import torch
from bench_rig import SEED, Bench, Figures, Job, Targets, common_options, count, median_of, run_benchmark
from curvature_truth import METHOD, TrainedModels, estimator_of, probe_images, settings_of

from triaccel_bench import precision
from triaccel_bench.graphs import Pool
from triaccel_bench.hessian import mean_cross_entropy
from triaccel_bench.meters import Clock
from triaccel_bench.probe import leaving_no_trace
from triaccel_bench.records import RunRecord, Trace

MODELS = ("resnet18", "efficientnet_b0")
TARGETS = {
    "rank/fisher_hessian/resnet18": (">=", 0.9),
    "rank/fisher_hessian/efficientnet_b0": (">=", 0.8),
    "hessian/error/resnet18": ("<=", 0.10),
    "hessian/error/efficientnet_b0": ("<=", 0.15),
    "truth/curvlinops/resnet18/exact": ("==", 1.0),
    "truth/curvlinops/resnet18/jacobian": ("==", 1.0),
    "truth/curvlinops/efficientnet_b0/exact": ("==", 1.0),
    "truth/curvlinops/efficientnet_b0/difference": (">=", 0.9),
    **{f"hessian/share/{model}": ("in", (0.08, 0.12)) for model in MODELS},
    **{f"{estimator}/vram/{model}": ("<=", 1.10) for model in MODELS for estimator in ("fisher", "hessian")},
}
"""What the rows shall reach on any card."""
H200_TARGETS = {f"fisher/share/{model}": ("<=", 0.03) for model in MODELS}
"""And on an NVIDIA H200."""
AIMS = {
    **{f"fisher/share/{model}": 0.02 for model in MODELS},
    **{f"{estimator}/vram/{model}": 1.05 for model in MODELS for estimator in ("fisher", "hessian")},
}
"""What would be better still."""
REFERENCE_PRODUCT = {"resnet18": "exact", "efficientnet_b0": "difference"}
"""How converged eigenvalues are found: double backward of depthwise convolutions takes seconds a product."""
EXACT_LAYERS = (
    "classifier.1", "features.7.0.block.1.0", "features.7.0.block.3.0", "features.6.3.block.0.0",
    "features.6.2.block.1.0", "features.5.0.block.2.fc1", "features.4.0.block.1.0", "features.0.0",
)  # fmt: skip
"""Layers of EfficientNet-B0 whose probes are also held against double backward, the cheapest first but one."""
TRUTH_LIMITS = {"resnet18": {"exact": 0.02, "jacobian": 0.02}, "efficientnet_b0": {"exact": 0.02, "difference": 0.10}}
TRUTH_LAYERS = {
    "efficientnet_b0": (
        "classifier.1", "features.8.0", "features.7.0.block.1.0", "features.6.1.block.0.0", "features.5.1.block.2.fc2",
        "features.5.0.block.1.0", "features.4.1.block.3.0", "features.3.1.block.2.fc1", "features.3.0.block.1.0",
        "features.2.1.block.0.0", "features.1.0.block.0.0", "features.0.0",
    ),
}  # fmt: skip
"""Those of which curvlinops is asked, where not all are; from the classifier up, which is from cheap to dear."""
TRUTH_EPOCHS = 2
"""After which a network is held against curvlinops: young, and steep, where differences have it hardest."""
DOUBLE_BACKWARD_SECONDS = 30.0
"""After which no further layer is begun; the round is then scaled."""
WARM_UP_PROBES = 2


def training(bench: Bench, model: str, estimator: str, epochs: int, trained: TrainedModels | None = None) -> Figures:
    """A whole run: what its probes took of its time and memory, and how often they came round."""
    made = bench.trainer(*settings_of(model, estimator, epochs))
    trace = made.train()
    if trained is not None:
        trained.keep(model, made)
    every = made.settings.method.curvature.every
    rows = {
        f"{estimator}/share/{model}": share(made.run, trace, every),
        f"{estimator}/vram/{model}": memory(made.run),
        f"{estimator}/rounds/{model}": rounds(made.run, trace, every),
    }
    return {row: figure | ({"aim": AIMS[row]} if row in AIMS else {}) for row, figure in rows.items()}


def share(run: RunRecord, trace: Trace, every: int) -> dict[str, Any]:
    """Seconds of probes over seconds of training, which the probes are part of."""
    if not trace.probes:
        raise RuntimeError(f"no probe in {run.steps} steps, one in {every} was due; train longer")
    probing, whole = curvature_truth.probing_and_training(run)
    first, *later = (probe.seconds for probe in trace.probes)
    besides = {
        "without_first_probe": (probing - first) / (whole - first),
        "over_training_without_probes": probing / (whole - probing),
        "probes": len(trace.probes),
        "due": run.steps // every,
        "probe_ms": 1e3 * statistics.median(later or [first]),
        "first_probe_ms": 1e3 * first,
        "train_s": whole,
        "warnings": run.warnings or None,
    }
    if len(trace.probes) == run.steps // every and all(
        len(probe.layers) == len(trace.layers) for probe in trace.probes
    ):
        besides["note"] = "every probe that was due refreshed all layers: there was no more to do"
    return {"value": probing / whole, **besides}


def memory(run: RunRecord) -> dict[str, Any]:
    """The larger of training's peak and the probes' over training's, in the worst epoch.

    Both are the meter's, without the data set; an epoch's training peak has no probe in it.
    """
    peaks = [(epoch.memory_peak_bytes, epoch.probe_peak_bytes or 0) for epoch in run.epochs]
    if any(training is None for training, _ in peaks):
        raise RuntimeError(f"no memory was measured: {run.meter_reason}")
    training, probing = (max(each) for each in zip(*peaks))
    return {
        "value": max(max(pair) / pair[0] for pair in peaks),
        "whole_run": max(training, probing) / training,
        "training_gb": training / 1e9,
        "probe_gb": probing / 1e9,
        "reserved_gb": max(epoch.reserved_bytes or 0 for epoch in run.epochs) / 1e9,
    }


def rounds(run: RunRecord, trace: Trace, every: int) -> dict[str, Any]:
    """Refreshes over layers, and the steps between two of one layer."""
    steps = {name: [probe.step for probe in trace.probes if name in probe.layers] for name in trace.layers}
    gaps = [after - before for each in steps.values() for before, after in itertools.pairwise(each)]
    ages = [layer.lambda_age_steps for layer in run.layers if layer.lambda_age_steps is not None]
    return {
        "value": sum(map(len, steps.values())) / len(steps),
        "layers": len(steps),
        "probes": len(trace.probes),
        "due": run.steps // every,
        "layers_a_probe": statistics.median(len(probe.layers) for probe in trace.probes),
        "products_a_probe": statistics.median(sum(probe.iterations) for probe in trace.probes),
        "steps_between": statistics.median(gaps) if gaps else None,
        "longest_between": max(gaps, default=None),
        "age_at_end": statistics.median(ages) if ages else None,
        "never": sum(not each for each in steps.values()),
    }


def probe_times(bench: Bench, model: str, trained: TrainedModels, kind: str) -> Figures:
    """Milliseconds of a probe that reads all layers at once, its wait and its eigenvalues on the host included."""
    made = trained.trainer(bench, model)
    images, labels = probe_images(made, 0)
    chosen = {"fisher": {"estimator": "fisher"}, "jacobian": {"estimator": "hessian", "product": "jacobian"}}[kind]
    figures = {}
    for way in ("eager", "replayed"):
        with _lent_pool(bench, way == "replayed") as pool:
            estimator = estimator_of(made, **chosen)
            times = [
                1e3 * estimator.probe(images, labels, None, pool).seconds for _ in range(WARM_UP_PROBES + bench.repeats)
            ]
        besides = {"first_ms": times[0], "eager_reason": estimator.eager_reason}
        figures[f"time/{kind}/{way}/{model}"] = median_of(times[WARM_UP_PROBES:], **besides)
    return figures


def double_backward(bench: Bench, model: str, trained: TrainedModels) -> Figures:
    """Seconds of one Hessian-vector product for every layer, each by differentiating a gradient once more."""
    made = trained.trainer(bench, model)
    module, clock = made.network.module, Clock(bench.device)
    images, labels = probe_images(made, 0)
    names = random.Random(SEED).sample(list(made.network.layers), len(made.network.layers))
    times: list[float] = []

    def product(name: str) -> None:
        weight = module.get_parameter(f"{name}.weight")
        (gradient,) = torch.autograd.grad(mean_cross_entropy(module, images, labels), weight, create_graph=True)
        torch.autograd.grad(gradient, weight, torch.ones_like(weight))

    with precision.strict_fp32(made.network), leaving_no_trace(module, bench.device), torch.enable_grad():
        product(names[0])
        for name in names:
            if sum(times) > DOUBLE_BACKWARD_SECONDS:
                break
            began = clock.read()
            product(name)
            times.append(clock.read() - began)
    value = sum(times) * len(names) / len(times)
    measured = f"{len(times)} of {len(names)}"
    return {f"time/double_backward/{model}": {"value": value, "layers_measured": measured, "longest_s": max(times)}}


def differences(bench: Bench, model: str, trained: TrainedModels) -> Figures:
    """Seconds of one product for every layer by differences of gradients, which are replayed."""
    made = trained.trainer(bench, model)
    images, labels = probe_images(made, 0)
    with _lent_pool(bench) as pool:
        estimator = estimator_of(made, estimator="hessian", product="difference", k=1, iterations=1)
        times = [estimator.probe(images, labels, None, pool).seconds for _ in range(1 + bench.repeats)]
    figure = median_of(times[1:], layers=len(made.network.layers), eager_reason=estimator.eager_reason)
    return {f"time/differences/{model}": figure}


@contextmanager
def _lent_pool(bench: Bench, lent: bool = True) -> Iterator[Any]:
    """Memory for graphs, or ``None`` where it is not to be lent or there are none."""
    if not lent or bench.device.type != "cuda":
        yield None
        return
    pool = Pool()
    try:
        yield pool.handle
    finally:
        pool.release()


def all_jobs(epochs: int = 30, check_epochs: int = 6, checks: int = 60, exact_layers: int = 3) -> list[Job]:
    """In the order in which they are measured: what trains longest first, so that later jobs find its weights."""
    trained, young, jobs = TrainedModels(check_epochs), TrainedModels(TRUTH_EPOCHS), []
    for model in MODELS:
        quick = model == MODELS[0]
        for estimator, kept in (("fisher", trained), ("hessian", None)):
            units = {"share": "of time", "vram": "ratio", "rounds": "a layer"}
            rows = {f"{estimator}/{what}/{model}": unit for what, unit in units.items()}
            jobs.append(Job(rows, training, (model, estimator, epochs, kept), quick))
        product = REFERENCE_PRODUCT[model]
        exact = None if product == "exact" else EXACT_LAYERS[:exact_layers]
        rows = {f"hessian/error/{model}": "relative"}
        jobs.append(Job(rows, curvature_truth.error, (model, check_epochs, checks, exact), quick))
        rows = {f"rank/fisher_hessian/{model}": "rho"}
        jobs.append(Job(rows, curvature_truth.ranks, (model, trained, product), quick))
        for kind in ("fisher", "jacobian") if product == "exact" else ("fisher",):
            rows = {f"time/{kind}/{way}/{model}": "ms" for way in ("eager", "replayed")}
            jobs.append(Job(rows, probe_times, (model, trained, kind), quick))
        jobs.append(Job({f"time/double_backward/{model}": "s"}, double_backward, (model, trained)))
        jobs.append(Job({f"time/differences/{model}": "s"}, differences, (model, trained)))
        limits = TRUTH_LIMITS[model]
        rows = {f"time/curvlinops/{model}": "s"} | {f"truth/curvlinops/{model}/{each}": "of layers" for each in limits}
        arguments = (model, young, limits, TRUTH_LAYERS.get(model))
        jobs.append(Job(rows, curvature_truth.beside_curvlinops, arguments))
    return jobs


def targets(device: str) -> Targets:
    return TARGETS | (H200_TARGETS if "H200" in device else {})


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    extent = {
        "epochs": options.epochs or (4 if options.quick else 30),
        "check_epochs": options.check_epochs or (2 if options.quick else 6),
        "checks": options.checks or (10 if options.quick else 60),
        "exact_layers": options.exact_layers,
    }
    facts = {"method": METHOD, "overrides": options.override, "truth_epochs": TRUTH_EPOCHS, **extent}
    return run_benchmark(options, all_jobs(**extent), targets, facts, steps=1)


def _parser() -> argparse.ArgumentParser:
    parser = common_options(__doc__.split("\n")[0], "results/bench/curvature.json")
    parser.add_argument("--epochs", type=count, help="of the runs whose share is taken; default: 30, with --quick 4")
    parser.add_argument("--check-epochs", type=count, help="of the runs whose probes are checked; default: 6, 2")
    parser.add_argument("--checks", type=count, help="references a model; default: 60, with --quick 10")
    parser.add_argument(
        "--exact-layers", type=int, choices=range(len(EXACT_LAYERS) + 1), default=3,
        help="of efficientnet_b0, checked by double backward; default: %(default)s",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
