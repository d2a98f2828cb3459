"""Weight sync: the actor's shards to its engine in buckets of memory that both map, every tensor proven to be there.

    worker   pack ─ gather ─ send ────┐                    ┌─ wait (before its buffer is packed again)
    engine                            └─ map ─ load ─ verify ─┘

The shards of a rank, one parameter after the other and in bf16, are one long stream of elements; a bucket is the next
piece of it from every rank, so that one all-gather fills it whatever the sizes of its parameters. The engine copies
from there straight into its weights, fused or not. There are two buffers or more: the next bucket is gathered while
the engine loads the last one. What a rank packs is summed up (`checksum.py`), the sums of all ranks are added, and the
engine takes the same sum of what then lies in its weights: that proves gather, transport and load together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rltrace.errors import RunError
from rltrace_reference.channel import Channel
from rltrace_reference.checksum import Piece, Summands, prepare

ALIGNMENT = 64
"""Every run begins at a multiple of so many elements in its part, so that copies and checksums read whole words."""
BF16_BYTES = 2
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it


@dataclass
class Entry:
    """A run of elements of every rank's shard of one parameter."""

    name: str
    index: int
    """Index of the parameter, in the order sent."""
    total_elements: int
    """Elements of the whole parameter."""
    shard_elements: int
    """Elements of a whole shard, the last rank's padding included."""
    first: int
    """Where the run begins in the shard, in elements."""
    elements: int
    offset: int
    """Where it lies in the bucket's part of a rank, in elements."""


@dataclass
class Bucket:
    """What is sent at once: a part for each rank, one after another in one buffer, laid out alike."""

    key: str
    """Unique in the run: sender, step and index."""
    index: int
    buffer: int
    """Which of the buffers it uses."""
    ranks: int
    entries: list[Entry] = field(default_factory=list)
    part_elements: int = 0
    """Elements of each rank's part."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts, padding between and after parameters included."""
        return self.ranks * self.part_elements * BF16_BYTES

    @property
    def used_bytes(self) -> int:
        """Bytes of parameters."""
        runs = (run for entry in self.entries for run in _runs(entry, self.ranks))
        return BF16_BYTES * sum(end - start for _, start, end in runs)

    def parts(self, buffer: Tensor) -> Tensor:
        """Shape (ranks, elements), bf16: the bucket in its buffer."""
        return buffer[: self.size_bytes].view(torch.bfloat16).view(self.ranks, self.part_elements)


@dataclass(frozen=True)
class SyncStats:
    """What one sync moved."""

    bytes: int
    tensors: int
    buckets: int
    seconds: float
    """Seconds from the first shard packed to the last tensor proven to be there."""


class Buffer(Protocol):
    """Memory of one process that another can map."""

    bytes: Tensor

    def handle(self) -> tuple[bytes, tuple[int, ...]]:
        """What the other process needs to map it: bytes, and file descriptors."""

    def publish(self, size_bytes: int) -> None:
        """Make the first bytes visible to the other process, if writing them did not."""

    def fetch(self, size_bytes: int) -> None:
        """Make what the other process published visible in `bytes`, if it is not."""

    def close(self) -> None:
        """Release it."""


class Copies(Protocol):
    """See `Transport.copies`."""

    def run(self, buffer: Tensor) -> None:
        """Copy; on a GPU, queue the copies."""


class Transport(Protocol):
    """How buckets pass between two processes on one device."""

    def create(self, size_bytes: int) -> Buffer:
        """Allocate new memory."""

    def open(self, handle: bytes, descriptors: list[int], size_bytes: int) -> Buffer:
        """Map the memory of the other process that the handle names."""

    def copies(self, places: list[Tensor], offsets: list[int]) -> Copies:
        """Prepare copies from the bytes at these offsets of a buffer to flat tensors, to run often."""

    def queue(self) -> AbstractContextManager[Any]:
        """Return a context in which work is queued in order and may continue after it."""

    def mark(self) -> Any:
        """Return a mark whose `synchronize()` returns when the work queued so far is done."""

    def release(self) -> None:
        """Give closed buffers back to the device."""


Exchange = Callable[[Tensor, int, list[Entry]], None]
"""Fills in place the other ranks' rows of a tensor of shape (ranks, bytes) that has this rank's row."""


def all_gather(parts: Tensor, rank: int, entries: list[Entry]) -> None:
    """Send every rank's part to all others at once; as bytes, since gloo does not gather bf16 everywhere."""
    ALL_GATHER(parts.view(-1), parts[rank])


