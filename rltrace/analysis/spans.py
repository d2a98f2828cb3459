"""Spans that are no phases: the program's own, made by `rltrace.span` and `@rltrace.traced`, and those that hooks
made."""

from __future__ import annotations

from statistics import fmean

import msgspec

from rltrace.analysis.intervals import Intervals, cut, total_ns, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import Observations
from rltrace.analysis.seen.names import has_own_figures
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.spans import Intervalled
from rltrace.analysis.steps import StepWindows
from rltrace.read.removed import Total


class SpanFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All spans of one name in the processes of one role; calls of each method are counted separately."""

    name: str
    """Name of the spans."""
    method: str | None
    """For a `ray.call`, the method of the actor or the task; None for any other span."""
    role: str
    """Role of the processes: `driver`, `worker`, `engine`, ..."""
    processes: int
    """How many processes have such a span."""
    count: int
    """How many have ended, those included of which only totals are left."""
    open: int
    """How many have begun and not ended: they are under way, or their process died."""
    seconds: float
    """Sum over the spans that have ended."""
    mean_seconds: float | None
    """Mean of the spans that have ended; None while no span has."""
    max_seconds: float | None
    """Longest span that has ended; None while no span has."""
    share: float | None
    """Share of a steady step in which at least one of them was open, 0 to 1, or of the whole run if no step is marked.
    It is the mean over the ranks that have any, or over the processes if they have no rank; None while no step has
    ended."""


def own_spans(seen: Observations, windows: StepWindows) -> list[SpanFigures]:
    """Return the program's own spans by name and role; those with the most seconds first."""
    return _spans(seen, windows, of_hooks=False)


def hook_spans(seen: Observations, windows: StepWindows) -> list[SpanFigures]:
    """Return the same for spans that hooks made, without phases, weight sync, sleeps and GPU work, which have their own
    figures."""
    return _spans(seen, windows, of_hooks=True)


def _spans(seen: Observations, windows: StepWindows, *, of_hooks: bool) -> list[SpanFigures]:
    found: dict[tuple[str, str | None, str], list[tuple[Seen, Intervalled]]] = {}
    for process in seen.processes:
        spans = process.automatic_spans if of_hooks else process.own_spans
        for (name, method), kept in spans.items():
            found.setdefault((name, method, process.process.role), []).append((process, kept))
    totals = _totals(seen, of_hooks=of_hooks)
    for key in totals:
        found.setdefault(key, [])
    figures = [_figures(*key, members, totals.get(key, {}), seen, windows) for key, members in found.items()]
    return sorted(figures, key=lambda span: (-span.seconds, span.name, span.method or "", span.role))


def _figures(
    name: str,
    method: str | None,
    role: str,
    members: list[tuple[Seen, Intervalled]],
    totals: dict[str, Total],
    seen: Observations,
    windows: StepWindows,
) -> SpanFigures:
    total = sum(totals.values(), Total(0, 0, 0))
    of_lane: dict[Lane, list[tuple[Seen, Intervalled]]] = {}
    for process, kept in members:
        of_lane.setdefault(process.lane, []).append((process, kept))
    shares: list[float] = []
    for lane, own in of_lane.items():  # one after the other: the rows of all may be many
        rows = [(kept, kept.rows(seen.open_until_ns(process))) for process, kept in own]
        total = sum((_total(kept.ended() if kept.has_open else of) for kept, of in rows), total)
        shares += _share(lane, [of for _, of in rows], windows)
    seconds = total.total_ns / 1e9
    return SpanFigures(
        name=name,
        method=method,
        role=role,
        processes=len({process.process.key for process, _ in members} | totals.keys()),
        count=total.many,
        open=sum(len(kept) - len(kept.ended()) for _, kept in members if kept.has_open),
        seconds=seconds,
        mean_seconds=seconds / total.many if total.many else None,
        max_seconds=float(total.longest_ns) / 1e9 if total.many else None,
        share=fmean(shares) if shares else None,
    )


def _totals(seen: Observations, *, of_hooks: bool) -> dict[tuple[str, str | None, str], dict[str, Total]]:
    """Return the totals of spans that were removed, by name, method and role, and by the key of their process."""
    found: dict[tuple[str, str | None, str], dict[str, Total]] = {}
    for process in seen.processes:
        for group, total in process.process.removed.totals.items():
            if group.is_automatic == of_hooks and not has_own_figures(group.name, is_automatic=of_hooks):
                of_name = found.setdefault((group.name, group.method, process.process.role), {})
                of_name[process.process.key] = of_name.get(process.process.key, Total(0, 0, 0)) + total
    return found


def _total(ended: Intervals) -> Total:
    lengths_ns = ended[:, 1] - ended[:, 0]
    return Total(len(ended), int(lengths_ns.sum()), int(lengths_ns.max(initial=0)))


def _share(lane: Lane, rows: list[Intervals], windows: StepWindows) -> list[float]:
    """Return in which share of its steps a lane had one of its spans open; nothing if it has no step."""
    own = windows.of(lane)
    counted = own.windows[own.steady] if own.spans else own.windows
    whole_ns = total_ns(counted)
    return [total_ns(cut(union(*rows), counted)[0]) / whole_ns] if whole_ns else []
