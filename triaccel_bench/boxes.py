"""Which of the paper's cells were measured on which box, and what came of it: reference records side by side."""

from __future__ import annotations

from collections.abc import Callable

import pandas

from triaccel_bench import paper
from triaccel_bench.cells import Cell, cells, names
from triaccel_bench.footers import provenance_text
from triaccel_bench.labels import DATASETS, MODELS, dataset_label, method_label, model_label
from triaccel_bench.layout import Table
from triaccel_bench.results import Results
from triaccel_bench.stats import Mean

NOT_MEASURED = "not measured"
PAPERS_CARDS = ("T4", "P100")
"""Section 4.1's: listed also while nobody has contributed records of them."""

_FIGURES: dict[str, Callable[[Cell], tuple[Mean | None, int]]] = {
    "Acc (%)": lambda cell: (cell.mean("accuracy_percent"), 2),
    "Time (s)": lambda cell: (cell.mean("seconds"), 3),
    "VRAM (GB)": lambda cell: (_vram(cell), 3),
    "Eff. Score": lambda cell: (cell.mean("score"), 2),
}


def boxes_table(results: Results) -> Table:
    """A row for each of Table 1's cells on each card of the paper and each device that has records."""
    found = cells(results.runs)
    devices = sorted({cell.device_name for cell in found if cell.device_name})
    absent = [card for card in PAPERS_CARDS if not any(card in name.replace("-", " ").split() for name in devices)]
    rows = [row for name in (*devices, *absent) for row in _rows(name, found)]
    header = ("Device", "Dataset", "Architecture", "Method", *_FIGURES, "Seeds", "Epochs")
    measured = sum(NOT_MEASURED not in row for row in rows)
    caption = f"{measured} of {len(rows)} rows are measured. Epochs: as planned; what a row has, others need not have."
    return Table(
        title="Reference records by device",
        caption=f"{provenance_text(found)} {caption}",
        header=header,
        rows=tuple(rows),
        footers=tuple(f"Not used: {problem}" for problem in results.problems),
        frame=pandas.DataFrame(rows, columns=list(header), dtype=object),
        text_columns=4,
        group_columns=3,
    )


def _rows(device: str, found: list[Cell]) -> list[tuple[str, ...]]:
    rows = []
    for printed in paper.TABLE1:
        wanted = printed.dataset, printed.model, printed.method
        held = [cell for cell in found if cell.device_name == device and names(cell) == wanted]
        rows += [_row(device, cell) for cell in held]
        if not held:
            labels = DATASETS[printed.dataset], MODELS[printed.model], method_label(printed.method)
            rows.append((device, *labels, *[NOT_MEASURED] * len(_FIGURES), "0", ""))
    return rows


def _row(device: str, cell: Cell) -> tuple[str, ...]:
    data = dataset_label(cell.dataset, cell.settings["dataset"], cell.samples)
    method = method_label(cell.method) + (f" ({cell.variant})" if cell.variant else "")
    figures = (_shown(*figure(cell)) for figure in _FIGURES.values())
    epochs = str(cell.runs[0].epochs_planned)
    return device, data, model_label(cell.model, cell.settings), method, *figures, cell.seeds_told, epochs


def _vram(cell: Cell) -> Mean | None:
    memory = cell.mean("memory_peak_bytes") if cell.meter == "vram" else None
    return memory and memory.scaled(1 / paper.BYTES_PER_GB)


def _shown(value: Mean | None, decimals: int) -> str:
    if value is None:
        return NOT_MEASURED
    spread = "" if value.std is None else f" ± {value.std:.{decimals}f}"
    return f"{value.mean:.{decimals}f}{spread}"
