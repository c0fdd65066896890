"""Find and read the run records below folders: each seed of a cell once, and every file that gave none named."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from triaccel_bench.records import RUN_FILE, RecordError, RunRecord, read_run


@dataclass(frozen=True)
class Results:
    """Readable records, one per (cell, seed, device), in the order of their paths, and a sentence per unused file."""

    runs: tuple[RunRecord, ...]
    problems: tuple[str, ...] = ()


def read_results(folders: Iterable[Path]) -> Results:
    """Read every ``run.json`` below the folders.

    A seed found twice with different content counts once: the finished record, or of two the
    later one; the problems name the other. The same record found twice is no problem.
    """
    folders = list(folders)
    problems = [
        f"{folder}: expected a folder, got {'a file' if folder.exists() else 'no such folder'}; correct --results"
        for folder in folders
        if not folder.is_dir()
    ]
    kept: dict[tuple[str, int, str | None], tuple[Path, RunRecord]] = {}
    found = {os.path.realpath(path): path for folder in folders for path in run_files(folder, problems)}
    for path in sorted(found.values()):
        try:
            run = read_run(path)
        except RecordError as error:
            problems.append(str(error))
            continue
        key = (run.cell, run.seed, run.provenance.device_name if run.provenance else None)
        rival_path, rival = kept.setdefault(key, (path, run))
        if rival == run:
            continue
        unused = path
        if _standing(run) > _standing(rival):
            kept[key], unused = (path, run), rival_path
        problems.append(f"{unused}: seed {run.seed} of cell {run.cell} is recorded twice; used: {kept[key][0]}")
    return Results(tuple(run for _, run in kept.values()), tuple(problems))


def run_files(folder: Path, problems: list[str]) -> Iterator[Path]:
    """Every ``run.json`` below a folder; what cannot be looked into becomes a problem."""

    def hidden(error: OSError) -> None:
        if error.filename != str(folder):
            problems.append(
                f"{error.filename}: expected a folder that can be read, got {error}; give it read permission"
            )

    for place, folders, files in os.walk(folder, onerror=hidden):
        if RUN_FILE in files or RUN_FILE in folders:
            yield Path(place, RUN_FILE)


def _standing(run: RunRecord) -> tuple[bool, str]:
    return run.status == "done", (run.provenance.finished_at or "") if run.provenance else ""
