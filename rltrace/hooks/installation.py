"""Installs the hooks of all instrumentations, and lets a process join a run with them.

One object of the process knows what is installed. An instrumentation is loaded by its name in `plugins.py`, so that
nothing here imports one; a failure of one is said, and leaves the others and the program as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from rltrace import plugins
from rltrace.hooks.environment import reach_others, with_startup
from rltrace.hooks.hook import HookRegister
from rltrace.hooks.patching import PatchSet
from rltrace.host.interruption import own_failure
from rltrace.plugins import DISABLE_VARIABLE
from rltrace.record import cluster, disk_budget, lifecycle, spans
from rltrace.record.announcement import announce, complain
from rltrace.record.process import UNSAID_ROLE


class Instrumentation(Protocol):
    """An instrumentation names the hooks of one framework."""

    name: str
    """Its name in `plugins.INSTRUMENTATIONS`."""

    supports: tuple[str, ...]
    """The oldest versions that have what is hooked, such as "torch >= 2.11"; an older version is skipped."""

    def install(self, patches: PatchSet) -> None:
        """Name the hooks; called once a process, before or after the framework is imported."""


class Installed:
    """The instrumentations that are installed in this process."""

    def __init__(self) -> None:
        self.patch_sets: dict[str, PatchSet] = {}

    def switch(self, on: bool) -> None:
        """Let every hook pass its calls through while recording is paused."""
        for patches in self.patch_sets.values():
            patches.hold(not on)

    def undo(self) -> list[str]:
        """Take every hook back, the last first.

        Returns:
            The targets that somebody has patched since, which are left alone.
        """
        left = [target for patches in reversed(self.patch_sets.values()) for target in patches.undo()]
        self.patch_sets.clear()
        return left


_installed = Installed()
lifecycle.when_switched(_installed.switch)


def install(register: HookRegister, names: Iterable[str] | None = None) -> Installed:
    """Install instrumentations; those that are installed already stay as they are.

    Args:
        register: Where the hooks report to: the Recorder.
        names: Of the instrumentations; all of the table by default. `RLTRACE_DISABLE` takes some out.

    Returns:
        What is installed in this process, for `undo`. Never raises.
    """
    known = _known()
    disabled = _disabled()
    for name in known if names is None else names:
        if name in _installed.patch_sets:
            continue
        patches = PatchSet(name, register)
        try:
            instrumentation: Instrumentation = plugins.load(known[name])()
            patches.supports = instrumentation.supports
            if name in disabled:
                patches.refuse(f"disabled by {DISABLE_VARIABLE}")
            else:
                _installed.patch_sets[name] = patches
            instrumentation.install(patches)
        except own_failure() as error:
            reason = f"{type(error).__name__}: {error}"
            register.hook(name, known.get(name, name), "failed", reason)
            complain(f"the instrumentation {name} is not installed: {reason}")
    return _installed


def installed() -> Installed:
    """Return what is installed in this process."""
    return _installed


def warning_of_disabled() -> str | None:
    """Return one line for who starts the run if `RLTRACE_DISABLE` names an unknown instrumentation."""
    known = _known()
    unknown = [name for name in _disabled() if name not in known]
    if not unknown:
        return None
    return f"{DISABLE_VARIABLE}: no instrumentation is called {', '.join(unknown)}; there are {', '.join(known)}"


def _disabled() -> list[str]:
    names = (name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(","))
    return [name for name in names if name]


def _known() -> dict[str, str]:
    try:
        return plugins.instrumentations()
    except own_failure() as error:  # another distribution's metadata
        complain(f"plugins of other distributions were skipped: {error}")
        return plugins.INSTRUMENTATIONS


# ---- into a run -------------------------------------------------------------------------------------------------


def join_run() -> None:
    """Join the Recording that `RLTRACE_DIR` names and install the hooks: the plug-in of frameworks that load plug-ins.

    Does nothing without the variable, nor where the start-up hook was before. Never raises.
    """
    inherits_hooks = cluster.HOOKS_VARIABLE in os.environ or cluster.PARENT_VARIABLE not in os.environ
    try:
        # Frameworks load plug-ins late, when a hook has said already what this process is.
        if os.environ.get(cluster.DIR_VARIABLE) and inherits_hooks and spans.current() is None:
            _instrument(None, role=UNSAID_ROLE)
    except own_failure() as error:
        complain(f"this process is not traced: {type(error).__name__}: {error}")


def instrument(folder: str | os.PathLike[str] | None = None, **who: Any) -> Path | None:
    """Record this program and every process that it starts from here on, with all hooks: `rltrace exec` from inside.

    Call it first: what is imported or started before is hooked late, or not at all.

    Args:
        folder: As of `start`.
        **who: As of `start`: role, rank, device, name, config, max_bytes.

    Returns:
        As of `start`. Never raises.
    """
    path = _instrument(folder, **who)
    if path is not None:
        os.environ["PYTHONPATH"] = with_startup(os.environ.get("PYTHONPATH", ""))
    return path


def _instrument(folder: str | os.PathLike[str] | None, **who: Any) -> Path | None:
    is_first = spans.current() is None
    path = lifecycle.start(folder, **who)
    current = spans.current()
    if current is not None:
        install(current)
        reach_others()
        if is_first:
            announce(current.recording, current.key, disk_budget.notice(current.budget_bytes))
    return path
