"""verl's calls of a worker group: `ray.dispatch`, `ray.execute` and `ray.collect`, in the driver.

verl makes one callable per method of a group, from a function that divides the arguments, one that submits and one
that puts the results together. Waiting for the results lies between the last two and has no function of its own.
"""

from __future__ import annotations

import functools
from typing import Any

from rltrace.hooks.held_span import HeldSpan
from rltrace.hooks.hook import Function, Hook
from rltrace.hooks.patching import PatchSet


def watch_calls(patches: PatchSet, target: str) -> None:
    """Hook `func_generator`, which makes the callables."""
    patches.wrap(target, watch_callable, ("ray.dispatch", "ray.execute", "ray.collect"))


class Call:
    """One call of a worker group, and the part of it that is open now."""

    def __init__(self, method: str, blocking: bool, group: Any, dispatch_fn: Function, batch: Any) -> None:
        self._blocking = blocking
        self._division = functools.partial(division_of, group, dispatch_fn, batch)
        self._open = HeldSpan()
        self._open.open("ray.dispatch", method=method, blocking=blocking)

    def submitted(self, references: Any) -> None:
        """End the dispatch: the arguments are on their way, and a blocking call waits from here on."""
        self._open.set(calls=len(references) if isinstance(references, list) else 1, **self._division())
        self._open.close()
        if self._blocking:
            self._open.open("ray.execute")

    def arrived(self) -> None:
        """Begin to collect: the results are here, or the references that promise them."""
        self._open.close()
        self._open.open("ray.collect")

    def end(self, error: BaseException | None) -> None:
        """End the call, which returns or raises, in whichever part it is."""
        self._open.close(error)

    def end_interrupted(self, interruption: BaseException | None) -> None:
        """End the part that is open, if an error from outside has kept the hook from that."""
        self._open.end_interrupted(interruption)


def division_of(group: Any, dispatch_fn: Function, batch: Any) -> dict[str, Any]:
    """Return verl's mode of a dispatch, and how it divides a batch among the workers of a group.

    Asked when it is over: only then it is known which workers of a mesh get the same chunk.
    """
    function = dispatch_fn.func if isinstance(dispatch_fn, functools.partial) else dispatch_fn
    mode = getattr(function, "__name__", "").removeprefix("dispatch_")
    known: dict[str, Any] = {"mode": mode} if mode else {}
    chunks = None
    if isinstance(dispatch_fn, functools.partial) and dispatch_fn.args:
        known["mesh_name"] = str(dispatch_fn.args[0])
        ranks = getattr(group, "_dispatch_info", {}).get(dispatch_fn.args[0])
        chunks = max(ranks) + 1 if ranks else None
    elif mode.startswith("dp_compute"):
        chunks = group.world_size
    if chunks:
        known["mesh"] = [chunks, group.world_size // chunks]
        if hasattr(batch, "chunk"):
            known["chunk"] = -(-len(batch) // chunks)
    return known


def begin_call(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Call:
    """Open the first part of a call."""
    return Call(*args)


def submitted(call: Call, references: Any, _error: BaseException | None) -> None:
    """Close the first part."""
    call.submitted(references)


def arrived(call: Call, _result: Any, _error: BaseException | None) -> None:
    """Open the last part."""
    call.arrived()


def end_call(call: Call, _result: Any, error: BaseException | None) -> None:
    """Close the part that is open."""
    call.end(error)


def watch_callable(original: Function, hook: Hook) -> Function:
    """Wrap `func_generator`: its callables open and close the parts of their calls.

    A callable is made anew for each call, with functions that know this call: nothing is kept between two calls, so
    that threads do not meet and a worker group can still be pickled.
    """

    timed_begin, timed_submitted = hook.timed(begin_call), hook.timed(submitted)
    timed_arrived, timed_end = hook.timed(arrived), hook.timed(end_call)

    @functools.wraps(original)
    def make(
        group: Any, method_name: str, dispatch_fn: Function, collect_fn: Function, execute_fn: Function, blocking: bool
    ) -> Any:
        of_method = type(original(group, method_name, dispatch_fn, collect_fn, execute_fn, blocking))

        def call(functor: Any, *args: Any, **kwargs: Any) -> Any:
            if not hook.live:  # below a class is made for this call, which takes 10 µs
                return of_method.__call__(functor, *args, **kwargs)
            batch = args[0] if args else next(iter(kwargs.values()), None)
            token = hook.enter(timed_begin, (method_name, blocking, group, dispatch_fn, batch), {})

            def execute(*args: Any, **kwargs: Any) -> Any:
                references = execute_fn(*args, **kwargs)
                hook.leave(timed_submitted, token, references, None)
                return references

            def collect(*args: Any, **kwargs: Any) -> Any:
                hook.leave(timed_arrived, token, None, None)
                return collect_fn(*args, **kwargs)

            is_leaving = False
            try:
                result = original(group, method_name, dispatch_fn, collect, execute, blocking)(*args, **kwargs)
                is_leaving = True
                hook.leave(timed_end, token, result, None)
                return result
            except BaseException as error:
                hook.leave_by_error(timed_end, token, error, is_leaving=is_leaving)
                raise

        # A class named for the method, as verl makes it, so that it is still told apart.
        return type(method_name, (of_method,), {"__call__": call})()

    return make


def place(patches: PatchSet, target: str) -> None:
    """Hook what asks Ray for the places of a resource pool, and waits until it has them; it remembers them."""
    patches.span(target, "ray.placement_groups", place_args)


def place_args(pool: Any, strategy: str = "STRICT_PACK", *_: Any, **__: Any) -> dict[str, Any] | None:
    """Return how many bundles each node gets, how many processes share one, and how they are packed."""
    if getattr(pool, "pgs", None) is not None:
        return None
    bundles, sharing = list(getattr(pool, "_store", ())), getattr(pool, "max_colocate_count", None)
    return {"strategy": strategy, "bundles": bundles, "processes_per_bundle": sharing}
