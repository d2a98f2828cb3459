"""Measures the bytes that a process holds: unique tensor storages, resident pages of mappings, the whole process.

Values go in, numbers come out. The instrumentations say which tensors belong to which owner. torch is not imported.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rltrace.host.interruption import own_failure, suppress_own

PAGE_BYTES = mmap.PAGESIZE


class Resident(NamedTuple):
    """Pages of a process that are in memory, in bytes, by what backs them."""

    anonymous_bytes: int
    """Pages without a file: heaps, stacks, private mappings."""
    file_bytes: int
    """Pages of files: the code of the interpreter and the libraries. Each process that has a page counts it."""
    shared_bytes: int
    """Pages of shared memory. Each process that maps a page counts it."""


class ProcessMemory:
    """Pages of a process, from a file of /proc that is kept open (1.5 us per sample; opening it takes 8)."""

    def __init__(self, pid: int | None = None) -> None:
        """Open the file of a process; by default of this one, which in a forked child is the child."""
        self._pid = pid
        self._opened_by = 0
        self._descriptor = -1
        self._shared = 0, 0

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def resident_bytes(self) -> int:
        """Return the pages that are in memory, including those shared with other processes.

        Raises:
            OSError: /proc is not there, or the process is gone.
        """
        return self._statm()[0] * PAGE_BYTES

    def resident(self) -> Resident:
        """Return the same by what backs the pages (30 us more if pages of files or shared memory have come or gone).

        The kernel's counts are exact from Linux 6.17 on.

        Raises:
            OSError: /proc is not there, or the process is gone, or another user's.
        """
        all_pages, not_anonymous = self._statm()
        if self._shared[0] != not_anonymous:
            pid = os.getpid() if self._pid is None else self._pid
            self._shared = not_anonymous, _kilobytes(f"/proc/{pid}/status", ("RssShmem:",))[0]
        shared_bytes = min(self._shared[1], not_anonymous * PAGE_BYTES)
        anonymous_bytes = (all_pages - not_anonymous) * PAGE_BYTES
        return Resident(anonymous_bytes, not_anonymous * PAGE_BYTES - shared_bytes, shared_bytes)

    def _statm(self) -> tuple[int, int]:
        """Return the pages in memory, and those of files and shared memory among them."""
        if self._pid is None and self._opened_by != os.getpid():  # a fork: the descriptor still tells of the parent
            self._open("self")
        elif self._descriptor < 0:
            self._open(str(self._pid))
        _, resident, shared, *_ = os.pread(self._descriptor, 128, 0).split(None, 3)
        return int(resident), int(shared)

    def _open(self, process: str) -> None:
        self.close()
        self._descriptor = os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._opened_by = os.getpid()


def share_of_shared_bytes(pid: int) -> int:
    """Return the shared memory of a process, each page divided by the number of processes that map it.

    The kernel walks all pages of the process for it: 20 us for each resident MiB.

    Raises:
        OSError: the process is gone, or another user's.
    """
    return _kilobytes(f"/proc/{pid}/smaps_rollup", ("Pss_Shmem:",))[0]


def _kilobytes(path: str, names: tuple[str, ...]) -> list[int]:
    with open(path) as lines:
        values = {name: int(rest[0]) * 1024 for name, *rest in map(str.split, lines) if name in names}
    return [values.get(name, 0) for name in names]


def cpu_ns(pid: int) -> int:
    """Return the CPU time that all threads of a process have used.

    Raises:
        OSError: the process is gone.
    """
    return time.clock_gettime_ns(~pid << 3 | _PROCESS_CPU_CLOCK)  # the clock that clock_getcpuclockid(3) names


_PROCESS_CPU_CLOCK = 2


class Heap(NamedTuple):
    """What the C library's allocator holds, in bytes; torch's CPU tensors come from it."""

    used_bytes: int
    """Bytes that were handed out and not yet freed."""
    cached_bytes: int
    """Bytes that were freed and kept for the next request. Trimmed pieces have no pages any more and do not count."""
    present_bytes: int
    """Pages of its heaps that are in memory, without blocks that have a mapping of their own."""


def heap(present_bytes: int | None = None) -> Heap:
    """Return the state of this process's allocator.

    The allocator counts its free pieces for that: 1 us in a new process, 0.3 to 2 ms in one that has worked for a
    while.

    Args:
        present_bytes: Pages of its heaps in memory, if known. Otherwise their pages are looked at (6 us for each 100
            MiB and heap; 0.8 ms when it has grown or shrunk since).

    Raises:
        OSError: the C library is not glibc, or older than 2.33.
    """
    info = _mallinfo()
    if present_bytes is None:
        present_bytes = _present_bytes(info.arena)
    return Heap(info.uordblks + info.hblkhd, present_bytes - info.uordblks, present_bytes)


def _present_bytes(arena_bytes: int) -> int:
    """Return the pages in memory of all heaps, whose sizes add up to so many bytes."""
    global _HEAPS
    if _HEAPS.other_bytes != arena_bytes - sum(size_bytes for _, size_bytes in _HEAPS.ranges()):
        _HEAPS = _Heaps.found(arena_bytes)
    present_bytes = 0
    for address, size_bytes in _HEAPS.ranges():
        with suppress_own(OSError):  # another thread gave it back meanwhile
            present_bytes += resident_bytes_at(address, size_bytes)
    return present_bytes


class _Heaps(NamedTuple):
    """Where the allocator's heaps are. Looking for them takes 2 ms, asking known ones for their size 50 us."""

    main: int
    """Where the heap begins that grows by brk; 0 if there is none."""
    of_threads: list[int]
    other_bytes: int
    """What the allocator counts for all heaps, less their sizes. While this does not change, there is no new heap."""

    @classmethod
    def found(cls, arena_bytes: int) -> _Heaps:
        """Look for the heaps."""
        heaps = cls(0, [], 0)
        with open("/proc/self/maps") as lines:
            for line in lines:
                if " rw-p 00000000 00:00 0 " in line:
                    start, _, end = line[: line.index(" ")].partition("-")
                    first, last = int(start, 16), int(end, 16)
                    if line.endswith("[heap]\n"):
                        heaps = heaps._replace(main=first)
                    else:
                        heaps.of_threads.extend(range(-(-first // HEAP_BYTES) * HEAP_BYTES, last, HEAP_BYTES))
        found = heaps._replace(of_threads=[address for address, _ in heaps.ranges() if address != heaps.main])
        return found._replace(other_bytes=arena_bytes - sum(size_bytes for _, size_bytes in found.ranges()))

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Return address and size of each heap that is there, without blocks that have a mapping of their own."""
        if self.main:
            yield self.main, _libc().sbrk(0) - self.main
        # Through /proc: an address that another thread unmaps meanwhile is an error there, and a crash if looked at.
        with open("/proc/self/mem", "rb", buffering=0) as pages:
            for address in self.of_threads:
                try:
                    info = _HeapInfo.from_buffer_copy(os.pread(pages.fileno(), ctypes.sizeof(_HeapInfo), address))
                except own_failure(OSError, ValueError):
                    continue
                if info.arena and 0 < info.size <= info.writable_size <= HEAP_BYTES:
                    yield address, info.writable_size


_HEAPS = _Heaps(0, [], -1)
"""The heaps as they were last found."""


HEAP_BYTES = 64 << 20
"""Heaps of threads begin at multiples of this (HEAP_MAX_SIZE of glibc's malloc/arena.c)."""


def _mallinfo() -> Any:
    try:
        mallinfo2 = _libc().mallinfo2
    except own_failure(AttributeError):
        raise OSError("the C library has no mallinfo2, which glibc has from 2.33 on") from None
    mallinfo2.restype = _Mallinfo2
    return mallinfo2()


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


CONTROL_GROUPS, GROUPS_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class Room(NamedTuple):
    """How much more a process can allocate, and what sets that bound."""

    free_bytes: int
    bound: str


def room(groups: Path = CONTROL_GROUPS, of_process: Path = GROUPS_OF_PROCESS) -> Room:
    """Return the tightest bound: of this process's limits, its control groups and the machine's memory.

    Args:
        groups: Where control groups are mounted.
        of_process: The file that names the groups of this process.

    Raises:
        OSError: /proc is not there.
    """
    data_bytes, address_bytes = _kilobytes("/proc/self/status", ("VmData:", "VmSize:"))
    rooms = [Room(_kilobytes("/proc/meminfo", ("MemAvailable:",))[0], "the machine's memory")]
    rooms += _rooms_of_groups(groups, of_process)
    for used_bytes, limit, name in (
        (data_bytes, resource.RLIMIT_DATA, "RLIMIT_DATA"),
        (address_bytes, resource.RLIMIT_AS, "RLIMIT_AS"),
    ):
        limit_bytes = resource.getrlimit(limit)[0]
        if limit_bytes != resource.RLIM_INFINITY:
            rooms.append(Room(limit_bytes - used_bytes, f"{name} of {limit_bytes / (1 << 20):,.0f} MiB"))
    return min(rooms)


class _Version(NamedTuple):
    """How a version of control groups names its files about memory."""

    limit: str
    used: str
    reclaimable: str
    """Row of memory.stat: pages of files that were not used lately, including those of the groups below."""


_VERSION_1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Version("memory.max", "memory.current", "inactive_file")


def _rooms_of_groups(mounted: Path, of_process: Path) -> Iterator[Room]:
    """Yield what each control group around this process leaves it, without groups that have no limit."""
    with suppress_own(OSError):
        for line in of_process.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                for mount in (mounted, mounted / "unified"):  # beside version 1, which has the memory then
                    yield from _rooms_of(_VERSION_2, mount, path)
            elif "memory" in controllers.split(","):
                yield from _rooms_of(_VERSION_1, mounted / "memory", path)


def _rooms_of(version: _Version, mount: Path, path: str) -> Iterator[Room]:
    """Yield what a group leaves, and the groups around it up to the mounted one."""
    names = [name for name in path.split("/") if name not in ("", "..")]
    # A container sees its own group as the mounted one, and often is told its path on the host.
    while names and not (mount / "/".join(names)).is_dir():
        del names[0]
    for length in range(len(names), -1, -1):
        group = "/" + "/".join(names[:length])
        with suppress_own(OSError, ValueError):  # no limit, as the outermost of version 2, or "max"
            yield _room_of(version, mount / group[1:], group)


def _room_of(version: _Version, folder: Path, group: str) -> Room:
    limit_bytes = int((folder / version.limit).read_text())
    used_bytes = int((folder / version.used).read_text())
    # The kernel takes these back before it says that there is no room.
    reclaimable_bytes = _row_of(folder / "memory.stat", version.reclaimable)
    free_bytes = max(0, limit_bytes - used_bytes + reclaimable_bytes)
    return Room(free_bytes, f"{version.limit} of {limit_bytes / (1 << 20):,.0f} MiB of the control group {group}")


def _row_of(file: Path, name: str) -> int:
    """Return a row of a control group's figures; 0 if the group has none."""
    with suppress_own(OSError):
        rows = dict(line.split(" ", 1) for line in file.read_text().splitlines())
        return int(rows.get(name, 0))
    return 0


_ASKED = (
    re.compile(r"tried to allocate (?P<size>\d+) (?P<unit>bytes)"),  # torch on a CPU
    re.compile(r"Tried to allocate (?P<size>[\d.]+) (?P<unit>\wiB|bytes)"),  # torch on a GPU
)
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


_NO_ROOM = "out of memory"
"""CUDA's own words, which torch, NCCL and vLLM's allocator pass on."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was no memory left."""
    known = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    of_cuda = isinstance(error, RuntimeError) and _NO_ROOM in str(error)
    return known or of_cuda or asked_bytes(error) is not None


class MemoryErrors:
    """Tells errors about memory apart: one error passes several hooks on its way up, and the first hook is nearest to
    it."""

    def __init__(self) -> None:
        self._last: tuple[int, str] | None = None

    def is_new(self, error: BaseException) -> bool:
        """Return whether an error is about memory, and not the one of the last call."""
        known = (id(error), str(error))
        is_new = known != self._last and is_out_of_memory(error)
        if is_new:
            self._last = known
        return is_new


MOST_REASON = 500
"""How many characters of an error are kept."""


def reason_of(error: BaseException) -> str:
    """Return what an error says."""
    return f"{type(error).__name__}: {error}"[:MOST_REASON]


def asked_bytes(error: BaseException) -> int | None:
    """Return how many bytes were asked for, by the error's text; None if it does not say."""
    for pattern in _ASKED:
        found = pattern.search(str(error))
        if found is not None:
            return int(float(found["size"]) * _UNITS[found["unit"]])
    return None


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages beneath tensors, each counted once; of a DTensor, those of this rank's shard.

    A view counts for the whole storage that it keeps alive, padding included.
    """
    return sum(size_bytes for _, size_bytes in _storages(tensors))


class OnHost(NamedTuple):
    """What lies in the host's memory, in bytes."""

    size_bytes: int
    pinned_bytes: int | None
    """How many of these bytes are page-locked; None if it is not known."""


def on_host(tensors: Iterable[Any]) -> OnHost:
    """Return the bytes of tensors in the host's memory, and how many are pinned: the driver is asked once per
    storage."""
    found = _storages(tensors)
    pinned_bytes = sum(size_bytes for tensor, size_bytes in found if tensor.is_pinned())
    return OnHost(sum(size_bytes for _, size_bytes in found), pinned_bytes)


def _storages(tensors: Iterable[Any]) -> list[tuple[Any, int]]:
    """Return one tensor for each storage beneath tensors, and the storage's bytes."""
    storages = {}
    for tensor in tensors:
        shard = local(tensor)
        storage = shard.untyped_storage()
        storages[storage.data_ptr()] = shard, storage.nbytes()
    storages.pop(0, None)  # a storage that was freed by resizing it, or a tensor without data
    return list(storages.values())


class Place:
    """Where a tensor lies, for repeated looks: the driver is asked only if the tensor has moved."""

    def __init__(self) -> None:
        self._known = 0, False

    def of(self, tensor: Any) -> bool | None:
        """Return None for a tensor on a GPU, else whether it is pinned."""
        if tensor.is_cuda:
            return None
        address = tensor.data_ptr()
        if self._known[0] != address:
            self._known = address, tensor.is_pinned()
        return self._known[1]


def local(tensor: Any) -> Any:
    """Return this rank's shard of a DTensor; any other tensor is whole."""
    return getattr(tensor, "_local_tensor", tensor)


def optimizer_tensors(optimizer: Any) -> list[Any]:
    """Return the tensors of an optimizer's state: none until its first step. Sparse ones have no storage and are left
    out."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if has_storage(value)]


def has_storage(value: Any) -> bool:
    """Return whether a value is a tensor with a storage; a sparse tensor has the method, which raises."""
    return hasattr(value, "untyped_storage") and not value.is_sparse


def resident_bytes_at(address: int, size_bytes: int) -> int:
    """Return how many bytes of an address range have a page in memory.

    Args:
        address: Its first byte, at the beginning of a page.
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
        _LIBC.sbrk.restype = ctypes.c_size_t
    return _LIBC


_LIBC: ctypes.CDLL | None = None
