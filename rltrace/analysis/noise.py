"""Whether steps are longer than others, or than a limit, by more than the noise of steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt

import msgspec
import numpy as np
from numpy.typing import NDArray

FALSE_ALARMS = 0.01
"""How often steps that are alike may be called different."""

_T_99 = (
    31.821, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764, 2.718, 2.681, 2.650, 2.624, 2.602,
    2.583, 2.567, 2.552, 2.539, 2.528, 2.518, 2.508, 2.500, 2.492, 2.485, 2.479, 2.473, 2.467, 2.462, 2.457,
)  # fmt: skip
"""Student's t for 99 %, one-sided, by degrees of freedom from 1 (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""
_NORMAL_99 = 2.326

MOST_STEPS = 2000
"""Of more steps, so many are taken evenly: all pairs are compared."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """By how much steps are longer than others, as a share of these: 0.1 is ten per cent."""

    share: float
    """The middle one of all ratios between a step of one run and a step of the other, less 1 (Hodges and Lehmann,
    1963): one step that is far off hardly moves it."""
    least_share: float | None
    """Not less than this, with 99 % confidence (Wilcoxon's bound); None for fewer than 5 steps of each."""
    most_share: float | None
    """Not more than this, likewise."""
    visible_share: float | None
    """From which change on such steps would be told apart; None for fewer than 5 steps of each."""

    @property
    def is_slower(self) -> bool:
        """Whether they are longer, and not by chance."""
        return self.least_share is not None and self.least_share > 0

    @property
    def is_faster(self) -> bool:
        """Whether they are shorter, and not by chance."""
        return self.most_share is not None and self.most_share < 0


def change(a: Sequence[float], b: Sequence[float]) -> Change | None:
    """Compare steps `b` with steps `a`; None if there are none, or one took no time."""
    if not a or not b or min(*a, *b) <= 0:
        return None
    before, after = _thinned(a), _thinned(b)
    ratios = np.sort((np.log(after)[:, None] - np.log(before)[None, :]).ravel())
    middle = float(np.median(ratios))
    pairs = len(ratios)
    outside = int(pairs / 2 - _NORMAL_99 * sqrt(pairs * (len(before) + len(after) + 1) / 12))
    if outside < 1:
        return Change(share=exp(middle) - 1, least_share=None, most_share=None, visible_share=None)
    least, most = float(ratios[outside - 1]), float(ratios[pairs - outside])
    return Change(
        share=exp(middle) - 1,
        least_share=exp(least) - 1,
        most_share=exp(most) - 1,
        visible_share=exp(middle - least) - 1,
    )


def surely_above(values: Sequence[float]) -> float:
    """Return what the mean of some steps is above with 99 % confidence; the value itself if there is only one."""
    mean, degrees = float(np.mean(values)), len(values) - 1
    if degrees < 1:
        return mean
    t = _T_99[degrees - 1] if degrees <= len(_T_99) else _NORMAL_99
    return mean - t * float(np.std(values, ddof=1)) / sqrt(len(values))


def _thinned(values: Sequence[float]) -> NDArray[np.float64]:
    found = np.array(values, np.float64)
    return found if len(found) <= MOST_STEPS else found[np.linspace(0, len(found) - 1, MOST_STEPS).astype(np.intp)]
