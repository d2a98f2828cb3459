"""Memory by owner in the reference run: on a GPU its buckets, on a CPU everything, at every phase's edges."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from rltrace import memory, recorder
from rltrace.instrument.cuda_memory import LEDGER
from rltrace.instrument.fsdp2 import Shards
from rltrace.instrument.process_ledger import ProcessLedger
from rltrace.instrument.sharded_models import by_place
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
    f"{RUN}.rollout:Rollout.start",
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


def of_tokens(args: tuple[Any, ...]) -> Any:
    """Shape of a batch's tokens."""
    return tuple(args[1].tokens_BT.shape)


def of_new_tokens(args: tuple[Any, ...]) -> Any:
    """Shape of an engine step: its sequences, their new tokens, and how far back they look."""
    requests, new = args[1], args[2]
    return len(requests), max(map(len, new)), max(len(known.prompt) + len(known.tokens) for known in requests)


def always(_args: tuple[Any, ...]) -> Any:
    """One shape."""
    return ()


KERNELS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    f"{RUN}.engine.engine:Engine._forward": of_new_tokens,
    f"{RUN}.engine.engine:Engine.profile": always,
    f"{RUN}.actor:Actor.log_probs": of_tokens,
    f"{RUN}.actor:Ref.log_probs": of_tokens,
    f"{RUN}.actor:Actor._optimizer_step": always,
}
"""The first call of each shape leaves what torch's libraries keep for the next: oneDNN's kernels and scratch memory."""


class ReferenceMemory:
    """Bytes of each owner, and the totals that they must add up to."""

    name = "reference_memory"
    supports = ()

    def install(self, patches: PatchSet) -> None:
        """Sample at every edge."""
        sampler = Sampler()
        for target in EDGES:
            edge = Edge(sampler, target)
            patches.around(target, edge.before, edge.after)
        patches.around(f"{RUN}.weight_sync:Sender.send", sampler.sample_buckets, nothing)
        patches.around(f"{RUN}.weight_sync:Receiver.finish", keep, sampler.sample_after)
        patches.around(f"{RUN}.rollout:Rollout.__init__", keep, sampler.meet_engine)
        patches.around(f"{RUN}.engine.engine:Engine.__init__", sampler.meet_worker, nothing)
        step = f"{RUN}.engine.engine:Engine._forward"
        kernels = FirstCalls(sampler.ledger, KERNELS[step])
        patches.around(step, kernels.begin, kernels.end)
        micro_batch = MicroBatch(sampler)
        patches.around(f"{RUN}.actor:Actor.micro_batch", micro_batch.begin, micro_batch.end)
        patches.around(f"{RUN}.actor:Actor.forward", micro_batch.begin_forward, micro_batch.end_forward)


