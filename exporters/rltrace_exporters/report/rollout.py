"""The requests of the rollout: how long they and their answers were, how they queued, and where their time went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import holding
from rltrace.analysis.requests import Requests
from rltrace.events import REQUEST
from rltrace.read.columns import OPEN
from rltrace_exporters.report.amounts import as_text, count, percentage
from rltrace_exporters.report.blocks import Bars, Legend, Note, Part, Range, Row, Table
from rltrace_exporters.report.chart import Bar, Chart, Line, Plot
from rltrace_exporters.report.sections import Block, color_of
from rltrace_exporters.report.ticks import end_of_axis
from rltrace_exporters.report.values import Missing, RunValues

HEIGHT = 96
COLUMNS = 48
NARROW = 0.5
"""Where all values are above this share of the largest one, the axis does not begin at 0."""
POINTS = 400
"""Of the line of running and waiting requests."""
COLOR = color_of("rollout.generate")
PERCENTILES = (50, 95, 99, 100)

Numbers = NDArray[np.float64]


class _Distribution(NamedTuple):
    title: str
    unit: str
    values: Numbers


def rollout(values: RunValues) -> list[Block]:
    """Return distributions over requests, their stages, and what engines ran and kept waiting."""
    requests = _requests(values)
    if not len(requests.seconds) and not values.summary.requests:
        raise Missing("No engine's request was recorded, so nothing is known of single generations.")
    found = [
        _Distribution("Latency of a request in the engine", "s", requests.seconds),
        _Distribution("Length of an answer", "tokens", requests.tokens[requests.tokens >= 0]),
        _Distribution("Queued in the engine", "s", requests.queued_ns[requests.queued_ns >= 0] / 1e9),
    ]
    blocks: list[Block] = [_histogram(one) for one in found if len(one.values) and np.ptp(one.values) > 0]
    missing = [one.title.lower() for one in found[1:] if not len(one.values)]
    if len(found[0].values):
        blocks.append(_percentiles([one for one in found if len(one.values)]))
    if missing:
        blocks.append(Note(f"The engine did not say: {', '.join(missing)}."))
    if (chart := _over_time(values)) is not None:
        blocks.append(chart)
    blocks += [_stages(one) for one in values.summary.requests if len(one.stages) > 1]
    return blocks


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
    counts, edges = np.histogram(one.values, COLUMNS, (start, (to := most + 0.04 * (most - start))))
    bars = [
        Bar(float(begin), float(end), COLOR, f"{count(int(many), 'request')} from {begin:.3g} to {end:.3g} {one.unit}",
            high=float(many))
        for many, begin, end in zip(counts, edges[:-1], edges[1:], strict=True)
        if many
    ]  # fmt: skip
    plot = Plot("requests", HEIGHT, y_to=end_of_axis(float(counts.max())), y_unit="requests", bars=bars)
    title = f"{one.title}: {count(len(one.values), 'request')}"
    return Chart(title, to, one.unit, [plot], [], x_from=start)


def _percentiles(found: list[_Distribution]) -> Table:
    rows = []
    for one in found:
        cells = [_with_unit(float(value), one.unit) for value in np.percentile(one.values, PERCENTILES)]
        rows.append([one.title, _with_unit(float(one.values.mean()), one.unit), *cells])
    return Table("In figures", ["", "mean", "p50", "p95", "p99", "most"], rows, is_folded=False)


def _with_unit(value: float, unit: str) -> str:
    return as_text(value) if unit == "s" else f"{value:,.0f} {unit}"


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
        Plot("requests", HEIGHT, "in all engines together", most, "requests",
             lines=[Line("running", "first", xs, running), Line("waiting", "second", xs, waiting)]),
        Plot("KV cache", HEIGHT // 2, "share that is taken, of the fullest engine", 100, "%",
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
