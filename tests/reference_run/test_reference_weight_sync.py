"""Every tensor is proven to have arrived: real sender, real shared memory, real engine process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rltrace_reference import checksum
from rltrace_reference.channel import Channel
from rltrace_reference.config import Config
from rltrace_reference.engine.server import Server
from rltrace_reference.rollout import Rollout
from rltrace_reference.shared_memory import SharedMemory
from rltrace_reference.weight_sync import Bucket, DirectSender, Receiver, Sender

from rltrace.errors import RunError

NAMES = sorted(Config().model.shapes())
BUCKET_BYTES = 20_000


class FaultyReceiver(Receiver):
    """After a load, one parameter is as if its bytes had not arrived, or had arrived in other places."""

    stale: str | None = None
    swapped: str | None = None

    def load(self, bucket: Bucket) -> None:
        before = {name: parameter.clone() for name, parameter in self.parameters.items()}
        super().load(bucket)
        names = {entry.name for entry in bucket.entries}
        if self.stale in names:
            self.parameters[self.stale].copy_(before[self.stale])
        if self.swapped in names:
            first, second = self.parameters[self.swapped].view(-1, 64)[:2].clone()
            self.parameters[self.swapped].view(-1, 64)[:2] = torch.stack((second, first))


def sender_to(channel: Channel, **options: Any) -> Sender:
    return Sender(channel, BUCKET_BYTES, "s", SharedMemory(), **options)


@pytest.fixture(scope="module")
def server() -> Server:
    """A real engine whose receiver can hold a parameter back."""
    server = Server(Config(), rank=1, eos=11)
    server.on_start()
    server.receiver = FaultyReceiver(server.engine.parameters, 1, SharedMemory())
    return server


@pytest.fixture
def channel(server: Server) -> Iterator[Channel]:
    """The other end of the engine's channel, which it serves on a thread."""
    ours, theirs = map(Channel, socket.socketpair())
    thread = threading.Thread(target=server.serve, args=(theirs,))
    thread.start()
    yield ours
    ours.send({"call": "exit"})
    thread.join()


