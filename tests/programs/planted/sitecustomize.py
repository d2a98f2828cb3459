"""Faults in the reference run, planted from outside: each takes a time that is known, and says how long it really took.

PLANTED_FAULTS    JSON: seconds a step by the fault's name
PLANTED_FOLDER    where each process writes what it took, a line each time
"""

from __future__ import annotations

import functools
import gc
import json
import os
import time
from collections.abc import Callable
from typing import Any

from wrapt import register_post_import_hook

SECONDS: dict[str, float] = json.loads(os.environ.get("PLANTED_FAULTS", "{}"))
STEP_OF_SLOW_STEP = 5
BALLAST = 100_000
"""How many objects a planted garbage collection looks at."""


def take(fault: str, rank: int | None, pause: Callable[[float], object] = time.sleep) -> None:
    """Take the fault's time, and write down how long it was."""
    begin = time.monotonic()
    pause(SECONDS[fault])
    line = json.dumps({"fault": fault, "rank": rank, "seconds": time.monotonic() - begin})
    with open(os.path.join(os.environ["PLANTED_FOLDER"], f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
        file.write(line + "\n")


def before(holder: Any, name: str, action: Callable[..., None]) -> None:
    """Have an action done before each call of a function, with the call's arguments."""
    function = getattr(holder, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(holder, name, wrapper)


def slow_rank(actor: Any) -> None:
    """Rank 1 begins its update late; the other one waits for it in the collectives."""
    before(actor.Actor, "update", lambda self, *_: take("slow_rank", self.rank) if self.rank == 1 else None)


def slow_engine(engine: Any) -> None:
    """The engine of rank 1 begins to generate late."""
    before(engine.Engine, "generate", lambda self, *_: take("slow_engine", self.rank) if self.rank == 1 else None)


def garbage_collection(actor: Any) -> None:
    """Both ranks collect garbage before the update."""
    ballast: list[dict[str, list[int]]] = []

    def collect(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            gc.collect()

    def action(self: Any, *_: Any) -> None:
        if not ballast:
            ballast.extend({"item": [number]} for number in range(BALLAST))
        take("garbage_collection", self.rank, collect)

    before(actor.Actor, "update", action)


def sender_waits(weight_sync: Any) -> None:
    """Both engines take long over the first bucket of a sync."""
    before(weight_sync.Receiver, "load", lambda _, bucket: take("sender_waits", None) if bucket.index == 0 else None)


def sync_in_no_stage(weight_sync: Any) -> None:
    """Both senders think about their buckets before they fill the first."""
    before(weight_sync, "plan", lambda *_: take("sync_in_no_stage", None))


def driver_phases(task: Any) -> None:
    """The driver takes long to score, while all ranks wait."""
    before(task, "rewards", lambda *_: take("driver_phases", None))


def between_phases(task: Any) -> None:
    """The driver takes long to load its prompts, before the first phase of a step."""
    before(task, "prompts", lambda *_: take("between_phases", None))


def slow_steps(task: Any) -> None:
    """One step takes longer by all the seconds of its kind: `prompts` has the step's number as its third argument."""
    before(
        task, "prompts", lambda _count, _seed, step, *_: take("slow_steps", None) if step == STEP_OF_SLOW_STEP else None
    )


PLACES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "slow_rank": ("rltrace_reference.actor", slow_rank),
    "slow_engine": ("rltrace_reference.engine.engine", slow_engine),
    "garbage_collection": ("rltrace_reference.actor", garbage_collection),
    "sender_waits": ("rltrace_reference.weight_sync", sender_waits),
    "sync_in_no_stage": ("rltrace_reference.weight_sync", sync_in_no_stage),
    "driver_phases": ("rltrace_reference.task", driver_phases),
    "between_phases": ("rltrace_reference.task", between_phases),
    "slow_steps": ("rltrace_reference.task", slow_steps),
}
"""By the fault's name: the module that is changed, and how."""

for fault in SECONDS:
    register_post_import_hook(PLACES[fault][1], PLACES[fault][0])
