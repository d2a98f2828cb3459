"""Buckets through host memory: what the weight sync costs between processes on one GPU that cannot share its memory."""

from __future__ import annotations

import torch

from rltrace_reference.cuda_ipc import GpuQueue
from rltrace_reference.shared_memory import SharedBuffer, SharedMemory


class StagedBuffer:
    """GPU memory of this process, and host memory that both map, page-locked on both sides."""

    def __init__(self, host: SharedBuffer) -> None:
        self.host = host
        self.bytes = torch.empty(host.bytes.numel(), dtype=torch.uint8, device="cuda")
        _checked(torch.cuda.cudart().cudaHostRegister(host.bytes.data_ptr(), host.bytes.numel(), 0))

    def handle(self) -> tuple[bytes, tuple[int, ...]]:
        """Return the handle of the host memory."""
        return self.host.handle()

    def publish(self, size_bytes: int) -> None:
        """Copy from GPU to host."""
        self.host.bytes[:size_bytes].copy_(self.bytes[:size_bytes], non_blocking=True)

    def fetch(self, size_bytes: int) -> None:
        """Copy from host to GPU."""
        self.bytes[:size_bytes].copy_(self.host.bytes[:size_bytes], non_blocking=True)

    def close(self) -> None:
        """Release both."""
        _checked(torch.cuda.cudart().cudaHostUnregister(self.host.bytes.data_ptr()))
        self.host.close()
        del self.bytes


class HostStaging(GpuQueue):
    """The transport through the host."""

    def create(self, size_bytes: int) -> StagedBuffer:
        """Allocate new memory on both sides."""
        return StagedBuffer(SharedMemory().create(size_bytes))

    def open(self, handle: bytes, descriptors: list[int], size_bytes: int) -> StagedBuffer:
        """Map the host memory behind the descriptor, and allocate GPU memory to copy it to."""
        return StagedBuffer(SharedMemory().open(handle, descriptors, size_bytes))


def _checked(code: object) -> None:
    if int(code) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"CUDA error {code} while page-locking a bucket")
