"""Every allocation of torch's on a GPU in a chosen part of a run, by owner, on the Recording's own clock.

torch's allocator keeps a history of its own, without stacks at half a microsecond an entry; each entry carries a text
that the allocating thread has set before: the owner. Bytes are those asked for: the history does not say how large a
block was given for them (torch 2.11, c10/cuda/CUDACachingAllocator.cpp, `alloc_found_block`). They go when the block
can be used again, not when a free is asked for. Nothing is set, kept or written outside of the chosen part.
"""

from __future__ import annotations

import bisect
import heapq
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rltrace.events import (
    ALLOCATIONS,
    ALLOCATIONS_KEPT,
    ALLOCATIONS_RESERVED,
    ALLOCATIONS_WRITTEN,
    NO_GPU,
    OWNERS,
    UNATTRIBUTED,
)
from rltrace.host import clock
from rltrace.host.garbage_collector import without_collection
from rltrace.host.gpu_use import has_used_gpu
from rltrace.host.interruption import own_failure
from rltrace.record import lifecycle, spans
from rltrace.record.torch.allocation_replay import Change, Naming, Reservation, Reserved, Timeline, replay, reserved
from rltrace.record.torch.kernels import ClockMap, clock_map

MOST_ENTRIES = 1 << 22
"""How many entries torch keeps, three per allocation; the oldest make room, and are counted.

They take memory of the host as they come, some 140 bytes each, and 0.7 KB each while they are written. A step of an 8B
model with 32 samples a rank has 970,000; one of 1.7B whose log-probs verl computes row by row, 1.5 million.
"""
WHAT = "allocations"
"""What a process says is unavailable, with the reason, where it keeps none."""
SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""Entries about memory that comes from the driver or goes back; segments that can expand are mapped and unmapped."""
MARK = "rltrace.clock"
MARK_BYTES = 509
"""A size that hardly anything else has, for what the garbage collector frees meanwhile carries the same text."""
MARKS = 8
"""Readings of the allocator's clock at each end, of which the narrowest counts."""
HALF_TICK_NS = 500
"""The history's times are whole microseconds; each is taken for its middle."""
WANDER = 30e-6
"""By how much two clocks' rates may differ meanwhile: twice NTP's PHI (RFC 5905, 7.3)."""

_keeping: _Keeping | None = None
_sources: list[Callable[[], dict[int, str]]] = []
_switches: list[Callable[[bool], None]] = []
_pools: list[ForeignPools] = []


class ForeignPools(Protocol):
    """Memory that is not torch's own, with an allocator that has no history: each of its changes is told here."""

    def begin(self) -> None:
        """Keep what happens from now on."""

    def end(self) -> PoolHistory:
        """Return what has happened."""

    def has_segments(self) -> bool:
        """Tell whether there is anything, asleep or awake."""


@dataclass
class PoolHistory:
    """What an allocator beside torch's did."""

    changes: list[Change] = field(default_factory=list)
    alive: dict[int, int] = field(default_factory=dict)
    """What has memory behind it now: sizes by address."""
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """Address ranges that torch's allocator was given: what it says about them counts here, not there."""

    def since(self, start_ns: int) -> PoolHistory:
        """Return the same history without what was before."""
        return PoolHistory([change for change in self.changes if change.ts_ns >= start_ns], self.alive, self.ranges)

    def owners_at(self, start_ns: int) -> dict[int, str]:
        """Return the owners, by address, of what was mapped before that time and not unmapped."""
        owners: dict[int, str] = {}
        for change in self.changes:
            if change.ts_ns < start_ns:
                owners.pop(change.address, None)
                if change.owner is not None:
                    owners[change.address] = change.owner
        return owners


@dataclass
class _Keeping:
    """A history that is being kept."""

    memory: Any
    """torch.cuda.memory."""
    device: int
    stats: dict[str, int]
    start_ns: int = 0
    windows: list[tuple[int, int]] = field(default_factory=list)
    """Host's clock before and after each mark, in their order."""
    namings: list[Naming] = field(default_factory=list)
    still_since_ns: int | None = None
    """Since when nothing had come or gone when it began; None if nobody knows."""


# ---- from the hooks ---------------------------------------------------------------------------------------------


def name_by(source: Callable[[], dict[int, str]]) -> None:
    """Ask `source` at both ends of a history for owners by address."""
    _sources.append(source)


def keep_beside(pools: ForeignPools) -> None:
    """Keep what `pools` do in the same timeline."""
    _pools.append(pools)


def when_kept(switch: Callable[[bool], None]) -> None:
    """Call `switch(True)` when a history begins and `switch(False)` when it ends."""
    _switches.append(switch)


