"""Memory that sleeps: regions whose pages go back to the operating system while their addresses stay.

The mappings are private and anonymous. On a shared one `MADV_DONTNEED` frees nothing: the process's RSS falls, the
system's Shmem does not, and the old bytes come back. Asleep they cannot be written: the kernel counts a mapping for
`RLIMIT_DATA` (`device_memory.py`) only while it can.
"""

from __future__ import annotations

import ctypes
import errno
import mmap

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
WAKE_PATTERN = {"weights": 0xFF, "kv_cache": 0x7F}
"""Byte that fresh pages are filled with. As bf16 it is a NaN, which no forward survives unseen, and 3.4e38, which a
masked (zero) attention weight still cancels, so that an unwritten KV position is harmless only while it is masked."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PROT_NONE, PROT_READ, PROT_READ_WRITE = 0, 1, 3


class Region:
    """One anonymous mapping between two guard pages, so that the kernel never merges it with a neighbour."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // PAGE) * PAGE
        self._map = mmap.mmap(-1, self.size_bytes + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        everything = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes = everything[PAGE : PAGE + self.size_bytes]
        self.address = self.bytes.data_ptr()
        for guard in (self.address - PAGE, self.address + self.size_bytes):
            if _libc.mprotect(guard, PAGE, PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect of a guard page")

    def release(self) -> None:
        """Give every page back; until `take`, the region cannot be written."""
        self._map.madvise(mmap.MADV_DONTNEED, PAGE, self.size_bytes)
        _libc.mprotect(self.address, self.size_bytes, PROT_READ)

    def take(self) -> None:
        """Let the region be written again; its pages are new.

        Raises:
            OSError: ENOMEM, this process may not have so much more.
        """
        if _libc.mprotect(self.address, self.size_bytes, PROT_READ_WRITE):
            code = ctypes.get_errno()
            told = f"tried to allocate {self.size_bytes} bytes" if code == errno.ENOMEM else "mprotect of a region"
            raise OSError(code, told)

    def resident_bytes(self) -> int:
        """Return bytes of this mapping that have a page behind them now."""
        pages = (ctypes.c_ubyte * (self.size_bytes // PAGE))()
        if _libc.mincore(self.address, self.size_bytes, pages):
            raise OSError(ctypes.get_errno(), "mincore")
        return int((torch.frombuffer(pages, dtype=torch.uint8) & 1).sum()) * PAGE


class MappedPool:
    """Regions by tag: mapped (awake, with pages) or unmapped (asleep, without), always at the same address."""

    def __init__(self) -> None:
        self.regions: dict[str, Region] = {}
        self.awake: set[str] = set()

    def reserve(self, tag: str, size_bytes: int) -> Tensor:
        """Reserve a new region of this tag, without pages yet.

        Returns:
            Shape (size in bytes,), uint8: a view of the region for as long as the pool lives.
        """
        self.regions[tag] = Region(size_bytes)
        return self.regions[tag].bytes

    def map(self, tag: str) -> int:
        """Put fresh pages, full of the wake-up pattern, behind a region.

        Returns:
            Bytes mapped; 0 if it was awake.
        """
        if tag in self.awake:
            return 0
        region = self.regions[tag]
        region.take()
        region.bytes.fill_(WAKE_PATTERN[tag])
        self.awake.add(tag)
        return region.size_bytes

    def unmap(self, tag: str) -> tuple[int, int]:
        """Give the pages of a region back to the operating system.

        Returns:
            Bytes unmapped (0 if it was asleep), and the residual: bytes that still have a page.
        """
        if tag not in self.awake:
            return 0, 0
        region = self.regions[tag]
        before = region.resident_bytes()
        region.release()
        self.awake.discard(tag)
        residual = region.resident_bytes()
        return before - residual, residual
