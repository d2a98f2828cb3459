"""Whole numbers that are kept in few bytes are what they were."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrace.analysis.granules import from_granules, in_granules

LEAST, MOST = -(2**63), 2**63 - 1
WHOLE = st.integers(LEAST, MOST)
GRANULES = st.builds(lambda number, shift: number << shift, st.integers(-(2**20), 2**20), st.sampled_from([0, 9, 21]))


@given(st.lists(WHOLE | st.sampled_from([LEAST, 0, MOST]), max_size=20) | st.lists(GRANULES, max_size=20))
def test_they_come_back(numbers: list[int]) -> None:
    """Whatever the numbers are, also through msgpack."""
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(in_granules(np.array(numbers, np.int64))))
    assert from_granules(kept, len(numbers)).tolist() == numbers


def test_granules_are_counted() -> None:
    """What is a multiple of 2 MiB takes a byte or two, and what is always the same takes nothing."""
    held = np.arange(300) * (2 << 20) + (1 << 40)
    assert len(in_granules(held[:256])[-1]) == 256 and len(in_granules(held)[-1]) == 600
    assert in_granules(held[:1].repeat(1000)) == (1 << 40, 0, 0, b"")


def test_a_number_too_few_is_noticed() -> None:
    """What was kept of other moments is refused."""
    with pytest.raises(ValueError, match="broadcast"):
        from_granules(in_granules(np.arange(5)), 6)