def step_of(weights: dict[str, torch.Tensor], step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters after some steps of learning: each differs from the last in one element only."""
    for name, tensor in weights.items():
        moved = tensor.clone()
        moved.view(-1)[0] += step
        yield name, moved


def test_engine_has_the_bytes_sent(channel: Channel, server: Server, weights: dict[str, torch.Tensor]) -> None:
    """A sync fills the engine with exactly the bytes sent."""
    stats = sender_to(channel).sync(weights.items(), step=0)
    assert stats.bytes == sum(w.nbytes for w in weights.values())
    assert stats.tensors == len(weights) == 24
    assert stats.buckets > 4
    assert all(torch.equal(p, weights[name]) for name, p in server.engine.weights.parameters.items())
    fused = server.engine.weights.matrices["model.layers.1.self_attn.qkv_proj.weight"]
    parts = [weights[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(fused, torch.cat(parts))


@pytest.mark.parametrize("name", NAMES)
def test_stale_parameter_is_named(
    name: str, channel: Channel, server: Server, weights: dict[str, torch.Tensor]
) -> None:
    """One parameter held one step stale is caught and named."""
    sender = sender_to(channel)
    sender.sync(step_of(weights, 0), step=0)
    server.receiver.stale = name
    with pytest.raises(RunError, match=rf"weight sync: {name} did not arrive in the engine of rank 1: checksum"):
        sender.sync(step_of(weights, 1), step=1)
    server.receiver.stale = None


def test_swapped_rows_are_named(channel: Channel, server: Server, weights: dict[str, torch.Tensor]) -> None:
    """Two rows that changed places are caught and named."""
    server.receiver.swapped = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(RunError, match=r"model\.layers\.1\.mlp\.up_proj\.weight did not arrive"):
        sender_to(channel).sync(weights.items(), step=0)
    server.receiver.swapped = None


def test_parts_sum_up_to_the_whole() -> None:
    """Parts of a tensor sum up to the whole, and in other places to something else.

    Whichever rank has them.
    """
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    words, device = tensor.view(torch.int16), torch.device("cpu")
    (whole,) = checksum.of_tensors([tensor])
    cuts = [0, 1, 256, 700, 1000]
    pieces = [checksum.Piece(0, start, words[start:end]) for start, end in pairwise(cuts)]
    found = torch.zeros(2, dtype=torch.int64)
    for of_rank in (pieces[:2], pieces[2:]):
        checksum.prepare(of_rank, device).add_to(found)
    assert found.tolist() == [whole, 0]
    moved = [piece._replace(slot=1, start=piece.start + 1) for piece in pieces]
    checksum.prepare(moved, device).add_to(found)
    assert found[1] != whole


def test_checksum_follows_its_formula() -> None:
    """A checksum is what its formula gives in unbounded integers.

    Also far into a parameter, where products are large: a GPU's kernel is held to the same formula.
    """

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    words = torch.tensor([1, -1, 32767, -32768, 5], dtype=torch.int16)
    for start in (0, 70_000, 2**31 + 9):
        exact = sum(int(word) * (mix(start + place) | 1) for place, word in enumerate(words))
        assert int(checksum.weighted_sum(words, start)) % 2**64 == exact % 2**64


def test_unsent_parameter_is_named(channel: Channel, weights: dict[str, torch.Tensor]) -> None:
    """A parameter that is never sent is named."""
    del weights["model.norm.weight"]
    with pytest.raises(RunError, match=r"model\.norm\.weight \(1 of 24 parameters\) was never sent"):
        sender_to(channel).sync(weights.items(), step=0)


def test_unknown_parameter_is_named(channel: Channel, weights: dict[str, torch.Tensor]) -> None:
    """A parameter that the engine does not have is named."""
    extra = {"model.extra.weight": torch.zeros(3)}
    with pytest.raises(RunError, match=r"model\.extra\.weight of 3 elements was sent, the engine of rank 1 has no"):
        sender_to(channel).sync((extra | weights).items(), step=0)


def test_two_buckets_in_flight(lasting_rollout: Rollout, weights: dict[str, torch.Tensor]) -> None:
    """Two buckets are in flight and never three."""
    unacknowledged: list[int] = []

    class Counting(Sender):
        def send(self, *arguments: Any) -> None:
            super().send(*arguments)
            unacknowledged.append(len(self.in_flight))

        def wait(self, bucket: Bucket) -> None:
            unacknowledged.append(len(self.in_flight))
            super().wait(bucket)

    Counting(lasting_rollout.channel, BUCKET_BYTES, "s", SharedMemory()).sync(weights.items(), step=0)
    assert max(unacknowledged) == 2


def buffers(pid: int) -> int:
    """Mappings and descriptors of buckets in a process."""
    names = Path(f"/proc/{pid}/maps").read_text().splitlines()
    names += [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return sum("rltrace-bucket" in name for name in names)


def test_buffers_are_gone_after_a_sync(lasting_rollout: Rollout, weights: dict[str, torch.Tensor]) -> None:
    """The buffers are gone after a sync on both sides."""
    seen: list[int] = []

    class Counting(Sender):
        def wait(self, bucket: Bucket) -> None:
            seen.append(buffers(os.getpid()))
            super().wait(bucket)

    sender = Counting(lasting_rollout.channel, BUCKET_BYTES, "s", SharedMemory())
    before = buffers(os.getpid())
    for step in range(3):
        sender.sync(weights.items(), step)
    assert max(seen) >= before + 4  # so this test would see one that stayed
    assert buffers(os.getpid()) == before
    assert buffers(lasting_rollout.process.pid) == 0


def test_kept_buffers_serve_again(rollout: Rollout, weights: dict[str, torch.Tensor]) -> None:
    """Kept buffers serve the next sync too."""
    sender = sender_to(rollout.channel, keep=True, buffers=3)
    sender.sync(step_of(weights, 0), step=0)
    addresses = [buffer.bytes.data_ptr() for buffer in sender.buffers]
    mapped = buffers(rollout.process.pid)
    sender.sync(step_of(weights, 1), step=1)
    assert buffers(rollout.process.pid) == mapped > 0, "the engine has them already"
    assert [buffer.bytes.data_ptr() for buffer in sender.buffers] == addresses
    assert len(addresses) == 3


def test_parameters_mapped_by_themselves(lasting_rollout: Rollout, weights: dict[str, torch.Tensor]) -> None:
    """Each parameter can be memory of its own: all arrive, nothing stays, and buckets work again after it."""
    before = buffers(os.getpid())
    direct = DirectSender(lasting_rollout.channel, BUCKET_BYTES, "d", SharedMemory())
    assert direct.sync(weights.items(), 0).buckets == len(weights)
    assert lasting_rollout.checksums() == {name: checksum.of_tensors([weight])[0] for name, weight in weights.items()}
    assert (buffers(os.getpid()), buffers(lasting_rollout.process.pid)) == (before, 0)
    sender_to(lasting_rollout.channel).sync(step_of(weights, 1), 1)


def test_synced_engine_samples_again(lasting_rollout: Rollout, weights: dict[str, torch.Tensor]) -> None:
    """An engine synced after sleep samples again."""
    sender = sender_to(lasting_rollout.channel)
    sender.sync(weights.items(), 0)
    before = lasting_rollout.generate([[10, 5]], seed=0, step=0)
    lasting_rollout.sleep(2)
    lasting_rollout.wake_up(["weights"])
    sender.sync(weights.items(), 1)
    lasting_rollout.wake_up(["kv_cache"])
    after = lasting_rollout.generate([[10, 5]], seed=0, step=1)
    assert torch.equal(before.tokens_BT, after.tokens_BT)
    assert torch.equal(before.engine_log_probs_BT, after.engine_log_probs_BT)


def test_unsynced_engine_ends_the_run(rollout: Rollout, weights: dict[str, torch.Tensor]) -> None:
    """An engine without a sync after sleep ends the run."""
    sender_to(rollout.channel).sync(weights.items(), 0)
    rollout.sleep(2)
    rollout.wake_up(["weights", "kv_cache"])
    with pytest.raises(RunError, match="its logits are not finite"):
        rollout.generate([[10, 5]], seed=0, step=1)


def test_killed_engine_names_its_signal(rollout: Rollout) -> None:
    """A killed engine is named with its signal."""
    rollout.process.kill()
    with pytest.raises(RunError, match=rf"engine of rank 0 \(pid {rollout.process.pid}\) died: killed by SIGKILL"):
        rollout.generate([[10, 5]], seed=0, step=0)
