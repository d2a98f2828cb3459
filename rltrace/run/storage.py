"""Checks whether a folder is a good place for a Recording: writable, on a local disk, with enough room. Linux only."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from rltrace.host.interruption import own_failure
from rltrace.record.segment import FIRST_BYTES, Segment

SMALL_BYTES = 1 << 30
"""A run of hours writes less than this; a disk with less room may fill up during the run."""

NOT_LOCAL = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "afs", "glusterfs", "wekafs")
"""How the types of filesystems begin whose mapped files are slow, or torn when another host reads them."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A folder and the filesystem that it is on, or would be on."""

    path: str
    filesystem: str | None
    is_local: bool
    free_bytes: int
    error: str | None
    """Why a segment cannot be made there."""

    @property
    def problem(self) -> str | None:
        """What is wrong with it and what to do; None if nothing is wrong."""
        if self.error is not None:
            return f"cannot be written: {self.error}; name another folder with --out"
        if not self.is_local:
            return (
                f"on {self.filesystem}, not on a local disk; name a folder on a local disk with --out, and "
                "copy it afterwards"
            )
        if self.free_bytes < SMALL_BYTES:
            return f"only {self.free_bytes / 2**20:.0f} MiB are free; make room, or name another folder with --out"
        return None


def look_at(folder: Path) -> Place:
    """Try to make a segment in a folder, or in its nearest parent; leave nothing behind."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    filesystem = filesystem_of(there)
    return Place(
        path=str(folder.absolute()),
        filesystem=filesystem,
        is_local=is_local(filesystem),
        free_bytes=_free_bytes(there),
        error=_segment_error(there),
    )


def is_local(filesystem: str | None) -> bool:
    """Return whether a type of filesystem is that of a local disk; True if the type is not known."""
    return filesystem is None or not filesystem.startswith(NOT_LOCAL)


def filesystem_of(path: Path) -> str | None:
    """Return the type of the filesystem that holds a path: that of its nearest mount point."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except own_failure(OSError):
        return None
    real = os.path.realpath(path)
    best, found = -1, None
    for mount in mounts:
        fields, _, about = mount.partition(" - ")
        point = fields.split()[4].encode().decode("unicode_escape")  # a space is \040
        if len(point) >= best and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, found = len(point), about.split()[0]
    return found


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _segment_error(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryDirectory(prefix=".rltrace-", dir=folder) as made:
            Segment(Path(made) / "1.seg", FIRST_BYTES).close()
    except own_failure(OSError) as error:
        return error.strerror or str(error)
    return None
