"""The folder of one process in a Recording: who it is, its hooks, and counts that survive `kill -9`."""

from __future__ import annotations

import errno
import itertools
import json
import os
import platform
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

from rltrace import checksum, clock
from rltrace.manifest import LINES, PROCESSES, redact_command, started_ticks
from rltrace.mapped_file import map_new_file

COUNTS = "counts.u64"

COUNT_SLOTS = 1024
"""uint64 slots of `counts.u64`: slot 0 counts lost events, the others how often each hook fired. As many behind them:
nanoseconds that each hook took, where that was asked for."""
COUNTS_BYTES = 2 * COUNT_SLOTS * 8

LOST = 0

UNSAID_ROLE = "process"
"""What a process is called until it, or a hook, says what it is."""


class ProcessFolder:
    """Appends to the folder of this process; nothing in it is ever rewritten."""

    def __init__(self, recording: Path, key: str) -> None:
        """Create the folder.

        Args:
            recording: The Recording's folder.
            key: From `process_key`, unique among the processes of a run.

        Raises:
            OSError: it cannot be written, or the disk is full.
        """
        self.path = recording / PROCESSES / key
        self.path.mkdir(parents=True)
        try:
            self._map = map_new_file(self.path / COUNTS, COUNTS_BYTES)
            (self.path / LINES).touch()
        except OSError:  # leave nothing behind: it is tried again under the same name
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self.counts = memoryview(self._map).cast("Q")
        self._broken_line = b""
        self._numbers = itertools.count()
        """Of lines: a reader sees which are missing."""

    def append(self, kind: str, **fields: Any) -> None:
        """Append one JSON line; it is whole or, if the process dies in it, dropped by the reader.

        Raises:
            OSError: the disk is full.
        """
        said = checksum.signed(json.dumps({"kind": kind, "line": next(self._numbers), **fields}, default=str))
        line = self._broken_line + said.encode() + b"\n"
        written_bytes = self._write(line)
        self._broken_line = b"" if written_bytes == len(line) else b"\n"
        if self._broken_line:
            raise OSError(errno.ENOSPC, f"{written_bytes} of {len(line)} bytes were written", str(self.path / LINES))

    def _write(self, line: bytes) -> int:
        if self._map.closed:
            raise ValueError("it has stopped writing")
        # Opened anew: see `mapped_file`.
        descriptor = os.open(self.path / LINES, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            return os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Stop writing."""
        self.counts.release()
        self._map.close()


def process_key(start_ns: int) -> str:
    """Folder name of this process: host, pid and when it began to record, for one pid can run two interpreters."""
    host = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in socket.gethostname())
    return f"{host}-{os.getpid()}-{start_ns}"


def running_processes(recording: Path) -> list[str]:
    """Folder names of the processes of this host that record and run now."""
    host = process_key(0).rsplit("-", 2)[0]
    keys = [name.rsplit("-", 2) for name in os.listdir(recording / PROCESSES)]
    return ["-".join(key) for key in keys if key[0] == host and started_ticks(int(key[1])) is not None]


def identity(start_ns: int) -> dict[str, Any]:
    """What is known about this process from the start."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "start_ns": start_ns,
        "start_ticks": started_ticks(os.getpid()),
        **clock.domain(),
        **clock.anchor(),
        "argv": redact_command(sys.orig_argv),
        "python": platform.python_version(),
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
            lines.write(
                "\n" + checksum.signed(json.dumps(line)) + "\n"
            )  # the process may have died inside its last line
    except OSError:
        pass
