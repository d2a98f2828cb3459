"""The rows of the timeline: which there are, what they are called, and their order.

There is one process per recorded process. It has its threads (each with rows for asyncio tasks and for spans that
overlap), its phases, memory by owner, other counters, requests, and what was recorded afterwards with its own times.
Requests are below memory because they take as many rows as are in flight. The UI lays out sibling rows of one name as
one.

The UI puts threads first, and sorts what else a process has by name, whatever order we ask for: the names below are in
that order (capital letters sort first). Inside a group it keeps our order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import NamedTuple

from rltrace.analysis.ledger import FREE, INTERPRETER
from rltrace.events import (
    ALLOCATIONS,
    DEVICE_TIME,
    KERNEL,
    OPERATOR,
    OWNERS,
    RAY_CALL,
    RAY_SUBMIT,
    SAMPLER,
    STARTUP_PHASES,
    STEP,
    owner_of_counter,
    owner_of_pinned,
    owner_on_host,
    subjects,
)
from rltrace.read.perfetto_ui import LIVE
from rltrace.read.recording import Process
from rltrace_exporters.perfetto_devices import TOTALS
from rltrace_exporters.protobuf import data, integer, text

MAX_LINUX_PID = 1 << 22

MEMORY = "memory"
ON_HOST = "memory of the host"
"""What lies in host memory beside a GPU: all bytes of each owner, and below that the pinned ones."""
EVERY_ALLOCATION = "memory, every allocation (0 where none was kept)"
COUNTERS = "other counters"
REQUESTS = "requests"


STARTS = "recording starts"
"""Name of the instant at which the first process began: the UI, like `rltrace summary`, counts seconds from it."""
PAUSED = "recording paused"

SNAPSHOT = "snapshot"
"""Name of the instant at which a live run was looked at."""

BARE_NAME = "rltrace_name"
"""Argument of a slice that is not called as its span: what the span is called."""

_MODULE, _METHOD = "module", "method"
_OF_MODULE = ("fsdp.forward", "fsdp.backward", "fsdp.all_gather", "fsdp.reduce_scatter")
NAMED_BY = {
    STEP: "step",
    RAY_CALL: _METHOD,
    RAY_SUBMIT: _METHOD,
    "ray.dispatch": _METHOD,
    **dict.fromkeys(_OF_MODULE, _MODULE),
    **dict.fromkeys((DEVICE_TIME + name for name in _OF_MODULE), _MODULE),
}
"""Spans that stand for many things under one name, and the argument that says which; a slice's name includes it."""

_ROOT = "(root)"
"""The module without a name inside of itself: the whole model."""


def shown_name(name: str, text: str | None) -> str:
    """Return what a span's slice is called: `step 3`, `fsdp.forward model.layers.7`; else the span's name.

    Args:
        name: Name of the span.
        text: Value of the argument in `NAMED_BY`; None if it has none.
    """
    return name if text is None else f"{name} {text or _ROOT}"


def snapshot(now_ns: int) -> str:
    """Return the name of a live run's row."""
    return f"{LIVE}{datetime.fromtimestamp(now_ns // 10**9, timezone.utc):%H:%M:%S} UTC"


def phases(process: Process, phase: str, *, is_clock_known: bool) -> str:
    """Return the name of a phase's row. It says whose it is, because phases are pinned to the top, away from their
    process.

    The phases of an engine's and the Recording's start-up have a row of their own: pinned, it would be empty in every
    step.
    """
    if phase == PAUSED:
        return f"Recording · {process.name}"
    is_apart = phase == STARTS or (process.role == "engine" and phase in STARTUP_PHASES)
    named = f"{'Start-up' if is_apart else 'Phases'} · {process.name}"
    return named + ("" if is_clock_known else " · CLOCK NOT ALIGNED")


DEVICE_ROWS = (
    (DEVICE_TIME, "gpu stream"),
    (KERNEL, "kernels of gpu stream"),
    (OPERATOR, "torch operators of thread"),
)
"""How the names of spans begin that were recorded afterwards by a device's times or torch.profiler, and how their rows
are called, before the number of the stream or thread."""

_EXPLICIT = 3

BYTES = "_bytes"
"""Ends the names of counters of bytes."""


class MemoryUnit(NamedTuple):
    """What bytes are counted in: a power of two, so that a value times `size_bytes` is exactly the bytes recorded."""

    name: str
    size_bytes: int


_GIB, _MIB = MemoryUnit("GiB", 1 << 30), MemoryUnit("MiB", 1 << 20)

UNITS = {
    "_bytes_per_second": "bytes/s",
    "tokens_per_second": "tokens/s",
    "_percent": "%",
    "_watts": "W",
    "_megahertz": "MHz",
    "_seconds": "s",
    "_ms": "ms",
    "_ns": "ns",
    "_tokens": "tokens",
    "_requests": "requests",
}
"""The unit of a counter by the end of its name; one with another end has none. Bytes are counted in a `MemoryUnit`."""


def memory_unit(processes: Iterable[Process]) -> MemoryUnit:
    """What the memory of a trace is counted in: GiB where a process works on a GPU, else MiB.

    The UI knows no unit of 1,024: it would write 65G where all other readers say 60.5 GiB.
    """
    devices = (process.device_uuid or "cpu" for process in processes)
    return _MIB if all(device.startswith("cpu") for device in devices) else _GIB


def _unit_of(counter: str, memory: MemoryUnit) -> bytes:
    """The field of a counter's descriptor that says its unit."""
    if counter.endswith(BYTES):
        return text(6, memory.name)
    unit = next((unit for end, unit in UNITS.items() if counter.endswith(end)), None)
    return b"" if unit is None else text(6, unit)


