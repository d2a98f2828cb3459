"""Which process started which, by the kernel's word."""

from __future__ import annotations

from pathlib import Path


def parent_of(pid: int) -> int | None:
    """The process that started one, or has adopted it; None of one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return None


def is_below(pid: int, above: int) -> bool:
    """Whether a process was started by another one, or by one that is below that."""
    parent = parent_of(pid)
    while parent and parent != above:
        parent = parent_of(parent)
    return parent == above
