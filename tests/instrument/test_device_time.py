"""Pairs of events on a device's streams come out on the host's clock within the error they state.

The device is simulated: streams that work in order, a clock of its own that drifts, times in single precision and
whole ticks. What CUDA itself does is tested in tests/gpu.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrace.instrument.torch import device_time
from rltrace.instrument.torch.device_time import (
    ANCHOR_NS,
    CAPTURING,
    OTHER_DEVICE,
    POLL_NS,
    Anchor,
    DeviceSpan,
    DeviceTimes,
    coarseness_ns,
    error_bound_ns,
)

IDLE = -1


def single(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


@dataclass
class SimulatedEvent:
    fires_at_ns: int | None = None
    """By the host's clock, exactly."""


@dataclass
class SimulatedDevice:
    """Streams that work in order; the host's clock goes on with every call to the device."""

    drift: float = 0.0
    """Of its clock against the host's: 1e-4 is 100 µs a second."""
    call_ns: int = 700
    latency_ns: int = 4_000
    """Until an idle stream notices an event."""
    tick_ns: int = 500
    host_ns: int = 10**12
    current: int = 7
    capturing: bool = False
    busy_until_ns: dict[int, int] = field(default_factory=dict)
    events: int = 0
    stuck: bool = False
    """Its queues are full: nothing fires."""
    looks: int = 0
    """How often its clock was looked at."""

    def now_ns(self) -> int:
        self.host_ns += 40
        return self.host_ns

    def work(self, length_ns: int, stream: int | None = None) -> tuple[int, int]:
        """Submit work; when it will really run, by the host's clock."""
        stream = self.current if stream is None else stream
        start_ns = max(self.busy_until_ns.get(stream, 0), self.host_ns + self.latency_ns)
        self.busy_until_ns[stream] = start_ns + length_ns
        self.host_ns += self.call_ns
        return start_ns, start_ns + length_ns

    def new_event(self) -> SimulatedEvent:
        self.events += 1
        return SimulatedEvent()

    def is_capturing(self) -> bool:
        return self.capturing

    def record(self, event: SimulatedEvent) -> int:
        if self.capturing:
            return CAPTURING
        if self.current != OTHER_DEVICE:
            self._submit(event, self.current)
        return self.current

    def record_idle(self, event: SimulatedEvent) -> None:
        self.looks += 1
        self._submit(event, IDLE)

    def _submit(self, event: SimulatedEvent, stream: int) -> None:
        assert not self.capturing, "this event would fire at every replay"
        event.fires_at_ns = max(self.busy_until_ns.get(stream, 0), self.host_ns + self.latency_ns)
        if self.stuck:
            event.fires_at_ns = 1 << 62
        self.host_ns += self.call_ns

    def has_fired(self, event: SimulatedEvent) -> bool:
        assert not self.capturing, "this would make the capture invalid"
        self.host_ns += self.call_ns
        return event.fires_at_ns is not None and event.fires_at_ns <= self.host_ns

    def elapsed_ms(self, earlier: SimulatedEvent, later: SimulatedEvent) -> float:
        assert earlier.fires_at_ns is not None and later.fires_at_ns is not None
        assert max(earlier.fires_at_ns, later.fires_at_ns) <= self.host_ns, "asked before it fired"
        self.host_ns += self.call_ns
        return single((self._stamp(later) - self._stamp(earlier)) / 1e6)

    def _stamp(self, event: SimulatedEvent) -> int:
        assert event.fires_at_ns is not None
        device_ns = round((event.fires_at_ns - 10**12) * (1 + self.drift))
        return device_ns // self.tick_ns * self.tick_ns


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


def times_on(device: SimulatedDevice) -> tuple[DeviceTimes, list[DeviceSpan]]:
    written: list[DeviceSpan] = []
    return DeviceTimes(device, written.append, device.now_ns), written


WORK = st.tuples(
    st.sampled_from([7, 8, 9]),  # stream
    st.integers(0, 30_000_000),  # how long the work takes
    st.integers(0, 400_000_000),  # what the host does before it
)


