"""The ledger of a device: who held its bytes at each moment, over all its processes, beside the kernel's total.

Rows come from the processes, totals from the kernel (`memory.edge` spans: one process reads them for all processes of
its device). The difference is a row of its own, `unaccounted`, and nothing else is computed that way.

One process reads the total in one look. `same_moment.py` says which samples of the other processes belong to the same
moment; `unstamped.py` does so for Recordings that were made before samples were stamped.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.lanes import Lane
from rltrace.analysis.looks import CONSISTENT_NS, DRIVER_RESERVED, by_name, end_ns_of, looks, totals_of
from rltrace.analysis.observations import Observations, once
from rltrace.analysis.same_moment import SameMoment, are_stamped
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.samples import Samples, values_at
from rltrace.analysis.unstamped import Unstamped, consistent
from rltrace.events import OWNERS, Span

FREE, UNACCOUNTED, INTERPRETER = "free", "unaccounted", "interpreter"
FORMER_NAMES = {"unexplained": UNACCOUNTED}
"""The names of rows in older Recordings, with their names now."""
CONTEXT = "cuda.context"

ALLOWED_SHARE = 0.01
ALLOWED_CPU_BYTES = 24 << 20
ALLOWED_GPU_BYTES = 256 << 20
"""How many bytes may be unaccounted at a consistent phase boundary: a share of the used bytes, or this many, whichever
is more."""


class Ledger:
    """Moments of one device: shape (M,) moments, (M, O) by owner."""

    def __init__(self, owners: list[str], times_ns: NDArray[np.int64], size_bytes: NDArray[np.float64]) -> None:
        self.owners = owners
        """The owners in the order of `events.OWNERS`; `unaccounted` is the last one if the total is known."""
        self.times_ns = times_ns
        self.bytes = size_bytes
        self.apart_ns: NDArray[np.float64] = np.full(len(times_ns), np.nan)
        """How far apart the times are during which a moment's samples hold; NaN if nobody read the total."""
        self.is_consistent: NDArray[np.bool_] = np.full(len(times_ns), False)
        """Whether all samples of a moment hold there."""
        self.cost_ns: NDArray[np.float64] = np.full(len(times_ns), np.nan)
        """How long the process that looked took for it."""
        self.held_bytes: list[dict[str, int]] = [{} for _ in times_ns]
        """What a GPU's driver said of each process, by pid; empty where nobody knows."""
        self.is_of_gpu = False
        """Whether a driver read the total; else the kernel did, and the host's memory is the device's."""

    @property
    def has_total(self) -> bool:
        """Whether somebody read what the kernel counts."""
        return UNACCOUNTED in self.owners

    @property
    def used(self) -> NDArray[np.float64]:
        """The bytes of all owners without `free`; the total, if it is known."""
        counted = [index for index, owner in enumerate(self.owners) if owner != FREE]
        return np.asarray(self.bytes[:, counted].sum(axis=1))

    def row(self, owner: str) -> NDArray[np.float64]:
        """One owner's bytes; zeros for one that is not here."""
        return self.bytes[:, self.owners.index(owner)] if owner in self.owners else np.zeros(len(self.times_ns))

    def at(self, index: int) -> dict[str, int]:
        """Bytes by owner at a moment."""
        return dict(zip(self.owners, self.bytes[index].astype(np.int64).tolist(), strict=True))


@once
def ledgers(seen: Observations) -> dict[Lane, Ledger]:
    """Return one ledger per device, made of the looks of its processes, or of their counters if there are no looks."""
    members: dict[Lane, list[Seen]] = {}
    for process in seen.processes:
        if process.owners or process.looks:  # a server sees its engine's card, and holds nothing there
            members.setdefault(process.lane, []).append(process)
    return {
        lane: ledger_of_looks(processes) or counter_ledger(processes)
        for lane, processes in members.items()
        if any(process.owners for process in processes)
    }


# ---- by counters ------------------------------------------------------------------------------------------------


