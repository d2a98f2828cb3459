"""The ledger of a device: who held its bytes at each moment, over all its processes, beside the kernel's total.

Rows come from the processes, totals from the kernel (`memory.edge` spans: one process reads them for all processes of
its device). The difference is a row of its own, `unaccounted`, and nothing else is computed that way.

One process reads the total in one look. `same_moment.py` says which samples of the other processes belong to the same
moment; `unstamped.py` does so for Recordings that were made before samples were stamped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import EARLIEST_NS
from rltrace.analysis.lanes import Lane
from rltrace.analysis.looks import CONSISTENT_NS, DRIVER_RESERVED, ByName, Looks, Values, looks, together
from rltrace.analysis.observations import Observations, once
from rltrace.analysis.same_moment import NONE, Readings, Taken, are_stamped, same_moment
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.samples import Points, Samples, points, values_at
from rltrace.analysis.unstamped import consistent, unstamped
from rltrace.events import OWNERS

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
        self.held_bytes: ByName = ByName.without_any(len(times_ns))
        """What a GPU's driver said of each process, by pid; nothing where nobody knows."""
        self.is_of_gpu = False
        """Whether a driver read the total; else the kernel did, and the host's memory is the device's."""

    @property
    def has_total(self) -> bool:
        """Whether somebody read what the kernel counts."""
        return UNACCOUNTED in self.owners

    @property
    def used(self) -> NDArray[np.float64]:
        """The bytes of all owners without `free`; the total, if it is known."""
        return _without_free(self.bytes.T, self.owners)

    def row(self, owner: str) -> NDArray[np.float64]:
        """One owner's bytes; zeros for one that is not here."""
        return self.bytes[:, self.owners.index(owner)] if owner in self.owners else np.zeros(len(self.times_ns))

    def at(self, index: int) -> dict[str, int]:
        """Bytes by owner at a moment."""
        return dict(zip(self.owners, self.bytes[index].astype(np.int64).tolist(), strict=True))


def _without_free(size_bytes: NDArray[np.float64], owners: Sequence[str]) -> NDArray[np.float64]:
    """Return the bytes of all owners but `free` at each moment, of (owners, moments)."""
    return sum(
        (row for row, owner in zip(size_bytes, owners, strict=True) if owner != FREE),
        start=np.zeros(size_bytes.shape[1]),
    )


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
    times_ns = np.unique(np.concatenate([held.times_ns for _, held in series]))
    size_bytes = np.zeros((len(owners), len(times_ns)))
    for owner, held in series:
        size_bytes[owners.index(owner)] += held.at(times_ns)
    return Ledger(owners, times_ns, size_bytes.T)


class MostHeld(NamedTuple):
    """The most that an owner held at once."""

    at_ns: int
    bytes: int


def most_held(processes: list[Seen]) -> dict[str, MostHeld]:
    """Return the most that each owner held by the counters, at the first moment when it did."""
    held: dict[str, list[Points]] = {}
    for process in processes:
        for owner, samples in process.owners.items():
            held.setdefault(owner, []).append(_until_the_end(samples, process))
    firsts = [one.times_ns[0] for of_owner in held.values() for one in of_owner if len(one.times_ns)]
    return {owner: _most_held(held[owner], min(firsts)) for owner in sorted(held, key=OWNERS.index)}


def _most_held(parts: list[Points], first_ns: int) -> MostHeld:
    """Return the most of one owner, by its parts in each process; before it said anything it held nothing."""
    held = parts[0] if len(parts) == 1 else _added_up(parts)
    is_last = np.append(held.times_ns[1:] != held.times_ns[:-1], True)[: len(held.times_ns)]  # of those at one time
    times_ns, size_bytes = held.times_ns[is_last], held.values[is_last]
    if not len(times_ns) or first_ns < times_ns[0]:
        times_ns, size_bytes = np.append(first_ns, times_ns), np.append(0.0, size_bytes)
    most = int(np.argmax(size_bytes))
    return MostHeld(int(times_ns[most]), int(size_bytes[most]))


