"""Runs grouped into cells: seeds of one configuration on one device, and how cells differ from one another.

What did not finish is kept out of every mean and named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from triaccel_bench.identity import flat, identifying_settings
from triaccel_bench.labels import is_whole
from triaccel_bench.records import Meter, RunRecord
from triaccel_bench.stats import Mean, RunSummary, mean_std, summarise, why_excluded

_OF_THE_METHOD = ("method.", "replay.", "model.checkpointing", "memory.budget", "memory.calibration_steps")

_TUNED = ("optimizer.lr", "optimizer.weight_decay")
"""What each method may have at its own best."""


@dataclass(frozen=True)
class Cell:
    """All seeds of one configuration on one device. Only finished seeds are in ``summaries``."""

    cell: str
    dataset: str
    model: str
    method: str
    device_name: str | None
    settings: dict[str, Any]
    runs: tuple[RunRecord, ...]
    summaries: tuple[RunSummary, ...]
    excluded: tuple[str, ...]
    """One phrase per seed that is in no mean: its number and why."""
    variant: str = ""
    """What sets this cell apart from others of the same label; empty where nothing does."""

    @property
    def seeds_expected(self) -> int:
        return len(self.summaries) + len(self.excluded)

    @property
    def seeds_told(self) -> str:
        """How many seeds are finished, and of how many where some are not."""
        done = len(self.summaries)
        return str(done) if done == self.seeds_expected else f"{done} of {self.seeds_expected}"

    @property
    def meter(self) -> Meter:
        """The meter of the cell's memory figures; "off" where no seed has any."""
        return next((summary.meter for summary in self.summaries if summary.meter != "off"), "off")

    @property
    def samples(self) -> tuple[int | None, int | None]:
        """Training and evaluation images: those that were loaded, else those that the settings expect."""
        for run in self.runs:
            if run.train_samples is not None:
                return run.train_samples, run.evaluation_samples
        dataset = self.settings["dataset"]
        return dataset["train_size"], dataset["test_size"]

    @cached_property
    def identifying(self) -> dict[str, str]:
        """What names this cell, as text by dotted key."""
        try:
            tree = identifying_settings(self.settings)
        except KeyError:
            # A record of another version, without some of today's settings: all that it has is compared.
            tree = self.settings
        return as_text(tree) | {"device": str(self.device_name), "results_version": str(self.runs[0].results_version)}

    @cached_property
    def shared(self) -> dict[str, str]:
        """Of ``identifying`` what cells of two methods must have in common to be compared."""
        read = {key: value for key, value in self.identifying.items() if not key.startswith(_OF_THE_METHOD)}
        return read | {"batch.initial": str(self.settings["method"]["batch"]["initial"]), "memory.meter": self.meter}

    @cached_property
    def shared_untuned(self) -> dict[str, str]:
        """``shared`` without what is tuned for each method by itself."""
        return {key: value for key, value in self.shared.items() if key not in _TUNED}

    @cached_property
    def has_memory(self) -> bool:
        return self.mean("memory_peak_bytes") is not None

    def mean(self, quantity: str) -> Mean | None:
        """Mean of a ``RunSummary`` field over the finished seeds that measured it."""
        one_meter = quantity == "memory_peak_bytes"
        chosen = (summary for summary in self.summaries if not one_meter or summary.meter == self.meter)
        return mean_std(getattr(summary, quantity) for summary in chosen)


def as_in_the_paper(cell: Cell) -> bool:
    """The set itself, its test images, and torchvision's models at 32x32 from scratch, which the paper's VRAM fits."""
    model, dataset = cell.settings["model"], cell.settings["dataset"]
    shape = (model["stem"], model["input_size"], model["weights"])
    whole = is_whole(cell.dataset, dataset, cell.samples)
    return whole and shape == ("imagenet", 32, "none") and dataset.get("evaluate_on", "test") == "test"


def names(cell: Cell) -> tuple[str, ...]:
    return cell.dataset, cell.model, cell.method


def cells(runs: Iterable[RunRecord], label: Callable[[Cell], tuple[str, ...]] = names) -> list[Cell]:
    """Group runs by cell hash and device, in the order of names, hash and device.

    Cells of the same ``label`` get a ``variant`` that names the settings in which they differ.
    """
    return told_apart(grouped(runs), label)


def grouped(runs: Iterable[RunRecord]) -> list[Cell]:
    """As ``cells``, without variants. Seeds that the settings ask for and no record holds are excluded as missing."""
    by_hash: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_hash.setdefault(run.cell, []).append(run)
    found = [cell for members in by_hash.values() for cell in _cells_of_one_hash(members)]
    found.sort(key=lambda cell: (*names(cell), cell.cell, cell.device_name or ""))
    return found


def told_apart(found: Iterable[Cell], label: Callable[[Cell], tuple[str, ...]]) -> list[Cell]:
    """What ``grouped`` found, with the variants of ``cells``."""
    by_label: dict[tuple[str, ...], list[Cell]] = {}
    for cell in found:
        by_label.setdefault(label(cell), []).append(cell)
    return [cell for alike in by_label.values() for cell in _told_apart(alike)]


