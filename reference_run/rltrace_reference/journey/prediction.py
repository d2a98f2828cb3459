"""What a variant will hold in each phase, from shapes and settings alone, and the first phase that has no room."""

from __future__ import annotations

import math

from rltrace_reference.config import BF16_BYTES, Config

FP32_BYTES = 4
ADAM_STATES = 2

Owners = dict[str, int]
"""Bytes by owner."""


def predict(config: Config, limit_bytes: int) -> dict[str, Owners]:
    """Return the bytes of each owner in the phases of a step, in their order; what is measured only is not in it.

    Args:
        config: The run.
        limit_bytes: Memory of a rank's device, of which vLLM takes its share.
    """
    elements = sum(math.prod(shape) for shape in config.model.shapes().values())
    shard = -(-elements // config.ranks)
    params = {"actor.params": FP32_BYTES * shard}
    states = {"actor.optimizer": ADAM_STATES * FP32_BYTES * shard}
    grads = {"actor.grads": FP32_BYTES * shard}
    ref = {} if config.ref.offload and config.device == "cuda" else {"ref.params": BF16_BYTES * shard}
    weights = {"rollout.weights": BF16_BYTES * elements}
    kv_cache = {"rollout.kv_cache": _kv_cache_bytes(config, limit_bytes) - weights["rollout.weights"]}
    buckets = {"weight_sync.bucket": config.bucket_bytes * config.rollout.buckets}

    rollout, actor = config.rollout, config.actor
    away = actor.offload
    stays = weights | kv_cache if rollout.sleep_level == 0 and rollout.wake_up != "relaunch" else {}
    resident = ref | ({} if away else params | states)
    syncing = {
        "staged": params | weights | buckets,
        "all": params | weights | kv_cache | buckets,
        "relaunch": params,
    }[rollout.wake_up]
    return {
        "weight_sync": resident | syncing | stays,
        "rollout.generate": resident | weights | kv_cache,
        "actor.update": ref | params | grads | states | stays,
    }


def first_without_room(phases: dict[str, Owners], limit_bytes: int) -> str | None:
    """Return the first phase that needs more than there is; None if all fit."""
    return next((phase for phase, owners in phases.items() if sum(owners.values()) > limit_bytes), None)


def _kv_cache_bytes(config: Config, limit_bytes: int) -> int:
    """Return the bytes of weights and KV cache together: the pool of the configuration, or vLLM's share."""
    if config.device == "cuda":
        return int(config.rollout.gpu_memory_utilization * limit_bytes)
    elements = sum(math.prod(shape) for shape in config.model.shapes().values())
    return config.kv_cache_bytes + BF16_BYTES * elements
