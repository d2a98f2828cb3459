"""Ids of traces and spans. They are made of what the Recording says, so that a second export sends the same spans again
and no others."""

from __future__ import annotations

from hashlib import blake2b


def trace_id(run_id: str, what: str) -> int:
    """Return the id of one trace of a run.

    Args:
        run_id: The run's id, from its manifest.
        what: What the trace is about, such as `step 3`.
    """
    return _number(f"{run_id}/{what}", 16)


def span_id(run_id: str, *where: object) -> int:
    """Return the id of one span.

    Args:
        run_id: The run's id.
        *where: What no two spans of a run share: process, thread, task, beginning and name.
    """
    return _number("/".join((run_id, *map(str, where))), 8)


def _number(text: str, size: int) -> int:
    found = int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=size).digest(), "big")
    return found or 1  # 0 means none
