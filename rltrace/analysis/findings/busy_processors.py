"""All processors of a host are busy, so whoever needs one waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.findings import slow_rank, slow_steps, sync_in_no_stage
from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.between_phases import gaps_of
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import PerStep, Run
from rltrace.analysis.intervals import Intervals, cut, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.samples import Samples
from rltrace.events import SAMPLER, WAITED_FOR_PROCESSOR, subject

NAME = "busy_processors"
CPU = "host.cpu_percent"
OF_PROCESS = "process.cpu_percent/"

SATURATED = 95.0
"""Per cent of all processors that are in use between two samples, of which there is one a second. A second is long
beside a scheduler's slices, so at 95 % threads have queued in it (Gregg, Systems Performance, ch. 6)."""

LEAST_SHARE = 0.5
"""Share of the samples that must be above it, so that the median is."""

FEWEST_SAMPLES = 2
"""Of a clock that only grows, to say by how much it grew."""

WITHOUT_PLACE = (slow_steps.NAME, sync_in_no_stage.NAME)
"""Findings that say where time was lost and not by what, beside ranks that are slow in turns."""

SETTINGS = (
    Setting("your program", "OMP_NUM_THREADS, torch.set_num_threads: as many threads in all as processors"),
    Setting("your cluster", "more processors per GPU, or fewer workers beside the trainer"),
)


def judge(run: Run) -> list[Finding]:
    """Price how long the main threads of a rank wait in a queue; where nobody counted that, say what is in use."""
    samplers = _samplers(run)
    if not samplers:
        raise UnjudgeableError("no host's processors were sampled")
    return [found for sampler in samplers for found in _of_host(run, sampler)]


def _samplers(run: Run) -> list[Seen]:
    return [process for process in run.seen.processes if process.process.role == SAMPLER and CPU in process.sampled]


def absorb(run: Run, found: Sequence[Finding]) -> list[Finding]:
    """Return findings without those that a wait for processors explains: steps and ranks that are slow in turns, and
    time of a sync in which nothing is open.

    A rank that is always the slowest is no such thing, nor is what costs more than was waited in its own phases.
    """
    waits = next((one for one in found if one.id == NAME and one.seconds_per_step), None)
    if waits is None:
        return list(found)
    explained = [one for one in found if _is_candidate(one) and (one.seconds_per_step or 0.0) <= _waited_in(run, one)]
    facts = [*waits.evidence.facts, *(f"explained by it: {one.title}" for one in explained)]
    fuller = msgspec.structs.replace(waits, evidence=msgspec.structs.replace(waits.evidence, facts=facts))
    return [fuller if one is waits else one for one in found if one not in explained]


def _is_candidate(one: Finding) -> bool:
    is_in_turns = one.id == slow_rank.NAME and len(one.evidence.ranks) > 1
    return is_in_turns or one.id in WITHOUT_PLACE


def _waited_in(run: Run, one: Finding) -> float:
    """Return how long the lane that waits most waited in a finding's steps and phases, as seconds of a step."""
    is_named = np.isin(run.numbers, one.evidence.steps)
    if one.id == slow_steps.NAME:
        return _waited_beyond(run, one, is_named)
    waits = [
        sum(float(_grown(clock, rows).sum()) for clock in clocks)
        for sampler in _samplers(run)
        for lane, clocks in _clocks(run, sampler).items()
        for rows in [cut(_place(run, one, lane), run.steps[is_named])[0]]
    ]
    return max(waits, default=0.0) / len(run.steps)


def _waited_beyond(run: Run, one: Finding, is_named: NDArray[np.bool_]) -> float:
    """Return how much longer all lanes together waited in slow steps than in the median step: what they wait in each
    step makes none of them slow.

    Where only the time in which nothing computes is longer, waits in it count, of the lane that waits most: all lanes
    are in the same gap.
    """
    is_in_gaps = slow_steps.IN_GAPS in one.evidence.figures
    rows = gaps_of(run) if is_in_gaps else run.steps
    beyond = []
    for sampler in _samplers(run):
        for clocks in _clocks(run, sampler).values():
            grown = np.sum([_grown(clock, rows) for clock in clocks], axis=0)
            of_step = np.bincount(run.step_of(rows[:, 0]), grown, len(run.steps))
            beyond.append(float(np.maximum(of_step - np.median(of_step), 0)[is_named].sum()))
    return (max(beyond, default=0.0) if is_in_gaps else sum(beyond)) / len(run.steps)


