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


class InFlight:
    """A request that has begun and not ended; what nobody has told yet is None."""

    __slots__ = ("cached_tokens", "first_token_ns", "lane", "queued_ns", "start_ns")

    def __init__(self, start_ns: int, lane: int) -> None:
        self.start_ns = start_ns
        self.lane = lane
        self.queued_ns: int | None = None
        self.first_token_ns: int | None = None
        self.cached_tokens: int | None = None

    def told(self) -> dict[str, int]:
        """Return what is known, as arguments of its span."""
        known = (("queued_ns", self.queued_ns), ("first_token_ns", self.first_token_ns))
        return {name: value for name, value in (*known, ("cached_tokens", self.cached_tokens)) if value is not None}


class Requests:
    """The requests in flight, each on a lane that no other request uses meanwhile."""

    def __init__(self) -> None:
        self._begun: dict[str, InFlight] = {}
        self._lanes = Lanes()
        self.without_token: dict[str, InFlight] = {}
        """Those that a step has computed, and that have no token yet: in most steps there are none."""

    @property
    def in_flight(self) -> int:
        """The number of requests that have begun and not ended."""
        return len(self._begun)

    def begin(self, request_id: str) -> None:
        """Note when a request was queued; one that is queued again keeps its beginning."""
        if request_id not in self._begun:
            self._begun[request_id] = InFlight(now_ns(), self._lanes.take())

    def scheduled(self, request_id: str, at_ns: int, cached_tokens: int | None = None) -> None:
        """Note when the first step that computes a request began: until then it waited.

        Args:
            request_id: Of the request.
            at_ns: When the step began.
            cached_tokens: So many tokens of its prompt did not have to be computed, because they had been before.
        """
        begun = self._begun.get(request_id)
        if begun is not None and begun.queued_ns is None:
            begun.queued_ns = max(0, at_ns - begun.start_ns)
            begun.cached_tokens = cached_tokens
            self.without_token[request_id] = begun

    def has_token(self, request_id: str) -> None:
        """Note that a request has its first token now."""
        begun = self.without_token.pop(request_id, None)
        if begun is not None:
            begun.first_token_ns = now_ns() - begun.start_ns

    def end(self, request_id: str, **args: Any) -> None:
        """Write the span of a request that is done, with what is known of its way."""
        begun = self._begun.pop(request_id, None)
        self.without_token.pop(request_id, None)
        if begun is None:  # it was queued before the hook was there
            return
        self._lanes.give_back(begun.lane)
        told = begun.told()
        spans.automatic_span_at(
            REQUEST, begun.start_ns, now_ns(), lane=begun.lane, request_id=request_id, **told, **args
        )
