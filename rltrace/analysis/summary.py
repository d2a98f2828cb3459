"""Everything `rltrace summary` shows, as one value; its fields are the keys of the JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rltrace.analysis.allocations import AllocationPeak, AllocationsMissed, allocation_peaks, allocations_missed
from rltrace.analysis.clocks import ClockFigures, clocks
from rltrace.analysis.errors import SpanErrors, span_errors
from rltrace.analysis.gpu_work import GpuWork, gpu_work, gpu_work_missed
from rltrace.analysis.hooks import HookFigures, hooks, names_not_applicable
from rltrace.analysis.host_memory import HostMemory, host_memory
from rltrace.analysis.idle import IdleGap, idle_gaps
from rltrace.analysis.machines import Machine, machines
from rltrace.analysis.memory import DeviceMemory, OutOfMemory, device_memory, out_of_memory
from rltrace.analysis.observations import Observations
from rltrace.analysis.open_spans import OpenSpan, open_spans
from rltrace.analysis.phases import RankStep, rank_steps
from rltrace.analysis.processes import ProcessFigures, processes, signal_name
from rltrace.analysis.samples import HostSamples, host_samples
from rltrace.analysis.spans import SpanFigures, hook_spans, own_spans
from rltrace.analysis.steady import Steady, steady
from rltrace.analysis.steps import Step, StepWindows, steps
from rltrace.analysis.transactions import Leak, Transaction, leaks, transactions
from rltrace.analysis.untraced import Untraced, untraced
from rltrace.analysis.weight_sync import RankSync, rank_syncs
from rltrace.recording import Recording

VERSION = 1
"""Of the JSON: raised when a key changes its meaning or goes; new keys do not raise it."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What was run."""

    path: str
    run_id: str | None
    command: list[str]
    created_unix_seconds: float | None
    seconds: float
    """From the first process's beginning to the last event of any."""
    is_live: bool
    exit_code: int | None
    """Of the command; None while it goes on, and of a program that no `rltrace exec` or `run` started."""
    interrupted_by: str | None
    """Name of the signal by which the user asked it to end."""
    versions: dict[str, str]
    """Of the packages that it was made with."""
    machines: list[Machine]
    clock_domains: int
    """More than 1: see `clocks`."""


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """What the Recording lacks, of one process."""

    process_key: str
    """Its folder in the Recording; or the file of the run that has damaged lines, which is of no process."""
    lost_events: int
    """Could not be written: a full disk, a record too large; and `misfit_records`."""
    misfit_records: int
    """Whole, and of no use: a name that is no text, a value that is no number, an arrow that is neither out nor in."""
    torn_records: int
    """Cut by the death of the process while it wrote them; damaged, or at a time at which the process was not there."""
    orphan_records: int
    """Ends whose beginning is missing, and `stray_arrows`."""
    stray_arrows: int
    """Outside of any span."""
    unfit_values: int
    """Arguments, fields and samples that cannot be what they say, such as 10**19 bytes: left out."""
    damaged_lines: int
    """That say who it is, or how it went: left out."""
    damaged_segments: int
    """Not what they were when they were full or closed, or not there: what can still be read counts, and may be wrong.
    """
    dropped_segments: int
    """Dropped, oldest first, to keep to `max_bytes`."""
    dropped_bytes: int


class Unsealed(msgspec.Struct, frozen=True, kw_only=True):
    """Segments of a process without a checksum, because it lives or did not come to close them.

    What they say was looked at for sense alone: a figure that rests on them may be wrong, if they are damaged.
    """

    process_key: str
    segments: int
    bytes: int
    """That were written into them."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A Recording in figures."""

    version: int
    run: Run
    clocks: list[ClockFigures]
    steps: list[Step]
    phases: list[RankStep]
    steady: Steady | None
    """What to compare: the steps after the first, which also warms everything up; None while no step is over."""
    idle: list[IdleGap]
    own_spans: list[SpanFigures]
    hook_spans: list[SpanFigures]
    gpu_work: list[GpuWork]
    gpu_work_missed: dict[str, str]
    """What was not timed, by process."""
    weight_sync: list[RankSync]
    memory: list[DeviceMemory]
    allocations: list[AllocationPeak]
    """Of the steps of which every allocation was kept."""
    allocations_missed: list[AllocationsMissed]
    """Of the steps that `--allocations` chose; empty is good."""
    samples: list[HostSamples]
    host_memory: list[HostMemory]
    out_of_memory: list[OutOfMemory]
    sleeps: list[Transaction]
    leaks: list[Leak]
    processes: list[ProcessFigures]
    untraced: list[Untraced]
    hooks: list[HookFigures]
    not_applicable: dict[str, str]
    """Span names that cannot be in this run, each with the reason."""
    open_spans: list[OpenSpan]
    errors: list[SpanErrors]
    """That left a span, caught or not."""
    losses: list[Losses]
    """Of the processes that lost something; empty is good."""
    unsealed: list[Unsealed]
    """Of processes that live, or did not end in good order; empty for Recordings from before there were checksums."""
    lost_events: int
    """Over all processes; what was dropped to keep to `max_bytes` is in `losses` only."""
    complete: bool | None
    """Every process ended its part in good order; None where nobody saw how those went that did not."""


