"""Measures the bytes that a process holds: unique tensor storages, resident pages of mappings, the whole process.

Values in, numbers out; which tensors belong to which owner is said by the instrumentations. torch is not imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import resource
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

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


class Resident(NamedTuple):
    """Pages of a process that are in memory, in bytes, by what is behind them."""

    anonymous_bytes: int
    """Nothing: heaps, stacks, private mappings."""
    file_bytes: int
    """Files: the interpreter's and the libraries' code; each process that has a page counts it."""
    shared_bytes: int
    """Shared memory; each process that maps a page counts it."""


def resident(pid: int) -> Resident:
    """What the kernel counts for a process, this one or another (30 us; exact from Linux 6.17 on).

    Raises:
        OSError: the process is gone, or another user's.
    """
    fields = _kilobytes(f"/proc/{pid}/status", ("RssAnon:", "RssFile:", "RssShmem:"))
    return Resident(*fields)


def share_of_shared_bytes(pid: int) -> int:
    """Shared memory of a process, each page divided by the number of those that map it.

    The kernel walks all of the process's pages for it: 20 us for each MiB that is resident.

    Raises:
        OSError: the process is gone, or another user's.
    """
    return _kilobytes(f"/proc/{pid}/smaps_rollup", ("Pss_Shmem:",))[0]


def _kilobytes(path: str, names: tuple[str, ...]) -> list[int]:
    with open(path) as lines:
        values = {name: int(rest[0]) * 1024 for name, *rest in map(str.split, lines) if name in names}
    return [values.get(name, 0) for name in names]


def cpu_ns(pid: int) -> int:
    """CPU time that all threads of a process have used.

    Raises:
        OSError: the process is gone.
    """
    return time.clock_gettime_ns(~pid << 3 | _PROCESS_CPU_CLOCK)  # the clock that clock_getcpuclockid(3) names


_PROCESS_CPU_CLOCK = 2


class Heap(NamedTuple):
    """What the C library's allocator holds, in bytes; torch's CPU tensors come from it."""

    used_bytes: int
    """Handed out and not yet freed."""
    cached_bytes: int
    """Freed and kept for the next who asks; what was trimmed has no page any more and does not count."""


def heap_used_bytes() -> int:
    """What this process's allocator has handed out (5 us).

    Raises:
        OSError: the C library is not glibc, or older than 2.33.
    """
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


def heap() -> Heap:
    """The state of this process's allocator (0.1 ms; 0.8 ms when it has grown or shrunk since).

    Raises:
        OSError: the C library is not glibc, or older than 2.33.
    """
    global _HEAPS
    info = _mallinfo()
    if _HEAPS[0] != info.arena:
        _HEAPS = info.arena, list(_heap_ranges())
    present_bytes = 0
    for address, size_bytes in _HEAPS[1]:
        with contextlib.suppress(OSError):  # another thread gave it back meanwhile
            present_bytes += resident_bytes_at(address, size_bytes)
    return Heap(info.uordblks + info.hblkhd, present_bytes - info.uordblks)


_HEAPS: tuple[int, list[tuple[int, int]]] = (-1, [])
"""Bytes of all heaps when they were looked up, and where they are."""


def _mallinfo() -> Any:
    try:
        mallinfo2 = _libc().mallinfo2
    except AttributeError:
        raise OSError("the C library has no mallinfo2, which glibc has from 2.33 on") from None
    mallinfo2.restype = _Mallinfo2
    return mallinfo2()


HEAP_BYTES = 64 << 20
"""Threads' heaps begin at multiples of it (HEAP_MAX_SIZE of glibc's malloc/arena.c)."""


def _heap_ranges() -> Iterator[tuple[int, int]]:
    """Address and size of the allocator's heaps, blocks that have a mapping of their own apart."""
    # Through /proc: an address that another thread unmaps meanwhile is an error there, and a crash if it is looked at.
    with open("/proc/self/maps") as lines, open("/proc/self/mem", "rb", buffering=0) as pages:
        for line in lines:
            if " rw-p 00000000 00:00 0 " not in line:
                continue
            start, _, end = line[: line.index(" ")].partition("-")
            first, last = int(start, 16), int(end, 16)
            if line.endswith("[heap]\n"):
                yield first, last - first
                continue
            for address in range(-(-first // HEAP_BYTES) * HEAP_BYTES, last, HEAP_BYTES):
                try:
                    info = _HeapInfo.from_buffer_copy(os.pread(pages.fileno(), ctypes.sizeof(_HeapInfo), address))
                except (OSError, ValueError):
                    continue
                if info.arena and 0 < info.size <= info.writable_size <= min(HEAP_BYTES, last - address):
                    yield address, info.writable_size


class _HeapInfo(ctypes.Structure):
    """How a thread's heap begins (struct _heap_info of glibc's malloc/arena.c)."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "previous", "size", "writable_size")]


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


class Room(NamedTuple):
    """How much more a process can have, and what sets that bound."""

    free_bytes: int
    bound: str


def room() -> Room:
    """The tightest of this process's limits and the machine's memory.

    Raises:
        OSError: /proc is not there.
    """
    data_bytes, address_bytes = _kilobytes("/proc/self/status", ("VmData:", "VmSize:"))
    rooms = [Room(_kilobytes("/proc/meminfo", ("MemAvailable:",))[0], "the machine's memory")]
    for used_bytes, limit, name in (
        (data_bytes, resource.RLIMIT_DATA, "RLIMIT_DATA"),
        (address_bytes, resource.RLIMIT_AS, "RLIMIT_AS"),
    ):
        limit_bytes = resource.getrlimit(limit)[0]
        if limit_bytes != resource.RLIM_INFINITY:
            rooms.append(Room(limit_bytes - used_bytes, f"{name} of {limit_bytes / (1 << 20):,.0f} MiB"))
    return min(rooms)


_ASKED = (
    re.compile(r"tried to allocate (?P<size>\d+) (?P<unit>bytes)"),  # torch on a CPU
    re.compile(r"Tried to allocate (?P<size>[\d.]+) (?P<unit>\wiB|bytes)"),  # torch on a GPU
)
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


_NO_ROOM = "out of memory"
"""CUDA's own words, which torch, NCCL and vLLM's allocator pass on."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory left."""
    known = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    of_cuda = isinstance(error, RuntimeError) and _NO_ROOM in str(error)
    return known or of_cuda or asked_bytes(error) is not None


class MemoryErrors:
    """The errors about memory that were told: one passes several hooks on its way up, the first is nearest to it."""

    def __init__(self) -> None:
        self._last: tuple[int, str] | None = None

    def is_new(self, error: BaseException) -> bool:
        """Whether an error is about memory, and not the one that was asked about last."""
        known = (id(error), str(error))
        is_new = known != self._last and is_out_of_memory(error)
        if is_new:
            self._last = known
        return is_new


MOST_REASON = 500
"""Letters of an error that are kept."""


def reason_of(error: BaseException) -> str:
    """What an error says."""
    return f"{type(error).__name__}: {error}"[:MOST_REASON]


def asked_bytes(error: BaseException) -> int | None:
    """What was asked for, by the error's text; None where it does not say."""
    for pattern in _ASKED:
        found = pattern.search(str(error))
        if found is not None:
            return int(float(found["size"]) * _UNITS[found["unit"]])
    return None


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the storages beneath tensors, each counted once; of a DTensor, those of this rank's shard.

    A view counts for the whole storage that it keeps alive, padding included.
    """
    storages = {}
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)  # a storage that was freed by resizing it, or a tensor without data
    return sum(storages.values())


def local(tensor: Any) -> Any:
    """This rank's shard of a DTensor; any other tensor is whole."""
    return getattr(tensor, "_local_tensor", tensor)


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
