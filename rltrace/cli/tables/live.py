"""What a run does now, as a screen of any size: from 80 columns and one rank to a thousand ranks, grouped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from rltrace.analysis.findings import Why
from rltrace.analysis.live import SILENT_SECONDS, DeviceNow, ErrorNow, LaneNow, Now, StackNow, StepNow
from rltrace.cli.tables import figures
from rltrace.cli.tables.findings import largest
from rltrace.cli.tables.fit import visible_figures
from rltrace.events import OWNER_COLORS, OWNERS

FEW = 8
"""So many ranks have a row each."""

ODD_SHARE = 0.05
"""Ranks that do what no more than this share of all does are named."""

STEPS, ERRORS = 6, 4
"""How many of the last ones are shown."""

WHO_LETTERS = 24
LEAST_FOUND = 3
"""Lines of findings that stay: the first one is a sentence of up to three lines of 80 columns."""
OTHER = "other"
"""What is used of a device and no owner has said so yet."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""Of owners, where there are no colours."""


class Heading(NamedTuple):
    """What is said of the view itself."""

    path: str
    at: str
    """The time of day."""
    every_seconds: float
    is_screen: bool


class Findings(NamedTuple):
    """What bounds a step, as it was computed last."""

    why: Why
    at: str
    steps: str


class Section(NamedTuple):
    """Lines that belong together."""

    title: Text | None
    lines: list[Text]
    least: int
    """So many of them stay, however low the terminal is."""


class LiveScreen:
    """What a run does now, as high and as wide as there is room."""

    def __init__(self, now: Now, heading: Heading, findings: Findings | None, no_findings: str) -> None:
        self.now: Now = visible_figures(now)
        self.heading = visible_figures(heading)
        self.findings = findings
        self.no_findings = no_findings

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        has_colors = console.color_system is not None and not console.no_color
        width, height = options.max_width, options.height or console.height if self.heading.is_screen else None
        sections = [section for section in self._sections(console, width, has_colors) if section.lines]
        for line in _fitted(sections, height):
            line.no_wrap, line.overflow = True, "ellipsis"
            line.truncate(width, overflow="ellipsis")
            yield line

    def _sections(self, console: Console, width: int, has_colors: bool) -> Iterator[Section]:
        now = self.now
        yield Section(None, [*_head(now, self.heading, width)], 3)
        if now.is_still:
            stands = f"Nothing has begun or ended for {_long(now.still_seconds)}. Where each thread stands"
            yield Section(Text(stands, "bold red"), [*_stacks(now.stacks)], 4)
        yield Section(_title("Ranks" if any(lane.rank is not None for lane in now.lanes) else "Processes"), [
            *_lanes(now.lanes)
        ], 3)  # fmt: skip
        yield Section(_title("Memory"), [*_memory(now.devices, width, has_colors)], 2)
        yield Section(_title("Rollout"), [*_rollout(now, width)], 1)
        steps = "Steps, inferred from what runs" if any(step.is_inferred for step in now.steps) else "Steps"
        yield Section(_title(steps), [*_steps(now.steps)], 2)
        yield Section(_title("Errors", "bold red"), [*_errors(now)], 1)
        yield Section(_title("Findings so far"), [*self._found(console, width)], LEAST_FOUND)

    def _found(self, console: Console, width: int) -> Iterator[Text]:
        if self.findings is None:
            if self.no_findings:
                yield Text(self.no_findings, "dim")
            return
        drawn = largest(self.findings.why)
        if drawn is None:
            return
        for segments in console.render_lines(drawn, console.options.update(width=width, height=None), pad=False):
            yield Text.assemble(*((one.text, one.style or "") for one in segments))
        yield Text(f"of steps {self.findings.steps}, computed at {self.findings.at}", "dim")


def _title(words: str, style: str = "bold") -> Text:
    return Text(words, style)


