"""What changed from one run to another: the verdict, findings that came and went, and what differs between them."""

from __future__ import annotations

from collections.abc import Sequence

from rltrace.analysis.difference import Difference, Seconds
from rltrace.analysis.finding_changes import FindingChange
from rltrace.analysis.noise import FEWEST_STEPS
from rltrace_exporters.report.amounts import as_text, bytes_as_text, gibibytes, longer_by
from rltrace_exporters.report.blocks import Change, Changes, Note, Table
from rltrace_exporters.report.sections import Block

SLIGHT = 0.001
"""Share of both steps below which a phase has no row."""


def changes(found: Difference) -> list[Block]:
    """Return the verdict first, then findings, settings, phases and owners that differ."""
    blocks: list[Block] = [Note(verdict(found))]
    if found.findings:
        blocks.append(Changes([_change(one) for one in found.findings]))
    if not found.same_program:
        blocks.append(Note("These are different programs: of their settings, only machines and packages are compared."))
    if found.settings:
        rows = [[one.name, one.a or "", one.b or ""] for one in found.settings]
        blocks.append(Table("Settings that differ", ["setting", "A", "B"], rows, is_folded=len(rows) > 12))
    if found.step is not None:
        blocks.append(_seconds("Seconds of a step", [*found.phases, *found.driver, found.step], found.step))
    if found.weight_sync:
        blocks.append(_seconds("Stages of the weight sync", found.weight_sync, None, is_folded=True))
    if found.memory:
        rows = [[one.owner, _size(one.a_bytes), _size(one.b_bytes)] for one in found.memory]
        blocks.append(Table("The most that each owner held on any card", ["owner", "A", "B"], rows))
    return blocks


def verdict(found: Difference) -> str:
    """Say whether the steps of B are longer, by more than noise."""
    change = found.step_change
    if change is None:
        return "Which run is faster cannot be told: one has no step that is over."
    typical = f"a typical step of B is {longer_by(change.share)}"
    if found.step is not None and found.step.ratio is not None:
        typical += f" (the mean of the steps {found.step.ratio - 1:+.1%})"
    if change.least_share is None or change.most_share is None:
        many = f"{len(found.a.steps)} and {len(found.b.steps)} steps"
        few = f"{many} are too few to tell that from noise, {FEWEST_STEPS} are needed"
        return f"{typical[0].upper()}{typical[1:]}; {few}."
    if change.is_slower:
        return f"B is slower: {typical}, surely by more than {abs(change.least_share):.1%}."
    if change.is_faster:
        return f"B is faster: {typical}, surely by more than {abs(change.most_share):.1%}."
    return f"No difference beyond noise: {typical}."


def _change(one: FindingChange) -> Change:
    written = [None if cost is None else _cost(cost, one.unit) for cost in (one.a, one.b)]
    both = f"{written[0]} → {written[1]}" if None not in written else written[0] or written[1] or ""
    return Change(one.change, both, one.title)


def _cost(cost: float, unit: str) -> str:
    return bytes_as_text(cost) if unit == "bytes" else as_text(cost)


def _seconds(title: str, rows: Sequence[Seconds], step: Seconds | None, is_folded: bool = False) -> Table:
    """Return lengths side by side; what is slight in both has no row."""
    cells = []
    for one in rows:
        a, b = (None if of is None else of.mean_seconds for of in (one.a, one.b))
        whole = max((of.mean_seconds for of in (step.a, step.b) if of is not None), default=0.0) if step else 0.0
        if max(a or 0.0, b or 0.0) < SLIGHT * whole:
            continue
        change = "" if one.difference_seconds is None else f"{one.difference_seconds:+.3f} s"
        doubt = "may be chance" if one.overlapping else ""
        cells.append([one.name, _length(a), _length(b), change, doubt])
    return Table(title, ["", "A", "B", "B - A", ""], cells, is_folded)


def _length(seconds: float | None) -> str:
    return "" if seconds is None else as_text(seconds)


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else gibibytes(size_bytes)
