"""Run records as if they had been measured, for the tests of statistics, tables and reports."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from triaccel_bench import paper
from triaccel_bench.configuration import compose
from triaccel_bench.records import EpochRecord, Provenance, RunRecord, write_run
from triaccel_bench.results import Results

GB = 10**9
CONF = Path(__file__).resolve().parent.parent / "conf"


def epoch(number: int = 0, **changes: Any) -> EpochRecord:
    values = dict(
        epoch=number, train_loss=1.0, train_accuracy_percent=50.0, evaluation_accuracy_percent=77.0, train_seconds=21.0,
        steps=10, samples_seen=960, batch_mean=96.0, batch_min=96, batch_max=96, batch_last=96, learning_rate_last=0.1,
        memory_peak_bytes=350_000_000, layers_requested={"fp32": 21}, layers_executed={"fp32": 21},
    )  # fmt: skip
    return EpochRecord(**values | changes)


def provenance(device_name: str = "Card A") -> Provenance:
    return Provenance(
        code_version="0.1.0", git_commit="abc1234", python="3.12", torch="2.6", torchvision="0.21", device="cuda",
        device_name=device_name, device_total_bytes=16 * GB, bf16_native=True, kernels="torch", kernels_reason="asked",
        started_at="2025-01-01T00:00:00", finished_at="2025-01-01T00:01:00",
    )  # fmt: skip


@cache
def _composed(*overrides: str) -> dict[str, Any]:
    # What was tuned for a cell is another matter than what these tests make up.
    return compose(["tuned=none", *overrides]).model_dump(mode="json")


def settings(dataset: str, model: str, method: str) -> dict[str, Any]:
    """What a run of one epoch and seed records; a name without a file in ``conf/`` gets the settings of FP32's."""
    tree = deepcopy(_composed("epochs=1", "seeds=[0]", "method=fp32"))
    for group, name in (("dataset", dataset), ("model", model), ("method", method)):
        # method=replay has no settings of its own.
        if name != "replay" and (CONF / group / f"{name}.yaml").is_file():
            tree[group] = deepcopy(_composed(f"{group}={name}")[group])
        tree[group]["name"] = name
    return tree


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(tree[key], changes[key]) for key in tree.keys() & changes.keys() if isinstance(tree[key], dict)}
    return tree | changes | both


def run(
    dataset: str = "cifar10", model: str = "resnet18", method: str = "fp32", seed: int = 0, *, epochs=None, tree=None,
    accuracy: float = 77.0, seconds: float = 21.0, gb: float | None = 0.35, **changes: Any,
) -> RunRecord:  # fmt: skip
    """A finished run of the figures given, or of ``epochs``; ``tree`` changes its settings."""
    if epochs is None:
        memory = None if gb is None else round(gb * GB)
        epochs = [epoch(evaluation_accuracy_percent=accuracy, train_seconds=seconds, memory_peak_bytes=memory)]
    recorded = merged(settings(dataset, model, method), tree or {})
    values = dict(
        results_version=1, status="done", cell=f"{dataset}-{model}-{method}", dataset=dataset, model=model,
        method=method, seed=seed, epochs_planned=len(epochs), settings=recorded,
        provenance=provenance(), meter="vram", budget_bytes=350_000_000, budget_source="fp32", epochs=epochs,
    )  # fmt: skip
    return RunRecord(**values | changes)


def papers_table1() -> Results:
    """The paper's Table 1 as if it had been measured, one seed a cell."""
    return Results(
        tuple(
            run(
                row.dataset, row.model, row.method, accuracy=row.accuracy_percent, seconds=row.seconds, gb=row.memory_gb
            )
            for row in paper.TABLE1
        )
    )


def write(folder: Path, *runs: RunRecord) -> Path:
    for one in runs:
        write_run(folder / one.cell / f"seed{one.seed}", one)
    return folder
