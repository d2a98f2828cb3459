"""How far the figures can be trusted: what was seen, what is missing, and what recording itself cost."""

from __future__ import annotations

from collections.abc import Iterator

from rltrace.analysis.fates import having
from rltrace.analysis.hooks import is_not_needed, made_by
from rltrace.analysis.memory import DeviceMemory
from rltrace.analysis.seen.process import Seen
from rltrace.events import DEVICE_SPAN
from rltrace_exporters.report.amounts import as_text, count, gibibytes, percentage
from rltrace_exporters.report.blocks import Table, Trust, Trusts
from rltrace_exporters.report.sections import Block
from rltrace_exporters.report.values import RunValues

GOOD, LOOK, UNKNOWN = "good", "look", "unknown"
MOST_COST = 0.01
"""Share of a run that recording may take; our goal is half of it (docs/measurements/cost_8b.md)."""
NAMED = 3


def trust(values: RunValues) -> list[Block]:
    """Return one row for each thing that makes figures certain or less so."""
    rows = [*_memory(values), *_hooks(values), *_clocks(values), *_losses(values), *_processes(values), *_cost(values)]
    return [Trusts(rows), *_silent_hooks(values)]


def _memory(values: RunValues) -> Iterator[Trust]:
    judged = [(one, one.residual) for one in values.summary.memory if one.residual is not None]
    if not judged:
        why = "no process sampled memory" if not values.summary.memory else "nobody read the device's total"
        yield Trust(UNKNOWN, "consistent phase boundaries", "unknown", f"{why}, so there is nothing to judge")
        return
    boundaries = sum(found.boundaries for _, found in judged)
    doubtful = sum(found.inconsistent_boundaries for _, found in judged)
    share = 1 - doubtful / boundaries if boundaries else 0.0
    yield Trust(
        GOOD if share >= 0.5 else LOOK,
        "consistent phase boundaries",
        f"{boundaries - doubtful:,} of {boundaries:,}",
        "all processes of a card were looked at in one moment; memory is judged there and nowhere else",
    )
    over = sum(found.boundaries_over_limit for _, found in judged)
    card, worst = max(judged, key=lambda item: item[1].worst_bytes)
    yield Trust(
        LOOK if over else GOOD,
        "unaccounted bytes",
        f"at most {gibibytes(worst.worst_bytes)}",
        f"{card.lane} in {worst.worst_phase or 'no phase'}; the limit there is {gibibytes(worst.worst_limit_bytes)}, "
        f"and {count(over, 'boundary')} exceed theirs",
    )
    yield from _unknown_rows(values.summary.memory)


def _unknown_rows(memory: list[DeviceMemory]) -> Iterator[Trust]:
    unknown = {owner: reason for card in memory for owner, reason in card.unknown.items()}
    if unknown:
        said = "; ".join(f"{owner}: {reason}" for owner, reason in list(unknown.items())[:NAMED])
        yield Trust(LOOK, "owners that are not known", f"{len(unknown)}", said)


def _hooks(values: RunValues) -> Iterator[Trust]:
    hooks = values.summary.hooks
    if not hooks:
        yield Trust(UNKNOWN, "hooks", "none", "no hook was installed: only what the program itself marks was recorded")
        return
    installed = [hook for hook in hooks if hook.state == "installed"]
    made = made_by(hooks)
    not_needed = sum(is_not_needed(hook, made) for hook in installed)
    silent = [hook for hook in installed if hook.never_fired and not is_not_needed(hook, made)]
    failed = [hook for hook in hooks if hook.state == "failed"]
    unverified = [hook for hook in installed if hook.unverified]
    yield Trust(
        LOOK if silent or failed else GOOD,
        "missed hooks",
        f"{len(silent):,} of {len(installed):,} never fired"
        + (f", {not_needed:,} were not needed" if not_needed else "")
        + (f", {len(failed):,} failed" if failed else ""),
        "what a silent hook would have recorded may be missing" if silent else "every hook that should be called was",
    )
    if unverified:
        yield Trust(
            LOOK, "hooks in newer releases", f"{len(unverified):,}", "they found all that they read, in changed source"
        )


