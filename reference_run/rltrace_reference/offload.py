"""Tensors of the actor that leave the device while nobody uses them: to pinned host memory, or on a CPU to a file.

The storages beneath the tensors are emptied and filled again, so everything that refers to them, FSDP2 and the
optimizer included, goes on with the same tensors.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class Home(Protocol):
    """Where the bytes of one storage are meanwhile."""

    def keep(self, contents: Tensor) -> None:
        """Copy the bytes from the device, or begin to."""

    def give(self, contents: Tensor) -> None:
        """Copy the bytes to the device, or begin to."""


class PinnedHome:
    """Page-locked host memory, allocated once."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def keep(self, contents: Tensor) -> None:
        """Queue the copy to the host."""
        self.bytes.copy_(contents, non_blocking=True)

    def give(self, contents: Tensor) -> None:
        """Queue the copy to the device."""
        contents.copy_(self.bytes, non_blocking=True)


class FileHome:
    """A place in a file."""

    def __init__(self, descriptor: int, offset: int) -> None:
        self.descriptor, self.offset = descriptor, offset

    def keep(self, contents: Tensor) -> None:
        """Write to the file."""
        left, offset = _view(contents), self.offset
        while left:
            written = os.pwrite(self.descriptor, left, offset)
            left, offset = left[written:], offset + written

    def give(self, contents: Tensor) -> None:
        """Read from the file."""
        left, offset = _view(contents), self.offset
        while left:
            read = os.preadv(self.descriptor, [left], offset)
            left, offset = left[read:], offset + read


class Offload:
    """Knows which storages are away, and where."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.homes: dict[int, Home] = {}
        """Home of each storage, by what identifies the storage."""
        self.away: dict[int, int] = {}
        """Bytes of those that are away."""
        self.file = tempfile.TemporaryFile(prefix="rltrace-offload-")  # noqa: SIM115  # without a name, ends with us
        self.file_bytes = 0

    def out(self, tensors: Iterable[Tensor], changed: bool = True) -> int:
        """Empty the storages beneath tensors.

        Args:
            tensors: This rank's shards; what is away already, or is not on the device, is left alone.
            changed: False if their homes hold the same bytes already, if they have been there before.

        Returns:
            The bytes that the device has back.
        """
        leaving = [storage for storage in self._storages(tensors) if storage._cdata not in self.away]
        for storage in leaving:
            if changed or storage._cdata not in self.homes:
                self._home(storage).keep(self._contents(storage))
        self._wait()
        for storage in leaving:
            self.away[storage._cdata] = storage.nbytes()
            storage.resize_(0)
        return sum(self.away[storage._cdata] for storage in leaving)

    def back(self, tensors: Iterable[Tensor]) -> int:
        """Fill the storages again; return the bytes that the device has lost."""
        coming = [storage for storage in self._storages(tensors) if storage._cdata in self.away]
        for storage in coming:
            storage.resize_(self.away.pop(storage._cdata))
            self.homes[storage._cdata].give(self._contents(storage))
        self._wait()
        return sum(storage.nbytes() for storage in coming)

    def _storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """Return the storages beneath tensors of the device, each once."""
        storages = [local.untyped_storage() for local in map(_local, tensors) if local.device.type == self.device.type]
        return list({storage._cdata: storage for storage in storages}.values())

    def _home(self, storage: torch.UntypedStorage) -> Home:
        if storage._cdata not in self.homes:
            self.homes[storage._cdata] = self._new_home(storage.nbytes())
        return self.homes[storage._cdata]

    def _new_home(self, size_bytes: int) -> Home:
        if self.device.type == "cuda":
            return PinnedHome(size_bytes)
        self.file_bytes += size_bytes
        return FileHome(self.file.fileno(), self.file_bytes - size_bytes)

    def _contents(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _view(contents: Tensor) -> memoryview:
    """Return the bytes to read and write; torch's own way to numpy would keep the storage from being resized."""
    view = memoryview((ctypes.c_ubyte * contents.nbytes).from_address(contents.data_ptr()))
    return view.cast("B")


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor is whole."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
