"""How much disk a run may use on a host: from the environment, else a share of what is free.

This needs the standard library only, because every process loads it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from rltrace.host.interruption import own_failure
from rltrace.record.announcement import complain_once

VARIABLE = "RLTRACE_MAX_DISK"
"""Environment variable with the budget, such as `20GB`; `none` for no bound."""

UNBOUNDED = "none"

MOST_BYTES = 20_000_000_000
"""The budget if nobody names one, unless a `FREE_SHARE` of the disk is less."""

FREE_SHARE = 10
"""Without a budget a run takes at most one of so many bytes that are free when it begins."""

LEAST_BYTES = 1 << 20
"""A smaller budget holds no process's first records."""

LEAST_DEFAULT_BYTES = 16 << 20
"""The least that nobody has to ask for: on a disk that is nearly full, the disk is the bound."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", re.I)


def parse(text: str) -> int | None:
    """Return the bytes that `20GB`, `1.5 TiB` or `500000000` names; None for `none`, which is no bound.

    Raises:
        ValueError: it names something else, or too little to record anything.
    """
    if text.strip().lower() == UNBOUNDED:
        return None
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size; write 20GB, 500MB, or {UNBOUNDED} for no bound")
    size_bytes = int(float(found[1]) * _UNITS[found[2].lower()])
    if size_bytes < LEAST_BYTES:
        raise ValueError(f"{text!r} is less than {LEAST_BYTES:,} bytes, the least that holds any record; name more")
    return size_bytes


def of_host(recording: Path) -> int | None:
    """Return the budget of this host's part of a Recording: the one that the environment names, else the default."""
    if text := os.environ.get(VARIABLE, "").strip():
        try:
            return parse(text)
        except ValueError as error:
            complain_once(f"{VARIABLE} is ignored: {error}")
    return default(recording)


def default(recording: Path) -> int | None:
    """Return `MOST_BYTES`, or a share of what is free on the disk of a folder if that is less."""
    try:
        status = os.statvfs(recording)
    except own_failure(OSError):
        return MOST_BYTES
    return max(LEAST_DEFAULT_BYTES, min(MOST_BYTES, status.f_bavail * status.f_frsize // FREE_SHARE))


def notice(budget_bytes: int | None) -> str:
    """Return what a user is told when recording begins."""
    return "with no bound on its size" if budget_bytes is None else f"at most {size(budget_bytes)} (--max-disk)"


def size(size_bytes: int) -> str:
    """Return a budget as a person writes it: `20 GB`, `1.3 GB`, `900 MB`."""
    unit, divisor = ("GB", 10**9) if size_bytes >= 10**9 else ("MB", 10**6)
    return f"{size_bytes / divisor:.3g} {unit}"
