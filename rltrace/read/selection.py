"""Which part of a run a reader is asked for: one grammar for `--steps`, `--ranks`, `--time` and `--depth`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

FORM = "write 3, 100-110 or 1,5-7"
FORM_OF_TIME = "write 10:20, 10: or :20, in seconds from the start of the run"

_RANGE = re.compile(r"(?P<first>\d{1,18})(-(?P<last>\d{1,18}))?", re.ASCII)
_SECONDS = re.compile(r"\d{1,12}(\.\d{1,9})?|\.\d{1,9}", re.ASCII)


class Range(NamedTuple):
    """Whole numbers from `first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class Numbers(NamedTuple):
    """Steps or ranks, as the user wrote them: `1,5-7`."""

    ranges: tuple[Range, ...]

    def has(self, number: int | None) -> bool:
        """Return whether a number is among them."""
        return number is not None and any(one.first <= number <= one.last for one in self.ranges)

    def without_any(self, existing: Iterable[int]) -> Range | None:
        """Return the first range that has none of the existing numbers; None if each range has one."""
        known = set(existing)
        return next((one for one in self.ranges if not any(one.first <= number <= one.last for number in known)), None)

    def each(self, most: int) -> list[int]:
        """Return every number, once.

        Raises:
            ValueError: there are more than `most`.
        """
        if sum(one.last - one.first + 1 for one in self.ranges) > most:
            raise ValueError(f"{str(self)!r} names more than {most:,} numbers; name fewer")
        return sorted({number for one in self.ranges for number in range(one.first, one.last + 1)})

    def __str__(self) -> str:
        return ",".join(map(str, self.ranges))


class Seconds(NamedTuple):
    """A time window in seconds from the start of the run; an end that was not given is infinite."""

    begin: float
    end: float

    def __str__(self) -> str:
        return ":".join(f"{side:g}" if math.isfinite(side) else "" for side in self)


class Selection(NamedTuple):
    """The part of a run that a reader is asked for; None is all of it."""

    steps: Numbers | None = None
    ranks: Numbers | None = None
    time: Seconds | None = None
    depth: int | None = None
    """How deep spans may be nested: 1 has only the outermost of each thread."""


ALL = Selection()


def numbers(text: str) -> Numbers:
    """Return the numbers that `3`, `100-110` or `1,5-7` names.

    Raises:
        ValueError: it has another form; the message says the right one.
    """
    return Numbers(tuple(_range(part.strip(), text) for part in text.split(",")))


def seconds(text: str) -> Seconds:
    """Return the time window that `10:20`, `10:` or `:20` names.

    Raises:
        ValueError: it has another form; the message says the right one.
    """
    begin, colon, end = (part.strip() for part in text.partition(":"))
    if not colon or not (begin or end) or not all(_SECONDS.fullmatch(side) for side in (begin, end) if side):
        raise ValueError(f"{text!r} is not a time from A to B; {FORM_OF_TIME}")
    found = Seconds(float(begin or 0), float(end or math.inf))
    if found.begin >= found.end:
        raise ValueError(f"{text!r} ends before it begins; {FORM_OF_TIME}")
    return found


def written(existing: Iterable[int]) -> str:
    """Return numbers in the same form, as short as possible: 0, 1, 2 and 7 are `0-2,7`."""
    return ",".join(map(str, _ranges(sorted(set(existing)))))


def _range(part: str, text: str) -> Range:
    found = _RANGE.fullmatch(part)
    if found is None:
        said = f"{part!r} in {text!r}" if part != text.strip() else f"{text!r}"
        raise ValueError(f"{said} is neither a number nor a range; {FORM}")
    first = int(found["first"])
    last = first if found["last"] is None else int(found["last"])
    if last < first:
        raise ValueError(f"{part!r} runs backwards; {FORM}")
    return Range(first, last)


def _ranges(ordered: list[int]) -> Iterator[Range]:
    first = last = None
    for number in ordered:
        if first is None or last is None:
            first = last = number
        elif number == last + 1:
            last = number
        else:
            yield Range(first, last)
            first = last = number
    if first is not None and last is not None:
        yield Range(first, last)