@settings(max_examples=60, deadline=None)
@given(
    works=st.lists(WORK, min_size=1, max_size=30),
    drift=st.floats(-2e-4, 2e-4),
    latency_ns=st.integers(500, 30_000),
)
def test_spans_are_within_their_error(works: list[tuple[int, int, int]], drift: float, latency_ns: int) -> None:
    """Each span is within its stated error of the truth, whatever the clocks do."""
    device = SimulatedDevice(drift=drift, latency_ns=latency_ns)
    times, written = times_on(device)
    truth = {}
    for number, (stream, length_ns, pause_ns) in enumerate(works):
        device.host_ns += pause_ns
        device.current = stream
        with times.pair("work", number=number):
            truth[number] = device.work(length_ns)
    device.host_ns += 10**9
    times.poll()
    assert len(written) == len(works)
    for span in written:
        start_ns, end_ns = truth[span.args["number"]]
        # The first event fires when the stream's work before it ends, up to a call before the work that it is about.
        assert start_ns - device.call_ns - span.error_ns <= span.start_ns <= start_ns + span.error_ns
        assert abs(span.end_ns - max(end_ns, span.start_ns)) <= span.error_ns + device.call_ns + latency_ns
        assert span.error_ns < 40_000, "an error that would say nothing"
        assert span.start_ns <= span.end_ns


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1_000, 3_000_000), min_size=2, max_size=40))
def test_spans_of_a_stream_keep_their_order(lengths: list[int]) -> None:
    """Spans of one stream keep their order, and do not overlap by more than the error."""
    device = SimulatedDevice()
    times, written = times_on(device)
    for number, length_ns in enumerate(lengths):
        with times.pair("work", number=number):
            device.work(length_ns)
    device.host_ns += 10**9
    times.poll()
    assert [span.args["number"] for span in written] == [*range(len(lengths))]
    for one, other in itertools.pairwise(written):
        assert other.start_ns >= one.end_ns - one.error_ns - other.error_ns


def test_length_does_not_depend_on_the_anchor(device: SimulatedDevice) -> None:
    """A length is as precise as its own events, however far the anchor is."""
    times, written = times_on(device)
    with times.pair("before"):
        device.work(1000)
    device.host_ns += ANCHOR_NS - 10_000_000
    with times.pair("work"):
        device.work(123_456)
    device.host_ns += 10**9
    times.poll()
    (span,) = (span for span in written if span.name == "work")
    assert abs((span.end_ns - span.start_ns) - 123_456) <= 2 * device.tick_ns + device.call_ns


def test_the_host_never_waits_for_the_device(device: SimulatedDevice) -> None:
    times, written = times_on(device)
    with times.pair("long"):
        device.work(60 * 10**9)
    before_ns, looks = device.host_ns, device.looks
    assert times.poll() == 0
    assert device.host_ns - before_ns < 1_000_000
    assert device.looks == looks == 1, "one good look at its clock is enough, and none where nothing is done"
    assert written == []
    device.host_ns += 61 * 10**9
    assert times.poll() == 1
    assert abs(written[0].end_ns - written[0].start_ns - 60 * 10**9) < 100_000


def test_delay_behind_the_host_is_told(device: SimulatedDevice) -> None:
    """How far the device is behind its host is told.

    What was launched at once begins when the work before it is done.
    """
    times, written = times_on(device)
    with times.pair("first"):
        device.work(17_000_000)
    launched_ns = device.host_ns
    with times.pair("second"):
        device.work(1_000_000)
    device.host_ns += 20_000_000
    times.poll()
    first, second = written
    assert first.behind_host_ns < 1_000_000
    assert abs(second.start_ns - second.behind_host_ns - launched_ns) < 100_000
    assert abs(second.behind_host_ns - 17_000_000) < 100_000


def test_next_pairs_resolve_earlier_ones(device: SimulatedDevice) -> None:
    """Pairs are resolved by those that follow; nobody has to ask."""
    times, written = times_on(device)
    with times.pair("first"):
        device.work(1_000)
    device.host_ns += POLL_NS + 10**6
    with times.pair("second"):
        device.work(1_000)
    assert [span.name for span in written] == ["first"]


def test_finished_work_is_resolved_first(device: SimulatedDevice) -> None:
    """Finished work is resolved though earlier work is not finished."""
    times, written = times_on(device)
    with times.pair("long"):
        device.work(10**10)
    device.current = 8
    with times.pair("short"):
        device.work(1_000)
    device.host_ns += 10**8
    assert times.poll() == 1
    assert [span.name for span in written] == ["short"]


def test_queue_orders_its_work(
    device: SimulatedDevice,
) -> None:
    """Work of one queue begins when the work before it has ended, on whatever stream."""
    times, written = times_on(device)
    device.current = 8
    with times.pair("earlier"):
        device.work(1_000)
    device.current = 7
    with times.pair("scatter", 5):
        before_ns, between_ns = device.work(2_000_000)
    device.current = 8
    with times.pair("gather", 5):
        # Its own stream is free at once; the device takes it up behind what was launched before it.
        ready_ns = device.host_ns
        device.busy_until_ns[8] = between_ns
        _, end_ns = device.work(300_000)
    with times.pair("of no queue"):
        device.work(100_000)
    device.host_ns += 10**9
    times.poll()
    _, scatter, gather, other = written
    assert abs(scatter.start_ns - before_ns) < 20_000 and "queued_ns" not in scatter.args
    assert gather.start_ns == scatter.end_ns
    assert abs((gather.end_ns - gather.start_ns) - (end_ns - between_ns)) < 20_000
    assert abs(gather.args["queued_ns"] - (between_ns - ready_ns)) < 20_000
    assert "queued_ns" not in other.args


