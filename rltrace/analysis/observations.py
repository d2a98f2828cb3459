"""All that figures are computed from, of all processes of a Recording."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.growth import Growth
from rltrace.analysis.lanes import Lane, lanes
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.seeing import see
from rltrace.events import SAMPLER
from rltrace.read import cores
from rltrace.read.recording import Recording


class Observations:
    """What was kept of a Recording; all times are on its `TimeLine`.

    Memory: a few numbers for each span and each owner's sample; nothing for any other event, such as torch.profiler's.
    """

    def __init__(self, recording: Recording) -> None:
        processes = recording.processes
        self.recording = recording
        self.time_line = TimeLine(recording)
        on_lane = lanes(processes)
        before = Growth(recording)
        self.processes = cores.each(
            lambda process: see(process, on_lane[process.key], self.time_line, before), processes
        )
        self.damaged = before.damaged
        """Files of the cache that could not be used, because they are damaged."""
        self._on_lane: dict[Lane, list[Seen]] = {}
        for seen in self.processes:
            self._on_lane.setdefault(seen.lane, []).append(seen)
        self.samplers = [seen for seen in self.processes if seen.process.role == SAMPLER]
        self.pids: dict[str, set[int]] = {}
        """Those of each host's processes."""
        for process in processes:
            self.pids.setdefault(process.host, set()).add(process.pid)
        self.start_ns = min((seen.first_ns for seen in self.processes), default=0)
        self.end_ns = max((seen.last_ns for seen in self.processes), default=0)
        """The time of the last event of all."""
        self.now_ns = self.time_line.now_ns()
        self.went_on_ns = _went_on_ns(self.processes)
        """By the key of a process that went on as another program (`exec`), when that program began."""
        for seen in self.processes:
            if self.is_end_known(seen) and not seen.process.is_alive:
                over_ns = self.open_until_ns(seen)
                for kept in seen.intervalled():
                    kept.over_ns = over_ns

    def on(self, lane: Lane) -> list[Seen]:
        """Return what was kept of the processes of a lane."""
        return self._on_lane.get(lane, [])

    def open_until_ns(self, seen: Seen) -> int:
        """Return until when an open span of a process counts: until the process was over, else until its last event."""
        over_ns = self._over_ns(seen)
        return seen.last_ns if over_ns is None else over_ns

    def is_end_known(self, seen: Seen) -> bool:
        """Return whether a process is alive, or has ended its part, or was seen to be gone."""
        return seen.process.end_ns is not None or self._over_ns(seen) is not None

    def _over_ns(self, seen: Seen) -> int | None:
        """Return when it was seen to be gone, or now if it is alive."""
        if seen.process.key in self.went_on_ns:
            return self.went_on_ns[seen.process.key]
        if seen.process.is_alive:
            return self.now_ns
        gone_ns = seen.process.gone_ns
        return None if gone_ns is None else gone_ns + self.time_line.shift_ns(seen.process)


Made = TypeVar("Made")
Of = TypeVar("Of")


def once(make: Callable[[Of], Made]) -> Callable[[Of], Made]:
    """Make what several figures need once for each Recording. Nobody may change it."""
    made: WeakKeyDictionary[Of, Made] = WeakKeyDictionary()

    @functools.wraps(make)
    def known(of: Of) -> Made:
        if of not in made:
            made[of] = make(of)
        return made[of]

    return known


def _went_on_ns(all_seen: list[Seen]) -> dict[str, int]:
    """Return when the next program of the same process began, for each that did not end its part itself."""
    began_ns: dict[str, int] = {}
    next_of: dict[tuple[Any, ...], Seen] = {}
    for seen in sorted(all_seen, key=lambda seen: -seen.first_ns):
        process = seen.process
        if process.life is None:
            continue
        if process.life in next_of and (process.end_ns is None or process.gone_ns is not None):
            began_ns[process.key] = next_of[process.life].first_ns
        next_of[process.life] = seen
    return began_ns
