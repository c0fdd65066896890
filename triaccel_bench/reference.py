"""A box's records made into a pack that its owner can contribute: every one of them is judged before it goes in."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from triaccel_bench.files import write_atomically
from triaccel_bench.identity import RESULTS_VERSION, identity
from triaccel_bench.packs import MANIFEST, RUNS, Manifest, digest
from triaccel_bench.parsing import parse
from triaccel_bench.records import (
    RUN_FILE,
    TRACE_FILE,
    Provenance,
    RecordError,
    RunRecord,
    read_run,
    read_trace,
)
from triaccel_bench.results import run_files
from triaccel_bench.settings import Settings, SettingsError
from triaccel_bench.stats import why_excluded

ENDED = ("done", "diverged", "oom")
"""What says something of a box; a crash or an interruption does not."""


class NoPack(ValueError):
    """Records that make no pack; the message says why and what to do."""


@dataclass(frozen=True)
class Packed:
    folder: Path
    records: int
    refused: tuple[str, ...]
    """A sentence for each record that was left out."""


def pack(folders: Iterable[Path], out: Path, device: str = "") -> Packed:
    """Check all records below the folders and copy the sound ones to ``<out>/runs``, beside their manifest.

    Args:
        out: a folder that does not exist yet; it is there as a whole at the end, or not at all.
        device: part of the name of the device whose records are meant.

    Raises:
        NoPack: no record can be packed, they come from several devices, or read several data sets of one name.
        OSError: the folder cannot be written.
    """
    if out.exists():
        raise NoPack(f"{out}: expected a new folder, got one that is there; remove it or give the box a name")
    refused: list[str] = []
    sound: dict[Path, tuple[RunRecord, Provenance]] = {}
    names: set[str] = set()
    for path in sorted(path for folder in folders for path in run_files(folder, refused)):
        try:
            run, provenance = _judged(path)
        except RecordError as error:
            refused.append(str(error))
            continue
        except NoPack as error:
            refused.append(f"{path}: {error}")
            continue
        names.add(provenance.device_name)
        if device.lower() in provenance.device_name.lower():
            sound[path] = (run, provenance)
    if names and not sound:
        raise NoPack(f"--device {device}: expected part of {' or '.join(sorted(names))}, got another; correct it")
    if not sound:
        listed = "".join(f"\n{sentence}" for sentence in refused)
        raise NoPack(f"expected finished runs of this version, got none; run a sweep or name --results{listed}")
    chosen = sorted({provenance.device_name for _, provenance in sound.values()})
    if len(chosen) > 1:
        raise NoPack(f"expected records of one device, got {', '.join(chosen)}; choose by --device")
    _check_data(run for run, _ in sound.values())
    _write(sound, out, chosen[0])
    return Packed(out, len(sound), tuple(refused))


def _judged(path: Path) -> tuple[RunRecord, Provenance]:
    """Raises ``RecordError`` for a file that is none, ``NoPack`` for what no run of this version writes."""
    run = read_run(path)
    if run.results_version != RESULTS_VERSION:
        raise NoPack(
            f"expected results version {RESULTS_VERSION}, got {run.results_version}; run that seed again with this code"
        )
    if run.status not in ENDED:
        raise NoPack(f"expected a run that ended, got {run.status} ({run.reason}); run that seed again")
    if run.provenance is None:
        raise NoPack("expected to be told the device, got no provenance; run that seed again")
    if (reason := why_excluded(run)) and run.status == "done":
        raise NoPack(f"{reason}; run that seed again")
    try:
        settings = parse(run.settings)
    except SettingsError as error:
        raise NoPack(f"its settings are none of this version ({error}); run that seed again") from None
    if (fault := _contradiction(run, settings)) is not None:
        raise NoPack(f"it contradicts itself: {fault}; run that seed again")
    if (path.parent / TRACE_FILE).exists() or run.status == "done":
        read_trace(path.parent / TRACE_FILE)
    return run, run.provenance


def _contradiction(run: RunRecord, settings: Settings) -> str | None:
    """The first figure that does not follow from the others, as it must in every record."""
    told = (run.dataset, run.model, run.method, run.epochs_planned)
    meant = (settings.dataset.name, settings.model.name, settings.method.name, settings.epochs)
    if told != meant:
        return f"it names {told}, its settings {meant}"
    if run.seed not in settings.seeds:
        return f"its settings ask for seeds {list(settings.seeds)}, and it holds {run.seed}"
    by_itself = settings.dataset.path is None and settings.model.weights in ("none", "imagenet")
    if by_itself and (cell := identity(settings, run.provenance.device_name)) != run.cell:
        return f"its settings and device make cell {cell}, and it names {run.cell}"
    for number, epoch in enumerate(run.epochs, start=1):
        if epoch.epoch != number:
            return f"epoch {epoch.epoch} stands in place {number}"
        if epoch.train_seconds == 0:
            return f"epoch {number} took {epoch.train_seconds} s"
        share = epoch.evaluation_accuracy_percent
        if share is not None:
            right = share * epoch.evaluation_samples / 100
            if abs(right - round(right)) > 1e-3:
                return f"epoch {number} has {share} % of {epoch.evaluation_samples} images right"
    if run.status == "done" and (steps := sum(epoch.steps for epoch in run.epochs)) != run.steps:
        return f"its epochs have {steps} steps, and it {run.steps}"
    return None


def _check_data(runs: Iterable[RunRecord]) -> None:
    data: dict[str, str | None] = {}
    for run in runs:
        if data.setdefault(run.dataset, run.dataset_fingerprint) != run.dataset_fingerprint:
            raise NoPack(
                f"expected one data set called {run.dataset}, got images of fingerprints {data[run.dataset]} and "
                f"{run.dataset_fingerprint}; name the folder of one of them by --results"
            )


def _write(sound: dict[Path, tuple[RunRecord, Provenance]], out: Path, device_name: str) -> None:
    files: dict[str, bytes] = {}
    for path, (run, _) in sound.items():
        place = f"{RUNS}/{run.dataset}-{run.model}-{run.method}-{run.cell}/seed-{run.seed}"
        if f"{place}/{RUN_FILE}" in files:
            raise NoPack(f"{path}: seed {run.seed} of cell {run.cell} is there twice; name one of them")
        files[f"{place}/{RUN_FILE}"] = path.read_bytes()
        if (path.parent / TRACE_FILE).exists():
            files[f"{place}/{TRACE_FILE}"] = (path.parent / TRACE_FILE).read_bytes()
    manifest = Manifest(
        box=out.name,
        device_name=device_name,
        results_version=RESULTS_VERSION,
        code=sorted({provenance.code_hash or provenance.code_version for _, provenance in sound.values()}),
        data={run.dataset: run.dataset_fingerprint or "unknown" for run, _ in sound.values()},
        files={name: digest(content) for name, content in sorted(files.items())},
    )
    files[MANIFEST] = (manifest.model_dump_json(indent=1) + "\n").encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        for name, content in files.items():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(staged / name, content)
        staged.chmod(0o755)
        os.rename(staged, out)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
