"""Time on the GPU's streams of what the other hooks see on the host: `gpu.fsdp.all_gather` beside `fsdp.all_gather`.

Source read: torch 2.11 and 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py. The pairs around a
collective sit inside FSDP2's own stream, by the classes that it calls: `foreach_all_gather` enters that stream only
after the copy-in, and an event recorded before it would fire when the stream's work before ends. Instances are left
alone.

A pair takes 15 to 30 µs of the host, and 100 in cold caches. So only the forward of a whole model has one, and the
backward from the loss on. With `RLTRACE_CUDA_TIME=layers` the forward and backward of each sharded module have one too,
the whole model among them. A forward that is repeated for its backward is a part of that backward.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

from rltrace.events import DEVICE_SPAN, DEVICE_TIME, GPU_TIME, LOG_PROBS
from rltrace.hooks import boundaries, cost
from rltrace.hooks.arguments import argument, attributes
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.host.gpu_use import has_used_gpu
from rltrace.host.nvml import DRIVER
from rltrace.instrument.torch import autograd
from rltrace.instrument.torch.device_time import (
    CAPTURING,
    OTHER_DEVICE,
    DeviceEvents,
    DeviceSpan,
    DeviceTimes,
    Missed,
    Work,
)
from rltrace.instrument.torch.fsdp2 import LAUNCHED, NAMED, PACKAGE, STATE, Backwards, watch_forwards
from rltrace.instrument.torch.optim import STEPS, watch_optimizer_steps
from rltrace.record import lifecycle, spans
from rltrace.record.lock import InterruptibleLock

GATHER, SCATTER = "fsdp.all_gather", "fsdp.reduce_scatter"
GATHERS = ("DefaultAllGather", "ProcessGroupAllocAllGather", "SymmMemAllGather")
SCATTERS = ("DefaultReduceScatter", "ProcessGroupAllocReduceScatter", "SymmMemReduceScatter")
"""The last class in each tuple is torch 2.13's."""


FORWARD, BACKWARD = f"{DEVICE_TIME}fsdp.forward", f"{DEVICE_TIME}fsdp.backward"
NOTHING = spans.NoSpan()

VARIABLE, LAYERS = "RLTRACE_CUDA_TIME", "layers"


