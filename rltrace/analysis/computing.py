"""Finds when a rank computed, whatever phase it was in, so that time in no phase is called idle only if the rank was
idle."""

from __future__ import annotations

import numpy as np

from rltrace.analysis.intervals import EARLIEST_NS, EMPTY, LATEST_NS, Intervals, cut, outside, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import Observations, once
from rltrace.analysis.seen.process import Seen
from rltrace.events import REQUEST, subjects

WAITING = (
    "ray.call",
    "ray.get",
    "ray.wait",
    "ray.execute",
    "ray.collect",
    "agent_loop.",
    "server.",
    "memory.",
    REQUEST,
)
"""How the names of automatic spans begin in which a process may wait for another one, or measures itself."""

CPU_COUNTER, BUSY_PERCENT = "process.cpu_percent", 50.0
"""The share of one processor from which on a process counts as computing between two samples."""

ALWAYS: Intervals = np.array([(EARLIEST_NS, LATEST_NS)], np.int64)


@once
def computing(seen: Observations) -> dict[Lane, Intervals]:
    """Return when the processes of each lane computed in no phase, by their automatic spans, GPU times and processor
    times.

    The processor time between two samples counts only if no phase lies between them; otherwise it may be the phase's.
    The driver is left out, because its ranks compute for it.
    """
    busy = _by_processor_time(seen)
    lanes = dict.fromkeys(process.lane for process in seen.processes if not process.lane.is_driver)
    return {lane: _of_lane(seen.on(lane), busy.get(lane, []), seen) for lane in lanes}


def _of_lane(processes: list[Seen], busy: list[Intervals], seen: Observations) -> Intervals:
    phases = union(*(kept.rows(seen.end_ns) for process in processes for kept in process.phases.values()))
    between, _ = outside(phases, ALWAYS)
    rows = [spans for process in processes for spans in _of_spans(process, seen)]
    rows += [_apart_from(samples, phases) for samples in busy]
    # Nearly all lies inside of phases: what is left is little to put in order.
    return union(*(cut(some, between)[0] for some in rows))


def _of_spans(process: Seen, seen: Observations) -> list[Intervals]:
    until_ns = seen.open_until_ns(process)
    automatic = [kept for (name, _), kept in process.automatic_spans.items() if not name.startswith(WAITING)]
    return [kept.rows(until_ns) for kept in (*automatic, *process.stages.values(), *process.device_spans.values())]


def _by_processor_time(seen: Observations) -> dict[Lane, list[Intervals]]:
    """Return the intervals between samples in which each process was busy, by lane."""
    lane_of = {process.process.key: process.lane for process in seen.processes}
    found: dict[Lane, list[Intervals]] = {}
    for sampler in seen.samplers:
        for name, samples in sampler.sampled.items():
            counter, of = subjects(name)
            if counter == CPU_COUNTER and of and of[0] in lane_of:
                times_ns, percent = np.array(samples.times_ns, np.int64), np.array(samples.values)
                between = np.column_stack([times_ns[:-1], times_ns[1:]])
                found.setdefault(lane_of[of[0]], []).append(between[percent[1:] >= BUSY_PERCENT])
    return found


def _apart_from(rows: Intervals, phases: Intervals) -> Intervals:
    """Return the intervals that no phase lies in."""
    if not len(rows) or not len(phases):
        return rows if len(rows) else EMPTY
    _, _, touched = cut(rows, phases)
    return rows[~np.isin(np.arange(len(rows)), touched)]
