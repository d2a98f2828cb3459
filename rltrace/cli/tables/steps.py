"""Steps, one row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from statistics import fmean
from typing import TypeVar

from rich.console import RenderableType
from rich.text import Text

from rltrace.analysis.steps import Step
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, bars, titled

_Item = TypeVar("_Item")
MOST_PROCESSES = 6
MOST_STEPS = 30
"""A run with more steps shows only its first and last ones."""
MOST_FIGURES = 3
FEW_FIGURES = 4
"""Figures in one line."""


def step_line(steps: Sequence[Step]) -> Text | None:
    """Return one line: how the figures changed from the first step to the last; None without any."""
    over = [step for step in steps if step.end_seconds is not None and step.recorded and step.error is None]
    if not over:
        return None
    parts = []
    known = {name: of for name, of in _figures_of(over).items() if name != "tokens"}
    for name, of in list(known.items())[:FEW_FIGURES]:
        first, last = (figures.number(of(step)) for step in (over[0], over[-1]))
        parts.append(f"{name} {first}" + (f" → {last}" if first != last else ""))
    numbers = figures.between(str(over[0].step), str(over[-1].step))
    what = "Steps" if len(over) > 1 else "Step"
    return Text.assemble((what, "bold"), f" {numbers}: {', '.join(parts)}") if parts else None


def _figures_of(steps: Sequence[Step]) -> dict[str, Callable[[Step], float | None]]:
    """Return the known figures of how steps went, rewards first."""
    numbers: dict[str, Callable[[Step], float | None]] = {
        "reward": lambda step: step.reward_mean,
        "tokens": lambda step: step.tokens,
        "tokens/s": lambda step: step.tokens_per_second,
    }
    for name in list(dict.fromkeys(name for step in steps for name in step.figures))[:MOST_FIGURES]:
        numbers[name] = partial(_figure, name)
    return {name: of for name, of in numbers.items() if any(of(step) is not None for step in steps)}


def process_table(steps: Sequence[Step], most: int = MOST_PROCESSES) -> RenderableType:
    """Draw processes that have steps of their own, one row each: their number, and the length of those that a mean
    counts."""
    table = Figures("process", "steps", "seconds", "least-most")
    own = by_lane(steps)
    for lane, of_lane in list(own.items())[:most]:
        counted = [step.seconds for step in of_lane if step.steady]
        lengths = (figures.seconds(fmean(counted)), figures.spread(counted)) if counted else ("", "")
        table.add_row(lane, f"{len(of_lane):,}", *lengths)
    more = len(own) - most
    caption = f"{more} more: see --all" if more > 0 else ""
    return titled("Steps of each process", table, caption)


def by_lane(steps: Sequence[Step]) -> dict[str, list[Step]]:
    """Return the steps of each process whose steps they are."""
    found: dict[str, list[Step]] = {}
    for step in steps:
        found.setdefault(step.lane, []).append(step)
    return found


def of_processes(steps: Sequence[Step]) -> str:
    """Return whose steps they are if several processes have their own: ` of 3 processes`."""
    many = len(by_lane(steps))
    return f" of {figures.count(many, 'process')}" if many > 1 else ""


def step_table(steps: Sequence[Step], whose: str = "", most: int = MOST_STEPS) -> RenderableType:
    """Draw one row per step; for a long run the first and last ones."""
    known = {name: of for name, of in _figures_of(steps).items() if name != "reward"}
    # The further a figure is behind, the earlier it goes.
    columns = [Column(name, worth=8 - at) for at, name in enumerate(known)]
    table = Figures("step", "seconds", Column("reward", 8), bars(1), *columns)
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    best = max((abs(reward) for reward in rewards if isfinite(reward)), default=0.0)
    for step in first_and_last(steps, most):
        if step is None:
            table.add_row("…")
            continue
        reward = step.reward_mean
        table.add_row(
            str(step.step),
            figures.seconds(step.seconds) + _unfinished(step),
            figures.number(reward),
            figures.bar(reward / best if reward is not None and isfinite(reward) and best > 0 else 0.0),
            *(figures.number(of(step)) for of in known.values()),
        )
    return titled(f"Steps{whose}", table)


def first_and_last(items: Sequence[_Item], most: int = MOST_STEPS) -> list[_Item | None]:
    """Return all of them, or the first third and the last ones, with a gap between."""
    if len(items) <= most:
        return list(items)
    first = max(1, most // 3)
    return [*items[:first], None, *items[first - most :]]


def _unfinished(step: Step) -> str:
    if step.end_seconds is None:
        return " open"
    if step.error is not None:
        return " aborted"
    if step.brief:
        return " in brief"
    return "" if step.recorded else " not recorded"


def _figure(name: str, step: Step) -> float | None:
    return step.figures.get(name)
