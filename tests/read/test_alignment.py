"""The fit of another clock: whatever its offset, drift and wander, and however unequal the ways, the bound holds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from rltrace.read import alignment
from rltrace.read.alignment import UNMEASURED_DRIFT, WANDER, Alignment, Reading
from rltrace.record import clock_readings

SECOND = 1_000_000_000


@dataclass(frozen=True)
class Clock:
    """Another clock, in true (the reference's) time from 0 on: a piecewise constant rate."""

    offset_ns: int
    drift: float
    wander: tuple[float, ...]
    """By second, how far the rate is from its mean; the last one holds for ever."""
    jump: tuple[int, int] = (0, 0)
    """When it jumps, and by how many nanoseconds; for a negative number it stands still so long."""

    def read(self, true_ns: int) -> int:
        """What it shows."""
        stray = sum(
            self.wander[min(n, len(self.wander) - 1)] * (min(true_ns, (n + 1) * SECOND) - n * SECOND)
            for n in range(true_ns // SECOND + 1)
        )
        when_ns, by_ns = self.jump
        jumped_ns = 0 if true_ns < when_ns else by_ns if by_ns > 0 else -min(true_ns - when_ns, -by_ns)
        return self.offset_ns + true_ns + round(true_ns * self.drift + stray) + jumped_ns


STRAY = WANDER * 0.97
"""WANDER is of the shift over the other clock's time, this of that clock over the true time: 1 % apart at 1 % drift."""
DELAYS = st.integers(1_000, 20_000_000)


@st.composite
def clocks(draw: st.DrawFn, most_drift: float) -> Clock:
    """Any clock whose rate is the true one's within `most_drift`."""
    return Clock(
        draw(st.integers(-(10**15), 10**15)),
        draw(st.floats(-most_drift, most_drift)),
        tuple(draw(st.lists(st.floats(-STRAY, STRAY), min_size=1, max_size=40))),
    )


def exchange(clock: Clock, sent_ns: int, there_ns: int, back_ns: int) -> Reading:
    """A reading taken over ways of these lengths."""
    return Reading.of(sent_ns, clock.read(sent_ns + there_ns), sent_ns + there_ns + back_ns)


@given(
    clocks(UNMEASURED_DRIFT - 3 * WANDER),
    st.lists(st.tuples(st.integers(0, 40 * SECOND), DELAYS, DELAYS), min_size=1, max_size=20),
    st.lists(st.integers(0, 60 * SECOND), min_size=1, max_size=20),
)
@example(Clock(0, 0.0, (STRAY,) * 10 + (-STRAY,)), [(0, 1000, 1000), (10 * SECOND, 1000, 1000)], [40 * SECOND])
def test_the_truth_lies_within_the_bound(clock: Clock, exchanges: list[tuple[int, int, int]], times: list[int]) -> None:
    fit = Alignment(exchange(clock, *times) for times in exchanges)
    for true_ns in times:
        shown_ns = clock.read(true_ns)
        error_ns = abs(shown_ns + fit.shift_ns(shown_ns) - true_ns)
        assert error_ns <= fit.bound_ns(shown_ns) <= fit.largest_bound_ns(clock.read(0), clock.read(60 * SECOND))
        assert abs(fit.undone_ns(shown_ns + fit.shift_ns(shown_ns)) - shown_ns) <= fit.bound_ns(shown_ns)


@given(clocks(0.01), st.lists(st.tuples(DELAYS, DELAYS), min_size=2, max_size=8), st.integers(0, 80 * SECOND))
def test_large_drift_is_measured(clock: Clock, delays: list[tuple[int, int]], true_ns: int) -> None:
    """A drift larger than any real clock's is measured.

    As long as exchanges lie far enough apart to see it.
    """
    spread_ns = 45 * SECOND // (len(delays) - 1)
    fit = Alignment(exchange(clock, n * spread_ns, *ways) for n, ways in enumerate(delays))
    shown_ns = clock.read(true_ns)
    assert fit.is_drift_measured
    assert abs(shown_ns + fit.shift_ns(shown_ns) - true_ns) <= fit.bound_ns(shown_ns)


@given(
    clocks(0.01),
    st.lists(st.tuples(st.integers(0, 40 * SECOND), DELAYS, DELAYS), min_size=1, max_size=20),
    st.tuples(st.integers(0, 60 * SECOND), st.integers(0, 60 * SECOND)),
)
@example(Clock(0, 0.0, (0.0,)), [(0, 10_000_000, 20_000_000), (0, 12_000_000, 1000)], (10_000_000, 12_000_000))
def test_order_of_times_is_kept(clock: Clock, exchanges: list[tuple[int, int, int]], two: tuple[int, int]) -> None:
    """Two times of a clock keep their order."""
    fit = Alignment(exchange(clock, *times) for times in exchanges)
    early, late = sorted(map(clock.read, two))
    assert early + fit.shift_ns(early) <= late + fit.shift_ns(late)


@given(
    clocks(100e-6),
    st.integers(SECOND, 59 * SECOND),
    st.one_of(st.integers(2_000_000, 3600 * SECOND), st.integers(-SECOND // 2, -2_000_000)),
    st.lists(st.tuples(DELAYS, DELAYS), min_size=13, max_size=13),
    st.lists(st.integers(0, 80 * SECOND), min_size=1, max_size=20),
)
@example(Clock(0, 0.0, (0.0,)), 29_000_000_000, 50_000_000, [(50_000, 60_000)] * 13, [*range(0, 80 * SECOND, SECOND)])
@example(Clock(0, 1e-4, (0.0,)), 31_000_000_000, 100_000_000, [(50_000, 60_000)] * 13, [31 * SECOND])
def test_a_jump_is_within_the_bound(
    clock: Clock, when_ns: int, jump_ns: int, delays: list[tuple[int, int]], times: list[int]
) -> None:
    """The truth lies within the bound of a clock that jumps, forwards or by a freeze, far more than the ways take."""
    quick = [(there_ns // 50, back_ns // 50) for there_ns, back_ns in delays]
    jumping = Clock(clock.offset_ns, clock.drift, clock.wander, (when_ns, jump_ns))
    fit = Alignment(exchange(jumping, 5 * n * SECOND, *ways) for n, ways in enumerate(quick))
    for true_ns in times:
        shown_ns = jumping.read(true_ns)
        if when_ns <= true_ns < when_ns - jump_ns:
            continue  # it stands still, and nothing runs there
        error_ns = abs(shown_ns + fit.shift_ns(shown_ns) - true_ns)
        assert error_ns <= fit.bound_ns(shown_ns) <= fit.largest_bound_ns(jumping.read(0), jumping.read(90 * SECOND))
        assert abs(fit.undone_ns(shown_ns + fit.shift_ns(shown_ns)) - shown_ns) <= fit.bound_ns(shown_ns)


def test_a_jump_widens_its_gap_alone() -> None:
    """A jump widens the bound between the two readings around it, and neither the drift nor any other time."""
    clock = Clock(10**12, 50e-6, (0.0,), (31 * SECOND, 50_000_000))
    fit = Alignment(exchange(clock, n * 5 * SECOND, 20_000, 30_000) for n in range(13))
    assert [n for n, jump_ns in enumerate(fit.jumps_ns) if jump_ns] == [6]
    assert abs(fit.jumps_ns[6] + 50_000_000) < 200_000
    assert abs(fit.drift + 50e-6) < fit.drift_error < 35e-6
    assert fit.bound_ns(clock.read(29 * SECOND)) < 100_000 < 25_000_000 < fit.bound_ns(clock.read(32 * SECOND))
    assert fit.bound_ns(clock.read(61 * SECOND)) < 100_000


def test_slow_exchange_does_not_widen() -> None:
    """A slow exchange does not widen the bound of quick ones around it."""
    clock = Clock(10**12, 50e-6, (0.0,))
    quick = [exchange(clock, n * SECOND, 20_000, 30_000) for n in range(5)]
    slow = exchange(clock, 2 * SECOND + SECOND // 2, 9_000_000, 1_000_000)
    fit = Alignment([*quick, slow])
    assert slow not in fit.readings and len(fit.readings) == 5
    assert fit.bound_ns(slow.at_ns) < 50_000
    assert abs(fit.drift + 50e-6) < fit.drift_error


def test_largest_bound_of_the_widest_gap() -> None:
    """The largest bound is that of the widest gap in which a time may lie, and of no other."""
    fit = Alignment(Reading.of(at_ns, at_ns, at_ns + 2_000) for at_ns in (0, 10 * SECOND, 20 * SECOND, 4000 * SECOND))
    in_gap_ns = fit.bound_ns(15 * SECOND)
    assert in_gap_ns > 10 * fit.bound_ns(10 * SECOND)
    assert in_gap_ns <= fit.largest_bound_ns(10 * SECOND + 1, 20 * SECOND - 1) < 2 * in_gap_ns
    assert fit.largest_bound_ns(21 * SECOND, 3999 * SECOND) >= fit.bound_ns(2000 * SECOND) > 50 * in_gap_ns


def test_one_reading_bounds_all_times() -> None:
    """One reading bounds what any two clocks may do from there."""
    fit = Alignment([Reading.of(0, 100, 50)])
    assert (fit.is_drift_measured, fit.drift) == (False, 0.0)
    assert 1_000_000 < fit.bound_ns(100 + SECOND) < 1_000_100


def test_shortest_exchanges_are_read_back(tmp_path: Path) -> None:
    """The shortest exchanges of two rounds are read back."""
    here, there, third = ("boot-a", "time:[1]"), ("boot-b", "time:[1]"), ("boot-c", "time:[1]")
    with (tmp_path / clock_readings.FILE).open("w") as file:
        file.write(clock_readings.line(here, there, (0, 1000, 10), host="far"))
        file.write(clock_readings.line(here, there, (SECOND, 1000 + SECOND, SECOND + 30), host="far"))
        file.write(clock_readings.line(third, there, (0, 77, 10)))
        file.write(clock_readings.line(here, there, (2 * SECOND, 77, SECOND)))  # an answer before its question
        file.write('{"reference": ["boot-a", "ti')  # its writer died here
    found = alignment.read(tmp_path, here)
    assert list(found) == [there]
    assert [reading.shift_ns for reading in found[there].readings] == [-995, -985]
    assert alignment.read(tmp_path / "nowhere", here) == {}
    assert json.loads((tmp_path / clock_readings.FILE).read_text().splitlines()[0])["host"] == "far"