def _fitted(sections: Sequence[Section], height: int | None) -> Iterator[Text]:
    """Yield the lines that there is room for, with an empty one between two sections where there is room for it."""
    rooms = [len(section.lines) for section in sections]
    titles = sum(section.title is not None for section in sections)
    if height is not None:
        while sum(rooms) + titles > height:
            losing = [at for at, section in enumerate(sections) if rooms[at] > section.least]
            if not losing:
                break
            rooms[max(losing, key=lambda at: rooms[at] - sections[at].least)] -= 1
    left = None if height is None else height - sum(rooms) - titles
    for at, (section, room) in enumerate(zip(sections, rooms, strict=True)):
        if at and (left is None or left > 0):
            left = None if left is None else left - 1
            yield Text("")
        if section.title is not None:
            more = len(section.lines) - room
            yield Text.assemble(section.title, (f"  ({more:,} more lines)" if more else "", "dim"))
        yield from section.lines[:room]


# ---- the head -----------------------------------------------------------------------------------------------------


def _head(now: Now, heading: Heading, width: int) -> Iterator[Text]:
    goes_on = f" · {_long(now.seconds)}" + (f" · {_step_words(now.steps)}" if now.steps else "")
    yield Text.assemble((_end_of(heading.path, max(WHO_LETTERS, width - cell_len(goes_on))), "bold"), goes_on)
    seen = {lane.rank for lane in now.lanes if lane.rank is not None}
    of_all = f" of {now.ranks_started:,}" if now.ranks_started and now.ranks_started > len(seen) else ""
    facts = [f"{len(seen):,}{of_all} {'rank' if len(seen) == 1 and not of_all else 'ranks'}"] if seen else []
    facts.append(figures.count(now.processes, "process") + (f", {now.ended:,} ended" if now.ended else ""))
    every = f"every {heading.every_seconds:.0f} s" if heading.every_seconds >= 1 else "several times a second"
    yield from _in_lines([*facts, f"seen at {heading.at}, {every}"], width)
    yield _hosts(now)
    if now.hosts_elsewhere or of_all:
        one_host = len(now.hosts_elsewhere) == 1
        who = f"{_some(now.hosts_elsewhere, 3)} {'records' if one_host else 'record'} elsewhere, and"
        who = who if now.hosts_elsewhere else "a host that records elsewhere"
        is_are = "is" if one_host or not now.hosts_elsewhere else "are"
        yield Text(f"{who} {is_are} seen as far as it was collected: `rltrace collect`", "yellow")
    if lost := sum(now.losses[:5]):
        yield Text(f"{lost:,} records or segments are missing or damaged; `rltrace summary` names them", "yellow")


def _end_of(path: str, width: int) -> str:
    """Return a path, or as much of its end, where the run's name is, as there is room for."""
    return path if cell_len(path) <= width else "…" + set_cell_size(path[::-1], width - 1)[::-1].lstrip()


def _step_words(steps: Sequence[StepNow]) -> str:
    over = [step.seconds for step in steps if step.is_over]
    usual = f"a step takes {figures.number(round(median(over), 3))} s" if over else ""
    last = steps[-1]
    now = "" if last.is_over else f"step {last.number}, {_long(last.seconds)} in"
    return ", ".join(filter(None, (now or f"behind step {last.number}", usual)))


def _hosts(now: Now) -> Text:
    hosts = now.hosts
    if not hosts:
        return Text("nothing was recorded yet", "dim")
    if len(hosts) == 1:
        return Text(_host_words(hosts[0].name, hosts[0].cpu_percent, hosts[0].available_bytes), "dim")
    quiet = [host.name for host in hosts if host.silent_seconds > SILENT_SECONDS]
    said = f"{len(hosts):,} hosts: {_some([host.name for host in hosts], 4)}"
    if quiet and len(quiet) < len(hosts):
        return Text.assemble(said, (f" · nothing new of {_some(quiet, 3)}", "yellow"))
    return Text(said, "dim")


def _host_words(name: str, cpu_percent: float | None, available_bytes: int | None) -> str:
    facts = [f"host {name}"]
    if cpu_percent is not None:
        facts.append(f"processors {cpu_percent:.0f} % busy")
    if available_bytes is not None:
        facts.append(f"{figures.size(available_bytes)} of memory free")
    return " · ".join(facts)


def _some(names: Sequence[str], most: int) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


