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
from rltrace.cli.tables.fit import Figures, titled, visible_figures, words

LARGEST = 3
"""How many the summary opens with."""

MARGIN = 3

SLIGHT = 0.001
"""Share of a step below which a gap has no row of its own."""


def show_findings(found: Why, screen: Console) -> None:
    """Print all findings, and what could not be judged."""
    found = visible_figures(found)
    screen.print(_heading(found))
    for doubt in found.doubts:
        screen.print(Text(f"Doubt: {doubt}", "yellow"))
    if (together := overlap(found)) is not None:
        screen.print(Text(together, "dim"))
    for place, finding in enumerate(found.findings, 1):
        screen.print()
        screen.print(Text(f"{place}. {finding.title}", "bold"))
        screen.print(Padding(Group(*_lines(finding)), (0, 0, 0, MARGIN)))
    for drawn in (*_path(found), *_rest(found)):
        screen.print()
        screen.print(drawn)


def overlap(found: Why) -> str | None:
    """Say that prices are not to be added up; None if there is one at most."""
    shares = [one.share for one in found.findings if one.share is not None]
    if len(shares) < 2:
        return None
    return (
        f"Several findings may be about the same seconds, so their prices do not add up; together they are "
        f"{sum(shares):.0%} of a step"
    )


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
    lines = [
        Text.assemble((f"{_cost(finding)}  ", "yellow"), finding.title, (_first_setting(finding), "green"))
        for finding in shown
    ]
    said = f" and {figures.count(more, 'more finding')}" if more else ""
    said += "" if len(shown) < 2 else "; their prices may be of the same seconds"
    return Group(*lines, Text(f"rltrace why has all settings{said}", "dim"))


def _first_setting(finding: Finding) -> str:
    return f" → {finding.settings[0].change}" if finding.settings else ""


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


def _path(found: Why) -> Iterator[RenderableType]:
    """Return what a step waits for, phase by phase; gaps that are slight are one row."""
    path = found.critical_path
    if path is None:
        yield Text(f"What a step waits for is not known: {found.no_path}", "dim")
        return
    table = Figures(words("phase"), "seconds", "share", words("on, in how many steps"))
    slight = 0.0
    for part in path.parts:
        if part.phase is None and part.share < SLIGHT:
            slight += part.seconds
            continue
        name = part.phase or f"{part.after or 'its beginning'} → {part.before or 'its end'}"
        who = ", ".join(f"{lane} in {times}" for lane, times in part.lanes.items())
        table.add_row(name, figures.seconds(part.seconds), f"{part.share:.1%}", who)
    if slight:
        table.add_row("between phases, short", figures.seconds(slight), f"{slight / path.seconds:.1%}", "")
    table.add_section()
    table.add_row("step", figures.seconds(path.seconds), "", f"of {figures.count(len(path.steps), 'step')}")
    bounds = [f"{one.what}: {as_text(one.bound_seconds)}" for one in path.what_ifs if one.bound_seconds]
    yield titled(
        "What a step waits for",
        table,
        f"A step would take less, by at most: with {'; '.join(bounds)}" if bounds else "",
    )


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
