"""What can be known to go wrong before a run begins: checks as plain data, their table, and those of folders and disks.

A check is one fact about the machine and some of the cells of a sweep. What has to ask torch or the
device for its facts stands in ``inspection``, which runs in a child; this side imports no torch.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pandas

from triaccel_bench.layout import Table

RECORD_BYTES = 2_000_000
"""A seed's ``run.json`` and ``trace.json.gz``, and some room."""


@dataclass(frozen=True)
class Check:
    """One fact: ``finding``, and where it is no good what to do about it.

    Attributes:
        cells: numbers of the cells that a check that fails stops.
        by_the_run: whether runs themselves say it as they begin, so that it needs no line before them.
    """

    name: str
    verdict: Literal["ok", "warning", "fails"]
    finding: str
    remedy: str = ""
    cells: tuple[int, ...] = ()
    by_the_run: bool = False

    @property
    def sentence(self) -> str:
        return f"{self.finding}; {self.remedy}" if self.remedy else self.finding


def failed(name: str, message: str, cells: Iterable[int]) -> Check:
    """A check that fails with a sentence of the form "what; remedy"."""
    finding, separator, remedy = message.rpartition("; ")
    return Check(name, "fails", finding if separator else remedy, remedy if separator else "", tuple(cells))


@dataclass(frozen=True)
class Report:
    """Checks in the order of the table, and the names of the devices that can be used, by (device, kernels)."""

    checks: tuple[Check, ...]
    devices: dict[tuple[str, str], str] = field(default_factory=dict)

    def obstacles(self) -> dict[int, str]:
        """For each cell that cannot run, the first sentence that says why."""
        found: dict[int, str] = {}
        for check in self.checks:
            if check.verdict == "fails":
                for cell in check.cells:
                    found.setdefault(cell, check.sentence)
        return found

    def worth_a_line(self) -> list[str]:
        """Sentences to be said before the first run although every cell can run."""
        return [
            f"preflight, {check.name}: {check.sentence}"
            for check in self.checks
            if check.verdict == "warning" and not check.by_the_run
        ]


def merged(parts: Iterable[tuple[str, Sequence[int], Report]]) -> Report:
    """One report of several, each with the device that it is of and its cells' numbers in the whole sweep."""
    checks: list[Check] = []
    devices: dict[tuple[str, str], str] = {}
    for device, numbers, report in parts:
        checks += [replace(check, cells=tuple(numbers[cell] for cell in check.cells)) for check in report.checks]
        devices |= {(device, kernels): name for (_, kernels), name in report.devices.items()}
    return Report(tuple(dict.fromkeys(checks)), devices)


_SHOWN = {"ok": "ok", "warning": "warning", "fails": "FAILS"}


def lines(report: Report) -> list[str]:
    """A line a check, whole, for a pipe or a log."""
    width = max((len(check.name) for check in report.checks), default=0)
    rows = [f"{check.name:<{width}}  {_SHOWN[check.verdict]:<7}  {check.sentence}" for check in report.checks]
    return [*rows, _caption(report)]


def table(report: Report) -> Table:
    """The same for a terminal."""
    rows = tuple((check.name, f"{_SHOWN[check.verdict]}: {check.finding}", check.remedy) for check in report.checks)
    return Table(
        title="Preflight",
        caption=_caption(report),
        header=("check", "result", "remedy"),
        rows=rows,
        footers=(),
        frame=pandas.DataFrame(rows, columns=["check", "result", "remedy"]),
        text_columns=3,
    )


def _caption(report: Report) -> str:
    fails = sum(check.verdict == "fails" for check in report.checks)
    warnings = sum(check.verdict == "warning" for check in report.checks)
    return f"{_count(fails, 'check')} failed, {_count(warnings, 'warning')}; nothing was run"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def folder(name: str, path: Path, key: str, cells: Iterable[int]) -> Check:
    """Whether a file can be written into a folder, which is made if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        finding = f"{path}: expected a folder that can be written, got {error}"
        return Check(name, "fails", finding, f"name another by {key}", tuple(cells))
    return Check(name, "ok", f"{path} can be written", cells=tuple(cells))


def space(path: Path, key: str, records: int, checkpoints: int, cells: Iterable[int]) -> Check:
    """Whether the disk of the folder that ``key`` names has room for so many bytes of records, and of checkpoints."""
    free = free_bytes(path)
    needs = f"{path}: runs write up to {megabytes(records)} of records and {megabytes(checkpoints)} of checkpoints"
    finding, remedy = f"{needs}, {megabytes(free)} are free", f"free space there or name another disk by {key}"
    if free < records:
        return Check("disk", "fails", finding, remedy, tuple(cells))
    if free < records + checkpoints:
        return Check("disk", "warning", finding, remedy, tuple(cells))
    return Check("disk", "ok", finding, cells=tuple(cells))


def free_bytes(path: Path) -> int:
    """What this user may still write on the disk of a folder that exists or will be made."""
    return shutil.disk_usage(nearest(path)).free


def nearest(path: Path) -> Path:
    """The folder itself, or of those above it the lowest that exists."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def can_write(path: Path) -> bool:
    return os.access(nearest(path), os.W_OK | os.X_OK)


def megabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def duration(minutes: float) -> str:
    if minutes < 1:
        return f"{minutes * 60:.0f} s" if minutes * 60 >= 1 else f"{minutes * 60:.1f} s"
    return f"{minutes:.1f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
