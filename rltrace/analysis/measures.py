"""The figures of a run that a limit may be about, by name: a step, a phase, memory, what a finding costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from rltrace.analysis.budget import BYTES, SECONDS
from rltrace.analysis.findings import Why
from rltrace.analysis.ledger import FREE
from rltrace.analysis.memory import DeviceMemory
from rltrace.analysis.noise import surely_above
from rltrace.analysis.series import of_driver, of_ranks, phase_seconds, stage_seconds, step_seconds
from rltrace.analysis.summary import Summary
from rltrace.events import STEP

FIRST_STEP, STARTUP = "first_step", "startup"
USED = "memory.used"
MEMORY, FINDING = "memory.", "finding."


class UnmeasuredError(Exception):
    """A run does not have a figure; the message says why."""


class Judged(NamedTuple):
    """A run's figures, and what bounds its steps."""

    summary: Summary
    why: Why


class Measure(NamedTuple):
    """One figure of a run."""

    unit: str
    values: Sequence[float]
    """One for each steady step; a single one if it does not come with steps."""
    whole: float | None
    """What a share of it is a share of: a step, or the device; None if that is unknown."""
    least: float
    """What it is above for certain."""

    @property
    def mean(self) -> float:
        """Its mean."""
        return fmean(self.values)


def measure(judged: Judged, name: str) -> Measure:
    """Return a figure.

    Raises:
        UnmeasuredError: the run does not have it.
    """
    for prefix, found in _PREFIXED.items():
        if name.startswith(prefix):
            return found(judged, name.removeprefix(prefix))
    if name in (FIRST_STEP, STARTUP):
        return _once(judged.summary, name)
    lengths = step_seconds(judged.summary, of_ranks(judged.summary))
    if not lengths:
        raise UnmeasuredError("no step has ended")
    if name == STEP:
        return Measure(SECONDS, lengths, fmean(lengths), surely_above(lengths))
    known = _by_name(judged.summary)
    if name not in known:
        raise UnmeasuredError(f"no step has `{name}`; there are {', '.join([STEP, *known])}")
    return Measure(SECONDS, known[name], fmean(lengths), surely_above(known[name]))


def _by_name(summary: Summary) -> dict[str, list[float]]:
    return {
        **phase_seconds(of_driver(summary)),
        **stage_seconds(summary),
        **phase_seconds(of_ranks(summary)),
    }


def _once(summary: Summary, name: str) -> Measure:
    if summary.earlier_steps_lost:
        raise UnmeasuredError("earlier steps may be gone: the oldest was dropped to bound the size")
    if not summary.steps:
        raise UnmeasuredError("no step is marked")
    first = summary.steps[0]
    if name == STARTUP:
        return _single(SECONDS, first.start_seconds, None)
    if summary.steady is None or summary.steady.first_step is None:
        raise UnmeasuredError("the first step is not recorded beside later ones")
    return _single(SECONDS, first.seconds, None)


def _of_memory(judged: Judged, owner: str) -> Measure:
    """Return the most that an owner, or all together, held of any device."""
    sizes = [(size, device) for device in judged.summary.memory if (size := _held(device, owner)) is not None]
    if not sizes:
        owners = sorted({name for device in judged.summary.memory for name in device.owner_peaks})
        reason = f"nobody said what `{owner}` holds" if owners else "nobody measured memory"
        raise UnmeasuredError(reason + (f"; there are used, {', '.join(owners)}" if owners else ""))
    size, device = max(sizes, key=lambda item: item[0])
    free = device.at_peak_bytes.get(FREE)
    return _single(BYTES, float(size), None if free is None else float(device.peak_bytes + free))


def _held(device: DeviceMemory, owner: str) -> int | None:
    if owner != "used":
        peak = device.owner_peaks.get(owner)
        return None if peak is None or owner in device.unknown else peak.bytes
    return max(device.peak_bytes, device.most_used.bytes if device.most_used is not None else 0)


def _of_finding(judged: Judged, name: str) -> Measure:
    """Return what a finding costs in a step; nothing if it was looked for and not found."""
    found = [one for one in judged.why.findings if one.id == name and one.seconds_per_step is not None]
    if not found and name not in judged.why.nothing and not any(one.id == name for one in judged.why.findings):
        reason = next((one.reason for one in judged.why.unjudged if one.id == name), None)
        raise UnmeasuredError(reason or f"there is no finding `{name}`: docs/findings.md has their names")
    seconds = sum(one.seconds_per_step or 0.0 for one in found)
    least = sum(
        one.seconds_per_step or 0.0 if one.interval_seconds is None else one.interval_seconds.least for one in found
    )
    return Measure(SECONDS, [seconds], judged.why.step_seconds, least)


def _single(unit: str, value: float, whole: float | None) -> Measure:
    return Measure(unit, [value], whole, value)


_PREFIXED: dict[str, Callable[[Judged, str], Measure]] = {MEMORY: _of_memory, FINDING: _of_finding}
