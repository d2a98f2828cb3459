"""What a step waited for, from its end back to its beginning, and what it would have taken otherwise.

A phase begins when what it waited for is done: the phase before on its own rank, if that ended just then; else the one
that ended last on any rank or the driver. Walking back from the end of a step finds a chain of phases without a hole:
its parts and the gaps between them add up to the step. Whatever is not on it could have taken longer, by its slack.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.findings.finding import UnjudgeableError
from rltrace.analysis.findings.rollout_tail import tails_of
from rltrace.analysis.findings.run import Run
from rltrace.analysis.findings.slow_rank import Slowness, behind_others, slowness_of
from rltrace.analysis.intervals import LATEST_NS, Intervals, cut
from rltrace.analysis.lanes import DRIVER_ROLE
from rltrace.analysis.phases import in_order

JUST_BEFORE_NS = 1_000_000
"""A phase that ends so shortly before the next one on its rank is what that waited for: a call of a driver, which would
wait for all ranks, takes longer (docs/measurements/verl_8b.md)."""

SYNC = "weight_sync"

NAMED = 3
"""How many lanes are named."""

MEDIAN = "the median of the others"


class PathPart(msgspec.Struct, frozen=True, kw_only=True):
    """A phase on the path, or a gap between two."""

    phase: str | None
    """The phase; None for a gap, in which nothing that is marked was waited for."""
    after: str | None
    """For a gap, the phase before it; None at the beginning of a step."""
    before: str | None
    """For a gap, the phase behind it; None at the end of a step."""
    seconds: float
    """Mean over the steps."""
    share: float
    """Share of the step, 0 to 1."""
    lanes: dict[str, int]
    """In how many steps it was waited for on which lane, the most first; up to 3. Where collectives make all ranks
    equally slow, it is the one that waits least in them. Empty for a gap."""


class PathSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the path of one step."""

    start_seconds: float
    """When it begins, counted from the beginning of the Recording."""
    end_seconds: float
    """When it ends: where the next one begins, or the step ends."""
    lane: str | None
    """The lane that was waited for; None for a gap."""
    phase: str | None
    """Its phase; None for a gap."""


class Slack(msgspec.Struct, frozen=True, kw_only=True):
    """How much longer a phase could take on a rank without anybody waiting for it: means over the steps."""

    phase: str
    """The phase."""
    median_seconds: float
    """Of the median rank."""
    most_seconds: float
    """Of the rank that has most."""
    most_lane: str
    """That rank."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """A bound of what a step could gain."""

    what: str
    """What would be otherwise."""
    bound_seconds: float
    """What a step could gain at most: what takes its place on the path is not known."""


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """What the steady steps waited for."""

    steps: list[int]
    """Their numbers."""
    seconds: float
    """Their mean length; that of all parts together."""
    parts: list[PathPart]
    """Phases and gaps in the order of a step."""
    what_ifs: list[WhatIf]
    """Bounds of what could be gained, the largest first."""
    slack: list[Slack]
    """By phase, what its ranks have to spare."""
    typical_step: int
    """Number of the step whose length is the median."""
    segments: list[PathSegment]
    """That step, second by second."""


Places = NDArray[np.int64]

NONE = -1
"""In place of a lane or of a phase that there is none of."""


class _Segments(NamedTuple):
    """Pieces of the paths of all steps, in the order of time; a gap has no lane and no phase."""

    steps: Places
    starts_ns: Places
    ends_ns: Places
    lanes: Places
    phases: Places
    after: Places
    """For a gap, the phase before it."""
    before: Places
    """For a gap, the phase behind it."""

    @property
    def seconds(self) -> NDArray[np.float64]:
        """How long each one is."""
        return np.asarray((self.ends_ns - self.starts_ns) / 1e9)

    def part(self, chosen: NDArray[Any]) -> _Segments:
        """Return some of them, by their places or by a mask."""
        return _Segments(*(column[chosen] for column in self))


class _Pieces:
    """The phases of all steps, by the time at which they end."""

    def __init__(self, rows: NDArray[np.int64], steps: int) -> None:
        """Args:
        rows: The step, the start, the end, the lane and the phase of each.
        steps: How many steps there are.
        """
        rows = np.vstack([rows, (steps, LATEST_NS, LATEST_NS, NONE, NONE)])  # so that there is always one
        self.starts_ns, self.ends_ns, self.lanes, self.phases = np.ascontiguousarray(rows[:, 1:].T)
        self.firsts = np.searchsorted(rows[:, 0], np.arange(steps))
        """The first piece of each step."""
        self._by_lane = np.sort(self.lanes * len(rows) + np.arange(len(rows)))
        """The place of each lane's pieces, behind the lane."""

    def waited_for(self, steps: Places, at_ns: Places, lanes: Places) -> Places:
        """Return the piece that ended before each of some moments: of the same lane if it ended just then, else the
        last one of all; `NONE` without any in that step."""
        many, firsts = len(self.ends_ns), self.firsts[steps]
        last = np.searchsorted(self.ends_ns, at_ns, side="right") - 1
        just_before = np.searchsorted(self.ends_ns, at_ns - JUST_BEFORE_NS, side="left")
        found = self._by_lane[np.searchsorted(self._by_lane, lanes * many + last, side="right") - 1]
        own = found - lanes * many
        is_own = (own >= np.maximum(firsts, just_before)) & (own <= last)
        return np.where(last < firsts, NONE, np.where(is_own, own, last))


