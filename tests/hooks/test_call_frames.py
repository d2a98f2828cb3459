"""Looking at the variables of a function that is being called."""

from __future__ import annotations

import sys
import weakref

from rltrace.hooks.call_frames import variable


class Large:
    """What a function gives up while it runs."""


def test_variable_is_what_the_function_has() -> None:
    """A variable is found by its name, and one that is not there is the default."""
    here = "now"
    assert variable(sys._getframe(), "here") == here == variable(sys._getframe(), "here")
    assert variable(sys._getframe(), "gone") is None
    assert variable(sys._getframe(), "gone", 3) == 3


def test_look_keeps_nothing_alive() -> None:
    """What a function deletes after a look is gone at once."""
    large = Large()
    is_there = weakref.ref(large)
    variable(sys._getframe(), "is_there")
    del large
    assert is_there() is None