class CudaTime:
    """Times collectives, forwards, log-probs, backwards, optimizer steps and the copies of a weight sync."""

    name = "cuda_time"
    supports = ("torch >= 2.11",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks; there are none without a driver."""
        if DRIVER.exists():
            name_hooks(patches, CudaPairs(), of_layers=os.environ.get(VARIABLE) == LAYERS)


def name_hooks(patches: PatchSet, pairs: CudaPairs, *, of_layers: bool) -> None:
    """Name each place that gets a pair of events, and ask the device at the end of a phase which pairs are done."""
    patches.when_imported("torch.cuda", lambda _: follow(pairs))
    for kind, whole, classes in ((GATHER, "output_tensor", GATHERS), (SCATTER, "input_tensor", SCATTERS)):
        for class_name in classes:
            patches.around(
                f"{PACKAGE}._fsdp_collectives:{class_name}.__call__",
                functools.partial(begin_collective, pairs, DEVICE_TIME + kind, whole),
                end_span,
                (DEVICE_TIME + kind,),
            )
    patches.wrap(
        f"{PACKAGE}._fsdp_state:FSDPState.init",
        functools.partial(watch_forwards, opens=pairs.open_forward, root_only=not of_layers, waits=False),
        (FORWARD,),
    )
    if of_layers:
        backwards = Backwards(pairs.open_backward)
        patches.wrap(
            f"{PACKAGE}._fsdp_state:FSDPState._pre_backward",
            backwards.watch_beginnings,
            (BACKWARD,),
            reads=(*attributes(STATE, "_training_state"), *NAMED),
        )
        patches.wrap(f"{PACKAGE}._fsdp_param_group:FSDPParamGroup.post_backward", backwards.watch_ends)
    begin_backward = functools.partial(begin_whole_backward, pairs)
    patches.wrap(
        autograd.TARGET,
        functools.partial(autograd.wrap_backward, before=begin_backward, after=end_span),
        (DEVICE_TIME + autograd.NAME,),
    )
    patches.use(
        "torch.optim.optimizer:register_optimizer_step_pre_hook",
        functools.partial(watch_optimizer_steps, span=pairs.span),
        (f"{DEVICE_TIME}optimizer.step",),
        reads=STEPS,
    )
    patches.around(
        "rltrace_reference.grpo:token_log_probs",
        lambda _args, _kwargs: pairs.begin(DEVICE_TIME + LOG_PROBS, {}),
        end_span,
        (DEVICE_TIME + LOG_PROBS,),
    )
    for method, stage in (("Sender.pack", "weight_sync.pack"), ("Receiver.load", "weight_sync.load")):
        patches.around(
            f"rltrace_reference.weight_sync:{method}",
            functools.partial(begin_bucket, pairs, DEVICE_TIME + stage),
            end_span,
            (DEVICE_TIME + stage,),
        )


FOLLOWED: list[CudaPairs] = []
"""The pairs of this process whose hooks are in place; the first one takes what other instrumentations see."""


def follow(pairs: CudaPairs) -> Callable[[], None]:
    """Look at the end of each phase which pairs are done, and let other hooks make pairs; return what undoes it."""
    FOLLOWED.append(pairs)
    unwatch = boundaries.watch(pairs.reached, is_last=True)

    def undo() -> None:
        FOLLOWED.remove(pairs)
        unwatch()

    return undo


def begin_work(name: str) -> Any:
    """Return what to leave after work that another hook sees begin now; None if nothing is measured."""
    return FOLLOWED[0].begin(DEVICE_TIME + name, {}) if FOLLOWED else None


def begin_whole_backward(pairs: CudaPairs, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Open the pair of a backward, from the loss on; a backward within another one is a part of it."""
    return None if autograd.is_in_backward() else pairs.begin(DEVICE_TIME + autograd.NAME, {})


def begin_collective(
    pairs: CudaPairs, name: str, whole_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Open the pair of a collective: called as `comm(output_tensor=..., input_tensor=..., group=..., async_op=...)`.

    At one rank nothing moves. An asynchronous one ends on NCCL's stream, which an event on this one does not wait for.
    NCCL has one stream a group, so that a gather also waits for a reduce-scatter that was launched before it.
    """
    group = argument("group", 3, args, kwargs, None)
    ranks = 1 if group is None else group.size()
    if ranks == 1 or kwargs.get("async_op"):
        return None
    whole = kwargs.get(whole_name)
    size_bytes = 0 if whole is None else whole.numel() * whole.element_size()
    said = {"bytes": size_bytes, "ranks": ranks}
    if (module := getattr(LAUNCHED, "module", None)) is not None:  # None: the hooks on the host are disabled
        said["module"] = module
    return pairs.begin(name, said, id(group))


def begin_bucket(pairs: CudaPairs, name: str, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Open the pair of the copies of one bucket."""
    return pairs.begin(name, {"bucket": args[1].key})


class CudaPairs:
    """Makes pairs on the GPU that the process uses, and none before it uses one."""

    def __init__(self) -> None:
        self._times: DeviceTimes | None = None
        self._lock = InterruptibleLock()

    def begin(self, name: str, args: dict[str, Any], queue: int = 0) -> Any:
        """Return what to leave after work that begins now, as `DeviceTimes.begin` does; None if nothing is measured."""
        times = self._times or self._open()
        return None if times is None else times.begin(name, args, queue)

    def span(self, name: str, /, **args: Any) -> Work:
        """Return what to enter and leave around the work."""
        return Work(lambda: self.begin(DEVICE_TIME + name, args))

    def open_forward(self, path: str, is_repeated: bool) -> Any:
        """Return what to leave after a forward of the module at a path. The whole model is the module ""."""
        return (None if is_repeated else self.begin(FORWARD, {"module": path})) or NOTHING

    def open_backward(self, path: str) -> Any:
        """Return what to leave after the backward of the module at a path."""
        return self.begin(BACKWARD, {"module": path}) or NOTHING

    def close(self) -> None:
        """Write what is done, and say what was never measured."""
        if self._times is not None:
            self._times.end()
            if reason := why_missed(self._times.missed):
                lifecycle.unavailable(GPU_TIME, reason)

    def reached(self, boundary: boundaries.Boundary) -> None:
        """Resolve what the device has done when a phase is over."""
        if self._times is not None and boundary.is_end:
            self._times.poll_if_due()

    def _open(self) -> DeviceTimes | None:
        if not has_used_gpu():  # an event or a stream of ours would make a context
            return None
        self._lock.run(self._measure_once)
        return self._times

    def _measure_once(self) -> None:
        import torch

        if self._times is None:
            self.measure(CudaEvents(torch))

    def measure(self, device: DeviceEvents) -> None:
        """Make pairs on this device from now on."""
        self._times = DeviceTimes(device, write)
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)  # the device is not there
        cost.OTHER_EVENTS[DEVICE_SPAN] = lambda: one_pair(DeviceTimes(device, write))

    def _forget(self) -> None:
        self._times = None
        cost.OTHER_EVENTS.pop(DEVICE_SPAN, None)


def why_missed(missed: Missed) -> str | None:
    """Say in words what was not measured."""
    reasons = {
        "captured into a graph, whose replays nobody times": missed.capturing,
        "on another GPU than the process's first": missed.other_device,
        "without an answer of the GPU about its clock": missed.no_anchor,
        "more than wait at once": missed.too_many,
        "ended by an error or on another stream": missed.other_stream,
        "not over when the process ended": missed.unfinished,
        "refused by CUDA": missed.failed,
    }
    return "; ".join(f"{count} {reason}" for reason, count in reasons.items() if count) or None


def one_pair(times: DeviceTimes) -> Callable[[], None]:
    """Return what records one pair in a hook, and resolves the pairs of a measured block at its end."""
    pair = cost.hooked(lambda: times.pair(f"{DEVICE_TIME}cost", bytes=4096, ranks=2))
    numbers = itertools.count(1)

    def record() -> None:
        pair()
        if next(numbers) % cost.EVENTS == 0:
            times.poll()

    return record


def write(span: DeviceSpan) -> None:
    """Write a span into the Recording, with how far off it may be, and how long before it the host launched it."""
    known = {"stream": span.stream, "error_ns": span.error_ns, "behind_host_ns": span.behind_host_ns}
    spans.automatic_span_at(span.name, span.start_ns, span.end_ns, lane=span.stream, **span.args, **known)


class CudaEvents:
    """The current CUDA device; it implements `device_time.DeviceEvents`.

    It calls torch's bindings directly where the Python functions around them take longer than the call to CUDA.
    """

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._event = torch._C._CudaEventBase
        self._capturing = torch._C._cuda_isCurrentStreamCapturing
        self._current_device = torch._C._cuda_getDevice
        self._current_stream = torch._C._cuda_getCurrentRawStream
        # From torch's pool: if others submit to it too, an anchor takes longer to fire, and says so by its width.
        self._idle = torch.cuda.Stream()
        self._device: int = torch.cuda.current_device()
        self._streams: dict[int, tuple[int, Any]] = {}
        """Streams by address, numbered as they are met; each has a row of the timeline."""

    def new_event(self) -> Any:
        return self._event(enable_timing=True)

    def is_capturing(self) -> bool:
        return bool(self._capturing())

    def record(self, event: Any) -> int:
        if self._current_device() != self._device:
            return OTHER_DEVICE
        if self._capturing():
            return CAPTURING
        address = self._current_stream(self._device)
        known = self._streams.get(address)
        if known is None:
            known = self._streams[address] = len(self._streams) + 1, self._cuda.current_stream()
        number, stream = known
        event.record(stream)
        return number

    def record_idle(self, event: Any) -> None:
        event.record(self._idle)

    def has_fired(self, event: Any) -> bool:
        return bool(event.query())

    def elapsed_ms(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later))