def critical_path(run: Run) -> CriticalPath:
    """Return what the steady steps of a run waited for.

    Raises:
        UnjudgeableError: there are no phases or steps, steps overlap, or times of different processes do not compare.
    """
    steps = run.steps
    overlapping = _overlapping(run)
    if overlapping:
        raise UnjudgeableError(
            f"{overlapping} steps begin before the one before has ended: such steps have no one path"
        )
    run.require_one_time()
    names, phases, pieces = _pieces(run)
    if not names:
        raise UnjudgeableError("no rank and no driver has a phase in a steady step")
    slow = slowness_of(run)
    paths = _named(_paths(pieces, steps), names, phases, slow)
    typical = int(np.argsort(run.step_seconds, kind="stable")[len(steps) // 2])
    return CriticalPath(
        steps=run.numbers,
        seconds=float(run.step_seconds.mean()),
        parts=_parts(paths, names, phases, len(steps), float(run.step_seconds.mean())),
        what_ifs=sorted(_what_ifs(run, paths, phases, slow), key=lambda one: -one.bound_seconds),
        slack=list(_slack(run)),
        typical_step=run.numbers[typical],
        segments=list(_shown(paths.part(paths.steps == typical), names, phases, run.seen.start_ns)),
    )


def _overlapping(run: Run) -> int:
    ends = [span.end_ns for span in run.windows.spans[:-1]]
    starts = [span.start_ns for span in run.windows.spans[1:]]
    return sum(end is not None and start < end for end, start in zip(ends, starts, strict=True))


def _pieces(run: Run) -> tuple[list[str], list[str], _Pieces]:
    """Return the names of lanes, those of phases, and what the steps have of them."""
    rows = {lane.name: run.phases[lane] for lane in run.ranks} | {DRIVER_ROLE: run.driver_phases}
    if not run.ranks:
        rows = {lane.name: of for lane, of in run.phases.items()} | rows
    names = [name for name, of in rows.items() if of]
    phases = in_order(phase for of in rows.values() for phase in of)
    columns: list[NDArray[np.int64]] = [np.empty((0, 5), np.int64)]
    for place, name in enumerate(names):
        for phase, of in rows[name].items():
            inside, step, _ = cut(of, run.steps)
            known = np.full((len(inside), 2), (place, phases.index(phase)))
            columns.append(np.column_stack([step, inside, known]))
    whole = np.concatenate(columns)
    whole = whole[whole[:, 2] > whole[:, 1]]
    return names, phases, _Pieces(whole[np.lexsort((whole[:, 2], whole[:, 0]))], len(run.steps))


def _paths(pieces: _Pieces, windows: Intervals) -> _Segments:
    """Walk back from the end of each step to its beginning, in all steps at once."""
    found = [_Segments(*np.empty((7, 0), np.int64))]
    steps, now_ns = np.arange(len(windows)), windows[:, 1]
    lanes, behind = np.full((2, len(windows)), NONE)
    while len(goes_on := np.flatnonzero(now_ns > windows[steps, 0])):
        steps, now_ns, lanes, behind = (one[goes_on] for one in (steps, now_ns, lanes, behind))
        at, nothing = pieces.waited_for(steps, now_ns, lanes), np.full(len(steps), NONE)
        is_any = at != NONE
        until_ns = np.where(is_any, pieces.ends_ns[at], windows[steps, 0])
        phases = np.where(is_any, pieces.phases[at], NONE)
        found.append(_Segments(steps, until_ns, now_ns, nothing, nothing, phases, behind).part(until_ns < now_ns))
        at, steps, until_ns, behind, nothing = (one[is_any] for one in (at, steps, until_ns, phases, nothing))
        now_ns, lanes = pieces.starts_ns[at], pieces.lanes[at]
        found.append(_Segments(steps, now_ns, until_ns, lanes, behind, nothing, nothing))
    whole = _Segments(*map(np.concatenate, zip(*found, strict=True)))
    return whole.part(np.argsort(whole.starts_ns, kind="stable"))


# ---- whom a phase waited for ------------------------------------------------------------------------------------


def _named(paths: _Segments, names: Sequence[str], phases: Sequence[str], slow: Mapping[str, Slowness]) -> _Segments:
    """Return paths with the culprit as the lane, where collectives make all ranks equally slow."""
    lanes = paths.lanes.copy()
    driver = names.index(DRIVER_ROLE) if DRIVER_ROLE in names else NONE
    for phase, name in enumerate(phases):
        known = slow.get(name)
        if known is not None and known.waited is not None:
            own = np.flatnonzero((paths.phases == phase) & (lanes != driver))
            place_of = np.array([names.index(lane.name) for lane in known.lanes])
            lanes[own] = place_of[known.took.argmax(axis=0)[paths.steps[own]]]
    return paths._replace(lanes=lanes)


def _parts(paths: _Segments, names: Sequence[str], phases: Sequence[str], steps: int, seconds: float) -> list[PathPart]:
    """Return the mean of all paths, by phase and by gap, in the order in which they come.

    Args:
        paths: Those of all steps.
        names: Of their lanes.
        phases: The names of their phases.
        steps: How many steps there are.
        seconds: The mean length of a step.
    """
    many = len(phases) + 1
    code = ((paths.phases + 1) * many + paths.after + 1) * many + paths.before + 1
    codes, first, kind = np.unique(code, return_index=True, return_inverse=True)
    lengths = np.bincount(kind, paths.seconds / steps).tolist()
    places = np.bincount(kind, _shares_of_path(paths.steps)) / np.bincount(kind)
    known, lanes = [*phases, None], _lanes(paths, names)
    return [
        PathPart(
            phase=known[(phase := codes[one] // many**2 - 1)],
            after=known[codes[one] // many % many - 1],
            before=known[codes[one] % many - 1],
            seconds=lengths[one],
            share=lengths[one] / seconds,
            lanes=lanes.get(phase, {}),
        )
        for one in np.lexsort((first, places)).tolist()
    ]


def _shares_of_path(steps: Places) -> NDArray[np.float64]:
    """Return how far along the path of its step each piece comes, from 0 to 1."""
    many = np.bincount(steps)
    return np.asarray((np.arange(len(steps)) - (np.cumsum(many) - many)[steps]) / many[steps])


def _lanes(paths: _Segments, names: Sequence[str]) -> dict[int, dict[str, int]]:
    """Return for each phase in how many steps it was waited for on which lane, the most first."""
    paths = paths.part(paths.lanes != NONE)
    many = int(paths.steps.max(initial=0)) + 1
    once, first = np.unique((paths.phases * len(names) + paths.lanes) * many + paths.steps, return_index=True)
    pairs, began, times = np.unique(once // many, return_index=True, return_counts=True)
    found: dict[int, dict[str, int]] = {}
    for at in np.lexsort((first[began], -times)).tolist():
        phase, lane = divmod(int(pairs[at]), len(names))
        of_phase = found.setdefault(phase, {})
        if len(of_phase) < NAMED:
            of_phase[names[lane]] = int(times[at])
    return found


def _shown(path: _Segments, names: Sequence[str], phases: Sequence[str], from_ns: int) -> Iterator[PathSegment]:
    """Yield the pieces of a path, in seconds since the beginning of the Recording."""
    lanes, known = [*names, None], [*phases, None]
    columns = (path.starts_ns, path.ends_ns, path.lanes, path.phases)
    for start_ns, end_ns, lane, phase in zip(*(column.tolist() for column in columns), strict=True):
        yield PathSegment(
            start_seconds=(start_ns - from_ns) / 1e9,
            end_seconds=(end_ns - from_ns) / 1e9,
            lane=lanes[lane],
            phase=known[phase],
        )


# ---- otherwise --------------------------------------------------------------------------------------------------


def _what_ifs(run: Run, paths: _Segments, phases: Sequence[str], slow: Mapping[str, Slowness]) -> Iterator[WhatIf]:
    """Yield bounds: what is on the path cannot save more than it is there, nor more than it is behind the others."""
    steps = len(run.steps)
    on_path = _on_path(paths, phases, steps)
    behind = {
        name: np.minimum(behind_others(found.took).max(axis=0), on_path[name])
        for name, found in slow.items()
        if name in on_path
    }
    if behind:
        yield WhatIf(
            what=f"the slowest rank of each phase as fast as {MEDIAN}",
            bound_seconds=float(sum(of.mean() for of in behind.values())),
        )
        gains = defaultdict[str, float](float)
        for name, seconds in behind.items():
            for place, at in enumerate(slow[name].took.argmax(axis=0).tolist()):
                gains[slow[name].lanes[at].name] += float(seconds[place]) / steps
        most = max(gains, key=lambda lane: gains[lane])
        yield WhatIf(what=f"{most} as fast as {MEDIAN}", bound_seconds=gains[most])
    gaps = paths.part(paths.phases == NONE)
    gaps_ns = int((gaps.ends_ns - gaps.starts_ns).sum())
    yield WhatIf(what="nothing between two phases", bound_seconds=gaps_ns / 1e9 / steps)
    with suppress(UnjudgeableError):
        yield WhatIf(what="no request among the slowest 5 %", bound_seconds=fmean(tails_of(run).seconds.tolist()))
    if SYNC in on_path:
        yield WhatIf(what="the weight sync beside other work", bound_seconds=float(on_path[SYNC].mean()))


def _on_path(paths: _Segments, phases: Sequence[str], steps: int) -> dict[str, NDArray[np.float64]]:
    """Return for how long each phase is on the path of each step."""
    own = {name: paths.part(paths.phases == phase) for phase, name in enumerate(phases)}
    return {
        name: np.bincount(of.steps, of.seconds, steps).astype(np.float64) for name, of in own.items() if len(of.steps)
    }


def _slack(run: Run) -> Iterator[Slack]:
    """Yield by phase how much earlier than the last rank the others are done."""
    for name in in_order(name for lane in run.ranks for name in run.phases[lane]):
        lanes = [lane for lane in run.ranks if name in run.phases[lane]]
        ends = np.zeros((len(lanes), len(run.steps)), np.int64)
        for place, lane in enumerate(lanes):
            pieces, step, _ = cut(run.phases[lane][name], run.steps)
            np.maximum.at(ends[place], step, pieces[:, 1])
        in_all = (ends > 0).all(axis=0)
        if len(lanes) < 2 or not in_all.any():
            continue
        spare = (ends.max(axis=0) - ends)[:, in_all].mean(axis=1) / 1e9
        most = int(spare.argmax())
        yield Slack(
            phase=name,
            median_seconds=float(np.median(spare)),
            most_seconds=float(spare[most]),
            most_lane=lanes[most].name,
        )
