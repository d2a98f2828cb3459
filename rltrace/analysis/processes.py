"""The processes of a run: who they are, who started whom, and which of them died."""

from __future__ import annotations

import signal
from bisect import bisect_right
from typing import Any, Literal

import msgspec

from rltrace.analysis.clocks import TimeLine, bound_seconds
from rltrace.analysis.observations import Observations
from rltrace.analysis.seen.process import Seen
from rltrace.record.manifest import host_name

State = Literal["alive", "ended", "died", "gone", "stopped", "unknown"]


class ProcessFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the run."""

    key: str
    """Its folder in the Recording."""
    name: str
    """What it is called in every table and in the timeline."""
    role: str
    """`driver`, `worker`, `engine`, `sampler`, `main`, ..."""
    rank: int | None
    """Its rank; None if it has none."""
    host: str
    """Its host."""
    pid: int
    """Its process id there."""
    device: str | None
    """Uuid of the device that it works on."""
    parent: str | None
    """Key of the traced process that started it."""
    state: State
    """`ended`: it finished its part of the Recording, or went on as another program (`exec`). `alive`: it still runs.
    `died`: it went without finishing. `stopped`: likewise, because the user stopped the run or another process had
    died. `gone`: likewise, and nobody watched it, so it may have ended well. `unknown`: not finished, and on another
    host."""
    killed_by: str | None
    """Name of the signal that killed it, if known."""
    ran_when_driver_left: bool | None
    """Whether it still ran when a driver left its Ray cluster, whose workers Ray ends then. None: no driver has said
    that it left one, or nobody saw when this process, on another host, went."""
    start_seconds: float
    """When it began, counted from the beginning of the Recording."""
    last_seconds: float
    """When it ended, or its last event."""
    gone_seconds: float | None
    """When it was seen to be gone, which may be long after its last event; None if nobody saw that."""
    spans: int
    """How many spans it recorded."""
    samples: int
    """How many samples of counters it recorded."""
    clock_aligned: bool
    """False if its clock was never compared with the run's: its times were shifted by real time, and their error is
    unknown."""
    clock_bound_seconds: float | None
    """The largest possible error of its times; 0 on the run's own clock, None is unknown."""


def processes(seen: Observations) -> list[ProcessFigures]:
    """Return every process, by when it began."""
    parents = _parents(seen.processes)
    left = [process for process in seen.processes if process.process.left_running]
    found = [_process(process, parents[process.process.key], left, seen) for process in seen.processes]
    return sorted(found, key=lambda process: process.start_seconds)


def state(seen: Seen, all_seen: Observations) -> State:
    """Return whether a process lives, ended in good order, or died, as far as anybody saw."""
    process = seen.process
    if process.was_stopped:
        return "stopped"
    if process.end_ns is not None:
        return "ended"
    if process.killed_by is not None:
        return "died"
    if process.key in all_seen.went_on_ns:
        return "ended"
    if process.host != host_name():
        return "unknown"
    if process.is_alive:
        return "alive"
    return "died" if all_seen.recording.is_watched else "gone"


def _process(seen: Seen, parent: str | None, left: list[Seen], all_seen: Observations) -> ProcessFigures:
    process = seen.process
    gone_ns = _at(seen, process.gone_ns, all_seen.time_line)
    return ProcessFigures(
        key=process.key,
        name=process.name,
        role=process.role,
        rank=process.rank,
        host=process.host,
        pid=process.pid,
        device=seen.lane.device,
        parent=parent,
        state=state(seen, all_seen),
        killed_by=signal_name(process.killed_by),
        ran_when_driver_left=_ran_when_left(seen, left, all_seen.time_line),
        start_seconds=(seen.first_ns - all_seen.start_ns) / 1e9,
        last_seconds=(seen.last_ns - all_seen.start_ns) / 1e9,
        gone_seconds=None if gone_ns is None else (gone_ns - all_seen.start_ns) / 1e9,
        spans=seen.spans,
        samples=seen.samples,
        clock_aligned=all_seen.time_line.is_aligned(process),
        clock_bound_seconds=bound_seconds(seen, all_seen.time_line),
    )


def _ran_when_left(seen: Seen, left: list[Seen], time_line: TimeLine) -> bool | None:
    """Whether a process still ran when one of the drivers that left their cluster did so, the last time."""
    process = seen.process
    if any(process.key in driver.process.left_running for driver in left):
        return True
    if any(process.host == driver.process.host for driver in left):
        return False
    left_ns = max((at_ns for driver in left if (at_ns := _at(driver, driver.process.left_ns, time_line))), default=None)
    gone_ns = _at(seen, process.gone_ns, time_line)
    return None if left_ns is None or gone_ns is None else gone_ns >= left_ns


def _at(seen: Seen, time_ns: int | None, time_line: TimeLine) -> int | None:
    return None if time_ns is None else time_ns + time_line.shift_ns(seen.process)


def _parents(all_seen: list[Seen]) -> dict[str, str | None]:
    """Return each process's parent: the one it names, else the one that had its parent's pid when it began."""
    known = {seen.process.key for seen in all_seen}
    of_pid: dict[tuple[str, Any], list[Seen]] = {}
    for seen in sorted(all_seen, key=_began):
        of_pid.setdefault((seen.process.host, seen.process.pid), []).append(seen)
    parents: dict[str, str | None] = {}
    for seen in all_seen:
        named = seen.process.parent
        parents[seen.process.key] = named if named in known else _by_pid(seen, of_pid)
    return parents


def _by_pid(child: Seen, of_pid: dict[tuple[str, Any], list[Seen]]) -> str | None:
    """Return the last process that began with the parent's pid before the child; processes of a pid are in order of
    their start."""
    same = of_pid.get((child.process.host, child.process.identity.get("ppid")), [])
    older = reversed(same[: bisect_right(same, child.first_ns, key=_began)])
    return next((seen.process.key for seen in older if seen is not child), None)


def _began(seen: Seen) -> int:
    return seen.first_ns


def signal_name(number: int | None) -> str | None:
    """Return what a signal is called; None for no signal."""
    if number is None:
        return None
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal, or one that this system does not have
        return f"signal {number}"
