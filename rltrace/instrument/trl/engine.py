"""The engine in a trainer's process: it wakes up, gets the weights, and goes to sleep.

`VLLMGeneration.sync_weights` empties the cache, wakes the engine up, hands it one parameter after the other and has it
forget its cached prefixes; adapters are merged before, and taken out behind it. A sync is all of that without the
wake-up: the phases of a rank do not overlap.
"""

from __future__ import annotations

from typing import Any

from rltrace.events import wake_up_of
from rltrace.hooks.arguments import argument
from rltrace.host.clock import now_ns
from rltrace.instrument.trl.held_phases import HeldPhases
from rltrace.record import spans
from rltrace.record.error_message import error_args

SYNC, SLEEP = "weight_sync", "rollout.sleep"


class Stages:
    """Stages that abut: one ends at the instant at which the next begins, for a sync has hundreds of short ones.

    Each is recorded when it is over; of a process that dies inside of one, the sync stays open.
    """

    def __init__(self) -> None:
        self._name = ""
        self._start_ns = 0
        self._args: dict[str, Any] = {}

    def begin(self, name: str, **args: Any) -> None:
        """End the stage that is under way, if one is, and begin this one."""
        at_ns = now_ns()
        self._end(at_ns)
        self._name, self._start_ns, self._args = name, at_ns, args

    def set(self, **args: Any) -> None:
        """Add arguments to the stage that is under way."""
        self._args |= args

    def close(self, error: BaseException | None = None) -> None:
        """End the stage that is under way, if one is; `error` is what ended it."""
        if error is not None:
            self._args |= error_args(error)
        self._end(now_ns())

    def _end(self, end_ns: int) -> None:
        name, self._name = self._name, ""
        if name:
            spans.automatic_span_at(name, self._start_ns, end_ns, **self._args)


class ColocatedEngine:
    """The phases of TRL's engine, and the stages of the sync that is under way."""

    def __init__(self) -> None:
        self._phases = HeldPhases()
        self._is_met = False
        """Whether TRL has an engine here; a program's own one has no phases of TRL's."""
        self._syncs = False
        self._waking = ""
        self._stage = Stages()

    def meet(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Meet the engine that is about to be made; one on a server is traced there."""
        self._is_met = args[0].mode == "colocate"

    # ---- waking up, going to sleep

    def begin_wake(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a wake-up; one inside of a sync interrupts it."""
        if not self._is_met:
            return
        self._phases.close(SYNC)
        tags = argument("tags", 1, args, kwargs, None)
        self._waking = wake_up_of(tags)
        self._phases.open(self._waking, tags=None if tags is None else list(tags))

    def end_wake(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End the wake-up; the sync goes on if there is one."""
        self._phases.close(self._waking, error=error)
        if self._syncs:
            self._phases.open(SYNC)

    def begin_sleep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin to go to sleep."""
        if self._is_met:
            self._phases.open(SLEEP, level=argument("level", 1, args, kwargs, 1))

    def end_sleep(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """The engine sleeps."""
        self._phases.close(SLEEP, error=error)

    # ---- weights

    def begin_sync(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Begin a sync."""
        self._syncs = True
        self._phases.open(SYNC)

    def end_sync(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End it: the engine has the weights, or something raised."""
        self._syncs = False
        self._stage.close(error)
        self._phases.close(SYNC, error=error)

    def begin_gather(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Begin to make the next parameter whole: what was done with the last one is done."""
        self._stage.begin("weight_sync.gather")
        return args[0]

    def end_gather(self, generation: Any, item: Any, error: BaseException | None) -> None:
        """A parameter is whole: until the next one is asked for it is loaded, or sent to a server.

        The last `next` finds none. A server has to know all names before: then nothing is done with the parameters.
        """
        known = {} if item is None else tensor_args(item)
        if known:
            self._stage.set(**known)
        if generation.mode == "colocate":
            stage = "weight_sync.load"
        else:
            stage = "weight_sync.send" if generation._weight_metadata is not None else ""
        if known and stage:
            self._stage.begin(stage, **known, tensors=1)
        else:
            self._stage.close(error)

    def begin_reset(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Begin to forget the prefixes that the engine cached with the old weights: it walks over all KV blocks."""
        if self._syncs:
            self._stage.begin("weight_sync.reset_cache")

    def end_reset(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """They are forgotten."""
        if self._syncs:
            self._stage.close(error)

    def begin_merge(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Begin to merge the adapters into the weights, or to take them out of it."""
        if self._syncs:
            self._stage.begin("weight_sync.merge")

    def end_merge(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """They are merged: the first parameter is gathered, or there is none left."""
        if self._syncs:
            self._stage.close(error)
            self._stage.begin("weight_sync.gather")


def tensor_args(item: Any) -> dict[str, Any]:
    """Return the name and the bytes of a parameter."""
    name, tensor = item
    return {"tensor": name, "bytes": tensor.numel() * tensor.element_size()}
