"""What each rank did in its step: seconds of phases, of waiting for the driver, of work in no phase, of idle time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from itertools import combinations, repeat
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.computing import computing
from rltrace.analysis.intervals import EMPTY, Intervals, added_up, covered_in, covered_ns, cut, outside, union
from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.lifetimes import Presence, presence
from rltrace.analysis.observations import Observations, once
from rltrace.analysis.steps import StepWindows
from rltrace.events import DRIVER_PHASES, STARTUP_PHASES, STEP_PHASES, WAIT_DRIVER

IDLE = "idle"
UNLABELLED = "unlabelled"
"""Time in no phase in which the rank computed."""
STARTING = "start-up"
"""Time before the first phase of a rank in which nothing says that it computed: its processes start and import."""

ORDER = {name: place for place, name in enumerate((*STARTUP_PHASES, *STEP_PHASES))}
"""Known phases in the order in which they happen."""


OF_NOBODY = (WAIT_DRIVER, STARTING, UNLABELLED, IDLE)
"""What a rank's time in no phase is called."""
_OF_NOBODY = {name: len(ORDER) + 1 + place for place, name in enumerate(OF_NOBODY)}


def in_order(phases: Iterable[str]) -> list[str]:
    """Return each name once: known phases in the order of a step, the program's own phases in the given order; then
    `wait.driver`, `start-up`, `unlabelled` and `idle`."""
    once = list(dict.fromkeys(phases))
    places = ORDER if all(name in ORDER or name in _OF_NOBODY for name in once) else {}
    return sorted(once, key=lambda name: _OF_NOBODY.get(name, places.get(name, 0)))


class Share(msgspec.Struct, frozen=True):
    """A part of a rank's step."""

    seconds: float
    """Seconds of all spans of the phase together."""
    share: float
    """Share of the step, 0 to 1."""
    inferred: bool = False
    """Whether the phase was inferred from what ran, and not marked."""


class Overlap(msgspec.Struct, frozen=True):
    """Two phases of one rank at once: one of them is not a phase, or does not belong to this rank."""

    phases: tuple[str, str]
    """The two phases."""
    seconds: float
    """How long both were open."""


class RankStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one rank: its phases, `wait.driver`, `start-up`, `unlabelled` and `idle` add up to `seconds` plus
    `overlap_seconds`."""

    step: int | None
    """Number of the step; None is the start-up before the first step, or all of a Recording without steps."""
    lane: str
    """`rank 0`, `driver`, or the name of the process."""
    rank: int | None
    """The rank; None if the lane has none."""
    host: str | None
    """Host of the rank."""
    device: str | None
    """Uuid of the rank's device. A rank is a device: its phases come from all processes that work on it."""
    seconds: float
    """Length of the step; if the rank began or died in it, of the part in which it was there."""
    clock_aligned: bool
    """False if a process of the rank has a clock that was never compared with the run's, so that its times have an
    unknown error."""
    finished: bool
    """False if the step is open or was aborted by an exception: do not average over it."""
    steady: bool
    """Whether the step counts in `steady`: not that in which the rank died."""
    phases: dict[str, Share]
    """By phase, in the order of a step; then `wait.driver` (the driver is in a phase and the rank is not), `start-up`
    (only if there is any: neither is, and the rank has not had its first phase), `unlabelled` (neither is, and yet the
    rank computes: an automatic span, GPU time or processor time says so) and `idle` (neither is, and nothing computes).
    Together they are `seconds` plus `overlap_seconds`."""
    overlap_seconds: float
    """Time that is counted twice because phases overlap; 0 in a colocated run."""
    overlaps: list[Overlap]
    """Which phases overlap."""


class Partitions(NamedTuple):
    """Windows in whole nanoseconds: of each, `phases - overlap + wait_driver + unlabelled + starting + idle` is its
    length."""

    phases: list[str]
    """Their names."""
    phases_ns: NDArray[np.int64]
    """How long each phase was open in each window, (phases, windows)."""
    is_there: NDArray[np.bool_]
    """In which windows each phase was open, (phases, windows)."""
    overlap_ns: NDArray[np.int64]
    """Of each window, as the others are, (windows,)."""
    wait_driver_ns: NDArray[np.int64]
    unlabelled_ns: NDArray[np.int64]
    starting_ns: NDArray[np.int64]
    idle_ns: NDArray[np.int64]


