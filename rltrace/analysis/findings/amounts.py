"""How a finding writes seconds and bytes, in the unit in which they have digits that mean something, and counts."""

from __future__ import annotations


def as_text(seconds: float) -> str:
    """Write a length in seconds, or in milliseconds or microseconds where seconds would round it away."""
    return between_as_text(seconds, seconds)


def between_as_text(least: float, most: float) -> str:
    """Write a range of lengths in the unit of the longer one; one length if both are written alike."""
    if most >= 0.0995 or not most:
        unit, scale, digits = "s", 1.0, 3
    elif most >= 0.000995:
        unit, scale, digits = "ms", 1e3, 2
    else:
        unit, scale, digits = "µs", 1e6, 1
    ends = [_rounded(length * scale, digits) for length in (least, most)]
    return f"{'-'.join(dict.fromkeys(ends))} {unit}"


def _rounded(value: float, digits: int) -> str:
    """Write a number with so many digits, and all those before the point."""
    before = next((len(str(whole)) for whole in (100, 10) if value >= whole * (1 - 0.5 / 10**digits)), 1)
    return f"{value:,.{max(digits - before, 0) if value else 0}f}"


def longer_by(share: float) -> str:
    """Write by what share something is longer, or shorter."""
    return f"{abs(share):.1%} {'longer' if share > 0 else 'shorter'}"


def counted(many: int, noun: str) -> str:
    """Write a number and its noun, whose plural ends with s."""
    return f"{many:,} {noun}{'' if many == 1 else 's'}"


def bytes_as_text(size_bytes: float) -> str:
    """Write a size in powers of 1,024, as everywhere; only rates of links are in GB/s, as their makers give them."""
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    unit, scale = next(((unit, scale) for unit, scale in units if abs(size_bytes) >= scale), ("bytes", 1))
    return f"{size_bytes / scale:,.{1 if unit == 'GiB' else 0}f} {unit}"
