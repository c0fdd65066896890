"""The paper's printed numbers, claims and set-up as data; ``findings`` recomputes them.

Nothing here is corrected: a misprint stays as printed and is flagged.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_GB = 10**9
"""The tables' GB read as decimal gigabytes."""

CARDS = ("T4", "P100")
DEVICE_GB = 16
"""What every run was made on, and its memory (section 4.1)."""

IMAGES, TRAIN_IMAGES, TEST_IMAGES = 60_000, 50_000, 10_000
CLASSES = {"cifar10": 10, "cifar100": 100}
INPUT_SIZES = {"resnet18": 32, "efficientnet_b0": 224}
"""Of either data set, and pixels a side that each architecture sees (section 4.1)."""

BATCH = 96
"""The initial one (section 4)."""

SCORE_TOLERANCE = 0.01
"""Two printed decimals, from inputs that were themselves rounded before printing."""

DATASET_LABELS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
MODEL_LABELS = {"resnet18": "ResNet-18", "efficientnet_b0": "EfficientNet-B0"}
METHOD_LABELS = {"fp32": "FP32 Baseline", "amp": "AMP (Static)", "triaccel": "Tri-Accel"}
CONFIGURATION_LABELS = {
    "fp32": "Standard Training",
    "triaccel_batch": "+ Dynamic Batch Sizing",
    "triaccel_precision": "+ Dynamic Precision",
    "triaccel": "+ Full Tri-Accel",
}


@dataclass(frozen=True)
class Table1Row:
    """One row of Table 1; names are those of ``conf/``."""

    dataset: str
    model: str
    method: str
    accuracy_percent: float
    seconds: float
    memory_gb: float
    score: float

    @property
    def score_computed(self) -> float:
        """Acc(%) / (Time(s) x VRAM(GB)): what the printed column holds, unlike the formula of section 4.2."""
        return self.accuracy_percent / (self.seconds * self.memory_gb)

    @property
    def score_agrees(self) -> bool:
        return abs(self.score - self.score_computed) <= SCORE_TOLERANCE


@dataclass(frozen=True)
class Table2Row:
    """One row of Table 2 (CIFAR-10); ``reduction_percent`` is None for the baseline itself."""

    model: str
    method: str
    memory_gb: float
    reduction_percent: float | None

    @property
    def reduction_computed_percent(self) -> float:
        """100 x (1 - VRAM / VRAM of Standard Training)."""
        baseline = next(row for row in TABLE2 if (row.model, row.method) == (self.model, "fp32"))
        return 100 * (1 - self.memory_gb / baseline.memory_gb)

    @property
    def reduction_agrees(self) -> bool:
        return self.reduction_percent is None or rounds_to(self.reduction_computed_percent, self.reduction_percent, 1)


@dataclass(frozen=True)
class Claim:
    """What a sentence of the paper says of its own figures; ``printed`` is a number and its unit, or a phrase."""

    where: str
    what: str
    printed: str


TABLE1 = (
    Table1Row("cifar10", "resnet18", "fp32", 77.0, 21.0, 0.35, 10.48),
    Table1Row("cifar10", "resnet18", "amp", 77.2, 19.4, 0.32, 12.25),
    Table1Row("cifar10", "resnet18", "triaccel", 78.1, 19.5, 0.31, 12.92),
    Table1Row("cifar10", "efficientnet_b0", "fp32", 78.3, 18.5, 0.30, 14.11),
    Table1Row("cifar10", "efficientnet_b0", "amp", 78.7, 17.2, 0.26, 17.59),
    Table1Row("cifar10", "efficientnet_b0", "triaccel", 79.4, 16.8, 0.26, 18.17),
    Table1Row("cifar100", "resnet18", "fp32", 68.2, 24.3, 0.38, 7.39),
    Table1Row("cifar100", "resnet18", "amp", 68.7, 22.8, 0.35, 8.61),
    Table1Row("cifar100", "resnet18", "triaccel", 69.9, 22.4, 0.34, 9.18),
    Table1Row("cifar100", "efficientnet_b0", "fp32", 72.8, 21.1, 0.33, 10.46),
    Table1Row("cifar100", "efficientnet_b0", "amp", 73.1, 19.6, 0.31, 12.03),
    Table1Row("cifar100", "efficientnet_b0", "triaccel", 74.3, 19.0, 0.29, 13.48),
)

TABLE2 = (
    Table2Row("resnet18", "fp32", 0.350, None),
    Table2Row("resnet18", "triaccel_batch", 0.321, 8.3),
    Table2Row("resnet18", "triaccel_precision", 0.310, 11.4),
    Table2Row("resnet18", "triaccel", 0.307, 12.3),
    Table2Row("efficientnet_b0", "fp32", 0.301, None),
    Table2Row("efficientnet_b0", "triaccel_batch", 0.282, 6.0),
    Table2Row("efficientnet_b0", "triaccel_precision", 0.270, 10.0),
    Table2Row("efficientnet_b0", "triaccel", 0.265, 13.3),
)


