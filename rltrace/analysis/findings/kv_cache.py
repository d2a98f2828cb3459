"""The KV cache is too small for the requests, or far larger than they need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.findings.amounts import as_text, bytes_as_text
from rltrace.analysis.findings.capacity import gpus
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.programs import EXAMPLE
from rltrace.analysis.findings.run import PerStep, Run
from rltrace.analysis.seen.spans import EngineSteps

NAME = "kv_cache"
KV_CACHE = "rollout.kv_cache"
GENERATE = "rollout.generate"

FULL = 0.95
"""Share of the cache in use at which requests wait for room: it is given out in whole blocks, and the rest fits nobody
(vLLM's `KVCacheManager`)."""

FAR_TOO_LARGE = 0.25
"""If a cache is never fuller than this, half of it can go, and twice of what was needed is still there."""

LARGER = (
    Setting("vLLM", "gpu_memory_utilization: higher"),
    Setting("vLLM", "max_num_seqs: lower"),
    Setting("verl", "actor_rollout_ref.rollout.gpu_memory_utilization: higher"),
    Setting("TRL", "GRPOConfig(vllm_gpu_memory_utilization=...): higher"),
    Setting(EXAMPLE, "rollout.kv_cache_megabytes (embedded engine), rollout.gpu_memory_utilization (vLLM): higher"),
)
SMALLER = (
    Setting("vLLM", "gpu_memory_utilization: lower; the room is for larger micro-batches, or a model that stays"),
    Setting("verl", "actor_rollout_ref.rollout.gpu_memory_utilization: lower"),
    Setting("TRL", "GRPOConfig(vllm_gpu_memory_utilization=...): lower"),
    Setting(EXAMPLE, "rollout.gpu_memory_utilization: lower"),
)


class Waits(NamedTuple):
    """When requests of an engine waited for room in its KV cache."""

    seconds: PerStep
    share: float
    """How many of the requests did, meanwhile."""


def judge(run: Run) -> list[Finding]:
    """Price the time in which requests wait for room; if the cache is far too large, tell its bytes."""
    kept = [process.engine_steps for process in run.seen.processes if process.engine_steps]
    inside = [run.step_of(np.array(steps.starts, np.int64)) >= 0 for steps in kept]
    usage = _joined([np.array(steps.kv_usage) for steps in kept], inside)
    if not (usage >= 0).any():
        raise UnjudgeableError("no engine said in a steady step how full its KV cache is")
    preempted = int(_joined([np.array(steps.preempted) for steps in kept], inside).sum())
    most = float(usage.max())
    waits = max((_waiting(run, steps) for steps in kept), key=lambda found: float(found.seconds.sum()))
    if preempted or (most >= FULL and waits.seconds.any()):
        return [_too_small(run, waits, preempted, most)]
    return list(_too_large(run, most))


def _joined(columns: list[NDArray[np.float64]], inside: list[NDArray[np.bool_]]) -> NDArray[np.float64]:
    chosen = [column[where] for column, where in zip(columns, inside, strict=True)]
    return np.concatenate([np.empty(0), *chosen])


def _waiting(run: Run, steps: EngineSteps) -> Waits:
    """Return how long requests of an engine waited for room in its KV cache, and how many of them."""
    running, waiting = np.array(steps.running), np.array(steps.waiting)
    is_full = ((waiting > 0) & (np.array(steps.kv_usage) >= FULL)) | (np.array(steps.preempted) > 0)
    rows = steps.rows(run.seen.end_ns)
    lengths_ns = (rows[:, 1] - rows[:, 0])[is_full]
    of_waiting = np.maximum(waiting, 0)[is_full] / np.maximum(running + waiting, 1)[is_full]
    share = float(np.average(of_waiting, weights=lengths_ns)) if lengths_ns.any() else 0.0
    return Waits(run.seconds_in(rows[is_full]), share)


def _too_small(run: Run, waits: Waits, preempted: int, most: float) -> Finding:
    """Return the finding: an engine that computes all of them at once takes longer for each step, or does not."""
    lost = f"{preempted} were preempted and computed again" if preempted else "none was preempted"
    at_most = float(waits.seconds.mean())
    return run.finding(
        NAME,
        f"Requests wait for room in the KV cache for {as_text(at_most)} of a step; {lost}",
        [
            f"at most {most:.0%} of it is taken, in the engine in which they wait longest",
            f"{waits.share:.0%} of its requests wait then, so that share of the time is the price",
        ],
        per_step=waits.seconds * waits.share if preempted else None,
        bound=at_most,
        less_because="a step of the engine takes longer with more requests"
        + ("" if preempted else ", and computes others meanwhile"),
        basis="modelled",
        figures={"preempted": float(preempted), "most_usage": most, "waiting_share": waits.share},
        phases=[GENERATE],
        settings=LARGER,
    )


def _too_large(run: Run, most: float) -> Iterator[Finding]:
    held = [device.owner_peaks[KV_CACHE].bytes for device in gpus(run) if KV_CACHE in device.owner_peaks]
    size = max(held, default=0)
    if most >= FAR_TOO_LARGE or not size:
        return
    spare = size * (1 - 2 * most)
    yield run.finding(
        NAME,
        f"The KV cache is never more than {most:.1%} full: {bytes_as_text(spare)} of "
        f"{bytes_as_text(size)} a card are spare",
        ["of the cache, twice what was ever taken is kept out of this"],
        size_bytes=spare,
        less_because="",
        figures={"most_usage": most, "kv_cache_bytes": float(size)},
        phases=[GENERATE],
        settings=SMALLER,
    )
