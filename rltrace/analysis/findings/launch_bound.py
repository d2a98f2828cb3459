"""Python launches kernels no faster than the GPU runs them, so that the GPU waits between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.gpu_samples import gpu_samples, values_in
from rltrace.analysis.findings.launches import BUSY, forwards_in, launch_bound_phases, mean_seconds
from rltrace.analysis.findings.run import PerStep, Run

NAME = "launch_bound"
SETTINGS = (
    Setting("PyTorch", 'torch.compile(model, mode="reduce-overhead"): CUDA graphs launch many kernels at once'),
    Setting("your program", "larger micro-batches: as many launches for more tokens"),
    Setting("your cluster", "faster processors, and as many as processes that compute"),
)


def judge(run: Run) -> list[Finding]:
    """Price the time in which no kernel runs in phases whose forwards take as long to launch as to run."""
    bound = launch_bound_phases(run)
    if bound is None:
        raise UnjudgeableError("no forward was timed both on a host and on its GPU")
    if not bound:
        return []
    busy = _busy(run, bound)
    idle = {name: share for name in bound if (share := _idle_seconds(run, name, busy)) is not None}
    where = sorted(bound, key=lambda name: -float(idle[name].mean() if idle else bound[name].gpu_seconds))
    facts = [
        f"{name}: a forward takes {as_text(launches.host_seconds)} to launch and {as_text(launches.gpu_seconds)} to "
        f"run, and the GPU is done {as_text(launches.behind_seconds)} after the host"
        + (_share_words(run, name, busy[name]) if name in busy else "")
        for name, launches in ((name, bound[name]) for name in where)
    ]
    title = "The GPUs run kernels as fast as Python launches them"
    price = np.sum(list(idle.values()), axis=0) if idle else None
    if price is not None:
        facts.append("NVML counts a moment as busy if any kernel runs, however small: small ones do not fill the GPU")
        title += f", and none for {as_text(price.mean())} of a step"
    return [
        run.finding(
            NAME,
            f"{title}, most in {where[0]}",
            facts,
            per_step=price,
            bound=max(_fewer_launches(run, where), 0.0 if price is None else float(price.mean())),
            less_because="without the gaps alone the price is gained; larger micro-batches gain more, as far as their "
            "kernels take no longer",
            basis="modelled",
            figures={f"busy_share_{name}": share for name, share in busy.items()},
            phases=where,
            settings=SETTINGS,
        )
    ]


def _share_words(run: Run, name: str, busy: float) -> str:
    """Say how the price of a phase is made of the share in which kernels run."""
    whole = float(mean_seconds(run, name).mean())
    return f"; no kernel runs for {1 - busy:.0%} of {as_text(whole)} (NVML), {as_text(whole * (1 - busy))}"


def _busy(run: Run, phases: Iterable[str]) -> dict[str, float]:
    """Return the share of each phase in which kernels ran, in the mean of the samples; of phases that have any."""
    samples = gpu_samples(run, BUSY)
    found = {name: values_in(run, samples, name) for name in phases}
    return {name: float(np.mean(percent)) / 100 for name, percent in found.items() if len(percent)}


def _idle_seconds(run: Run, name: str, busy: Mapping[str, float]) -> PerStep | None:
    return mean_seconds(run, name) * (1 - busy[name]) if name in busy else None


def _fewer_launches(run: Run, phases: list[str]) -> float:
    """Return the seconds of all forwards of each phase but one, which has to be launched in any case."""
    return sum(float(mean_seconds(run, name).mean()) * (1 - 1 / max(forwards_in(run, name), 1)) for name in phases)
