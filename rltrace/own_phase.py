"""`rltrace.phase`: a phase that a program marks itself, its memory looked at on both sides as where hooks are."""

from __future__ import annotations

from typing import Any

from rltrace import edges, recorder
from rltrace.recorder import NoSpan, OpenSpan


def phase(name: str, /, **args: Any) -> OpenSpan | NoSpan:
    """A span that partitions its rank's step: phases of one rank do not overlap.

    Args:
        name: `subject.action`.
        **args: Recorded with the beginning.
    """
    opened = recorder.phase(name, **args)
    return opened if isinstance(opened, NoSpan) else OwnPhase(opened.name, 0, 0, opened.args)


_said: set[str] = set()
"""Reasons that are in the Recording already."""


class OwnPhase(OpenSpan):
    """Tells whoever watches memory before it begins and behind its end: what that takes is not its time."""

    def __enter__(self) -> OwnPhase:
        _reached(edges.Edge((self.name,), is_end=False, is_own=True))
        OpenSpan.__enter__(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object = None, traceback: object = None, /) -> None:
        OpenSpan.__exit__(self, kind, error, traceback)
        _reached(edges.Edge((self.name,), error=error if isinstance(error, BaseException) else None, is_own=True))


def _reached(edge: edges.Edge) -> None:
    """Nothing of ours raises into the program."""
    try:
        edges.reached(edge)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if reason not in _said:
            _said.add(reason)
            recorder.unavailable(f"memory at {edge.names[0]}", reason)
