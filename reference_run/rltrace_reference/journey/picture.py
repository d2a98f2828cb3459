"""The variants' memory in one picture: for each phase of a step, who held how much, below the limit that all share."""

from __future__ import annotations

from pathlib import Path

from rltrace_reference.memory_bars import canvas, legend, most_bytes, named_owners, stack, unit_of
from rltrace_reference.run_figures import Figures, Moment

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
    """Draw one panel per variant, and save them in a .png or .svg file."""
    limit_bytes = most_bytes(variants)
    owners = named_owners([moment for variant in variants for moment in variant.phases], limit_bytes)
    with canvas(len(variants), file, 3.6 * len(variants)) as (figure, panels):
        for panel, variant in zip(panels, variants, strict=True):
            stack(panel, _moments(variant), owners, limit_bytes, [variant.failed_phase or ""])
            panel.set_title(variant.name, fontsize=10)
        panels[0].set_ylabel(f"{unit_of(limit_bytes)[1]} of one device")
        legend(figure, panels)


def _moments(variant: Figures) -> dict[str, Moment]:
    """Return the fullest moment of each phase; of the one that failed, the moment of its failure."""
    known = {moment.phase: moment for moment in variant.phases}
    if variant.failure is not None and variant.failure.moment is not None:
        known[variant.failed_phase] = variant.failure.moment
    return {phase: known[phase] for phase in PHASES if phase in known}
