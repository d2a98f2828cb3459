"""SGLang's scheduler process: batches, and what a trainer asks of it: weights, sleep and wake-up.

Source read: SGLang 0.4.6 to 0.5.23. Control requests are hooked at the dispatcher that all of these releases hand them
to; the methods behind it have moved twice. The bytes are torch_memory_saver's to say.
"""

from __future__ import annotations

from typing import Any

from rltrace import recorder
from rltrace.clock import now_ns
from rltrace.instrument.requests import Lanes
from rltrace.patching import PatchSet

SCHEDULER = "sglang.srt.managers.scheduler"
DISPATCH = "sglang.utils:TypeBasedDispatcher.__call__"


class Sglang:
    """Batches, weight updates, memory released and resumed."""

    name = "sglang"
    supports = ("sglang >= 0.4.6, < 0.5.24",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        batches = Batches()
        patches.around(f"{SCHEDULER}:run_scheduler_process", identify_scheduler, nothing)
        patches.around(f"{SCHEDULER}:Scheduler.run_batch", batches.begin, batches.keep_result)
        patches.around(
            f"{SCHEDULER}:Scheduler.process_batch_result", batches.find_result, batches.end, ("engine.step",)
        )
        patches.around(
            DISPATCH,
            begin_request,
            end_request,
            ("rollout.sleep", "rollout.wake_weights", "rollout.wake_kv_cache", "weight_sync.load"),
        )


def identify_scheduler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say which of an engine's schedulers this process is; its rank in the engine is none of the run's ranks."""
    tp_rank = kwargs["tp_rank"] if "tp_rank" in kwargs else args[3]
    recorder.identify(role="engine", name=f"scheduler {tp_rank}")


def nothing(_token: Any, _result: Any, _error: BaseException | None) -> None:
    """All was done before."""


# ---- batches ----------------------------------------------------------------------------------------------------


class Batches:
    """Batches in flight: with the overlap scheduler the next one runs before the last one's result is processed."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[Any, int, int, dict[str, Any]]] = {}
        """Result (kept, so that its id stays its own), start, lane and arguments, by the result's id."""
        self._lanes = Lanes()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """When the batch began, and what it computes."""
        return now_ns(), batch_args(args[0], kwargs["batch"] if "batch" in kwargs else args[1])

    def keep_result(self, token: tuple[int, dict[str, Any]], result: Any, error: BaseException | None) -> None:
        """It runs until its result is processed."""
        if error is None and result is not None:
            self._begun[id(result)] = (result, token[0], self._lanes.take(), token[1])

    def find_result(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Which batch the call is about to end."""
        return self._begun.pop(id(kwargs["result"] if "result" in kwargs else args[2]), None)

    def end(self, begun: Any, _result: Any, error: BaseException | None) -> None:
        """Write the batch's span."""
        if begun is None:
            return
        _, start_ns, lane, args = begun
        self._lanes.give_back(lane)
        late = {} if error is None else {"error": type(error).__name__}
        recorder.span_at("engine.step", start_ns, now_ns(), lane=lane, **args, **late)


def batch_args(scheduler: Any, batch: Any) -> dict[str, Any]:
    """Requests that run and wait, and tokens: those of the prompts in an extend batch, one a request else."""
    running = batch.batch_size()
    is_extend = batch.forward_mode is not None and batch.forward_mode.is_extend()
    return {
        "running": running,
        "waiting": len(scheduler.waiting_queue),
        "tokens": (batch.extend_num_tokens or 0) if is_extend else running,
    }


# ---- control requests -------------------------------------------------------------------------------------------


def begin_request(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the span of a control request; of any other request, none."""
    request = kwargs["obj"] if "obj" in kwargs else args[1]
    opened = span_of(type(request).__name__, list(getattr(request, "tags", None) or ()))
    return None if opened is None else opened.__enter__()


def end_request(opened: Any, _result: Any, error: BaseException | None) -> None:
    """Close it."""
    if opened is not None:
        opened.__exit__(None if error is None else type(error))


def span_of(request: str, tags: list[str]) -> Any:
    """The span, or the phase, that a request of this class is; `tags` are the pools that it names, none for all."""
    if request == "ReleaseMemoryOccupationReqInput":
        return recorder.phase("rollout.sleep", tags=tags)
    if request == "ResumeMemoryOccupationReqInput":
        only_kv_cache = tags == ["kv_cache"]
        return recorder.phase("rollout.wake_kv_cache" if only_kv_cache else "rollout.wake_weights", tags=tags)
    if request.startswith(("UpdateWeightFrom", "UpdateWeightsFrom")):
        return recorder.span("weight_sync.load", source=request.partition("From")[2].removesuffix("ReqInput").lower())
    return None
