"""What processes read when they looked at their memory comes out as columns, however it was written."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rltrace.analysis.looks import columns
from rltrace.analysis.seen.looked import Looked
from rltrace.read import gate

USUAL: dict[str, Any] = {"totals": {"used": 5, "driver.reserved": 1 << 56}, "free_bytes": 3, "cpu_ns": {"7": 9}}


def test_looks_that_are_over() -> None:
    """Looks come in the order in which they ended; an open one says nothing yet."""
    looked = Looked()
    looked.add(3, 9, {"free_bytes": 1})
    looked.add(4, None, {"free_bytes": 2})
    looked.add(2, 5, {"free_bytes": 3, "turn": "beat"})
    found = columns(looked)
    assert (found.starts_ns.tolist(), found.ends_ns.tolist()) == ([2, 3], [5, 9])
    assert (found.free_bytes.tolist(), found.turns.tolist()) == ([3, 1], ["beat", None])


def test_what_a_look_does_not_say() -> None:
    """A number that nobody said is NaN, the age of what is not repeated 0, and what is no number says nothing."""
    looked = Looked()
    looked.add(1, 2, {"totals": {"used": True}, "held_bytes": None, "cpu_ns": {"7": float("nan")}, "age_ns": None})
    found = columns(looked)
    assert found.used_bytes.tolist() == [1] and np.isnan(found.free_bytes[0]) and found.age_ns[0] == 0
    assert found.cpu_ns.says("7")[0] and np.isnan(found.cpu_ns.of("7")[0])
    assert not found.held_bytes.says_any().any()


def test_numbers_by_name() -> None:
    """Looks may say numbers of different names, which come in the order of the looks."""
    looked = Looked()
    for end_ns, said in ((3, {"b": 1, "a": 2}), (5, {}), (4, {"c": 3.0, "a": 4.0})):
        looked.add(1, end_ns, {"totals": said})
    found = columns(looked).totals
    assert [found.names[place] for place in found.places.tolist()] == ["b", "a", "c", "a"]
    assert found.looks.tolist() == [0, 0, 1, 1] and found.says_any().tolist() == [True, True, False]
    assert found.of("a").tolist()[:2] == [2, 4] and found.sums().tolist() == [3, 7, 0]


@pytest.mark.parametrize(
    "changed",
    [
        {"free_bytes": -1},
        {"free_bytes": True},
        {"totals": {"used": 1.5}},
        {"held_bytes": {"7": (1 << 56) + 1}},
        {"cpu_ns": {"7": float("nan")}},
        {"totals": None},
        {"unchanged_ns": 1 << 63},
        {"age_ns": "old"},
    ],
)
def test_usual_arguments(changed: dict[str, Any]) -> None:
    """Only what passes every check is usual, and one that is not makes nothing of its list usual."""
    usual = msgspec.msgpack.encode(USUAL | {"more": [None], "age_ns": None})
    assert gate.are_usual("memory.edge", [usual, usual])
    assert not gate.are_usual("memory.edge", [usual, msgspec.msgpack.encode(USUAL | changed)])
