"""Packs: a box's records as their owner handed them over, beside a manifest that any later change of a file shows in.

The manifest's digests tell damage and edits, not forgery: whoever writes a file can write its digest too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triaccel_bench.records import RUN_FILE, TRACE_FILE, Bytes, RunRecord

MANIFEST = "reference.json"
RUNS = "runs"
_REMEDY = "take it as its owner handed it over"


class PackError(ValueError):
    """A manifest that cannot be used; the message names it, its fault and the remedy."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileDigest(_Part):
    bytes: Bytes
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(_Part):
    format: Literal["triaccel-bench reference"] = "triaccel-bench reference"
    version: Literal[1] = 1
    box: str
    device_name: str
    results_version: int
    code: list[str]
    """The states of the sources that made the records."""
    data: dict[str, str]
    """The fingerprint of each data set."""
    files: dict[str, FileDigest]
    """By path below the pack's folder."""


def digest(content: bytes) -> FileDigest:
    return FileDigest(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def folder_of(run_file: Path) -> Path | None:
    """The pack that a ``run.json`` lies in by its place: ``<pack>/runs/<cell>/seed-<n>/run.json``."""
    # Of a relative path those above it are not told.
    above = run_file.absolute().parents
    if len(above) > 3 and above[2].name == RUNS and (above[3] / MANIFEST).exists():
        return above[3]
    return None


@dataclass(frozen=True)
class Pack:
    folder: Path
    manifest: Manifest

    def fault(self, run_file: Path) -> str | None:
        """Why a record is not as it was packed, in a sentence; ``None``: it is."""
        for file in (run_file.absolute(), run_file.absolute().with_name(TRACE_FILE)):
            if (found := self._fault_of(file, file.name == TRACE_FILE)) is not None:
                return f"{file}: {found}; {_REMEDY}"
        return None

    def _fault_of(self, file: Path, may_lack: bool) -> str | None:
        listed = self.manifest.files.get(file.relative_to(self.folder).as_posix())
        try:
            held = digest(file.read_bytes())
        except FileNotFoundError:
            return None if listed is None and may_lack else f"{MANIFEST} lists it, and it is missing"
        except OSError as error:
            return f"cannot be read ({error})"
        if listed is None:
            return f"foreign to this pack, whose {MANIFEST} does not list it"
        if held.bytes < listed.bytes:
            return f"cut off, {held.bytes} of {listed.bytes} bytes"
        if held != listed:
            return "changed since it was packed"
        return None

    def mismatch(self, run: RunRecord) -> str | None:
        """What tells a record from those of this pack; ``None``: nothing."""
        device = run.provenance.device_name if run.provenance else None
        if run.results_version != self.manifest.results_version:
            return f"of results version {run.results_version} in a pack of {self.manifest.results_version}"
        if device != self.manifest.device_name:
            return f"measured on {device} in a pack of {self.manifest.device_name}"
        return None

    def missing(self) -> list[str]:
        """A sentence for each record that the manifest lists and that is not there."""
        names = (name for name in self.manifest.files if name.endswith(f"/{RUN_FILE}"))
        gone = [self.folder / name for name in names if not (self.folder / name).exists()]
        return [f"{path}: {MANIFEST} lists it, and it is missing; {_REMEDY}" for path in gone]


def read_pack(folder: Path) -> Pack:
    """The pack in a folder.

    Raises:
        PackError: its manifest cannot be read or is none.
    """
    path = folder / MANIFEST
    try:
        return Pack(folder, Manifest.model_validate_json(path.read_bytes()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        fault = f"not the manifest of a pack ({where}: {first['msg']})"
    except OSError as error:
        fault = f"cannot be read ({error})"
    raise PackError(f"{path}: {fault}, so that none of its records is used; {_REMEDY}")
