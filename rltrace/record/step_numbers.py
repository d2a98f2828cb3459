"""Numbers of steps or ranks as a user writes them: one grammar for what is recorded and for what is read.

It needs the standard library only, because every process loads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

FORM = "write 3, 100-110 or 1,5-7"
FORM_WITH_PERIODS = "write 3, 100-110, every:50 or 1,5-7,every:50"

_RANGE = re.compile(r"(?P<first>\d{1,18})(-(?P<last>\d{1,18}))?", re.ASCII)
_PERIOD = re.compile(r"every:(?P<period>0*[1-9]\d{0,17})", re.ASCII)


class Range(NamedTuple):
    """Whole numbers from `first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class Numbers(NamedTuple):
    """Steps or ranks, as the user wrote them: `1,5-7`."""

    ranges: tuple[Range, ...]
    periods: tuple[int, ...] = ()
    """Multiples of these are among them too: `every:50`."""

    def has(self, number: int | None) -> bool:
        """Return whether a number is among them."""
        if number is None:
            return False
        is_in = any(one.first <= number <= one.last for one in self.ranges)
        return is_in or any(number % period == 0 for period in self.periods)

    def without_any(self, existing: Iterable[int]) -> Range | None:
        """Return the first range that has none of the existing numbers; None if each range has one."""
        known = set(existing)
        return next((one for one in self.ranges if not any(one.first <= number <= one.last for number in known)), None)

    def each(self, most: int) -> list[int]:
        """Return every number of the ranges, once.

        Raises:
            ValueError: there are more than `most`.
        """
        if sum(one.last - one.first + 1 for one in self.ranges) > most:
            raise ValueError(f"{str(self)!r} names more than {most:,} numbers; name fewer")
        return sorted({number for one in self.ranges for number in range(one.first, one.last + 1)})

    def __str__(self) -> str:
        return ",".join([*map(str, self.ranges), *(f"every:{period}" for period in self.periods)])


def numbers(text: str, *, has_periods: bool = False) -> Numbers:
    """Return the numbers that `3`, `100-110` or `1,5-7` names, and `every:50` where there are periods.

    Raises:
        ValueError: it has another form; the message says the right one.
    """
    ranges: list[Range] = []
    periods: list[int] = []
    for part in map(str.strip, text.split(",")):
        if has_periods and (period := _PERIOD.fullmatch(part)) is not None:
            periods.append(int(period["period"]))
        else:
            ranges.append(_range(part, text, has_periods=has_periods))
    return Numbers(tuple(ranges), tuple(periods))


def _range(part: str, text: str, *, has_periods: bool) -> Range:
    found = _RANGE.fullmatch(part)
    form = FORM_WITH_PERIODS if has_periods else FORM
    if found is None:
        said = f"{part!r} in {text!r}" if part != text.strip() else f"{text!r}"
        kinds = "a number, a range nor a period" if has_periods else "a number nor a range"
        raise ValueError(f"{said} is neither {kinds}; {form}")
    first = int(found["first"])
    last = first if found["last"] is None else int(found["last"])
    if last < first:
        raise ValueError(f"{part!r} runs backwards; {form}")
    return Range(first, last)
