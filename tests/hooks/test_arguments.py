"""A hook finds an argument of a call however the program passed it."""

from __future__ import annotations

from typing import Any

import pytest

from rltrace.hooks.arguments import argument, keep, with_argument


def load(model: Any, weights: Any = None, step: int = 0) -> tuple[Any, Any, int]:
    """What is called."""
    return model, weights, step


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("m", "w"), {}),
    (("m", "w", 3), {}),
    (("m",), {"weights": "w"}),
    (("m",), {"step": 3, "weights": "w"}),
    ((), {"model": "m", "weights": "w"}),
]

every_call = pytest.mark.parametrize(("args", "kwargs"), CALLS)


@every_call
def test_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """By place and by name it is the same one, also for a `before` that only keeps it."""
    assert argument("weights", 1, args, kwargs) == keep("weights", 1)(args, kwargs) == load(*args, **kwargs)[1] == "w"


def test_none_is_an_argument() -> None:
    """The default is for who passes nothing."""
    assert argument("weights", 1, ("m",), {"weights": None}, "default") is None
    assert argument("weights", 1, ("m", None), {}, "default") is None
    assert argument("weights", 1, ("m",), {}, "default") == "default"
    assert argument("weights", 1, ("m",), {}, None) is None


def test_missing_argument() -> None:
    """Without a default it is named."""
    with pytest.raises(TypeError, match="'weights' was passed neither by name nor among 1 positional arguments"):
        argument("weights", 1, ("m",), {"step": 3})


@every_call
def test_replaced_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """It is passed as the program passed it, and the others stay; what the program gave is left as it was."""
    before = dict(kwargs)
    model, _, step = load(*args, **kwargs)
    changed = with_argument("weights", 1, args, kwargs, "other")
    assert load(*changed[0], **changed[1]) == (model, "other", step)
    assert (len(changed[0]), changed[1].keys()) == (len(args), before.keys())
    assert kwargs == before
