"""The requests of the rollout: how long they and their answers were, how they queued, and where their time went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import holding
from rltrace.analysis.requests import Requests
from rltrace.analysis.rollout import (
    NAMES,
    REQUEST_SECONDS,
    SECONDS,
    TRAJECTORY_SECONDS,
    EngineShare,
    SteadyRollout,
    StepRollout,
)
from rltrace.events import REQUEST
from rltrace.read.columns import OPEN
from rltrace_exporters.report.amounts import as_text, between_as_text, count, percentage
from rltrace_exporters.report.blocks import Bars, Legend, Note, Part, Range, Row, Table
from rltrace_exporters.report.chart import Bar, Chart, Dot, Line, Plot
from rltrace_exporters.report.sections import MOST_ROWS, Block, color_of
from rltrace_exporters.report.ticks import end_of_axis
from rltrace_exporters.report.values import Missing, RunValues

HEIGHT = 96
COLUMNS = 48
NARROW = 0.5
"""Where all values are above this share of the largest one, the axis does not begin at 0."""
POINTS = 400
"""Of the line of running and waiting requests."""
COLOR = color_of("rollout.generate")
FEW = 3
"""Tools that are named."""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


Numbers = NDArray[np.float64]


class _Distribution(NamedTuple):
    title: str
    unit: str
    values: Numbers


def rollout(values: RunValues) -> list[Block]:
    """Return distributions over trajectories and requests, how they went from step to step, and what engines did."""
    requests = _requests(values)
    found = values.summary.rollout
    if not len(requests.seconds) and found is None:
        raise Missing("No trajectory and no request of an engine was recorded, so nothing is known of single samples.")
    of_requests = [
        _Distribution("Latency of a request in the engine", "s", requests.seconds),
        _Distribution("Length of a response", "tokens", requests.tokens[requests.tokens >= 0]),
        _Distribution("Waiting in the engine", "s", requests.queued_ns[requests.queued_ns >= 0] / 1e9),
    ]
    blocks: list[Block] = [_histogram(one) for one in of_requests if len(one.values) and np.ptp(one.values) > 0]
    if found is not None:
        blocks += [_distributions(found), *(Note(said) for said in _said(found))]
        if (chart := _over_steps(values.summary.rollout_by_step)) is not None:
            blocks.append(chart)
    if (chart := _over_time(values)) is not None:
        blocks.append(chart)
    if found is not None and len(found.engines) > 1:
        blocks.append(_engines(found.engines))
    return [*blocks, *(_stages(one) for one in values.summary.requests if len(one.stages) > 1)]


# ---- figures of the rollout -------------------------------------------------------------------------------------


def _distributions(found: SteadyRollout) -> Table:
    rows = []
    for name, called in NAMES.items():
        if (of := found.distributions.get(name)) is not None:
            write = as_text if name in SECONDS else _number
            rows.append([called, *map(write, (of.mean, of.p50, of.p95, of.p99, of.maximum))])
    many = [count(found.trajectories, "trajectory"), count(found.requests, "request")]
    title = " and ".join(one for one in many if not one.startswith("0 ")) or "None is over"
    return Table(title, ["", "mean", "p50", "p95", "p99", "longest"], rows, is_folded=False)


def _said(found: SteadyRollout) -> Iterator[str]:
    if (tail := found.tail) is not None:
        whole = as_text(tail.seconds + tail.without_seconds)
        without = as_text(tail.without_seconds)
        if without != whole:
            yield f"Without the slowest 5 % of the requests, the engines would be done after {without} and not {whole}."
    if (balance := found.balance) is not None and balance.engines > 1:
        work = "-".join(dict.fromkeys(f"{many:,.0f}" for many in (balance.least, balance.most)))
        done = between_as_text(balance.first_done_seconds, balance.last_done_seconds)
        last = f"last is {balance.last_engine}"
        yield f"{balance.engines:,} engines have {work} {balance.unit} each and are done after {done}; {last}."
    if (prompts := found.prompts) is not None and prompts.most_samples > 1:
        waits = as_text(prompts.waiting_seconds.p50)
        yield f"Of {count(prompts.prompts, 'prompt')}, the last sample ends {waits} after the first one (median)."
    for tool in sorted(found.tools, key=lambda one: -one.calls)[:FEW]:
        if tool.seconds is not None:
            length = f"median {as_text(tool.seconds.p50)}, p99 {as_text(tool.seconds.p99)}"
            yield f"Tool {tool.name}: {count(tool.calls, 'call')}, {length}."
    by_reason: dict[str, list[str]] = {}
    for name, reason in found.unknown.items():
        by_reason.setdefault(reason, []).append(NAMES.get(name, name))
    for reason, names in by_reason.items():
        yield f"Not known, or not of all: {', '.join(names)}: {reason}."


def _over_steps(by_step: Sequence[StepRollout]) -> Chart | None:
    """Return how long the requests of each step were; None with fewer than two steps."""
    name = next(
        (name for name in (TRAJECTORY_SECONDS, REQUEST_SECONDS) if any(name in one.distributions for one in by_step)),
        None,
    )
    having = [one for one in by_step if name is not None and one.step is not None and name in one.distributions]
    if name is None or len(having) < 2:
        return None
    xs: Numbers = np.arange(len(having), dtype=np.float64) + 0.5
    lengths = [one.distributions[name] for one in having]
    of = {"p50": "first", "p95": "second", "longest": "third"}
    ys = {
        "p50": [one.p50 for one in lengths],
        "p95": [one.p95 for one in lengths],
        "longest": [one.maximum for one in lengths],
    }
    lines = [Line(what, kind, xs, np.array(ys[what])) for what, kind in of.items()]
    dots = [
        Dot(
            float(x),
            one.maximum,
            f"step {step.step}: p50 {as_text(one.p50)}, p95 {as_text(one.p95)}, longest {as_text(one.maximum)}",
        )
        for x, one, step in zip(xs, lengths, having, strict=True)
    ]
    plot = Plot(
        "seconds",
        HEIGHT,
        y_to=end_of_axis(max(ys["longest"])),
        y_unit="s",
        lines=lines,
        dots=dots if len(dots) <= POINTS else [],
    )
    marked = range(0, len(having), -(-len(having) // 12))
    marks = [(place + 0.5, str(having[place].step)) for place in marked]
    legend = [Legend(what, kind) for what, kind in of.items()]
    called = NAMES[name]
    return Chart(
        f"How long a {called} takes from step to step",
        len(having),
        "step",
        [plot],
        legend,
        x_marks=marks,
        is_alike=False,
    )


def _engines(engines: Sequence[EngineShare]) -> Table:
    """Return what each engine did; of many, those that were last most often."""
    shown = (
        sorted(engines, key=lambda one: (-one.times_last, -one.seconds))[:MOST_ROWS]
        if len(engines) > MOST_ROWS
        else engines
    )
    rows = [
        [
            one.engine, f"{one.requests:,}", "" if one.tokens is None else f"{one.tokens:,}", as_text(one.seconds),
            f"{one.times_last:,}", f"{one.preempted:,}",
            "" if one.most_kv_cache_share is None else percentage(one.most_kv_cache_share),
        ]
        for one in shown
    ]  # fmt: skip
    more = f", {len(shown)} of {len(engines):,} that were last most often" if len(shown) < len(engines) else ""
    columns = ["engine", "requests", "tokens", "done after", "times last", "preempted", "KV cache at most"]
    return Table(f"Balance of engines{more}", columns, rows)


# ---- requests of engines ----------------------------------------------------------------------------------------


class _Requests(NamedTuple):
    """Requests of engines that are over, one number for each."""

    seconds: Numbers
    queued_ns: Numbers
    """How long it waited; -1 if nobody said so."""
    tokens: Numbers
    """How many the engine made for it; -1 likewise."""


def _requests(values: RunValues) -> _Requests:
    """Return the requests that began in steady steps; those of the run if these have none."""
    kept = [process.passed[REQUEST] for process in values.seen.processes if REQUEST in process.passed]
    starts, ends, queued_ns, tokens = (
        np.concatenate([np.empty(0, np.int64), *(np.array(getattr(one, name), np.int64) for one in kept)])
        for name in ("starts", "ends", "queued_ns", "tokens")
    )
    chosen = ends != OPEN
    if values.windows.spans and values.windows.steady:
        inside = chosen & (holding(values.windows.windows[values.windows.steady], starts) >= 0)
        chosen = inside if inside.any() else chosen
    return _Requests((ends - starts)[chosen] / 1e9, queued_ns[chosen].astype(float), tokens[chosen].astype(float))


def _histogram(one: _Distribution) -> Chart:
    least, most = float(one.values.min()), float(one.values.max())
    start = least - 0.04 * (most - least) if least > NARROW * most else 0.0
    to = most + 0.04 * (most - start)
    counts, edges = np.histogram(one.values, _edges(start, to, is_whole=one.unit == "tokens"))
    bars = [
        Bar(float(begin), float(end), COLOR, f"{count(int(many), 'request')} from {begin:.3g} to {end:.3g} {one.unit}",
            high=float(many))
        for many, begin, end in zip(counts, edges[:-1], edges[1:], strict=True)
        if many
    ]  # fmt: skip
    plot = Plot("requests", HEIGHT, "Requests", y_to=end_of_axis(float(counts.max())), y_unit="requests", bars=bars)
    title = f"{one.title}: {count(len(one.values), 'request')}"
    return Chart(title, float(edges[-1]), one.unit, [plot], [], x_from=float(edges[0]))


def _edges(start: float, to: float, *, is_whole: bool) -> Numbers:
    """Return where columns begin and end; of whole numbers, each column has as many."""
    if not is_whole:
        return np.linspace(start, to, COLUMNS + 1)
    width = max(1, round((to - start) / COLUMNS))
    return np.arange(np.floor(start), to + width, width, dtype=float)


# ---- engines ----------------------------------------------------------------------------------------------------


def _over_time(values: RunValues) -> Chart | None:
    """Return how many requests all engines ran and kept waiting in the step that is drawn; None if none said so."""
    window = values.window
    at_ns = np.linspace(window.start_ns, window.end_ns, POINTS)
    running, waiting, usage = (np.zeros(POINTS) for _ in range(3))
    engines = 0
    for process in values.seen.processes:
        steps = process.engine_steps
        if not len(steps.starts):
            continue
        starts, ends = np.array(steps.starts, np.int64), np.array(steps.ends, np.int64)
        order = np.argsort(starts, kind="stable")
        place = np.clip(np.searchsorted(starts[order], at_ns, side="right") - 1, 0, None)
        of = order[place]
        is_inside = (starts[of] <= at_ns) & (at_ns < ends[of])
        engines += 1
        counted = (np.array(column, float)[of] for column in (steps.running, steps.waiting, steps.kv_usage))
        ran, waited, taken = (np.where(is_inside, np.maximum(column, 0), 0) for column in counted)
        running, waiting, usage = running + ran, waiting + waited, np.maximum(usage, taken)
    if not running.any() and not waiting.any():
        return None
    xs = (at_ns - window.start_ns) / 1e9
    most = end_of_axis(float(max(running.max(), waiting.max())))
    plots = [
        Plot("requests", HEIGHT, "Requests in all engines together", most, "requests",
             lines=[Line("running", "first", xs, running), Line("waiting", "second", xs, waiting)]),
        Plot("KV cache", HEIGHT // 2, "Share of the KV cache that is taken, of the fullest engine", 100, "%",
             lines=[Line("KV cache", "third", xs, usage * 100)]),
    ]  # fmt: skip
    legend = [Legend("running", "first"), Legend("waiting", "second"), Legend("KV cache in use", "third")]
    title = f"What {count(engines, 'engine')} ran and kept waiting: {window.title}"
    return Chart(title, window.seconds, "s", plots, legend)


# ---- stages -----------------------------------------------------------------------------------------------------


def _stages(one: Requests) -> Bars:
    """Return where the time of requests went on their way."""
    rows = []
    for name, stage in one.stages.items():
        part = Part(0.0, stage.mean_seconds, color_of(name), f"{name}: {as_text(stage.mean_seconds)} in the mean")
        tip = f"{name}: median {as_text(stage.median_seconds)}, p95 {as_text(stage.p95_seconds)}"
        rows.append(
            Row(name.replace("_", " "), [part], as_text(stage.mean_seconds), percentage(stage.share),
                (Range(stage.median_seconds, stage.p95_seconds, "ranks", tip),))
        )  # fmt: skip
    most = max(max(stage.mean_seconds, stage.p95_seconds) for stage in one.stages.values())
    return Bars(
        title=f"Way of {count(one.count, 'request')} from {one.name} on",
        rows=rows,
        to=end_of_axis(most),
        unit="s",
        legend=[Legend("from the median to p95", "ranks")],
        note="; ".join(_unjoined(one)),
        value_name="mean",
        note_name="share",
    )


def _unjoined(one: Requests) -> Iterator[str]:
    if one.unjoined:
        reasons = ", ".join(f"{many:,} {reason}" for reason, many in one.unjoined.items())
        yield f"Not among them: {reasons}."
