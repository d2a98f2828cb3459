"""The models that FSDP shards in this process, and their optimizers: who holds how many bytes, on the GPU and the host.

Source read: torch 2.6 to 2.13, torch/distributed/fsdp/_fully_shard and _flat_param.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rltrace import memory
from rltrace.instrument.fsdp2 import groups_of

Rows = dict[str, int]
"""Bytes by counter: `actor.params_bytes`."""


MOST_KEPT = 64


class Models:
    """The sharded models of a process and their optimizers; one that no optimizer holds is the ref.

    Called, it gives the bytes of parameters, gradients and optimizer states by owner.
    """

    def __init__(self) -> None:
        self._units: list[Unit] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._rows: dict[Any, Rows] = {}
        """By the marks of all units: a step goes through a few of them, the next step through the same."""
        self._states: weakref.WeakKeyDictionary[Any, tuple[tuple[int, int], Rows]] = weakref.WeakKeyDictionary()

    @property
    def met(self) -> bool:
        """Whether there is any."""
        return bool(self._units)

    def meet_state(self, state: Any) -> None:
        """An FSDP2 state; its parameters are in groups that are made after it."""
        self._units.append(Unit(weakref.ref(state), fsdp2_params))

    def meet_fsdp1(self, module: Any) -> None:
        """A module that FSDP1 wraps."""
        self._units.append(Unit(weakref.ref(module), fsdp1_params))

    def meet_optimizer(self, optimizer: Any) -> None:
        """An optimizer; whose parameters it has is asked when it is used."""
        self._optimizers.append(weakref.ref(optimizer))

    def __call__(self) -> Rows:
        optimizers = [optimizer for known in self._optimizers if (optimizer := known()) is not None]
        marks = tuple(("actor" if unit.is_trained(optimizers) else "ref", *unit.marks()) for unit in self._units)
        rows = dict(self._rows.get(marks) or self._count(marks))
        for optimizer in optimizers:
            add(rows, self._state_rows(optimizer))
        return rows

    def _count(self, marks: tuple[Any, ...]) -> Rows:
        """Bytes of parameters and gradients, kept for when all units are so again."""
        if len(self._rows) >= MOST_KEPT:
            self._rows.clear()
        rows = self._rows[marks] = {}
        for unit, (subject, *_) in zip(self._units, marks, strict=True):
            add(rows, unit.rows(subject))
        return rows

    def _state_rows(self, optimizer: Any) -> Rows:
        """Bytes of an optimizer's state, counted anew when it has grown or moved."""
        tensors: Iterable[Any] = next(iter(optimizer.state.values()), {}).values()
        first = next(
            (memory.local(tensor) for tensor in tensors if hasattr(tensor, "untyped_storage") and tensor.ndim), None
        )
        key = len(optimizer.state), 0 if first is None else first.data_ptr()
        known = self._states.get(optimizer)
        if known is None or known[0] != key:
            known = key, by_place("actor.optimizer", memory.optimizer_tensors(optimizer))
            self._states[optimizer] = known
        return known[1]


class Unit:
    """Parameters that are sharded together."""

    def __init__(self, holder: weakref.ref[Any], params_of: Callable[[Any], list[Params]]) -> None:
        self._holder, self._params_of = holder, params_of
        self._is_trained = False
        self._seen_optimizers = 0
        self._params: list[Params] = []

    def params(self) -> list[Params]:
        """The groups of parameters; none once the model is gone."""
        holder = self._holder()
        if holder is None:
            return []
        self._params = self._params or self._params_of(holder)
        return self._params

    def is_trained(self, optimizers: list[Any]) -> bool:
        """Whether an optimizer holds any of these parameters; before there is one, whether they can be trained."""
        if len(optimizers) != self._seen_optimizers and not self._is_trained:
            self._seen_optimizers = len(optimizers)
            held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
            self._is_trained = any(id(parameter) in held for params in self.params() for parameter in params.trained())
        if optimizers:
            return self._is_trained
        return any(parameter.requires_grad for params in self.params() for parameter in params.trained())

    def marks(self) -> list[Any]:
        """Of each group of parameters, where and what it holds."""
        return [params.mark() for params in self.params()]

    def rows(self, subject: str) -> Rows:
        """Bytes of parameters, sharded and gathered, and of gradients."""
        rows: Rows = {}
        for params in self.params():
            add(rows, by_place(f"{subject}.params", params.held()))
            add(rows, by_place(f"{subject}.grads", params.grads()))
        return rows


