"""The folder of one process in a Recording: who it is, its hooks, and counts that survive `kill -9`."""

from __future__ import annotations

import errno
import itertools
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from rltrace.host import clock
from rltrace.host.mapped_file import map_new_file, require_size
from rltrace.record import checksum, redaction
from rltrace.record.encoding import text_of
from rltrace.record.manifest import LINES, PROCESSES, host_name, started_ticks, to_json

COUNTS = "counts.u64"

OPENING = "opening"
"""Folder in the Recording where folders of processes are made; one that stays there belongs to a process that died in
it."""
_ATTEMPT = "+"
"""Precedes the number of the attempt in the name of such a folder; no key contains it."""

Line = tuple[str, dict[str, Any]]
"""Kind and fields of a line of `process.jsonl`."""

COUNT_SLOTS = 1024
"""uint64 slots of `counts.u64`: slot 0 counts lost events, the others how often each hook fired. The same number of
slots follows, with the nanoseconds that each hook took, if that was asked for."""
COUNTS_BYTES = 2 * COUNT_SLOTS * 8

LOST = 0

UNSAID_ROLE = "process"
"""What a process is called until it, or a hook, says what it is."""


class ProcessFolder:
    """Appends to the folder of this process; nothing in it is ever rewritten.

    The folder is made aside, and moved to where readers look once it says who the process is. So whenever this process
    is killed, no reader meets a process without an identity.
    """

    def __init__(self, recording: Path, key: str, attempt: int, identity: Line) -> None:
        """Make the folder aside.

        Args:
            recording: Folder of the Recording.
            key: From `process_key`, unique among the processes of a run.
            attempt: Unique among this process's attempts to make the folder.
            identity: The line that says who the process is.

        Raises:
            OSError: it cannot be written, or the disk is full.
        """
        self._aside = recording / OPENING / f"{key}{_ATTEMPT}{attempt}"
        self._place = recording / PROCESSES / key
        self.path = self._aside
        """Where the folder is now."""
        self._broken_line = b""
        self._numbers = itertools.count()
        """Numbers of lines, by which a reader sees which are missing."""
        self._unused: list[int] = []
        """Numbers of lines that could not be written."""
        try:
            self._aside.mkdir(parents=True)
            self._map = map_new_file(self.path / COUNTS, COUNTS_BYTES)
            self.counts = memoryview(self._map).cast("Q")
            (self.path / LINES).touch()
            kind, fields = identity
            self.append(kind, **fields)
        except BaseException:  # what a signal handler raised too: leave nothing behind
            self.discard()
            raise

    def show(self) -> None:
        """Move the folder to where readers look; calling this again does nothing.

        Raises:
            OSError: it cannot be moved, or somebody has deleted it.
        """
        self._place.parent.mkdir(exist_ok=True)  # on another host than the run's it is the first
        try:
            self._aside.rename(self._place)
        except FileNotFoundError:
            if not self._place.is_dir():
                raise
        self.path = self._place

    def discard(self) -> None:
        """Remove what was made aside; what readers see stays."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def append(self, kind: str, **fields: Any) -> int:
        """Append one JSON line, and return its bytes. If the process dies while writing it, the reader drops it.

        Raises:
            OSError: the disk is full.
        """
        number = self._unused.pop() if self._unused else next(self._numbers)
        try:
            return self._append(checksum.signed(to_json({"kind": kind, "line": number, **fields})))
        except BaseException:
            self._unused.append(number)
            raise

    def _append(self, said: str) -> int:
        line = self._broken_line + said.encode() + b"\n"
        written_bytes = self._write(line)
        self._broken_line = b"" if written_bytes == len(line) else b"\n"
        if self._broken_line:
            raise OSError(errno.ENOSPC, f"{written_bytes} of {len(line)} bytes were written", str(self.path / LINES))
        return written_bytes

    def _write(self, line: bytes) -> int:
        if self._map.closed:
            raise ValueError("this process has stopped recording")
        # Opened anew: see `mapped_file`.
        descriptor = os.open(self.path / LINES, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            require_size(self.path / LINES, os.fstat(descriptor).st_size + len(line))
            return os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def counts_in_file(self) -> dict[int, int]:
        """Return the slots that are not 0. If somebody has truncated the file, reading the mapping would kill the
        process.

        Raises:
            OSError: it cannot be read.
        """
        content = (self.path / COUNTS).read_bytes()
        counts = memoryview(content[: len(content) // 8 * 8]).cast("Q")
        return {slot: count for slot, count in enumerate(counts) if count}

    def close(self) -> None:
        """Stop writing."""
        self.counts.release()
        self._map.close()


def process_key(start_ns: int) -> str:
    """Return the folder name of this process: host, pid and when it began to record, since one pid can run two
    interpreters."""
    return f"{_host()}-{os.getpid()}-{start_ns}"


def _host() -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in host_name())


def is_of_this_host(key: str) -> bool:
    """Return whether the process with a key runs, or ran, on this host."""
    return key.rsplit("-", 2)[0] == _host()


def discard_attempts(recording: Path, key: str) -> None:
    """Remove what interrupted attempts to make the folder of a process left."""
    for left in (recording / OPENING).glob(f"{key}{_ATTEMPT}*"):
        shutil.rmtree(left, ignore_errors=True)


def key_of_opening(name: str) -> str:
    """Return the key of the process that makes a folder in `OPENING`."""
    return name.partition(_ATTEMPT)[0]


def pid_of(key: str) -> int | None:
    """Return the pid of the process with a key; None if that is not a key."""
    *_, pid, _ = ("", "", *key.rsplit("-", 2))
    return int(pid) if pid.isdecimal() else None


def running_processes(recording: Path) -> list[str]:
    """Return the folder names of the processes of this host that record and run now."""
    here = [key for key in os.listdir(recording / PROCESSES) if is_of_this_host(key)]
    return [key for key in here if (pid := pid_of(key)) is not None and started_ticks(pid) is not None]


def identity(start_ns: int) -> dict[str, Any]:
    """Return what is known about this process from the start."""
    return {
        "host": host_name(),
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "start_ns": start_ns,
        "start_ticks": started_ticks(os.getpid()),
        **clock.domain(),
        **clock.anchor(),
        "argv": redaction.command(sys.orig_argv),
        "python": platform.python_version(),
    }


def sound_fields(who: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Sort what a program says about its process into JSON fields and refusals.

    Args:
        who: role, rank, device and name; other fields are taken as they are.

    Returns:
        The fields that have their types, and a line for each that does not.
    """
    sound: dict[str, Any] = {}
    refused = []
    for field, value in who.items():
        type_, wanted = _TYPES.get(field, (None, ""))
        if value is None or type_ is None:
            sound[field] = value
        elif not isinstance(value, type_) or isinstance(value, bool):
            refused.append(f"{field} must be {wanted}, not {text_of(value)!r}")
        elif type_ is Integral and not -(2**63) <= int(value) < 2**63:
            refused.append(f"{field} must be {wanted} of 64 bits, not {text_of(value)}")
        else:
            sound[field] = _CONVERTED[type_](value)
    return sound, refused


