"""In which step and in which phase an instant is: asked for millions of spans at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import EMPTY, Intervals
from rltrace.analysis.lanes import Lane, lanes
from rltrace.analysis.phase_times import NONE, PhaseTimes, spans_of
from rltrace.analysis.step_times import StepTime, step_times
from rltrace.frames import arrow
from rltrace.read.gate import MOST_NS
from rltrace.read.recording import Recording

Numbers = NDArray[np.int64]


class StepMoments:
    """The steps that count for each lane, as in `StepWindows`: those of the run, or the lane's own ones."""

    def __init__(self, recording: Recording) -> None:
        on_lane = lanes(recording.processes)
        of_lane: dict[Lane, list[StepTime]] = {}
        for step in step_times(recording):
            of_lane.setdefault(on_lane[step.key], []).append(step)
        self._of_lane = {lane: _Windows(steps) for lane, steps in of_lane.items()}
        self._of_run = next(iter(self._of_lane.values()), _Windows([]))

    def column(self, lane: Lane, times_ns: Numbers) -> Any:
        """Return the numbers of the steps that instants are in; nothing outside of steps."""
        return self._of_lane.get(lane, self._of_run).column(times_ns)


class _Windows:
    """Steps; if they overlap, one ends where the next one begins."""

    def __init__(self, steps: Sequence[StepTime]) -> None:
        self.starts_ns = np.array([step.start_ns for step in steps], np.int64)
        ends_ns = [MOST_NS if step.end_ns is None else step.end_ns for step in steps]
        following_ns = [*(step.start_ns for step in steps[1:]), MOST_NS]
        self.ends_ns = np.minimum(np.array(ends_ns, np.int64), np.array(following_ns[: len(steps)], np.int64))
        self.numbers = np.array([step.number for step in steps], np.int64)

    def column(self, times_ns: Numbers) -> Any:
        if not len(self.numbers):
            return arrow.same_number(None, len(times_ns))
        places = np.searchsorted(self.starts_ns, times_ns, side="right") - 1
        is_outside = (places < 0) | (times_ns >= self.ends_ns[places])
        return arrow.numbers(self.numbers[places], is_outside)


class PhaseMoments:
    """The phases of every lane; of several at once the one that began last counts."""

    def __init__(self, of_lane: Mapping[Lane, Mapping[str, Intervals]]) -> None:
        self._of_lane = {lane: _Changes(phases) for lane, phases in of_lane.items()}

    def column(self, lane: Lane, times_ns: Numbers) -> Any:
        """Return the phases that instants are in; nothing outside of phases."""
        changes = self._of_lane.get(lane, _NO_CHANGES)
        return arrow.texts(changes.places(times_ns), changes.names)


class _Changes:
    """When the phase of a lane changes, and to which."""

    def __init__(self, phases: Mapping[str, Intervals]) -> None:
        self.edges_ns = np.unique(np.concatenate([EMPTY, *phases.values()]))
        # Twice the times: between two edges that are one nanosecond apart there is an instant, too.
        spans = spans_of([(name, 2 * rows) for name, rows in phases.items()])
        self.names = spans.names
        inside = PhaseTimes(spans).around(self.edges_ns[:-1] + self.edges_ns[1:])
        self._place_behind = np.concatenate([[NONE], inside, [NONE]])
        """The phase before the first edge, which is none, and behind each."""

    def places(self, times_ns: Numbers) -> Numbers:
        """Return the place of each instant's phase in `names`; -1 for none."""
        found: Numbers = self._place_behind[np.searchsorted(self.edges_ns, times_ns, side="right")]
        return found


_NO_CHANGES = _Changes({})