def _clocks(values: RunValues) -> Iterator[Trust]:
    clocks = values.summary.clocks
    if values.unaligned:
        yield Trust(LOOK, "clock bound", "unknown", values.unaligned)
        return
    bound = max((clock.bound_seconds or 0.0 for clock in clocks), default=0.0)
    said = "one clock wrote all times" if len(clocks) < 2 else f"of {len(clocks):,} clocks, by exchanges with the run's"
    yield Trust(GOOD, "clock bound", f"± {as_text(bound)}" if bound else "exact", said)


def _losses(values: RunValues) -> Iterator[Trust]:
    summary = values.summary
    damaged = len(summary.losses) + len(summary.unidentified)
    if not damaged and not summary.lost_events:
        yield Trust(GOOD, "lost events", "none", "everything that was recorded could be read")
        return
    torn = sum(loss.torn_records + loss.damaged_lines + loss.damaged_segments for loss in summary.losses)
    dropped = sum(loss.dropped_segments for loss in summary.losses)
    said = [f"{torn:,} records, lines or segments are cut or damaged"] if torn else []
    said += [f"{dropped:,} segments were dropped to keep to the disk budget"] if dropped else []
    said += [f"{len(summary.unidentified):,} processes are not identified"] if summary.unidentified else []
    yield Trust(
        LOOK, "lost events", f"{summary.lost_events:,} in {damaged:,} places",
        "; ".join(said) or "`rltrace summary` says which",
    )  # fmt: skip


def _processes(values: RunValues) -> Iterator[Trust]:
    summary = values.summary
    died = having(summary, "died", "in doubt")
    if summary.run.is_live:
        yield Trust(LOOK, "the run", "goes on", "what comes later is not in this report")
    elif died:
        names = ", ".join(process.name for process in died[:NAMED])
        more = f" and {len(died) - NAMED:,} more" if len(died) > NAMED else ""
        yield Trust(LOOK, "processes", f"{len(died):,} died", f"{names}{more}: what they had not finished is missing")
    else:
        yield Trust(GOOD, "processes", f"{len(summary.processes):,}", "none died in the middle of its work")
    missed = [process for process in summary.untraced if process.missed]
    if missed:
        yield Trust(LOOK, "untraced processes", f"{len(missed):,}", "seen in the run, and not recorded")


def _cost(values: RunValues) -> Iterator[Trust]:
    costs = {process.process.name: cost for process in values.seen.processes if (cost := _cost_of(process)) is not None}
    if costs:
        most = max(costs, key=lambda name: costs[name])
        yield Trust(
            GOOD if costs[most] <= MOST_COST else LOOK, "cost of tracing", percentage(costs[most]),
            f"of the time of {most}, by its own bookkeeping of spans and samples",
        )  # fmt: skip
    else:
        yield Trust(UNKNOWN, "cost of tracing", "unknown", "this run did not measure it; `rltrace overhead` does")
    shares = [one.residual.sample_share for one in values.summary.memory if one.residual is not None]
    known = [share for share in shares if share is not None]
    if known:
        yield Trust(
            GOOD if max(known) <= MOST_COST else LOOK, "cost of memory samples", percentage(max(known)),
            "of a step on the card where it is most",
        )  # fmt: skip


def _cost_of(process: Seen) -> float | None:
    """Return the share of its life that a process spent on recording; None if it never measured what that costs."""
    costs = process.process.costs
    lived_ns = process.last_ns - process.first_ns
    if not costs or lived_ns <= 0:
        return None
    of_device = sum(len(spans.starts) for spans in process.device_spans.values())
    spent_ns = (process.spans - of_device) * costs.get("span", 0.0) + process.samples * costs.get("counter", 0.0)
    return float(spent_ns + of_device * costs.get(DEVICE_SPAN, 0.0)) / lived_ns


def _silent_hooks(values: RunValues) -> list[Block]:
    made = made_by(values.summary.hooks)
    rows = [
        [hook.instrumentation, hook.target, "never fired" if hook.state == "installed" else hook.reason or hook.state]
        for hook in values.summary.hooks
        if (hook.never_fired and not is_not_needed(hook, made)) or hook.state == "failed"
    ]
    return [Table("Hooks that never fired or failed", ["of", "hook", "state"], rows)] if rows else []