class Sampler:
    """What this process owns, as far as the edges have shown it."""

    def __init__(self) -> None:
        self.ledger = ProcessLedger()
        self.activation_bytes = 0

    def meet(self, owner: Any) -> None:
        """Remember whose edge this is; before the first model exists, what the process holds is its interpreter."""
        kind = type(owner).__name__
        sources = self.ledger.mapped if kind in MAPPED else self.ledger.in_heap
        if kind not in MEASURES or kind in sources:  # what it measures is known
            return
        sources[kind] = MEASURES[kind](owner)
        if kind == "Engine":
            self.ledger.in_heap[kind] = HostCopy(owner)
        self._begin_ledger(owner)

    def _begin_ledger(self, owner: Any) -> None:
        """Here, before the model exists, what the process holds is its interpreter."""
        config = getattr(owner, "config", None)
        if config is None:  # a sender's: whose device it is was said by its actor
            return
        self.ledger.on_gpu = config.device == "cuda"
        if self.ledger.on_gpu:
            return
        self.ledger.freeze()
        if type(owner).__name__ == "Actor":
            self.ledger.in_heap["activations"] = lambda: {"actor.activations_bytes": self.activation_bytes}

    def sample_buckets(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Sample when the second buffer is sent, and from then on the buckets alone: nothing else changes."""
        if self.ledger.on_gpu:
            LEDGER.tensors.setdefault("Sender", CudaBuckets(args[0]))
        if args[1].index == 1:
            (LEDGER if self.ledger.on_gpu else self.ledger).sample()
            return
        if self.ledger.on_gpu:
            return
        for name, value in BucketMemory(args[0])().items():
            recorder.counter(name, value)

    def sample_after(self, _args: Any, _result: Any, _error: BaseException | None) -> None:
        """Sample where only the end is an edge: before it shared memory is mapped twice, which takes long to divide."""
        self.ledger.on_gpu |= LEDGER.in_use  # an engine's process meets nobody who says so
        self.ledger.sample()

    def meet_engine(self, args: Any, _result: Any, error: BaseException | None) -> None:
        """The worker's device is its engine's too."""
        if error is None:
            self.ledger.peers.add(args[0].process.pid)

    def meet_worker(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """The engine's device is that of the worker that started it."""
        self.ledger.peers.add(os.getppid())


class Edge:
    """Before and after the calls of one function."""

    def __init__(self, sampler: Sampler, target: str) -> None:
        self._sampler = sampler
        self._kernels = FirstCalls(sampler.ledger, KERNELS[target]) if target in KERNELS else None

    def before(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int | None:
        """Sample."""
        self._sampler.meet(args[0])
        self._sampler.ledger.sample()
        return self._kernels.begin(args) if self._kernels is not None else None

    def after(self, unnamed_bytes: int | None, _result: Any, error: BaseException | None) -> None:
        """Sample; a process that ran out of memory says so first."""
        if error is not None:
            self._sampler.ledger.out_of_memory(error)
        elif self._kernels is not None:
            self._kernels.end(unnamed_bytes)
        self._sampler.ledger.sample()


class FirstCalls:
    """What libraries keep of a function's first call of each shape: measured where it comes into being, then frozen."""

    def __init__(self, ledger: ProcessLedger, shape_of: Callable[[tuple[Any, ...]], Any]) -> None:
        self._ledger = ledger
        self._shape_of = shape_of
        self._known: set[Any] = set()

    def begin(self, args: tuple[Any, ...], _kwargs: object = None) -> int | None:
        """The heap's bytes without an owner, before the first call of a shape."""
        shape = self._shape_of(args)
        if shape in self._known or not self._ledger.on_cpu:
            return None
        self._known.add(shape)
        return self._ledger.unnamed_heap_bytes()

    def end(self, unnamed_bytes: int | None, _result: Any = None, error: BaseException | None = None) -> None:
        """What the call has left."""
        if unnamed_bytes is not None and error is None:
            self._ledger.add_kernels(self._ledger.unnamed_heap_bytes() - unnamed_bytes)


class MicroBatch:
    """What a forward leaves for its backward: what the heap grew meanwhile."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._kernels = FirstCalls(sampler.ledger, of_tokens)
        self._is_inside = False

    def begin(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int | None:
        """A forward will come, and a backward."""
        self._is_inside = self._sampler.ledger.on_cpu
        return self._kernels.begin(args)

    def begin_forward(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int | None:
        """The heap before; None for a forward without a backward."""
        return memory.heap_used_bytes() if self._is_inside else None

    def end_forward(self, used_bytes: int | None, _result: Any, error: BaseException | None) -> None:
        """Now there are most of them."""
        if used_bytes is not None and error is None:
            self._sampler.activation_bytes = memory.heap_used_bytes() - used_bytes
            self._sampler.ledger.sample()

    def end(self, unnamed_bytes: int | None, _result: Any, error: BaseException | None) -> None:
        """The backward has used them up; or there was no room for it."""
        if error is not None:
            self._sampler.ledger.out_of_memory(error)
        self._sampler.activation_bytes = 0
        self._is_inside = False
        self._kernels.end(unnamed_bytes, error=error)


def keep(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Keep the call's arguments for its end."""
    return args


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
        """Bytes of an owner's tensors."""
        return {f"{owner}_bytes": memory.storage_bytes(tensors)}


def whole(policy: Any) -> list[Any]:
    """The parameters that rank 0 keeps whole until it has sent them."""
    return list(getattr(policy, "full", {}).values())


class ActorMemory(PolicyMemory):
    """The actor's."""

    def __call__(self) -> dict[str, int]:
        policy, shards = self._policy(), self.shards()
        optimizer = getattr(policy, "optimizer", None)
        return {
            **self.owned("actor.params", (*shards, *whole(policy))),
            **self.owned("actor.grads", (shard.grad for shard in shards if shard.grad is not None)),
            **self.owned("actor.optimizer", () if optimizer is None else memory.optimizer_tensors(optimizer)),
        }


class RefMemory(PolicyMemory):
    """The ref's, which never learns."""

    def __call__(self) -> dict[str, int]:
        return self.owned("ref.params", (*self.shards(), *whole(self._policy())))


class BucketMemory:
    """Pages of the shared buffers; counted at the sender, and not in the engine that maps them too."""

    def __init__(self, sender: Any) -> None:
        self._sender = weakref.ref(sender)

    def __call__(self) -> dict[str, int]:
        views = [buffer.bytes for buffer in getattr(self._sender(), "buffers", [])]
        resident = [memory.resident_bytes_at(view.data_ptr(), view.numel()) for view in views]
        return {"weight_sync.bucket_bytes": sum(resident)}


class CudaBuckets:
    """The shared buffers of a GPU, or pinned in the host's memory where those are staged."""

    def __init__(self, sender: Any) -> None:
        self._sender = weakref.ref(sender)

    def __call__(self) -> dict[str, int]:
        return by_place("weight_sync.bucket", [buffer.bytes for buffer in getattr(self._sender(), "buffers", [])])


class EngineMemory:
    """Pages of the engine's weights and of its KV pool: asleep they have an address and no page."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> dict[str, int]:
        regions = getattr(getattr(self._engine(), "pool", None), "regions", {})
        return {
            f"rollout.{tag}_bytes": memory.resident_bytes_at(region.address, region.size_bytes)
            for tag, region in regions.items()
        }


class HostCopy:
    """The engine's weights in host memory while it sleeps at level 1."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> dict[str, int]:
        copy = getattr(self._engine(), "host_weights", None)
        return {"rollout.weights_host_bytes": 0 if copy is None else memory.storage_bytes([copy])}


MEASURES: dict[str, Callable[[Any], Callable[[], dict[str, int]]]] = {
    "Actor": ActorMemory,
    "Ref": RefMemory,
    "Sender": BucketMemory,
    "Engine": EngineMemory,
}
"""Class of the reference run -> what measures its object."""

MAPPED = frozenset({"Sender", "Engine"})
"""Those whose bytes are mappings of their own; the others' come from the C library's allocator."""
