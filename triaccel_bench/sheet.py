"""The rows of one table in their order, and how its rows and columns are called."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from triaccel_bench.cells import Cell, grouped, told_apart
from triaccel_bench.labels import dataset_label, model_label, order
from triaccel_bench.results import Results

LONGEST_VARIANT = 24
"""A longer text on how two rows of one label differ stands below the table."""

MEMORY_HEADERS = {
    "vram": ("VRAM (GB)", "Budget (GB)"),
    "tensors": ("Tensors (GB, not VRAM)", "Budget (GB, tensors)"),
    "differs": ("Memory (GB)", "Budget (GB)"),
}
"""Columns of memory and budget by the meter that all rows share."""


_GROUPED: WeakKeyDictionary[Results, list[Cell]] = WeakKeyDictionary()
"""Of records of which several tables are made, one after the other."""


def _grouped(results: Results) -> list[Cell]:
    if results not in _GROUPED:
        _GROUPED[results] = grouped(results.runs)
    return _GROUPED[results]


class Sheet:
    """The cells of one table in the paper's order. ``label`` names a method; ``belongs`` chooses the table's cells."""

    def __init__(
        self, results: Results, label: Callable[[str], str], belongs: Callable[[Cell], bool] = lambda cell: True
    ) -> None:
        self._label = label
        self.problems = results.problems
        found = told_apart(_grouped(results), self._plain_names)
        self.found = sorted(found, key=self._position)
        self.cells = [cell for cell in self.found if belongs(cell)]
        """Those of ``found`` that the table shows."""
        self.variant_notes: list[str] = []
        self._names = {_key(cell): self._with_variant(cell) for cell in self.cells}
        self._one_group = len({names[:2] for names in self._names.values()}) == 1
        meters = {cell.meter for cell in self.cells} - {"off"}
        self.meters_differ = len(meters) > 1
        meter = "differs" if self.meters_differ else min(meters, default="vram")
        self.memory_header, self.budget_header = MEMORY_HEADERS[meter]

    def _plain_names(self, cell: Cell) -> tuple[str, ...]:
        data = dataset_label(cell.dataset, cell.settings["dataset"], cell.samples)
        return data, model_label(cell.model, cell.settings), self._label(cell.method)

    def _position(self, cell: Cell) -> tuple[object, ...]:
        places, (data, model, _) = order(cell.dataset, cell.model, cell.method), self._plain_names(cell)
        return places[0], data, places[1], model, places[2]

    def _with_variant(self, cell: Cell) -> tuple[str, ...]:
        *group, method = self._plain_names(cell)
        if not cell.variant:
            return *group, method
        if len(cell.variant) <= LONGEST_VARIANT:
            return *group, f"{method} ({cell.variant})"
        self.variant_notes.append(f"[{len(self.variant_notes) + 1}] {cell.variant}")
        return *group, f"{method} [{len(self.variant_notes)}]"

    def names(self, cell: Cell) -> tuple[str, ...]:
        return self._names.get(_key(cell)) or self._plain_names(cell)

    def name(self, cell: Cell) -> str:
        """How a row is called in a sentence: by no more than tells it apart."""
        names = self.names(cell)
        return names[2] if self._one_group else " / ".join(names)


def _key(cell: Cell) -> tuple[str, str | None]:
    return cell.cell, cell.device_name
