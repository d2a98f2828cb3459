"""Whether a run will fit, asked before it runs: `rltrace plan` knows GPUs, shapes alone say it of a laptop."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import msgspec

from rltrace_reference.config import BF16_BYTES, MEBIBYTE, Config

FP32_BYTES = 4
ADAM_STATES = 2

Owners = dict[str, int]
"""Bytes by owner."""


NO_ROOM = ("does not fit", "the engine refuses to start")
"""Verdicts of `rltrace plan` about runs that are not worth starting."""


class Prediction(msgspec.Struct, frozen=True):
    """What was said beforehand."""

    phase: str | None
    """The phase that has no room, of several the one that plan finds fullest; None if all have."""
    reason: str
    """Why the run cannot fit; empty if it may."""


class _Plan(msgspec.Struct, frozen=True):
    """What is read of `rltrace plan --json`."""

    verdict: str
    fails_in: str | None


def foretell(file: Path, config: Config, limit_bytes: int) -> Prediction:
    """Say whether a run fits, without running it.

    Args:
        file: Its configuration.
        config: The same, checked.
        limit_bytes: Memory of a rank's device.
    """
    plan = _planned(file, limit_bytes) if config.device == "cuda" else None
    if plan is None:
        phase = first_without_room(predict(config, limit_bytes), limit_bytes)
        return Prediction(phase, "" if phase is None else f"no room in {phase}")
    fails = plan.verdict in NO_ROOM
    return Prediction((plan.fails_in or "start-up") if fails else None, f"plan: {plan.verdict}" if fails else "")


def _planned(file: Path, card_bytes: int) -> _Plan | None:
    """Return what `rltrace plan` says of a configuration on such a card; None if it cannot plan it."""
    gpu = f"{card_bytes // MEBIBYTE}MiB"
    command = [sys.executable, "-m", "rltrace", "plan", str(file), "--json", "--gpu", gpu]
    done = subprocess.run(command, check=False, capture_output=True)
    return msgspec.json.decode(done.stdout, type=_Plan) if done.returncode == 0 else None


def predict(config: Config, limit_bytes: int) -> dict[str, Owners]:
    """Return the bytes of each owner in the phases of a step, in their order; what is measured only is not in it.

    Args:
        config: The run.
        limit_bytes: Memory of a rank's device, of which the engine takes its share.
    """
    elements = sum(math.prod(shape) for shape in config.model.shapes().values())
    shard = -(-elements // config.ranks)
    params = {"actor.params": FP32_BYTES * shard}
    states = {"actor.optimizer": ADAM_STATES * FP32_BYTES * shard}
    grads = {"actor.grads": FP32_BYTES * shard}
    ref = {} if config.ref.offload and config.device == "cuda" else {"ref.params": BF16_BYTES * shard}
    weights = {"rollout.weights": BF16_BYTES * elements}
    at_start = sum((ref | params).values())
    kv_cache = {"rollout.kv_cache": _engine_bytes(config, limit_bytes, at_start) - weights["rollout.weights"]}
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


def _engine_bytes(config: Config, limit_bytes: int, others_bytes: int) -> int:
    """Return the bytes of weights and KV cache together: the pool of the configuration, or the engine's share.

    vLLM's is of the whole device, SGLang's of what others leave it when it starts.
    """
    if config.device == "cuda":
        whole_bytes = limit_bytes - (others_bytes if config.rollout.engine == "sglang" else 0)
        return int(config.rollout.gpu_memory_utilization * whole_bytes)
    elements = sum(math.prod(shape) for shape in config.model.shapes().values())
    return config.kv_cache_bytes + BF16_BYTES * elements
