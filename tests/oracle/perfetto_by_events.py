"""Writes a Recording as a Perfetto trace, by going through its events one by one: slow, and plain to see that it is
right."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from hashlib import blake2b
from time import time_ns
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from rltrace_exporters import perfetto_tracks as tracks
from rltrace_exporters.perfetto import Clocks
from rltrace_exporters.perfetto_devices import DeviceCounters
from rltrace_exporters.perfetto_trajectories import NAMES, Trajectories
from rltrace_exporters.protobuf import PAIRS, SHORT, SMALL, data, double, fixed64, integer, rest_of_nine, text, varint
from rltrace_exporters.rows import FlatRow, NestedRow, Row, Rows

from rltrace.events import (
    COLLECTION,
    DEVICE_TIME,
    KERNEL,
    MEMORY_EDGE,
    OPERATOR,
    REQUEST,
    SAMPLER,
    SERVER_REQUEST,
    STEP,
    Counter,
    Span,
    asked_ids,
    is_of_bytes,
)
from rltrace.read import columns
from rltrace.read.gate import plain
from rltrace.read.recording import Process, Recording, in_order

BLOCK_PIECES = 65_536
"""Pieces of packets (about half a megabyte) that are compressed together."""

MOST_NAMES = 20_000
"""Names that one process's sequence of packets refers to by number; then it starts numbering again."""

_REALTIME, _MONOTONIC = 1, 3
_TYPE_BEGIN, _TYPE_END, _TYPE_INSTANT, _TYPE_COUNTER = (integer(9, kind) for kind in (1, 2, 3, 4))
_EVENT_NAMES, _ARG_NAMES = 2, 3
_CLEARED, _NEEDS_NAMES = 1, 2
_NEVER = 1 << 62


class PerfettoByEvents:
    """The same as `Perfetto`, without columns."""

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
        _write_trajectories(trace, processes, clocks, sequence=len(processes) + 4)
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
    writer = _ProcessWriter(trace, process, uuid, pid, sequence, offset_ns, devices, is_clock_known=is_known)
    writer.write(is_first=is_first)
    writer.break_counters()
    ended_ns = process.gone_ns if process.end_ns is None else process.end_ns
    if ended_ns is not None:
        writer.end_counters(ended_ns + offset_ns)
        devices.end(process, ended_ns + offset_ns)


def _write_devices(trace: _Trace, devices: DeviceCounters, sequence: int) -> None:
    """Write a group for each device, after all processes: only now is it known what they hold together."""
    trusted = integer(10, sequence)
    for name, totals in devices.devices():
        group = trace.track(partial(tracks.group, name=name))
        found: dict[str, _Track] = {}
        drawn = {total.name for total in totals if total.value}
        for total in totals:
            if total.name not in drawn:
                continue
            if total.name not in found:
                uuid = trace.track(partial(tracks.device_counter, parent=group, name=total.name, memory=trace.memory))
                found[total.name] = _Track(uuid, trusted)
            track = found[total.name]
            source = b"" if total.source is None else data(4, text(10, "source") + text(6, total.source))
            value = _counter_value(total.value / trace.memory.size_bytes)
            head, tail = track.around(_TYPE_COUNTER + track.uuid + value + source)
            trace.packets.extend((head, *_time_pieces(total.ts_ns), tail))
        trace.flush()


def _write_trajectories(trace: _Trace, processes: Iterable[Process], clocks: Clocks, sequence: int) -> None:
    """Write the rows of trajectories, which the importer is asked about in a test of their own."""
    kept = Trajectories()
    for number, process in enumerate(processes):
        for rows in columns.read(process):
            chosen = np.flatnonzero(np.array([rows.texts[name] in NAMES for name in rows.name.tolist()], np.bool_))
            kept.add(number, rows, chosen, clocks.offset_ns(process))
    kept.write(trace, sequence)


def _write_snapshot(trace: _Trace, now_ns: int, sequence: int) -> None:
    """Write a row that says when a live run was looked at, with an instant there."""
    uuid = trace.track(partial(tracks.group, name=tracks.snapshot(now_ns)))
    track = _Track(uuid, integer(10, sequence))
    head, tail = track.around(_TYPE_INSTANT + track.uuid + text(23, tracks.SNAPSHOT))
    trace.packets.extend((head, *_time_pieces(now_ns), tail))


