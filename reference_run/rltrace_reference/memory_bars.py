"""Stacked bars of memory by owner, for pictures of several runs side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rltrace.errors import MissingExtraError, OutputError
from rltrace.events import OWNER_COLORS, OWNERS
from rltrace_reference.run_figures import Figures, Moment

MISSING_COLOR = "#d62728"
SHARE_TO_NAME = 0.01
"""Owners that never hold more than this part of the memory are one grey part of a bar."""


@contextmanager
def canvas(panels: int, file: Path, width: float) -> Iterator[tuple[Any, list[Any]]]:
    """Make a figure with panels side by side, and save it at the end.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: the file cannot be written, or has an ending that matplotlib does not know.
    """
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        raise MissingExtraError("--picture needs matplotlib, which is not installed here", "pictures") from None
    figure, axes = pyplot.subplots(1, panels, figsize=(width, 4.6), squeeze=False)
    try:
        yield figure, list(axes[0])
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise OutputError(f"{file}: {error}; name a file that ends in .png or .svg") from None
    finally:
        pyplot.close(figure)


def unit_of(size_bytes: int) -> tuple[int, str]:
    """Return the unit in which so many bytes are a handy number, and its name."""
    return (1 << 30, "GiB") if size_bytes >= 8 << 30 else (1 << 20, "MiB")


def named_owners(moments: list[Moment], limit_bytes: int) -> list[str]:
    """Return the owners that hold enough to be told apart, in the order of the ledger."""
    most: dict[str, int] = {}
    for moment in moments:
        for owner, size_bytes in moment.held.items():
            most[owner] = max(most.get(owner, 0), size_bytes)
    known = dict.fromkeys(owner for owner in (*OWNERS, *most) if most.get(owner, 0) >= SHARE_TO_NAME * limit_bytes)
    return [owner for owner in known if owner != "unaccounted"]


def stack(panel: Any, moments: dict[str, Moment], owners: list[str], limit_bytes: int, failed: list[str]) -> None:
    """Draw one bar per label, below the line of the limit.

    Args:
        panel: Axes of matplotlib.
        moments: By label.
        owners: Those that are told apart, from the bottom.
        limit_bytes: The memory of the device.
        failed: Labels at which memory ran out.
    """
    unit, _ = unit_of(limit_bytes)
    labels = list(moments)
    bottoms = [0.0] * len(labels)
    for owner in owners:
        heights = [max(0, moment.held.get(owner, 0)) / unit for moment in moments.values()]
        panel.bar(labels, heights, bottom=bottoms, width=0.8, color=OWNER_COLORS.get(owner, "#999999"), label=owner)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    tops = [moment.held_bytes / unit for moment in moments.values()]
    rest = [max(0.0, top - bottom) for top, bottom in zip(tops, bottoms, strict=True)]
    panel.bar(labels, rest, bottom=bottoms, width=0.8, color="#dddddd", label="the rest")
    beyond = 1.08 * limit_bytes / unit
    for label, top in zip(labels, tops, strict=True):
        if label in failed:
            panel.bar(
                [label],
                [max(0.0, beyond - top)],
                bottom=[top],
                width=0.8,
                fill=False,
                edgecolor=MISSING_COLOR,
                hatch="xx",
                label="out of memory",
            )
    panel.axhline(limit_bytes / unit, color="black", linestyle="--", linewidth=1)
    panel.set_ylim(0, 1.1 * limit_bytes / unit)
    slant(panel)


def slant(panel: Any) -> None:
    """Write the labels below a panel so that long ones fit."""
    panel.tick_params(axis="x", labelsize=7)
    for label in panel.get_xticklabels():
        label.set(rotation=60, ha="right", rotation_mode="anchor")


def legend(figure: Any, panels: list[Any]) -> None:
    """Write once, below all panels, what each colour is."""
    known: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        known.update(zip(labels, handles, strict=True))
    figure.legend(known.values(), known.keys(), loc="lower center", ncols=6, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.12, 1, 1))


def most_bytes(runs: list[Figures]) -> int:
    """Return the memory of the largest device among runs."""
    return max(run.limit_bytes for run in runs)
