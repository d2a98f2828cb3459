"""Writes one process of a trace: its spans and samples by columns, and descriptors where a row is first needed.

Rows of columns are numbered by what decides on which row of the timeline they are, and what they are called there. So
each kind of span is looked at once, spans that may overlap are placed, and the encoder does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rltrace.events import (
    COLLECTION,
    MEMORY_EDGE,
    PHASES,
    REQUEST,
    SAMPLER,
    SERVER_REQUEST,
    STEP,
    asked_ids,
    is_of_bytes,
)
from rltrace.read import columns
from rltrace.read.columns import NO_LANE, OPEN, Columns
from rltrace.read.recording import Process
from rltrace_exporters import perfetto_tracks as tracks
from rltrace_exporters.perfetto_devices import DeviceCounters
from rltrace_exporters.perfetto_packets import (
    ARG_NAMES,
    BARE_NAME_NUMBER,
    CLEARED,
    EVENT_NAMES,
    NEEDS_NAMES,
    TYPE_BEGIN,
    TYPE_COUNTER,
    TYPE_END,
    TYPE_INSTANT,
    Arrowed,
    Chosen,
    bare_name,
    encoder,
    name_packet,
    packet,
)
from rltrace_exporters.perfetto_trajectories import NAMES as TRAJECTORY_NAMES
from rltrace_exporters.perfetto_trajectories import Trajectories
from rltrace_exporters.protobuf import data, double, fixed64, integer, varint

MOST_NAMES = 20_000
"""Names that one process's sequence of packets refers to by number; then it starts numbering again."""

REALTIME = 1
_NEVER = 1 << 62
_FLOWS, _LAST_OF_FLOWS = 47, 48
_COUNTER_VALUE = 44


class Trace(Protocol):
    """The file."""

    memory: tracks.MemoryUnit
    process_names: dict[str, str]
    trajectories: Trajectories

    def track(self, descriptor: Callable[[int], bytes]) -> int:
        """Append the descriptor that `descriptor(uuid)` makes, and return the new track's uuid."""

    def write(self, packets: bytes) -> None:
        """Append whole packets."""


_Int64s = NDArray[np.int64]

_ON_THREAD, _PHASE, _REQUEST, _COLLECTION, _DEVICE, _LATE = range(6)
"""What decides on which row a span is."""
_FLAT = (_REQUEST, _COLLECTION)


class _Name(NamedTuple):
    """What is known of spans of one name."""

    name: str
    kind: int
    """The kind of row, unless a span says itself that it is a phase."""
    device_prefix: int
    """What begins the name of a span of a device's row; -1 if nothing does."""
    shown_by: str | None
    """The argument that is a part of what a slice is called."""


class _Progress:
    """How many rows of spans and samples of a process have passed."""

    def __init__(self) -> None:
        self.spans = self.samples = 0
        self.texts: Sequence[str] = ()
        self.names = np.empty(0, np.int32)
        """The number of each text among the names of spans."""


