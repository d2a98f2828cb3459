"""Single steps take much longer than the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.findings.amounts import as_text, counted
from rltrace.analysis.findings.between_phases import gap_seconds
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import PerStep, Run

NAME = "slow_steps"

FEWEST = 5
"""With fewer steps none can be called an exception."""

OVER_NOISE = 0.2
"""The share of the median by which a step must be longer: twice the 10 % by which steps differ on shared hosts
(docs/measurements/index.md)."""

NOISE = 0.1
"""The share of the median step by which its time in which nothing computes must be longer: the 10 % by which steps
differ on shared hosts (docs/measurements/index.md), though not by that time."""

DEVIATIONS = 5
"""The number of deviations by which it must be longer as well, estimated by the median absolute deviation times 1.4826.
Leys et al. (2013) take 2.5 to 3, but of thousands of steps some are that far off by chance."""

RARE = 0.005
"""Share of a step in the mean below which they are told as what the run paid once: in thousands of steps a single one
costs none of them anything, and yet somebody wants to know (the share is that of `LEAST_SHARE`)."""

IN_GAPS = "gap_seconds"
"""The figure of steps that are told for their time in which nothing computes."""

NAMED = 10
"""How many steps are named."""

SETTINGS = (Setting("your program", "look at this step beside its neighbours in the timeline"),)


class _Most(NamedTuple):
    """A phase of a lane, and how much longer than in the median step it took."""

    seconds: float
    phase: str
    lane: str
    rank: int | None


def judge(run: Run) -> list[Finding]:
    """Price what exceptional steps take beyond the median step."""
    if len(run.steps) < FEWEST:
        raise UnjudgeableError(
            f"{counted(len(run.steps), 'steady step')} {'is' if len(run.steps) == 1 else 'are'} too few to call one an "
            f"exception: {FEWEST} are needed"
        )
    median = float(np.median(run.step_seconds))
    over, is_slow = run.step_seconds - median, _stands_out(run.step_seconds, OVER_NOISE * median)
    if is_slow.any():
        return [_of_length(run, over, is_slow)]
    gaps = _gaps(run)
    over, is_slow = gaps - float(np.median(gaps)), _stands_out(gaps, NOISE * median)
    return [_of_gaps(run, over, is_slow)] if is_slow.any() else []


def _stands_out(seconds: PerStep, least: float) -> NDArray[np.bool_]:
    over = seconds - float(np.median(seconds))
    return np.asarray(over > max(least, DEVIATIONS * 1.4826 * float(np.median(np.abs(over)))))


def _gaps(run: Run) -> PerStep:
    """Return how long nothing computes in each step: it is quiet where the length of steps is not, because processors
    are shared. 0 where it cannot be known."""
    try:
        return gap_seconds(run)
    except UnjudgeableError:
        return np.zeros(len(run.steps))


def _of_length(run: Run, over: PerStep, is_slow: NDArray[np.bool_]) -> Finding:
    """Return the finding of steps that are longer."""
    worst, many = _worst(over, is_slow), int(is_slow.sum())
    most = _most(run, worst)
    which = f"Step {run.numbers[worst]} takes" if many == 1 else f"{many} of {len(run.steps)} steps take"
    where = f", most in {most.phase} of {most.lane}" if most is not None else ""
    fact = (
        f"median {as_text(np.median(run.step_seconds))}; step {run.numbers[worst]}: {as_text(run.step_seconds[worst])}"
    )
    if most is not None:
        fact += f", of which {as_text(most.seconds)} more than usual in {most.phase}"
    title = f"{which} {as_text(over[is_slow].mean())} longer than the median step{where}"
    return _finding(run, over, is_slow, title, fact, most=most)


def _of_gaps(run: Run, over: PerStep, is_slow: NDArray[np.bool_]) -> Finding:
    """Return the finding of steps that are not longer than others may be, but in which nothing computes for long."""
    worst, many = _worst(over, is_slow), int(is_slow.sum())
    which = f"step {run.numbers[worst]}" if many == 1 else f"{many} of {len(run.steps)} steps"
    title = f"In {which} nothing computes for {as_text(over[is_slow].mean())} longer than in the median step"
    fact = (
        f"step {run.numbers[worst]}: {as_text(run.step_seconds[worst])}; steps differ by more than that, and their "
        "time in which nothing computes does not"
    )
    return _finding(run, over, is_slow, title, fact, figures={IN_GAPS: float(over[worst])})


def _worst(over: PerStep, is_slow: NDArray[np.bool_]) -> int:
    return int(np.where(is_slow, over, 0.0).argmax())


def _finding(
    run: Run,
    over: PerStep,
    is_slow: NDArray[np.bool_],
    title: str,
    fact: str,
    *,
    most: _Most | None = None,
    figures: Mapping[str, float] | None = None,
) -> Finding:
    """Return the finding of some steps, priced by how much more they take than the median step."""
    price, numbers = np.where(is_slow, over, 0.0), [run.numbers[at] for at in np.flatnonzero(is_slow).tolist()]
    is_rare, rank = price.mean() < RARE * run.step_seconds.mean(), None if most is None else most.rank
    return run.finding(
        NAME,
        title,
        [fact, "slow: step " + ", ".join(map(str, numbers[:NAMED]))],
        per_step=None if is_rare else price,
        once=float(price.sum()) if is_rare else None,
        when="some_steps" if is_rare else "step",
        steps=numbers,
        moment=run.moment(_worst(over, is_slow), rank),
        less_because="what happens now and then may be needed, such as a checkpoint",
        figures=figures,
        ranks=[] if rank is None else [rank],
        phases=[] if most is None else [most.phase],
        about=(),
        settings=SETTINGS,
    )


def _most(run: Run, place: int) -> _Most | None:
    """Return the phase that is longer by the most in this step than in the median step."""
    found = [
        _Most(float(seconds[place] - np.median(seconds)), name, lane.name, lane.rank)
        for lane, phases in run.phases.items()
        for name, rows in phases.items()
        for seconds in [run.seconds_in(rows)]
    ]
    most = max(found, key=lambda one: one.seconds, default=None)
    return most if most is not None and most.seconds > 0 else None
