"""Tells which process started which, as the kernel says it."""

from __future__ import annotations

from pathlib import Path

from rltrace.host.interruption import own_failure


def parent_of(pid: int) -> int | None:
    """Return the process that started a process, or has adopted it; None if the process is gone."""
    return _state_and_parent(pid)[1]


def running_parent_of(pid: int) -> int | None:
    """Return the same; None also for a process that has ended and whose parent has not yet waited for it."""
    state, parent = _state_and_parent(pid)
    return None if state in ("Z", "X") else parent


def stack_of(pid: int) -> int | None:
    """Return where its first stack begins: a fork has this from its parent, and an executed program for itself.

    None for a process that is gone, or is another user's.
    """
    fields = _fields(pid)
    return int(fields[_STACK]) or None if fields else None


def _state_and_parent(pid: int) -> tuple[str | None, int | None]:
    fields = _fields(pid)
    return (fields[0], int(fields[1])) if fields else (None, None)


_STACK = 25
"""`startstack` of proc(5), counted after the name."""


def _fields(pid: int) -> list[str]:
    """Return what the kernel says about a process after its name, its state first; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except own_failure(OSError):
        return []


def is_below(pid: int, above: int) -> bool:
    """Return whether a process was started by another one, or by one that is below that one."""
    parent = parent_of(pid)
    while parent and parent != above:
        parent = parent_of(parent)
    return parent == above
