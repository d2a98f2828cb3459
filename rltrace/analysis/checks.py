"""`rltrace check`: whether a run keeps to its limits, and to another run, by more than noise."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rltrace.analysis.budget import BYTES, SECONDS, SHARE, Amount, Budget
from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.measures import Judged, Measure, UnmeasuredError, measure
from rltrace.analysis.noise import FEWEST_STEPS, Change, change
from rltrace.analysis.phases import IDLE, STARTING
from rltrace.analysis.summary import Summary
from rltrace.events import WAIT_DRIVER

VERSION = 1
"""Version of the JSON, raised like that of `Summary`."""

OK, BROKEN, UNJUDGED = "ok", "broken", "unjudged"
COMPLETE = "complete"

EXPLAINED = 3
"""How many phases are named that grew."""

SLIGHT = 0.01
"""Share of a step by which a phase must grow to be named."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One limit, and whether the run keeps to it."""

    name: str
    """The figure that it is about: `step`, a phase, `memory.used`, `finding.slow_rank`; `complete` is about the run
    itself."""
    state: str
    """`ok`, `broken`, or `unjudged` if the run does not have the figure."""
    said: str
    """That in one sentence, with both values."""
    value: float | None
    """The figure: the mean of the steady steps; None if the run does not have it."""
    limit: float | None
    """What it may be at most; None if it is compared with another run, or is no number."""
    unit: str | None
    """`seconds`, `bytes` or `share`."""
    baseline: float | None
    """The figure of the other run; None without one."""
    change: Change | None
    """By how much steps differ from those of the other run; None without one, and for bytes."""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A run and its limits."""

    version: int
    """Version of this format, raised like that of `Summary`."""
    path: str
    """The run."""
    baseline: str | None
    """The run that it was compared with."""
    state: str
    """`broken` if a limit is; else `unjudged` if one is; else `ok`."""
    checks: list[Check]
    """One item for each limit."""
    notes: list[str]
    """What to know besides: the phases that grew, and settings that differ."""


def checked(run: Judged, budget: Budget, other: Judged | None = None) -> Checked:
    """Judge a run by its limits, and by another run if there is one."""
    checks = [_of_the_run(run.summary), *(_below(run, name, limit) for name, limit in budget.most.items())]
    if other is not None:
        checks += [_compared(run, other, name, share) for name, share in budget.over.items()]
    states = {one.state for one in checks}
    return Checked(
        version=VERSION,
        path=run.summary.run.path,
        baseline=None if other is None else other.summary.run.path,
        state=next((state for state in (BROKEN, UNJUDGED) if state in states), OK),
        checks=checks,
        notes=list(_explained(run, other)) if other is not None and BROKEN in states else [],
    )


# ---- the run ----------------------------------------------------------------------------------------------------


def _of_the_run(summary: Summary) -> Check:
    """Judge whether the run came to its end; figures of one that died are of what was left."""
    run = summary.run
    if run.is_live:
        return _check(COMPLETE, UNJUDGED, "the run still goes on: check it when it is over")
    if run.exit_code or run.interrupted_by:
        how = f"was interrupted by {run.interrupted_by}" if run.interrupted_by else f"ended with {run.exit_code}"
        return _check(COMPLETE, BROKEN, f"the run {how}; `rltrace summary {run.path}` says what happened")
    if summary.complete is False:
        return _check(COMPLETE, BROKEN, f"a process did not end in good order; `rltrace summary {run.path}` says which")
    if summary.complete is None:
        said = f"nobody saw how a process ended; `rltrace summary {run.path}` says which"
        return _check(COMPLETE, UNJUDGED, said)
    if summary.losses:
        return _check(COMPLETE, UNJUDGED, f"parts of the Recording are lost; `rltrace summary {run.path}` says which")
    return _check(COMPLETE, OK, "the run is complete")


def _check(name: str, state: str, said: str) -> Check:
    return Check(
        name=name, state=state, said=said, value=None, limit=None, unit=None, baseline=None, change=None
    )  # fmt: skip


# ---- a limit ----------------------------------------------------------------------------------------------------


def _below(run: Judged, name: str, limit: Amount) -> Check:
    try:
        found = measure(run, name)
        scale = _scale(found, limit)
    except UnmeasuredError as reason:
        return _check(name, UNJUDGED, str(reason))
    value, least = found.mean / scale, found.least / scale
    is_broken = least > limit.value
    said = f"{_written(value, limit.unit)}{_of_steps(found)}, of at most {limit.text}"
    if is_broken and least < value:
        said += f": surely more than {_written(least, limit.unit)}"
    elif not is_broken and value > limit.value:
        said += ": more, but steps differ so much that it may be chance"
    return Check(
        name=name,
        state=BROKEN if is_broken else OK,
        said=said,
        value=value,
        limit=limit.value,
        unit=limit.unit,
        baseline=None,
        change=None,
    )


def _scale(found: Measure, limit: Amount) -> float:
    """Return by what to divide the figure, so that it is in the unit of its limit."""
    if limit.unit == found.unit:
        return 1.0
    if limit.unit != SHARE:
        raise UnmeasuredError(f"it is in {found.unit}, and {limit.text} in {limit.unit}")
    if not found.whole:
        raise UnmeasuredError(f"of what {limit.text} would be a share is unknown")
    return found.whole


def _of_steps(found: Measure) -> str:
    return f" (mean of {len(found.values)} steps)" if len(found.values) > 1 else ""


def _written(value: float, unit: str) -> str:
    if unit == SECONDS:
        return as_text(value)
    return f"{value:.1%}" if unit == SHARE else f"{value / 2**30:.2f} GiB"


# ---- another run ------------------------------------------------------------------------------------------------


def _compared(run: Judged, other: Judged, name: str, share: float) -> Check:
    try:
        before, after = measure(other, name), measure(run, name)
    except UnmeasuredError as reason:
        return _check(name, UNJUDGED, str(reason))
    values = f"{_written(after.mean, after.unit)}, before {_written(before.mean, before.unit)}"
    if after.unit == BYTES or len(after.values) == len(before.values) == 1:
        ratio = after.mean / before.mean - 1 if before.mean else 0.0
        state, said, found = BROKEN if ratio > share else OK, f"{values} ({ratio:+.1%}), of at most {share:+.0%}", None
    else:
        found = change(before.values, after.values)
        state, said = _judged(found, share, len(before.values), len(after.values))
        said = f"{values} {said}"
    return Check(
        name=name,
        state=state,
        said=said,
        value=after.mean,
        limit=None,
        unit=after.unit,
        baseline=before.mean,
        change=found,
    )


def _judged(found: Change | None, share: float, before: int, after: int) -> tuple[str, str]:
    """Judge a change of steps; it is broken if it is larger than allowed, and no noise."""
    if found is None:
        return UNJUDGED, "cannot be compared: a step took no time"
    said = f"(a typical step {found.share:+.1%}, the mean {found.mean_share:+.1%}), of at most {share:+.0%}"
    if found.least_share is None or found.visible_share is None:
        few = f"{before} and {after} steps are too few to tell a change from noise; {FEWEST_STEPS} are needed"
        return UNJUDGED, f"{said}: {few}"
    if found.exceeds(share):
        return BROKEN, f"{said}: surely more than {found.least_share:+.1%}"
    return OK, f"{said}; with these steps {found.visible_share:+.1%} would be seen"


def _explained(run: Judged, other: Judged) -> Iterator[str]:
    """Say which phases grew most, each on the rank where it grew most, and which findings are new."""
    grown = _grown(run.summary, other.summary)
    longest = sorted(grown.items(), key=lambda item: -item[1][0])[:EXPLAINED]
    if longest:
        yield "longer: " + ", ".join(f"{name} by {as_text(seconds)} ({lane})" for name, (seconds, lane) in longest)
    known = {one.id for one in other.why.findings}
    yield from (f"new finding: {one.title}" for one in run.why.findings if one.id not in known)


def _grown(run: Summary, other: Summary) -> dict[str, tuple[float, str]]:
    """Return by how much phases are longer than in another run, on which lane most; waits are no phases here."""
    if run.steady is None or other.steady is None:
        return {}
    before = {lane.lane: lane.phases for lane in other.steady.lanes}
    most: dict[str, tuple[float, str]] = {}
    for lane in run.steady.lanes:
        for name, after in lane.phases.items():
            old = before.get(lane.lane, {}).get(name)
            seconds = after.mean_seconds - (0.0 if old is None else old.mean_seconds)
            if name not in (IDLE, STARTING, WAIT_DRIVER) and seconds >= SLIGHT * run.steady.seconds.mean_seconds:
                most[name] = max(most.get(name, (0.0, "")), (seconds, lane.lane))
    return most
