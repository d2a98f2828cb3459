"""The used memory of a Recording beside a log that rltrace did not make.

Usage: against_nvml.py RUN LOG

For each GPU of the run, prints the share of the log's samples, from the run's first look at it to the last, that lie
next to a change of more than 256 MiB and are left out; the share of the others at which `used` is within 256 MiB, by
the looks of the run's own processes alone and with the sampler's points; and the worst.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.ledger import ledgers
from rltrace.analysis.observations import Observations
from rltrace.analysis.used_memory import UsedMemory, used_memory
from rltrace.read.recording import Recording

NEAR_BYTES = 256 << 20
NEAR_NS = 50_000_000


def read_log(log: Path) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Return times and used bytes by the GPU's uuid."""
    rows: dict[str, list[tuple[int, int]]] = {}
    for line in log.read_text().splitlines():
        at_ns, uuid, used_bytes = line.split()
        rows.setdefault(uuid, []).append((int(at_ns), int(used_bytes)))
    return {
        uuid: (np.array([at for at, _ in found], np.int64), np.array([size for _, size in found], np.float64))
        for uuid, found in rows.items()
    }


def is_near_change(times_ns: NDArray[np.int64], used_bytes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which samples of a log lie within 50 ms of one of its changes, which lies between two of its samples."""
    changed = np.flatnonzero(np.abs(np.diff(used_bytes)) > NEAR_BYTES)
    near = np.zeros(len(times_ns), bool)
    for index in changed:
        near |= (times_ns >= times_ns[index] - NEAR_NS) & (times_ns <= times_ns[index + 1] + NEAR_NS)
    return near


def compare(name: str, line: UsedMemory, times_ns: NDArray[np.int64], used_bytes: NDArray[np.float64]) -> None:
    """Print how far the line is from a log."""
    inside = (times_ns >= line.times_ns[0]) & (times_ns <= line.times_ns[-1])
    left_out = is_near_change(times_ns, used_bytes) & inside
    judged = inside & ~left_out
    away_bytes = np.abs(line.at(times_ns[judged]) - used_bytes[judged])
    within = (away_bytes <= NEAR_BYTES).mean()
    print(
        f"  {name}: {len(line.times_ns)} points; {left_out.sum() / inside.sum():.1%} of {inside.sum()} samples left "
        f"out; within 256 MiB at {within:.2%}; at worst {away_bytes.max() / (1 << 30):.2f} GiB"
    )
    start_ns = times_ns[0]
    for at_ns, away in zip(times_ns[judged], away_bytes, strict=True):
        if away > NEAR_BYTES and name == "looks":
            print(f"    {(at_ns - start_ns) / 1e9:8.2f} s: {away / (1 << 30):.2f} GiB")


def main(run: Path, log: Path) -> None:
    """Compare."""
    recording = Recording.open(run)
    seen = Observations(recording)
    logged = read_log(log)
    for lane, ledger in ledgers(seen).items():
        if lane.device not in logged:
            continue
        times_ns, used_bytes = logged[str(lane.device)]
        line = used_memory(seen, lane)
        print(f"{lane.name} ({lane.device}): {len(ledger.times_ns)} moments in the ledger")
        compare("looks", line.looked(), times_ns, used_bytes)
        if line.is_sampled.any():
            compare("looks and sampler", line, times_ns, used_bytes)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
