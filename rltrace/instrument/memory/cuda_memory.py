"""A GPU's bytes by owner, at every phase boundary of any framework: sharded models, their optimizers, communicators.

What an engine holds is said by its own instrumentation.

Source read: torch 2.6 to 2.13, torch/distributed/fsdp and distributed_c10d.py.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rltrace.hooks import boundaries
from rltrace.hooks.arguments import argument
from rltrace.hooks.patching import Function, Hook, PatchSet, wrap_function
from rltrace.host import nvml
from rltrace.host.gpu_use import has_used_gpu
from rltrace.host.nvml import DRIVER
from rltrace.host.parents import is_below
from rltrace.instrument.memory import cuda_ledger
from rltrace.instrument.memory.cuda_ledger import CONTEXT, CudaLedger, Growth, Reserved, Turn
from rltrace.instrument.memory.sharded_models import MODELS, ROLES, watch_models
from rltrace.instrument.memory.turns import Turns, at, beating
from rltrace.instrument.memory.uncaught_errors import watch_uncaught
from rltrace.instrument.torch.dynamo import outside_graphs
from rltrace.instrument.torch.fsdp2 import PACKAGE
from rltrace.instrument.torch.optim import watch_optimizer_steps
from rltrace.record import spans

PROCESS_GROUP = "torch.distributed.distributed_c10d:ProcessGroup"

COLLECTIVES = (
    "allreduce",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "broadcast",
    "barrier",
    "alltoall",
    "alltoall_base",
    "send",
    "recv",
)
"""Methods of a process group; a release that does not have one of them says so."""


class CudaMemory:
    """Every process that uses a GPU samples what it holds there."""

    name = "cuda_memory"
    supports = ("torch >= 2.6, < 2.14",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks; there are none without a driver."""
        if DRIVER.exists():
            name_hooks(patches, LEDGER, TURNS)


OnDevice = Callable[[Any], AbstractContextManager[None]]


@contextmanager
def on_device(device: Any) -> Iterator[None]:
    """Enter a device that has its context: else NCCL would make it, and it would count as the communicator's."""
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        yield


def name_hooks(patches: PatchSet, ledger: CudaLedger, turns: Turns, on_device: OnDevice = on_device) -> None:
    """Meet models, optimizers and communicators where they are made; look at every boundary."""
    ledger.tensors[MODELS] = MODELS
    ledger.trains = lambda: MODELS.met
    patches.when_imported("torch.cuda", lambda _: boundaries.watch(ledger.reached))
    watch_uncaught(patches, ledger.out_of_memory)
    loading = Loading(ledger)
    watch_models(patches, functools.partial(watch_forwards, turns, loading))
    passes = Backwards(turns, loading)
    patches.around("torch.autograd:backward", passes.begin, passes.end)
    patches.around(f"{PACKAGE}._fsdp_param_group:FSDPParamGroup.post_backward", nothing, beating(turns))
    patches.use(
        "torch.optim.optimizer:register_optimizer_step_pre_hook",
        functools.partial(watch_optimizer_steps, span=functools.partial(OptimizerStep, turns, loading)),
    )
    patches.around("torch.optim.optimizer:Optimizer.zero_grad", nothing, at(turns, Turn.ZERO_GRAD))
    for module in ("torch.cuda", "torch.cuda.memory"):
        patches.around(f"{module}:empty_cache", at(turns, Turn.EMPTY_CACHE), at(turns, Turn.EMPTY_CACHE))
    moves = ModuleMoves(turns)
    patches.around("torch.nn.modules.module:Module._apply", moves.begin, moves.end)
    for method in COLLECTIVES:
        patches.wrap(f"{PROCESS_GROUP}.{method}", FirstCollectives(ledger, turns).watch)
    # By which FSDP1 and DDP begin: several tensors at once, in C++, which calls none of the above.
    patches.wrap("torch.distributed.utils:_sync_params_and_buffers", FirstCollectives(ledger, turns).watch)
    eager = EagerConnections(ledger, on_device)
    patches.around("torch.distributed:_Backend.eager_connect_single_device", eager.begin, eager.end)
    splits = Splits(ledger)
    patches.around(f"{PROCESS_GROUP}.split_group", splits.begin, splits.end)


class Growing:
    """Each call gives an owner what the process grows meanwhile outside of torch's allocator."""

    def __init__(self, ledger: CudaLedger, owner: str) -> None:
        self._ledger, self._owner = ledger, owner

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Growth | None:
        """Look before the call."""
        return self._ledger.growth(self._owner).__enter__()

    def end(self, growth: Growth | None, _result: Any, _error: BaseException | None) -> None:
        """Look after the call."""
        if growth is not None:
            growth.__exit__()


