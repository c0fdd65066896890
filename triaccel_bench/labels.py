"""How data sets, models, methods and estimators are called in tables and figures, and the order they stand in.

The paper's names where it has one; a name without a label stands as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from triaccel_bench import paper

DATASETS = paper.DATASET_LABELS | {"digits": "Digits", "synthetic": "Synthetic"}
MODELS = paper.MODEL_LABELS | {"resnet18_cifar": "ResNet-18 (CIFAR stem)", "resnet8": "ResNet-8"}
CONFIGURATIONS = {
    "fp32": paper.CONFIGURATION_LABELS["fp32"],
    "triaccel_batch": paper.CONFIGURATION_LABELS["triaccel_batch"],
    "triaccel_precision": paper.CONFIGURATION_LABELS["triaccel_precision"],
    "triaccel_curvature": "+ Curvature",
    "triaccel_precision_batch": "+ Dynamic Precision and Batch Sizing",
    "triaccel_precision_curvature": "+ Dynamic Precision and Curvature",
    "triaccel_curvature_batch": "+ Curvature and Dynamic Batch Sizing",
    "triaccel": paper.CONFIGURATION_LABELS["triaccel"],
    "triaccel_plus": "Tri-Accel Plus",
    "replay": "Open-Loop Replay",
}
"""Table 2's rows, in its order: each switch alone, pairs, all, and what this project adds."""

METHODS = {"fp32": "FP32", "tf32": "TF32", "amp": "AMP"} | CONFIGURATIONS | paper.METHOD_LABELS
"""Table 1's rows, in its order: baselines, then Tri-Accel and its parts."""

PAPER_ESTIMATOR = "hessian"
ESTIMATORS = {PAPER_ESTIMATOR: "Hessian", "fisher": "Fisher information"}
"""What a method reads curvature of; the paper's is the first."""


WHOLE = {
    "cifar10": (10, 32, 50_000, 10_000),
    "cifar100": (100, 32, 50_000, 10_000),
    "digits": (10, 32, 1437, 360),
    "synthetic": (10, 32, 512, 128),
}
"""Classes, pixels a side, training and test images of each data set as it is shipped."""

TENSORS_NOTE = "‡ bytes of live tensors, which are not VRAM"

DTYPES = ("fp16", "bf16", "fp32")


def is_whole(name: str, dataset: dict[str, Any], samples: tuple[int | None, int | None]) -> bool:
    """Whether this is the named set itself, wherever it lies, and no other data in its format.

    ``dataset`` is that section of a record's settings, ``samples`` the training and evaluation images.
    """
    return (dataset["num_classes"], dataset["image_size"], *samples) == WHOLE.get(name)


def dataset_label(name: str, dataset: dict[str, Any], samples: tuple[int | None, int | None]) -> str:
    """The data set, with its size and the user's file where it is not the named set itself; see ``is_whole``."""
    label = DATASETS.get(name, name)
    if name not in WHOLE or is_whole(name, dataset, samples):
        return label
    classes, side, *_ = WHOLE[name]
    details = ["/".join("n/a" if count is None else str(count) for count in samples)]
    if dataset["num_classes"] != classes:
        details.append(f"{dataset['num_classes']} classes")
    if dataset["image_size"] != side:
        details.append(f"{dataset['image_size']}×{dataset['image_size']}")
    if dataset["evaluate_on"] != "test":
        details.append(dataset["evaluate_on"])
    source = f" format: {os.path.basename(os.path.normpath(dataset['path']))}" if dataset["path"] else ""
    return f"{label}{source} ({', '.join(details)})"


def model_label(name: str, settings: dict[str, Any]) -> str:
    """The architecture, with input size and weights where they are not the paper's; ``settings`` is a record's."""
    label, model = MODELS.get(name, name), settings.get("model", {})
    if (size := model.get("input_size", 32)) != 32:
        label += f" at {size}×{size}"
    if (weights := model.get("weights", "none")) != "none":
        label += f", weights {weights}"
    return label


def method_label(name: str) -> str:
    return METHODS.get(name, name)


def configuration_label(name: str) -> str:
    return CONFIGURATIONS.get(name, method_label(name))


def layer_mix(mixes: Iterable[dict[str, int]]) -> str:
    """Layers by dtype, narrowest first, such as "fp16:12-14 bf16:4": a range where seeds differ, empty for none."""
    mixes = list(mixes)
    counts = {dtype: [mix.get(dtype, 0) for mix in mixes] for dtype in DTYPES}
    spans = {dtype: (min(values), max(values)) for dtype, values in counts.items() if any(values)}
    return " ".join(f"{d}:{low}" if low == high else f"{d}:{low}-{high}" for d, (low, high) in spans.items())


def order(dataset: str, model: str, method: str) -> tuple[tuple[int, str], ...]:
    """Sort key: the paper's order, then what it does not have by name."""
    return _place(dataset, DATASETS), _place(model, MODELS), _place(method, METHODS)


def _place(name: str, known: dict[str, str]) -> tuple[int, str]:
    return (list(known).index(name) if name in known else len(known), name)
