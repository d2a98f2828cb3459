"""The memory of each device as one group of counters: the ledger over all processes, and one line of its total.

A process's own counters are beside its threads; here the worker's and the engine's are one ledger. What is counted at
phase boundaries (such as `unaccounted`) comes from `analysis.ledger`, as in `rltrace summary`. A phase boundary needs
what each process said before and after it, so everything is kept until the trace ends: 16 bytes per sample, and some
270 per boundary, packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.lanes import Lane, lanes, order
from rltrace.analysis.ledger import FREE, UNACCOUNTED, ledger_of_looks
from rltrace.analysis.looks import DRIVER_RESERVED
from rltrace.analysis.seen.looked import Looked
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.samples import Samples
from rltrace.analysis.used_memory import SAMPLED_RESERVED, SAMPLED_USED, sampled_points
from rltrace.events import OWNERS, SAMPLER, USED, Span, owner_of_counter, subjects
from rltrace.read.gate import MOST_BYTES
from rltrace.read.recording import Process

OWNED = "owned_bytes"
"""The total as the owners count it: without `free` and without `unaccounted`."""

TOTALS = (USED, OWNED)
"""In the order of their rows, above the owners'."""

AT_LOOKS = (DRIVER_RESERVED, UNACCOUNTED, FREE)
"""Rows of the ledger that no process samples."""

GROUP = " Memory"
"""How the names of devices' groups begin. The UI sorts groups and threads by name, and puts processes after the
fiftieth: with the space, the groups are above the processes however many threads there are."""


class Total(NamedTuple):
    """What a device's owner has, from a moment on."""

    name: str
    ts_ns: int
    value: float
    source: str | None = None
    """Who read it, where several do."""


