"""Who held a device's bytes when it held most, and each owner's own peak."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.observations import Observations, Samples, Seen
from rltrace.analysis.steps import StepWindows
from rltrace.events import OWNERS

FREE = "free"


class OwnerPeak(msgspec.Struct, frozen=True):
    """The most that one owner held."""

    bytes: int
    at_seconds: float
    phase: str | None
    """What its rank was in then."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A device's bytes by owner, over all processes that sampled them."""

    lane: str
    rank: int | None
    host: str | None
    device: str | None
    peak_bytes: int
    """The largest sum over the owners, `free` apart."""
    peak_at_seconds: float
    """After the Recording's first instant."""
    peak_step: int | None
    """None: in no step."""
    peak_phase: str | None
    """What its rank was in; None: in no phase."""
    at_peak_bytes: dict[str, int]
    """By owner, at the device's peak; they add up to `peak_bytes`, `free` apart."""
    owner_peaks: dict[str, OwnerPeak]
    """By owner: its own most, which may be at another moment."""


class _Moments:
    """Samples of several owners as one line of time: who holds how much after each."""

    def __init__(self, series: list[Samples]) -> None:
        times = np.concatenate([np.array(samples.times_ns, np.int64) for samples in series])
        values = np.concatenate([np.array(samples.values, np.float64) for samples in series])
        which = np.repeat(np.arange(len(series)), [len(samples.times_ns) for samples in series])
        in_time = np.argsort(times, kind="stable")
        self.times_ns: NDArray[np.int64] = times[in_time]
        self._values = values[in_time]
        self._which = which[in_time]
        changes = np.zeros(len(times))
        for index in range(len(series)):
            here = self._which == index
            changes[here] = np.diff(self._values[here], prepend=0.0)
        sums = np.cumsum(changes)
        # Samples of one instant are one moment: its sum is known after the last of them.
        settled = np.append(self.times_ns[1:] > self.times_ns[:-1], True)
        self.peak = int(np.argmax(np.where(settled, sums, -np.inf)))

    def held_at_peak(self, index: int) -> float:
        """What one of the series holds when the sum is largest."""
        before = self._values[: self.peak + 1][self._which[: self.peak + 1] == index]
        return float(before[-1]) if len(before) else 0.0


def device_memory(seen: Observations, windows: StepWindows) -> list[DeviceMemory]:
    """Every device whose owners' bytes were sampled, by rank."""
    members: dict[Lane, list[Seen]] = {}
    for process in seen.processes:
        if process.owners:
            members.setdefault(process.lane, []).append(process)
    return [_device(lane, members[lane], seen, windows) for lane in sorted(members, key=order)]


def _device(lane: Lane, members: list[Seen], seen: Observations, windows: StepWindows) -> DeviceMemory:
    owned: dict[str, list[Samples]] = {}
    for process in members:
        for owner, samples in process.owners.items():
            owned.setdefault(owner, []).append(_until_the_end(samples, process))
    owners = sorted(owned, key=OWNERS.index)
    series = [(owner, samples) for owner in owners if owner != FREE for samples in owned[owner]]
    moments = _Moments([samples for _, samples in series] or owned[FREE])
    held = dict.fromkeys(owners if series else [], 0.0)
    for index, (owner, _) in enumerate(series):
        held[owner] += moments.held_at_peak(index)
    at_ns = int(moments.times_ns[moments.peak])
    if FREE in held:
        held[FREE] = sum(_value_at(samples, at_ns) for samples in owned[FREE])
    return DeviceMemory(
        lane=lane.name,
        rank=lane.rank,
        host=lane.host,
        device=lane.device,
        peak_bytes=int(sum(value for owner, value in held.items() if owner != FREE)),
        peak_at_seconds=(at_ns - seen.start_ns) / 1e9,
        peak_step=_step_at(windows, at_ns),
        peak_phase=_phase_at(seen, lane, at_ns),
        at_peak_bytes={owner: int(value) for owner, value in held.items()},
        owner_peaks={owner: _owner_peak(owned[owner], seen, lane) for owner in owners},
    )


def _owner_peak(series: list[Samples], seen: Observations, lane: Lane) -> OwnerPeak:
    moments = _Moments(series)
    at_ns = int(moments.times_ns[moments.peak])
    size = sum(moments.held_at_peak(index) for index in range(len(series)))
    return OwnerPeak(int(size), (at_ns - seen.start_ns) / 1e9, _phase_at(seen, lane, at_ns))


def _until_the_end(samples: Samples, process: Seen) -> Samples:
    """With the process, its bytes go."""
    if process.process.is_alive:
        return samples
    ended = Samples()
    ended.times_ns = samples.times_ns[:]
    ended.values = samples.values[:]
    ended.add(process.last_ns + 1, 0.0)
    return ended


def _value_at(samples: Samples, at_ns: int) -> float:
    behind = int(np.searchsorted(np.array(samples.times_ns, np.int64), at_ns, side="right"))
    return samples.values[behind - 1] if behind else 0.0


def _step_at(windows: StepWindows, at_ns: int) -> int | None:
    inside = np.flatnonzero((windows.windows[:, 0] <= at_ns) & (at_ns < windows.windows[:, 1]))
    return windows.numbers[int(inside[-1])] if len(inside) else None


def _phase_at(seen: Observations, lane: Lane, at_ns: int) -> str | None:
    """The phase of the lane that holds an instant; where one ends and another begins, the one that begins."""
    phases = []
    for process in seen.processes:
        if process.lane != lane:
            continue
        for name, kept in process.phases.items():
            rows = kept.rows(seen.end_ns)
            around = rows[(rows[:, 0] <= at_ns) & (at_ns <= rows[:, 1])]
            if len(around):
                phases.append((int(around[:, 0].max()), name))
    return max(phases)[1] if phases else None
