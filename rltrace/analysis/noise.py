"""Whether steps are longer than others, or than a limit, by more than the noise of steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, sqrt
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Logarithms = NDArray[np.float64]

FALSE_ALARMS = 0.01
"""How often steps that are alike may be called different."""

_T_995 = (
    63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947,
    2.921, 2.898, 2.878, 2.861, 2.845, 2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750,
)  # fmt: skip
"""Student's t for 99.5 %, one-sided, by degrees of freedom from 1 (NIST/SEMATECH e-Handbook, 1.3.6.7.2): noise is not
normal, and with 99 % more than one alarm in a hundred was false on recorded steps (docs/measurements/gate.md)."""
_NORMAL_995 = 2.576

FEWEST_STEPS = 5
"""Of each run: with 4, all of one are longer than all of the other by chance in 1 of 70 cases."""

MOST_STEPS = 2000
"""Of more steps, so many are taken evenly: all pairs are compared."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """By how much steps are longer than others, as a share of these: 0.1 is ten per cent.

    Two ways look at it, each with half of the false alarms. One compares all pairs of steps, and is not moved by one
    step that is far off; the other compares means, and sees more where no step is.
    """

    share: float
    """The middle one of all ratios between a step of one run and a step of the other, less 1 (Hodges and Lehmann,
    1963): that of a typical step."""
    mean_share: float
    """The ratio of the geometric means, less 1."""
    least_share: float | None
    """Not less than this, with 99 % confidence: the higher one of Wilcoxon's and Welch's bounds. None for fewer than 5
    steps of each."""
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

    def exceeds(self, share: float) -> bool:
        """Whether they are longer by more than a share, and not by chance."""
        return self.is_slower and max(self.share, self.mean_share) > share


class _Bounds(NamedTuple):
    """A logarithm of a ratio, and how far it may be off to both sides."""

    middle: float
    below: float
    above: float


def change(a: Sequence[float], b: Sequence[float]) -> Change | None:
    """Compare steps `b` with steps `a`; None if there are none, or one took no time."""
    if not a or not b or min(*a, *b) <= 0:
        return None
    before, after = np.log(_thinned(a)), np.log(_thinned(b))
    pairs, means = _of_pairs(before, after), _of_means(before, after)
    found = {"share": exp(pairs.middle) - 1, "mean_share": exp(means.middle) - 1}
    if min(len(a), len(b)) < FEWEST_STEPS:
        return Change(**found, least_share=None, most_share=None, visible_share=None)
    return Change(
        **found,
        least_share=exp(max(one.middle - one.below for one in (pairs, means))) - 1,
        most_share=exp(min(one.middle + one.above for one in (pairs, means))) - 1,
        visible_share=exp(min(one.below for one in (pairs, means))) - 1,
    )


def _of_pairs(a: Logarithms, b: Logarithms) -> _Bounds:
    """Return Hodges's and Lehmann's estimate, with the bounds that belong to Wilcoxon's test."""
    ratios = np.sort((b[:, None] - a[None, :]).ravel())
    pairs, middle = len(ratios), float(np.median(ratios))
    outside = int(pairs / 2 - _NORMAL_995 * sqrt(pairs * (len(a) + len(b) + 1) / 12))
    if outside < 1:
        return _Bounds(middle, inf, inf)
    return _Bounds(middle, middle - float(ratios[outside - 1]), float(ratios[pairs - outside]) - middle)


def _of_means(a: Logarithms, b: Logarithms) -> _Bounds:
    """Return the difference of the means, with the bounds that belong to Welch's test."""
    middle = float(b.mean() - a.mean())
    if min(len(a), len(b)) < FEWEST_STEPS:
        return _Bounds(middle, inf, inf)
    parts = [float(of.var(ddof=1)) / len(of) for of in (a, b)]
    squares = sum(part**2 / (len(of) - 1) for part, of in zip(parts, (a, b), strict=True))
    degrees = sum(parts) ** 2 / squares if squares else 1.0
    half = _t(int(degrees)) * sqrt(sum(parts))
    return _Bounds(middle, half, half)


def _t(degrees: int) -> float:
    return _T_995[degrees - 1] if degrees <= len(_T_995) else _NORMAL_995


def surely_above(values: Sequence[float]) -> float:
    """Return what the mean of some steps is above with 99.5 % confidence; the value itself if there is only one."""
    mean, degrees = float(np.mean(values)), len(values) - 1
    if degrees < 1:
        return mean
    return mean - _t(degrees) * float(np.std(values, ddof=1)) / sqrt(len(values))


def _thinned(values: Sequence[float]) -> NDArray[np.float64]:
    found = np.array(values, np.float64)
    return found if len(found) <= MOST_STEPS else found[np.linspace(0, len(found) - 1, MOST_STEPS).astype(np.intp)]
