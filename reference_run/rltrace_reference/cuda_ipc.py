"""Buckets in GPU memory that both processes map: the worker allocates, the engine opens a CUDA IPC handle."""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rltrace_reference.shared_memory import SliceCopies
from rltrace_reference.weight_sync import Copies

DEVICE_ARGUMENT = 6
"""Argument of what `reduce_tensor` returns: the sender's number of the device, which the receiver may number
differently."""


class IpcBuffer:
    """GPU memory of the sender; a mapping costs the receiver none."""

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory

    def handle(self) -> tuple[bytes, tuple[int, ...]]:
        """What torch needs to open the memory in another process."""
        return pickle.dumps(reduce_tensor(self.bytes)), ()

    def publish(self, size_bytes: int) -> None:
        """Do nothing: the bytes are visible once the work that writes them is done."""

    def fetch(self, size_bytes: int) -> None:
        """Do nothing: the bytes are visible."""

    def close(self) -> None:
        """Release the memory, or the mapping."""
        del self.bytes


class GpuQueue:
    """The weight sync's own stream, which all transports between GPU processes share."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def copies(self, places: list[Tensor], offsets: list[int]) -> Copies:
        """Return copies in one launch, at the speed of the memory, if addresses and sizes allow it."""
        from rltrace_reference import kernels  # needs Triton

        return kernels.Copies(places, offsets) if kernels.Copies.fits(places, offsets) else SliceCopies(places, offsets)

    def queue(self) -> AbstractContextManager[Any]:
        """Return the stream, after all work that the current one has been given."""
        self.stream.wait_stream(torch.cuda.current_stream())
        entered: AbstractContextManager[Any] = torch.cuda.stream(self.stream)
        return entered

    def mark(self) -> torch.cuda.Event:
        """Return an event of the current stream."""
        event = torch.cuda.Event()
        event.record()
        return event

    def release(self) -> None:
        """Let torch's allocator have what no other process maps any more."""
        torch.cuda.ipc_collect()


class CudaIpc(GpuQueue):
    """The transport of processes that share a GPU: nothing is copied on the way."""

    def create(self, size_bytes: int) -> IpcBuffer:
        """Allocate new memory of the current device."""
        return IpcBuffer(torch.empty(size_bytes, dtype=torch.uint8, device="cuda"))

    def open(self, handle: bytes, descriptors: list[int], size_bytes: int) -> IpcBuffer:
        """Map the sender's memory."""
        rebuild, arguments = pickle.loads(handle)
        arguments = list(arguments)
        arguments[DEVICE_ARGUMENT] = torch.cuda.current_device()
        return IpcBuffer(rebuild(*arguments))
