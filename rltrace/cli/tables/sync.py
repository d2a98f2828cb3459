"""The weight sync by stage, and the sleeps and wake-ups of the engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from rich.console import Group, RenderableType
from rich.text import Text

from rltrace.analysis.steady import Steady, Stepped, of_steady
from rltrace.analysis.transactions import LEAK_SLEEPS, Leak, Transaction
from rltrace.analysis.weight_sync import RankSync
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, titled, words
from rltrace.events import ENGINE_STAGES, SYNC_STAGES

FEW = 2
"""Stages that one line names."""
FASTEST = 1e12
"""Bytes per second that no link reaches: a faster stage was only launched."""


def in_steady(items: Sequence[Stepped], found: Steady | None) -> list[Stepped]:
    """Return those of the steady steps; all if the steady steps have none."""
    return of_steady(items, found) or list(items)


def sync_line(syncs: Sequence[RankSync]) -> Text:
    """Return one line: how much, how fast, and the stages that took longest."""
    size, seconds = sum(sync.bytes for sync in syncs), sum(sync.seconds for sync in syncs)
    stages = {name: _stage_seconds(name, syncs) for name in SYNC_STAGES}
    longest = sorted((name for name in stages if stages[name]), key=lambda name: -stages[name])
    parts = [f"{name.partition('.')[2]} {figures.seconds(stages[name])}" for name in longest[:FEW]]
    buckets = figures.count(round(fmean(sync.buckets for sync in syncs)), "bucket")
    said = f" {figures.megabytes(size / len(syncs)) or 0} MB in {buckets}, "
    said += f"{figures.with_unit(figures.seconds(seconds / len(syncs)))}" + (f" ({', '.join(parts)})" if parts else "")
    return Text.assemble(("Weight sync", "bold"), said)


def _stage_seconds(name: str, syncs: Sequence[RankSync]) -> float:
    return fmean([sync.stages[name].seconds if name in sync.stages else 0.0 for sync in syncs])


def sync_table(syncs: Sequence[RankSync]) -> RenderableType:
    """Draw the stages of a bucket as a mean over ranks and steps; a stage that a sync lacks counts as 0."""
    table = Figures("stage", "seconds", Column("summed", 4), Column("spans", 3), "MB", "GB/s")
    for name in SYNC_STAGES:
        stages = [sync.stages[name] for sync in syncs if name in sync.stages]
        if stages:
            size, seconds = sum(stage.bytes for stage in stages), sum(stage.seconds for stage in stages)
            table.add_row(
                name.partition(".")[2],
                figures.seconds(seconds / len(syncs)),
                figures.seconds(sum(stage.summed_seconds for stage in stages) / len(syncs)),
                figures.number(round(sum(stage.spans for stage in stages) / len(syncs), 1)),
                figures.megabytes(size / len(syncs)),
                figures.rate(size, seconds),
            )
    table.add_row("other", figures.seconds(fmean(sync.rest_seconds for sync in syncs)), style="dim")
    size, seconds = sum(sync.bytes for sync in syncs), sum(sync.seconds for sync in syncs)
    table.add_section()
    whole = figures.megabytes(size / len(syncs)), figures.rate(size, seconds)
    table.add_row("weight_sync", figures.seconds(seconds / len(syncs)), "", "", *whole)
    buckets = figures.count(round(fmean(sync.buckets for sync in syncs)), "bucket")
    tensors = figures.count(round(fmean(sync.tensors for sync in syncs)), "tensor")
    caption = f"{buckets}, {tensors}; seconds: overlapping spans count once; summed: each counts"
    if any((rate := sync.stages.get("weight_sync.gather")) and rate.bytes > FASTEST * rate.seconds for sync in syncs):
        caption += "; on a GPU the seconds and GB/s of gather, pack, load and verify are those of their launches"
    if of_engine := [name.partition(".")[2] for name in ENGINE_STAGES if any(name in sync.stages for sync in syncs)]:
        caption += f"; in the engine: {', '.join(of_engine)}"
    steps = sorted({sync.step for sync in syncs if sync.step is not None})
    of = f", steps {figures.ranges(steps)}" if steps else ""
    return titled(f"Weight sync by stage: mean of a rank's sync{of}", table, caption)


def sleep_line(sleeps: Sequence[Transaction]) -> Text:
    """Return one line: how many, and whether all went well."""
    wrong = sum(sleep.verdict != "ok" for sleep in sleeps)
    state = Text(f", {wrong} of them with a problem", "bold red") if wrong else Text(", all ok", "green")
    return Text.assemble(("Sleeps and wake-ups", "bold"), f" {len(sleeps)}", state)


def _by_name(sleeps: Sequence[Transaction]) -> list[tuple[str, list[Transaction]]]:
    names = dict.fromkeys(sleep.name for sleep in sleeps)
    return [(name, [sleep for sleep in sleeps if sleep.name == name]) for name in names]


def sleep_table(sleeps: Sequence[Transaction], leaks: Sequence[Leak], found: Steady | None) -> RenderableType:
    """Draw sleeps and wake-ups by kind, then each that went wrong, and what grew from one sleep to the next."""
    table = Figures(
        "sleep and wake-up", "times", "seconds", "expected", "moved", Column("total", 4),
        Column("left", 5), Column("GB/s", 3), words(),
    )  # fmt: skip
    for name, group in _by_name(sleeps):
        wrong = sum(sleep.verdict != "ok" for sleep in group)
        state = Text(f"{wrong} of {len(group)} with a problem", "bold red") if wrong else Text("ok", "green")
        table.add_row(name, *_sleep_cells(in_steady(group, found)), state)
    lines = [*(wrong_line(sleep) for sleep in sleeps if sleep.verdict != "ok"), *leak_lines(leaks)]
    titled_table = titled("Sleeps and wake-ups: mean over the steady steps, or over all where there are none", table)
    return Group(titled_table, Text("\n".join(lines), "yellow")) if lines else titled_table


def _sleep_cells(group: Sequence[Transaction]) -> list[str]:
    """Return counts and means."""
    changed = [sleep.changed_bytes for sleep in group if sleep.changed_bytes is not None]
    rates = [sleep.gigabytes_per_second for sleep in group if sleep.gigabytes_per_second is not None]
    return [
        str(len(group)),
        figures.seconds(fmean(sleep.seconds for sleep in group)),
        _size(fmean(sum(sleep.expected_bytes.values()) for sleep in group)),
        _size(fmean(sum(sleep.moved_bytes.values()) for sleep in group)),
        _size(fmean(changed)) if changed else "",
        _size(fmean(sum(sleep.left_bytes.values()) for sleep in group)),
        figures.gigabytes_per_second(fmean(rates)) if rates else "",
    ]


def _size(size_bytes: float) -> str:
    """Write memory; nothing for none."""
    return figures.size(size_bytes) if size_bytes else ""


def wrong_line(sleep: Transaction) -> str:
    """Return what went wrong with one."""
    step = f"step {sleep.step}" if sleep.step is not None else "start-up"
    return f"{sleep.lane}, {step}, {sleep.at_seconds:.1f} s, {sleep.name}: {sleep.verdict}: {sleep.reason}"


def leak_lines(leaks: Sequence[Leak]) -> Iterator[str]:
    """Return what grew, how fast at most, and on which devices; one line for rows that grew alike."""
    alike: dict[tuple[int, tuple[str, ...]], dict[str, int]] = {}
    for sleeps, owner in dict.fromkeys((leak.sleeps, leak.owner) for leak in leaks):
        group = [leak for leak in leaks if (leak.sleeps, leak.owner) == (sleeps, owner)]
        fastest = max(leak.bytes_per_sleep for leak in group)
        alike.setdefault((sleeps, tuple(leak.lane for leak in group)), {})[owner] = fastest
    for (sleeps, lanes), grown in alike.items():
        said = ", ".join(f"{owner} {figures.size(size_bytes)}" for owner, size_bytes in grown.items())
        what = "Possible leak" if sleeps == LEAK_SLEEPS else "Possible leak (or a cache still filling)"
        yield f"{what}: grew across the last {sleeps} sleeps: {said} a sleep ({figures.ranks(lanes)})"
