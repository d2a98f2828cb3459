"""Buckets in host memory that both processes map; only a file descriptor names it."""

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
        """Return the descriptor."""
        return b"", (self.descriptor,)

    def publish(self, size_bytes: int) -> None:
        """Do nothing: the bytes are visible."""

    def fetch(self, size_bytes: int) -> None:
        """Do nothing: the bytes are visible."""

    def close(self) -> None:
        """Unmap it and close the descriptor."""
        del self.bytes
        os.close(self.descriptor)


class SliceCopies:
    """Copies from runs of a buffer to flat tensors; any device."""

    def __init__(self, places: list[Tensor], offsets: list[int]) -> None:
        self.places, self.offsets = places, offsets

    def run(self, buffer: Tensor) -> None:
        """Copy."""
        for place, offset in zip(self.places, self.offsets, strict=True):
            place.copy_(buffer[offset : offset + place.nbytes].view(place.dtype))


class Done:
    """The mark of work that is done when its call returns."""

    def synchronize(self) -> None:
        """Return at once: there is nothing to wait for."""


class SharedMemory:
    """The transport of a CPU."""

    def create(self, size_bytes: int) -> SharedBuffer:
        """Allocate new memory."""
        descriptor = os.memfd_create("rltrace-bucket")
        os.ftruncate(descriptor, size_bytes)
        return SharedBuffer(descriptor, size_bytes)

    def open(self, handle: bytes, descriptors: list[int], size_bytes: int) -> SharedBuffer:
        """Map the memory behind the one descriptor."""
        return SharedBuffer(descriptors[0], size_bytes)

    def copies(self, places: list[Tensor], offsets: list[int]) -> SliceCopies:
        """Return copies that run one after another."""
        return SliceCopies(places, offsets)

    def queue(self) -> AbstractContextManager[None]:
        """Do nothing: a CPU has no queue."""
        return nullcontext()

    def mark(self) -> Done:
        """Return a mark: all work is done."""
        return Done()

    def release(self) -> None:
        """Do nothing: closed memory is released."""
