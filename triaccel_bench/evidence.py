"""What records of a reproduction say, before anybody judges it: one study a network, its controls, pairs by seed.

All tests of a family (the paper's claims, the targets, the controls) are made at once, and p values are corrected over
them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from triaccel_bench import compare, paper
from triaccel_bench.cells import Cell, as_in_the_paper, cells, names
from triaccel_bench.compare import Difference
from triaccel_bench.differences import QUANTITIES, Quantity, least, values
from triaccel_bench.labels import order
from triaccel_bench.recording import open_loop
from triaccel_bench.results import Results
from triaccel_bench.stats import mean_std
from triaccel_bench.tuning import Tuning, tunings

OURS = "triaccel_plus"
_ALL_FOUR = tuple(quantity.field for quantity in QUANTITIES)
CLAIMED = {
    ("amp", "fp32"): _ALL_FOUR,
    ("triaccel", "fp32"): _ALL_FOUR,
    ("triaccel", "amp"): _ALL_FOUR,
    ("triaccel_batch", "fp32"): ("seconds",),
    ("triaccel_precision", "fp32"): ("memory_peak_bytes",),
    ("triaccel", "triaccel_precision"): ("memory_peak_bytes",),
}
"""Whom the paper's claims compare with whom, in what."""
TARGETED = {(OURS, "fp32"): _ALL_FOUR, (OURS, "amp"): _ALL_FOUR}


@dataclass(frozen=True)
class Compared:
    """One quantity of two cells, with its p value after Holm's correction over all tests of its family."""

    ours: Cell
    theirs: Cell
    quantity: Quantity
    found: Difference | None
    p: float | None

    @property
    def verdict(self) -> compare.Verdict:
        return compare.verdict(self.found, self.p, least(self.theirs, self.quantity))

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return self.found is not None and self.found.low is not None

    @property
    def text(self) -> str:
        if self.found is None:
            return "no shared seed"
        sign, times, unit = ("", "× ", "") if self.quantity.ratio else ("+", "", " points")
        told = [value for value in (self.found.mean, self.found.low, self.found.high) if value is not None]
        mean, *interval = (f"{value:{sign}.{self.quantity.decimals}f}" for value in told)
        between = f" [{', '.join(interval)}]" if interval else ""
        return f"{times}{mean}{between}{unit}, n = {self.found.n}"

    @property
    def text_with_p(self) -> str:
        if self.p is None:
            return self.text
        return f"{self.text}, p {'< 0.001' if self.p < 0.001 else f'= {self.p:.2g}'}"


