"""The ledger of a device: who held its bytes at each moment, over all its processes, beside the kernel's total.

Rows come from the processes, totals from the kernel (`memory.edge` spans: one process reads them for all processes of
its device). The difference is a row of its own, `unaccounted`, and nothing else is computed that way.

An edge is seen by one process. What another one says then is what it said last, or next: it is as old as the time that
has passed, or as the CPU time that it has used since, whichever is less, for a process that did not run did not change.
A process that repeats what it knows of itself says how old that is, in the same measure.
On a GPU a process that says what it holds itself sees what the others hold together: while that stays the same, what
they said is not older than it was; and where the driver says what each of them holds, not old at all while that is so.
Where its last word is old, what a process says next is not, if the card's total is by then what it was at the edge:
then nothing has come to the card or gone, whatever has moved within an allocator.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import Observations, Samples, Seen, values_at
from rltrace.events import OWNERS, Span

FREE, UNACCOUNTED, INTERPRETER = "free", "unaccounted", "interpreter"
FORMER_NAMES = {"unexplained": UNACCOUNTED}
"""What older Recordings call a row whose total nobody could read."""
CONTEXT, DRIVER_RESERVED = "cuda.context", "driver.reserved"

CONSISTENT_NS = 5_000_000
"""An edge whose samples lie further apart is not consistent, unless they are seen to hold still."""

GRANULE_BYTES = 2 << 20
"""In which a driver gives memory away."""

ALLOWED_SHARE = 0.01
ALLOWED_CPU_BYTES = 24 << 20
ALLOWED_GPU_BYTES = 256 << 20
"""How much of a consistent edge may have no owner: a share of the used bytes, or this much, whichever is more."""


class Ledger:
    """Moments of one device: shape (M,) moments, (M, O) by owner."""

    def __init__(self, owners: list[str], times_ns: NDArray[np.int64], size_bytes: NDArray[np.float64]) -> None:
        self.owners = owners
        """In the order of `events.OWNERS`; `unaccounted` is last where the total is known."""
        self.times_ns = times_ns
        self.bytes = size_bytes
        self.apart_ns: NDArray[np.float64] = np.full(len(times_ns), np.nan)
        """How old the oldest sample of a moment is; NaN where nobody read the total."""
        self.is_consistent: NDArray[np.bool_] = np.full(len(times_ns), False)
        """Whether all samples of a moment hold there."""
        self.cost_ns: NDArray[np.float64] = np.full(len(times_ns), np.nan)
        """How long the process that read it took for it."""
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
        """Of all owners, `free` apart; where the total is known, that."""
        counted = [index for index, owner in enumerate(self.owners) if owner != FREE]
        return np.asarray(self.bytes[:, counted].sum(axis=1))

    def row(self, owner: str) -> NDArray[np.float64]:
        """One owner's bytes; zeros for one that is not here."""
        return self.bytes[:, self.owners.index(owner)] if owner in self.owners else np.zeros(len(self.times_ns))

    def at(self, index: int) -> dict[str, int]:
        """Bytes by owner at a moment."""
        return {owner: int(size) for owner, size in zip(self.owners, self.bytes[index], strict=True)}


def ledgers(seen: Observations) -> dict[Lane, Ledger]:
    """One a device: by the edges where its processes recorded any, else by their counters alone."""
    members: dict[Lane, list[Seen]] = {}
    for process in seen.processes:
        if process.owners or process.edges:  # a server sees its engine's card, and holds nothing there
            members.setdefault(process.lane, []).append(process)
    return {
        lane: edge_ledger(processes) or counter_ledger(processes)
        for lane, processes in members.items()
        if any(process.owners for process in processes)
    }


# ---- by counters ------------------------------------------------------------------------------------------------