class ProcessWriter:
    """Writes one process.

    Args:
        trace: The file.
        process: The process.
        uuid: The number of its track.
        pid: Its process id in the trace.
        sequence: The number of its sequence of packets.
        offset_ns: What to add to its times to get nanoseconds since 1970.
        devices: Gets what it samples of devices.
        is_clock_known: Whether its times compare with those of the run.
    """

    def __init__(
        self,
        trace: Trace,
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
        self.own_sequence = integer(10, sequence)
        self.sequence = self.own_sequence + integer(13, NEEDS_NAMES)
        self.encoder = encoder(process, self.sequence)
        self.counters = _Counters(self)
        self.written = _Progress()
        self.names: list[_Name] = []
        self.name_numbers: dict[str, int] = {}
        self.event_names: dict[str, bytes] = {}
        self.beginnings = 0
        self.tracks: list[int] = []
        """The uuids of the rows of spans."""
        self.track_kinds: list[int] = []
        self.of_groups = np.empty(0, np.int32)
        """The track of each group of rows; of those that are placed, -1 - the place."""
        self.of_keys = np.empty(0, np.int32)
        """The beginning of each track and name."""
        self.places: dict[Hashable, int] = {}
        self.placed: dict[tuple[int, int], int] = {}
        """The track of each row of a place."""
        self.place_names: list[str] = []
        self.place_kinds: list[int] = []
        self.threads: dict[int, int] = {}

    def write(self, *, is_first: bool) -> None:
        """Write all that the process has; for the first process also when it began."""
        self._restart()
        if is_first:
            self._mark(tracks.STARTS, self.process.start_ns, self.process.start_ns)
        for begin_ns, end_ns in self.process.pauses:
            self._mark(tracks.PAUSED, begin_ns, end_ns)
        columns.fold(self.process, _Progress, self._add)

    def _restart(self) -> None:
        """Begin the sequence, or forget all names on it."""
        self.encoder.restart()
        self.event_names.clear()
        self.beginnings, self.of_keys = 0, np.empty(0, np.int32)
        cleared = self.own_sequence + integer(13, CLEARED) + data(59, integer(58, REALTIME))
        self.trace.write(data(1, cleared))
        self.trace.write(name_packet(self.sequence, ARG_NAMES, varint(BARE_NAME_NUMBER), tracks.BARE_NAME))

    def _mark(self, name: str, start_ns: int, end_ns: int | None) -> None:
        """Write a phase that no process recorded."""
        title = tracks.phases(self.process, name, is_clock_known=self.is_clock_known)
        place = self._place(title, _PHASE, title)
        ends = np.array([_NEVER if end_ns is None else end_ns], np.int64)
        (index,) = self.encoder.place(place, np.array([start_ns], np.int64), ends, is_flat=False).tolist()
        uuid = integer(11, self.tracks[self._track_of_place(place, index, name)])
        event = uuid + b"\x50" + self._event_name(name)
        start = start_ns + self.offset_ns
        if end_ns == start_ns:
            self.trace.write(packet(start, self.sequence, TYPE_INSTANT + event))
            return
        self.trace.write(packet(start, self.sequence, TYPE_BEGIN + event))
        if end_ns is not None:
            self.trace.write(packet(end_ns + self.offset_ns, self.sequence, TYPE_END + uuid))

    def _add(self, progress: _Progress, rows: Columns) -> None:
        """Write some rows; if the native decoder gave up in the middle, those that it gave come again."""
        many, samples = len(rows), len(rows.samples.name)
        first = min(max(self.written.spans - progress.spans, 0), many)
        first_sample = min(max(self.written.samples - progress.samples, 0), samples)
        progress.spans += many
        progress.samples += samples
        self._learn(progress, rows.texts)
        if first < many:
            self._spans(rows, first, progress.names[rows.name[first:]].astype(np.int64))
        if first_sample < samples:
            self.counters.add(rows, first_sample)
        self.written.spans = max(self.written.spans, progress.spans)
        self.written.samples = max(self.written.samples, progress.samples)
        if len(self.event_names) + self.beginnings + self.encoder.names > MOST_NAMES:
            self._restart()

    def _learn(self, progress: _Progress, texts: Sequence[str]) -> None:
        """Learn which names there are."""
        new = texts[len(progress.names) :]
        progress.names = np.append(progress.names, np.array([self._name_number(text) for text in new], np.int32))

    def _name_number(self, name: str) -> int:
        number = self.name_numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            prefix = next((at for at, (begin, _) in enumerate(tracks.DEVICE_ROWS) if name.startswith(begin)), -1)
            kind = _PHASE if name in PHASES or name == STEP else _OF_NAMES.get(name, _ON_THREAD)
            self.names.append(_Name(name, kind, prefix, tracks.NAMED_BY.get(name)))
        return number

    # ---------------------------------------------------------------- spans

    def _spans(self, rows: Columns, first: int, names: _Int64s) -> None:
        chosen = self.encoder.chosen(rows, first)
        in_tracks = self._tracks(chosen, names)
        shown, texts = self._shown(chosen, names)
        numbers, first_rows = self.encoder.group(1, (in_tracks, names, shown))
        if len(first_rows):
            new = [
                self._beginning(track, self.names[name], texts.get((name, text)))
                for track, name, text in zip(
                    in_tracks[first_rows].tolist(), names[first_rows].tolist(), shown[first_rows].tolist(), strict=True
                )
            ]
            self.of_keys = np.append(self.of_keys, np.array(new, np.int32))
        arrows = self._arrows(chosen, names)
        self._looks(chosen, names)
        self._trajectories(chosen, names)
        for packets in self.encoder.encode(chosen, self.of_keys[numbers], self.offset_ns, arrows):
            self.trace.write(packets)

    def _tracks(self, chosen: Chosen, names: _Int64s) -> _Int64s:
        """Return the track of each row."""
        rows, first = chosen.columns, chosen.first
        thread, task, lane = rows.thread[first:], rows.task[first:], rows.lane[first:].astype(np.int64)
        kinds = np.array([name.kind for name in self.names], np.int64)[names]
        kinds[rows.arguments["phase"][first:]] = _PHASE
        parts = [thread, task, lane]
        is_late = (kinds == _ON_THREAD) & (lane == NO_LANE)
        apart = np.flatnonzero(is_late | (kinds != _ON_THREAD))
        if len(apart):
            prefixes = np.array([name.device_prefix for name in self.names], np.int64)[names]
            kinds[is_late] = np.where(prefixes[is_late] >= 0, _DEVICE, _LATE)
            parts = [column.copy() for column in parts]
            parts[2][apart] = 0
            parts[0][apart] = np.select(
                [kinds[apart] == _PHASE, kinds[apart] == _DEVICE, kinds[apart] == _LATE],
                [names[apart], prefixes[apart], thread[apart]],
            )
            parts[1][apart] = np.where(kinds[apart] >= _DEVICE, task[apart], 0)
        numbers, first_rows = self.encoder.group(0, (kinds, *parts))
        values = (column[first_rows].tolist() for column in (kinds, *parts, names))
        new = [self._group(kind, a, b, c, self.names[name]) for kind, a, b, c, name in zip(*values, strict=True)]
        self.of_groups = np.append(self.of_groups, np.array(new, np.int32))
        found = self.of_groups[numbers].astype(np.int64)
        if len(apart):
            found[apart] = self._placed(rows, first + apart, -1 - found[apart], names[apart])
        return found

    def _group(self, kind: int, a: int, b: int, c: int, name: _Name) -> int:
        """Return the track of a group of rows, or -1 - the place on whose rows they are."""
        if kind == _ON_THREAD:
            return self._thread_row(a, b, c)
        if kind == _PHASE:
            title = tracks.phases(self.process, name.name, is_clock_known=self.is_clock_known)
        elif kind == _DEVICE:
            title = f"{tracks.DEVICE_ROWS[a][1]} {b}"
        else:
            title = {_REQUEST: tracks.REQUESTS, _COLLECTION: COLLECTION}.get(kind, name.name)
        return -1 - self._place((a, b) if kind == _LATE else title, kind, title)

    def _place(self, key: Hashable, kind: int, title: str) -> int:
        place = self.places.setdefault((kind in _FLAT, key), len(self.places))
        if place == len(self.place_names):
            self.place_names.append(title)
            self.place_kinds.append(kind)
        return place

    def _placed(self, rows: Columns, chosen: _Int64s, places: _Int64s, names: _Int64s) -> _Int64s:
        """Return the track of rows that may overlap: each is on the first row of its place that has room."""
        found = np.empty(len(chosen), np.int64)
        order = np.argsort(places, kind="stable")
        ordered = places[order]
        cuts = np.flatnonzero(np.diff(ordered)) + 1
        for own in np.split(order, cuts):
            place = int(places[own[0]])
            starts, ends = rows.start_ns[chosen[own]], rows.end_ns[chosen[own]]
            ends = np.where(ends == OPEN, _NEVER, ends)
            indexes = self.encoder.place(place, starts, ends, is_flat=self.place_kinds[place] in _FLAT)
            taken, begins, of_taken = np.unique(indexes, return_index=True, return_inverse=True)
            begun_by = [self.names[name].name for name in names[own[begins]].tolist()]
            found_tracks = [
                self._track_of_place(place, index, name) for index, name in zip(taken.tolist(), begun_by, strict=True)
            ]
            found[own] = np.array(found_tracks, np.int64)[of_taken]
        return found

    def _track_of_place(self, place: int, index: int, begun_by: str) -> int:
        """Return the track of a row of a place.

        Args:
            place: The place.
            index: Of the row.
            begun_by: Name of a span on it, by which a row of late spans is called.
        """
        if (place, index) not in self.placed:
            name = begun_by if self.place_kinds[place] == _LATE else self.place_names[place]
            uuid = self.trace.track(lambda uuid: tracks.row(uuid, self.uuid, name))
            self.placed[place, index] = self._track(uuid, self.place_kinds[place])
        return self.placed[place, index]

    def _track(self, uuid: int, kind: int) -> int:
        self.tracks.append(uuid)
        self.track_kinds.append(kind)
        return len(self.tracks) - 1

    def _thread_row(self, thread: int, task: int, lane: int) -> int:
        if thread not in self.threads:
            self.threads[thread] = self._thread(thread)
        parent = self.threads[thread]
        if not task and not lane:
            return self._track(parent, _ON_THREAD)
        name = f"{self._thread_name(thread)} · {'tasks' if task else 'overlapping'}"
        return self._track(self.trace.track(lambda uuid: tracks.row(uuid, parent, name)), _ON_THREAD)

    def _thread(self, thread: int) -> int:
        # A main thread's id is its process's, by which the importer knows it.
        tid = self.pid if thread == self.process.pid else thread
        position, name = len(self.threads), self._thread_name(thread)
        return self.trace.track(lambda uuid: tracks.thread_track(uuid, self.uuid, self.pid, tid, name, position))

    def _thread_name(self, thread: int) -> str:
        return self.process.threads.get(thread) or f"thread {thread}"

    # ---------------------------------------------------------------- what is said of a span

    def _shown(self, chosen: Chosen, names: _Int64s) -> tuple[_Int64s, dict[tuple[int, int], str]]:
        """Return for each row the place of the text that is a part of its slice's name, or -1; and by name and place
        these texts."""
        found = np.full(len(chosen), -1, np.int64)
        texts: dict[tuple[int, int], str] = {}
        for number in np.flatnonzero(np.bincount(names, minlength=len(self.names))).tolist():
            key = self.names[number].shown_by
            if key is None:
                continue
            own = np.flatnonzero(names == number)
            found[own], known = self.encoder.shown(chosen, key, own)
            texts |= {(number, place): known[place] for place in np.unique(found[own]).tolist() if place >= 0}
        return found, texts

    def _beginning(self, track: int, name: _Name, text: str | None) -> int:
        """Add what begins spans of one name on one row to the encoder, and return its number."""
        uuid = integer(11, self.tracks[track])
        shown = tracks.shown_name(name.name, text)
        event = TYPE_BEGIN + uuid + b"\x50" + self._event_name(shown)
        if shown != name.name:
            event += bare_name(name.name)
        self.encoder.beginning(event, len(uuid), drops_phase=self.track_kinds[track] == _PHASE)
        self.beginnings += 1
        return self.beginnings - 1

    def _event_name(self, name: str) -> bytes:
        number = self.event_names.get(name)
        if number is None:
            number = self.event_names[name] = varint(len(self.event_names) + 1)
            self.trace.write(name_packet(self.sequence, EVENT_NAMES, number, name))
        return number

    def _arrows(self, chosen: Chosen, names: _Int64s) -> Arrowed:
        """Return the arrows of rows. They leave at a span's beginning and arrive at its end, so that they point forward
        if both began at once: the importer turns an arrow around if its receiver began before its sender did."""
        rows, first = chosen.columns, chosen.first
        found: dict[int, tuple[list[str], list[str]]] = {}
        flows = rows.flows
        for row, key, is_out in zip(flows.row.tolist(), flows.keys(flows.key), flows.is_out.tolist(), strict=True):
            if row >= first:
                found.setdefault(row - first, ([], []))[0 if is_out else 1].append(key)
        for name in (SERVER_REQUEST, REQUEST):
            number = self.name_numbers.get(name, -1)
            for row in np.flatnonzero(names == number).tolist():
                _join_request(name, chosen.args(row).get("request_id"), found.setdefault(row, ([], [])))
        request = self.name_numbers.get(REQUEST, -1)
        return {
            row: (_encoded(leaving), _encoded(arriving, _LAST_OF_FLOWS if names[row] == request else _FLOWS))
            for row, (leaving, arriving) in found.items()
        }

    def _looks(self, chosen: Chosen, names: _Int64s) -> None:
        """Keep what was read at phase boundaries."""
        looks = np.flatnonzero(names == self.name_numbers.get(MEMORY_EDGE, -1))
        for look in chosen.columns.spans(chosen.first + looks):
            self.devices.add_look(self.process, look, self.offset_ns)

    def _trajectories(self, chosen: Chosen, names: _Int64s) -> None:
        """Keep what has a row of its trajectory too."""
        numbers = [number for name, number in self.name_numbers.items() if name in TRAJECTORY_NAMES]
        if numbers:
            found = np.flatnonzero(np.isin(names, numbers))
            if len(found):
                self.trace.trajectories.add(self.uuid, chosen.columns, chosen.first + found, self.offset_ns)


_OF_NAMES = {REQUEST: _REQUEST, COLLECTION: _COLLECTION}


def _join_request(name: str, request_id: object, flows: tuple[list[str], list[str]]) -> None:
    """Let an arrow lead from a server's request to the engine's: they name the same id, and nothing else joins them."""
    if isinstance(request_id, str):
        if name == SERVER_REQUEST:
            flows[0].append(f"request:{request_id}")
        else:
            flows[1].extend(f"request:{one}" for one in dict.fromkeys(asked_ids(request_id)))


def _encoded(keys: Iterable[str], field: int = _FLOWS) -> bytes:
    """Return the arrows of one slice; the importer joins the slices of one number in the order of their times."""
    return b"".join(
        fixed64(field, int.from_bytes(blake2b(key.encode("utf-8", "replace"), digest_size=8).digest(), "little"))
        for key in keys
    )


class _Counters:
    """Writes the samples of one process."""

    def __init__(self, writer: ProcessWriter) -> None:
        self.writer = writer
        self.process = writer.process
        self.drawn: dict[str, int] = {}
        """The uuids of the counters that have a row."""
        self.held: dict[str, float] = {}
        """The last value of each counter of bytes."""
        self.counted_ns: dict[str, int] = {}
        """When each counter that is drawn was first sampled."""
        self.zeros: dict[str, list[_Int64s]] = {}
        """When a memory counter that was never anything else was 0: its row is drawn once it has another value."""
        self.groups: dict[str, int] = {}

    def add(self, rows: Columns, first: int) -> None:
        """Write samples, each counter's in their order."""
        samples = rows.samples
        names = samples.name[first:]
        order = np.argsort(names, kind="stable")
        cuts = np.flatnonzero(np.diff(names[order])) + 1
        for own in np.split(order, cuts):
            at = first + own
            self._counter(rows.texts[names[own[0]]], samples.ts_ns[at], samples.value[at])

    def _counter(self, name: str, times_ns: _Int64s, values: NDArray[np.float64]) -> None:
        writer = self.writer
        is_memory = is_of_bytes(name)
        times = times_ns + writer.offset_ns
        writer.devices.add(self.process, name, times, values)
        if writer.devices.has_total(self.process, name):
            return
        if name not in self.drawn:
            is_zero = not values.any()  # what is not a number is not zero
            if is_memory and is_zero:
                self.zeros.setdefault(name, []).append(times)
                return
            self.drawn[name] = self._track(name)
            self.counted_ns[name] = int(times_ns[np.flatnonzero(values)[0] if is_memory else 0])
            for before in self.zeros.pop(name, ()):
                self._write(name, before, np.zeros(len(before)))
        if is_memory:
            self.held[name] = float(values[-1])
            values = values / writer.trace.memory.size_bytes
        self._write(name, times, values)

    def _write(self, name: str, times: _Int64s, values: NDArray[np.float64]) -> None:
        self.writer.trace.write(counter_packets(self.writer.sequence, self.drawn[name], times, values))

    def _track(self, name: str) -> int:
        writer = self.writer
        title = tracks.counter_group(self.process, name)
        if title not in self.groups:
            self.groups[title] = writer.trace.track(lambda uuid: tracks.row(uuid, writer.uuid, title))
        group = self.groups[title]
        shown, memory = tracks.counter_name(self.process, name, writer.trace.process_names), writer.trace.memory
        return writer.trace.track(lambda uuid: tracks.counter_track(uuid, group, name, shown, memory))

    def interrupt(self) -> None:
        """Where recording was paused, no counter has a value: NULL in SQL, the base line in the user interface."""
        for begin_ns, _ in self.process.pauses:
            for name, counted_ns in self.counted_ns.items():
                if counted_ns < begin_ns:
                    self._one(name, begin_ns + self.writer.offset_ns, math.nan)

    def end(self, time: int) -> None:
        """With the process, its memory goes."""
        for name, value in self.held.items():
            if value and self.process.role != SAMPLER:
                self._one(name, time, 0.0)

    def _one(self, name: str, time: int, value: float) -> None:
        self._write(name, np.array([time], np.int64), np.array([value]))


def counter_packets(sequence: bytes, uuid: int, times: _Int64s, values: NDArray[np.float64]) -> bytes:
    """Return the packets of one counter: all have the same size, so numpy writes times and values into copies of one.

    Args:
        sequence: The fields that say to which sequence they belong.
        uuid: The counter's track.
        times: In nanoseconds since 1970.
        values: Of the counter.
    """
    event = TYPE_COUNTER + integer(11, uuid) + double(_COUNTER_VALUE, 0.0)
    model = np.frombuffer(packet(0, sequence, event), np.uint8)
    packets = np.tile(model, (len(times), 1))
    at = len(model) - len(sequence) - len(data(11, event)) - 9
    groups = times[:, None].astype(np.uint64) >> np.arange(0, 63, 7, dtype=np.uint64)
    packets[:, at : at + 8] = (groups[:, :8] | 0x80).astype(np.uint8)
    packets[:, at + 8] = (groups[:, 8] & 0x7F).astype(np.uint8)
    packets[:, -8:] = values.astype("<f8").view(np.uint8).reshape(-1, 8)
    return packets.tobytes()
