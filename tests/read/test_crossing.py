"""Lanes of spans that cross: those of the rule told plainly, and found as fast for thousands as for a few."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import recordings
from hypothesis import given
from hypothesis import strategies as st

from rltrace.events import Span
from rltrace.read.crossing import Crossing
from rltrace.read.recording import Recording


def _plain_lanes(ends: list[int]) -> list[int]:
    """By the rule itself: each barred span has the set of lanes on which one began before it and ended inside it.

    Args:
        ends: Which of the open spans ends, counted from the oldest; -1 begins one.
    """
    row: list[int] = []
    barred: dict[int, set[int]] = {}
    lanes: dict[int, int] = {}
    begun = itertools.count()
    for end in ends:
        if end < 0 or not row:
            row.append(next(begun))
            continue
        at = end % len(row)
        lanes[row[at]] = lane = next(n for n in itertools.count() if n not in barred.get(row[at], ()))
        for younger in row[at + 1 :]:
            barred.setdefault(younger, set()).add(lane)
        del row[at]
    for span in row:
        lanes[span] = next(n for n in itertools.count() if n not in barred.get(span, ()))
    return [lanes[span] for span in sorted(lanes)]


def _records(ends: list[int]) -> list[list[object]]:
    """The same as records of a thread, a nanosecond apart."""
    row: list[int] = []
    written: list[list[object]] = []
    for now_ns, end in enumerate(ends, start=1):
        if end < 0 or not row:
            row.append(now_ns)
            written.append(["work", 0, now_ns, {}, True])
        else:
            written.append([row.pop(end % len(row)), now_ns, None, True])
    return written


@given(st.lists(st.integers(-1, 7) | st.just(-1), max_size=60))
def test_lanes_are_those_of_the_rule(tmp_path_factory: object, ends: list[int]) -> None:
    """Whatever ends when: the same lanes as by the sets themselves."""
    folder = tmp_path_factory.mktemp("lanes") / "run"  # type: ignore[attr-defined]
    recordings.Written(folder).process("p", _records(ends))
    (process,) = Recording.open(folder).processes
    spans = sorted(process.events(), key=lambda span: span.start_ns)
    assert [span.lane for span in spans] == _plain_lanes(ends)


def _steps(many: int, rounds: int, work: Callable[[Crossing, list[Span]], None]) -> int:
    """Lines of our code that run while so many spans are in flight."""
    ran = 0

    def count(*_: object) -> object:
        nonlocal ran
        ran += 1
        return count

    crossing, row = Crossing(), [Span("s", 1, 0, n, None, {}) for n in range(many)]
    before = sys.gettrace()
    sys.settrace(count)
    try:
        for _ in range(rounds):
            work(crossing, row)
    finally:
        sys.settrace(before)
    return ran


def test_cost_per_span_stays_small(tmp_path: Path) -> None:
    """With thousands in flight each span costs as little as with hundreds.

    Spans that end in the order they began: what each costs grows as the depth of a tree does.
    """

    def oldest_ends(crossing: Crossing, row: list[Span]) -> None:
        lane = crossing.lane(row[0])
        crossing.leave(row, 0, lane)
        row.append(Span("s", 1, 0, row[-1].start_ns + 1, None, {}))

    few, many = (_steps(size, 2 * size, oldest_ends) / (2 * size) for size in (250, 4000))
    assert many < 2 * few
