"""verl's driver, the process that runs the trainer: steps, reward, advantage, and what it asks of the others."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from rltrace.events import STEP
from rltrace.hooks.call_frames import variable
from rltrace.hooks.hook import Function, Hook
from rltrace.hooks.patching import PatchSet, end_span, nothing_after
from rltrace.hooks.wrapping import wrap_coroutine_function
from rltrace.record import lifecycle, spans


def span_named(name: str) -> Callable[[PatchSet, str], None]:
    """Return a hook that makes every call a span of this name."""
    return lambda patches, target: patches.span(target, name)


def auto_awaited(name: str) -> Callable[[PatchSet, str], None]:
    """Return a hook on a coroutine function behind verl's `@auto_await`, which looks at the frame that calls it.

    A wrapper around the decorated function would be that frame, and the coroutine would run in another thread: the
    function beneath is wrapped, and decorated again.
    """

    def name_hook(patches: PatchSet, target: str) -> None:
        patches.wrap(target, functools.partial(wrap_auto_awaited, name), (name,))

    return name_hook


def wrap_auto_awaited(name: str, original: Function, hook: Hook) -> Function:
    """Make the awaiting of the function beneath `@auto_await` a span."""
    from verl.utils.ray_utils import auto_await

    def begin(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return spans.automatic_span(name).__enter__()

    beneath = original.__wrapped__  # type: ignore[attr-defined]
    watched = auto_await(wrap_coroutine_function(beneath, hook, begin, end_span))
    return functools.update_wrapper(watched, original)


# ---- steps ------------------------------------------------------------------------------------------------------


NUMBER = "global_steps"
"""This attribute of a trainer has the number of its step."""


def trainer_above(frame: FrameType | None) -> Any:
    """Return the trainer whose code called this; None if none did.

    A trainer that is part of a script, as that of verl 0.8's `main_ppo_sync`, is sent to its process by value: its
    class has no hook there.
    """
    while frame is not None:
        above = variable(frame, "self")
        if NUMBER in getattr(above, "__dict__", ()):
            return above
        frame = frame.f_back
    return None


class Trainer:
    """The trainer of this process: it alone knows the number of the step."""

    def __init__(self) -> None:
        self._trainer: weakref.ref[Any] | None = None

    def remember(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Remember the trainer: the process that makes it is the driver; one that joined Ray before only started it."""
        self._trainer = weakref.ref(args[0])
        lifecycle.identify(role="driver", name="trainer")

    def step_args(self, name: str, *_: Any, **__: Any) -> dict[str, Any] | None:
        """Return the step of a timer's block, or None if the block is not one."""
        if name != STEP:
            return None
        trainer = self._trainer() if self._trainer is not None else None
        if trainer is None and (trainer := trainer_above(sys._getframe())) is not None:
            self.remember((trainer,), {})
        number = getattr(trainer, NUMBER, None)
        return {} if number is None else {"step": int(number)}


_trainer = Trainer()


def remember_trainer(patches: PatchSet, target: str) -> None:
    """Hook a trainer's `__init__`."""
    patches.around(target, _trainer.remember, nothing_after)


def step(patches: PatchSet, target: str) -> None:
    """Hook the generator beneath all of verl's timers: the block named `step` is a step."""
    patches.span(target, STEP, _trainer.step_args)


# ---- reward and advantage ---------------------------------------------------------------------------------------


def reward(patches: PatchSet, target: str) -> None:
    """Hook what computes the batch's rewards: it is a phase of the driver and has their mean."""
    patches.span(target, "reward", late_args=reward_args)


def reward_args(result: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Sample the mean reward of a sequence, from a tensor with one reward per token."""
    rewards = result[0] if isinstance(result, tuple) else result
    mean = float(rewards.sum(-1).mean())
    spans.counter("reward_mean", mean)
    return {"reward_mean": mean}


def advantage(patches: PatchSet, target: str) -> None:
    """Hook what computes the advantages: it is a phase of the driver and has the tokens of the step."""
    patches.span(target, "advantage", advantage_args)


def advantage_args(data: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Sample how many tokens were generated."""
    if "response_mask" not in data.batch:
        return {}
    tokens = int(data.batch["response_mask"].sum())
    spans.counter("tokens", tokens)
    return {"tokens": tokens}
