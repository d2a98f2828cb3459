"""Every request of a Recording once, with what the processes on its way said of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rltrace.analysis.observations import Observations, once
from rltrace.analysis.requests import Joined, joined
from rltrace.analysis.span_tables import Numbers, Places, at
from rltrace.analysis.trajectories import trajectories


class Asked(NamedTuple):
    """Requests, one row each; -1 where nobody said a number."""

    starts: Numbers
    ends: Numbers
    """When whoever asked first had the answer; `OPEN` if that is not over."""
    trajectory: Places
    engine_starts: Numbers
    engine_ends: Numbers
    queued_ns: Numbers
    first_token_ns: Numbers
    cached_tokens: Numbers
    prompt_tokens: Numbers
    tokens: Numbers
    prompts: Numbers
    """What the samples of one prompt have in common; 0 if nothing says so."""

    def part(self, chosen: Places) -> Asked:
        """Return some of them; those that follow one another, as the requests of a step do, are not copied."""
        if len(chosen) and (np.diff(chosen) == 1).all():
            rows = slice(int(chosen[0]), int(chosen[-1]) + 1)
            return Asked(*(column[rows] for column in self))
        return Asked(*(column.take(chosen) for column in self))


def _asked(seen: Observations) -> Asked:
    way, of = joined(seen), trajectories(seen)
    engine_of_agent = at(way.engine_of, way.server_of)
    alone = np.flatnonzero(way.agent_of < 0)
    nobody, not_served = np.full(len(alone), -1), np.full(len(way.only_engines), -1)
    parts = (
        _part(way, np.arange(len(way.agents)), way.server_of, engine_of_agent, of.of_agent_request),
        _part(way, nobody, alone, way.engine_of[alone], nobody),
        _part(way, not_served, not_served, way.only_engines, of.of_engine_request[way.only_engines]),
    )
    return Asked(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


asked = once(_asked)


def _part(way: Joined, agent: Places, server: Places, engine: Places, trajectory: Places) -> Asked:
    """Return the requests that these spans are of, the outermost first."""
    if not len(agent):
        return Asked(*(np.empty(0, np.int64) for _ in Asked._fields))
    tables = ((way.agents, agent), (way.servers, server), (way.engines, engine))

    def said(column: str, *, innermost: bool) -> Numbers:
        found = np.full(len(agent), -1, np.int64)
        for table, places in tables[::-1] if innermost else tables:
            found = np.where(found < 0, at(table.column(column), places), found)
        return found

    def outermost(column: str) -> Numbers:
        found, is_known = np.full(len(agent), -1, np.int64), np.zeros(len(agent), np.bool_)
        for table, places in tables:
            found = np.where(is_known, found, at(getattr(table, column), places))
            is_known |= places >= 0
        return found

    def of_engine(column: str, otherwise: int = -1) -> Numbers:
        return np.where(engine < 0, otherwise, at(way.engines.column(column), engine))

    return Asked(
        outermost("starts"),
        outermost("ends"),
        trajectory,
        at(way.engines.starts, engine),
        at(way.engines.ends, engine),
        of_engine("queued_ns"),
        of_engine("first_token_ns"),
        of_engine("cached_tokens"),
        said("prompt_tokens", innermost=True),
        said("tokens", innermost=True),
        of_engine("prompts", 0),
    )