def test_busy_queue_bounds_an_end(device: SimulatedDevice) -> None:
    """Work ends where it ended, though its queue was seen busy after that.

    By the error of both: no span ends before it begins.
    """
    times, written = times_on(device)
    with times.pair("long", 5):
        device.work(2_000_000)
    device.current = 8
    with times.pair("short", 5):
        _, end_ns = device.work(100_000)
    device.host_ns += 10**9
    times.poll()
    _, short = written
    assert short.start_ns == short.end_ns
    assert abs(short.end_ns - end_ns) < 20_000


def test_events_are_reused(device: SimulatedDevice) -> None:
    """Events are used again, and never while something waits for them."""
    times, written = times_on(device)
    for round_number in range(200):
        with times.pair("work", number=round_number):
            start_ns, end_ns = device.work(50_000)
        device.host_ns += 60_000_000
        times.poll()
        assert abs(written[-1].start_ns - start_ns) <= written[-1].error_ns + device.call_ns
        assert abs(written[-1].end_ns - end_ns) <= written[-1].error_ns + device.call_ns
    assert len(written) == 200
    assert device.events <= 8


def test_pair_keeps_its_anchor(device: SimulatedDevice) -> None:
    """A pair keeps its anchor, however many others come and go meanwhile."""
    times, written = times_on(device)
    with times.pair("long"):
        start_ns, end_ns = device.work(10**10)
    device.current = 8
    while device.host_ns < end_ns:
        with times.pair("short"):
            device.work(50_000)
        device.host_ns += 60_000_000
    times.poll()
    (span,) = (span for span in written if span.name == "long")
    assert abs(span.start_ns - start_ns) <= span.error_ns + device.call_ns
    assert abs(span.end_ns - end_ns) <= span.error_ns + device.call_ns


def test_a_stream_that_is_captured_is_left_alone(device: SimulatedDevice) -> None:
    times, written = times_on(device)
    with times.pair("before"):
        device.work(1_000)
    device.host_ns += 2 * max(ANCHOR_NS, POLL_NS)  # all is due that asks the device
    device.capturing = True
    with times.pair("captured"):
        device.work(1_000)
    times.poll()
    device.capturing = False
    with times.pair("replayed"):
        device.work(1_000)
    device.host_ns += 10**8
    times.poll()
    assert [span.name for span in written] == ["before", "replayed"]
    assert times.missed.capturing == 1


def test_capture_inside_a_pair(device: SimulatedDevice) -> None:
    """A capture that begins inside of a pair takes its end away."""
    times, written = times_on(device)
    with times.pair("work"):
        device.capturing = True
    device.capturing = False
    device.host_ns += 10**8
    assert times.poll() == 0
    assert (written, times.missed.other_stream) == ([], 1)


def test_silent_device_costs_a_bounded_look(device: SimulatedDevice) -> None:
    """A device that does not answer costs a bounded time, and nothing is made up."""
    times, written = times_on(device)
    device.stuck = True
    before_ns = device.host_ns
    with times.pair("work"):
        device.work(1_000)
    assert device.host_ns - before_ns < 2_000_000
    assert (written, times.missed.no_anchor) == ([], 1)
    device.stuck = False
    with times.pair("work"):
        device.work(1_000)
    device.host_ns += 10**8
    assert times.poll() == 1


def test_work_that_raised_is_counted(device: SimulatedDevice) -> None:
    """Work that raised or changed its stream is counted and not measured."""
    times, written = times_on(device)
    with pytest.raises(KeyError), times.pair("failed"):
        raise KeyError
    with times.pair("moved"):
        device.current = 8
    device.host_ns += 10**8
    times.poll()
    assert (written, times.missed.other_stream) == ([], 2)


def test_work_on_another_device_is_counted(device: SimulatedDevice) -> None:
    """Work on another device is counted and not measured."""
    times, written = times_on(device)
    device.current = OTHER_DEVICE
    for _ in range(50):
        with times.pair("elsewhere"):
            device.work(1_000)
    device.host_ns += 10**8
    times.poll()
    assert (written, times.missed.other_device) == ([], 50)
    assert device.events <= 8, "events that were not recorded are used again"


