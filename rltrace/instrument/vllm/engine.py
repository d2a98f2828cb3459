"""vLLM's V1 engine: start-up, sleep and wake-up with bytes by tag, engine steps, requests.

Source read: one release of each line from 0.8.5 to 0.33; the targets are the same in all of them, what differs is said
where it is read. Since 0.12 there are two model runners, and each release chooses the newer one for more models. Sleep
and wake-up are hooked at `CuMemAllocator`, beneath the executor and the worker: only there it is known which bytes
move. The V0 engine of 0.8 to 0.10 (VLLM_USE_V1=0) has other classes and is not traced.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

from rltrace.hooks import boundaries
from rltrace.hooks.arguments import argument, attributes, keep, keep_self
from rltrace.hooks.patching import PatchSet, end_span, nothing_after, nothing_before
from rltrace.hooks.request_spans import Requests
from rltrace.host import memory
from rltrace.host.clock import now_ns
from rltrace.instrument.memory.cuda_ledger import GRAPHS
from rltrace.instrument.memory.cuda_memory import KERNELS, LEDGER, TURNS
from rltrace.instrument.memory.growth import Growth
from rltrace.instrument.memory.pools import Pools
from rltrace.instrument.memory.sharded_models import by_place
from rltrace.instrument.memory.turn_hooks import beat_afterwards
from rltrace.instrument.memory.turns import beating
from rltrace.instrument.torch.tensor_sizes import sizes_of
from rltrace.instrument.vllm import speculation, weight_transfer
from rltrace.record import lifecycle, spans
from rltrace.record.error_message import error_args

WORKER = "vllm.v1.worker.gpu_worker:Worker"
ALLOCATOR = "vllm.device_allocator.cumem:CuMemAllocator"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
RUNNER = f"{speculation.RUNNER}:GPUModelRunner"
NEWER_RUNNER = f"{speculation.NEWER_RUNNER}:GPUModelRunner"
"""The newer model runner, V2, whose methods have the same names."""
REQUEST = "vllm.v1.request:Request"
OUTPUT = "vllm.v1.core.sched.output"
ENGINE_PROCESS = "vllm.v1.engine.core:EngineCoreProc.run_engine_core"
WORKER_PROCESS = "vllm.v1.executor.multiproc_executor:WorkerProc.worker_main"

POOLS = (
    *attributes(ALLOCATOR, "instance", "pointer_to_data"),
    *attributes("vllm.device_allocator.cumem:AllocationData", "handle", "tag"),
)
"""What says which segments there are."""
SCHEDULED = (
    *attributes(SCHEDULER, "running"),
    *attributes(f"{OUTPUT}:SchedulerOutput", "total_num_scheduled_tokens", "scheduled_new_reqs"),
    *attributes(f"{OUTPUT}:NewRequestData", "req_id", "num_computed_tokens"),
)
UPDATED = (
    *attributes(SCHEDULER, "running", "waiting", "requests", "kv_cache_manager"),
    *attributes(REQUEST, "num_output_tokens"),
    *attributes("vllm.v1.core.kv_cache_manager:KVCacheManager", "usage"),
    *speculation.READ,
)


class Vllm:
    """One engine: its worker, its allocator and its scheduler."""

    name = "vllm"
    supports = ("vllm >= 0.8.5",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        tensors = TensorAddresses()
        pools = Pools(bytes_by_tag, addresses, LEDGER.free_bytes, LEDGER.out_of_memory, copies, tensors.now)
        install_startup(patches, pools)
        graphs = Growth(LEDGER, GRAPHS)
        name_runner_hooks(patches, RUNNER, tensors, graphs)
        patches.when_imported(
            speculation.NEWER_RUNNER, lambda _: name_runner_hooks(patches, NEWER_RUNNER, tensors, graphs)
        )
        install_sleep(patches, pools)
        install_steps(patches)
        install_processes(patches)
        weight_transfer.name_hooks(patches)


def install_startup(patches: PatchSet, pools: Pools) -> None:
    """Name the hooks on the phases before the first request; the memory that they reserve is sampled after them."""

    def meet_worker(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        LEDGER.engine = pools

    patches.around(f"{WORKER}.__init__", meet_worker, nothing_after)
    patches.around(f"{WORKER}.init_device", begin_inputs, end_inputs)
    for method, name, args_of in (
        ("load_model", "rollout.load", nothing_known),
        ("determine_available_memory", "rollout.profile", nothing_known),
        ("initialize_from_config", "rollout.reserve_kv", cache_args),
        ("compile_or_warm_up_model", "rollout.capture", nothing_known),
    ):
        patches.around(f"{WORKER}.{method}", *phase(name, pools, args_of), (name,))
    patches.span(f"{WORKER}.add_lora", "engine.add_lora", adapter_args)
    # Memory may have changed though no phase ends: where a step is computed, and where the parameters are allocated.
    patches.wrap(f"{WORKER}.execute_model", functools.partial(beat_afterwards, TURNS))
    loaded = "vllm.model_executor.model_loader.base_loader:initialize_model"
    patches.around(loaded, nothing_before, beating(TURNS))
    # Its parameters have been allocated, and are filled now.
    patches.around("vllm.model_executor.models.utils:AutoWeightsLoader.load_weights", beating(TURNS), nothing_after)


def name_runner_hooks(patches: PatchSet, runner: str, tensors: TensorAddresses, graphs: Growth) -> None:
    """Name the hooks on a model runner, which has the weights and the KV cache, and captures the graphs."""
    patches.around(f"{runner}.__init__", tensors.meet, nothing_after)
    patches.around(f"{runner}.load_model", keep_self, meet_weights, reads=attributes(runner, "model"))
    kv_caches = attributes(runner, "kv_caches")
    patches.around(f"{runner}.initialize_kv_cache", keep_self, meet_kv_cache, reads=kv_caches)
    # Profiling and capture run the first, and a warm-up ends with the second, whose kernels are compiled for seconds.
    for method in ("_dummy_run", "_dummy_sampler_run"):
        patches.around(f"{runner}.{method}", nothing_before, beating(TURNS))
    patches.around(f"{runner}.capture_model", graphs.begin, graphs.end)


def nothing_known(*_: Any, **__: Any) -> dict[str, Any]:
    """Return no arguments."""
    return {}


def cache_args(worker: Any, kv_cache_config: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return how many blocks the KV cache has on this GPU, and how many tokens fit into one."""
    return {"gpu_blocks": kv_cache_config.num_blocks, "block_tokens": worker.cache_config.block_size}


