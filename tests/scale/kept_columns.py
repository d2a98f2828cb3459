"""What it costs a host to keep beside the run what figures are made of, and what a reader saves by that.

    python tests/scale/kept_columns.py RUN

Figures are CPU seconds of this process: reading all processes of RUN from their segments, packing what was kept of
them as the cache of a run that goes on does, and taking it back.
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path

import msgspec

from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.growth import packed
from rltrace.analysis.lanes import lanes
from rltrace.analysis.seen.seeing import Seeing
from rltrace.host.garbage_collector import without_collection
from rltrace.read import columns
from rltrace.read.columns import Before
from rltrace.read.recording import Recording


def main() -> None:
    """Print microseconds of CPU per record, and bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    recording = Recording.open(parser.parse_args().run)
    on_lane, line = lanes(recording.processes), TimeLine(recording)
    seconds = dict.fromkeys(("read the segments", "pack what was kept", "take it back"), 0.0)
    kept_bytes = segment_bytes = records = 0
    for process in recording.processes:
        begin = functools.partial(Seeing, process, on_lane[process.key], line.shift_ns(process))
        began = time.process_time()
        seeing = columns.fold(process, begin, Seeing.add)
        read = time.process_time()
        content = packed(Before(), seeing.said())
        written = time.process_time()
        _, said = msgspec.msgpack.decode(content)
        begin().put(said)
        for name, took in zip(seconds, (read - began, written - read, time.process_time() - written), strict=True):
            seconds[name] += took
        seen = seeing.seen()
        records += 2 * seen.spans + seen.samples
        kept_bytes += len(content)
        segment_bytes += process.segment_bytes()
    for name, took in seconds.items():
        print(f"{name}: {took:.2f} s, {took / records * 1e6:.3f} us a record")
    print(f"{records:,} records: {kept_bytes:,} bytes kept, {kept_bytes / segment_bytes:.0%} of the segments")


if __name__ == "__main__":
    with without_collection():
        main()
