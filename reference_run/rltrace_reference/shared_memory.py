"""Buckets in host memory that both processes map, named by a file descriptor only."""

from __future__ import annotations

import mmap
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class SharedBuffer:
    """Shared memory; the system takes it back when nobody maps it."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.bytes = torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)

    def handle(self) -> tuple[bytes, tuple[int, ...]]:
        """The descriptor."""
        return b"", (self.descriptor,)

    def publish(self, size_bytes: int) -> None:
        """It is visible."""

    def fetch(self, size_bytes: int) -> None:
        """It is visible."""

    def close(self) -> None:
        """Unmaps it and closes the descriptor."""
        del self.bytes
        os.close(self.descriptor)


class SliceCopies:
    """Copies from runs of a buffer to flat tensors; any device."""

    def __init__(self, places: list[Tensor], offsets: list[int]) -> None:
        self.places, self.offsets = places, offsets

    def run(self, buffer: Tensor) -> None:
        """Copies."""
        for place, offset in zip(self.places, self.offsets, strict=True):
            place.copy_(buffer[offset : offset + place.nbytes].view(place.dtype))


class Done:
    """The mark of work that is done when its call returns."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class SharedMemory:
    """The transport of a CPU."""

    def create(self, size_bytes: int) -> SharedBuffer:
        """New memory."""
        descriptor = os.memfd_create("rltrace-bucket")
        os.ftruncate(descriptor, size_bytes)
        return SharedBuffer(descriptor, size_bytes)

    def open(self, handle: bytes, descriptors: list[int], size_bytes: int) -> SharedBuffer:
        """The memory behind the one descriptor."""
        return SharedBuffer(descriptors[0], size_bytes)

    def copies(self, places: list[Tensor], offsets: list[int]) -> SliceCopies:
        """One after the other."""
        return SliceCopies(places, offsets)

    def queue(self) -> AbstractContextManager[None]:
        """A CPU has no queue."""
        return nullcontext()

    def mark(self) -> Done:
        """All is done."""
        return Done()

    def release(self) -> None:
        """Closed is released."""
