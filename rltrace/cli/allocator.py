"""The C library's allocator in a command: what is given back stays the process's own.

A command makes one large array after the other. By default the library gives each back to the system, which has to find
and zero its pages anew for the next one: a twentieth of a large summary.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_LARGEST_BYTES = 8 << 20
"""A larger array has pages of its own, which grow without being copied."""
_SPARE_BYTES = 1 << 30


def keep_memory() -> None:
    """Have the library keep what is given back, up to a gigabyte. Other libraries than glibc are left as they are."""
    try:
        set_parameter = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    set_parameter(_MMAP_THRESHOLD, _LARGEST_BYTES)
    set_parameter(_TRIM_THRESHOLD, _SPARE_BYTES)
