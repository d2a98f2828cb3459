"""How the report writes seconds, sizes and shares."""

from __future__ import annotations

from rltrace.analysis.findings.amounts import as_text, between_as_text, bytes_as_text, longer_by

__all__ = ["as_text", "between_as_text", "bytes_as_text", "count", "gibibytes", "longer_by", "percentage", "rate"]

GIB, MIB = 1 << 30, 1 << 20


def gibibytes(size_bytes: float) -> str:
    """Write a size of memory in units of 1,024, as cards are."""
    if abs(size_bytes) >= GIB:
        return f"{size_bytes / GIB:,.1f} GiB"
    return f"{size_bytes / MIB:,.0f} MiB" if abs(size_bytes) >= 10 * MIB else f"{size_bytes / MIB:,.1f} MiB"


def percentage(share: float) -> str:
    """Write a share."""
    return f"{share:.0%}" if share >= 0.0995 or not share else f"{share:.1%}"


def rate(gigabytes_per_second: float | None) -> str:
    """Write a rate; nothing if it is unknown."""
    if gigabytes_per_second is None:
        return ""
    return f"{gigabytes_per_second:,.0f} GB/s" if gigabytes_per_second >= 100 else f"{gigabytes_per_second:.3g} GB/s"


def count(many: int, what: str) -> str:
    """Write a number and its noun."""
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{many:,} {what if many == 1 else plural}"
