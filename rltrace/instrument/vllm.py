"""vLLM's V1 engine: start-up, sleep and wake-up with bytes by tag, engine steps, requests.

Source read: vLLM 0.26. Sleep and wake-up are hooked at `CuMemAllocator`, beneath the executor and the worker: only
there it is known which bytes move.
"""

from __future__ import annotations

from typing import Any

from rltrace import recorder
from rltrace.clock import now_ns
from rltrace.instrument.requests import Lanes, Requests
from rltrace.patching import PatchSet

WORKER = "vllm.v1.worker.gpu_worker:Worker"
ALLOCATOR = "vllm.device_allocator.cumem:CuMemAllocator"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

OWNERS = {"weights": "rollout.weights", "kv_cache": "rollout.kv_cache"}
"""Owner of the allocator's bytes by its tag."""


class Vllm:
    """One engine: its worker, its allocator and its scheduler."""

    name = "vllm"
    supports = ("vllm >= 0.20, < 0.27",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        pools = Pools()
        install_startup(patches, pools)
        install_sleep(patches, pools)
        install_steps(patches)


def install_startup(patches: PatchSet, pools: Pools) -> None:
    """The phases before the first request; memory that they reserve is sampled behind them."""
    for method, phase in (
        ("load_model", "rollout.load"),
        ("determine_available_memory", "rollout.profile"),
        ("initialize_from_config", "rollout.reserve_kv"),
        ("compile_or_warm_up_model", "rollout.capture"),
    ):
        patches.around(f"{WORKER}.{method}", *pools.phase(phase), (phase,))


def install_sleep(patches: PatchSet, pools: Pools) -> None:
    """Pages taken from the pools and given to them."""
    patches.around(f"{ALLOCATOR}.sleep", pools.begin_sleep, pools.end_sleep, ("cumem.unmap",))
    patches.around(f"{ALLOCATOR}.wake_up", pools.begin_wake_up, pools.end_wake_up, ("cumem.map",))


def install_steps(patches: PatchSet) -> None:
    """Engine steps, from a scheduler output to the update by the same output, and requests."""
    steps, requests = Steps(), SchedulerRequests()
    patches.around(f"{SCHEDULER}.schedule", steps.begin, steps.keep_output)
    patches.around(f"{SCHEDULER}.update_from_output", steps.find_output, steps.end, ("engine.step",))
    patches.around(f"{SCHEDULER}.add_request", requests.keep, requests.begin)
    patches.around(f"{SCHEDULER}._free_request", requests.keep, requests.end, ("rollout.request",))


class Pools:
    """vLLM's sleeping pools: which tags are awake, and how many bytes each holds.

    Kept here because an allocation knows whether it sleeps from 0.26 on only.
    """

    def __init__(self) -> None:
        self._asleep: set[str] = set()

    def phase(self, name: str) -> tuple[Any, Any]:
        """`before` and `after` of a start-up phase."""

        def begin(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
            return recorder.phase(name).__enter__()

        def end(opened: Any, _result: Any, error: BaseException | None) -> None:
            opened.set(**{f"{tag}_bytes": size for tag, size in bytes_by_tag().items()})
            opened.__exit__(None if error is None else type(error))
            self.sample()

        return begin, end

    def begin_sleep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open the span with the bytes that are to go, and those to be kept on the host."""
        self.sample()
        kept = kwargs.get("offload_tags", args[1] if len(args) > 1 else ("weights",)) or ()
        going = {tag: size for tag, size in bytes_by_tag().items() if tag not in self._asleep}
        backed_up = sum(size for tag, size in going.items() if tag in kept)
        return recorder.span("cumem.unmap", bytes=sum(going.values()), host_bytes=backed_up, tags=going).__enter__()

    def end_sleep(self, opened: Any, _result: Any, error: BaseException | None) -> None:
        """Close it; every pool sleeps now."""
        if error is None:
            self._asleep |= set(bytes_by_tag())
        opened.__exit__(None if error is None else type(error))
        self.sample()

    def begin_wake_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open the span with the bytes that come back."""
        self.sample()
        wanted = kwargs.get("tags", args[1] if len(args) > 1 else None)
        coming = {t: size for t, size in bytes_by_tag().items() if t in self._asleep and (not wanted or t in wanted)}
        opened = recorder.span("cumem.map", bytes=sum(coming.values()), tags=coming).__enter__()
        return opened, set(coming)

    def end_wake_up(self, token: Any, _result: Any, error: BaseException | None) -> None:
        """Close it; what it named is awake now."""
        opened, woken = token
        if error is None:
            self._asleep -= woken
        opened.__exit__(None if error is None else type(error))
        self.sample()

    def sample(self) -> None:
        """Write the bytes of each owner that have memory behind them now."""
        for tag, size in bytes_by_tag().items():
            if tag in OWNERS:
                recorder.counter(f"{OWNERS[tag]}_bytes", 0 if tag in self._asleep else size)


def bytes_by_tag() -> dict[str, int]:
    """Bytes of every pool, asleep or awake; segments of the allocator, not tensors."""
    from vllm.device_allocator.cumem import CuMemAllocator

    sizes: dict[str, int] = {}
    allocator = CuMemAllocator.instance  # never made here: that would be a side effect
    for allocation in list(allocator.pointer_to_data.values()) if allocator is not None else ():
        sizes[allocation.tag] = sizes.get(allocation.tag, 0) + allocation.handle[1]
    return sizes


class Steps:
    """Engine steps in flight: with asynchronous scheduling the next is scheduled before the last one has ended."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[Any, int, int]] = {}
        """Scheduler output (kept, so that its id stays its own), start and lane, by the output's id."""
        self._lanes = Lanes()

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
        """When the scheduling began."""
        return now_ns()

    def keep_output(self, start_ns: int, output: Any, error: BaseException | None) -> None:
        """A step that computes nothing is none."""
        if error is None and output.total_num_scheduled_tokens > 0:
            self._begun[id(output)] = (output, start_ns, self._lanes.take())

    def find_output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The scheduler, and which step its call is about to end."""
        output = kwargs["scheduler_output"] if "scheduler_output" in kwargs else args[1]
        return args[0], self._begun.pop(id(output), None)

    def end(self, token: Any, _result: Any, error: BaseException | None) -> None:
        """Write the step's span."""
        scheduler, begun = token
        if begun is None:
            return
        output, start_ns, lane = begun
        self._lanes.give_back(lane)
        late = {} if error is None else {"error": type(error).__name__}
        recorder.span_at("engine.step", start_ns, now_ns(), lane=lane, **step_args(scheduler, output), **late)


def step_args(scheduler: Any, output: Any) -> dict[str, Any]:
    """What a step computed and what is left, as the embedded engine says it."""
    return {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "tokens": output.total_num_scheduled_tokens,
        "kv_usage": scheduler.kv_cache_manager.usage,
        "preempted": len(getattr(output, "preempted_req_ids", None) or ()),
    }


class SchedulerRequests:
    """Requests from the scheduler's queue to their last token."""

    def __init__(self) -> None:
        self._requests = Requests()

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The request that the call is about."""
        return kwargs["request"] if "request" in kwargs else args[1]

    def begin(self, request: Any, _result: Any, error: BaseException | None) -> None:
        """It was queued."""
        if error is None:
            self._requests.begin(request.request_id)

    def end(self, request: Any, _result: Any, _error: BaseException | None) -> None:
        """It is done, or was aborted."""
        self._requests.end(
            request.request_id, prompt_tokens=request.num_prompt_tokens, tokens=request.num_output_tokens
        )
