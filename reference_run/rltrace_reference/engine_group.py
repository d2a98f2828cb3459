"""Weight sync by broadcast: rank 0's worker and all engines are one process group, and it sends each whole parameter.

Source: figure 1 of vLLM's RFC of weight synchronisation for RLHF. All ranks are on one host.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrace.errors import RunError
from rltrace_reference import checksum
from rltrace_reference.disk_reload import check, whole
from rltrace_reference.rollout import Rollout
from rltrace_reference.weight_sync import SyncStats

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=2)


class Group:
    """One end: rank 0 is the sender."""

    def __init__(self, backend: str, port: int, rank: int, size: int, store: Any = None) -> None:
        """Join the others; returns when all are there."""
        store = store or dist.TCPStore(HOST, port, is_master=False)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self.group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self.group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)

    def broadcast(self, tensor: Tensor) -> None:
        """Send rank 0's tensor into everybody's."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([tensor], options).wait()


class Broadcast:
    """A worker's part of the syncs."""

    def __init__(self, rollout: Rollout, backend: str) -> None:
        """Join, and let the engine join.

        Raises:
            RunError: the engine cannot.
        """
        self.rollout = rollout
        self.is_first = dist.get_rank() == 0
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False) if self.is_first else None
        port = [store.port if store is not None else 0]
        dist.broadcast_object_list(port, src=0, device=torch.device("cpu"))
        size = dist.get_world_size() + 1
        rollout.send("join_group", backend=backend, port=port[0], rank=dist.get_rank() + 1, size=size)
        try:
            self.group = Group(backend, port[0], 0, size, store) if self.is_first else None
        finally:
            rollout.answer()

    def sync(self, parameters: Iterable[tuple[str, Tensor]]) -> SyncStats:
        """Send every parameter, and return when the engine has proven that it has them.

        Args:
            parameters: Names and sharded parameters; every rank must come with all of them.

        Raises:
            RunError: what lies in the engine's weights is not what was sent; names the first tensor.
        """
        start = time.monotonic()
        named = dict(parameters)
        self.rollout.send("receive_broadcast", names=list(named))
        sent, sent_bytes = {}, 0
        try:
            for name, parameter in named.items():
                gathered = whole(parameter).contiguous()
                (sent[name],) = checksum.of_tensors([gathered])
                sent_bytes += gathered.nbytes
                if self.group is not None:
                    self.group.broadcast(gathered)
        except RuntimeError as error:  # what the backend cannot do, in its own words
            raise RunError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
        finally:
            self.rollout.answer()
        check(sent, self.rollout.checksums(), self.rollout.rank)
        return SyncStats(sent_bytes, len(sent), len(sent), time.monotonic() - start)


def receive(group: Group, weights: dict[str, Tensor], names: list[str]) -> None:
    """Load what rank 0 broadcasts, in this order; each parameter takes memory of its own on the way."""
    for name in names:
        weight = weights[name]
        arrived = torch.empty_like(weight)
        group.broadcast(arrived)
        weight.copy_(arrived)