def adapter_args(_worker: Any, lora_request: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return which adapter is added, and its bytes if it comes as tensors, as from verl, and not from a disk."""
    tensors = getattr(lora_request, "lora_tensors", None) or {}
    known = sizes_of(tensors.values()) if tensors else {}
    return {"adapter": str(lora_request.lora_name), **known}


class TensorAddresses:
    """Where the weights and the KV cache of this process's engine lie, which its CUDA graphs have in them."""

    def __init__(self) -> None:
        self._runner: Any = lambda: None

    def meet(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Meet the model runner, which has them."""
        self._runner = weakref.ref(args[0])

    def now(self) -> list[int]:
        """Return the addresses, in an order that stays."""
        runner = self._runner()
        if runner is None:
            return []
        caches = [cache for cache in getattr(runner, "kv_caches", ()) if hasattr(cache, "data_ptr")]
        return [tensor.data_ptr() for tensor in (*tensors_of(getattr(runner, "model", None)), *caches)]


def begin_inputs(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int | None:
    """Reach the boundary before the inputs are allocated: beside a trainer, only growth tells them from its bytes."""
    LEDGER.reached(boundaries.Boundary(("rollout.load",), is_end=False))
    return KERNELS.begin() if LEDGER.in_use else None


def end_inputs(before_bytes: int | None, _result: Any, error: BaseException | None) -> None:
    """Give the context the kernels that this has loaded, and reach the boundary after the inputs are allocated."""
    if before_bytes is None:  # a process of the engine's own, which has nothing but its context yet
        LEDGER.rest_is_context()
    KERNELS.end(before_bytes)
    LEDGER.reached(boundaries.Boundary(("rollout.load",), error=error))


def meet_weights(runner: Any, _result: Any, error: BaseException | None) -> None:
    """Meet the weights, which without sleep mode are tensors like any others."""
    if error is None and not bytes_by_tag():
        model = weakref.ref(runner.model)
        LEDGER.tensors["vllm.weights"] = lambda: by_place("rollout.weights", tensors_of(model()))


def tensors_of(model: Any) -> list[Any]:
    """Return the parameters and buffers of a model, each once, in an order that stays; none if the model is gone.

    It is asked at each sleep and wake-up. `parameters()` and `buffers()` take 3 ms for 28 layers, because they make a
    name for each.
    """
    found: dict[int, Any] = {}
    met, modules = set(), [] if model is None else [model]
    while modules:
        module = modules.pop()
        if module is None or id(module) in met:
            continue
        met.add(id(module))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                found[id(tensor)] = tensor
        modules += module._modules.values()
    return [*found.values()]


def meet_kv_cache(runner: Any, _result: Any, error: BaseException | None) -> None:
    """Meet the KV cache, which without sleep mode consists of tensors like any others."""
    if error is None and not bytes_by_tag().get("kv_cache"):
        known = weakref.ref(runner)
        LEDGER.tensors["vllm.kv_cache"] = lambda: by_place("rollout.kv_cache", getattr(known(), "kv_caches", ()))


def install_sleep(patches: PatchSet, pools: Pools) -> None:
    """Name the hooks on pages that are taken from the pools and given to them."""

    def begin_sleep(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return pools.begin_unmap(kept=argument("offload_tags", 1, args, kwargs, ("weights",)) or ())

    def begin_wake_up(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return pools.begin_map(argument("tags", 1, args, kwargs, None))

    patches.around(f"{ALLOCATOR}.sleep", begin_sleep, pools.end_unmap, ("cumem.unmap",), reads=POOLS)

    def arrived(handle: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:
            pools.arrived(tag_of(handle), handle[1])

    patches.around(f"{ALLOCATOR}.wake_up", begin_wake_up, pools.end_map, ("cumem.map",), reads=POOLS)
    # Behind the allocator's the worker has some 6 ms of its own to do, which would make the allocator's last word old.
    patches.around(f"{WORKER}.wake_up", nothing_before, sample)
    patches.around("vllm.device_allocator.cumem:create_and_map", keep("allocation_handle", 0), arrived, reads=POOLS)
    patches.around(f"{ALLOCATOR}.use_memory_pool", nothing_before, meet_never_mapped, reads=POOLS)


def install_steps(patches: PatchSet) -> None:
    """Name the hooks on engine steps, from a scheduler output to the update by the same output, and on requests."""
    requests = SchedulerRequests()
    steps = Steps(requests.in_flight)
    patches.around(f"{SCHEDULER}.schedule", steps.begin, steps.keep_output, reads=SCHEDULED)
    patches.around(f"{SCHEDULER}.update_from_output", steps.find_output, steps.end, ("engine.step",), reads=UPDATED)
    speculation.name_hooks(patches)
    queued = attributes(REQUEST, "request_id")
    patches.around(f"{SCHEDULER}.add_request", keep("request", 1), requests.begin, reads=queued)
    freed = attributes(REQUEST, "request_id", "num_prompt_tokens", "num_output_tokens")
    patches.around(f"{SCHEDULER}._free_request", keep("request", 1), requests.end, ("rollout.request",), reads=freed)


def install_processes(patches: PatchSet) -> None:
    """Name the hooks that say which process is which; an engine inside the program's process leaves that its role."""
    patches.around(ENGINE_PROCESS, identify_engine, nothing_after)
    patches.around(WORKER_PROCESS, identify_worker, nothing_after)


def identify_engine(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Say that this process schedules an engine's steps."""
    lifecycle.identify(role="engine", name="EngineCore")


def identify_worker(_args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say which of an engine's workers this process is; its rank in the engine is not one of the run's ranks."""
    lifecycle.identify(role="engine_worker", name=f"Worker {kwargs['rank']}" if "rank" in kwargs else "Worker")


def sample(_token: Any, _result: Any, _error: BaseException | None) -> None:
    """Sample what this process holds; whoever asked for the wake-up asks what each process holds."""
    LEDGER.sample(of_processes=False)


def phase(name: str, pools: Pools, args_of: Callable[..., dict[str, Any]]) -> tuple[Any, Any]:
    """Return the `before` and the `after` of a start-up phase, in which kernels are loaded too."""

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return KERNELS.begin(), spans.phase(name, **args_of(*args, **kwargs)).__enter__()

    def end(token: Any, _result: Any, error: BaseException | None) -> None:
        before_bytes, opened = token
        KERNELS.end(before_bytes)
        opened.set(**{f"{tag}_bytes": size for tag, size in bytes_by_tag().items()})
        end_span(opened, None, error)
        pools.sample()

    return begin, end


NEVER_MAPPED: dict[int, Any] = {}
"""Segments for which there was no room, by address: vLLM's allocator lists them first, and leaves them there."""


def meet_never_mapped(_token: Any, _result: Any, error: BaseException | None) -> None:
    """Note the segments that the allocator lists and torch does not have, if memory ran out within a pool.

    Nothing else asks for them, because torch lists every block of all pools to answer.
    """
    if error is None or not memory.is_out_of_memory(error):
        return
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator

    assert CuMemAllocator.instance is not None
    mapped = {segment["address"] for segment in torch.cuda.memory_snapshot()}
    listed = CuMemAllocator.instance.pointer_to_data
    NEVER_MAPPED.update({address: data for address, data in listed.items() if address not in mapped})


def segments(allocator: Any) -> dict[int, Any]:
    """Return the listed segments that have had memory behind them, by address; an address may have been reused."""
    listed = list(allocator.pointer_to_data.items())
    return {address: data for address, data in listed if NEVER_MAPPED.get(address) is not data}


class BytesByTag:
    """The bytes of every pool, asleep or awake: segments of the allocator, not tensors.

    They are added up again when a segment has come or gone. The allocator lists a new one last, unless its address is
    one that was never mapped.
    """

    def __init__(self) -> None:
        self._newest: Any = None
        """The segment itself, and not its id, so that no later one gets that."""
        self._count = 0
        self._sizes: dict[str, int] = {}

    def __call__(self) -> dict[str, int]:
        """Return them by tag."""
        from vllm.device_allocator.cumem import CuMemAllocator

        allocator = CuMemAllocator.instance  # never made here: that would be a side effect
        if allocator is None:
            return {}
        listed = allocator.pointer_to_data
        newest, count = next(reversed(listed.values()), None), len(listed)
        if newest is not self._newest or count != self._count or NEVER_MAPPED:
            sizes: dict[str, int] = {}
            for data in segments(allocator).values():
                sizes[data.tag] = sizes.get(data.tag, 0) + data.handle[1]
            self._newest, self._count, self._sizes = newest, count, sizes
        return self._sizes


bytes_by_tag = BytesByTag()


def copies(_asleep: Collection[str]) -> dict[str, memory.OnHost]:
    """Return what level 1 has copied to the host's memory, by tag; vLLM pins it where it believes that it can.

    So each copy is asked whether it is pinned, once, after the sleep that made it.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    tensors: dict[str, list[Any]] = {}
    allocator = CuMemAllocator.instance
    for data in segments(allocator).values() if allocator is not None else ():
        if (copy := getattr(data, "cpu_backup_tensor", None)) is not None:
            tensors.setdefault(data.tag, []).append(copy)
    return {tag: memory.on_host(held) for tag, held in tensors.items()}


def tag_of(handle: Any) -> str:
    """Return the pool of a segment; its handle is device, bytes, address and the driver's own handle."""
    from vllm.device_allocator.cumem import CuMemAllocator

    assert CuMemAllocator.instance is not None
    return str(CuMemAllocator.instance.pointer_to_data[handle[2]].tag)


def addresses() -> Collection[int]:
    """Return where the segments of all pools begin: the allocator's own list, because each look asks how long it is."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    return () if allocator is None else allocator.pointer_to_data.keys()


Step = tuple[Any, int, int, "int | None"]
"""An engine step that is scheduled and not over: the scheduler's output (kept, so that no other gets its id), when it
began, its lane, and how many requests it preempted; None where the output says that. It is no NamedTuple, because to
make one calls a function of Python."""


class Steps:
    """Engine steps in flight: with asynchronous scheduling the next is scheduled before the last one has ended.

    A rollout has a thousand steps, between which none of this stays in the processor's caches: so whatever is rare is
    in functions of its own.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        """They are told which of them are new in a step, and which have their first token."""
        self._begun: dict[int, Step] = {}
        """By the output's id."""
        self._new_lane = itertools.count(1).__next__
        self._free_lanes: list[int] = []
        """Lanes that steps have been on and none is on now. `Lanes` would take 9 µs in cold caches for each step."""
        self._are_preempted_named = False
        """Whether the scheduler's outputs name preempted requests, as from 0.12 on."""

    def begin(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[int, Any, list[Any] | None]:
        """Return when the scheduling began, the scheduler, and if needed the requests that were running then."""
        if self._are_preempted_named:
            return now_ns(), None, None
        return now_ns(), args[0], list(args[0].running)

    def keep_output(self, token: tuple[int, Any, list[Any] | None], output: Any, error: BaseException | None) -> None:
        """Keep the output of a step, unless the step computes nothing."""
        start_ns, scheduler, running = token
        if error is not None or not output.total_num_scheduled_tokens:
            return
        preempted = None
        if running is not None:
            self._are_preempted_named = hasattr(output, "preempted_req_ids")
            if not self._are_preempted_named:
                preempted = preemptions(running, scheduler.running)
        lanes = self._free_lanes
        self._begun[id(output)] = output, start_ns, lanes.pop() if lanes else self._new_lane(), preempted
        if output.scheduled_new_reqs:
            self._schedule_new(output.scheduled_new_reqs, start_ns)

    def _schedule_new(self, requests: Iterable[Any], start_ns: int) -> None:
        for new in requests:
            self._requests.scheduled(new.req_id, start_ns, new.num_computed_tokens)

    def find_output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Step | None, dict[str, int]]:
        """Return the scheduler, which step its call is about to end, and what became of tokens guessed ahead."""
        output = argument("scheduler_output", 1, args, kwargs)
        step = self._begun.pop(id(output), None)
        if not getattr(output, "scheduled_spec_decode_tokens", None):
            return args[0], step, {}
        answer = argument("model_runner_output", 2, args, kwargs, None)
        return args[0], step, speculation.guessed(args[0], output, answer)

    def end(self, token: tuple[Any, Step | None, dict[str, int]], _result: Any, error: BaseException | None) -> None:
        """Write the step's span: what it computed and what is left, as the embedded engine says it."""
        scheduler, step, late = token
        if step is None:
            return
        if self._requests.without_token:
            self._note_first_tokens(scheduler.requests)
        if error is not None:
            late = {**late, **error_args(error)}
        output, start_ns, lane, preempted = step
        self._free_lanes.append(lane)
        spans.automatic_span_at(
            "engine.step",
            start_ns,
            now_ns(),
            lane=lane,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            tokens=output.total_num_scheduled_tokens,
            kv_usage=scheduler.kv_cache_manager.usage,
            preempted=len(output.preempted_req_ids or ()) if preempted is None else preempted,
            **late,
        )

    def _note_first_tokens(self, requests: dict[str, Any]) -> None:
        for request_id in list(self._requests.without_token):
            request = requests.get(request_id)
            if request is not None and request.num_output_tokens:
                self._requests.has_token(request_id)


def preemptions(running: list[Any], still: list[Any]) -> int:
    """Return how many requests a scheduling of vLLM up to 0.11 preempted: only their status shows it.

    Args:
        running: What ran before.
        still: What runs now. A preempted request is not in it, so if no request has left, none was preempted; to look
            at 256 requests takes 27 µs a step.
    """
    if still[: len(running)] == running:
        return 0
    return sum(request.status.name == "PREEMPTED" for request in running)


class SchedulerRequests:
    """Requests from the scheduler's queue to their last token."""

    def __init__(self) -> None:
        self.in_flight = Requests()

    def begin(self, request: Any, _result: Any, error: BaseException | None) -> None:
        """Begin a request that was queued."""
        if error is None:
            self.in_flight.begin(request.request_id)

    def end(self, request: Any, _result: Any, _error: BaseException | None) -> None:
        """End a request that is done or was aborted; its last token may be its first."""
        if request.num_output_tokens:
            self.in_flight.has_token(request.request_id)
        self.in_flight.end(
            request.request_id, prompt_tokens=request.num_prompt_tokens, tokens=request.num_output_tokens
        )
        if not self.in_flight.in_flight:  # the engine has nothing left to do: what it holds now stays until it sleeps
            boundaries.reached(boundaries.Boundary())
