"""One segment: a file with a thread's records. It is mapped shared, so that the kernel keeps them if the process is
killed."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from rltrace.host.interruption import own_failure
from rltrace.host.mapped_file import map_new_file
from rltrace.record import native

FIRST_BYTES = 16 * 1024
"""Size of a thread's first segment: ten thousand threads of one span each must not cost 10 GiB."""

SECOND_BYTES = 128 * 1024

NEXT_BYTES = 1024 * 1024
"""Size of every later one: small enough that creating it stalls the thread by less than a millisecond."""

SIZES = (FIRST_BYTES, SECOND_BYTES, NEXT_BYTES)

SPARE_BYTES = 1
"""What is never written at the end of a segment: so one that is closed, and cut behind its last record, has none of
these sizes."""

REUSE_BYTES = 4 * 1024
"""A dead thread's segment with less room than this is not reused."""


class Segment:
    """A mapped file that records are appended to; zeros follow the last record."""

    __slots__ = ("_writer", "map", "path", "size_bytes", "write")

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Create the file with all its blocks allocated.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        self.map = map_new_file(path, size_bytes, SPARE_BYTES)
        self.path = path
        self.size_bytes = size_bytes
        """What the file takes: less once it is closed."""
        self._writer = writer_to(self.map)
        self.write = self.map.write if self._writer is None else self._writer.write
        """Appends bytes; raises ValueError if they do not fit or the segment is closed."""

    @property
    def used_bytes(self) -> int:
        """Return how much was written."""
        return int(self.map.tell() if self._writer is None else self._writer.used_bytes)

    @property
    def free_bytes(self) -> int:
        """Return the room after the last record."""
        return 0 if self.map.closed else len(self.map) - self.used_bytes

    def has(self, record: bytes) -> bool:
        """Return whether the segment has a record."""
        return not self.map.closed and self.map.rfind(record, 0, self.used_bytes) >= 0

    def unmap(self) -> int:
        """Write nothing any more; return how much was written."""
        if self._writer is not None:
            self._writer.close()
        used_bytes = self.used_bytes
        self.map.close()
        return used_bytes

    def close(self) -> None:
        """Unmap the file and cut it after the last record."""
        if self.map.closed:
            return
        used_bytes = self.unmap()
        try:
            with open(self.path, "r+b") as file:
                # Another thread may have written between the two lines above; a record never ends in a zero.
                file.seek(used_bytes)
                self.size_bytes = file.truncate(used_bytes + len(file.read().rstrip(b"\0")))
        except own_failure(OSError):  # the zeros behind the records do no harm
            pass


def writer_to(mapped: mmap.mmap) -> Any:
    """Return what appends to a mapping natively; None where nothing does."""
    if native.LIBRARY is None:
        return None
    import ctypes  # not where nobody needs it

    first = ctypes.c_char.from_buffer(mapped)  # as long as that is there, the mapping cannot be closed
    return native.LIBRARY.Writer(first, ctypes.addressof(first), len(mapped))
