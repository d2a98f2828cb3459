"""Where the seconds of a step go, phase by phase, and how much that differs between ranks and between steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.phases import RankStep, in_order
from rltrace.analysis.series import of_driver, of_ranks
from rltrace_exporters.report.amounts import as_text, between_as_text, percentage
from rltrace_exporters.report.blocks import Bars, Legend, Note, Part, Range, Row, Table
from rltrace_exporters.report.sections import MOST_ROWS, OF_NOBODY, Block, color_of
from rltrace_exporters.report.ticks import end_of_axis
from rltrace_exporters.report.values import Missing, RunValues

Matrix = NDArray[np.float64]
"""Seconds of one phase, shape (R, S) ranks and steps."""

SLIGHT = 0.001
"""Share of a step below which time in no phase has no row."""


def where_a_step_goes(values: RunValues) -> list[Block]:
    """Return a bar for each phase, with the spread over ranks and steps."""
    rows = of_ranks(values.summary)
    if values.summary.steady is None or not rows:
        what = "No step has ended" if values.summary.steps else "No step was recorded"
        without = what if values.summary.steady is None else "No phase was recorded"
        raise Missing(f"{without}, so nobody knows where the seconds of a step went.")
    ranks, seconds = _seconds(rows)
    step = float(np.mean([row.seconds for row in rows]))
    shown = {name: matrix for name, matrix in seconds.items() if name not in OF_NOBODY or matrix.mean() > SLIGHT * step}
    drawn = [_row(name, matrix, ranks, step) for name, matrix in shown.items()]
    driver = _seconds(of_driver(values.summary))[1]
    notes = [f"{name} {as_text(float(matrix.mean()))}" for name, matrix in driver.items() if matrix.any()]
    most = max([0.0, *(float(matrix.mean(axis=axis).max()) for matrix in shown.values() for axis in (0, 1))])
    spread = "the middle 90 % of ranks" if len(ranks) > MOST_ROWS else "least and most of the ranks"
    blocks: list[Block] = [
        Bars(
            title=f"Mean seconds of {len(ranks):,} {'lane' if rows[0].rank is None else 'rank'}"
            f"{'s' if len(ranks) > 1 else ''} over {len(values.summary.steady.steps):,} steady steps"
            if len(values.summary.steady.steps) > 1
            else "Seconds of one step",
            rows=drawn,
            to=end_of_axis(most),
            unit="s",
            legend=[Legend(f"over ranks: {spread}", "ranks"), Legend("over steps: least and most", "steps")],
            value_name="seconds",
            note_name="of a step",
        ),
    ]
    if notes:
        blocks.append(Note(f"While ranks wait for the driver, it is in {', '.join(notes)}."))
    return [*blocks, _table(shown, ranks, step)]


def _seconds(rows: Sequence[RankStep]) -> tuple[list[str], dict[str, Matrix]]:
    """Return the lanes, and seconds by phase, lane and step; a step without the phase counts as 0."""
    lanes = list(dict.fromkeys(row.lane for row in rows))
    steps = list(dict.fromkeys(row.step for row in rows))
    at = {lane: place for place, lane in enumerate(lanes)}, {step: place for place, step in enumerate(steps)}
    found: dict[str, Matrix] = {}
    for row in rows:
        for name, share in row.phases.items():
            if name not in found:
                found[name] = np.zeros((len(lanes), len(steps)))
            found[name][at[0][row.lane], at[1][row.step]] += share.seconds
    return lanes, {name: found[name] for name in in_order(found)}


def _over_ranks(matrix: Matrix) -> tuple[float, float]:
    """Return the least and the most of the ranks' means; of many ranks the middle 90 %."""
    means = matrix.mean(axis=1)
    if len(means) > MOST_ROWS:
        least, most = np.percentile(means, (5, 95))
        return float(least), float(most)
    return float(means.min()), float(means.max())


def _over_steps(matrix: Matrix) -> tuple[float, float]:
    means = matrix.mean(axis=0)
    return float(means.min()), float(means.max())


def _row(name: str, matrix: Matrix, ranks: Sequence[str], step: float) -> Row:
    mean = float(matrix.mean())
    ranges = []
    if len(ranks) > 1:
        least, most = _over_ranks(matrix)
        slowest = ranks[int(matrix.mean(axis=1).argmax())]
        tip = f"{name} over ranks: {between_as_text(least, most)}; {slowest} takes longest"
        ranges.append(Range(least, most, "ranks", tip))
    if matrix.shape[1] > 1:
        least, most = _over_steps(matrix)
        ranges.append(Range(least, most, "steps", f"{name} over steps: {between_as_text(least, most)}"))
    part = Part(0.0, mean, color_of(name), f"{name}: {as_text(mean)}, {percentage(mean / step)} of a step")
    return Row(name, [part], as_text(mean), percentage(mean / step if step else 0.0), tuple(ranges))


def _table(shown: dict[str, Matrix], ranks: Sequence[str], step: float) -> Table:
    rows = []
    for name, matrix in shown.items():
        mean = float(matrix.mean())
        slowest = int(matrix.mean(axis=1).argmax())
        rows.append([
            name,
            as_text(mean),
            percentage(mean / step if step else 0.0),
            between_as_text(*_over_ranks(matrix)),
            between_as_text(*_over_steps(matrix)),
            f"{ranks[slowest]} ({as_text(float(matrix.mean(axis=1)[slowest]))})" if len(ranks) > 1 else "",
        ])  # fmt: skip
    columns = ["phase", "mean", "of a step", "over ranks", "over steps", "slowest"]
    return Table("The same as figures", columns, rows)
