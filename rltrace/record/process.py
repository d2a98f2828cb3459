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
from rltrace.record import checksum
from rltrace.record.encoding import text_of
from rltrace.record.manifest import LINES, PROCESSES, host_name, redact_command, started_ticks, to_json

COUNTS = "counts.u64"

OPENING = "opening"
"""In the Recording: folders of processes that are being made; one that stays there is of a process that died in it."""
_ATTEMPT = "+"
"""Before the number of the attempt, in the name of such a folder; in no key."""

Line = tuple[str, dict[str, Any]]
"""Kind and fields of a line of `process.jsonl`."""

COUNT_SLOTS = 1024
"""uint64 slots of `counts.u64`: slot 0 counts lost events, the others how often each hook fired. As many behind them:
nanoseconds that each hook took, where that was asked for."""
COUNTS_BYTES = 2 * COUNT_SLOTS * 8

LOST = 0

UNSAID_ROLE = "process"
"""What a process is called until it, or a hook, says what it is."""


class ProcessFolder:
    """Appends to the folder of this process; nothing in it is ever rewritten.

    It is made aside, and moved to where readers look once it says who the process is: whenever this one is killed, no
    reader meets a process that is nobody.
    """

    def __init__(self, recording: Path, key: str, attempt: int, identity: Line) -> None:
        """Make the folder aside.

        Args:
            recording: The Recording's folder.
            key: From `process_key`, unique among the processes of a run.
            attempt: Unique among those of this process to make it.
            identity: The line that says who the process is.

        Raises:
            OSError: it cannot be written, or the disk is full.
        """
        self._aside = recording / OPENING / f"{key}{_ATTEMPT}{attempt}"
        self._place = recording / PROCESSES / key
        self.path = self._aside
        """Where it is now."""
        self._broken_line = b""
        self._numbers = itertools.count()
        """Of lines: a reader sees which are missing."""
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
        """Move it to where readers look; done again, this does nothing.

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
        """Remove what was made aside of it; what readers see stays."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def append(self, kind: str, **fields: Any) -> None:
        """Append one JSON line; it is whole or, if the process dies in it, dropped by the reader.

        Raises:
            OSError: the disk is full.
        """
        number = self._unused.pop() if self._unused else next(self._numbers)
        try:
            self._append(checksum.signed(to_json({"kind": kind, "line": number, **fields})))
        except BaseException:
            self._unused.append(number)
            raise

    def _append(self, said: str) -> None:
        line = self._broken_line + said.encode() + b"\n"
        written_bytes = self._write(line)
        self._broken_line = b"" if written_bytes == len(line) else b"\n"
        if self._broken_line:
            raise OSError(errno.ENOSPC, f"{written_bytes} of {len(line)} bytes were written", str(self.path / LINES))

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
        """Slots that are not 0. Of a file that somebody has cut, reading the mapping would kill the process.

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
    """Folder name of this process: host, pid and when it began to record, for one pid can run two interpreters."""
    return f"{_host()}-{os.getpid()}-{start_ns}"


def _host() -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in host_name())


def is_of_this_host(key: str) -> bool:
    """Whether the process with a key is, or was, one of this host."""
    return key.rsplit("-", 2)[0] == _host()


def discard_attempts(recording: Path, key: str) -> None:
    """Remove what attempts to make the folder of a process left that were interrupted."""
    for left in (recording / OPENING).glob(f"{key}{_ATTEMPT}*"):
        shutil.rmtree(left, ignore_errors=True)


def key_of_opening(name: str) -> str:
    """The key of the process that a folder in `OPENING` was to be of."""
    return name.partition(_ATTEMPT)[0]


def pid_of(key: str) -> int | None:
    """Of the process with a key; None if it is no key."""
    *_, pid, _ = ("", "", *key.rsplit("-", 2))
    return int(pid) if pid.isdecimal() else None


def running_processes(recording: Path) -> list[str]:
    """Folder names of the processes of this host that record and run now."""
    here = [key for key in os.listdir(recording / PROCESSES) if is_of_this_host(key)]
    return [key for key in here if (pid := pid_of(key)) is not None and started_ticks(pid) is not None]


def identity(start_ns: int) -> dict[str, Any]:
    """What is known about this process from the start."""
    return {
        "host": host_name(),
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "start_ns": start_ns,
        "start_ticks": started_ticks(os.getpid()),
        **clock.domain(),
        **clock.anchor(),
        "argv": redact_command(sys.orig_argv),
        "python": platform.python_version(),
    }


def sound_fields(who: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What a program may say of its process, as it goes into JSON.

    Args:
        who: role, rank, device and name; what a program says besides is taken as it is.

    Returns:
        The fields that are of their types, and of each that is not a line that says so.
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
    "max_bytes": (Integral, "a whole number"),
    "device": (Mapping, "a mapping of host and uuid"),
}
_CONVERTED: dict[Any, Callable[[Any], Any]] = {
    str: text_of,
    Integral: int,
    Mapping: lambda device: {text_of(key): None if value is None else text_of(value) for key, value in device.items()},
}


def append_exit(folder: Path, *, end_ns: int, killed_by: int | None, was_stopped: bool) -> None:
    """Append how a process went that is gone and said nothing: told by the one that watched it.

    Args:
        folder: Of the process.
        end_ns: When it was seen to be gone, by the clock of this host.
        killed_by: The signal; None if it left by itself, or with the Ray cluster of its driver.
        was_stopped: It was killed because another process of the run had died, or the user had stopped the run.
    """
    line = {"kind": "exit", "end_ns": end_ns, "killed_by": killed_by, "was_stopped": was_stopped}
    try:
        with (folder / LINES).open("a") as lines:
            # The process may have died inside its last line.
            lines.write("\n" + checksum.signed(json.dumps(line)) + "\n")
    except OSError:
        pass
