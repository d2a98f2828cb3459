"""What a finding says, and how its price gets an interval and a confidence."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Literal

import msgspec

Confidence = Literal["high", "medium", "low"]
_CONFIDENCES: tuple[Confidence, ...] = ("low", "medium", "high")
Basis = Literal["measured", "modelled"]
"""Whether spans have the seconds themselves, or the seconds follow from something else that was measured."""
When = Literal["step", "some_steps", "first_step", "startup"]

_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t for 95 %, two-sided, by degrees of freedom from 1 (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""
_NORMAL_95 = 1.960
"""The same for many degrees of freedom (the last row of that table)."""


class UnjudgeableError(Exception):
    """A Recording lacks what a finding needs; the message says what, and how to record it if that is possible."""


class Interval(msgspec.Struct, frozen=True):
    """The 95 % interval of a mean over steps, by Student's t."""

    least: float
    """Lower end, never below 0."""
    most: float
    """Upper end."""


class Setting(msgspec.Struct, frozen=True):
    """What to change."""

    program: str
    """Whose setting it is: verl, vLLM, TRL, PyTorch, your program."""
    change: str
    """Its name with the new value, or what to do."""
    since: str | None = None
    """The first release of the program that has it; None if all have."""
    until: str | None = None
    """The first release that no longer has it; None if all have."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Where a finding shows best in the timeline."""

    step: int | None
    """Number of the step; None for the start-up."""
    rank: int | None
    """The rank to look at; None if it is no rank's."""
    start_seconds: float
    """When it begins, counted from the beginning of the Recording."""
    end_seconds: float
    """When it ends."""
    command: str
    """The command that shows it."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a finding rests on."""

    facts: list[str]
    """In words, each with its figures."""
    figures: dict[str, float]
    """The same figures by name, with the unit at the end of the name."""
    ranks: list[int]
    """Ranks that it is about; empty if it is about all or none."""
    phases: list[str]
    """Phases that it is about."""
    steps: list[int]
    """Steps that it was seen in."""
    moment: Moment | None
    """Where it shows best in the timeline."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that makes a step slow or fills a device, with what it costs and what to change."""

    id: str
    """Name of the finding, as in the table of findings."""
    title: str
    """The finding in one sentence."""
    when: str
    """`step` for what every step pays; `some_steps`, `first_step` and `startup` for what the run pays once."""
    seconds_per_step: float | None
    """What it costs in a steady step, a mean over them; None if it costs no seconds that can be told, or comes once."""
    interval_seconds: Interval | None
    """The 95 % interval of these seconds over the steps; None for fewer than two steps."""
    once_seconds: float | None
    """What it costs the run once; None if every step pays."""
    bytes: int | None
    """Bytes that it is about: moved too often in a step, or held for nothing."""
    share: float | None
    """`seconds_per_step` as a share of the steady step, 0 to 1."""
    bound_seconds: float | None
    """The most that the change could gain: a step, or once if the run pays once."""
    less_because: str
    """Why the gain may be less."""
    confidence: str
    """`high`: spans have these seconds, and the interval is above 0. `medium`: one of the two. `low`: neither."""
    evidence: Evidence
    """What it rests on."""
    settings: list[Setting]
    """What to change; empty if no setting is known."""
    about: list[str] = []
    """What the price is the price of: phases or owners; empty if it is of all there is. Findings of two runs with the
    same id are compared only if it is the same."""


class Unjudged(msgspec.Struct, frozen=True):
    """A finding that this Recording can neither confirm nor rule out."""

    id: str
    """Name of the finding."""
    reason: str
    """What is missing."""


def interval_of(per_step: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of the mean of some steps; None for fewer than two."""
    degrees = len(per_step) - 1
    if degrees < 1:
        return None
    t = _T_95[degrees - 1] if degrees <= len(_T_95) else _NORMAL_95
    mean, half = fmean(per_step), t * stdev(per_step) / sqrt(len(per_step))
    return Interval(max(mean - half, 0.0), mean + half)


def confidence_of(basis: Basis, interval: Interval | None) -> Confidence:
    """Return how far a price can be trusted, by where it comes from and how it varies over the steps."""
    good = (basis == "measured") + (interval is not None and interval.least > 0)
    return _CONFIDENCES[good]
