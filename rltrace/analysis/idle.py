"""Where a rank was idle: between which phases, and what the driver and other processes did meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.computing import computing
from rltrace.analysis.intervals import EMPTY, Intervals, added_up_by, cut, opened_last, outside, total_ns, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.lifetimes import Presence, presence
from rltrace.analysis.observations import Observations
from rltrace.analysis.phases import driver_phases, lane_phases
from rltrace.analysis.seen.process import Seen
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
        rows, places = [EMPTY], [np.empty(0, np.intp)]
        known: dict[str, int] = {}
        for process in processes:
            until_ns = seen.open_until_ns(process)
            named = (*process.own_spans.items(), *process.automatic_spans.items())
            of_calls = ((method or name, kept) for (name, method), kept in named)
            for name, kept in (*of_calls, *process.phases.items(), *process.stages.items()):
                rows.append(kept.rows(until_ns))
                places.append(np.full(len(rows[-1]), known.setdefault(name, len(known)), np.intp))
        self.names = list(known)
        self._rows: Intervals = np.concatenate(rows)
        self._name_of_row = np.concatenate(places)
        self._opened: dict[int, tuple[Intervals, NDArray[np.intp]]] = {}

    def keep_inside(self, gaps: Intervals) -> None:
        """Leave out the spans that lie in none of some gaps, which are disjoint and in order."""
        behind = np.append(gaps[:, 0], np.iinfo(np.int64).max)
        gap = np.searchsorted(gaps[:, 1], self._rows[:, 0], side="right")
        is_inside = behind[gap] < self._rows[:, 1]
        self._rows, self._name_of_row = self._rows[is_inside], self._name_of_row[is_inside]

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


class _Gaps:
    """When a lane was idle, in every window, as far as it was there."""

    def __init__(self, phases: dict[str, Intervals], windows: StepWindows, there: Presence) -> None:
        self._windows = windows
        self._is_whole = there.is_there & ~there.is_cut_off
        self.rows, self._window = outside(union(*phases.values()), there.windows)
        edges = there.windows[self._window]
        after = _names_at(self.rows[:, 0], edges[:, 0], {name: rows[:, 1] for name, rows in phases.items()})
        before = _names_at(self.rows[:, 1], edges[:, 1], {name: rows[:, 0] for name, rows in phases.items()})
        self._between: list[Between] = list(zip(after, before, strict=True))

    def figures(self, lane: Lane, busy: Intervals, computed: Intervals, *spans: _Spans) -> Iterator[IdleGap]:
        """Return one item per pair of phases, for the steps that belong together.

        Args:
            lane: The lane of the gaps.
            busy: When any lane was in a phase.
            computed: When this lane computed.
            spans: Spans of the driver, of the lane, and of processes elsewhere.
        """
        others_ns, computed_ns = self._inside_ns(busy), self._inside_ns(computed)
        for what, all_places in _together(self._windows):
            places = [place for place in all_places if what != STEADY_STEP or self._is_whole[place]]
            alike = self._alike(places)
            driver, own, elsewhere = (self._meanwhile(alike, of, len(places)) for of in spans)
            for at, ((after, before), gaps) in enumerate(alike):
                yield IdleGap(
                    lane=lane.name,
                    rank=lane.rank,
                    host=lane.host,
                    device=lane.device,
                    of=what,
                    after=after,
                    before=before,
                    count=len(gaps) / len(places),
                    seconds=total_ns(self.rows[gaps]) / 1e9 / len(places),
                    unlabelled_seconds=float(computed_ns[gaps].sum()) / 1e9 / len(places),
                    others_seconds=float(others_ns[gaps].sum()) / 1e9 / len(places),
                    driver_seconds=driver[at],
                    own_seconds=own[at],
                    elsewhere_seconds=elsewhere[at],
                )

    def _inside_ns(self, rows: Intervals) -> NDArray[np.float64]:
        """Return how much of each gap lies inside of some rows."""
        pieces, _, gap = cut(self.rows, rows)
        return np.bincount(gap, pieces[:, 1] - pieces[:, 0], len(self.rows)).astype(np.float64)

    def _alike(self, places: list[int]) -> list[tuple[Between, list[int]]]:
        """Return the gaps of some windows, grouped by the phases around them; the longest first."""
        found: dict[Between, list[int]] = {}
        for gap in np.flatnonzero(np.isin(self._window, places)).tolist():
            found.setdefault(self._between[gap], []).append(gap)
        return sorted(found.items(), key=lambda item: -total_ns(self.rows[item[1]]))

    def _meanwhile(self, alike: list[tuple[Between, list[int]]], spans: _Spans, steps: int) -> list[dict[str, float]]:
        """Return seconds of a step by name, for each such group of gaps."""
        segments, name = spans.opened_last(self._windows)
        group_of = np.full(len(self.rows), -1, np.intp)
        for group, (_, gaps) in enumerate(alike):
            group_of[gaps] = group
        all_ns = added_up_by(self.rows, group_of, segments, name, (len(alike), len(spans.names)))
        found = []
        for name_ns in all_ns:
            longest = np.argsort(-name_ns, kind="stable")
            found.append({spans.names[at]: float(name_ns[at]) / 1e9 / steps for at in longest.tolist() if name_ns[at]})
        return found


def _names_at(
    times_ns: NDArray[np.int64], edges_ns: NDArray[np.int64], phases: dict[str, NDArray[np.int64]]
) -> list[str | None]:
    """Return which phase begins or ends at each of these times; None at the edge of the window."""
    name_at = {at_ns: name for name, of_phase in phases.items() for at_ns in of_phase.tolist()}
    pairs = zip(times_ns.tolist(), edges_ns.tolist(), strict=True)
    return [None if at_ns == edge_ns else name_at.get(at_ns) for at_ns, edge_ns in pairs]


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
