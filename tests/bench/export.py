"""How fast and in how much memory a Recording becomes a Perfetto trace: `python tests/bench/export.py --help`.

The Recording is synthetic: 64 processes of 200,000 records, shaped like a rank's step (a phase, micro-batches in it,
layers in those, one span in four with a size and a tensor's name, one with an index, now and then a memory sample).
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rltrace_exporters.perfetto import Perfetto

from rltrace.read.recording import Recording
from rltrace.record.segment import NEXT_BYTES

RECORDS_PER_PHASE = 2_000
_encode = msgspec.msgpack.Encoder().encode


def write_recording(folder: Path, processes: int, records: int) -> int:
    """Write a synthetic Recording and return the number of its records."""
    (folder / "processes").mkdir(parents=True)
    manifest = {"version": 1, "run_id": "bench", "created_unix_ns": 0, "command": [], "config": {}, "versions": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    # The processes differ in who they are only; encoding each anew would take longer than the export.
    segments, written = _segments(records)
    for rank in range(processes):
        process = folder / "processes" / f"node-{1000 + rank}-1"
        process.mkdir()
        identity = {"kind": "process", "host": "node", "pid": 1000 + rank, "start_ns": 1, "boot_id": "b"}
        identity |= {"time_namespace": "t", "monotonic_ns": 0, "realtime_ns": 1_700_000_000_000_000_000}
        identity |= {"role": "worker", "rank": rank}
        (process / "process.jsonl").write_text(json.dumps(identity) + "\n")
        for number, segment in enumerate(segments, 1):
            (process / f"{number:06d}.seg").write_bytes(segment)
    return written * processes


def _segments(records: int) -> tuple[list[bytes], int]:
    segments, written = [], 0
    header = _encode((1, "MainThread", True))
    segment = bytearray(header)
    now = 10**12
    while written < records:
        phase, now = now, now + 1000
        segment += _encode(("actor.update", 0, phase, {"phase": True, "step": written}, True))
        for index in range(RECORDS_PER_PHASE // 17):
            now = _round(segment, now, 2 * index)
            now = _round(segment, now, 2 * index + 1)
            segment += _encode(("allocated_bytes", now, 4096 * index, True))
        now += 1000
        segment += _encode((phase, now, None, True))
        written += 2 + RECORDS_PER_PHASE // 17 * 17
        if len(segment) > NEXT_BYTES - 100_000:
            segments.append(bytes(segment) + bytes(NEXT_BYTES - len(segment)))
            segment = bytearray(header)
    return [*segments, bytes(segment)], written


def _round(segment: bytearray, now: int, index: int) -> int:
    """Four nested spans: eight records."""
    layer = {"bytes": 4096 * index, "tensor": f"model.layers.{index % 28}.mlp.down_proj.weight"}
    spans = [
        ("actor.micro_batch", {"index": index}),
        ("fsdp.forward", None),
        ("fsdp.layer", None),
        ("fsdp.all_gather", layer),
    ]
    starts = []
    for name, args in spans:
        now += 700
        starts.append(now)
        segment += _encode((name, 0, now, args, True))
    for start in reversed(starts):
        now += 500
        segment += _encode((start, now, None, True))
    return now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--records", type=int, default=200_000, help="of each process")
    parser.add_argument("--require", type=float, default=0, help="fail below this many events a second")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rltrace-bench-"))
    try:
        events = write_recording(folder / "recording", given.processes, given.records)
        figures = measure(folder / "recording", folder / "trace.pftrace", events)
    finally:
        shutil.rmtree(folder)
    for name, value in figures.items():
        print(f"{name:>24}  {value:,.1f}")
    if figures["events/s"] < given.require:
        sys.exit(f"export: {figures['events/s']:,.0f} events/s, the bar is {given.require:,.0f}")


def measure(recording: Path, trace: Path, events: int) -> dict[str, float]:
    """Export once, on this thread, and say what it took; an event is one record: a span's begin or end, a sample."""
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    wall, cpu = time.perf_counter(), time.process_time()
    with trace.open("wb") as out:
        Perfetto().write(Recording.open(recording), out)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "events": events,
        "CPU seconds": cpu,
        "wall seconds": wall,
        "events/s": events / cpu,
        "peak RSS MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "of it by the export MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before_mb,
        "bytes/event": trace.stat().st_size / events,
    }


if __name__ == "__main__":
    main()
