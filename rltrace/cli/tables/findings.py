"""What bounds a step, in sentences: all findings for `why`, the largest for the summary."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rltrace.analysis.findings import LEAST_SHARE, Why
from rltrace.analysis.findings.finding import Finding, Interval
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import visible_figures

LARGEST = 3
"""How many the summary opens with."""

MARGIN = 3


def show_findings(found: Why, screen: Console) -> None:
    """Print all findings, and what could not be judged."""
    found = visible_figures(found)
    screen.print(_heading(found))
    for place, finding in enumerate(found.findings, 1):
        screen.print()
        screen.print(Text(f"{place}. {finding.title}", "bold"))
        screen.print(Padding(Group(*_lines(finding)), (0, 0, 0, MARGIN)))
    for drawn in _rest(found):
        screen.print()
        screen.print(drawn)


def largest(found: Why) -> RenderableType | None:
    """Draw what costs most in a line each; nothing if nothing was found."""
    if not found.findings:
        return None
    shown = visible_figures(found).findings[:LARGEST]
    more = len(found.findings) - len(shown)
    lines = [Text.assemble((f"{_cost(finding)}  ", "yellow"), finding.title) for finding in shown]
    return Group(*lines, Text(f"rltrace why says what to change{f', and {more} more' if more else ''}", "dim"))


def _heading(found: Why) -> Text:
    where = Text(found.path, "bold", overflow="fold")
    if found.step_seconds is None:
        return where
    steps = f"step {found.steps[0]}" if len(found.steps) == 1 else f"mean of steps {figures.ranges(found.steps)}"
    return Text.assemble(where, f" · a step takes {figures.seconds(found.step_seconds)} s ({steps})")


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
    """Write what it costs in short."""
    if finding.seconds_per_step is not None:
        return f"{figures.with_unit(figures.seconds(finding.seconds_per_step))} ({finding.share:.1%})"
    if finding.once_seconds is not None:
        return f"{figures.with_unit(figures.seconds(finding.once_seconds))} once"
    return "" if finding.bytes is None else figures.size(finding.bytes)


def _price(finding: Finding) -> str:
    size = "" if finding.bytes is None else f"{figures.size(finding.bytes)}"
    if finding.seconds_per_step is not None:
        between = (
            f", 95 % interval {_written(finding.interval_seconds)}" if finding.interval_seconds is not None else ""
        )
        price = (
            f"{figures.with_unit(figures.seconds(finding.seconds_per_step))} of a step ({finding.share:.1%}{between})"
        )
        return f"{price} · {size}" if size else price
    if finding.once_seconds is not None:
        return f"{figures.with_unit(figures.seconds(finding.once_seconds))}, once" + (f" · {size}" if size else "")
    return size


def _written(interval: Interval) -> str:
    return figures.with_unit(figures.between_seconds(interval.least, interval.most))


def _bound(finding: Finding) -> str:
    if finding.bound_seconds is None:
        return ""
    return f"at most {figures.with_unit(figures.seconds(finding.bound_seconds))} to gain"


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