def enter(owner: str) -> str | None:
    """Give this thread's allocations to an owner from here on; return what `leave` needs, None if none are kept."""
    keeping = _keeping  # another thread may end it meanwhile
    if keeping is None:
        return None
    before: str = keeping.memory._get_memory_metadata()
    keeping.memory._set_memory_metadata(owner)
    return before


def leave(before: str | None) -> None:
    """Give this thread's allocations back to whoever had them before `enter`."""
    if before is not None:
        import torch

        torch.cuda.memory._set_memory_metadata(before)


class Scope:
    """An owner's scope, for a `with` statement and for what takes a span."""

    __slots__ = ("before", "owner")

    def __init__(self, owner: str) -> None:
        self.owner = owner

    def __enter__(self) -> Scope:
        self.before = enter(self.owner)
        return self

    def __exit__(self, kind: object = None, error: object = None, traceback: object = None, /) -> None:
        leave(self.before)


def name(owners: dict[int, str]) -> None:
    """Say whose the bytes at some addresses are, for as long as they are allocated."""
    keeping = _keeping  # as in `enter`
    if keeping is not None:
        keeping.namings.append(Naming(clock.now_ns(), owners))


# ---- from the program -------------------------------------------------------------------------------------------


def start_allocations() -> None:
    """Keep every allocation and free of this process on its current GPU until `stop_allocations`.

    Does nothing where nothing is recorded, the process has had no memory of a GPU yet, or torch keeps no history; then
    one line of the Recording says why.
    """
    if _keeping is None and spans.is_recording() and (reason := begin()) is not None:
        lifecycle.unavailable(WHAT, reason)


class Stillness(NamedTuple):
    """How much torch's allocator had done on a device at one time."""

    at_ns: int
    device: int
    counts: tuple[int, ...]

    def lasts(self, until: Stillness) -> bool:
        """Tell whether nothing has come or gone on the same device between the two."""
        return (self.device, self.counts) == (until.device, until.counts)


COUNTED = (
    *("active.all.allocated", "active.all.freed"),
    *("requested_bytes.all.current", "reserved_bytes.all.current"),
)
"""Keys of torch.cuda.memory_stats(), one of which changes whenever something comes or goes.

Active is what is allocated, or waits for a stream to be freed. Only bytes show that a cache was emptied, because
segments that can expand are not counted (torch 2.11, CUDACachingAllocator.cpp, `unmap_block`), and what happened where
the program has reset the counts.
"""


def stillness() -> Stillness | None:
    """Return what `begin` needs to tell whether anything has come or gone meanwhile; None if that cannot be told."""
    if not has_used_gpu():
        return None
    import torch

    try:
        device = torch.cuda.current_device()
        return _stillness(device, torch.cuda.memory_stats(device))
    except own_failure(RuntimeError):  # an allocator of the program's own counts nothing
        return None


def _stillness(device: int, stats: dict[str, int]) -> Stillness | None:
    """Return a device's stillness; None where there are pools, which sleep and wake up without torch's allocator."""
    if any(pools.has_segments() for pools in _pools):
        return None
    return Stillness(clock.now_ns(), device, tuple(stats.get(name, 0) for name in COUNTED))


def begin(last: Stillness | None = None) -> str | None:
    """Do as `start_allocations` does; return why that is impossible, None if it is done.

    Args:
        last: A `stillness` from before. If nothing has come or gone since, what is there now was there all along, and
            is written so.
    """
    try:
        _keep(_start(last))
    except own_failure() as error:
        return f"{type(error).__name__}: {error}"
    return None


def is_kept() -> bool:
    """Tell whether this process keeps its allocations now."""
    return _keeping is not None


def _keep(keeping: _Keeping | None) -> None:
    global _keeping
    _keeping = keeping
    for switch in _switches:
        switch(keeping is not None)


def _start(last: Stillness | None) -> _Keeping:
    import torch

    memory = torch.cuda.memory
    _require_history(torch)
    device = torch.cuda.current_device()
    keeping = _Keeping(memory, device, torch.cuda.memory_stats(device))
    now = _stillness(device, keeping.stats)
    if last is not None and now is not None and last.lasts(now):
        keeping.still_since_ns = last.at_ns
    memory._record_memory_history(enabled="all", context=None, max_entries=MOST_ENTRIES, clear_history=True)
    try:
        keeping.start_ns = clock.now_ns()
        keeping.namings.append(Naming(keeping.start_ns, _named()))
        _mark(keeping)
        for pools in _pools:
            pools.begin()
    except BaseException:  # torch would go on with it to the end of the program
        memory._record_memory_history(enabled=None)
        raise
    return keeping


