"""The part of a run that `--steps`, `--ranks` and `--time` choose, as a Recording that has nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.lanes import lanes
from rltrace.analysis.step_times import StepTime, step_times
from rltrace.errors import SelectionError
from rltrace.events import SAMPLER
from rltrace.read.gate import MOST_NS
from rltrace.read.recording import Process, Recording
from rltrace.read.selection import ALL, Numbers, Seconds, Selection, numbers, written
from rltrace.read.window import Cut, Windows

_ALWAYS: Windows = ((0, MOST_NS),)


def selected(recording: Recording, selection: Selection, *, whole_steps: bool = False) -> Recording:
    """Return the part of a Recording that was asked for, or the Recording itself if that is all of it.

    Whole spans that overlap the part are in it. Processes without a rank, such as the driver, are in it whichever ranks
    were chosen, but for samplers of hosts on which other ranks are and none of these.

    Args:
        recording: The whole.
        selection: What was asked for.
        whole_steps: Steps that overlap the chosen time are in the part as a whole, with all that happened in them: of
            a part of a step no figure can be made.

    Raises:
        SelectionError: there is no such step, rank or time; the message says which there are.
    """
    if selection == ALL:
        return recording
    if whole_steps and selection.time is not None:
        selection = _whole_steps(recording, selection, selection.time)
    processes = recording.processes if selection.ranks is None else _of_ranks(recording, selection.ranks)
    if selection.steps is None and selection.time is None:
        cuts = {process.key: Cut(depth=selection.depth) for process in processes}
        return recording.part(cuts, steps_are_chosen=False)
    steps = [] if selection.steps is None else step_times(recording)
    chosen = [] if selection.steps is None else chosen_steps(recording, steps, selection.steps)
    limits = _ALWAYS if selection.time is None else (_window(recording, selection.time),)
    time_line = TimeLine(recording)
    cuts = {}
    for process in processes:
        windows = _cut(_ALWAYS if selection.steps is None else _windows_of(process, chosen), limits)
        if windows:
            own = _own(process, windows, steps, time_line.shift_ns(process))
            cuts[process.key] = own._replace(depth=selection.depth)
    if not cuts:
        raise SelectionError(f"steps {selection.steps} and time {selection.time} do not overlap")
    return recording.part(cuts, steps_are_chosen=selection.steps is not None)


def chosen_steps(recording: Recording, steps: Sequence[StepTime], numbers: Numbers) -> list[StepTime]:
    """Return the steps of a run that were asked for.

    Raises:
        SelectionError: no step has that number; the message says which there are.
    """
    existing = [step.number for step in steps]
    missing = numbers.without_any(existing)
    if missing is not None:
        there = f"the run has steps {written(existing)}" if steps else "the run has no steps"
        raise SelectionError(f"{recording.path}: steps {missing}: no such step; {there}")
    return [step for step in steps if numbers.has(step.number)]


def _whole_steps(recording: Recording, selection: Selection, time: Seconds) -> Selection:
    """Return a selection of the steps that overlap a time, in place of the time; of a run without steps the same."""
    steps = step_times(recording)
    if not steps:
        return selection
    begin_ns, end_ns = _window(recording, time)
    in_time = [
        step.number for step in steps if step.start_ns < end_ns and (step.end_ns is None or begin_ns < step.end_ns)
    ]
    if selection.steps is not None:
        in_time = [number for number in in_time if selection.steps.has(number)]
    if not in_time:
        raise SelectionError(f"{recording.path}: time {time}: no chosen step is in that time")
    return selection._replace(steps=numbers(written(in_time)), time=None)


def _of_ranks(recording: Recording, numbers: Numbers) -> list[Process]:
    """Choose processes by their lane: an engine that does not say its rank is on its device's lane."""
    on_lane = lanes(recording.processes)
    existing = {lane.rank for lane in on_lane.values() if lane.rank is not None}
    missing = numbers.without_any(existing)
    if missing is not None:
        there = f"the run has ranks {written(existing)}" if existing else "the run has no ranks"
        raise SelectionError(f"{recording.path}: ranks {missing}: no such rank; {there}")
    ranks = {process.key: on_lane[process.key].rank for process in recording.processes}
    of_ranks = [process for process in recording.processes if ranks[process.key] is not None]
    elsewhere = {process.host for process in of_ranks} - {
        process.host for process in of_ranks if numbers.has(ranks[process.key])
    }
    return [
        process
        for process in recording.processes
        if numbers.has(ranks[process.key])
        or (ranks[process.key] is None and not (process.role == SAMPLER and process.host in elsewhere))
    ]


def _window(recording: Recording, time: Seconds) -> tuple[int, int]:
    """Return the chosen window on the `TimeLine`."""
    time_line = TimeLine(recording)
    start_ns = min(process.start_ns + time_line.shift_ns(process) for process in recording.processes)
    last_ns = _last_ns(recording, time_line)
    begin_ns = start_ns + round(time.begin * 1e9)
    if begin_ns >= last_ns:
        seconds = (last_ns - start_ns) / 1e9
        raise SelectionError(f"{recording.path}: time {time} begins after the run, which lasted {seconds:.1f} s")
    return begin_ns, MOST_NS if math.isinf(time.end) else start_ns + round(time.end * 1e9)


def _last_ns(recording: Recording, time_line: TimeLine) -> int:
    """Return when the last process ended; far in the future if only a look at all events could tell."""
    last_ns = 0
    for process in recording.processes:
        end_ns = process.gone_ns if process.end_ns is None else process.end_ns
        last_ns = max(last_ns, MOST_NS if end_ns is None else end_ns + time_line.shift_ns(process))
    return last_ns


def _windows_of(process: Process, chosen: Sequence[StepTime]) -> Windows:
    """Return windows from a process's own steps if it has some, else from the run's."""
    steps = [step for step in chosen if step.key == process.key] or chosen
    merged: list[tuple[int, int]] = []
    for begin, end in sorted((step.start_ns, MOST_NS if step.end_ns is None else step.end_ns) for step in steps):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def _cut(windows: Windows, limits: Windows) -> Windows:
    pairs = ((max(begin, low), min(end, high)) for begin, end in windows for low, high in limits)
    return tuple((begin, end) for begin, end in pairs if begin < end)


def _own(process: Process, windows: Windows, steps: Sequence[StepTime], shift_ns: int) -> Cut:
    """Return the cut in the process's own times."""
    numbers = {step.start_ns - shift_ns: step.number for step in steps if step.key == process.key}
    return Cut(tuple((begin - shift_ns, end - shift_ns) for begin, end in windows), numbers)
