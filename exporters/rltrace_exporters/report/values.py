"""What a report is made of: one Recording, read once, with its figures and findings."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rltrace.analysis import figures
from rltrace.analysis.allocations import AllocationTimeline, allocation_timelines
from rltrace.analysis.findings import Why, why
from rltrace.analysis.lanes import Lane
from rltrace.analysis.ledger import Ledger, ledgers
from rltrace.analysis.memory import DeviceMemory
from rltrace.analysis.observations import Observations
from rltrace.analysis.phases import lane_phases
from rltrace.analysis.steps import StepWindows
from rltrace.analysis.summary import Analysed, Summary, analyse
from rltrace.read.recording import Recording


class Missing(Exception):  # noqa: N818 - it is no error: a Recording need not have everything
    """A Recording lacks what a section needs; the message is one sentence that says what."""


class Window:
    """The part of a run that is drawn: a typical step, or all of it if there is none."""

    def __init__(self, start_ns: int, end_ns: int, step: int | None, title: str) -> None:
        self.start_ns, self.end_ns = start_ns, max(end_ns, start_ns + 1)
        self.step = step
        self.title = title

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end_ns - self.start_ns) / 1e9


class RunValues:
    """A Recording as sections see it."""

    def __init__(self, analysed: Analysed, found: Why, path: str, manifest: dict[str, Any]) -> None:
        self.seen: Observations = analysed.seen
        self.windows: StepWindows = analysed.windows
        self.summary: Summary = analysed.summary
        self.why = found
        self.path = path
        self.manifest = manifest

    @property
    def name(self) -> str:
        """What the Recording is called."""
        return Path(self.path).name.removesuffix(".zip") or self.path

    @cached_property
    def window(self) -> Window:
        """The step that is drawn: one with every allocation of the fullest card, else the one of median length."""
        windows = self.windows
        if not windows.spans or not windows.steady:
            return Window(self.seen.start_ns, self.seen.end_ns, None, "the whole run")
        place = self._kept_place
        what = "every allocation of the fullest card was kept in it"
        if place is None:
            lengths = windows.windows[windows.steady, 1] - windows.windows[windows.steady, 0]
            place = windows.steady[int(np.argsort(lengths, kind="stable")[len(lengths) // 2])]
            what = f"the one of median length of {len(lengths)}" if len(lengths) > 1 else "the only one"
        start_ns, end_ns = windows.windows[place].tolist()
        return Window(start_ns, end_ns, windows.numbers[place], f"step {windows.numbers[place]}, {what}")

    @cached_property
    def _kept_place(self) -> int | None:
        """The last steady step of which every allocation of the fullest card was kept."""
        if self.fullest is None:
            return None
        numbers = [self.windows.numbers[place] for place in self.windows.steady]
        known = [one.step for one in self.timelines if one.lane.name == self.fullest.lane and one.step in numbers]
        return self.windows.steady[numbers.index(known[-1])] if known else None

    @cached_property
    def timelines(self) -> list[AllocationTimeline]:
        """Steps of which every allocation was kept."""
        if not self.summary.allocations:
            return []
        return [one for one in allocation_timelines(self.seen, self.windows) if one.window is not None and one.is_over]

    @cached_property
    def lanes(self) -> dict[str, Lane]:
        """Every lane, by name."""
        return {process.lane.name: process.lane for process in self.seen.processes}

    @cached_property
    def ranks(self) -> list[Lane]:
        """The ranks that have phases, by number; without ranks, other processes that have."""
        found = [lane for lane in lane_phases(self.seen) if not lane.is_driver]
        return [lane for lane in found if lane.rank is not None] or found

    @cached_property
    def unaligned(self) -> str:
        """Says that times of different hosts do not compare; empty if they do."""
        hosts = sorted({host for clock in self.summary.clocks if not clock.aligned for host in clock.hosts})
        if not hosts:
            return ""
        named = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3:,} more" if len(hosts) > 3 else "")
        return f"The clock of {named} was never compared with the run's, so its times here have an unknown error."

    @cached_property
    def fullest(self) -> DeviceMemory | None:
        """The device with the largest peak."""
        return max(self.summary.memory, key=most_used, default=None)

    def ledger(self, memory: DeviceMemory) -> tuple[Lane, Ledger]:
        """Return the lane and the ledger of a device."""
        found = ledgers(self.seen)
        return next((lane, found[lane]) for lane in found if (lane.name, lane.device) == (memory.lane, memory.device))

    def seconds(self, at_ns: int) -> float:
        """Return a time in seconds from the beginning of the Recording."""
        return (at_ns - self.seen.start_ns) / 1e9


def is_gpu(device: DeviceMemory) -> bool:
    """Return whether a device is a card; else it is the host's memory."""
    return (device.device or "").startswith(("GPU-", "MIG-"))


def most_used(device: DeviceMemory) -> int:
    """Return the most bytes that anybody saw in use on a device."""
    return max(device.peak_bytes, device.most_used.bytes if device.most_used is not None else 0)


def read(recording: Recording) -> RunValues:
    """Read a Recording or a part of one once."""
    analysed = analyse(recording)
    return RunValues(analysed, why(analysed), str(recording.path), recording.manifest)


def read_whole(recording: Recording) -> tuple[RunValues, list[str]]:
    """Read a whole Recording, without computing again what was kept of it; return which of that is damaged, too."""
    found = figures.read(recording)
    return RunValues(found.analysed, found.why, str(recording.path), recording.manifest), found.damaged
