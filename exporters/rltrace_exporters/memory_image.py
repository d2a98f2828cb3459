"""Draws the picture of memory as SVG or PNG, by matplotlib."""

from __future__ import annotations

import io

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rltrace_exporters.memory_picture import ENDS_ONLY, Device, Picture
from rltrace_exporters.timeline_colors import slice_color

LETTER = 0.0095
"""Of the step's width."""

TITLE_LETTERS = 80
"""Of an area's title on one line: the bars' title is beside it."""

DOTS_PER_INCH = 144
WIDTH_INCHES, DEVICE_INCHES = 14.0, 5.2

DARK, MUTED, RED = "#0f172a", "#475569", "#dc2626"
OTHERS = "#f59e0b"
"""What devices have that are alike: a colour of no owner."""

COLUMNS = 3
"""Of a device: its area, its bars and its legends."""


def draw_as(drawn: Picture, kind: str) -> bytes:
    """The file; the same picture gives the same bytes.

    Args:
        drawn: What to draw.
        kind: "svg" or "png".
    """
    return saved(figure_of(drawn), kind)


def saved(figure: Figure, kind: str) -> bytes:
    """A figure as a file."""
    file = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with rc_context({"svg.hashsalt": "rltrace"}):  # else names in it are drawn at random
        figure.savefig(file, format=kind, dpi=DOTS_PER_INCH, metadata=metadata)
    return file.getvalue()


def figure_of(drawn: Picture) -> Figure:
    """For each device, a step beside the bars of its phases."""
    figure = Figure(figsize=(WIDTH_INCHES, 0.6 + DEVICE_INCHES * len(drawn.devices)), layout="constrained")
    rows = figure.subplots(
        len(drawn.devices), COLUMNS, squeeze=False, sharey="row", gridspec_kw={"width_ratios": (1.6, 1, 0.42)}
    )
    for device, (area, bars, words) in zip(drawn.devices, rows, strict=True):
        _draw_area(area, device)
        _draw_bars(bars, device)
        _draw_legends(words, device)
    more = f" · {drawn.left_out} more devices are left out" if drawn.left_out else ""
    figure.suptitle(drawn.title + more, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure


def _draw_area(axes: Axes, device: Device) -> None:
    """One step, second by second; what a process said holds until it says something else."""
    areas = axes.stackplot(
        device.seconds,
        *(layer.area for layer in device.layers),
        colors=[layer.color for layer in device.layers],
        step="post",
        linewidth=0,
    )
    for layer, area in zip(device.layers, areas, strict=True):
        area.set_gid(f"owner:{layer.owner}")
    if device.others is not None:
        least, most = device.others
        axes.fill_between(
            device.seconds, least, most, step="post", facecolor=OTHERS, alpha=0.35, edgecolor=OTHERS, linewidth=0.8
        )
    axes.step(device.seconds, device.used, where="post", color=DARK, linewidth=0.9)
    whole = (float(device.seconds[-1]) if len(device.seconds) else 0.0) or 1.0  # of one moment: any width
    low = device.top + 0.25 * (device.height - device.top)
    for band in device.bands:
        axes.axvline(band.start, color="#64748b", linewidth=0.5, linestyle=":")
        axes.fill_between((band.start, band.end), low, device.height, color=band.color, linewidth=0)
        label = band.label((band.end - band.start) / whole / LETTER)
        axes.text(
            (band.start + band.end) / 2, (low + device.height) / 2, label,
            color="white", fontsize=6.5, ha="center", va="center",
        )  # fmt: skip
    for at in device.failures:
        axes.axvline(at, color=RED, linewidth=1.4)
    _draw_capacity(axes, device)
    axes.set(xlim=(0, whole), ylim=(device.floor, device.height), ylabel=device.unit, xlabel=device.axis)
    axes.annotate(device.note, (0, -0.16), xycoords="axes fraction", fontsize=6.5, color=MUTED, va="top")
    line = f"{device.name} · {device.moments}"
    title = line if len(line) <= TITLE_LETTERS else f"{device.name}\n{device.moments}"
    axes.set_title(title, fontsize=10, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_capacity(axes: Axes, device: Device) -> None:
    if device.capacity is not None:
        axes.axhline(device.capacity, color=RED, linewidth=1.0, linestyle="--", gid="capacity")


def _draw_bars(axes: Axes, device: Device) -> None:
    """Each phase when most is allocated in it, and the most that there was in all."""
    places = range(len(device.phases))
    below = [0.0] * len(device.phases)
    for layer in device.layers:
        for bar in axes.bar(places, layer.bars, bottom=below, color=layer.color, width=0.72):
            bar.set_gid(f"owner:{layer.owner}")
        below = [low + high for low, high in zip(below, layer.bars, strict=True)]
    for place, top in zip(places, device.tops, strict=True):
        axes.plot((place - 0.36, place + 0.36), (top, top), color=DARK, linewidth=1.1)
    _draw_capacity(axes, device)
    axes.set_xticks(places, device.phases, rotation=35, ha="right", fontsize=7)
    axes.set_title("each phase when its owners hold most", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if not device.phases:
        axes.text(0.5, 0.5, "no phase was recorded", transform=axes.transAxes, ha="center", color=MUTED, fontsize=8)
        axes.set_xticks([])


def _draw_legends(axes: Axes, device: Device) -> None:
    """On axes of their own, so that nothing of them is cut off."""
    axes.axis("off")
    owners: list[Artist] = [Line2D([], [], color=DARK, linewidth=0.9, label="used, in all; on a bar its most")]
    if device.others is not None:
        owners.append(Patch(facecolor=OTHERS, alpha=0.35, label="used by the others"))
    if device.capacity is not None:
        said = f"capacity, {device.capacity:,.1f} {device.unit}"
        owners.append(Line2D([], [], color=RED, linestyle="--", linewidth=1.0, label=said))
    if device.failures:
        owners.append(Line2D([], [], color=RED, linewidth=1.4, label="out of memory"))
    owners += [Patch(color=layer.color, label=layer.owner) for layer in reversed(device.layers)]
    names = dict.fromkeys([*(band.name for band in device.bands), *(name.rstrip(ENDS_ONLY) for name in device.phases)])
    phases = [Patch(color=slice_color(name), label=name) for name in names]
    first = axes.legend(handles=owners, title="owners", loc="upper left", **_LEGEND)
    if phases:
        axes.add_artist(first)
        axes.legend(handles=phases, title="phases", loc="lower left", **_LEGEND)


_LEGEND = {
    "fontsize": 6.5,
    "title_fontsize": 7,
    "alignment": "left",
    "frameon": False,
    "labelspacing": 0.25,
    "bbox_to_anchor": (-0.1, -0.2, 1.1, 1.25),
    "borderaxespad": 0.0,
}
