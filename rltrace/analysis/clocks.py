"""One time line for all processes of a Recording."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rltrace import clock
from rltrace.recording import Process


class TimeLine:
    """Shifts the times of every process to the clock of the first one.

    Processes of one clock domain are not shifted against each other: they share a clock by construction. Another domain
    is shifted as a whole, by the real-time clocks of both; the error of that is not known, and is said.
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        self._offsets: dict[tuple[str, str], int] = {}
        """Nanoseconds from each domain's clock to 1970, by the domain's first process."""
        for process in sorted(processes, key=lambda process: process.start_ns):
            self._offsets.setdefault(process.clock_domain, process.unix_offset_ns)
        first = min(processes, key=lambda process: process.start_ns + process.unix_offset_ns, default=None)
        self._home = first.clock_domain if first else None

    @property
    def domains(self) -> int:
        """How many clocks the Recording was written by."""
        return len(self._offsets)

    @property
    def unix_offset_ns(self) -> int:
        """What to add to a time of this line to get nanoseconds since 1970."""
        return self._offsets[self._home] if self._home else 0

    def is_aligned(self, process: Process) -> bool:
        """Whether the times of a process compare exactly with those of the first one."""
        return process.clock_domain == self._home

    def shift_ns(self, process: Process) -> int:
        """What to add to a time of the process."""
        return self._offsets[process.clock_domain] - self.unix_offset_ns

    def now_ns(self) -> int:
        """The present, on this line; exact where this process shares its clock."""
        domain = clock.domain()
        if (domain["boot_id"], domain["time_namespace"]) == self._home:
            return clock.now_ns()
        return time.time_ns() - self.unix_offset_ns
