"""Arithmetic of interval sets, against counting every nanosecond."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rltrace.analysis.intervals import added_up_by, covered_ns, cut, holding, opened_last, outside, total_ns, union
from rltrace.analysis.phases import partitions
from rltrace.read import native

Row = tuple[int, int]
rows = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda row: (row[0], row[0] + row[1])), max_size=9
)


def as_array(rows: list[Row]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, 2)


def moments(rows: list[Row]) -> set[int]:
    return {moment for start, end in rows for moment in range(start, end)}


@given(rows, rows)
def test_union_is_disjoint(one: list[Row], other: list[Row]) -> None:
    """`union` covers what its sets cover and is disjoint."""
    joined = union(as_array(one), as_array(other))
    assert moments([tuple(row) for row in joined]) == moments(one + other)
    assert (joined[1:, 0] > joined[:-1, 1]).all() and (joined[:, 1] > joined[:, 0]).all()
    assert covered_ns(as_array(one), as_array(other)) == total_ns(joined) == len(moments(one + other))


@given(rows, st.lists(st.integers(0, 80), min_size=2, max_size=8, unique=True))
def test_cut_by_windows(given_rows: list[Row], edges: list[int]) -> None:
    """`cut` gives each window its piece of each row."""
    edges = sorted(edges[: len(edges) // 2 * 2])
    windows = list(zip(edges[::2], edges[1::2], strict=True))
    pieces, window, row = cut(as_array(given_rows), as_array(windows))
    for at, (start, end) in enumerate(windows):
        for of, (row_start, row_end) in enumerate(given_rows):
            mine = pieces[(window == at) & (row == of)]
            assert moments([tuple(piece) for piece in mine]) == moments([(row_start, row_end)]) & set(range(start, end))
            assert row_start == row_end or (mine[:, 1] > mine[:, 0]).all(), "to touch a window is not to lie in it"


times = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 80)
wide_rows = st.lists(st.tuples(times, times), max_size=12)


@given(wide_rows | wide_rows.map(sorted), st.lists(times, max_size=12, unique=True))
def test_the_library_does_the_same(given_rows: list[Row], edges: list[int]) -> None:
    """Whatever the intervals are: empty, backwards, in order or not, and of any times."""
    edges = sorted(edges[: len(edges) // 2 * 2])
    windows = as_array(list(zip(edges[::2], edges[1::2], strict=True)))
    some = as_array(given_rows)
    joined, by_windows = union(some), cut(some, windows)
    with pytest.MonkeyPatch.context() as without:
        without.setattr(native, "library", lambda: None)
        assert joined.tolist() == union(some).tolist()
        assert [part.tolist() for part in by_windows] == [part.tolist() for part in cut(some, windows)]


@given(rows, st.lists(st.integers(0, 80), max_size=12, unique=True), st.data())
def test_lengths_add_up_by_kinds(given_rows: list[Row], edges: list[int], data: st.DataObject) -> None:
    """With the library and without, each piece counts for its row's group and its window's kind."""
    windows = windows_of(edges)
    groups = data.draw(st.lists(st.integers(-1, 2), min_size=len(given_rows), max_size=len(given_rows)))
    kinds = data.draw(st.lists(st.integers(0, 3), min_size=len(windows), max_size=len(windows)))
    wanted = np.zeros((3, 4), np.int64)
    for row, group in zip(given_rows, groups, strict=True):
        for window, kind in zip(windows, kinds, strict=True):
            wanted[group, kind] += len(moments([row]) & moments([window])) if group >= 0 else 0
    given_all = (as_array(given_rows), np.array(groups, np.intp), as_array(windows), np.array(kinds, np.intp), (3, 4))
    assert added_up_by(*given_all).tolist() == wanted.tolist()
    with pytest.MonkeyPatch.context() as without:
        without.setattr(native, "library", lambda: None)
        assert added_up_by(*given_all).tolist() == wanted.tolist()


def windows_of(edges: list[int]) -> list[Row]:
    """Disjoint ones; some touch."""
    edges = sorted(edges)
    return [(start, end) for start, end in pairwise(edges)][:: 2 if len(edges) % 2 else 1]


@given(st.lists(st.integers(0, 80), max_size=8, unique=True), st.lists(st.integers(0, 90), max_size=12))
def test_holding_names_the_window(edges: list[int], at_ns: list[int]) -> None:
    """`holding` names the window that each instant is in, its end excluded; also where there is no window."""
    edges = sorted(edges[: len(edges) // 2 * 2])
    windows = list(zip(edges[::2], edges[1::2], strict=True))
    places = [next((at for at, (start, end) in enumerate(windows) if start <= ns < end), -1) for ns in at_ns]
    assert holding(as_array(windows), np.array(at_ns, np.int64)).tolist() == places


edges = st.lists(st.integers(0, 80), max_size=8, unique=True)


@given(rows, edges)
def test_outside_is_the_gaps(given_rows: list[Row], edges: list[int]) -> None:
    """`outside` is the part of each window that nothing covers."""
    windows = windows_of(edges)
    gaps, window = outside(union(as_array(given_rows)), as_array(windows))
    for at, row in enumerate(windows):
        mine = [tuple(gap) for gap in gaps[window == at]]
        assert moments(mine) == moments([row]) - moments(given_rows)
        assert sum(end - start for start, end in mine) == len(moments(mine))
    assert (gaps[:, 1] > gaps[:, 0]).all() and (gaps[1:, 0] >= gaps[:-1, 1]).all()


@given(rows, edges)
@example([(0, 9), (3, 10)], [0, 12])
@example([(0, 9), (3, 5), (4, 5)], [0, 4, 12])
def test_opened_last_wins(given_rows: list[Row], edges: list[int]) -> None:
    """Each instant of a window belongs to the interval that began last in it, of those that cover it."""
    windows = windows_of(edges)
    expected: dict[int, Row] = {}
    for start, end in windows:
        new = [row for row in given_rows if start <= row[0]]
        for moment in range(start, end):
            if covering := [row for row in new if row[0] <= moment < row[1]]:
                expected[moment] = max(covering, key=lambda row: (row[0], -row[1]))
    segments, of = opened_last(as_array(given_rows), as_array(windows))
    found = {
        moment: given_rows[at] for (start, end), at in zip(segments, of, strict=True) for moment in range(start, end)
    }
    assert found == expected
    assert (segments[:, 1] > segments[:, 0]).all() and (segments[1:, 0] >= segments[:-1, 1]).all()


@given(st.lists(rows, min_size=1, max_size=4), rows, rows, rows)
def test_step_parts_add_up(
    phases: list[list[Row]], driver: list[Row], computing: list[Row], starting: list[Row]
) -> None:
    """The parts of a step add up to its length, to the nanosecond.

    Whatever the phases do: overlap, touch, be empty, cover nothing or everything.
    """
    named = {f"phase {number}": union(as_array(of_phase)) for number, of_phase in enumerate(phases)}
    window = as_array([(0, 100)])
    parts = partitions(named, as_array(driver), window, union(as_array(computing)), as_array(starting))
    busy = moments([row for of_phase in phases for row in of_phase])
    assert parts.phases_ns.sum() - parts.overlap_ns == len(busy)
    assert parts.wait_driver_ns == len(moments(driver) - busy)
    known = moments(driver) | busy
    assert parts.unlabelled_ns == len(moments(computing) - known)
    known |= moments(computing)
    assert parts.starting_ns == len(moments(starting) - known)
    assert parts.idle_ns == 100 - len(known | moments(starting))


@given(st.lists(st.integers(0, 40), max_size=40), st.lists(st.integers(0, 9), max_size=40), edges)
def test_rows_in_order_are_cut_alike(starts: list[int], lengths: list[int], edges: list[int]) -> None:
    """Rows that begin and end in order, as most do, are cut in another way into the same pieces."""
    windows = as_array(windows_of(edges))
    ends = np.maximum.accumulate(
        [start + length for start, length in zip(sorted(starts), lengths, strict=False)] or [0]
    )
    in_order = np.array([*zip(sorted(starts), ends.tolist(), strict=False)], np.int64).reshape(-1, 2)
    found = cut(in_order, windows)
    shuffled = np.concatenate([in_order[::-1], in_order])[: len(in_order)]
    expected = cut(shuffled, windows)
    order = np.lexsort((expected[1], len(in_order) - 1 - expected[2]))
    assert (found[0] == expected[0][order]).all() and (found[1] == expected[1][order]).all()
    assert (found[2] == len(in_order) - 1 - expected[2][order]).all()
