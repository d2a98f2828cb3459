"""The reference run (`rltrace_reference`): its phases, weight sync, engine and dispatch."""

from __future__ import annotations

import socket
from typing import Any

from rltrace.events import EMPTY_CACHE, LOG_PROBS
from rltrace.hooks.arguments import argument, keep
from rltrace.hooks.bucket_flow import flow_key
from rltrace.hooks.patching import PatchSet, nothing_after, nothing_before
from rltrace.hooks.request_spans import Requests
from rltrace.host.clock import now_ns
from rltrace.instrument.torch.devices import gpu_uuid
from rltrace.record import lifecycle

RUN = "rltrace_reference"


class Reference:
    """Everything of the reference run except the phases of its driver, which it names itself."""

    name = "reference"
    supports = ()

    def install(self, patches: PatchSet) -> None:
        """Name the hooks, process by process."""
        install_driver(patches)
        install_worker(patches)
        install_sender(patches)
        install_engine(patches)


# ---- driver -----------------------------------------------------------------------------------------------------


def install_driver(patches: PatchSet) -> None:
    """Name the hooks on one call of all workers: dispatch, execute, collect."""
    group = f"{RUN}.worker_group:WorkerGroup"
    patches.span(f"{group}.dispatch", "ray.dispatch", lambda _self, method, *_, **__: {"method": method})
    patches.span(f"{group}.execute", "ray.execute", lambda _self, refs, *_, **__: {"calls": len(refs)})
    patches.span(f"{group}.collect", "ray.collect")


# ---- worker -----------------------------------------------------------------------------------------------------


def install_worker(patches: PatchSet) -> None:
    """Name the hooks on the phases of a rank, and on what lies inside the update."""
    worker = f"{RUN}.worker:Worker"
    patches.around(f"{worker}.__init__", identify_worker, nothing_after)
    patches.span(f"{worker}.old_log_prob", "actor.old_log_prob", batch_args)
    patches.span(f"{worker}.ref_log_prob", "ref.log_prob", batch_args)
    patches.span(f"{worker}.update", "actor.update", batch_args)
    for policy, subject in (("Actor", "actor"), ("Ref", "ref")):
        patches.span(f"{RUN}.actor:{policy}.build", f"{subject}.build")
        patches.span(f"{RUN}.actor:{policy}.shard", f"{subject}.shard")
        patches.span(f"{RUN}.actor:{policy}.broadcast", f"{subject}.broadcast")
        patches.span(f"{RUN}.actor:{policy}.draw", f"{subject}.draw")
    patches.span(f"{RUN}.actor:Actor.state_dict", "actor.state_dict", late_args=tensor_name, each_item=True)
    patches.span(f"{RUN}.actor:Actor.micro_batch", "actor.micro_batch", batch_args)
    patches.span(f"{RUN}.grpo:token_log_probs", LOG_PROBS)
    manager = f"{RUN}.sharding_manager:ShardingManager"
    patches.span(f"{manager}.wake_weights", "rollout.wake_weights")
    patches.span(f"{manager}.sync_weights", "weight_sync", lambda manager: {"step": manager.step}, sync_stats)
    patches.span(f"{manager}.wake_kv_cache", "rollout.wake_kv_cache")
    patches.span(f"{RUN}.device:trim_heap", EMPTY_CACHE)  # on a GPU it is torch's, which has its own hook
    rollout = f"{RUN}.rollout:Rollout"
    patches.span(f"{rollout}.generate", "rollout.generate", generate_args, engine_memory)
    # Not the manager's: the engine is put to sleep once before the first step too.
    patches.span(f"{rollout}.sleep", "rollout.sleep", lambda _rollout, level: {"level": level})
    patches.span(f"{rollout}.end", "engine.end")
    patches.span(f"{RUN}.offload:Offload.out", "actor.offload", late_args=moved_bytes)
    patches.span(f"{RUN}.offload:Offload.back", "actor.onload", late_args=moved_bytes)


