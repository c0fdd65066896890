"""Records of a reproduction's runs, as if sweeps on ``CARD`` had made them."""

from __future__ import annotations

from pathlib import Path

from measured import epoch, provenance
from omegaconf import OmegaConf
from traced import trace

from triaccel_bench.identity import RESULTS_VERSION, identity
from triaccel_bench.records import planned_run, write_run
from triaccel_bench.reproduction import sweep
from triaccel_bench.runner import seed_folder
from triaccel_bench.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
CARD = "Card A"


def record(
    settings: Settings,
    seed: int,
    batch: int = 96,
    seconds: float = 2.0,
    accuracy: float = 70.0,
    fp32: int = 0,
    status: str = "done",
    device: str | None = CARD,
) -> None:
    """A run on ``CARD`` that ended, where a sweep there would look for it."""
    cell = identity(settings, CARD)
    run = planned_run(settings.model_dump(mode="json"), seed, cell, RESULTS_VERSION)
    run.status, run.reason, run.provenance, run.meter = status, None, None, "vram"
    run.provenance = device and provenance(device)
    run.epochs = [
        epoch(
            n, batch_min=batch, batch_max=batch, batch_mean=float(batch), train_seconds=seconds, evaluation_seconds=0.5,
            evaluation_accuracy_percent=accuracy, layers_executed={"fp32": fp32, "bf16": 21 - fp32},
        )
        for n in range(1, settings.epochs + 1)
    ]  # fmt: skip
    run.evaluation_samples = 5000
    write_run(seed_folder(settings, cell, seed), run, trace())


def swept(part: str) -> dict[str, list[str]]:
    params = OmegaConf.load(ROOT / "conf" / "experiment" / "reproduce" / f"{part}.yaml").hydra.sweeper.params
    return {key: value.split(",") for key, value in params.items()}


B0 = ("model=efficientnet_b0", "method=amp")
FIRST = {2: 79.0, 5: 80.0}
"""Accuracy of the first round by trial; the others' is 70 % and their number."""


def first_round(*leaving_out: int) -> list[Settings]:
    jobs = sweep("tuning", B0).jobs()
    for number, job in enumerate(jobs):
        if number not in leaving_out:
            record(job, 100, accuracy=FIRST.get(number, 70.0 + number))
    return jobs


def every_trial(accuracy: float = 70.0) -> Path:
    """Records of all trials of one method; returns the name of the file that its choice goes into."""
    for job in sweep("tuning", ["model=resnet18", "method=amp"]).jobs():
        record(job, 100, accuracy=accuracy)
    return Path("cifar10-resnet18-amp.yaml")
