"""Charts in units of their data: several plots above each other that share a horizontal axis.

Only `at`, `above` and the paths know that a chart is drawn: places along the axis are percentages, so that the same
chart fits any width while its text keeps its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace_exporters.report.blocks import Legend, percent
from rltrace_exporters.report.ticks import ticks

WIDE = 1000
"""Width of the coordinates of a path; the browser stretches it to the plot's."""

LETTER, PADDING = 6.6, 10.0
"""Width of a letter of a label, and of what is left free around it, in pixels."""

LEAST_WIDTH = 0.001
"""Share of the plot's width that a bar has at least."""

WIDTHS = (240, 320, 450, 600, 750, 900, 1100)
"""Widths of a plot from which on a label may fit its bar, as classes of the style sheet."""


class Bar(NamedTuple):
    """A rectangle."""

    start: float
    end: float
    color: str
    tip: str
    label: str = ""
    low: float = 0.0
    high: float = 1.0
    is_faint: bool = False

    @property
    def ink(self) -> str:
        """Whether text on it is dark or light."""
        red, green, blue = (int(self.color[place : place + 2], 16) for place in (1, 3, 5))
        return "dark" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "light"


class Layer(NamedTuple):
    """One of the areas that are stacked."""

    name: str
    color: str
    values: NDArray[np.float64]


class Line(NamedTuple):
    """A line over time."""

    name: str
    kind: str
    """A class of the style sheet."""
    xs: NDArray[np.float64]
    ys: NDArray[np.float64]


class Dot(NamedTuple):
    """A point."""

    x: float
    y: float
    tip: str


class Level(NamedTuple):
    """A horizontal line across the plot."""

    y: float
    label: str


class Plot(NamedTuple):
    """One row of a chart."""

    label: str
    height: int
    tip: str = ""
    y_to: float = 1.0
    y_unit: str = ""
    """Unit of the vertical axis; without one it has no ticks."""
    bars: Sequence[Bar] = ()
    xs: NDArray[np.float64] = np.empty(0)
    """Where the layers' values begin to hold; each holds until the next one."""
    layers: Sequence[Layer] = ()
    lines: Sequence[Line] = ()
    dots: Sequence[Dot] = ()
    levels: Sequence[Level] = ()
    are_values_shown: bool = False
    """Whether the layers' values are shown at the pointer."""

    def above(self, value: float) -> str:
        """Return how far a value lies below the upper edge, in pixels."""
        share = min(max(value / self.y_to if self.y_to else 0.0, 0.0), 1.0)
        return f"{(1 - share) * self.height:.1f}".rstrip("0").rstrip(".")

    def tall(self, bar: Bar) -> str:
        """Return the height of a bar in pixels."""
        return f"{float(self.above(bar.low)) - float(self.above(bar.high)):.1f}"

    def y_ticks(self) -> list[float]:
        """Return the marks of the vertical axis."""
        return ticks(self.y_to, max(2, self.height // 44)) if self.y_unit else []


class Chart(NamedTuple):
    """Plots above each other."""

    title: str
    x_to: float
    x_unit: str
    plots: list[Plot]
    legend: list[Legend]
    more: Sequence[Legend] = ()
    """A legend of its own, for what the last plot shows."""
    x_from: float = 0.0
    x_marks: Sequence[tuple[float, str]] | None = None
    """Marks of the horizontal axis; None for round numbers."""
    is_alike: bool = True
    """Whether two charts of this title share their axes."""

    def at(self, x: float) -> str:
        """Return a place on the axis in percent."""
        return percent(self._share(x))

    def wide(self, bar: Bar) -> str:
        """Return the width of a bar in percent; a short one can still be seen."""
        return percent(max(self._share(bar.end) - self._share(bar.start), LEAST_WIDTH))

    def _share(self, x: float) -> float:
        length = self.x_to - self.x_from
        return min(max((x - self.x_from) / length if length else 0.0, 0.0), 1.0)

    def x_ticks(self) -> list[tuple[float, str]]:
        """Return the marks of the horizontal axis."""
        if self.x_marks is not None:
            return [(x, text) for x, text in self.x_marks if x <= self.x_to]
        return [(x, f"{x:,.6g}") for x in ticks(self.x_to, 8, self.x_from)]

    def label_class(self, bar: Bar) -> str | None:
        """Return from which width of the plot on the label of a bar fits it; None if never."""
        share = self._share(bar.end) - self._share(bar.start)
        if not bar.label or share <= 0:
            return None
        needed = (len(bar.label) * LETTER + PADDING) / share
        return next((f"from-{width}" for width in WIDTHS if width >= needed), None)

    def area(self, plot: Plot, place: int) -> str:
        """Return the path of one layer, from the top of the layers below it to its own."""
        below = sum((layer.values for layer in plot.layers[:place]), np.zeros(len(plot.xs)))
        top = below + plot.layers[place].values
        return _steps(self._wide(plot.xs), self._high(plot, top), self._high(plot, below))

    def line(self, plot: Plot, line: Line) -> str:
        """Return the path of a line."""
        points = zip(self._wide(line.xs), self._high(plot, line.ys), strict=True)
        return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)

    def _wide(self, xs: NDArray[np.float64]) -> list[float]:
        return [round(self._share(float(x)) * WIDE, 1) for x in xs]

    def _high(self, plot: Plot, ys: NDArray[np.float64]) -> list[float]:
        shares = np.clip(ys / plot.y_to if plot.y_to else ys * 0, 0, 1)
        return [round(float(y), 1) for y in (1 - shares) * plot.height]


def _steps(xs: Sequence[float], tops: Sequence[float], bottoms: Sequence[float]) -> str:
    """Return the outline of values that hold until the next; corners that nobody sees are left out."""
    if not xs:
        return ""
    there = "".join(f"H{x:g}V{top:g}" for x, before, top in zip(xs[1:], tops, tops[1:], strict=False) if top != before)
    # On the way back, a value holds from its beginning on.
    back = "".join(
        f"H{xs[place + 1]:g}V{bottoms[place]:g}"
        for place in range(len(xs) - 2, -1, -1)
        if bottoms[place] != bottoms[place + 1]
    )
    return f"M{xs[0]:g} {tops[0]:g}{there}H{xs[-1]:g}V{bottoms[-1]:g}{back}H{xs[0]:g}Z"


def sharing_axes(charts: Sequence[Chart]) -> list[Chart]:
    """Return charts of several runs on the same axes, so that they can be compared by eye."""
    if len(charts) < 2 or not all(chart.is_alike for chart in charts):
        return list(charts)
    x_from, x_to = min(chart.x_from for chart in charts), max(chart.x_to for chart in charts)
    most: dict[tuple[str, str], float] = {}
    for plot in (plot for chart in charts for plot in chart.plots):
        most[plot.label, plot.y_unit] = max(most.get((plot.label, plot.y_unit), 0.0), plot.y_to)
    return [
        chart._replace(
            x_from=x_from,
            x_to=x_to,
            plots=[plot._replace(y_to=most[plot.label, plot.y_unit]) if plot.y_unit else plot for plot in chart.plots],
        )
        for chart in charts
    ]