def _time_pieces(time: int) -> tuple[bytes, bytes, bytes]:
    return PAIRS[time & 0x3FFF], PAIRS[time >> 14 & 0x3FFF], rest_of_nine(time >> 28)


class _Trace:
    """The file: blocks of packets, and the numbers of tracks."""

    def __init__(self, out: BinaryIO, memory: tracks.MemoryUnit):
        self.out = out
        self.memory = memory
        """What bytes are counted in."""
        self.packets: list[bytes] = []
        """Packets or pieces of packets, in order."""
        self.tracks = 0
        self.process_names: dict[str, str] = {}
        """The name of each process, by its key."""
        self.digest = blake2b(digest_size=16)
        """Digest of everything that was written."""

    def preamble(self, recording: Recording, processes: list[Process], clocks: Clocks) -> None:
        """Write what holds for the whole trace: its clock, and the order of its processes."""
        if processes:
            monotonic_ns = processes[0].start_ns
            pair = ((_REALTIME, monotonic_ns + clocks.offset_ns(processes[0])), (_MONOTONIC, monotonic_ns))
            snapshot = b"".join(data(1, integer(1, clock) + integer(2, time)) for clock, time in pair)
            self.packet(data(6, snapshot + integer(2, _REALTIME)))
        self.packet(data(60, tracks.root()))
        facts: dict[str, str | int] = {
            "rltrace.run_id": str(recording.manifest.get("run_id")),
            "rltrace.command": " ".join(map(str, recording.manifest.get("command") or ())),
            "rltrace.clock_domains": clocks.domains,
            "rltrace.clock_error_bound": clocks.error_bound,
        }
        self.packet(data(126, b"".join(data(1, _attribute(key, value)) for key, value in facts.items())))

    def write(self, packets: bytes) -> None:
        """Append whole packets."""
        self.packets.append(packets)

    def packet(self, fields: bytes) -> None:
        """Append one packet that says nothing about its sequence but its number, or nothing at all."""
        self.packets.append(data(1, fields))

    def track(self, descriptor: Callable[[int], bytes]) -> int:
        """Append the descriptor that `descriptor(uuid)` makes, and return the new track's uuid."""
        self.tracks += 1
        self.packet(data(60, descriptor(self.tracks)) + integer(10, 1))
        return self.tracks

    def flush(self) -> None:
        """Write what was appended as one block."""
        block = b"".join(self.packets)
        self.packets.clear()
        if block:
            self.digest.update(block)
            self.out.write(data(1, data(50, zlib.compress(block, 1))))

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


class _Track:
    """A row's number in a TrackEvent, and the bytes around the time of a packet that ends a span on it."""

    def __init__(self, uuid: int, sequence: bytes):
        self.uuid = integer(11, uuid)
        self.sequence = sequence + b"\x5a"
        self.end_head, self.end_tail = self.around(_TYPE_END + self.uuid)

    def around(self, event: bytes) -> tuple[bytes, bytes]:
        """The bytes before and after the time of a packet with this TrackEvent.

        A packet is `head + time + tail`. A time always takes nine bytes, so the lengths in `head` are known before it.
        """
        tail = self.sequence + varint(len(event)) + event
        return _head(len(tail)), tail


def _head(tail_bytes: int) -> bytes:
    """What precedes the time of a packet: `packet` and its length, `timestamp`."""
    return b"\x0a" + varint(10 + tail_bytes) + b"\x40"


_HEADS = [_head(tail_bytes) for tail_bytes in range(4096)]


class _Begin(NamedTuple):
    """The bytes of a packet that begins a span of one name on one track."""

    track: _Track
    sequence: bytes
    event: bytes
    head: bytes
    tail: bytes
    """Return the bytes before and after the time, for a span without arguments."""
    end_head: bytes
    end_tail: bytes
    """Return the bytes before and after the time of the packet that ends it."""


class _Names:
    """Numbers for the names on one sequence of packets, and the packets that say which is which."""

    def __init__(self, trace: _Trace, sequence: bytes):
        self.trace = trace
        self.sequence = sequence
        self.numbers: dict[tuple[int, str], bytes] = {}

    def number(self, kind: int, name: str) -> bytes:
        """Return the number of a name, as a varint; `kind` is its field in InternedData."""
        number = self.numbers.get((kind, name))
        if number is None:
            number = self.numbers[kind, name] = varint(len(self.numbers) + 1)
            entry = data(kind, b"\x08" + number + text(2, name))
            self.trace.packet(self.sequence + integer(13, _NEEDS_NAMES) + data(12, entry))
        return number

    def restart(self) -> None:
        """Begin the sequence, or forget all names on it."""
        self.numbers.clear()
        self.trace.packet(self.sequence + integer(13, _CLEARED) + data(59, integer(58, _REALTIME)))


