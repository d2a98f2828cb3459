"""What a process does between two pieces of work that hooks see: it computes in Python, or it waits.

Rewards, log-probs of logits and logging have no hook. Behind each piece of work its processor time is read, and where
the next one begins, the time in between is divided: so much of it the process computed, and the rest it waited.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from time import process_time_ns
from typing import Any

from rltrace.events import HOST_WORK
from rltrace.host.clock import now_ns
from rltrace.record import spans

LEAST_NS = 50_000
"""A shorter time is not worth a record."""


class Between:
    """The pieces of work that are under way in this process, on whatever thread, and what was between them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Begin anew: a forked child has done no work, and its processor time begins at 0."""
        self._lock = threading.Lock()
        self._under_way = 0
        self._ended_ns = self._cpu_ns = 0
        self._output: Any = None
        self._dropped_ns: list[int] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way."""
        return self._under_way == 0

    def begins(self) -> None:
        """Say what was between the last piece of work and the one that begins now."""
        with self._lock:
            self._under_way += 1
            is_first, began_ns, self._ended_ns = self._under_way == 1, self._ended_ns, 0
        if is_first and began_ns:
            gap_ns = now_ns() - began_ns
            if gap_ns > LEAST_NS:
                self._record(began_ns, gap_ns)
            self._output = None

    def _record(self, began_ns: int, gap_ns: int) -> None:
        """Write the part of the time in which the process computed, as far as the whole is known, in front."""
        cpu_ns = min(process_time_ns() - self._cpu_ns, gap_ns)
        if cpu_ns <= LEAST_NS:
            return
        known = {"output_ns": max(0, self._dropped_ns[0] - began_ns)} if self._dropped_ns else {}
        spans.automatic_span_at(HOST_WORK, began_ns, began_ns + cpu_ns, gap_ns=gap_ns, **known)

    def ends(self, output: Any = None, *, has_gradient: bool = False) -> None:
        """A piece of work is over.

        Args:
            output: A tensor that it made: as long as the program keeps it, something is computed from it.
            has_gradient: A backward follows, and all in front of that is a part of the same phase.
        """
        with self._lock:
            self._under_way = max(0, self._under_way - 1)
            if self._under_way or has_gradient:
                return
            self._ended_ns, self._cpu_ns, self._dropped_ns = now_ns(), process_time_ns(), []
        self._output = None if output is None else weakref.ref(output, appends_time(self._dropped_ns))


def appends_time(times_ns: list[int]) -> Callable[[Any], Any]:
    """Return a function, all in C, that appends the time to a list when it is called with one argument.

    Python forgets what is raised in a callback of a weak reference. A bytecode of ours there might be the first since a
    signal came, and what the program's handler raises would be lost.
    """
    return functools.partial(
        next, map(times_ns.append, iter(now_ns, None))
    )  # the argument is for the end, which is none


BETWEEN = Between()
