"""What was removed from a process's segments to keep to a disk budget: totals by name, in `removed.jsonl`.

A line says what went from one segment, and how the file is without it. It is written before the file is replaced: so
the last line about a segment holds only if the file is as it says, or is gone. Lines without a segment, which are sums
of others, always hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rltrace.host import regular_file
from rltrace.host.interruption import own_failure
from rltrace.limits import LIMITS, Limits
from rltrace.read import gate, packed
from rltrace.record import checksum

FILE = "removed.jsonl"


class Group(NamedTuple):
    """Of what spans there is one total."""

    first_step: int | None
    """None before the first step, and in a run without steps."""
    last_step: int | None
    name: str
    method: str | None
    """The method that a `ray.call` called."""
    is_automatic: bool
    error: str | None
    """The exception that ended them."""


class Total(NamedTuple):
    """How many spans, for how long together, and how long the longest of them was."""

    many: int
    total_ns: int
    longest_ns: int

    def __add__(self, other: Any) -> Total:
        return Total(self.many + other.many, self.total_ns + other.total_ns, max(self.longest_ns, other.longest_ns))


Totals = dict[Group, Total]


class Removed(NamedTuple):
    """What was removed from a process."""

    totals: Totals
    samples: int
    flows: int
    segments: dict[str, list[checksum.Sum]]
    """How each segment is that lacks something, by its name; the last form is the newest."""
    damaged_lines: int
    left: Totals
    """Those of the totals whose spans are still on the process's host, from where they were not collected."""


NOTHING = Removed({}, 0, 0, {}, 0, {})


def read(folder: Path, limits: Limits = LIMITS) -> Removed:
    """Return what was removed from the process of a folder."""
    try:
        content = regular_file.read(folder / FILE, limits)
    except own_failure(OSError):
        content = b""
    places = packed.Store(folder, limits).look()
    if not content and not any(place.lacks for place in places.values()):
        return NOTHING
    found = gate.lines(content).fitting(gate.REMOVED)
    counting = holding(folder, found.values, {name: place.sum.size_bytes for name, place in places.items()})
    lacking = {name: place for name, place in places.items() if place.lacks and not (folder / name).exists()}
    counting += [place.lacks for place in lacking.values()]
    totals: Totals = {}
    segments: dict[str, list[checksum.Sum]] = {}
    for line in found.values:
        if "segment" in line:
            segments.setdefault(line["segment"], []).append(checksum.Sum(line["bytes"], line["crc32"]))
    for name, place in lacking.items():
        segments.setdefault(name, []).append(place.sum)
    for of_segment in counting:
        add(totals, totals_of(of_segment))
    samples, flows = (sum(line[what] for line in counting) for what in ("samples", "flows"))
    left = merged(totals_of(place.lacks) for place in lacking.values())
    return Removed(totals, samples, flows, segments, found.damaged, left)


def holding(
    folder: Path, lines: Sequence[Mapping[str, Any]], sizes: Mapping[str, int] = MappingProxyType({})
) -> list[Mapping[str, Any]]:
    """Return the lines that hold: all but the last one about a segment that is not as it says.

    Args:
        folder: The process's.
        lines: In the order in which they were written.
        sizes: Bytes of each segment that is columns now.
    """
    last = {line["segment"]: place for place, line in enumerate(lines) if "segment" in line}
    return [
        line
        for place, line in enumerate(lines)
        if last.get(line.get("segment")) != place or _holds(folder, line, sizes)
    ]


def _holds(folder: Path, line: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
    """Return whether a segment is as a line says: it lacks what the line counts."""
    try:
        return bool((folder / line["segment"]).stat().st_size == line["bytes"])
    except own_failure(FileNotFoundError):
        return bool(sizes.get(line["segment"], line["bytes"]) == line["bytes"])
    except own_failure(OSError):
        return False


def totals_of(line: Mapping[str, Any]) -> Totals:
    """Return the totals that a line has."""
    return {Group(*row[:6]): Total(*row[6:]) for row in line["spans"]}


def rows_of(totals: Totals) -> list[list[Any]]:
    """Return totals as a line has them."""
    return [[*group, *total] for group, total in totals.items()]


def add(totals: Totals, more: Totals) -> None:
    """Add totals to others."""
    for group, total in more.items():
        known = totals.get(group)
        totals[group] = total if known is None else known + total


def merged(parts: Iterable[Totals]) -> Totals:
    """Return the sum of totals."""
    whole: Totals = {}
    for part in parts:
        add(whole, part)
    return whole
