"""SGLang's scheduler process: start-up, batches, and what a trainer asks of it: weights, sleep and wake-up.

Source read: SGLang 0.4.6 to 0.5.23; 0.5.12 was run. Control requests are hooked at the dispatcher that all of these
releases hand them to; the methods behind it have moved twice. What sleeps has its bytes from torch_memory_saver.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from rltrace.events import REQUEST
from rltrace.hooks import boundaries
from rltrace.hooks.arguments import argument, attributes
from rltrace.hooks.patching import PatchSet, end_span, nothing_after, nothing_before
from rltrace.hooks.request_spans import Lanes
from rltrace.host.clock import now_ns
from rltrace.host.interruption import own_failure
from rltrace.instrument.memory.cuda_ledger import GRAPHS
from rltrace.instrument.memory.cuda_memory import LEDGER
from rltrace.instrument.memory.growth import Growth
from rltrace.instrument.sglang import speculation
from rltrace.instrument.sglang.control import MODEL_RUNNER, ControlRequests
from rltrace.instrument.sglang.requests import READ, SchedulerRequests
from rltrace.instrument.torch.devices import on_cpu, on_gpu
from rltrace.record import lifecycle, spans
from rltrace.record.error_message import error_args

SCHEDULER = "sglang.srt.managers.scheduler"
DETOKENIZER = "sglang.srt.managers.detokenizer_manager"
DISPATCH = "sglang.utils:TypeBasedDispatcher.__call__"

STARTUP = (
    ("rollout.load", ("load_model",)),
    ("rollout.reserve_kv", ("init_memory_pool", "alloc_memory_pool")),
    ("rollout.capture", ("init_device_graphs", "init_cuda_graphs")),
)
"""Phases of a model runner's start-up, each with the names that its method has had."""


BATCH = "sglang.srt.managers.schedule_batch:ScheduleBatch"
RUNS = (
    *attributes(f"{SCHEDULER}:Scheduler", "waiting_queue"),
    *attributes(BATCH, "batch_size", "forward_mode", "extend_num_tokens"),
    *attributes("sglang.srt.model_executor.forward_batch_info:ForwardMode", "is_extend"),
)
RESULTS = (
    *attributes(
        f"{SCHEDULER}:Scheduler", "waiting_queue", "token_to_kv_pool_allocator", "tree_cache", "max_total_num_tokens"
    ),
    *READ,
    *attributes(BATCH, "reqs"),
    *attributes("sglang.srt.managers.schedule_batch:Req", "finished"),
    *speculation.READ,
)
CONTROL = (
    *attributes(
        "sglang.srt.managers.io_struct:",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
        "UpdateWeightFromDiskReqInput",
        "UpdateWeightsFromDistributedReqInput",
        "UpdateWeightsFromTensorReqInput",
    ),
    *attributes("sglang.srt.managers.io_struct:UpdateWeightsFromTensorReqInput", "serialized_named_tensors"),
)


