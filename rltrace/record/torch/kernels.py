"""Every operator and kernel of a chosen part of a run, by torch.profiler, on the Recording's own clock.

The profiler has a clock of its own, which is read at both ends: a range of the profiler's is entered and left between
two readings of the host's clock. So the offset is known within the narrowest of these, and so is its drift.
torch.profiler uses CUPTI, which has one subscriber, so it cannot run beside nsys.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rltrace.events import KERNEL, KERNELS_KEPT, KERNELS_WRITTEN, OPERATOR
from rltrace.host import clock
from rltrace.host.garbage_collector import without_collection
from rltrace.host.interruption import own_failure
from rltrace.record import lifecycle, spans
from rltrace.record.lock import InterruptibleLock

WHAT = "kernels"
"""What a process says is unavailable, with the reason, where it records none."""
KEPT_LANE = 1 << 40
"""Row of the span around all: it may begin and end anywhere among those of the thread."""
MARK = "rltrace.clock"
MARKS = 8
"""Readings at each end, of which the narrowest counts."""

GAVE_WAY = "the program opened its own profiler in it, and only one can run at a time; what ran before is recorded"
NO_KERNELS = "torch.profiler saw no kernel; CUPTI has one subscriber, which may be another tool"


@dataclass
class _Profiling:
    profile: Any
    args: dict[str, Any]
    """Recorded with the whole."""
    start_ns: int
    has_device: bool
    windows: list[tuple[int, int]] = field(default_factory=list)
    """Host's clock before and after each mark, in their order."""


class _State:
    """What is profiled in this process, by us and by the program."""

    def __init__(self) -> None:
        self.profiling: _Profiling | None = None
        self.theirs: weakref.WeakSet[Any] = weakref.WeakSet()
        """Profilers that the program has open."""
        self.gave_way = False
        """Whether ours has ended because the program opened one."""
        self._lock = InterruptibleLock()

    def take(self) -> _Profiling | None:
        """Return what we profile, to one caller only."""
        return self._lock.run(self._take)

    def _take(self) -> _Profiling | None:
        profiling, self.profiling = self.profiling, None
        return profiling


_state = _State()
_thread = threading.local()
"""Says whether a thread is in a call of ours to the profiler."""


@dataclass(frozen=True)
class ClockMap:
    """The map from the profiler's clock to the host's, known at two instants."""

    first_ns: int
    """The first of the two instants, by the profiler's clock."""
    first_offset_ns: int
    last_ns: int
    last_offset_ns: int
    error_ns: int
    """A time is off by at most this much."""

    def host_ns(self, profiler_ns: int) -> int:
        """Return the same instant by the host's clock."""
        span_ns = self.last_ns - self.first_ns
        share = (profiler_ns - self.first_ns) / span_ns if span_ns > 0 else 0.0
        return profiler_ns + self.first_offset_ns + round(share * (self.last_offset_ns - self.first_offset_ns))


def start_kernels() -> None:
    """Record every operator of this thread, and every kernel of this process's GPU, until `stop_kernels`.

    Does nothing where nothing is recorded, or torch cannot profile; then one line of the Recording says why.
    """
    if _state.profiling is None and spans.is_recording() and (reason := begin()) is not None:
        lifecycle.unavailable(WHAT, reason)


def stop_kernels() -> None:
    """Write what was profiled since `start_kernels`."""
    if _state.profiling is not None and (reason := end()) is not None:
        lifecycle.unavailable(WHAT, reason)


def begin(*, of_all_threads: bool = False, **args: Any) -> str | None:
    """Do as `start_kernels` does; return why that is impossible, None if it is done.

    Args:
        of_all_threads: Record the operators of every thread; then any of them may end it.
        **args: Recorded with the whole, beside what is known of it.
    """
    try:
        if _state.profiling is not None:
            raise RuntimeError("the program records kernels itself")
        _state.profiling, _state.gave_way = _started(of_all_threads, args), False
    except own_failure() as error:
        return f"{type(error).__name__}: {error}"
    return None


def end() -> str | None:
    """Do as `stop_kernels` does; return what is missing, None if nothing is."""
    gave_way, _state.gave_way = _state.gave_way, False
    profiling = _state.take()
    if profiling is None:
        return GAVE_WAY if gave_way else "nothing was profiled"
    try:
        _mark(profiling)
        end_ns = clock.now_ns()
        with spans.automatic_span(KERNELS_WRITTEN), without_collection(of_a_program=True):
            _stop(profiling)
            return _write(profiling, end_ns)
    except own_failure() as error:
        return f"{type(error).__name__}: {error}"


def abandon() -> None:
    """Profile no more, and write nothing."""
    if (profiling := _state.take()) is not None:
        _stop(profiling)


# ---- beside a profiler of the program's own ---------------------------------------------------------------------


def program_profiles(profiler: Any) -> None:
    """Take in that the program opens a profiler: ours ends, and writes what it has."""
    if getattr(_thread, "is_ours", False):
        return
    _state.theirs.add(profiler)
    if _state.profiling is not None:
        end()
        _state.gave_way = True


def program_has_profiled(profiler: Any) -> None:
    """Take in that a profiler of the program's is over."""
    _state.theirs.discard(profiler)


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    """Call the profiler for ourselves."""
    _thread.is_ours = True
    try:
        yield
    finally:
        _thread.is_ours = False


# ---- what torch profiles ----------------------------------------------------------------------------------------


