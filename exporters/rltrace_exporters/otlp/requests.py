"""Which call sent a request, a turn or a tool, wherever that ran; and which of a step's requests are sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rltrace.events import AGENT_REQUEST, REQUEST, SERVER_REQUEST, TRAJECTORIES, asked_ids
from rltrace_exporters.otlp.calls import GENERATION, Call

MOST_SPANS = 256
"""How many spans of requests, turns and tools are sent of one step, give or take one trajectory."""

LONGEST_SHARE = 0.25
"""Share of them for the trajectories that took longest; the others are spread over the step."""


class Senders:
    """The calls of a step that can have sent another one."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._by_flow: dict[str, Call] = {}
        self._by_request: dict[tuple[str, str], Call] = {}
        self._by_trajectory: dict[tuple[str | None, str], Call] = {}
        for call in calls:
            for key in call.flows_out:
                self._by_flow[key] = call
            request_id = call.args.get("request_id")
            if request_id is not None and call.name in (AGENT_REQUEST, SERVER_REQUEST):
                self._by_request[call.name, str(request_id)] = call
            trajectory = call.args.get("trajectory")
            if trajectory is not None and call.name in TRAJECTORIES:
                self._by_trajectory[call.source, str(trajectory)] = call
                self._by_trajectory.setdefault((None, str(trajectory)), call)

    def of_flow(self, key: str) -> Call | None:
        """Return the call that an arrow left from."""
        return self._by_flow.get(key)

    def of(self, call: Call) -> Call | None:
        """Return what a call without anything around it is part of: the request that it serves, or its trajectory."""
        for key in call.flows_in:
            sender = self._by_flow.get(key)
            if sender is not None and sender.sent_as.name in GENERATION:
                return sender.sent_as
        return self._of_request(call) or self._of_trajectory(call)

    def _of_request(self, call: Call) -> Call | None:
        request_id = call.args.get("request_id")
        if request_id is None or call.name not in (REQUEST, SERVER_REQUEST):
            return None
        names = (SERVER_REQUEST, AGENT_REQUEST) if call.name == REQUEST else (AGENT_REQUEST,)
        ids = asked_ids(str(request_id)) if call.name == REQUEST else (str(request_id),)
        for name in names:
            for asked in ids:
                if (name, asked) in self._by_request:
                    return self._by_request[name, asked]
        return None

    def _of_trajectory(self, call: Call) -> Call | None:
        trajectory = call.args.get("trajectory")
        if trajectory is None or call.name in TRAJECTORIES:
            return None
        own = self._by_trajectory.get((call.source, str(trajectory)))
        return own or self._by_trajectory.get((None, str(trajectory)))


def chosen(outermost: Sequence[Call]) -> list[Call]:
    """Return which requests and trajectories are sent, if there are too many: the longest, and some of the others.

    Args:
        outermost: Those that are inside of no other one.
    """
    sizes = {id(call): sum(1 for _ in call.walk()) for call in outermost}
    if sum(sizes.values()) <= MOST_SPANS:
        return list(outermost)
    by_length = sorted(outermost, key=lambda call: (call.start_ns - call.end_ns, call.start_ns, call.source))
    kept, left = _within(by_length, sizes, int(MOST_SPANS * LONGEST_SHARE))
    left.sort(key=lambda call: (call.start_ns, call.source))
    kept_spans = sum(sizes[id(call)] for call in kept)
    mean_spans = sum(sizes[id(call)] for call in left) / len(left) if left else 1.0
    many = max(1, int((MOST_SPANS - kept_spans) / mean_spans))
    spread = [left[place * len(left) // many] for place in range(min(many, len(left)))]
    return kept + _within(spread, sizes, MOST_SPANS - kept_spans)[0]


def _within(calls: Sequence[Call], sizes: dict[int, int], most: int) -> tuple[list[Call], list[Call]]:
    """Return the first calls that have no more spans than this together, at least one; and the others."""
    spans = 0
    for place, call in enumerate(calls):
        spans += sizes[id(call)]
        if spans > most and place:
            return list(calls[:place]), list(calls[place:])
    return list(calls), []
