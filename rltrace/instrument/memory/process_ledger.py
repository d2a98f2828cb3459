"""What one process holds, owner by owner, and beside it the kernel's totals of all processes on its device.

A row is measured where it comes into being: tensors by their storages, mappings by their pages, the interpreter once,
before the model exists. The totals come from the kernel alone, so that what has no row shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rltrace.events import MEMORY_EDGE, OUT_OF_MEMORY
from rltrace.host import memory
from rltrace.host.interruption import own_failure
from rltrace.instrument.memory.unchanged import Unchanged
from rltrace.record import spans

Rows = dict[str, int]
"""The bytes by the name of the counter, such as `actor.params_bytes`."""

SAME_CPU_NS = 2_000_000
SAME_BYTES = 128 << 10
"""A process that has used less CPU time since it asked its allocator, and whose pages are the same but for so many,
holds what it held then: asking costs 0.3 to 2 ms, for the C library counts every free piece."""


class Asked(NamedTuple):
    """The allocator's last answer, and what shows whether it still holds."""

    heap: memory.Heap
    in_heap: Rows
    """The owners' part of it."""
    mapped: Rows
    """What owners had in mappings of their own."""
    loose_bytes: int
    """Pages that were not of an owner's mapping when the heaps' pages were counted."""
    cpu_ns: int
    """The CPU time that this process had used."""


