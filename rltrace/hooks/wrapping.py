"""A hook around a function of any kind: a coroutine function stays one, a generator function stays one.

Each wrapper is a closure, not wrapt's proxy: a proxy costs 0.4 us a call, and cloudpickle takes a class that holds one
by value, so that a Ray worker would lose the hook.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from types import CoroutineType
from typing import Any

from rltrace.hooks.hook import ENTERING, NOT_ENTERED, After, Before, Function, Hook, end_token
from rltrace.host.interruption import own_failure
from rltrace.record import spans

Call = tuple[tuple[Any, ...], dict[str, Any]]
ChangeArguments = Callable[["Hook", tuple[Any, ...], dict[str, Any]], Call]

# An error from outside may come wherever Python calls something. A `with` is not safe from it: it may come before the
# first statement of `__exit__`. So everything from `before` to `after` is in one `try`. Its handler knows from `token`
# and `is_leaving` how far the call has got, and is in a `try` itself.


def wrap_function(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Put `before` and `after` around a call, and around the coroutine if the call returns one."""
    before, after = hook.timed(before), hook.timed(after)

    # Hook.enter and Hook.leave written out: this is the hot one (two calls less, 0.1 us).
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not hook.live:
            return original(*args, **kwargs)
        token, is_leaving, newest = ENTERING, False, spans.newest
        try:
            try:
                hook.row.fired()
                token = before(args, kwargs)
            except own_failure() as error:
                token = NOT_ENTERED
                hook.failed(error)
            # Outside of the handler above: neither what the program raises nor sys.exc_info may know of our error.
            result = original(*args, **kwargs)
            if token is NOT_ENTERED:
                return result
            # `@torch.no_grad() async def` is a plain function that returns a coroutine.
            if type(result) is CoroutineType:
                return _finish_coroutine(result, hook, after, token)
            is_leaving = True
            after(token, result, None)
            return result
        except BaseException as error:
            try:
                if hook.leave_by_error(after, token, error, newest, is_leaving=is_leaving):
                    return result
            except BaseException as interruption:
                end_token(token, interruption)
                raise
            raise

    return call


async def _finish_coroutine(coroutine: Any, hook: Hook, after: After, token: Any) -> Any:
    """Await the coroutine that a plain function has returned, whose span is open already.

    An error from outside that comes before the first statement, when it is awaited first, leaves that open.
    """
    is_leaving = False
    try:
        result = await coroutine
        is_leaving = True
        after(token, result, None)
        return result
    except BaseException as error:
        try:
            if hook.leave_by_error(after, token, error, is_leaving=is_leaving):
                return result
        except BaseException as interruption:
            end_token(token, interruption)
            raise
        raise


