"""Spans of the program's own: made by `rltrace.span` and `@rltrace.traced`, by no hook, and no phases."""

from __future__ import annotations

import msgspec
import numpy as np

from rltrace.analysis.intervals import Intervals, covered_ns, cut, total_ns, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import Intervalled, Observations, Seen
from rltrace.analysis.steps import StepWindows


class OwnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """All spans of one name in the processes of one role."""

    name: str
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
    share: float | None
    """Of a steady step, while at least one of them was open: the mean over the ranks, or processes without a rank, that
    have any; None without such a step. A span that is open lasts until its process was last heard of, or until now."""


def own_spans(seen: Observations, windows: StepWindows) -> list[OwnSpan]:
    """By name and role, those that took most first."""
    found: dict[tuple[str, str], list[tuple[Seen, Intervalled]]] = {}
    for process in seen.processes:
        for name, kept in process.own.items():
            found.setdefault((name, process.process.role), []).append((process, kept))
    spans = [_own_span(name, role, members, seen, windows) for (name, role), members in found.items()]
    return sorted(spans, key=lambda span: (-span.seconds, span.name, span.role))


def _own_span(
    name: str, role: str, members: list[tuple[Seen, Intervalled]], seen: Observations, windows: StepWindows
) -> OwnSpan:
    ended = [kept.ended() for _, kept in members]
    seconds = sum(map(total_ns, ended)) / 1e9
    count = sum(map(len, ended))
    covered = [(process.lane, kept.rows(_until_ns(process, seen))) for process, kept in members]
    return OwnSpan(
        name=name,
        role=role,
        processes=len(members),
        count=count,
        open=sum(len(rows) for _, rows in covered) - count,
        seconds=seconds,
        mean_seconds=seconds / count if count else None,
        share=_share(covered, windows),
    )


def _until_ns(process: Seen, seen: Observations) -> int:
    """How long a span of a process is known to have been open."""
    return seen.end_ns if process.process.is_alive else process.last_ns


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
