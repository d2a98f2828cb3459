"""Spans that are no phases: the program's own, of `rltrace.span` and `@rltrace.traced`, and those that hooks made."""

from __future__ import annotations

from statistics import fmean

import msgspec
import numpy as np

from rltrace.analysis.intervals import Intervals, covered_ns, cut, total_ns, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import Intervalled, Observations, Seen
from rltrace.analysis.steps import StepWindows


class SpanFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All spans of one name in the processes of one role; calls of each method apart."""

    name: str
    method: str | None
    """Of a `ray.call`, the actor's method or the task; None of any other span."""
    role: str
    processes: int
    """That have any."""
    count: int
    """Of those that are over."""
    open: int
    """Begun and not over: under way, or their process died."""
    seconds: float
    """Added up over the spans that are over."""
    mean_seconds: float | None
    """Of those; None while none is over."""
    max_seconds: float | None
    """Likewise."""
    share: float | None
    """Of a steady step, or of the whole run where no step is marked, while at least one of them was open: the mean over
    the ranks, or processes without a rank, that have any; None while no step is over. A span that is open in a dead
    process lasts until somebody saw that it was gone, else until the process was last heard of."""


def own_spans(seen: Observations, windows: StepWindows) -> list[SpanFigures]:
    """By name and role, those that took most first."""
    return _spans(seen, windows, of_hooks=False)


def hook_spans(seen: Observations, windows: StepWindows) -> list[SpanFigures]:
    """The same of what hooks made, less what has figures of its own: phases, weight sync, sleeps, GPU work."""
    return _spans(seen, windows, of_hooks=True)


def _spans(seen: Observations, windows: StepWindows, *, of_hooks: bool) -> list[SpanFigures]:
    found: dict[tuple[str, str | None, str], list[tuple[Seen, Intervalled]]] = {}
    for process in seen.processes:
        for (name, method), kept in process.named.items():
            if (name in seen.made_by_hooks) is of_hooks:
                found.setdefault((name, method, process.process.role), []).append((process, kept))
    spans = [_figures(*key, members, seen, windows) for key, members in found.items()]
    return sorted(spans, key=lambda span: (-span.seconds, span.name, span.method or "", span.role))


def _figures(
    name: str,
    method: str | None,
    role: str,
    members: list[tuple[Seen, Intervalled]],
    seen: Observations,
    windows: StepWindows,
) -> SpanFigures:
    ended = np.concatenate([kept.ended() for _, kept in members])
    covered = [(process.lane, kept.rows(seen.open_until_ns(process))) for process, kept in members]
    count, seconds = len(ended), total_ns(ended) / 1e9
    return SpanFigures(
        name=name,
        method=method,
        role=role,
        processes=len(members),
        count=count,
        open=sum(len(rows) for _, rows in covered) - count,
        seconds=seconds,
        mean_seconds=seconds / count if count else None,
        max_seconds=float((ended[:, 1] - ended[:, 0]).max()) / 1e9 if count else None,
        share=_share(covered, windows),
    )


def _share(members: list[tuple[Lane, Intervals]], windows: StepWindows) -> float | None:
    of_lane: dict[Lane, list[Intervals]] = {}
    for lane, spans in members:
        of_lane.setdefault(lane, []).append(spans)
    shares = []
    for lane, rows in of_lane.items():
        own = windows.of(lane)
        counted = own.windows[own.steady] if own.spans else own.windows
        if whole_ns := total_ns(counted):
            shares.append(covered_ns(cut(union(*rows), counted)[0]) / whole_ns)
    return fmean(shares) if shares else None
