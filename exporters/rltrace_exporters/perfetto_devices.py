"""The memory of each device as one group of counters: every owner's bytes over all processes, and the total.

A process's own counters are beside its threads; here the worker's and the engine's are one ledger. 16 bytes a sample
are kept until the trace ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rltrace.analysis.lanes import Lane, lanes, order
from rltrace.events import OWNERS, owner_of_counter
from rltrace.recording import Process

USED = "used_bytes"
"""The kernel's total of a device: not a sum, whoever read it last is right."""


class Total(NamedTuple):
    """What a device's owner has, from a moment on."""

    name: str
    ts_ns: int
    value: float


class _Samples:
    """Of one counter in one process."""

    def __init__(self) -> None:
        self.times_ns = array("q")
        self.values = array("d")


class DeviceCounters:
    """Samples of what processes own, by the device that they own it on."""

    def __init__(self, processes: Iterable[Process]) -> None:
        self._lanes = lanes(list(processes))
        self._samples: dict[Lane, dict[tuple[str, str], _Samples]] = {}

    def add(self, process: Process, name: str, ts_ns: int, value: float) -> None:
        """Keep a sample, if it is of a device's memory.

        Args:
            process: Who wrote it.
            name: Of the counter.
            ts_ns: In the trace's time.
            value: In bytes.
        """
        lane = self._lanes[process.key]
        if lane.device is None or not (name == USED or owner_of_counter(name)):
            return
        kept = self._samples.setdefault(lane, {}).setdefault((name, process.key), _Samples())
        kept.times_ns.append(ts_ns)
        kept.values.append(value)

    def end(self, process: Process, ts_ns: int) -> None:
        """With the process, its bytes go."""
        for (_, key), kept in self._samples.get(self._lanes[process.key], {}).items():
            if key == process.key:
                kept.times_ns.append(ts_ns)
                kept.values.append(0.0)

    def devices(self) -> Iterator[tuple[str, list[Total]]]:
        """Name of each device's group, and its counters in the order of the ledger, each in time."""
        for lane in sorted(self._samples, key=order):
            of_lane = self._samples[lane]
            names = sorted({name for name, _ in of_lane}, key=_in_order)
            totals = [
                total
                for name in names
                for total in _sums(name, [kept for (other, _), kept in of_lane.items() if other == name])
            ]
            yield f"Memory · {lane.name} · {lane.device}", totals


def _in_order(name: str) -> int:
    owner = owner_of_counter(name)
    return OWNERS.index(owner) if owner else -1


def _sums(name: str, processes: list[_Samples]) -> Iterator[Total]:
    """What all processes hold together, wherever one of them says something else than before."""
    held = [0.0] * len(processes)
    last: float | None = None
    events = sorted(
        (ts_ns, index, value)
        for index, kept in enumerate(processes)
        for ts_ns, value in zip(kept.times_ns, kept.values, strict=True)
    )
    for ts_ns, index, value in events:
        held[index] = value
        total = value if name == USED else sum(held)
        if total != last:
            last = total
            yield Total(name, ts_ns, total)
