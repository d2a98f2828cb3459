"""What a process and its children said on stderr, for who asks why they ended."""

from __future__ import annotations

import os
import re
import stat
from typing import IO

MOST_BYTES = 3000
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception): .*$", re.MULTILINE)
"""The line in which Python names an exception at the end of its traceback."""


def last_words(stderr: IO[bytes] | int, most_bytes: int = MOST_BYTES) -> str:
    """Return the end of it as one line; nothing if it was said to a terminal or a pipe, which remember nothing.

    The last exception in it comes first, because who shows a message may cut it short.
    """
    descriptor = stderr if isinstance(stderr, int) else stderr.fileno()
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return ""
    try:
        said = os.pread(descriptor, most_bytes, max(0, status.st_size - most_bytes))
    except OSError:  # it is only written here
        return ""
    text = said.decode(errors="replace")
    raised = _RAISED.findall(text)
    return " ".join((f"{raised[-1]} ... {text}" if raised else text).split())
