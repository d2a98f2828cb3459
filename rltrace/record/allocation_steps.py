"""The steps of which everything is kept (every allocation, every kernel), and which of them run now.

Only the process that runs the training loop knows the number of a step; workers and engines are other processes. It
writes the number to a small file of the Recording, and they check whether that file has grown. This needs the standard
library only, because every process loads it.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rltrace.host.interruption import own_failure
from rltrace.record.step_numbers import numbers

VARIABLE, KERNELS_VARIABLE = "RLTRACE_ALLOCATIONS", "RLTRACE_KERNELS"
"""Environment variables with the numbers of the steps whose allocations and kernels are kept, separated by commas."""

FILE = "chosen.jsonl"
"""File in a Recording, and in the folder that stands for it on another host: one line per begin and end of a step."""


MOST = 1000
"""How many steps may be kept whole; the allocations of one are some hundred megabytes for a large model."""


def parse(text: str) -> frozenset[int]:
    """Return the steps that `3` or `3,5-7` names; an empty text names none.

    Raises:
        ValueError: it names something else, or more than `MOST`.
    """
    return frozenset(numbers(text).each(MOST) if text.strip() else ())


def say(folder: Path, step: int, process: str, *, is_over: bool) -> None:
    """Tell other processes that a process has begun or ended a step; once each, so that no two lines are equal.

    Raises:
        OSError: the folder cannot be written.
    """
    _append(folder, [json.dumps({"step": step, "process": process, "is_over": is_over})])


def say_marked(folder: Path, process: str) -> None:
    """Tell other processes that a process marks its steps, so that none has to be inferred.

    Raises:
        OSError: the folder cannot be written.
    """
    _append(folder, [json.dumps({"marked_by": process})])


def lines(folder: Path) -> list[str]:
    """Return what was said, the oldest first."""
    try:
        return (folder / FILE).read_text().splitlines()
    except own_failure(OSError):
        return []


def merge(folder: Path, said: Iterable[str]) -> list[str]:
    """Append what was said elsewhere and is missing here; return all that is here afterwards.

    Raises:
        OSError: as for `say`.
    """
    here = lines(folder)
    new = [line for line in said if line not in here]
    _append(folder, new)
    return [*here, *new]


def _append(folder: Path, said: Iterable[str]) -> None:
    if text := "".join(f"{line}\n" for line in said):
        with (folder / FILE).open("a") as file:
            file.write(text)


def step_number(args: Mapping[str, Any], place: int) -> int | None:
    """Return the number of a step's span; one without a number has its place, as in `summary`."""
    try:
        return operator.index(args["step"]) if "step" in args else place
    except own_failure(TypeError):
        return None


class RunningSteps:
    """The chosen steps that run, according to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = str(folder / FILE)
        self._size_bytes = 0
        self._begun_by: dict[int, str] = {}
        self.met: set[int] = set()
        """Steps that have begun, whether or not they are over."""
        self.ended: set[int] = set()
        """Steps that some process has ended."""
        self.are_marked = False
        """Whether a process marks its steps."""

    def now(self) -> list[int]:
        """Return the steps that have begun and not ended, the first one first.

        If several processes begin a step (each rank its own, or a second try after a death), it runs until the last one
        that began has ended it. A call costs a look at the size of a file.
        """
        try:
            size_bytes = os.stat(self._path).st_size
        except own_failure(OSError):
            return []
        if size_bytes != self._size_bytes:
            self._size_bytes = size_bytes
            self._read()
        return list(self._begun_by)

    def marked(self) -> bool:
        """Return whether a process marks its steps. What was said once stays so, and is not looked for again."""
        if not self.are_marked:
            self.now()
        return self.are_marked

    def _read(self) -> None:
        self._begun_by.clear()
        over: set[int] = set()
        for line in lines(self._folder):
            try:
                said = json.loads(line)
                if "marked_by" in said:
                    self.are_marked = True
                    continue
                step, process, is_over = int(said["step"]), str(said["process"]), bool(said["is_over"])
            except own_failure(ValueError, KeyError, TypeError):  # being written
                continue
            self.met.add(step)
            if is_over:
                self.ended.add(step)
            if not is_over and step not in over:
                self._begun_by[step] = process
            elif self._begun_by.get(step) == process:
                del self._begun_by[step]
                over.add(step)