class ProcessLedger:
    """The sources of this process's rows, and the processes that it shares its device with."""

    def __init__(self) -> None:
        self.in_heap: dict[str, Callable[[], Rows]] = {}
        """Sources whose bytes come from the C library's allocator, as torch's CPU tensors do."""
        self.mapped: dict[str, Callable[[], Rows]] = {}
        """Sources with mappings of their own."""
        self.on_gpu = False
        """Whether the run's device is a GPU: `cuda_ledger` counts its bytes, and nothing is sampled here."""
        self.on_cpu = True
        """Whether the totals can be measured."""
        self.activation_bytes: int | None = None
        """What the last forward has left in the heap for its backward; None where nothing is trained."""
        self._peers: dict[int, memory.ProcessMemory] = {}
        self._process = memory.ProcessMemory()
        self._frozen: _Frozen | None = None
        self._asked: Asked | None = None
        self._sampled_cpu_ns = 0
        self._unchanged = Unchanged()
        self._kernel_bytes = 0
        self._errors = memory.MemoryErrors()
        self._shared: dict[tuple[tuple[int, int], ...], dict[int, int]] = {}

    @property
    def has_heap(self) -> bool:
        """Return whether the bytes come from an allocator that says what it holds."""
        return self._frozen is not None and not self.on_gpu

    def meet_peer(self, pid: int) -> None:
        """Note that another process is on this one's device."""
        self._peers.setdefault(pid, memory.ProcessMemory(pid))

    def freeze(self) -> None:
        """Count what this process holds now as its interpreter and its libraries. Only the first call does anything.

        If the C library does not say what its allocator holds, only owners with a name are sampled, without totals. A
        reader then says that the rest is unknown.
        """
        if self._frozen is not None:
            return
        try:
            heap = memory.heap()
            anonymous_bytes = self._process.resident().anonymous_bytes
        except own_failure(OSError):
            self.on_cpu = False
            return
        self._frozen = _Frozen(anonymous_bytes - heap.cached_bytes, heap.used_bytes)

    def sample(
        self, *, moved: bool = False, before_kernels: int | None = None, before_forward: int | None = None
    ) -> None:
        """Write every row, then the totals.

        Args:
            moved: Whether this process has moved owners' mappings since the last sample. Its allocator had no part in
                that, unless other pages came or went too.
            before_kernels: The heap's bytes without an owner, before calls that made libraries keep something.
            before_forward: The same, before a forward that is over now and has left activations for its backward.
        """
        if spans.current() is None or self.on_gpu:
            return
        with spans.automatic_span(MEMORY_EDGE) as sampled:
            if moved and self._asked is not None:
                moving_ns = time.process_time_ns() - self._sampled_cpu_ns
                self._asked = self._asked._replace(cpu_ns=self._asked.cpu_ns + moving_ns)
            if before_kernels is not None:
                self.add_kernels(self.unnamed_heap_bytes() - before_kernels)
            if before_forward is not None:
                self.activation_bytes = self.unnamed_heap_bytes() - before_forward
            for name, value in self.rows().items():
                spans.counter(name, value)
            sampled.set(unchanged_ns=max(0, sampled.start_ns - self._unchanged.since_ns(self._asked)))
            spans.counter("resident_bytes", self._process.resident_bytes())
            self._sampled_cpu_ns = time.process_time_ns()
            if self.on_cpu:
                self._set_totals(sampled)

    def _set_totals(self, sampled: Any) -> None:
        totals = self.totals()
        spans.counter("used_bytes", sum(totals.values()))
        sampled.set(
            totals={str(pid): total for pid, total in totals.items()},
            cpu_ns={str(pid): memory.cpu_ns(pid) for pid in totals},
        )

    def unnamed_heap_bytes(self) -> int:
        """Return the bytes that the allocator has handed out, without those of tensors that have an owner."""
        asked = self._ask(self._process.resident(), _measure(self.in_heap), _measure(self.mapped))
        return asked.heap.used_bytes - sum(asked.in_heap.values())

    def add_kernels(self, size_bytes: int) -> None:
        """Count what libraries kept after the first call that needed it: compiled kernels, scratch memory."""
        self._kernel_bytes += size_bytes

    def out_of_memory(self, error: BaseException) -> None:
        """If an error is about memory, write how much was asked for and was free, and sample what each process holds.

        The error passes several hooks on its way up. The first one that sees it is nearest to the moment.
        """
        if spans.current() is None or self.on_gpu or not self._errors.is_new(error):
            return
        args: dict[str, object] = {"asked_bytes": memory.asked_bytes(error)}
        if self.on_cpu:
            room = memory.room()
            args |= {"free_bytes": room.free_bytes, "bound": room.bound}
        with spans.automatic_span(OUT_OF_MEMORY, reason=memory.reason_of(error), **args):
            self.sample()

    def rows(self) -> Rows:
        """Return the bytes of every owner in this process now."""
        in_heap, mapped = _measure(self.in_heap), _measure(self.mapped)
        rows = in_heap | mapped
        if self.activation_bytes is not None:
            rows["actor.activations_bytes"] = self.activation_bytes
        if not self.on_cpu:
            return rows
        rows = _on_one_memory(rows)
        here = self._process.resident()
        if self._frozen is None:
            return rows | {"interpreter_bytes": sum(here)}
        heap = self._ask(here, in_heap, mapped).heap
        named_bytes = self._frozen.heap_bytes + self._kernel_bytes + sum(in_heap.values())
        return rows | {
            "allocator.cached_bytes": heap.cached_bytes,
            "interpreter_bytes": self._frozen.anonymous_bytes + here.file_bytes,
            "library.kernels_bytes": self._kernel_bytes,
            "unattributed_bytes": heap.used_bytes - named_bytes - (self.activation_bytes or 0),
        }

    def _ask(self, here: memory.Resident, in_heap: Rows, mapped: Rows) -> Asked:
        """Return what the allocator holds; if its last answer still holds, return that."""
        loose_bytes, cpu_ns = sum(here) - sum(mapped.values()), time.process_time_ns()
        asked = self._asked
        if asked is None or abs(asked.loose_bytes - loose_bytes) > SAME_BYTES:
            heap = memory.heap()
        elif asked.in_heap != in_heap or cpu_ns - asked.cpu_ns > SAME_CPU_NS:
            heap, loose_bytes = memory.heap(asked.heap.present_bytes), asked.loose_bytes
        else:
            self._asked = asked._replace(mapped=mapped)
            return self._asked
        self._asked = Asked(heap, in_heap, mapped, loose_bytes, time.process_time_ns())
        return self._asked

    def totals(self) -> dict[int, int]:
        """Return what the kernel counts for each process of the device; shared memory counts once."""
        counts = {os.getpid(): self._process.resident()}
        for pid, peer in list(self._peers.items()):
            try:
                counts[pid] = peer.resident()
            except own_failure(OSError):
                self._peers.pop(pid).close()
        shared = self._shared_bytes({pid: count.shared_bytes for pid, count in counts.items()})
        return {pid: count.anonymous_bytes + count.file_bytes + shared[pid] for pid, count in counts.items()}

    def _shared_bytes(self, mapped: dict[int, int]) -> dict[int, int]:
        """Return each process's part of the shared memory, so that a page that several processes map counts once.

        Dividing it takes a walk over all pages. That is done when more than one process maps any, and when it changes.
        """
        if sum(size > 0 for size in mapped.values()) < 2:
            return mapped
        key = tuple(sorted(mapped.items()))
        if key not in self._shared:
            self._shared = {key: {pid: memory.share_of_shared_bytes(pid) for pid in mapped}}
        return self._shared[key]


class _Frozen:
    """What a process held before its model existed."""

    def __init__(self, anonymous_bytes: int, heap_bytes: int) -> None:
        self.anonymous_bytes = anonymous_bytes
        """The bytes without what its allocator had free."""
        self.heap_bytes = heap_bytes


def _on_one_memory(rows: Rows) -> Rows:
    """Add what is in host memory to the owner's row, because on a CPU the host's memory is the device's."""
    merged: Rows = {}
    for name, size in rows.items():
        owner = name.replace("_host_bytes", "_bytes")
        merged[owner] = merged.get(owner, 0) + size
    return merged


def _measure(sources: dict[str, Callable[[], Rows]]) -> Rows:
    return {name: size for source in sources.values() for name, size in source().items()}