class _Arguments:
    """Span arguments as debug annotations, which the UI shows under a selected span."""

    def __init__(self, names: _Names):
        self.names = names
        self.integers: dict[str, list[bytes]] = {}
        """By name, the bytes before an integer of so many varint bytes."""
        self.strings: dict[tuple[str, str], bytes] = {}

    def forget(self) -> None:
        """Forget the numbers of names, which start again."""
        self.integers.clear()
        self.strings.clear()

    def encode(self, args: dict[str, Any]) -> bytes:
        """Return the annotations of one span, the most frequent kinds of value first."""
        pieces = []
        for key, value in args.items():
            if value.__class__ is str:
                pieces.append(self.strings.get((key, value)) or self._string(key, value))
            elif value.__class__ is int and 0 <= value < 1 << 63:
                number = SHORT[value] if value < SMALL else varint(value)
                heads = self.integers.get(key) or self._integer(key)
                pieces += (heads[len(number)], number)
            else:
                pieces.append(self._annotation(key, _annotation_value(plain(value))))
        return b"".join(pieces)

    def _annotation(self, key: str, value: bytes) -> bytes:
        """One annotation: the importer writes `_` for a dot in a name, and joins the names of nested ones by dots."""
        name, *inner = str(key).split(".", _DEEPEST)
        return data(4, b"\x08" + self.names.number(_ARG_NAMES, name) + _nested(inner, value))

    def _integer(self, key: str) -> list[bytes]:
        heads = self.integers[key] = []
        for size in range(10):  # the lengths in an annotation depend on that of its value, which is cut off here
            whole = self._annotation(key, b"\x20" + bytes(size))
            heads.append(whole[: len(whole) - size])
        return heads

    def _string(self, key: str, value: str) -> bytes:
        annotation = self._annotation(key, text(6, value))
        if len(value) < 100:
            self.strings[key, value] = annotation
        return annotation


def _nested(names: Iterable[str], value: bytes) -> bytes:
    """A value below the names of entries, the outermost first."""
    for name in reversed([*names]):
        value = data(11, text(10, name) + value)
    return value


_DEEPEST = 32
"""Levels of a nested argument that are shown, and of dots in a key; anything below them is one value."""


def _annotation_value(value: Any, level: int = 0) -> bytes:
    """Return a DebugAnnotation without its name."""
    if isinstance(value, bool):
        return integer(2, value)
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return integer(4 if value < 1 << 63 else 3, value)
    if isinstance(value, float):
        return double(5, value)
    if isinstance(value, (dict, list, tuple)) and level == _DEEPEST:
        return text(6, "...")
    if isinstance(value, dict) and value:
        inside = ((str(key), _annotation_value(inner, level + 1)) for key, inner in value.items())
        return b"".join(_nested(key.split(".", _DEEPEST), inner) for key, inner in inside)
    if isinstance(value, (list, tuple)) and value:
        return b"".join(data(12, _annotation_value(inner, level + 1)) for inner in value)
    return text(6, str(value))


def _counter_value(value: float) -> bytes:
    if value.__class__ is int and -(1 << 63) <= value < 1 << 63:
        return b"\xf0\x01" + varint(value)
    return double(44, value)


_FLOWS, _LAST_OF_FLOWS = 47, 48