class FirstCollectives(Growing):
    """The first call in each group, which makes its communicator and its channels."""

    def __init__(self, ledger: CudaLedger, turns: Turns) -> None:
        super().__init__(ledger, "nccl")
        self._turns = turns
        self._known: set[str] = set()

    def watch(self, original: Function, hook: Hook) -> Function:
        """Wrap a collective; every later call is a beat and no more, for a step has seven hundred of them."""
        known, watched = self._known, wrap_function(original, hook, self.begin, self.end)
        beat = beating(self._turns)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if not hook.live:
                return original(*args, **kwargs)
            if args[0].group_name in known:
                hook.leave(beat, None, None, None)
                return original(*args, **kwargs)
            return watched(*args, **kwargs)

        return collective

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Growth | None:
        """Look before; one of the host's tensors needs no communicator of GPUs."""
        if not any(map(is_on_gpu, (*args[1:], *kwargs.values()))):
            return None
        self._known.add(args[0].group_name)
        return super().begin(args, kwargs)


class EagerConnections(Growing):
    """Communicators that are made at once and not by a first collective: of a group that is bound to a device.

    `init_process_group` and `new_group` end in this call (torch 2.6 to 2.13), and in 2.6 `split_group`.
    """

    def __init__(self, ledger: CudaLedger, on_device: OnDevice) -> None:
        super().__init__(ledger, "nccl")
        self._on_device = on_device

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look before; a process that has no context yet gets it first."""
        device = argument("device", 1, args, kwargs)
        if device is None or device.type != "cuda":
            return None
        with nullcontext() if self._ledger.in_use else self._on_device(device):
            return super().begin(args, kwargs)


class Splits(Growing):
    """Communicators that are split from another one, which later releases do in C++ (2.9 to 2.13)."""

    def __init__(self, ledger: CudaLedger) -> None:
        super().__init__(ledger, "nccl")

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look before, if the other one is of GPUs."""
        device = getattr(args[0], "bound_device_id", None)
        return super().begin(args, kwargs) if device is not None and device.type == "cuda" else None


