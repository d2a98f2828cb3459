"""Maps the times of another clock domain to the reference's by offset and drift, each time with an error bound.

A reading is one exchange: the reference sent at `sent_ns`, the other clock was read at `read_ns`, the answer was back
by `received_ns`. The other clock was read somewhere in between, however unequal the two ways were, so half the round
trip bounds the error of taking the middle. Between two readings the shift is interpolated; beyond them it continues
with the drift that was measured over all of them.

A clock may jump: a virtual machine is frozen and goes on, a host sleeps. Between two readings it then went by more than
its rate elsewhere allows. Nobody knows when in between, so the bound there includes the jump, and the drift is measured
on one side of it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rltrace.host import regular_file
from rltrace.host.clock import Domain
from rltrace.read import gate
from rltrace.record.clock_readings import FILE

WANDER = 15e-6
"""How far a clock's rate may stray from its mean while it is watched: PHI of RFC 5905, section 7.3 (NTP)."""

UNMEASURED_DRIFT = 1000e-6
"""Drift of two clocks of which only the offset is known: each is slewed by at most 500 ppm (MAXFREQ, linux/timex.h)."""

MOST_DRIFT = 0.01
"""Readings that imply more drift contradict each other: no two clocks run so far apart."""

_ROUNDING_NS = 2
"""Half a nanosecond each for the middle, its half width, and two interpolations."""


