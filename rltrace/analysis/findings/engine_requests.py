"""The requests of each engine, as columns; findings about a rollout share this."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.findings.finding import UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.observations import Passed
from rltrace.events import REQUEST


class EngineRequests(NamedTuple):
    """Requests that began in a steady step and ended, one row each."""

    engines: list[Lane]
    engine: NDArray[np.intp]
    """The place of its engine in `engines`."""
    step: NDArray[np.intp]
    """The place of its steady step."""
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    queued_ns: NDArray[np.int64]
    """How long it waited in the engine's queue; -1 if nobody said so."""
    tokens: NDArray[np.int64]
    """How many tokens the engine made; -1 if nobody said so."""

    def of_step(self, place: int) -> EngineRequests:
        """Return those that began in a step."""
        here = self.step == place
        return EngineRequests(self.engines, *(column[here] for column in self[1:]))


def engine_requests(run: Run) -> EngineRequests:
    """Return the requests of all engines in the steady steps.

    Raises:
        UnjudgeableError: no engine recorded any.
    """
    serving = [process for process in run.seen.processes if REQUEST in process.passed]
    engines = sorted({process.lane for process in serving}, key=order)
    columns = [_columns(process.passed[REQUEST], engines.index(process.lane)) for process in serving]
    rows = np.concatenate([np.empty((0, 5), np.int64), *columns])
    step = run.step_of(rows[:, 1])
    chosen = (step >= 0) & (rows[:, 2] >= rows[:, 1])
    if not chosen.any():
        raise UnjudgeableError("no engine recorded a request in a steady step")
    engine, starts, ends, queued_ns, tokens = rows[chosen].T
    return EngineRequests(engines, engine, step[chosen], starts, ends, queued_ns, tokens)


def _columns(kept: Passed, engine: int) -> NDArray[np.int64]:
    columns = [np.array(column, np.int64) for column in (kept.starts, kept.ends, kept.queued_ns, kept.tokens)]
    return np.column_stack([np.full(len(kept.starts), engine), *columns])
