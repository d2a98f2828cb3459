"""Figures as tables for a terminal: one file per noun, one function per table.

In: values of `analysis`. Out: what rich prints. Nothing is computed here. The first screen says what is wrong, where
the seconds and the bytes of a step went, and how things were measured. It names what it leaves out.

The table of phases is in `phases.py`: `steady_table` has all ranks together, `lane_tables` one column per rank;
`process_phases.py` has processes without a rank. `figures.py` writes a figure, `fit.py` fits a table into the terminal.

To add a section, write its function in the file of its noun, and one line in `SECTIONS` below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from rich.console import Console, Group, RenderableType
from rich.text import Text

from rltrace.analysis.fates import fates, having
from rltrace.analysis.findings import Why
from rltrace.analysis.folding import FEW_RANKS, folded, kept, steps_apart
from rltrace.analysis.idle import FIRST_STEP, RUN, STARTUP, STEADY_STEP
from rltrace.analysis.memory import DeviceMemory
from rltrace.analysis.processes import ProcessFigures
from rltrace.analysis.requests import Requests
from rltrace.analysis.steady import Spread
from rltrace.analysis.summary import Run, Summary
from rltrace.cli.tables import figures
from rltrace.cli.tables.apart import apart_line, folded_line
from rltrace.cli.tables.findings import largest
from rltrace.cli.tables.fit import WIDTH, console, visible_figures
from rltrace.cli.tables.gpu_work import gpu_work_line, gpu_work_missed_lines, gpu_work_table
from rltrace.cli.tables.hooks import hook_lines, hook_table, not_applicable_lines
from rltrace.cli.tables.idle import idle_line, idle_tables
from rltrace.cli.tables.inferred import inferred_line, inferred_table
from rltrace.cli.tables.memory import (
    alike_lines,
    allocation_line,
    allocation_table,
    allocations_missed_line,
    device_table,
    fullest_table,
    host_memory_table,
    is_alike,
    is_without_gpu,
    legend,
    out_of_memory_line,
    out_of_memory_table,
    phase_table,
)
from rltrace.cli.tables.origin import made_with, when_and_where
from rltrace.cli.tables.phases import (
    STARTUP_IDLE,
    has_phases_by_step,
    lane_tables,
    phases_by_step,
    steady_table,
    steady_title,
    steady_words,
)
from rltrace.cli.tables.problems import clock_lines, problems
from rltrace.cli.tables.processes import bare_line, process_line, process_tree, sample_table
from rltrace.cli.tables.requests import request_line, request_table
from rltrace.cli.tables.rollout import rollout_line, rollout_table
from rltrace.cli.tables.spans import FEW, MOST_OPEN, collection_line, hook_span_table, open_span_table, own_span_table
from rltrace.cli.tables.steps import by_lane, process_table, step_count, step_line, step_table
from rltrace.cli.tables.sync import in_steady, sleep_line, sleep_table, sync_line, sync_table
from rltrace.events import SAMPLER
from rltrace.read.selection import ALL as ALL_OF_IT
from rltrace.read.selection import Selection

__all__ = ["WIDTH", "console", "hook_table", "show", "step_table"]

COMMAND_LETTERS = 60
"""How many characters of the command the first screen shows, in whole words."""

UNMARKED_PHASES = '`with rltrace.phase("reward")` inside of a step shows where its seconds go'


def show(
    summary: Summary, screen: Console, *, whole: bool = False, why: Why | None = None, selection: Selection = ALL_OF_IT
) -> None:
    """Print a Recording's figures.

    Args:
        summary: Figures of the Recording.
        screen: Where to print.
        whole: Print everything; otherwise what answers the first questions, with equal ranks as one.
        why: What costs most, which comes before the figures.
        selection: What of the run was chosen: nothing of that is folded.
    """
    summary = visible_figures(summary)
    few = folded(summary, kept(summary, selection, FEW_RANKS))
    costs = largest(why) if why is not None else None
    screen.print(header(summary.run, summary, whole=whole))
    wrong, sections = (_drawn(of, summary, few, whole) for of in (WRONG, SECTIONS))
    for drawn in (*wrong, *([costs] if costs else []), *sections):
        screen.print()
        screen.print(drawn)


def _drawn(sections: Iterable[Section], summary: Summary, few: Summary, whole: bool) -> Iterator[RenderableType]:
    for section in sections:
        if section.screens in (BOTH, ALL if whole else FIRST):
            yield from section.draw(few if section.is_folded else summary, whole=whole)


def _wrong(summary: Summary, *, whole: bool) -> Iterator[RenderableType]:
    """Return what must be known before any figure."""
    shown = summary.out_of_memory if whole else summary.out_of_memory[:1]
    yield from map(out_of_memory_table, shown)
    again = [Text(out_of_memory_line(failure), "bold red") for failure in summary.out_of_memory[len(shown) :]]
    if wrong := again + (problems(summary, None) if whole else problems(summary)):
        yield Group(*wrong)


def _open_spans(summary: Summary, *, whole: bool) -> Iterator[RenderableType]:
    if summary.open_spans and not summary.complete:
        yield open_span_table(summary.open_spans, MOST_OPEN if whole else FEW)


def _seconds(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    """Return the seconds of a step; of everything if there are no steps."""
    table = steady_table(summary)
    if table is not None:
        yield table
    elif summary.phases:
        yield from lane_tables("Phases", summary.phases)
    elif summary.steady is not None:
        advice = "" if _is_damaged(summary) else f"; {UNMARKED_PHASES}"
        yield Text(f"{steady_title(summary, summary.steady)}: {_spread(summary.steady.seconds)}{advice}")
    elif not summary.steps and _is_damaged(summary):
        yield Text("No step is in what can be read of this Recording; see above what was lost", "dim")
    elif not summary.steps and summary.complete and any(process.role != SAMPLER for process in summary.processes):
        yield Text(f'No step is marked: mark each with `with rltrace.span("step", step=n)`; {UNMARKED_PHASES}', "dim")
    if len(by_lane(summary.steps)) > 1:
        yield process_table(summary.steps)


def _is_damaged(summary: Summary) -> bool:
    """Return whether a step or a phase may have been recorded and lost."""
    return bool(summary.losses or summary.unidentified)


def _spread(length: Spread) -> str:
    between = figures.between_seconds(length.least_seconds, length.most_seconds)
    return figures.with_unit(figures.seconds(length.mean_seconds)) + (f" ({between})" if "-" in between else "")


def _in_short(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    """Return one line for each thing of which `--all` has a table, and what it shows besides."""
    named = [section.name for section in SECTIONS if section.name and section.has(summary)]
    yield Group(*_lines(summary), Text(f"--all shows {', '.join(named)}", "dim"))


def _lines(summary: Summary) -> Iterator[RenderableType]:
    steps = step_line(summary.steps) if len(by_lane(summary.steps)) == 1 else None
    sleeps = sleep_line(summary.sleeps) if summary.sleeps else None
    if steps is not None or sleeps is not None:
        yield Text(" · ").join(filter(None, [steps, sleeps]))
    if (line := inferred_line(summary)) is not None:
        yield line
    if (line := idle_line(summary)) is not None:
        yield line
    if summary.gpu_work:
        yield gpu_work_line(summary.gpu_work)
    if summary.weight_sync:
        yield sync_line(in_steady(summary.weight_sync, summary.steady))
    if (line := rollout_line(summary)) is not None:
        yield line
    if (line := request_line(summary.requests)) is not None:
        yield line
    if (line := collection_line(summary)) is not None:
        yield line
    if summary.allocations:
        yield allocation_line(summary.allocations)
    if summary.processes:
        yield process_line(summary.processes, fates(summary))
    yield from _bare(summary)
    if summary.hooks:
        yield hook_lines(summary.hooks)
    yield from _clocks(summary)


def _all_seconds(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    """Return the steady step, each lane's, the first step's and the start-up's, each with its idle time."""
    if (table := steady_table(summary, whole=True)) is not None:
        yield table
    found = summary.steady
    if found is not None:
        over = [row for row in summary.phases if row.step is not None and row.finished]
        yield from lane_tables(f"Phases by rank, {steady_words(found)}", [row for row in over if row.steady])
        yield from idle_tables(steady_words(found), STEADY_STEP, summary)
        yield from lane_tables(f"Phases by rank, step {found.first_step}", [row for row in over if not row.steady])
        yield from idle_tables(f"step {found.first_step}", FIRST_STEP, summary)
    if startup := [row for row in summary.phases if row.step is None]:
        if summary.steps:
            is_startup = not summary.earlier_steps_lost
            title = "Start-up, before the first step" if is_startup else "Before the first step that is left"
            yield from lane_tables(title, startup, STARTUP_IDLE if is_startup else "")
        else:
            yield from lane_tables("Phases", startup)
        yield from idle_tables("before that" if summary.earlier_steps_lost else "start-up", STARTUP, summary)
        yield from idle_tables("", RUN, summary)


