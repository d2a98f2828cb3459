"""Which steps count, and which process's calls are in which of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rltrace.analysis.steps import number_of
from rltrace.events import Span
from rltrace_exporters.otlp.calls import Call
from rltrace_exporters.otlp.resources import Source

DRIVERS = ("driver", "main")
"""Roles of processes whose steps are the run's."""


def owners(sources: Iterable[Source]) -> list[Source]:
    """Return whose steps count: the driver's; without a driver, the lowest rank's; else each process has its own."""
    having = sorted((source for source in sources if source.has_steps), key=_seniority)
    return having[:1] if are_of_run(having) else having


def are_of_run(owners: Sequence[Source]) -> bool:
    """Return whether the first of them stands for the run."""
    return bool(owners) and (owners[0].role in DRIVERS or owners[0].rank is not None)


def _seniority(source: Source) -> tuple[bool, bool, int, str]:
    return source.role not in DRIVERS, source.rank is None, source.rank or 0, source.key


def step_number(step: Call, place: int) -> int:
    """Return a step's number as the program counts; for a step without one, its place."""
    return number_of(Span(step.name, 0, 0, 0, None, step.args), place)


class Anchors:
    """The phases and steps of some processes, by time: what a call without anything around it belongs to."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = sorted(calls, key=lambda call: (call.start_ns, -call.end_ns))

    def around(self, call: Call) -> Call | None:
        """Return the innermost one that was open when a call began; it is never inside of the call itself."""
        found = None
        for anchor in self._calls:
            if anchor.start_ns > call.start_ns:
                break
            is_wider = anchor.start_ns < call.start_ns or anchor.end_ns > call.end_ns
            if is_wider and call.start_ns < anchor.end_ns and not anchor.is_below(call):
                found = anchor
        return found