# ---- ranks --------------------------------------------------------------------------------------------------------


class _Doing(NamedTuple):
    """What lanes have in common."""

    what: str
    style: str
    urgency: int


def _lanes(lanes: Sequence[LaneNow]) -> Iterator[Text]:
    shown = [lane for lane in lanes if lane.rank is not None or lane.phase or lane.inside or lane.state != "ended"]
    ranks = [lane for lane in shown if lane.rank is not None]
    others = [lane for lane in shown if lane.rank is None and (lane.phase or lane.inside or not ranks)]
    wrote = min((lane.silent_seconds for lane in shown), default=0.0)
    if len(ranks) <= FEW:
        rows = [_lane_row(lane, wrote) for lane in [*others[:FEW], *ranks]]
    else:
        rows = [*(_lane_row(lane, wrote) for lane in others[:2]), *_groups(ranks, wrote)]
    yield from _in_columns(rows)
    if len(others) > FEW:
        yield Text(f"and {figures.count(len(others) - FEW, 'process')} without a rank", "dim")


def _doing(lane: LaneNow, wrote_seconds: float) -> _Doing:
    if lane.state not in ("running", "ended"):
        return _Doing(f"killed by {lane.state}" + (f" in {lane.phase}" if lane.phase else ""), "bold red", 3)
    if lane.state == "ended":
        return _Doing("ended", "dim", 0)
    is_silent = lane.silent_seconds > SILENT_SECONDS and lane.silent_seconds > wrote_seconds + SILENT_SECONDS
    silent = f", silent for {_long(lane.silent_seconds)}" if is_silent else ""
    style = "yellow" if is_silent else ""
    if lane.phase is not None:
        return _Doing(lane.phase + silent, style, 2 * is_silent)
    if lane.last_phase is not None:
        return _Doing(f"after {lane.last_phase}{silent}", style or "dim", 2 * is_silent)
    return _Doing(f"no phase yet{silent}", style or "dim", 2 * is_silent)


class _Row(NamedTuple):
    """Who does what, since when."""

    who: str
    doing: _Doing
    since: str
    remark: str


def _lane_row(lane: LaneNow, wrote_seconds: float) -> _Row:
    doing = _doing(lane, wrote_seconds)
    if lane.state != "running" or lane.phase_seconds is None:
        return _Row(lane.name, doing, "", "")
    return _Row(lane.name, doing, _long(lane.phase_seconds), _inside([lane]))


def _groups(ranks: Sequence[LaneNow], wrote_seconds: float) -> Iterator[_Row]:
    """Yield a row for those that do the same, those that somebody has to look at first."""
    groups: dict[_Doing, list[LaneNow]] = {}
    for lane in ranks:
        doing = _doing(lane, wrote_seconds)
        what = doing.what.partition(", silent for ")[0]
        groups.setdefault(doing._replace(what=f"{what}, silent" if doing.urgency == 2 else what), []).append(lane)
    for doing, lanes in sorted(groups.items(), key=lambda item: (-item[0].urgency, -len(item[1]))):
        lengths = sorted(lane.silent_seconds if doing.urgency == 2 else lane.phase_seconds or 0.0 for lane in lanes)
        since = _between(lengths[0], lengths[-1]) if lanes[0].state == "running" else ""
        late = ""
        if since and lengths[-1] > 2 * median(lengths) + 1:
            late = f"longest: {max(lanes, key=lambda lane: lane.phase_seconds or 0.0).name}"
        yield _Row(_who(lanes, len(ranks)), doing, since, late or (_inside(lanes) if since else ""))


def _who(lanes: Sequence[LaneNow], of: int) -> str:
    names = figures.ranks([lane.name for lane in lanes])
    if len(lanes) > max(1, ODD_SHARE * of) and len(names) > WHO_LETTERS:
        return f"{len(lanes):,} ranks"
    return names


def _inside(lanes: Sequence[LaneNow]) -> str:
    """Say what is open inside, if it is the same in most."""
    names = [lane.inside for lane in lanes if lane.inside is not None]
    if not names:
        return ""
    most = max(set(names), key=names.count)
    longest = max(lane.inside_seconds or 0.0 for lane in lanes if lane.inside == most)
    return f"in {most} {_long(longest)}" if names.count(most) * 2 > len(lanes) else ""


