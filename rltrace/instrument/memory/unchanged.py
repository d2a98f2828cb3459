"""The stamp of a process's samples: since when its memory is as it is (`analysis/same_moment.py` reads it)."""

from __future__ import annotations

from typing import Any

from rltrace.host.clock import now_ns


class Unchanged:
    """Knows since when a key is the same; each change of what the key stands for makes another key."""

    def __init__(self) -> None:
        self._key: Any = None
        self._since_ns = 0

    def since_ns(self, key: Any) -> int:
        """Return since when the key is what it is now. For None, which stands for nothing, that is now."""
        if key is None or key != self._key:
            self._key, self._since_ns = key, now_ns()
        return self._since_ns
