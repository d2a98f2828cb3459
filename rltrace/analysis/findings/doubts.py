"""What makes the findings of a Recording less certain than they look."""

from __future__ import annotations

from collections.abc import Iterator

from rltrace.analysis.fates import having
from rltrace.analysis.findings.amounts import counted
from rltrace.analysis.findings.run import Run
from rltrace.analysis.summary import Summary

FEW_STEPS = 2
"""With fewer, no price has an interval."""

NAMED = 4
"""How many ranks or processes are named."""


def doubts(run: Run) -> list[str]:
    """Return in sentences what is missing or damaged."""
    return [
        *_of_the_end(run.summary),
        *_of_steps(run.summary),
        *_of_brief_steps(run),
        *_of_ranks(run),
        *_of_clocks(run),
    ]


def _of_the_end(summary: Summary) -> Iterator[str]:
    if summary.run.is_live:
        yield "the run still goes on: what comes later is not in it"
    died = [process.name for process in having(summary, "died")]
    if died:
        more = f" and {len(died) - NAMED} more" if len(died) > NAMED else ""
        yield f"{', '.join(died[:NAMED])}{more} died: what they had not finished is missing"
    if summary.losses:
        places = counted(len(summary.losses), "place")
        yield f"parts of it are lost or damaged, in {places}: `rltrace summary` says which"


def _of_steps(summary: Summary) -> Iterator[str]:
    if summary.steady is None:
        return
    if summary.steady.has_first:
        yield "only the first step has ended, which includes warm-up"
    elif len(summary.steady.steps) < FEW_STEPS:
        yield "it is one step: no price has an interval"


def _of_brief_steps(run: Run) -> Iterator[str]:
    if run.are_brief:
        yield "its steps are in brief: spans other than phases, and what computed in no phase, were not kept"


def _of_ranks(run: Run) -> Iterator[str]:
    ranks = {lane.rank for lane in run.members if lane.rank is not None}
    missing = sorted(set(range(max(ranks, default=-1) + 1)) - ranks)
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        named = ", ".join(map(str, missing[:NAMED]))
        yield f"rank {named}{more} of {max(ranks) + 1} is not in it: it may be the one that others wait for"


def _of_clocks(run: Run) -> Iterator[str]:
    if run.unaligned:
        hosts = ", ".join(run.unaligned)
        yield f"the clock of {hosts} was never compared with the others': nothing is said of who waits for whom"
