"""What is looked up in order is what a search through everything finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from same_moment_by_looks import SameMoment
from unstamped_by_looks import Taken as TakenByLook
from unstamped_by_looks import Unstamped as ByLooks

from rltrace.analysis.looks import CONSISTENT_NS, Looks, columns, together
from rltrace.analysis.moment_times import MomentTimes
from rltrace.analysis.phase_times import PhaseTimes, spans_of
from rltrace.analysis.same_moment import NONE, Readings, Taken, same_moment
from rltrace.analysis.seen.looked import Looked
from rltrace.analysis.seen.span_rows import moved
from rltrace.analysis.transactions import _joined, _outer_moves
from rltrace.analysis.unstamped import unstamped
from rltrace.events import MAP, MEMORY_EDGE, SLEEP, UNMAP, WAKE_UPS, Span
from rltrace.read.alignment import Alignment, Reading
from rltrace.read.columns import _time_line

instants = st.integers(0, 30)
phases = st.lists(st.tuples(instants, st.integers(0, 12), st.sampled_from("abc")), max_size=8).map(
    lambda rows: sorted((start, start + length, name) for start, length, name in rows)
)


@given(phases, instants, st.integers(0, 9))
def test_phases_around_an_instant(spans: list[tuple[int, int, str]], at: int, within: int) -> None:
    """The phase that holds it, ended last before it, or begins first behind it."""
    of_phases = spans_of([(name, np.array([(start, end)])) for start, end, name in spans])
    times, at_ns = PhaseTimes(of_phases), np.array([at])
    around = [(start, name) for start, end, name in spans if start <= at <= end]
    ended = [(end, name) for _, end, name in spans if at - within <= end < at]
    begins = [(-start, name) for start, _, name in spans if at < start <= at + within]
    names = [*of_phases.names, None]
    assert [names[place] for place in times.around(at_ns)] == [max(around)[1] if around else None]
    assert [names[place] for place in times.ended(at_ns, at_ns - within)] == [max(ended)[1] if ended else None]
    assert [names[place] for place in times.begins(at_ns, at_ns + within)] == [max(begins)[1] if begins else None]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(-5, 45))
def test_nearest_moment(times: list[int], at: int) -> None:
    """The first of those that are nearest, or the last before an instant that none is near to."""
    times_ns = [time * CONSISTENT_NS // 3 for time in sorted(times)]
    at_ns = at * CONSISTENT_NS // 3
    index = int(np.argmin(np.abs(np.array(times_ns) - at_ns)))
    before = int(np.searchsorted(times_ns, at_ns, side="right")) - 1
    is_near = abs(times_ns[index] - at_ns) <= CONSISTENT_NS
    (found,) = MomentTimes(np.array(times_ns), []).nearest(np.array([at_ns]))
    assert found == (index if is_near else max(before, 0))


@pytest.mark.parametrize(("began_ms", "ended_ms", "expected"), [(12.01, 14.5, 1), (12.01, 30, 1), (14.5, 14.5, 0)])
def test_nearest_sampling(began_ms: float, ended_ms: float, expected: int) -> None:
    """A phase ended at 12 ms. A sampling that begins then says more than one that was over at 10 ms, however long it
    takes.
    """
    samplings = [(9_900_000, 10_000_000), (int(began_ms * 1e6), int(ended_ms * 1e6))]
    looks = columns(_looked([Span(MEMORY_EDGE, 1, 0, start_ns, end_ns, {}) for start_ns, end_ns in samplings]))
    (found,) = MomentTimes(looks.ends_ns, [looks]).nearest(np.array([12_000_000]))
    assert found == expected


moves = st.lists(
    st.tuples(st.sampled_from([SLEEP, *WAKE_UPS, MAP, UNMAP]), instants, st.none() | st.integers(0, 12)), max_size=10
).map(
    lambda rows: sorted(
        (Span(name, 1, 0, at, None if length is None else at + length, {}) for name, at, length in rows),
        key=lambda span: span.start_ns,
    )
)


@given(moves)
def test_moves_inside_of_phases(spans: list[Span]) -> None:
    """Each phase has the moves that begin in it, and a move outside of all stands alone."""

    def holds(phase: Span, move: Span) -> bool:
        return phase.start_ns <= move.start_ns and (phase.end_ns is None or move.start_ns < phase.end_ns)

    outer = [phase for name in (SLEEP, *WAKE_UPS) for phase in _joined(spans, name)]
    inner = [move for move in spans if move.name in (MAP, UNMAP)]
    expected = [(phase, [move for move in inner if holds(phase, move)]) for phase in outer]
    expected += [(move, [move]) for move in inner if not any(holds(phase, move) for phase in outer)]
    expected.sort(key=lambda one: one[0].start_ns)
    assert _outer_moves(spans) == expected


looks = st.lists(
    st.tuples(
        st.integers(1, 4 * CONSISTENT_NS),
        st.fixed_dictionaries(
            {},
            optional={
                "cpu_ns": st.dictionaries(
                    st.sampled_from("12"), st.integers(0, 2 * CONSISTENT_NS) | st.just(float("nan"))
                ),
                "held_bytes": st.dictionaries(st.sampled_from("12"), st.integers(0, 2)),
                "others_bytes": st.integers(0, 2),
                "age_ns": st.none() | st.integers(0, 2 * CONSISTENT_NS),
                "totals": st.fixed_dictionaries({"used": st.integers(0, 2)}),
            },
        ),
    ),
    max_size=10,
)


def _spans(rows: list[tuple[int, dict[str, Any]]]) -> list[Span]:
    ends = accumulate(gap for gap, _ in rows)
    return [Span(MEMORY_EDGE, 1, 0, end - 1, end, args) for end, (_, args) in zip(ends, rows, strict=True)]


def _looked(spans: list[Span]) -> Looked:
    looked = Looked()
    for span in spans:
        looked.add(span.start_ns, span.end_ns, span.args)
    return looked


@given(looks, looks)
def test_samples_of_a_moment(first: list[Any], second: list[Any]) -> None:
    """What each edge takes of two processes is what a search look by look takes."""
    spans = {"1": _spans(first), "2": _spans(second)}
    found = _taken(unstamped, spans)
    by_looks = ByLooks(spans)
    assert [by_looks.taken(look, writer, spans) for look, writer in _edges(spans)] == [*_by_look(found)]


thirds = st.integers(0, 9).map(lambda many: many * CONSISTENT_NS // 3)
stamped = st.lists(
    st.tuples(
        thirds.map(lambda gap_ns: gap_ns + 1),
        st.fixed_dictionaries(
            {
                "unchanged_ns": thirds,
                "totals": st.fixed_dictionaries({"used": st.integers(0, 2), "driver.reserved": st.just(0)})
                | st.just({"1": 5}),
            },
            optional={"cpu_ns": st.just({}), "others_bytes": st.integers(0, 1)},
        ),
    ),
    max_size=10,
)


def _stamped(rows: list[tuple[int, dict[str, Any]]]) -> list[Span]:
    """Looks of which some read the processor time of two processes, which run now and then."""
    spans = _spans(rows)
    for span in spans:
        if "cpu_ns" in span.args:
            turns = (span.end_ns or 0) // (4 * CONSISTENT_NS)
            span.args["cpu_ns"] = {"1": turns * CONSISTENT_NS, "2": turns * 2 * CONSISTENT_NS}
    return spans


@given(stamped, stamped)
def test_stamped_samples_of_a_moment(first: list[Any], second: list[Any]) -> None:
    """The same of samples that say how long they hold."""
    spans = {"1": _stamped(first), "2": _stamped(second)}
    found = _taken(same_moment, spans)
    by_looks = SameMoment(spans, _edges(spans))
    assert [by_looks.taken(look, writer, spans) for look, writer in _edges(spans)] == [*_by_look(found)]


def _edges(spans: dict[str, list[Span]]) -> list[tuple[Span, str]]:
    return sorted(((look, pid) for pid in spans for look in spans[pid]), key=lambda edge: edge[0].end_ns or 0)


def _taken(rule: Callable[..., Taken], spans: dict[str, list[Span]]) -> Taken:
    """Apply a rule where all processes hold something all the time."""
    samples = {pid: columns(_looked(of_process)) for pid, of_process in spans.items()}
    readings = _readings(samples)
    return rule(samples, readings, dict.fromkeys(samples, np.ones(len(readings.writers), np.bool_)))


def _by_look(taken: Taken) -> Iterator[TakenByLook]:
    for place, apart_ns in enumerate(taken.apart_ns.tolist()):
        samples = {pid: int(of_process[place]) for pid, of_process in taken.samples.items()}
        yield TakenByLook({pid: None if one == NONE else one for pid, one in samples.items()}, apart_ns)


def _readings(samples: dict[str, Looks]) -> Readings:
    both = together([*samples.values()])
    order = np.argsort(both.ends_ns, kind="stable")
    writers = np.repeat(np.arange(len(samples)), [len(looks.ends_ns) for looks in samples.values()])
    return Readings(both.part(order), writers[order], [*samples])


times = st.integers(0, 2**59) | st.integers(10**12, 10**12 + 10**9)
readings = st.builds(
    lambda at, out, shift, back: Reading.of(at, at + out - shift, at + out + back),
    st.integers(10**12, 10**12 + 10**9),
    st.integers(1, 10**6),
    st.integers(-(10**15), 10**15) | st.just(10**12),
    st.integers(1, 10**6),
)


@given(st.lists(readings, min_size=1, max_size=6), st.lists(times, max_size=12))
def test_times_on_another_clock(taken: list[Reading], times_ns: list[int]) -> None:
    """A column of times is mapped to another clock as each of them is."""
    alignment = Alignment(taken)
    mapped = _time_line(alignment)(np.array(times_ns, np.int64))
    assert mapped.tolist() == [time_ns + alignment.shift_ns(time_ns) for time_ns in times_ns]


@given(st.lists(st.tuples(st.integers(-(2**56), 2**56), st.integers(-(2**56), 2**56)), min_size=1, max_size=5))
def test_moved_bytes(pairs: list[tuple[int, int]]) -> None:
    """What a rank moves of a collective, however large the numbers."""
    expected = [many * (ranks - 1) // ranks if ranks else 0 for many, ranks in pairs]
    many, ranks = np.array(pairs, np.int64).T
    if all(-(2**63) <= moved < 2**63 for moved in expected):
        assert moved(many, ranks).tolist() == expected