class Params:
    """Parameters of one unit: those that train, and tensors that hold them now."""

    def trained(self) -> list[Any]:
        """What an optimizer holds."""
        raise NotImplementedError

    def held(self) -> Iterable[Any]:
        """Tensors behind the parameters: the shards, and what is gathered now."""
        raise NotImplementedError

    def grads(self) -> Iterable[Any]:
        """Tensors of the gradients."""
        raise NotImplementedError

    def mark(self) -> Any:
        """Something that is the same whenever they hold as many bytes at the same place, all of them alike."""
        raise NotImplementedError


class Fsdp2Params(Params):
    """A parameter group of FSDP2."""

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)

    def _params(self) -> list[Any]:
        group = self._group()
        return [] if group is None else group.fsdp_params

    def trained(self) -> list[Any]:
        return [param.sharded_param for param in self._params()]

    def held(self) -> Iterator[Any]:
        for param in self._params():
            yield param.sharded_param
        group = self._group()
        if group is not None and group.is_unsharded:
            for param in group.fsdp_params:
                yield from param.all_gather_outputs

    def grads(self) -> Iterator[Any]:
        for param in self._params():
            for grad in (param.sharded_param.grad, param.unsharded_accumulated_grad):
                if grad is not None:
                    yield grad

    def mark(self) -> Any:
        group, params = self._group(), self._params()
        if group is None or not params:
            return None
        param = params[-1]
        shard = param.sharded_param
        # Their sizes follow: FSDP2 moves and frees whole tensors.
        return (
            is_on_gpu(shard),
            group.is_unsharded,
            is_on_gpu(shard.grad),
            is_on_gpu(param.unsharded_accumulated_grad),
        )


class Fsdp1Params(Params):
    """The flat parameter of an FSDP1 module."""

    NAMES = ("_local_shard", "_mp_shard", "_full_param_padded", "_full_prec_full_param_padded")

    def __init__(self, handle: Any) -> None:
        self._handle = weakref.ref(handle)

    def _flat(self) -> list[Any]:
        handle = self._handle()
        return [] if handle is None else [handle.flat_param]

    def trained(self) -> list[Any]:
        return [part for flat in self._flat() for part in (flat, *(getattr(flat, "_params", None) or ()))]

    def held(self) -> Iterator[Any]:
        for flat in self._flat():
            yield flat
            yield from (tensor for name in self.NAMES if (tensor := getattr(flat, name, None)) is not None)

    def grads(self) -> Iterator[Any]:
        for flat in self._flat():
            for name in ("grad", "_saved_grad_shard"):
                if (grad := getattr(flat, name, None)) is not None:
                    yield grad

    def mark(self) -> Any:
        # FSDP1 frees a flat parameter's storage and keeps the tensor.
        tensors = (*self.held(), *self.grads())
        return tuple((is_on_gpu(tensor), tensor.untyped_storage().nbytes()) for tensor in tensors)


def fsdp2_params(state: Any) -> list[Params]:
    """Groups of an FSDP2 state."""
    return [Fsdp2Params(group) for group in groups_of(state)]


def fsdp1_params(module: Any) -> list[Params]:
    """The flat parameter of an FSDP1 module, if it has one of its own."""
    handle = getattr(module, "_handle", None)
    return [] if handle is None else [Fsdp1Params(handle)]


def is_on_gpu(tensor: Any) -> bool | None:
    """Whether a tensor lies on a GPU and not in the host's memory; None of none."""
    return None if tensor is None else memory.local(tensor).is_cuda


def by_place(owner: str, tensors: Iterable[Any]) -> Rows:
    """Bytes of tensors by where they lie: `OWNER_bytes` on a GPU, `OWNER_host_bytes` in the host's memory."""
    shards = [memory.local(tensor) for tensor in tensors]
    return {
        f"{owner}_bytes": memory.storage_bytes(shard for shard in shards if shard.is_cuda),
        f"{owner}_host_bytes": memory.storage_bytes(shard for shard in shards if not shard.is_cuda),
    }


def add(rows: Rows, more: Rows) -> None:
    """Rows of one name add up."""
    for name, size in more.items():
        rows[name] = rows.get(name, 0) + size
