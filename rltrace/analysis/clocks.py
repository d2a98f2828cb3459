"""One time line for all processes of a Recording, and how far each clock can be trusted on it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import msgspec

from rltrace.host import clock
from rltrace.host.clock import Domain
from rltrace.read.recording import Process

if TYPE_CHECKING:
    from rltrace.analysis.seen.process import Seen


class Clocked(Protocol):
    """A Recording, or a part of one."""

    @property
    def processes(self) -> list[Process]: ...
    @property
    def time_domain(self) -> Domain | None: ...


class TimeLine:
    """Shifts the times of every process to the clock of the run.

    Processes of one clock domain are not shifted against each other, because they share a clock. If exchanges measured
    a domain, the reader already gives its times on the run's clock. Any other domain is shifted as a whole, by the
    real-time clocks of both; its error is unknown, and reported as such.
    """

    def __init__(self, recording: Clocked) -> None:
        self._home = recording.time_domain
        self._offsets: dict[Domain, int] = {}
        """Nanoseconds from each domain's clock to 1970, by the first process that has it as its own."""
        own_first = sorted(recording.processes, key=lambda process: (process.alignment is not None, process.start_ns))
        for process in own_first:
            if "boot_id" in process.identity:  # it said by which clock its times are
                self._offsets.setdefault(process.time_domain, process.unix_offset_ns)

    @property
    def unix_offset_ns(self) -> int:
        """What to add to a time of this line to get nanoseconds since 1970."""
        own = next(iter(self._offsets.values()), 0)
        return self._offsets.get(self._home, own) if self._home else own

    @property
    def domains(self) -> int:
        """How many clocks the times are given in; more than one if some were never compared with the run's."""
        return len(self._offsets)

    def offset_ns(self, process: Process) -> int:
        """Return what to add to a time of the process to get nanoseconds since 1970.

        A process that never said its clock is assumed to have the run's.
        """
        return self._offsets.get(process.time_domain, self.unix_offset_ns)

    def is_aligned(self, process: Process) -> bool:
        """Return whether the times of a process compare with those of the run, exactly or within a known bound."""
        return process.time_domain == self._home

    def shift_ns(self, process: Process) -> int:
        """Return what to add to a time of the process."""
        return self.offset_ns(process) - self.unix_offset_ns

    def now_ns(self) -> int:
        """Return the present on this line; it is exact if this process shares its clock."""
        if clock.own_domain() == self._home:
            return clock.now_ns()
        return time.time_ns() - self.unix_offset_ns


class ClockFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A clock that wrote the Recording."""

    boot_id: str
    """Boot of the kernel that keeps the clock."""
    time_namespace: str
    """Time namespace; with the boot id it is the identity of a clock."""
    hosts: list[str]
    """Hosts whose processes have this clock."""
    processes: int
    """How many processes have it."""
    is_reference: bool
    """Whether all times of the Recording are given in this clock's."""
    aligned: bool
    """False if its times were shifted by real time only, so that their error is unknown."""
    readings: int
    """Exchanges with the reference clock from which the alignment is computed."""
    offset_seconds: float | None
    """What was added to its times at the first exchange; None without an exchange."""
    drift_ppm: float | None
    """How many microseconds per second the offset grows by; None if the exchanges do not say."""
    drift_error_ppm: float | None
    """The largest possible error of `drift_ppm`."""
    bound_seconds: float | None
    """The largest possible error of its times on the reference clock; None if unknown."""
    jumps: int = 0
    """How often it jumped between two exchanges, as the clock of a virtual machine does that was frozen."""


def clocks(all_seen: Iterable[Seen], time_line: TimeLine) -> list[ClockFigures]:
    """Return every clock, the reference first."""
    domains: dict[Domain, list[Seen]] = {}
    for seen in all_seen:
        domains.setdefault(seen.process.clock_domain, []).append(seen)
    found = [_clock(domain, together, time_line) for domain, together in domains.items()]
    return sorted(found, key=lambda figures: (not figures.is_reference, figures.hosts))


def bound_seconds(seen: Seen, time_line: TimeLine) -> float | None:
    """Return how far off the times of a process are at most; None if unknown."""
    return seen.process.time_bound_ns(seen.last_ns) / 1e9 if time_line.is_aligned(seen.process) else None


def _clock(domain: Domain, together: list[Seen], time_line: TimeLine) -> ClockFigures:
    aligned = time_line.is_aligned(together[0].process)
    fit = together[0].process.alignment
    bounds = [bound_seconds(seen, time_line) for seen in together]
    return ClockFigures(
        boot_id=domain[0],
        time_namespace=domain[1],
        hosts=sorted({seen.process.host for seen in together}),
        processes=len(together),
        is_reference=aligned and fit is None,
        aligned=aligned,
        readings=len(fit.readings) if fit else 0,
        offset_seconds=fit.readings[0].shift_ns / 1e9 if fit else None,
        drift_ppm=fit.drift * 1e6 if fit and fit.is_drift_measured else None,
        drift_error_ppm=fit.drift_error * 1e6 if fit and fit.is_drift_measured else None,
        bound_seconds=max((bound for bound in bounds if bound is not None), default=None),
        jumps=sum(map(bool, fit.jumps_ns)) if fit else 0,
    )
