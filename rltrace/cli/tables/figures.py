"""How figures are written."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

BAR = 10
FEW_PIDS = 3
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(share: float, width: int = BAR) -> str:
    """Draw a bar that has `width` columns for 1."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def seconds(length: float) -> str:
    """Write seconds to the millisecond; less than one in microseconds, with that unit."""
    return short(length) if length > 0 and _is_in_microseconds(length) else _to_the_millisecond(length)


def between_seconds(least: float, most: float) -> str:
    """Write a range of seconds in one unit."""
    if most > 0 and _is_in_microseconds(most):
        return f"{between(_microseconds(least), _microseconds(most))} µs"
    return between(_to_the_millisecond(least), _to_the_millisecond(most))


def with_unit(written: str) -> str:
    """Write seconds, or a range, with the unit, if no heading says it."""
    return written if written.endswith("s") else f"{written} s"


def with_units(written: Sequence[str]) -> str:
    """Write several of those in a row, with the unit once at the end if all of them are in seconds."""
    one_unit = not any(one.endswith("s") for one in written)
    return with_unit(", ".join(written)) if one_unit else ", ".join(map(with_unit, written))


def _is_in_microseconds(length: float) -> bool:
    """Return whether rounding would leave less than a millisecond."""
    return length * 1e6 < 999.5


def _microseconds(length: float) -> str:
    return f"{length * 1e6:.0f}"


def _to_the_millisecond(length: float) -> str:
    return f"{length:,.1f}" if length >= 100 else f"{length:.3f}"


def change(length: float) -> str:
    """Write a change of seconds with its sign; nothing if rounding to the millisecond leaves nothing."""
    written = _to_the_millisecond(abs(length))
    return written if not float(written.replace(",", "")) else f"{'+' if length > 0 else '-'}{written}"


def short(length_seconds: float) -> str:
    """Write a short time in milliseconds, or in microseconds if it is less than one."""
    if _is_in_microseconds(length_seconds):
        return f"{_microseconds(length_seconds)} µs"
    return f"{length_seconds * 1e3:.1f} ms"


def number(value: float | None) -> str:
    """Write four digits; nothing if there is no number."""
    if value is None:
        return ""
    if not isfinite(value):
        return str(value)
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def size(size_bytes: float) -> str:
    """Write a size in units of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} GiB"


def megabytes(size_bytes: float) -> str:
    """Write 10^6 bytes, to read beside GB/s; nothing for None."""
    return f"{size_bytes / 1e6:,.2f}" if size_bytes else ""


def rate(size_bytes: float, length_seconds: float) -> str:
    """Write 10^9 bytes per second; nothing if either is unknown."""
    return gigabytes_per_second(size_bytes / 1e9 / length_seconds) if size_bytes and length_seconds > 0 else ""


def gigabytes_per_second(value: float) -> str:
    """Write three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def count(many: int, what: str) -> str:
    """Write a number and its noun."""
    return f"{many:,} {what if many == 1 else _plural(what)}"


def _plural(what: str) -> str:
    if what.endswith("ry"):
        return f"{what[:-1]}ies"
    return what + ("es" if what.endswith("s") else "s")


def pids(found: Sequence[int]) -> str:
    """Write the first few process ids: pid 7, 8, 9 and 2 more."""
    more = f" and {len(found) - FEW_PIDS} more" if len(found) > FEW_PIDS else ""
    return f"pid {', '.join(map(str, found[:FEW_PIDS]))}{more}"


def between(least: str, most: str) -> str:
    """Write a range of two figures; one figure if both are written alike."""
    return least if least == most else f"{least}-{most}"


def spread(lengths: Sequence[float]) -> str:
    """Write a range from the least to the most of some seconds."""
    return between_seconds(min(lengths), max(lengths))


def ranges(numbers: Sequence[int]) -> str:
    """Write numbers in order, with consecutive ones as a range: 1-3, 5."""
    parts: list[list[int]] = []
    for one in numbers:
        if parts and one == parts[-1][-1] + 1:
            parts[-1].append(one)
        else:
            parts.append([one])
    return ", ".join(between(str(part[0]), str(part[-1])) for part in parts)


def ranks(lanes: Sequence[str]) -> str:
    """Write lanes by name, and several ranks by their numbers: ranks 0-3."""
    numbers = [int(lane.removeprefix("rank ")) for lane in lanes if lane.startswith("rank ")]
    many = len(numbers) == len(lanes) > 1
    return f"ranks {ranges(sorted(numbers))}" if many else ", ".join(lanes)
