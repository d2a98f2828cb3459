"""Round numbers on an axis."""

from __future__ import annotations

from math import ceil, floor, log10


def ticks(to: float, about: int, start: float = 0.0) -> list[float]:
    """Return round numbers from the beginning to the end of an axis, about so many."""
    if not to > start:
        return [start]
    step = _round_up((to - start) / about)
    first = ceil(start / step - 1e-9)
    return [round(place * step, 12) for place in range(first, floor(to / step + 1e-9) + 1)]


def end_of_axis(most: float) -> float:
    """Return where an axis ends that holds a value: a little above it."""
    return most * 1.04 if most > 0 else 1.0


def _round_up(value: float) -> float:
    """Return the next 1, 2, 2.5 or 5 times a power of ten."""
    power: float = 10.0 ** floor(log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * (1 - 1e-9))