def per_parameter(parts: Tensor, rank: int, entries: list[Entry]) -> None:
    """Gather each parameter and copy it into the bucket: what `DTensor.full_tensor()` and packing cost."""
    for entry in entries:
        start, size_bytes = BF16_BYTES * entry.offset, BF16_BYTES * entry.elements
        gathered = parts.new_empty(len(parts), size_bytes)
        ALL_GATHER(gathered.view(-1), parts[rank, start : start + size_bytes])
        parts[:, start : start + size_bytes] = gathered


def relay(parts: Tensor, rank: int, entries: list[Entry]) -> None:
    """Let rank 0 collect all parts and send the whole to everybody: what a central parameter server costs.

    Source: figure 1 of vLLM's RFC of weight synchronisation for RLHF.
    """
    if rank == 0:
        for other in range(1, len(parts)):
            dist.recv(parts[other], src=other)
    else:
        dist.send(parts[rank], dst=0)
    dist.broadcast(parts, src=0)


EXCHANGES: dict[str, Exchange] = {"all_gather": all_gather, "per_parameter": per_parameter, "relay": relay}


class Packing(NamedTuple):
    """A rank's part of a bucket, about to be packed."""

    places: list[Tensor]
    pieces: list[Tensor]
    summands: Summands


class Sender:
    """The worker's end."""

    def __init__(
        self,
        channel: Channel,
        bucket_bytes: int,
        sender_id: str,
        transport: Transport,
        buffers: int = 2,
        keep: bool = False,
        exchange: Exchange = all_gather,
    ) -> None:
        """Args:
        channel: To the engine; nothing else may be said on it during a sync.
        bucket_bytes: Size of each buffer.
        sender_id: Unique in the run.
        transport: As the engine's.
        buffers: How many there are.
        keep: Whether the buffers stay, mapped on both sides, until the next sync.
        exchange: How every rank comes by the others' parts.
        """
        self.channel, self.transport, self.keep, self.exchange = channel, transport, keep, exchange
        self.bucket_bytes, self.sender_id, self.count = bucket_bytes, sender_id, buffers
        self.rank: int = dist.get_rank() if dist.is_initialized() else 0
        self.ranks: int = dist.get_world_size() if dist.is_initialized() else 1
        self.buffers: list[Buffer] = []
        self.in_flight: list[Bucket] = []

    def sync(self, parameters: Iterable[tuple[str, Tensor]], step: int) -> SyncStats:
        """Send every parameter, and return when the engine has proven that it has them.

        Args:
            parameters: Names and sharded parameters, `Shard(0)`, or plain ones on a single rank.
            step: Step of the run, for the buckets' keys.

        Raises:
            RunError: what lies in the engine's weights is not what was sent; names the first tensor.
        """
        try:
            with self.transport.queue(), torch.no_grad():
                return self._send_all(dict(parameters), step)
        finally:
            self.in_flight = []
            if not self.keep:
                self.close()

    def _send_all(self, parameters: dict[str, Tensor], step: int) -> SyncStats:
        new = not self.buffers
        if new:
            self.buffers = [self.transport.create(self.bucket_bytes) for _ in range(self.count)]
        self.sums = torch.zeros(len(parameters), dtype=torch.int64, device=self.buffers[0].bytes.device)
        gathered: tuple[Bucket, Any] | None = None
        count, start = 0, time.monotonic()
        for bucket in plan(parameters, self.ranks, self.bucket_bytes, self.count, f"{self.sender_id}.{step}"):
            packing = self._prepare(bucket, parameters)  # while the last buckets are on their way
            while any(other.buffer == bucket.buffer for other in self.in_flight):
                self.wait(self.in_flight[0])
            self.pack(bucket, packing)
            self.gather(bucket)
            self.buffers[bucket.buffer].publish(bucket.size_bytes)
            mark = self.transport.mark()
            if gathered is not None:  # the gather just begun runs while the engine loads the last bucket
                self.send(*gathered, new)
            gathered = bucket, mark
            count += 1
        assert gathered is not None
        self.send(*gathered, new)
        checksums = self.total_checksums(list(parameters))
        while self.in_flight:
            self.wait(self.in_flight[0])
        self.finish(checksums, keep=self.keep)
        sent_bytes = BF16_BYTES * sum(parameter.numel() for parameter in parameters.values())
        return SyncStats(sent_bytes, len(parameters), count, time.monotonic() - start)

    def _prepare(self, bucket: Bucket, parameters: dict[str, Tensor]) -> Packing:
        """Prepare what goes where, so that packing takes two launches."""
        mine = bucket.parts(self.buffers[bucket.buffer].bytes)[self.rank]
        places, pieces, packed = [], [], []
        for entry in bucket.entries:
            piece = local_shard(parameters[entry.name])[entry.first : entry.first + entry.elements]
            if len(piece):  # the last ranks' shards may be short, or empty
                place = mine[entry.offset : entry.offset + len(piece)]
                places.append(place)
                pieces.append(piece)
                packed.append(_summand(entry, place, self.rank * entry.shard_elements + entry.first))
        return Packing(places, pieces, prepare(packed, mine.device))

    def pack(self, bucket: Bucket, packing: Packing) -> None:
        """Cast this rank's shards into its part of the bucket and sum them up."""
        torch._foreach_copy_(packing.places, packing.pieces)
        packing.summands.add_to(self.sums)

    def gather(self, bucket: Bucket) -> None:
        """Fill the other ranks' parts of the bucket, in place."""
        if self.ranks > 1:
            parts = bucket.parts(self.buffers[bucket.buffer].bytes).view(torch.uint8)
            self.exchange(parts, self.rank, bucket.entries)

    def send(self, bucket: Bucket, mark: Any, new: bool) -> None:
        """Pass a gathered bucket to the engine, with its buffer's handle if it goes there for the first time.

        Args:
            bucket: Packed, its gather begun.
            mark: The end of its gather.
            new: Whether the engine has yet to map the buffers.
        """
        mark.synchronize()
        unknown = new and bucket.index < self.count
        handle, descriptors = self.buffers[bucket.buffer].handle() if unknown else (b"", ())
        message = {"call": "bucket", "bucket": bucket, "handle": handle, "size_bytes": self.bucket_bytes}
        self.channel.send(message, descriptors)
        self.in_flight.append(bucket)

    def wait(self, bucket: Bucket) -> None:
        """Return when the engine has loaded the bucket.

        Raises:
            RunError: it cannot.
        """
        key = _result_of(self.channel)
        assert key == bucket.key, f"the engine acknowledged bucket {key}, not {bucket.key}"
        self.in_flight.remove(bucket)

    def total_checksums(self, names: list[str]) -> dict[str, int]:
        """Return the checksum of every whole parameter, from what all ranks packed."""
        if self.ranks > 1:
            dist.all_reduce(self.sums)
        return dict(zip(names, self.sums.tolist(), strict=True))

    def finish(self, checksums: dict[str, int], *, keep: bool) -> None:
        """Return when the engine has compared what lies in its weights with these checksums.

        Args:
            checksums: Of every parameter, by its name.
            keep: Whether the engine keeps the buffers mapped.

        Raises:
            RunError: It is not what was sent.
        """
        self.channel.send({"call": "finish_sync", "checksums": checksums, "keep": keep})
        _result_of(self.channel)

    def close(self) -> None:
        """Release the buffers; the engine must have unmapped them."""
        for buffer in self.buffers:
            buffer.close()
        self.buffers = []
        self.transport.release()


