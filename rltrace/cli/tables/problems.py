"""What is wrong with a run or with its Recording, one line each, the worst first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from rltrace.analysis.clocks import ClockFigures
from rltrace.analysis.fates import having
from rltrace.analysis.open_spans import OpenSpan
from rltrace.analysis.processes import ProcessFigures
from rltrace.analysis.summary import Losses, Summary
from rltrace.cli.tables import figures
from rltrace.cli.tables.hooks import failures, left_out
from rltrace.cli.tables.memory import allocations_missed_line, is_without_gpu, missed_line
from rltrace.cli.tables.processes import untraced_line
from rltrace.cli.tables.steps import by_lane
from rltrace.cli.tables.sync import leak_lines, wrong_line
from rltrace.events import NO_GPU, NO_TORCH

FEW = 3
"""How many of each kind are shown; `--all` shows every one."""
MOST_CLOCKS = 4
"""With more clocks, all share a line."""
USUALLY_INCONSISTENT = 0.05
"""Share of the phase boundaries that are not consistent in a healthy run."""
HELP = "docs/memory-ledger.md#when-a-boundary-is-consistent"
MISFIT = "malformed (a name that is not text, a value that is not a number, or an arrow without a direction)"
_BAD, _DOUBTFUL = "bold red", "yellow"


def problems(summary: Summary, most: int | None = FEW) -> list[Text]:
    """Return everything that a reader must know before any figure; no lines mean that all is well."""
    kinds = (
        _deaths, _gone, _aborted, _errors, _hangs, _failed_hooks, _left_out,
        _memory, _allocations, _kernels, _losses, _removed, _unidentified, _unsealed, _sleeps, _untraced, _ranks,
        _clocks,
    )  # fmt: skip
    styles = (_BAD, _DOUBTFUL, _BAD, _DOUBTFUL, _DOUBTFUL, _BAD, *[_DOUBTFUL] * 12)
    found: list[Text] = []
    for kind, style in zip(kinds, styles, strict=True):
        lines = list(kind(summary))
        found += [Text(line, style) for line in lines[:most]]
        more = len(lines) - len(lines[:most])
        found += [Text(f"... and {more} more of these: see --all", style)] if more else []
    return found


def _deaths(summary: Summary) -> Iterator[str]:
    for processes, doing in _alike(having(summary, "died"), summary):
        yield death_line(processes, doing)
    if silent := len(having(summary, "silent")):
        yield f"{figures.count(silent, 'process')} died before recording anything"


def _gone(summary: Summary) -> Iterator[str]:
    for processes, doing in _alike(having(summary, "in doubt"), summary):
        yield f"{_how_it_went(processes, 'is gone', doing)}: nobody saw how it ended"


def _alike(found: Sequence[ProcessFigures], summary: Summary) -> Iterator[tuple[list[ProcessFigures], str | None]]:
    """Return processes of one name that ended alike, and what they were doing; those in the middle of something come
    first."""
    longest: dict[str, OpenSpan] = {}
    for span in summary.open_spans:
        longest.setdefault(span.process_key, span)
    alike: dict[tuple[str, str | None, str | None], list[ProcessFigures]] = {}
    for process in sorted(found, key=lambda process: process.key not in longest):
        inside = longest.get(process.key)
        doing = inside.name if inside is not None else None
        alike.setdefault((process.name, process.killed_by, doing), []).append(process)
    yield from ((processes, doing) for (_, _, doing), processes in alike.items())


def death_line(alike: Sequence[ProcessFigures], inside: str | None) -> str:
    """Return who died, how, and what it was doing; processes of one name that died alike share a line."""
    killed_by = alike[-1].killed_by
    return _how_it_went(alike, f"was killed by {killed_by}" if killed_by else "died", inside)


def _how_it_went(alike: Sequence[ProcessFigures], went: str, inside: str | None) -> str:
    last = max(alike, key=_over_seconds)
    doing = f" in {inside}" if inside is not None else ""
    whose = figures.pids([process.pid for process in alike])
    return f"{last.name} ({whose}) {went}{doing}, at {_over_seconds(last):.1f} s"


def _over_seconds(process: ProcessFigures) -> float:
    return process.last_seconds if process.gone_seconds is None else process.gone_seconds


def _aborted(summary: Summary) -> Iterator[str]:
    is_of_many = len(by_lane(summary.steps)) > 1
    for step in summary.steps:
        whose = f" of {step.lane}" if is_of_many else ""
        if step.error is not None:
            at_seconds = step.start_seconds + step.seconds
            said = _said(step.error_message)
            yield f"Step {step.step}{whose} was aborted by {step.error}, at {at_seconds:.1f} s{said}"
        elif step.left_open_at_seconds is not None:
            yield f"Step {step.step}{whose} had not ended when its process did, at {step.left_open_at_seconds:.1f} s"


def _errors(summary: Summary) -> Iterator[str]:
    for found in summary.errors:
        phase = f", phase {found.phase}" if found.phase not in (None, found.name) else ""
        whose = found.process if found.processes == 1 else f"{found.processes} x {found.process}"
        steps = f", step{'' if len(found.steps) == 1 else 's'} {figures.ranges(found.steps)}" if found.steps else ""
        times = f"{found.count:,} times, first at " if found.count > 1 else ""
        said = _said(found.message)
        yield f"{found.error} in {found.name} of {whose}{phase}{steps}: {times}{found.first_seconds:.1f} s{said}"


def _said(message: str | None) -> str:
    """What an exception said, behind everything else: it may be long."""
    return "" if message is None else f": {message}"


def _hangs(summary: Summary) -> Iterator[str]:
    stuck = [span for span in summary.open_spans if span.is_stuck]
    for span in reversed(stuck):  # what began last: the others wait for it
        where = f"{span.process} (pid {span.pid}) has been in {span.name}"
        yield f"{where} for {span.open_seconds:,.0f} s, and the run stands still"


def _failed_hooks(summary: Summary) -> Iterator[str]:
    for reason, hooks in failures(summary.hooks).items():
        yield f"{figures.count(len(hooks), 'hook')} failed: {reason}: {', '.join(hooks)}"


def _left_out(summary: Summary) -> Iterator[str]:
    yield from (f"not traced: {name}: {reason}" for name, reason in left_out(summary.hooks).items())


def _memory(summary: Summary) -> Iterator[str]:
    judged = [(device.lane, device.residual) for device in summary.memory if device.residual is not None]
    over = {lane: found.boundaries_over_limit for lane, found in judged}
    unsure = {lane: found.inconsistent_boundaries for lane, found in judged}
    boundaries = sum(found.boundaries for _, found in judged)
    if sum(over.values()):
        yield _at_boundaries(over, boundaries, "have more unaccounted bytes than the limit")
    if sum(unsure.values()) > USUALLY_INCONSISTENT * boundaries:
        yield f"{_at_boundaries(unsure, boundaries, 'are inconsistent, so not judged')}: what helps is in {HELP}"


def _at_boundaries(many: Mapping[str, int], boundaries: int, what: str) -> str:
    whose = figures.ranks([lane for lane, number in many.items() if number])
    return f"Memory: {sum(many.values()):,} of {boundaries:,} phase boundaries {what} ({whose})"


def _allocations(summary: Summary) -> Iterator[str]:
    for missed in summary.allocations_missed:
        if not is_without_gpu(missed, summary.allocations):
            yield allocations_missed_line(missed)


def _kernels(summary: Summary) -> Iterator[str]:
    """Yield why kernels of chosen steps are missing; a process without any, beside others that have them, is no
    problem."""
    for missed in summary.kernels_missed:
        if missed.reason not in (NO_GPU, NO_TORCH):
            yield missed_line("kernels", "recorded", missed)


def _losses(summary: Summary) -> Iterator[str]:
    processes = {process.key: process for process in summary.processes}
    for loss in summary.losses:
        yield _loss_line(loss, processes.get(loss.process_key))
    if damaged := [processes[loss.process_key] for loss in summary.losses if loss.damaged_segments]:
        records = sum(process.spans + process.samples for process in damaged)
        share = records / max(1, sum(process.spans + process.samples for process in summary.processes))
        whose = ", ".join(dict.fromkeys(process.name for process in damaged))
        yield f"Figures may be wrong: {share:.0%} of all events come from {whose}, which has damaged segments"


def _removed(summary: Summary) -> Iterator[str]:
    if not summary.removed:
        return
    spans = figures.count(sum(gone.spans for gone in summary.removed), "span")
    firsts = [gone.first_step for gone in summary.removed if gone.first_step is not None]
    lasts = [gone.last_step for gone in summary.removed if gone.last_step is not None]
    where = "" if summary.earlier_steps_lost or not summary.steps else " before the first step"
    if firsts:
        where = f" in steps {figures.between(str(min(firsts)), str(max(lasts)))}"
    many_left = sum(gone.spans_left_on_host for gone in summary.removed)
    if not many_left:
        yield f"In brief, to keep to the disk budget: of {spans}{where} only totals are left"
        return
    all_of = "the rest is" if many_left == sum(gone.spans for gone in summary.removed) else f"{many_left:,} are"
    yield f"In brief: of {spans}{where} only totals are here; {all_of} on their hosts: `rltrace collect --steps`"


def _unidentified(summary: Summary) -> Iterator[str]:
    killed = [process for process in summary.unidentified if not process.unreadable_events]
    if killed:
        whose = f"{figures.count(len(killed), 'process')} ({figures.pids([process.pid or 0 for process in killed])})"
        yield f"{whose} died as they began to record: what they did is unknown"
    for process in summary.unidentified:
        if process.unreadable_events:
            events = figures.count(process.unreadable_events, "event")
            yield f"Lost: {events} of {process.process_key}, whose identity is missing, so that its clock is unknown"


def _unsealed(summary: Summary) -> Iterator[str]:
    processes = {process.key: process for process in summary.processes}
    of_dead = [found for found in summary.unsealed if processes[found.process_key].state != "alive"]
    if of_dead:
        whose = ", ".join(dict.fromkeys(processes[found.process_key].name for found in of_dead))
        segments, size = (sum(numbers) for numbers in zip(*((f.segments, f.bytes) for f in of_dead), strict=True))
        yield (
            f"{whose} did not close {figures.count(segments, 'segment')} ({figures.size(size)}): without a checksum, "
            "damage there may go unnoticed"
        )


def _loss_line(loss: Losses, process: ProcessFigures | None) -> str:
    if process is None:
        return f"Lost from {loss.process_key}: {figures.count(loss.damaged_lines, 'line')} damaged"
    dropped = f"({figures.size(loss.dropped_bytes)}) dropped to keep within the bound of its size"
    counts = [
        (loss.lost_events - loss.misfit_records, "event", "that could not be written"),
        (loss.misfit_records, "record", MISFIT),
        (loss.unfit_values, "value", "that cannot be true"),
        (loss.damaged_lines, "line", "about itself damaged"),
        (loss.damaged_segments, "segment", "damaged or missing"),
        (loss.torn_records, "record", "damaged" if process.state == "ended" else "cut when it died"),
        (loss.orphan_records - loss.stray_arrows, "record", "without its span"),
        (loss.stray_arrows, "arrow", "outside of any span"),
        (loss.dropped_segments, "segment", dropped),
    ]
    said = ", ".join(f"{figures.count(many, what)} {how}" for many, what, how in counts if many)
    return f"Lost from {process.name}: {said}"


def _sleeps(summary: Summary) -> Iterator[str]:
    yield from (wrong_line(sleep) for sleep in summary.sleeps if sleep.verdict != "ok")
    yield from leak_lines(summary.leaks)


def _untraced(summary: Summary) -> Iterator[str]:
    yield from (f"not traced: {untraced_line(missing)}" for missing in summary.untraced if missing.missed)


def _ranks(summary: Summary) -> Iterator[str]:
    run = summary.run
    if run.ranks_missing and run.ranks_started is not None and not run.is_live:
        yield (
            f"{run.ranks_missing:,} of {figures.count(run.ranks_started, 'rank')} are not in this Recording; bring the "
            "folders of their hosts here with `rltrace collect`"
        )


def _clocks(summary: Summary) -> Iterator[str]:
    yield from (clock_line(clock) for clock in summary.clocks if not clock.is_reference and not clock.aligned)


def clock_lines(clocks: Sequence[ClockFigures]) -> list[str]:
    """Return how far the times of clocks that were aligned can be trusted: of each, or of all if they are many."""
    aligned = [clock for clock in clocks if not clock.is_reference and clock.aligned]
    known = [clock for clock in aligned if clock.bound_seconds is not None]
    if len(aligned) <= MOST_CLOCKS or not known:
        return [clock_line(clock) for clock in aligned]
    worst = max(known, key=lambda clock: clock.bound_seconds or 0.0)
    drifts = [clock.drift_ppm for clock in aligned if clock.drift_ppm is not None]
    drift = f"drift {min(drifts):+.1f} to {max(drifts):+.1f} ppm" if drifts else "drift not measured"
    readings = figures.between(*(f"{of(clock.readings for clock in aligned):,}" for of in (min, max)))
    bound = figures.short(worst.bound_seconds or 0.0)
    return [
        f"Clocks of {len(aligned):,} other hosts: aligned within ±{bound} ({', '.join(worst.hosts)} has the largest "
        f"bound), {drift}, {readings} readings each."
    ]


def clock_line(clock: ClockFigures) -> str:
    """Return how far a clock's times can be trusted."""
    whose = f"Clock of {', '.join(clock.hosts)}"
    if clock.bound_seconds is None:
        return (
            f"{whose}: not aligned. Its times were shifted by real time, with an unknown error: do not compare them "
            "with others. `rltrace collect` measures the clock while a Ray cluster is up."
        )
    drift = "drift not measured" if clock.drift_ppm is None else f"drift {clock.drift_ppm:+.1f} ppm"
    within = f"aligned within ±{figures.short(clock.bound_seconds)}"
    jumps = f", {figures.count(clock.jumps, 'jump')}" if clock.jumps else ""
    return f"{whose}: {within}, {drift}, {figures.count(clock.readings, 'reading')}{jumps}."
