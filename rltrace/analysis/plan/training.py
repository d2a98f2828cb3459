"""A trainer's process through a step, allocation by allocation, as FSDP2 of torch 2.11 makes them.

`_fsdp_collectives.py` and `_fsdp_param_group.py` say in which order, and on which stream: gathers are copied in on a
stream of their own, reductions are made on another, and torch's cache keeps each stream's blocks apart. Few
micro-batches are enough, since each repeats the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

from rltrace.analysis.plan import activations
from rltrace.analysis.plan.allocator import Block, CachingAllocator
from rltrace.analysis.plan.shapes import Shapes, elements
from rltrace.analysis.plan.trainer import Trainer

UNATTRIBUTED = "unattributed"
COPY_IN = "all_gather_copy_in"
REDUCE = "reduce_scatter"
WORKSPACE_BYTES = 32 << 20
"""cuBLAS's workspace for one thread's handle on Hopper (`getChosenWorkspaceSize` in `aten/src/ATen/cuda/
CublasHandlePool.cpp`: 32 MiB from compute capability 9.0 on). A forward and a backward run on threads of their own."""


class Moment(NamedTuple):
    """A trainer's process at one moment."""

    owners: dict[str, int]
    """What is handed out, by owner, activations and whatever is on its way included."""
    reserved_bytes: int


class Stage(NamedTuple):
    """A phase of the trainer."""

    most: Moment
    """When most was handed out."""
    end: Moment
    most_reserved_bytes: int
    most_held_bytes: int
    """What is reserved at least, if the cache is given back whenever memory runs out."""
    named_peaks: dict[str, int]


class Leftover(NamedTuple):
    """What an emptied cache keeps: the rest of segments of which something is in use."""

    bytes: int
    by_chance_bytes: int
    """The largest segment that only a workspace of cuBLAS keeps. It might as well lie in another one, or that one in a
    third, so as much may be kept more, or less."""


@dataclass
class Group:
    """Parameters that FSDP gathers together."""

    shapes: Shapes
    reshard_after_forward: bool
    element_bytes: int
    """Of its shards."""
    is_offloaded: bool = False
    owner: str = "actor.params"
    gathered: list[Block] = field(default_factory=list)
    gradients: list[Block] = field(default_factory=list)
    """On their way to the reduction."""
    reduced: Block | None = None
    """The shards of the gradients."""

    @property
    def elements(self) -> int:
        """Return how many numbers are gathered."""
        return elements(self.shapes)


@dataclass
class Sharded:
    """A model whose parts are gathered when they run."""

    root: Group
    """All that is in no other group."""
    embedding: Group | None
    layers: list[Group]
    head: Group | None

    @property
    def groups(self) -> list[Group]:
        """Return all of them."""
        return [self.root, *filter(None, [self.embedding]), *self.layers, *filter(None, [self.head])]


