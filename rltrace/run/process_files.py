"""The files that the processes of a run wrote into one folder, as a collection takes them from there."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path, PurePosixPath

from rltrace.host import regular_file
from rltrace.read.packed import Store


class ProcessFiles:
    """What is below a folder `processes/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def digests(self) -> dict[str, str]:
        """Return a digest of every file, by its path below the folder."""
        files = sorted(path for path in self.folder.glob("*/*") if path.is_file())
        return {str(path.relative_to(self.folder)): digest(content(path)) for path in files}

    def read(self, path: str) -> bytes:
        """Return the content of one of these files."""
        return content(self.folder / path)


def content(path: Path) -> bytes:
    """Return the content of a file of a process; of a segment, only what was written into it.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it cannot be read.
    """
    if path.suffix != ".seg":
        return regular_file.read(path)
    try:
        data = regular_file.read(path)
    except FileNotFoundError:  # it is columns now, or was dropped
        data = Store(path.parent).read(path.name)
    return data.rstrip(b"\0")  # a record never ends in a zero


def digest(data: bytes) -> str:
    """Return a digest that tells two contents of one file apart."""
    return blake2b(data, digest_size=16).hexdigest()


def is_sound(path: str) -> bool:
    """Return whether the path is one that a process writes, `<process>/<file>`, and does not lead out of the
    Recording."""
    parts = PurePosixPath(path).parts
    return len(parts) == 2 and not any(part.startswith(".") for part in parts)
