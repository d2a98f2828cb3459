"""Finds the program that a command runs in the end, and its environment, behind programs that only start other
programs.

It goes by the words of the command alone: it runs nothing and reads no file of the command. What the words do not say
is reported as unknown, with the reason.
"""

from __future__ import annotations

import getopt
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

SHELL = re.compile(r"(?:ba|da|k|z)?sh")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_EXPANDED = re.compile(r"[$`~]")
_OPERATOR = re.compile(r"[();<>|&]+")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A command and the environment that it gets."""

    command: list[str]
    environment: dict[str, str]
    through: list[str] = []
    """The launchers in front of the command, the outermost first."""
    unknown: str | None = None
    """Why the words of the command do not say what it starts; None if they do."""

    @property
    def program(self) -> str | None:
        """The path of the command's first word, as execvp(3) finds it; None if there is no such program."""
        return shutil.which(self.command[0], path=self.environment.get("PATH", os.defpath))


@dataclass(frozen=True)
class _Starter:
    """A program that starts the command behind its options and operands, and changes nothing that matters here."""

    letters: str = ""
    """Its short options, in the form of `getopt`."""
    names: tuple[str, ...] = ()
    operands: int = 0


STARTERS = {
    "ionice": _Starter("c:n:t", ("class=", "classdata=", "ignore")),
    "nice": _Starter("n:", ("adjustment=",)),
    "nohup": _Starter(),
    "numactl": _Starter(
        "i:N:C:m:p:l", ("interleave=", "cpunodebind=", "physcpubind=", "membind=", "preferred=", "localalloc")
    ),
    "setsid": _Starter("cfw", ("ctty", "fork", "wait")),
    "stdbuf": _Starter("i:o:e:", ("input=", "output=", "error=")),
    "taskset": _Starter("ac", ("all-tasks", "cpu-list"), operands=1),
    "time": _Starter("apvf:o:", ("append", "portability", "verbose", "format=", "output=")),
    "timeout": _Starter("k:s:v", ("kill-after=", "signal=", "foreground", "preserve-status", "verbose"), operands=1),
}


def look_through(command: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Return what a command starts in the end.

    Args:
        command: At least one word.
        environment: The environment of the command itself.
    """
    launch = Launch(command=list(command), environment=dict(environment))
    while launch.unknown is None and (look := _look_of(launch.command[0])) is not None:
        outer = Path(launch.command[0]).name
        try:
            inner = look(launch)
        except (getopt.GetoptError, ValueError) as error:
            return _unknown(launch, f"`{outer}`: {error}")
        if not inner.command:
            return _unknown(launch, f"`{outer}` was given no command")
        launch = msgspec.structs.replace(inner, through=[*launch.through, outer])
    return launch


def _unknown(launch: Launch, reason: str) -> Launch:
    """Return the same launch, marked as one whose program is not known."""
    return msgspec.structs.replace(launch, unknown=reason)


def _look_of(program: str) -> Callable[[Launch], Launch] | None:
    name = Path(program).name
    if name == "env":
        return _through_env
    if SHELL.fullmatch(name):
        return _through_shell
    starter = STARTERS.get(name)
    return None if starter is None else lambda launch: _through_starter(launch, starter)


def _through_starter(launch: Launch, starter: _Starter) -> Launch:
    _, words = getopt.getopt(launch.command[1:], starter.letters, list(starter.names))
    return msgspec.structs.replace(launch, command=words[starter.operands :])


def _through_env(launch: Launch) -> Launch:
    """Look through `env [-i] [-u NAME] [NAME=VALUE] COMMAND`."""
    options, words = getopt.getopt(launch.command[1:], "iu:v", ["ignore-environment", "unset=", "debug"])
    environment = launch.environment
    for option, value in options:
        if option in ("-i", "--ignore-environment"):
            environment = {}
        elif option in ("-u", "--unset"):
            environment = {name: kept for name, kept in environment.items() if name != value}
    if words[:1] == ["-"]:
        environment, words = {}, words[1:]
    return _with_assignments(msgspec.structs.replace(launch, environment=environment), words)


def _through_shell(launch: Launch) -> Launch:
    """Look through `sh -c COMMAND` with one simple command. A login shell or an interactive one runs the user's files
    first."""
    options, words = getopt.getopt(launch.command[1:], "ceux")
    if ("-c", "") not in options or not words:
        raise ValueError("it runs a script")
    lexer = shlex.shlex(words[0], posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    parsed = list(lexer)
    if "\n" in words[0].strip() or _EXPANDED.search(words[0]) or any(map(_OPERATOR.fullmatch, parsed)):
        raise ValueError("it runs more than one simple command")
    inner = _with_assignments(launch, parsed)
    return msgspec.structs.replace(inner, command=inner.command[inner.command[:1] == ["exec"] :])


def _with_assignments(launch: Launch, words: Sequence[str]) -> Launch:
    """Return the command with the variables that are set in front of it."""
    environment = dict(launch.environment)
    at = 0
    while at < len(words) and (found := _ASSIGNMENT.fullmatch(words[at])):
        environment[found[1]] = found[2]
        at += 1
    return msgspec.structs.replace(launch, command=list(words[at:]), environment=environment)
