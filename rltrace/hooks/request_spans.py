"""A span for each request of an engine, from the queue to its last token."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

from rltrace.events import REQUEST
from rltrace.host.clock import now_ns
from rltrace.record import spans


class Lanes:
    """Hands out numbers from 1, the smallest free one first; one thing holds a number at a time."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._numbers = itertools.count(1)

    def take(self) -> int:
        """Take a number that nobody holds."""
        return heapq.heappop(self._free) if self._free else next(self._numbers)

    def give_back(self, lane: int) -> None:
        """Let somebody else have the number."""
        heapq.heappush(self._free, lane)


class Requests:
    """The requests in flight, each on a lane that no other request uses meanwhile."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[int, int]] = {}
        self._queued_ns: dict[str, int] = {}
        self._lanes = Lanes()

    @property
    def in_flight(self) -> int:
        """The number of requests that have begun and not ended."""
        return len(self._begun)

    def begin(self, request_id: str) -> None:
        """Note when a request was queued; one that is queued again keeps its beginning."""
        if request_id not in self._begun:
            self._begun[request_id] = (now_ns(), self._lanes.take())

    def scheduled(self, request_id: str, at_ns: int) -> None:
        """Note when the first step that computes a request began: until then it waited."""
        begun = self._begun.get(request_id)
        if begun is not None:
            self._queued_ns.setdefault(request_id, max(0, at_ns - begun[0]))

    def end(self, request_id: str, **args: Any) -> None:
        """Write the span of a request that is done, with how long it waited, if that is known."""
        begun = self._begun.pop(request_id, None)
        queued_ns = self._queued_ns.pop(request_id, None)
        if queued_ns is not None:
            args["queued_ns"] = queued_ns
        if begun is None:  # it was queued before the hook was there
            return
        start_ns, lane = begun
        self._lanes.give_back(lane)
        spans.automatic_span_at(REQUEST, start_ns, now_ns(), lane=lane, request_id=request_id, **args)
