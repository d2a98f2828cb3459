"""Figures as tables for a terminal of 100 columns: one function a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import isfinite
from statistics import fmean

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rltrace.analysis.allocations import AllocationPeak
from rltrace.analysis.clocks import ClockFigures
from rltrace.analysis.hooks import HookFigures
from rltrace.analysis.host_memory import HostMemory
from rltrace.analysis.memory import DeviceMemory, OutOfMemory
from rltrace.analysis.open_spans import OpenSpan
from rltrace.analysis.phases import IDLE, ORDER, RankStep
from rltrace.analysis.processes import ProcessFigures
from rltrace.analysis.samples import HostSamples
from rltrace.analysis.steps import Step
from rltrace.analysis.summary import Losses, Run, Summary
from rltrace.analysis.transactions import Leak, Transaction
from rltrace.analysis.untraced import Untraced
from rltrace.analysis.weight_sync import RankSync
from rltrace.events import WAIT_DRIVER, WEIGHT_SYNC_STAGES

WIDTH = 100
"""Of what goes into a file or a pipe; a terminal has its own."""
MOST_STEPS = 30
"""A longer run shows its first and last steps."""
MOST_LANES = 4
"""More ranks are shown as their mean, fastest and slowest."""
MOST_DEVICES = 4
MOST_FIGURES = 3
MOST_OPEN = 20
MOST_WRONG = 8
BAR = 10

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def console() -> Console:
    """Standard output."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH, highlight=False)


def show(summary: Summary, screen: Console) -> None:
    """Print everything that the Recording has figures for."""
    screen.print(header(summary.run, summary))
    for table in _tables(summary):
        screen.print()
        screen.print(table)


def _tables(summary: Summary) -> list[RenderableType]:
    tables: list[RenderableType] = [out_of_memory_table(failure) for failure in summary.out_of_memory[:MOST_WRONG]]
    if summary.open_spans and not summary.complete:
        tables.append(open_span_table(summary.open_spans))
    if summary.steps:
        tables.append(step_table(summary.steps))
    startup = [row for row in summary.phases if row.step is None]
    inside = [row for row in summary.phases if row.step is not None]
    if inside:
        tables.append(_mean_step_table(inside))
    if startup:
        tables.append(phase_table("Start-up, before the first step" if summary.steps else "Phases", startup))
    if summary.weight_sync:
        tables.append(weight_sync_table(summary.weight_sync))
    for device in _fullest(summary.memory):
        tables += [memory_table(device), memory_phase_table(device)]
    if len(summary.memory) > MOST_DEVICES:
        tables.append(Text(f"{len(summary.memory) - MOST_DEVICES} more devices: see --json", style="dim"))
    if summary.allocations:
        tables.append(allocation_table(summary.allocations))
    tables += [sample_table(host) for host in summary.samples]
    if summary.host_memory:
        tables.append(host_memory_table(summary.host_memory))
    if summary.sleeps:
        tables.append(sleep_table(summary.sleeps, summary.leaks))
    if summary.processes:
        tables.append(process_tree(summary.processes))
    if summary.untraced:
        tables.append(untraced_lines(summary.untraced))
    if summary.hooks:
        tables.append(hook_table(summary.hooks))
        # Only where ranks are known is it an RL run, whose reader misses them.
        if summary.not_applicable and any(process.rank is not None for process in summary.processes):
            tables.append(not_applicable_lines(summary.not_applicable))
    tables.append(loss_lines(summary))
    return tables


def _mean_step_table(rows: Sequence[RankStep]) -> RenderableType:
    """Of the steps that are over: a part of a step would make the mean one of nothing."""
    finished = [row for row in rows if row.finished]
    unfinished = len({row.step for row in rows if not row.finished})
    if not finished:
        return phase_table(f"Phases: mean of {_count(unfinished, 'step')}, none of them finished", rows)
    left_out = f", {unfinished} unfinished left out" if unfinished else ""
    return phase_table(f"Phases: mean of {_count(len({row.step for row in finished}), 'step')}{left_out}", finished)


