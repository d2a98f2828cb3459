"""Checksums of tensors in parts: each rank sums up the elements it has, and the sums add up to the whole tensor's.

The checksum of words w_0 ... w_n is the sum of w_i * (mix(i) | 1) modulo 2^64, each word (16 or 32 bits) taken as a
signed integer and `mix` a bijection of 32-bit integers that scatters positions. It needs no order, so that a GPU
computes it at the speed of its memory. It detects every single changed word, and words or rows that changed places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

POSITIONS = np.arange(1 << 15, dtype=np.uint32)
"""Of the words that are summed up at a time in host memory: so many that they stay in a processor's cache."""


class Piece(NamedTuple):
    """Consecutive words of a parameter."""

    slot: int
    """The slot that its sum is added to."""
    start: int
    """Position of its first word in the whole parameter."""
    words: Tensor
    """The words: flat and contiguous, int16 or int32."""


class Summands(Protocol):
    """Pieces that are ready to be added, once or repeatedly; they are read when they are added."""

    def add_to(self, values: Tensor) -> None:
        """Add each piece's weighted sum to its slot; on a GPU the work is only queued."""


def prepare(pieces: Sequence[Piece], device: torch.device) -> Summands:
    """Prepare the pieces, which must stay where they are, to be added."""
    if device.type == "cpu":
        return HostSummands(list(pieces))
    from rltrace_reference import kernels  # needs Triton

    return kernels.Summands(pieces)


class HostSummands:
    """Pieces in host memory."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces

    def add_to(self, values: Tensor) -> None:
        """Add them one after another."""
        for piece in self.pieces:
            values[piece.slot] += weighted_sum(piece.words, piece.start)


def of_tensors(tensors: Sequence[Tensor]) -> list[int]:
    """Return the checksums of whole bf16 tensors, contiguous and all on one device."""
    words = [tensor.detach().reshape(-1).view(torch.int16) for tensor in tensors]
    sums = torch.zeros(len(words), dtype=torch.int64, device=words[0].device)
    prepare([Piece(slot, 0, of_one) for slot, of_one in enumerate(words)], sums.device).add_to(sums)
    found: list[int] = sums.tolist()
    return found


def weighted_sum(words: Tensor, start: int) -> int:
    """Return the checksum's share of consecutive words in host memory, as a signed integer of 64 bits."""
    total = np.int64(0)
    with np.errstate(over="ignore"):
        for part in torch.split(words, len(POSITIONS)):
            # Modulo 2^32, as `mix` counts, and then modulo 2^64.
            factors = _mix(POSITIONS[: len(part)] + np.uint32(start % (1 << 32))) | np.uint32(1)
            total += np.dot(factors.astype(np.int64), part.numpy().astype(np.int64))
            start += len(part)
    return int(total)


def _mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A bijection of 32-bit integers after which neighbours have nothing in common; it works in place.

    Source: C. Wellons, "Prospecting for Hash Functions", the two-round function with the least bias.
    """
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x
