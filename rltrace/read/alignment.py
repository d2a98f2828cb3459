"""Maps the times of another clock domain to the reference's by offset and drift, each time with an error bound.

A reading is one exchange: the reference sent at `sent_ns`, the other clock was read at `read_ns`, the answer was back
by `received_ns`. The other clock was read somewhere in between, however unequal the two ways were, so half the round
trip bounds the error of taking the middle. Between two readings the shift is interpolated; beyond them it continues
with the drift that was measured over all of them.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rltrace.host import regular_file
from rltrace.read import gate
from rltrace.record import checksum

FILE = "clocks.jsonl"
"""File in a Recording with one line per reading."""

Domain = tuple[str, str]
"""Boot id and time namespace."""

WANDER = 15e-6
"""How far a clock's rate may stray from its mean while it is watched: PHI of RFC 5905, section 7.3 (NTP)."""

UNMEASURED_DRIFT = 1000e-6
"""Drift of two clocks of which only the offset is known: each is slewed by at most 500 ppm (MAXFREQ, linux/timex.h)."""

MOST_DRIFT = 0.01
"""Readings that imply more drift contradict each other: no two clocks run so far apart."""

_ROUNDING_NS = 2
"""Half a nanosecond each for the middle, its half width, and two interpolations."""

_HALVINGS = 20
"""Readings lie twice their bounds apart, so a shift changes by at most half a nanosecond per nanosecond: each step
halves an error."""


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


class Alignment:
    """What to add to the times of one clock domain to get the reference's, with a bound on the error."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        """Fit the readings.

        Args:
            readings: At least one, of one pair of clocks, in any order.
        """
        self.readings = _tightest(sorted(readings))
        self._times_ns = [reading.at_ns for reading in self.readings]
        first, last = self.readings[0], self.readings[-1]
        length_ns = last.at_ns - first.at_ns
        measured = 2 * WANDER + (first.bound_ns + last.bound_ns) / length_ns if length_ns else UNMEASURED_DRIFT
        self.is_drift_measured = measured < UNMEASURED_DRIFT
        """Whether the readings say more about the drift than is known of any two clocks."""
        self.drift_error = min(measured, UNMEASURED_DRIFT)
        self.drift = (last.shift_ns - first.shift_ns) / length_ns if self.is_drift_measured else 0.0
        """Nanoseconds by which the shift grows per nanosecond; 1e-6 is a part per million."""

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
        """Return the time of the domain's clock that `shift_ns` maps to this time of the reference, to well below a
        bound."""
        near_ns = reference_ns - self.readings[-1].shift_ns
        for _ in range(_HALVINGS):
            near_ns = reference_ns - self.shift_ns(near_ns)
        return near_ns

    def bound_ns(self, time_ns: int) -> float:
        """Return how far off `shift_ns` is at most: half of the nearest round trips, and what the drift may add from
        there."""
        before, after = self._around(time_ns)
        if before is None or after is None:
            end = before or after
            assert end is not None
            return end.bound_ns + abs(time_ns - end.at_ns) * self.drift_error + _ROUNDING_NS
        return _between(before, after, time_ns) + _ROUNDING_NS

    def largest_bound_ns(self, start_ns: int, end_ns: int) -> float:
        """Return the largest `bound_ns` of the times from `start_ns` to `end_ns`, or a little more."""
        ends = max(self.bound_ns(start_ns), self.bound_ns(end_ns))
        inside = (
            max(before.bound_ns, after.bound_ns) + WANDER * (after.at_ns - before.at_ns) / 2 + _ROUNDING_NS
            for before, after in pairwise(self.readings)
            if before.at_ns < end_ns and after.at_ns > start_ns
        )
        return max(ends, *inside, 0.0)

    def _around(self, time_ns: int) -> tuple[Reading | None, Reading | None]:
        place = bisect.bisect_right(self._times_ns, time_ns)
        return (
            self.readings[place - 1] if place else None,
            self.readings[place] if place < len(self.readings) else None,
        )


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


def line(reference: Domain, domain: Domain, exchange: tuple[int, int, int], **more: Any) -> str:
    """Return the line that is appended to `FILE` about the shortest exchange of a round, with its newline.

    Args:
        reference: The clock domain that sent and received.
        domain: The clock domain that was read in between.
        exchange: sent_ns, read_ns, received_ns.
        **more: Useful to people: the host, the number of exchanges.
    """
    times = dict(zip(("sent_ns", "read_ns", "received_ns"), exchange, strict=True))
    return checksum.signed(json.dumps({"reference": reference, "domain": domain, **times, **more})) + "\n"


def read(recording: Path, reference: Domain) -> dict[Domain, Alignment]:
    """Return the alignment of every domain that was measured against the reference.

    Args:
        recording: Folder of the Recording.
        reference: Exchanges with another reference are ignored.
    """
    readings: dict[Domain, list[Reading]] = {}
    for said in read_lines(recording).values:
        if tuple(said["reference"]) == reference:
            times_ns = (said["sent_ns"], said["read_ns"], said["received_ns"])
            readings.setdefault(tuple(said["domain"]), []).append(Reading.of(*times_ns))
    fitted = {domain: Alignment(found) for domain, found in readings.items()}
    return {domain: fit for domain, fit in fitted.items() if abs(fit.drift) <= MOST_DRIFT}


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
