"""Python's garbage collector: `python.gc`, during which no thread of the process runs Python.

A full collection looks at every container there is. With torch and Ray loaded these are 0.3 million, and take 0.1 to
0.4 s; ranks collect at different moments, and in the next collective all wait for the one that does.

No bytecode of ours runs at the end of a collection. It would be the first since a signal came, so that Python would run
the program's signal handler inside of it, and what a callback of `gc` raises is printed and forgotten: a Ctrl-C, or the
timeout of a reward, would be lost. Times are kept by functions in C, and read at the next boundary of a phase.
"""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from rltrace.events import COLLECTION
from rltrace.hooks import boundaries
from rltrace.hooks.hook import Hook
from rltrace.hooks.patching import PatchSet
from rltrace.host import clock
from rltrace.host.interruption import own_failure
from rltrace.record import lifecycle, spans
from rltrace.record.lock import InterruptibleLock

WORTH_NS = 5_000_000
"""Shorter collections, as of young objects while packages are imported, are not recorded."""
TIMES = 4
"""How many times are kept for each collection."""
MOST_COLLECTIONS = 16_384
"""The times of this many collections, the last ones, are kept until they are read."""


class PythonGc:
    """Records collections that take 5 ms or more."""

    name = "python_gc"
    supports = ("Python >= 3.10",)

    def install(self, patches: PatchSet) -> None:
        """Have Python report when it collects."""
        patches.use("gc:callbacks", watch_collections, (COLLECTION,))


def watch_collections(hook: Hook) -> Callable[[], None]:
    """Make each long collection a span; return what undoes it."""
    times_ns: deque[int] = deque(maxlen=MOST_COLLECTIONS * TIMES)
    lock = InterruptibleLock()

    def read(_boundary: boundaries.Boundary | None = None) -> None:
        if len(times_ns) < TIMES or lock.is_held_here:
            return
        try:
            lock.run_if_free(read_alone)
        except own_failure() as error:
            hook.failed(error)

    def read_alone() -> None:
        for start_ns, end_ns in each_collection(times_ns):
            write_if_long(hook, start_ns, end_ns)

    def forget(_on: bool = True) -> None:
        for _ in each_collection(times_ns):
            pass

    def take_back() -> None:
        read()
        if watch in gc.callbacks:
            gc.callbacks.remove(watch)
        unwatch()
        atexit.unregister(read)

    watch = two_times(times_ns)
    gc.callbacks.append(watch)
    unwatch = boundaries.watch(read, is_last=True)
    atexit.register(read)
    lifecycle.when_switched(forget)
    os.register_at_fork(after_in_child=forget)
    return take_back


def two_times(times_ns: deque[int]) -> Callable[[Any, Any], Any]:
    """Return a function, all in C, that appends the time twice when it is called as callbacks of `gc` are."""
    appended = itertools.filterfalse(times_ns.append, iter(clock.now_ns, None))
    # `max` asks its key of both arguments, and `next` of `partial` takes each of them for what to return at an end.
    return functools.partial(max, key=functools.partial(next, appended))


def each_collection(times_ns: deque[int]) -> Iterator[tuple[int, int]]:
    """Take out the beginning and the end of each collection; each of them was reported with two times."""
    if len(times_ns) == times_ns.maxlen and is_collecting(times_ns):  # two of the first one's are gone
        return
    for _ in range(len(times_ns) // TIMES):  # others may come meanwhile, and are behind these
        _, start_ns, end_ns, _ = (times_ns.popleft() for _ in range(TIMES))
        yield start_ns, end_ns


def is_collecting(times_ns: deque[int]) -> bool:
    """Tell whether this runs in the middle of a collection, in a finalizer or beside one: then no other begins."""
    last_ns = times_ns[-1]
    gc.collect(0)
    return times_ns[-1] == last_ns


def write_if_long(hook: Hook, start_ns: int, end_ns: int) -> None:
    """Write a long collection on a row of its own; no process joins the Recording for that alone."""
    if hook.live and end_ns - start_ns >= WORTH_NS and spans.has_recorded():
        hook.row.fired()
        spans.automatic_span_at(COLLECTION, start_ns, end_ns, lane=1)