def identify_worker(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say which rank this process works for."""
    rank = argument("rank", 1, args, kwargs)
    config = argument("config", 2, args, kwargs)
    lifecycle.identify(role="worker", rank=rank, device=device_of(rank, config))


def device_of(rank: int, config: Any) -> dict[str, str]:
    """Return the device of a rank: the GPU that this process sees, or on a laptop a CPU device of its own."""
    uuid = gpu_uuid() if getattr(config, "device", "cpu") == "cuda" else f"cpu-{rank}"
    return {"host": socket.gethostname(), "uuid": uuid}


def batch_args(_self: Any, batch: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the number of a batch's sequences."""
    return {"sequences": len(batch)}


def generate_args(_rollout: Any, prompts: list[Any], seed: int, step: int) -> dict[str, Any]:
    """Return the number of this rank's prompts."""
    return {"prompts": len(prompts), "step": step}


def engine_memory(_batch: Any, rollout: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return which process the engine is, and a digest of where its weights and its KV cache lie."""
    return {"engine": rollout.process.pid, "addresses": rollout.addresses}


def moved_bytes(size_bytes: int, *_: Any, **__: Any) -> dict[str, Any]:
    """Return how many bytes have left the device, or come back."""
    return {"bytes": size_bytes}


def tensor_name(item: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the name of the parameter that comes out; the last `next` finds none."""
    return {} if item is None else {"tensor": item[0]}


def sync_stats(stats: Any, *_: Any) -> dict[str, Any]:
    """Return what a sync moved."""
    return {"bytes": stats.bytes, "tensors": stats.tensors, "buckets": stats.buckets}


# ---- weight sync ------------------------------------------------------------------------------------------------


def install_sender(patches: PatchSet) -> None:
    """Name the hooks on the stages of a bucket on its way."""
    sender = f"{RUN}.weight_sync:Sender"
    patches.span(f"{sender}.pack", "weight_sync.pack", bucket_args)
    patches.span(f"{sender}.gather", "weight_sync.gather", gather_args)
    patches.span(f"{sender}.send", "weight_sync.send", bucket_args, flow_out=bucket_key)
    patches.span(f"{sender}.wait", "weight_sync.wait", lambda _self, bucket: {"bucket": bucket.key})
    patches.span(f"{sender}.total_checksums", "weight_sync.verify")
    patches.span(f"{sender}.finish", "weight_sync.verify")
    receiver = f"{RUN}.weight_sync:Receiver"
    patches.span(
        f"{receiver}.map", "weight_sync.map", lambda _self, _buffer, _handle, size_bytes, _fds: {"bytes": size_bytes}
    )
    patches.span(f"{receiver}.load", "weight_sync.load", bucket_args, flow_in=bucket_key)
    patches.span(f"{receiver}.verify", "weight_sync.verify", bucket_args)


def gather_args(_self: Any, bucket: Any) -> dict[str, Any] | None:
    """Describe a bucket that is gathered from other ranks; a single rank has none to gather from."""
    return None if bucket.ranks == 1 else bucket_args(_self, bucket) | {"dtype": "bfloat16"}


def bucket_args(_self: Any, bucket: Any, *_: Any) -> dict[str, Any]:
    """Describe a packed bucket."""
    return {"bucket": bucket.key, "bytes": bucket.used_bytes, "tensors": len(bucket.entries)}


def bucket_key(_self: Any, bucket: Any, *_: Any) -> str:
    """Return the key of the arrow from a bucket sent to the same bucket loaded."""
    return flow_key(bucket.key)


# ---- engine -----------------------------------------------------------------------------------------------------


def install_engine(patches: PatchSet) -> None:
    """Name the hooks on an engine's start-up, steps and requests, and on the mapping of its memory."""
    engine = f"{RUN}.engine.engine:Engine"
    patches.around(f"{engine}.__init__", identify_engine, nothing_after)
    patches.around(f"{RUN}.engine.vllm_engine:VllmEngine.__init__", identify_engine, nothing_after)
    patches.around(f"{RUN}.engine.sglang_engine:SglangEngine.__init__", identify_engine, nothing_after)
    patches.span(f"{engine}.load", "rollout.load")
    patches.span(f"{engine}.profile", "rollout.profile")
    patches.span(f"{engine}.reserve_kv", "rollout.reserve_kv", lambda _self, size_bytes: {"bytes": size_bytes})
    patches.span(f"{engine}.restore_rng", "rng.restore")
    patches.span(f"{engine}.step", "engine.step", late_args=step_stats)
    requests = EngineRequests()
    patches.around(f"{engine}.add_request", nothing_before, requests.begin)
    patches.around(f"{engine}._admit", nothing_before, requests.scheduled)
    patches.around(f"{engine}._sample", keep("batch", 1), requests.sampled)
    patches.around(f"{engine}.finish_request", keep("request", 1), requests.end, ("rollout.request",))
    pool = f"{RUN}.engine.memory:MappedPool"
    patches.span(f"{pool}.map", "cumem.map", map_args, lambda moved, *_: {"bytes": moved})
    patches.span(
        f"{pool}.unmap", "cumem.unmap", unmap_args, lambda moved, *_: {"bytes": moved[0], "residual": moved[1]}
    )


def identify_engine(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say whose engine this process is."""
    rank = argument("rank", 2, args, kwargs)
    config = argument("config", 1, args, kwargs)
    lifecycle.identify(role="engine", rank=rank, device=device_of(rank, config))


def step_stats(stats: Any, *_: Any) -> dict[str, Any]:
    """Return what a step of the engine worked on."""
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "tokens": stats.tokens,
        "kv_usage": stats.kv_usage,
    }


def map_args(pool: Any, tag: str) -> dict[str, Any] | None:
    """Return the tag of memory that gets pages; memory that has them already makes no span."""
    return None if tag in pool.awake else {"tag": tag}


def unmap_args(pool: Any, tag: str) -> dict[str, Any] | None:
    """Return the tag of memory that loses its pages; memory that has none makes no span."""
    return {"tag": tag} if tag in pool.awake else None


class EngineRequests:
    """The embedded engine's requests as spans."""

    def __init__(self) -> None:
        self._requests = Requests()

    def begin(self, _token: Any, request: Any, error: BaseException | None) -> None:
        """Begin a request that was queued."""
        if error is None:
            self._requests.begin(request.request_id)

    def scheduled(self, _token: Any, admitted: Any, _error: BaseException | None) -> None:
        """Note which requests have waited until now."""
        for request in admitted or ():
            self._requests.scheduled(request.request_id, now_ns())

    def sampled(self, batch: Any, _result: Any, error: BaseException | None) -> None:
        """Note which requests have their first token."""
        if error is None and self._requests.without_token:
            for request in batch:
                self._requests.has_token(request.request_id)

    def end(self, request: Any, _result: Any, _error: BaseException | None) -> None:
        """End a request that is done."""
        self._requests.end(request.request_id, prompt_tokens=len(request.prompt), tokens=len(request.tokens))
