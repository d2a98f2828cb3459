"""When a process looked at its memory, and what it read: `memory.edge` spans, as columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.seen.rows import groups
from rltrace.analysis.seen.spans import Column, Intervalled
from rltrace.read.columns import NO_TEXT, OPEN, numbers_of


class Looked(Intervalled):
    """Looks as columns: 16 bytes per span, and some 13 for each number that it says."""

    __slots__ = ("many", "names", "of", "texts", "turn_texts", "turns", "values")

    NARROWED = ("many", "of", "names", "turns")

    def __init__(self) -> None:
        super().__init__()
        self.many: Column = array("i")
        """How many numbers each look says."""
        self.of: Column = array("b")
        """The place in `NUMBERS` of the argument that says each number, one look's behind the other's."""
        self.names: Column = array("i")
        """The place in `texts` of its name there; `NO_TEXT` if the argument is the number itself."""
        self.values: array[float] | NDArray[np.float64] = array("d")
        self.turns: Column = array("i")
        """The place in `turn_texts` of what turned at each look; `NO_TEXT` if a phase did."""
        self.texts: dict[str, int] = {}
        self.turn_texts: dict[str, int] = {}
        """The place of each text, in the order of these."""

    def add(self, start_ns: int, end_ns: int | None, args: Mapping[str, Any]) -> None:
        """Append one, with the arguments of its span."""
        columns = (self.pairs, self.many, self.of, self.names, self.values, self.turns)
        pairs, many, of, names, values, turns = (column for column in columns if isinstance(column, array))
        pairs.extend((start_ns, OPEN if end_ns is None else end_ns))
        self.has_open |= end_ns is None
        numbers = [*numbers_of(args, lambda name: _place(name, self.texts))]
        many.append(len(numbers))
        for column, told in zip((of, names, values), zip(*numbers, strict=True), strict=False):
            column.extend(told)
        turn = args.get("turn")
        turns.append(_place(turn, self.turn_texts) if isinstance(turn, str) else NO_TEXT)

    def compacted(self) -> Iterator[tuple[Any, str]]:
        """Put numbers into as few bytes as they take; yield where long columns are."""
        yield from super().compacted()
        self.values = np.array(self.values)
        yield self, "values"


def places_of(texts: NDArray[np.int32], known: Sequence[str], places: dict[str, int]) -> NDArray[np.intp]:
    """Return the place of each of some texts, which may be new ones; `NO_TEXT` stays what it is.

    Args:
        texts: By their places among those that are known, (N,).
        known: Those of the process.
        places: The places so far.
    """
    found = np.full(len(texts), NO_TEXT)
    for rows in groups(texts + 1):
        text = texts[rows[0]]
        if text != NO_TEXT:
            found[rows] = _place(known[text], places)
    return found


def _place(text: str, places: dict[str, int]) -> int:
    return places.setdefault(text, len(places))