def counter_ledger(processes: list[Seen]) -> Ledger:
    """A moment at every sample; an owner holds what it last said, until its process ends."""
    series = [
        (owner, _until_the_end(samples, process)) for process in processes for owner, samples in process.owners.items()
    ]
    owners = sorted({owner for owner, _ in series}, key=OWNERS.index)
    times_ns = np.unique(np.concatenate([np.array(samples.times_ns, np.int64) for _, samples in series]))
    size_bytes = np.zeros((len(times_ns), len(owners)))
    for owner, samples in series:
        size_bytes[:, owners.index(owner)] += values_at(samples, times_ns)
    return Ledger(owners, times_ns, size_bytes)


def _until_the_end(samples: Samples, process: Seen) -> Samples:
    """With the process, its bytes go."""
    if process.process.is_alive:
        return samples
    ended = Samples()
    ended.times_ns = samples.times_ns[:]
    ended.values = samples.values[:]
    ended.add(process.last_ns + 1, 0.0)
    return ended


# ---- by edges ---------------------------------------------------------------------------------------------------


class _Process:
    """What one process said of itself, edge by edge."""

    def __init__(self, seen: Seen, owners: list[str]) -> None:
        self.pid = str(seen.process.pid)
        self.last_ns = seen.last_ns
        self.edges = looks(seen)
        self.ends_ns = np.array([end_ns_of(edge) for edge in self.edges], np.int64)
        self.cpu_ns = np.array([_of(edge, "cpu_ns", self.pid) for edge in self.edges])
        self.said_age_ns = np.array([float(edge.args.get("age_ns") or 0) for edge in self.edges])
        self.held_bytes = np.array([_of(edge, "held_bytes", self.pid) for edge in self.edges])
        self.used_bytes = np.array([_used_bytes(edge) for edge in self.edges])
        self.rows = np.zeros((len(self.edges), len(owners)))
        for owner, samples in seen.owners.items():
            self.rows[:, owners.index(owner)] = values_at(samples, self.ends_ns)

    def has_said(self, at_ns: int) -> bool:
        """Whether it was there and had measured itself; one with rows and without an edge never did."""
        return bool(self.edges) and end_ns_of(self.edges[0]) <= at_ns <= self.last_ns

    def nearest(self, edge: Span) -> tuple[int | None, float]:
        """Which of its own samples tells most about an edge, and how old that is in nanoseconds.

        One before or behind it if that is new. Else the next one, if the card held as much by then; else its last word,
        for a process samples before it moves memory.
        """
        behind = int(np.searchsorted(self.ends_ns, end_ns_of(edge), side="right"))
        near = [index for index in (behind - 1, behind) if 0 <= index < len(self.edges)]
        if behind == 0:  # before its first sample a process is nothing but its interpreter, or its context
            return None, 0.0
        age_ns, _, index = min(
            (self._age_ns(index, edge), abs(self.ends_ns[index] - end_ns_of(edge)), index) for index in near
        )
        if age_ns <= CONSISTENT_NS:
            return index, age_ns
        if self.used_bytes[near[-1]] == _used_bytes(edge) and near[-1] == behind:
            return behind, 0.0
        return near[0], self._age_ns(near[0], edge)

    def _age_ns(self, index: int, edge: Span) -> float:
        if self.held_bytes[index] == _of(edge, "held_bytes", self.pid):
            return 0.0
        passed_ns = abs(int(self.ends_ns[index]) - end_ns_of(edge))
        if self.ends_ns[index] > end_ns_of(edge):  # the first thing that it did then may have been to move memory
            return float(self.said_age_ns[index]) + passed_ns
        used_ns = abs(float(self.cpu_ns[index]) - _of(edge, "cpu_ns", self.pid))
        return float(self.said_age_ns[index]) + (min(passed_ns, used_ns) if np.isfinite(used_ns) else passed_ns)


