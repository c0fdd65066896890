"""A local folder for a run's files, which are then copied to where they belong, each whole or not at all.

For a ``results.root`` on a network or a mounted drive: small writes stay on the local disk, and the root gets every
file in one go, under a temporary name that is then changed. What lies in the root is what counts: a run goes on from
the checkpoint there, whichever machine has put it there.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from triaccel_bench.files import replacing
from triaccel_bench.records import CHECKPOINT_FILE, RUN_FILE, TRACE_FILE
from triaccel_bench.settings import SettingsError


class Workplace:
    """The folder of one run, and beside it a local one, if there is to be one.

    Attributes:
        home: where others find the run's files.
        folder: where to write them; ``home`` itself without ``scratch``.
    """

    def __init__(self, home: Path, scratch: str | None) -> None:
        self.home = self.folder = home
        if scratch is not None:
            # Several roots may have the same local folder.
            told_apart = hashlib.sha256(str(home.absolute()).encode()).hexdigest()[:8]
            self.folder = Path(scratch) / f"{home.parent.name}-{home.name}-{told_apart}"

    @property
    def apart(self) -> bool:
        return self.folder != self.home

    def open(self) -> None:
        """Begin with a copy of the checkpoint at home, if there is one, and with nothing else.

        Raises:
            SettingsError: the local folder cannot be written.
        """
        if not self.apart:
            return
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            if (self.home / CHECKPOINT_FILE).exists():
                shutil.copyfile(self.home / CHECKPOINT_FILE, self.folder / CHECKPOINT_FILE)
        except OSError as error:
            raise SettingsError(
                f"results.scratch={self.folder.parent}: expected a local folder that can be written, got {error}; "
                "name another, or leave it out"
            ) from None

    def publish(self, name: str) -> None:
        """Copy one file home. Raises ``OSError``; home has then what it had."""
        if self.apart:
            with (self.folder / name).open("rb") as source, replacing(self.home / name) as target:
                shutil.copyfileobj(source, target, 2**20)

    def publish_record(self) -> None:
        """Copy trace and record home, in the order of ``write_run``. Raises ``OSError``."""
        if not self.apart:
            return
        if (self.folder / TRACE_FILE).exists():
            self.publish(TRACE_FILE)
        else:
            (self.home / TRACE_FILE).unlink(missing_ok=True)
        self.publish(RUN_FILE)

    def recover(self) -> bool:
        """Copy home the record of a run that had ended when home could not be written. Raises ``OSError``."""
        if not (self.apart and (self.folder / RUN_FILE).exists()):
            return False
        self.publish_record()
        self.close()
        return True

    def close(self) -> None:
        """Remove the local folder."""
        if self.apart:
            shutil.rmtree(self.folder, ignore_errors=True)
