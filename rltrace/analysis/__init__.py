"""Figures of a Recording: pure functions from what was recorded to frozen values with their units in the name.

`summarize` reads every event once; its parts can be called alone. Nothing here imports a framework.
"""

from __future__ import annotations

from rltrace.analysis.summary import Summary, summarize

__all__ = ["Summary", "summarize"]
