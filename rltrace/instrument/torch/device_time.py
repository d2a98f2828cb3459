"""Times work on a device's streams by pairs of events, whose times are converted to the host's clock afterwards.

An event is recorded where work is submitted and fires when the stream gets there; the host asks later, and never waits
for it. A device's clock is related to the host's by anchors: an event on an idle stream, with the host's clock read
before it was recorded and after it was seen to have fired. Each pair lies between two anchors, so neither the two
clocks' offset nor their drift enters. What depends on CUDA is behind `DeviceEvents`, in `cuda_time.py`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rltrace.dependencies import msgspec
from rltrace.host import clock
from rltrace.host.interruption import own_failure
from rltrace.record.lock import InterruptibleLock

POLL_NS = 2_000_000_000
"""After this time a new pair resolves the pairs before it, unless somebody has asked for that since."""
ANCHOR_NS = 2_000_000_000
"""How long an anchor is used. After 2 s, elapsed times have a resolution of 122 ns; after ten minutes, 62 µs."""
MOST_PAIRS = 16_384
"""How many pairs may wait for the device. Further ones are counted and not measured."""
ANCHOR_TRIES = 3
NARROW_NS = 30_000
"""Half width of an anchor that is good enough. The first try has 22 µs on a busy device, and 5 µs on an idle one."""
ANCHOR_LOOK_NS = 200_000
"""How long one try looks for its event to fire: on an idle stream that takes 10 µs; a busy device is asked later."""
TICK_NS = 500
"""Resolution of an event's own time stamp (CUDA Runtime API, cudaEventElapsedTime)."""

Event = Any


class DeviceEvents(Protocol):
    """Everything that depends on the device."""

    def new_event(self) -> Event:
        """Return an event that keeps its time."""

    def is_capturing(self) -> bool:
        """Tell whether the current stream is being captured into a graph: then nothing may be asked of the device."""

    def record(self, event: Event) -> int:
        """Let the event fire when the current stream gets here.

        Returns:
            The stream's number, from 1; what was not recorded is `OTHER_DEVICE` or `CAPTURING`.
        """

    def record_idle(self, event: Event) -> None:
        """Let the event fire at once, on a stream that nothing else is submitted to."""

    def has_fired(self, event: Event) -> bool:
        """Tell whether the device has got there; this does not wait."""

    def elapsed_ms(self, earlier: Event, later: Event) -> float:
        """Return the time between two events that have fired, in single precision."""


OTHER_DEVICE = 0
"""The number of a stream of another device."""
CAPTURING = -1
"""The number of a stream that is being captured into a graph, where an event would fire at every replay."""


@dataclass(eq=False)
class Anchor:
    """An event, and what the host's clock was when it fired."""

    event: Event
    host_ns: int
    half_width_ns: int
    """The event fired within that much of `host_ns`."""
    pairs: int = 0
    """The pairs that are measured from here and not resolved yet."""


class Pair(msgspec.Struct, gc=False, eq=False):
    """Work on one stream that has begun; once it has ended, the two events around it."""

    name: str
    args: dict[str, Any]
    times: DeviceTimes
    queue: int
    number: int
    """The pair's place in what was submitted."""
    launched_ns: int
    """When the host submitted it."""
    anchor: Anchor
    stream: int
    start: Event
    end: Event = None

    def __exit__(self, kind: object = None, error: object = None, traceback: object = None, /) -> None:
        self.times.finish(self, failed=kind is not None)


class Work:
    """Work that begins when this is entered."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        """Make work that has not begun.

        Args:
            begin: Begins the work, and returns the `Pair` to leave after it, or None.
        """
        self._begin = begin

    def __enter__(self) -> Any:
        self._opened = self._begin()
        return self._opened

    def __exit__(self, kind: object = None, error: object = None, traceback: object = None, /) -> None:
        if self._opened is not None:
            self._opened.__exit__(kind)


class DeviceSpan(NamedTuple):
    """A resolved pair, on the host's clock."""

    name: str
    stream: int
    start_ns: int
    end_ns: int
    error_ns: int
    """The start and the end are at most that far off."""
    behind_host_ns: int
    """How long after the host's launch the device began it."""
    args: dict[str, Any]


class Scale(NamedTuple):
    """Converts a device's clock to the host's, between two anchors."""

    host_ns_per_ms: float
    """0 if the two anchors are one moment of the device."""
    error_ns: int

    @classmethod
    def between(cls, opening: Anchor, closing: Anchor, between_ms: float) -> Scale:
        """Return the scale between two anchors that are as far apart as the device says."""
        if between_ms <= 0:
            return cls(0.0, 0)
        return cls((closing.host_ns - opening.host_ns) / between_ms, error_bound_ns(opening, closing, between_ms))


@dataclass
class Missed:
    """How many pairs were not measured, by reason."""

    capturing: int = 0
    """The stream was being captured."""
    other_device: int = 0
    """The process uses several; one is measured."""
    no_anchor: int = 0
    """The device did not answer in time when it was asked for its clock, or the clock stood still."""
    too_many: int = 0
    other_stream: int = 0
    """The work ended on another stream than it began on, or by an exception."""
    unfinished: int = 0
    """The process ended before the device got there."""
    failed: int = 0
    """The device was asked for their times, and raised."""


