"""What tracing costs, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from rltrace.analysis.overhead import Comparison, Overhead, ProcessCost, Verdict
from rltrace.cli.tables.fit import Figures, titled, visible_figures

BUSY = 0.5
"""Load per core before a run, from which on somebody else was working too."""

_STYLES: dict[Verdict, str] = {"established": "green", "exceeded": "bold red", "inconclusive": "yellow"}


def show(found: Overhead, screen: Console) -> None:
    """Print the comparisons, each with its verdict, and the bookkeeping."""
    found = visible_figures(found)
    screen.print(comparison_table(found))
    for comparison in found.comparisons:
        screen.print(Text(verdict_line(comparison, found.limit), _STYLES[comparison.verdict]), soft_wrap=True)
    screen.print()
    screen.print(bookkeeping_table(found.bookkeeping, found.bookkept_cost))
    screen.print(Text(load_line(found), "dim"))


def comparison_table(found: Overhead) -> RenderableType:
    """Draw one row per comparison, and beneath the steps of one run their phases."""
    table = Figures("compared", "pairs", "ms with", "ms without", "cost", "95 % interval")
    of_steps, *of_runs = found.comparisons
    table.add_row(*_cells(of_steps, of_steps.what))
    for phase in found.phases:
        table.add_row(*_cells(phase, f"  {phase.what}"))
    for row in of_runs:
        table.add_row(*_cells(row, row.what))
    return titled(f"What tracing costs of a step of {found.measurement.config}", table)


def _cells(row: Comparison, what: str) -> list[str]:
    interval = f"{_percent(row.low)} to {_percent(row.high)}" if row.low is not None else "too few"
    means = ["" if mean_s is None else f"{1e3 * mean_s:,.1f}" for mean_s in (row.with_seconds, row.without_seconds)]
    return [what, str(row.count), *means, _percent(row.cost), interval]


def verdict_line(row: Comparison, limit: float) -> str:
    """Return one sentence: the upper end of the interval, or why there is no reliable one."""
    if row.low is None or row.high is None:
        return f"{row.what}: inconclusive: {_count(row.count, row.unit)}, but {row.needed} are needed"
    if row.verdict == "established":
        return f"{row.what}: at most {_percent(row.high)} (upper end of the interval), within the limit of {limit:.2%}"
    if row.verdict == "exceeded":
        return f"{row.what}: at least {_percent(row.low)}, above the limit of {limit:.2%}"
    return f"{row.what}: inconclusive: too noisy to confirm {limit:.2%}, for the interval reaches {_percent(row.high)}"


def bookkeeping_table(processes: Sequence[ProcessCost], share: float | None) -> RenderableType:
    """Draw what each process recorded in a mean step, and what that took by the cost it measured."""
    if share is None:
        return Text("rltrace's own work: unknown, for no process measured what its events cost", "yellow")
    table = Figures(
        "process",
        "spans",
        "ns a span",
        "GPU spans",
        "ns a GPU span",
        "samples",
        "arrows",
        "ms of events",
        "ms at boundaries",
    )
    for row in processes:
        table.add_row(
            row.process, f"{row.spans:,.1f}", f"{row.span_ns:,.0f}", f"{row.device_spans:,.1f}",
            f"{row.device_span_ns:,.0f}", f"{row.samples:,.1f}", f"{row.arrows:,.1f}",
            f"{1e3 * row.events_seconds:.3f}", f"{1e3 * row.looks_seconds:.3f}",
        )  # fmt: skip
    caption = f"driver and slowest rank, one after the other: {share:.2%} of an unrecorded step"
    return titled(
        "rltrace's own work in a mean step: events × their cost in that process + phase boundaries", table, caption
    )


def load_line(found: Overhead) -> str:
    """Return whether the machine was idle before each run."""
    measured = found.measurement
    load = max(arm.load_before for arm in measured.arms)
    said = f"{measured.cores} cores on {measured.host}; load before a run: up to {load:.1f}"
    return said + (" (the machine was busy)" if load > BUSY * measured.cores else "")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.2f} %"


def _count(number: int, what: str) -> str:
    head, _, tail = what.partition(" ")
    return f"{number} {what}" if number == 1 else f"{number} {head}s {tail}"