class Reading(NamedTuple):
    """What to add to the other clock's time `at_ns`, and how far off that is at most."""

    at_ns: int
    shift_ns: int
    bound_ns: float

    @classmethod
    def of(cls, sent_ns: int, read_ns: int, received_ns: int) -> Reading:
        """Make a reading from an exchange: `sent_ns` and `received_ns` by the reference, `read_ns` by the other
        clock."""
        return cls(read_ns, (sent_ns + received_ns) // 2 - read_ns, (received_ns - sent_ns) / 2)


class _Gap(NamedTuple):
    """The time between two readings that follow each other."""

    before: Reading
    after: Reading

    @property
    def length_ns(self) -> int:
        return self.after.at_ns - self.before.at_ns

    @property
    def rate(self) -> float:
        """Nanoseconds by which the shift grew per nanosecond."""
        return (self.after.shift_ns - self.before.shift_ns) / self.length_ns

    @property
    def stray(self) -> float:
        """How far `rate` may be from the clock's mean rate if the clock did not jump."""
        return WANDER + (self.before.bound_ns + self.after.bound_ns + _ROUNDING_NS) / self.length_ns


class Alignment:
    """What to add to the times of one clock domain to get the reference's, with a bound on the error."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        """Fit the readings.

        Args:
            readings: At least one, of one pair of clocks, in any order.
        """
        self.readings = _tightest(sorted(readings))
        self._times_ns = [reading.at_ns for reading in self.readings]
        gaps = [_Gap(*pair) for pair in pairwise(self.readings)]
        steady = _steady(gaps)
        first, last = _longest_run(self.readings, steady)
        length_ns = last.at_ns - first.at_ns
        measured = 2 * WANDER + (first.bound_ns + last.bound_ns) / length_ns if length_ns else UNMEASURED_DRIFT
        self.is_drift_measured = measured < UNMEASURED_DRIFT
        """Whether the readings say more about the drift than is known of any two clocks."""
        self.drift_error = min(measured, UNMEASURED_DRIFT)
        self.drift = (last.shift_ns - first.shift_ns) / length_ns if self.is_drift_measured else 0.0
        """Nanoseconds by which the shift grows per nanosecond; 1e-6 is a part per million."""
        self.jumps_ns = [
            0.0 if is_steady else (gap.rate - self.drift) * gap.length_ns
            for gap, is_steady in zip(gaps, steady, strict=True)
        ]
        """For each gap between two readings, by how much the clock jumped in it."""

    def shift_ns(self, time_ns: int) -> int:
        """Return what to add to a time of the domain's clock; the order of two of its times is always kept."""
        before, after = self._around(time_ns)
        if before is None or after is None:
            end = before or after
            assert end is not None
            return end.shift_ns + round((time_ns - end.at_ns) * self.drift)
        part = (time_ns - before.at_ns) / (after.at_ns - before.at_ns)
        return before.shift_ns + round((after.shift_ns - before.shift_ns) * part)

    def undone_ns(self, reference_ns: int) -> int:
        """Return the time of the domain's clock that `shift_ns` maps to this time of the reference, to a rounding."""
        place = bisect.bisect_right(self.readings, reference_ns, key=_reference_ns)
        if 0 < place < len(self.readings):
            before, after = self.readings[place - 1], self.readings[place]
            part = (reference_ns - _reference_ns(before)) / (_reference_ns(after) - _reference_ns(before))
            return before.at_ns + round((after.at_ns - before.at_ns) * part)
        end = self.readings[-1 if place else 0]
        return end.at_ns + round((reference_ns - _reference_ns(end)) / (1 + self.drift))

    def bound_ns(self, time_ns: int) -> float:
        """Return how far off `shift_ns` is at most: half of the nearest round trips, and what the drift or a jump may
        add from there."""
        place = bisect.bisect_right(self._times_ns, time_ns)
        if not 0 < place < len(self.readings):
            end = self.readings[-1 if place else 0]
            return end.bound_ns + abs(time_ns - end.at_ns) * self.drift_error + _ROUNDING_NS
        before, after, jump_ns = self.readings[place - 1], self.readings[place], self.jumps_ns[place - 1]
        if not jump_ns:
            return _between(before, after, time_ns) + _ROUNDING_NS
        farther_ns = max(time_ns - before.at_ns, after.at_ns - time_ns)
        return self._across(_Gap(before, after), jump_ns, farther_ns)

    def largest_bound_ns(self, start_ns: int, end_ns: int) -> float:
        """Return the largest `bound_ns` of the times from `start_ns` to `end_ns`, or a little more."""
        ends = max(self.bound_ns(start_ns), self.bound_ns(end_ns))
        inside = (
            self._across(gap, jump_ns, gap.length_ns)
            if jump_ns
            else max(gap.before.bound_ns, gap.after.bound_ns) + WANDER * gap.length_ns / 2 + _ROUNDING_NS
            for gap, jump_ns in zip(map(_Gap._make, pairwise(self.readings)), self.jumps_ns, strict=True)
            if gap.before.at_ns < end_ns and gap.after.at_ns > start_ns
        )
        return max(ends, *inside, 0.0)

    def _across(self, gap: _Gap, jump_ns: float, farther_ns: int) -> float:
        """Return the bound in a gap with a jump, this far from the farther of its readings.

        The true shift is one reading's, continued with the drift, up to the jump, and the other's from there on. The
        interpolated one lies between the two.
        """
        ends_ns = max(gap.before.bound_ns, gap.after.bound_ns)
        return ends_ns + abs(jump_ns) * farther_ns / gap.length_ns + self.drift_error * farther_ns + _ROUNDING_NS

    def _around(self, time_ns: int) -> tuple[Reading | None, Reading | None]:
        place = bisect.bisect_right(self._times_ns, time_ns)
        return (
            self.readings[place - 1] if place else None,
            self.readings[place] if place < len(self.readings) else None,
        )


def _reference_ns(reading: Reading) -> int:
    return reading.at_ns + reading.shift_ns


def _steady(gaps: Sequence[_Gap]) -> list[bool]:
    """Return in which gaps the clock can have run at one mean rate: the one that most of the time agrees on.

    A rate that no two clocks have is believed only if every gap agrees on it.
    """
    ranges = [(gap.rate - gap.stray, gap.rate + gap.stray, gap.length_ns) for gap in gaps]
    rate = _most_agreed(ranges)
    found = [least <= rate <= most for least, most, _ in ranges]
    if abs(rate) <= UNMEASURED_DRIFT or all(found):
        return found
    possible = [
        (max(least, -UNMEASURED_DRIFT), min(most, UNMEASURED_DRIFT), length_ns)
        for least, most, length_ns in ranges
        if least <= UNMEASURED_DRIFT and most >= -UNMEASURED_DRIFT
    ]
    rate = _most_agreed(possible) if possible else rate
    return [least <= rate <= most for least, most, _ in ranges]


def _most_agreed(ranges: Iterable[tuple[float, float, int]]) -> float:
    """Return a value inside of the ranges that weigh most together; of several, the one nearest to zero.

    Args:
        ranges: Least, most and weight of each.
    """
    edges = sorted(edge for least, most, weight in ranges for edge in ((least, -1, weight), (most, 1, weight)))
    weight_there, best = 0, (0, 0.0, 0.0)
    for (value, is_end, weight), (next_value, *_) in pairwise(edges):
        weight_there -= is_end * weight
        near_zero = min(max(value, 0.0), next_value)
        best = max(best, (weight_there, -abs(near_zero), near_zero))
    return best[2]


def _longest_run(readings: Sequence[Reading], steady: Sequence[bool]) -> tuple[Reading, Reading]:
    """Return the first and the last reading of the longest time without a jump."""
    first, best = readings[0], (readings[0], readings[0])
    for after, is_steady in zip(readings[1:], steady, strict=True):
        first = first if is_steady else after
        if is_steady and after.at_ns - first.at_ns > best[1].at_ns - best[0].at_ns:
            best = first, after
    return best


def _between(before: Reading, after: Reading, time_ns: int) -> float:
    """Return the bound of a shift interpolated between two readings.

    Both ends are off by their own bounds; besides, the rates before and after `time_ns` differ by 2 `WANDER` at most.
    """
    gone_ns, left_ns = time_ns - before.at_ns, after.at_ns - time_ns
    length_ns = after.at_ns - before.at_ns
    ends = (before.bound_ns * left_ns + after.bound_ns * gone_ns) / length_ns
    return ends + 2 * WANDER * gone_ns * left_ns / length_ns


def _tightest(readings: Sequence[Reading]) -> list[Reading]:
    """Drop the readings that the readings around them bound better than they do themselves: a slow exchange says
    little.

    Two readings that are nearer to each other than their bounds say nothing about the drift between them. The better
    one stays, which keeps the order of the clock's times.
    """
    kept: list[Reading] = []
    for reading in readings:
        if kept and reading.at_ns - kept[-1].at_ns <= 2 * (kept[-1].bound_ns + reading.bound_ns):
            if kept[-1].bound_ns <= reading.bound_ns:
                continue
            kept.pop()
        while len(kept) > 1 and _between(kept[-2], reading, kept[-1].at_ns) <= kept[-1].bound_ns:
            kept.pop()
        kept.append(reading)
    return kept


def read(recording: Path, reference: Domain) -> dict[Domain, Alignment]:
    """Return the alignment of every domain that was measured against the reference.

    Args:
        recording: Folder of the Recording.
        reference: Exchanges with another reference are ignored.
    """
    return fitted(read_lines(recording).values, reference)


def fitted(lines: Iterable[dict[str, Any]], reference: Domain) -> dict[Domain, Alignment]:
    """Return the alignment of every domain that was measured against the reference.

    Args:
        lines: Of readings.
        reference: Exchanges with another reference are ignored.
    """
    readings: dict[Domain, list[Reading]] = {}
    for said in lines:
        if tuple(said["reference"]) == reference:
            times_ns = (said["sent_ns"], said["read_ns"], said["received_ns"])
            readings.setdefault(tuple(said["domain"]), []).append(Reading.of(*times_ns))
    fits = {domain: Alignment(found) for domain, found in readings.items()}
    return {domain: fit for domain, fit in fits.items() if abs(fit.drift) <= MOST_DRIFT}


def read_lines(recording: Path) -> gate.Fitting:
    """Return every reading as it was written; lines that cannot be one are counted."""
    try:
        content = regular_file.read(recording / FILE)
    except OSError:
        content = b""
    return gate.lines(content).fitting(_exchange)


def _exchange(line: Any) -> dict[str, Any]:
    said: dict[str, Any] = gate.READING(line)
    if said["sent_ns"] > said["received_ns"] or len(said["reference"]) != 2 or len(said["domain"]) != 2:
        raise ValueError
    return said
