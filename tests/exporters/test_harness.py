"""The harness itself: it must see what is wrong with a trace, or the other tests see nothing."""

from __future__ import annotations

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as TraceProto
from trace_processor import Importer


def _trace(begin: int, end: int, cleared: bool = True) -> bytes:
    trace = TraceProto()
    for index, (kind, timestamp) in enumerate([(1, begin), (2, end)]):
        packet = trace.packet.add(timestamp=timestamp, trusted_packet_sequence_id=1)
        packet.sequence_flags = 3 if index == 0 and cleared else 2
        packet.track_event.type = kind
        packet.track_event.track_uuid = 5
        if index == 0:
            packet.track_event.name = "one"
    return trace.SerializeToString()


def test_a_good_trace_is_clean(importer: Importer) -> None:
    trace = importer.load(_trace(10, 20))
    trace.check_clean(slices=1, counters=0, starts=0)
    assert trace.query("select name, ts, dur from slice") == [("one", 10, 10)]


def test_each_load_forgets_the_trace_before(importer: Importer) -> None:
    for _ in range(3):
        importer.load(_trace(10, 20)).check_clean(slices=1, counters=0, starts=0)


def test_a_missing_slice_is_seen(importer: Importer) -> None:
    with pytest.raises(AssertionError):
        importer.load(_trace(10, 20)).check_clean(slices=2, counters=0, starts=0)


def test_dropped_packets_are_seen(importer: Importer) -> None:
    """The harness sees packets that the importer drops."""
    with pytest.raises(AssertionError):
        importer.load(_trace(10, 20, cleared=False)).check_clean(slices=1, counters=0, starts=0)


def test_unknown_clock_is_an_error(importer: Importer) -> None:
    """A clock that the importer cannot place is an error."""
    trace = TraceProto()
    trace.ParseFromString(_trace(10, 20))
    for packet in trace.packet:
        packet.timestamp_clock_id = 3
    assert importer.load(trace.SerializeToString()).problems() != []
