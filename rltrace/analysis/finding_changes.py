"""Which findings of one run are gone in another one, are new, or cost more or less."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from rltrace.analysis.findings import Why
from rltrace.analysis.findings.finding import Finding

GONE, NEW, MORE, LESS = "gone", "new", "more", "less"

NOISE = 0.1
"""By what share a price without an interval must differ: equal steps differ by 5 to 10 %
(docs/measurements/index.md)."""


class FindingChange(msgspec.Struct, frozen=True, kw_only=True):
    """One finding in both runs."""

    id: str
    """Name of the finding."""
    phases: list[str]
    """Phases that it is about."""
    change: str
    """`gone` if only A has it, `new` if only B has it; `more` or `less` if it costs B more or less, by more than the
    intervals of both."""
    title: str
    """The finding of B in one sentence; that of A if it is gone."""
    a: float | None
    """What it costs A, in `unit`; None if A has it not."""
    b: float | None
    """The same of B."""
    unit: str
    """`seconds_per_step`, `once_seconds`, `bytes` or `bound_seconds`."""


def finding_changes(a: Why, b: Why, phases: tuple[Collection[str], Collection[str]] = ((), ())) -> list[FindingChange]:
    """Compare the findings of two runs; what is alike is left out, and what one run could not judge too.

    Only like is compared with like: where a finding of B is about other phases or owners than that of A, or in another
    unit, that of A is gone and that of B is new. A finding about phases that the other run does not have is gone with
    them, or came with them.

    Args:
        a: What bounds the steps of the run to compare with.
        b: What bounds those of the other run.
        phases: Names of the phases of each; of a run without any, nothing is known.
    """
    before, after = _by_place(a), _by_place(b)
    unknown_a, unknown_b = ({one.id for one in found.unjudged} for found in (a, b))
    changes: list[FindingChange] = []
    for place in dict.fromkeys((*after, *before)):
        old, new = before.get(place), after.get(place)
        if place[0] in unknown_a and not _is_foreign(new, phases[0]):
            continue
        if place[0] in unknown_b and not _is_foreign(old, phases[1]):
            continue
        changes += _change(old, new)
    return changes


def _is_foreign(one: Finding | None, phases: Collection[str]) -> bool:
    """Return whether a finding is about phases that the other run does not have."""
    about = set() if one is None else set(one.evidence.phases)
    return bool(about and phases) and about.isdisjoint(phases)


Place = tuple[str, str, tuple[str, ...]]


def _by_place(found: Why) -> dict[Place, Finding]:
    """Return findings by what tells them apart: their id, in what they are priced, and what the price is of."""
    by_place: dict[Place, Finding] = {}
    for one in found.findings:  # the one that costs most comes first
        by_place.setdefault((one.id, _unit(one), tuple(one.about)), one)
    return by_place


def _change(a: Finding | None, b: Finding | None) -> Iterator[FindingChange]:
    one = b or a
    if one is None:
        return
    unit = _unit(one)
    costs = [None if found is None else getattr(found, unit) for found in (a, b)]
    kind = NEW if a is None else GONE if b is None else _compared(a, b, unit)
    if kind is not None:
        yield FindingChange(
            id=one.id, phases=one.evidence.phases, change=kind, title=one.title, a=costs[0], b=costs[1], unit=unit
        )


def _unit(one: Finding) -> str:
    names = ("seconds_per_step", "once_seconds", "bytes")
    return next((name for name in names if getattr(one, name) is not None), "bound_seconds")


def _compared(a: Finding, b: Finding, unit: str) -> str | None:
    before, after = getattr(a, unit), getattr(b, unit)
    if before is None or after is None:
        return None
    if unit == "seconds_per_step" and a.interval_seconds is not None and b.interval_seconds is not None:
        is_more = b.interval_seconds.least > a.interval_seconds.most
        is_less = b.interval_seconds.most < a.interval_seconds.least
    else:
        is_more, is_less = after > before * (1 + NOISE), after < before / (1 + NOISE)
    return MORE if is_more else LESS if is_less else None
