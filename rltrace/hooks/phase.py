"""`rltrace.phase`: a phase that a program marks itself, its memory looked at on both sides as where hooks are."""

from __future__ import annotations

from typing import Any

from rltrace.hooks import boundaries
from rltrace.host.interruption import own_failure
from rltrace.record import lifecycle, spans
from rltrace.record.spans import LiveSpan, NoSpan


def phase(name: str, /, **args: Any) -> LiveSpan | NoSpan:
    """Return a span that partitions its rank's step: the phases of one rank do not overlap.

    Args:
        name: `subject.action`.
        **args: Recorded with the beginning.
    """
    spans.phase_begins()
    return OwnPhase(name, 0, 0, {**args, "phase": True}) if spans.is_recording() else NoSpan()


_said: set[str] = set()
"""Reasons that the Recording already has."""


class OwnPhase(LiveSpan):
    """A phase tells the watchers of memory before it begins and after it ends; what they take is not its time."""

    def __enter__(self) -> OwnPhase:
        _reached(self.name, is_end=False)
        newest = spans.newest
        try:
            LiveSpan.__enter__(self)
            return self
        except BaseException as interruption:  # `with` never calls `__exit__` then
            spans.end_lost(newest, interruption)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: object = None, traceback: object = None, /) -> None:
        try:
            LiveSpan.__exit__(self, kind, error, traceback)
        except BaseException as interruption:
            self.end_interrupted(interruption)
            raise
        spans.phase_ended(self.name, self.start_ns)
        _reached(self.name, error=error if isinstance(error, BaseException) else None)


def _reached(name: str, *, is_end: bool = True, error: BaseException | None = None) -> None:
    """Tell the watchers of a boundary, if there are any; nothing of ours raises into the program."""
    if not boundaries.WATCHERS:
        return
    try:
        boundaries.reached(boundaries.Boundary((name,), is_end, error, is_own=True))
    except own_failure() as failure:
        reason = f"{type(failure).__name__}: {failure}"
        if reason not in _said:
            _said.add(reason)
            lifecycle.unavailable(f"memory at {name}", reason)
