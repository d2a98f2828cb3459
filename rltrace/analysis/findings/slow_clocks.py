"""A GPU's power limit or its temperature holds its clock back."""

from __future__ import annotations

import numpy as np

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.gpu_samples import GpuSamples, gpu_samples
from rltrace.analysis.findings.run import PerStep, Run
from rltrace.analysis.intervals import holding
from rltrace.analysis.lanes import Lane
from rltrace.events import GPU_CLOCK, HEAT_LIMITED, POWER_LIMITED

NAME = "slow_clocks"
CAUSES = {POWER_LIMITED: "the power limit", HEAT_LIMITED: "heat"}

SETTINGS = (
    Setting(
        "your cluster", "`nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE` says why; `nvidia-smi -pl` sets the limit"
    ),
    Setting("your cluster", "better cooling, or another node for this rank"),
)


def judge(run: Run) -> list[Finding]:
    """Price the clock that the GPU which loses most is short of, while NVML says that something holds it back."""
    clocks = gpu_samples(run, GPU_CLOCK)
    limited = {name: gpu_samples(run, name) for name in CAUSES}
    lanes = [lane for lane in clocks if all(lane in of for of in limited.values())]
    if not lanes:
        raise UnjudgeableError("no sampler said what holds the GPUs' clocks back")
    fastest = max(float(clocks[lane].values.max()) for lane in lanes)
    lost = {lane: _lost(clocks[lane], [of[lane] for of in limited.values()], fastest) for lane in lanes}
    price = {lane: _seconds(run, clocks[lane], lost[lane]) for lane in lanes}
    most = max(lanes, key=lambda lane: float(price[lane].sum()))
    if not price[most].any():
        return []
    cause = max(CAUSES, key=lambda name: float(limited[name][most].values.mean()))
    is_limited = lost[most] > 0
    slow_mhz = float(clocks[most].values[is_limited].mean())
    where = _phase(run, most, clocks[most], lost[most])
    others = sum(bool(price[lane].any()) for lane in lanes)
    return [
        run.finding(
            NAME,
            f"{CAUSES[cause].capitalize()} holds {most.name}'s GPU to {slow_mhz:,.0f} of {fastest:,.0f} MHz for "
            f"{is_limited.mean():.0%} of the steps" + (f", most in {where}" if where else ""),
            [
                f"{others} of {len(lanes)} GPUs are held back at times; the fastest clock of the run is the measure",
                f"in the mean of these ranks: {as_text(np.mean([price[lane].mean() for lane in lanes]))} of a step",
            ],
            per_step=price[most],
            less_because="a kernel that waits for memory or for another rank is no faster with a higher clock",
            basis="modelled",
            figures={"slow_mhz": slow_mhz, "fastest_mhz": fastest, "limited_share": float(is_limited.mean())},
            ranks=[] if most.rank is None else [most.rank],
            phases=[where] if where else [],
            about=(),
            settings=SETTINGS,
        )
    ]


def _lost(clock: GpuSamples, limited: list[GpuSamples], fastest: float) -> PerStep:
    """Return by what share of the fastest clock each sample is slower, where something held it back."""
    held = np.zeros(len(clock.values), bool)
    for samples in limited:
        at = np.searchsorted(samples.times_ns, clock.times_ns, side="right") - 1
        held |= (at >= 0) & (samples.values[at] > 0)
    return np.where(held, 1 - clock.values / fastest, 0.0)


def _seconds(run: Run, clock: GpuSamples, lost: PerStep) -> PerStep:
    return np.asarray(clock.in_steps(lost, len(run.steps)) * run.step_seconds)


def _phase(run: Run, lane: Lane, clock: GpuSamples, lost: PerStep) -> str | None:
    """Return the phase in which most of the clock is lost."""
    by_phase = {name: float(lost[holding(rows, clock.times_ns) >= 0].sum()) for name, rows in run.phases[lane].items()}
    most = max(by_phase, key=lambda name: by_phase[name], default=None)
    return most if most is not None and by_phase[most] > 0 else None
