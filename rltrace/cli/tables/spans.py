"""Spans of the program's own, and spans that are open."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from rltrace.analysis.open_spans import OpenSpan
from rltrace.analysis.own_spans import OwnSpan
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, titled, words

MOST_OPEN = 20
FEW = 6


def own_span_table(spans: Sequence[OwnSpan], most: int | None = None) -> RenderableType:
    """How often, how long, and what share of a step; the longest in all first."""
    table = Figures("span", Column("process", 7, is_left=True), "times", "seconds", "mean", Column("of a step", 8))
    for span in spans[:most]:
        of = f"{span.processes} x {span.role}" if span.processes > 1 else span.role
        share = f"{span.share:.1%}" if span.share is not None else ""
        times = f"{span.count:,}" + (f" + {span.open:,} open" if span.open else "")
        seconds = (
            (figures.seconds(span.seconds), _mean(span.mean_seconds)) if span.mean_seconds is not None else ("", "")
        )
        table.add_row(span.name, of, times, *seconds, share)
    more = len(spans) - len(spans[:most])
    lines = [f"{more} more: see --all"] if more else []
    lines += ["seconds and mean are of those that are over"] if any(span.open for span in spans[:most]) else []
    return titled("Spans of your own", table, "; ".join(lines))


def _mean(seconds: float) -> str:
    return figures.seconds(seconds) if seconds >= 0.1 else figures.short(seconds)


def open_span_table(spans: Sequence[OpenSpan], most: int = MOST_OPEN) -> RenderableType:
    """What was going on, or still is; the longest first."""
    table = Figures(Column("open"), words("span"), words("process"), words("thread", 5), words())
    for span in spans[:most]:
        remark = "" if span.process_state == "alive" else f"the process {span.process_state}"
        table.add_row(
            f"{span.open_seconds:,.1f} s", span.name, f"{span.process} (pid {span.pid})", span.thread, remark,
            style="bold yellow" if span.is_long else None,
        )  # fmt: skip
    return titled("Open spans", table, f"{len(spans) - most} more: see --json" if len(spans) > most else "")
