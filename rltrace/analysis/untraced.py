"""Processes of the run that were seen and not traced."""

from __future__ import annotations

import msgspec

from rltrace.read.recording import Recording


class Untraced(msgspec.Struct, frozen=True, kw_only=True):
    """Processes that were started by the same command and not traced for the same reason."""

    command: list[str]
    """Command line with secrets redacted; the interpreter alone if the process itself reported."""
    reason: str
    """Why it was not traced."""
    pids: list[int]
    """Process ids."""
    missed: bool
    """False if there was nothing to trace: the process imported only the standard library."""


def untraced(recording: Recording) -> list[Untraced]:
    """Return who was not traced, by when it was first reported."""
    pids: dict[tuple[tuple[str, ...], str, bool], list[int]] = {}
    for said in recording.untraced:
        command = tuple(map(str, said.get("command") or ()))
        about = command, str(said.get("reason")), said.get("missed") is not False
        pids.setdefault(about, []).append(int(said.get("pid") or 0))
    return [
        Untraced(command=list(command), reason=reason, pids=found, missed=missed)
        for (command, reason, missed), found in pids.items()
    ]
