"""What each rank did in its step: seconds of phases, of waiting for the driver, of work in no phase, of idle time."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Set
from itertools import combinations

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


@functools.lru_cache(maxsize=1024)
def _in_order(phases: tuple[str, ...]) -> list[str]:
    """Return the same; the steps of a run have the same phases again and again."""
    return in_order(phases)


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


class Partition(msgspec.Struct, frozen=True):
    """A window in whole nanoseconds: `sum(phases) - overlap + wait_driver + unlabelled + starting + idle` is its
    length."""

    phases_ns: dict[str, int]
    overlap_ns: int
    wait_driver_ns: int
    unlabelled_ns: int
    starting_ns: int
    idle_ns: int


def partitions(
    phases: Mapping[str, Intervals],
    driver: Intervals,
    windows: Intervals,
    computing: Intervals = EMPTY,
    starting: Intervals = EMPTY,
) -> list[Partition]:
    """Divide a rank's windows.

    Args:
        phases: The rank's phases by name, each disjoint and in order.
        driver: When the driver was in a phase of its own.
        windows: Shape (W, 2), disjoint and in order.
        computing: When the rank computed, in a phase or not; disjoint and in order.
        starting: When it had not begun.
    """
    busy_ns = covered_in(union(*phases.values()), windows)
    known = union(driver, *phases.values())
    known_ns = covered_in(known, windows)
    gaps, window = outside(known, windows)
    unlabelled_ns = _added_up(computing, gaps, window, len(windows))
    gaps, gap = outside(union(cut(computing, gaps)[0]), gaps)
    starting_ns = _added_up(union(starting), gaps, window[gap], len(windows))
    idle_ns = windows[:, 1] - windows[:, 0] - known_ns - unlabelled_ns - starting_ns
    phases_ns: list[dict[str, int]] = [{} for _ in windows]
    for name, rows in phases.items():
        lengths_ns = covered_in(rows, windows).tolist()
        for place in np.flatnonzero(np.bincount(cut(rows, windows)[1])).tolist():
            phases_ns[place][name] = lengths_ns[place]
    columns = (busy_ns, known_ns - busy_ns, unlabelled_ns, starting_ns, idle_ns)
    return [
        Partition(
            phases_ns=of_phases_ns,
            overlap_ns=sum(of_phases_ns.values()) - busy,
            wait_driver_ns=wait_driver,
            unlabelled_ns=unlabelled,
            starting_ns=starting,
            idle_ns=idle,
        )
        for of_phases_ns, busy, wait_driver, unlabelled, starting, idle in zip(
            phases_ns, *(column.tolist() for column in columns), strict=True
        )
    ]


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
        there, steady = presence(seen, lane, own, [*whole.values()]), frozenset(own.steady)
        parts = partitions(phases, driver, there.windows, computed.get(lane, EMPTY), there.starting)
        for place in np.flatnonzero(own.recorded & there.is_there).tolist():
            if seen.recording.steps_are_chosen and own.numbers[place] is None:
                continue
            row = _rank_step(
                lane, place, own, there, parts[place], phases, steady=place in steady,
                clock_aligned=lane not in astray, inferred=of_lane,
            )  # fmt: skip
            found.append((place, row))
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


def _rank_step(
    lane: Lane,
    place: int,
    windows: StepWindows,
    there: Presence,
    parts: Partition,
    phases: dict[str, Intervals],
    *,
    steady: bool,
    clock_aligned: bool,
    inferred: Set[str],
) -> RankStep:
    window = there.windows[place : place + 1]
    length_ns = int(window[0, 1] - window[0, 0])
    named_ns = {name: parts.phases_ns[name] for name in _in_order(tuple(parts.phases_ns))}
    starting_ns = {STARTING: parts.starting_ns} if parts.starting_ns else {}
    of_nobody_ns = {UNLABELLED: parts.unlabelled_ns, IDLE: parts.idle_ns}
    all_ns = {**named_ns, WAIT_DRIVER: parts.wait_driver_ns, **starting_ns, **of_nobody_ns}
    return RankStep(
        step=windows.numbers[place],
        lane=lane.name,
        rank=lane.rank,
        host=lane.host,
        device=lane.device,
        seconds=length_ns / 1e9,
        clock_aligned=clock_aligned,
        finished=windows.finished[place],
        steady=steady and not there.is_cut_off[place],
        phases={
            name: Share(ns / 1e9, ns / length_ns if length_ns else 0.0, name in inferred) for name, ns in all_ns.items()
        },
        overlap_seconds=parts.overlap_ns / 1e9,
        overlaps=_overlaps(phases, parts.phases_ns, window) if parts.overlap_ns else [],
    )


def _overlaps(phases: dict[str, Intervals], phases_ns: dict[str, int], window: Intervals) -> list[Overlap]:
    inside = {name: cut(phases[name], window)[0] for name in phases_ns}
    pairs = []
    for one, other in combinations(in_order(phases_ns), 2):
        both_ns = phases_ns[one] + phases_ns[other] - covered_ns(inside[one], inside[other])
        if both_ns:
            pairs.append(Overlap((one, other), both_ns / 1e9))
    return pairs