class Loading:
    """The first calls of each kind, in which CUDA loads the kernels that they launch: they stay with the context."""

    CALLS = 3
    """The second one has kernels of its own, for it finds state that the first one left."""

    def __init__(self, ledger: CudaLedger) -> None:
        self._ledger = ledger
        self._calls: dict[Any, int] = {}

    def span(self, kind: str, /, **args: Any) -> Growth | spans.NoSpan:
        """Return what to enter and leave around a call; its kind is told by the arguments and the model's owner."""
        if not self._ledger.in_use:
            return spans.NoSpan()
        key = kind, ROLES.acting, *args.items()
        self._calls[key] = self._calls.get(key, 0) + 1
        return self._ledger.growth(CONTEXT) if self._calls[key] <= self.CALLS else spans.NoSpan()

    def begin_forward(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Look before; with gradients to come it has other kernels."""
        return self.span("forward", gradients=args[0]).__enter__()


class Backwards:
    """Looks around each backward: behind the one, activations are gone and gradients are there."""

    def __init__(self, turns: Turns, loading: Loading) -> None:
        self._turns, self._loading = turns, loading

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Look before the call."""
        self._turns.begin_backward()
        return self._loading.span("backward").__enter__()

    def end(self, opened: Any, _result: Any, _error: BaseException | None) -> None:
        """Look after it."""
        opened.__exit__(None)
        self._turns.end_backward()


class OptimizerStep:
    """A step of an optimizer, looked at from both sides."""

    def __init__(self, turns: Turns, loading: Loading, kind: str, /, **args: Any) -> None:
        self._turns = turns
        self._loaded = loading.span(kind, **args)

    def __enter__(self) -> OptimizerStep:
        self._turns.reached(Turn.OPTIMIZER_BEGIN)
        self._loaded.__enter__()
        return self

    def __exit__(self, kind: object = None, error: object = None, traceback: object = None, /) -> None:
        self._loaded.__exit__(None)
        self._turns.reached(Turn.OPTIMIZER_END)


def nothing(*_: Any) -> None:
    """Do nothing before a call."""


def leave(opened: Any, _result: Any, _error: BaseException | None) -> None:
    """Look after the call: an `after`."""
    opened.__exit__(None)


def is_on_gpu(value: Any) -> bool:
    """Tell whether a tensor, or the first one of nested lists, lies on a GPU, or a barrier's options name one."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return getattr(getattr(value, "device", None), "type", None) == "cuda"


class ModuleMoves:
    """Looks behind each call that moves, casts or makes the tensors of a whole module: `to`, `cuda`, `to_empty`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._depth = 0

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Go into a module: it calls the same of its children."""
        self._depth += 1

    def end(self, _token: Any, _result: Any, _error: BaseException | None) -> None:
        """Come out of one."""
        self._depth -= 1
        if self._depth:
            self._turns.beat()
        else:
            self._turns.reached(Turn.MOVED)


def watch_forwards(turns: Turns, loading: Loading, state: Any, hook: Hook) -> None:
    """Look around the forwards of the module that is the root of its model; the others' are beats.

    Which one is the root shows in its first forward.
    """
    from torch import is_grad_enabled

    turns.beat()  # sharding it has moved it to the GPU
    known = weakref.ref(state)
    opened: list[Any] = []
    beat = beating(turns)

    def is_root() -> bool:
        root = known()
        return root is not None and bool(root._is_root)

    def begin(*_: Any) -> Any:
        has_gradients = is_grad_enabled()
        turns.begin_forward(has_gradients=has_gradients)
        return loading.begin_forward((has_gradients,), {})

    def end(token: Any, *_: Any) -> None:
        token.__exit__(None)
        turns.end_forward(has_gradients=is_grad_enabled())

    def before(_module: Any, _args: Any) -> None:
        if is_root():
            opened[:] = [hook.enter(begin, (), {})]
        else:
            hook.leave(beat, None, None, None)

    def after(_module: Any, _args: Any, _result: Any) -> None:
        while opened:
            hook.leave(end, opened.pop(), None, None)

    for module in state._modules:
        module.register_forward_pre_hook(outside_graphs(before))
        module.register_forward_hook(outside_graphs(after))


# ---- the device -------------------------------------------------------------------------------------------------


class NvmlCard:
    """A GPU that others use, as `cuda_ledger.Card` says."""

    def __init__(self, gpu: nvml.Gpu) -> None:
        self._gpu = gpu

    def card(self) -> nvml.Memory:
        return self._gpu.memory()

    def held(self) -> dict[int, int]:
        return self._gpu.bytes_by_pid()


class UnseenCard:
    """A GPU of which NVML says nothing that holds for this process; the same reason at every question."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def card(self) -> nvml.Memory:
        raise nvml.UnavailableError(self._reason)

    def held(self) -> dict[int, int]:
        raise nvml.UnavailableError(self._reason)


class TorchCard:
    """The current CUDA device, as `cuda_ledger.OwnCard` says."""

    def __init__(self, torch: Any, uuid: str, card: cuda_ledger.Card) -> None:
        self._cuda = torch.cuda
        self._index = torch.cuda.current_device()
        self.uuid = uuid
        self.card, self.held = card.card, card.held

    def torch(self) -> Reserved:
        stats = self._cuda.memory_stats_as_nested_dict(self._index)
        allocated, times = stats["allocated_bytes"]["all"], stats["allocation"]["all"]
        return Reserved(
            stats["reserved_bytes"]["all"]["current"],
            allocated["current"],
            times["allocated"] + times["freed"],
            allocated["peak"],
        )

    def pinned_bytes(self) -> int:
        return pinned_bytes(getattr(self._cuda.memory, "host_memory_stats_as_nested_dict", dict)())

    def pools(self, addresses: Collection[int]) -> tuple[Reserved, Reserved]:
        sleeping, private = [0, 0], [0, 0]
        for segment in self._cuda.memory_snapshot():
            if segment["device"] != self._index:
                continue
            if segment["address"] in addresses:
                place = sleeping
            elif tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
                place = private
            else:
                continue
            place[0] += segment["total_size"]
            place[1] += segment["allocated_size"]
        return Reserved(*sleeping), Reserved(*private)


def pinned_bytes(stats: dict[str, Any]) -> int:
    """What torch's allocator of pinned memory has, handed out or kept, by its own count.

    Not what it has handed out: up to 2.12 `active_bytes` does not fall where memory is given back (pytorch#171662).

    Args:
        stats: As `torch.cuda.host_memory_stats_as_nested_dict` gives them.

    Raises:
        UnavailableError: They do not say.
    """
    # Renamed in 2.10, from which on "allocated" is what "reserved" was, and no longer what is handed out.
    whole = stats.get("allocated_bytes" if "active_bytes" in stats else "reserved_bytes")
    if whole is None:
        raise nvml.UnavailableError("this torch does not count the pinned memory of its allocator, as 2.7 and later do")
    return int(whole["current"])


def open_device() -> TorchCard | None:
    """The device on which this process has a context; None while it has none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    try:
        gpu = nvml.whole_gpu(uuid)
    except nvml.UnavailableError as reason:  # torch knows its own rows all the same
        return TorchCard(torch, uuid, UnseenCard(str(reason))) if has_used_gpu() else None
    # NVML's list may be empty, in a container too: who has had memory of torch's has a context.
    return TorchCard(torch, uuid, NvmlCard(gpu)) if has_used_gpu() or is_listed(gpu) else None


def open_engines_card() -> NvmlCard | None:
    """The one GPU that processes below this one use; None where there are several, or NVML does not say.

    Nor of a part of one: the engine itself says why its card's totals are unknown.
    """
    try:
        used = [gpu for gpu in nvml.gpus() if any(is_below(pid, os.getpid()) for pid in gpu.bytes_by_pid())]
    except nvml.UnavailableError:
        return None
    return NvmlCard(used[0]) if len(used) == 1 and not used[0].is_divided() else None


def is_listed(gpu: nvml.Gpu) -> bool:
    """Whether NVML says that this process is one of a GPU's."""
    try:
        return os.getpid() in gpu.bytes_by_pid()
    except nvml.UnavailableError:
        return False


LEDGER = CudaLedger(open_device, open_engines_card)
"""The one of this process."""

TURNS = Turns(LEDGER)
"""Where it is looked at between boundaries."""