class Walk:
    """Walks through the phases of a trainer's process."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.allocator = CachingAllocator(trainer.is_expandable)
        self.named: dict[str, int] = {}
        """Bytes by owner of what has one."""
        self.peaks: dict[str, int] = {}
        self.most: Moment | None = None
        self.most_bytes = 0
        self.gathering: Block | None = None
        self.reducing: Block | None = None
        self.params: list[Block] = []
        self.optimizer: list[Block] = []
        self.away: dict[str, list[int]] = {}
        """Sizes of the parameters and states that are in host memory, by owner."""
        self.adapter_grads: Block | None = None
        self.orders: dict[int, list[tuple[str, int]]] = {}
        self.normed: list[Block] = []
        """What the last norm keeps for its backward."""
        self.workspaces: list[Block] = []
        self.actor = model_of(trainer, is_ref=False)
        self.ref = model_of(trainer, is_ref=True) if trainer.has_ref else None
        self.place_shards()
        self.place_others()
        self.allocator.empty_cache()

    def take(self, size_bytes: int, owner: str = "", stream: str = "") -> Block:
        """Allocate; remember the fullest moment."""
        block = self.allocator.allocate(size_bytes, stream)
        if owner:
            self.named[owner] = self.named.get(owner, 0) + block.size_bytes
            self.peaks[owner] = max(self.peaks.get(owner, 0), self.named[owner])
        if self.most is None or self.allocator.allocated_bytes > self.most_bytes:
            self.most, self.most_bytes = self.now(), self.allocator.allocated_bytes
        return block

    def give(self, *blocks: Block, owner: str = "") -> None:
        """Free."""
        for block in blocks:
            if owner:
                self.named[owner] -= block.size_bytes
            self.allocator.release(block)

    def now(self) -> Moment:
        """Return what is held."""
        held = {owner: size for owner, size in self.named.items() if size}
        rest = self.allocator.allocated_bytes - sum(held.values())
        return Moment(held | {"actor.activations": rest}, self.allocator.reserved_bytes)

    def stage(self, work: Callable[[], None]) -> Stage:
        """Do the work of a phase, and return how full it was."""
        self.most, self.peaks = None, dict(self.named)
        self.allocator.most_reserved_bytes = self.allocator.reserved_bytes
        self.allocator.most_held_bytes = self.allocator.held_bytes
        start = self.now()
        work()
        end = self.now()
        most = self.most or start
        return Stage(most, end, self.allocator.most_reserved_bytes, self.allocator.most_held_bytes, dict(self.peaks))

    def sharded(self, group: Group, element_bytes: int) -> Iterator[int]:
        """Yield the sizes of this rank's shards; FSDP2 cuts the first dimension, the last rank's padding included."""
        shards = self.trainer.shards
        for shape in group.shapes.values():
            yield -(-shape[0] // shards) * prod(shape[1:]) * element_bytes

    def place_shards(self) -> None:
        """Bring the shards to the GPU; those of a ref that is offloaded stay in host memory."""
        t = self.trainer
        for group in self.actor.groups:
            for size in self.sharded(group, t.param_bytes):
                self.params.append(self.take(size, "actor.params"))
        for group in self.ref.groups if self.ref is not None and not t.ref_offload else []:
            for size in self.sharded(group, t.ref_bytes):
                self.take(size, "ref.params")

    def offload(self) -> None:
        """Take parameters and states to host memory, and empty the cache."""
        self.away |= {
            owner: [block.size_bytes for block in blocks]
            for owner, blocks in (("actor.params", self.params), ("actor.optimizer", self.optimizer))
            if blocks
        }
        self.give(*self.params, owner="actor.params")
        self.give(*self.optimizer, owner="actor.optimizer")
        self.params, self.optimizer = [], []
        self.allocator.empty_cache()

    def onload(self, owner: str) -> list[Block]:
        """Bring what is away back from host memory."""
        return [self.take(size, owner) for size in self.away.pop(owner, [])]

    def sync(self) -> tuple[Leftover, Leftover]:
        """Empty the cache, pass the parameters to the engine, and leave the card to it.

        Returns:
            What is cached while the parameters are there for the engine, and while it generates.
        """
        self.params += self.onload("actor.params")
        self.allocator.empty_cache()
        during = self.leftover()
        if self.trainer.offload:
            self.offload()
        return during, self.leftover()

    def leftover(self) -> Leftover:
        """Return what is still cached when the cache was just emptied."""
        pinning = Counter(block.segment for block in self.workspaces)
        alone = [segment.size_bytes for segment, count in pinning.items() if segment.in_use == count]
        return Leftover(self.allocator.reserved_bytes - self.allocator.allocated_bytes, max(alone, default=0))

    def place_others(self) -> None:
        """Make adapters, and DDP's buckets, which are as large as all gradients."""
        t = self.trainer
        if t.trained is not None:
            self.params.append(self.take(-(-t.trained // t.shards) * t.param_bytes, "actor.params"))
        if not t.is_gathered and t.replicas > 1:
            self.take((t.model.count() if t.trained is None else t.trained) * t.param_bytes, UNATTRIBUTED)

    def unshard(self, group: Group, *, is_forward: bool) -> None:
        """Gather a group's parameters."""
        t = self.trainer
        if group.gathered or (not t.is_gathered and group.element_bytes == t.compute_bytes):
            return
        sizes = [t.compute_bytes * prod(shape) for shape in group.shapes.values()]
        if t.shards == 1:
            self._copy_alone(group, sizes)
            return
        stream = f"{group.owner}.{COPY_IN}"  # a sharded model has streams of its own
        moved = self._moved(group, stream) if group.is_offloaded else [self.take(sum(sizes) // t.shards, stream=stream)]
        whole = self.take(sum(sizes), stream=stream)
        self.give(*moved)
        if self.gathering is not None:
            self.give(self.gathering)
            self.gathering = None
        group.gathered = [self.take(size, group.owner) for size in sizes]
        if is_forward:
            self.gathering = whole  # until the next group's copy-out
        else:
            self.give(whole)

    def _moved(self, group: Group, stream: str) -> list[Block]:
        """Copy shards from host memory, and cast each if it is of another type."""
        moved = []
        for size in self.sharded(group, self.trainer.compute_bytes):
            source = size * self.trainer.ref_bytes // self.trainer.compute_bytes
            copied = self.take(source, stream=stream)
            moved.append(copied if source == size else self.take(size, stream=stream))
            if source != size:
                self.give(copied)
        return moved

    def _copy_alone(self, group: Group, sizes: list[int]) -> None:
        """Cast the parameters one by one: a single rank gathers nothing."""
        cast: Block | None = None
        needs_copy = group.is_offloaded or group.element_bytes != self.trainer.compute_bytes
        for size in sizes:
            before, cast = cast, self.take(size) if needs_copy else None
            if before is not None:
                self.give(before)
            group.gathered.append(self.take(size, group.owner))
        if cast is not None:
            self.give(cast)

    def reshard(self, group: Group) -> None:
        """Free what was gathered."""
        self.give(*group.gathered, owner=group.owner)
        group.gathered = []

    def workspace(self, number: int) -> None:
        """Take cuBLAS's workspace for a thread that multiplies for the first time."""
        while len(self.workspaces) < number:
            self.workspaces.append(self.take(WORKSPACE_BYTES, UNATTRIBUTED))

    def forward(self, model: Sharded, *, with_grad: bool) -> tuple[list[Block], list[Block]]:
        """Run all layers and the head.

        Returns:
            What the layers keep, and what the loss keeps.
        """
        t = self.trainer
        sizes = self._sizes(with_grad=with_grad)
        tokens = t.micro_batch(with_grad) * t.sequence_tokens
        one = activations.of_layer(t.model, tokens)
        self.unshard(model.root, is_forward=True)
        with self.gathered(model.embedding):
            hidden = self.take(sizes.hidden)
        kept: list[Block] = []
        if not with_grad:
            hidden = self._layers_alone(model.layers, tokens, hidden)
        else:
            for group in model.layers:
                with self.gathered(group):
                    self.workspace(1)
                    if t.recompute:
                        kept.append(hidden)
                        hidden = self.layer(tokens)
                    else:
                        kept += [self.take(size) for size in one.kept]
                        before, hidden = hidden, self.take(sizes.hidden)
                        self.give(before)
        normed = self._norm(hidden, sizes, with_grad=with_grad)
        with self.gathered(model.head):
            loss = self._head(normed, sizes, with_grad=with_grad)
        if model.root.reshard_after_forward:
            self.reshard(model.root)
        return kept, loss

    def _sizes(self, *, with_grad: bool) -> activations.Logits:
        t = self.trainer
        return activations.of_logits(t.model, t.micro_batch(with_grad), t.sequence_tokens, in_fp32=t.has_fp32_logits)

    @contextmanager
    def gathered(self, group: Group | None) -> Iterator[None]:
        """Gather a group's parameters for as long as it runs, if it is one of its own."""
        if group is None:
            yield
            return
        self.unshard(group, is_forward=True)
        yield
        self.reshard(group)

    def order(self, tokens: int) -> list[tuple[str, int]]:
        """Return what a layer makes and frees; all layers are alike."""
        if tokens not in self.orders:
            self.orders[tokens] = list(activations.order_of_layer(self.trainer.model, tokens))
        return self.orders[tokens]

    def layer(self, tokens: int) -> Block:
        """Run one decoder layer and keep nothing but what it returns."""
        held: dict[str, Block] = {}
        for name, size in self.order(tokens):
            if size == activations.FREED:
                self.give(held.pop(name))
            else:
                held[name] = self.take(size)
        return held["out"]

    def _layers_alone(self, layers: list[Group], tokens: int, hidden: Block) -> Block:
        """Run decoder layers of which nothing is kept, and return what the last one returns.

        Layers that are alike soon leave all as it was before some of them: the same would come again, and is left out.
        """
        are_alike = len({tuple(group.shapes.values()) for group in layers}) == 1
        left, states = layers[::-1], [self._state(hidden)]
        while left:
            with self.gathered(left.pop()):
                self.workspace(1)
                before, hidden = hidden, self.layer(tokens)
                self.give(before)
            state = self._state(hidden)
            if are_alike and state in states:
                left, are_alike = left[: len(left) % (len(states) - states.index(state))], False
            states.append(state)
        return hidden

    def _state(self, hidden: Block) -> tuple[object, ...]:
        """Return all that decides what the allocator does with the next layer."""
        free = [[entry[:2] for entry in pool.free] for pool in self.allocator.pools.values()]
        gathering = None if self.gathering is None else self.gathering.address
        return free, hidden.address, gathering, self.allocator.next_address

    def _norm(self, hidden: Block, sizes: activations.Logits, *, with_grad: bool) -> Block:
        """Take the last norm, in fp32, of which the backward needs all but the squares and the scaled."""
        upcast = self.take(sizes.hidden_fp32)
        self.give(self.take(sizes.hidden_fp32))  # squares
        scaled = self.take(sizes.hidden_fp32)
        if not with_grad:
            self.give(upcast)
        cast, out = self.take(sizes.hidden), self.take(sizes.hidden)
        self.give(scaled, hidden)
        if with_grad:
            self.normed = [upcast, cast, out]
        else:
            self.give(cast)
        return out

    def _head(self, hidden: Block, sizes: activations.Logits, *, with_grad: bool) -> list[Block]:
        """Make the logits and their log-softmax, in fp32."""
        logits = self.take(sizes.logits)
        if not with_grad:
            self.give(hidden)
        chunk = sizes.scores
        upcast = self.take(chunk)
        scaled = self.take(chunk)
        self.give(upcast)
        scores = self.take(chunk)
        self.give(scaled, logits)
        if with_grad:
            return [scores]
        self.give(scores)
        return []

    def backward(self, model: Sharded, kept: list[Block], loss: list[Block]) -> None:
        """Run backward of what a forward kept, and reduce each group's gradients."""
        t, layers = self.trainer, model.layers
        sizes = self._sizes(with_grad=True)
        one = activations.of_layer(t.model, t.micro_batch(True) * t.sequence_tokens)
        self.unshard(model.root, is_forward=False)
        gradient = self._norm_backward(self._head_backward(model, sizes, loss), sizes)
        per_layer = len(kept) // max(len(layers), 1)
        for number, group in reversed(list(enumerate(layers))):
            self.unshard(group, is_forward=False)
            if number:
                self.unshard(layers[number - 1], is_forward=False)  # prefetched
            mine = kept[number * per_layer : (number + 1) * per_layer]
            again = [self.take(size) for size in one.kept] if t.recompute else []
            needed = [self.take(size) for size in one.backward]
            group.gradients = self._gradients(group)
            before, gradient = gradient, self.take(sizes.hidden)
            self.give(before, *needed, *again, *mine)
            self.reduce(group)
        self._embedding_backward(model)
        self.give(gradient)
        self.reduce(model.root)
        if self.reducing is not None:
            self.give(self.reducing)
            self.reducing = None

    def _gradients(self, group: Group) -> list[Block]:
        if self.trainer.trained is not None:
            return []
        return [self.take(self.trainer.compute_bytes * prod(shape)) for shape in group.shapes.values()]

    def _embedding_backward(self, model: Sharded) -> None:
        """Make the embedding's gradient, which is as large as it is."""
        if self.trainer.trained is not None:
            return
        if model.embedding is not None:
            self.unshard(model.embedding, is_forward=False)
            model.embedding.gradients = self._gradients(model.embedding)
            self.reduce(model.embedding)
            return
        added = self.take(self.trainer.compute_bytes * elements(self.trainer.model.embedding()))
        if self.trainer.model.tie_word_embeddings:  # autograd adds it to the head's, into a third one
            total = self.take(added.size_bytes)
            self.give(added, *model.root.gradients)
            model.root.gradients = [total]
        else:
            model.root.gradients.append(added)

    def _head_backward(self, model: Sharded, sizes: activations.Logits, loss: list[Block]) -> Block:
        group = model.head or model.root
        self.unshard(group, is_forward=False)
        chunk = sizes.scores
        picked = self.take(chunk)
        softmax = self.take(chunk)
        self.give(picked, *loss)
        scaled = self.take(chunk)
        self.give(softmax)
        cast = self.take(sizes.logits)
        self.give(scaled)
        whole = self.take(sizes.logits)
        self.give(cast)
        self.workspace(2)
        gradient = self.take(sizes.hidden)
        head = self.trainer.compute_bytes * elements(self.trainer.model.embedding())
        group.gradients = [self.take(head)] if self.trainer.trained is None else []
        self.give(whole)
        if model.head is not None:
            self.reduce(model.head)
        return gradient

    def _norm_backward(self, gradient: Block, sizes: activations.Logits) -> Block:
        """Free what the last norm has kept, and return the gradient of what it read."""
        upcast, cast, out = self.normed
        self.give(out)
        scaled = self.take(sizes.hidden)
        self.give(gradient, cast)
        gradient = self.take(sizes.hidden_fp32)
        self.give(scaled)
        parts = [self.take(sizes.hidden_fp32) for _ in range(2)]
        self.give(gradient, upcast)
        total = self.take(sizes.hidden_fp32)
        self.give(*parts)
        gradient = self.take(sizes.hidden)
        self.give(total)
        return gradient

    def reduce(self, group: Group) -> None:
        """Reduce a group's gradients to this rank's shard."""
        t = self.trainer
        self.reshard(group)
        if t.trained is not None:
            return
        if t.is_gathered:
            if self.reducing is not None:
                self.give(self.reducing)
            self.reducing = self.take(t.reduce_bytes * group.elements)
            self.give(*group.gradients)
            group.gradients = []
        shard = self.take(t.reduce_bytes * group.elements // t.shards, stream=REDUCE if t.is_gathered else "")
        self.give(*group.gradients)
        group.gradients = []
        if group.reduced is None:
            group.reduced = shard
            self.named["actor.grads"] = self.named.get("actor.grads", 0) + shard.size_bytes
            self.peaks["actor.grads"] = max(self.peaks.get("actor.grads", 0), self.named["actor.grads"])
        else:
            self.give(shard)

    def log_probs(self, model: Sharded) -> None:
        """Compute log-probs, micro-batch by micro-batch."""
        for _ in range(self.trainer.micro_batches(with_grad=False)):
            self.forward(model, with_grad=False)
        self._drop_gathering()

    def update(self) -> None:
        """Make one optimizer step; states that are offloaded come back for it."""
        t = self.trainer
        self.optimizer += self.onload("actor.optimizer")
        if t.trained is not None:
            self.adapter_grads = self.take(-(-t.trained // t.shards) * t.param_bytes, "actor.grads")
        for _ in range(t.micro_batches(with_grad=True)):
            kept, loss = self.forward(self.actor, with_grad=True)
            self._drop_gathering()
            self.backward(self.actor, kept, loss)
        self.optimizer_step()

    def _drop_gathering(self) -> None:
        if self.gathering is not None:
            self.give(self.gathering)
            self.gathering = None

    def optimizer_step(self) -> None:
        """Step, and drop the gradients; the states come into being in the first one."""
        t = self.trainer
        sizes = [size for group in self.actor.groups for size in self.sharded(group, t.param_bytes)]
        if t.trained is not None:
            sizes = [-(-t.trained // t.shards) * t.param_bytes]
        if not self.optimizer:
            states = [round(size * t.optimizer_bytes / t.param_bytes) for size in sizes for _ in range(t.states)]
            self.optimizer = [self.take(state, "actor.optimizer") for state in states]
        if t.optimizer_is_foreach:
            self.give(*[self.take(size) for size in sizes])
        for group in self.actor.groups:
            if group.reduced is not None:
                self.give(group.reduced, owner="actor.grads")
                group.reduced = None
        if self.adapter_grads is not None:
            self.give(self.adapter_grads, owner="actor.grads")
            self.adapter_grads = None


def model_of(trainer: Trainer, *, is_ref: bool) -> Sharded:
    """Return the groups that FSDP gathers."""
    model = trainer.model
    owner = "ref.params" if is_ref else "actor.params"
    element_bytes = trainer.ref_bytes if is_ref else trainer.param_bytes

    def group(shapes: Shapes, reshards: bool) -> Group:
        return Group(shapes, reshards, element_bytes, is_ref and trainer.ref_offload, owner)

    layers = [group(model.layer(index), True) for index in range(model.num_hidden_layers)]
    if not trainer.wraps_embedding or model.tie_word_embeddings:
        return Sharded(group(model.embedding() | model.head(), trainer.root_reshards), None, layers, None)
    head = dict(model.head())
    norm = {"model.norm.weight": head.pop("model.norm.weight")}
    return Sharded(group(norm, trainer.root_reshards), group(model.embedding(), True), layers, group(head, True))


class Steps(NamedTuple):
    """The phases of the last step, and what it leaves to the next sync and rollout."""

    stages: dict[str, Stage]
    synced: Leftover
    left: Leftover
    """In the rollout, where parameters and states are away if they are offloaded."""


@lru_cache(maxsize=64)
def walk(trainer: Trainer, steps: int = 2) -> Steps:
    """Return the phases of a step, by default of a steady one: the first makes the optimizer's states.

    The search for ceilings and the changes that it leads to ask for the same ones again. Nobody may change what they
    get.
    """
    process = Walk(trainer)
    stages: dict[str, Stage] = {}
    for _ in range(steps):
        process.sync()
        process.params += process.onload("actor.params")
        stages["actor.old_log_prob"] = process.stage(partial(process.log_probs, process.actor))
        if (ref := process.ref) is not None:
            stages["ref.log_prob"] = process.stage(partial(process.log_probs, ref))
        stages["actor.update"] = process.stage(process.update)
        if trainer.offload:
            process.offload()
    return Steps(stages, *process.sync())