def _require_history(torch: Any) -> None:
    """Raise a RuntimeError with the reason if this process's allocations cannot be kept."""
    if not has_used_gpu():  # to mark its clock allocates
        raise RuntimeError(NO_GPU)
    if not hasattr(torch.cuda.memory, "_set_memory_metadata"):
        raise RuntimeError(f"allocations of torch {torch.__version__} cannot carry a text; those of torch 2.11 can")
    if torch.cuda.memory.get_allocator_backend() != "native":
        raise RuntimeError("PYTORCH_ALLOC_CONF selects an allocator that keeps no history; use backend:native")
    if torch._C._cuda_isHistoryEnabled():
        raise RuntimeError("the program records a memory history itself, and torch keeps only one")


def _named() -> dict[int, str]:
    return {address: owner for source in _sources for address, owner in source().items() if address}


def _mark(keeping: _Keeping) -> None:
    """Allocate a little between two readings of the host's clock; the history has that moment by its own clock."""
    import torch

    before = keeping.memory._get_memory_metadata()
    keeping.memory._set_memory_metadata(MARK)
    for _ in range(MARKS):
        before_ns = clock.now_ns()
        tensor = torch.empty(MARK_BYTES, dtype=torch.uint8, device=f"cuda:{keeping.device}")
        keeping.windows.append((before_ns, clock.now_ns()))
        del tensor
    keeping.memory._set_memory_metadata(before)


def stop_allocations() -> None:
    """Write what was kept since `start_allocations`; call it where a pause does no harm."""
    if _keeping is not None and (reason := end()) is not None:
        lifecycle.unavailable(WHAT, reason)


def end(**args: Any) -> str | None:
    """Do as `stop_allocations` does; return why nothing was written, None if all was.

    Args:
        **args: Recorded with the whole, beside what is known of it.
    """
    keeping = _keeping
    if keeping is None:
        return "nothing was kept"
    try:
        _keep(None)
        # No object is garbage, and to look took 2.2 of 4.9 s (half a million entries).
        with spans.automatic_span(ALLOCATIONS_WRITTEN), without_collection(of_a_program=True):
            _write(*_stop(keeping), **args)
    except own_failure() as error:
        return f"{type(error).__name__}: {error}"
    return None


def abandon() -> None:
    """Keep no more, and write nothing."""
    if (keeping := _keeping) is not None:
        _keep(None)
        keeping.memory._record_memory_history(enabled=None)


def _stop(keeping: _Keeping) -> tuple[_Keeping, dict[str, Any], list[PoolHistory], dict[str, int]]:
    import torch

    try:
        histories = [pools.end() for pools in _pools]
        keeping.namings.append(Naming(clock.now_ns(), _named()))
        _mark(keeping)
        stats = torch.cuda.memory_stats(keeping.device)
        return keeping, keeping.memory._snapshot(), histories, stats
    finally:
        keeping.memory._record_memory_history(enabled=None)


# ---- what torch kept --------------------------------------------------------------------------------------------


@dataclass
class History:
    """One device's history, as `_snapshot` gives it, in the host's time."""

    changes: list[Change]
    alive: dict[int, int]
    """Sizes by address of what is allocated at its end, or waits for a stream to be freed."""
    reservations: list[Reservation]
    segments: dict[int, int]
    """Sizes by address of what torch has from the driver at its end."""
    error_ns: int
    """A time is off by at most this much."""
    drift_ns: int
    """By how much the two clocks moved apart meanwhile."""
    allocations: int
    lost: int
    """Allocations and frees whose entries were dropped because others needed their room."""
    unaccounted_bytes: int
    """The allocator's own count at the beginning, less what its history leads back to; of a whole history, 0."""

    @classmethod
    def of(
        cls,
        snapshot: dict[str, Any],
        device: int,
        windows: list[tuple[int, int]],
        before: dict[str, int],
        after: dict[str, int],
    ) -> History:
        """Read a snapshot.

        Args:
            snapshot: As torch.cuda.memory._snapshot() gives it.
            device: Whose history is read.
            windows: The host's clock before and after each mark.
            before: torch.cuda.memory_stats() at the beginning.
            after: The same at the end.

        Raises:
            ValueError: the history has no mark of the clock.
        """
        entries = snapshot["device_traces"][device]
        counts = Counter(entry["action"] for entry in entries)
        clocks = clocks_of(entries, windows)
        alive = dict(_alive(snapshot["segments"], device))
        asked = sum(alive.values()) - sum(map(_gained_bytes, entries))
        changes = list(_changes(entries, clocks))
        return cls(
            changes=changes,
            alive=alive,
            reservations=list(_reservations(entries, clocks)),
            segments=dict(_segments(snapshot["segments"], device)),
            error_ns=clocks.error_ns + HALF_TICK_NS,
            drift_ns=clocks.last_offset_ns - clocks.first_offset_ns,
            allocations=sum(change.owner is not None for change in changes),
            lost=_lost(before, after, counts),
            unaccounted_bytes=before["requested_bytes.all.current"] - asked,
        )

    def whole_since(self, start_ns: int) -> int:
        """Return since when it is whole: since its beginning or, if entries are missing, since the oldest one left."""
        oldest = [entries[0].ts_ns for entries in (self.changes, self.reservations) if entries]
        return max(start_ns, min(oldest, default=start_ns)) if self.lost else start_ns


