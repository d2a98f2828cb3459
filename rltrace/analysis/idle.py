"""Where a rank was idle: between which phases, and what the driver and other processes did meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.coded import Coded
from rltrace.analysis.computing import computing
from rltrace.analysis.intervals import EARLIEST_NS, EMPTY, Intervals, added_up_by, cut, opened_last, outside, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.lifetimes import Presence, presence
from rltrace.analysis.observations import Observations
from rltrace.analysis.phases import driver_phases, lane_phases
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.rows import distinct, groups
from rltrace.analysis.steps import FIRST, StepWindows

RUN, STARTUP, FIRST_STEP, STEADY_STEP = "run", "startup", "first_step", "steady_step"
"""What is added up: all of a Recording without steps; otherwise the time before the steps, or a step."""

Between = tuple[str | None, str | None]
"""The phases around a gap; None if the step begins, or ends, with the gap."""


class IdleGap(msgspec.Struct, frozen=True, kw_only=True):
    """A lane's time between two phases, idle or unlabelled; for the steady steps a mean."""

    lane: str
    """`rank 0`, `driver`, or the name of the process."""
    rank: int | None
    """Rank of the lane; None if it has none."""
    host: str | None
    """Host of the rank."""
    device: str | None
    """Uuid of the rank's device."""
    of: str
    """What the row is about: `startup`, `first_step` (where it is left out of the mean), `steady_step` (a mean over the
    steady steps), or `run` for a Recording without steps."""
    after: str | None
    """The phase before the gap, of the rank or of the driver; None if the step begins with the gap."""
    before: str | None
    """The phase after the gap; None if the step ends with the gap."""
    count: float
    """How many such gaps there were; a mean over the steady steps."""
    seconds: float
    """Their length; all rows of a lane add up to its `start-up`, `unlabelled` and `idle` together."""
    unlabelled_seconds: float
    """The part of `seconds` in which the rank computed: an automatic span, GPU time or processor time says so."""
    others_seconds: float
    """The part of `seconds` in which another rank was in a phase."""
    driver_seconds: dict[str, float]
    """What the driver did in the gap: seconds by the span, or by the method of a `ray.call`, that it had opened last in
    this step. The largest is first."""
    own_seconds: dict[str, float]
    """The same for the processes of this lane."""
    elsewhere_seconds: dict[str, float]
    """The same for processes that belong neither to the driver nor to a rank, such as agent loops."""


def idle_gaps(seen: Observations, windows: StepWindows) -> list[IdleGap]:
    """Return the gaps of each rank, or without ranks of each other process: start-up, first step, steady steps; the
    longest first."""
    phases, of_driver = lane_phases(seen), driver_phases(seen)
    lanes = shown_lanes(phases)
    busy = union(*(rows for lane in lanes for rows in phases[lane].values()))
    driver = _Spans(seen, [process for process in seen.processes if process.lane.is_driver])
    elsewhere = _Spans(seen, [process for process in seen.processes if _is_elsewhere(process.lane, lanes)])
    computed = computing(seen)
    found: list[IdleGap] = []
    for lane in lanes:
        own = _Spans(seen, seen.on(lane))
        known = phases[lane] if lane.is_driver else {**phases[lane], **of_driver}
        there = presence(seen, lane, windows.of(lane), [*phases[lane].values()])
        gaps = _Gaps(known, windows.of(lane), there)
        own.keep_inside(gaps.rows)
        found += gaps.figures(lane, busy, computed.get(lane, EMPTY), driver, own, elsewhere)
    return found


def shown_lanes(phases: Iterable[Lane]) -> list[Lane]:
    """Return the lanes that one figure can stand for, as in `steady.together`."""
    all_lanes = list(phases)
    ranks = [lane for lane in all_lanes if lane.rank is not None]
    return ranks or [lane for lane in all_lanes if not lane.is_driver] or all_lanes


def _is_elsewhere(lane: Lane, lanes: list[Lane]) -> bool:
    return not lane.is_driver and lane.rank is None and lane not in lanes


class _Spans:
    """All spans of some processes, phases included."""

    def __init__(self, seen: Observations, processes: Iterable[Seen]) -> None:
        rows, places = [EMPTY], [0]
        known: dict[str, int] = {}
        for process in processes:
            until_ns = seen.open_until_ns(process)
            named = (*process.own_spans.items(), *process.automatic_spans.items())
            of_calls = ((method or name, kept) for (name, method), kept in named)
            for name, kept in (*of_calls, *process.phases.items(), *process.stages.items()):
                rows.append(kept.rows(until_ns))
                places.append(known.setdefault(name, len(known)))
        self.names = list(known)
        self._rows: Intervals = np.concatenate(rows)
        self._name_of_row = np.repeat(np.array(places, np.intp), [*map(len, rows)])
        self._opened: dict[int, tuple[Intervals, NDArray[np.intp]]] = {}

    def keep_inside(self, gaps: Intervals) -> None:
        """Leave out the spans that lie in none of some gaps, which are disjoint and in order."""
        is_inside = np.zeros(len(self._rows), np.bool_)
        is_inside[cut(self._rows, gaps)[2]] = True
        inside = np.flatnonzero(is_inside)
        self._rows, self._name_of_row = self._rows.take(inside, axis=0), self._name_of_row[inside]

    def opened_last(self, windows: StepWindows) -> tuple[Intervals, NDArray[np.intp]]:
        """Return which span was opened last at each instant, of those that began in its window; a program's main span
        says nothing.

        Returns:
            Segments, disjoint and in order; and the name of each, by its place in `names`.
        """
        if id(windows) not in self._opened:
            segments, row = opened_last(self._rows, windows.windows)
            self._opened[id(windows)] = segments, self._name_of_row[row]
        return self._opened[id(windows)]


