"""Spans of the program's own: made by `rltrace.span` and `@rltrace.traced`, by no hook, and no phases."""

from __future__ import annotations

import msgspec
import numpy as np

from rltrace.analysis.intervals import Intervals, covered_ns, cut, total_ns, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import Observations
from rltrace.analysis.steps import StepWindows


class OwnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """All spans of one name in the processes of one role."""

    name: str
    role: str
    processes: int
    """That have any."""
    count: int
    seconds: float
    """Added up over the spans; one that is open lasts until the Recording's last event."""
    mean_seconds: float
    share: float | None
    """Of a steady step, while at least one of them was open: the mean over the ranks, or processes without a rank, that
    have any; None without such a step."""


def own_spans(seen: Observations, windows: StepWindows) -> list[OwnSpan]:
    """By name and role, those that took most first."""
    found: dict[tuple[str, str], list[tuple[Lane, Intervals]]] = {}
    for process in seen.processes:
        for name, kept in process.own.items():
            rows = kept.rows(seen.end_ns)
            found.setdefault((name, process.process.role), []).append((process.lane, rows))
    spans = [_own_span(name, role, members, windows) for (name, role), members in found.items()]
    return sorted(spans, key=lambda span: (-span.seconds, span.name, span.role))


def _own_span(name: str, role: str, members: list[tuple[Lane, Intervals]], windows: StepWindows) -> OwnSpan:
    seconds = sum(total_ns(rows) for _, rows in members) / 1e9
    count = sum(len(rows) for _, rows in members)
    return OwnSpan(
        name=name,
        role=role,
        processes=len(members),
        count=count,
        seconds=seconds,
        mean_seconds=seconds / count,
        share=_share(members, windows),
    )


def _share(members: list[tuple[Lane, Intervals]], windows: StepWindows) -> float | None:
    steps = windows.windows[windows.steady]
    whole_ns = total_ns(steps)
    if not whole_ns:
        return None
    of_lane: dict[Lane, list[Intervals]] = {}
    for lane, rows in members:
        of_lane.setdefault(lane, []).append(rows)
    inside_ns = [covered_ns(cut(union(*rows), steps)[0]) for rows in of_lane.values()]
    return float(np.mean(inside_ns)) / whole_ns
