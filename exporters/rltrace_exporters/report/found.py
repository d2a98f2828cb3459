"""What bounds a step: the findings of `rltrace why`, with what each costs and what to change."""

from __future__ import annotations

from collections.abc import Iterator

from rltrace.analysis.findings import LEAST_SHARE
from rltrace.analysis.findings.finding import Finding as Found
from rltrace_exporters.report.amounts import as_text, between_as_text, bytes_as_text
from rltrace_exporters.report.blocks import Finding, Findings, Note, Table
from rltrace_exporters.report.sections import Block
from rltrace_exporters.report.values import RunValues

OPEN = 3
"""So many findings show all that they say at once."""


def findings(values: RunValues) -> list[Block]:
    """Return all findings, then what was judged and what could not be."""
    why = values.why
    blocks: list[Block] = []
    if why.findings:
        blocks.append(Findings([_finding(one, place < OPEN) for place, one in enumerate(why.findings)]))
    else:
        blocks.append(Note(f"Nothing was found that costs {LEAST_SHARE:.1%} of a step or more."))
    if why.nothing:
        names = ", ".join(name.replace("_", " ") for name in why.nothing)
        blocks.append(Note(f"Judged, and nothing worth telling: {names}."))
    if why.unjudged:
        by_reason: dict[str, list[str]] = {}
        for one in why.unjudged:
            by_reason.setdefault(one.reason, []).append(one.id.replace("_", " "))
        rows = [[", ".join(names), reason] for reason, names in by_reason.items()]
        blocks.append(Table(f"{len(why.unjudged)} not judged", ["what", "why"], rows))
    return blocks


def _finding(one: Found, is_open: bool) -> Finding:
    moment = one.evidence.moment
    return Finding(
        title=one.title,
        price=price(one),
        share=one.share,
        facts=one.evidence.facts,
        settings=[f"{setting.program}: {setting.change}" for setting in one.settings],
        bound=""
        if one.bound_seconds is None
        else f"At most {as_text(one.bound_seconds)} to gain. It may be less: {one.less_because}",
        confidence=one.confidence,
        command="" if moment is None else moment.command,
        is_open=is_open,
    )


def price(one: Found) -> str:
    """Write what a finding costs."""
    return " · ".join(_prices(one))


def _prices(one: Found) -> Iterator[str]:
    if one.seconds_per_step is not None:
        interval = one.interval_seconds
        yield f"{as_text(one.seconds_per_step)} of a step"
        if interval is not None:
            yield f"95 % interval {between_as_text(interval.least, interval.most)}"
    elif one.once_seconds is not None:
        yield f"{as_text(one.once_seconds)}, once"
    if one.bytes is not None:
        yield bytes_as_text(one.bytes)
