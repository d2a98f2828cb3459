"""Hooks: how many of each instrumentation fired, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from rltrace.analysis.hooks import HookFigures
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, titled, words

_STYLES = {"failed": "bold red", "skipped": "yellow"}


def hook_lines(hooks: Sequence[HookFigures]) -> RenderableType:
    """One row an instrumentation, then the hooks that failed, were skipped or never fired, by reason."""
    table = Figures(Column("Hooks", is_left=True), "fired", "times", words())
    absent = []
    for name, rows in _by_instrumentation(hooks):
        if all(hook.state == "waiting" for hook in rows):
            absent.append(name)
            continue
        bound = [hook for hook in rows if hook.state == "installed"]
        fired = f"{sum(hook.fired > 0 for hook in bound)} of {len(bound)}" if bound else ""
        table.add_row(name, fired, f"{sum(hook.fired for hook in rows):,}", _said_of_all(rows) or _inapplicable(rows))
    said = [Text(line, style) for line, style in _complaints(hooks)]
    if absent:
        said.append(Text(f"hooks of what was not imported: {', '.join(absent)}", "dim"))
    return Group(table, *said)


def _by_instrumentation(hooks: Sequence[HookFigures]) -> Iterator[tuple[str, list[HookFigures]]]:
    for name, rows in groupby(hooks, lambda hook: hook.instrumentation):
        yield name, list(rows)


def _said_of_all(hooks: Sequence[HookFigures]) -> Text | None:
    """What all hooks of an instrumentation have to say, if it is one thing."""
    if all(hook.state == "waiting" for hook in hooks):
        return Text("not imported in this run", "dim")
    if hooks[0].state == "skipped" and len({(hook.state, hook.reason) for hook in hooks}) == 1:
        return _remark(hooks[0])
    if _is_unused(hooks) and all(hook.state in ("installed", "waiting") for hook in hooks):
        return Text("imported, nothing fired", "dim")
    return None


def _inapplicable(hooks: Sequence[HookFigures]) -> Text:
    many = sum(bool(hook.not_applicable) and not hook.fired and hook.state == "installed" for hook in hooks)
    return Text(f"{many} not applicable" if many else "", "dim")


def _is_unused(hooks: Sequence[HookFigures]) -> bool:
    """The program does without this framework, or it is broken: not one hook's fault."""
    return not any(hook.fired for hook in hooks)


def _complaints(hooks: Sequence[HookFigures]) -> Iterator[tuple[str, str]]:
    """What is wrong and with whom, and a style: failures, then what was skipped, then what never fired."""
    by_reason: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, rows in _by_instrumentation(hooks):
        if _said_of_all(rows) is not None:
            continue
        for hook in rows:
            if hook.state in _STYLES or (hook.never_fired and not _is_unused(rows)):
                kind = hook.state if hook.state in _STYLES else "never fired"
                by_reason.setdefault((kind, hook.reason or ""), {}).setdefault(name, []).append(_target(hook))
    order = [*_STYLES, "never fired"]
    for kind, reason in sorted(by_reason, key=lambda key: order.index(key[0])):
        whose = "; ".join(f"{name} {', '.join(targets)}" for name, targets in by_reason[kind, reason].items())
        yield f"{kind}: {whose}" + (f": {reason}" if reason else ""), _STYLES.get(kind, "yellow")


def _target(hook: HookFigures) -> str:
    return hook.target.partition(":")[2] or hook.target


def failures(hooks: Sequence[HookFigures]) -> dict[str, list[str]]:
    """The hooks that failed, by reason."""
    found: dict[str, list[str]] = {}
    for hook in hooks:
        if hook.state == "failed":
            found.setdefault(hook.reason or "no reason", []).append(f"{hook.instrumentation} {_target(hook)}")
    return found


def hook_table(hooks: Sequence[HookFigures]) -> RenderableType:
    """Every hook whose module was imported, what it fired, and what is wrong with it."""
    table = Figures("hook", "fired", words())
    for name, rows in _by_instrumentation(hooks):
        in_common = _said_of_all(rows)
        table.add_row(Text(name, "bold"), "", in_common or "")
        if in_common is None:
            _add_hooks(table, rows)
    return titled("Hooks", table)


def _add_hooks(table: Figures, hooks: Sequence[HookFigures]) -> None:
    listed = [hook for hook in hooks if hook.state != "waiting"]
    if _is_unused(hooks):
        silent = [hook for hook in listed if hook.state == "installed"]
        listed = [hook for hook in listed if hook.state != "installed"]
        if silent:
            table.add_row(f"  {figures.count(len(silent), 'hook')}", "0", Text("imported, nothing fired", "dim"))
    for hook in listed:
        table.add_row(f"  {_target(hook)}", f"{hook.fired:,}", _remark(hook))
    waiting = sum(hook.state == "waiting" for hook in hooks)
    if waiting:
        waits = "waits for a module that was" if waiting == 1 else "wait for modules that were"
        table.add_row(Text(f"  {waiting} more {waits} not imported", "dim"))


def _remark(hook: HookFigures) -> Text:
    if hook.never_fired:
        return Text("never fired", "yellow")
    if hook.state == "installed":
        return Text(f"not applicable: {hook.not_applicable}" if hook.not_applicable and not hook.fired else "", "dim")
    return Text(hook.state + (f": {hook.reason}" if hook.reason else ""), _STYLES.get(hook.state, "dim"))


def not_applicable_lines(reasons: Mapping[str, str]) -> RenderableType:
    """What a reader may look for in vain, and why."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    lines = [f"  {', '.join(group)}: {reason}" for reason, group in names.items()]
    return Text("Not applicable in this run\n", "bold").append("\n".join(lines), "not bold dim")
