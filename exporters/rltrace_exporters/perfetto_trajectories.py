"""A row per trajectory with its turns and tools, whatever tasks, threads and processes these ran in.

The rows belong to no process. When a trajectory is over, its row is free for the next one; tools of one trajectory that
overlap are one below the other. Everything is on the row of its thread too, under the name that it was recorded by.
"""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.trajectories import TURNS, owners
from rltrace.events import TOOLS, TRAJECTORIES, Args
from rltrace.read.columns import NO_TEXT, OPEN, Columns
from rltrace_exporters import perfetto_tracks as tracks
from rltrace_exporters.perfetto_packets import TYPE_BEGIN, TYPE_END, TYPE_INSTANT, packet
from rltrace_exporters.protobuf import data, integer, text

NAMES = frozenset((*TRAJECTORIES, *TURNS, *TOOLS))
"""Spans that are looked at."""

TOLD = ("prompt_tokens", "tokens")
"""What a turn says."""

GROUP = "trajectories"
NEVER = 1 << 62
"""When an open span ends."""


class Trace(Protocol):
    """The file."""

    def track(self, descriptor: Callable[[int], bytes]) -> int:
        """Append the descriptor that `descriptor(uuid)` makes, and return the new track's uuid."""

    def write(self, packets: bytes) -> None:
        """Append whole packets."""


class _Slice(NamedTuple):
    """What is drawn, in nanoseconds since 1970."""

    start_ns: int
    end_ns: int
    shown: str
    said: dict[str, int | str]


class _Table(NamedTuple):
    """Where spans ran, one row each, as `owners` asks it."""

    starts: NDArray[np.int64]
    until: NDArray[np.int64]
    places: NDArray[np.int64]
    ids: NDArray[np.int64]
    process: NDArray[np.int64]


class _Kind:
    """Spans of one name, as columns: 64 bytes per span, for there may be a million."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.columns = tuple(array("q") for _ in (*_Table._fields, *TOLD))
        self.shown: list[str] = []
        """What each trajectory, and each tool, is called."""

    def add(self, process: int, rows: Columns, chosen: NDArray[np.intp], offset_ns: int) -> None:
        """Keep some rows of a process."""
        ends_ns = rows.end_ns[chosen]
        ids = rows.arguments["trajectory"][chosen].tolist()
        lanes = zip(rows.thread[chosen].tolist(), rows.task[chosen].tolist(), strict=True)
        columns: tuple[Any, ...] = (
            rows.start_ns[chosen] + offset_ns,
            np.where(ends_ns == OPEN, NEVER, ends_ns + offset_ns),
            [hash((process, thread, task)) for thread, task in lanes],
            [0 if text == NO_TEXT else hash(rows.texts[text]) for text in ids],
            np.full(len(chosen), process),
            *(rows.arguments[told][chosen] for told in TOLD),
        )
        for kept, column in zip(self.columns, columns, strict=True):
            kept.frombytes(np.asarray(column, np.int64).tobytes())
        if self.name in TOOLS:
            tools = rows.arguments["tool"][chosen].tolist()
            self.shown += [self.name if tool == NO_TEXT else rows.texts[tool] for tool in tools]
        elif self.name in TRAJECTORIES:
            self.shown += [_called(self.name, args) for args in rows.all_args(chosen)]

    def __len__(self) -> int:
        return len(self.columns[0])

    def table(self) -> _Table:
        """Return where they ran."""
        starts, until, places, ids, process, *_ = (np.array(column, np.int64) for column in self.columns)
        return _Table(starts, until, places, ids, process)

    def slice(self, place: int, shown: str = "") -> _Slice:
        """Return one of them as it is drawn."""
        start_ns, end_ns, *_ = (column[place] for column in self.columns)
        told = zip(TOLD, (column[place] for column in self.columns[-len(TOLD) :]), strict=True)
        said: dict[str, int | str] = {key: value for key, value in told if value >= 0}
        return _Slice(start_ns, end_ns, shown or self.shown[place], {**said, tracks.BARE_NAME: self.name})


def _called(name: str, args: Args) -> str:
    """Return what a trajectory's slice is called: by its prompt and sample, else by its id, where it says them."""
    if "sample_index" in args:
        return f"prompt {args['sample_index']}, sample {args.get('rollout_n', 0)}"
    if "prompt" in args:
        return f"prompt {args['prompt']}"
    is_own = name != TRAJECTORIES[0]  # the ids that hooks make mean nothing to anybody
    return f"trajectory {args['trajectory']}" if is_own and "trajectory" in args else "trajectory"