class _Kept:
    """What is kept of one process, in the trace's time."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.owners: dict[str, Samples] = {}
        self.used = Samples()
        self.looks = Looked()
        self.end_ns: int | None = None

    def seen(self, lane: Lane) -> Seen:
        """Return it as the ledger needs it."""
        seen = Seen(self.process, lane)
        seen.owners.update(self.owners)
        seen.looks = self.looks
        seen.finish()
        known_ns = (*self.looks.ends[-1:].tolist(), *(samples.times_ns[-1] for samples in self.owners.values()))
        seen.last_ns = max(known_ns, default=0) if self.end_ns is None else self.end_ns
        return seen


class DeviceCounters:
    """What processes own, by the device on which they own it."""

    def __init__(self, processes: Iterable[Process]) -> None:
        self._lanes = lanes(list(processes))
        self._kept: dict[Lane, dict[str, _Kept]] = {}
        self._sampled: dict[str, Samples] = {}
        """The samplers', by the counter's name with the GPU's uuid."""

    def add(self, process: Process, name: str, times_ns: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Keep samples of one counter, if it is of a device's memory.

        Args:
            process: The process that wrote them.
            name: Name of the counter.
            times_ns: In the trace's time.
            values: In bytes.
        """
        known = (values >= -MOST_BYTES) & (values <= MOST_BYTES)  # of the others nobody knows how many bytes
        samples = self._samples_of(process, name) if known.any() else None
        if samples is not None:
            samples.extend(times_ns[known], values[known])

    def _samples_of(self, process: Process, name: str) -> Samples | None:
        """Return where a counter's samples are kept; None if they are not of a device's memory."""
        if process.role == SAMPLER:
            is_total = subjects(name)[0] in (SAMPLED_USED, SAMPLED_RESERVED)
            return self._sampled.setdefault(name, Samples()) if is_total else None
        owner = owner_of_counter(name)
        if not (self.has_total(process, name) or (owner and self._lanes[process.key].device)):
            return None
        kept = self._of(process)
        return kept.owners.setdefault(owner, Samples()) if owner else kept.used

    def has_total(self, process: Process, name: str) -> bool:
        """Whether a process's counter is the total of its device, which has its line here and none beside a process."""
        return name == USED and self._lanes[process.key].device is not None

    def add_look(self, process: Process, look: Span, offset_ns: int) -> None:
        """Keep what a process read at a phase boundary.

        Args:
            process: The process that wrote it.
            look: Its span; an open one says nothing yet.
            offset_ns: What to add to its times to get the trace's.
        """
        if look.end_ns is None or self._lanes[process.key].device is None:
            return
        kept = self._of(process)
        kept.looks.add(look.start_ns + offset_ns, look.end_ns + offset_ns, look.args)

    def end(self, process: Process, ts_ns: int) -> None:
        """Let a process's bytes end with the process."""
        kept = self._kept.get(self._lanes[process.key], {}).get(process.key)
        if kept is not None:
            kept.end_ns = ts_ns

    def devices(self) -> Iterator[tuple[str, list[Total]]]:
        """Yield the name of each device's group, and its counters, totals first and then the ledger, each in order of
        time."""
        for lane in sorted(self._kept, key=order):
            processes = list(self._kept[lane].values())
            if any(kept.owners or kept.used.times_ns for kept in processes):
                yield f"{GROUP} · {lane.name} · {lane.device}", list(self._totals(lane, processes))

    def _of(self, process: Process) -> _Kept:
        of_lane = self._kept.setdefault(self._lanes[process.key], {})
        return of_lane.setdefault(process.key, _Kept(process))

    def _totals(self, lane: Lane, processes: list[_Kept]) -> Iterator[Total]:
        at_looks = _at_looks(lane, processes)
        yield from _changes(USED, sorted(self._used(lane, processes)))
        yield from at_looks.get(OWNED) or _sums(OWNED, [held for kept in processes for held in _held(kept)])
        for owner in OWNERS:
            name = f"{owner}_bytes"
            of_owner = [held for kept in processes for held in _held(kept, owner)]
            yield from _sums(name, of_owner) if of_owner else at_looks.get(name, [])

    def _used(self, lane: Lane, processes: list[_Kept]) -> Iterator[tuple[int, float, str]]:
        for kept in processes:
            for ts_ns, value in _pairs(kept.used):
                yield ts_ns, value, kept.process.name
        points = sampled_points(self._sampled, str(lane.device))
        for ts_ns, value in zip(points.times_ns.tolist(), points.values.tolist(), strict=True):
            yield ts_ns, value, SAMPLER


_Pairs = list[tuple[int, float]]
"""Times and values."""


def _pairs(samples: Samples) -> _Pairs:
    return list(zip(samples.times_ns, samples.values, strict=True))


def _held(kept: _Kept, owner: str | None = None) -> Iterator[_Pairs]:
    """Return what a process holds for one owner, or for each of them, until it ends."""
    for name, samples in kept.owners.items():
        if owner in (None, name):
            yield _pairs(samples) + ([] if kept.end_ns is None else [(kept.end_ns, 0.0)])


def _at_looks(lane: Lane, processes: list[_Kept]) -> dict[str, list[Total]]:
    """Return what only phase boundaries tell, by counter; each keeps its last value, because nobody looked after the
    last one."""
    seen = [kept.seen(lane) for kept in processes if kept.owners or kept.looks]
    ledger = ledger_of_looks(seen) if any(process.owners for process in seen) else None
    if ledger is None:
        return {}
    rows = {f"{owner}_bytes": ledger.row(owner) for owner in AT_LOOKS if owner in ledger.owners}
    rows[OWNED] = ledger.used - ledger.row(UNACCOUNTED)
    times_ns = ledger.times_ns.tolist()
    return {name: list(_changes(name, zip(times_ns, row.tolist(), strict=True))) for name, row in rows.items()}


def _sums(name: str, series: list[_Pairs]) -> Iterator[Total]:
    """Return the sums, wherever one of the series changes."""
    held = [0.0] * len(series)
    events = sorted((ts_ns, index, value) for index, pairs in enumerate(series) for ts_ns, value in pairs)

    def sums() -> Iterator[tuple[int, float]]:
        for ts_ns, index, value in events:
            held[index] = value
            yield ts_ns, sum(held)

    return _changes(name, sums())


def _changes(name: str, points: Iterable[tuple[int, float] | tuple[int, float, str]]) -> Iterator[Total]:
    """The points that differ from the one before."""
    last: float | None = None
    for ts_ns, value, *source in points:
        if value != last:
            last = value
            yield Total(name, ts_ns, value, *source)