def _steps(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    own = by_lane(summary.steps)
    apart = {one.number for one in steps_apart(summary)}
    yield from (step_table(steps, f" of {lane}" if len(own) > 1 else "", apart) for lane, steps in own.items())


def _inferred(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    if summary.inferred:
        yield inferred_table(summary)


def _phases_by_step(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    if (by_step := phases_by_step(summary)) is not None:
        yield by_step


def _fullest(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    if summary.memory:
        yield fullest_table(summary.memory)


def _apart(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    if (line := apart_line(summary)) is not None:
        yield line


def _folded(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    yield from map(folded_line, summary.folded)


def _your_spans(summary: Summary, *, whole: bool) -> Iterator[RenderableType]:
    if summary.own_spans:
        yield own_span_table(summary, None if whole else FEW)


def _automatic_spans(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    if summary.hook_spans:
        yield hook_span_table(summary)


def _automatic_spans_alone(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    """Return automatic spans: in a program without phases there is nothing else to see."""
    if summary.hook_spans and not summary.phases:
        yield hook_span_table(summary, FEW)


def _gpu_work(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    if summary.gpu_work:
        yield gpu_work_table(summary.gpu_work)
    if summary.gpu_work_missed:
        yield gpu_work_missed_lines(summary.gpu_work_missed)


def _weight_sync(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    if summary.weight_sync:
        yield sync_table(in_steady(summary.weight_sync, summary.steady))


def _rollout(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    if (found := summary.rollout) is not None:
        are_steady = summary.steady is not None and bool(found.steps)
        yield rollout_table(found, steady_words(summary.steady) if are_steady and summary.steady else "")


def _requests(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    found = summary.steady
    are_steady = found is not None and any(row.step in found.steps for row in summary.requests_by_step)
    when = steady_words(found) if found is not None and are_steady else ""
    yield from (request_table(requests, when) for requests in _with_stages(summary))


def _with_stages(summary: Summary) -> Iterator[Requests]:
    """Yield the requests that have more than one stage: of one, nothing can be said but its length."""
    yield from (requests for requests in summary.requests if len(requests.stages) != 1)


def _memory(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    shown: list[DeviceMemory] = []
    for device in summary.memory:
        like = next((one for one in shown if is_alike(device, one)), None)
        if like is not None:
            yield alike_lines(device, like)
            continue
        shown.append(device)
        yield device_table(device)
        yield phase_table(device)
    if said := legend(summary.memory):
        yield said


def _allocations(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    if summary.allocations:
        yield allocation_table(summary.allocations)
        for missed in summary.allocations_missed:
            if is_without_gpu(missed, summary.allocations):
                yield Text(allocations_missed_line(missed), "dim")


def _hosts(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    yield from map(sample_table, summary.samples)
    if summary.host_memory:
        yield host_memory_table(summary.host_memory)


def _sleeps(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    if summary.sleeps:
        yield sleep_table(summary.sleeps, summary.leaks, summary.steady)


def _processes(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    if summary.processes:
        yield process_tree(summary.processes, fates(summary))
    yield from _bare(summary)


def _bare(summary: Summary) -> Iterator[Text]:
    """Return processes that had nothing to trace."""
    if bare := [process for process in summary.untraced if not process.missed]:
        yield Text(bare_line(bare), "dim")


def _hooks(summary: Summary, **_: bool) -> Iterator[RenderableType]:
    if summary.hooks:
        yield hook_table(summary.hooks)
        # Only where ranks are known is it an RL run, whose reader misses them.
        if summary.not_applicable and any(process.rank is not None for process in summary.processes):
            yield not_applicable_lines(summary.not_applicable)


def _clocks(summary: Summary, **_: bool) -> Iterator[Text]:
    yield from (Text(line, "dim") for line in clock_lines(summary.clocks))


Screens = Literal["first", "all", "both"]
FIRST: Screens
ALL: Screens
BOTH: Screens
FIRST, ALL, BOTH = "first", "all", "both"


class Draw(Protocol):
    """Draws a section, or nothing if the Recording does not have it."""

    def __call__(self, summary: Summary, *, whole: bool) -> Iterable[RenderableType]:
        """Return what is printed, each part after an empty line."""


class Section(NamedTuple):
    """A section of the summary."""

    name: str
    """What the last line of the first screen calls it if only `--all` shows it; empty if it is not worth a word."""
    draw: Draw
    screens: Screens
    has: Callable[[Summary], object] = bool
    """Of a section with a name: whether there is anything to draw, told without drawing it."""
    is_folded: bool = False
    """Whether it has so much of each rank that those that are alike are left out where there are many."""


WRONG = (
    Section("", _wrong, BOTH),
    Section("", _open_spans, BOTH),
)
"""What must be known before any figure; what costs most comes next."""

SECTIONS = (
    Section("", _seconds, FIRST),
    Section("each rank and its idle time", _all_seconds, ALL, lambda summary: summary.phases),
    Section("each step", _steps, ALL, lambda summary: summary.steps),
    Section("what was inferred", _inferred, ALL, lambda summary: summary.inferred),
    Section("phases by step", _phases_by_step, ALL, has_phases_by_step),
    Section("", _apart, FIRST),
    Section("", _fullest, FIRST),
    Section("", _your_spans, BOTH),
    Section("", _automatic_spans_alone, FIRST),
    Section("automatic spans", _automatic_spans, ALL, lambda summary: summary.hook_spans),
    Section("GPU work", _gpu_work, ALL, lambda summary: summary.gpu_work or summary.gpu_work_missed),
    Section("weight sync", _weight_sync, ALL, lambda summary: summary.weight_sync),
    Section("rollout", _rollout, ALL, lambda summary: summary.rollout),
    Section("", _requests, ALL),
    Section("", _folded, ALL, is_folded=True),
    Section("memory", _memory, ALL, lambda summary: summary.memory, is_folded=True),
    Section("every allocation", _allocations, ALL, lambda summary: summary.allocations),
    Section("hosts", _hosts, ALL, lambda summary: summary.samples or summary.host_memory, is_folded=True),
    Section("sleeps", _sleeps, ALL, lambda summary: summary.sleeps),
    Section("processes", _processes, ALL, lambda summary: summary.processes or any(_bare(summary)), is_folded=True),
    Section("hooks", _hooks, ALL, lambda summary: summary.hooks),
    Section("", _clocks, ALL),
    Section("", _in_short, FIRST),
)
"""The summary from top to bottom; a new section is one line here."""


def header(run: Run, summary: Summary, *, whole: bool = False) -> RenderableType:
    """Return what was run, and whether its Recording is whole."""
    ranks = {row.rank for row in summary.processes if row.rank is not None}
    facts = [
        step_count(summary.steps) if summary.steps else "no steps",
        f"{run.seconds:.1f} s",
        *([figures.count(len(ranks), "rank")] if ranks else []),
        figures.count(sum(process.role != SAMPLER for process in summary.processes), "process"),
    ]
    line = Text.assemble(" · ".join(facts), " · ", _state(run, summary))
    if not (summary.losses or summary.unidentified) and any(process.role != SAMPLER for process in summary.processes):
        line.append(" · nothing lost", "green")
    command = " ".join(run.command if whole else _few_words(run.command))
    place = Text.assemble((run.path, "bold"), *(f" · {fact}" for fact in when_and_where(run)), overflow="fold")
    made = [Text(made_with(run), "dim")] if whole and made_with(run) else []
    return Group(line, place, Text(command, "dim", overflow="fold"), *made)


def _few_words(command: Sequence[str]) -> list[str]:
    """Return the first words of a command, and how many follow."""
    kept = 0
    while kept < len(command) and len(" ".join(command[: kept + 1])) <= COMMAND_LETTERS:
        kept += 1
    kept = max(kept, 1)
    more = len(command) - kept
    return [*command[:kept], f"... and {figures.count(more, 'word')} more"] if more else list(command)


def _state(run: Run, summary: Summary) -> Text:
    if died := having(summary, "died"):
        return Text(_died(died), "bold red")
    if run.exit_code and run.interrupted_by is not None:
        return Text(f"interrupted by {run.interrupted_by}", "yellow")
    if run.exit_code:
        return Text(f"failed with exit code {run.exit_code}", "bold red")
    if any(process.state == "stopped" for process in summary.processes):
        return Text("stopped", "yellow")
    if all(process.role == SAMPLER for process in summary.processes):
        return Text("no process has recorded anything" + (" yet" if run.is_live else ""), "yellow")
    if gone := having(summary, "in doubt"):
        who = f"{gone[0].name} (pid {gone[0].pid})" if len(gone) == 1 else figures.count(len(gone), "process")
        return Text(f"{who} is gone", "yellow")
    if summary.complete:
        return Text("ended, with losses", "yellow") if summary.losses else Text("complete", "green")
    return Text("running", "cyan") if run.is_live else Text("incomplete", "yellow")


def _died(died: Sequence[ProcessFigures]) -> str:
    """Name the process that died; several are only counted, because a line below names them."""
    if len(died) > 1:
        causes = sorted({process.killed_by for process in died if process.killed_by})
        return f"{len(died)} died" + (f" ({', '.join(causes)})" if causes else "")
    (process,) = died
    how = f"was killed by {process.killed_by}" if process.killed_by else "died"
    return f"{process.name} (pid {process.pid}) {how}"