class DirectSender(Sender):
    """Without buckets: each parameter is new memory that the engine maps, copies from, and unmaps.

    Source: proposal 2 of vLLM's RFC, direct access of the engines to the trainer's weights. A rank holds a shard in
    fp32, so what the engine can read as it is has to be gathered and cast first.
    """

    def _send_all(self, parameters: dict[str, Tensor], step: int) -> SyncStats:
        start = time.monotonic()
        device = next(iter(parameters.values())).device
        self.sums = torch.zeros(len(parameters), dtype=torch.int64, device=device)
        buckets = [
            bucket
            for index, (name, parameter) in enumerate(parameters.items())
            for bucket in alone(name, parameter, index, self.ranks, f"{self.sender_id}.{step}")
        ]
        for bucket in buckets:
            self._send_alone(bucket, parameters)
        self.finish(self.total_checksums(list(parameters)), keep=False)
        sent_bytes = BF16_BYTES * sum(parameter.numel() for parameter in parameters.values())
        return SyncStats(sent_bytes, len(parameters), len(buckets), time.monotonic() - start)

    def _send_alone(self, bucket: Bucket, parameters: dict[str, Tensor]) -> None:
        """Fill memory for one parameter, let the engine copy from it, and release it."""
        self.bucket_bytes = bucket.size_bytes
        self.buffers = [self.transport.create(bucket.size_bytes)]
        self.pack(bucket, self._prepare(bucket, parameters))
        self.gather(bucket)
        self.buffers[0].publish(bucket.size_bytes)
        self.transport.mark().synchronize()
        handle, descriptors = self.buffers[0].handle()
        message = {"call": "bucket", "bucket": bucket, "handle": handle, "size_bytes": bucket.size_bytes}
        self.channel.send(message, descriptors)
        self.in_flight.append(bucket)
        self.wait(bucket)
        self.close()


