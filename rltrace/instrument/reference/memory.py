"""Memory by owner in the reference run: on a GPU its buckets, on a CPU everything, at every phase boundary."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from rltrace.hooks.arguments import keep_self
from rltrace.hooks.patching import PatchSet, nothing_after, nothing_before
from rltrace.host import memory
from rltrace.instrument.memory.cuda_memory import LEDGER
from rltrace.instrument.memory.process_ledger import ProcessLedger
from rltrace.instrument.memory.sharded_models import by_place
from rltrace.instrument.memory.uncaught_errors import watch_uncaught
from rltrace.instrument.torch.fsdp2 import Shards
from rltrace.record import spans

RUN = "rltrace_reference"

BOUNDARIES = (
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
"""A process samples what it owns before and after each of these calls."""

MOVES = (f"{RUN}.engine.engine:Engine.sleep", f"{RUN}.engine.engine:Engine.wake_up")
"""These calls take owners' mappings from memory and bring them back; the allocator has no part in it."""

INNER = (f"{RUN}.actor:Actor._optimizer_step",)
"""A phase makes these calls several times, each like the first; only the first is sampled."""


def of_tokens(args: tuple[Any, ...]) -> Any:
    """Return the shape of a batch's tokens."""
    return tuple(args[1].tokens_BT.shape)


def of_new_tokens(args: tuple[Any, ...]) -> Any:
    """Return the shape of an engine step: its sequences, their new tokens, and how far back they look."""
    requests, new = args[1], args[2]
    return len(requests), max(map(len, new)), max(len(known.prompt) + len(known.tokens) for known in requests)


def always(_args: tuple[Any, ...]) -> Any:
    """Return the one shape that there is."""
    return ()


KERNELS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    f"{RUN}.engine.engine:Engine.profile": always,
    f"{RUN}.actor:Actor.log_probs": of_tokens,
    f"{RUN}.actor:Ref.log_probs": of_tokens,
    f"{RUN}.actor:Actor._optimizer_step": always,
}
"""The first call of each shape leaves what torch's libraries keep for the next: oneDNN's kernels and scratch memory."""

GENERATE, ENGINE_STEP = f"{RUN}.engine.engine:Engine.generate", f"{RUN}.engine.engine:Engine._forward"
"""The same for an engine, whose steps keep having new shapes: all steps of a batch are measured at once."""


class ReferenceMemory:
    """Bytes of each owner, and the totals that they must add up to."""

    name = "reference_memory"
    supports = ()

    def install(self, patches: PatchSet) -> None:
        """Sample at every boundary."""
        sampler = Sampler()
        steps = FirstCallsInside(sampler.ledger, of_new_tokens)
        patches.around(ENGINE_STEP, steps.meet, nothing_after)
        kernels = {target: FirstCalls(sampler.ledger, shape_of) for target, shape_of in KERNELS.items()}
        kernels[GENERATE] = steps
        for target in BOUNDARIES:
            calls = SampledCalls(sampler, target, kernels.get(target))
            patches.around(target, calls.before, calls.after)
        patches.around(f"{RUN}.weight_sync:Sender.send", sampler.sample_buckets, nothing_after)
        patches.around(f"{RUN}.weight_sync:Receiver.finish", nothing_before, sampler.sample_after)
        patches.around(f"{RUN}.rollout:Rollout._spawn", keep_self, sampler.meet_engine)
        patches.around(f"{RUN}.engine.engine:Engine.__init__", sampler.meet_worker, nothing_after)
        micro_batch = MicroBatch(sampler)
        patches.around(f"{RUN}.actor:Actor.micro_batch", micro_batch.begin, micro_batch.end)
        patches.around(f"{RUN}.actor:Actor.forward", micro_batch.begin_forward, micro_batch.end_forward)
        watch_uncaught(patches, sampler.tell_uncaught)


