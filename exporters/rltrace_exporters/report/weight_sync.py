"""The weight sync of one rank in the step that is drawn, stage by stage, and the stages of all."""

from __future__ import annotations

import numpy as np

from rltrace.analysis.intervals import Intervals, cut, union
from rltrace.analysis.series import steady_syncs
from rltrace.analysis.weight_sync import PHASE, RankSync
from rltrace.events import STAGES_INSIDE, SYNC_STAGES
from rltrace_exporters.report.amounts import as_text, between_as_text, bytes_as_text, count, rate
from rltrace_exporters.report.blocks import Command, Note, Table
from rltrace_exporters.report.chart import Bar, Chart, Plot
from rltrace_exporters.report.one_step import joined
from rltrace_exporters.report.sections import Block, color_of, view
from rltrace_exporters.report.values import Missing, RunValues

ROW = 22
FINEST = 1000
"""Parts of the sync: buckets that are closer are drawn as one."""
REST = "in no stage"


def weight_sync(values: RunValues) -> list[Block]:
    """Return the waterfall of the slowest rank's sync, and a table of the stages."""
    syncs = steady_syncs(values.summary) or values.summary.weight_sync
    if not syncs:
        raise Missing("No weight sync was recorded: this run sends no weights from a trainer to an engine, or no hook "
                      "saw it.")  # fmt: skip
    of_step = [sync for sync in syncs if sync.step == values.window.step] or syncs
    shown = max(of_step, key=lambda sync: sync.seconds)
    seconds = [sync.seconds for sync in of_step]
    sent = [bytes_as_text(shown.bytes), rate(shown.gigabytes_per_second), count(shown.buckets, "bucket")]
    said = f"{shown.lane} sends {', '.join(filter(None, sent))}, {shown.tensors:,} tensors" if shown.bytes else ""
    ranks = f"Over {len(of_step):,} ranks a sync takes {between_as_text(min(seconds), max(seconds))}."
    notes = [f"{said}." if said else "", ranks if len(of_step) > 1 else ""]
    blocks: list[Block] = []
    if (chart := _waterfall(values, shown)) is not None:
        blocks.append(chart)
    blocks.append(Note(" ".join(filter(None, notes)) or "Nobody said how many bytes it sent."))
    if not shown.stages:
        blocks.append(Note("No stage of it was recorded, so nobody knows what its time went to."))
    else:
        blocks.append(_table(syncs))
    rank = "" if shown.rank is None else str(shown.rank)
    return [*blocks, Command("In the timeline", view(values, step=shown.step, ranks=rank))]


def _waterfall(values: RunValues, shown: RankSync) -> Chart | None:
    """Return when each stage was under way; None without one."""
    place = values.windows.numbers.index(shown.step) if shown.step in values.windows.numbers else 0
    limits = values.windows.windows[place : place + 1]
    processes = [process for process in values.seen.processes if process.lane.name == shown.lane]
    end_ns = values.seen.end_ns
    phase = cut(union(*(p.phases[PHASE].rows(end_ns) for p in processes if PHASE in p.phases)), limits)[0]
    rows: dict[str, Intervals] = {}
    for name in SYNC_STAGES:
        kept = [p.stages[name].rows(end_ns) for p in processes if name in p.stages]
        kept += [p.automatic_spans[name, None].rows(end_ns) for p in processes if (name, None) in p.automatic_spans]
        inside = cut(union(*kept), limits)[0] if kept else np.empty((0, 2), np.int64)
        if name in STAGES_INSIDE and len(phase):
            inside = cut(inside, union(phase))[0]
        if len(inside):
            rows[name] = inside
    if not rows:
        return None
    every = np.concatenate([*rows.values(), phase])
    start_ns, until_ns = int(every[:, 0].min()), int(every[:, 1].max())
    seconds = max((until_ns - start_ns) / 1e9, 1e-9)
    finest_ns = (until_ns - start_ns) // FINEST
    plots = [_plot(name, inside, start_ns, finest_ns) for name, inside in rows.items()]
    in_ms = seconds < 1
    scale = 1e3 if in_ms else 1.0
    scaled = [
        plot._replace(bars=[bar._replace(start=bar.start * scale, end=bar.end * scale) for bar in plot.bars])
        for plot in plots
    ]
    step = "before the first step" if shown.step is None else f"in step {shown.step}"
    title = f"Weight sync of {shown.lane} {step}, the slowest rank: {as_text(shown.seconds)}"
    return Chart(title, seconds * scale, "ms" if in_ms else "s", scaled, [], is_alike=False)


def _plot(name: str, rows: Intervals, start_ns: int, finest_ns: int) -> Plot:
    covered = union(rows)
    whole = int((covered[:, 1] - covered[:, 0]).sum()) / 1e9
    bars = [
        Bar((start - start_ns) / 1e9, (end - start_ns) / 1e9, color_of(name), f"{name}: {as_text(whole)} in all")
        for start, end in joined(rows, finest_ns).tolist()
    ]
    return Plot(name.removeprefix("weight_sync."), ROW, f"{name}: {as_text(whole)} in all", bars=bars)


def _table(syncs: list[RankSync]) -> Table:
    names = [name for name in SYNC_STAGES if any(name in sync.stages for sync in syncs)]
    whole = float(np.mean([sync.seconds for sync in syncs]))
    rows = []
    for name in names:
        having = [sync.stages[name] for sync in syncs if name in sync.stages]
        seconds = np.array([stage.seconds for stage in having])
        size = float(np.mean([stage.bytes for stage in having]))
        speed = size / 1e9 / float(seconds.mean()) if size and seconds.mean() else None
        rows.append([
            name, as_text(float(seconds.mean())), between_as_text(float(seconds.min()), float(seconds.max())),
            f"{np.mean([stage.spans for stage in having]):,.0f}", bytes_as_text(size) if size else "", rate(speed),
        ])  # fmt: skip
    rest = [sync.rest_seconds for sync in syncs]
    rows.append([REST, as_text(float(np.mean(rest))), between_as_text(min(rest), max(rest)), "", "", ""])
    rows.append(["weight sync", as_text(whole), "", "", "", ""])
    columns = ["stage", "mean", "least to most", "spans", "bytes", "rate"]
    return Table("Stages over all ranks and steady steps; they overlap", columns, rows, is_folded=False)
