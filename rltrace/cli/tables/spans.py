"""Your spans, automatic spans, and spans that are open."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from rltrace.analysis.open_spans import OpenSpan
from rltrace.analysis.spans import SpanFigures
from rltrace.analysis.summary import Summary
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, titled, words
from rltrace.events import COLLECTION, RAY_CALL

MOST_OPEN = 20
FEW = 6
_REMARKS = {"alive": "", "gone": "the process is gone"}
WORTH_A_LINE = 0.01
"""Share of a step: less garbage collection than this is shown in the table only."""


def own_span_table(summary: Summary, most: int | None = None) -> RenderableType:
    """Draw what the program itself marked."""
    return titled("Your spans", *_spans(summary.own_spans, summary, most))


def hook_span_table(summary: Summary, most: int | None = None) -> RenderableType:
    """Draw what hooks marked, besides phases, weight sync, sleeps and GPU work, which have tables of their own."""
    return titled("Automatic spans", *_spans(summary.hook_spans, summary, most))


def collection_line(summary: Summary) -> Text | None:
    """Return one line: how much of a step Python collected garbage, and what helps; None if that is too little."""
    found = [span for span in summary.hook_spans if span.name == COLLECTION and (span.share or 0.0) >= WORTH_A_LINE]
    if not found or not summary.steps:
        return None
    parts = [
        f"{span.share:.1%} of a step in {_who(span)} (longest {figures.with_unit(_length(span.max_seconds or 0.0))})"
        for span in sorted(found, key=lambda span: -(span.share or 0.0))
    ]
    return Text.assemble(("Garbage collection", "bold"), f" {', '.join(parts)}: `gc.freeze()`")


def _spans(spans: Sequence[SpanFigures], summary: Summary, most: int | None) -> tuple[Figures, str]:
    """Draw how often and how long in the run, and the share of a step or of the run; the longest in total first."""
    of = "of a step" if summary.steps else "of the run"
    table = Figures(
        "span", Column("process", 7, is_left=True), "times", "seconds", "mean", Column("longest", 6), Column(of, 8)
    )
    shown = spans[:most]
    for span in shown:
        share = f"{span.share:.1%}" if span.share is not None else ""
        times = f"{span.count:,}" + (f" + {span.open:,} open" if span.open else "")
        seconds = figures.seconds(span.seconds) if span.count else ""
        lengths = _length(span.mean_seconds), _length(span.max_seconds)
        table.add_row(_called(span), _who(span), times, seconds, *lengths, share)
    more = len(spans) - len(shown)
    lines = [f"{of}: of the mean step; all other columns: of the whole run"] if summary.steady is not None else []
    lines += [f"{more} more: see --all"] if more else []
    lines += [f"Class.method: {RAY_CALL} of an actor"] if any("." in (span.method or "") for span in shown) else []
    lines += ["seconds and mean: of the spans that have ended"] if any(span.open for span in shown) else []
    return table, "; ".join(lines)


def _who(span: SpanFigures) -> str:
    return f"{span.processes} x {span.role}" if span.processes > 1 else span.role


def _called(span: SpanFigures) -> str:
    """Return the name of a call: an actor's method names its class, while a task's function alone would look like a
    span's name."""
    if span.method is None:
        return span.name
    return span.method if "." in span.method else f"{span.name} {span.method}"


def _length(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return figures.seconds(seconds) if seconds >= 0.1 else figures.short(seconds)


def open_span_table(spans: Sequence[OpenSpan], most: int = MOST_OPEN) -> RenderableType:
    """Draw what was going on, or still is; the longest first."""
    table = Figures(Column("open"), words("span"), words("process"), words("thread", 5), words())
    for span in spans[:most]:
        remark = _REMARKS.get(span.process_state, f"the process {span.process_state}")
        table.add_row(
            _open_for(span), span.name, f"{span.process} (pid {span.pid})", span.thread, remark,
            style="bold yellow" if span.is_stuck else None,
        )  # fmt: skip
    captions = [f"{len(spans) - most} more: see --json"] if len(spans) > most else []
    if any(span.is_at_least for span in spans[:most]):
        captions.append("≥: at least so long, for nobody saw when the process went")
    return titled("Open spans", table, "; ".join(captions))


def _open_for(span: OpenSpan) -> str:
    return f"{'≥ ' if span.is_at_least else ''}{span.open_seconds:,.1f} s"
