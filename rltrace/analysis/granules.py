"""Whole numbers in as few bytes as they take, to be kept: bytes of memory come in granules, and few of them differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def in_granules(values: NDArray[np.int64]) -> tuple[int, int, int, bytes]:
    """Return whole numbers as the least of them, and what each has more than that.

    Args:
        values: Whole numbers, (numbers,).

    Returns:
        The least number; by how many bits the others are shifted; how many bytes each takes, 0 if all are the same; and
        these bytes.
    """
    least, most = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if least == most:
        return least, 0, 0, b""
    more = values.astype(np.uint64) - np.int64(least).astype(np.uint64)  # modulo 2**64: no difference is too large
    bits = int(np.bitwise_or.reduce(more))
    shift = (bits & -bits).bit_length() - 1
    size = next(size for size in (1, 2, 4, 8) if bits >> shift < 1 << 8 * size)
    return least, shift, size, (more >> np.uint64(shift)).astype(f"<u{size}").tobytes()


def from_granules(kept: Sequence[Any], many: int) -> NDArray[np.int64]:
    """Return so many whole numbers that `in_granules` gave.

    Raises:
        ValueError: there are not so many of them.
    """
    least, shift, size, content = kept
    values = np.full(many, least, np.int64)
    if size:
        more = np.frombuffer(content, f"<u{size}").astype(np.uint64) << np.uint64(shift)
        values += more.view(np.int64)
    return values
