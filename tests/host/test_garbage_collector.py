"""What a process sees of its garbage collector after much was made without it."""

import gc

from rltrace.host.garbage_collector import without_collection


def test_what_is_frozen_stays_frozen() -> None:
    """What a traced program has put aside by `gc.freeze` stays aside: it would be looked through again and again."""
    kept: list[object] = []
    gc.freeze()
    with without_collection(of_a_program=True):
        assert not gc.isenabled()
    assert not any(one is kept for one in gc.get_objects())
    assert gc.isenabled()


def test_what_was_made_is_old() -> None:
    """What a reader made is not looked at before the oldest objects are."""
    with without_collection():
        made: list[object] = []
    assert any(one is made for one in gc.get_objects(generation=2))
    assert gc.isenabled()
