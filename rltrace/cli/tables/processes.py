"""The processes of a run, what was sampled of their hosts, and who was not traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from rltrace.analysis.fates import Fate
from rltrace.analysis.processes import ProcessFigures
from rltrace.analysis.samples import HostSamples
from rltrace.analysis.untraced import Untraced
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Figures, titled
from rltrace.events import SAMPLER

_STATE_STYLES = {
    "alive": "cyan", "ended": "green", "died": "bold red", "gone": "yellow", "stopped": "yellow", "unknown": "yellow",
}  # fmt: skip
MOST_LETTERS = 100
"""How many characters of a command line are shown."""
MOST_BARE = 3
DEVICE_LETTERS = 12
"""How many characters of a device are shown: enough to tell GPUs apart, and for nvidia-smi to accept."""


def process_line(processes: Sequence[ProcessFigures], fates: Mapping[str, Fate]) -> Text:
    """Return one line: how many processes of which role, and how they ended."""
    roles = Counter(process.role for process in processes)
    states = Counter(_ended(process, fates) for process in processes)
    line = Text.assemble(("Processes", "bold"), " " + ", ".join(_times(many, role) for role, many in roles.items()))
    for at, ((said, style), many) in enumerate(states.items()):
        line.append("; " if at == 0 else ", ").append(f"{many} {said}" if len(states) > 1 else said, style)
    return line


def _ended(process: ProcessFigures, fates: Mapping[str, Fate], killed_by: str | None = None) -> tuple[str, str]:
    """Return how a process ended, in words, and their style: a process that was stopped while idle is no alarm."""
    if fates.get(process.key) == "released":
        return ("stopped while idle" if process.state == "died" else "gone while idle"), "dim"
    by = f" by {killed_by}" if killed_by and process.state == "died" else ""
    return process.state + by, _STATE_STYLES[process.state]


def _times(many: int, role: str) -> str:
    return role if many == 1 else f"{many} x {role}"


def process_tree(processes: Sequence[ProcessFigures], fates: Mapping[str, Fate]) -> RenderableType:
    """Draw who started whom; processes that one process started and that recorded nothing share a line."""
    below: dict[str | None, list[ProcessFigures]] = {}
    for process in processes:
        below.setdefault(process.parent, []).append(process)
    hosts = sorted({process.host for process in processes})
    tree = Tree(Text("Processes" + (f" on {hosts[0]}" if len(hosts) == 1 else ""), "bold"), guide_style="dim")
    _grow(tree, None, below, fates, has_hosts=len(hosts) > 1)
    return tree


def _grow(
    branch: Tree,
    parent: str | None,
    below: dict[str | None, list[ProcessFigures]],
    fates: Mapping[str, Fate],
    *,
    has_hosts: bool,
) -> None:
    silent: dict[tuple[str, str], list[ProcessFigures]] = {}
    for process in sorted(below.get(parent, []), key=lambda process: (process.rank is None, process.rank or 0)):
        if process.spans == 0 and process.key not in below and process.role != SAMPLER:
            silent.setdefault((process.name, process.host), []).append(process)
        else:
            added = branch.add(_branch([process], fates, has_hosts=has_hosts))
            _grow(added, process.key, below, fates, has_hosts=has_hosts)
    for alike in silent.values():
        branch.add(_branch(alike, fates, has_hosts=has_hosts))


def _branch(alike: Sequence[ProcessFigures], fates: Mapping[str, Fate], *, has_hosts: bool) -> Text:
    """Draw a process, or several that share a line."""
    one, many = alike[0], len(alike)
    pids = figures.pids(sorted(process.pid for process in alike))
    line = Text.assemble((_times(many, one.name), "bold"), f"  {pids}")
    line.append(f" on {one.host}" if has_hosts else "")
    if many == 1 and one.device:
        line.append(f", {one.device[:DEVICE_LETTERS]}")
    start_seconds, last_seconds = min(p.start_seconds for p in alike), max(p.last_seconds for p in alike)
    line.append(f"  {start_seconds:.1f}-{last_seconds:.1f} s, {figures.count(one.spans, 'span')}  ")
    ends = Counter(_ended(process, fates, process.killed_by) for process in alike)
    for at, ((said, style), count) in enumerate(ends.items()):
        line.append(", " if at else "").append(f"{count} {said}" if len(ends) > 1 else said, style)
    if not one.clock_aligned:
        line.append("  another clock, not aligned", "yellow")
    elif one.clock_bound_seconds:
        line.append(f"  clock within ±{figures.short(one.clock_bound_seconds)}", "dim")
    return line


def sample_table(host: HostSamples) -> RenderableType:
    """Draw what the sampler of a host saw, and what it could not see."""
    table = Figures("sampled", "mean", "least", "most")
    groups = [("", host.counters), *host.gpus.items(), *host.processes.items()]
    for title, counters in groups:
        if title:
            table.add_row(Text(title, "bold"))
        for name, sampled in counters.items():
            show = figures.size if "_bytes" in name else figures.number
            table.add_row(f"  {name}", show(sampled.mean), show(sampled.least), show(sampled.most))
    lines = [f"{what}: unknown: {reason}" for what, reason in host.unavailable.items()]
    if host.sampler_cpu_share is not None:
        lines.append(f"{host.samples} samples; sampling took {host.sampler_cpu_share:.1%} of a processor")
    return titled(f"Host {host.host}", table, "\n".join(lines))


def bare_line(found: Sequence[Untraced]) -> str:
    """Return the processes that had nothing to trace, in one line."""
    commands = [_brief(bare.command) for bare in found]
    others = f" and {len(commands) - MOST_BARE} other commands" if len(commands) > MOST_BARE else ""
    many = figures.count(sum(len(bare.pids) for bare in found), "process")
    return f"{many} not recorded ({found[0].reason}): {'; '.join(commands[:MOST_BARE])}{others}"


def untraced_line(missing: Untraced) -> str:
    """Return which command was not traced, how often, and why."""
    return f"{_brief(missing.command)} (pid {', '.join(map(str, missing.pids))}): {missing.reason}"


def _brief(command: Sequence[str]) -> str:
    """Return a command in a line; a long one without its program's folders, for what the program ran says more."""
    line = " ".join(command)
    if len(line) > MOST_LETTERS:
        line = " ".join([PurePath(command[0]).name, *command[1:]])
    return line if len(line) <= MOST_LETTERS else f"{line[: MOST_LETTERS - 3]}..."
