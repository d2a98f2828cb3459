"""Limits of what a reader opens: a Recording from somebody else may have been made to fill a disk or memory."""

from __future__ import annotations

import sys
from typing import NamedTuple

LIFT = "--no-limits (in Python: limits=NO_LIMITS) lifts the limits; use it if you trust who made this Recording"


class Limits(NamedTuple):
    """What is opened without a question. The defaults are far above what rltrace itself writes."""

    unpacked_bytes: int = 16 << 30
    """Bytes that an archive may unpack to, all files together."""
    expansion: int = 100
    """How many times its own size an archive may unpack to; those of real runs grow seven times."""
    expansion_from_bytes: int = 1 << 30
    """Up to this many unpacked bytes `expansion` does not matter, because zeros that nobody wrote to yet pack well."""
    files: int = 100_000
    """Files in an archive."""
    depth: int = 16
    """Depth of its folders; a Recording in one has four."""
    segment_bytes: int = 4 << 20
    """Size of a file of records; the recorder writes 1 MiB."""
    columns_bytes: int = 256 << 20
    """Size of a file with the columns of some segments."""
    lines_bytes: int = 1 << 30
    """Size of a file that lines are appended to, and that is read line by line."""
    document_bytes: int = 16 << 20
    """Size of any other file, and of a line: each is in memory whole."""

    def of(self, name: str) -> int:
        """Return the bytes that a file of this name may have."""
        if name.endswith(".seg"):
            return self.segment_bytes
        if name.endswith(".columns"):
            return self.columns_bytes
        return self.lines_bytes if name.endswith(".jsonl") else self.document_bytes


LIMITS = Limits()
NO_LIMITS = Limits(*[sys.maxsize] * len(Limits._fields))
