"""Makes a new file and maps it shared, without keeping a descriptor.

A program may close all descriptors, as a daemon does, and open its own under the same numbers. If we had kept one, we
would then write into the program's file, or close it. The program may also come near its limit of open files, while
each of its threads has a file of ours.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path

from rltrace.host.interruption import own_failure

_MAP_FIXED = 0x10
"""A constant that Python's `mmap` does not define."""


def map_new_file(path: Path, size_bytes: int, spare_bytes: int = 0) -> mmap.mmap:
    """Create a file with all its blocks allocated, and map it.

    A file of that name, left by a call that was interrupted, is overwritten.

    Args:
        path: The file.
        size_bytes: Its size.
        spare_bytes: How many of them, at its end, are not mapped.

    Raises:
        OSError: the disk is full, the folder cannot be written, or files may not be that large. Without the allocation,
            writing to the mapping of a file on a full disk would kill the process with SIGBUS.
    """
    require_size(path, size_bytes)
    try:
        # Unbuffered, and closed by its own death if a signal handler raises between the two halves of `with`.
        with open(path, "w+b", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            return _map(file.fileno(), size_bytes - spare_bytes)
    except own_failure(OSError):
        path.unlink(missing_ok=True)
        raise


def require_size(path: Path, size_bytes: int) -> None:
    """Refuse a file that is larger than this process may write.

    Raises:
        OSError: it is larger; the kernel would send SIGXFSZ, which kills a program that has restored the default
            action.
    """
    import resource  # not everywhere where Recordings are read

    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes != resource.RLIM_INFINITY and size_bytes > limit_bytes:
        raise OSError(errno.EFBIG, f"it needs {size_bytes} bytes, and RLIMIT_FSIZE allows {limit_bytes}", str(path))


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
