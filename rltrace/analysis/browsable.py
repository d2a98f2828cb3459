"""The part of a large run that a browser opens: ranks and steps that stand out, the slowest among them, and a few more.

A timeline of everything would not open. What is chosen is as large as a browser shows well, and what was left out is
said.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.folding import FIRST_STEPS, LAST_STEPS, LEAST_SHARE, apart_in
from rltrace.analysis.gpu_work import GATHERS_AND_SCATTERS
from rltrace.analysis.lanes import lanes
from rltrace.analysis.step_times import StepTime, step_times
from rltrace.events import DEVICE_TIME, PHASES
from rltrace.read import columns, cores
from rltrace.read.columns import OPEN, Columns
from rltrace.read.recording import Process, Recording
from rltrace.read.selection import Selection, numbers, written

MOST_RECORDS = 10_000_000
"""So many records a browser opens. Perfetto's importer in WebAssembly took 24 s of CPU and 1.8 GB for 20 M begins and
ends of spans, of the 4 GB that it may have (research of v55.3, docs/measurements/export.md)."""

RECORD_BYTES = 45
"""A record takes so many bytes on disk, or more: 55 in the 8B run, 45 in verl's."""

MOST_RANKS = 16
"""So many ranks can be compared on a screen."""


class Browsable(NamedTuple):
    """A part of a run, and what it is a part of."""

    selection: Selection
    records: int
    """How many the whole run has, about."""
    ranks: tuple[int, int] | None
    """Of the ranks: how many are in the part, and how many there are; None if all are."""
    steps: tuple[int, int] | None
    slowest: int | None
    """The rank that is furthest from the others, if one stands out."""


def browsable(recording: Recording) -> Browsable | None:
    """Return the part of a run that a browser opens; None if it opens all of it."""
    records = sum(map(_records, recording.processes))
    if records <= MOST_RECORDS:
        return None
    on_lane = lanes(recording.processes)
    by_rank: dict[int, list[Process]] = defaultdict(list)
    for process in recording.processes:
        rank = on_lane[process.key].rank
        if rank is not None:
            by_rank[rank].append(process)
    steps = step_times(recording)
    step_numbers = sorted({step.number for step in steps})
    shown_steps = _steps(steps)
    of_ranks = {rank: sum(map(_records, own)) for rank, own in by_rank.items()}
    share = len(shown_steps) / len(step_numbers) if step_numbers else 1.0
    apart = _ranks_apart(by_rank) if len(by_rank) > 2 else []
    room = MOST_RECORDS - (records - sum(of_ranks.values())) * share
    shown_ranks: list[int] = []
    for rank in dict.fromkeys([*apart[:1], *sorted(by_rank)[:1], *apart[1:], *sorted(by_rank)]):
        if len(shown_ranks) == MOST_RANKS or (shown_ranks and of_ranks[rank] * share > room):
            break
        shown_ranks.append(rank)
        room -= of_ranks[rank] * share
    all_ranks, all_steps = len(shown_ranks) == len(by_rank), len(shown_steps) == len(step_numbers)
    return Browsable(
        Selection(
            None if all_steps else numbers(written(shown_steps)),
            None if all_ranks else numbers(written(shown_ranks)),
        ),
        records,
        None if all_ranks else (len(shown_ranks), len(by_rank)),
        None if all_steps else (len(shown_steps), len(step_numbers)),
        apart[0] if apart else None,
    )


def _records(process: Process) -> int:
    """Return how many records a process has, about: its segments are as long as what is written there, but the last
    ones."""
    return process.segment_bytes() // RECORD_BYTES


def _steps(steps: list[StepTime]) -> list[int]:
    """Return the first steps, those that stand out, and the last ones."""
    lengths: dict[int, float] = {}
    for step in steps:
        if step.end_ns is not None and step.is_whole:
            lengths[step.number] = max(lengths.get(step.number, 0.0), (step.end_ns - step.start_ns) / 1e9)
    in_order = sorted({step.number for step in steps})
    least = LEAST_SHARE * float(np.median([*lengths.values()])) if lengths else 0.0
    apart = [one.number for one in apart_in("step", lengths, least)]
    return sorted({*in_order[:FIRST_STEPS], *apart[: LAST_STEPS - FIRST_STEPS], *in_order[-LAST_STEPS:]})


def _ranks_apart(by_rank: dict[int, list[Process]]) -> list[int]:
    """Return the ranks that stand out in how long a phase, or their collectives, took, the furthest first."""
    seconds: dict[str, dict[int, float]] = defaultdict(dict)
    of_ranks = [(rank, process) for rank, processes in by_rank.items() for process in processes]
    read = cores.each(lambda one: columns.fold(one[1], _Lengths, _Lengths.add).seconds(), of_ranks)
    for (rank, _), lengths in zip(of_ranks, read, strict=True):
        for name, length in lengths.items():
            seconds[name][rank] = seconds[name].get(rank, 0.0) + length
    whole = max((max(lengths.values()) for lengths in seconds.values()), default=0.0)
    found = [one for name, lengths in seconds.items() for one in apart_in(name, lengths, LEAST_SHARE * whole)]
    return [*dict.fromkeys(one.number for one in sorted(found, key=lambda one: -abs(one.deviations)))]


_COLLECTIVES = {DEVICE_TIME + name for name in GATHERS_AND_SCATTERS}


class _Lengths:
    """How long phases took in a process, and the collectives in them."""

    def __init__(self) -> None:
        self.phases: list[tuple[int, int, str]] = []
        self.collectives: list[NDArray[np.int64]] = []
        """Begins and ends."""

    def add(self, rows: Columns) -> None:
        """Add some rows."""
        are_over = rows.end_ns != OPEN
        phases = np.array([text in PHASES for text in rows.texts], np.bool_)[rows.name] | rows.arguments["phase"]
        of_phases = np.flatnonzero(phases & are_over)
        listed = (column[of_phases].tolist() for column in (rows.start_ns, rows.end_ns, rows.name))
        self.phases += [(start_ns, end_ns, rows.texts[name]) for start_ns, end_ns, name in zip(*listed, strict=True)]
        collectives = np.array([text in _COLLECTIVES for text in rows.texts], np.bool_)[rows.name]
        own = np.flatnonzero(collectives & are_over)
        self.collectives.append(np.stack([rows.start_ns[own], rows.end_ns[own]]))

    def seconds(self) -> dict[str, float]:
        """Return how long each phase took, and the collectives in it, which wait for the slowest rank."""
        found: dict[str, float] = defaultdict(float)
        self.phases.sort()
        for start_ns, end_ns, name in self.phases:
            found[name] += (end_ns - start_ns) / 1e9
        starts, ends = np.concatenate(self.collectives, axis=1)
        begins = np.array([start_ns for start_ns, _, _ in self.phases], np.int64)
        phase = np.searchsorted(begins, starts, side="right") - 1
        lengths = np.bincount(phase[phase >= 0], (ends - starts)[phase >= 0] / 1e9, minlength=len(self.phases))
        for (_, _, name), length in zip(self.phases, lengths.tolist(), strict=True):
            found[f"collectives in {name}"] += length
        return found