def _added_up(parts: list[Points]) -> Points:
    """Return what an owner held in all processes; bytes are whole numbers, so that their changes add up exactly."""
    times_ns = np.concatenate([part.times_ns for part in parts])
    changes = np.concatenate([np.diff(part.values, prepend=0.0) for part in parts])
    order = np.argsort(times_ns, kind="stable")
    return Points(times_ns[order], np.cumsum(changes[order]))


def _until_the_end(samples: Samples, process: Seen) -> Points:
    """Return what an owner held in a process, until that ended."""
    held = points(samples)
    if process.process.is_alive:
        return held
    return Points(np.append(held.times_ns, process.last_ns + 1), np.append(held.values, 0.0))


# ---- by looks ---------------------------------------------------------------------------------------------------


class _Process:
    """What one process said of itself, look by look."""

    def __init__(self, seen: Seen, own_looks: Looks) -> None:
        self.pid = str(seen.process.pid)
        self.last_ns = seen.last_ns
        self.looks = own_looks
        self.held_bytes = {
            owner: np.append(_at_looks(samples, own_looks.ends_ns), 0.0) for owner, samples in seen.owners.items()
        }
        """What each owner held at each look, and in the end nothing, for a look that is `NONE`."""

    def has_said(self, times_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return when the process was there and had measured itself; one with rows and no look never did."""
        if not len(self.looks.ends_ns):
            return np.zeros(len(times_ns), np.bool_)
        return np.asarray((self.looks.ends_ns[0] <= times_ns) & (times_ns <= self.last_ns))

    def is_there(self, readings: Looks) -> NDArray[np.bool_]:
        """Return which readings are of a device of which it holds something: as the totals say, else the driver; where
        that does not say, whatever we know."""
        # Whose processor time was read is a list of an earlier reading, to which another may have come since.
        known = readings.cpu_ns.says(self.pid) | self.has_said(readings.ends_ns)
        of_gpu = np.where(readings.held_bytes.says_any(), readings.held_bytes.says(self.pid), known)
        return np.where(readings.is_of_gpu, of_gpu, readings.totals.says(self.pid))


def _at_looks(samples: Samples, ends_ns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return what an owner held when each look ended; 0 before its first sample.

    Nearly always an owner is sampled once in each look, from its first one on. Then its samples and the looks go side
    by side, and nothing needs to be searched.
    """
    times_ns, silent = np.array(samples.times_ns, np.int64), len(ends_ns) - len(samples.times_ns)
    if silent >= 0:
        before_ns = np.append(EARLIEST_NS, ends_ns)[silent:-1]
        if ((before_ns < times_ns) & (times_ns <= ends_ns[silent:])).all():
            return np.concatenate([np.zeros(silent), samples.values])
    return values_at(samples, ends_ns)


def ledger_of_looks(processes: list[Seen]) -> Ledger | None:
    """Return a ledger with a moment for each look of a process of the device; None if nobody read a total."""
    looks_of = [(seen, looks(seen)) for seen in processes]
    readings = _readings(looks_of)
    if not len(readings.writers):
        return None
    known_looks = {str(seen.process.pid): (seen, own) for seen, own in looks_of if seen.owners}
    of_totals = _rows_of_totals(readings.looks, list(known_looks))
    named = sorted({owner for seen in processes for owner in seen.owners}.union(of_totals), key=OWNERS.index)
    known = {pid: _Process(seen, own) for pid, (seen, own) in known_looks.items()}
    samples = {pid: process.looks for pid, process in known.items()}
    there = {pid: process.is_there(readings.looks) for pid, process in known.items()}
    is_stamped = all(map(are_stamped, samples.values()))
    taken = (same_moment if is_stamped else unstamped)(samples, readings, there)
    rows = np.zeros((len(named), len(readings.writers)))
    for owner, size_bytes in of_totals.items():
        rows[named.index(owner)] = size_bytes
    _add_samples(rows, named, readings.looks, known, there, taken)
    unaccounted = readings.looks.totals.sums() - _without_free(rows, named)
    ledger = Ledger([*named, UNACCOUNTED], readings.looks.ends_ns, np.vstack([rows, unaccounted]).T)
    ledger.apart_ns = taken.apart_ns
    ledger.cost_ns = (readings.looks.ends_ns - readings.looks.starts_ns).astype(np.float64)
    ledger.held_bytes = readings.looks.held_bytes
    ledger.is_consistent = ledger.apart_ns <= CONSISTENT_NS
    ledger.is_of_gpu = bool(readings.looks.is_of_gpu.all())
    if ledger.is_of_gpu and not is_stamped:
        ledger.is_consistent = consistent(ledger.apart_ns, unaccounted)
    return ledger


def _readings(looks_of: Sequence[tuple[Seen, Looks]]) -> Readings:
    """Return the looks of all processes that have read a total, in order."""
    pids = list(dict.fromkeys(str(seen.process.pid) for seen, _ in looks_of))
    found = together([own for _, own in looks_of])
    places = [pids.index(str(seen.process.pid)) for seen, _ in looks_of]
    writers = np.repeat(places, [len(own.ends_ns) for _, own in looks_of])
    read = np.flatnonzero(found.totals.says_any())
    order = read[np.argsort(found.ends_ns[read], kind="stable")]
    return Readings(found.part(order), writers[order], pids)


def _rows_of_totals(readings: Looks, pids: list[str]) -> dict[str, Values]:
    """Return the rows that the totals tell of themselves; processes (`pids`) without a sample fall to the last one of
    each.

    On a GPU that is so only if its driver says what any of them holds: else nobody knows their contexts.
    """
    zeros = np.zeros(len(readings.ends_ns))
    is_of_gpu = readings.is_of_gpu
    rows = {} if is_of_gpu.all() else {INTERPRETER: zeros}
    if is_of_gpu.any():
        for owner, size_bytes in ((DRIVER_RESERVED, readings.totals.of(DRIVER_RESERVED)), (FREE, readings.free_bytes)):
            rows[owner] = np.where(is_of_gpu & ~np.isnan(size_bytes), size_bytes, 0.0)
        if any((readings.held_bytes.says(pid) & is_of_gpu).any() for pid in pids):
            rows[CONTEXT] = zeros
    return rows


def _add_samples(
    rows: NDArray[np.float64],
    owners: list[str],
    readings: Looks,
    known: dict[str, _Process],
    there: dict[str, NDArray[np.bool_]],
    taken: Taken,
) -> None:
    """Add what processes hold to the rows of each look's device.

    Args:
        rows: By owner and moment.
        owners: Of the rows.
        readings: Looks with totals, in order.
        known: The processes, by pid.
        there: When each of them holds something.
        taken: The samples that belong to each look.
    """
    is_of_gpu = readings.is_of_gpu
    for pid, process in known.items():
        samples = taken.samples[pid]
        is_silent = there[pid] & (samples == NONE)
        for owner, is_one, of_all in (
            (CONTEXT, is_of_gpu & readings.held_bytes.says(pid), readings.held_bytes),
            (INTERPRETER, ~is_of_gpu, readings.totals),
        ):
            if (alone := is_silent & is_one).any():
                rows[owners.index(owner), alone] += of_all.of(pid)[alone]
        for owner, held_bytes in process.held_bytes.items():
            rows[owners.index(owner)] += held_bytes[samples]
    if not is_of_gpu.all():  # what one holds of a GPU that is not traced has no owner
        of_others = readings.totals.without(frozenset(known)).sums()
        rows[owners.index(INTERPRETER)] += np.where(is_of_gpu, 0.0, of_others)
