"""A span for each trajectory, and its id for what belongs to it, in whatever task or thread that runs.

An agent loop runs the tools of a turn in tasks of their own, which have the context of the one that made them; so have
the threads of `asyncio.to_thread`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from rltrace.events import TRAJECTORIES
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.record import spans

TRAJECTORY = TRAJECTORIES[0]

_running: ContextVar[str | None] = ContextVar("rltrace_trajectory", default=None)


def name_trajectories(patches: PatchSet, target: str, args_of: Callable[..., dict[str, Any]]) -> None:
    """Hook a call that is one trajectory.

    Args:
        patches: The hooks.
        target: The call.
        args_of: Called as the call is; describes it.
    """

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = args_of(*args, **kwargs)
        outer, own = _running.get(), secrets.token_hex(8)
        _running.set(own)
        return outer, spans.automatic_span(TRAJECTORY, trajectory=own, **known).__enter__()

    patches.around(target, begin, end, (TRAJECTORY,))


def end(token: Any, result: Any, error: BaseException | None) -> None:
    """End it; what the same task does next belongs to the one around it, if there is one."""
    outer, opened = token
    _running.set(outer)
    end_span(opened, result, error)


def of_trajectory() -> dict[str, Any]:
    """Return the trajectory in which this is called, as an argument of a span; none outside of one."""
    running = _running.get()
    return {} if running is None else {"trajectory": running}