@dataclass(frozen=True)
class Unpacking:
    """A bucket on its way into the engine's weights."""

    entries: list[Entry]
    ranks: int
    copies: Copies
    summands: Summands


class Receiver:
    """The engine's end."""

    def __init__(self, parameters: dict[str, Tensor], rank: int, transport: Transport) -> None:
        """Args:
        parameters: The engine's weights by the sender's names, bf16; contiguous views, fused ones too.
        rank: Whose engine this is, for errors.
        transport: As the sender's.
        """
        self.parameters = {name: parameter.detach().view(-1) for name, parameter in parameters.items()}
        self.rank, self.transport = rank, transport
        self.buffers: dict[int, Buffer] = {}
        self.unpackings: dict[int, Unpacking] = {}
        """For each bucket, the unpacking of the last sync: the next one is laid out alike."""
        self._begin()

    def _begin(self) -> None:
        self.arrived = dict.fromkeys(self.parameters, 0)
        device = next(iter(self.parameters.values())).device
        self.sums = torch.zeros(len(self.parameters), dtype=torch.int64, device=device)

    def receive(self, bucket: Bucket, handle: bytes, size_bytes: int, descriptors: list[int]) -> str:
        """Map, load and sum up one bucket.

        Returns:
            Its key, the acknowledgement: the buffer may be written again.

        Raises:
            RunError: the engine does not have such a name or size.
        """
        if bucket.index == 0:  # whatever became of the sync before
            self._begin()
        if handle or descriptors:
            self.map(bucket.buffer, handle, size_bytes, descriptors)
        with self.transport.queue(), torch.no_grad():
            self.buffers[bucket.buffer].fetch(bucket.size_bytes)
            self.load(bucket)
            self.verify(bucket)
            self.transport.mark().synchronize()
        return bucket.key

    def map(self, buffer: int, handle: bytes, size_bytes: int, descriptors: list[int]) -> None:
        """Map the sender's buffer into this process, in the place of the one before it."""
        if buffer in self.buffers:
            self.buffers.pop(buffer).close()
        self.buffers[buffer] = self.transport.open(handle, descriptors, size_bytes)

    def load(self, bucket: Bucket) -> None:
        """Copy every rank's part of the bucket into its rows of the engine's weights."""
        self._unpacking(bucket).copies.run(self.buffers[bucket.buffer].bytes)
        for entry in bucket.entries:
            self.arrived[entry.name] += sum(end - start for _, start, end in _runs(entry, bucket.ranks))

    def verify(self, bucket: Bucket) -> None:
        """Sum up what lies in the engine's weights where the bucket went; `finish` compares."""
        self._unpacking(bucket).summands.add_to(self.sums)

    def _unpacking(self, bucket: Bucket) -> Unpacking:
        """Prepare what goes where."""
        known = self.unpackings.get(bucket.index)
        if known is not None and known.entries == bucket.entries and known.ranks == bucket.ranks:
            return known
        places, offsets, summands = [], [], []
        for entry in bucket.entries:
            self._check(entry)
            for rank, start, end in _runs(entry, bucket.ranks):
                place = self.parameters[entry.name][start:end]
                places.append(place)
                offsets.append(BF16_BYTES * (rank * bucket.part_elements + entry.offset))
                summands.append(_summand(entry, place, start))
        self.unpackings[bucket.index] = Unpacking(
            bucket.entries, bucket.ranks, self.transport.copies(places, offsets), prepare(summands, self.sums.device)
        )
        return self.unpackings[bucket.index]

    def finish(self, checksums: dict[str, int], keep: bool) -> None:
        """End a sync.

        Args:
            checksums: What was sent, by the parameter's name, in the order sent.
            keep: Whether the buffers stay mapped.

        Raises:
            RunError: a parameter of the engine did not arrive completely, or what lies there is not what was sent.
        """
        if not keep:
            self.close()
        missing = [name for name, weight in self.parameters.items() if self.arrived[name] != len(weight)]
        if missing:
            name = min(missing)
            raise RunError(
                f"weight sync: {name} ({len(missing)} of {len(self.parameters)} parameters) was never sent whole to "
                f"the engine of rank {self.rank}: {self.arrived[name]:,} of {len(self.parameters[name]):,} elements"
            )
        found = self.sums.tolist()
        for index, (name, sent) in enumerate(checksums.items()):
            if found[index] != sent:
                raise RunError(
                    f"weight sync: {name} did not arrive in the engine of rank {self.rank}: checksum "
                    f"{sent & MASK:016x} sent, {found[index] & MASK:016x} in the engine's weights; the "
                    "engine would sample from a wrong policy"
                )

    def close(self) -> None:
        """Unmap the buffers."""
        for buffer in self.buffers.values():
            buffer.close()
        self.buffers = {}

    def _check(self, entry: Entry) -> None:
        """Raise a RunError if what is sent cannot be what the engine has."""
        parameter = self.parameters.get(entry.name)
        if parameter is None or len(parameter) != entry.total_elements:
            has = "no such weight" if parameter is None else f"{len(parameter):,} elements"
            raise RunError(
                f"weight sync: {entry.name} of {entry.total_elements:,} elements was sent, "
                f"the engine of rank {self.rank} has {has}"
            )


