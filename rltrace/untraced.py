"""Watches all processes below one, to tell which of them should have been traced and were not. Linux only.

What the kernel tells of each is compared with what is recorded: a Python that was started so that no start-up hook runs
says nothing itself. A process that is gone within a tenth of a second may not be seen.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from rltrace.manifest import PROCESSES, UNTRACED, redact_command
from rltrace.recorder import DIR_VARIABLE
from rltrace.recording import Recording
from rltrace.startup.rltrace_startup import is_traced

LOOKS_BETWEEN_EXAMINATIONS = 10
"""New processes are examined at each look, the others less often: a shell becomes Python by `exec`."""

PYTHON = re.compile(r"(?:python|pypy)[0-9.]*[dt]?")
"""File names of interpreters."""
_PACKAGE = re.compile(rb"/(?:site|dist)-packages/\S+\.so")


class ProcessTree:
    """The processes below one.

    Args:
        root: Its pid; it is not among them.
        recording: That they are to join.
    """

    def __init__(self, root: int, recording: Path) -> None:
        self._recording = recording
        self._root = root
        self._members = {root}
        self._seen: set[int] = set()
        self._looks = 0
        self._reasons: dict[int, tuple[list[str], str]] = {}
        """Command and reason of each process that will not be traced, unless it is recorded after all."""

    def look(self) -> None:
        """See who is new and who is gone."""
        running = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        new = running - self._seen
        self._seen = running
        while born := {pid for pid in new - self._members if _parent(pid) in self._members}:
            self._members |= born
        self._looks += 1
        everybody = self._looks % LOOKS_BETWEEN_EXAMINATIONS == 0
        for pid in (running - self._recorded() if everybody else new) & self._members - {self._root}:
            self._examine(pid)

    def write(self) -> None:
        """Append who was not traced to the Recording."""
        said = {int(line["pid"]) for line in Recording.open(self._recording).untraced}  # by themselves
        known = self._recorded() | said
        lines = [
            json.dumps({"pid": pid, "command": redact_command(command), "reason": reason}) + "\n"
            for pid, (command, reason) in sorted(self._reasons.items())
            if pid not in known
        ]
        if lines:
            with (self._recording / UNTRACED).open("a") as file:
                file.write("".join(lines))

    def _recorded(self) -> set[int]:
        """Pids of the processes that record."""
        return {int(name.rsplit("-", 2)[1]) for name in os.listdir(self._recording / PROCESSES)}

    def _examine(self, pid: int) -> None:
        try:
            if not PYTHON.fullmatch(Path(os.readlink(f"/proc/{pid}/exe")).name):
                return
            command = _words(pid, "cmdline")
            reason = why_untraced(command, _words(pid, "environ"))
            if reason is None and is_traced(command) and self._looks % LOOKS_BETWEEN_EXAMINATIONS == 0:
                reason = self._why_unheard(pid)
        except OSError:  # it is gone
            return
        if command and reason is not None:
            self._reasons[pid] = command, reason

    def _why_unheard(self, pid: int) -> str | None:
        """A process that has loaded packages has met our start-up hook at the first of them, if there was one."""
        if not _PACKAGE.search(Path(f"/proc/{pid}/maps").read_bytes()):
            return None
        return "no start-up hook ran in it: PYTHONPATH was replaced, or another sitecustomize comes before ours"


def why_untraced(command: list[str], environment: list[str]) -> str | None:
    """What keeps our start-up hook out of a Python process.

    Args:
        command: Its command line.
        environment: Its variables, "NAME=value".

    Returns:
        The reason; None if nothing does.
    """
    options = python_options(command)
    if "S" in options:
        return "started with -S: Python runs no start-up hook"
    if not any(variable.startswith(f"{DIR_VARIABLE}=") for variable in environment):
        return f"its environment was replaced: {DIR_VARIABLE} is not in it"
    for option in "IE":
        if option in options:
            return f"started with -{option}: Python ignores PYTHONPATH, and rltrace is not installed for it"
    return None


def python_options(command: list[str]) -> str:
    """The letters of the options that the interpreter itself is given."""
    letters = ""
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word == "-" or word.startswith("--"):
            break
        for at, letter in enumerate(word[1:], 1):
            if letter in "cm":
                return letters
            if letter in "WX":  # the rest is its value, or the next word
                if at == len(word) - 1:
                    next(words, None)
                break
            letters += letter
    return letters


def _words(pid: int, file: str) -> list[str]:
    return [os.fsdecode(word) for word in Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")[:-1]]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return None
