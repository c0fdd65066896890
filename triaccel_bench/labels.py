"""How data sets, models and methods are called in tables and figures, and the order they stand in.

The paper's names where it has one; a name without a label stands as it is.
"""

from __future__ import annotations

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
}
"""Table 2's rows, in its order: each switch alone, pairs, all."""

METHODS = {"fp32": "FP32", "tf32": "TF32", "amp": "AMP"} | CONFIGURATIONS | paper.METHOD_LABELS
"""Table 1's rows, in its order: baselines, then Tri-Accel and its parts."""


def dataset_label(name: str) -> str:
    return DATASETS.get(name, name)


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


def order(dataset: str, model: str, method: str) -> tuple[tuple[int, str], ...]:
    """Sort key: the paper's order, then what it does not have by name."""
    return _place(dataset, DATASETS), _place(model, MODELS), _place(method, METHODS)


def _place(name: str, known: dict[str, str]) -> tuple[int, str]:
    return (list(known).index(name) if name in known else len(known), name)