def counter_ledger(processes: list[Seen]) -> Ledger:
    """Return a ledger with a moment at each sample; an owner holds what it last said, until its process ends."""
    series = [
        (owner, _until_the_end(samples, process)) for process in processes for owner, samples in process.owners.items()
    ]
    owners = sorted({owner for owner, _ in series}, key=OWNERS.index)
    times_ns = np.unique(np.concatenate([np.array(samples.times_ns, np.int64) for _, samples in series]))
    size_bytes = np.zeros((len(times_ns), len(owners)))
    for owner, samples in series:
        size_bytes[:, owners.index(owner)] += values_at(samples, times_ns)
    return Ledger(owners, times_ns, size_bytes)


class MostHeld(NamedTuple):
    """The most that an owner held at once."""

    at_ns: int
    bytes: int


def most_held(processes: list[Seen]) -> dict[str, MostHeld]:
    """Return the most that each owner held by the counters, at the first moment when it did."""
    series: dict[str, list[Samples]] = {}
    for process in processes:
        for owner, samples in process.owners.items():
            series.setdefault(owner, []).append(_until_the_end(samples, process))
    firsts = [samples.times_ns[0] for of_owner in series.values() for samples in of_owner if samples.times_ns]
    return {owner: _most_held(series[owner], min(firsts)) for owner in sorted(series, key=OWNERS.index)}


def _most_held(series: list[Samples], first_ns: int) -> MostHeld:
    """Return the most of one owner; before it said anything it held nothing."""
    times_ns = np.concatenate([np.array([first_ns]), *(np.array(one.times_ns, np.int64) for one in series)])
    if len(series) > 1:
        times_ns.sort()
    size_bytes = np.zeros(len(times_ns))
    for samples in series:
        size_bytes += values_at(samples, times_ns)
    most = int(np.argmax(size_bytes))
    return MostHeld(int(times_ns[most]), int(size_bytes[most]))


def _until_the_end(samples: Samples, process: Seen) -> Samples:
    """Remove the bytes of a process when it ends."""
    if process.process.is_alive:
        return samples
    ended = Samples()
    ended.times_ns = samples.times_ns[:]
    ended.values = samples.values[:]
    ended.add(process.last_ns + 1, 0.0)
    return ended


# ---- by looks ---------------------------------------------------------------------------------------------------


class _Process:
    """What one process said of itself, look by look."""

    def __init__(self, seen: Seen, own_looks: list[Span], owners: list[str]) -> None:
        self.last_ns = seen.last_ns
        self.looks = own_looks
        ends_ns = np.array([end_ns_of(look) for look in self.looks], np.int64)
        self.rows = np.zeros((len(self.looks), len(owners)))
        for owner, samples in seen.owners.items():
            self.rows[:, owners.index(owner)] = values_at(samples, ends_ns)

    def has_said(self, at_ns: int) -> bool:
        """Return whether the process was there and had measured itself; one with rows and no look never did."""
        return bool(self.looks) and end_ns_of(self.looks[0]) <= at_ns <= self.last_ns


class _Reading:
    """A look that has read a total."""

    def __init__(self, look: Span, writer: str) -> None:
        self.look = look
        self.writer = writer
        """The pid of its process."""
        self.end_ns = end_ns_of(look)
        self.totals = totals_of(look)
        self.is_of_gpu = DRIVER_RESERVED in self.totals
        self.held_bytes: dict[str, int] = by_name(look, "held_bytes")

    def rows_of_all(self, pids: Set[str]) -> dict[str, float]:
        """Return the rows that the totals tell of themselves; processes (`pids`) without a sample fall to the last one
        of each.

        On a GPU that is so only if its driver says what any of them holds: else nobody knows their contexts.
        """
        if not self.is_of_gpu:
            return {INTERPRETER: 0.0}
        reserved_bytes, free_bytes = self.totals[DRIVER_RESERVED], float(self.look.args.get("free_bytes", 0))
        contexts = {} if self.held_bytes.keys().isdisjoint(pids) else {CONTEXT: 0.0}
        return {DRIVER_RESERVED: reserved_bytes, FREE: free_bytes, **contexts}

    def processes(self, known: dict[str, _Process]) -> dict[str, float]:
        """Return the processes of its device with what each holds; where the driver does not say, all that we know."""
        if not self.is_of_gpu:
            return self.totals
        if self.held_bytes:
            return {pid: float(size) for pid, size in self.held_bytes.items()}
        # Whose processor time was read is a list of an earlier reading, to which another may have come since.
        there = dict.fromkeys(pid for pid, process in known.items() if process.has_said(self.end_ns))
        return dict.fromkeys([*by_name(self.look, "cpu_ns"), *there], np.nan)


