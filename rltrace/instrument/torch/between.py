"""What a process does between two pieces of work that hooks see: it computes in Python, or it waits.

Rewards, log-probs of logits and logging have no hook. The process's CPU time is read after each piece of work and
before the next one. It divides the time in between: for that long the process computed, and for the rest it waited.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from time import process_time_ns
from typing import Any

from rltrace.events import HOST_WORK
from rltrace.host.clock import now_ns
from rltrace.record import spans
from rltrace.record.lock import InterruptibleLock

LEAST_NS = 50_000
"""Less time than this is not worth a record."""


class Between:
    """Counts the pieces of work that are under way, on all threads of the process, and records what is between them."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Begin anew. A forked child has done no work, and its CPU time begins at 0."""
        self._lock = InterruptibleLock()
        self._under_way = 0
        self._ended_ns = self._cpu_ns = 0
        self._output: Any = None
        self._dropped_ns: list[int] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way."""
        return self._under_way == 0

    def begins(self) -> None:
        """Begin a piece of work: record what was between the last one and this one."""
        began_ns = self._lock.run(self._count)
        if began_ns:
            gap_ns = now_ns() - began_ns
            if gap_ns > LEAST_NS:
                self._record(began_ns, gap_ns)
            self._output = None

    def _count(self) -> int:
        """Count a piece that begins; return since when nothing was under way, 0 if something was or is."""
        began_ns, self._ended_ns = self._ended_ns, 0
        self._under_way += 1
        return began_ns if self._under_way == 1 else 0

    def _record(self, began_ns: int, gap_ns: int) -> None:
        """Write for how long the process computed in a gap. Nobody knows when, so it is put at the gap's beginning."""
        cpu_ns = min(process_time_ns() - self._cpu_ns, gap_ns)
        if cpu_ns <= LEAST_NS:
            return
        known = {"output_ns": max(0, self._dropped_ns[0] - began_ns)} if self._dropped_ns else {}
        spans.automatic_span_at(HOST_WORK, began_ns, began_ns + cpu_ns, gap_ns=gap_ns, **known)

    def ends(self, output: Any = None, *, has_gradient: bool = False) -> None:
        """End a piece of work.

        Args:
            output: A tensor that it made. As long as the program keeps it, something may be computed from it.
            has_gradient: Whether a backward follows; what is in front of that belongs to the same phase.
        """
        if self._lock.run(self._count_end, has_gradient):
            self._output = None if output is None else weakref.ref(output, appends_time(self._dropped_ns))

    def _count_end(self, has_gradient: bool) -> bool:
        """Count a piece that ends; return whether nothing is under way any more, and what follows counts."""
        self._under_way = max(0, self._under_way - 1)
        if self._under_way or has_gradient:
            return False
        self._ended_ns, self._cpu_ns, self._dropped_ns = now_ns(), process_time_ns(), []
        return True


def appends_time(times_ns: list[int]) -> Callable[[Any], Any]:
    """Return a function that is all in C, and appends the time to a list when it is called with one argument.

    Python forgets what is raised in a callback of a weak reference. A bytecode of ours there might be the first since a
    signal came, and what the program's handler raises would be lost.
    """
    return functools.partial(next, map(times_ns.append, iter(now_ns, None)))  # `next` takes the argument for a default


BETWEEN = Between()