def summarize(recording: Recording) -> Summary:
    """Read a Recording once and work out its figures; it may be alive, dead, empty, or of any program."""
    seen = Observations(recording)
    windows = StepWindows(seen)
    measured = clocks(seen.processes, seen.time_line)
    all_steps, phases = steps(seen, windows), rank_steps(seen, windows)
    of_processes = processes(seen)
    return Summary(
        version=VERSION,
        run=_run(seen, len(measured)),
        clocks=measured,
        steps=all_steps,
        phases=phases,
        steady=steady(windows, all_steps, phases),
        idle=idle_gaps(seen, windows),
        own_spans=own_spans(seen, windows),
        hook_spans=hook_spans(seen, windows),
        gpu_work=gpu_work(seen, windows),
        gpu_work_missed=gpu_work_missed(seen),
        weight_sync=rank_syncs(seen, windows),
        memory=(memory := device_memory(seen, windows)),
        allocations=allocation_peaks(seen, windows, memory),
        allocations_missed=allocations_missed(seen),
        samples=host_samples(seen),
        host_memory=host_memory(seen),
        out_of_memory=out_of_memory(seen, windows),
        sleeps=transactions(seen, windows),
        leaks=leaks(seen),
        processes=of_processes,
        untraced=untraced(recording),
        hooks=hooks(seen),
        not_applicable=names_not_applicable(seen),
        open_spans=open_spans(seen),
        errors=span_errors(seen, windows),
        losses=_losses(recording),
        unsealed=_unsealed(recording),
        lost_events=recording.lost_events,
        complete=_is_complete(of_processes),
    )


def _run(seen: Observations, clock_domains: int) -> Run:
    manifest = seen.recording.manifest
    created_ns = manifest.get("created_unix_ns")
    ending = seen.recording.ending
    return Run(
        path=str(seen.recording.path),
        run_id=manifest.get("run_id"),
        command=manifest.get("command") or [],
        created_unix_seconds=None if created_ns is None else created_ns / 1e9,
        seconds=(seen.end_ns - seen.start_ns) / 1e9,
        is_live=any(process.is_alive for process in seen.recording.processes),
        exit_code=ending.exit_code if ending is not None else None,
        interrupted_by=signal_name(ending.interrupted_by) if ending is not None else None,
        versions=manifest.get("versions") or {},
        machines=machines(seen.recording.processes),
        clock_domains=clock_domains,
    )


def _is_complete(found: Sequence[ProcessFigures]) -> bool | None:
    states = {process.state for process in found}
    if states == {"ended"}:
        return True
    return None if states and states <= {"ended", "gone"} else False


def _losses(recording: Recording) -> list[Losses]:
    """Called after the events were read: torn and orphan records are known only then."""
    of_processes = [
        Losses(
            process_key=process.key,
            lost_events=process.lost_events,
            misfit_records=process.misfits,
            torn_records=process.torn,
            orphan_records=process.orphans,
            stray_arrows=process.stray_flows,
            unfit_values=process.unfit,
            damaged_lines=process.damaged_lines,
            damaged_segments=process.damaged_segments,
            dropped_segments=process.dropped_segments,
            dropped_bytes=process.dropped_bytes,
        )
        for process in recording.processes
    ]
    of_run = [_of_file(file, damaged) for file, damaged in recording.damaged.items()]
    return [*of_run, *(loss for loss in of_processes if any(msgspec.structs.astuple(loss)[1:]))]


def _of_file(file: str, damaged_lines: int) -> Losses:
    nothing = dict.fromkeys(Losses.__struct_fields__, 0)
    return Losses(**{**nothing, "process_key": file, "damaged_lines": damaged_lines})  # type: ignore[arg-type]


def _unsealed(recording: Recording) -> list[Unsealed]:
    return [
        Unsealed(process_key=process.key, segments=len(process.unsealed), bytes=sum(process.unsealed.values()))
        for process in recording.processes
        if process.unsealed
    ]
