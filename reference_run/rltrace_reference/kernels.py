"""Triton kernels of the weight sync: one launch takes all pieces of a bucket, however many and however large."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rltrace_reference.checksum import Piece

WORDS = {torch.int16: tl.int16, torch.int32: tl.int32}
BLOCK = 1024
"""Words that a program takes at a time."""
PROGRAMS = 512
"""Most programs that share a piece."""


class Summands:
    """Pieces whose checksums one launch adds up, two if they have words of both sizes."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.launches = []
        for dtype, word_type in WORDS.items():
            rows = [
                [piece.words.data_ptr(), len(piece.words), piece.start, piece.slot]
                for piece in pieces
                if piece.words.dtype == dtype
            ]
            if rows:
                aligned = all(address % 16 == 0 and count % 16 == 0 for address, count, _, _ in rows)
                self.launches.append((_table(rows), _programs(max(row[1] for row in rows)), word_type, aligned))

    def add_to(self, values: Tensor) -> None:
        """Adds every piece's weighted sum, as `checksum.py` defines it, to its slot of `values`, int64."""
        for table, programs, word_type, aligned in self.launches:
            _add_checksums[(len(table), programs)](
                values, table, word_type=word_type, programs=programs, block=BLOCK, aligned=aligned
            )


class Copies:
    """Copies from runs of a buffer, wherever it lies, to fixed places: one launch."""

    def __init__(self, places: Sequence[Tensor], offsets: Sequence[int]) -> None:
        """Args:
        places: Flat; contiguous.
        offsets: Where in the buffer each one's bytes begin; `fits` must hold.
        """
        rows = [[to.data_ptr(), offset, to.nbytes // 4] for to, offset in zip(places, offsets, strict=True)]
        self.table, self.programs = _table(rows), _programs(max(row[2] for row in rows))

    @staticmethod
    def fits(places: Sequence[Tensor], offsets: Sequence[int]) -> bool:
        """Whether all addresses are multiples of 16 bytes and all sizes of 64."""
        return all(
            to.data_ptr() % 16 == 0 and offset % 16 == 0 and to.nbytes % 64 == 0
            for to, offset in zip(places, offsets, strict=True)
        )

    def run(self, buffer: Tensor) -> None:
        """Queues the copies."""
        _copy[(len(self.table), self.programs)](self.table, buffer, programs=self.programs, block=BLOCK)


def _programs(most_words: int) -> int:
    """A few sizes only, since each is compiled for itself."""
    return PROGRAMS if most_words > 8 * BLOCK else 8


def _table(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).to("cuda", non_blocking=True)


@triton.jit  # type: ignore[untyped-decorator]
def _add_checksums(  # type: ignore[no-untyped-def]
    values,
    table,
    word_type: tl.constexpr,
    programs: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
):
    row = table + tl.program_id(0) * 4
    words = tl.load(row).to(tl.pointer_type(word_type))
    count = tl.load(row + 1)
    start = tl.load(row + 2)
    slot = tl.load(row + 3)
    if aligned:  # wide loads
        words = tl.multiple_of(words, 16)
        count = tl.multiple_of(count, 16)
    lane = tl.arange(0, block)
    total = tl.zeros((block,), tl.int64)
    for begin in range(tl.program_id(1).to(tl.int64) * block, count, programs * block):
        index = begin + lane
        word = tl.load(words + index, mask=index < count, other=0)
        x = (start + index).to(tl.uint32)
        x ^= x >> 16
        x *= 0x7FEB352D
        x ^= x >> 15
        x *= 0x846CA68B
        x ^= x >> 16
        total += word.to(tl.int64) * (x | 1).to(tl.int64)
    tl.atomic_add(values + slot, tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _copy(table, buffer, programs: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = table + tl.program_id(0) * 3
    to = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int32)), 16)
    source = tl.multiple_of((buffer + tl.load(row + 1)).to(tl.pointer_type(tl.int32)), 16)
    count = tl.multiple_of(tl.load(row + 2), 16)
    lane = tl.arange(0, block)
    for begin in range(tl.program_id(1).to(tl.int64) * block, count, programs * block):
        index = begin + lane
        tl.store(to + index, tl.load(source + index, mask=index < count), mask=index < count)
