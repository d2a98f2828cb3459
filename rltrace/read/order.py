"""What the order of a segment's records says of their times, where no checksum does.

A thread appends its records as they happen. So what begins or ends a span, and what is an arrow, is written at the time
that it bears, and later records bear later times. A sample and a span that was over may be older than that, and never
younger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rltrace.events import AUTOMATIC
from rltrace.read import gate

MOST_SILENCE_NS = 3600 * 10**9
"""How long a process that was killed while nobody watched may have been silent before its last record; a longer gap is
damage."""

MOST_BEHIND_NS = 10**9
"""How much younger than a record those in front of it may be: a signal handler that records may come between the
reading of a time and the writing of its record."""


def unmarked(record: list[Any]) -> list[Any]:
    """Return the record of a span as it is without the mark that a hook made it; any other record itself."""
    return record[1:] if len(record) > 5 and record[0] == AUTOMATIC else record


TIMES = {(int, 3): slice(0), (int, 4): slice(2), (str, 4): slice(1, 2), (str, 5): slice(2, 3), (str, 6): slice(2, 4)}
"""Where a record without its mark has its times, by the type of its first element and its length."""


class Stamp(NamedTuple):
    """The last time that a record bears."""

    at_ns: int
    is_of_writing: bool
    """Whether the record was written at that time, and not at some later one."""


def stamp_of(record: list[Any]) -> Stamp | None:
    """Return the time of a record; None if it bears none, or is damaged."""
    plain = unmarked(record)
    kind = type(plain[0]), len(plain)
    is_typed = kind[0] is int and plain[0] < 0 and len(plain) >= 5
    where = slice(-3, -2) if is_typed else TIMES.get(kind, slice(0))
    times_ns = plain[where][-1:]
    if not times_ns or times_ns[0].__class__ is not int:
        return None
    return Stamp(times_ns[0], is_typed or kind in ((int, 4), (str, 5)))


def in_order(found: Sequence[list[Any]]) -> Iterator[list[Any]]:
    """Yield the records whose times agree with those around them.

    One that is younger than both that were written behind it is damaged; and so is one that was written at its time and
    is older than both in front of it. Of two records nobody can tell which is wrong.
    """
    stamps = [stamp_of(record) for record in found]
    limits_ns = _youngest_behind(stamps)
    earlier: tuple[int, ...] = ()
    for record, stamp, limit_ns in zip(found, stamps, limits_ns, strict=True):
        if stamp is not None:
            if stamp.at_ns > limit_ns + MOST_BEHIND_NS:
                continue
            if stamp.is_of_writing:
                if len(earlier) == 2 and stamp.at_ns < min(earlier) - MOST_BEHIND_NS:
                    continue
                earlier = (*earlier[-1:], stamp.at_ns)
        yield record


def _youngest_behind(stamps: Sequence[Stamp | None]) -> list[int]:
    """Return for each record the younger of the two that are written behind it at their time; without two, no limit."""
    limits_ns = []
    behind: tuple[int, ...] = ()
    for stamp in reversed(stamps):
        limits_ns.append(max(behind) if len(behind) == 2 else gate.MOST_NS)
        if stamp is not None and stamp.is_of_writing:
            behind = (*behind[-1:], stamp.at_ns)
    return limits_ns[::-1]


def last_ns(found: Iterable[list[Any]], otherwise: int) -> int:
    """Return the latest time in a segment for which nobody knows when its process died.

    Records are in order, so one that lies after both of those that follow it is damaged. The last one may be the end of
    a span that took long, with nothing recorded in it. Finished spans were written some time after they ended.
    """
    times_ns: list[int] = []
    finished_ns: list[int] = []
    for record in map(unmarked, found):
        where = TIMES.get((type(record[0]), len(record)))
        for at_ns in record[where][-1:] if where else ():
            if at_ns.__class__ is int:
                (finished_ns if len(record) == 6 else times_ns).append(at_ns)
    if not times_ns:
        return otherwise
    most_ns = sorted(times_ns[-3:])[len(times_ns[-3:]) // 2] + MOST_SILENCE_NS
    behind_ns = [max(pair) + gate.SLACK_NS for pair in pairwise(times_ns[1:])] + 2 * [most_ns]
    sound_ns = [at_ns for at_ns, limit_ns in zip(times_ns, behind_ns, strict=False) if at_ns <= limit_ns]
    return max([*sound_ns, *(end_ns for end_ns in finished_ns if end_ns <= most_ns)], default=otherwise)
