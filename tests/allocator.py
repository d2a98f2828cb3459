"""An allocator that keeps a history in the format of `torch.cuda.memory._snapshot()`, on a clock of its own.

A stand-in for what only a GPU has. It knows the truth: what every owner held after each of its changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rltrace.events import OWNERS
from rltrace.record.torch import allocations
from rltrace.record.torch.allocations import History

DEVICE = 1
BLOCK_BYTES = 8192
SEGMENT_BYTES = 4 * BLOCK_BYTES


@dataclass
class Allocator:
    """Gives out the lowest free address first, so that addresses are used again and again."""

    realtime_us: Callable[[int], int] = lambda host_ns: 1_700_000_000_000_000 + host_ns // 1000
    ring: int = 1 << 20
    host_ns: int = 5_000_000
    entries: list[dict[str, Any]] = field(default_factory=list)
    blocks: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Size asked for and owner, by address."""
    segments: set[int] = field(default_factory=set)
    """Addresses of what it has from the driver."""
    pending: list[int] = field(default_factory=list)
    """Addresses whose free was asked for."""
    stats: Counter[str] = field(default_factory=Counter)
    truth: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    """When something changed, by the host's clock, and what each owner held then."""
    reserved: list[int] = field(default_factory=list)
    """What it had from the driver at first, and after each change."""
    windows: list[tuple[int, int]] = field(default_factory=list)
    is_kept: bool = False

    def allocate(self, size_bytes: int, text: str = "") -> int:
        """A new block."""
        taken = {*self.blocks}
        address = next(a for a in range(BLOCK_BYTES, 1 << 40, BLOCK_BYTES) if a not in taken)
        self.blocks[address] = (size_bytes, text if text in OWNERS else "unattributed")
        self.stats.update(("allocation.all.allocated", "active.all.allocated"))
        if (segment := address - address % SEGMENT_BYTES) not in self.segments:
            self.segments.add(segment)
            self._entry("segment_alloc", segment, SEGMENT_BYTES, text)
        self._entry("alloc", address, size_bytes, text)
        return address

    def ask_to_free(self, address: int, text: str = "") -> None:
        """From here on it is no tensor's; a stream may still use it."""
        self.pending.append(address)
        self.stats["allocation.all.freed"] += 1
        self._entry("free_requested", address, self.blocks[address][0], text)

    def complete_free(self, address: int, text: str = "") -> None:
        """From here on the block can be used again."""
        self.pending.remove(address)
        self.stats["active.all.freed"] += 1
        size_bytes, _ = self.blocks.pop(address)
        self._entry("free_completed", address, size_bytes, text)

    def free(self, address: int) -> None:
        """Both at once."""
        self.ask_to_free(address)
        self.complete_free(address)

    def empty_cache(self) -> None:
        """Give back every segment that nothing lies in."""
        for segment in sorted(self.segments - {address - address % SEGMENT_BYTES for address in self.blocks}):
            self.segments.remove(segment)
            self._entry("segment_free", segment, SEGMENT_BYTES, "")

    def reserved_bytes(self) -> int:
        """What it has from the driver."""
        return len(self.segments) * SEGMENT_BYTES

    def start(self) -> dict[str, int]:
        """Begin to keep a history; returns what memory_stats says."""
        before = self.memory_stats()
        self.is_kept = True
        self.reserved.append(self.reserved_bytes())
        self.truth.append((self.host_ns, self.held()))
        self.mark()
        return before

    def mark(self) -> None:
        """What `allocations._mark` does."""
        for _ in range(allocations.MARKS):
            before_ns = self.host_ns
            address = self.allocate(allocations.MARK_BYTES, allocations.MARK)
            self.windows.append((before_ns, self.host_ns))
            self.ask_to_free(address, allocations.MARK)
            self.complete_free(address, allocations.MARK)

    def memory_stats(self) -> dict[str, int]:
        """As torch.cuda.memory_stats."""
        return {
            "requested_bytes.all.current": sum(size for size, _ in self.blocks.values()),
            "reserved_bytes.all.current": self.reserved_bytes(),
            "allocation.all.allocated": 0,
            "allocation.all.freed": 0,
            **self.stats,
        }

    def held(self) -> dict[str, int]:
        """Bytes by owner."""
        held: Counter[str] = Counter()
        for size, owner in self.blocks.values():
            held[owner] += size
        return dict(held)

    def history(self, before: dict[str, int]) -> History:
        """End the history and read it."""
        self.mark()
        return History.of(self.snapshot(), DEVICE, self.windows, before, self.memory_stats())

    def snapshot(self) -> dict[str, Any]:
        """As torch.cuda.memory._snapshot, with a segment of another device's."""
        others = [{"size": BLOCK_BYTES, "requested_size": 77, "state": "active_allocated", "address": BLOCK_BYTES}]
        segments = [{"device": 1 - DEVICE, "address": BLOCK_BYTES, "total_size": BLOCK_BYTES, "blocks": others}]
        for segment in sorted(self.segments):
            addresses = range(segment, segment + SEGMENT_BYTES, BLOCK_BYTES)
            blocks = [self._block(address) for address in addresses]
            segments.append({"device": DEVICE, "address": segment, "total_size": SEGMENT_BYTES, "blocks": blocks})
        return {"segments": segments, "device_traces": [[], self.entries[-self.ring :]]}

    def _block(self, address: int) -> dict[str, Any]:
        size, _ = self.blocks.get(address, (0, ""))
        waits = "active_pending_free" if address in self.pending else "active_allocated"
        state = waits if address in self.blocks else "inactive"
        return {"size": BLOCK_BYTES, "requested_size": size, "state": state, "address": address}

    def _entry(self, action: str, address: int, size: int, text: str) -> None:
        self.host_ns += 700
        if not self.is_kept:
            return
        known = {"addr": address, "size": size, "user_metadata": text, "stream": 0, "frames": []}
        self.entries.append({"action": action, "time_us": self.realtime_us(self.host_ns), **known})
        if action in allocations.SEGMENTS:
            self.reserved.append(self.reserved_bytes())
        elif text != allocations.MARK and action != "free_requested":
            self.truth.append((self.host_ns, self.held()))
        self.host_ns += 700


TEXTS = """
    import threading
    import torch

    text = threading.local()  # as torch's allocator has it
    sets, seen = [], {}
    def set_text(new):
        sets.append(new)
        text.now = new
    torch.cuda.memory._get_memory_metadata = lambda: getattr(text, "now", "")
    torch.cuda.memory._set_memory_metadata = set_text
    def see(where):
        seen.setdefault(where, []).append(torch.cuda.memory._get_memory_metadata())

    class Observed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            see("forward")
            return x.clone()
        @staticmethod
        def backward(ctx, grad):
            see("backward")
            return grad.clone()
"""
"""Begins a program in which allocations have texts: which ones were set, and what each was where it looks."""
