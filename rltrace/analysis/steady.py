"""The step that readers compare: means over the steps after the first, which warms up kernels and communicators."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Protocol, TypeVar

import msgspec

from rltrace.analysis.lanes import DRIVER_ROLE
from rltrace.analysis.phases import IDLE, STARTING, UNLABELLED, RankStep, in_order
from rltrace.analysis.steps import FIRST, Step, StepWindows


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """One length over several steps."""

    mean_seconds: float
    """Mean over the steps."""
    median_seconds: float
    """Median over the steps."""
    least_seconds: float
    """Shortest of the steps."""
    most_seconds: float
    """Longest of the steps."""


class PhaseSpread(Spread, frozen=True, kw_only=True):
    """A phase of one lane over several steps; 0 in a step that does not have it."""

    share: float
    """Share of the steps' time, 0 to 1."""


class Coverage(msgspec.Struct, frozen=True):
    """How much of a step is explained: shares of it, which are 1 together. Of the ranks, or of other processes without
    any."""

    phases: float
    """In a phase, or waiting for the driver while that is in one."""
    unlabelled: float
    """In no phase, though the rank computed."""
    idle: float
    """In no phase, while nothing computed, or before it began."""


class LaneSteps(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank, the driver or another process did with several steps."""

    lane: str
    """`rank 0`, `driver`, or the name of the process."""
    rank: int | None
    """The rank; None if the lane has none."""
    seconds: Spread
    """Length of the steps."""
    phases: dict[str, PhaseSpread]
    """By phase, as in `RankStep`; a step without the phase counts as 0."""


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that are alike, and how long everything took in them."""

    steps: list[int]
    """Numbers of the steps: all that have ended and were recorded, after the first."""
    first_step: int | None
    """Number of the step that is left out as warm-up; None if it is among `steps`, or is open, aborted, not recorded
    or gone."""
    has_first: bool
    """Whether no other step has ended, so that the first one is among `steps`."""
    unfinished_steps: int
    """How many steps are left out because they are open or were aborted."""
    seconds: Spread
    """Length of a step."""
    lanes: list[LaneSteps]
    """One item per rank; also the driver and other processes that have phases."""
    coverage: Coverage | None
    """How much of a step phases explain; None without any phase."""


def steady(
    windows: StepWindows, steps: Sequence[Step], phases: Sequence[RankStep], *, chosen: bool = False
) -> Steady | None:
    """Return the steady step of a run; None while no step is over.

    Args:
        windows: Windows of the steps.
        steps: The steps themselves.
        phases: Phases of each step and rank.
        chosen: The steps were chosen, so that all of them count.
    """
    having = [own for own in windows.all() if own.steady]
    if not having:
        return None
    beginning = [own for own in having if own.has_beginning]
    apart = [own for own in beginning if FIRST not in own.steady and own.recorded[FIRST] and own.finished[FIRST]]
    counted = [step for step in steps if step.steady]
    of_lanes = lanes([row for row in phases if row.steady])
    return Steady(
        steps=sorted({step.step for step in counted}),
        first_step=next((own.numbers[FIRST] for own in apart), None),
        has_first=not chosen and not apart and any(FIRST in own.steady for own in beginning),
        unfinished_steps=sum(not finished for own in windows.all() for finished in own.finished),
        seconds=spread([step.seconds for step in counted]),
        lanes=of_lanes,
        coverage=_coverage(together(of_lanes)),
    )


def _coverage(shown: Sequence[LaneSteps]) -> Coverage | None:
    if not shown:
        return None
    unlabelled, idle, starting = (
        fmean(lane.phases[name].share if name in lane.phases else 0.0 for lane in shown)
        for name in (UNLABELLED, IDLE, STARTING)
    )
    return Coverage(1.0 - unlabelled - idle - starting, unlabelled, idle + starting)


def lanes(rows: Sequence[RankStep]) -> list[LaneSteps]:
    """Return each lane over its rows, in the order in which they come."""
    names = dict.fromkeys(row.lane for row in rows)
    return [_lane([row for row in rows if row.lane == name]) for name in names]


def _lane(rows: list[RankStep]) -> LaneSteps:
    names = in_order(name for row in rows for name in row.phases)
    whole = sum(row.seconds for row in rows)
    phases = {}
    for name in names:
        seconds = [row.phases[name].seconds if name in row.phases else 0.0 for row in rows]
        share = sum(seconds) / whole if whole else 0.0
        phases[name] = PhaseSpread(**msgspec.structs.asdict(spread(seconds)), share=share)
    return LaneSteps(lane=rows[0].lane, rank=rows[0].rank, seconds=spread([row.seconds for row in rows]), phases=phases)


def together(shown: Sequence[LaneSteps]) -> list[LaneSteps]:
    """Return the lanes that one figure can stand for: the ranks; without ranks, the other processes."""
    ranks = [lane for lane in shown if lane.rank is not None]
    return ranks or [lane for lane in shown if lane.lane != DRIVER_ROLE] or list(shown)


def spread(seconds: Sequence[float]) -> Spread:
    """Return the spread of at least one length."""
    return Spread(
        mean_seconds=fmean(seconds),
        median_seconds=median(seconds),
        least_seconds=min(seconds),
        most_seconds=max(seconds),
    )


class OfStep(Protocol):
    """What belongs to a step."""

    @property
    def step(self) -> int | None:
        """Number of the step."""


Stepped = TypeVar("Stepped", bound=OfStep)


def of_steady(items: Sequence[Stepped], found: Steady | None) -> list[Stepped]:
    """Return those of the steady steps; none if there are no such steps."""
    steps = frozenset(() if found is None else found.steps)
    return [item for item in items if item.step in steps]
