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

if TYPE_CHECKING:
    from rltrace.frames import open
    from rltrace.instrument import instrument
    from rltrace.read.recording import Recording
    from rltrace.record.torch.allocations import start_allocations, stop_allocations
    from rltrace.record.torch.kernels import start_kernels, stop_kernels

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


_IMPORTED_WHEN_ASKED_FOR = {
    "Recording": "rltrace.read.recording",
    "open": "rltrace.frames",
    "start_allocations": "rltrace.record.torch.allocations",
    "start_kernels": "rltrace.record.torch.kernels",
    "stop_allocations": "rltrace.record.torch.allocations",
    "stop_kernels": "rltrace.record.torch.kernels",
}
"""What few processes need, and none should wait for: a traced program does not load the reader's dependencies."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "instrument":  # a module that can be called
        return import_module("rltrace.instrument")
    if name in _IMPORTED_WHEN_ASKED_FOR:
        return getattr(import_module(_IMPORTED_WHEN_ASKED_FOR[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
