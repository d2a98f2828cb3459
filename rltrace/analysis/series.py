"""Seconds of each steady step: of the step, of its phases, and of the stages of its weight sync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

from rltrace.analysis.lanes import DRIVER_ROLE
from rltrace.analysis.phases import RankStep, in_order
from rltrace.analysis.steady import lanes, of_steady, together
from rltrace.analysis.summary import Summary
from rltrace.analysis.weight_sync import RankSync
from rltrace.events import DRIVER_PHASES, SYNC_STAGES

BySteps = Mapping[str, Sequence[float]]
"""For each name, seconds of each steady step."""


def of_ranks(summary: Summary) -> list[RankStep]:
    """Return the phases of the ranks in the steady steps; without ranks, those of other processes."""
    rows = [row for row in summary.phases if row.steady]
    names = {lane.lane for lane in together(lanes(rows))}
    return [row for row in rows if row.lane in names]


def of_driver(summary: Summary) -> list[RankStep]:
    """Return the driver's own phases in the steady steps."""
    rows = [row for row in summary.phases if row.steady and row.lane == DRIVER_ROLE]
    own = [{name: share for name, share in row.phases.items() if name in DRIVER_PHASES} for row in rows]
    return [msgspec.structs.replace(row, phases=phases) for row, phases in zip(rows, own, strict=True)]


def phase_seconds(rows: Sequence[RankStep]) -> dict[str, list[float]]:
    """Return the seconds of each phase in each step, the mean of the ranks."""
    names = in_order(name for row in rows for name in row.phases)
    of_name = {
        name: _by_step((row.step, row.phases[name].seconds if name in row.phases else 0.0) for row in rows)
        for name in names
    }
    return {name: seconds for name, seconds in of_name.items() if any(seconds)}


def step_seconds(summary: Summary, rows: Sequence[RankStep]) -> list[float]:
    """Return the length of each steady step, the mean of the ranks."""
    if rows:
        return _by_step((row.step, row.seconds) for row in rows)
    return _by_step((step.step, step.seconds) for step in summary.steps if step.steady)


def stage_seconds(summary: Summary) -> dict[str, list[float]]:
    """Return the seconds of each stage of the weight sync in each steady step, the mean of the ranks."""
    syncs = steady_syncs(summary)
    names = [name for name in SYNC_STAGES if any(name in sync.stages for sync in syncs)]
    return {
        name: _by_step((sync.step, sync.stages[name].seconds if name in sync.stages else 0.0) for sync in syncs)
        for name in names
    }


def steady_syncs(summary: Summary) -> list[RankSync]:
    """Return the weight syncs of the steady steps."""
    return of_steady(summary.weight_sync, summary.steady)


def _by_step(seconds: Iterable[tuple[int | None, float]]) -> list[float]:
    """Return the mean of each step."""
    of_step: dict[int | None, list[float]] = {}
    for step, length in seconds:
        of_step.setdefault(step, []).append(length)
    return [fmean(lengths) for lengths in of_step.values()]
