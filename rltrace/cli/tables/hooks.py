"""Hooks: how many of each instrumentation fired, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from rltrace.analysis.hooks import HookFigures, is_not_needed, made_by
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, titled, words
from rltrace.events import UNVERIFIED

_STYLES = {"failed": "bold red", "skipped": "yellow"}
NEWER = "in a newer release, their source is not the one that was read"
OF_PYTHON = "python_gc"
"""This is in every process, and fires only if there is enough garbage."""
OF_CHOSEN_STEPS = {
    "chosen_allocations": "no chosen step's allocations were kept",
    "chosen_loop_steps": "no phase boundary told of a step",
    "chosen_kernels": "no chosen step's kernels were recorded",
}
"""These fire only if steps were chosen; why one kept none of theirs is among what is wrong."""


def hook_lines(hooks: Sequence[HookFigures]) -> RenderableType:
    """Return whose hooks fired, then which failed, were skipped or never fired, one of each framework by name.

    A framework may have several places for one thing, and a run goes through one of them. If another hook of the
    framework made the spans, or there are none to make, nothing is missing.
    """
    of = {name: rows for name, rows in _by_instrumentation(hooks) if any(hook.state == "installed" for hook in rows)}
    fired = {name: rows for name, rows in of.items() if not _is_unused(rows)}
    of = {name: rows for name, rows in of.items() if name in fired or name != OF_PYTHON}
    bound = [hook for rows in fired.values() for hook in rows if hook.state == "installed"]
    parts = [f"{', '.join(fired)}: {sum(hook.fired > 0 for hook in bound)} of {len(bound)} fired"] if fired else []
    silent = [name for name in of if name not in fired and name not in OF_CHOSEN_STEPS]
    parts += [f"none of {', '.join(silent)} fired"] if silent else []
    parts += [said for name, said in OF_CHOSEN_STEPS.items() if name in of and name not in fired]
    missed, others = _missed(hooks)
    complaints = list(_complaints(missed))
    parts += ["no span is missing"] if others and not complaints else []
    line = Text.assemble(("Hooks", "bold"), f" {'; '.join(parts) or 'none: no framework with hooks was imported'}")
    if others and complaints:
        complaints[-1].append(f"; {others} more were not needed", "dim")
    return Group(line, *complaints, *_unverified(hooks))


def _unverified(hooks: Sequence[HookFigures]) -> Iterator[Text]:
    """Return one line for all hooks that work on a source that nobody has read."""
    counts = {name: sum(hook.unverified for hook in rows) for name, rows in _by_instrumentation(hooks)}
    if any(counts.values()):
        said = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        yield Text(f"{UNVERIFIED}: {said}: {NEWER}", "dim")


def _by_instrumentation(hooks: Sequence[HookFigures]) -> Iterator[tuple[str, list[HookFigures]]]:
    for name, rows in groupby(hooks, lambda hook: hook.instrumentation):
        yield name, list(rows)


def _said_of_all(hooks: Sequence[HookFigures]) -> Text | None:
    """Return what all hooks of an instrumentation say, if they agree."""
    if all(hook.state == "waiting" for hook in hooks):
        return Text("not imported in this run", "dim")
    if hooks[0].state == "skipped" and len({(hook.state, hook.reason) for hook in hooks}) == 1:
        return _remark(hooks[0])
    if _is_unused(hooks) and all(hook.state in ("installed", "waiting") for hook in hooks):
        return Text(OF_CHOSEN_STEPS.get(hooks[0].instrumentation, "imported, nothing fired"), "dim")
    return None


def _is_unused(hooks: Sequence[HookFigures]) -> bool:
    """Return whether the program does without this framework, or the framework is broken: that is no single hook's
    fault."""
    return not any(hook.fired for hook in hooks)


def _missed(hooks: Sequence[HookFigures]) -> tuple[dict[str, dict[str, list[str]]], int]:
    """Return those that failed, were skipped and never fired, by framework; and the number of others, whose spans are
    not missing."""
    kinds: dict[str, dict[str, list[str]]] = {"failed": {}, "skipped": {}, "never fired": {}}
    made = made_by(hooks)
    others = 0
    for name, rows in _by_instrumentation(hooks):
        is_unused = _is_unused(rows)
        for hook in rows:
            if hook.state not in _STYLES and (is_unused or not hook.never_fired):
                continue
            if hook.state != "failed" and not is_unused and made.issuperset(hook.emits):
                others += 1
                continue
            kind = hook.state if hook.state in _STYLES else "never fired"
            kinds[kind].setdefault(name, []).append(_target(hook))
    return kinds, others


def _complaints(missed: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[Text]:
    """Return one line of each kind."""
    for kind, whose in missed.items():
        if whose:
            said = "; ".join(f"{name} {_first(targets)}" for name, targets in whose.items())
            yield Text(f"{kind}: {said}", _STYLES.get(kind, "yellow"))


def _first(targets: Sequence[str]) -> str:
    return targets[0] + (f" and {len(targets) - 1} more" if len(targets) > 1 else "")


def _target(hook: HookFigures) -> str:
    return hook.target.partition(":")[2] or hook.target


def left_out(hooks: Sequence[HookFigures]) -> dict[str, str]:
    """Return the frameworks that were not traced at all, with the reason, without those that the user disabled."""
    found = {}
    for name, rows in _by_instrumentation(hooks):
        reasons = {hook.reason or "" for hook in rows if hook.state == "skipped"}
        if all(hook.state == "skipped" for hook in rows) and len(reasons) == 1:
            found[name] = reasons.pop()
    return {name: reason for name, reason in found.items() if not reason.startswith("disabled by ")}


def failures(hooks: Sequence[HookFigures]) -> dict[str, list[str]]:
    """Return the hooks that failed, by reason."""
    found: dict[str, list[str]] = {}
    for hook in hooks:
        if hook.state == "failed":
            found.setdefault(hook.reason or "no reason", []).append(f"{hook.instrumentation} {_target(hook)}")
    return found


def hook_table(hooks: Sequence[HookFigures]) -> RenderableType:
    """Draw every hook whose module was imported, how often it fired, and what is wrong with it."""
    table = Figures("hook", "fired", Column("seconds", 5), Column("each", 6), words())
    made = made_by(hooks)
    for name, rows in _by_instrumentation(hooks):
        in_common = _said_of_all(rows)
        table.add_row(Text(name, "bold"), "", "", "", in_common or "")
        if in_common is None:
            _add_hooks(table, rows, made)
    return titled("Hooks", table)


def _seconds(hook: HookFigures) -> tuple[str, str]:
    """Write all the time that it took, and each time; nothing if that was not measured."""
    if hook.seconds is None or not hook.fired:
        return "", ""
    return figures.seconds(hook.seconds), figures.short(hook.seconds / hook.fired)


def _add_hooks(table: Figures, hooks: Sequence[HookFigures], made: frozenset[str]) -> None:
    listed = [hook for hook in hooks if hook.state != "waiting"]
    if _is_unused(hooks):
        silent = [hook for hook in listed if hook.state == "installed"]
        listed = [hook for hook in listed if hook.state != "installed"]
        if silent:
            table.add_row(
                f"  {figures.count(len(silent), 'hook')}", "0", "", "", Text("imported, nothing fired", "dim")
            )
    for hook in listed:
        is_another_way = is_not_needed(hook, made)
        remark = Text("not needed: another hook made its spans", "dim") if is_another_way else _remark(hook)
        table.add_row(f"  {_target(hook)}", f"{hook.fired:,}", *_seconds(hook), remark)
    waiting = sum(hook.state == "waiting" for hook in hooks)
    if waiting:
        waits = "waits for a module that was" if waiting == 1 else "wait for modules that were"
        table.add_row(Text(f"  {waiting} more {waits} not imported", "dim"))


def _remark(hook: HookFigures) -> Text:
    if hook.never_fired:
        return Text("never fired", "yellow")
    if hook.state == "installed" and hook.unverified:
        return Text(hook.reason or UNVERIFIED, "dim")
    if hook.state == "installed":
        return Text(f"not applicable: {hook.not_applicable}" if hook.not_applicable and not hook.fired else "", "dim")
    return Text(hook.state + (f": {hook.reason}" if hook.reason else ""), _STYLES.get(hook.state, "dim"))


def not_applicable_lines(reasons: Mapping[str, str]) -> RenderableType:
    """Return which spans cannot be in this run, and why."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    lines = [f"  {', '.join(group)}: {reason}" for reason, group in names.items()]
    return Text("Not applicable in this run\n", "bold").append("\n".join(lines), "not bold dim")
