"""Where a rank was idle: between which phases, and what the driver and other processes did meanwhile."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import Intervals, cut, opened_last, outside, total_ns, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import Observations, Seen
from rltrace.analysis.phases import driver_phases, lane_phases
from rltrace.analysis.steps import FIRST, StepWindows

RUN, STARTUP, FIRST_STEP, STEADY_STEP = "run", "startup", "first_step", "steady_step"
"""What is added up: all of a Recording without steps; else what is before them, or a step."""


class IdleGap(msgspec.Struct, frozen=True, kw_only=True):
    """A lane's idle time between two phases; of the steady steps a mean."""

    lane: str
    rank: int | None
    of: str
    """`run`, `startup`, `first_step` (where it is no steady one) or `steady_step`."""
    after: str | None
    """The phase before it, of the lane or of the driver; None: the step begins with it."""
    before: str | None
    """The one behind it; None: the step ends with it."""
    count: float
    """Of times."""
    seconds: float
    """Over all pairs of phases they add up to the lane's `idle`."""
    others_seconds: float
    """Of those, while another rank was in a phase."""
    driver_seconds: dict[str, float]
    """By the span, or the method called, that the driver had opened last, in that step; what took most first."""
    own_seconds: dict[str, float]
    """Likewise of the lane's own processes."""
    elsewhere_seconds: dict[str, float]
    """Likewise of all processes that are neither the driver's nor a rank's: agent loops, rewards."""


def idle_gaps(seen: Observations, windows: StepWindows) -> list[IdleGap]:
    """Of each rank, without any of each other process: start-up, first step, steady ones; what took most first."""
    phases, of_driver = lane_phases(seen), driver_phases(seen)
    lanes = [lane for lane in phases if lane.rank is not None] or [lane for lane in phases if not lane.is_driver]
    busy = {lane: union(*phases[lane].values()) for lane in lanes}
    driver = _Spans(seen, [process for process in seen.processes if process.lane.is_driver])
    elsewhere = _Spans(seen, [p for p in seen.processes if not p.lane.is_driver and p.lane not in busy])
    found: list[IdleGap] = []
    for lane in lanes:
        own = _Spans(seen, [process for process in seen.processes if process.lane == lane])
        others = union(*(busy[other] for other in lanes if other != lane))
        gaps = _Gaps({**phases[lane], **of_driver}, windows.of(lane))
        found += gaps.figures(lane, others, driver, own, elsewhere)
    return found


class _Spans:
    """Spans of some processes that are no phases."""

    def __init__(self, seen: Observations, processes: Iterable[Seen]) -> None:
        rows = []
        names: list[str] = []
        for process in processes:
            until_ns = seen.open_until_ns(process, unseen_ns=process.last_ns)
            for (name, method), kept in process.named.items():
                rows.append(kept.rows(until_ns))
                names += [method or name] * len(rows[-1])
        self.rows: Intervals = np.concatenate(rows) if rows else np.empty((0, 2), np.int64)
        self.names = names

    def opened_last(self, gaps: Intervals, since_ns: NDArray[np.int64]) -> list[Counter[str]]:
        """Of each gap, nanoseconds by name; what was open before its step is, as a program's main, no answer."""
        found: list[Counter[str]] = [Counter() for _ in gaps]
        for gap, row, length_ns in opened_last(self.rows, gaps, since_ns):
            found[gap][self.names[row]] += length_ns
        return found


class _Gaps:
    """When a lane was idle, in every window."""

    def __init__(self, phases: dict[str, Intervals], windows: StepWindows) -> None:
        self._windows = windows
        self.rows, window = outside(union(*phases.values()), windows.windows)
        self.window = window
        edges = windows.windows[window]
        after = _names_at(self.rows[:, 0], edges[:, 0], {name: rows[:, 1] for name, rows in phases.items()})
        before = _names_at(self.rows[:, 1], edges[:, 1], {name: rows[:, 0] for name, rows in phases.items()})
        self.between = list(zip(after, before, strict=True))

    def figures(self, lane: Lane, others: Intervals, *spans: _Spans) -> Iterator[IdleGap]:
        """One item a pair of phases, of the steps that go together; `spans` of driver, lane, and elsewhere."""
        others_ns = _inside_ns(others, self.rows)
        begins_ns = self._windows.windows[self.window, 0]
        meanwhile = [of.opened_last(self.rows, begins_ns) for of in spans]
        for what, places in _together(self._windows):
            alike: defaultdict[tuple[str | None, str | None], list[int]] = defaultdict(list)
            for gap in np.flatnonzero(np.isin(self.window, places)).tolist():
                alike[self.between[gap]].append(gap)
            for (after, before), gaps in sorted(alike.items(), key=lambda item: -total_ns(self.rows[item[1]])):
                driver, own, elsewhere = (_mean((of[gap] for gap in gaps), len(places)) for of in meanwhile)
                yield IdleGap(
                    lane=lane.name,
                    rank=lane.rank,
                    of=what,
                    after=after,
                    before=before,
                    count=len(gaps) / len(places),
                    seconds=total_ns(self.rows[gaps]) / 1e9 / len(places),
                    others_seconds=int(others_ns[gaps].sum()) / 1e9 / len(places),
                    driver_seconds=driver,
                    own_seconds=own,
                    elsewhere_seconds=elsewhere,
                )


def _names_at(
    times_ns: NDArray[np.int64], edges_ns: NDArray[np.int64], phases: dict[str, NDArray[np.int64]]
) -> list[str | None]:
    """Which phase has one of its times at each of these; None at the edge of the window."""
    name_at = {at_ns: name for name, of_phase in phases.items() for at_ns in of_phase.tolist()}
    pairs = zip(times_ns.tolist(), edges_ns.tolist(), strict=True)
    return [None if at_ns == edge_ns else name_at[at_ns] for at_ns, edge_ns in pairs]


def _inside_ns(rows: Intervals, gaps: Intervals) -> NDArray[np.int64]:
    """How much of each gap disjoint intervals cover."""
    pieces, gap, _ = cut(rows, gaps)
    found = np.zeros(len(gaps), np.int64)
    np.add.at(found, gap, pieces[:, 1] - pieces[:, 0])
    return found


def _together(windows: StepWindows) -> Iterator[tuple[str, list[int]]]:
    """The windows that a mean is made over, and what they are."""
    yield (STARTUP if windows.spans else RUN), [0]
    if windows.spans and windows.recorded[FIRST] and windows.finished[FIRST] and FIRST not in windows.steady:
        yield FIRST_STEP, [FIRST]
    if windows.steady:
        yield STEADY_STEP, windows.steady


def _mean(each: Iterable[Counter[str]], steps: int) -> dict[str, float]:
    together: Counter[str] = Counter()
    for lengths_ns in each:
        together.update(lengths_ns)
    return {name: length_ns / 1e9 / steps for name, length_ns in together.most_common()}
