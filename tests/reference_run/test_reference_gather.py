"""What two ranks gather lies in the engine as the whole parameters do, whatever their sizes."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from gloo_ranks import RANKS, on_ranks
from rltrace_reference import checksum
from rltrace_reference.channel import Channel
from rltrace_reference.checksum import Piece, weighted_sum
from rltrace_reference.shared_memory import SharedMemory
from rltrace_reference.weight_sync import EXCHANGES, Bucket, Receiver, Sender
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

SHAPES = {"odd rows": (37, 5), "norm": (128,), "larger than a bucket": (1000, 64), "fewer rows than ranks": (1, 7)}


def parameters() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(4)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def serve(receiver: Receiver, channel: Channel) -> None:
    """The engine's side of one sync."""
    while True:
        message, descriptors = channel.receive()
        if message["call"] == "finish_sync":
            receiver.finish(message["checksums"], message["keep"])
            channel.send({"result": None})
            return
        bucket = msgspec.convert(message["bucket"], Bucket)
        channel.send({"result": receiver.receive(bucket, message["handle"], message["size_bytes"], descriptors)})


def sync_on_rank(rank: int, exchange: str) -> dict[str, torch.Tensor]:
    """What the engine of this rank holds after a sync."""
    mesh = init_device_mesh("cpu", (RANKS,))
    shards = {name: distribute_tensor(whole, mesh, [Shard(0)]) for name, whole in parameters().items()}
    engine = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    ours, theirs = map(Channel, socket.socketpair())
    thread = threading.Thread(target=serve, args=(Receiver(engine, rank, SharedMemory()), theirs))
    thread.start()
    Sender(ours, 16384, "s", SharedMemory(), exchange=EXCHANGES[exchange]).sync(shards.items(), step=0)
    thread.join()
    return engine


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_engines_hold_every_parameter(exchange: str, tmp_path: Path) -> None:
    """Each engine holds the whole of every parameter."""
    for rank, held in enumerate(on_ranks(sync_on_rank, tmp_path, exchange)):
        for name, whole in parameters().items():
            assert torch.equal(held[name], whole.bfloat16()), (rank, name)


def words(count: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(5)).to(torch.int32)


def total(pieces: list[Piece]) -> int:
    values = torch.zeros(1, dtype=torch.int64)
    checksum.prepare(pieces, values.device).add_to(values)
    return int(values)


def test_checksums_of_parts_add_up() -> None:
    """The checksums of parts add up to that of the whole."""
    whole = words(1000)
    assert total([Piece(0, 300, whole[300:]), Piece(0, 0, whole[:300])]) == total([Piece(0, 0, whole)])


def test_checksum_is_the_written_one() -> None:
    """The checksum is the one written down."""
    # mix(0) is 0 and mix(1) is 0x688990C0
    assert int(weighted_sum(torch.tensor([5, -2], dtype=torch.int16), 0)) == 5 * 1 - 2 * 0x688990C1


@pytest.mark.parametrize("change", ["one bit", "two words swapped", "two rows swapped", "shifted by one"])
def test_change_changes_the_checksum(change: str) -> None:
    """A change is a change of the checksum."""
    whole = words(64)
    other: Any = whole.clone()
    if change == "one bit":
        other[17] ^= 1 << 30
    elif change == "two words swapped":
        other[[3, 40]] = whole[[40, 3]]
    elif change == "two rows swapped":  # of equal sums, which a weight that grows evenly would not see
        whole = torch.tensor([1, 2, 3, 0, 2, 2, 1, 1], dtype=torch.int32)
        other = whole.view(2, 4).flip(0).reshape(-1)
    else:
        other = whole.roll(1)
    assert total([Piece(0, 0, other)]) != total([Piece(0, 0, whole)])
