"""Judges how each process ended: whether that was as it should be, or somebody has to look."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal, NamedTuple

from rltrace.analysis.lanes import DRIVER_ROLE
from rltrace.analysis.processes import ProcessFigures
from rltrace.events import SAMPLER

if TYPE_CHECKING:
    from rltrace.analysis.summary import Summary

Fate = Literal["fine", "released", "silent", "in doubt", "died"]

CRASHES = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS")


class Circumstances(NamedTuple):
    """What a process left behind, and what became of the others."""

    is_busy: bool
    """Whether it had an open span."""
    is_first: bool
    """Whether it is the first process of the run, without the sampler."""
    uses_ray: bool
    """Whether Ray runs the processes: it kills the workers that it started in advance and did not need."""
    parent_ended: bool
    """Whether the process that started it ended in good order."""
    run_ended_well: bool
    """Whether every step ended, none by an exception, and the driver ended in good order."""


def fate(process: ProcessFigures, around: Circumstances) -> Fate:
    """Judge one process.

    Returns:
        `died`: it died, and the run lacks it. `in doubt`: it ended in the middle of something, or was the run itself,
            and nobody saw how. `silent`: it died before it recorded anything. `released`: it was stopped while idle, as
            Ray stops its workers and a Pool its children. `fine`: it lives, ended, or the user stopped it.
    """
    if process.state == "gone":
        return "in doubt" if around.is_busy or around.is_first else "released"
    if process.state != "died":
        return "fine"
    if process.spans and not around.is_busy and _is_ended_by_others(process, around):
        return "released"
    crashed = process.killed_by in CRASHES and not around.uses_ray
    if process.spans or process.samples or process.rank is not None or crashed:
        return "died"
    return "released" if around.uses_ray else "silent"


def _is_ended_by_others(process: ProcessFigures, around: Circumstances) -> bool:
    """Return whether its parent let it go: by SIGTERM as a Pool does, or by SIGKILL as Ray does when its driver leaves.

    A worker that Ray stops before that, as one that is idle or by `ray.kill`, leaves by itself. One that was killed
    before its driver left was killed by somebody else, such as the kernel, short of memory.
    """
    if process.killed_by in (None, "SIGTERM") and process.rank is None and around.parent_ended:
        return True
    is_by_ray = around.uses_ray and around.run_ended_well and process.ran_when_driver_left is not False
    return is_by_ray and process.killed_by in ("SIGTERM", "SIGKILL")


def fates(summary: Summary) -> dict[str, Fate]:
    """Return the fate of every process, by its key."""
    busy = {span.process_key for span in summary.open_spans}
    first = next((process.key for process in summary.processes if process.role != SAMPLER), None)
    ended = {process.key for process in summary.processes if process.state == "ended"}
    ray, well = uses_ray(summary), _run_ended_well(summary, ended)
    return {
        process.key: fate(
            process,
            Circumstances(
                is_busy=process.key in busy,
                is_first=process.key == first,
                uses_ray=ray,
                parent_ended=process.parent in ended,
                run_ended_well=well,
            ),
        )
        for process in summary.processes
    }


def having(summary: Summary, *wanted: Fate) -> list[ProcessFigures]:
    """Return the processes that had one of these fates."""
    found = fates(summary)
    return [process for process in summary.processes if found[process.key] in wanted]


def is_complete(summary: Summary) -> bool | None:
    """Return whether every process ended its part in good order, or was let go while idle.

    None if nobody saw how the others ended.
    """
    if summary.unidentified or not summary.processes:
        return False
    found = fates(summary)
    left = {process.state for process in summary.processes if found[process.key] != "released"} - {"ended"}
    return True if not left else None if left == {"gone"} else False


def uses_ray(summary: Summary) -> bool:
    """Return whether any process imported Ray."""
    return any(hook.instrumentation == "ray" and hook.state == "installed" for hook in summary.hooks)


def _run_ended_well(summary: Summary, ended: Collection[str]) -> bool:
    drivers = [process for process in summary.processes if process.role == DRIVER_ROLE]
    steps_ended = all(step.end_seconds is not None and step.error is None for step in summary.steps)
    return bool(drivers and summary.steps) and steps_ended and all(driver.key in ended for driver in drivers)
