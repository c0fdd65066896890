"""Files that are never half of something: written beside their place, synced, and only then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: bytes) -> Path:
    """Temporary name, fsync, rename: a reader sees the old file or the new one, never a part."""
    write_together({path: content})
    return path


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Files that belong together: none of them changes before all lie on the disk.

    Raises:
        OSError: there was no room, say; nothing has changed then, and nothing is left over.
    """
    with _beside() as opened:
        for path, content in contents.items():
            opened(path).write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` once it is complete and on the disk; otherwise nothing has changed."""
    with _beside() as opened:
        yield opened(path)


@contextmanager
def _beside() -> Iterator[Callable[[Path], BinaryIO]]:
    """Opens temporary files beside those that they take the place of at the end."""
    staged: list[tuple[BinaryIO, Path, Path]] = []

    def opened(path: Path) -> BinaryIO:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        staged.append((os.fdopen(handle, "wb"), Path(temporary), path))
        return staged[-1][0]

    try:
        yield opened
        for file, temporary, _ in staged:
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.chmod(temporary, 0o644)
        for _, temporary, path in staged:
            os.replace(temporary, path)
    except BaseException:
        for file, temporary, _ in staged:
            with suppress(OSError):
                # It would write what the disk has no room for.
                file.close()
            temporary.unlink(missing_ok=True)
        raise