_TYPES: dict[str, tuple[Any, str]] = {
    "role": (str, "text"),
    "name": (str, "text"),
    "rank": (Integral, "a whole number"),
    "world_size": (Integral, "a whole number"),
    "max_bytes": (Integral, "a whole number"),
    "device": (Mapping, "a mapping of host and uuid"),
}
_CONVERTED: dict[Any, Callable[[Any], Any]] = {
    str: text_of,
    Integral: int,
    Mapping: lambda device: {text_of(key): None if value is None else text_of(value) for key, value in device.items()},
}


def append_exit(folder: Path, *, end_ns: int, killed_by: int | None, was_stopped: bool) -> None:
    """Append how a process ended that did not say so itself; the process that watched it calls this.

    Args:
        folder: Folder of the process.
        end_ns: When it was seen to be gone, by the clock of this host.
        killed_by: The signal; None if it exited by itself, or ended with the Ray cluster of its driver.
        was_stopped: It was killed because another process of the run had died, or the user had stopped the run.
    """
    line = {"kind": "exit", "end_ns": end_ns, "killed_by": killed_by, "was_stopped": was_stopped}
    try:
        with (folder / LINES).open("a") as lines:
            # The process may have died inside its last line.
            lines.write("\n" + checksum.signed(json.dumps(line)) + "\n")
    except OSError:
        pass
