"""What a step waited for, from its end back to its beginning, and what it would have taken otherwise.

A phase begins when what it waited for is done: the phase before on its own rank, if that ended just then; else the one
that ended last on any rank or the driver. Walking back from the end of a step finds a chain of phases without a hole:
its parts and the gaps between them add up to the step. Whatever is not on it could have taken longer, by its slack.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.findings.finding import UnjudgeableError
from rltrace.analysis.findings.rollout_tail import tails_of
from rltrace.analysis.findings.run import Run
from rltrace.analysis.findings.slow_rank import Slowness, behind_others, slowness_of
from rltrace.analysis.intervals import cut
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


class _Segment(NamedTuple):
    """A piece of a path; a gap has no lane and no phase."""

    start_ns: int
    end_ns: int
    lane: int | None
    phase: str | None
    after: str | None
    before: str | None


class _Pieces(NamedTuple):
    """The phases of one step, by the time at which they end."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    lanes: NDArray[np.int64]
    phases: NDArray[np.int64]


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
    paths = [
        [_named(segment, place, names, slow) for segment in _path(pieces[place], start_ns, end_ns, phases)]
        for place, (start_ns, end_ns) in enumerate(steps.tolist())
    ]
    typical = int(np.argsort(run.step_seconds, kind="stable")[len(steps) // 2])
    return CriticalPath(
        steps=run.numbers,
        seconds=float(run.step_seconds.mean()),
        parts=_parts(paths, names, float(run.step_seconds.mean())),
        what_ifs=sorted(_what_ifs(run, paths, slow), key=lambda one: -one.bound_seconds),
        slack=list(_slack(run)),
        typical_step=run.numbers[typical],
        segments=[_shown(segment, names, run.seen.start_ns) for segment in paths[typical]],
    )


def _overlapping(run: Run) -> int:
    ends = [span.end_ns for span in run.windows.spans[:-1]]
    starts = [span.start_ns for span in run.windows.spans[1:]]
    return sum(end is not None and start < end for end, start in zip(ends, starts, strict=True))


def _pieces(run: Run) -> tuple[list[str], list[str], list[_Pieces]]:
    """Return the names of lanes, those of phases, and what each step has of them."""
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
    whole = whole[np.lexsort((whole[:, 2], whole[:, 0]))]
    bounds = np.searchsorted(whole[:, 0], np.arange(len(run.steps) + 1))
    return names, phases, [_Pieces(*whole[first:last, 1:].T) for first, last in pairwise(bounds)]


def _path(pieces: _Pieces, start_ns: int, end_ns: int, phases: Sequence[str]) -> list[_Segment]:
    """Walk back from the end of a step to its beginning."""
    found: list[_Segment] = []
    now_ns, lane, behind = end_ns, -1, None
    while now_ns > start_ns:
        at = _waited_for(pieces, now_ns, lane)
        until_ns = start_ns if at is None else int(pieces.ends[at])
        before = None if at is None else phases[int(pieces.phases[at])]
        if until_ns < now_ns:
            found.append(_Segment(until_ns, now_ns, None, None, before, behind))
        if at is None:
            break
        now_ns, lane, behind = int(pieces.starts[at]), int(pieces.lanes[at]), before
        found.append(_Segment(now_ns, until_ns, lane, before, None, None))
    return found[::-1]


def _waited_for(pieces: _Pieces, now_ns: int, lane: int) -> int | None:
    """Return the piece that ended before a moment: of the same lane if it ended just then, else the last one of all."""
    last = int(np.searchsorted(pieces.ends, now_ns, side="right")) - 1
    if last < 0:
        return None
    first = int(np.searchsorted(pieces.ends, now_ns - JUST_BEFORE_NS, side="left"))
    own = np.flatnonzero(pieces.lanes[first : last + 1] == lane)
    return first + int(own[-1]) if len(own) else last


# ---- whom a phase waited for ------------------------------------------------------------------------------------


def _named(segment: _Segment, place: int, names: Sequence[str], slow: Mapping[str, Slowness]) -> _Segment:
    """Return a segment with the culprit as its lane, where collectives make all ranks equally slow."""
    known = slow.get(segment.phase or "")
    if segment.lane is None or known is None or known.waited is None or names[segment.lane] == DRIVER_ROLE:
        return segment
    return segment._replace(lane=names.index(known.lanes[int(known.took[:, place].argmax())].name))


def _parts(paths: Sequence[Sequence[_Segment]], names: Sequence[str], seconds: float) -> list[PathPart]:
    """Return the mean of all paths, by phase and by gap, in the order in which they come."""
    lengths = defaultdict[tuple[str | None, ...], float](float)
    lanes = defaultdict[tuple[str | None, ...], Counter[str]](Counter)
    places = defaultdict[tuple[str | None, ...], list[float]](list)
    for path in paths:
        for at, segment in enumerate(path):
            key = segment.phase, segment.after, segment.before
            lengths[key] += (segment.end_ns - segment.start_ns) / 1e9 / len(paths)
            places[key].append(at / len(path))
        for phase, lane in {(one.phase, one.lane) for one in path if one.lane is not None}:
            lanes[phase, None, None][names[lane]] += 1
    in_time = sorted(lengths, key=lambda key: sum(places[key]) / len(places[key]))
    return [
        PathPart(
            phase=key[0],
            after=key[1],
            before=key[2],
            seconds=lengths[key],
            share=lengths[key] / seconds,
            lanes=dict(lanes[key].most_common(NAMED)),
        )
        for key in in_time
    ]


def _shown(segment: _Segment, names: Sequence[str], from_ns: int) -> PathSegment:
    return PathSegment(
        start_seconds=(segment.start_ns - from_ns) / 1e9,
        end_seconds=(segment.end_ns - from_ns) / 1e9,
        lane=None if segment.lane is None else names[segment.lane],
        phase=segment.phase,
    )


# ---- otherwise --------------------------------------------------------------------------------------------------


def _what_ifs(run: Run, paths: Sequence[Sequence[_Segment]], slow: Mapping[str, Slowness]) -> Iterator[WhatIf]:
    """Yield bounds: what is on the path cannot save more than it is there, nor more than it is behind the others."""
    on_path = _on_path(paths)
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
                gains[slow[name].lanes[at].name] += float(seconds[place]) / len(paths)
        most = max(gains, key=lambda lane: gains[lane])
        yield WhatIf(what=f"{most} as fast as {MEDIAN}", bound_seconds=gains[most])
    gaps = sum((one.end_ns - one.start_ns for path in paths for one in path if one.phase is None), 0) / 1e9
    yield WhatIf(what="nothing between two phases", bound_seconds=gaps / len(paths))
    with suppress(UnjudgeableError):
        yield WhatIf(what="no request among the slowest 5 %", bound_seconds=fmean(tails_of(run).seconds.tolist()))
    if SYNC in on_path:
        yield WhatIf(what="the weight sync beside other work", bound_seconds=float(on_path[SYNC].mean()))


def _on_path(paths: Sequence[Sequence[_Segment]]) -> dict[str, NDArray[np.float64]]:
    """Return for how long each phase is on the path of each step."""
    found = defaultdict[str, NDArray[np.float64]](lambda: np.zeros(len(paths)))
    for place, path in enumerate(paths):
        for segment in path:
            if segment.phase is not None:
                found[segment.phase][place] += (segment.end_ns - segment.start_ns) / 1e9
    return dict(found)


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
