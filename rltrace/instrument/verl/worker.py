"""verl's workers, one per GPU: who they are, the phases of a rank, micro-batches, and what moves to the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from rltrace.hooks import boundaries
from rltrace.hooks.arguments import argument, attributes, keep_self
from rltrace.hooks.held_span import HeldSpan
from rltrace.hooks.patching import PatchSet, end_span, nothing_after
from rltrace.host import memory
from rltrace.host.interruption import own_failure
from rltrace.instrument.memory.cuda_memory import KERNELS
from rltrace.instrument.memory.work import ACTOR, CRITIC, REF, WORK
from rltrace.instrument.torch import cuda_time
from rltrace.instrument.torch.devices import device_of
from rltrace.record import lifecycle, spans

# ---- identity ---------------------------------------------------------------------------------------------------


def identify(patches: PatchSet, target: str) -> None:
    """Hook a worker's `__init__`: afterwards it knows its rank and sees only its device."""
    patches.around(target, keep_self, become_worker, reads=attributes(target.rpartition(".")[0], "rank"))


def become_worker(worker: Any, _result: Any, error: BaseException | None) -> None:
    """Say which rank and which device this process works for."""
    if error is None:
        lifecycle.identify(role="worker", rank=worker.rank, **device_of(f"cpu-{worker.rank}"))


# ---- phases -----------------------------------------------------------------------------------------------------


def span_of_batch(name: str) -> Callable[[PatchSet, str], None]:
    """Return a hook that makes every call a span with the sequences of its batch."""
    return lambda patches, target: patches.span(target, name, batch_args)


