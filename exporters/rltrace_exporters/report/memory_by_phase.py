"""Memory by phase: who holds the fullest card when each phase holds most, its true peaks, and what is left."""

from __future__ import annotations

from collections.abc import Iterator

from rltrace.analysis.ledger import FREE
from rltrace.analysis.memory import DeviceMemory, FullestMoment, fullest_moments
from rltrace.events import OWNER_COLORS, OWNERS
from rltrace_exporters.report.amounts import GIB, MIB, gibibytes, percentage
from rltrace_exporters.report.blocks import Bars, Legend, Mark, Note, Part, Row
from rltrace_exporters.report.sections import MOST_ROWS, Block
from rltrace_exporters.report.ticks import end_of_axis
from rltrace_exporters.report.values import Missing, RunValues, is_gpu, most_used

FULLEST = 6
"""So many cards are shown by name where there are many."""


def memory_by_phase(values: RunValues) -> list[Block]:
    """Return a stacked bar for each phase of the fullest card, then a bar for each card."""
    card = values.fullest
    if card is None:
        raise Missing("No process sampled what it holds, so nothing is known of memory (docs/gpus.md says what does).")
    lane, ledger = values.ledger(card)
    moments = fullest_moments(lane, ledger, values.seen, values.windows.of(lane))
    of_steps = [one for one in moments if one.moment.step is not None] or moments
    capacity = _capacity(card)
    counted = _counted(card)
    blocks: list[Block] = []
    if of_steps:
        blocks.append(_phases(card, of_steps, capacity, counted))
    else:
        blocks.append(Note(f"No phase of {card.lane} was sampled, so its memory is not told apart by phase."))
    blocks.append(_cards(values))
    has_ends_only = not all(one.is_sampled_inside for one in of_steps)
    blocks += [Note(said) for said in _said(card, capacity, has_ends_only=has_ends_only)]
    return blocks


def _capacity(card: DeviceMemory) -> int | None:
    """Return all bytes of a card; None if nobody read what is free."""
    free = card.at_peak_bytes.get(FREE)
    return card.peak_bytes + free if free else None


def _counted(card: DeviceMemory) -> dict[str, int]:
    """Return the most that torch counted in a phase, between samples too."""
    found: dict[str, int] = {}
    for peak in (*card.allocated_peaks, *card.allocated_steps):
        if peak.phase is not None:
            found[peak.phase] = max(found.get(peak.phase, 0), peak.bytes)
    return found


def _unit(most: float) -> tuple[str, int]:
    return ("GiB", GIB) if most >= 4 * GIB else ("MiB", MIB)


def _phases(card: DeviceMemory, moments: list[FullestMoment], capacity: int | None, counted: dict[str, int]) -> Bars:
    most = max([capacity or 0, *(one.used_bytes for one in moments)])
    unit, size = _unit(most)
    rows = [_phase(one, capacity, counted, size) for one in moments]
    owners = [owner for owner in OWNERS if owner != FREE and any(one.moment.bytes.get(owner, 0) > 0 for one in moments)]
    where = " · ".join(filter(None, (card.lane, card.device)))
    return Bars(
        title=f"The fullest moment of each phase, {where}",
        rows=rows,
        to=end_of_axis(most / size),
        unit=unit,
        legend=[Legend(owner, OWNER_COLORS[owner]) for owner in owners],
        note="A line across a bar is the most that was in use in the phase, caches and all"
        + (", or that torch itself counted." if counted else "."),
        value_name="peak",
        note_name="headroom" if capacity else "",
    )


def _phase(one: FullestMoment, capacity: int | None, counted: dict[str, int], size: int) -> Row:
    phase = one.moment.phase or "no phase"
    parts, start = [], 0.0
    for owner in OWNERS:
        held = one.moment.bytes.get(owner, 0)
        if owner != FREE and held > 0:
            end = start + held / size
            parts.append(Part(start, end, OWNER_COLORS[owner], f"{phase}: {owner} {gibibytes(held)}"))
            start = end
    most = max(one.used_bytes, counted.get(phase, 0))
    marks = [Mark(one.used_bytes / size, f"{phase}: at most {gibibytes(one.used_bytes)} in use at any look")]
    if (torch := counted.get(phase)) is not None:
        marks.append(Mark(torch / size, f"{phase}: torch handed out {gibibytes(torch)} at once, between looks too"))
    left = "" if capacity is None else gibibytes(capacity - most)
    name = phase if one.is_sampled_inside else f"{phase}*"
    return Row(name, parts, gibibytes(most), left, marks=tuple(marks), room=(capacity or 0) / size)


def _cards(values: RunValues) -> Bars:
    """Return the true peak of each card; of many, of the fullest, the median and the emptiest one."""
    cards = sorted(values.summary.memory, key=most_used, reverse=True)
    of_many = len(cards) > MOST_ROWS
    shown = [*cards[:FULLEST], cards[len(cards) // 2], cards[-1]] if of_many else values.summary.memory
    most = max([*map(most_used, cards), *(_capacity(card) or 0 for card in cards)])
    unit, size = _unit(most)
    kind = "card" if all(map(is_gpu, cards)) else "device"
    title = (
        f"Peaks of {len(cards):,} {kind}s: the fullest, the median, the emptiest" if of_many else f"Peak of each {kind}"
    )
    knows = any(map(_capacity, shown))
    return Bars(title, [_card(card, size) for card in shown], end_of_axis(most / size), unit,
                value_name="peak", note_name="headroom" if knows else "")  # fmt: skip


def _card(card: DeviceMemory, size: int) -> Row:
    used, capacity = most_used(card), _capacity(card)
    when = " in " + card.peak_phase if card.peak_phase else ""
    parts = [Part(0.0, used / size, "#6366f1", f"{card.lane}: at most {gibibytes(used)}, at a boundary{when}")]
    left = "" if capacity is None else f"{gibibytes(capacity - used)} ({percentage(1 - used / capacity)})"
    return Row(card.lane, parts, gibibytes(used), left, room=(capacity or 0) / size)


def _said(card: DeviceMemory, capacity: int | None, *, has_ends_only: bool) -> Iterator[str]:
    if capacity is None:
        what = "card" if is_gpu(card) else "device"
        yield f"Nobody read how much the {what} has in all, so the headroom is unknown."
    if card.unknown:
        reasons = "; ".join(f"{owner}: {reason}" for owner, reason in card.unknown.items())
        yield f"Not known here: {reasons}."
    if has_ends_only:
        yield "* was sampled at its two ends only; what comes and goes in between shows in its peak at most."
