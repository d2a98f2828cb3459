"""What one process holds of a GPU, owner by owner, and beside it the driver's totals of that GPU.

A row is measured where it comes into being: tensors by their storages, an engine's pools by its allocator, the context
when CUDA is first met, communicators and graphs by what the process grew while they were made. The totals come from
NVML alone, so that what has no row shows.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rltrace.events import (
    ALLOCATED_PEAK,
    HOST_BYTES,
    MEMORY_EDGE,
    OUT_OF_MEMORY,
    PINNED_BYTES,
    SLEEP,
    UNATTRIBUTED,
    USED,
    WAKE_UPS,
    Turn,
    pinned_of,
)
from rltrace.hooks.boundaries import Boundary
from rltrace.host import memory
from rltrace.host.clock import now_ns
from rltrace.host.interruption import own_failure
from rltrace.host.nvml import Memory, UnavailableError
from rltrace.instrument.memory.engine_share import EngineShare
from rltrace.instrument.memory.sharded_models import Rows, add
from rltrace.instrument.memory.unchanged import Unchanged
from rltrace.record import lifecycle, spans

SAME_NS = 2_000_000
"""A boundary this soon after a sample, with nothing allocated or freed between, is the same boundary."""

RETRY_NS, RETRY_SHARE = 1_000_000_000, 0.01
"""When the next look comes at the latest, after one that found nothing; and the share of time that looks may take."""

ENGINES_PHASES = frozenset({*WAKE_UPS, "weight_sync", "rollout.generate", SLEEP})
"""The engine's memory moves in these phases."""

CONTEXT = "cuda.context"
"""The kernels that a process has loaded are a part of it."""
GRAPHS = "rollout.graphs"
"""CUDA graphs, and what the driver needs for them."""
NCCL = "nccl"
"""Communicators."""
OUTSIDE = (CONTEXT, NCCL, GRAPHS)
"""Rows that torch's allocator does not know of, or not all of."""

BETWEEN_PASSES = frozenset(
    {Turn.FORWARD_END, Turn.BACKWARD_BEGIN, Turn.BACKWARD_END, Turn.OPTIMIZER_BEGIN, Turn.OPTIMIZER_END, Turn.ZERO_GRAD}
)
"""Where all layers of a model have gone through the same: none is being computed."""

OF_HOST = (HOST_BYTES, PINNED_BYTES)
"""Rows whose names end like this are no part of the card."""
REGISTERED = (f"weight_sync.bucket{PINNED_BYTES}",)
"""Rows of memory that was pinned where it lay: torch's allocator of pinned memory has none of it."""


class Reserved(NamedTuple):
    """The memory that torch's allocator has from the driver, in bytes."""

    reserved_bytes: int
    allocated_bytes: int
    """The part that is handed out and not yet freed."""
    changes: int = 0
    """How often the allocator has handed out memory or got it back: while that is the same, no tensor has moved."""
    peak_bytes: int = 0
    """The most that was handed out at once since the process began, or since its program reset that figure."""
    moved_bytes: int = 0
    """The bytes that the allocator has ever taken from the driver, and those that it has given back: while that is the
    same, none have come or gone."""


class State(NamedTuple):
    """The state changes whenever the rows of a process change."""

    torch: Reserved
    engine: Rows | None
    """Bytes of its pools by owner; None in a process without an engine."""
    moves: tuple[int, ...] = ()
    """Counts of all that comes to the card and leaves it: while they are the same, this process's part of it is."""


class Held(NamedTuple):
    """The bytes of the card that processes held when somebody last looked."""

    by_pid: dict[int, int]
    mine_bytes: int
    """The sum of this process's rows at that time."""
    others_bytes: int
    """What was used besides these processes."""


class Card(Protocol):
    """A GPU as any process sees it."""

    def card(self) -> Memory:
        """Return what the driver says now.

        Raises:
            UnavailableError: NVML is not there.
        """

    def held(self) -> dict[int, int]:
        """Return the bytes of each process by pid, which takes much longer; empty where they cannot be told.

        Raises:
            UnavailableError: The same, with the reason.
        """