def batch_args(_worker: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the number of a batch's sequences; the batch is the first argument whatever its name."""
    try:
        return {"sequences": len(first(args, kwargs))}
    except own_failure(TypeError):
        return {}


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument of a call, whatever its name; releases pass the same one by position or by name."""
    return args[0] if args else next(iter(kwargs.values()), None)


def old_log_prob(patches: PatchSet, target: str) -> None:
    """Hook the actor's log-probs; without its LoRA adapter the actor is its own reference."""
    patches.around(target, begin_log_prob, end_span, ("actor.old_log_prob",))


def begin_log_prob(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the phase, unless `compute_ref_log_prob` has opened it and makes this call."""
    data = first(args[1:], kwargs)
    if getattr(data, "meta_info", {}).get("is_lora"):
        return None
    name = "ref.log_prob" if says(data, "no_lora_adapter") else "actor.old_log_prob"
    return spans.automatic_span(name, **batch_args(*args, **kwargs)).__enter__()


def says(data: Any, key: str) -> bool:
    """Tell whether a flag is set in an engine worker's batch, a TensorDict or what stands for one in TransferQueue."""
    extra = getattr(data, "extra_info", None)
    value = extra.get(key) if isinstance(extra, dict) else data.get(key, None) if hasattr(data, "get") else None
    return bool(getattr(value, "data", value))


# ---- start-up ---------------------------------------------------------------------------------------------------


def begin_startup(name: str) -> tuple[Any, int | None]:
    """Open a phase of the start-up."""
    before_bytes = KERNELS.begin()
    return spans.phase(name).__enter__(), before_bytes


def end_startup(opened: tuple[Any, int | None], result: Any, error: BaseException | None) -> None:
    """Close the span."""
    span, before_bytes = opened
    end_span(span, result, error)
    KERNELS.end(before_bytes)


def build_model(patches: PatchSet, target: str) -> None:
    """Hook what builds a worker's model, shards it and makes its optimizer, in one function."""
    patches.around(target, begin_build, end_startup, ("actor.build", "ref.build"))


def begin_build(_args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the phase of the model that the call is about; all releases name the role."""
    return begin_startup(f"{kwargs.get('role', ACTOR)}.build")


def build_critic(patches: PatchSet, target: str) -> None:
    """Hook what builds the model of a worker that has only a critic."""

    def begin(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return begin_startup("critic.build"), WORK.begin(CRITIC)

    def end(token: Any, result: Any, error: BaseException | None) -> None:
        opened, before = token
        WORK.end(before)
        end_startup(opened, result, error)

    patches.around(target, begin, end, ("critic.build",))


def engine_phase(action: str) -> Callable[[PatchSet, str], None]:
    """Return a hook on a part of an engine's start-up."""

    def begin(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return begin_startup(f"{subject_of(args[0])}.{action}")

    def name_hook(patches: PatchSet, target: str) -> None:
        names = tuple(f"{subject}.{action}" for subject in (ACTOR, REF, CRITIC))
        patches.around(target, begin, end_startup, names)

    return name_hook


# ---- whose model it is ------------------------------------------------------------------------------------------

SubjectOf = Callable[[Any], str]


def subject_of(holder: Any) -> str:
    """Return the owner of an engine's model, or of a worker's with an engine: only a reference is never trained."""
    engine = getattr(holder, "engine", holder)
    if any(kind.__name__.endswith("ValueHead") for kind in type(engine).__mro__):
        return CRITIC
    return REF if getattr(getattr(engine, "engine_config", None), "forward_only", False) else ACTOR


def of_critic(_holder: Any) -> str:
    """Return the owner of a model that only critics have."""
    return CRITIC


def make_engine(patches: PatchSet, target: str, subject_of: SubjectOf = subject_of) -> None:
    """Hook what makes an engine's model and optimizer: they belong to the engine's owner."""

    def begin(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return KERNELS.begin(), WORK.begin(subject_of(args[0]))

    def end(token: Any, _result: Any, _error: BaseException | None) -> None:
        before_bytes, before = token
        WORK.end(before)
        KERNELS.end(before_bytes)

    patches.around(target, begin, end)


class CriticsTurn:
    """A phase in which a worker works for its critic: activations are the critic's meanwhile.

    The workers of engines have the same methods for any model, so not every call begins a turn.
    """

    def __init__(self, phase: str, subject_of: SubjectOf) -> None:
        self._phase, self._subject_of = phase, subject_of

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str | None] | None:
        """Begin the critic's turn, if the call is about a critic."""
        if self._subject_of(args[0]) != CRITIC:
            return None
        known = batch_args(*args, **kwargs)
        boundaries.reached(boundaries.Boundary((self._phase,), is_end=False))
        return spans.automatic_span(self._phase, **known).__enter__(), WORK.begin(CRITIC)

    def end(self, turn: tuple[Any, str | None] | None, result: Any, error: BaseException | None) -> None:
        """End the turn: activations belong to the previous owner again."""
        if turn is None:
            return
        opened, before = turn
        WORK.end(before)
        try:
            end_span(opened, result, error)
        finally:
            boundaries.reached(boundaries.Boundary((self._phase,), error=error))


def critics_turn(phase: str, subject_of: SubjectOf = subject_of) -> Callable[[PatchSet, str], None]:
    """Return a hook on a call that is, or may be, a critic's phase."""

    def name_hook(patches: PatchSet, target: str) -> None:
        turn = CriticsTurn(phase, subject_of)
        patches.around(target, turn.begin, turn.end, (phase,), at_boundaries=False)

    return name_hook


# ---- micro-batches ----------------------------------------------------------------------------------------------


class MicroBatches:
    """The open micro-batch of an update: from its forward until the next one's, or until the optimizer's step.

    verl has no function that runs the forward and the backward of one micro-batch.
    """

    def __init__(self) -> None:
        self._trained: str | None = None
        """The owner of the model that is updated; None outside of an update."""
        self._open = HeldSpan()

    def begin_update(self, args: tuple[Any, ...], kwargs: dict[str, Any], subject_of: SubjectOf = subject_of) -> None:
        """Begin an update, whose forwards follow unless an engine is told `forward_only`, its third argument."""
        is_forward_only = argument("forward_only", 3, args, kwargs, False)
        self._trained = None if is_forward_only else subject_of(args[0])

    def end_update(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End the update: what follows is not a part of it."""
        self._trained = None
        self._open.close(error)

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Begin a micro-batch with its forward."""
        self._open.close()
        if self._trained is not None:
            self._open.open(f"{self._trained}.micro_batch")

    def stop(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """End the last micro-batch of a mini-batch: its backward is over."""
        self._open.close()


_micro_batches = MicroBatches()

MICRO_BATCHES = f"{ACTOR}.micro_batch", f"{CRITIC}.micro_batch"


def end_micro_batches(patches: PatchSet, target: str, subject_of: SubjectOf = subject_of) -> None:
    """Hook the function that goes through the micro-batches."""
    begin = functools.partial(_micro_batches.begin_update, subject_of=subject_of)
    patches.around(target, begin, _micro_batches.end_update)


def begin_micro_batch(patches: PatchSet, target: str) -> None:
    """Hook the forward of a micro-batch."""
    patches.around(target, _micro_batches.begin, nothing_after, MICRO_BATCHES)


def stop_micro_batch(patches: PatchSet, target: str) -> None:
    """Hook what follows the last backward of a mini-batch."""
    patches.around(target, _micro_batches.stop, nothing_after)


def timed_span(name: str) -> Callable[[PatchSet, str], None]:
    """Return a hook that makes every call a span, and what it launches a span of the GPU's stream."""

    def begin(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[Any, Any]:
        span = spans.automatic_span(name).__enter__()
        return span, cuda_time.begin_work(name)

    def end(opened: tuple[Any, Any], result: Any, error: BaseException | None) -> None:
        span, work = opened
        try:
            end_span(work, result, error)
        finally:
            end_span(span, result, error)

    # Of the two names the host's is said to be emitted: without a GPU the other one would seem to be missing.
    return lambda patches, target: patches.around(target, begin, end, (name,))


# ---- offload ----------------------------------------------------------------------------------------------------


def offload(name: str) -> Callable[[PatchSet, str], None]:
    """Return a hook on what moves a model or an optimizer between the device and the host."""
    return lambda patches, target: patches.span(target, name, moved_args)


def moved_args(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the bytes of this rank's share of a model's parameters or of an optimizer's state."""
    holder = first(args, kwargs)
    what = "model" if hasattr(holder, "parameters") else "optimizer"
    return {"what": what, "bytes": sum(map(local_bytes, tensors_of(holder)))}


def tensors_of(holder: Any) -> Iterable[Any]:
    """Return the parameters of a model, or the tensors of an optimizer's state."""
    if hasattr(holder, "parameters"):
        return list(holder.parameters())
    states = getattr(holder, "state", {}).values()
    return [value for state in states for value in state.values() if hasattr(value, "element_size")]


def local_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor on this rank; of a sharded one, those of its shard."""
    return int(memory.local(tensor).nbytes)
