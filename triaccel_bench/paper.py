"""The paper's printed numbers and claims as data, and an audit that recomputes each claim from the printed tables.

Nothing here is corrected: a misprint stays as printed and is flagged.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_GB = 10**9
"""The tables' GB read as decimal gigabytes."""

DEVICE_GB = 16
"""Memory of the T4 and the P100 (section 4.1)."""

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
        return self.reduction_percent is None or _rounds_to(self.reduction_computed_percent, self.reduction_percent, 1)


@dataclass(frozen=True)
class Finding:
    """One claim beside what the paper's own tables give for it, both as they would be printed."""

    claim: str
    printed: str
    computed: str
    agrees: bool
    note: str = ""


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


def audit() -> list[Finding]:
    """Every score, reduction and headline claim, recomputed from the numbers printed in Tables 1 and 2."""
    return [*_scores(), *_reductions(), *_claims()]


def _scores() -> list[Finding]:
    return [
        Finding(
            f"Table 1, {DATASET_LABELS[row.dataset]}, {MODEL_LABELS[row.model]}, {METHOD_LABELS[row.method]}: score",
            f"{row.score:.2f}",
            f"{row.score_computed:.2f}",
            row.score_agrees,
            f"{row.accuracy_percent} / ({row.seconds} s x {row.memory_gb:.2f} GB)",
        )
        for row in TABLE1
    ]


def _reductions() -> list[Finding]:
    return [
        Finding(
            f"Table 2, {MODEL_LABELS[row.model]}, {CONFIGURATION_LABELS[row.method]}: reduction",
            f"{row.reduction_percent:.1f} %",
            f"{row.reduction_computed_percent:.1f} %",
            row.reduction_agrees,
        )
        for row in TABLE2
        if row.reduction_percent is not None
    ]


def _claims() -> list[Finding]:
    fp32, amp, ours = (printed("cifar10", "resnet18", method) for method in METHOD_LABELS)
    time_cifar10 = -min(_change_percent("seconds", "fp32", ("cifar10",)))
    less_time = -min(_change_percent("seconds", "fp32"))
    less_memory = -min(_change_percent("memory_gb", "fp32", ("cifar10",)))
    gained_cifar10, gained = max(_accuracy_gained("fp32", ("cifar10",))), _accuracy_gained("fp32")
    return [
        _claim("Abstract: up to 9.9 % less time than FP32 on CIFAR-10", "9.9 %", time_cifar10, "10.0 % on CIFAR-100"),
        _claim("Conclusion: up to 9.9 % less time than FP32 on CIFAR-10 and CIFAR-100", "9.9 %", less_time),
        _claim("Abstract: 13.3 % less memory than FP32 on CIFAR-10", "13.3 %", less_memory, "Table 2 gives 12.0 %"),
        _claim("Abstract: +1.1 pp accuracy over FP32 on CIFAR-10", "1.1 pp", gained_cifar10),
        _claim("Conclusion: +1.1 to +1.7 pp over FP32, lower end", "1.1 pp", min(gained)),
        _claim("Conclusion: +1.1 to +1.7 pp over FP32, upper end", "1.7 pp", max(gained)),
        _claim("Conclusion: up to +0.7 pp over AMP", "0.7 pp", max(_accuracy_gained("amp"))),
        _claim("Conclusion: score up to 25 % over FP32", "25 %", max(_change_percent("score", "fp32"))),
        _claim("Conclusion: score up to 10 % over AMP", "10 %", max(_change_percent("score", "amp"))),
        _claim("Abstract: static AMP's memory, ResNet-18, CIFAR-10", "0.35 GB", amp.memory_gb, "FP32's: 0.35 GB"),
        _claim("Abstract: Tri-Accel's memory, ResNet-18, CIFAR-10", "0.31 GB", ours.memory_gb),
        _claim("Abstract: Tri-Accel's accuracy, ResNet-18, CIFAR-10", "78.1 %", ours.accuracy_percent),
        _efficiency_trade_off(),
        _faster_than_amp(),
        _printed_formula(fp32),
    ]


def _claim(claim: str, as_printed: str, computed: float, note: str = "") -> Finding:
    number, unit = as_printed.split()
    decimals = len(number.partition(".")[2])
    # A whole-number claim is answered with a decimal, so that the size of the difference shows.
    return Finding(
        claim, as_printed, f"{computed:.{decimals or 1}f} {unit}", _rounds_to(computed, float(number), decimals), note
    )


def _efficiency_trade_off() -> Finding:
    gains = _change_percent("score", "amp", ("cifar100",))
    return Finding(
        "Section 4.4: on CIFAR-100 a modest efficiency trade-off",
        "score below AMP's",
        f"{min(gains):+.1f} to {max(gains):+.1f} % over AMP's",
        min(gains) < 0,
        "Tri-Accel has the best score of every group in Table 1",
    )


def _faster_than_amp() -> Finding:
    changes = _change_percent("seconds", "amp")
    return Finding(
        "Section 4.4: consistently better than static mixed precision (epoch time)",
        "less time",
        f"{min(changes):+.1f} to {max(changes):+.1f} % of AMP's time",
        max(changes) < 0,
        "19.5 s against AMP's 19.4 s for ResNet-18 on CIFAR-10",
    )


def _printed_formula(row: Table1Row) -> Finding:
    memory_percent = 100 * row.memory_gb / DEVICE_GB
    computed = 100 * row.accuracy_percent / (row.seconds * memory_percent)
    return Finding(
        "Section 4.2: Score = Acc / (Time x Memory %) x 100, first row of Table 1",
        f"{row.score:.2f}",
        f"{computed:.2f}",
        abs(computed - row.score) <= SCORE_TOLERANCE,
        f"memory as a percentage of {DEVICE_GB} GB; the column holds Acc / (Time x VRAM in GB)",
    )


def _pairs(baseline: str, datasets: tuple[str, ...]) -> list[tuple[Table1Row, Table1Row]]:
    """Tri-Accel's row and the baseline's for each data set and model of Table 1."""
    ours = (row for row in TABLE1 if row.method == "triaccel" and row.dataset in datasets)
    return [(row, printed(row.dataset, row.model, baseline)) for row in ours]


def _change_percent(field: str, baseline: str, datasets: tuple[str, ...] = tuple(DATASET_LABELS)) -> list[float]:
    """100 x (Tri-Accel / baseline - 1) of one column: negative where Tri-Accel prints the smaller figure."""
    pairs = _pairs(baseline, datasets)
    return [100 * (getattr(ours, field) / getattr(theirs, field) - 1) for ours, theirs in pairs]


def _accuracy_gained(baseline: str, datasets: tuple[str, ...] = tuple(DATASET_LABELS)) -> list[float]:
    return [ours.accuracy_percent - theirs.accuracy_percent for ours, theirs in _pairs(baseline, datasets)]


def _rounds_to(computed: float, value: float, decimals: int) -> bool:
    """Within half a unit of the last printed digit; the slack covers binary fractions only."""
    return abs(computed - value) <= 0.5 * 10**-decimals + 1e-9
