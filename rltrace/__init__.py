"""Where every second and every byte of a colocated RL step went.

`instrument` a program, or `start` a recording; name what happens with `span`, `phase`, `traced`, `counter` and `flow`;
and read the `Recording` with `rltrace summary` and `rltrace view`, or as tables with `open`. While nothing is recorded,
each of the calls that record costs no more than a disabled span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rltrace.hooks.cost import measure_cost
from rltrace.hooks.phase import phase
from rltrace.record.decorator import traced
from rltrace.record.lifecycle import identify, join, pause, resume, start, stop
from rltrace.record.spans import counter, flow, span, span_at, typed_span
from rltrace.record.torch.allocations import start_allocations, stop_allocations
from rltrace.record.torch.kernels import start_kernels, stop_kernels

if TYPE_CHECKING:
    from rltrace.frames import open
    from rltrace.instrument import instrument
    from rltrace.read.recording import Recording

__all__ = [
    "Recording",
    "counter",
    "flow",
    "identify",
    "instrument",
    "join",
    "measure_cost",
    "open",
    "pause",
    "phase",
    "resume",
    "span",
    "span_at",
    "start",
    "start_allocations",
    "start_kernels",
    "stop",
    "stop_allocations",
    "stop_kernels",
    "traced",
    "typed_span",
]


def __getattr__(name: str) -> Any:
    if name == "Recording":  # the reader's dependencies are not loaded into a traced program
        from rltrace.read.recording import Recording

        return Recording
    if name == "instrument":  # a process that only records needs no hooks
        from importlib import import_module

        return import_module("rltrace.instrument")
    if name == "open":
        from rltrace import frames

        return frames.open
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
