"""The variants' memory in one picture: for each phase of a step, who held how much, below the limit that all share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rltrace.errors import MissingExtraError, OutputError
from rltrace.events import OWNER_COLORS, OWNERS
from rltrace_reference.journey.figures import Figures, Moment

MISSING_COLOR = "#d62728"
SHARE_TO_NAME = 0.01
"""Owners that never hold more than this part of the memory are one grey part of a bar."""
PHASES = (
    "rollout.wake_weights",
    "weight_sync",
    "rollout.wake_kv_cache",
    "rollout.generate",
    "actor.old_log_prob",
    "ref.log_prob",
    "actor.update",
)


def draw(variants: list[Figures], file: Path) -> None:
    """Draw one panel per variant.

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
    unit, name = (1 << 30, "GiB") if variants[0].limit_bytes >= 8 << 30 else (1 << 20, "MiB")
    owners = named_owners(variants)
    figure, panels = pyplot.subplots(1, len(variants), figsize=(3.6 * len(variants), 4.6), sharey=True, squeeze=False)
    for panel, variant in zip(panels[0], variants, strict=True):
        _draw_variant(panel, variant, owners, unit)
    panels[0][0].set_ylabel(f"{name} of one device")
    handles, labels = panels[0][-1].get_legend_handles_labels()
    for panel in panels[0][:-1]:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    figure.legend(handles, labels, loc="lower center", ncols=6, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise OutputError(f"{file}: {error}; name a file that ends in .png or .svg") from None
    finally:
        pyplot.close(figure)


def named_owners(variants: list[Figures]) -> list[str]:
    """Return the owners that hold enough to be told apart, in the order of the ledger."""
    most: dict[str, int] = {}
    for variant in variants:
        for moment in variant.phases:
            for owner, size_bytes in moment.held.items():
                most[owner] = max(most.get(owner, 0), size_bytes)
    enough_bytes = SHARE_TO_NAME * variants[0].limit_bytes
    known = [owner for owner in (*OWNERS, *most) if most.get(owner, 0) >= enough_bytes]
    return [owner for owner in dict.fromkeys(known) if owner != "unaccounted"]


def _draw_variant(panel: Any, variant: Figures, owners: list[str], unit: int) -> None:
    moments = {moment.phase: moment for moment in variant.phases}
    if variant.failure is not None and variant.failure.moment is not None:
        moments[variant.failed_phase] = variant.failure.moment
    phases = [phase for phase in PHASES if phase in moments]
    bottoms = [0.0] * len(phases)
    for owner in owners:
        heights = [max(0, moments[phase].held.get(owner, 0)) / unit for phase in phases]
        panel.bar(phases, heights, bottom=bottoms, width=0.8, color=OWNER_COLORS.get(owner, "#999999"), label=owner)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    rest = [max(0.0, _held(moments[phase]) / unit - bottom) for phase, bottom in zip(phases, bottoms, strict=True)]
    panel.bar(phases, rest, bottom=bottoms, width=0.8, color="#dddddd", label="the rest")
    if variant.failure is not None and variant.failed_phase in phases:
        top = _held(moments[variant.failed_phase]) / unit
        panel.bar(
            [variant.failed_phase], [max(0, variant.limit_bytes / unit * 1.08 - top)], bottom=[top], width=0.8,
            fill=False, edgecolor=MISSING_COLOR, hatch="xx", label="out of memory",
        )  # fmt: skip
    panel.axhline(variant.limit_bytes / unit, color="black", linestyle="--", linewidth=1)
    panel.set_title(variant.name, fontsize=10)
    panel.tick_params(axis="x", labelrotation=60, labelsize=7)
    for label in panel.get_xticklabels():
        label.set_ha("right")
        label.set_rotation_mode("anchor")
    panel.set_ylim(0, 1.1 * variant.limit_bytes / unit)


def _held(moment: Moment) -> int:
    return moment.held_bytes