class Sampler:
    """Knows what this process owns, as far as the boundaries have shown it."""

    def __init__(self) -> None:
        self.ledger = ProcessLedger()
        self.most_inside: dict[str, int] = {}
        """Size of the largest call of each kind that was sampled inside the open phase."""

    def meet(self, owner: Any) -> None:
        """Remember who reaches this boundary; before the first model exists, the process holds only its interpreter."""
        kind = type(owner).__name__
        sources = self.ledger.mapped if kind in MAPPED else self.ledger.in_heap
        if kind not in MEASURES or kind in sources:  # what it measures is known
            return
        sources[kind] = MEASURES[kind](owner)
        if kind == "Engine":
            self.ledger.in_heap[kind] = HostCopy(owner)
        self._begin_ledger(owner)

    def is_more(self, what: str, size: int) -> bool:
        """Tell whether a call is larger than all of its kind in this phase so far: then it is worth a sample."""
        is_more = size > self.most_inside.get(what, 0)
        if is_more:
            self.most_inside[what] = size
        return is_more

    def tell_uncaught(self, error: BaseException) -> None:
        """Say who held what when an error about memory ended this process; one that uses a GPU has another ledger."""
        if LEDGER.device() is None:
            self.ledger.out_of_memory(error)

    def _begin_ledger(self, owner: Any) -> None:
        """Begin the ledger before the model exists: what the process holds now is its interpreter."""
        config = getattr(owner, "config", None)
        if config is None:  # a sender's: whose device it is was said by its actor
            return
        self.ledger.on_gpu = config.device == "cuda"
        if self.ledger.on_gpu:
            return
        self.ledger.freeze()
        if type(owner).__name__ == "Actor":
            self.ledger.activation_bytes = 0

    def sample_buckets(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Sample when the second buffer is sent, and from then on the buckets alone: nothing else changes."""
        if self.ledger.on_gpu:
            LEDGER.tensors.setdefault("Sender", CudaBuckets(args[0]))
        if self.ledger.on_gpu:
            if args[1].index == 1:
                LEDGER.sample(of_processes=False)  # in the middle of the sync; what the engine moved it has said itself
            return
        if args[1].index == 1:
            self.ledger.sample()
            return
        for name, value in BucketMemory(args[0])().items():
            spans.counter(name, value)

    def sample_after(self, _token: Any, _result: Any, _error: BaseException | None) -> None:
        """Sample where only the end is a boundary: before it, memory is mapped twice, which takes long to divide."""
        self.ledger.on_gpu |= LEDGER.in_use  # an engine's process meets nobody who says so
        self.ledger.sample(moved=True)

    def meet_engine(self, rollout: Any, _result: Any, error: BaseException | None) -> None:
        """Note the engine's process: it is on the worker's device too."""
        if error is None:
            self.ledger.meet_peer(rollout.process.pid)

    def meet_worker(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Note the worker's process: the engine is on its device."""
        self.ledger.meet_peer(os.getppid())


class Began(NamedTuple):
    """What the sample after a call needs to know about the sample before it."""

    unnamed_bytes: int | None
    """The heap's bytes without an owner, where what libraries keep is measured."""


class SampledCalls:
    """Samples before and after the calls of one function."""

    def __init__(self, sampler: Sampler, target: str, kernels: FirstCalls | None) -> None:
        self._sampler, self._target, self._kernels = sampler, target, kernels

    def before(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Began | None:
        """Sample before a call; among the calls inside of a phase, only before the first."""
        if self._target not in INNER:
            self._sampler.most_inside.clear()
        elif not self._sampler.is_more(self._target, 1):
            return None
        self._sampler.meet(args[0])
        self._sampler.ledger.sample()
        return Began(self._kernels.begin(args) if self._kernels is not None else None)

    def after(self, began: Began | None, _result: Any, error: BaseException | None) -> None:
        """Sample after a call; a process that ran out of memory says so first."""
        if error is not None:
            self._sampler.ledger.out_of_memory(error)
        if began is None:
            return
        is_measured = error is None and self._kernels is not None and self._kernels.met_first
        before_kernels = began.unnamed_bytes if is_measured else None
        self._sampler.ledger.sample(moved=self._target in MOVES, before_kernels=before_kernels)


class FirstCalls:
    """What libraries keep after a function's first call of each shape: it is measured where it arises, then frozen."""

    def __init__(self, ledger: ProcessLedger, shape_of: Callable[[tuple[Any, ...]], Any]) -> None:
        self._ledger = ledger
        self._shape_of = shape_of
        self._known: set[Any] = set()
        self.met_first = False
        """Whether there was a first call since `begin`."""

    def begin(self, args: tuple[Any, ...]) -> int | None:
        """Return the heap's bytes without an owner, before the first call of a shape."""
        self.met_first = False
        self.meet(args)
        return self._ledger.unnamed_heap_bytes() if self._ledger.has_heap and self.met_first else None

    def meet(self, args: tuple[Any, ...], _kwargs: object = None) -> None:
        """Note a call."""
        if not self._ledger.has_heap:  # nothing will be measured, and the shape of an engine's step takes 7 µs
            return
        shape = self._shape_of(args)
        self.met_first |= shape not in self._known
        self._known.add(shape)


class FirstCallsInside(FirstCalls):
    """The same for calls that are made inside another call, which is the one that is measured."""

    def begin(self, _args: tuple[Any, ...]) -> int | None:
        """Return the heap's bytes without an owner, before any of the calls."""
        self.met_first = False
        return self._ledger.unnamed_heap_bytes() if self._ledger.has_heap else None


class MicroBatch:
    """What a forward leaves for its backward: the heap's growth in the largest forward of each phase."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._kernels = FirstCalls(sampler.ledger, of_tokens)
        self._is_sampled = False

    def begin(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int | None:
        """Begin a micro-batch: decide whether it is sampled, and return what `FirstCalls.begin` returns."""
        self._is_sampled = self._sampler.ledger.has_heap and self._sampler.is_more("forward", args[1].tokens_BT.numel())
        return self._kernels.begin(args)

    def begin_forward(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int | None:
        """Return the heap's bytes before a forward; None for a forward without a backward."""
        return self._sampler.ledger.unnamed_heap_bytes() if self._is_sampled else None

    def end_forward(self, unnamed_bytes: int | None, _result: Any, error: BaseException | None) -> None:
        """Sample after the forward, when there are the most activations."""
        if unnamed_bytes is not None and error is None:
            self._sampler.ledger.sample(before_forward=unnamed_bytes)

    def end(self, unnamed_bytes: int | None, _result: Any, error: BaseException | None) -> None:
        """End the micro-batch: its backward has used the activations up, or found no room."""
        ledger = self._sampler.ledger
        if error is not None:
            ledger.out_of_memory(error)
        if ledger.activation_bytes is not None:
            ledger.activation_bytes = 0
        self._is_sampled = False
        if unnamed_bytes is not None and error is None:
            ledger.add_kernels(ledger.unnamed_heap_bytes() - unnamed_bytes)


class PolicyMemory:
    """Parameters of a sharded model as they lie on this rank, and what learning adds to them.

    They are counted again when the first or the last parameter has moved, or got its gradient: all move at once.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = weakref.ref(policy)
        self._shards: Shards | None = None
        self._mark: Any = None
        self._rows: dict[str, int] = {}

    def __call__(self) -> dict[str, int]:
        policy, shards = self._policy(), self.shards()
        full = list(getattr(policy, "full", {}).values())  # what rank 0 keeps whole until it has sent it
        state = getattr(getattr(policy, "optimizer", None), "state", {})
        first_state = list(next(iter(state.values()), {}).values())
        grads = [shard.grad for shard in (*shards[:1], *shards[-1:])]
        mark = (
            len(shards),
            len(full),
            len(state),
            [address(t) for t in (*shards[:1], *shards[-1:], *grads, *first_state)],
        )
        if mark != self._mark:
            self._mark, self._rows = mark, self.count(policy, shards, full)
        return self._rows

    def shards(self) -> list[Any]:
        """Return this rank's shards; none before the model is built."""
        model = getattr(self._policy(), "model", None)
        if self._shards is None and model is not None:
            self._shards = Shards(model)
        return [] if self._shards is None else self._shards()

    def count(self, policy: Any, shards: list[Any], full: list[Any]) -> dict[str, int]:
        """Return the bytes by owner."""
        raise NotImplementedError


def address(tensor: Any) -> int:
    """Return the address of a tensor's memory; 0 for what is no tensor, or lies nowhere."""
    local = memory.local(tensor)
    return local.data_ptr() if hasattr(local, "data_ptr") else 0


class ActorMemory(PolicyMemory):
    """The actor's memory."""

    def count(self, policy: Any, shards: list[Any], full: list[Any]) -> dict[str, int]:
        """Return the bytes by owner."""
        optimizer = getattr(policy, "optimizer", None)
        return {
            "actor.params_bytes": memory.storage_bytes((*shards, *full)),
            "actor.grads_bytes": memory.storage_bytes(shard.grad for shard in shards if shard.grad is not None),
            "actor.optimizer_bytes": 0
            if optimizer is None
            else memory.storage_bytes(memory.optimizer_tensors(optimizer)),
        }


class RefMemory(PolicyMemory):
    """The memory of the ref, which never learns."""

    def count(self, _policy: Any, shards: list[Any], full: list[Any]) -> dict[str, int]:
        """Return the bytes by owner."""
        return {"ref.params_bytes": memory.storage_bytes((*shards, *full))}


class BucketMemory:
    """Pages of the shared buffers; counted at the sender, and not in the engine that maps them too."""

    def __init__(self, sender: Any) -> None:
        self._sender = weakref.ref(sender)

    def __call__(self) -> dict[str, int]:
        views = [buffer.bytes for buffer in getattr(self._sender(), "buffers", [])]
        resident = [memory.resident_bytes_at(view.data_ptr(), view.numel()) for view in views]
        return {"weight_sync.bucket_bytes": sum(resident)}


class CudaBuckets:
    """The shared buffers of a GPU, and the host's memory behind them if they are staged; counted at the sender."""

    def __init__(self, sender: Any) -> None:
        self._sender = weakref.ref(sender)

    def __call__(self) -> dict[str, int]:
        buffers = getattr(self._sender(), "buffers", [])
        staged = [buffer.host for buffer in buffers if hasattr(buffer, "host")]
        return by_place("weight_sync.bucket", [buffer.bytes for buffer in (*buffers, *staged)])


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
"""The bytes of these are mappings of their own; those of the others come from the C library's allocator."""
