"""A sweep in one picture: who held how much at the fullest moment, and how long a step took, by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rltrace.errors import ConfigError
from rltrace_reference.memory_bars import canvas, legend, most_bytes, named_owners, slant, stack, unit_of
from rltrace_reference.run_figures import Figures, Moment


def draw(key: str, runs: list[tuple[Any, Figures]], file: Path) -> None:
    """Draw memory on the left and time on the right, and save them in a .png or .svg file.

    Raises:
        ConfigError: no value has run.
    """
    if not runs:
        raise ConfigError("--picture: none of the values has run, so there is nothing to draw")
    limit_bytes = most_bytes([run for _, run in runs]) or max(run.peak_bytes for _, run in runs)
    moments = {str(value): fullest(run) for value, run in runs}
    owners = named_owners(list(moments.values()), limit_bytes)
    with canvas(2, file, max(9.0, 0.9 * len(runs) + 5)) as (figure, (memory, time)):
        failed = [str(value) for value, run in runs if run.failed_phase is not None]
        stack(memory, moments, owners, limit_bytes, failed)
        memory.set_ylabel(f"{unit_of(limit_bytes)[1]} at the fullest moment")
        done = [(str(value), run.step_seconds) for value, run in runs if run.step_seconds is not None]
        time.plot([label for label, _ in done], [seconds for _, seconds in done], marker="o", color="#333333")
        time.set_ylabel("seconds of a step")
        time.set_ylim(bottom=0)
        slant(time)
        for panel in (memory, time):
            panel.set_xlabel(key, fontsize=8)
        legend(figure, [memory])


def fullest(run: Figures) -> Moment:
    """Return the moment at which most was held; of a run that failed, the moment of its failure."""
    if run.failure is not None and run.failure.moment is not None:
        return run.failure.moment
    return max(run.phases, key=lambda moment: moment.held_bytes)