def _started(of_all_threads: bool, args: dict[str, Any]) -> _Profiling:
    import torch
    from torch.profiler import ProfilerActivity, profile

    if torch.autograd._profiler_enabled() or _state.theirs:
        raise RuntimeError("the program's own profiler is active, and only one can run at a time")
    activities = _activities(ProfilerActivity)
    with _ours():
        made = profile(activities=activities, experimental_config=_all_threads() if of_all_threads else None)
        profiling = _Profiling(made, args, clock.now_ns(), has_device=len(activities) > 1)
        made.start()
    _mark(profiling)
    return profiling


def _stop(profiling: _Profiling) -> None:
    with _ours():
        profiling.profile.stop()


def _all_threads() -> Any:
    """Return what makes torch profile all threads.

    Raises:
        RuntimeError: this torch profiles one thread only, and only that thread could end it.
    """
    try:
        from torch._C._profiler import _ExperimentalConfig

        return _ExperimentalConfig(profile_all_threads=True)
    except own_failure(ImportError, TypeError):
        import torch

        raise RuntimeError(f"torch {torch.__version__} profiles one thread only, later ones profile all") from None


def _activities(kinds: Any) -> list[Any]:
    import torch

    return [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_initialized() else [])]


def _mark(profiling: _Profiling) -> None:
    from torch.profiler import record_function

    for _ in range(MARKS):
        mark = record_function(MARK)
        before_ns = clock.now_ns()
        mark.__enter__()
        mark.__exit__(None, None, None)
        profiling.windows.append((before_ns, clock.now_ns()))


def _write(profiling: _Profiling, end_ns: int) -> str | None:
    """Write every operator and kernel, and a span around them; return what is missing."""
    operators, launched = _parted(profiling.profile.profiler.kineto_results.events())
    marks = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in operators if e.name() == MARK)
    clocks = clock_map(marks, profiling.windows)
    launches = Launches.of(operators)
    operators = [event for event in operators if event.name() != MARK]
    kernels = [event for event in launched if event.name() != MARK and not event.is_user_annotation()]
    for event in operators:
        _write_event(OPERATOR, event, event.start_thread_id(), clocks)
    for event in kernels:
        _write_event(KERNEL, event, event.device_resource_id(), clocks, **launches.said(event))
    said = {"operators": len(operators), "kernels": len(kernels), "error_ns": clocks.error_ns}
    spans.automatic_span_at(KERNELS_KEPT, profiling.start_ns, end_ns, lane=KEPT_LANE, **profiling.args, **said)
    return NO_KERNELS if profiling.has_device and not kernels else None


def _parted(events: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the events of the host, and those of devices."""
    from torch.autograd import DeviceType

    host = DeviceType.CPU
    of_host: list[Any] = []
    of_devices: list[Any] = []
    for event in events:
        (of_host if event.device_type() == host else of_devices).append(event)
    return of_host, of_devices


def _write_event(kind: str, event: Any, row: int, clocks: ClockMap, **said: Any) -> None:
    """Write an event on the row of its thread or stream."""
    start_ns = clocks.host_ns(event.start_ns())
    end_ns = start_ns + event.duration_ns()
    spans.automatic_span_at(kind + event.name(), start_ns, end_ns, lane=row + 1, error_ns=clocks.error_ns, **said)


class Launches(NamedTuple):
    """What the host called to launch kernels, and the operators that it did this in, by their numbers."""

    launched_ns: dict[int, int]
    operators: dict[int, str]

    @classmethod
    def of(cls, of_host: Iterable[Any]) -> Launches:
        """Find them: calls of CUDA's runtime and driver have names such as cudaLaunchKernel and cuLaunchKernel."""
        launched_ns: dict[int, int] = {}
        operators: dict[int, str] = {}
        for event in of_host:
            number = event.correlation_id()
            if event.name().startswith(("cu", "hip")):
                launched_ns[number] = event.start_ns()
            elif number:
                operators[number] = event.name()
        return cls(launched_ns, operators)

    def said(self, kernel: Any) -> dict[str, Any]:
        """Return how long before a kernel the host had launched it, and in which operator, as far as that is known."""
        found: dict[str, Any] = {}
        launched_ns = self.launched_ns.get(kernel.correlation_id())
        if launched_ns is not None:
            found["behind_host_ns"] = kernel.start_ns() - launched_ns
        operator = self.operators.get(kernel.linked_correlation_id())
        if operator is not None:
            found["operator"] = operator
        return found


def clock_map(marks: list[tuple[int, int]], windows: list[tuple[int, int]]) -> ClockMap:
    """Return the map from the profiler's times to the host's clock.

    Args:
        marks: First and last instant of each mark, by the profiler, in order.
        windows: The host's clock before and after each mark.

    Raises:
        ValueError: the profiler has not seen all marks.
    """
    if len(marks) != len(windows) or not marks:
        raise ValueError(f"the profiler saw {len(marks)} of {len(windows)} clock marks")
    half = len(marks) // 2
    first, last = (
        min((_offset(mark, window) for mark, window in both), key=lambda found: found[1])
        for both in (
            [*zip(marks[:half], windows[:half], strict=True)],
            [*zip(marks[half:], windows[half:], strict=True)],
        )
    )
    return ClockMap(first[2], first[0], last[2], last[0], max(first[1], last[1]))


def _offset(mark: tuple[int, int], window: tuple[int, int]) -> tuple[int, int, int]:
    """Return what to add to the profiler's time, how far off that is at most, and when, by the profiler's clock.

    The mark lies inside the window: its beginning not before the window's, its end not after it.
    """
    least_ns, most_ns = window[0] - mark[0], window[1] - mark[1]
    return (least_ns + most_ns) // 2, abs(most_ns - least_ns) // 2 + 1, mark[0]
