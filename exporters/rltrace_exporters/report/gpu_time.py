"""What the GPUs did in a step: busy, communicating, and communicating with nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rltrace.analysis.gpu_work import COLLECTIVES, GpuWork
from rltrace.analysis.intervals import cut, holding, total_ns, union
from rltrace.events import SAMPLER, subjects
from rltrace_exporters.report.amounts import as_text, between_as_text, percentage
from rltrace_exporters.report.blocks import Bars, Legend, Note, Part, Range, Row, Table
from rltrace_exporters.report.sections import Block
from rltrace_exporters.report.ticks import end_of_axis
from rltrace_exporters.report.values import Missing, RunValues

UTILISATION = "gpu.utilisation_percent"
COMMUNICATING, BUSY, EXPOSED, SAMPLED_BUSY = "#db2777", "#2563eb", "#dc2626", "#64748b"

PerRank = Mapping[str, float]
"""One number for each rank, by its lane."""


def gpu_time(values: RunValues) -> list[Block]:
    """Return shares of a step for the mean GPU, with the spread over GPUs."""
    steady = values.summary.steady
    step = 0.0 if steady is None else steady.seconds.mean_seconds
    rows = []
    if step:
        rows += [_row("timed work on streams", _busy(values), step, BUSY)]
        collectives = _collectives(values)
        rows += [
            _row("communicating", {one.lane: one.seconds for one in collectives}, step, COMMUNICATING),
            _row("exposed, at least", _known(collectives, "least_exposed_seconds"), step, EXPOSED),
            _row("exposed, at most", _known(collectives, "most_exposed_seconds"), step, EXPOSED),
            _row(
                "busy by NVML", {lane: share * step for lane, share in _utilisation(values).items()}, step, SAMPLED_BUSY
            ),
        ]
    drawn = [row for row in rows if row is not None]
    if not drawn:
        raise Missing(_why(values))
    blocks: list[Block] = [
        Bars(
            title="The mean GPU in a steady step, and the range over GPUs",
            rows=drawn,
            to=end_of_axis(step),
            unit="s",
            legend=[Legend("least and most of the GPUs", "ranks")],
            value_name="seconds",
            note_name="of a step",
        )
    ]
    blocks += [Note(said) for said in _said(values)]
    return [*blocks, *_kinds(values)]


def _why(values: RunValues) -> str:
    if values.summary.steady is None:
        return "No step has ended, so there is no share of a step to tell."
    devices = [process.lane.device or "" for process in values.seen.processes]
    if not any(device.startswith(("GPU-", "MIG-")) for device in devices):
        return "No process of this run used a GPU."
    return "No GPU was timed and no sampler saw one busy (docs/gpus.md says how both are recorded)."


def _row(name: str, seconds: PerRank, step: float, color: str) -> Row | None:
    if not seconds:
        return None
    lengths = list(seconds.values())
    mean = float(np.mean(lengths))
    most = max(seconds, key=lambda lane: seconds[lane])
    tip = f"{name}: {between_as_text(min(lengths), max(lengths))} over {len(lengths):,} GPUs; most {most}"
    ranges = (Range(min(lengths), max(lengths), "ranks", tip),) if len(lengths) > 1 else ()
    part = Part(0.0, mean, color, f"{name}: {as_text(mean)}, {percentage(mean / step)} of a step")
    return Row(name, [part], as_text(mean), percentage(mean / step), ranges)


def _busy(values: RunValues) -> PerRank:
    """Return the seconds of a step in which any timed work ran, by rank."""
    found = {}
    for lane in values.ranks:
        windows = values.windows.of(lane)
        kept = [spans.rows(values.seen.end_ns) for p in values.seen.on(lane) for spans in p.device_spans.values()]
        if kept and windows.steady:
            inside = cut(union(*kept), windows.windows[windows.steady])[0]
            found[lane.name] = total_ns(inside) / 1e9 / len(windows.steady)
    return found


def _collectives(values: RunValues) -> list[GpuWork]:
    return [one for one in values.summary.gpu_work if one.work == COLLECTIVES and one.phase is None]


def _known(found: list[GpuWork], field: str) -> PerRank:
    return {one.lane: seconds for one in found if (seconds := getattr(one, field)) is not None}


def _utilisation(values: RunValues) -> PerRank:
    """Return the mean share of the steady steps in which NVML saw a kernel run, by rank."""
    windows = values.windows
    if not windows.spans or not windows.steady:
        return {}
    steady = windows.windows[windows.steady]
    lanes = {lane.device: lane.name for lane in values.ranks if lane.device}
    found = {}
    for process in values.seen.processes:
        if process.process.role != SAMPLER:
            continue
        for name, samples in process.sampled.items():
            counter, of = subjects(name)
            if counter != UTILISATION or not of or of[0] not in lanes:
                continue
            times_ns, percent = np.array(samples.times_ns, np.int64), np.array(samples.values)
            inside = holding(steady, times_ns) >= 0
            if inside.any():
                found[lanes[of[0]]] = float(percent[inside].mean()) / 100
    return found


def _said(values: RunValues) -> list[str]:
    collectives = _collectives(values)
    said = []
    if collectives and not _known(collectives, "most_exposed_seconds"):
        said.append("How much of it is exposed is unknown: layers were not timed (RLTRACE_CUDA_TIME=layers).")
    if collectives:
        said.append("A collective contains its wait for the slowest rank; a GPU counts as busy while it waits in one.")
    if values.summary.gpu_work_missed:
        missed = list(values.summary.gpu_work_missed.items())
        more = f" and {len(missed) - 3:,} more" if len(missed) > 3 else ""
        said.append("Not timed: " + "; ".join(f"{name}: {why}" for name, why in missed[:3]) + more + ".")
    return said


def _kinds(values: RunValues) -> list[Block]:
    """Return the kinds of work as figures."""
    of_kind: dict[str, list[GpuWork]] = {}
    for one in values.summary.gpu_work:
        if one.phase is None:
            of_kind.setdefault(one.work, []).append(one)
    rows = []
    for name, works in of_kind.items():
        seconds = [one.seconds for one in works]
        size = float(np.mean([one.bytes for one in works]))
        speed = f"{size / 1e9 / float(np.mean(seconds)):,.0f} GB/s" if size and np.mean(seconds) else ""
        spread = between_as_text(min(seconds), max(seconds))
        many = f"{np.mean([one.count for one in works]):,.0f}"
        rows.append([name, as_text(float(np.mean(seconds))), spread, many, speed])
    return [Table("Kinds of work on the streams", ["work", "mean", "over GPUs", "spans", "rate"], rows)] if rows else []