MASK = (1 << 64) - 1


def plan(parameters: dict[str, Tensor], ranks: int, bucket_bytes: int, buffers: int, prefix: str) -> Iterator[Bucket]:
    """Cut the stream of shards into buckets.

    Args:
        parameters: Whole ones, or sharded by `Shard(0)`; only their shapes are used.
        ranks: How many shards there are.
        bucket_bytes: Size of a bucket; it holds `bucket_bytes // ranks` of each rank.
        buffers: How many there are, used in turn.
        prefix: Prefix of the buckets' keys.
    """
    room = bucket_bytes // BF16_BYTES // ranks // ALIGNMENT * ALIGNMENT
    bucket = Bucket(f"{prefix}.0", 0, 0, ranks)
    for index, (name, parameter) in enumerate(parameters.items()):
        shard_elements = -(-parameter.shape[0] // ranks) * (parameter.numel() // parameter.shape[0])
        first = 0
        while first < shard_elements:
            if bucket.part_elements == room:
                yield bucket
                number = bucket.index + 1
                bucket = Bucket(f"{prefix}.{number}", number, number % buffers, ranks)
            elements = min(shard_elements - first, room - bucket.part_elements)
            place = bucket.part_elements
            bucket.entries.append(Entry(name, index, parameter.numel(), shard_elements, first, elements, place))
            bucket.part_elements += -(-elements // ALIGNMENT) * ALIGNMENT
            first += elements
    yield bucket


def alone(name: str, parameter: Tensor, index: int, ranks: int, prefix: str) -> Iterator[Bucket]:
    """Return the bucket of one parameter, of its size."""
    shard_elements = -(-parameter.shape[0] // ranks) * (parameter.numel() // parameter.shape[0])
    room = -(-shard_elements // ALIGNMENT) * ALIGNMENT
    for bucket in plan({name: parameter}, ranks, room * ranks * BF16_BYTES, 1, prefix):
        bucket.key, bucket.index = f"{prefix}.{index}", index
        for entry in bucket.entries:
            entry.index = index
        yield bucket


def local_shard(parameter: Tensor) -> Tensor:
    """Return this rank's elements of a parameter, flat."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach().reshape(-1)


def _runs(entry: Entry, ranks: int) -> Iterator[tuple[int, int, int]]:
    """Return each rank's run of an entry: rank, first and end in the whole parameter, in elements; without empty
    ones."""
    for rank in range(ranks):
        start = rank * entry.shard_elements + entry.first
        end = min(start + entry.elements, (rank + 1) * entry.shard_elements, entry.total_elements)
        if start < end:
            yield rank, start, end


def _summand(entry: Entry, elements: Tensor, start: int) -> Piece:
    """Return elements of a parameter for the checksum: two at a time if they pair up on every rank."""
    if entry.total_elements % 2 or entry.shard_elements % 2:
        return Piece(entry.index, start, elements.view(torch.int16))
    return Piece(entry.index, start // 2, elements.view(torch.int32))


def _result_of(channel: Channel) -> Any:
    """Return the engine's answer, or raise what the engine raised."""
    answer, _ = channel.receive()
    if answer.get("error"):
        raise RunError(answer["error"])
    return answer["result"]
