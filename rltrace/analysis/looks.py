"""What a process read when it looked at its memory: the arguments of its `memory.edge` spans."""

from __future__ import annotations

from math import nan
from typing import Any

from rltrace.analysis.seen.process import Seen
from rltrace.events import Span

DRIVER_RESERVED = "driver.reserved"

CONSISTENT_NS = 5_000_000
"""Samples of one moment lie at most this far apart."""

GRANULE_BYTES = 2 << 20
"""The driver gives memory out in multiples of this."""


def looks(seen: Seen) -> list[Span]:
    """Return the times when a process measured what it owns, in the order in which they ended."""
    return sorted((look for look in seen.looks if look.end_ns is not None), key=end_ns_of)


def end_ns_of(span: Span) -> int:
    """Return when a span ended; it must have ended."""
    assert span.end_ns is not None
    return span.end_ns


def totals_of(look: Span) -> dict[str, float]:
    """Return the totals that were read in a look; empty if none was."""
    return by_name(look, "totals")


def is_of_gpu(look: Span) -> bool:
    """Return whether the totals are a GPU's driver's."""
    return DRIVER_RESERVED in totals_of(look)


def used_bytes(look: Span) -> float:
    """Return the bytes in use by a GPU's driver; NaN if nobody asked, or for a host, whose total says little."""
    return float(totals_of(look).get("used", "nan"))


def of_process(look: Span, name: str, pid: str) -> float:
    """Return what an argument says about a process; NaN if it says nothing."""
    return float(by_name(look, name).get(pid, nan))


def by_name(look: Span, name: str) -> dict[str, Any]:
    """Return an argument that is a dictionary; an empty one if it is missing or something else."""
    values = look.args.get(name)
    return values if isinstance(values, dict) else {}
