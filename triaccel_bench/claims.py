"""Whose turn it is in a seed's folder: one command at a time, and what the last one left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from triaccel_bench.deadline import Deadline
from triaccel_bench.progress import Reporter
from triaccel_bench.records import CHECKPOINT_FILE, RUN_FILE, TRACE_FILE
from triaccel_bench.scratch import Workplace


class Refused(RuntimeError):
    """It turned out, before any step, that the run cannot be set up; the message says why and what to do."""


@contextlib.contextmanager
def claimed(folder: Path, label: str, reporter: Reporter, deadline: Deadline) -> Iterator[bool]:
    """Hold a seed's folder alone, waiting for another command that does; the system frees it when a holder dies.

    Yields whether it is held, and not the time up before.
    """
    lock = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_WRONLY | os.O_CREAT, 0o644)
    except OSError as error:
        raise Refused(
            f"{folder}: expected a folder that can be written, got {error}; name another by results.root"
        ) from None
    try:
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                reporter.line(f"{label}: another command is running it; waiting for that one to end")
                if not _freed(handle, deadline):
                    yield False
                    return
            _remove_parts(folder)
        except OSError as error:
            # Each command still writes whole files, and leaves alone what others may be writing.
            _say_that_there_are_no_locks(folder.parent.parent, error, reporter)
        yield True
    finally:
        os.close(handle)


def _freed(handle: int, deadline: Deadline) -> bool:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if deadline.near():
                return False
            time.sleep(0.5)


_without_locks: set[Path] = set()


def _say_that_there_are_no_locks(root: Path, error: OSError, reporter: Reporter) -> None:
    if root not in _without_locks:
        _without_locks.add(root)
        reporter.line(f"{root}: no locks there ({error}); commands that are given the same seed at once all run it")


def _remove_parts(folder: Path) -> None:
    """What a run that was killed had begun to write."""
    for name in (RUN_FILE, TRACE_FILE, CHECKPOINT_FILE):
        for part in folder.glob(f".{name}.*"):
            with contextlib.suppress(OSError):
                part.unlink()


def recover(folder: Path, scratch: str | None, label: str, reporter: Reporter) -> None:
    """Bring home what a run had ended with when its folder could not be written."""
    work = Workplace(folder, scratch)
    try:
        if work.recover():
            reporter.line(f"{label}: its record could not be written to {folder} before, and now was")
    except OSError as error:
        raise Refused(
            f"{folder}: expected a folder for the record that waits in {work.folder}, got {error}; free space below "
            "results.root, or results.reuse=false to run it again"
        ) from None
