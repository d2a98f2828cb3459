"""Python's garbage collector: `python.gc`, while which no thread of the process runs.

A full collection looks at every container there is. With torch and Ray loaded these are 0.3 million, and take 0.1 to
0.4 s; ranks collect at different moments, and in the next collective all wait for the one that does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from rltrace import clock, recorder
from rltrace.events import COLLECTION
from rltrace.patching import Hook, PatchSet

WORTH_NS = 5_000_000
"""Shorter ones, as of young objects while packages are imported, are not told."""


class PythonGc:
    """Collections that take 5 ms or more."""

    name = "python_gc"
    supports = ()

    def install(self, patches: PatchSet) -> None:
        """Ask Python to tell when it collects."""
        patches.use("gc:callbacks", watch_collections, (COLLECTION,))


def watch_collections(hook: Hook) -> Callable[[], None]:
    """Make each long collection a span; returns what undoes it."""
    start_ns = 0  # of the collection that goes on: there is one at a time in a process

    def watch(phase: str, info: dict[str, Any]) -> None:
        nonlocal start_ns
        if info["generation"] == 0:  # every 700 new objects
            return
        try:
            if phase == "start":
                start_ns = clock.now_ns() if hook.live else 0
            elif start_ns and hook.live:
                hook.fired()
                write_if_long(start_ns, clock.now_ns(), info)
        except Exception as error:
            hook.failed(error)

    def take_back() -> None:
        if watch in gc.callbacks:
            gc.callbacks.remove(watch)

    gc.callbacks.append(watch)
    return take_back


def write_if_long(start_ns: int, end_ns: int, info: dict[str, Any]) -> None:
    """Of which generation it was, and how many objects were unreachable; a process gets no row for that alone."""
    if end_ns - start_ns >= WORTH_NS and recorder.has_recorded():
        recorder.span_at(COLLECTION, start_ns, end_ns, generation=info["generation"], collected=info["collected"])
