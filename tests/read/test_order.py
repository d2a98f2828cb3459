"""Times of records that no checksum vouches for: they agree with the records around them, or are damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rltrace.analysis.summary import summarize
from rltrace.events import AUTOMATIC
from rltrace.read import order
from rltrace.read.recording import Recording
from rltrace.record import manifest

SECOND_NS = 10**9


def begin(at_s: float, name: str = "a") -> list[Any]:
    return [name, 0, round(at_s * SECOND_NS), None, True]


def automatic(at_s: float) -> list[Any]:
    return [AUTOMATIC, *begin(at_s)]


def typed(at_s: float) -> list[Any]:
    return [-1, 4096, 0, round(at_s * SECOND_NS), None, True]


def end(began_s: float, at_s: float) -> list[Any]:
    return [round(began_s * SECOND_NS), round(at_s * SECOND_NS), None, True]


def sample(at_s: float) -> list[Any]:
    return ["bytes", round(at_s * SECOND_NS), 7, True]


def over(began_s: float, at_s: float) -> list[Any]:
    return ["gpu", 3, round(began_s * SECOND_NS), round(at_s * SECOND_NS), None, True]


THREAD = [77, "MainThread", True]
SOUND = [THREAD, begin(1), automatic(2), sample(0.5), typed(3), over(1, 2), end(3, 4), end(2, 5), end(1, 6), begin(7)]


def dropped(records: list[list[Any]]) -> list[list[Any]]:
    kept = list(order.in_order(records))
    return [record for record in records if record not in kept]


def test_records_in_order_are_kept() -> None:
    """A sample and a finished span may be as old as they like."""
    assert list(order.in_order(SOUND)) == SOUND


@pytest.mark.parametrize("early", [begin(40), automatic(40), typed(40), end(2, 40), sample(40), over(1, 40)])
def test_too_young_is_dropped(early: list[Any]) -> None:
    """What is younger than both that follow is damaged."""
    assert dropped([*SOUND[:6], early, *SOUND[6:]]) == [early]


@pytest.mark.parametrize("late", [begin(0.5), automatic(0.5), typed(0.5), end(0.1, 0.5)])
def test_too_old_is_dropped(late: list[Any]) -> None:
    """What is older than both in front of it, though it is written at its time, is damaged."""
    assert dropped([*SOUND[:6], late, *SOUND[6:]]) == [late]


def test_a_handler_may_come_between() -> None:
    """A signal handler records between a time and its record, and in it another one does: all is kept."""
    inner = [begin(1.2), end(1.2, 1.3)]
    assert not dropped([begin(0), *inner, begin(1.1), end(1.1, 1.4), begin(0.9), end(0.9, 2), end(0, 3)])


def test_last_two_are_kept() -> None:
    """Of two records nobody can tell which is wrong."""
    assert not dropped([begin(1), begin(2), end(2, 50), end(1, 4)])


PROGRAM = """
import os, sys, time
from pathlib import Path
from rltrace.record import spans
from rltrace.record.writer import Recorder
now_ns = time.monotonic_ns() - 60 * 10**9
spans.record_with(Recorder(Path(sys.argv[1]), start_ns=now_ns, role="driver"))
def tick():
    global now_ns
    now_ns += 500_000_000
    return now_ns
spans._now_ns = tick
spans.record_by(*spans.PLAIN)
for n in range(12):
    with spans.span("step", step=n), spans.span("inner"):
        pass
os._exit(1)
"""
"""Twelve steps of 1.5 s, one after another, in a process that closes nothing."""


def places_of_times(content: bytes) -> list[int]:
    """Return where the times of that program begin in its segment: all are within a minute of the first step's."""
    places = [at for at in range(len(content) - 8) if content[at : at + 1] == b"\xcf"]
    times_ns = {at: int.from_bytes(content[at + 1 : at + 9], "big") for at in places}
    first_ns = times_ns[content.index(b"\xcf", content.index(b"\xa4step"))]
    return [at for at in places if abs(times_ns[at] - first_ns) < 60 * SECOND_NS]


def test_flipped_times_inside_the_life(tmp_path: Path) -> None:
    """A time that is wrong by seconds, in a segment without a checksum, costs its record and makes no step longer."""
    run = tmp_path / "run"
    manifest.create(run, owner=None, command=["python"], config={})
    subprocess.run([sys.executable, "-c", PROGRAM, str(run)], check=False, env={**os.environ, "RLTRACE_DIR": ""})
    lengths = [step.seconds for step in summarize(Recording.open(run)).steps]
    assert lengths == [1.5] * 12
    (segment,) = run.glob("processes/*/*.seg")
    content = segment.read_bytes()
    places = places_of_times(content)
    assert len(places) > 70
    for at in places[6:-6]:
        flipped = bytearray(content)
        flipped[at + 4] ^= 1 << 1  # 8.6 s
        segment.write_bytes(flipped)
        found = summarize(Recording.open(run))
        assert all(step.seconds < 4 for step in found.steps if step.end_seconds is not None), at
        assert found.losses
