"""Everything that `rltrace summary` shows, as one value; its fields are the keys of the JSON."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from rltrace.analysis.allocations import AllocationPeak, AllocationsMissed, allocation_peaks, allocations_missed
from rltrace.analysis.clocks import ClockFigures, clocks
from rltrace.analysis.errors import SpanErrors, span_errors
from rltrace.analysis.fates import is_complete
from rltrace.analysis.gpu_work import GpuWork, gpu_work, gpu_work_missed
from rltrace.analysis.hooks import HookFigures, hooks, names_not_applicable
from rltrace.analysis.host_memory import HostMemory, host_memory
from rltrace.analysis.idle import IdleGap, idle_gaps
from rltrace.analysis.kernels import KernelsMissed, kernels_missed
from rltrace.analysis.machines import Machine, machines
from rltrace.analysis.memory import DeviceMemory, OutOfMemory, device_memory, out_of_memory
from rltrace.analysis.observations import Observations
from rltrace.analysis.open_spans import OpenSpan, open_spans
from rltrace.analysis.phases import RankStep, in_order, rank_steps
from rltrace.analysis.processes import ProcessFigures, processes, signal_name
from rltrace.analysis.requests import Requests, StepRequests, requests_by_step, steady_requests, ways
from rltrace.analysis.rollout import SteadyRollout, StepRollout, rollouts
from rltrace.analysis.samples import HostSamples, host_samples
from rltrace.analysis.spans import SpanFigures, hook_spans, own_spans
from rltrace.analysis.steady import Steady, steady
from rltrace.analysis.steps import Step, StepWindows, steps
from rltrace.analysis.transactions import Leak, Transaction, leaks, transactions
from rltrace.analysis.untraced import Untraced, untraced
from rltrace.analysis.weight_sync import RankSync, rank_syncs
from rltrace.events import SAMPLER, STEP
from rltrace.host.garbage_collector import without_collection
from rltrace.read.recording import Process, Recording

VERSION = 2
"""Version of the JSON: it is raised when a key is removed or changes its meaning, not for a new key."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What was run."""

    path: str
    """The Recording that was opened: its folder, or an archive."""
    run_id: str | None
    """Unique to the run."""
    command: list[str]
    """Its command line, with secrets redacted."""
    created_unix_seconds: float | None
    """When it began, since 1970."""
    seconds: float
    """From the beginning of the first process to the last event of any."""
    is_live: bool
    """A process of the run is still alive on this host."""
    exit_code: int | None
    """Exit code of the command; 128 plus the number of a signal that killed it. None while it goes on, and for a
    program that neither `rltrace exec` nor `run` started."""
    interrupted_by: str | None
    """Name of the signal by which the user asked it to end; it may have ended well all the same."""
    versions: dict[str, str]
    """Version of each package that it was made with."""
    machines: list[Machine]
    """One item per host that was sampled."""
    clock_domains: int
    """How many clocks wrote it; if more than 1, see `clocks`."""
    ranks_started: int | None
    """How many ranks the launcher started on all hosts, as they say; None if it did not tell them."""
    ranks_missing: int
    """How many of these are in no process of the Recording, such as those of hosts whose folders are not in it."""


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """What the Recording lacks of one process."""

    process_key: str
    """The process's folder in the Recording, or the file of the run that has damaged lines."""
    lost_events: int
    """Events that could not be written, for example on a full disk, plus `misfit_records`."""
    misfit_records: int
    """Whole records that make no sense: a name that is no text, a value that is no number."""
    torn_records: int
    """Records that the death of the process cut, that are damaged, or whose time lies outside of the process's life or
    contradicts those of the records around them."""
    orphan_records: int
    """Ends of spans without a beginning, plus `stray_arrows`."""
    stray_arrows: int
    """Arrows outside of any span."""
    unfit_values: int
    """Arguments, fields and samples that cannot be right, such as 10**19 bytes. They are left out."""
    damaged_lines: int
    """Damaged lines that say who the process is or how it ended. They are left out."""
    damaged_segments: int
    """Segments that are missing or changed after they were closed. What can still be read counts, and may be wrong."""
    dropped_segments: int
    """Segments that were dropped, oldest first, to keep to `--max-disk` or `max_bytes`."""
    dropped_bytes: int
    """Size of these segments."""


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed from a process to keep to the disk budget, or was not collected from its host. Totals of it are
    left: they are in `own_spans` and `hook_spans`."""

    process_key: str
    """The process's folder in the Recording."""
    first_step: int | None
    """The first step that is in brief; None if what went was before the first step, or the run has no steps."""
    last_step: int | None
    """The last one."""
    spans: int
    """Spans of which only totals are left."""
    spans_left_on_host: int
    """Those of them that are still on the process's host; `rltrace collect --steps` brings them."""
    samples: int
    """Samples that went; those of memory at the boundaries of phases stay."""
    arrows: int
    """Ends of arrows that went."""


class UnidentifiedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was killed while it opened its folder, or whose identity is damaged; it is in no other figure."""

    process_key: str
    """The process's folder in the Recording."""
    pid: int | None
    """Process id, according to the name of its folder."""
    unreadable_events: int
    """Spans and samples that it wrote; nobody knows by which clock. They count as lost."""


class Unsealed(msgspec.Struct, frozen=True, kw_only=True):
    """Segments of a process without a checksum, because it is alive or did not close them.

    Readers can only check that their content makes sense: if they are damaged, a figure that rests on them may be
    wrong.
    """

    process_key: str
    """The process's folder in the Recording."""
    segments: int
    """Segments without a checksum."""
    bytes: int
    """Bytes that were written into them."""


class Inferred(msgspec.Struct, frozen=True):
    """A step or a phase that nobody marked."""

    name: str
    """`step`, or the phase."""
    reason: str
    """From what it was inferred."""


class Folded(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks or steps of which a large summary has only those that stand out, because the others are alike."""

    of: str
    """`ranks` or `steps`."""
    there: int
    """How many the run has."""
    kept: list[int]
    """Those that have items in the lists below."""
    option: str
    """What to add to the command to get another one, for example."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A Recording in figures."""

    version: int
    """Version of this format. It is raised when a key goes or changes its meaning; a new key does not raise it."""
    run: Run
    """What was run."""
    clocks: list[ClockFigures]
    """One item per clock that wrote the Recording, the reference first."""
    steps: list[Step]
    """One item per step, in order; the first step is among them."""
    phases: list[RankStep]
    """One item per step and rank, the start-up first; also of the driver and of other processes that have phases."""
    steady: Steady | None
    """The steps to compare: those after the first, which also warms everything up. None while no step has ended."""
    inferred: list[Inferred]
    """Steps and phases that were inferred from what ran, in a run that marks no steps and whose trainer no hook knows:
    one item per name and reason."""
    idle: list[IdleGap]
    """Where the idle time is: one item per lane and pair of phases around the gap."""
    own_spans: list[SpanFigures]
    """Your spans: one item per name and role, for those made by `rltrace.span` and `@rltrace.traced` that are no
    phases."""
    hook_spans: list[SpanFigures]
    """Automatic spans: the same for those that hooks made, without phases and without what `weight_sync`, `sleeps` and
    `gpu_work` show."""
    gpu_work: list[GpuWork]
    """What the GPUs' streams did: one item per rank, kind of work and phase, a mean over the steady steps; empty if no
    GPU was timed."""
    gpu_work_missed: dict[str, str]
    """By process, GPU work that was not timed, such as `3 not over when the process ended`."""
    weight_sync: list[RankSync]
    """One item per step and rank that synced."""
    requests: list[Requests]
    """Where the time of requests went in the steady steps, or in the run if these have none: one item per outermost
    span; empty without requests."""
    requests_by_step: list[StepRequests]
    """The same for the requests that began in each step: one item per step and outermost span."""
    rollout: SteadyRollout | None
    """Trajectories and requests of the steady steps, or of the run if these have none; None without any."""
    rollout_by_step: list[StepRollout]
    """The same for those that began in each step; also of steps in which none did."""
    memory: list[DeviceMemory]
    """One item per device whose owners' bytes were sampled."""
    allocations: list[AllocationPeak]
    """One item per device and step whose every allocation was kept."""
    allocations_missed: list[AllocationsMissed]
    """One item per step that `--allocations` chose and reason why it was not kept; empty if all were kept."""
    kernels_missed: list[KernelsMissed]
    """One item per step that `--kernels` chose and reason why its kernels are missing; empty if all are there."""
    samples: list[HostSamples]
    """One item per host that was sampled."""
    host_memory: list[HostMemory]
    """One item per process that said what it has in host memory."""
    out_of_memory: list[OutOfMemory]
    """One item for each time that a process ran out of memory and a phase, or a thread or process outside of phases,
    ended with it."""
    sleeps: list[Transaction]
    """One item per sleep or wake-up of an engine; those of one device that overlap are one."""
    leaks: list[Leak]
    """Rows of the ledger that grew over several sleeps in a row: 1 MiB or more after each of the last 3 (caches apart),
    or after each of the last 8 and by 1 MiB together (caches too)."""
    processes: list[ProcessFigures]
    """One item per process, by when it began."""
    untraced: list[Untraced]
    """Processes of the run that were seen and not traced: one item per command and reason."""
    hooks: list[HookFigures]
    """One item per hook, over all processes."""
    not_applicable: dict[str, str]
    """Names of spans that cannot be in this run, each with the reason."""
    open_spans: list[OpenSpan]
    """Spans without an end, the longest first."""
    errors: list[SpanErrors]
    """One item per kind of exception and the innermost span that it left, caught or not. Exceptions that abort steps
    and sleeps are at these; `StopIteration` and `SystemExit` are no errors. An exception that leaves an outer span
    cannot be told from another of its type that an inner span had and that was caught."""
    losses: list[Losses]
    """One item per process that lost something; empty if none did."""
    earlier_steps_lost: bool
    """Whether steps before the first of `steps` may be gone, because segments were dropped or steps removed to bound
    the size. Then nobody knows when the start-up ended, or which step was the first."""
    removed: list[Removed]
    """One item per process of which spans were removed to keep to the disk budget, or left on its host; empty in
    nearly all runs."""
    unidentified: list[UnidentifiedProcess]
    """One item per process that is in no other figure, because its identity is unknown; empty if there is none."""
    unsealed: list[Unsealed]
    """One item per process that is alive or did not end in good order; empty in Recordings that have no checksums."""
    lost_events: int
    """Sum over all processes; what was dropped to keep to a bound is in `losses` only."""
    complete: bool | None
    """Whether every process ended its part in good order, or was let go while idle, as Ray ends its workers; None if
    nobody saw how the others ended."""
    folded: list[Folded] = []
    """What is left out of the lists of a large run, above 640 ranks times steps: their items are of some ranks and
    steps only. `steps`, `steady`, `errors` and whatever is no item of a rank or a step are whole. Empty if nothing
    is."""


class Analysed(NamedTuple):
    """A Recording that was read once, with its figures."""

    seen: Observations
    windows: StepWindows
    summary: Summary


def summarize(recording: Recording) -> Summary:
    """Read a Recording once and compute its figures; it may be live, dead, empty, or of any program."""
    return analyse(recording).summary


def analyse(recording: Recording) -> Analysed:
    """Do the same, and return what the figures were computed from, too."""
    with without_collection():
        return _analyse(recording)


def _analyse(recording: Recording) -> Analysed:
    seen = Observations(recording)
    windows = StepWindows(seen)
    measured = clocks(seen.processes, seen.time_line)
    all_steps, phases = steps(seen, windows), rank_steps(seen, windows)
    of_requests, of_rollout = ways(seen), rollouts(seen, windows)
    of_processes = processes(seen)
    summary = Summary(
        version=VERSION,
        run=_run(seen, len(measured)),
        clocks=measured,
        steps=all_steps,
        phases=phases,
        steady=steady(windows, all_steps, phases, chosen=recording.steps_are_chosen),
        inferred=_inferred(seen),
        idle=idle_gaps(seen, windows),
        own_spans=own_spans(seen, windows),
        hook_spans=hook_spans(seen, windows),
        gpu_work=gpu_work(seen, windows),
        gpu_work_missed=gpu_work_missed(seen),
        weight_sync=rank_syncs(seen, windows),
        requests=steady_requests(of_requests, windows),
        requests_by_step=requests_by_step(of_requests, windows),
        rollout=of_rollout.steady,
        rollout_by_step=of_rollout.by_step,
        memory=(memory := device_memory(seen, windows)),
        allocations=allocation_peaks(seen, windows, memory),
        allocations_missed=allocations_missed(seen),
        kernels_missed=kernels_missed(seen),
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
        losses=losses(recording),
        earlier_steps_lost=_lacks_earlier_steps(recording, windows),
        removed=[_removed(process) for process in recording.processes if process.removed.totals],
        unidentified=[
            UnidentifiedProcess(process_key=process.key, pid=process.pid, unreadable_events=process.records)
            for process in recording.unidentified
        ],
        unsealed=_unsealed(recording),
        lost_events=recording.lost_events,
        complete=None,
    )
    return Analysed(seen, windows, msgspec.structs.replace(summary, complete=is_complete(summary)))


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
        ranks_started=seen.recording.ranks.started,
        ranks_missing=seen.recording.ranks.missing,
    )


def _inferred(seen: Observations) -> list[Inferred]:
    found = dict.fromkeys(name_and_reason for process in seen.processes for name_and_reason in process.inferred)
    order = {name: place for place, name in enumerate((STEP, *in_order(name for name, _ in found if name != STEP)))}
    return [Inferred(name, reason) for name, reason in sorted(found, key=lambda item: order[item[0]])]


def _lacks_earlier_steps(recording: Recording, windows: StepWindows) -> bool:
    if recording.steps_are_chosen:
        return False
    if not windows.spans:
        return any(process.may_lack_steps for process in recording.processes if process.role != SAMPLER)
    return not all(own.has_beginning for own in windows.all())


def _removed(process: Process) -> Removed:
    gone = process.removed
    steps = [step for group in gone.totals for step in (group.first_step, group.last_step) if step is not None]
    return Removed(
        process_key=process.key,
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
        spans=sum(total.many for total in gone.totals.values()),
        spans_left_on_host=sum(total.many for total in gone.left.values()),
        samples=gone.samples,
        arrows=gone.flows,
    )


def losses(recording: Recording) -> list[Losses]:
    """Return the losses; call this after the events were read, because torn and orphan records are known only then."""
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