def wrap_coroutine_function(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Put `before` and `after` around the awaiting, not around the making of the coroutine."""
    before, after = hook.timed(before), hook.timed(after)

    @functools.wraps(original)
    async def call(*args: Any, **kwargs: Any) -> Any:
        token, is_leaving, newest = ENTERING, False, spans.newest
        try:
            token = hook.enter(before, args, kwargs)
            result = await original(*args, **kwargs)
            is_leaving = True
            hook.leave(after, token, result, None)
            return result
        except BaseException as error:
            try:
                hook.leave_by_error(after, token, error, newest, is_leaving=is_leaving)
            except BaseException as interruption:
                end_token(token, interruption)
                raise
            raise

    return call


def wrap_generator_function(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Put `before` and `after` around the generator's life, from its first `next` to its end."""
    before, after = hook.timed(before), hook.timed(after)

    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        token, is_leaving, newest = ENTERING, False, spans.newest
        try:
            token = hook.enter(before, args, kwargs)
            result = yield from original(*args, **kwargs)
            is_leaving = True
            hook.leave(after, token, result, None)
            return result
        except BaseException as error:
            is_shown = not isinstance(error, GeneratorExit)
            try:
                hook.leave_by_error(after, token, error, newest, is_leaving=is_leaving, is_shown=is_shown)
            except BaseException as interruption:
                end_token(token, interruption)
                raise
            raise

    return generate


def wrap_each_item(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Put `before` and `after` around every `next` of a generator function, whose consumer works in between."""
    before, after = hook.timed(before), hook.timed(after)

    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        inner = original(*args, **kwargs)
        resume, value = inner.send, None
        while True:
            token, is_leaving, newest = ENTERING, False, spans.newest
            try:
                token = hook.enter(before, args, kwargs)
                try:
                    item = resume(value)
                except StopIteration as stop:
                    is_leaving = True
                    hook.leave(after, token, None, None)
                    return stop.value
                is_leaving = True
                hook.leave(after, token, item, None)
            except BaseException as error:
                try:
                    hook.leave_by_error(after, token, error, newest, is_leaving=is_leaving)
                except BaseException as interruption:
                    end_token(token, interruption)
                    raise
                raise
            try:
                resume, value = inner.send, (yield item)
            except GeneratorExit:
                inner.close()
                raise
            except BaseException as thrown:
                resume, value = inner.throw, thrown

    return generate


def watch_items(items: Iterable[Any], hook: Hook, before: Before, after: After) -> Iterable[Any]:
    """Put `before` and `after` around every `next` of an iterable that is passed on to somebody."""

    def each() -> Generator[Any, Any, Any]:
        yield from items

    watched: Iterable[Any] = wrap_each_item(each, hook, before, after)()
    return watched


def wrap_arguments(original: Function, hook: Hook, change: ChangeArguments, *, is_counted: bool = True) -> Function:
    """Let `change` replace the arguments of a call; where it fails, they are passed on as they came.

    A call that returns a coroutine returns it as it is, so this keeps the kind of any function but a coroutine
    function, which gets a wrapper of its own kind.
    """

    timed_change: ChangeArguments = hook.timed(change)

    def changed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if not hook.live:
            return args, kwargs
        try:
            if is_counted:
                hook.row.fired()
            return timed_change(hook, args, kwargs)
        except own_failure() as error:
            hook.failed(error)
            return args, kwargs

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = changed(args, kwargs)
        return original(*args, **kwargs)

    @functools.wraps(original)
    async def call_coroutine(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = changed(args, kwargs)
        return await original(*args, **kwargs)

    return call_coroutine if inspect.iscoroutinefunction(original) else call


def wrap_async_generator_function(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Put `before` and `after` around the asynchronous generator's life."""
    before, after = hook.timed(before), hook.timed(after)

    @functools.wraps(original)
    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        token, is_leaving, newest = ENTERING, False, spans.newest
        try:
            token = hook.enter(before, args, kwargs)
            inner = original(*args, **kwargs)
            # What `yield from` does, which asynchronous generators lack.
            step = inner.__anext__()
            while True:
                try:
                    item = await step
                except StopAsyncIteration:
                    break
                try:
                    sent = yield item
                except GeneratorExit:
                    await inner.aclose()
                    raise
                except BaseException as thrown:
                    step = inner.athrow(thrown)
                else:
                    step = inner.asend(sent)
            is_leaving = True
            hook.leave(after, token, None, None)
        except BaseException as error:
            is_shown = not isinstance(error, GeneratorExit)
            try:
                hook.leave_by_error(after, token, error, newest, is_leaving=is_leaving, is_shown=is_shown)
            except BaseException as interruption:
                end_token(token, interruption)
                raise
            raise

    return generate


def wrap_context_manager(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Put `before` and `after` around the `with` block of a `@contextmanager` function."""
    generate = wrap_generator_function(original.__wrapped__, hook, before, after)  # type: ignore[attr-defined]
    return functools.update_wrapper(contextlib.contextmanager(generate), original)


def wrap_async_context_manager(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Put `before` and `after` around the `async with` block of an `@asynccontextmanager` function."""
    generate = wrap_async_generator_function(original.__wrapped__, hook, before, after)  # type: ignore[attr-defined]
    return functools.update_wrapper(contextlib.asynccontextmanager(generate), original)


# The code object that every function made by these decorators shares tells it from other wrapped functions.
def _nothing() -> None: ...


_CONTEXT_MANAGER_CODE = contextlib.contextmanager(_nothing).__code__  # type: ignore[arg-type]
_ASYNC_CONTEXT_MANAGER_CODE = contextlib.asynccontextmanager(_nothing).__code__  # type: ignore[arg-type]


def wrap_same_kind(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Choose the wrapper of the kind of `original`.

    Args:
        original: A function of any kind.
        hook: Gates and counts the calls.
        before: Called with the call's (args, kwargs); returns a token.
        after: Called with the token, the result (None after an error) and the error (None without one).
    """
    code = getattr(original, "__code__", None)
    if code is _CONTEXT_MANAGER_CODE:
        wrap = wrap_context_manager
    elif code is _ASYNC_CONTEXT_MANAGER_CODE:
        wrap = wrap_async_context_manager
    elif inspect.isasyncgenfunction(original):
        wrap = wrap_async_generator_function
    elif inspect.iscoroutinefunction(original):
        wrap = wrap_coroutine_function
    elif inspect.isgeneratorfunction(original):
        wrap = wrap_generator_function
    else:
        wrap = wrap_function
    return wrap(original, hook, before, after)


def wrap_borrowed(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Choose the wrapper in the same way, and count a reference to it here, once, for good.

    When the interpreter ends, the collector empties what nobody refers to: an extension may call it even then, and a
    method without a closure survives that, where one of ours is a SIGSEGV.
    """
    import ctypes  # not where nobody needs it

    wrapper = wrap_same_kind(original, hook, before, after)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(wrapper))
    return wrapper
