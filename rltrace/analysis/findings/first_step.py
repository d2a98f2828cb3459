"""The first step takes longer than later ones: imports, compilation, communicators, caches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Moment, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.idle import FIRST_STEP, STEADY_STEP, IdleGap
from rltrace.analysis.phases import RankStep

NAME = "first_step"

LEAST_SHARE = 0.01
"""Share of the run that a cost must have if it comes once. Of a run of a day that is a quarter of an hour. People
record short runs to find out what a long one pays, so such a cost is told there too."""

NOTABLE = 0.1
"""Share of the price that a gap must have to be in the title."""

MEANWHILE = 2
"""How many spans are named that were open meanwhile."""

IMPORTING = "ray.deserialize"
"""Unpacking a handle or a class imports its module."""

SETTINGS = (
    Setting("Ray", 'runtime_env={"worker_process_setup_hook": ...}: import what is needed while the engines start'),
    Setting("your program", "send one request, and run one micro-batch, before the first step"),
)


def judge(run: Run) -> list[Finding]:
    """Compare the first step with the mean of the others, phase by phase and gap by gap."""
    steady = run.summary.steady
    if steady is None or not len(run.steps):
        raise UnjudgeableError("no step has ended")
    run.require_first_step()
    if steady.first_step is None:
        raise UnjudgeableError("the first step is not recorded beside later ones")
    first = next(step for step in run.summary.steps if step.step == steady.first_step)
    longer = first.seconds - steady.seconds.mean_seconds
    if longer < LEAST_SHARE * run.summary.run.seconds:
        return []
    by_phase = _more(run, steady.first_step)
    gaps = [] if first.brief else _gaps(run)
    facts = [f"step {first.step}: {as_text(first.seconds)}; later ones: {as_text(steady.seconds.mean_seconds)}"]
    if by_phase:
        facts.append("longer: " + ", ".join(f"{name} by {as_text(seconds)}" for name, seconds in by_phase[:3]))
    title = f"The first step takes {as_text(longer)} longer than later ones"
    where: list[str] = []
    if gaps and gaps[0][1] >= NOTABLE * longer:
        (after, before), seconds, names = gaps[0]
        title += f", {as_text(seconds)} of them idle {_between(after, before)}"
        where = [name for name in (after, before) if name is not None]
        if names:
            facts.append(f"idle {_between(after, before)}, meanwhile: {', '.join(names)}")
        if any(IMPORTING in name for name in names):
            facts.append(f"{IMPORTING} unpacks handles and classes, which imports their modules")
    return [
        run.finding(
            NAME,
            title,
            facts,
            once=longer,
            when="first_step",
            less_because="a warm-up before the first step takes its time, too; it can overlap with the engines' start",
            figures={"first_step_seconds": first.seconds},
            phases=where,
            about=(),
            settings=SETTINGS,
            moment=Moment(
                step=first.step,
                rank=None,
                start_seconds=first.start_seconds,
                end_seconds=first.start_seconds + first.seconds,
                command=run.view("--steps", str(first.step)),
            ),
        )
    ]


def _more(run: Run, first: int) -> list[tuple[str, float]]:
    """Return by how much each phase is longer in the first step, as a mean over the ranks, the largest first."""
    having = [row for row in run.summary.phases if row.rank is not None and row.finished] or run.summary.phases
    before, after = [row for row in having if row.step == first], [row for row in having if row.steady]
    if not before or not after:
        return []
    old, new = _means(before), _means(after)
    more = {name: seconds - new.get(name, 0.0) for name, seconds in old.items()}
    return sorted(((name, seconds) for name, seconds in more.items() if seconds > 0), key=lambda item: -item[1])


def _means(rows: Iterable[RankStep]) -> Mapping[str, float]:
    found, many = defaultdict[str, float](float), 0
    for row in rows:
        many += 1
        for name, share in row.phases.items():
            found[name] += share.seconds
    return {name: seconds / many for name, seconds in found.items()}


Gap = tuple[tuple[str | None, str | None], float, list[str]]


def _gaps(run: Run) -> list[Gap]:
    """Return where ranks are idle longer than in a later step, with the spans that were open; the longest first."""
    lanes = len({gap.lane for gap in run.summary.idle}) or 1
    of_first, of_steady = (_by_place(run.summary.idle, what) for what in (FIRST_STEP, STEADY_STEP))
    found: list[Gap] = []
    for place, gaps in of_first.items():
        more = (_seconds(gaps) - _seconds(of_steady.get(place, []))) / lanes
        if more > 0:
            found.append((place, more, _meanwhile(gaps, lanes)))
    return sorted(found, key=lambda gap: -gap[1])


def _by_place(gaps: Iterable[IdleGap], what: str) -> dict[tuple[str | None, str | None], list[IdleGap]]:
    found = defaultdict[tuple["str | None", "str | None"], list[IdleGap]](list)
    for gap in gaps:
        if gap.of == what:
            found[gap.after, gap.before].append(gap)
    return found


def _seconds(gaps: Iterable[IdleGap]) -> float:
    return sum(gap.seconds for gap in gaps)


def _meanwhile(gaps: Iterable[IdleGap], lanes: int) -> list[str]:
    totals = defaultdict[tuple[str, str], float](float)
    for gap in gaps:
        for who, of in (
            ("driver", gap.driver_seconds),
            ("rank", gap.own_seconds),
            ("other processes", gap.elsewhere_seconds),
        ):
            for name, seconds in of.items():
                totals[who, name] += seconds / lanes
    said = []
    for who in ("other processes", "rank", "driver"):
        longest = sorted(((seconds, name) for (of, name), seconds in totals.items() if of == who), reverse=True)
        said += [f"{who} {name} {as_text(seconds)}" for seconds, name in longest[:MEANWHILE] if seconds >= 0.1]
    return said


def _between(after: str | None, before: str | None) -> str:
    if after is None:
        return f"before {before}" if before else "throughout"
    return f"between {after} and {before or 'its end'}"