def clocks_of(entries: list[dict[str, Any]], windows: list[tuple[int, int]]) -> ClockMap:
    """Return what brings a history's times to the host's clock.

    Where the first marks were dropped with the oldest entries, the last ones count throughout, and the further back a
    time is, the less is known.

    Raises:
        ValueError: the history has no mark at all.
    """
    marks = [_time_ns(entry) for entry in entries if entry["action"] == "alloc" and _is_mark(entry)]
    if not marks:
        raise ValueError(f"the history has none of the {len(windows)} clock marks")
    kept = windows[len(windows) - len(marks) :]
    wider = [(before_ns - HALF_TICK_NS, after_ns + HALF_TICK_NS) for before_ns, after_ns in kept]
    found = clock_map([(time_ns, time_ns) for time_ns in marks], wider)
    if len(marks) == len(windows):
        return found
    back_ns = found.last_ns - _time_ns(entries[0])
    error_ns = found.error_ns + round(WANDER * back_ns)
    return ClockMap(found.last_ns, found.last_offset_ns, found.last_ns, found.last_offset_ns, error_ns)


def _time_ns(entry: dict[str, Any]) -> int:
    return int(entry["time_us"]) * 1000 + HALF_TICK_NS


def _is_mark(entry: dict[str, Any]) -> bool:
    return entry.get("user_metadata") == MARK and entry["size"] == MARK_BYTES


def _gained_bytes(entry: dict[str, Any]) -> int:
    if entry["action"] == "alloc":
        return int(entry["size"])
    return -int(entry["size"]) if entry["action"] == "free_completed" else 0


def _changes(entries: list[dict[str, Any]], clocks: ClockMap) -> Iterator[Change]:
    """Return the allocations and the completed frees, without the marks."""
    for entry in entries:
        is_free = entry["action"] == "free_completed"
        if (is_free or entry["action"] == "alloc") and not _is_mark(entry):
            owner = None if is_free else owner_of(entry.get("user_metadata"))
            yield Change(clocks.host_ns(_time_ns(entry)), entry["addr"], entry["size"], owner)


def _reservations(entries: list[dict[str, Any]], clocks: ClockMap) -> Iterator[Reservation]:
    """Return the segments that came and went."""
    for entry in entries:
        if (sign := SEGMENTS.get(entry["action"])) is not None:
            yield Reservation(clocks.host_ns(_time_ns(entry)), entry["addr"], sign * int(entry["size"]))


def owner_of(text: str | None) -> str:
    """Return the owner that an allocation carries; a text of the program's own names none."""
    return text if text in OWNERS else UNATTRIBUTED


def _alive(segments: list[dict[str, Any]], device: int) -> Iterator[tuple[int, int]]:
    for segment in segments:
        if segment["device"] == device:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    yield address, block["requested_size"]
                address += block["size"]


def _segments(segments: list[dict[str, Any]], device: int) -> Iterator[tuple[int, int]]:
    return ((segment["address"], segment["total_size"]) for segment in segments if segment["device"] == device)


def _lost(before: dict[str, int], after: dict[str, int], counts: Counter[str]) -> int:
    """Return what the allocator counted, less what its history has."""
    allocated, freed = (after[key] - before[key] for key in ("allocation.all.allocated", "allocation.all.freed"))
    return int(allocated - counts["alloc"] + freed - counts["free_requested"])


# ---- writing ----------------------------------------------------------------------------------------------------