def header(run: Run, summary: Summary) -> RenderableType:
    """What was run, and whether the Recording of it is whole."""
    ranks = {row.rank for row in summary.processes if row.rank is not None}
    facts = [
        _count(len(summary.steps), "step") if summary.steps else "no steps",
        f"{run.seconds:.1f} s",
        *([_count(len(ranks), "rank")] if ranks else []),
        _count(len(summary.processes), "process"),
    ]
    state = Text("complete", "green") if summary.complete else Text("going on", "cyan")
    died = [process for process in summary.processes if process.state == "died"]
    if died:
        killed = f" by {died[0].killed_by}" if died[0].killed_by else ""
        state = Text(f"{died[0].name} (pid {died[0].pid}) died{killed}", "bold red")
    elif any(process.state == "stopped" for process in summary.processes):
        state = Text("stopped", "yellow")
    elif not summary.processes:
        state = Text("no process has recorded anything", "yellow")
    elif not summary.complete and not run.is_live:
        state = Text("not complete", "yellow")
    line = Text.assemble(" · ".join(facts), " · ", state)
    command = Text(" ".join(run.command), "dim", overflow="ellipsis", no_wrap=True)
    return Group(line, Text(run.path, "bold", overflow="fold"), command)


def step_table(steps: Sequence[Step]) -> RenderableType:
    """One row a step; the first and last ones of a long run."""
    numbers: dict[str, Callable[[Step], float | None]] = {
        "tokens": lambda step: step.tokens,
        "tokens/s": lambda step: step.tokens_per_second,
    }
    for name in list(dict.fromkeys(name for step in steps for name in step.figures))[:MOST_FIGURES]:
        numbers[name] = partial(_figure, name)
    known = {name: of for name, of in numbers.items() if any(of(step) is not None for step in steps)}
    table = _table("step", "seconds", "reward", "", *known)
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    best = max((abs(reward) for reward in rewards if isfinite(reward)), default=0.0)
    shown = list(steps) if len(steps) <= MOST_STEPS else [*steps[: MOST_STEPS // 3], None, *steps[-MOST_STEPS // 3 :]]
    for step in shown:
        if step is None:
            table.add_row("…")
            continue
        reward = step.reward_mean
        table.add_row(
            str(step.step),
            _seconds(step.seconds) + _unfinished(step),
            _number(reward),
            bar(reward / best if reward is not None and isfinite(reward) and best > 0 else 0.0),
            *(_number(of(step)) for of in known.values()),
        )
    return _titled("Steps", table)


def _unfinished(step: Step) -> str:
    if step.end_seconds is None:
        return " open"
    if step.error is not None:
        return " aborted"
    return "" if step.recorded else " not recorded"


def _figure(name: str, step: Step) -> float | None:
    return step.figures.get(name)


def phase_table(title: str, rows: Sequence[RankStep]) -> RenderableType:
    """Seconds and share of each phase, one column a rank: a mean over the steps given."""
    lanes = list(dict.fromkeys(row.lane for row in rows))
    names = list(dict.fromkeys(name for row in rows for name in row.phases if name not in (WAIT_DRIVER, IDLE)))
    names.sort(key=lambda name: (ORDER.get(name, len(ORDER)), name))
    if any(row.phases[WAIT_DRIVER].seconds for row in rows):
        names.append(WAIT_DRIVER)
    names.append(IDLE)
    means = {lane: _means([row for row in rows if row.lane == lane], names) for lane in lanes}
    table = _lane_table(lanes, means, names)
    lengths = [fmean(row.seconds for row in rows if row.lane == lane) for lane in lanes]
    overlap = sum(row.overlap_seconds for row in rows)
    caption = f"whole: {_seconds(fmean(lengths))} s"
    if overlap:
        pairs = sorted({" + ".join(pair.phases) for row in rows for pair in row.overlaps})
        caption += f"; {_seconds(overlap)} s counted twice, phases overlap: {', '.join(pairs)}"
    astray = list(dict.fromkeys(row.lane for row in rows if not row.clock_aligned))
    if astray:
        caption += f"; clock of {', '.join(astray)} not aligned: its figures are by real time, error unknown"
    return _titled(title, table, caption)


_Means = dict[str, tuple[float, float]]
"""Seconds and share by phase."""


def _means(rows: Sequence[RankStep], names: Sequence[str]) -> _Means:
    whole = sum(row.seconds for row in rows)
    sums = {name: sum(row.phases[name].seconds for row in rows if name in row.phases) for name in names}
    return {name: (total / len(rows), total / whole if whole else 0.0) for name, total in sums.items()}


def _lane_table(lanes: Sequence[str], means: dict[str, _Means], names: Sequence[str]) -> Table:
    ranks = [lane for lane in lanes if lane != "driver"]
    if len(lanes) <= MOST_LANES:
        table = _table("phase", *(column for lane in lanes for column in (lane, "share", "")))
        for name in names:
            cells = [cell for lane in lanes for cell in _lane_cells(lane, name, means[lane])]
            table.add_row(name, *cells, style=_style(name))
        return table
    table = _table("phase", f"mean of {len(ranks)}", "share", "", "fastest", "", "slowest", "")
    for name in names:
        of_rank = sorted((means[lane][name][0], lane) for lane in ranks)
        share = fmean(means[lane][name][1] for lane in ranks)
        (fast, fastest), (slow, slowest) = of_rank[0], of_rank[-1]
        mean = _share_cells(fmean(seconds for seconds, _ in of_rank), share)
        table.add_row(name, *mean, _seconds(fast), fastest, _seconds(slow), slowest, style=_style(name))
    return table


def _lane_cells(lane: str, phase: str, means: _Means) -> tuple[str, str, str]:
    if lane == "driver" and phase == IDLE:  # it waits for its workers
        return "", "", ""
    return _share_cells(*means[phase])


def _style(phase: str) -> str | None:
    return "dim" if phase in (WAIT_DRIVER, IDLE) else None


def _share_cells(seconds: float, share: float) -> tuple[str, str, str]:
    return ("", "", "") if seconds <= 0 else (_seconds(seconds), f"{share:.0%}", bar(share))


def weight_sync_table(syncs: Sequence[RankSync]) -> RenderableType:
    """The stages of a bucket, a mean over ranks and steps."""
    table = _table("stage", "seconds", "summed", "spans", "MB", "GB/s")
    for name in WEIGHT_SYNC_STAGES:
        stages = [sync.stages[name] for sync in syncs if name in sync.stages]
        if stages:
            size, seconds = sum(stage.bytes for stage in stages), sum(stage.seconds for stage in stages)
            table.add_row(
                name.partition(".")[2],
                _seconds(seconds / len(stages)),
                _seconds(fmean(stage.summed_seconds for stage in stages)),
                f"{fmean(stage.spans for stage in stages):.0f}",
                _megabytes(size / len(stages)),
                _rate(size, seconds),
            )
    size, seconds = sum(sync.bytes for sync in syncs), sum(sync.seconds for sync in syncs)
    table.add_section()
    table.add_row(
        "weight_sync",
        _seconds(seconds / len(syncs)),
        "",
        "",
        _megabytes(size / len(syncs)),
        _rate(size, seconds),
    )
    buckets, tensors = fmean(sync.buckets for sync in syncs), fmean(sync.tensors for sync in syncs)
    caption = f"{buckets:.0f} buckets, {tensors:.0f} tensors; seconds: overlapping spans once, summed: each"
    return _titled("Weight sync by stage: mean of a rank's sync", table, caption)


def memory_table(device: DeviceMemory) -> RenderableType:
    """Who held the bytes of one device when it held most, and how far its own peak is above that."""
    table = _table("owner", "at this peak", "", "own peak", "in")
    table.columns[4].justify = "left"
    for owner, size in device.at_peak_bytes.items():
        own = device.owner_peaks.get(owner)
        share = size / device.peak_bytes if device.peak_bytes else 0.0
        most, phase = (_bytes(own.bytes), own.phase or "") if own is not None else ("", "")
        table.add_row(owner, _bytes(size), bar(share), most, phase, style=None if size else "dim")
    step = f" of step {device.peak_step}" if device.peak_step is not None else ""
    title = f"Memory of {_place(device)}: peak {_bytes(device.peak_bytes)}"
    title += f", in {device.peak_phase or 'no phase'}{step}, {device.peak_at_seconds:.1f} s"
    return _titled(title, table, _residual_line(device))


def memory_phase_table(device: DeviceMemory) -> RenderableType:
    """Owners by phases, each at the phase's peak; MiB, or GiB where a GPU's memory would be too wide."""
    phases = [moment for moment in device.phases if moment.step is not None] or device.phases
    owners = [owner for owner in device.at_peak_bytes if any(moment.bytes[owner] for moment in phases)]
    unit, divisor = ("GiB", 1 << 30) if device.peak_bytes >= 10 << 30 else ("MiB", 1 << 20)
    size_of: Callable[[int], str] = lambda size: f"{size / divisor:,.1f}" if size else "·"  # noqa: E731
    table = _table("owner", *(str(number) for number in range(1, len(phases) + 1)))
    for owner in owners:
        table.add_row(owner, *(size_of(moment.bytes[owner]) for moment in phases))
    table.add_section()
    table.add_row("used", *(size_of(moment.used_bytes) for moment in phases), style="bold")
    names = "  ".join(f"{number} {moment.phase}" for number, moment in enumerate(phases, 1))
    return _titled(f"Memory of {device.lane} by phase, each at its peak, {unit}", table, names)


def allocation_table(peaks: Sequence[AllocationPeak]) -> RenderableType:
    """The exact peaks of the steps of which every allocation was kept, beside the sampled ones."""
    table = _table("device", "step", "exact peak", "sampled", "most of it", "at", "within", "lost")
    for peak in peaks:
        owner = max(peak.at_peak_bytes, key=lambda owner: peak.at_peak_bytes[owner], default="")
        table.add_row(
            peak.lane,
            _number(peak.step),
            _bytes(peak.peak_bytes),
            "" if peak.sampled_peak_bytes is None else _bytes(peak.sampled_peak_bytes),
            owner,
            f"{peak.peak_at_seconds:.3f} s",
            f"{peak.error_seconds * 1e6:.0f} µs",
            _number(peak.lost),
        )
    caption = "bytes asked of torch's and vLLM's allocators: contexts, NCCL, caches and the driver's are not among them"
    return _titled("Peaks of the steps with every allocation", table, caption)


def _place(device: DeviceMemory) -> str:
    where = " ".join(filter(None, (device.device, device.host and f"on {device.host}")))
    return f"{device.lane} ({where})" if where else device.lane


def _residual_line(device: DeviceMemory) -> str:
    """How much nobody holds, and what it cost to know."""
    found = device.residual
    if found is None:
        reasons = dict.fromkeys(device.unknown.values())
        return "\n".join(
            f"unknown, {reason}: " + ", ".join(row for row in device.unknown if device.unknown[row] == reason)
            for reason in reasons
        )
    judged = found.edges - found.unsettled_edges
    line = f"without an owner at {judged} settled phase edges: at most {_bytes(found.worst_bytes)}"
    line += f" ({found.worst_phase}; allowed {_bytes(found.worst_allowed_bytes)})" if judged else ""
    line += f", {found.edges_over_allowed} over it" if found.edges_over_allowed else ""
    line += f"; {_count(found.unsettled_edges, 'edge')} unsettled\n"
    line += f"a sample takes {found.sample_seconds * 1e3:.1f} ms"
    return line + (f", all of them {found.sample_share:.1%} of a step" if found.sample_share is not None else "")


def host_memory_table(processes: Sequence[HostMemory]) -> RenderableType:
    """What each process has in its host's memory; one line where that is the devices' memory."""
    apart = [process for process in processes if not process.is_device]
    if not apart:
        return Text("The host's memory is the devices' here: the tables above have all of it.", "dim")
    owners = list(dict.fromkeys(owner for process in apart for owner in process.peak_owner_bytes))
    table = _table("process", "resident", *owners)
    for process in apart:
        resident = process.peak_resident_bytes
        sizes = [process.peak_owner_bytes.get(owner, 0) for owner in owners]
        table.add_row(
            process.process,
            _bytes(resident) if resident is not None else "unknown",
            *(_bytes(n) if n else "" for n in sizes),
        )
    return _titled("Memory of the hosts: each process's own most, and of which owner", table)


def out_of_memory_table(failure: OutOfMemory) -> RenderableType:
    """Who held what when a process asked for more than there was, and what would have made room."""
    asked = _bytes(failure.asked_bytes) if failure.asked_bytes is not None else "memory"
    free = f", {_bytes(failure.free_bytes)} were free" if failure.free_bytes is not None else ""
    bound = f" ({failure.bound})" if failure.bound else ""
    title = f"Out of memory: {failure.process} asked for {asked}{free}{bound}, {failure.at_seconds:.1f} s"
    table = _table("owner", "held", "", f"{len(failure.before)} samples of the last 30 s: most")
    held = failure.moment.bytes if failure.moment is not None else {}
    for owner, size in sorted(held.items(), key=lambda item: -item[1]):
        most = max(moment.bytes.get(owner, 0) for moment in failure.before)
        if size or most:
            used = failure.moment.used_bytes if failure.moment is not None else 0
            table.add_row(owner, _bytes(size), bar(size / used if used else 0.0), _bytes(most))
    room = "".join(f"\nroom: {change}" for change in failure.changes[:MOST_WRONG])
    return Group(Text(title, "bold red"), Text(failure.reason, "dim"), table, Text(room.strip(), "yellow"))


def sleep_table(sleeps: Sequence[Transaction], leaks: Sequence[Leak]) -> RenderableType:
    """Sleeps and wake-ups by kind, then each that went wrong, and what grew from one sleep to the next."""
    table = _table(
        "sleep and wake-up", "times", "seconds", "expected MB", "moved MB", "total MB", "left MB", "GB/s", ""
    )
    for name in dict.fromkeys(sleep.name for sleep in sleeps):
        group = [sleep for sleep in sleeps if sleep.name == name]
        changed = [sleep.changed_bytes for sleep in group if sleep.changed_bytes is not None]
        rates = [sleep.gigabytes_per_second for sleep in group if sleep.gigabytes_per_second is not None]
        wrong = sum(sleep.verdict != "ok" for sleep in group)
        table.add_row(
            name,
            str(len(group)),
            _seconds(fmean(sleep.seconds for sleep in group)),
            *(_megabytes(fmean(sum(by.values()) for by in column)) for column in (
                [sleep.expected_bytes for sleep in group], [sleep.moved_bytes for sleep in group],
            )),
            _megabytes(fmean(changed)) if changed else "",
            _megabytes(fmean(sum(sleep.left_bytes.values()) for sleep in group)),
            f"{fmean(rates):.3g}" if rates else "",
            Text(f"{wrong} not ok", "bold red") if wrong else Text("ok", "green"),
        )  # fmt: skip
    lines = [_wrong_line(sleep) for sleep in sleeps if sleep.verdict != "ok"][:MOST_WRONG]
    lines += [
        f"{leak.lane}: a leak: {leak.owner} grew by {_bytes(leak.bytes_per_sleep)} a sleep, {leak.sleeps} in a row"
        for leak in leaks
    ]
    titled = _titled("Sleeps and wake-ups: a mean of each", table)
    return Group(titled, Text("\n".join(lines), "yellow")) if lines else titled


def _wrong_line(sleep: Transaction) -> str:
    step = f"step {sleep.step}" if sleep.step is not None else "start-up"
    return f"{sleep.lane}, {step}, {sleep.at_seconds:.1f} s, {sleep.name}: {sleep.verdict}: {sleep.reason}"


def sample_table(host: HostSamples) -> RenderableType:
    """What the sampler of a host saw, and what it could not see."""
    table = _table("sampled", "mean", "least", "most")
    groups = [("", host.counters), *host.gpus.items(), *host.processes.items()]
    for title, counters in groups:
        if title:
            table.add_row(Text(title, "bold"))
        for name, figures in counters.items():
            show = _bytes if "_bytes" in name else _number
            table.add_row(f"  {name}", show(figures.mean), show(figures.least), show(figures.most))
    lines = [f"{what}: unknown: {reason}" for what, reason in host.unavailable.items()]
    if host.sampler_cpu_share is not None:
        lines.append(f"{host.samples} samples; sampling took {host.sampler_cpu_share:.1%} of a processor")
    return _titled(f"Host {host.host}", table, "\n".join(lines))


def process_tree(processes: Sequence[ProcessFigures]) -> RenderableType:
    """Who started whom."""
    below: dict[str | None, list[ProcessFigures]] = {}
    for process in processes:
        below.setdefault(process.parent, []).append(process)
    tree = Tree(Text("Processes", "bold"), guide_style="dim")
    _grow(tree, None, below)
    return tree


def _grow(branch: Tree, parent: str | None, below: dict[str | None, list[ProcessFigures]]) -> None:
    for process in sorted(below.get(parent, []), key=lambda process: (process.rank is None, process.rank or 0)):
        _grow(branch.add(_process_line(process)), process.key, below)


_STATE_STYLES = {"alive": "cyan", "ended": "green", "died": "bold red", "stopped": "yellow", "unknown": "yellow"}


def _process_line(process: ProcessFigures) -> Text:
    state = process.state + (f" by {process.killed_by}" if process.killed_by and process.state == "died" else "")
    line = Text.assemble((process.name, "bold"), f"  pid {process.pid} on {process.host}")
    if process.device:
        line.append(f", device {process.device}")
    line.append(f"  {process.start_seconds:.1f}-{process.last_seconds:.1f} s, {process.spans:,} spans  ")
    line.append(state, _STATE_STYLES[process.state])
    if not process.clock_aligned:
        line.append("  another clock, error unknown", "yellow")
    elif process.clock_bound_seconds:
        line.append(f"  clock within ±{_short(process.clock_bound_seconds)}", "dim")
    return line


def untraced_lines(found: Sequence[Untraced]) -> RenderableType:
    """Which processes are missing, and why."""
    text = Text("Not traced", "bold yellow")
    for missing in found:
        command = " ".join(missing.command)
        pids = ", ".join(map(str, missing.pids))
        text.append(f"\n  {command[:WIDTH]} (pid {pids}): {missing.reason}", "not bold yellow")
    return text


def hook_table(hooks: Sequence[HookFigures]) -> RenderableType:
    """Every hook whose module was imported, what it fired, and what is wrong with it."""
    table = _table("hook", "fired", "")
    for name, group in groupby(hooks, lambda hook: hook.instrumentation):
        rows = list(group)
        in_common = _in_common(rows)
        table.add_row(Text(name, "bold"), "", in_common)
        if in_common is None:
            _add_hooks(table, rows)
    return _titled("Hooks", table)


def _in_common(hooks: Sequence[HookFigures]) -> Text | None:
    """What all hooks of an instrumentation have to say, if it is one thing."""
    if all(hook.state == "waiting" for hook in hooks):
        return Text("not imported in this run", "dim")
    if hooks[0].state == "skipped" and len({(hook.state, hook.reason) for hook in hooks}) == 1:
        return _remark(hooks[0])
    return None


def _add_hooks(table: Table, hooks: Sequence[HookFigures]) -> None:
    listed = [hook for hook in hooks if hook.state != "waiting"]
    if not any(hook.fired for hook in hooks):
        silent = [hook for hook in listed if hook.state == "installed"]
        listed = [hook for hook in listed if hook.state != "installed"]
        if silent:  # the program does without this framework, or it is broken: not one hook's fault
            table.add_row(f"  {_count(len(silent), 'hook')}", "0", Text("imported, nothing fired", "dim"))
    for hook in listed:
        target = hook.target.partition(":")[2] or hook.target
        table.add_row(f"  {escape(target)}", f"{hook.fired:,}", _remark(hook))
    waiting = sum(hook.state == "waiting" for hook in hooks)
    if waiting:
        waits = "waits for a module that was" if waiting == 1 else "wait for modules that were"
        table.add_row(Text(f"  {waiting} more {waits} not imported", "dim"))


def _remark(hook: HookFigures) -> Text:
    if hook.never_fired:
        return Text("never fired", "yellow")
    if hook.state == "installed":
        return Text(f"not applicable: {hook.not_applicable}" if hook.not_applicable and not hook.fired else "", "dim")
    style = {"failed": "bold red", "skipped": "yellow"}.get(hook.state, "dim")
    return Text(hook.state + (f": {hook.reason}" if hook.reason else ""), style)


def not_applicable_lines(reasons: Mapping[str, str]) -> RenderableType:
    """What a reader may look for in vain, and why."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    lines = [f"  {', '.join(group)}: {reason}" for reason, group in names.items()]
    return Text("Not applicable in this run\n", "bold").append("\n".join(lines), "not bold dim")


def open_span_table(spans: Sequence[OpenSpan]) -> RenderableType:
    """What was going on, or still is; the longest first."""
    table = _table("open", "span", "process", "thread", "")
    for column in table.columns[1:]:
        column.justify = "left"
    for span in spans[:MOST_OPEN]:
        remark = "" if span.process_state == "alive" else f"the process {span.process_state}"
        style = "bold yellow" if span.is_long else None
        table.add_row(
            f"{span.open_seconds:,.1f} s", escape(span.name), f"{escape(span.process)} (pid {span.pid})",
            escape(span.thread), remark, style=style,
        )  # fmt: skip
    caption = f"{len(spans) - MOST_OPEN} more: see --json" if len(spans) > MOST_OPEN else ""
    return _titled("Open spans", table, caption)


def loss_lines(summary: Summary) -> Text:
    """What the Recording lacks, and how far its clocks can be trusted."""
    lines = [_loss_line(loss) for loss in summary.losses]
    text = Text("Nothing was lost." if not lines else "\n".join(lines), "green" if not lines else "yellow")
    for other in (clock for clock in summary.clocks if not clock.is_reference):
        text.append(f"\n{_clock_line(other)}", "dim" if other.aligned else "yellow")
    return text


def _clock_line(clock: ClockFigures) -> str:
    whose = f"Clock of {', '.join(clock.hosts)}"
    if clock.bound_seconds is None:
        return (
            f"{whose}: not aligned: its times were shifted by real time only, how far they are off is unknown; do not"
            " compare them with others (`rltrace collect` measures it while the cluster is up)."
        )
    drift = "drift not measured" if clock.drift_ppm is None else f"drift {clock.drift_ppm:+.1f} ppm"
    return f"{whose}: aligned within ±{_short(clock.bound_seconds)}, {drift}, {_count(clock.readings, 'reading')}."


def _short(seconds: float) -> str:
    """A small time in milliseconds, microseconds below one of them."""
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _loss_line(loss: Losses) -> str:
    counts = [
        (loss.lost_events, "events could not be written"),
        (loss.torn_records, "records were cut when it died"),
        (loss.orphan_records, "ends or arrows belong to no span"),
        (loss.dropped_segments, f"segments ({_bytes(loss.dropped_bytes)}) were dropped to keep to max_bytes"),
    ]
    return f"{loss.process_key}: " + ", ".join(f"{count:,} {what}" for count, what in counts if count)


def _fullest(devices: Sequence[DeviceMemory]) -> list[DeviceMemory]:
    fullest = sorted(devices, key=lambda device: -device.peak_bytes)[:MOST_DEVICES]
    return [device for device in devices if device in fullest]


def bar(share: float, width: int = BAR) -> str:
    """A bar of `width` columns for 1."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for at, column in enumerate(columns):
        # bars and remarks have no heading, or say what they are next to
        table.add_column(column, justify="left" if at == 0 or not column else "right", no_wrap=at == 0)
    return table


def _titled(title: str, table: Table, caption: str = "") -> RenderableType:
    below = [Text(caption, "dim")] if caption else []
    return Group(Text(title, "bold"), table, *below)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 100 else f"{seconds:.3f}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if not isfinite(value):
        return str(value)
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _megabytes(size: float) -> str:
    """10^6 bytes, to read beside GB/s."""
    return f"{size / 1e6:,.2f}" if size else ""


def _rate(size: int, seconds: float) -> str:
    return f"{size / 1e9 / seconds:.3g}" if size and seconds > 0 else ""


def _count(number: int, what: str) -> str:
    plural: Callable[[str], str] = lambda word: word + ("es" if word.endswith("s") else "s")  # noqa: E731
    return f"{number:,} {what if number == 1 else plural(what)}"
