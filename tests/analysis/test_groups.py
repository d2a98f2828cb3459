"""Places of equal keys, by the native library and with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rltrace.analysis.seen.rows import distinct, groups
from rltrace.read import native
from rltrace.read.native import groups as by_library

KEYS = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 1 << 16), st.sampled_from([1 << 31, 1 << 40])), max_size=60)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
@given(keys=KEYS)
def test_groups_are_the_places_of_each_key(is_native: bool, kind: type[np.signedinteger], keys: list[int]) -> None:
    """Each key has all its places in their order, and the key that is first comes first."""
    of_kind = [key for key in keys if key <= np.iinfo(kind).max]
    with pytest.MonkeyPatch.context() as patch:
        if not is_native:
            patch.setattr(native, "library", lambda: None)
        found = groups(np.array(of_kind, kind))
    assert [places.tolist() for places in found] == [
        [place for place, other in enumerate(of_kind) if other == key] for key in dict.fromkeys(of_kind)
    ]


@pytest.mark.parametrize("keys", [np.array([0, -1]), np.array([0, 3])])
def test_keys_beyond_the_range_are_refused(keys: NDArray[np.int64]) -> None:
    """The library counts only what there is a count for."""
    library = native.library()
    if library is None:
        pytest.skip("there is no compiler here")
    with pytest.raises(ValueError, match="a key of 2 is not from 0 to 2"):
        by_library.groups(library, keys, 2)


@given(numbers=st.lists(st.one_of(st.integers(0, 4), st.sampled_from([-1, 60, 1 << 40])), max_size=60))
def test_distinct_numbers_are_those_of_numpy(numbers: list[int]) -> None:
    """Small ones are found without sorting, and all are found in order."""
    given_numbers = np.array(numbers, np.int64)
    found, places = distinct(given_numbers)
    assert found.tolist() == sorted({*numbers})
    assert found.take(places).tolist() == numbers if numbers else not len(places)
