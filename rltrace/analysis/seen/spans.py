"""Spans of one kind of one process, as columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import EMPTY, Intervals
from rltrace.analysis.seen.compact import MANY, CompactPairs, compact_pairs, narrowed
from rltrace.read.columns import OPEN

NEVER_NS = 1 << 63


Column: TypeAlias = "array[int] | NDArray[Any]"
"""An array while rows are added, then in as few bytes as they take."""


def place_of(name: str, names: list[str]) -> int:
    """Return the place of a name among those of a column; a new one comes last."""
    if name not in names:
        names.append(name)
    return names.index(name)


class Intervalled:
    """Spans of one name, as columns: 16 bytes per span, 8 of many short ones."""

    __slots__ = ("has_open", "over_ns", "pairs")

    NARROWED: ClassVar[tuple[str, ...]] = ()
    """The columns that are kept in as few bytes as they take."""

    def __init__(self) -> None:
        self.pairs: array[int] | CompactPairs = array("q")
        """The start and the end of each, in turn."""
        self.has_open = False
        self.over_ns = NEVER_NS
        """When the process was over; nothing is open after it."""

    def __len__(self) -> int:
        return len(self.pairs) if isinstance(self.pairs, CompactPairs) else len(self.pairs) // 2

    @property
    def starts(self) -> NDArray[np.int64]:
        """When each began."""
        return self._rows[:, 0]

    @property
    def ends(self) -> NDArray[np.int64]:
        """When each ended; `OPEN` for an open one."""
        return self._rows[:, 1]

    @property
    def _rows(self) -> Intervals:
        """The memory of `pairs` itself, if it is there as rows: nobody may change it."""
        if not self.pairs:
            return EMPTY
        if isinstance(self.pairs, CompactPairs):
            return self.pairs.rows()
        rows = np.frombuffer(self.pairs, np.int64).reshape(-1, 2)
        rows.flags.writeable = False
        return rows

    def rows(self, until_ns: int) -> Intervals:
        """Return rows of shape (N, 2), not to be changed; open spans end at `until_ns`, or with their process."""
        rows = self._rows
        if self.has_open:
            rows = rows.copy()
            rows[rows[:, 1] == OPEN, 1] = min(until_ns, self.over_ns)
        return rows

    def ended(self) -> Intervals:
        """Return the same, without open spans."""
        rows = self._rows
        return rows[rows[:, 1] != OPEN] if self.has_open else rows

    def compacted(self) -> Iterator[tuple[Any, str]]:
        """Put numbers into as few bytes as they take, when nothing is added any more; yield where long columns are."""
        assert isinstance(self.pairs, array)
        pairs = compact_pairs(self.pairs, has_open=self.has_open)
        if pairs is not None:
            self.pairs = pairs
            yield pairs, "offsets"
        if len(self) >= MANY:
            for name in self.NARROWED:
                setattr(self, name, narrowed(getattr(self, name)))
                yield self, name


class Stages(Intervalled):
    """Spans of one stage of a weight sync, as columns."""

    __slots__ = ("bytes", "tensors")

    NARROWED = ("bytes", "tensors")

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Column = array("q")
        self.tensors: Column = array("q")


class DeviceSpans(Intervalled):
    """Spans of one kind of work on a GPU's streams, as columns: about 20 bytes per span."""

    __slots__ = ("behind_ns", "largest_error_ns", "moved_bytes", "of_part", "queued_ns")

    NARROWED = ("moved_bytes", "queued_ns", "behind_ns", "of_part")

    def __init__(self) -> None:
        super().__init__()
        self.behind_ns: Column = array("q")
        """How long before its beginning the host had launched it."""
        self.moved_bytes: Column = array("q")
        """Bytes of a collective: to a rank, or from it."""
        self.queued_ns: Column = array("q")
        self.of_part: Column = array("b")
        """1 for a module inside of the model."""
        self.largest_error_ns = 0


class Passed(Intervalled):
    """Spans of one name that requests pass on their way to an engine, as columns: 32 bytes per span, 56 of those that
    say their tokens, 96 of an engine's."""

    __slots__ = (
        "cached_tokens", "first_token_ns", "keys", "places", "prompt_tokens", "prompts", "queued_ns", "stems", "tokens",
        "trajectories",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.places = array("q")
        """Which thread and task of which process it was in."""
        self.keys = array("q")
        """The request's id, or that of Ray's call."""
        self.stems = array("q")
        """The id of an engine's request, without what the engine has put behind it."""
        self.queued_ns = array("q")
        """How long an engine's request waited there; -1 if nobody said so."""
        self.tokens = array("q")
        """How many tokens an engine made for it; -1 if nobody said so."""
        self.prompt_tokens = array("q")
        """How many it was asked with, likewise."""
        self.first_token_ns = array("q")
        """How long after its beginning an engine's request had its first token, likewise."""
        self.cached_tokens = array("q")
        """How many of the prompt's tokens the engine had computed before, likewise."""
        self.prompts = array("q")
        """Of an engine's request, what the samples of one prompt have in common; 0 if nothing says so."""
        self.trajectories = array("q")
        """The trajectory that a request says it belongs to; 0 if it does not say."""


class Trajectories(Intervalled):
    """Trajectories, as columns: 41 bytes per span."""

    __slots__ = ("are_validating", "places", "prompts", "trajectories")

    def __init__(self) -> None:
        super().__init__()
        self.places = array("q")
        """Which thread and task of which process it was in."""
        self.trajectories = array("q")
        """Its id; 0 if it has none."""
        self.prompts = array("q")
        """What the samples of one prompt have in common; 0 if nothing says so."""
        self.are_validating = array("b")
        """1 if it is of a validation."""


class ToolCalls(Intervalled):
    """Calls of tools and environments, as columns: 36 bytes per span."""

    __slots__ = ("names", "places", "tools", "trajectories")

    def __init__(self) -> None:
        super().__init__()
        self.places = array("q")
        """Which thread and task of which process it was in."""
        self.trajectories = array("q")
        """The trajectory that it says it belongs to; 0 if it does not say."""
        self.tools = array("i")
        """The place of the tool's name in `names`."""
        self.names: list[str] = []


class EngineSteps(Intervalled):
    """Steps of an engine, as columns: 56 bytes per span."""

    __slots__ = ("accepted", "drafted", "kv_usage", "preempted", "running", "waiting")

    def __init__(self) -> None:
        super().__init__()
        self.running = array("i")
        self.waiting = array("i")
        """Requests that were computed, and that waited; -1 if nobody said so."""
        self.preempted = array("i")
        """Requests that lost their KV cache in the step."""
        self.kv_usage = array("d")
        """Share of the KV cache that was taken, 0 to 1; -1 if nobody said so."""
        self.drafted = array("i")
        self.accepted = array("i")
        """Tokens that a draft had guessed, and those among them that the model accepted."""


class Forwards(Intervalled):
    """Forwards of models, as columns: 24 bytes per span."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        super().__init__()
        self.tokens = array("q")
