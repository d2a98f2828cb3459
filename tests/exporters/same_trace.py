"""What a trace says, apart from the numbers of its tracks and names, and from the order of its packets."""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as TraceProto
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

Path = tuple[Any, ...]


def said(data: bytes) -> dict[Path, list[Any]]:
    """Return by track what happens on it, in the order of time; and by the empty path what the trace says of itself.

    A track is known by its descriptor and those above it. Tracks whose descriptors are alike are told apart by what
    happens on them, in order.
    """
    packets = packets_of(data)
    descriptors = {packet.track_descriptor.uuid: packet.track_descriptor for packet in packets if _describes(packet)}
    events: dict[int, list[Any]] = defaultdict(list)
    names: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    itself: list[Any] = []
    for packet in packets:
        sequence = packet.trusted_packet_sequence_id
        if packet.sequence_flags & 1:
            for kind in (2, 3):
                names[sequence, kind].clear()
        if packet.HasField("interned_data"):
            new = packet.interned_data
            names[sequence, 2] |= {entry.iid: entry.name for entry in new.event_names}
            names[sequence, 3] |= {entry.iid: entry.name for entry in new.debug_annotation_names}
        if packet.HasField("track_event"):
            event = packet.track_event
            events[event.track_uuid].append(_event(packet, names[sequence, 2], names[sequence, 3]))
        elif any(map(packet.HasField, ("clock_snapshot", "trace_attributes"))):
            itself.append(str(packet))
    found: dict[Path, list[Any]] = {(): itself}
    for uuid in descriptors:
        happened = sorted(events.pop(uuid, []), key=lambda event: event[0])
        found.setdefault(_path(uuid, descriptors), []).append(happened)
    assert not events, f"tracks without a descriptor: {[*events]}"
    return {path: sorted(alike, key=repr) if path and len(alike) > 1 else alike for path, alike in found.items()}


def blocks_of(data: bytes) -> list[bytes]:
    """Return the blocks of a trace, decompressed."""
    return [zlib.decompress(packet.compressed_packets) for packet in TraceProto.FromString(data).packet]


def packets_of(data: bytes) -> list[TracePacket]:
    """Return all packets of a trace, those in blocks too."""
    return [packet for block in blocks_of(data) for packet in TraceProto.FromString(block).packet]


def _describes(packet: TracePacket) -> bool:
    return bool(packet.HasField("track_descriptor"))


def _path(uuid: int, descriptors: dict[int, Any]) -> Path:
    descriptor = descriptors[uuid]
    above = _path(descriptor.parent_uuid, descriptors) if descriptor.parent_uuid in descriptors and uuid else ()
    own = type(descriptor)()
    own.CopyFrom(descriptor)
    own.ClearField("uuid")
    own.ClearField("parent_uuid")
    return (*above, own.SerializeToString(deterministic=True))


def _event(packet: TracePacket, names: dict[int, str], arg_names: dict[int, str]) -> tuple[Any, ...]:
    event = packet.track_event
    value = event.double_counter_value if event.HasField("double_counter_value") else event.counter_value
    args = tuple(
        (arg_names[one.name_iid] if one.name_iid else one.name, _value(one)) for one in event.debug_annotations
    )
    name = names[event.name_iid] if event.name_iid else event.name
    flows = tuple(event.flow_ids), tuple(event.terminating_flow_ids)
    return packet.timestamp, event.type, name, args, flows, repr(float(value))


def _value(annotation: Any) -> bytes:
    """What an annotation says without its name, which it has no longer."""
    annotation.ClearField("name_iid")
    annotation.ClearField("name")
    value: bytes = annotation.SerializeToString(deterministic=True)
    return value