def _cells_of_one_hash(members: list[RunRecord]) -> Iterator[Cell]:
    devices = sorted({run.provenance.device_name for run in members if run.provenance}) or [None]
    asked = {seed for run in members for seed in run.settings.get("seeds", ())}
    missing = sorted(asked - {run.seed for run in members})
    for device in devices:
        # A run that failed before it reached a device is listed with the first one, as missing seeds are.
        here = [run for run in members if (run.provenance.device_name if run.provenance else devices[0]) == device]
        here.sort(key=lambda run: run.seed)
        excluded = [f"seed {run.seed} {reason}" for run in here if (reason := why_excluded(run))]
        if device == devices[0]:
            excluded += [f"seed {seed} missing: asked for, no record" for seed in missing]
        first = here[0]
        yield Cell(
            cell=first.cell,
            dataset=first.dataset,
            model=first.model,
            method=first.method,
            device_name=device,
            settings=first.settings,
            runs=tuple(here),
            summaries=tuple(summarise(run) for run in here if why_excluded(run) is None),
            excluded=tuple(excluded),
        )


def _told_apart(alike: list[Cell]) -> Iterator[Cell]:
    if len(alike) == 1:
        yield from alike
        return
    keys = differing([cell.identifying for cell in alike])
    variants = [told(cell.identifying, keys) for cell in alike]
    for cell, variant in zip(alike, variants, strict=True):
        if variants.count(variant) > 1:
            variant = f"{variant}, cell={cell.cell}".removeprefix(", ")
        yield replace(cell, variant=variant)


def baseline(cell: Cell, found: Iterable[Cell]) -> Cell | None:
    """The one fp32 cell, with memory of the same meter, that differs from ``cell`` in its method and budget alone.

    Where none has the same learning rate and weight decay either, the one of others, as if each were tuned.
    """
    measured = [other for other in _fp32_cells(cell, found) if other.has_memory]
    alike = [other for other in measured if other.shared == cell.shared]
    alike = alike or [other for other in measured if other.shared_untuned == cell.shared_untuned]
    return alike[0] if len(alike) == 1 else None


class Counterparts:
    """Finds the cells that differ from another in their method and budget alone; only those with a finished seed.

    Where none has the same learning rate and weight decay either, the one of others counts, as if each were tuned.
    """

    def __init__(self, found: Iterable[Cell]) -> None:
        self._alike: dict[tuple, list[Cell]] = {}
        for cell in found:
            if cell.summaries:
                for shared in (cell.shared, cell.shared_untuned):
                    self._alike.setdefault(self._key(cell, cell.method, shared), []).append(cell)

    def of(self, cell: Cell, method: str) -> Cell | None:
        """The one of ``method``; ``None`` where there is none, or more than one."""
        exact, untuned = (
            self._alike.get(self._key(cell, method, shared), ()) for shared in (cell.shared, cell.shared_untuned)
        )
        alike = exact or untuned
        return alike[0] if len(alike) == 1 else None

    @staticmethod
    def _key(cell: Cell, method: str, shared: dict[str, str]) -> tuple:
        return cell.dataset, cell.model, method, *sorted(shared.items())


def tuned_apart(cell: Cell, other: Cell) -> str:
    """In what tuned settings two cells differ, with both values; empty where in none."""
    keys = [key for key in _TUNED if cell.shared.get(key) != other.shared.get(key)]
    return ", ".join(f"{key} ({cell.shared.get(key)} and {other.shared.get(key)})" for key in keys)


def why_no_baseline(cell: Cell, found: Iterable[Cell]) -> str:
    """For a cell without ``baseline``: what there is instead, as a phrase."""
    candidates = _fp32_cells(cell, found)
    if not candidates:
        return "there is no fp32 cell of this data set and model"
    measured = [other for other in candidates if other.has_memory]
    if not measured:
        return "the fp32 cell has no finished seed with a memory reading"
    differences = min((_differences(cell, other) for other in measured), key=len)
    if not differences:
        return "more than one fp32 cell has the same settings"
    return f"the fp32 cell differs in {', '.join(differences)}"


def _fp32_cells(cell: Cell, found: Iterable[Cell]) -> list[Cell]:
    return [other for other in found if names(other) == (cell.dataset, cell.model, "fp32")]


def _differences(cell: Cell, other: Cell) -> list[str]:
    """How ``other`` differs in what two methods share, one "setting=value (here value)" each."""
    ours, theirs = cell.shared, other.shared
    keys = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
    return [f"{_short(key)}={theirs.get(key)} (here {ours.get(key)})" for key in keys]


def as_text(tree: dict[str, Any]) -> dict[str, str]:
    """Settings as text by dotted key."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat(tree)}


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Keys that not all have alike, in their order."""
    keys = sorted({key for each in settings for key in each})
    return [key for key in keys if len({each.get(key) for each in settings}) > 1]


def told(settings: Mapping[str, str], keys: Sequence[str]) -> str:
    """Those of the keys that it has, as "lr=0.1, epochs=2"."""
    return ", ".join(f"{_short(key)}={settings[key]}" for key in keys if key in settings)


def _short(key: str) -> str:
    """A setting's key without its group, where the rest tells what it is."""
    group, _, rest = key.partition(".")
    return rest if group in ("dataset", "model", "method", "optimizer", "memory") else key