def ledger_of_looks(processes: list[Seen]) -> Ledger | None:
    """Return a ledger with a moment for each look of a process of the device; None if nobody read a total."""
    looks_of = [(seen, looks(seen)) for seen in processes]
    readings = [_Reading(look, str(seen.process.pid)) for seen, own in looks_of for look in own if totals_of(look)]
    if not readings:
        return None
    pids = {str(seen.process.pid) for seen in processes if seen.owners}
    readings.sort(key=lambda reading: reading.end_ns)
    of_all = [reading.rows_of_all(pids) for reading in readings]
    named = sorted({owner for process in processes for owner in process.owners}.union(*of_all), key=OWNERS.index)
    known = {str(seen.process.pid): _Process(seen, own, named) for seen, own in looks_of if seen.owners}
    samples = {pid: process.looks for pid, process in known.items()}
    is_stamped = all(map(are_stamped, samples.values()))
    pairs = [(reading.look, reading.writer) for reading in readings]
    rule = SameMoment(samples, pairs) if is_stamped else Unstamped(samples, [look for look, _ in pairs])
    rows, apart_ns = _moments(readings, of_all, known, named, rule)
    totals = np.array([sum(reading.totals.values()) for reading in readings], np.float64)
    counted = [index for index, owner in enumerate(named) if owner != FREE]
    unaccounted = totals - rows[:, counted].sum(axis=1)
    ledger = Ledger(
        [*named, UNACCOUNTED],
        np.array([reading.end_ns for reading in readings], np.int64),
        np.column_stack([rows, unaccounted]),
    )
    ledger.apart_ns = apart_ns
    ledger.cost_ns = np.array([reading.end_ns - reading.look.start_ns for reading in readings], np.float64)
    ledger.held_bytes = [reading.held_bytes for reading in readings]
    ledger.is_consistent = ledger.apart_ns <= CONSISTENT_NS
    ledger.is_of_gpu = all(reading.is_of_gpu for reading in readings)
    if ledger.is_of_gpu and not is_stamped:
        ledger.is_consistent = consistent(ledger.apart_ns, unaccounted)
    return ledger


def _moments(
    readings: list[_Reading],
    of_all: list[dict[str, float]],
    known: dict[str, _Process],
    owners: list[str],
    rule: SameMoment | Unstamped,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the rows of all processes of each look's device, and how far apart their samples are.

    Args:
        readings: Looks with totals, in order.
        of_all: The rows that the totals of each tell of themselves.
        known: The processes, by pid.
        owners: The owners of the rows.
        rule: Says which samples belong to a look.
    """
    place_of = {owner: place for place, owner in enumerate(owners)}
    apart_ns = np.empty(len(readings))
    cells: list[tuple[int, int, float]] = []
    samples: dict[str, list[tuple[int, int]]] = {pid: [] for pid in known}
    for moment, (reading, of_totals) in enumerate(zip(readings, of_all, strict=True)):
        cells += [(moment, place_of[owner], size_bytes) for owner, size_bytes in of_totals.items()]
        there = reading.processes(known)
        taken = rule.taken(reading.look, reading.writer, [pid for pid in there if pid in known])
        apart_ns[moment] = taken.apart_ns
        for pid, held_bytes in there.items():
            index = taken.samples.get(pid)
            if index is not None:
                samples[pid].append((moment, index))
            elif reading.is_of_gpu:
                if pid in known and pid in reading.held_bytes:  # what one holds that is not traced has no owner
                    cells.append((moment, place_of[CONTEXT], held_bytes))
            else:
                cells.append((moment, place_of[INTERPRETER], held_bytes))
    rows = np.zeros((len(readings), len(owners)))
    for moment, place, size_bytes in cells:
        rows[moment, place] += size_bytes
    for pid, pairs in samples.items():
        if pairs:
            moments, indices = np.array(pairs).T
            rows[moments] += known[pid].rows[indices]
    return rows, apart_ns
