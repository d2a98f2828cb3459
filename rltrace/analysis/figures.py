"""The figures of a Recording and what bounds its steps: computed once, and kept until the Recording changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import msgspec

from rltrace import plugins
from rltrace.analysis.encoded import from_kept, to_keep
from rltrace.analysis.findings import Why, why
from rltrace.analysis.observations import Observations
from rltrace.analysis.selected import selected
from rltrace.analysis.steps import StepWindows
from rltrace.analysis.summary import Analysed, Summary, analyse
from rltrace.host.garbage_collector import without_collection
from rltrace.read.cache import Cache
from rltrace.read.recording import Recording
from rltrace.read.selection import ALL, Selection

NAME = "figures"
"""Of the file in the cache."""


class Figures:
    """What a Recording, or a part of it, says."""

    def __init__(self, summary: Summary, judge: Callable[[], Why], damaged: list[str]) -> None:
        self.summary = summary
        self._judge = judge
        self.damaged = damaged
        """Files of the cache that could not be used, because they are damaged."""

    @cached_property
    def why(self) -> Why:
        """What bounds its steps; computed when it is asked for, if it was not kept."""
        return self._judge()


class _Kept(msgspec.Struct, array_like=True):
    summary: Summary
    why: Why


def figures(recording: Recording, selection: Selection = ALL) -> Figures:
    """Return the figures of a Recording, or of a part: those that were kept, if it has not changed since."""
    with without_collection():
        is_kept = selection == ALL and can_be_kept()
        return _kept(recording) if is_kept else _made(selected(recording, selection, whole_steps=True))


def can_be_kept() -> bool:
    """Return whether findings are of rltrace's own code alone: nobody knows when others' code changes."""
    return plugins.findings() == plugins.FINDINGS


class Read(NamedTuple):
    """A whole Recording that was read, with its figures."""

    analysed: Analysed
    why: Why
    damaged: list[str]
    """Files of the cache that could not be used, because they are damaged."""


def read(recording: Recording) -> Read:
    """Read a whole Recording, for those who need more of it than figures; these are not computed again if they were
    kept, and nobody has changed the Recording since."""
    cache = Cache(recording, NAME)
    found = _load(cache) if cache.is_worth_it and can_be_kept() else None
    if found is None:
        analysed = analyse(recording)
        return Read(analysed, why(analysed), [*cache.damaged, *analysed.seen.damaged])
    seen = Observations(recording)
    return Read(Analysed(seen, StepWindows(seen), found.summary), found.why, [*cache.damaged, *seen.damaged])


def _made(recording: Recording, damaged: list[str] | None = None) -> Figures:
    analysed = analyse(recording)
    return Figures(analysed.summary, lambda: why(analysed), [*(damaged or []), *analysed.seen.damaged])


def _load(cache: Cache) -> _Kept | None:
    content = cache.load()
    return None if content is None else from_kept(content, _Kept)


def _kept(recording: Recording) -> Figures:
    cache = Cache(recording, NAME)
    if not cache.is_worth_it:
        return _made(recording)
    found = _load(cache)
    if found is not None:
        return Figures(found.summary, lambda: found.why, cache.damaged)
    cache.begin()
    made = _made(recording, cache.damaged)
    summary, judged, damaged = made.summary, made.why, made.damaged
    del made  # and with it all spans, before as much is written
    cache.save(to_keep(_Kept(summary, judged)))
    return Figures(summary, lambda: judged, damaged)