def _flows(keys: Iterable[str], field: int = _FLOWS) -> bytes:
    """Return the arrows of one slice; the importer joins the slices of one number in the order of their times."""
    return b"".join(
        fixed64(field, int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")) for key in keys
    )


def _arriving(span: Span) -> bytes:
    """Return the arrows that end in a slice; those of a request go on to no other that has its id."""
    return _flows(span.flows_in, _LAST_OF_FLOWS if span.name == REQUEST else _FLOWS)


def shown_name(span: Span) -> str:
    """Return what a span's slice is called: `step 3`, `fsdp.forward model.layers.7`; else the span's name."""
    key = tracks.NAMED_BY.get(span.name)
    value = span.args.get(key) if key is not None else None
    return span.name if value is None else f"{span.name} {value if value != '' else tracks._ROOT}"


def join_request(span: Span) -> None:
    """Let an arrow lead from a server's request to the engine's: they name the same id, and nothing else joins them."""
    request_id = span.args.get("request_id")
    if isinstance(request_id, str) and span.name == SERVER_REQUEST:
        span.flows_out = (*span.flows_out, f"request:{request_id}")
    elif isinstance(request_id, str):
        span.flows_in = (*span.flows_in, *(f"request:{one}" for one in dict.fromkeys(asked_ids(request_id))))


def device_row(span: Span) -> str | None:
    """Return the name of the row for times on a GPU's stream or by torch.profiler; None for any other span."""
    if span.lane is not None:
        return None
    kinds = {DEVICE_TIME: "gpu stream", KERNEL: "kernels of gpu stream", OPERATOR: "torch operators of thread"}
    return next((f"{kind} {span.task}" for prefix, kind in kinds.items() if span.name.startswith(prefix)), None)


class _ProcessWriter:
    """Writes one process: its events in the order the reader yields them, descriptors where a track is first needed."""

    def __init__(
        self,
        trace: _Trace,
        process: Process,
        uuid: int,
        pid: int,
        sequence: int,
        offset_ns: int,
        devices: DeviceCounters,
        *,
        is_clock_known: bool,
    ):
        self.is_clock_known = is_clock_known
        self.trace = trace
        self.devices = devices
        self.process = process
        self.uuid = uuid
        self.pid = pid
        self.offset_ns = offset_ns
        self.sequence = integer(10, sequence) + integer(13, _NEEDS_NAMES)
        self.names = _Names(trace, integer(10, sequence))
        self.arguments = _Arguments(self.names)
        self.begins: dict[tuple[int, int, int | None, str], _Begin] = {}
        """The beginnings of spans whose row follows from their thread, task and lane."""
        self.tracks: dict[Hashable, _Track] = {}
        self.rows: dict[Hashable, Rows] = {}
        self.counters: dict[str, _Track] = {}
        self.held: dict[str, float] = {}
        """The last value of each counter of bytes."""
        self.counted_ns: dict[str, int] = {}
        """When each counter that is drawn was first sampled."""
        self.zeros: dict[str, array[int]] = {}
        """When a memory counter that was never anything else was 0: its row is drawn once it has another value."""
        self.groups: dict[str, int] = {}
        self.threads: dict[int, int] = {}
        self.times: dict[int, bytes] = {}

    def write(self, *, is_first: bool) -> None:
        """Write all events of the process; for the first process also when it began.

        This loop is the exporter's speed: a span without arguments takes one look-up of prepared bytes and two of
        times; nothing is encoded.
        """
        for _ in self.process.events():
            pass
        self.thread_names = dict(self.process.threads)  # the last of each
        self.names.restart()
        if is_first:
            start_ns = self.process.start_ns
            mark = Span(tracks.STARTS, self.process.pid, 0, start_ns, start_ns, {"phase": True})
            self._rare(mark, self._begin(mark, mark.name))
        for begin_ns, end_ns in self.process.pauses:
            pause = Span(tracks.PAUSED, self.process.pid, 0, begin_ns, end_ns, {"phase": True})
            self._rare(pause, self._begin(pause, pause.name))
        packets = self.trace.packets
        append = packets.extend
        arguments = self.arguments.encode
        pairs, short, heads, times = PAIRS, SHORT, _HEADS, self.times
        begins, offset_ns, most, named_by = self.begins, self.offset_ns, BLOCK_PIECES, tracks.NAMED_BY
        for event in self.process.events():
            if len(packets) > most:
                self._make_room()
            if isinstance(event, Counter):
                self._counter(event)
                continue
            args = event.args
            name = event.name
            if name in named_by:
                name = shown_name(event)
            begin = begins.get((event.thread, event.task, event.lane, name))
            if begin is None or "phase" in args:
                begin = self._begin(event, name)
            end_ns = event.end_ns
            if end_ns is None or end_ns == event.start_ns or event.flows_out or event.flows_in:
                self._rare(event, begin)
                continue
            _, sequence, fields, head, tail, end_head, end_tail = begin
            start = event.start_ns + offset_ns
            end = end_ns + offset_ns
            high, end_high = start >> 28, end >> 28
            rest = times.get(high) or self._rest(high)
            end_rest = rest if end_high == high else times.get(end_high) or self._rest(end_high)
            if args:
                annotations = arguments(args)
                size = len(fields) + len(annotations)
                tail_size = len(sequence) + size + (1 if size < 128 else 2)
                if tail_size >= 4096:
                    self._rare(event, begin)
                    continue
                append((
                    heads[tail_size], pairs[start & 0x3FFF], pairs[start >> 14 & 0x3FFF], rest,
                    sequence, short[size], fields, annotations,
                    end_head, pairs[end & 0x3FFF], pairs[end >> 14 & 0x3FFF], end_rest, end_tail,
                ))  # fmt: skip
            else:
                append((
                    head, pairs[start & 0x3FFF], pairs[start >> 14 & 0x3FFF], rest, tail,
                    end_head, pairs[end & 0x3FFF], pairs[end >> 14 & 0x3FFF], end_rest, end_tail,
                ))  # fmt: skip
        self._make_room()

    def _rare(self, span: Span, begin: _Begin) -> None:
        """Write a span that is still open, or takes no time, or has arrows or very long arguments.

        Arrows leave at a span's beginning and arrive at its end, so that they point forward if both began at once. The
        importer turns an arrow around if its receiver began before its sender did.
        """
        track, fields = begin.track, begin.event + _flows(span.flows_out) + self.arguments.encode(span.args)
        start = span.start_ns + self.offset_ns
        if span.end_ns is None:
            self._packet(start, track, fields + _arriving(span))
        elif span.end_ns == span.start_ns:
            self._packet(start, track, _TYPE_INSTANT + fields.removeprefix(_TYPE_BEGIN) + _arriving(span))
        else:
            self._packet(start, track, fields)
            self._packet(span.end_ns + self.offset_ns, track, _TYPE_END + track.uuid + _arriving(span))

    def _packet(self, time: int, track: _Track, event: bytes) -> None:
        head, tail = track.around(event)
        rest = self.times.get(time >> 28) or self._rest(time >> 28)
        self.trace.packets.extend((head, PAIRS[time & 0x3FFF], PAIRS[time >> 14 & 0x3FFF], rest, tail))

    def _counter(self, sample: Counter) -> None:
        time = sample.ts_ns + self.offset_ns
        self.devices.add(self.process, sample.name, np.array([time], np.int64), np.array([sample.value], np.float64))
        if self.devices.has_total(self.process, sample.name):
            return
        track = self.counters.get(sample.name)
        if track is None:
            if not sample.value and is_of_bytes(sample.name):
                self.zeros.setdefault(sample.name, array("q")).append(time)
                return
            track = self._counter_track(sample.name)
            self.counted_ns[sample.name] = sample.ts_ns
            for before in self.zeros.pop(sample.name, ()):
                self._packet(before, track, _TYPE_COUNTER + track.uuid + _counter_value(0))
        value = sample.value
        if sample.name in self.held:
            self.held[sample.name] = value
            value /= self.trace.memory.size_bytes
        self._packet(time, track, _TYPE_COUNTER + track.uuid + _counter_value(value))

    def break_counters(self) -> None:
        """Where recording was paused, no counter has a value: NULL in SQL, the base line in the user interface."""
        for begin_ns, _ in self.process.pauses:
            for name, counted_ns in self.counted_ns.items():
                if counted_ns < begin_ns:
                    track = self.counters[name]
                    value = _TYPE_COUNTER + track.uuid + _counter_value(math.nan)
                    self._packet(begin_ns + self.offset_ns, track, value)

    def end_counters(self, time: int) -> None:
        """With the process, its memory goes."""
        for name, value in self.held.items():
            if value and self.process.role != SAMPLER:
                track = self.counters[name]
                self._packet(time, track, _TYPE_COUNTER + track.uuid + _counter_value(0))

    def _rest(self, high: int) -> bytes:
        rest = self.times[high] = rest_of_nine(high)
        return rest

    def _make_room(self) -> None:
        """Write a block, and bound what is kept from one to the next."""
        self.trace.flush()
        if len(self.names.numbers) + len(self.begins) + len(self.arguments.strings) > MOST_NAMES:
            self.begins.clear()
            self.arguments.forget()
            self.names.restart()
        if len(self.times) > MOST_NAMES:
            self.times.clear()

    # ---------------------------------------------------------------- rows

    def _begin(self, span: Span, shown: str) -> _Begin:
        """Find or make the row of a span, and the bytes that begin it there under the name that is shown."""
        if span.name == MEMORY_EDGE:  # looked for here, not in the loop over all events: its bytes are never kept
            self.devices.add_look(self.process, span, self.offset_ns)
        if span.name in _JOINED:  # likewise
            join_request(span)
        track, follows_from_key = self._track_of(span)
        if _has_phase_row(span):  # which says so already
            span.args.pop("phase", None)
        event = _TYPE_BEGIN + track.uuid + b"\x50" + self.names.number(_EVENT_NAMES, shown)
        if shown != span.name:
            event += self.arguments.encode({tracks.BARE_NAME: span.name})
        begin = _Begin(track, track.sequence, event, *track.around(event), track.end_head, track.end_tail)
        if follows_from_key:
            self.begins[span.thread, span.task, span.lane, shown] = begin
        return begin

    def _track_of(self, span: Span) -> tuple[_Track, bool]:
        """Return the row of a span, and whether every span of its thread, task, lane and name is on it."""
        if _has_phase_row(span):
            name = tracks.phases(self.process, span.name, is_clock_known=self.is_clock_known)
            return self._placed(span, name, NestedRow, name), False
        if span.name == REQUEST:
            return self._placed(span, "requests", FlatRow, tracks.REQUESTS), False
        if span.name == COLLECTION:  # of all threads, and written by any
            return self._placed(span, COLLECTION, FlatRow, COLLECTION), False
        title = device_row(span)
        if title is not None:
            return self._placed(span, title, NestedRow, title), False
        if span.lane is None:
            return self._placed(span, (span.thread, span.task), NestedRow, span.name), False
        key = (span.thread, span.task, span.lane)
        return self.tracks.get(key) or self._thread_row(*key), span.name not in _NEVER_KEPT

    def _placed(self, span: Span, group: Hashable, kind: type[Row], name: str) -> _Track:
        """Return the first row of a group that has room for a span."""
        rows = self.rows.setdefault(group, Rows(kind))
        index = rows.place(span.start_ns, _NEVER if span.end_ns is None else span.end_ns)
        key = (group, index)
        if key not in self.tracks:
            self.tracks[key] = self._track(lambda uuid: tracks.row(uuid, self.uuid, name))
        return self.tracks[key]

    def _thread_row(self, thread: int, task: int, lane: int) -> _Track:
        if thread not in self.threads:
            self.threads[thread] = self._thread(thread)
        parent = self.threads[thread]
        if not task and not lane:
            track = _Track(parent, self.sequence)
        else:
            name = f"{self._thread_name(thread)} · {'tasks' if task else 'overlapping'}"
            track = self._track(lambda uuid: tracks.row(uuid, parent, name))
        self.tracks[thread, task, lane] = track
        return track

    def _thread(self, thread: int) -> int:
        # A main thread's id is its process's, by which the importer knows it.
        tid = self.pid if thread == self.process.pid else thread
        position, name = len(self.threads), self._thread_name(thread)
        return self.trace.track(lambda uuid: tracks.thread_track(uuid, self.uuid, self.pid, tid, name, position))

    def _thread_name(self, thread: int) -> str:
        return self.thread_names.get(thread) or f"thread {thread}"

    def _counter_track(self, name: str) -> _Track:
        title = tracks.counter_group(self.process, name)
        if title not in self.groups:
            self.groups[title] = self.trace.track(lambda uuid: tracks.row(uuid, self.uuid, title))
        group = self.groups[title]
        if is_of_bytes(name):
            self.held[name] = 0.0
        shown, memory = tracks.counter_name(self.process, name, self.trace.process_names), self.trace.memory
        track = self.counters[name] = self._track(lambda uuid: tracks.counter_track(uuid, group, name, shown, memory))
        return track

    def _track(self, descriptor: Callable[[int], bytes]) -> _Track:
        return _Track(self.trace.track(descriptor), self.sequence)


_JOINED = frozenset({SERVER_REQUEST, REQUEST})
_NEVER_KEPT = frozenset({MEMORY_EDGE, SERVER_REQUEST})
"""Spans whose bytes are made anew each time, because each is looked at."""


def _has_phase_row(span: Span) -> bool:
    """Return whether a span is on the row of its rank's phases, or on that of the steps."""
    return span.is_phase or span.name == STEP
