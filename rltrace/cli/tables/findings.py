"""What bounds a step, in sentences: all findings for `why`, the largest for the summary."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rltrace.analysis.findings import LEAST_SHARE, NOTABLE_SHARE, Why, notable
from rltrace.analysis.findings.amounts import as_text, between_as_text
from rltrace.analysis.findings.finding import Finding
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import visible_figures

LARGEST = 3
"""How many the summary opens with."""

MARGIN = 3


def show_findings(found: Why, screen: Console) -> None:
    """Print all findings, and what could not be judged."""
    found = visible_figures(found)
    screen.print(_heading(found))
    for doubt in found.doubts:
        screen.print(Text(f"Doubt: {doubt}", "yellow"))
    for place, finding in enumerate(found.findings, 1):
        screen.print()
        screen.print(Text(f"{place}. {finding.title}", "bold"))
        screen.print(Padding(Group(*_lines(finding)), (0, 0, 0, MARGIN)))
    for drawn in _rest(found):
        screen.print()
        screen.print(drawn)


def largest(found: Why) -> RenderableType | None:
    """Draw what costs most in a line each, or say that nothing does; nothing without a step."""
    found = visible_figures(found)
    shown = notable(found)[:LARGEST]
    more = len(found.findings) - len(shown)
    if not shown and found.step_seconds is None:
        return None
    if not shown:
        smaller = f"{figures.count(more, 'smaller finding')}, and " if more else ""
        return Group(
            Text(f"Nothing was found that costs {NOTABLE_SHARE:.0%} of a step or more", "green"),
            Text(f"rltrace why has {smaller}what could not be judged", "dim"),
        )
    lines = [Text.assemble((f"{_cost(finding)}  ", "yellow"), finding.title) for finding in shown]
    return Group(*lines, Text(f"rltrace why says what to change{f', and {more} more' if more else ''}", "dim"))


def _heading(found: Why) -> Text:
    where = Text(found.path, "bold", overflow="fold")
    if found.step_seconds is None:
        return where
    steps = f"step {found.steps[0]}" if len(found.steps) == 1 else f"mean of steps {figures.ranges(found.steps)}"
    return Text.assemble(where, f" · a step takes {as_text(found.step_seconds)} ({steps})")


def _lines(finding: Finding) -> Iterator[Text]:
    yield Text(
        " · ".join(filter(None, (_price(finding), _bound(finding), f"confidence {finding.confidence}"))), "yellow"
    )
    yield from map(Text, finding.evidence.facts)
    for setting in finding.settings:
        yield Text(f"change ({setting.program}): {setting.change}", "green")
    if finding.bound_seconds is not None:
        yield Text(f"may gain less: {finding.less_because}", "dim")
    if finding.evidence.moment is not None:
        yield Text(f"see: {finding.evidence.moment.command}", "dim")


def _cost(finding: Finding) -> str:
    """Write what it costs in short: seconds of a step or once, the most to gain, or bytes."""
    if finding.seconds_per_step is not None:
        return f"{as_text(finding.seconds_per_step)} ({finding.share:.1%})"
    if finding.once_seconds is not None:
        return f"{as_text(finding.once_seconds)} once"
    if finding.bytes is not None:
        return figures.size(finding.bytes)
    return "" if finding.bound_seconds is None else f"at most {as_text(finding.bound_seconds)}"


def _price(finding: Finding) -> str:
    size = [] if finding.bytes is None else [figures.size(finding.bytes)]
    if finding.seconds_per_step is not None:
        interval = finding.interval_seconds
        between = "" if interval is None else f", 95 % interval {between_as_text(interval.least, interval.most)}"
        size.insert(0, f"{as_text(finding.seconds_per_step)} of a step ({finding.share:.1%}{between})")
    elif finding.once_seconds is not None:
        size.insert(0, f"{as_text(finding.once_seconds)}, once")
    return " · ".join(size)


def _bound(finding: Finding) -> str:
    return "" if finding.bound_seconds is None else f"at most {as_text(finding.bound_seconds)} to gain"


def _rest(found: Why) -> Iterator[RenderableType]:
    """Return what was looked for and not found, and what could not be judged."""
    if not found.findings:
        yield Text(f"Nothing was found that costs {LEAST_SHARE:.1%} of a step or more", "green")
    if found.nothing:
        yield Text(f"Judged, and nothing worth telling: {', '.join(found.nothing)}", "dim")
    if found.unjudged:
        by_reason: dict[str, list[str]] = {}
        for one in found.unjudged:
            by_reason.setdefault(one.reason, []).append(one.id)
        yield Group(
            Text("Not judged", "bold"), *(Text(f"{', '.join(ids)}: {reason}") for reason, ids in by_reason.items())
        )
