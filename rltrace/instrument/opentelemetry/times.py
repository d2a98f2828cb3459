"""When a span of OpenTelemetry begins and ends on our clock, and how that is written.

OpenTelemetry reads the real-time clock, which may be set; ours is monotonic. So each time is compared with both clocks
at the moment at which it is told. A span that begins now is written at once: it is known even if it never ends, and
arrows leave from it. One that a program gives an earlier beginning is written when it is over.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from rltrace.host import clock
from rltrace.record import lifecycle, spans

NOW_NS = 1_000_000
"""A beginning that is told later than this may have been given by the program."""
MOST_UNWRITTEN = 10_000
"""So many spans are kept to be written at the end of the process if they do not end."""


class Begun:
    """A span that has begun."""

    __slots__ = ("args", "forks", "is_written", "name", "start_ns")

    def __init__(
        self,
        name: str,
        args: dict[str, Any],
        unix_ns: int | None,
        is_given: Callable[[], bool] = lambda: True,
        *,
        may_be_written: bool = True,
    ) -> None:
        """Begin a span.

        Args:
            name: Of the span.
            args: What it says at its beginning.
            unix_ns: When it began; None for now.
            is_given: Tells whether the program gave that time, by default that it did. It is asked about a beginning
                that is told late, which a busy machine makes of one that was read a moment ago.
            may_be_written: Whether this thread is the one that it begins in.
        """
        now_ns = clock.now_ns()
        ago_ns = 0 if unix_ns is None else time.time_ns() - unix_ns
        self.name, self.args, self.start_ns, self.forks = name, args, now_ns - ago_ns, _forks
        is_just_now = 0 <= ago_ns < NOW_NS and not _has_begun_since(self.start_ns)
        is_now = may_be_written and (unix_ns is None or is_just_now or (ago_ns >= 0 and not is_given()))
        self.is_written = is_now and spans.begin_automatic(name, self.start_ns, args)
        if not self.is_written and spans.is_recording() and len(_unwritten) < MOST_UNWRITTEN:
            _write_the_unended_too()
            _unwritten.add(self)

    def end(self, late: dict[str, Any], unix_ns: int | None) -> None:
        """End it, unless that is a forked child's copy of what its parent began.

        Args:
            late: What it says at its end besides.
            unix_ns: When it ended; None for now.
        """
        _unwritten.discard(self)
        if self.forks != _forks:
            return
        end_ns = clock.now_ns() if unix_ns is None else monotonic_ns(unix_ns)
        if not self.is_written:
            spans.automatic_span_at(self.name, self.start_ns, end_ns, **self.args | late)
            return
        if end_ns < self.start_ns:  # the program says so
            end_ns, late["ended_before_it_began"] = self.start_ns, True
        spans.end_automatic(self.start_ns, end_ns, late or None)


def monotonic_ns(unix_ns: int) -> int:
    """Return what our clock showed when the real-time clock showed a time."""
    return clock.now_ns() - (time.time_ns() - unix_ns)


def _has_begun_since(start_ns: int) -> bool:
    """Tell whether another span has begun since, which a span that is written now would have to enclose."""
    return spans.newest is not None and spans.newest.start_ns > start_ns


_unwritten: set[Begun] = set()
"""What has begun, is not written and has not ended."""


def write_unended() -> None:
    """Write what has an earlier beginning and no end, as the process ends."""
    for begun in list(_unwritten):
        begun.end({"never_ended": True}, None)


@functools.cache
def _write_the_unended_too() -> None:
    lifecycle.when_stopped(write_unended)


_forks = 0
"""How many forks there are between the program's first process and this one."""


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # readers run where nothing forks
    os.register_at_fork(after_in_child=_count_fork)
