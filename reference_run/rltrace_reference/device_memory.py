"""A limit on the memory that worker and engine of a rank share on a CPU, as a GPU's size limits what they share there.

The kernel refuses a process what goes beyond its RLIMIT_DATA, and has no such limit for two processes. So what is left
of the device is added to what each of them maps now. Whoever runs then may have all of it, and the other one waits.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 20


class DeviceMemory:
    """The worker's part; without a limit, nothing happens."""

    def __init__(self, limit_bytes: int | None) -> None:
        """Begin with this process, which holds nothing yet."""
        self.limit_bytes = limit_bytes
        self._before: dict[int, int] = {}
        """By process, the bytes that it had mapped before its model existed."""
        self.meet(os.getpid())

    def meet(self, pid: int) -> None:
        """Count what a process maps from now on."""
        if self.limit_bytes is not None:
            self._before[pid] = data_bytes(pid)

    def forget(self, pid: int) -> None:
        """Stop counting a process that ends."""
        self._before.pop(pid, None)

    def held_bytes(self) -> int:
        """Return what the processes hold together."""
        return sum(data_bytes(pid) - before for pid, before in self._before.items())

    def divide(self) -> None:
        """Let each process have what is left; call this when another one has taken memory or given it back."""
        if self.limit_bytes is None:
            return
        left_bytes = max(0, self.limit_bytes - self.held_bytes())
        for pid in self._before:
            _limit(pid, data_bytes(pid) + left_bytes)

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Limit this process inside; Ray, outside, may have what it needs to tell of a failure."""
        self.divide()
        try:
            yield
        finally:
            if self.limit_bytes is not None:
                _limit(os.getpid(), resource.RLIM_INFINITY)


def data_bytes(pid: int) -> int:
    """Return the bytes of a process that count for its RLIMIT_DATA: private mappings that can be written."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")


def give_back_large_blocks() -> None:
    """Let the C library's allocator return every large block at once, where it would keep some for later."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def _limit(pid: int, size_bytes: int) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
    resource.prlimit(pid, resource.RLIMIT_DATA, (size_bytes, hard))
