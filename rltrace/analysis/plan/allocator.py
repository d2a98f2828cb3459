"""What torch's caching allocator reserves for a sequence of allocations.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` of torch 2.11: sizes are rounded to 512 bytes; what is at
most 1 MiB shares segments of 2 MiB, what is below 10 MiB segments of 20 MiB, and the rest has segments of its own,
rounded to 2 MiB. A block goes to the smallest free one of its stream that holds it, which is split if enough remains,
and merges with its free neighbours when it is freed. A segment goes back to the device only when the cache is emptied.

With `expandable_segments` each stream has one segment per pool, which grows by pages where no free block is large
enough.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from math import inf

MEBIBYTE = 1 << 20
ROUNDING = 512
SMALL_BYTES = MEBIBYTE
"""Most that a block of the small pool has, and least that is worth splitting off in the large one."""
SMALL_SEGMENT = 2 * MEBIBYTE
LARGE_FROM = 10 * MEBIBYTE
"""From here on a block gets a segment of its own size."""
LARGE_SEGMENT = 20 * MEBIBYTE
SEGMENT_ROUNDING = 2 * MEBIBYTE


@dataclass(eq=False, slots=True)
class Pool:
    """What one stream has of small blocks, or of large ones."""

    is_small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    """Its free blocks behind their sizes and addresses, in order."""
    last: Block | None = None
    """The last block of its segment, if that expands."""


@dataclass(eq=False, slots=True)
class Segment:
    """Memory from the device."""

    size_bytes: int
    pool: Pool
    in_use: int = 0
    """Blocks that are handed out."""


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment, linked with its neighbours."""

    segment: Segment
    address: int
    size_bytes: int
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False


@dataclass
class CachingAllocator:
    """Counts what is handed out and what is reserved.

    A step of a model allocates ten thousand times, and a plan walks through several: no function is called here that is
    not needed.
    """

    is_expandable: bool = False
    limit_bytes: float = inf
    """Of the device. Before a segment would exceed it, the cache is emptied; with `expandable_segments` it is not."""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    held_bytes: int = 0
    """Segments of which a part is handed out: what is left if memory runs out and the cache is given back."""
    most_allocated_bytes: int = 0
    most_reserved_bytes: int = 0
    most_held_bytes: int = 0
    pools: dict[tuple[str, bool], Pool] = field(default_factory=dict)
    """By stream, and whether their blocks are small."""
    segments: list[Segment] = field(default_factory=list)
    next_address: int = 0

    def allocate(self, size_bytes: int, stream: str = "") -> Block:
        """Hand out a block."""
        size = -(-size_bytes // ROUNDING) * ROUNDING or ROUNDING
        is_small = size <= SMALL_BYTES
        pool = self.pools.get((stream, is_small)) or self._new_pool(stream, is_small)
        free = pool.free
        at = bisect_left(free, (size, 0))
        if at < len(free):
            block = free.pop(at)[2]
        else:
            block = (self._expand if self.is_expandable else self._new_segment)(size, pool)
        rest = block.size_bytes - size
        if rest >= (ROUNDING if is_small else SMALL_BYTES + 1):
            self._split(block, size, rest)
        block.is_free = False
        self.allocated_bytes += block.size_bytes
        segment = block.segment
        if self.is_expandable:
            self.held_bytes = self.allocated_bytes
        elif not segment.in_use:
            self.held_bytes += segment.size_bytes
        segment.in_use += 1
        if self.allocated_bytes > self.most_allocated_bytes:
            self.most_allocated_bytes = self.allocated_bytes
        if self.held_bytes > self.most_held_bytes:
            self.most_held_bytes = self.held_bytes
        return block

    def release(self, block: Block) -> None:
        """Take a block back into the cache."""
        segment = block.segment
        self.allocated_bytes -= block.size_bytes
        segment.in_use -= 1
        if self.is_expandable:
            self.held_bytes = self.allocated_bytes
        elif not segment.in_use:
            self.held_bytes -= segment.size_bytes
        free = segment.pool.free
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                del free[bisect_left(free, (neighbour.size_bytes, neighbour.address))]
                _merge(block, neighbour)
        block.is_free = True
        insort(free, (block.size_bytes, block.address, block))

    def empty_cache(self) -> None:
        """Give segments, or pages, of which nothing is handed out back to the device."""
        if self.is_expandable:
            self._unmap()
            return
        for pool in self.pools.values():
            pool.free = [entry for entry in pool.free if entry[2].segment.in_use]
        self.segments = [segment for segment in self.segments if segment.in_use]
        self.reserved_bytes = sum(segment.size_bytes for segment in self.segments)

    def _new_pool(self, stream: str, is_small: bool) -> Pool:
        return self.pools.setdefault((stream, is_small), Pool(is_small))

    def _new_segment(self, size: int, pool: Pool) -> Block:
        segment = Segment(segment_bytes(size), pool)
        if self.reserved_bytes + segment.size_bytes > self.limit_bytes:
            self.empty_cache()
        if self.reserved_bytes + segment.size_bytes > self.limit_bytes:
            raise MemoryError(f"{size} more bytes than {self.reserved_bytes} exceed {self.limit_bytes}")
        self.segments.append(segment)
        self.reserved_bytes += segment.size_bytes
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        block = Block(segment, self.next_address, segment.size_bytes)
        self.next_address += segment.size_bytes
        return block

    def _expand(self, size: int, pool: Pool) -> Block:
        """Let a segment grow at its end, where a free block may be that is too small."""
        page, last = _page(pool), pool.last
        if last is not None and last.is_free:
            del pool.free[bisect_left(pool.free, (last.size_bytes, last.address))]
            block, grown = last, round_up(size - last.size_bytes, page)
            block.size_bytes += grown
        else:
            grown = round_up(size, page)
            segment = last.segment if last is not None else Segment(0, pool)
            block = pool.last = Block(segment, self.next_address, grown, before=last)
            if last is not None:
                last.after = block
        self.next_address += grown
        self.reserved_bytes += grown
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        return block

    def _unmap(self) -> None:
        """Give back the whole pages of free blocks; what is allocated later grows at the end."""
        for pool in self.pools.values():
            page = _page(pool)
            for size, _, block in pool.free:
                self.reserved_bytes -= size // page * page
                if block.before is not None:
                    block.before.after = None
                if block.after is not None:
                    block.after.before = None
                if pool.last is block:
                    pool.last = None
            pool.free.clear()

    def _split(self, block: Block, size: int, rest: int) -> None:
        """Make a free block of what a block has too much."""
        pool = block.segment.pool
        other = Block(block.segment, block.address + size, rest, block, block.after, True)
        if block.after is not None:
            block.after.before = other
        block.after, block.size_bytes = other, size
        if pool.last is block:
            pool.last = other
        insort(pool.free, (rest, other.address, other))


def _page(pool: Pool) -> int:
    """Return by how much a segment that expands grows."""
    return SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT


def _merge(block: Block, neighbour: Block) -> None:
    """Make the block as large as both."""
    if neighbour is block.before:
        block.address, block.before = neighbour.address, neighbour.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block
        if block.segment.pool.last is neighbour:
            block.segment.pool.last = block
    block.size_bytes += neighbour.size_bytes


def segment_bytes(size_bytes: int) -> int:
    """Return how much the allocator asks the device for, to hand out this much."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size_bytes < LARGE_FROM else round_up(size_bytes, SEGMENT_ROUNDING)


def round_up(value: int, of: int) -> int:
    """Return the next multiple."""
    return -(-value // of) * of
