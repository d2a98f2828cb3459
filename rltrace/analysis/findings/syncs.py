"""The weight syncs of the steady steps, by their slowest rank; findings about the sync share this."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from rltrace.analysis.findings.run import Run
from rltrace.analysis.weight_sync import RankSync

Syncs = dict[int, list[RankSync]]
"""The syncs of each step, one per rank, by the number of the step."""


def slowest(syncs: Syncs, of: Callable[[RankSync], float]) -> list[float]:
    """Return a figure for each sync, of the rank with the most of it."""
    return [max(map(of, of_step)) for of_step in syncs.values()]


def per_step(run: Run, syncs: Syncs, of: Callable[[RankSync], float]) -> list[float]:
    """Return the same for each steady step. It is 0 for a step without a sync, of which some runs have many."""
    return [max(map(of, syncs.get(number, ())), default=0.0) for number in run.numbers]


def length(syncs: Syncs) -> float:
    """Return the mean length of a sync on its slowest rank."""
    return fmean(slowest(syncs, lambda sync: sync.seconds))


def seconds_of(stage: str) -> Callable[[RankSync], float]:
    """Return a function that returns the seconds of a stage; 0 for a sync without it."""
    return lambda sync: sync.stages[stage].seconds if stage in sync.stages else 0.0
