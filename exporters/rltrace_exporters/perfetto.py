"""Writes a Recording as a Perfetto trace: packets as bytes, a block at a time, whatever the Recording's size.

Each span becomes two packets where it ends (the importer sorts by time): its beginning with everything known about it,
and its end. All times are nanoseconds since 1970: the run's monotonic clock, as the reader gives it, plus one constant.
A clock that nobody measured against it has a constant of its own, and its rows say so. Packets go out in compressed
blocks of whole packets, so a cut file loses its last block and nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from time import time_ns
from typing import BinaryIO

from rltrace.analysis.clocks import TimeLine
from rltrace.read.recording import Process, Recording, in_order
from rltrace_exporters import perfetto_tracks as tracks
from rltrace_exporters.perfetto_devices import DeviceCounters
from rltrace_exporters.perfetto_packets import BLOCK_BYTES, TYPE_COUNTER, TYPE_INSTANT, packet
from rltrace_exporters.perfetto_process import REALTIME, ProcessWriter
from rltrace_exporters.protobuf import data, double, integer, text

_MONOTONIC = 3


class Perfetto:
    """The format of ui.perfetto.dev and of `rltrace view`."""

    suffix = ".pftrace"

    def write(self, recording: Recording, out: BinaryIO) -> None:
        """Write every event of a Recording.

        Args:
            recording: Live, dead or complete; an open span stays open in the trace.
            out: Written from its position on, never read or rewound.
        """
        processes = in_order(recording.processes)
        clocks = Clocks(recording, processes)
        pids = tracks.pids(processes)
        trace = _Trace(out, tracks.memory_unit(processes))
        trace.preamble(recording, processes, clocks)
        trace.process_names = {process.key: process.name for process in processes}
        first = clocks.first(processes)
        devices = DeviceCounters(processes)
        for position, process in enumerate(processes):
            _write_process(trace, process, position, pids[process.key], clocks, devices, is_first=process is first)
        if any(process.is_alive for process in processes):
            _write_snapshot(trace, time_ns(), sequence=len(processes) + 3)
        _write_devices(trace, devices, sequence=len(processes) + 2)
        trace.end()


def _write_process(
    trace: _Trace,
    process: Process,
    position: int,
    pid: int,
    clocks: Clocks,
    devices: DeviceCounters,
    *,
    is_first: bool,
) -> None:
    labels = clocks.labels(process)
    uuid = trace.track(lambda uuid: tracks.process_track(uuid, pid, process, position, labels))
    sequence = position + 2  # descriptors of tracks are on sequence 1
    offset_ns, is_known = clocks.offset_ns(process), clocks.is_known(process)
    writer = ProcessWriter(trace, process, uuid, pid, sequence, offset_ns, devices, is_clock_known=is_known)
    writer.write(is_first=is_first)
    writer.counters.interrupt()
    ended_ns = process.gone_ns if process.end_ns is None else process.end_ns
    if ended_ns is not None:
        writer.counters.end(ended_ns + offset_ns)
        devices.end(process, ended_ns + offset_ns)


def _write_devices(trace: _Trace, devices: DeviceCounters, sequence: int) -> None:
    """Write a group for each device, after all processes: only now is it known what they hold together."""
    trusted = integer(10, sequence)
    for name, totals in devices.devices():
        group = trace.track(partial(tracks.group, name=name))
        uuids: dict[str, bytes] = {}
        drawn = {total.name for total in totals if total.value}
        for total in totals:
            if total.name not in drawn:
                continue
            if total.name not in uuids:
                counter = partial(tracks.device_counter, parent=group, name=total.name, memory=trace.memory)
                uuids[total.name] = integer(11, trace.track(counter))
            source = b"" if total.source is None else data(4, text(10, "source") + text(6, total.source))
            value = double(44, total.value / trace.memory.size_bytes)
            trace.write(packet(total.ts_ns, trusted, TYPE_COUNTER + uuids[total.name] + value + source))


def _write_snapshot(trace: _Trace, now_ns: int, sequence: int) -> None:
    """Write a row that says when a live run was looked at, with an instant there."""
    uuid = trace.track(partial(tracks.group, name=tracks.snapshot(now_ns)))
    event = TYPE_INSTANT + integer(11, uuid) + text(23, tracks.SNAPSHOT)
    trace.write(packet(now_ns, integer(10, sequence), event))


class Clocks:
    """How the times of processes compare: their `TimeLine` in nanoseconds since 1970, and the words for its error."""

    def __init__(self, recording: Recording, processes: Iterable[Process]):
        self.time_line = TimeLine(recording)
        self.domains = len({process.clock_domain for process in processes if process.identity})
        self.error_bound_ns = max(map(_bound_ns, processes), default=0.0)
        """The largest error bound of the times that are aligned."""

    @property
    def error_bound(self) -> str:
        """Return in words how far off times of different processes are at most."""
        if self.time_line.domains > 1:
            return "unknown: aligned by real time"
        return f"{_milliseconds(self.error_bound_ns)} ms" if self.error_bound_ns else "exact: one clock"

    def is_known(self, process: Process) -> bool:
        """Return whether the times of `process` compare with those of the run, exactly or within a known bound."""
        return self.time_line.domains < 2 or self.time_line.is_aligned(process)

    def offset_ns(self, process: Process) -> int:
        """Return what to add to the times of `process` to get nanoseconds since 1970."""
        return self.time_line.offset_ns(process)

    def first(self, processes: Iterable[Process]) -> Process | None:
        """Return the process that began first; those that never said when do not count."""
        known = [process for process in processes if process.start_ns]
        return min(known, key=lambda process: process.start_ns + self.offset_ns(process), default=None)

    def labels(self, process: Process) -> list[str]:
        """Return what must be said next to the name of `process`."""
        if not self.is_known(process):
            return ["another clock, aligned by real time, error unknown"]
        bound_ns = _bound_ns(process)
        return [f"another clock, aligned within {_milliseconds(bound_ns)} ms"] if bound_ns else []


def _bound_ns(process: Process) -> float:
    """Return the bound at the end of the process; for one that died, at its beginning: its last event is not known
    yet."""
    return process.time_bound_ns(process.end_ns or process.start_ns)


def _milliseconds(ns: float) -> str:
    return f"{ns / 1e6:.3f}"


class _Trace:
    """The file: blocks of packets, and the numbers of tracks."""

    def __init__(self, out: BinaryIO, memory: tracks.MemoryUnit):
        self.out = out
        self.memory = memory
        """What bytes are counted in."""
        self.packets = bytearray()
        """Whole packets that were not written yet."""
        self.tracks = 0
        self.process_names: dict[str, str] = {}
        """The name of each process, by its key."""
        self.digest = blake2b(digest_size=16)
        """Digest of everything that was written."""

    def preamble(self, recording: Recording, processes: list[Process], clocks: Clocks) -> None:
        """Write what holds for the whole trace: its clock, and the order of its processes."""
        if processes:
            monotonic_ns = processes[0].start_ns
            pair = ((REALTIME, monotonic_ns + clocks.offset_ns(processes[0])), (_MONOTONIC, monotonic_ns))
            snapshot = b"".join(data(1, integer(1, clock) + integer(2, time)) for clock, time in pair)
            self.packet(data(6, snapshot + integer(2, REALTIME)))
        self.packet(data(60, tracks.root()))
        facts: dict[str, str | int] = {
            "rltrace.run_id": str(recording.manifest.get("run_id")),
            "rltrace.command": " ".join(map(str, recording.manifest.get("command") or ())),
            "rltrace.clock_domains": clocks.domains,
            "rltrace.clock_error_bound": clocks.error_bound,
        }
        self.packet(data(126, b"".join(data(1, _attribute(key, value)) for key, value in facts.items())))

    def packet(self, fields: bytes) -> None:
        """Append one packet that says nothing about its sequence but its number, or nothing at all."""
        self.write(data(1, fields))

    def write(self, packets: bytes) -> None:
        """Append whole packets."""
        self.packets += packets
        if len(self.packets) > BLOCK_BYTES:
            self.flush()

    def track(self, descriptor: Callable[[int], bytes]) -> int:
        """Append the descriptor that `descriptor(uuid)` makes, and return the new track's uuid."""
        self.tracks += 1
        self.packet(data(60, descriptor(self.tracks)) + integer(10, 1))
        return self.tracks

    def flush(self) -> None:
        """Write what was appended as one block."""
        if self.packets:
            self.digest.update(self.packets)
            self.out.write(data(1, data(50, zlib.compress(self.packets, 1))))
            self.packets.clear()

    def end(self) -> None:
        """Write the rest, and what tells this trace from others.

        The UI keeps traces by it: the same Recording must give the same value, and more of a live run another one.
        """
        self.flush()
        identity = int.from_bytes(self.digest.digest(), "big")
        self.packet(data(89, integer(1, identity >> 64) + integer(2, identity & 0xFFFF_FFFF_FFFF_FFFF)))
        self.flush()


def _attribute(key: str, value: str | int) -> bytes:
    return text(1, key) + (integer(2, value) if isinstance(value, int) else text(3, value))
