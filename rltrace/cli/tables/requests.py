"""Where the time of requests went, from the agent loop to the engine and back."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from rltrace.analysis.requests import (
    AFTER_ENGINE,
    AGENT_LOOP,
    BEFORE_ENGINE,
    ENGINE,
    FROM_SERVER,
    IN_ENGINE,
    RUNNING,
    SERVER,
    TO_SERVER,
    WAITING,
    Requests,
)
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, titled
from rltrace.events import AGENT_REQUEST, REQUEST, SERVER_REQUEST

FEW = 2
"""Stages that one line names."""

MATTERS = 0.5
"""Share of the requests' time outside of the engine above which the first screen says where it went."""

_CALLED = {
    AGENT_LOOP: "in the agent loop, before it is sent",
    TO_SERVER: "on its way to the server",
    SERVER: "at the server and in the engine",
    BEFORE_ENGINE: "at the server, before the engine",
    WAITING: "waiting in the engine",
    RUNNING: "running in the engine",
    ENGINE: "in the engine",
    AFTER_ENGINE: "at the server, after the engine",
    FROM_SERVER: "on its way back",
}
_OF = {
    AGENT_REQUEST: "from the agent loop to the engine and back",
    SERVER_REQUEST: "that no agent loop sent",
    REQUEST: "of engines, without a server",
}


def request_line(found: Sequence[Requests]) -> Text | None:
    """Return one line if most of the time is outside of the engine: how much, and where; None if it is not."""
    for requests in found:
        outside = {name: stage for name, stage in requests.stages.items() if name not in IN_ENGINE}
        share = sum(stage.share for stage in outside.values())
        if requests.mean_seconds is None or len(outside) == len(requests.stages) or share <= MATTERS:
            continue
        longest = sorted(outside, key=lambda name: -outside[name].mean_seconds)[:FEW]
        parts = [f"{_CALLED[name]} {_with_unit(outside[name].mean_seconds)}" for name in longest]
        said = f" {_with_unit(requests.mean_seconds)} each, {share:.0%} outside of the engine: {'; '.join(parts)}"
        return Text.assemble(("Requests", "bold"), said)
    return None


def _with_unit(seconds: float) -> str:
    return figures.with_unit(figures.seconds(seconds))


def request_table(requests: Requests, when: str) -> RenderableType:
    """Draw the stages of a request in the order in which it passes them, and the whole.

    Args:
        requests: Those of one outermost span.
        when: Of which steps they are; empty for the whole run.
    """
    table = Figures("stage", Column("mean s", 9), Column("median s", 4), Column("p95 s", 5), Column("share", 6))
    for name, stage in requests.stages.items():
        table.add_row(_CALLED[name], *_lengths(stage), f"{stage.share:.1%}")
    if requests.count:
        table.add_section()
        table.add_row(requests.name, *_lengths(requests), "")
    title = f"Requests {_OF[requests.name]}: {figures.count(requests.count, 'request')}{f', {when}' if when else ''}"
    return titled(title, table, "; ".join(_notes(requests)))


def _lengths(item: object) -> list[str]:
    """Return mean, median and 95th percentile."""
    return [figures.seconds(getattr(item, f"{of}_seconds")) for of in ("mean", "median", "p95")]


def _notes(requests: Requests) -> list[str]:
    notes = ["means add up, medians and p95 do not"] if len(requests.stages) > 1 else []
    if missed := [f"{many:,} {reason}" for reason, many in requests.unjoined.items()]:
        notes.append(f"not in the figures: {', '.join(missed)}")
    return notes