class Trajectories:
    """Keeps trajectories and what belongs to them while processes are written, and writes their rows."""

    def __init__(self) -> None:
        self._kinds = {name: _Kind(name) for name in (*TRAJECTORIES, *TURNS, *TOOLS)}

    def add(self, process: int, rows: Columns, chosen: NDArray[np.intp], offset_ns: int) -> None:
        """Keep some rows of one process, that are of `NAMES`.

        Args:
            process: Its number.
            rows: Rows that it wrote.
            chosen: Which of them.
            offset_ns: What to add to their times to get nanoseconds since 1970.
        """
        names = rows.name[chosen]
        for name in np.unique(names).tolist():
            self._kinds[rows.texts[name]].add(process, rows, chosen[names == name], offset_ns)

    def write(self, trace: Trace, sequence: int) -> None:
        """Write the rows on a sequence of packets of their own; nothing if there is no trajectory."""
        for name in TRAJECTORIES:
            of, turn = self._kinds[name], self._turn(name)
            if len(of):
                group = trace.track(partial(tracks.group, name=GROUP))
                _draw(_Lanes(trace, group, integer(10, sequence)), of, dict(self._inside(of, turn)))

    def _turn(self, trajectories: str) -> str | None:
        """Return the first kind of turns that belong to trajectories of a name."""
        table = self._kinds[trajectories].table()
        kinds = ((name, self._kinds[name]) for name in TURNS)
        return next((name for name, of in kinds if len(of) and (owners(of.table(), table) >= 0).any()), None)

    def _inside(self, of: _Kind, turn: str | None) -> dict[int, list[_Slice]]:
        """Return the turns and tools of each trajectory, by its place, in order."""
        table = of.table()
        inside: defaultdict[int, list[_Slice]] = defaultdict(list)
        for kind in (self._kinds[name] for name in (*TOOLS, *([turn] if turn is not None else []))):
            if len(kind):
                found = owners(kind.table(), table)
                order = np.lexsort((kind.table().starts, found))
                for place, number in zip(order.tolist(), _counted(found[order]), strict=True):
                    if (owner := int(found[place])) >= 0:
                        inside[owner].append(kind.slice(place, f"turn {number}" if kind.name in TURNS else ""))
        return {owner: sorted(slices, key=_order) for owner, slices in inside.items()}


def _counted(groups: NDArray[np.intp]) -> list[int]:
    """Return for each row the how-many-th of its group it is, from 1; rows of a group follow each other."""
    begins = np.flatnonzero(np.append(True, np.diff(groups) != 0)[: len(groups)])
    sizes = np.diff(np.append(begins, len(groups)))
    found: list[int] = (np.arange(len(groups)) - np.repeat(begins, sizes) + 1).tolist()
    return found


def _draw(lanes: _Lanes, of: _Kind, inside: dict[int, list[_Slice]]) -> None:
    """Write trajectories in the order of their beginnings."""
    slices = [of.slice(place) for place in range(len(of))]
    for place in sorted(range(len(of)), key=lambda place: _order(slices[place])):
        lanes.put(slices[place], inside.get(place, []))
    lanes.end()


def _order(one: _Slice) -> tuple[int, int]:
    """Sort key: whoever begins first, and of these the one that is around the others."""
    return one.start_ns, -one.end_ns


class _Track:
    """One row, on which slices nest; they come in the order of their beginnings."""

    def __init__(self, trace: Trace, uuid: int, sequence: bytes) -> None:
        self._trace, self._sequence = trace, sequence
        self._uuid = integer(11, uuid)
        self._open: list[int] = []
        """When the open slices end, the outermost first."""

    def takes(self, span: _Slice) -> bool:
        """Return whether a slice nests here, having ended those that are over."""
        while self._open and self._open[-1] <= span.start_ns:
            self._end(self._open.pop())
        return not self._open or span.end_ns <= self._open[-1]

    def begin(self, span: _Slice) -> None:
        """Begin a slice; one that takes no time is an instant."""
        said = b"".join(_annotation(key, value) for key, value in span.said.items())
        kind = TYPE_INSTANT if span.end_ns == span.start_ns else TYPE_BEGIN
        event = kind + self._uuid + text(23, span.shown) + said
        self._trace.write(packet(span.start_ns, self._sequence, event))
        if span.end_ns != span.start_ns:
            self._open.append(span.end_ns)

    def end(self) -> None:
        """End what is open and does end."""
        while self._open:
            self._end(self._open.pop())

    def _end(self, end_ns: int) -> None:
        if end_ns != NEVER:
            self._trace.write(packet(end_ns, self._sequence, TYPE_END + self._uuid))


def _annotation(key: str, value: int | str) -> bytes:
    return data(4, text(10, key) + (text(6, value) if isinstance(value, str) else integer(4, value)))


class _Lanes:
    """The rows of trajectories, the smallest free number first; a number has as many rows as overlap on it."""

    def __init__(self, trace: Trace, group: int, sequence: bytes) -> None:
        self._trace, self._group, self._sequence = trace, group, sequence
        self._taken: list[tuple[int, int]] = []
        self._free: list[int] = []
        self._tracks: list[list[_Track]] = []

    def put(self, trajectory: _Slice, inside: Iterable[_Slice]) -> None:
        """Write a trajectory; it does not begin before one that was written already."""
        lane = self._lane(trajectory)
        own, *_ = self._tracks[lane]
        own.takes(trajectory)
        own.begin(trajectory)
        for span in inside:
            is_beyond = span.end_ns > trajectory.end_ns
            self._track(lane, span, first=int(is_beyond)).begin(span)

    def end(self) -> None:
        """End all rows."""
        for track in (track for of_lane in self._tracks for track in of_lane):
            track.end()

    def _lane(self, trajectory: _Slice) -> int:
        while self._taken and self._taken[0][0] <= trajectory.start_ns:
            heapq.heappush(self._free, heapq.heappop(self._taken)[1])
        lane = heapq.heappop(self._free) if self._free else len(self._tracks)
        if lane == len(self._tracks):
            self._tracks.append([])
            self._add(lane)
        heapq.heappush(self._taken, (trajectory.end_ns, lane))
        return lane

    def _track(self, lane: int, span: _Slice, first: int) -> _Track:
        """Return the first row of a number, from one on, on which a slice nests."""
        found = next((track for track in self._tracks[lane][first:] if track.takes(span)), None)
        return found if found is not None else self._add(lane)

    def _add(self, lane: int) -> _Track:
        row = partial(tracks.numbered_row, parent=self._group, name=f"trajectory {lane + 1}", position=lane)
        track = _Track(self._trace, self._trace.track(row), self._sequence)
        self._tracks[lane].append(track)
        return track
