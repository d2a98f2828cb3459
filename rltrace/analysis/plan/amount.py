"""A number of bytes that was computed or measured before, and how far it may be off."""

from __future__ import annotations

from typing import NamedTuple

MEBIBYTE = 1 << 20


class Amount(NamedTuple):
    """Bytes, how far they may be off, and where they come from."""

    bytes: int
    uncertainty_bytes: int
    source: str


def mebibytes(value: float, uncertainty: float, source: str) -> Amount:
    """Return an amount from figures in MiB."""
    return Amount(int(value * MEBIBYTE), int(uncertainty * MEBIBYTE), source)
