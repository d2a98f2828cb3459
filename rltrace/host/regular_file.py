"""Reads the files of a Recording: only regular files of sensible size, whatever else may be in the folder.

A pipe would keep its reader waiting forever. A device or a sparse file would fill its memory. A link would lead it, and
whatever is exported, to a file that is no part of the Recording.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from rltrace.limits import LIFT, LIMITS, Limits

_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

_FIRST_BYTES = 256
_LARGEST_BYTES = 1 << 14
"""How much of a tail is read at first, where there is often nothing, and at most at a time."""

_ZEROS = 64
"""So many zeros are the end of what was written; a record has fewer in a row."""

_GROWTH_BYTES = 1 << 20
"""How much a file may grow between the look at its size and its end: its process may be writing it."""


class RefusedError(OSError):
    """A file that is not read: it is not regular, or larger than the limit."""


def read(path: Path, limits: Limits = LIMITS) -> bytes:
    """Return the bytes of a file.

    Raises:
        RefusedError: it is no regular file, or larger than `limits` allow.
        OSError: it is not there, or cannot be read.
    """
    with _opened(path, limits) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        # A buffer would copy it once more. Room that is given back has the allocator ask the system for memory anew for
        # each file, which takes twice as long as to read it.
        content = file.raw.read(size_bytes + 1) or b""
        most_bytes = size_bytes + _GROWTH_BYTES
        while len(content) != size_bytes and (more := file.raw.read(most_bytes - len(content))):  # 2 GiB at a time
            content += more
        return content


def part(path: Path, at: int, size_bytes: int, limits: Limits = LIMITS) -> bytes:
    """Return so many bytes of a file from a place on, or fewer if it ends before.

    Raises:
        RefusedError: it is no regular file, or larger than `limits` allow.
        OSError: it is not there, or cannot be read.
    """
    with _opened(path, limits) as file:
        file.seek(at)
        return file.read(min(size_bytes, limits.of(path.name)))


def first_line(path: Path, limits: Limits = LIMITS) -> bytes:
    """Return the first line of a file with its end, or as much of it as a document may have; raises as `part`."""
    with _opened(path, limits) as file:
        return file.readline(limits.document_bytes)


class Tail(NamedTuple):
    """What is in a file from a place on."""

    content: bytes
    """Without zeros at its end."""
    read_bytes: int
    """How many bytes were read to find that out."""
    inode: int
    """Of the file: another one has been put into its place if this differs."""


def tail(path: Path, at: int, limits: Limits = LIMITS) -> Tail:
    """Return what is in a file from a place on, until its end or zeros, without reading many zeros.

    Raises:
        RefusedError: it is no regular file, or larger than `limits` allow.
        OSError: it is not there, or cannot be read.
    """
    with _opened(path, limits) as file:
        number = file.fileno()
        inode, content, piece_bytes = os.fstat(number).st_ino, b"", _FIRST_BYTES
        while piece := os.pread(number, piece_bytes, at + len(content)):
            content += piece
            if not piece[-_ZEROS:].strip(b"\0"):
                break
            piece_bytes = min(_LARGEST_BYTES, 4 * piece_bytes)
    return Tail(content.rstrip(b"\0"), len(content), inode)


def lines(path: Path, limits: Limits = LIMITS) -> Iterator[str]:
    """Yield the lines of a file, without their ends; a line that is too long is cut.

    Raises:
        RefusedError: it is no regular file, or larger than `limits` allow.
        OSError: it is not there, or cannot be read.
    """
    with _opened(path, limits) as file:
        most_bytes = min(limits.document_bytes, limits.of(path.name))
        goes_on = False
        while piece := file.readline(most_bytes):
            if not goes_on:
                yield piece.decode(errors="replace").rstrip("\r\n")
            goes_on = not piece.endswith(b"\n")


def refusal(path: Path, limits: Limits = LIMITS) -> str | None:
    """Return why a file is not read, in words; None if it is read, or does not exist."""
    try:
        return _refusal(path.lstat(), limits.of(path.name))
    except OSError:
        return None


def _opened(path: Path, limits: Limits) -> BufferedReader:
    _check(path, path.lstat(), limits)  # before it is opened: opening a device may do something
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    try:
        _check(path, os.fstat(file.fileno()), limits)
    except RefusedError:
        file.close()
        raise
    return file


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting for the other end of a pipe and without following a link, if the system allows
    that."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _check(path: Path, status: os.stat_result, limits: Limits) -> None:
    why = _refusal(status, limits.of(path.name))
    if why is not None:
        raise RefusedError(0, why, str(path))


def _refusal(status: os.stat_result, most_bytes: int) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")
        return f"{kind}, not a regular file"
    if status.st_size > most_bytes:
        return f"{status.st_size:,} bytes, and no such file of a run has more than {most_bytes:,}; {LIFT}"
    return None
