"""A large summary in short: the ranks and steps that stand out, for all those that are alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rltrace.analysis.gpu_work import COLLECTIVES
from rltrace.analysis.moments import Boundaries
from rltrace.analysis.steady import together
from rltrace.analysis.summary import Folded, Summary
from rltrace.events import SAMPLER
from rltrace.read.selection import ALL, Selection, written

MOST_RANKS = 16
"""With more ranks, those that are alike are folded on a screen; `--json` has so many of them."""
MOST_STEPS = 40
"""With more steps, those that are alike are folded."""
MOST_RANK_STEPS = 640
"""With more ranks times steps, `--json` folds what is alike: one rank and step takes some 30 kB there."""
FEW_RANKS = 8
"""So many ranks a screen has."""
MOST_HOSTS = 3
"""So many hosts of them are there: what was sampled of one takes 170 lines."""

APART = 5.0
"""How many standard deviations a rank or step is from the median to stand out, the deviation estimated by the median
one: of 10,000 that differ by chance, none is."""
LEAST_SHARE = 0.01
"""The share of a step, or of a device's bytes, by which a rank must be apart as well: where a summary begins to tell a
price (`NOTABLE_SHARE` of findings). Of ranks that are all but equal, the least difference is many deviations."""
LEAST_SHARE_OF_STEPS = 0.1
"""The share of the median step by which a step must be apart as well: equal steps differ by 5 to 10 % on hosts that
others use too (docs/measurements/index.md)."""
MEDIAN_TO_DEVIATION = 1.4826
"""The standard deviation by the median one, for normal values."""
FIRST_STEPS, LAST_STEPS = 3, 10
"""So many steps are always there."""


class Apart(NamedTuple):
    """A rank or a step that stands out."""

    number: int
    of: str
    """What it is apart in: a phase, the collectives in a phase, `peak memory`; of a step `step`."""
    value: float
    median: float
    deviations: float

    @property
    def is_bytes(self) -> bool:
        return self.of == PEAK


PEAK = "peak memory"
STEP_LENGTH = "step"


def ranks_apart(summary: Summary) -> list[Apart]:
    """Return the ranks that stand out in the steady steps, the furthest first, each by what it is furthest apart in."""
    step_seconds = summary.steady.seconds.mean_seconds if summary.steady is not None else 0.0
    found = [
        one
        for of, by_rank, whole in _by_rank(summary, step_seconds)
        for one in apart_in(of, by_rank, LEAST_SHARE * whole)
    ]
    furthest: dict[int, Apart] = {}
    for one in sorted(found, key=lambda one: -abs(one.deviations)):
        furthest.setdefault(one.number, one)
    return list(furthest.values())


def steps_apart(summary: Summary) -> list[Apart]:
    """Return the steady steps that are longer or shorter than the others, the furthest first."""
    lengths: dict[int, float] = {}
    for step in summary.steps:
        if step.steady:
            lengths[step.step] = max(step.seconds, lengths.get(step.step, 0.0))
    whole = float(np.median([*lengths.values()])) if lengths else 0.0
    return sorted(apart_in(STEP_LENGTH, lengths, LEAST_SHARE_OF_STEPS * whole), key=lambda one: -abs(one.deviations))


def _by_rank(summary: Summary, step_seconds: float) -> Iterator[tuple[str, Mapping[int, float], float]]:
    """Yield what ranks are compared in, and how much of it there is."""
    of_phases: dict[str, dict[int, float]] = defaultdict(dict)
    for lane in together(summary.steady.lanes) if summary.steady is not None else ():
        if lane.rank is not None:
            for name, phase in lane.phases.items():
                of_phases[name][lane.rank] = phase.mean_seconds
    for name, by_rank in of_phases.items():
        yield name, by_rank, step_seconds
    collectives: dict[str, dict[int, float]] = defaultdict(dict)
    for work in summary.gpu_work:
        if work.rank is not None and work.phase is not None and work.work == COLLECTIVES:
            collectives[work.phase][work.rank] = work.seconds
    for name, by_rank in collectives.items():
        yield f"{COLLECTIVES} in {name}", by_rank, step_seconds
    peaks = {device.rank: float(device.peak_bytes) for device in summary.memory if device.rank is not None}
    yield PEAK, peaks, max(peaks.values(), default=0.0)


def apart_in(of: str, values: Mapping[int, float], least: float) -> list[Apart]:
    """Return the ranks or steps that stand out in something.

    Args:
        of: What they are compared in.
        values: How much of it each has.
        least: How far from the median they must be at least.
    """
    if len(values) < 3:
        return []
    numbers, found = [*values], np.array([*values.values()])
    median = float(np.median(found))
    deviation = MEDIAN_TO_DEVIATION * float(np.median(np.abs(found - median)))
    scores = (found - median) / max(deviation, least / APART, 1e-12)
    far = np.flatnonzero((np.abs(scores) > APART) & (np.abs(found - median) > least))
    return [Apart(numbers[at], of, float(found[at]), median, float(scores[at])) for at in far.tolist()]


class Kept(NamedTuple):
    """What of a summary is there; None is all of it."""

    ranks: frozenset[int] | None = None
    steps: frozenset[int] | None = None


def kept(summary: Summary, selection: Selection = ALL, most_ranks: int = MOST_RANKS) -> Kept:
    """Return the ranks and steps that a large summary is reduced to.

    Args:
        summary: The summary.
        selection: What the user chose: nothing of that is folded.
        most_ranks: How many ranks there may be.
    """
    ranks = sorted({process.rank for process in summary.processes if process.rank is not None})
    steps = sorted({step.step for step in summary.steps})
    return Kept(
        frozenset(_ranks(summary, ranks, most_ranks)) if len(ranks) > MOST_RANKS and selection.ranks is None else None,
        frozenset(_steps(summary, steps)) if len(steps) > MOST_STEPS and selection.steps is None else None,
    )


def _ranks(summary: Summary, ranks: Sequence[int], most: int) -> list[int]:
    """Return the ranks that somebody has to look at: of trouble, those that stand out, the fullest, the first."""
    in_trouble = [process.rank for process in summary.processes if process.state == "died"]
    in_trouble += [leak.rank for leak in summary.leaks]
    in_trouble += [sleep.rank for sleep in summary.sleeps if sleep.verdict != "ok"]
    apart = [one.number for one in ranks_apart(summary)]
    fullest = max((device for device in summary.memory), key=lambda device: device.peak_bytes, default=None)
    named = [ranks[0], *([fullest.rank] if fullest is not None else []), *in_trouble, *apart, *ranks[1:]]
    return [rank for rank in dict.fromkeys(named) if rank is not None][:most]


def _steps(summary: Summary, steps: Sequence[int]) -> list[int]:
    """Return the first steps, the last, those that were aborted, and those that stand out."""
    aborted = [step.step for step in summary.steps if step.error is not None]
    apart = [one.number for one in steps_apart(summary)]
    named = [*steps[:FIRST_STEPS], *steps[-LAST_STEPS:], *aborted, *apart]
    return [*dict.fromkeys(named)][:MOST_STEPS]


def for_programs(summary: Summary, selection: Selection = ALL) -> Summary:
    """Return what `--json` has: all of a summary, or a large one without what is alike."""
    ranks = {process.rank for process in summary.processes if process.rank is not None}
    steps = {step.step for step in summary.steps}
    if max(len(ranks), 1) * len(steps) <= MOST_RANK_STEPS:
        return summary
    return folded(summary, kept(summary, selection))


def folded(summary: Summary, there: Kept) -> Summary:
    """Return a summary that has the items of some ranks and steps, and says so.

    Steps and means over all ranks or over all steps are there in full: `steps`, `steady`, spans, requests, hooks.
    """
    if there == Kept():
        return summary
    hosts = _hosts(summary, there)
    changed: dict[str, Any] = {}
    for name in summary.__struct_fields__:
        items = getattr(summary, name)
        if name not in _WHOLE and isinstance(items, list):
            changed[name] = [_of_steps(item, there) for item in items if _is_there(item, there, hosts)]
    ranks = sorted({process.rank for process in summary.processes if process.rank is not None})
    steps = sorted({step.step for step in summary.steps})
    said = [
        Folded(of=of, there=len(numbers), kept=sorted(own), option=f"--{of} {written(numbers[-1:])}")
        for of, numbers, own in (("ranks", ranks, there.ranks), ("steps", steps, there.steps))
        if own is not None
    ]
    return msgspec.structs.replace(summary, folded=said, **changed)


_WHOLE = ("steps", "errors", "losses", "unidentified", "unsealed", "folded", "out_of_memory", "leaks")


def _hosts(summary: Summary, there: Kept) -> set[str]:
    """Return the hosts of the ranks that are there, and those of processes without a rank that are no samplers."""
    if there.ranks is None:
        return {process.host for process in summary.processes}
    of_ranks = dict.fromkeys(process.host for process in summary.processes if process.rank in there.ranks)
    others = {process.host for process in summary.processes if process.rank is None and process.role != SAMPLER}
    return {*[*of_ranks][:MOST_HOSTS], *others}


def _is_there(item: Any, there: Kept, hosts: set[str]) -> bool:
    rank, step = getattr(item, "rank", None), getattr(item, "step", None)
    if there.steps is not None and step is not None and step not in there.steps:
        return False
    if there.ranks is None:
        return True
    if rank is not None:
        return rank in there.ranks
    is_of_host = getattr(item, "role", SAMPLER) == SAMPLER and hasattr(item, "host")
    if is_of_host:
        return item.host is None or item.host in hosts
    own = getattr(item, "hosts", None)
    return not own or item.is_reference or bool(hosts & {*own})


def _of_steps(item: Any, there: Kept) -> Any:
    """Return an item with those of its own items that are of a step that is there."""
    if there.steps is None or not isinstance(item, msgspec.Struct):
        return item
    changed: dict[str, Any] = {}
    for name in item.__struct_fields__:
        inner = getattr(item, name)
        if isinstance(inner, Boundaries):
            changed[name] = inner.part(inner.step.are_in({None, *there.steps}))
        elif isinstance(inner, list) and inner and hasattr(inner[0], "step"):
            changed[name] = [one for one in inner if one.step is None or one.step in there.steps]
    return msgspec.structs.replace(item, **changed) if changed else item
