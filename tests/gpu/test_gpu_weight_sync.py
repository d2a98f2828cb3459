"""Kernels and CUDA IPC on a real GPU: what arrives is what was sent, and what did not arrive is named."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from rltrace_reference import checksum, device
from rltrace_reference.channel import Channel
from rltrace_reference.checksum import Piece, weighted_sum
from rltrace_reference.weight_sync import Bucket, Receiver, Sender

from rltrace.errors import RunError

pytestmark = pytest.mark.in_this_process

SHAPES = {"embedding": (1000, 64), "norm": (128,), "odd": (37, 5), "large": (4096, 1024)}
BUCKET_BYTES = 1 << 20


def parameters(step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator("cuda").manual_seed(step)
    return {name: torch.randn(shape, device="cuda", generator=random) for name, shape in SHAPES.items()}


def serve(end: socket.socket, transport: str, stale: str | None) -> None:
    """An engine's side of syncs, in a process of its own."""
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in SHAPES.items()}
    receiver = Receiver(weights, 0, device.transport(transport))
    channel = Channel(end)
    while True:
        message, descriptors = channel.receive()
        name = message.pop("call")
        try:
            if name == "exit":
                return
            if name == "finish_sync":
                result: Any = receiver.finish(**message)
            elif name == "held":
                result = {name: float(weight.double().sum()) for name, weight in weights.items()}
            else:
                bucket = msgspec.convert(message.pop("bucket"), Bucket)
                result = receiver.receive(bucket, message["handle"], message["size_bytes"], descriptors)
                if stale is not None:
                    weights[stale].fill_(1.0)
                    receiver.sums.zero_()
                    for known in receiver.unpackings.values():
                        known.summands.add_to(receiver.sums)
            channel.send({"result": result})
        except RunError as error:
            channel.send({"error": str(error)})


@contextmanager
def engine(transport: str, stale: str | None = None) -> Iterator[Channel]:
    """The channel to such a process."""
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, transport, stale))
    process.start()
    theirs.close()
    channel = Channel(ours)
    try:
        yield channel
    finally:
        channel.send({"call": "exit"})
        process.join(timeout=30)


@pytest.mark.parametrize("transport", ["cuda_ipc", "host_staging"])
def test_every_sync_arrives_in_the_other_process(transport: str) -> None:
    with engine(transport) as channel:
        for keep in (False, True):
            sender = Sender(channel, BUCKET_BYTES, "s", device.transport(transport), keep=keep)
            for step in range(3):
                sent = parameters(step)
                sender.sync(sent.items(), step)
                channel.send({"call": "held"})
                held = channel.receive()[0]["result"]
                assert held == {name: float(weight.bfloat16().double().sum()) for name, weight in sent.items()}


def test_stale_parameter_is_named() -> None:
    """A parameter that was not updated is named."""
    with engine("cuda_ipc", stale="norm") as channel:
        sender = Sender(channel, BUCKET_BYTES, "s", device.transport("cuda_ipc"))
        with pytest.raises(RunError, match=r"norm did not arrive in the engine of rank 0: checksum [0-9a-f]{16} sent"):
            sender.sync(parameters(0).items(), 0)


def test_freed_buckets_leave_no_gpu_memory() -> None:
    """No GPU memory stays behind when buckets are freed."""
    with engine("cuda_ipc") as channel:
        sender = Sender(channel, BUCKET_BYTES, "s", device.transport("cuda_ipc"))
        sent = parameters(0)
        before = torch.cuda.memory_allocated()
        for step in range(3):
            sender.sync(sent.items(), step)
        assert torch.cuda.memory_allocated() - before < BUCKET_BYTES


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("count", [1, 1000, 3_000_001])
def test_kernel_and_cpu_checksums_agree(dtype: torch.dtype, count: int) -> None:
    """The kernel computes the checksum that the CPU computes."""
    words = torch.randint(-(2**15), 2**15, (count,), device="cuda").to(dtype)
    values = torch.zeros(2, dtype=torch.int64, device="cuda")
    pieces = [Piece(1, 0, words[: count // 2]), Piece(1, count // 2, words[count // 2 :])]
    checksum.prepare([piece for piece in pieces if len(piece.words)], values.device).add_to(values)
    assert values.tolist() == [0, int(weighted_sum(words.cpu(), 0))]
