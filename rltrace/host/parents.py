"""Which process started which, by the kernel's word."""

from __future__ import annotations

from pathlib import Path

from rltrace.host.interruption import own_failure


def parent_of(pid: int) -> int | None:
    """The process that started one, or has adopted it; None of one that is gone."""
    return _state_and_parent(pid)[1]


def running_parent_of(pid: int) -> int | None:
    """The same; None of one that has ended too, of which its parent has not heard yet."""
    state, parent = _state_and_parent(pid)
    return None if state in ("Z", "X") else parent


def stack_of(pid: int) -> int | None:
    """Where its first stack begins, which a fork has from its parent, and a program that was executed anew for itself.

    None of a process that is gone, or that is somebody else's.
    """
    fields = _fields(pid)
    return int(fields[_STACK]) or None if fields else None


def _state_and_parent(pid: int) -> tuple[str | None, int | None]:
    fields = _fields(pid)
    return (fields[0], int(fields[1])) if fields else (None, None)


_STACK = 25
"""`startstack` of proc(5), behind the name."""


def _fields(pid: int) -> list[str]:
    """What the kernel says of a process behind its name, its state first; nothing of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except own_failure(OSError):
        return []


def is_below(pid: int, above: int) -> bool:
    """Whether a process was started by another one, or by one that is below that."""
    parent = parent_of(pid)
    while parent and parent != above:
        parent = parent_of(parent)
    return parent == above