class _Group(NamedTuple):
    """Gaps between the same two phases, in windows that belong together."""

    of: str
    """What the windows are."""
    windows: int
    """How many there are."""
    between: Between
    gaps: NDArray[np.intp]


class _Gaps:
    """When a lane was idle, in every window, as far as it was there."""

    def __init__(self, phases: dict[str, Intervals], windows: StepWindows, there: Presence) -> None:
        self._windows = windows
        self._is_whole = there.is_there & ~there.is_cut_off
        self.rows, self._window = outside(union(*phases.values()), there.windows)
        self._lengths_ns = self.rows[:, 1] - self.rows[:, 0]
        edges = there.windows[self._window]
        after = _phases_at(self.rows[:, 0], edges[:, 0], [rows[:, 1] for rows in phases.values()])
        before = _phases_at(self.rows[:, 1], edges[:, 1], [rows[:, 0] for rows in phases.values()])
        names = [None, *phases]
        codes, places = distinct(after * len(names) + before)
        pairs = [divmod(code, len(names)) for code in codes.tolist()]
        self._between = Coded([(names[after], names[before]) for after, before in pairs], places)

    def figures(self, lane: Lane, busy: Intervals, computed: Intervals, *spans: _Spans) -> Iterator[IdleGap]:
        """Return one item per pair of phases, for the steps that belong together.

        Args:
            lane: The lane of the gaps.
            busy: When any lane was in a phase.
            computed: When this lane computed.
            spans: Spans of the driver, of the lane, and of processes elsewhere.
        """
        others_ns, computed_ns = self._inside_ns(busy), self._inside_ns(computed)
        groups = [*self._groups()]
        meanwhile = (self._meanwhile(groups, of) for of in spans)
        for (what, many, (after, before), gaps), driver, own, elsewhere in zip(groups, *meanwhile, strict=True):
            yield IdleGap(
                lane=lane.name,
                rank=lane.rank,
                host=lane.host,
                device=lane.device,
                of=what,
                after=after,
                before=before,
                count=len(gaps) / many,
                seconds=float(self._lengths_ns[gaps].sum()) / 1e9 / many,
                unlabelled_seconds=float(computed_ns[gaps].sum()) / 1e9 / many,
                others_seconds=float(others_ns[gaps].sum()) / 1e9 / many,
                driver_seconds=driver,
                own_seconds=own,
                elsewhere_seconds=elsewhere,
            )

    def _inside_ns(self, rows: Intervals) -> NDArray[np.float64]:
        """Return how much of each gap lies inside of some rows."""
        pieces, _, gap = cut(self.rows, rows)
        return np.bincount(gap, pieces[:, 1] - pieces[:, 0], len(self.rows)).astype(np.float64)

    def _groups(self) -> Iterator[_Group]:
        """Return the gaps that are alike, for the steps that belong together; the longest first."""
        for what, all_places in _together(self._windows):
            places = np.array(all_places, np.intp)
            if what == STEADY_STEP:
                places = places[self._is_whole[places]]
            is_in = np.zeros(len(self._is_whole), np.bool_)
            is_in[places] = True
            inside = np.flatnonzero(is_in[self._window])
            alike = [inside[of_kind] for of_kind in groups(self._between.places[inside])]
            alike.sort(key=lambda of_kind: (-self._lengths_ns[of_kind].sum(), of_kind[0]))
            for gaps in alike:
                yield _Group(what, len(places), self._between.values[self._between.places[gaps[0]]], gaps)

    def _meanwhile(self, groups: list[_Group], spans: _Spans) -> list[dict[str, float]]:
        """Return seconds of a step by name, for each group of gaps; the largest first."""
        segments, name_of_segment = spans.opened_last(self._windows)
        group_of = np.full(len(self.rows), -1, np.intp)
        for place, group in enumerate(groups):
            group_of[group.gaps] = place
        all_ns = added_up_by(self.rows, group_of, segments, name_of_segment, (len(groups), len(spans.names)))
        found = []
        for group, name_ns in zip(groups, all_ns.tolist(), strict=True):
            named_ns = [(name, ns) for name, ns in zip(spans.names, name_ns, strict=True) if ns]
            named_ns.sort(key=lambda item: -item[1])
            found.append({name: ns / 1e9 / group.windows for name, ns in named_ns})
        return found


def _phases_at(
    times_ns: NDArray[np.int64], edges_ns: NDArray[np.int64], of_phases: list[NDArray[np.int64]]
) -> NDArray[np.intp]:
    """Return which phase begins or ends at each of these times, by its place from 1; 0 at the edge of the window, and
    where none does."""
    known_ns = np.concatenate([[EARLIEST_NS], *of_phases])
    place = np.repeat(np.arange(len(of_phases) + 1), [1, *map(len, of_phases)])
    order = np.argsort(known_ns, kind="stable")
    last = order[np.searchsorted(known_ns[order], times_ns, side="right") - 1]
    return np.where((known_ns[last] == times_ns) & (times_ns != edges_ns), place[last], 0)


def _together(windows: StepWindows) -> Iterator[tuple[str, list[int]]]:
    """Return the windows that a mean is computed over, and what they are."""
    yield (STARTUP if windows.spans else RUN), [0]
    if (
        windows.spans
        and windows.has_beginning
        and windows.recorded[FIRST]
        and windows.finished[FIRST]
        and FIRST not in windows.steady
    ):
        yield FIRST_STEP, [FIRST]
    if windows.steady:
        yield STEADY_STEP, windows.steady