def partitions(
    phases: Mapping[str, Intervals],
    driver: Intervals,
    windows: Intervals,
    computing: Intervals = EMPTY,
    starting: Intervals = EMPTY,
) -> Partitions:
    """Divide a rank's windows.

    Args:
        phases: The rank's phases by name, each disjoint and in order.
        driver: When the driver was in a phase of its own.
        windows: Shape (W, 2), disjoint and in order.
        computing: When the rank computed; only what lies in none of its phases counts. Disjoint and in order.
        starting: When it had not begun.
    """
    phases_ns = np.zeros((len(phases), len(windows)), np.int64)
    is_there = np.zeros((len(phases), len(windows)), np.bool_)
    for place, rows in enumerate(phases.values()):
        pieces, window, _ = cut(rows, windows)
        phases_ns[place] = added_up(pieces[:, 1] - pieces[:, 0], window, len(windows))
        is_there[place, window] = True
    busy = union(*phases.values())
    busy_ns = covered_in(busy, windows)
    known = union(driver, busy)
    known_ns = covered_in(known, windows)
    gaps, window = outside(known, windows)
    unlabelled_ns = _added_up(computing, gaps, window, len(windows))
    begins, gap, _ = cut(union(starting), gaps)
    of_begins_ns = added_up(begins[:, 1] - begins[:, 0], window[gap], len(windows))
    starting_ns = of_begins_ns - _added_up(computing, begins, window[gap], len(windows))
    return Partitions(
        phases=list(phases),
        phases_ns=phases_ns,
        is_there=is_there,
        overlap_ns=phases_ns.sum(axis=0) - busy_ns,
        wait_driver_ns=known_ns - busy_ns,
        unlabelled_ns=unlabelled_ns,
        starting_ns=starting_ns,
        idle_ns=windows[:, 1] - windows[:, 0] - known_ns - unlabelled_ns - starting_ns,
    )


def _added_up(rows: Intervals, gaps: Intervals, window: NDArray[np.intp], many: int) -> NDArray[np.int64]:
    """Return how much of some gaps disjoint rows cover, by the window that each gap is in."""
    pieces, gap, _ = cut(rows, gaps)
    return added_up(pieces[:, 1] - pieces[:, 0], window[gap], many)


def rank_steps(seen: Observations, windows: StepWindows) -> list[RankStep]:
    """Return every step of every rank, of the driver, and of every other process that has phases: by step, then by
    rank. In a part of chosen steps the start-up is not among them. Steps before a rank began or after it
    was gone are not either."""
    of_driver, computed = union(*driver_phases(seen).values()), computing(seen)
    acting = [process for process in seen.processes if process.phases]
    inferred = {(process.lane, name) for process in seen.processes for name, _ in process.inferred}
    astray = {process.lane for process in acting if not seen.time_line.is_aligned(process.process)}
    found = []
    for lane, whole in lane_phases(seen).items():
        happened = sorted(whole, key=lambda name: int(whole[name][:1, 0].sum()))
        own = windows.of(lane)
        phases = {name: whole[name] for name in happened}
        driver = EMPTY if lane.is_driver else of_driver
        of_lane = {name for name in happened if (lane, name) in inferred}
        there = presence(seen, lane, own, [*whole.values()])
        parts = partitions(phases, driver, there.windows, computed.get(lane, EMPTY), there.starting)
        rows = _of_windows(lane, own, there, parts, phases, clock_aligned=lane not in astray, inferred=of_lane)
        for place in np.flatnonzero(own.recorded & there.is_there).tolist():
            if not seen.recording.steps_are_chosen or own.numbers[place] is not None:
                found.append((place, rows[place]))
    return [rank_step for _, rank_step in sorted(found, key=lambda item: item[0])]


@once
def lane_phases(seen: Observations) -> dict[Lane, dict[str, Intervals]]:
    """Return when each lane was in each of its phases: ranks by number, then the driver and all others."""
    of_lane: dict[Lane, dict[str, list[Intervals]]] = {}
    for process in seen.processes:
        for name, kept in process.phases.items():
            of_lane.setdefault(process.lane, {}).setdefault(name, []).append(kept.rows(seen.end_ns))
    lanes = sorted(of_lane, key=order)
    return {lane: {name: union(*rows) for name, rows in of_lane[lane].items()} for lane in lanes}