class OwnCard(Card, Protocol):
    """The GPU that this process uses, as the process itself sees it."""

    uuid: str

    def torch(self) -> Reserved:
        """Return all that torch's allocator has, including pools, whether they have memory behind them or not."""

    def pools(self, addresses: Collection[int]) -> tuple[Reserved, Reserved]:
        """Return the part in segments at these addresses, and the part in private pools, which are the graphs'."""

    def pinned_bytes(self) -> int:
        """Page-locked bytes of the host that torch's allocator of such memory has, handed out or kept for the next.

        Raises:
            UnavailableError: This torch does not say.
        """


class SleepingMemory(Protocol):
    """An engine's pools that sleep."""

    moves: int
    """How often any memory of theirs has come or gone."""

    def bytes_by_owner(self) -> Rows:
        """Return the bytes that have memory behind them now, by owner."""

    def addresses(self) -> Collection[int]:
        """Return where the segments of all pools begin, asleep or awake."""


Found = TypeVar("Found")


class Sought(Generic[Found]):
    """Looks for something that may come later, until it is there: once a second, and more often where that takes less
    than a hundredth of the time."""

    def __init__(self, look: Callable[[], Found | None]) -> None:
        self._look = look
        self.found: Found | None = None
        self.next_ns = 0
        """When to look again."""

    def get(self, *, now: bool = False) -> Found | None:
        """Return what was found, now or before; None if it is not there, or if it is too soon for another look.

        Args:
            now: Look however short a time ago that was.
        """
        if self.found is not None:
            return self.found
        began_ns = now_ns()
        if now or began_ns >= self.next_ns:
            self.found = self._look()
            ended_ns = now_ns()
            self.next_ns = ended_ns + min(RETRY_NS, int((ended_ns - began_ns) / RETRY_SHARE))
        return self.found


