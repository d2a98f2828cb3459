"""A card is nearly full, so a longer batch may not fit."""

from __future__ import annotations

from rltrace.analysis.findings.amounts import bytes_as_text
from rltrace.analysis.findings.capacity import NOT_MEASURED, capacity_bytes, gpus
from rltrace.analysis.findings.finding import Finding, Moment, Setting, UnjudgeableError
from rltrace.analysis.findings.programs import EXAMPLE
from rltrace.analysis.findings.run import Run
from rltrace.analysis.ledger import FREE
from rltrace.analysis.memory import DeviceMemory

NAME = "nearly_full"

NEARLY_FULL = 0.95
"""Share of a card that is in use. By default vLLM keeps 8 % back for kernels, NCCL and fragments
(`gpu_memory_utilization` is 0.92 in its `CacheConfig`); here nearly half of that is gone."""

NAMED = 4
"""How many owners are named."""

SETTINGS = (
    Setting("vLLM", "gpu_memory_utilization: lower, if the peak is in a rollout"),
    Setting("verl", "actor_rollout_ref.rollout.gpu_memory_utilization: lower, if the peak is in a rollout"),
    Setting("verl", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: smaller, if it is in the update"),
    Setting("TRL", "GRPOConfig(per_device_train_batch_size=...): smaller, if it is in the update"),
    Setting(EXAMPLE, "rollout.gpu_memory_utilization: lower; actor.micro_batch: smaller"),
    Setting("your program", "smaller micro-batches, or a smaller KV cache, by the phase of the peak"),
)


def judge(run: Run) -> list[Finding]:
    """Name the fullest card, and when it is fullest, if little of it is left."""
    having = list(gpus(run))
    if not having:
        raise UnjudgeableError(NOT_MEASURED)
    full = [device for device in having if _used_bytes(device) >= NEARLY_FULL * capacity_bytes(device)]
    if not full:
        return []
    fullest = max(full, key=lambda device: _used_bytes(device) / capacity_bytes(device))
    used, whole = _used_bytes(fullest), capacity_bytes(fullest)
    owners = sorted((-size, owner) for owner, size in fullest.at_peak_bytes.items() if owner != FREE)[:NAMED]
    when = "" if fullest.peak_step is None else f" of step {fullest.peak_step}"
    return [
        run.finding(
            NAME,
            f"{fullest.lane}'s card is {used / whole:.0%} full in {fullest.peak_phase or 'no phase'}{when}: "
            f"{bytes_as_text(whole - used)} are left",
            [
                f"{len(full)} of {len(having)} cards are at least {NEARLY_FULL:.0%} full",
                "at the peak: " + ", ".join(f"{owner} {bytes_as_text(-size)}" for size, owner in owners),
            ],
            size_bytes=whole - used,
            less_because="",
            figures={"used_bytes": float(used), "capacity_bytes": float(whole)},
            ranks=[] if fullest.rank is None else [fullest.rank],
            phases=[] if fullest.peak_phase is None else [fullest.peak_phase],
            about=(),
            settings=SETTINGS,
            moment=_moment(run, fullest),
        )
    ]


def _used_bytes(device: DeviceMemory) -> int:
    return max(device.peak_bytes, device.most_used.bytes if device.most_used is not None else 0)


def _moment(run: Run, device: DeviceMemory) -> Moment:
    at = device.peak_at_seconds
    of_rank = [] if device.rank is None else ["--ranks", str(device.rank)]
    return Moment(
        step=device.peak_step,
        rank=device.rank,
        start_seconds=at,
        end_seconds=at,
        command=run.view("--time", f"{max(at - 1, 0):.0f}:{at + 1:.0f}", *of_rank),
    )
