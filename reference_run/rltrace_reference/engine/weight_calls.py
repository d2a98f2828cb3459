"""What is asked of the process in which an engine's weights lie: to load buckets, to prove them, and to record."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

import rltrace
from rltrace_reference import checksum, device, engine_group
from rltrace_reference.engine.calls import Calls
from rltrace_reference.weight_sync import Bucket, Receiver


class RecordCalls(Calls):
    """What every process of an engine is asked about its Recording."""

    def on_record(self, on: bool) -> None:
        """Continue recording, or pause."""
        (rltrace.resume if on else rltrace.pause)()

    def on_kernels(self, on: bool) -> None:
        """Begin or end recording every operator and kernel."""
        (rltrace.start_kernels if on else rltrace.stop_kernels)()

    def on_allocations(self, on: bool) -> None:
        """Begin or end recording every allocation."""
        (rltrace.start_allocations if on else rltrace.stop_allocations)()

    def on_measure_cost(self) -> None:
        """Measure what recording an event costs in this process."""
        rltrace.measure_cost()


class WeightCalls(RecordCalls):
    """Answers for the weights of this process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.receiver: Receiver | None = None

    def parameters(self) -> dict[str, Tensor]:
        """Return the weights by their names in a checkpoint; contiguous views of where they lie."""
        raise NotImplementedError

    def on_use_transport(self, transport: str) -> None:
        """Let the next sync come by this transport."""
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = Receiver(self.parameters(), self.rank, device.transport(transport))

    def on_bucket(self, bucket: dict[str, Any], handle: bytes, size_bytes: int, descriptors: list[int]) -> str:
        """See `Receiver.receive`."""
        assert self.receiver is not None
        return self.receiver.receive(msgspec.convert(bucket, Bucket), handle, size_bytes, descriptors)

    def on_finish_sync(self, checksums: dict[str, int], keep: bool) -> None:
        """See `Receiver.finish`."""
        assert self.receiver is not None
        self.receiver.finish(checksums, keep)

    def on_join_group(self, backend: str, port: int, rank: int, size: int) -> None:
        """See `engine_group.Group`."""
        self.group = engine_group.Group(backend, port, rank, size)

    def on_receive_broadcast(self, names: list[str]) -> None:
        """See `engine_group.receive`."""
        with torch.no_grad():
            engine_group.receive(self.group, self.parameters(), names)

    def on_checksums(self) -> dict[str, int]:
        """See `Rollout.checksums`."""
        parameters = self.parameters()
        return dict(zip(parameters, checksum.of_tensors(list(parameters.values())), strict=True))