CLAIMS = {
    "time_cifar10": Claim("Abstract", "time below FP32's on CIFAR-10, up to", "9.9 %"),
    "memory_cifar10": Claim("Abstract", "memory below FP32's on CIFAR-10, up to", "13.3 %"),
    "accuracy_cifar10": Claim("Abstract", "accuracy over FP32's on CIFAR-10", "1.1 pp"),
    "accuracy": Claim("Abstract", "Tri-Accel's accuracy (ResNet-18, CIFAR-10)", "78.1 %"),
    "memory_amp": Claim("Abstract", "static mixed precision's memory (ResNet-18, CIFAR-10)", "0.35 GB"),
    "memory": Claim("Abstract", "Tri-Accel's memory (ResNet-18, CIFAR-10)", "0.31 GB"),
    "occupancy": Claim("Section 3.3", "occupancy of the card's memory", "maximal"),
    "over_78": Claim("Section 4", "Tri-Accel's accuracy (ResNet-18, CIFAR-10)", "over 78 %"),
    "no_worse_accuracy": Claim("Section 4", "accuracy beside FP32 and AMP, every task", "matches or outperforms"),
    "no_worse_time": Claim("Section 4", "epoch time beside FP32 and AMP, every task", "matches or outperforms"),
    "no_worse_memory": Claim("Section 4", "VRAM beside FP32 and AMP, every task", "matches or outperforms"),
    "images": Claim("Section 4.1", "images of CIFAR-10, training and test", "60,000"),
    "formula": Claim("Section 4.2", "scores of Table 1 by the printed formula", "Acc / (Time x Memory %) x 100"),
    "faster_than_amp": Claim("Section 4.4", "epoch time beside static mixed precision, every task", "improves"),
    "resnet_memory": Claim("Section 4.4", "VRAM on ResNet-18 beside FP32 and AMP", "reduced"),
    "resnet_accuracy": Claim("Section 4.4", "accuracy on ResNet-18 beside FP32 and AMP", "maintained or improved"),
    "efficientnet_time": Claim("Section 4.4", "epoch time on EfficientNet-B0 beside FP32 and AMP", "accelerated"),
    "best_score": Claim("Section 4.4", "score on CIFAR-10, both architectures", "the best"),
    "cifar100_accuracy": Claim("Section 4.4", "accuracy on CIFAR-100 beside FP32 and AMP", "higher"),
    "trade_off": Claim("Section 4.4", "score on CIFAR-100 beside FP32 and AMP", "a modest trade-off"),
    "precision_alone": Claim("Section 4.4", "VRAM with dynamic precision alone (Table 2)", "reduced"),
    "combination": Claim("Section 4.4", "of the full reduction, by precision alone (Table 2)", "not the full"),
    "saved_resnet18": Claim("Section 4.4", "VRAM saved, all components, ResNet-18 (Table 2)", "12.3 %"),
    "saved_efficientnet_b0": Claim("Section 4.4", "VRAM saved, all components, EfficientNet-B0 (Table 2)", "13.3 %"),
    "faster": Claim("Conclusion", "time below FP32's, up to", "9.9 %"),
    "less_memory": Claim("Conclusion", "VRAM below FP32's, up to", "13.3 %"),
    "gained_least": Claim("Conclusion", "accuracy over FP32's, from", "1.1 pp"),
    "gained_most": Claim("Conclusion", "accuracy over FP32's, to", "1.7 pp"),
    "gained_amp": Claim("Conclusion", "accuracy over AMP's, up to", "0.7 pp"),
    "score_fp32": Claim("Conclusion", "score over FP32's, up to", "25 %"),
    "score_amp": Claim("Conclusion", "score over AMP's, up to", "10 %"),
}

MEASURABLE = {
    "efficiency": Claim("Abstract", "efficiency over the course of training", "gradually improving"),
    "overhead": Claim("Section 3.4", "share of the time that control, probes and captures take", "low overhead"),
    "stability": Claim("Section 4", "runs of Tri-Accel that end as planned, every task", "stability"),
    "below_budget": Claim("Section 4", "peak VRAM beside the budget, every task", "below"),
    "throughput": Claim("Section 4", "epoch time with the elastic batch alone beside FP32", "improves"),
}
"""Claims without a figure beside them in the paper: they can be measured, not audited."""

REMARKS = (
    "Stated without a figure that follows from them: momentum 0.9, k = 5, T_curv = 200, b_curv = 32 (called far below "
    f"the training batch, which begins at {BATCH}), 3 seeds, 5 epochs of warm-up, means over the last 5 epochs.",
    "Section 4 puts peak VRAM below the budget and throughput up; neither a budget nor a throughput is printed.",
    "Section 4.3 announces standard deviations; neither table prints one, so that no difference can be tested.",
    "Section 4.1 names PyTorch 2.2 with Triton 3.2; PyTorch 2.2 asks for Triton 2.2 itself, and a package manager "
    "refuses the two together.",
    "Neither card has native BF16 (compute capability 7.5 and 6.0; it begins with 8.0), which section 3.1 makes the "
    "default; and Triton has no code for the P100 (it begins with 7.0).",
)
"""What the paper says that no figure can be computed of."""


def printed(dataset: str, model: str, method: str) -> Table1Row | None:
    """The row of Table 1 for a cell, or None where the paper prints none."""
    return next((row for row in TABLE1 if (row.dataset, row.model, row.method) == (dataset, model, method)), None)


def printed_ablation(dataset: str, model: str, method: str) -> Table2Row | None:
    """The row of Table 2 for a cell, or None where the paper prints none (it prints CIFAR-10 only)."""
    if dataset != "cifar10":
        return None
    return next((row for row in TABLE2 if (row.model, row.method) == (model, method)), None)


def printed_vram_bytes(dataset: str, model: str) -> int | None:
    """Table 1's FP32 VRAM in bytes: the MemMax of ``memory.budget=paper``. None where the paper prints none."""
    row = printed(dataset, model, "fp32")
    return None if row is None else round(row.memory_gb * BYTES_PER_GB)


def rounds_to(computed: float, value: float, decimals: int) -> bool:
    """Within half a unit of the last printed digit; the slack covers binary fractions only."""
    return abs(computed - value) <= 0.5 * 10**-decimals + 1e-9