def _place(run: Run, one: Finding, lane: Lane) -> Intervals:
    """Return when a lane was in the phases that a finding is about."""
    return union(*(run.phases[lane][phase] for phase in one.evidence.phases if phase in run.phases.get(lane, {})))


def _of_host(run: Run, sampler: Seen) -> Iterator[Finding]:
    share, facts, others = _in_use(run, sampler)
    settings = SETTINGS if others is None else (_fewer(others), *SETTINGS)
    waits = _waits(run, sampler)
    most = max(waits, key=lambda lane: float(waits[lane].sum()), default=None)
    if most is not None and waits[most].any():
        yield run.finding(
            NAME,
            f"{most.name} waits for a processor for {as_text(waits[most].mean())} of a step",
            [f"the main threads of its processes are ready and none is free, by the kernel of {facts}"],
            per_step=waits[most],
            less_because="with a few more processors a queue is shorter, and not empty",
            figures={"saturated_share": share},
            ranks=[] if most.rank is None else [most.rank],
            settings=settings,
        )
    elif most is None and share >= LEAST_SHARE:
        yield run.finding(
            NAME,
            f"All processors of {sampler.process.host} are in use for {share:.0%} of the steps",
            [facts],
            bound=share * float(run.step_seconds.mean()),
            less_because="what computes needs a processor anyway: lost is the time in the queue, which nobody counted",
            basis="modelled",
            figures={"saturated_share": share},
            settings=settings,
        )


def _fewer(others: float) -> Setting:
    return Setting(
        "your host", f"programs beside the run take {others:.0f} % of its processors: run fewer of them there"
    )


def _in_use(run: Run, sampler: Seen) -> tuple[float, str, float | None]:
    """Return in which share of the samples all processors were in use; how much of them was in use, in words; and how
    many per cent of them other programs took, if that is more than the run did."""
    samples, host = sampler.sampled[CPU], sampler.process.host
    values = _in_steps(run, samples)
    cpus = next((machine.cpus for machine in run.summary.run.machines if machine.host == host), None)
    many = f", {cpus} processors" if cpus else ""
    if not len(values):
        return 0.0, f"{host}{many}", None
    facts = f"{host}{many}: {values.mean():.0f} % of them are in use in the mean"
    share = float((values >= SATURATED).mean())
    own = sum(_in_steps(run, kept).sum() for name, kept in sampler.sampled.items() if name.startswith(OF_PROCESS))
    if not own or not cpus:
        return share, facts, None
    own_percent = min(own / len(values) / cpus, values.mean())
    others = float(values.mean() - own_percent)
    return share, f"{facts}, {own_percent:.0f} % by processes of the run", others if others > own_percent else None


def _in_steps(run: Run, samples: Samples) -> NDArray[np.float64]:
    """Return the values of samples that were taken in a step."""
    return np.array(samples.values, np.float64)[run.step_of(np.array(samples.times_ns, np.int64)) >= 0]


def _waits(run: Run, sampler: Seen) -> dict[Lane, PerStep]:
    """Return how long the main threads of each lane waited in each step; of lanes of which the sampler counted it."""
    return {
        lane: np.sum([_grown(clock, run.steps) for clock in clocks], axis=0)
        for lane, clocks in _clocks(run, sampler).items()
    }


def _clocks(run: Run, sampler: Seen) -> dict[Lane, list[Samples]]:
    """Return the clocks of each lane's processes that count the waits of their main threads."""
    found: dict[Lane, list[Samples]] = {}
    for lane, members in run.members.items():
        if all(process.process.role == SAMPLER for process in members):
            continue
        counted = [sampler.sampled.get(subject(WAITED_FOR_PROCESSOR, process.process.key)) for process in members]
        clocks = [samples for samples in counted if samples is not None and is_clock(samples)]
        if clocks:
            found[lane] = clocks
    return found


def is_clock(samples: Samples) -> bool:
    """Return whether there are enough samples to say by how much it grew."""
    return len(samples.values) >= FEWEST_SAMPLES


def _grown(samples: Samples, rows: Intervals) -> NDArray[np.float64]:
    """Return by how much a clock grew in each interval; between two samples evenly."""
    at_ns = np.interp(rows, np.array(samples.times_ns, np.int64), np.array(samples.values))
    return np.asarray(at_ns[:, 1] - at_ns[:, 0])
