"""Measures the bytes that a process holds: unique tensor storages, resident pages of mappings, the whole process.

Values in, numbers out; which tensors belong to which owner is said by the instrumentations. torch is not imported.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from typing import Any

PAGE_BYTES = mmap.PAGESIZE


class ProcessMemory:
    """Resident bytes of this process, by a file of /proc that is kept open (1 µs a sample; opening it costs 8)."""

    def __init__(self) -> None:
        self._pid = 0
        self._descriptor = -1

    def resident_bytes(self) -> int:
        """Pages of this process that are in memory, those that it shares with others included.

        Raises:
            OSError: /proc is not there.
        """
        if self._pid != os.getpid():  # a fork: the descriptor still tells of the parent
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            self._pid = os.getpid()
        return int(os.pread(self._descriptor, 128, 0).split(None, 2)[1]) * PAGE_BYTES


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the storages beneath tensors, each counted once; of a DTensor, those of this rank's shard.

    A view counts for the whole storage that it keeps alive, padding included.
    """
    storages = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)  # a storage that was freed by resizing it, or a tensor without data
    return sum(storages.values())


def optimizer_tensors(optimizer: Any) -> list[Any]:
    """The tensors of an optimizer's state: none until its first step."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if hasattr(value, "untyped_storage")]


def resident_bytes_at(address: int, size_bytes: int) -> int:
    """Bytes of an address range that have a page in memory.

    Args:
        address: Of its first byte, at a page's beginning.
        size_bytes: Length of the range.

    Raises:
        OSError: part of the range is not mapped.
    """
    pages = -(-size_bytes // PAGE_BYTES)
    present = (ctypes.c_ubyte * pages)()
    if _libc().mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), present):
        code = ctypes.get_errno()
        raise OSError(code, f"mincore of {size_bytes} bytes at {address:#x}: {os.strerror(code)}")
    # Bit 0 alone means anything; one byte a page, so counting set bytes counts pages.
    return (pages - bytes(present).count(0)) * PAGE_BYTES


def _libc() -> ctypes.CDLL:
    global _LIBC
    if _LIBC is None:
        _LIBC = ctypes.CDLL(None, use_errno=True)
    return _LIBC


_LIBC: ctypes.CDLL | None = None
