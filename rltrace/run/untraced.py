"""Watches all processes below one process, to find those that should have been traced and were not. Linux only.

It compares what the kernel says about each process with what is recorded: a Python that was started without our
start-up hook says nothing itself. A process that lives for less than a tenth of a second may not be seen.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from rltrace.hooks.startup.rltrace_startup import is_traced
from rltrace.host.parents import parent_of, stack_of
from rltrace.read.command_line import PYTHON, python_options, words_of_program
from rltrace.read.recording import Recording
from rltrace.record import redaction
from rltrace.record.cluster import DIR_VARIABLE
from rltrace.record.manifest import PROCESSES, UNTRACED, to_json
from rltrace.record.process import COUNTS_BYTES

LOOKS_OF_THE_YOUNG = 10
"""How many looks in a row examine a new process, before it gives itself a title; afterwards, one look in so many
does."""

STANDARD_ONLY = "nothing to trace: only standard-library imports"

NO_HOOK_RAN = "no start-up hook ran in it: PYTHONPATH was replaced, or another sitecustomize comes before ours"

DISK_FULL = "the disk of the Recording is full: there was no room for another process's folder"

FOLDER_BYTES = 2 * COUNTS_BYTES
"""On a disk with less room than this, a process may not be able to make its folder."""

_PACKAGE = re.compile(rb"/(?:site|dist)-packages/\S+\.so")


class ProcessTree:
    """The processes below one process.

    Args:
        root: Its pid; it is not among them.
        recording: The Recording that they are to join.
        apart: Pids of our own processes below the root, which are there before the first look.
    """

    def __init__(self, root: int, recording: Path, apart: Iterable[int] = ()) -> None:
        self._recording = recording
        self._root = root
        self._members = {root}
        self._seen = set(apart)
        self._looks = 0
        self._young: dict[int, int] = {}
        """The look at which each process was first seen."""
        self._commands: dict[int, list[str]] = {}
        """The command of each Python, from before it gave itself a title."""
        self._reasons: dict[int, tuple[list[str], str]] = {}
        """Command and reason of each process that will not be traced, unless it turns out to be recorded."""
        self._bare: dict[int, list[str]] = {}
        """The command of each Python that had loaded no package when it was last seen."""
        self._stacks: set[int] = set()
        """Stacks of the processes that record. A fork of one has its hooks, and joins the Recording at its first
        span."""

    def leave_out(self, pid: int) -> None:
        """Take no notice of a process of ours that has just begun."""
        self._seen.add(pid)

    def look(self) -> None:
        """See who is new and who is gone."""
        running = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        new = running - self._seen
        self._seen = running
        while born := {pid for pid in new - self._members if parent_of(pid) in self._members}:
            self._members |= born
        self._looks += 1
        self._young = {pid: look for pid, look in self._young.items() if self._looks - look < LOOKS_OF_THE_YOUNG}
        self._young |= dict.fromkeys(new & self._members - {self._root}, self._looks)
        for pid in self._young:
            self._examine(pid)
        if self._looks % LOOKS_OF_THE_YOUNG == 0:
            recorded = self._recorded()
            self._stacks |= {stack for pid in running & recorded if (stack := stack_of(pid))}
            for pid in running & self._members - recorded - self._young.keys() - {self._root}:
                self._examine(pid)
                self._examine_packages(pid)

    def write(self) -> None:
        """Append the processes that were not traced to the Recording."""
        said = {int(line["pid"]) for line in Recording.open(self._recording).untraced}  # by themselves
        known = self._recorded() | said
        missed = {pid: (command, reason, True) for pid, (command, reason) in self._reasons.items()}
        found = {pid: (command, STANDARD_ONLY, False) for pid, command in self._bare.items()} | missed
        lines = [
            to_json({"pid": pid, "command": redaction.command(command), "reason": reason, "missed": is_missed}) + "\n"
            for pid, (command, reason, is_missed) in sorted(found.items())
            if pid not in known
        ]
        if lines:
            with (self._recording / UNTRACED).open("a") as file:
                file.write("".join(lines))

    def _recorded(self) -> set[int]:
        """Return the pids of the processes that record."""
        return {int(name.rsplit("-", 2)[1]) for name in os.listdir(self._recording / PROCESSES)}

    def _examine(self, pid: int) -> None:
        """Judge a process by its command line and environment."""
        try:
            if not PYTHON.fullmatch(Path(os.readlink(f"/proc/{pid}/exe")).name):
                self._commands.pop(pid, None)  # it was one until it executed another program, as Ray's raylet is
                self._bare.pop(pid, None)
                return
            command, environment = _words(pid, "cmdline"), _words(pid, "environ")
        except OSError:  # it is gone
            return
        if len(command) > 1 and not any(command[1:]):  # it gave itself a title, over both of them
            return
        reason = why_untraced(command, environment) if is_traced(command) else None
        is_bare = reason is None and is_traced(command) and self._is_bare(pid, command)
        if _has_ended(pid):  # in the middle of this: what it had no time to say is empty
            return
        self._commands[pid] = command
        self._reasons.pop(pid, None)
        self._bare.pop(pid, None)
        if reason is not None:
            self._reasons[pid] = command, reason
        elif is_bare:
            self._bare[pid] = command

    def _is_bare(self, pid: int, command: list[str]) -> bool:
        """Return whether it runs a program that has loaded no package."""
        return _has_packages(pid) is False and not self._only_forks(pid, command) and _has_program(pid, command)

    def _only_forks(self, pid: int, command: list[str]) -> bool:
        """Return whether it is multiprocessing's forkserver, which runs nothing itself; those it forks have its command
        line."""
        is_named_so = any(word.startswith("from multiprocessing.forkserver import main") for word in command[1:])
        parent = parent_of(pid) if is_named_so else None
        return parent is not None and self._commands.get(parent) != command

    def _examine_packages(self, pid: int) -> None:
        """Judge a process by its packages: if there was a start-up hook, the first of them has met it."""
        command = self._commands.get(pid)
        if not command or pid in self._reasons or not is_traced(command) or stack_of(pid) in self._stacks:
            return
        if _has_packages(pid):
            is_full = shutil.disk_usage(self._recording).free < FOLDER_BYTES
            self._reasons[pid] = command, DISK_FULL if is_full else NO_HOOK_RAN


def _has_ended(pid: int) -> bool:
    """Return whether a process is gone, or nobody has waited for it yet."""
    try:
        os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return True
    return False


def _has_packages(pid: int) -> bool | None:
    """Return whether a process has loaded packages, which its fork has too; None if it is gone."""
    try:
        return _PACKAGE.search(Path(f"/proc/{pid}/maps").read_bytes()) is not None
    except OSError:
        return None


def _has_program(pid: int, command: list[str]) -> bool:
    """Return whether the script of a Python exists; one without its script ends with an error, and imports nothing."""
    words = words_of_program(command)
    if not words or words[0].startswith("-"):
        return True
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"), words[0]).exists()
    except OSError:  # the process is gone, or the script is not ours to see
        return True


def why_untraced(command: list[str], environment: list[str]) -> str | None:
    """Return what keeps our start-up hook out of a Python process.

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


def _words(pid: int, file: str) -> list[str]:
    return [os.fsdecode(word) for word in Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")[:-1]]
