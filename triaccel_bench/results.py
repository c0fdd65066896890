"""Find and read the run records below folders: each seed of a cell once, and every file that gave none named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from triaccel_bench import packs
from triaccel_bench.records import RUN_FILE, RecordError, RunRecord, read_run


@dataclass(frozen=True, eq=False)
class Results:
    """Readable records, one per (cell, seed, device), in the order of their paths, and a sentence per unused file.

    Each is its own: what was found out about one can be kept beside it.
    """

    runs: tuple[RunRecord, ...]
    problems: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()
    """The file of each of ``runs``; empty for records that lie in none."""


def read_results(folders: Iterable[Path]) -> Results:
    """Read every ``run.json`` below the folders.

    A seed found twice with different content counts once: the finished record, or of two the
    later one; the problems name the other. The same record found twice is no problem. Of a pack
    only records count that are as they were packed.
    """
    folders = list(folders)
    problems = [
        f"{folder}: expected a folder, got {'a file' if folder.exists() else 'no such folder'}; correct --results"
        for folder in folders
        if not folder.is_dir()
    ]
    reader = _Packs(problems)
    kept: dict[tuple[str, int, str | None], tuple[Path, RunRecord]] = {}
    found = {os.path.realpath(path): path for folder in folders for path in run_files(folder, problems, reader.met)}
    for path in sorted(found.values()):
        try:
            run = reader.read(path)
        except RecordError as error:
            problems.append(str(error))
            continue
        if run is None:
            continue
        key = (run.cell, run.seed, run.provenance.device_name if run.provenance else None)
        rival_path, rival = kept.setdefault(key, (path, run))
        if rival == run:
            continue
        unused = path
        if _standing(run) > _standing(rival):
            kept[key], unused = (path, run), rival_path
        problems.append(f"{unused}: seed {run.seed} of cell {run.cell} is recorded twice; used: {kept[key][0]}")
    paths, runs = zip(*kept.values()) if kept else ((), ())
    return Results(runs, tuple(problems), paths)


def run_files(folder: Path, problems: list[str], met: Callable[[Path], object] = lambda pack: None) -> Iterator[Path]:
    """Every ``run.json`` below a folder; what cannot be looked into becomes a problem, a pack's folder is ``met``."""

    def hidden(error: OSError) -> None:
        if error.filename != str(folder):
            fault = f"expected a folder that can be read, got {error}; allow that, or move it"
            problems.append(f"{error.filename}: {fault}")

    for place, folders, files in os.walk(folder, onerror=hidden):
        if packs.MANIFEST in files:
            met(Path(place).absolute())
        if RUN_FILE in files or RUN_FILE in folders:
            yield Path(place, RUN_FILE)


class _Packs:
    """Reads records, those of packs only if they are as they were packed; the others become problems."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems
        self._known: dict[Path, packs.Pack | None] = {}

    def met(self, folder: Path) -> packs.Pack | None:
        if folder not in self._known:
            self._known[folder] = None
            try:
                self._known[folder] = pack = packs.read_pack(folder)
                self._problems += pack.missing()
            except packs.PackError as error:
                self._problems.append(str(error))
        return self._known[folder]

    def read(self, path: Path) -> RunRecord | None:
        """Raises ``RecordError`` as ``read_run`` does; ``None``: it is no record of the pack that it lies in."""
        folder = packs.folder_of(path)
        pack = None if folder is None else self.met(folder)
        if folder is None:
            return read_run(path)
        if pack is None:
            return None
        fault = pack.fault(path)
        if fault is None:
            run = read_run(path)
            fault = pack.mismatch(run)
            if fault is None:
                return run
            fault = f"{path}: {fault}; pack each version and each box by itself"
        self._problems.append(fault)
        return None


def _standing(run: RunRecord) -> tuple[bool, str]:
    return run.status == "done", (run.provenance.finished_at or "") if run.provenance else ""
