"""Ray: which process is a driver and which a worker, an arrow from each call of an actor's method or of a task to where
it runs, who waits for results, and how long arguments and results take to pack and unpack.

Both ends know the task's id, so nothing is added to the call's arguments (Ray's own OpenTelemetry hook adds one, which
breaks streaming methods). Source read: Ray 2.41 and 2.60, ray/actor.py, ray/remote_function.py,
ray/_private/function_manager.py, serialization.py and worker.py.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from rltrace.events import RAY_CALL
from rltrace.hooks.arguments import argument, attributes
from rltrace.hooks.environment import NEXT_RAY_HOOK_VARIABLE, with_startup
from rltrace.hooks.hook import Function, Hook
from rltrace.hooks.patching import PatchSet, end_span, nothing_after
from rltrace.hooks.wrapping import wrap_async_generator_function, wrap_function, wrap_generator_function
from rltrace.host import clock
from rltrace.host.interruption import own_failure
from rltrace.record import cluster, lifecycle, spans
from rltrace.record.announcement import complain
from rltrace.record.process import UNSAID_ROLE, running_processes

MANAGED = "ray._private.function_manager"


class Ray:
    """Roles, calls with their arrows, waits, and serialization."""

    name = "ray"
    supports = ("ray >= 2.41",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        patches.around("ray._private.worker:init", remember_address, become_driver)
        patches.around("ray._private.worker:disconnect", say_left, nothing_after)
        for owner, name in (
            ("ray.actor:ActorMethod", "_method_name"),
            ("ray.remote_function:RemoteFunction", "_function_name"),
        ):
            begin = functools.partial(begin_submit, name)
            patches.around(f"{owner}._remote", begin, end_submit, ("ray.submit",), reads=attributes(owner, name))
        manager = f"{MANAGED}:FunctionActorManager"
        patches.wrap(f"{manager}._make_actor_method_executor", watch_executor, (RAY_CALL,))
        patches.wrap(f"{manager}.get_execution_info", watch_tasks, (RAY_CALL,))
        patches.around(f"{MANAGED}:_inject_tracing_into_class", forget_inherited, nothing_after)
        # Below `ray.get`, which other modules have imported by name before we could replace it.
        patches.span("ray._private.worker:Worker.get_objects", "ray.get", get_args)
        patches.span("ray._private.worker:wait", "ray.wait", wait_args)
        patches.span("ray.util.placement_group:placement_group", "ray.placement_group", placement_args)
        context = "ray._private.serialization:SerializationContext"
        for method, name, args_of in (
            ("serialize", "ray.serialize", packed_args),
            ("deserialize_objects", "ray.deserialize", unpacked_args),
        ):
            patches.around(f"{context}.{method}", now, functools.partial(write_if_long, name, args_of), (name,))


def remember_address(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Remember where `ray.init` is told to connect to, for `runtime_env_hook`, which it calls."""
    _init.address = argument("address", 0, args, kwargs, None)
    _init.temp_dir = kwargs.get("_temp_dir")


def become_driver(_token: Any, _result: Any, error: BaseException | None) -> None:
    """Make the process that starts or joins a cluster its driver; a cluster that it joins may have other hosts."""
    _init.__dict__.clear()
    if error is not None:
        return
    lifecycle.identify(role="driver")
    recording, address = spans.current(), address_of_joined_cluster()
    if recording is not None and address is not None:
        cluster.say(recording.recording, address)


def say_left(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Say that the driver leaves its cluster: Ray ends its workers now, and kills those that take too long."""
    import ray

    recording = spans.current()
    if recording is not None and ray._private.worker.global_worker.mode == ray.SCRIPT_MODE:
        recording.append("left", ts_ns=clock.now_ns(), running=running_processes(recording.recording))


def address_of_joined_cluster() -> str | None:
    """Return `host:port` of the cluster that this process joined; None if it started the cluster itself."""
    import ray

    node = ray._private.worker._global_node  # None where a Ray client runs its tasks through a server
    return None if node is None or node.head else str(node.gcs_address)


# ---- a cluster that others started ------------------------------------------------------------------------------

_init = threading.local()
"""The arguments of the `ray.init` that this thread is in."""


def runtime_env_hook(runtime_env: Any) -> Any:
    """Let the workers of a cluster that others started join the Recording: Ray calls it by `RAY_RUNTIME_ENV_HOOK`.

    A cluster that this driver starts inherits our environment; its workers start faster without one of the job's own.
    """
    runtime_env = _next_hook(runtime_env)
    try:
        if os.environ.get(cluster.DIR_VARIABLE) and not cluster.is_off() and not _starts_cluster():
            return traced_runtime_env(runtime_env)
    except own_failure() as error:
        complain(f"workers of this Ray cluster are not traced: {type(error).__name__}: {error}")
    return runtime_env


def traced_runtime_env(runtime_env: Any) -> dict[str, Any]:
    """Return a copy of a runtime environment whose workers join this process's Recording, on whatever host."""
    traced: dict[str, Any] = copy.copy(runtime_env) if runtime_env is not None else {}
    theirs = traced.get("env_vars") or {}
    # Ray puts the value that its own processes have in the place of ${PYTHONPATH}.
    python_path = with_startup(theirs.get("PYTHONPATH", "${PYTHONPATH}"))
    traced["env_vars"] = {**theirs, **cluster.recording_variables(), "PYTHONPATH": python_path}
    return traced


def _next_hook(runtime_env: Any) -> Any:
    name = os.environ.get(NEXT_RAY_HOOK_VARIABLE)
    if not name:
        return runtime_env
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)(runtime_env)


