"""Single steps take much longer than the others."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rltrace.analysis.findings.amounts import as_text, counted
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run

NAME = "slow_steps"

FEWEST = 5
"""With fewer steps none can be called an exception."""

OVER_NOISE = 0.2
"""The share of the median by which a step must be longer: twice the 10 % by which steps differ on shared hosts
(docs/measurements/index.md)."""

DEVIATIONS = 5
"""The number of deviations by which it must be longer as well, estimated by the median absolute deviation times 1.4826.
Leys et al. (2013) take 2.5 to 3, but of thousands of steps some are that far off by chance."""

RARE = 0.005
"""Share of a step in the mean below which they are told as what the run paid once: in thousands of steps a single one
costs none of them anything, and yet somebody wants to know (the share is that of `LEAST_SHARE`)."""

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
    over = run.step_seconds - median
    is_slow = over > max(OVER_NOISE * median, DEVIATIONS * 1.4826 * float(np.median(np.abs(over))))
    if not is_slow.any():
        return []
    price = np.where(is_slow, over, 0.0)
    worst, many = int(price.argmax()), int(is_slow.sum())
    most = _most(run, worst)
    which = f"Step {run.numbers[worst]} takes" if many == 1 else f"{many} of {len(run.steps)} steps take"
    where = f", most in {most.phase} of {most.lane}" if most is not None else ""
    is_rare = price.mean() < RARE * run.step_seconds.mean()
    return [
        run.finding(
            NAME,
            f"{which} {as_text(over[is_slow].mean())} longer than the median step{where}",
            [
                f"median {as_text(median)}; step {run.numbers[worst]}: {as_text(run.step_seconds[worst])}"
                + (f", of which {as_text(most.seconds)} more than usual in {most.phase}" if most is not None else ""),
                "slow: step " + ", ".join(str(run.numbers[at]) for at in np.flatnonzero(is_slow)[:NAMED].tolist()),
            ],
            per_step=None if is_rare else price,
            once=float(price.sum()) if is_rare else None,
            when="some_steps" if is_rare else "step",
            steps=[run.numbers[at] for at in np.flatnonzero(is_slow).tolist()],
            moment=run.moment(worst, None if most is None else most.rank),
            less_because="what happens now and then may be needed, such as a checkpoint",
            ranks=[] if most is None or most.rank is None else [most.rank],
            phases=[] if most is None else [most.phase],
            about=(),
            settings=SETTINGS,
        )
    ]


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
