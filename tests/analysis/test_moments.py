"""Boundaries are kept as columns, and nobody who reads them can tell."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from rltrace.analysis.coded import Coded
from rltrace.analysis.encoded import as_builtins, as_json, from_kept, to_keep
from rltrace.analysis.moments import AT_A_TIME, Boundaries, Boundary

MANY = 2 * AT_A_TIME + 10


class Holder(msgspec.Struct):
    boundaries: Boundaries


def boundaries(many: int = MANY) -> Boundaries:
    """Of so many: two moments that boundaries share, and every seventh without a total."""
    places = np.arange(many)
    return Boundaries(
        step=Coded([None, 4, 7], places % 3),
        phase=Coded(["actor.update", None], places % 2),
        is_end=places % 2 == 1,
        at_seconds=places / 4,
        used_bytes=places << 33,
        owners=["actor.params", "unaccounted"],
        owned_bytes=np.array([[1 << 40, -3], [0, 5]]),
        moment=places % 2,
        apart_seconds=np.where(places % 7, 0.25, math.nan),
        is_consistent=places % 5 > 0,
        away_seconds=places * 0.5,
    )


def expected(place: int) -> Boundary:
    is_known = bool(place % 7)
    return Boundary(
        step=(None, 4, 7)[place % 3],
        phase=("actor.update", None)[place % 2],
        at_seconds=place / 4,
        used_bytes=place << 33,
        bytes={"actor.params": (1 << 40, 0)[place % 2], "unaccounted": (-3, 5)[place % 2]},
        apart_seconds=0.25 if is_known else None,
        is_consistent=place % 5 > 0 if is_known else None,
        side=("begin", "end")[place % 2],
        away_seconds=place * 0.5,
    )


def test_they_are_a_sequence_of_values() -> None:
    """One by one, from the end, in part and all together they are what they were made of."""
    found, all_of_them = boundaries(), [expected(place) for place in range(MANY)]
    assert len(found) == MANY and list(found) == all_of_them == found
    assert found[0] == all_of_them[0] and found[-1] == all_of_them[-1]
    assert found[AT_A_TIME - 1 : AT_A_TIME + 2] == all_of_them[AT_A_TIME - 1 : AT_A_TIME + 2]
    assert found[::-500] == all_of_them[::-500]
    with pytest.raises(IndexError):
        found[MANY]
    assert found != all_of_them[1:] and boundaries(0) == []


@pytest.mark.parametrize("name", Boundary.__struct_fields__)
def test_each_field_is_a_column(name: str) -> None:
    """A column has the values of the field, and of the types that JSON knows."""
    found = boundaries().column(name)
    assert found == [getattr(expected(place), name) for place in range(MANY)]
    assert {type(one) for one in found} <= {int, float, bool, str, dict, type(None)}


def test_json_has_them_as_a_list() -> None:
    """Programs that read the JSON see a list, as of any other figures."""
    found = {"boundaries": [msgspec.to_builtins(expected(place)) for place in range(MANY)]}
    assert json.loads(as_json(Holder(boundaries()))) == as_builtins(Holder(boundaries())) == found


def test_what_was_kept_is_the_same() -> None:
    """Kept figures are read again as columns, which take less than half of what the values take."""
    content = to_keep(Holder(boundaries()))
    again = from_kept(content, Holder).boundaries
    assert isinstance(again, Boundaries) and again == boundaries() and len(again.owned_bytes) == 2
    assert len(content) < len(msgspec.msgpack.encode(list(boundaries()))) / 2


def test_a_part_has_those_that_were_chosen() -> None:
    """By a mask or by places."""
    found = boundaries()
    of_steps = found.part(found.step.are_in({4, None}))
    assert list(of_steps) == [expected(place) for place in range(MANY) if place % 3 < 2]
    assert list(found.part(np.array([5, 2]))) == [expected(5), expected(2)]


@pytest.mark.parametrize("encode", [as_json, to_keep])
def test_what_is_no_figure_is_said(encode: Any) -> None:
    """A field that nobody can encode is named by its type."""
    with pytest.raises(NotImplementedError, match="complex is no figure"):
        encode({"figure": 1j})
