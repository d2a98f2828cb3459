"""Columns of few values."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Coded(NamedTuple):
    """A column of few values: each row has the place of its own."""

    values: list[Any]
    places: NDArray[np.integer[Any]]

    def rows(self, chosen: slice = slice(None)) -> list[Any]:
        """Return the values of all rows, or of some."""
        values = self.values
        return [values[place] for place in self.places[chosen].tolist()]

    def are_in(self, wanted: Collection[Any]) -> NDArray[np.bool_]:
        """Return which rows have one of these values."""
        return np.isin(self.places, [place for place, value in enumerate(self.values) if value in wanted])

    def numbered(self, number: Callable[[Any], int]) -> NDArray[np.int64]:
        """Return a number for each row, made once for each value."""
        numbered: NDArray[np.int64] = np.array([*map(number, self.values)], np.int64)[self.places]
        return numbered
