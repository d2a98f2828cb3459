"""Pools of device memory that give their pages back while they sleep, each known by its tag."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from rltrace.events import pinned_of
from rltrace.host.memory import OnHost
from rltrace.instrument.memory.sharded_models import host_rows
from rltrace.record import lifecycle, spans

OWNERS = {"weights": "rollout.weights", "kv_cache": "rollout.kv_cache", "cuda_graph": "rollout.graphs"}
"""Owner of a pool's bytes by its tag."""

NOT_SAID = "its allocator does not say how it copied them"
"""The reason where nobody can tell how much of a copy is pinned."""


class Pools:
    """Knows which pools of a process are awake, and how many bytes each of them holds.

    It is kept here because no allocator says it in all of its releases: vLLM's does only from 0.26 on.
    """

    def __init__(
        self,
        bytes_by_tag: Callable[[], dict[str, int]],
        addresses: Callable[[], Collection[int]] = tuple,
        free_bytes: Callable[[], int | None] = lambda: None,
        out_of_memory: Callable[..., None] | None = None,
        copies: Callable[[Collection[str]], dict[str, OnHost]] = lambda _asleep: {},
        tensor_addresses: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """Args:
        bytes_by_tag: Asks the allocator for the bytes of every pool, asleep or awake.
        addresses: Asks it where their segments begin.
        free_bytes: Asks the device how much is free; None where it does not say.
        out_of_memory: Called with the error of a wake-up that failed, the bytes that it asked for, the bytes that were
            free before it (a wake-up maps what it can), and the owners that woke up.
        copies: Asks the allocator which copies of pools are in host memory, by tag, given the tags that sleep. It is
            called after each sleep and wake-up.
        tensor_addresses: Asks where the tensors are that CUDA graphs contain, always in the same order. What wakes up
            has to be where it fell asleep, which is looked at once nothing sleeps any more.
        """
        self._bytes_by_tag = bytes_by_tag
        self.addresses = addresses
        self._free_bytes, self._out_of_memory, self._copies = free_bytes, out_of_memory, copies
        self.moves = 0
        """How often any of their memory has come or gone."""
        self._tensor_addresses = tensor_addresses
        self._fell_asleep_at: Sequence[int] = ()
        self._asleep: set[str] = set()
        self._arrived: dict[str, int] = {}
        """The bytes by tag that a wake-up has mapped, if it is under way or has failed."""
        self._on_host: dict[str, OnHost] = {}
        """The bytes in host memory by tag, for all tags that were ever copied there."""

    def begin_unmap(self, tags: Collection[str] | None = None, kept: Collection[str] = ()) -> Any:
        """Open the span with the bytes that will go: those of `tags`, by default all. `kept` are copied to the host."""
        going = {
            tag: held
            for tag, size in self.sample().items()
            if ((held := self._held_bytes(tag, size)) or tag not in self._asleep) and (tags is None or tag in tags)
        }
        host_bytes = sum(size for tag, size in going.items() if tag in kept)
        self.moves += 1
        opened = spans.automatic_span("cumem.unmap", bytes=sum(going.values()), host_bytes=host_bytes, tags=going)
        return opened.__enter__(), set(going)

    def end_unmap(self, token: Any, _result: Any, error: BaseException | None) -> None:
        """Close the span; the pools that it named sleep now."""
        opened, going = token
        self.moves += 1
        self._fell_asleep_at = self._tensor_addresses()
        if error is None:
            self._asleep |= going
            self._arrived = {tag: size for tag, size in self._arrived.items() if tag not in going}
        opened.__exit__(None if error is None else type(error), error)
        self._sample_anew()

    def begin_map(self, tags: Collection[str] | None = None) -> Any:
        """Open the span with the bytes that come back."""
        coming = {t: size for t, size in self.sample().items() if t in self._asleep and (not tags or t in tags)}
        opened = spans.automatic_span("cumem.map", bytes=sum(coming.values()), tags=coming)
        self._arrived = dict.fromkeys(coming, 0)
        return opened.__enter__(), coming, self._free_bytes()

    def end_map(self, token: Any, _result: Any, error: BaseException | None) -> None:
        """Close the span; the pools that it named are awake now."""
        opened, coming, free_bytes = token
        self.moves += 1
        if error is None:
            self._asleep -= set(coming)
            if self._fell_asleep_at and not self._asleep:  # all that graphs contain is there again
                opened.set(moved_tensors=self._moved_tensors())
        elif self._out_of_memory is not None:
            owners = [OWNERS[tag] for tag in coming if tag in OWNERS]
            self._out_of_memory(error, sum(coming.values()), free_bytes, owners)
        opened.__exit__(None if error is None else type(error), error)
        self._sample_anew()

    def _moved_tensors(self) -> int:
        """Return how many tensors lie elsewhere than before the sleep, or are gone: the graphs would read the wrong
        memory."""
        before, now = self._fell_asleep_at, self._tensor_addresses()
        return sum(a != b for a, b in zip(before, now, strict=False)) + abs(len(before) - len(now))

    def _sample_anew(self) -> None:
        """Sample after a sleep or a wake-up, with the copies that it made or freed if these are known."""
        try:
            self._look_for_copies()
        finally:
            self.sample()

    def _look_for_copies(self) -> None:
        """Look for copies only here, not at each boundary: a sleep makes them, and a wake-up frees them."""
        found = self._copies(self._asleep)
        for tag in found.keys() & OWNERS.keys() - self._on_host.keys():
            if found[tag].pinned_bytes is None:
                lifecycle.unavailable(pinned_of(OWNERS[tag]), NOT_SAID)
        gone = {tag: OnHost(0, None if held.pinned_bytes is None else 0) for tag, held in self._on_host.items()}
        self._on_host = gone | found

    def arrived(self, tag: str, size_bytes: int) -> None:
        """Note that a segment has memory behind it again, during a wake-up."""
        self.moves += 1
        if tag in self._arrived:
            self._arrived[tag] += size_bytes

    def sample(self) -> dict[str, int]:
        """Write the bytes of each owner that have memory behind them now, and return those of each pool.

        One question serves both: vLLM has hundreds of segments to add up, and torch lists every block of a pool.
        """
        sizes = self._bytes_by_tag()
        for name, size in self._rows(sizes).items():
            spans.counter(name, size)
        return sizes

    def bytes_by_owner(self) -> dict[str, int]:
        """Return the bytes of each owner that have memory behind them now, and of the copies in the host's memory."""
        return self._rows(self._bytes_by_tag())

    def _rows(self, sizes: dict[str, int]) -> dict[str, int]:
        rows = {}
        for tag, size in sizes.items():
            if tag in OWNERS:
                rows[f"{OWNERS[tag]}_bytes"] = self._held_bytes(tag, size)
                if tag in self._on_host:
                    rows |= host_rows(OWNERS[tag], self._on_host[tag])
        return rows

    def _held_bytes(self, tag: str, size_bytes: int) -> int:
        """Return how much of a pool has memory behind it: if it sleeps, what a failed wake-up has mapped."""
        return self._arrived.get(tag, 0) if tag in self._asleep else size_bytes
