"""Draws the picture of memory as SVG or PNG, by matplotlib."""

from __future__ import annotations

import io

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rltrace_exporters.memory_picture import Device, Picture

LETTER = 0.0095
"""Of the step's width."""

TITLE_LETTERS = 80
"""Of an area's title on one line: the bars' title is beside it."""

DOTS_PER_INCH = 144
WIDTH_INCHES, DEVICE_INCHES = 13.0, 4.2


def draw_as(drawn: Picture, kind: str) -> bytes:
    """The file; the same picture gives the same bytes.

    Args:
        drawn: What to draw.
        kind: "svg" or "png".
    """
    figure = figure_of(drawn)
    file = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with rc_context({"svg.hashsalt": "rltrace"}):  # else names in it are drawn at random
        figure.savefig(file, format=kind, dpi=DOTS_PER_INCH, metadata=metadata)
    return file.getvalue()


def figure_of(drawn: Picture) -> Figure:
    """For each device, a step beside the bars of its phases."""
    figure = Figure(figsize=(WIDTH_INCHES, 0.6 + DEVICE_INCHES * len(drawn.devices)), layout="constrained")
    rows = figure.subplots(len(drawn.devices), 2, squeeze=False, sharey="row", gridspec_kw={"width_ratios": (1.6, 1)})
    for device, (area, bars) in zip(drawn.devices, rows, strict=True):
        _draw_area(area, device)
        _draw_bars(bars, device)
    more = f" · {drawn.left_out} more devices are left out" if drawn.left_out else ""
    figure.suptitle(drawn.title + more, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure


def _draw_area(axes: Axes, device: Device) -> None:
    """One step, second by second; what a process said holds until it says something else."""
    axes.stackplot(
        device.seconds,
        *(layer.area for layer in device.layers),
        colors=[layer.color for layer in device.layers],
        step="post",
        linewidth=0,
    )
    axes.step(device.seconds, device.used, where="post", color="#0f172a", linewidth=0.9)
    whole = float(device.seconds[-1]) if len(device.seconds) else 1.0
    low = device.top - 0.055 * (device.top - device.floor)
    for place, band in enumerate(device.bands):
        axes.axvline(band.start, color="#64748b", linewidth=0.5, linestyle=":")
        axes.fill_between((band.start, band.end), low, device.top, color=("#475569", "#94a3b8")[place % 2], linewidth=0)
        label = band.label((band.end - band.start) / whole / LETTER)
        middle = (band.start + band.end) / 2
        axes.text(middle, (low + device.top) / 2, label, color="white", fontsize=6.5, ha="center", va="center")
    axes.set(
        xlim=(0, whole), ylim=(device.floor, device.top), ylabel=device.unit, xlabel="seconds from the step's beginning"
    )
    axes.annotate(device.note, (0, -0.2), xycoords="axes fraction", fontsize=6.5, color="#475569", va="top")
    line = f"{device.name} · {device.moments}"
    title = line if len(line) <= TITLE_LETTERS else f"{device.name}\n{device.moments}"
    axes.set_title(title, fontsize=10, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bars(axes: Axes, device: Device) -> None:
    """Each phase when it holds most."""
    below = [0.0] * len(device.phases)
    for layer in device.layers:
        axes.bar(range(len(below)), layer.bars, bottom=below, color=layer.color, width=0.72)
        below = [low + high for low, high in zip(below, layer.bars, strict=True)]
    axes.set_xticks(range(len(below)), device.phases, rotation=35, ha="right", fontsize=7)
    axes.set_title("each phase when it holds most", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=layer.color, label=layer.owner) for layer in reversed(device.layers)]
    axes.legend(handles=handles, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
