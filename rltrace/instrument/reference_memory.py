"""Memory by owner in the reference run on a CPU, sampled at every phase's edges and where gradients are largest."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from rltrace import memory, recorder
from rltrace.events import EDGE
from rltrace.instrument.fsdp2 import Shards
from rltrace.patching import PatchSet

RUN = "rltrace_reference"

EDGES = (
    f"{RUN}.actor:Actor.build",
    f"{RUN}.actor:Actor.shard",
    f"{RUN}.actor:Actor.broadcast",
    f"{RUN}.actor:Ref.build",
    f"{RUN}.actor:Ref.shard",
    f"{RUN}.actor:Ref.broadcast",
    f"{RUN}.sharding_manager:ShardingManager.wake_weights",
    f"{RUN}.sharding_manager:ShardingManager.sync_weights",
    f"{RUN}.sharding_manager:ShardingManager.wake_kv_cache",
    f"{RUN}.rollout:Rollout.generate",
    f"{RUN}.rollout:Rollout.sleep",
    f"{RUN}.actor:Actor.log_probs",
    f"{RUN}.actor:Ref.log_probs",
    f"{RUN}.actor:Actor.update",
    f"{RUN}.actor:Actor._optimizer_step",
    f"{RUN}.weight_sync:Sender.sync",
    f"{RUN}.engine.engine:Engine.load",
    f"{RUN}.engine.engine:Engine.profile",
    f"{RUN}.engine.engine:Engine.reserve_kv",
    f"{RUN}.engine.engine:Engine.sleep",
    f"{RUN}.engine.engine:Engine.wake_up",
    f"{RUN}.engine.engine:Engine.generate",
)
"""Before and after each of these a process samples what it owns."""


class ReferenceMemory:
    """Bytes of each owner, and of each process."""

    name = "reference_memory"
    supports = ()

    def install(self, patches: PatchSet) -> None:
        """Sample at every edge."""
        sampler = Sampler()
        for target in EDGES:
            patches.around(target, sampler.before, sampler.after)
        patches.around(f"{RUN}.weight_sync:Sender.send", sampler.sample_buckets, nothing)


class Sampler:
    """What this process owns, as far as the edges have shown it, and how it is measured."""

    def __init__(self) -> None:
        self._process = memory.ProcessMemory()
        self._owned: dict[str, Callable[[], dict[str, int]]] = {}

    def before(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Remember whose edge this is, and sample."""
        kind = type(args[0]).__name__
        if kind in MEASURES and kind not in self._owned:
            self._owned[kind] = MEASURES[kind](args[0])
        self.sample()

    def after(self, _token: Any, _result: Any, _error: BaseException | None) -> None:
        """Sample."""
        self.sample()

    def sample_buckets(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Sample the buckets alone: this happens many times in a sync, and nothing else changes in it."""
        for name, value in BucketMemory(args[0])().items():
            recorder.counter(name, value)

    def sample(self) -> None:
        """Write what everything that is owned here takes now, and the process as a whole."""
        with recorder.span(EDGE):
            for measure in self._owned.values():
                for name, value in measure().items():
                    recorder.counter(name, value)
            recorder.counter("resident_bytes", self._process.resident_bytes())


def nothing(_token: Any, _result: Any, _error: BaseException | None) -> None:
    """All was done before."""


class PolicyMemory:
    """Parameters of a sharded model as they lie on this rank, and what learning adds to them."""

    def __init__(self, policy: Any) -> None:
        self._policy = weakref.ref(policy)
        self._shards: Shards | None = None

    def shards(self) -> list[Any]:
        """This rank's shards; none before the model is built."""
        model = getattr(self._policy(), "model", None)
        if self._shards is None and model is not None:
            self._shards = Shards(model)
        return [] if self._shards is None else self._shards()

    def owned(self, owner: str, tensors: Iterable[Any]) -> dict[str, int]:
        """Bytes of an owner's tensors on the run's device; on a GPU, what is offloaded from it is the host's."""
        tensors = list(tensors)
        if getattr(getattr(self._policy(), "config", None), "device", "cpu") != "cuda":
            return {f"{owner}_bytes": memory.storage_bytes(tensors)}
        offloaded = [tensor for tensor in tensors if not tensor.is_cuda]
        return {
            f"{owner}_bytes": memory.storage_bytes(tensor for tensor in tensors if tensor.is_cuda),
            f"{owner}_host_bytes": memory.storage_bytes(offloaded),
        }


class ActorMemory(PolicyMemory):
    """The actor's."""

    def __call__(self) -> dict[str, int]:
        shards = self.shards()
        optimizer = getattr(self._policy(), "optimizer", None)
        return {
            **self.owned("actor.params", shards),
            **self.owned("actor.grads", (shard.grad for shard in shards if shard.grad is not None)),
            **self.owned("actor.optimizer", () if optimizer is None else memory.optimizer_tensors(optimizer)),
        }


class RefMemory(PolicyMemory):
    """The ref's, which never learns."""

    def __call__(self) -> dict[str, int]:
        return self.owned("ref.params", self.shards())


class BucketMemory:
    """Pages of the shared buffers; counted at the sender, and not in the engine that maps them too."""

    def __init__(self, sender: Any) -> None:
        self._sender = weakref.ref(sender)

    def __call__(self) -> dict[str, int]:
        views = [buffer.bytes for buffer in getattr(self._sender(), "buffers", [])]
        resident = [
            view.numel() if view.is_cuda else memory.resident_bytes_at(view.data_ptr(), view.numel()) for view in views
        ]
        return {"weight_sync.bucket_bytes": sum(resident)}


class EngineMemory:
    """Pages of the engine's weights and of its KV pool: asleep they have an address and no page."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> dict[str, int]:
        pool = getattr(self._engine(), "pool", None)
        return {
            f"rollout.{tag}_bytes": memory.resident_bytes_at(region.address, region.size_bytes)
            for tag, region in (pool.regions.items() if pool is not None else ())
        }


MEASURES: dict[str, Callable[[Any], Callable[[], dict[str, int]]]] = {
    "Actor": ActorMemory,
    "Ref": RefMemory,
    "Sender": BucketMemory,
    "Engine": EngineMemory,
}
"""Class of the reference run -> what measures its object."""