def _without_unit(counter: str) -> str:
    """A counter's name as its row has it: bytes are not what a counter of memory is in there."""
    return counter.removesuffix(BYTES) or counter


def title(process: Process, pid: int) -> str:
    """Return `rank 0 engine · host`. The UI adds the pid, so the true pid is given only if the UI shows another."""
    named = f"{process.name} · {process.host}"
    return named if pid == process.pid else f"{named}, pid {process.pid}"


def pids(processes: Iterable[Process]) -> dict[str, int]:
    """Return a number for each process, by its key: its pid, if no other process of the Recording has the same.

    To the importer a pid is the process: two hosts' equal pids, or one pid used twice, would become one. Machine ids
    would tell hosts apart, but not pid namespaces, nor a pid's second use; numbers above Linux's largest pid always do.
    """
    numbers: dict[str, int] = {}
    taken = {0}  # the importer takes pid 0 for the kernel's idle task
    for process in processes:
        pid = process.pid
        if pid in taken:
            pid = MAX_LINUX_PID + len(numbers)
        taken.add(pid)
        numbers[process.key] = pid
    return numbers


def root(uuid: int = 0) -> bytes:
    """Return the descriptor that makes newer UIs (v57) keep our order of processes and threads."""
    return integer(1, uuid) + integer(19, 1) + integer(20, 1)


def process_track(uuid: int, pid: int, process: Process, position: int, labels: Iterable[str]) -> bytes:
    """Return the descriptor of a process."""
    descriptor = integer(1, pid) + integer(3, position) + text(6, title(process, pid))
    for label in labels:
        descriptor += text(8, label)
    return integer(1, uuid) + data(3, descriptor) + integer(11, _EXPLICIT) + integer(12, position)


def thread_track(uuid: int, parent: int, pid: int, tid: int, name: str, position: int) -> bytes:
    """Return the descriptor of a thread; threads keep the order in which they first appeared."""
    descriptor = integer(1, pid) + integer(2, tid) + integer(3, position) + text(5, name)
    return integer(1, uuid) + integer(5, parent) + data(4, descriptor)


def row(uuid: int, parent: int, name: str) -> bytes:
    """Return the descriptor of a row or a group of rows."""
    return integer(1, uuid) + integer(5, parent) + text(2, name) + integer(11, _EXPLICIT)


def group(uuid: int, name: str) -> bytes:
    """Return the descriptor of a group of rows that belongs to no process."""
    return integer(1, uuid) + text(2, name) + integer(11, _EXPLICIT)


def counter_group(process: Process, name: str) -> str:
    """Return which group a process's counter is in: a sampler has one for the host and one for each GPU."""
    if process.role != SAMPLER:
        if name.startswith(ALLOCATIONS):
            return EVERY_ALLOCATION
        if owner_on_host(name) or owner_of_pinned(name):
            return ON_HOST
        return MEMORY if name.endswith(BYTES) else COUNTERS
    counter, of = subjects(name)
    if counter.startswith("gpu."):
        return f"GPU {of[0]}"
    return f"host {process.host}" if not of else f"processes on {process.host}"


def counter_name(process: Process, name: str, names: Mapping[str, str]) -> str:
    """Return what a counter is called in its group: a sampler's without the GPU, and with the process it is about."""
    if process.role != SAMPLER:
        exact = name.removeprefix(ALLOCATIONS)
        return _without_unit(exact) + (", every allocation" if exact != name else "")
    counter, of = subjects(name)
    keys = of[1:] if counter.startswith("gpu.") else of
    return " ".join([_without_unit(counter), *(names.get(key, key) for key in keys)])


def counter_track(uuid: int, parent: int, name: str, shown: str, memory: MemoryUnit) -> bytes:
    """Return the descriptor of a counter: owners of memory in the order of the ledger, on one vertical scale.

    A process's totals have a scale of their own, and so has its interpreter; otherwise the owners beside them would be
    too flat to see.
    """
    on_host = owner_on_host(name) or owner_of_pinned(name)
    if on_host is not None:
        position = 2 * OWNERS.index(on_host) + (owner_of_pinned(name) is not None)
        return _counter(uuid, parent, shown, _unit_of(name, memory) + text(7, "owners"), position)
    owner = owner_of_counter(name.removeprefix(ALLOCATIONS))
    counter, _ = subjects(name)
    scale = text(7, "owners" if owner and owner != INTERPRETER else "totals") if counter.endswith(BYTES) else b""
    position = OWNERS.index(owner) if owner else len(OWNERS)
    return _counter(uuid, parent, shown, _unit_of(counter, memory) + scale, position)


def device_counter(uuid: int, parent: int, name: str, memory: MemoryUnit) -> bytes:
    """Return the descriptor of a device's counter: totals on one scale above owners on another, so that heights
    compare.

    Free memory, and what a laptop's libraries take, has a scale of its own: beside it owners would be too flat to see.
    """
    owner = owner_of_counter(name)
    position = TOTALS.index(name) if owner is None else len(TOTALS) + OWNERS.index(owner)
    scale = b"" if owner in (FREE, INTERPRETER) else text(7, "totals" if owner is None else "owners")
    return _counter(uuid, parent, _without_unit(name), _unit_of(name, memory) + scale, position)


def _counter(uuid: int, parent: int, shown: str, described: bytes, position: int) -> bytes:
    return integer(1, uuid) + integer(5, parent) + text(2, shown) + data(8, described) + integer(12, position)
