"""What a process and its children said on stderr, for who asks why they ended."""

from __future__ import annotations

import os
import stat
from typing import IO

MOST_BYTES = 3000


def last_words(stderr: IO[bytes] | int, most_bytes: int = MOST_BYTES) -> str:
    """Return the end of it as one line; nothing if it was said to a terminal or a pipe, which remember nothing."""
    descriptor = stderr if isinstance(stderr, int) else stderr.fileno()
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return ""
    try:
        said = os.pread(descriptor, most_bytes, max(0, status.st_size - most_bytes))
    except OSError:  # it is only written here
        return ""
    return " ".join(said.decode(errors="replace").split())