@once
def driver_phases(seen: Observations) -> dict[str, Intervals]:
    """Return when the driver was in each of its own phases, wherever they were recorded."""
    found: dict[str, list[Intervals]] = {}
    for process in seen.processes:
        for name in process.phases.keys() & DRIVER_PHASES:
            found.setdefault(name, []).append(process.phases[name].rows(seen.end_ns))
    return {name: union(*rows) for name, rows in sorted(found.items())}


def _of_windows(
    lane: Lane,
    windows: StepWindows,
    there: Presence,
    parts: Partitions,
    phases: dict[str, Intervals],
    *,
    clock_aligned: bool,
    inferred: Set[str],
) -> list[RankStep]:
    """Return what a lane did in each window."""
    shares, steady = _shares(parts, there.windows, inferred), frozenset(windows.steady)
    lengths_ns, overlap_ns = there.windows[:, 1] - there.windows[:, 0], parts.overlap_ns.tolist()
    seconds, is_cut_off = (lengths_ns / 1e9).tolist(), there.is_cut_off.tolist()
    return [
        RankStep(
            step=number,
            lane=lane.name,
            rank=lane.rank,
            host=lane.host,
            device=lane.device,
            seconds=seconds[place],
            clock_aligned=clock_aligned,
            finished=windows.finished[place],
            steady=place in steady and not is_cut_off[place],
            phases=shares[place],
            overlap_seconds=overlap_ns[place] / 1e9,
            overlaps=_overlaps(phases, parts, there.windows, place) if overlap_ns[place] else [],
        )
        for place, number in enumerate(windows.numbers)
    ]


def _shares(parts: Partitions, windows: Intervals, inferred: Set[str]) -> list[dict[str, Share]]:
    """Return the parts of each window by name, as a `RankStep` has them."""
    names = [*parts.phases, *OF_NOBODY]
    lengths_ns = windows[:, 1] - windows[:, 0]
    all_ns = np.vstack([parts.phases_ns, parts.wait_driver_ns, parts.starting_ns, parts.unlabelled_ns, parts.idle_ns])
    seconds, shares = all_ns / 1e9, all_ns / np.maximum(lengths_ns, 1)
    is_there = np.vstack([parts.is_there, np.ones((len(OF_NOBODY), len(windows)), np.bool_)])
    is_there[names.index(STARTING, len(parts.phases))] = parts.starting_ns != 0
    found: list[dict[str, Share]] = [{} for _ in windows]
    for own in map(np.array, _alike(is_there)):
        places = _in_order(parts.phases, np.flatnonzero(is_there[:, own[0]]).tolist())
        named = [names[place] for place in places]
        columns = [
            map(Share, seconds[place, own].tolist(), shares[place, own].tolist(), repeat(names[place] in inferred))
            for place in places
        ]
        for window, row in zip(own.tolist(), zip(*columns, strict=True), strict=True):
            found[window] = dict(zip(named, row, strict=True))
    return found


def _alike(is_there: NDArray[np.bool_]) -> list[list[int]]:
    """Return the windows that have the same parts together: those of a run are alike again and again."""
    found: dict[bytes, list[int]] = {}
    for window, of_window in enumerate(np.ascontiguousarray(is_there.T)):
        found.setdefault(of_window.tobytes(), []).append(window)
    return [*found.values()]


def _in_order(phases: list[str], places: list[int]) -> list[int]:
    """Return the places of some parts, phases in the order of a step and then what is of nobody."""
    of_phases = {phases[place]: place for place in places if place < len(phases)}
    return [*(of_phases[name] for name in in_order(of_phases)), *places[len(of_phases) :]]


def _overlaps(phases: dict[str, Intervals], parts: Partitions, windows: Intervals, place: int) -> list[Overlap]:
    of_window = zip(parts.phases, parts.phases_ns[:, place].tolist(), parts.is_there[:, place].tolist(), strict=True)
    phases_ns = {name: length_ns for name, length_ns, is_there in of_window if is_there}
    inside = {name: cut(phases[name], windows[place : place + 1])[0] for name in phases_ns}
    pairs = []
    for one, other in combinations(in_order(phases_ns), 2):
        both_ns = phases_ns[one] + phases_ns[other] - covered_ns(inside[one], inside[other])
        if both_ns:
            pairs.append(Overlap((one, other), both_ns / 1e9))
    return pairs
