"""A new file, mapped shared, of which the process holds no descriptor.

A program may close all descriptors there are, as a daemon does, and open its own under the same numbers: who had kept
one would then write into, or close, what is the program's. It may also come near its limit of open files, where each of
its threads has a file of ours.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

_MAP_FIXED = 0x10
"""What Python's `mmap` has no name for."""


def map_new_file(path: Path, size_bytes: int) -> mmap.mmap:
    """Create a file with all its blocks allocated, and map it.

    Raises:
        OSError: the disk is full or the folder cannot be written. Without the allocation, writing to the mapping of a
            file on a full disk would kill the process with SIGBUS.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        return _map(descriptor, size_bytes)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


if sys.version_info >= (3, 13):

    def _map(descriptor: int, size_bytes: int) -> mmap.mmap:
        return mmap.mmap(descriptor, size_bytes, trackfd=False)

else:

    def _map(descriptor: int, size_bytes: int) -> mmap.mmap:
        """Of a file, `mmap` keeps a descriptor, of memory it has none: so the file is put where some memory was."""
        import ctypes

        mapped = mmap.mmap(-1, size_bytes)
        put = ctypes.CDLL(None, use_errno=True).mmap
        put.restype = ctypes.c_void_p
        put.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if put(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != address:
            mapped.close()
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return mapped
