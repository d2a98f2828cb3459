"""One rank: its actor, its ref and its engine. A plain class; `worker_group.py` makes it a Ray actor.

The driver imports it too, for its name alone. So what only a worker needs is imported where a worker needs it, FSDP2
and transformers while the engine's process imports what it needs.
"""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import rltrace
from rltrace_reference import garbage

if TYPE_CHECKING:
    from torch import Tensor

    from rltrace_reference.batch import Batch
    from rltrace_reference.config import Config
    from rltrace_reference.step_record import UpdateStats
    from rltrace_reference.strategy import Strategy
    from rltrace_reference.weight_sync import SyncStats

LOOPBACK = "127.0.0.1"
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class Worker:
    """The methods the driver calls, in the order of a run."""

    def __init__(self, rank: int, config: Config, run_id: str) -> None:
        self.rank, self.config, self.run_id = rank, config, run_id
        garbage.pause()
        import torch

        from rltrace_reference.rollout import Rollout

        torch.set_num_threads(1)
        # Here, not in `setup`: the engine dies with the thread that started it, and this is the main one.
        self.rollout = Rollout(config, rank)

    def pids(self) -> dict[str, Any]:
        """Return this rank's processes by role, and the host on which they have these pids."""
        return {"worker": os.getpid(), "engine": self.rollout.process.pid, "host": socket.gethostname()}

    def open_store(self) -> tuple[str, int]:
        """Open the ranks' meeting point at a free port of rank 0, and return where it is."""
        host = LOOPBACK
        if self.config.ray_address is not None:
            import ray

            host = ray.util.get_node_ip_address()
        import torch.distributed as dist

        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def setup(self, host: str, port: int) -> None:
        """Join the ranks at rank 0's store, then build actor, ref and engine, and put the engine to sleep."""
        threading.current_thread().name = "worker"  # Ray runs the driver's calls on a thread of its own
        import torch
        import torch.distributed as dist

        from rltrace_reference import device
        from rltrace_reference.actor import Actor, Ref
        from rltrace_reference.device_memory import DeviceMemory, give_back_large_blocks
        from rltrace_reference.sharding_manager import ShardingManager

        if self.rank != 0:
            self.store = dist.TCPStore(host, port, is_master=False)
        dist.init_process_group(
            device.backend(self.config),
            store=self.store,
            rank=self.rank,
            world_size=self.config.ranks,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=torch.device("cuda", 0) if self.config.device == "cuda" else None,
        )
        if self.config.memory_limit_bytes is not None:
            give_back_large_blocks()
        import transformers.models.qwen3.modeling_qwen3  # noqa: F401  # its bytes are the interpreter's

        garbage.freeze()
        self.memory = self.rollout.memory = DeviceMemory(self.config.memory_limit_bytes)
        self.actor = Actor(self.config, self.rank)
        self.ref = Ref(self.config, self.rank)
        device.empty_cache(self.config)
        self.sharding_manager = ShardingManager(self.actor, self.rollout, f"{self.run_id}.{self.rank}")
        self.sharding_manager.start()
        garbage.freeze()

    def generate(self, prompts: list[list[int]], step: int) -> Batch:
        """Sample responses from the current policy."""
        seed = (self.config.seed * 1_000_003 + step) * 4099 + self.rank
        with self.memory.limited(), self.sharding_manager.at(step):
            return self.rollout.generate(prompts, seed, step)

    def old_log_prob(self, batch: Batch) -> Tensor:
        """Return log-probs by the actor before the update, shape (B, T)."""
        with self.memory.limited():
            self.actor.onload()
            return self.actor.log_probs(batch)

    def ref_log_prob(self, batch: Batch) -> Tensor:
        """Return log-probs by the ref, shape (B, T)."""
        with self.memory.limited():
            return self.ref.log_probs(batch)

    def update(self, batch: Batch, step: int) -> UpdateStats:
        """Learn from the step's samples."""
        with self.memory.limited():
            self.actor.onload(optimizer=True)
            stats = self.actor.update(batch, step)
            self.actor.offload(changed=True)
        return stats

    def compare_sync(self, strategy: Strategy, rounds: int) -> list[SyncStats]:
        """Sync the weights repeatedly in one way; not part of a run."""
        manager = self.sharding_manager
        if strategy.restarts_engine:
            return self._compare_reload(rounds)
        if strategy.broadcasts:
            return self._compare_broadcast(strategy.transport, rounds)
        sender = manager.sender_of(strategy)
        self.rollout.use_transport(strategy.transport)
        self.rollout.wake_up(["weights", "kv_cache"])
        stats = [sender.sync(self.actor.state_dict(), step) for step in range(rounds)]
        self.rollout.use_transport(strategy.transport)  # it unmaps what was kept
        sender.close()
        self.rollout.sleep(self.config.rollout.sleep_level)
        return stats

    def _compare_reload(self, rounds: int) -> list[SyncStats]:
        from rltrace_reference.disk_reload import DiskReload

        with DiskReload(self.rollout) as reload:
            stats = [reload.sync(self.actor.state_dict()) for _ in range(rounds)]
        self.rollout.sleep(self.config.rollout.sleep_level)
        return stats

    def _compare_broadcast(self, backend: str, rounds: int) -> list[SyncStats]:
        from rltrace_reference.engine_group import Broadcast

        self.rollout.wake_up(["weights", "kv_cache"])
        try:
            broadcast = Broadcast(self.rollout, backend)
            return [broadcast.sync(self.actor.state_dict()) for _ in range(rounds)]
        finally:
            self.rollout.sleep(self.config.rollout.sleep_level)

    def record(self, on: bool) -> None:
        """Continue or pause recording, here and in the engine; does nothing if nobody records."""
        (rltrace.resume if on else rltrace.pause)()
        self.rollout.record(on)

    def kernels(self, on: bool) -> None:
        """Begin or end recording every operator and kernel, here and in the engine."""
        (rltrace.start_kernels if on else rltrace.stop_kernels)()
        self.rollout.kernels(on)

    def allocations(self, on: bool) -> None:
        """Begin recording every allocation, here and in the engine; or end it, and write them."""
        (rltrace.start_allocations if on else rltrace.stop_allocations)()
        self.rollout.allocations(on)

    def measure_cost(self) -> None:
        """Measure what recording an event costs here and in the engine."""
        rltrace.measure_cost()
        self.rollout.measure_cost()

    def watch(self) -> str:
        """Return how this rank's engine died, once it has; this runs beside the other methods."""
        return self.rollout.death()

    def close(self) -> None:
        """End the engine and leave the ranks."""
        self.sharding_manager.close()
        self.rollout.close()
        import torch.distributed as dist

        dist.destroy_process_group()
