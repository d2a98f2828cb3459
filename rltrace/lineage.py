"""Which process started which, by the kernel's word."""

from __future__ import annotations

from pathlib import Path


def parent_of(pid: int) -> int | None:
    """The process that started one, or has adopted it; None of one that is gone."""
    return _state_and_parent(pid)[1]


def running_parent_of(pid: int) -> int | None:
    """The same; None of one that has ended too, of which its parent has not heard yet."""
    state, parent = _state_and_parent(pid)
    return None if state in ("Z", "X") else parent


def _state_and_parent(pid: int) -> tuple[str | None, int | None]:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    except OSError:
        return None, None
    return state, int(parent)


def is_below(pid: int, above: int) -> bool:
    """Whether a process was started by another one, or by one that is below that."""
    parent = parent_of(pid)
    while parent and parent != above:
        parent = parent_of(parent)
    return parent == above
