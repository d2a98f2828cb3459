"""Which part of a run a reader is asked for: by `--steps`, `--ranks`, `--time` and `--depth`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rltrace.record.step_numbers import FORM, Numbers, Range, numbers

__all__ = ["ALL", "FORM", "Numbers", "Range", "Seconds", "Selection", "numbers", "seconds", "written"]

FORM_OF_TIME = "write 10:20, 10: or :20, in seconds from the start of the run"

_SECONDS = re.compile(r"\d{1,12}(\.\d{1,9})?|\.\d{1,9}", re.ASCII)


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
