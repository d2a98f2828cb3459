"""When each rank was there: until it begins its work it starts up, and after it is gone it is neither busy nor idle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import EMPTY, Intervals
from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import Observations, once
from rltrace.analysis.processes import state
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.steps import StepWindows


class Lifetime(NamedTuple):
    """From the beginning of a lane's first process to the end of its last one."""

    start_ns: int
    end_ns: int
    was_cut_off: bool
    """Whether the last one did not end in good order, so that its last step is not whole."""


class Presence(NamedTuple):
    """What a lane has of each window."""

    windows: Intervals
    """The windows, each until the lane was gone; empty where it was."""
    is_there: NDArray[np.bool_]
    """Whether it was there for a part of the window; for the start-up always, because it is awaited."""
    is_cut_off: NDArray[np.bool_]
    """Whether it was cut off inside of the window."""
    starting: Intervals
    """When it had not begun: one row, or none. The driver's work is to wait for others, from the beginning on."""


@once
def lifetimes(seen: Observations) -> dict[Lane, Lifetime]:
    """Return when each lane was there."""
    return {lane: _lifetime(seen, seen.on(lane)) for lane in dict.fromkeys(one.lane for one in seen.processes)}


def _lifetime(seen: Observations, members: list[Seen]) -> Lifetime:
    end_ns, was_cut_off = max(_end(seen, process) for process in members)
    return Lifetime(min(process.first_ns for process in members), end_ns, was_cut_off)


def _end(seen: Observations, process: Seen) -> tuple[int, bool]:
    """Return when a process was gone, and whether it was cut off; that of the run if nobody knows that it is gone."""
    how = state(process, seen)
    if how in ("alive", "unknown"):
        return seen.end_ns, False
    return min(seen.open_until_ns(process), seen.end_ns), how != "ended"


def presence(seen: Observations, lane: Lane, windows: StepWindows, phases: list[Intervals]) -> Presence:
    """Return what a lane has of each window.

    Args:
        seen: What was kept of the Recording.
        lane: The lane.
        windows: Those that its phases are counted in.
        phases: Its own phases.
    """
    life = lifetimes(seen)[lane]
    starts_ns, whole_ns = windows.windows[:, 0], windows.windows[:, 1]
    ends_ns = np.maximum(np.minimum(whole_ns, life.end_ns), starts_ns)
    is_startup = np.arange(len(starts_ns)) == 0
    is_there = is_startup | ((starts_ns < life.end_ns) & (whole_ns > life.start_ns))
    return Presence(
        windows=np.column_stack([starts_ns, ends_ns]),
        is_there=is_there,
        is_cut_off=is_there & life.was_cut_off & (life.end_ns < whole_ns),
        starting=EMPTY if lane.is_driver else _starting(life, windows, phases),
    )


def _starting(life: Lifetime, windows: StepWindows, phases: list[Intervals]) -> Intervals:
    """Return when a lane had not begun: until its first phase, or until the steps begin if it was there by then."""
    begins_ns, steps_ns = windows.windows[0].tolist()
    if not windows.has_beginning:
        return EMPTY
    first_ns = min((int(rows[:, 0].min()) for rows in phases if len(rows)), default=steps_ns)
    until_ns = first_ns if life.start_ns > steps_ns else min(first_ns, steps_ns)
    return np.array([(begins_ns, until_ns)], np.int64) if until_ns > begins_ns else EMPTY
