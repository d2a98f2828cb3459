"""Trajectories with their turns, calls of tools, and requests.

A span belongs to the trajectory whose id it says, wherever it ran, in a process of its own too; else to the one that is
around it in its task. verl runs the tools of a turn in tasks of their own, and says the id since rltrace knows it.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.observations import Observations, once
from rltrace.analysis.requests import engines_of
from rltrace.analysis.span_tables import Numbers, Places, SpanTable, Timed, around, at, last_begun, passed
from rltrace.events import AGENT_REQUEST, GENERATE, TURN
from rltrace.read.columns import OPEN

TURNS = (TURN, AGENT_REQUEST, GENERATE)
"""Spans that are turns of a trajectory: the first of these kinds that a Recording has inside of one."""


class Located(Timed, Protocol):
    """Spans, as columns, with the trajectories that they say they belong to."""

    @property
    def ids(self) -> Numbers:
        """The id of the trajectory; 0 if it does not say one."""

    @property
    def process(self) -> Numbers:
        """A number for the process of each."""


class Calls(NamedTuple):
    """Calls of tools, one row each."""

    starts: Numbers
    ends: Numbers
    trajectory: Places
    """The place of its trajectory; -1 if none is known."""
    tool: NDArray[np.int64]
    """The place of its name."""


class Trajectories:
    """All trajectories of a Recording, and what belongs to each."""

    def __init__(self, seen: Observations) -> None:
        self.table = SpanTable(seen, lambda process: process.trajectories)
        self.prompts = self.table.column("prompts")
        self.are_validating = self.table.column("are_validating") != 0
        self.calls, self.tools = self._calls(seen)
        turns = {name: self.of(passed(seen, name)) for name in TURNS}
        self.turn = next((name for name in TURNS if (turns[name] >= 0).any()), None)
        """The name of the spans that are turns; None if no trajectory has any."""
        self.turns = turns[self.turn] if self.turn is not None else np.empty(0, np.intp)
        """The trajectory of each turn."""
        self.of_agent_request = turns[AGENT_REQUEST]
        """The trajectory of each request of an agent loop."""
        self.of_engine_request = self._of_engine(seen, turns[GENERATE])
        """That of each engine's request which the trajectory's program sent itself."""

    def __len__(self) -> int:
        return len(self.table)

    @property
    def are_over(self) -> NDArray[np.bool_]:
        """Whether each of them has ended."""
        return np.asarray(self.table.ends != OPEN)

    def of(self, spans: SpanTable) -> Places:
        """Return the trajectory of each span; -1 if none is known."""
        return owners(spans, self.table)

    def turns_of_each(self) -> NDArray[np.int64]:
        """Return how many turns each trajectory has."""
        return np.bincount(self.turns[self.turns >= 0], minlength=len(self))

    def _calls(self, seen: Observations) -> tuple[Calls, list[str]]:
        spans = SpanTable(seen, lambda process: process.tool_calls)
        kept = [process.tool_calls for process in seen.processes if process.tool_calls]
        names = sorted(set(chain.from_iterable(of.names for of in kept)))
        places = [np.array([names.index(name) for name in of.names], np.int64)[np.array(of.tools)] for of in kept]
        tool = np.concatenate([np.empty(0, np.int64), *places])
        return Calls(spans.starts, spans.ends, self.of(spans), tool), names

    def _of_engine(self, seen: Observations, of_generation: Places) -> Places:
        engines, generations = passed(seen, "rollout.request"), passed(seen, GENERATE)
        found = np.full(len(engines), -1)
        asked = engines_of(generations, engines)
        found[asked[asked >= 0]] = of_generation[asked >= 0]
        return found


def owners(spans: Located, trajectories: Located) -> Places:
    """Return the trajectory of each span; -1 if none is known."""
    ids = spans.ids
    found = np.where(ids != 0, -1, around(spans, trajectories))
    # Programs number the trajectories of each process; of equal ids, the own process's counts.
    own_keys = _of_process(ids, spans.process), _of_process(trajectories.ids, trajectories.process)
    for keys, of_keys in (own_keys, (ids, trajectories.ids)):
        said = last_begun(keys, spans.starts, of_keys, trajectories.starts)
        is_said = (ids != 0) & (found < 0) & (at(trajectories.until, said) >= spans.starts)
        found = np.where(is_said, said, found)
    return found


def _of_process(ids: Numbers, process: Numbers) -> Numbers:
    """Return ids that no two processes share."""
    with np.errstate(over="ignore"):
        return np.asarray(ids * np.int64(1_000_003) ^ (process + 1) * np.int64(0x9E3779B97F4A7C1))


trajectories = once(Trajectories)