def _write(
    keeping: _Keeping, snapshot: dict[str, Any], histories: list[PoolHistory], stats: dict[str, int], **args: Any
) -> None:
    history = History.of(snapshot, keeping.device, keeping.windows, keeping.stats, stats)
    start_ns = history.whole_since(keeping.start_ns)
    pools = [beside.since(start_ns) for beside in histories]
    # What an address was called before the oldest entry that is left may be of something that is gone.
    namings = [naming for naming in keeping.namings if naming.ts_ns >= start_ns]
    namings += [Naming(start_ns, beside.owners_at(start_ns)) for beside in histories]
    timeline = together(history, pools, namings)
    levels = reserved_together(history, pools, start_ns)
    if start_ns == keeping.start_ns and keeping.still_since_ns is not None:  # nothing is missing behind that
        start_ns = keeping.still_since_ns
        levels[0] = levels[0]._replace(ts_ns=start_ns)
    write(timeline, levels, history, start_ns, keeping.windows[-1][1], **args)


def together(history: History, histories: Iterable[PoolHistory], namings: list[Naming]) -> Timeline:
    """Return torch's history and those beside it as one; what a pool gave torch counts as the pool's."""
    histories = list(histories)
    ranges = _ranges(histories)
    changes = [change for change in history.changes if not _is_inside(change.address, ranges)]
    alive = {address: size for address, size in history.alive.items() if not _is_inside(address, ranges)}
    for beside in histories:
        alive |= beside.alive
    # Merged, not sorted: an allocator's own order counts where two of its times are equal.
    merged = heapq.merge(changes, *(beside.changes for beside in histories), key=lambda change: change.ts_ns)
    return replay(merged, alive, namings)


def reserved_together(history: History, histories: Iterable[PoolHistory], start_ns: int) -> list[Reserved]:
    """Return what torch's allocator and those beside it have from the driver, each byte once."""
    histories = list(histories)
    ranges = _ranges(histories)
    own = [change for change in history.reservations if not _is_inside(change.address, ranges)]
    beside = (map(_reservation, pool.changes) for pool in histories)
    end_bytes = sum(size for address, size in history.segments.items() if not _is_inside(address, ranges))
    end_bytes += sum(sum(pool.alive.values()) for pool in histories)
    return reserved(heapq.merge(own, *beside, key=lambda change: change.ts_ns), start_ns, end_bytes)


def _reservation(change: Change) -> Reservation:
    """Return a pool's change as a reservation: what it maps comes from the driver, and what it unmaps goes back."""
    return Reservation(change.ts_ns, change.address, -change.size_bytes if change.owner is None else change.size_bytes)


def _ranges(histories: Iterable[PoolHistory]) -> list[tuple[int, int]]:
    """Return what pools gave torch, in order."""
    return sorted(span for beside in histories for span in beside.ranges)


def _is_inside(address: int, ranges: list[tuple[int, int]]) -> bool:
    """Tell whether one of these ranges, sorted and apart, has an address."""
    place = bisect.bisect_right(ranges, address, key=lambda span: span[0])
    return place > 0 and address < ranges[place - 1][1]


def write(
    timeline: Timeline, levels: list[Reserved], history: History, start_ns: int, end_ns: int, **args: Any
) -> None:
    """Write a span with what is known of the whole and `args`, then every owner's bytes after each change.

    What is reserved follows. After the end each of them gets a 0, for nothing is known from there on.
    """
    owners = dict.fromkeys([*timeline.start_bytes, *timeline.end_bytes])
    spans.automatic_span_at(
        ALLOCATIONS_KEPT,
        start_ns,
        end_ns,
        lane=1,
        error_ns=history.error_ns,
        drift_ns=history.drift_ns,
        allocations=history.allocations,
        lost=history.lost,
        start_bytes=sum(timeline.start_bytes.values()),
        peak_bytes=timeline.peak_bytes,
        end_bytes=sum(timeline.end_bytes.values()),
        unaccounted_bytes=history.unaccounted_bytes,
        mismatches=timeline.mismatches,
        **args,
    )
    for owner in owners:
        spans.counter_at(counter_name(owner), start_ns, timeline.start_bytes.get(owner, 0))
    for balance in timeline.balances:
        spans.counter_at(counter_name(balance.owner), balance.ts_ns, balance.bytes)
    for owner in owners:
        spans.counter_at(counter_name(owner), end_ns, 0)
    for level in (*levels, Reserved(end_ns, 0)):
        spans.counter_at(ALLOCATIONS_RESERVED, level.ts_ns, level.bytes)


def counter_name(owner: str) -> str:
    """Return the name of an owner's counter, which no reader may take for the sampled one."""
    return f"{ALLOCATIONS}{owner}_bytes"


def _forget_parent() -> None:
    """Forget what the parent keeps: a forked child has no part in it, and cannot use the GPU."""
    if _keeping is not None:
        _keep(None)


if hasattr(os, "register_at_fork"):  # readers run where nothing forks
    os.register_at_fork(after_in_child=_forget_parent)