def edge_ledger(processes: list[Seen]) -> Ledger | None:
    """A moment at every edge of any process of the device; None if nobody read a total."""
    edges = [
        (edge, writer)
        for writer, seen in enumerate(processes)
        for edge in seen.edges
        if edge.end_ns is not None and totals_of(edge)
    ]
    pids = {str(seen.process.pid) for seen in processes if seen.owners}
    of_all = {owner for edge, _ in edges for owner in _rows_of_all(edge, pids)}
    named = sorted({owner for process in processes for owner in process.owners} | of_all, key=OWNERS.index)
    known = {process.pid: process for process in (_Process(seen, named) for seen in processes if seen.owners)}
    if not edges:
        return None
    edges.sort(key=lambda edge: end_ns_of(edge[0]))
    last: dict[tuple[int, str], _Said] = {}
    moments = [_moment(edge, writer, known, named, last) for edge, writer in edges]
    totals = np.array([sum(totals_of(edge).values()) for edge, _ in edges], np.float64)
    rows = np.array([row for row, _ in moments])
    counted = [index for index, owner in enumerate(named) if owner != FREE]
    unaccounted = totals - rows[:, counted].sum(axis=1)
    ledger = Ledger(
        [*named, UNACCOUNTED],
        np.array([end_ns_of(edge) for edge, _ in edges], np.int64),
        np.column_stack([rows, unaccounted]),
    )
    ledger.apart_ns = np.array([apart_ns for _, apart_ns in moments])
    ledger.cost_ns = np.array([end_ns_of(edge) - edge.start_ns for edge, _ in edges], np.float64)
    ledger.held_bytes = [_held_bytes(edge) for edge, _ in edges]
    ledger.is_consistent = ledger.apart_ns <= CONSISTENT_NS
    ledger.is_of_gpu = all(_is_of_gpu(edge) for edge, _ in edges)
    if ledger.is_of_gpu:
        ledger.is_consistent = consistent(ledger.apart_ns, unaccounted)
    return ledger


