"""Every operator and kernel of a chosen part of a run, by torch.profiler, on the Recording's own clock.

The profiler has a clock of its own, which is read at both ends: a range of the profiler's is entered and left between
two readings of the host's clock. So the offset is known within the narrowest of these, and so is its drift.
torch.profiler uses CUPTI, which has one subscriber, so it cannot run beside nsys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rltrace.events import KERNEL, OPERATOR
from rltrace.host import clock
from rltrace.host.interruption import own_failure
from rltrace.record import lifecycle, spans

MARK = "rltrace.clock"
MARKS = 8
"""Readings at each end, of which the narrowest counts."""

_profiling: _Profiling | None = None


@dataclass
class _Profiling:
    profile: Any
    windows: list[tuple[int, int]]
    """Host's clock before and after each mark, in their order."""


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
    global _profiling
    if _profiling is not None or not spans.is_recording():
        return
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if torch.autograd._profiler_enabled():
            raise RuntimeError("the program's own profiler is active, and only one can run at a time")
        profiling = _Profiling(profile(activities=_activities(ProfilerActivity)), [])
        profiling.profile.start()
        _mark(profiling)
        _profiling = profiling
    except own_failure() as error:
        _say(error)


def stop_kernels() -> None:
    """Write what was profiled since `start_kernels`."""
    global _profiling
    profiling, _profiling = _profiling, None
    if profiling is None:
        return
    try:
        _mark(profiling)
        profiling.profile.stop()
        _write(profiling)
    except own_failure() as error:
        _say(error)


def _activities(kinds: Any) -> list[Any]:
    import torch

    return [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_initialized() else [])]


def _say(error: Exception) -> None:
    lifecycle.unavailable("kernels", f"{type(error).__name__}: {error}")


def _mark(profiling: _Profiling) -> None:
    from torch.profiler import record_function

    for _ in range(MARKS):
        mark = record_function(MARK)
        before_ns = clock.now_ns()
        mark.__enter__()
        mark.__exit__(None, None, None)
        profiling.windows.append((before_ns, clock.now_ns()))


def _write(profiling: _Profiling) -> None:
    events = profiling.profile.profiler.kineto_results.events()
    marks = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == MARK and _is_host(e))
    clocks = clock_map(marks, profiling.windows)
    for event in events:
        if event.name() != MARK:
            start_ns = clocks.host_ns(event.start_ns())
            spans.automatic_span_at(
                (OPERATOR if _is_host(event) else KERNEL) + event.name(),
                start_ns,
                start_ns + event.duration_ns(),
                lane=_lane(event),
                error_ns=clocks.error_ns,
            )


def _is_host(event: Any) -> bool:
    return str(event.device_type()).endswith("CPU")


def _lane(event: Any) -> int:
    """Return the thread of an operator, or the stream of a kernel."""
    return int(event.start_thread_id() if _is_host(event) else event.device_resource_id()) + 1


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
