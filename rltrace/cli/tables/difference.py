"""Two runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from rltrace.analysis.difference import LEAST_STEPS, Bytes, Difference, Seconds, Setting, Side, Totals, Work
from rltrace.analysis.finding_changes import GONE, LESS, MORE, NEW, FindingChange
from rltrace.analysis.findings.amounts import as_text, longer_by
from rltrace.analysis.noise import FEWEST_STEPS
from rltrace.analysis.steady import Spread
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, titled, visible_figures, words
from rltrace.events import WAIT_DRIVER

SLIGHT = 0.001
"""Share of both steps below which a phase has no row."""
MOST_SETTINGS = 12
SAME_SHARE = 0.01
"""Below this, the typical step and the mean one differ by the same."""

MOST_FINDINGS = 6
MOST_TOTALS = 24
SMALL = 0.01
"""Share of both peaks below which an owner has no row."""


def show_difference(found: Difference, screen: Console) -> None:
    """Print two runs side by side."""
    found = visible_figures(found)
    screen.print(Group(_who("A", found.a), _who("B", found.b)))
    screen.print()
    screen.print(verdict(found))
    for change in found.findings[:MOST_FINDINGS]:
        screen.print(_finding(change))
    if len(found.findings) > MOST_FINDINGS:
        screen.print(Text(f"and {len(found.findings) - MOST_FINDINGS} more: see --json", "dim"))
    for section in _sections(found):
        screen.print()
        screen.print(section)


def verdict(found: Difference) -> Text:
    """Say whether the steps of B are longer, by more than noise."""
    change = found.step_change
    if change is None:
        return Text("Which is faster cannot be told: one has no step that is over", "yellow")
    if change.least_share is None or change.most_share is None or change.visible_share is None:
        steps = f"{len(found.a.steps)} and {len(found.b.steps)} steps"
        few = f"{steps} are too few to tell that from noise: {FEWEST_STEPS} are needed"
        return Text(f"A typical step of B is {longer_by(change.share)}{_mean_step(found)}; {few}", "yellow")
    said = f"a typical step is {longer_by(change.share)}{_mean_step(found)}, surely by"
    if change.is_slower:
        return Text(f"B is slower: {said} more than {abs(change.least_share):.1%}", "red")
    if change.is_faster:
        return Text(f"B is faster: {said} more than {abs(change.most_share):.1%}", "green")
    seen = f"with these steps {change.visible_share:+.1%} would be seen"
    return Text(f"No difference beyond noise: {change.share:+.1%}; {seen}")


def _mean_step(found: Difference) -> str:
    """Say by how much the mean differs, which is what the table has, where single steps make it another figure."""
    if found.step is None or found.step.ratio is None or found.step_change is None:
        return ""
    mean_share = found.step.ratio - 1
    return (
        ""
        if abs(mean_share - found.step_change.share) < SAME_SHARE
        else f" (the mean of the steps {longer_by(mean_share)})"
    )


def _finding(change: FindingChange) -> Text:
    costs = [None if cost is None else _cost(cost, change.unit) for cost in (change.a, change.b)]
    styles = {NEW: "red", MORE: "red", GONE: "green", LESS: "green"}
    said = f"({costs[0]} → {costs[1]})  " if None not in costs else ""
    return Text.assemble((f"{change.change}  ", styles[change.change]), said, change.title)


def _cost(cost: float, unit: str) -> str:
    return figures.size(cost) if unit == "bytes" else as_text(cost)


def _sections(found: Difference) -> Iterator[RenderableType]:
    if found.settings:
        yield setting_table(found.settings)
    if not found.same_program:
        yield Text("These are different programs: of their settings, only machines and packages are compared", "dim")
    if found.a.steps and found.b.steps:
        yield phase_table(found)
        if found.weight_sync:
            yield sync_table(found)
        if found.gpu_work:
            yield work_table(found.gpu_work)
    else:
        yield total_table(found)
    if found.peak is not None:
        yield memory_table(found)
    else:
        yield Text("Neither has a sample of memory", "dim")


def _who(name: str, side: Side) -> Text:
    """Say which run it is, and which part is compared."""
    steps = f"{'step' if len(side.steps) == 1 else 'mean of steps'} {figures.ranges(side.steps)}"
    steps += " (the first, which includes warm-up)" if side.is_first else ""
    facts = [steps if side.steps else "no step has ended", *([figures.count(side.ranks, "rank")] if side.ranks else [])]
    return Text.assemble((f"{name}  ", "bold"), side.run.path, (f"  {', '.join(facts)}", "dim"), overflow="fold")


def setting_table(settings: Sequence[Setting]) -> RenderableType:
    """Draw the settings of the two runs that differ."""
    table = Figures("setting", words("A"), words("B"))
    for setting in settings[:MOST_SETTINGS]:
        table.add_row(setting.name, setting.a or "", setting.b or "")
    more = len(settings) - MOST_SETTINGS
    return titled("What differs", table, f"and {more} more: see --json" if more > 0 else "")


def phase_table(found: Difference) -> RenderableType:
    """Draw a step of each, phase by phase; the driver's phases are below the ranks' waiting for it."""
    table = _seconds_table("phase")
    slight = []
    for row, is_of_driver in _phase_rows(found):
        if _share(row, found.step) < SLIGHT:
            slight.append(row.name)
        else:
            _add_seconds(table, row, f"  {row.name}" if is_of_driver else row.name)
    table.add_section()
    if found.step is not None:
        _add_seconds(table, found.step, found.step.name, "bold")
    captions = [f"below {SLIGHT:.1%} of both: {', '.join(slight)}"] if slight else []
    if any(row.overlapping for row, _ in _phase_rows(found)) or (found.step is not None and found.step.overlapping):
        captions.append(
            "~: the ranges of their steps overlap, so the difference may be chance; with few steps, others may be too"
        )
    if found.step is not None and found.step.a and found.step.b and found.step.overlapping is None:
        few = [name for name, side in (("A", found.a), ("B", found.b)) if len(side.steps) < LEAST_STEPS]
        captions.append(f"only one step of {' and '.join(few)}: any difference may be chance")
    return titled("Step", table, "; ".join(captions))


def total_table(found: Difference) -> RenderableType:
    """Draw whole runs, if one or both have no steps to compare: phases and spans by name."""
    table = Figures("phase or span", "A", Column("A's", 4), "B", Column("B's", 4), "B - A", "B / A")
    for row in found.totals[:MOST_TOTALS]:
        _add_total(table, row)
    table.add_section()
    lengths = [side.run.seconds for side in (found.a, found.b)]
    _add_total(
        table,
        Totals(name="the run", a_seconds=lengths[0], b_seconds=lengths[1], a_count=None, b_count=None),
        "bold",
    )
    more = len(found.totals) - MOST_TOTALS
    captions = [f"and {more} more: see --json"] if more > 0 else []
    without = [name for name, side in (("A", found.a), ("B", found.b)) if not side.steps]
    captions.append(
        "neither has a step that is over" if without == ["A", "B"] else f"{without[0]} has no step that is over"
    )
    return titled("Whole runs: seconds, and how many", table, "; ".join(captions))


def _add_total(table: Figures, row: Totals, style: str | None = None) -> None:
    change = ratio = ""
    if row.a_seconds is not None and row.b_seconds is not None:
        change = figures.change(row.b_seconds - row.a_seconds)
        ratio = f"{row.b_seconds / row.a_seconds:.2f}" if row.a_seconds else ""
    sides = ((row.a_seconds, row.a_count), (row.b_seconds, row.b_count))
    cells = [cell for seconds, count in sides for cell in _total_cells(seconds, count)]
    table.add_row(row.name, *cells, change, ratio, style=style)


def _total_cells(seconds: float | None, count: int | None) -> tuple[str, str]:
    return "" if seconds is None else figures.seconds(seconds), "" if count is None else f"{count:,}"


def _phase_rows(found: Difference) -> Iterator[tuple[Seconds, bool]]:
    waits = False
    for row in found.phases:
        yield row, False
        if row.name == WAIT_DRIVER:
            waits = True
            yield from ((own, True) for own in found.driver)
    if not waits:
        yield from ((own, True) for own in found.driver)


def _share(row: Seconds, step: Seconds | None) -> float:
    """Return the larger share."""
    sides = [] if step is None else [(row.a, step.a), (row.b, step.b)]
    return max((own.mean_seconds / of.mean_seconds for own, of in sides if own and of and of.mean_seconds), default=1.0)


def sync_table(found: Difference) -> RenderableType:
    """Draw the stages of the sync."""
    table = _seconds_table("stage")
    for row in found.weight_sync:
        _add_seconds(table, row, row.name.partition(".")[2])
    sent = found.weight_sync_bytes
    sizes = [figures.megabytes(size or 0) or "0" for size in (sent.a_bytes, sent.b_bytes)] if sent is not None else []
    said = f": {' and '.join(sizes)} MB" if sizes else ""
    return titled(f"Weight sync of a rank{said}", table)


def work_table(gpu_work: Sequence[Work]) -> RenderableType:
    """Draw what the GPUs did in a step, waits for other ranks included."""
    table = Figures("work", "A", "B", "B - A", "B / A")
    for row in gpu_work:
        cells = ["" if seconds is None else figures.seconds(seconds) for seconds in (row.a_seconds, row.b_seconds)]
        change = ratio = ""
        if row.a_seconds is not None and row.b_seconds is not None:
            change = figures.change(row.b_seconds - row.a_seconds)
            ratio = f"{row.b_seconds / row.a_seconds:.2f}" if row.a_seconds else ""
        table.add_row(row.name, *cells, change, ratio)
    return titled("GPU work in a step: mean over the ranks", table)


def _seconds_table(what: str) -> Figures:
    return Figures(what, "A", Column("A's steps", 4), "B", Column("B's steps", 4), "B - A", Column("", 5), "B / A")


def _add_seconds(table: Figures, row: Seconds, name: str, style: str | None = None) -> None:
    change = "" if row.difference_seconds is None else figures.change(row.difference_seconds)
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    doubt = "~" if row.overlapping else ""
    cells = _mean(row.a), _steps(row.a), _mean(row.b), _steps(row.b), change, doubt, ratio
    table.add_row(name, *cells, style=style or ("dim" if row.overlapping else None))


def _mean(seconds: Spread | None) -> str:
    return "" if seconds is None else figures.seconds(seconds.mean_seconds)


def _steps(seconds: Spread | None) -> str:
    if seconds is None:
        return ""
    return figures.between_seconds(seconds.least_seconds, seconds.most_seconds)


def memory_table(found: Difference) -> RenderableType:
    """Draw the owners, each at its own peak on any device."""
    table = Figures("owner", "A", "B", "B - A")
    small = []
    for row in found.memory:
        if max(abs(row.a_bytes or 0), abs(row.b_bytes or 0)) < SMALL * _most(found.peak):
            small.append(row.owner)
        else:
            _add_bytes(table, row, row.owner)
    table.add_section()
    if found.peak is not None:
        _add_bytes(table, found.peak, "total, at its peak", "bold")
    caption = f"below {SMALL:.0%} of both: {', '.join(small)}" if small else ""
    return titled("Memory: the peak of each owner on any device", table, caption)


def _most(peak: Bytes | None) -> int:
    return max(peak.a_bytes or 0, peak.b_bytes or 0) if peak is not None else 0


def _add_bytes(table: Figures, row: Bytes, name: str, style: str | None = None) -> None:
    sizes = ["" if size is None else figures.size(size) for size in (row.a_bytes, row.b_bytes)]
    said = ""
    if row.a_bytes is not None and row.b_bytes is not None:
        change = row.b_bytes - row.a_bytes
        said = f"{'+' if change > 0 else ''}{figures.size(change)}"
    table.add_row(name, *sizes, said, style=style)
