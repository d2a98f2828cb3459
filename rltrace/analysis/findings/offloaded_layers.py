"""A model's layers are in host memory and come over PCIe for each micro-batch, although the card may have room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rltrace.analysis.findings.amounts import as_text, bytes_as_text
from rltrace.analysis.findings.capacity import least_free_in
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.launches import mean_seconds
from rltrace.analysis.findings.programs import EXAMPLE
from rltrace.analysis.findings.run import PerStep, Run
from rltrace.analysis.gpu_work import FORWARD
from rltrace.analysis.lanes import Lane
from rltrace.analysis.seen.samples import values_at

NAME = "offloaded_layers"


class Pass(NamedTuple):
    """A phase with a model's forward pass, and a phase with the same pass of a model that is on the card."""

    owner: str
    phase: str
    alike: str | None
    settings: tuple[Setting, ...]


PASSES = (
    Pass(
        "ref.params", "ref.log_prob", "actor.old_log_prob",
        (
            Setting("verl", "actor_rollout_ref.ref.fsdp_config.param_offload=False"),
            Setting(EXAMPLE, "ref.offload: false"),
        ),
    ),
    Pass(
        "actor.params", "actor.update", None,
        (
            Setting("verl", "actor_rollout_ref.actor.fsdp_config.param_offload=False"),
            Setting(EXAMPLE, "actor.offload: false"),
        ),
    ),
    Pass(
        "critic.params", "critic.update", None,
        (
            Setting("verl", "critic.model.fsdp_config.param_offload=False", until="0.8.0"),
            Setting("verl", "critic.fsdp.param_offload=False", since="0.8.0"),
        ),
    ),
)  # fmt: skip
LARGER = Setting(
    "verl", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu: larger ones bring the layers over less often"
)


def judge(run: Run) -> list[Finding]:
    """Compare a pass over offloaded layers with the same pass over layers on the card."""
    if not any(process.on_host for process in run.seen.processes):
        raise UnjudgeableError("no process said what its models have in host memory beside a GPU")
    return [found for one in PASSES for found in _of_pass(run, one)]


def _of_pass(run: Run, one: Pass) -> Iterator[Finding]:
    on_host = {lane: size for lane in run.ranks if (size := _bytes_on_host(run, lane, one))}
    times = [row.count for row in run.summary.gpu_work if row.work == FORWARD and row.phase == one.phase]
    if not on_host:
        return
    if not times:
        raise UnjudgeableError(
            f"the GPU's forwards in {one.phase} were not timed, so how often it needs its layers is unknown"
        )
    size_bytes, crossings = sum(on_host.values()) / len(on_host), sum(times) / len(times)
    longer = _longer(run, one)
    free_bytes = least_free_in(run, one.phase)
    facts = [
        f"{bytes_as_text(size_bytes)} a rank are in host memory in {one.phase}, which goes forward "
        f"{crossings:.0f} times"
    ]
    if longer is not None:
        facts.append(
            f"it takes {as_text(longer.mean())} longer than {one.alike}, which does the same with a model on the card"
        )
    if free_bytes is not None:
        room = "has room for it" if free_bytes >= size_bytes else "has no room for it"
        facts.append(f"the fullest card has {bytes_as_text(free_bytes)} free then, and {room}")
    yield run.finding(
        NAME,
        f"The {one.owner.partition('.')[0]}'s layers lie in host memory and cross PCIe {crossings:.0f} times in "
        f"{one.phase} of each step: {bytes_as_text(size_bytes * crossings)} a rank",
        facts,
        per_step=longer,
        bound=float(mean_seconds(run, one.phase).mean()),
        size_bytes=size_bytes * crossings,
        less_because="the forwards take their own time; on the card the layers take the room of something else, such "
        "as KV cache",
        basis="modelled",
        figures={"host_bytes": size_bytes, "crossings": crossings},
        phases=[one.phase],
        about=[one.owner, one.phase],
        settings=[*one.settings, LARGER],
    )


def _bytes_on_host(run: Run, lane: Lane, one: Pass) -> float:
    """Return how much of the model is in host memory when the phase begins; 0 if it is fetched before."""
    where = run.phases[lane].get(one.phase)
    if where is None:
        return 0.0
    begins_ns = where[run.step_of(where[:, 0]) >= 0, 0]
    found = [
        float(np.median(values_at(process.on_host[one.owner], begins_ns + 1)))
        for process in run.members[lane]
        if one.owner in process.on_host and len(begins_ns)
    ]
    return sum(found)


def _longer(run: Run, one: Pass) -> PerStep | None:
    """Return how much longer the phase takes than the other one, as a mean over the ranks; None without the other."""
    if one.alike is None or not run.phase_seconds(one.alike):
        return None
    return np.asarray(np.maximum(mean_seconds(run, one.phase) - mean_seconds(run, one.alike), 0))