class Evidence:
    """The records of one device, sorted out.

    Args:
        device: part of the device's name, where the records are of several; of those that fit, the one with most runs.
    """

    def __init__(self, results: Results, device: str = "") -> None:
        self.problems = results.problems
        everything = cells(results.runs)
        tuned = [each for each in tunings(results.runs) if each.dataset in paper.DATASET_LABELS]
        found = [cell for cell in everything if as_in_the_paper(cell)]
        named = [cell for cell in found if _of(cell, device)]
        trials = [trial for each in tuned for trial in each.trials if _of(trial, device)]
        self.device_name = _most(named or trials, lambda cell: cell.device_name)
        self._found = [cell for cell in named if cell.device_name == self.device_name]
        self.other_devices = sorted({cell.device_name for cell in found if cell.device_name} - {self.device_name})
        self.unfinished = [cell for cell in self._found if cell.excluded]
        self.tunings: list[Tuning] = [each for each in tuned if each.trials[0].device_name in (self.device_name, None)]
        tried = {cell.cell for each in tuned for cell in each.trials}
        self.strange = sorted({names(cell) for cell in everything if not (as_in_the_paper(cell) or cell.cell in tried)})
        """Data set, network and method of records that are of no cell of the paper."""
        self._studies: dict[tuple[str, str], dict[str, Cell]] = {}
        for key in dict.fromkeys((cell.dataset, cell.model) for cell in self._found):
            self._studies[key] = _study([cell for cell in self._found if (cell.dataset, cell.model) == key])

    @property
    def cells(self) -> list[Cell]:
        """Those that are compared: of each network one study, in the paper's order."""
        return [
            study[method]
            for dataset in paper.DATASET_LABELS
            for model in paper.MODEL_LABELS
            for study in [self._studies.get((dataset, model), {})]
            for method in sorted(study, key=_method_order)
        ]

    def cell(self, dataset: str, model: str, method: str) -> Cell | None:
        return self._studies.get((dataset, model), {}).get(method)

    @property
    def says_nothing(self) -> bool:
        """Whether no record is of a cell of the paper or of a trial for one."""
        return not self.cells and not self.tunings and not self.unfinished

    def has(self, dataset: str) -> bool:
        return any(key[0] == dataset for key in self._studies)

    @cached_property
    def unused(self) -> list[Cell]:
        """Cells in no study and no control, such as the same method at another learning rate."""
        used = {id(cell) for cell in self.cells}
        used |= {id(cell) for key in self._studies for _, cell in self.controls(*key)}
        return [cell for cell in self._found if id(cell) not in used]

    def controls(self, dataset: str, model: str) -> list[tuple[str, Cell]]:
        """Cells beside the study that tell where Tri-Accel+'s gain comes from, each with its kind."""
        ours = self.cell(dataset, model, OURS)
        if ours is None:
            return []
        found = ((_kind(cell, ours), cell) for cell in self._found if (cell.dataset, cell.model) == (dataset, model))
        return sorted(
            ((kind, cell) for kind, cell in found if kind is not None),
            key=lambda each: (KINDS.index(each[0]), _method_order(each[1].method), each[1].cell),
        )

    def compared(self, ours: Cell | None, theirs: Cell | None, field: str) -> Compared | None:
        """Of two cells that are a pair here; ``None`` where one is missing."""
        if ours is None or theirs is None:
            return None
        return self._tests.get((id(ours), id(theirs), field))

    def pair(self, dataset: str, model: str, ours: str, theirs: str, field: str) -> Compared | None:
        return self.compared(self.cell(dataset, model, ours), self.cell(dataset, model, theirs), field)

    @property
    def tests(self) -> int:
        return sum(each.p is not None for each in self._tests.values())

    @cached_property
    def _tests(self) -> dict[tuple[int, int, str], Compared]:
        families = self._of_studies(CLAIMED), self._of_studies(TARGETED), self._of_controls()
        return {
            (id(each.ours), id(each.theirs), each.quantity.field): each
            for family in families
            for each in _corrected(list(family))
        }

    def _of_studies(self, pairs: Mapping[tuple[str, str], Sequence[str]]) -> Iterator[tuple[Cell, Cell, Quantity]]:
        for study in self._studies.values():
            for (ours, theirs), fields in pairs.items():
                if {ours, theirs} <= study.keys():
                    yield from (
                        (study[ours], study[theirs], quantity) for quantity in QUANTITIES if quantity.field in fields
                    )

    def _of_controls(self) -> Iterator[tuple[Cell, Cell, Quantity]]:
        for key, study in self._studies.items():
            found = self.controls(*key)
            pairs = [(study[OURS], cell) for _, cell in found]
            shuffled = [cell for kind, cell in found if kind == SHUFFLED]
            pairs += [(cell, other) for kind, cell in found if kind == FOLLOWED for other in shuffled]
            yield from ((*pair, quantity) for pair in pairs for quantity in QUANTITIES)


def _corrected(tests: Sequence[tuple[Cell, Cell, Quantity]]) -> list[Compared]:
    found = [compare.paired(*(values(cell, q.field) for cell in pair), q.ratio) for *pair, q in tests]
    return [
        Compared(*test, each, p)
        for test, each, p in zip(tests, found, compare.holm([each and each.p for each in found]))
    ]


MEAN_BATCH, EQUAL_TIME = "at Tri-Accel Plus's mean batch", "for as long as Tri-Accel Plus"
FOLLOWED, SHUFFLED = "recorded schedule", "recorded schedule, layers shuffled"
KINDS = (MEAN_BATCH, EQUAL_TIME, FOLLOWED, SHUFFLED)


