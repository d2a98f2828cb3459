"""The context of a trace crosses Ray's calls: of actors' methods, asynchronous ones too, and of tasks.

Ray has a parameter for it, `_ray_trace_ctx`, which its own tracing fills. Ray gives it to every method of an actor, in
every worker, and drops what comes while its tracing is off; so a worker that is not traced takes no harm. A task has
it only while Ray's tracing is on; here its function gets it in the same way. Methods that stream have none.

Source read: Ray 2.41 and 2.60, ray/util/tracing/tracing_helper.py, ray/actor.py, ray/remote_function.py.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rltrace.hooks.arguments import Arguments, argument, with_argument
from rltrace.hooks.environment import TRACE_CONTEXT_VARIABLE
from rltrace.hooks.hook import Function, Hook
from rltrace.hooks.patching import PatchSet
from rltrace.hooks.wrapping import wrap_function
from rltrace.host.interruption import own_failure
from rltrace.instrument.opentelemetry import context

PARAMETER = "_ray_trace_ctx"
MANAGER = "ray._private.function_manager:FunctionActorManager"
SIGNATURES = ("ray._common.signature", "ray._private.signature")
"""Where Ray checks and flattens the arguments of a call, in newer and in older releases."""


class RayContext:
    """The context of a trace in Ray's calls."""

    name = "ray_context"
    supports = ("ray >= 2.41",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        if reason := context.refusal():
            patches.refuse(reason)
        patches.wrap("ray.remote_function:_inject_tracing_into_function", give_parameter, context.JOINS)
        patches.when_imported("ray.remote_function", functools.partial(name_sending, patches))
        patches.wrap(f"{MANAGER}._make_actor_method_executor", watch_executor, context.JOINS)


def name_sending(patches: PatchSet, _hook: Hook) -> None:
    """Name the hook on what every call passes through."""
    patches.arguments(f"{next(filter(_is_there, SIGNATURES))}:flatten_args", send, context.JOINS)


def _is_there(module: str) -> bool:
    """Tell whether a module can be imported; `find_spec` alone raises if its package cannot."""
    package, _, _ = module.rpartition(".")
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None


def send(_hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Add the current context to the arguments of a call, if what is called takes it and nobody has added it."""
    parameters = argument("signature_parameters", 0, args, kwargs)
    given = argument("kwargs", 2, args, kwargs)
    if PARAMETER in given or not any(one.name == PARAMETER for one in parameters):
        return args, kwargs
    headers = context.to_send()
    return (
        (args, kwargs) if headers is None else with_argument("kwargs", 2, args, kwargs, {**given, PARAMETER: headers})
    )


# ---- tasks ------------------------------------------------------------------------------------------------------


def give_parameter(original: Function, hook: Hook) -> Function:
    """Give the functions of tasks the parameter, unless Ray's own tracing has done so."""

    @functools.wraps(original)
    def inject(function: Function) -> Function:
        injected: Function = original(function)
        if not hook.live or injected is not function or not is_context_used():
            return injected
        try:
            return with_parameter(function)
        except own_failure() as error:
            hook.failed(error)
            return injected

    return inject


def is_context_used() -> bool:
    """Tell whether this process may have a context to send."""
    return "opentelemetry.trace" in sys.modules or os.environ.get(TRACE_CONTEXT_VARIABLE) == "1"


def with_parameter(function: Function) -> Function:
    """Return a function that takes a context besides; that of a generator stays as it is.

    It is sent to the worker by value, and needs nothing of ours there.
    """
    if (
        not inspect.isfunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        return function
    signature = inspect.signature(function)
    if PARAMETER in signature.parameters:
        return function

    @functools.wraps(function)
    def call(*args: Any, _ray_trace_ctx: Any = None, **kwargs: Any) -> Any:
        import sys  # the only name that is looked up in the worker

        ours = sys.modules.get("rltrace.instrument.opentelemetry.ray_calls")
        if ours is None or _ray_trace_ctx is None:
            return function(*args, **kwargs)
        return ours.call_with(_ray_trace_ctx, function, args, kwargs)

    own = inspect.Parameter(PARAMETER, inspect.Parameter.KEYWORD_ONLY, default=None)
    before, behind = _split_at_keywords(signature)
    call.__signature__ = signature.replace(parameters=[*before, own, *behind])  # type: ignore[attr-defined]
    return call


def call_with(headers: Mapping[str, str], function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function of a task in the context of whoever called it."""
    hook = _receiving
    if hook is None or not hook.live:
        return function(*args, **kwargs)
    return wrap_function(function, hook, lambda _args, _kwargs: context.bring(headers), end_call)(*args, **kwargs)


def _split_at_keywords(signature: inspect.Signature) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """Return the parameters of a signature, and behind which of them one that is passed by name alone has its place."""
    parameters = list(signature.parameters.values())
    behind = [one for one in parameters if one.kind is inspect.Parameter.VAR_KEYWORD]
    return [one for one in parameters if one not in behind], behind


# ---- methods of actors ------------------------------------------------------------------------------------------

_receiving: Hook | None = None
"""The hook that gates what arrives in this process."""


def watch_executor(original: Function, hook: Hook) -> Function:
    """Let each call of an actor's method have the context that came with it."""
    global _receiving
    _receiving = hook

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        executor = original(*args, **kwargs)
        if not hook.bound or executor.name.startswith("__ray") or _streams(executor.method):
            return executor
        try:
            return wrap_function(executor, hook, begin_call, end_call)
        except own_failure() as error:
            hook.failed(error)
            return executor

    return make


def begin_call(_args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the context current that a call brings, unless Ray's own tracing does."""
    headers = kwargs.get(PARAMETER)
    return None if headers is None or _ray_traces() else context.bring(headers)


def end_call(token: Any, _result: Any, _error: BaseException | None) -> None:
    """Make the one before current again."""
    context.take_back(token)


def _streams(method: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)


def _ray_traces() -> bool:
    helper = sys.modules.get("ray.util.tracing.tracing_helper")
    return helper is not None and bool(helper._is_tracing_enabled())