class Sglang:
    """Batches, weight updates, memory released and resumed."""

    name = "sglang"
    supports = ("sglang >= 0.4.6",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        asked = SchedulerRequests()
        batches, requests = Batches(asked), ControlRequests()
        patches.around(
            f"{SCHEDULER}:run_scheduler_process", functools.partial(become_scheduler, requests, asked), nothing_after
        )
        asked.name_hooks(patches)
        patches.around(f"{BATCH}.retract_decode", nothing_before, batches.retracted)
        patches.around(f"{SCHEDULER}:Scheduler.__init__", nothing_before, is_ready)
        patches.around(f"{DETOKENIZER}:run_detokenizer_process", identify_detokenizer, nothing_after)
        scheduler = f"{SCHEDULER}:Scheduler"
        patches.around(f"{scheduler}.run_batch", batches.begin, batches.keep_result, reads=RUNS)
        found = f"{scheduler}.process_batch_result"
        patches.around(found, batches.find_result, batches.end, ("engine.step", REQUEST), reads=RESULTS)
        patches.around(
            DISPATCH,
            requests.begin,
            requests.end,
            ("rollout.sleep", "rollout.wake_weights", "rollout.wake_kv_cache", "weight_sync.load"),
            at_boundaries=False,  # every request of the scheduler passes, and every answer in the server
            reads=CONTROL,
        )
        patches.when_imported(MODEL_RUNNER, lambda _: name_moved(patches, requests))


def become_scheduler(
    requests: ControlRequests, asked: SchedulerRequests, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Note that this process is a scheduler: others have dispatchers too. The last parameters differ by release."""
    requests.is_scheduler = True
    begins = inspect.signature(importlib.import_module(SCHEDULER).run_scheduler_process)
    known = begins.bind_partial(*args, **kwargs).arguments
    identify_scheduler(known)
    asked.become(known["server_args"], known["tp_rank"], known.get("pp_rank", 0))


def identify_scheduler(known: dict[str, Any]) -> None:
    """Say which of an engine's schedulers this process is, and on which of the GPUs that its server sees.

    Its rank in the engine is not one of the run's ranks.
    """
    server_args, gpu_id = known["server_args"], known["gpu_id"]
    is_on_cpu = getattr(server_args, "device", None) == "cpu"
    device = on_cpu(f"cpu-{gpu_id}") if is_on_cpu else on_gpu(gpu_id)
    lifecycle.identify(role="engine", name=scheduler_name(server_args, known), **device)


def scheduler_name(server_args: Any, ranks: dict[str, Any]) -> str:
    """Return the scheduler's rank in its tensor-parallel group, and the group if an engine has several."""
    of_groups = (("DP", "dp"), ("PP", "pp"))
    groups = [
        f" {said}{ranks[f'{name}_rank']}" for said, name in of_groups if getattr(server_args, f"{name}_size", 1) > 1
    ]
    return f"scheduler {ranks['tp_rank']}{''.join(groups)}"


def identify_detokenizer(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Say that this process turns tokens into text."""
    lifecycle.identify(name="detokenizer")


def is_ready(_token: Any, result: Any, error: BaseException | None) -> None:
    """Give the context the kernels that were loaded until the engine was ready."""
    if error is None:
        LEDGER.rest_is_context()
    is_idle(None, result, error)


def is_idle(_token: Any, _result: Any, error: BaseException | None) -> None:
    """Tell of the boundary at which an engine becomes idle: what it holds then stays until it sleeps."""
    if error is None:
        boundaries.reached(boundaries.Boundary())


def name_moved(patches: PatchSet, requests: ControlRequests) -> None:
    """Name the hooks on what this release has at another place, or by another name, than others."""
    runner = importlib.import_module(MODEL_RUNNER).ModelRunner
    requests.name_loads(patches)
    for phase, names in STARTUP:
        for method in [name for name in names if hasattr(runner, name)][:1]:
            target, startup = f"{MODEL_RUNNER}:ModelRunner.{method}", StartupPhase(phase)
            patches.around(target, startup.begin, startup.end, (phase,), at_boundaries=False)


class StartupPhase:
    """One phase of a model runner's start-up, in which kernels are loaded too."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._graphs = Growth(LEDGER, GRAPHS) if name == "rollout.capture" else None
        """Torch's allocator knows only a part of CUDA graphs."""

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Open the phase, and tell of its boundary."""
        LEDGER.rest_is_context()
        boundaries.reached(boundaries.Boundary((self._name,), is_end=False))
        before_bytes = None if self._graphs is None else self._graphs.begin()
        return before_bytes, spans.phase(self._name).__enter__()

    def end(self, token: Any, _result: Any, error: BaseException | None) -> None:
        """Close the span."""
        before_bytes, opened = token
        end_span(opened, None, error)
        # One look of either kind: what is sampled at the boundary shall not be old.
        if self._graphs is not None:
            self._graphs.end(before_bytes)
        else:
            LEDGER.rest_is_context()
        boundaries.reached(boundaries.Boundary((self._name,), error=error))


# ---- batches ----------------------------------------------------------------------------------------------------


class Batches:
    """Batches in flight: with the overlap scheduler the next one runs before the last one's result is processed."""

    def __init__(self, asked: SchedulerRequests) -> None:
        self._asked = asked
        """They are told which of them a batch computes and has processed."""
        self._begun: dict[int, tuple[Callable[[], Any], int, int, dict[str, Any]]] = {}
        """By the result's id: what gives the result while it is there, start, lane and arguments."""
        self._lanes = Lanes()
        self._retracted = 0
        """Requests that have lost their KV cache since the last batch."""
        self._guesses = speculation.Guesses()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return when the batch began, and what it computes."""
        start_ns, batch = now_ns(), argument("batch", 1, args, kwargs)
        if is_extend(batch):
            self._asked.scheduled(batch, start_ns)
        preempted, self._retracted = self._retracted, 0
        return start_ns, {**batch_args(args[0], batch), "preempted": preempted}

    def retracted(self, _token: Any, result: Any, error: BaseException | None) -> None:
        """Count the requests that were taken out of a batch for want of room."""
        if error is None:
            self._retracted += len(result[0])

    def keep_result(self, token: tuple[int, dict[str, Any]], result: Any, error: BaseException | None) -> None:
        """Keep the batch until its result is processed."""
        if error is not None or result is None:
            return
        self._forget(id(result))
        if len(self._begun) >= IN_FLIGHT:
            self._forget(next(iter(self._begun)))
        self._begun[id(result)] = (reference(result), token[0], self._lanes.take(), token[1])

    def find_result(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the scheduler, the batch and the result of the call, and which batch it is about to end."""
        batch = argument("batch", 1, args, kwargs)
        result = argument("result", 2, args, kwargs)
        begun = self._begun.get(id(result))
        if begun is None or begun[0]() is not result:
            return args[0], batch, result, None
        return args[0], batch, result, self._begun.pop(id(result))

    def end(self, token: Any, _result: Any, error: BaseException | None) -> None:
        """Write the batch's span; with the last one the engine is idle."""
        scheduler, batch, result, begun = token
        self._asked.processed(batch)
        guesses = self._guesses.of(scheduler, batch, result)
        if begun is None:
            return
        self._write(begun, {**kv_usage(scheduler), **guesses}, error)
        is_last = (
            batch.reqs and not scheduler.waiting_queue and all(kept() is None for kept, *_ in self._begun.values())
        )
        if is_last and all(request.finished() for request in (*batch.reqs, *running(scheduler))):
            is_idle(None, None, error)

    def _forget(self, key: int) -> None:
        """Forget the batch with this id, which has ended unseen."""
        begun = self._begun.pop(key, None)
        if begun is not None:
            self._lanes.give_back(begun[2])

    def _write(self, begun: Any, found: dict[str, Any], error: BaseException | None) -> None:
        _, start_ns, lane, args = begun
        self._lanes.give_back(lane)
        late = found if error is None else {**found, **error_args(error)}
        spans.automatic_span_at("engine.step", start_ns, now_ns(), lane=lane, **args, **late)


IN_FLIGHT = 64
"""How many batches are remembered: with pipeline parallelism, another result is processed than the batch gave."""


def reference(result: Any) -> Callable[[], Any]:
    """Return what gives a result without keeping it alive, for its tensors are the engine's memory."""
    try:
        return weakref.ref(result)
    except own_failure(TypeError):  # of a kind that knows no references; there are few of them at once
        return lambda: result


def running(scheduler: Any) -> Any:
    """Return the requests that decode while others are in their first batch."""
    return getattr(getattr(scheduler, "running_batch", None), "reqs", None) or ()


def kv_usage(scheduler: Any) -> dict[str, float]:
    """Return the share of the KV cache that requests have: cached prefixes of nobody's can be taken at any time.

    A model of several kinds of attention has a cache for each; of these nothing is said.
    """
    try:
        whole = scheduler.max_total_num_tokens
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        return {"kv_usage": 1 - free / whole}
    except own_failure(AttributeError, TypeError, NotImplementedError, ZeroDivisionError):
        return {}


def is_extend(batch: Any) -> bool:
    """Return whether a batch computes prompts."""
    return batch.forward_mode is not None and bool(batch.forward_mode.is_extend())


def batch_args(scheduler: Any, batch: Any) -> dict[str, Any]:
    """Return how many requests run and wait, and the tokens: an extend batch's prompts, or else one per request."""
    running = batch.batch_size()
    return {
        "running": running,
        "waiting": len(scheduler.waiting_queue),
        "tokens": (batch.extend_num_tokens or 0) if is_extend(batch) else running,
    }