def _in_columns(rows: Sequence[_Row]) -> Iterator[Text]:
    who_letters = min(WHO_LETTERS, max((len(row.who) for row in rows), default=0))
    what_letters = max((len(row.doing.what) for row in rows), default=0)
    since_letters = max((len(row.since) for row in rows), default=0)
    for who, doing, since, remark in rows:
        short = who if len(who) <= who_letters else f"{who[: who_letters - 1]}…"
        yield Text.assemble(
            f"{short:<{who_letters}}  ",
            (f"{doing.what:<{what_letters}}", doing.style),
            f"  {since:>{since_letters}}",
            (f"  {remark}" if remark else "", "dim"),
        )


def _long(seconds: float) -> str:
    """Write a time that goes on: 3.2 s, 42 s, 3 min 12 s, 5 h 02 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def _between(least: float, most: float) -> str:
    """Write a range of such times, with the unit once if it is the same."""
    first, last = _long(least), _long(most)
    one_unit = all(one.endswith(" s") and " min" not in one for one in (first, last))
    return figures.between(first.removesuffix(" s") if one_unit and first != last else first, last)


# ---- where threads stand --------------------------------------------------------------------------------------------


def _stacks(stacks: Sequence[StackNow]) -> Iterator[Text]:
    """Yield a line for the threads that stand in the same place, those that have stood there longest first."""
    groups: dict[tuple[str, ...], list[StackNow]] = {}
    for stack in stacks:
        groups.setdefault(tuple(stack.spans), []).append(stack)
    for spans, of in sorted(groups.items(), key=lambda item: -max(stack.seconds for stack in item[1])):
        lengths = [stack.seconds for stack in of]
        since = _between(min(lengths), max(lengths))
        if len(of) == 1:
            who = f"{of[0].process} (pid {of[0].pid}), {of[0].thread}"
        else:
            names = sorted({stack.process for stack in of})
            who = f"{len(of):,} threads of {_some(names, 3)}"
        inner = " > ".join(spans[-3:])
        more = f"{len(spans) - 3} more > " if len(spans) > 3 else ""
        yield Text.assemble((f"{since:>12}  ", "yellow"), f"{more}{inner}  ", (who, "dim"))


# ---- memory -------------------------------------------------------------------------------------------------------


def _memory(devices: Sequence[DeviceNow], width: int, has_colors: bool) -> Iterator[Text]:
    if not devices:
        return
    by_fullness = sorted(devices, key=_share, reverse=True)
    owners = [*dict.fromkeys(owner for device in devices for owner in device.owners)]
    owners.sort(key=OWNERS.index)
    if len(devices) > FEW:
        picked = [("fullest", by_fullness[0]), ("middle", by_fullness[len(devices) // 2]), ("least", by_fullness[-1])]
        rows = [(f"{how}: {device.name}", device) for how, device in picked]
    else:
        rows = [(device.name, device) for device in devices]
    letters = max(len(name) for name, _ in rows)
    most = max(map(_total, devices))
    for name, device in rows:
        words = f" {_gib(_total(device))}"
        words += f" of {_gib(device.capacity_bytes)}" if device.capacity_bytes else ""
        room = max(10, width - letters - len(words) - 4)
        line = Text(f"{name:<{letters}} ▕")
        line.append_text(_bar(device, owners, room, device.capacity_bytes or most, has_colors))
        yield line.append(f"▏{words}")
    yield from _legend(by_fullness[0], owners, width, has_colors)


def _total(device: DeviceNow) -> int:
    return max(device.used_bytes or 0, sum(device.owners.values()))


def _share(device: DeviceNow) -> float:
    return _total(device) / device.capacity_bytes if device.capacity_bytes else float(_total(device))


def _parts(device: DeviceNow) -> dict[str, int]:
    other = _total(device) - sum(device.owners.values())
    return {**device.owners, **({OTHER: other} if other > 0 else {})}


def _bar(device: DeviceNow, owners: Sequence[str], room: int, whole_bytes: int, has_colors: bool) -> Text:
    """Draw who holds what; edges are rounded one by one, so that the end is where the total is."""
    bar = Text()
    parts = _parts(device)
    held = end = 0
    for owner in [*owners, OTHER]:
        held += parts.get(owner, 0)
        begin, end = end, min(room, round(held / whole_bytes * room)) if whole_bytes else 0
        glyph, style = _mark(owner, owners, has_colors)
        bar.append(glyph * (end - begin), style)
    return bar.append("·" * (room - end), "dim")


def _mark(owner: str, owners: Sequence[str], has_colors: bool) -> tuple[str, str]:
    if owner == OTHER:
        return "░", "dim"
    if has_colors:
        return "█", OWNER_COLORS[owner]
    return LETTERS[owners.index(owner)], ""


def _legend(fullest: DeviceNow, owners: Sequence[str], width: int, has_colors: bool) -> Iterator[Text]:
    """Name the owners, the largest of the fullest device first."""
    parts = _parts(fullest)
    line = Text()
    for owner, size in sorted(parts.items(), key=lambda item: -item[1]):
        glyph, style = _mark(owner, owners, has_colors)
        words = f" {owner} {_gib(size)}"
        if line and line.cell_len + len(words) + 3 > width:
            yield line
            line = Text()
        line.append("  " if line else "").append(glyph, style).append(words)
    yield line


def _gib(size_bytes: int) -> str:
    return figures.size(size_bytes) if size_bytes < 1 << 30 else f"{size_bytes / (1 << 30):.1f} GiB"


# ---- rollout, steps, errors -----------------------------------------------------------------------------------------


def _rollout(now: Now, width: int) -> Iterator[Text]:
    found = now.rollout
    if found is None:
        return
    facts = [f"{found.tokens_per_second:,.0f} tokens/s over the last 10 s"]
    if found.engines:
        facts.append(f"{found.running:,} requests running, {found.waiting:,} waiting")
        facts.append(figures.count(found.engines, "engine"))
    else:
        facts.append("no engine computes")
    if found.kv_usage is not None:
        facts.append(f"fullest KV cache {found.kv_usage:.0%}")
    yield from _in_lines(facts, width)


def _in_lines(facts: Sequence[str], width: int) -> Iterator[Text]:
    """Yield facts side by side, in as many lines as they take."""
    line = ""
    for fact in facts:
        if line and cell_len(f"{line} · {fact}") > width:
            yield Text(line)
            line = ""
        line = f"{line} · {fact}" if line else fact
    yield Text(line)


_COLUMNS: dict[str, Callable[[StepNow], str]] = {
    "seconds": lambda step: f"{step.seconds:,.2f}{'' if step.is_over else ' …'}",
    "reward": lambda step: "" if step.reward_mean is None else f"{step.reward_mean:.4f}",
    "tokens/s": lambda step: "" if step.tokens_per_second is None else f"{step.tokens_per_second:,.0f}",
    "": lambda step: step.error or "",
}


def _steps(steps: Sequence[StepNow]) -> Iterator[Text]:
    """Yield the newest step first: it stays when there is little room."""
    if not steps:
        return
    shown = steps[-STEPS:][::-1]
    columns = {name: cell for name, cell in _COLUMNS.items() if any(cell(step) for step in shown)}
    yield Text("  ".join(f"{name:>10}" for name in ("step", *columns)), "dim")
    for step in shown:
        cells = [f"{step.number:>10,}", *(f"{cell(step):>10}" for cell in columns.values())]
        yield Text("  ".join(cells), "red" if step.error else "")


def _errors(now: Now) -> Iterator[Text]:
    shown: Sequence[ErrorNow] = now.errors[-ERRORS:][::-1]
    for error in shown:
        yield Text.assemble((f"{_long(error.at_seconds):>12}  ", "dim"), (f"{error.process}: {error.what}", "red"))
    if (more := now.errors_in_all - len(shown)) > 0:
        yield Text(f"and {more:,} more", "dim")