def test_surplus_pairs_are_counted(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs beyond the limit are counted; when some are done, there is room again."""
    monkeypatch.setattr(device_time, "MOST_PAIRS", 4)
    times, written = times_on(device)
    for waiting in (4, 8):
        for _ in range(6):
            with times.pair("work"):
                device.work(1_000)
        device.host_ns += 10**8
        times.poll()
        assert (len(written), times.missed.too_many) == (waiting, waiting // 2)


def test_standing_clock_is_not_measured() -> None:
    """Work between two readings of a clock that stands still is counted and not measured."""
    device = SimulatedDevice(tick_ns=10**15)
    times, written = times_on(device)
    with times.pair("work"):
        device.work(1_000)
    device.host_ns += 10**8
    times.poll()
    assert (written, times.missed.no_anchor) == ([], 1)


def test_error_is_of_the_wider_reading() -> None:
    """The error is that of the wider reading of the clock."""
    narrow, wide = Anchor(None, 0, 5_000), Anchor(None, 10**9, 20_000)
    bounds = [error_bound_ns(narrow, wide, 1e3), error_bound_ns(wide, narrow, 1e3)]
    assert bounds[0] == bounds[1] > 20_000


class Alone(SimulatedDevice):
    """Whose every call takes a while, in which no other thread may come."""

    user: int | None = None

    def _taken(self) -> None:
        assert self.user in (None, threading.get_ident()), "another thread is at work"
        self.user = threading.get_ident()
        time.sleep(0.0002)
        self.user = None

    def record(self, event: SimulatedEvent) -> int:
        self._taken()
        return super().record(event)

    def has_fired(self, event: SimulatedEvent) -> bool:
        self._taken()
        return super().has_fired(event)


@pytest.mark.parametrize("does", ["begins", "ends", "asks"])
def test_threads_do_not_meet_in_a_pair(does: str) -> None:
    """Each step of one is taken alone, beside another thread that takes all of them: autograd has its own."""
    device = Alone()
    times, _ = times_on(device)
    open_pairs = [times.begin("theirs", {}) for _ in range(20)] if does == "ends" else [None] * 20
    step = {"begins": lambda _: times.begin("theirs", {}), "ends": times.finish, "asks": lambda _: times.poll()}[does]

    def work() -> None:
        for _ in range(20):
            with times.pair("mine"):
                pass
            times.poll()

    with ThreadPoolExecutor(2) as threads:
        for done in (threads.submit(work), threads.submit(lambda: [step(pair) for pair in open_pairs])):
            done.result()


class Broken(SimulatedDevice):
    """Which does not say when one event fired."""

    broken: SimulatedEvent | None = None

    def elapsed_ms(self, earlier: SimulatedEvent, later: SimulatedEvent) -> float:
        if self.broken is later:
            raise RuntimeError("the device is lost")
        return super().elapsed_ms(earlier, later)


def test_refused_pairs_are_counted() -> None:
    """What a device refuses to say is counted, and its events are used again."""
    device = Broken()
    times, written = times_on(device)
    for name in ("told", "refused", "behind it"):
        with times.pair(name) as pair:
            device.work(1_000)
        if name == "refused":
            assert pair is not None
            device.broken = pair.start
    device.host_ns += 10**8
    with pytest.raises(RuntimeError, match="the device is lost"):
        times.poll()
    assert ([span.name for span in written], times.missed.failed) == (["told"], 2)
    device.broken, events = None, device.events
    for _ in range(3):
        with times.pair("later"):
            device.work(1_000)
    device.host_ns += 10**8
    assert times.poll() == 3
    assert device.events <= events + 1, "the closing look at its clock"


def test_unresolved_at_exit_is_counted(device: SimulatedDevice) -> None:
    """What is not resolved when the process ends is counted."""
    times, written = times_on(device)
    with times.pair("long"):
        device.work(10**12)
    times.end()
    assert (written, times.missed.unfinished) == ([], 1)


@pytest.mark.parametrize(("seconds", "coarse_ns"), [(0.001, 0.12), (1, 61.1), (10, 976.6), (600, 62_500)])
def test_single_precision_is_as_coarse_as_said(seconds: float, coarse_ns: float) -> None:
    """Single precision is as coarse as is said."""
    elapsed_ms = seconds * 1e3
    assert coarseness_ns(elapsed_ms) == pytest.approx(coarse_ns, rel=0.03)
    (next_one,) = struct.unpack("f", struct.pack("I", struct.unpack("I", struct.pack("f", elapsed_ms))[0] + 1))
    assert (next_one - single(elapsed_ms)) * 1e6 == pytest.approx(coarseness_ns(elapsed_ms), rel=1e-6)