def _kind(cell: Cell, ours: Cell) -> str | None:
    """Which control of ``ours`` a cell is, by the one thing in which it differs."""
    here, there = _conditions(cell), _conditions(ours)
    apart = {key for key in here if here[key] != there.get(key)}
    if cell.method == "replay":
        if apart or not _follows(cell, ours):
            return None
        return FOLLOWED if cell.settings["replay"]["shuffle"] is None else SHUFFLED
    if cell.method == "amp" and apart == {"batch.initial"} and _as_large(cell, ours):
        return MEAN_BATCH
    if cell.method in ("fp32", "amp") and apart == {"epochs"} and _as_long(cell, ours):
        return EQUAL_TIME
    return None


def _follows(cell: Cell, ours: Cell) -> bool:
    """Whether a replay has the settings of our runs; which of them it follows no record of ours tells."""
    method = open_loop(ours.settings["method"], cell.method)
    return (cell.settings["method"], cell.settings["optimizer"]) == (method, ours.settings["optimizer"])


def _as_large(cell: Cell, ours: Cell) -> bool:
    """Whether B is our mean batch, to a twentieth."""
    mine, batch = _mean_beside(cell, ours, "batch_mean"), cell.settings["method"]["batch"]["initial"]
    return mine is None or abs(batch - mine) <= 0.05 * mine


def _as_long(cell: Cell, ours: Cell) -> bool:
    """Whether training took as long as ours, to an epoch or a tenth."""
    mine, taken = _mean_beside(cell, ours, "training_seconds"), cell.mean("training_seconds")
    if mine is None or taken is None:
        return True
    return abs(taken.mean - mine) <= max(taken.mean / cell.runs[0].epochs_planned, 0.1 * mine)


def _mean_beside(cell: Cell, ours: Cell, field: str) -> float | None:
    """Our mean over the seeds of a control, which was made by them; over all where there are none."""
    seeds = {summary.seed for summary in cell.summaries}
    chosen = [summary for summary in ours.summaries if summary.seed in seeds] or ours.summaries
    found = mean_std(getattr(summary, field) for summary in chosen)
    return None if found is None else found.mean


def _conditions(cell: Cell) -> dict[str, str]:
    """What cells of two methods have in common, whether or not a seed of theirs was finished."""
    return cell.shared_untuned | {"memory.meter": cell.settings["memory"]["meter"]}


def _study(found: Iterable[Cell]) -> dict[str, Cell]:
    """Cells that differ in their method alone: of groups with a finished run the one of the latest version of results,
    then with most methods, seeds, epochs.

    A method that is there twice, at two learning rates, counts as the one with more seeds, then the later.
    """
    groups: dict[tuple, list[Cell]] = {}
    for cell in found:
        if cell.method != "replay":
            groups.setdefault(tuple(sorted(_conditions(cell).items())), []).append(cell)
    if not groups:
        return {}
    best = max(groups, key=lambda key: (*_weight(groups[key]), key))
    study: dict[str, Cell] = {}
    for cell in sorted(groups[best], key=lambda cell: (len(cell.summaries), _ended(cell), cell.cell)):
        study[cell.method] = cell
    return study


def _weight(group: list[Cell]) -> tuple[bool, int, int, int, int]:
    first, seeds = group[0].runs[0], sum(len(cell.summaries) for cell in group)
    methods = {cell.method for cell in group if cell.summaries}
    return seeds > 0, first.results_version, len(methods), seeds, first.epochs_planned


def _ended(cell: Cell) -> str:
    return max((run.provenance.finished_at or "" for run in cell.runs if run.provenance), default="")


def _of(cell: Cell, device: str) -> bool:
    return device.lower() in (cell.device_name or "").lower()


def _most(found: list[Cell], name) -> str | None:
    runs: dict[str, int] = {}
    for cell in found:
        if name(cell) is not None:
            runs[name(cell)] = runs.get(name(cell), 0) + len(cell.summaries)
    return max(runs, key=lambda key: (runs[key], key), default=None)


def _method_order(method: str) -> tuple[int, str]:
    return order("", "", method)[2]
