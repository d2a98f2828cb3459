"""Replaces the segments of a run that is over by compressed columns, of which readers restore them byte for byte.

A file of columns is on the disk, and was read again, before the first of its segments goes: a kill at any moment leaves
a segment, or its columns, or both, and whoever compacts the run again finishes that. What nobody closed, or is damaged,
stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rltrace.errors import RecordingError
from rltrace.host import regular_file
from rltrace.read import packed
from rltrace.read.packed import Packed, Store
from rltrace.read.recording import Process, Recording
from rltrace.record import checksum
from rltrace.record.checksum import Sum

FILE_BYTES = 32 << 20
"""About so many bytes of segments go into one file of columns."""


@dataclass
class Compacted:
    """What became of the segments of a Recording."""

    segments: int = 0
    """How many were replaced."""
    before_bytes: int = 0
    """Of all segments and columns."""
    after_bytes: int = 0
    left: int = 0
    """How many stay as they are, because nobody closed them or they are damaged."""

    def __str__(self) -> str:
        said = f"{self.before_bytes:,} bytes of segments and columns before, {self.after_bytes:,} bytes now"
        if not self.segments:
            said = f"nothing to compact: {self.after_bytes:,} bytes of segments and columns"
        if self.left:
            said += f"; {self.left:,} segments stay as they are, because nobody closed them or they are damaged"
        return said


def compact(recording: Recording) -> Compacted:
    """Replace the segments of all processes by columns.

    Raises:
        RecordingError: it is an archive, or goes on.
        OSError: it cannot be written; all that it had is still there.
    """
    if recording.folder != recording.path:
        raise RecordingError(f"{recording.path}: an archive, which is read-only and compressed; give the folder")
    if not recording.is_settled:
        raise RecordingError(f"{recording.path}: processes of it still run here; compact it when they have ended")
    done = Compacted(before_bytes=_size_bytes(recording))
    for process in recording.processes:
        _compact(process, done)
    done.after_bytes = _size_bytes(recording)
    return done


def _compact(process: Process, done: Compacted) -> None:
    for unfinished in process.folder.glob(f"*{packed.UNFINISHED}"):
        unfinished.unlink(missing_ok=True)
    some: list[Packed] = []
    for name, content in _final(process, done):
        if _is_stored(process.packed, name, content):
            _remove(process.folder / name, done)
            continue
        some.append(Packed(name, content))
        if sum(len(one.content) for one in some) >= FILE_BYTES:
            _replace(process, some, done)
            some = []
    if some:
        _replace(process, some, done)


def _final(process: Process, done: Compacted) -> Iterator[tuple[str, bytes]]:
    """Yield the segments that are as they were when they were closed."""
    for path in sorted(process.folder.glob("*.seg")):
        try:
            content = regular_file.read(path, process.limits)
        except OSError:
            content = None
        if content is not None and is_final(process, path.name, checksum.of_bytes(content)):
            yield path.name, content
        elif content is None or content.strip(b"\0"):
            done.left += 1


def is_final(process: Process, name: str, is_now: Sum) -> bool:
    """Return whether a segment is as it was when it was closed, or as the last line about it says."""
    forms = process.removed.segments.get(name)
    if forms is not None:  # the last line about it may be of a form that it never got
        return is_now == forms[-1]
    seal = process.seal(name)
    if seal is not None:
        return is_now == seal
    return not process.has_checksums and process.end_ns is not None


def _is_stored(store: Store, name: str, content: bytes) -> bool:
    try:
        return store.read(name) == content
    except OSError:
        return False


def _replace(process: Process, segments: list[Packed], done: Compacted) -> None:
    """Write columns of segments, read them, and remove the segments."""
    packed.write(process.folder, segments)
    process.packed.look()
    for segment in segments:
        if not _is_stored(process.packed, segment.name, segment.content):
            raise RecordingError(
                f"{process.folder}: the columns of {segment.name} are not as they were written; the "
                "segment stays; check the disk"
            )
        _remove(process.folder / segment.name, done)


def _remove(path: Path, done: Compacted) -> None:
    path.unlink(missing_ok=True)
    done.segments += 1


def _size_bytes(recording: Recording) -> int:
    files = (file for process in recording.processes for file in process.folder.iterdir())
    return sum(file.lstat().st_size for file in files if file.suffix in (".seg", packed.SUFFIX))