def consistent(apart_ns: NDArray[np.float64], unaccounted_bytes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """At which moments all samples hold: they are new, or what nobody explains is what it was at such a moment.

    A process that has done something since its sample, as an idle engine does that looks for requests, may have moved
    memory meanwhile. If it had, without saying so, the total less all rows would hardly be, to a granule, what it is at
    any moment of which all is known, of which a run has a few levels; or what it was at the last that holds, for it may
    grow by a granule now and then. That is so of a GPU, whose driver counts whole granules; a host's figures are never
    the same twice. What is taken for consistent is judged: a coincidence can accuse the ledger and not acquit it.

    Args:
        apart_ns: Age of the oldest sample, (M,) moments of one device in their order.
        unaccounted_bytes: The total less all rows, (M,).
    """
    is_new = apart_ns <= CONSISTENT_NS
    found = is_new | (_distance(unaccounted_bytes, np.sort(unaccounted_bytes[is_new])) <= GRANULE_BYTES)
    before_bytes = np.nan
    for moment, size_bytes in enumerate(unaccounted_bytes):
        found[moment] |= abs(size_bytes - before_bytes) <= GRANULE_BYTES
        if found[moment]:
            before_bytes = size_bytes
    return found


def _distance(values: NDArray[np.float64], levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each value to the nearest of some that are sorted; infinite where there is none."""
    around = np.concatenate([[-np.inf], levels, [np.inf]])
    above = np.searchsorted(levels, values) + 1
    return np.asarray(np.minimum(around[above] - values, values - around[above - 1]))


class _Said(NamedTuple):
    """What a process said last, as an edge of another one takes it."""

    sample: int
    age_ns: float
    others_bytes: object
    """What all others held together at that edge."""
    held_bytes: float
    """What it held itself; NaN where nobody asked."""


def _still_said(now: _Said, before: _Said | None) -> _Said:
    """What an edge takes of a process: its nearest sample, or what the edge before took if that holds and is newer."""
    if before is None or before.age_ns >= now.age_ns:
        return now
    holds = before.held_bytes == now.held_bytes or before.others_bytes == now.others_bytes is not None
    return now._replace(sample=before.sample, age_ns=before.age_ns) if holds else now


def _moment(
    edge: Span, writer: int, known: dict[str, _Process], owners: list[str], last: dict[tuple[int, str], _Said]
) -> tuple[NDArray[np.float64], float]:
    """Rows of all processes of an edge's device, and the age of the oldest.

    Args:
        edge: With totals.
        writer: Which process's it is.
        known: The processes, by pid.
        owners: Of the rows.
        last: What each writer's last edge took of each process; updated.
    """
    rows = np.zeros(len(owners))
    for owner, size_bytes in _rows_of_all(edge, known).items():
        rows[owners.index(owner)] += size_bytes
    apart_ns = 0.0
    for pid, held_bytes in _processes(edge, known).items():
        process = known.get(pid)
        index, age_ns = (None, 0.0) if process is None else process.nearest(edge)
        if index is not None:
            said = _Said(index, age_ns, edge.args.get("others_bytes"), _of(edge, "held_bytes", pid))
            said = last[writer, pid] = _still_said(said, last.get((writer, pid)))
            index, age_ns = said.sample, said.age_ns
        if process is not None and index is not None:
            rows += process.rows[index]
        elif _is_of_gpu(edge):
            if process is not None and pid in _held_bytes(edge):  # what one holds that is not traced has no owner
                rows[owners.index(CONTEXT)] += held_bytes
        else:
            rows[owners.index(INTERPRETER)] += held_bytes
        apart_ns = max(apart_ns, age_ns)
    return rows, apart_ns


def _is_of_gpu(edge: Span) -> bool:
    return DRIVER_RESERVED in totals_of(edge)


def _rows_of_all(edge: Span, pids: Collection[str]) -> dict[str, float]:
    """Rows that the totals tell of themselves; processes (`pids`) without a sample fall to the last one of each.

    On a GPU that is so only if its driver says what any of them holds: else nobody knows their contexts.
    """
    if not _is_of_gpu(edge):
        return {INTERPRETER: 0.0}
    reserved_bytes, free_bytes = totals_of(edge)[DRIVER_RESERVED], float(edge.args.get("free_bytes", 0))
    contexts = {} if _held_bytes(edge).keys().isdisjoint(pids) else {CONTEXT: 0.0}
    return {DRIVER_RESERVED: reserved_bytes, FREE: free_bytes, **contexts}


def _held_bytes(edge: Span) -> dict[str, int]:
    return _by_name(edge, "held_bytes")


def _processes(edge: Span, known: dict[str, _Process]) -> dict[str, float]:
    """The processes of an edge's device with what each holds; where the driver does not say, all that we know."""
    if not _is_of_gpu(edge):
        return totals_of(edge)
    if held := _held_bytes(edge):
        return {pid: float(size) for pid, size in held.items()}
    # Whose processor time was read is a list of an earlier edge, to which another may have come since.
    there = dict.fromkeys(pid for pid, process in known.items() if process.has_said(end_ns_of(edge)))
    return dict.fromkeys([*_by_name(edge, "cpu_ns"), *there], np.nan)


def totals_of(edge: Span) -> dict[str, float]:
    """Return the totals that were read then; none where nobody read any."""
    return _by_name(edge, "totals")


def _used_bytes(edge: Span) -> float:
    """What a GPU's driver counted at an edge; NaN where nobody asked, or of a host, of which a total tells little."""
    return float(totals_of(edge).get("used", "nan"))


def _of(edge: Span, name: str, pid: str) -> float:
    return float(_by_name(edge, name).get(pid, "nan"))


def _by_name(edge: Span, name: str) -> dict[str, Any]:
    """An argument that is a dictionary; nothing where it is another, or not there."""
    values = edge.args.get(name)
    return values if isinstance(values, dict) else {}


def looks(seen: Seen) -> list[Span]:
    """Return the times when a process measured what it owns, in the order in which they ended."""
    return sorted((edge for edge in seen.edges if edge.end_ns is not None), key=end_ns_of)


def end_ns_of(span: Span) -> int:
    """Return when a span ended that has."""
    assert span.end_ns is not None
    return span.end_ns
