"""Steps, one row each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import isfinite
from statistics import fmean
from typing import Generic, TypeVar

from rich.console import RenderableType
from rich.text import Text

from rltrace.analysis.steps import DISK_BUDGET, LEFT, NOT_CHOSEN, Step
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, bars, titled

_Item = TypeVar("_Item")
MOST_PROCESSES = 6
MOST_STEPS = 30
"""A run with more steps shows the trend, the steps that stand out, and the last ones."""
TREND_ROWS, MOST_APART, LAST_STEPS = 10, 10, 10
"""Rows of each of these parts."""
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


BECAUSE = {NOT_CHOSEN: "not among --record-steps", DISK_BUDGET: "to keep to the disk budget", LEFT: "left on its host"}
"""Why steps are in brief."""


def brief_words(steps: Iterable[Step]) -> str:
    """Return why steps are in brief: `in brief, not among --record-steps`."""
    reasons = dict.fromkeys(BECAUSE[step.brief_because] for step in steps if step.brief_because is not None)
    return f"in brief, {' and '.join(reasons)}"


def step_count(steps: Sequence[Step]) -> str:
    """Return how many steps there are, whose they are, and how many of them are in brief."""
    count = figures.count(len(steps), "step") + of_processes(steps)
    many = sum(step.brief for step in steps)
    return f"{count} ({many:,} in brief)" if many else count


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


def step_table(steps: Sequence[Step], whose: str = "", apart: Collection[int] = ()) -> RenderableType:
    """Draw one row per step; for a long run the trend, the steps that stand out, and the last ones."""
    known = {name: of for name, of in _figures_of(steps).items() if name != "reward"}
    # The further a figure is behind, the earlier it goes.
    columns = [Column(name, worth=8 - at) for at, name in enumerate(known)]
    table = Figures("step", "seconds", Column("reward", 8), bars(1), *columns)
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    best = max((abs(reward) for reward in rewards if isfinite(reward)), default=0.0)
    numbers = [step.step for step in steps]
    for row in in_short(steps, numbers, apart):
        if row.begins_part:
            table.add_section()
        together = row.items
        reward = _mean(step.reward_mean for step in together)
        table.add_row(
            row.label,
            figures.seconds(fmean(step.seconds for step in together)) + _unfinished(together),
            figures.number(reward),
            figures.bar(reward / best if reward is not None and isfinite(reward) and best > 0 else 0.0),
            *(figures.number(_mean(map(of, together))) for of in known.values()),
        )
    return titled(f"Steps{whose}", table, SHORT if len(steps) > MOST_STEPS else "")


SHORT = "several steps in a row: their mean; then the steps that stand out, and the last ones"


@dataclass(frozen=True)
class Together(Generic[_Item]):
    """Some steps in one row of a table."""

    label: str
    items: list[_Item]
    begins_part: bool = False
    """Whether another part of the table begins here."""


def in_short(items: Sequence[_Item], numbers: Sequence[int], apart: Collection[int]) -> list[Together[_Item]]:
    """Return a row for each step; of a long run the trend, the steps that stand out, and the last ones.

    Args:
        items: One for each step, in order.
        numbers: Numbers of the steps.
        apart: Numbers of those that stand out.
    """
    each = [Together(str(number), [item]) for number, item in zip(numbers, items, strict=True)]
    if len(items) <= MOST_STEPS:
        return each
    before, last = each[:-LAST_STEPS], each[-LAST_STEPS:]
    cuts = [round(len(before) * part / TREND_ROWS) for part in range(TREND_ROWS + 1)]
    blocks = [before[begin:end] for begin, end in pairwise(cuts)]
    trend = [
        Together(figures.between(block[0].label, block[-1].label), [one.items[0] for one in block]) for block in blocks
    ]
    far = [one for one, number in zip(before, numbers, strict=False) if number in apart][:MOST_APART]
    parts = (trend, far, last)
    return [replace(one, begins_part=at == 0 and part is not trend) for part in parts for at, one in enumerate(part)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _unfinished(steps: Sequence[Step]) -> str:
    """Return what is wrong with a step; nothing of several."""
    if len(steps) > 1:
        return ""
    (step,) = steps
    if step.end_seconds is None:
        return " open"
    if step.error is not None:
        return " aborted"
    if step.brief:
        return " in brief"
    return "" if step.recorded else " not recorded"


def _figure(name: str, step: Step) -> float | None:
    return step.figures.get(name)
