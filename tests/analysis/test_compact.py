"""Columns in few bytes are the same as before, whatever is in them."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrace.analysis.seen.compact import (
    MANY,
    WORTH_BYTES,
    compact_pairs,
    narrowed,
    together,
)
from rltrace.read.columns import OPEN

SECOND_NS = 10**9

lengths = st.one_of(
    st.integers(0, 2 * SECOND_NS), st.sampled_from([(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 5 * SECOND_NS, -1])
)


@given(
    st.lists(st.tuples(st.integers(0, 60 * SECOND_NS), lengths, st.booleans()), min_size=1, max_size=9),
    st.integers(0, 1 << 62),
)
def test_pairs_come_back(pattern: list[tuple[int, int, bool]], from_ns: int) -> None:
    """Pairs of times are what they were, open ones too, or stay as they are."""
    spans = sorted(pattern) * MANY
    spans.sort()
    starts = [from_ns + start_ns for start_ns, _, _ in spans]
    ends = [OPEN if is_open else start + length for start, (_, length, is_open) in zip(starts, spans, strict=True)]
    pairs = array("q", np.column_stack([starts, ends]).astype(np.int64).tobytes())
    compact = compact_pairs(pairs, has_open=any(is_open for _, _, is_open in spans))
    if all(0 <= length < 1 << 31 or is_open for _, length, is_open in spans):
        assert compact is not None
    if compact is not None:
        assert compact.rows().tobytes() == pairs.tobytes()
        assert len(compact) == len(spans)


def test_pairs_that_are_no_smaller_stay() -> None:
    """Few rows stay as they are, and rows that are seconds apart."""
    assert compact_pairs(array("q", range(2 * MANY - 2)), has_open=False) is None
    far = [time_ns for row in range(MANY) for time_ns in (row * 4 * SECOND_NS, row * 4 * SECOND_NS + 1)]
    assert compact_pairs(array("q", far), has_open=False) is None


@pytest.mark.parametrize("values", [[0], [-128, 127], [-129], [1 << 15], [-(1 << 31)], [1 << 31], [-(1 << 63)]])
def test_narrowed_numbers_are_the_same(values: list[int]) -> None:
    """Whole numbers of each size are what they were."""
    assert narrowed(array("q", values)).tolist() == values


def test_columns_lie_together() -> None:
    """Columns that were put together are what they were, and cannot be changed."""
    columns: list[Any] = [np.arange(WORTH_BYTES), np.ones(3, np.int8), np.empty((0, 2)), np.eye(5, dtype=np.float32)]
    for kept, column in zip(together(columns), columns, strict=True):
        assert (kept.dtype, kept.shape, kept.tobytes()) == (column.dtype, column.shape, column.tobytes())
        assert not kept.flags.writeable
