"""Opens a Recording that is one file: a zip archive of its folder, as `rltrace export --to archive` writes it."""

from __future__ import annotations

import atexit
import shutil
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path, PureWindowsPath

from rltrace.errors import RecordingError
from rltrace.limits import LIFT, LIMITS, Limits
from rltrace.record import manifest

SUFFIX = ".zip"
SEGMENT = ".seg"

_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OverflowError, RuntimeError, ValueError)
"""What zipfile raises if the file is cut, altered, encrypted, or compressed by an unknown method."""

_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Other methods expand much more, and every decoder is one more that strangers can feed."""


def unpack(file: Path, limits: Limits = LIMITS, *, with_segments: bool = True) -> Path:
    """Unpack an archive into a temporary folder that only this user can read and that is deleted when this process
    ends.

    Args:
        file: The archive.
        limits: Limits of what it unpacks to.
        with_segments: If False, a reader knows the processes and none of their events.

    Returns:
        The Recording's folder.

    Raises:
        RecordingError: it is no complete zip file, holds no Recording or a path that leads out of it, is larger than
            `limits` allow, or cannot be unpacked here.
    """
    try:
        with zipfile.ZipFile(file) as packed:
            root = _root(packed, file)
            _refuse_ways_out(packed, file)
            _refuse_excess(packed, file, limits)
            folder = _temporary_folder()
            try:
                _extract(packed, folder, with_segments=with_segments)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except _DAMAGED as error:
        raise RecordingError(
            f"{file}: not a Recording: not a complete zip file: {error}; "
            "give the folder that `rltrace exec` or `run` named, or an archive that `rltrace export` wrote of it"
        ) from None
    except OSError as error:
        raise RecordingError(
            f"{file}: cannot be unpacked into {tempfile.gettempdir()}: {error}; make room there, or set TMPDIR"
        ) from None
    return folder / root


def _root(packed: zipfile.ZipFile, file: Path) -> str:
    """Return the folder in the archive that is the Recording."""
    for name in packed.namelist():
        folder, _, last = name.rpartition("/")
        if last == manifest.FILE and "/" not in folder:
            return folder
    raise RecordingError(
        f"{file}: holds no Recording ({manifest.FILE} is missing); give an archive that `rltrace export "
        "--to archive` wrote"
    )


def _refuse_ways_out(packed: zipfile.ZipFile, file: Path) -> None:
    for name in packed.namelist():
        path = PureWindowsPath(name)  # what leads out of a folder on any system does so here
        if path.anchor or ".." in path.parts:
            raise RecordingError(
                f"{file}: not unpacked: {name!r} would be written outside of the folder; ask its maker for "
                "a new archive"
            )


def _refuse_excess(packed: zipfile.ZipFile, file: Path, limits: Limits) -> None:
    """Refuse an archive by what it says about itself, before a byte is written."""
    entries = packed.infolist()
    if len(entries) > limits.files:
        raise _excess(file, f"{len(entries):,} files", f"{limits.files:,}")
    for entry in entries:
        if entry.compress_type not in _PACKINGS:
            raise RecordingError(
                f"{file}: not unpacked: {entry.filename!r} is packed by method {entry.compress_type}, rltrace reads "
                "deflate (8) and stored (0); pack the folder again with one of these"
            )
        if (depth := entry.filename.count("/")) > limits.depth:
            raise _excess(file, f"folders {depth:,} deep", f"{limits.depth:,}")
        most_bytes = limits.of(entry.filename)
        if entry.file_size > most_bytes:
            raise _excess(file, f"{entry.file_size:,} bytes in {entry.filename!r}", f"{most_bytes:,}")
    unpacked_bytes = sum(entry.file_size for entry in entries)
    _refuse_total(file, unpacked_bytes, limits)
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    if unpacked_bytes > free_bytes:
        raise RecordingError(
            f"{file}: not unpacked: it holds {unpacked_bytes:,} bytes, and {tempfile.gettempdir()} has {free_bytes:,} "
            "free; make room there, or set TMPDIR"
        )


def _extract(packed: zipfile.ZipFile, folder: Path, *, with_segments: bool) -> None:
    """Unpack block by block; zipfile checks each file and returns no more bytes than the archive's list names."""
    for entry in packed.infolist():
        target = folder / entry.filename
        if entry.is_dir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        if target.suffix == SEGMENT and not with_segments:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with packed.open(entry) as content, target.open("wb") as out:
            shutil.copyfileobj(content, out)


def _refuse_total(file: Path, unpacked_bytes: int, limits: Limits) -> None:
    packed_bytes = file.stat().st_size
    if unpacked_bytes > limits.unpacked_bytes:
        raise _excess(file, f"{unpacked_bytes:,} bytes", f"{limits.unpacked_bytes:,}")
    if unpacked_bytes > max(limits.expansion_from_bytes, packed_bytes * limits.expansion):
        times = f"{unpacked_bytes / packed_bytes:,.0f} times its own size"
        raise _excess(file, f"{unpacked_bytes:,} bytes, {times}", f"{limits.expansion:,} times")


def _excess(file: Path, found: str, limit: str) -> RecordingError:
    return RecordingError(f"{file}: not unpacked: it holds {found}, and the limit is {limit}; {LIFT}")


def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="rltrace-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
