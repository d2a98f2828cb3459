"""Since when what a process holds is as it is: the stamp of its samples (`analysis/same_moment.py` reads it)."""

from __future__ import annotations

from typing import Any

from rltrace.host.clock import now_ns


class Unchanged:
    """Knows since when a key is the same, of which every change of what it stands for makes another one."""

    def __init__(self) -> None:
        self._key: Any = None
        self._since_ns = 0

    def since_ns(self, key: Any) -> int:
        """Return since when the key is what it is now; of None, which stands for nothing, that is now."""
        if key is None or key != self._key:
            self._key, self._since_ns = key, now_ns()
        return self._since_ns