@dataclass
class DeviceTimes:
    """Measures pairs on one device. Autograd's threads use it too, so each step of a pair holds a lock."""

    device: DeviceEvents
    write: Callable[[DeviceSpan], None]
    now_ns: Callable[[], int] = clock.now_ns
    missed: Missed = field(default_factory=Missed)
    _pool: list[Event] = field(default_factory=list)
    _waiting: dict[int, list[Pair]] = field(default_factory=dict)
    """Pairs by stream, in the order in which the device gets to their ends."""
    _count: int = 0
    _submitted: int = 0
    _queue_end_ns: dict[int, int] = field(default_factory=dict)
    """When the last resolved work of each queue ended."""
    _anchor: Anchor | None = None
    _polled_ns: int = 0
    _look_ns: int = -1
    """After this time something is due: resolving pairs, or renewing the anchor."""
    _lock: InterruptibleLock = field(default_factory=InterruptibleLock)

    def pair(self, name: str, /, queue: int = 0, **args: Any) -> Work:
        """Measure the work between entering and leaving this, on the current stream."""
        return Work(lambda: self.begin(name, args, queue))

    # A step has a thousand pairs, each between calls that leave nothing of this in the processor's caches: no function
    # and no object here that is not needed.
    def begin(self, name: str, args: dict[str, Any], queue: int = 0) -> Pair | None:
        """Record the first event, and return the pair; None where it cannot be measured, which is counted.

        Args:
            name: Of the span.
            args: Of the span.
            queue: Work of one queue follows one another on the device, whatever streams it is submitted from; 0: none.
        """
        return self._lock.run(self._begin, name, args, queue)

    def _begin(self, name: str, args: dict[str, Any], queue: int) -> Pair | None:
        launched_ns = self.now_ns()
        if launched_ns > self._look_ns and not self._look():
            return None
        if self._count >= MOST_PAIRS:
            self.missed.too_many += 1
            return None
        event = self._pool.pop() if self._pool else self.device.new_event()
        stream = self.device.record(event)
        if stream <= 0:
            self._pool.append(event)
            self._count_missed(stream)
            return None
        anchor = self._anchor
        assert anchor is not None
        anchor.pairs += 1
        self._submitted += 1
        return Pair(name, args, self, queue, self._submitted, launched_ns, anchor, stream, event)

    def _look(self) -> bool:
        """Resolve what is done and renew the anchor, if that is due; without an anchor count the pair, return false."""
        now_ns = self.now_ns()
        is_anchor_due = self._anchor is None or now_ns - self._anchor.host_ns > ANCHOR_NS
        if is_anchor_due and self.device.is_capturing():
            self.missed.capturing += 1  # to ask the device anything now would make the capture invalid
            return False
        self.poll_if_due()
        if is_anchor_due and (self._anchor is None or self._anchor.host_ns < now_ns - ANCHOR_NS):
            self._renew_anchor()  # resolving has not
        if self._anchor is None:
            self.missed.no_anchor += 1
            return False
        self._look_ns = min(self._polled_ns + POLL_NS, self._anchor.host_ns + ANCHOR_NS)
        return True

    def _count_missed(self, stream: int) -> None:
        if stream == CAPTURING:
            self.missed.capturing += 1
        else:
            self.missed.other_device += 1

    def finish(self, pair: Pair, *, failed: bool = False) -> None:
        """Record the second event, and let the pair wait for the device."""
        self._lock.run(self._finish, pair, failed)

    def _finish(self, pair: Pair, failed: bool) -> None:
        pair.end = self._pool.pop() if self._pool else self.device.new_event()
        if failed or self.device.record(pair.end) != pair.stream:
            self.missed.other_stream += 1
            self._release(pair)
            return
        self._waiting.setdefault(pair.stream, []).append(pair)
        self._count += 1

    def poll(self) -> int:
        """Resolve what the device has done, and return how many pairs that were. Never waits for the device."""
        return self._lock.run(self._poll)

    def poll_if_due(self) -> None:
        """Resolve what the device has done, unless somebody has asked for that lately."""
        if self.now_ns() - self._polled_ns > POLL_NS:
            self.poll()

    def end(self) -> None:
        """Resolve what the device has done, and count what is not done or not known: there will be no other call."""
        self._lock.run(self._end)

    def _end(self) -> None:
        try:
            self._poll()
            self.missed.unfinished += self._count
        except own_failure():  # a device's error comes back at each call; it was told where it came first
            self.missed.failed += self._count
        self._waiting, self._count = {}, 0

    def _poll(self) -> int:
        if self.device.is_capturing():
            return 0
        self._polled_ns = self.now_ns()
        fired = {stream: self._fired(pairs) for stream, pairs in self._waiting.items()}
        # It is taken after everything that it bounds.
        closing = self._new_anchor() if any(fired.values()) else None
        done = [] if closing is None else self._take(fired)
        if closing is not None:
            self._resolve(done, closing)
            self._replace_anchor(closing)
        return len(done)

    def _fired(self, pairs: list[Pair]) -> int:
        """Return how many of a stream's pairs the device has done, up to the first that it has not."""
        return bisect.bisect_left(pairs, True, key=lambda pair: not self.device.has_fired(pair.end))

    def _take(self, fired: dict[int, int]) -> list[Pair]:
        """Take the first pairs of each stream, in the order in which they were submitted."""
        done = [pair for stream, count in fired.items() for pair in self._waiting[stream][:count]]
        for stream, count in fired.items():
            del self._waiting[stream][:count]
        self._count -= len(done)
        return sorted(done, key=lambda pair: pair.number)

    def _resolve(self, done: list[Pair], closing: Anchor) -> None:
        scales: dict[Anchor, Scale] = {}
        resolved = 0
        try:
            for pair in done:
                self._resolve_one(pair, closing, scales)
                resolved += 1
        finally:
            self.missed.failed += len(done) - resolved
            for pair in done:
                self._release(pair)

    def _resolve_one(self, pair: Pair, closing: Anchor, scales: dict[Anchor, Scale]) -> None:
        opening, elapsed_ms = pair.anchor, self.device.elapsed_ms
        scale = scales.get(opening)
        if scale is None:
            scale = scales[opening] = Scale.between(opening, closing, elapsed_ms(opening.event, closing.event))
        if scale.host_ns_per_ms:
            start_ms, length_ms = elapsed_ms(opening.event, pair.start), elapsed_ms(pair.start, pair.end)
            start_ns = opening.host_ns + round(start_ms * scale.host_ns_per_ms)
            self._write(pair, start_ns, start_ns + round(length_ms * scale.host_ns_per_ms), scale.error_ns)
        else:
            self.missed.no_anchor += 1

    def _release(self, pair: Pair) -> None:
        """Let the events of a pair be used again, and its anchor's after the last pair."""
        self._pool += (pair.start, pair.end)
        pair.anchor.pairs -= 1
        self._free(pair.anchor)

    def _write(self, pair: Pair, start_ns: int, end_ns: int, error_ns: int) -> None:
        if pair.queue:
            ready_ns, start_ns = start_ns, max(start_ns, min(end_ns, self._queue_end_ns.get(pair.queue, 0)))
            self._queue_end_ns[pair.queue] = end_ns
            if start_ns > ready_ns:
                pair.args["queued_ns"] = start_ns - ready_ns
        behind_ns = max(0, start_ns - pair.launched_ns)
        self.write(DeviceSpan(pair.name, pair.stream, start_ns, end_ns, error_ns, behind_ns, pair.args))

    # ---- anchors ------------------------------------------------------------------------------------------------

    def _renew_anchor(self) -> None:
        fresh = self._new_anchor()
        if fresh is not None:
            self._replace_anchor(fresh)

    def _replace_anchor(self, fresh: Anchor) -> None:
        old, self._anchor = self._anchor, fresh
        if old is not None:
            self._free(old)

    def _free(self, anchor: Anchor) -> None:
        """Let an anchor's event be used again once nothing is measured from it."""
        if anchor.pairs == 0 and anchor is not self._anchor:
            self._pool.append(anchor.event)

    def _new_anchor(self) -> Anchor | None:
        """Return the narrowest of a few tries; None if the device did not answer, as one with full queues."""
        best: Anchor | None = None
        for _ in range(ANCHOR_TRIES):
            found = self._try_anchor()
            if found is None:  # it would be asked in vain again
                return best
            if best is None or found.half_width_ns < best.half_width_ns:
                best, wider = found, best
            else:
                wider = found
            if wider is not None:
                self._pool.append(wider.event)
            if best.half_width_ns <= NARROW_NS:
                break
        return best

    def _try_anchor(self) -> Anchor | None:
        event = self._pool.pop() if self._pool else self.device.new_event()
        before_ns = self.now_ns()
        self.device.record_idle(event)
        while not self.device.has_fired(event):
            if self.now_ns() - before_ns > ANCHOR_LOOK_NS:
                return None  # and the event is left to the device
        after_ns = self.now_ns()
        return Anchor(event, (before_ns + after_ns) // 2, (after_ns - before_ns + 1) // 2)


def error_bound_ns(opening: Anchor, closing: Anchor, between_ms: float) -> int:
    """Return how far off a time between two anchors may be: their width, single precision, and the event's tick."""
    width_ns = max(opening.half_width_ns, closing.half_width_ns)
    # Two elapsed times are rounded, each at most by half the spacing at the longer one, and two ticks differ.
    return width_ns + math.ceil(2 * coarseness_ns(between_ms)) + 2 * TICK_NS


def coarseness_ns(elapsed_ms: float) -> float:
    """Return the spacing of single-precision milliseconds at a length, in ns: 61 at a second, 62,500 at ten minutes."""
    if elapsed_ms <= 0:
        return 0.0
    return float(2.0 ** (math.floor(math.log2(elapsed_ms)) - 23)) * 1e6