def _starts_cluster() -> bool:
    """Tell whether the `ray.init` that called us finds no cluster to connect to; this asks what Ray will ask."""
    from ray._private import services

    if not hasattr(_init, "address") or _init.address not in (None, "local"):
        return False
    if _init.address == "local":
        return True
    return not os.environ.get("RAY_ADDRESS") and services.find_bootstrap_address(_init.temp_dir) is None


# ---- arguments and results --------------------------------------------------------------------------------------

WORTH_NS = 100_000
"""Most of what Ray packs is a key or a number and takes 50 µs at most; whatever takes as long as this is a batch."""


def now(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    """Read the clock."""
    return clock.now_ns()


def write_if_long(
    name: str, args_of: Callable[[Any], dict[str, int]], start_ns: int, result: Any, error: BaseException | None
) -> None:
    """Write a span of the packing or unpacking if it took long enough."""
    end_ns = clock.now_ns()
    if error is None and end_ns - start_ns >= WORTH_NS:
        spans.automatic_span_at(name, start_ns, end_ns, **args_of(result))


def packed_args(packed: Any) -> dict[str, int]:
    """Return the bytes of an argument or a result; Ray's own code copies arrays later."""
    return {"bytes": packed.total_bytes}


def unpacked_args(unpacked: list[Any]) -> dict[str, int]:
    """Return how many arguments or results arrive."""
    return {"objects": len(unpacked)}


# ---- waits ------------------------------------------------------------------------------------------------------


def get_args(_worker: Any, object_refs: list[Any], timeout: float | None = None, *_: Any, **__: Any) -> Any:
    """Return how many results the caller waits for; None if it only looks whether they are there."""
    return None if timeout == 0 else {"objects": len(object_refs)}


def wait_args(ray_waitables: Any = None, *, num_returns: int = 1, timeout: float | None = None, **_: Any) -> Any:
    """Return how many results the caller waits for, and out of how many; Ray refuses anything but a list."""
    looks = timeout == 0 or not isinstance(ray_waitables, list)
    return None if looks else {"objects": num_returns, "of": len(ray_waitables)}


# ---- places -----------------------------------------------------------------------------------------------------


def placement_args(bundles: Any, strategy: str = "PACK", *_: Any, **__: Any) -> dict[str, Any]:
    """Return what a placement group is asked for: its bundles, alike ones once, and how they are packed.

    Ray finds places meanwhile and later; whoever needs them waits by `ray.get`.
    """
    texts = [", ".join(f"{name} {amount:g}" for name, amount in bundle.items()) for bundle in bundles]
    return {"strategy": strategy, "bundles": len(texts), "each": sorted(set(texts))}


# ---- calls ------------------------------------------------------------------------------------------------------


def begin_submit(attribute: str, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Open the span that a call's arrow leaves from: the caller may have no span of its own.

    The attribute names what is called; the module in the name of a task's function is left out.
    """
    return spans.automatic_span("ray.submit", method=getattr(args[0], attribute).rpartition(".")[2]).__enter__()


def end_submit(opened: Any, result: Any, error: BaseException | None) -> None:
    """Let the arrow leave once the task has an id."""
    try:
        task_id = None if error is not None else task_of(result)
        if task_id is not None:
            spans.flow(flow_key(task_id), "out")
    finally:
        end_span(opened, result, error)


def task_of(result: Any) -> str | None:
    """Return the id of the task that a call started; None if the call has no results, and so no reference."""
    reference = result[0] if isinstance(result, list) and result else result
    reference = getattr(reference, "_generator_ref", reference)
    if getattr(reference, "_id_future", None) is not None:  # of a Ray client: to ask would wait for its server
        return None
    task_id = getattr(reference, "task_id", None)
    return task_id().hex() if task_id is not None else None


def flow_key(task_id: str) -> str:
    """Return the key of the arrow of one call."""
    return f"ray:{task_id}"


def watch_executor(original: Function, hook: Hook) -> Function:
    """Wrap the maker of executors: each call of an executor from it is a span `ray.call`."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        executor = original(*args, **kwargs)
        if not hook.bound:
            return executor
        try:
            return wrap_executor(executor, hook)
        except own_failure() as error:
            hook.failed(error)
            return executor

    return make


def wrap_executor(executor: Any, hook: Hook) -> Any:
    """Put a span around the calls of one actor method; Ray reads `.name` and `.method` of the result."""
    if executor.name.startswith("__ray"):
        return executor

    def begin(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        actor = type(args[0]).__name__
        is_creation = executor.name == "__init__"  # no call that a reference is returned for
        if is_creation:
            lifecycle.identify(role="worker", name=actor)
        return open_call(f"{actor}.{executor.name}", has_arrow=not is_creation)

    return wrapper_of(executor.method)(executor, hook, begin, end_span)


def forget_inherited(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Let a class that was sent by value inherit again what a hook has wrapped in its base, before Ray wraps it all.

    Ray wraps an actor's methods where `ray.remote` decorates its class, inherited ones too. Where the base is of the
    same module, which is being imported just then, no hook is in it yet: what is sent is the method without it.
    """
    actor_class = args[0]
    for name, method in list(vars(actor_class).items()):
        if getattr(method, "__ray_tracing_wrapped__", False) and is_hooked_in_base(actor_class, name, method):
            delattr(actor_class, name)


def is_hooked_in_base(actor_class: type, name: str, method: Function) -> bool:
    """Tell whether the first base that defines a method is a module's own, and has a wrapper around that method now."""
    owner = next((base for base in actor_class.__mro__[1:] if name in vars(base)), None)
    module = sys.modules.get(getattr(owner, "__module__", ""))
    if owner is None or getattr(module, owner.__qualname__, None) is not owner:
        return False
    now = vars(owner)[name]
    is_same = getattr(inspect.unwrap(now), "__qualname__", None) == getattr(method, "__qualname__", "")
    return is_same and hasattr(now, "__wrapped__") and getattr(method, "__wrapped__", None) is not now


def watch_tasks(original: Function, hook: Hook) -> Function:
    """Wrap the loader of what a worker executes: each call of a task's function from it is a span `ray.call`."""
    watched: dict[Any, tuple[Any, Any]] = {}

    @functools.wraps(original)
    def load(self: Any, job_id: Any, function_descriptor: Any) -> Any:
        info = original(self, job_id, function_descriptor)
        # Ray keeps what it gets, so a function that is loaded during a pause is watched too.
        if not hook.bound or function_descriptor.is_actor_method():
            return info
        try:
            known, replacement = watched.get(function_descriptor.function_id, (None, None))
            if known is not info:
                replacement = info._replace(function=wrap_task(info.function, hook))
                watched[function_descriptor.function_id] = info, replacement
            return replacement
        except own_failure() as error:
            hook.failed(error)
            return info

    return load


def wrap_task(function: Function, hook: Hook) -> Function:
    """Put a span around the calls of one task's function."""

    def begin(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        recording = spans.current()
        if recording is not None and recording.who.get("role") in (None, UNSAID_ROLE):
            recording.identify(role="worker")
        return open_call(function.__name__, has_arrow=True)

    return wrapper_of(function)(function, hook, begin, end_span)


def wrapper_of(function: Function) -> Callable[..., Function]:
    """Return the wrapper for a kind of call; the executor of a coroutine method returns the coroutine."""
    if inspect.isgeneratorfunction(function):
        return wrap_generator_function
    if inspect.isasyncgenfunction(function):
        return wrap_async_generator_function
    return wrap_function


def open_call(method: str, *, has_arrow: bool) -> Any:
    """Open the span of a call, where its arrow arrives."""
    opened = spans.automatic_span(RAY_CALL, method=method).__enter__()
    if has_arrow and (task := current_task()) is not None:
        spans.flow(flow_key(task), "in")
    return opened


def current_task() -> str | None:
    """Return the id of the task that this thread or coroutine runs; None where Ray is not connected.

    `ray.get_runtime_context` would start a cluster there.
    """
    import ray

    return str(ray.get_runtime_context().get_task_id()) if ray.is_initialized() else None