class CudaLedger:
    """The sources of this process's rows."""

    def __init__(
        self, open_device: Callable[[], OwnCard | None], open_engines_card: Callable[[], Card | None] = lambda: None
    ) -> None:
        """Make the ledger of one device.

        Args:
            open_device: Returns the device; None while this process does not use one.
            open_engines_card: Returns the card of an engine below this process, or None. A server has no memory there,
                but it begins and ends the phases in which the engine moves its own.
        """
        self.tensors: dict[object, Callable[[], Rows]] = {}
        """Sources whose bytes come from torch's allocator. Rows with the same name add up."""
        self.between_passes: dict[object, Callable[[], Rows]] = {}
        """What answers in place of some of them where no pass is under way, and no phase begins or ends: sooner."""
        self.engine: SleepingMemory | None = None
        """The pools of the engine that runs in this process; None if there is none."""
        self.activations: Rows = {}
        """The bytes that forwards have left for their backward, by owner; empty until a pass was looked at."""
        self._unnamed_bytes = self._quiet_bytes = 0
        """The allocated bytes without an owner: at the last sample, and at the last one without activations."""
        self.trains: Callable[[], bool] = lambda: False
        """Returns whether this process trains a model, or holds one to compare with."""
        self._device = Sought(open_device)
        self._engines_card = Sought(open_engines_card)
        self._outside: Rows = {}
        self.outside_moves = 0
        """How often something may have changed outside of torch's allocator."""
        self._unchanged = Unchanged()
        self._named: tuple[Any, bool, Rows] = None, False, {}
        self._sampled: tuple[State | None, int] = None, 0
        self._held: Held | None = None
        self._knows_holders = True
        """Whether the driver could name the card's processes at the last sample."""
        self._pooled: tuple[int, int, tuple[Reserved, Reserved]] | None = None
        self._engine_share = EngineShare()
        self._peak_bytes = 0
        self._used_bytes = self._said_bytes = 0
        """What the driver counted at the last look, and what was last recorded of it."""
        self._asked: Memory | None = None
        """What the driver said when it was last asked whether anything has moved."""
        self._on_host: set[str] = set()
        """Owners that have had something in the host's memory."""
        self._process = memory.ProcessMemory()
        self._errors = memory.MemoryErrors()
        self._unavailable: set[str] = set()

    @property
    def in_use(self) -> bool:
        """Whether this process was seen to use a GPU."""
        return self._device.found is not None

    def device(self, *, is_sure: bool = False) -> OwnCard | None:
        """Return the device. At the first look, what this process has outside of torch's allocator is its context.

        Args:
            is_sure: Whether this process uses one by now. If it does not say so, the device may have been looked
                for too short a time ago, because that may take long.
        """
        was_known = self.in_use
        device = self._device.get(now=is_sure)
        if device is not None and not was_known:
            who = spans.current()
            if who is not None and not who.who.get("device"):
                lifecycle.identify(device={"host": socket.gethostname(), "uuid": device.uuid})
            self.rest_is_context()
        return device

    def rest_is_context(self) -> None:
        """Give the context what this process holds outside of torch's allocator and has no row of its own."""
        rest_bytes = self.ownerless_bytes()
        if rest_bytes is not None:  # else it is unknown, which is not 0
            self.give(CONTEXT, max(0, rest_bytes))

    def reached(self, boundary: Boundary) -> None:
        """Sample at a boundary; if an error about memory ended the span, say so first."""
        if not spans.is_recording():
            return
        if boundary.error is not None:
            self.out_of_memory(boundary.error)
        device, is_phase = self.device(), boundary.is_phase
        is_engines = not ENGINES_PHASES.isdisjoint(boundary.names)
        # The engine itself has just sampled its moves. Who holds what is asked again once they are over.
        of_processes = is_phase and (not is_engines or (not boundary.is_end and self._knows_holders))
        if device is not None:
            state = self.state(device)
            if not self._is_known(state, of_processes):
                self._sample(device, state, of_processes=of_processes)
        elif is_phase and is_engines and (card := self.engines_card()) is not None:
            with spans.automatic_span(MEMORY_EDGE) as sampled:
                sampled.set(**self._totals(card, {}, of_processes))
        self._engine_share.reached(boundary)

    def engines_card(self) -> Card | None:
        """Return the card of the engine below this process; it is looked for until there is one."""
        return self._engines_card.get()

    def _is_known(self, state: State, of_processes: bool) -> bool:
        """Return whether the last sample serves for this boundary too, as where one phase ends and another begins.

        An old sample does not, though nothing has changed since: a new one tells readers that nothing has.
        """
        known, end_ns = self._sampled
        is_old = now_ns() - end_ns >= SAME_NS
        return known == state and not is_old and (self._knows_holders or not of_processes)

    def state(self, device: OwnCard) -> State:
        """Return the state of the rows as it is now."""
        torch, engine = device.torch(), self.engine
        if engine is None:
            return State(torch, None, (torch.moved_bytes, self.outside_moves))
        return State(torch, engine.bytes_by_owner(), (torch.moved_bytes, self.outside_moves, engine.moves))

    def sample(self, *, of_processes: bool = True) -> None:
        """Write every row, then the totals.

        Args:
            of_processes: Whether to ask what each process holds, if that can have changed (2 ms on a busy machine).
        """
        device = self.device() if spans.is_recording() else None
        if device is not None:
            self._sample(device, self.state(device), of_processes=of_processes)

    def look(self, turn: Turn, *, activations: str | None = None) -> None:
        """Sample between two boundaries, unless nothing has changed since the last sample.

        Args:
            turn: Where that is.
            activations: In a pass, the owner of what was allocated since the pass began and has no other owner.
        """
        device = self.device() if spans.is_recording() else None
        if device is None:
            return
        state = self.state(device)
        if state != self._sampled[0] or turn is Turn.BEAT:
            self._sample(device, state, turn, activations=activations, of_processes=False)

    def settle(self) -> None:
        """Keep what was allocated since the last sample from counting as activations of the pass that begins now."""
        before = self._sampled[0]
        device = self.device() if spans.is_recording() else None
        if device is not None and before is not None:
            more_bytes = device.torch().allocated_bytes - before.torch.allocated_bytes
            self._settle_activations(self._unnamed_bytes + more_bytes, is_boundary=False)

    def has_moved(self) -> bool:
        """Return whether the card's used bytes differ from the last look's; false if the driver does not say."""
        device = self.device() if spans.is_recording() else None
        try:
            self._asked = None if device is None else device.card()
        except UnavailableError:
            self._asked = None
        return self._asked is not None and self._asked.used_bytes != self._used_bytes

    def say_used(self) -> None:
        """Sample what the driver counted when it was asked, without looking at who owns it (2 µs)."""
        if self._asked is not None and self._asked.used_bytes != self._said_bytes:
            self._say_used(self._asked)

    def _say_used(self, card: Memory) -> None:
        self._said_bytes = card.used_bytes
        spans.counter(USED, card.used_bytes + card.reserved_bytes)

    def _sample(
        self,
        device: OwnCard,
        state: State,
        turn: Turn | None = None,
        *,
        activations: str | None = None,
        of_processes: bool = True,
    ) -> None:
        since_ns = self._unchanged.since_ns(state.moves)
        with spans.automatic_span(MEMORY_EDGE) as sampled:
            said: dict[str, Any] = {"unchanged_ns": max(0, sampled.start_ns - since_ns)}
            if turn is not None:
                said["turn"] = turn._value_  # `value` is a function, in Python
            try:
                rows = self.rows(device, state, turn, activations=activations)
                counter = spans.counter
                for name, size in rows.items():
                    counter(name, size)
                if turn is None or self._on_host:
                    self._say_host(device, rows)
                self._say_peak(device, state)
                said |= self._totals(device, rows, of_processes)
            finally:
                sampled.set(**said)
        self._sampled = state, now_ns()

    def _say_host(self, device: OwnCard, rows: Rows) -> None:
        """Sample what is in the host's memory. Between boundaries that is left out until an owner has something there:
        both questions take 80 µs in cold caches.
        """
        spans.counter("resident_bytes", self._process.resident_bytes())
        self._say_pinned(device, rows)

    def _say_pinned(self, device: OwnCard, rows: Rows) -> None:
        """Sample pinned memory of torch that has no owner: unnamed tensors, rounding, and what the allocator keeps."""
        if pinned_of(UNATTRIBUTED) in self._unavailable:
            return
        try:
            pinned_bytes = device.pinned_bytes()
        except UnavailableError as reason:
            self._say(pinned_of(UNATTRIBUTED), str(reason))
            return
        pinned = (name for name in rows if name.endswith(PINNED_BYTES) and name not in REGISTERED)
        named_bytes = sum(rows[name] for name in pinned) if self._on_host else 0
        spans.counter(f"{UNATTRIBUTED}{PINNED_BYTES}", pinned_bytes - named_bytes)

    def say_peak(self) -> None:
        """Sample the most that torch has ever allocated, without looking at who owns it (13 µs)."""
        device = self.device() if spans.is_recording() else None
        if device is not None:
            self._say_peak(device, self.state(device))

    def _say_peak(self, device: OwnCard, state: State) -> None:
        """Sample the peak between two looks; an engine alone has none, because its pools count asleep as awake.

        Beside a trainer they are left out: from the engine's start-up on they have the same bytes at any moment.
        """
        if state.engine is not None and not self.trains():
            return
        peak_bytes = state.torch.peak_bytes - self._in_pools(device, state.torch.reserved_bytes)[0].allocated_bytes
        if peak_bytes != self._peak_bytes:
            self._peak_bytes = peak_bytes
            spans.counter(ALLOCATED_PEAK, peak_bytes)

    def _totals(self, device: Card, rows: Rows, of_processes: bool) -> dict[str, Any]:
        """Return what the driver counts, for a sample's span; nothing where it does not say."""
        try:
            card = device.card()
        except UnavailableError as reason:
            self._say("unaccounted", str(reason))
            return {}
        self._used_bytes = card.used_bytes
        self._say_used(card)
        mine_bytes = on_card(rows)
        others_bytes = card.used_bytes - mine_bytes
        said = {
            "totals": {"used": card.used_bytes, "driver.reserved": card.reserved_bytes},
            "free_bytes": card.free_bytes,
            "others_bytes": others_bytes,
        }
        known = self._held
        if known is None or (of_processes and known.others_bytes != others_bytes):
            self._held = known = Held(self._holders(device)[0], mine_bytes, others_bytes)
        self._knows_holders = known.others_bytes == others_bytes
        if self._knows_holders:
            by_pid, pid = dict(known.by_pid), os.getpid()
            if pid in by_pid:
                by_pid[pid] += mine_bytes - known.mine_bytes
            said["held_bytes"] = {str(pid): size for pid, size in by_pid.items()}
        said["cpu_ns"] = dict(_cpu_ns(known.by_pid))
        return said

    def rows(self, device: OwnCard, state: State, turn: Turn | None = None, *, activations: str | None = None) -> Rows:
        """Return the bytes of every owner in this process, in the state that it is in.

        Args:
            device: The device that the process uses.
            state: The state of the rows.
            turn: Where that is; None if a phase begins or ends here, so that no forward is waiting for its backward.
            activations: The owner of what a forward leaves, while a forward runs or waits for its backward.
        """
        torch, is_boundary = state.torch, turn is None
        pools, graphs = self._in_pools(device, torch.reserved_bytes)
        rows = self._named_rows(torch.changes, is_whole=turn not in BETWEEN_PASSES)
        named_bytes = on_card(rows)
        cached_bytes, loose_bytes = remainder(torch, pools, graphs)
        # An engine also has inputs and workspaces. Alone in its process, it owns everything that has no other owner.
        nameless_bytes = loose_bytes - named_bytes
        engine_bytes = self._engine_share.of(nameless_bytes) if self.engine is not None else 0
        if self.engine is not None and not self.trains():
            engine_bytes = nameless_bytes
        unnamed_bytes = nameless_bytes - engine_bytes
        self._settle_activations(unnamed_bytes, is_boundary=is_boundary, owner=activations)
        rows |= state.engine or {}
        rows |= {
            **self.activations,
            "rollout.activations_bytes": engine_bytes,
            "allocator.cached_bytes": cached_bytes,
            "unattributed_bytes": unnamed_bytes - sum(self.activations.values()),
        }
        for owner, size in self._outside.items():
            rows[f"{owner}_bytes"] = rows.get(f"{owner}_bytes", 0) + size
        if self.engine is not None:
            rows[f"{GRAPHS}_bytes"] = rows.get(f"{GRAPHS}_bytes", 0) + graphs.reserved_bytes
        return self._without_never_used(rows)

    def _named_rows(self, changes: int, *, is_whole: bool) -> Rows:
        """Return the bytes of tensors that have an owner. They are counted anew when any tensor has come or gone.

        Args:
            changes: How often one has.
            is_whole: Whether each source is asked for all that it knows.
        """
        key = changes, tuple(self.tensors.values())
        if self._named[0] != key or (is_whole and not self._named[1]):
            rows: Rows = {}
            for name, source in self.tensors.items():
                add(rows, (source if is_whole else self.between_passes.get(name, source))())
            self._named = key, is_whole, rows
        return dict(self._named[2])

    def _without_never_used(self, rows: Rows) -> Rows:
        """Return the rows without those of host memory for owners that never had any, which are most."""
        of_host = [name for name in rows if name.endswith(OF_HOST)]
        self._on_host.update(name.rsplit("_", 2)[0] for name in of_host if rows[name])
        for name in of_host:
            if name.rsplit("_", 2)[0] not in self._on_host:
                del rows[name]
        return rows

    def _settle_activations(self, unnamed_bytes: int, *, is_boundary: bool, owner: str | None = None) -> None:
        """Set how many of the bytes without an owner are activations.

        In a pass, which has an owner, these are the bytes that have come since it began. Elsewhere they are those of
        them that are still there, such as logits that the program keeps. At a boundary there are none.
        """
        self._unnamed_bytes = unnamed_bytes
        new_bytes = 0 if is_boundary else max(0, unnamed_bytes - self._quiet_bytes)
        if owner is not None:
            row = f"{owner}_bytes"
            self.activations = dict.fromkeys((*self.activations, row), 0) | {row: new_bytes}
            return
        for row, size in self.activations.items():
            self.activations[row] = min(size, new_bytes)
        self._quiet_bytes = unnamed_bytes - sum(self.activations.values())

    def ownerless_bytes(self) -> int | None:
        """Return what this process holds outside of torch's allocator and in no row; None where it cannot be told."""
        device = self.device(is_sure=True)
        outside_bytes = None if device is None else self._outside_bytes(device)
        return None if outside_bytes is None else outside_bytes - sum(self._outside.values())

    def give(self, owner: str, size_bytes: int) -> None:
        """Add to a row that torch's allocator does not know of."""
        self.outside_moves += 1
        self._outside[owner] = self._outside.get(owner, 0) + size_bytes

    def free_bytes(self) -> int | None:
        """Return the free bytes of the card; None where nobody says."""
        device = self.device() if spans.is_recording() else None
        try:
            return None if device is None else device.card().free_bytes
        except UnavailableError:
            return None

    def out_of_memory(
        self,
        error: BaseException,
        asked_bytes: int | None = None,
        free_bytes: int | None = None,
        owners: Collection[str] = (),
    ) -> None:
        """If an error is about memory, write how much was asked for, how much was free, and who holds the card.

        The error passes several hooks on its way up. The first one that sees it is nearest to the moment.

        Args:
            error: The error.
            asked_bytes: How much was asked for, if the error does not say.
            free_bytes: How much was free before; what is free now, by default.
            owners: Who would have owned it, if that is known.
        """
        device = self.device()
        if device is None or not self._errors.is_new(error):
            return
        args: dict[str, Any] = {"asked_bytes": memory.asked_bytes(error) or asked_bytes, "owners": list(owners)}
        try:
            card = device.card()
            size_bytes = card.used_bytes + card.reserved_bytes + card.free_bytes
            args["free_bytes"] = card.free_bytes if free_bytes is None else free_bytes
            args["bound"] = f"GPU {device.uuid} of {size_bytes / (1 << 20):,.0f} MiB"
        except UnavailableError as reason:
            self._say("unaccounted", str(reason))
        with spans.automatic_span(OUT_OF_MEMORY, reason=memory.reason_of(error), **args):
            self.sample()

    def _outside_bytes(self, device: OwnCard) -> int | None:
        """Return what the driver counts for this process and torch's allocator does not; None if unknown."""
        by_pid, reason = self._holders(device)
        held_bytes = by_pid.get(os.getpid())
        if held_bytes is None:
            for owner in OUTSIDE:
                self._say(owner, reason)
            return None
        state = self.state(device)
        pools = self._in_pools(device, state.torch.reserved_bytes)[0]
        awake_bytes = on_card(state.engine or {})
        return held_bytes - (state.torch.reserved_bytes - pools.reserved_bytes) - awake_bytes

    def _holders(self, device: Card) -> tuple[dict[int, int], str]:
        """Return the bytes of each process by pid, and why one is missing."""
        try:
            return device.held(), "NVML does not say what this process holds"
        except UnavailableError as reason:
            return {}, str(reason)

    def _in_pools(self, device: OwnCard, reserved_bytes: int) -> tuple[Reserved, Reserved]:
        """Return what is in an engine's pools and graphs, which are made once.

        A new one shows in the most that was ever reserved; if a trainer has had more before, it shows in the segments.
        A look takes 2 ms, because torch lists every block, and an engine's cache comes and goes with each rollout.
        """
        if self.engine is None:
            return Reserved(0, 0), Reserved(0, 0)
        addresses = self.engine.addresses()
        if self._pooled is None or self._pooled[0] < reserved_bytes or self._pooled[1] != len(addresses):
            self._pooled = reserved_bytes, len(addresses), device.pools(addresses)
        return self._pooled[2]

    def _say(self, what: str, reason: str) -> None:
        if what not in self._unavailable and spans.current() is not None:
            self._unavailable.add(what)
            lifecycle.unavailable(what, reason)


def on_card(rows: Rows) -> int:
    """Return the bytes of all rows, without those of host memory."""
    return sum(size for name, size in rows.items() if not name.endswith(OF_HOST))


def remainder(torch: Reserved, pools: Reserved, graphs: Reserved) -> tuple[int, int]:
    """Return the bytes that torch's allocator keeps, and those that it has handed out, without pools and graphs."""
    allocated_bytes = torch.allocated_bytes - pools.allocated_bytes - graphs.allocated_bytes
    reserved_bytes = torch.reserved_bytes - pools.reserved_bytes - graphs.reserved_bytes
    return reserved_bytes - allocated_bytes, allocated_bytes


def _cpu_ns(pids: Collection[int]) -> Iterator[tuple[str, int]]:
    for pid in pids:
        try:
            yield str(pid), memory.cpu_ns(pid)
        except own_failure(OSError):  # it has just ended
            continue
