"""Hooks on foreign code: the only module that replaces attributes of it.

A `PatchSet` belongs to one instrumentation. Each hook names a target ("module:Class.attr"), waits for the module's
import, and puts a closure of the same kind in the attribute's place: a coroutine function stays one, a generator
function stays one. Closures, not wrapt's proxies: a proxy costs 0.4 us a call, and cloudpickle takes a class that
holds one by value, so that a Ray worker would lose the hook. A hook that fails is counted and reported; what it was
put around runs on as if it were not there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from types import CoroutineType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rltrace.dependencies import own
from rltrace.hooks import binding, boundaries
from rltrace.hooks.binding import UntouchableError
from rltrace.hooks.versions import doubt_of_version, unmet_support
from rltrace.host import clock
from rltrace.host.interruption import own_failure
from rltrace.record import spans
from rltrace.record.announcement import complain

if TYPE_CHECKING:
    from wrapt import register_post_import_hook
else:
    register_post_import_hook = own("wrapt", "register_post_import_hook").register_post_import_hook

TIME_VARIABLE = "RLTRACE_TIME_HOOKS"
"""Environment variable: 1 has hooks around calls and forwards measure how long they hold their program up.

`rltrace.measure_cost` measures spans in a loop; it sees neither what a hook finds out for their arguments nor what a
cold cache adds.
"""

Function = Callable[..., Any]
Describe = Callable[..., "dict[str, Any] | None"]
Key = Callable[..., "str | None"]
Before = Callable[[tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[Any, Any, "BaseException | None"], None]
Call = tuple[tuple[Any, ...], dict[str, Any]]
Reader = tuple[Literal["call", "described", "result", "change", "made"], "Function | None"]
"""A function of ours that is told the arguments of a call, and how: `before`, `args`, `late_args`, `change`, `make`."""
ChangeArguments = Callable[["Hook", tuple[Any, ...], dict[str, Any]], Call]


class HookRow(Protocol):
    """A hook's counters in `counts.u64`."""

    @property
    def fired(self) -> Callable[[], object]:
        """A function to call each time that the hook runs."""

    def spent(self, spent_ns: int, /) -> None:
        """Add the time that the hook took; only timed hooks call this."""


class Nobody:
    """The counters of a hook that reports to nobody count nothing."""

    def fired(self) -> None:
        """Do nothing."""

    def spent(self, spent_ns: int, /) -> None:
        """Do nothing."""


NOBODY = Nobody()


class HookRegister(Protocol):
    """Hooks report to a register; the Recorder is one."""

    def hook(
        self, instrumentation: str, target: str, state: str, reason: str | None = None, emits: tuple[str, ...] = ()
    ) -> HookRow:
        """Report a hook's state; a later report of the same hook replaces it."""


class Hook:
    """A hook knows whether it is live, and reports its state.

    A wrapper that Ray sends to another process by value takes its hook along; there it is inert, because that
    process counts its own hooks.
    """

    __slots__ = (
        "_held", "_register", "_wanted", "bound", "emits", "failures", "instrumentation", "live", "row", "state",
        "target",
    )  # fmt: skip

    def __init__(
        self, instrumentation: str, target: str, emits: tuple[str, ...] = (), register: HookRegister | None = None
    ) -> None:
        self.instrumentation = instrumentation
        self.target = target
        self.emits = emits
        self.failures = 0
        self.live = self.bound = self._held = False
        self.row: HookRow = NOBODY
        self._wanted = True
        self._register = register
        self.report("waiting", f"{target.partition(':')[0]} is not imported")

    def __reduce__(self) -> tuple[type[Hook], tuple[str, str, tuple[str, ...]]]:
        return Hook, (self.instrumentation, self.target, self.emits)

    def report(self, state: str, reason: str | None = None) -> None:
        """Set the hook's state, here and in the Recording.

        Args:
            state: "waiting" for its module, "installed", "skipped", "failed" or "undone".
            reason: Why it is not installed, or is unverified.
        """
        self.state = state
        if state != "failed":  # one bad call does not silence the hook
            self.bind(state == "installed")
        if self._register is not None:
            self.row = self._register.hook(self.instrumentation, self.target, state, reason, self.emits)

    def bind(self, on: bool) -> None:
        """Say whether the hook is in place; only then it can be live."""
        self.bound = on
        self._decide()

    def want(self, on: bool) -> None:
        """Let the hook work, or pass its calls through until it is wanted again."""
        self._wanted = on
        self._decide()

    def hold(self, on: bool) -> None:
        """Let the hook pass its calls through while recording is paused, wanted or not."""
        self._held = on
        self._decide()

    def _decide(self) -> None:
        self.live = self.bound and self._wanted and not self._held

    def timed(self, function: Function) -> Function:
        """Return the function; where hooks are timed, return one that also keeps the time that it takes."""
        if os.environ.get(TIME_VARIABLE) != "1":
            return function

        def call(*args: Any) -> Any:
            start_ns = clock.now_ns()
            try:
                return function(*args)
            finally:
                self.row.spent(clock.now_ns() - start_ns)

        return call

    def failed(self, error: Exception) -> None:
        """Count an error of our own; the first one is printed and reported."""
        self.failures += 1
        if self.failures > 1:
            return
        try:
            reason = f"{type(error).__name__}: {error}"
            self.report("failed", reason)
            complain(f"the hook on {self.target} failed, and the program runs on: {reason}")
        except own_failure():  # an error that cannot be printed must not reach the program either
            pass

    def enter(self, before: Before, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `before`, and return the token for `leave`, or `NOT_ENTERED`."""
        if not self.live:
            return NOT_ENTERED
        newest = spans.newest
        try:
            self.row.fired()
            return before(args, kwargs)
        except own_failure() as error:
            self.failed(error)
            return NOT_ENTERED
        except BaseException as interruption:
            spans.end_lost(newest, interruption)
            raise

    def leave(self, after: After, token: Any, result: Any, error: BaseException | None) -> None:
        """Run `after` if its `before` was run."""
        if token is NOT_ENTERED:
            return
        try:
            after(token, result, error)
        except own_failure() as failure:
            self.failed(failure)
        except BaseException as interruption:
            _end_token(token, interruption)
            raise

    def leave_by_error(
        self,
        after: After,
        token: Any,
        error: BaseException,
        newest: Any = None,
        *,
        is_leaving: bool,
        is_shown: bool = True,
    ) -> bool:
        """Do what is left of a call that an error ends: the program's, one of `after`, or one from outside.

        Args:
            after: Run if it has not begun yet.
            token: What `before` returned; `ENTERING` if it has not returned.
            error: What ends the call.
            newest: `spans.newest` before `before`.
            is_leaving: Whether `after` has begun.
            is_shown: Whether the error is one for `after`, and does not only end a generator.

        Returns:
            Whether the error is ours, so that the call goes on.
        """
        if token is ENTERING:
            spans.end_lost(newest, error)
        elif not is_leaving:
            self.leave(after, token, None, error if is_shown else None)
        elif own_failure():
            self.failed(error)  # type: ignore[arg-type]
            return True
        else:
            _end_token(token, error)
        return False


class AwaitedImport(Hook):
    """Something to do once a module is imported. It replaces nothing, and is reported only if it cannot be done."""

    __slots__ = ()

    def report(self, state: str, reason: str | None = None) -> None:
        """Set the state, and put it into the Recording if it is "skipped" or "failed"."""
        if state in ("skipped", "failed"):
            super().report(state, reason)
        else:
            self.state = state
            self.bind(state == "installed")


NOT_ENTERED = object()
"""The token of a call whose `before` was not run, or has failed."""
ENTERING = object()
"""The token of a call whose `before` has not returned yet."""


def _end_token(token: Any, interruption: BaseException) -> None:
    """End what an error from outside has kept `after` from ending: what in a token has `end_interrupted`."""
    for part in token if isinstance(token, tuple) else (token,):
        if hasattr(part, "end_interrupted"):
            part.end_interrupted(interruption)


# ---- wrappers, one per kind -------------------------------------------------------------------------------------
#
# An error from outside may come wherever Python calls something. A `with` is not safe from it: it may come before the
# first statement of `__exit__`. So everything from `before` to `after` is in one `try`. Its handler knows from `token`
# and `is_leaving` how far the call has got, and is in a `try` itself.


def wrap_function(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Put `before` and `after` around a call, and around the coroutine if the call returns one."""

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
                _end_token(token, interruption)
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
            _end_token(token, interruption)
            raise
        raise


def wrap_coroutine_function(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Put `before` and `after` around the awaiting, not around the making of the coroutine."""

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
                _end_token(token, interruption)
                raise
            raise

    return call


def wrap_generator_function(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Put `before` and `after` around the generator's life, from its first `next` to its end."""

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
                _end_token(token, interruption)
                raise
            raise

    return generate


def wrap_each_item(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Put `before` and `after` around every `next` of a generator function, whose consumer works in between."""

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
                    _end_token(token, interruption)
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


def wrap_arguments(original: Function, hook: Hook, change: ChangeArguments) -> Function:
    """Let `change` replace the arguments of a call; where it fails, they are passed on as they came.

    A call that returns a coroutine returns it as it is, so this keeps the kind of any function but a coroutine
    function, which gets a wrapper of its own kind.
    """

    def changed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if not hook.live:
            return args, kwargs
        try:
            hook.row.fired()
            return change(hook, args, kwargs)
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
                _end_token(token, interruption)
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


# ---- patches ----------------------------------------------------------------------------------------------------


class Patch:
    """One replaced attribute: its owner, what stood there and what stands there now.

    A function of a module is replaced in the packages above that have imported it by name as well, as
    `torch.distributed` has `all_reduce`: most callers know only that name of it.
    """

    __slots__ = ("attr", "hook", "inherited", "original", "owner", "replacement")

    def __init__(self, owner: Any, attr: str, hook: Hook, make: Callable[[Function], Function]) -> None:
        self.owner = owner
        self.attr = attr
        self.hook = hook
        self.inherited = attr not in vars(owner)
        self.original = inspect.getattr_static(owner, attr)
        with _inspecting():
            _require_function(self.original)
        self.replacement = _replace(self.original, make)
        try:
            setattr(owner, attr, self.replacement)
        except (AttributeError, TypeError) as error:  # a type written in C
            raise UntouchableError(str(error)) from error
        self._exchange_above(self.original, self.replacement)

    def undo(self) -> bool:
        """Put the original back; False if somebody has patched the attribute since, and is left alone."""
        if vars(self.owner).get(self.attr) is not self.replacement:
            return False
        self._exchange_above(self.replacement, self.original)
        if self.inherited:
            delattr(self.owner, self.attr)
        else:
            setattr(self.owner, self.attr, self.original)
        return True

    def _exchange_above(self, old: Any, new: Any) -> None:
        for package in _packages_above(self.owner):
            if vars(package).get(self.attr) is old:
                vars(package)[self.attr] = new


def _packages_above(owner: Any) -> Iterator[ModuleType]:
    """Yield the imported packages that a module lies in, the innermost first; none of a class."""
    name = str(owner.__name__) if isinstance(owner, ModuleType) else ""
    while name := name.rpartition(".")[0]:
        if isinstance(package := sys.modules.get(name), ModuleType):
            yield package


def _replace(raw: Any, make: Callable[[Function], Function]) -> Any:
    """Return the replacement of `raw`, in the same kind of descriptor."""
    if isinstance(raw, staticmethod | classmethod):
        return type(raw)(make(raw.__func__))
    return make(raw)


def _require_function(raw: Any) -> None:
    """Refuse what no hook can be put around."""
    if isinstance(raw, staticmethod | classmethod):
        return
    if isinstance(raw, property):
        raise UntouchableError("a property, which no hook can wrap")
    if isinstance(raw, type):
        raise UntouchableError("a class: name one of its methods")
    if not (isinstance(raw, FunctionType | MethodType) or inspect.isroutine(raw)):
        raise UntouchableError(f"an object of {type(raw).__module__}.{type(raw).__qualname__}, not a function")


@contextlib.contextmanager
def _inspecting() -> Iterator[None]:
    """Refuse what raises while it is looked at: lazy modules and proxies run code of theirs then."""
    try:
        yield
    except UntouchableError:
        raise
    except own_failure() as error:
        raise UntouchableError(f"it cannot be looked at: {type(error).__name__}: {error}") from error


def _find_owner(module: ModuleType, path: str) -> tuple[Any, str]:
    """Return the object that holds the attribute at the end of `path`, and the attribute's name."""
    *parents, attr = path.split(".")
    owner: Any = module
    where = module.__name__
    with _inspecting():
        try:
            for name in parents:
                owner = getattr(owner, name)
                where += f".{name}"
            name = attr
            inspect.getattr_static(owner, attr)
        except AttributeError as error:
            # Python's own words would blame a circular import: the module is being imported just now.
            raise UntouchableError(f"not in this release: {where} has no {name}") from error
    return owner, attr


def _require_imported(module: ModuleType) -> None:
    """Refuse a module in whose place another object has been put: a hook on it would see none of the calls."""
    there = sys.modules.get(module.__name__, module)
    if there is not module:
        raise UntouchableError(f"{module.__name__} was replaced by an object of {type(there).__qualname__}")
    if doubt := doubt_of_version(module):
        raise UntouchableError(doubt)


def _span_hooks(
    name: str, args: Describe | None, late_args: Describe | None, flow_out: Key | None, flow_in: Key | None
) -> tuple[Before, After]:
    """Return what opens the span of a call, and what closes it."""
    begin_span = _begin(name, args)
    if late_args is None and flow_out is None and flow_in is None:
        return begin_span, end_span

    def begin(call_args: tuple[Any, ...], call_kwargs: dict[str, Any]) -> Any:
        # The keys first: what they may raise must not leave a span open.
        leaving = flow_out(*call_args, **call_kwargs) if flow_out is not None else None
        arriving = flow_in(*call_args, **call_kwargs) if flow_in is not None else None
        opened = begin_span(call_args, call_kwargs)
        try:
            if opened is not None and leaving is not None:
                spans.flow(leaving, "out")
            if opened is not None and arriving is not None:
                spans.flow(arriving, "in")
        except BaseException as interruption:  # `end` is not called then
            end_span(opened, None, interruption)
            raise
        return opened, call_args, call_kwargs

    def end(token: Any, result: Any, error: BaseException | None) -> None:
        opened, call_args, call_kwargs = token
        try:
            if late_args is not None and opened is not None and error is None:
                opened.set(**(late_args(result, *call_args, **call_kwargs) or {}))
        finally:
            end_span(opened, result, error)

    return begin, end


def _at_boundaries(before: Before, after: After, emits: tuple[str, ...]) -> tuple[Before, After]:
    """Return a `before` and an `after` that also tell the watchers of this boundary, outside of its span."""
    if boundaries.NAMES.isdisjoint(emits):
        return before, after
    beginning = boundaries.Boundary(emits, is_end=False)

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        boundaries.reached(beginning)
        return before(args, kwargs)

    def end(token: Any, result: Any, error: BaseException | None) -> None:
        try:
            after(token, result, error)
        finally:
            boundaries.reached(boundaries.Boundary(emits, is_end=True, error=error))

    return begin, end


def _begin(name: str, args: Describe | None) -> Before:
    """Return a `before` that opens a span, or returns None for a call that `args` calls no span."""
    if args is None:
        return lambda _args, _kwargs: spans.automatic_span(name).__enter__()

    def begin(call_args: tuple[Any, ...], call_kwargs: dict[str, Any]) -> Any:
        known = args(*call_args, **call_kwargs)
        return None if known is None else spans.automatic_span(name, **known).__enter__()

    return begin


def nothing_before(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Do nothing: a `before` where all is done afterwards."""


def nothing_after(_token: Any, _result: Any, _error: BaseException | None) -> None:
    """Do nothing: an `after` where all was done before."""


def end_span(opened: Any, _result: Any, error: BaseException | None) -> None:
    """Close the span that the `before` opened, if it opened one: an `after`."""
    if opened is not None:
        opened.__exit__(None if error is None else type(error), error)


class PatchSet:
    """The hooks of one instrumentation.

    Args:
        instrumentation: Its name.
        register: Where its hooks report to.
        supports: Requirements such as "torch >= 2.6"; looked up when a target's module is imported. While one is unmet
            every hook is skipped with that reason.
    """

    def __init__(self, instrumentation: str, register: HookRegister, supports: tuple[str, ...] = ()) -> None:
        self.instrumentation = instrumentation
        self.hooks: list[Hook] = []
        self.reads: dict[str, tuple[str, ...]] = {}
        """The attributes that each hook reads besides the arguments of its target, by target."""
        self.readers: dict[str, tuple[Reader, ...]] = {}
        """The functions that read the arguments of a call, by target: `make digests` finds out which they read."""
        self.awaiting: list[tuple[str, Callable[[Hook], Callable[[], None] | None]]] = []
        """What is done once a module is imported, by its name."""
        self._awaited: list[AwaitedImport] = []
        self._register = register
        self.supports = supports
        self._patches: list[Patch] = []
        self._undos: list[tuple[Hook, Callable[[], None]]] = []
        self._refused: str | None = None
        self._closed = False

    def refuse(self, reason: str) -> None:
        """Bind no hook that is named from here on; each reports the reason."""
        self._refused = reason

    def modules(self) -> list[str]:
        """Return the modules that something here waits for, each once."""
        return list(dict.fromkeys(hook.target.partition(":")[0] for hook in (*self._awaited, *self.hooks)))

    def hold(self, on: bool) -> None:
        """Let every hook pass its calls through while recording is paused."""
        for hook in (*self._awaited, *self.hooks):
            hook.hold(on)

    @contextlib.contextmanager
    def dormant(self) -> Iterator[Callable[[bool], None]]:
        """Name hooks that pass their calls through while they are not wanted, which they are not at first.

        Yields:
            What is called with True when they are, and with False when they are not any more.
        """
        first = len(self.hooks)
        named: list[Hook] = []

        def switch(on: bool) -> None:
            for hook in named:
                hook.want(on)

        yield switch
        named += self.hooks[first:]
        switch(False)

    def around(
        self,
        target: str,
        before: Before,
        after: After,
        emits: tuple[str, ...] = (),
        *,
        at_boundaries: bool = True,
        is_borrowed: bool = False,
        reads: tuple[str, ...] = (),
    ) -> None:
        """Call `before` and `after` around every call of `target`, whatever kind of function it is.

        Args:
            target: "module:Class.attr".
            before: Called with the call's (args, kwargs); returns a token.
            after: Called with the token, the result (None after an error) and the error (None without one).
            emits: Names of the spans that the two write.
            at_boundaries: Both sides of what emits a phase, a sleep or a wake-up are boundaries. False: the two tell of
                boundaries themselves, because not every call has them.
            is_borrowed: An extension calls it by a reference that it does not count.
            reads: What the two read of the objects that they are given: "module:Class.attr". A newer release that has
                not all of it gets no hook; what `argument` and `keep` name need not be named again.
        """
        self._note(target, reads, ("call", before))
        if at_boundaries:
            before, after = _at_boundaries(before, after, emits)
        self._wrap(wrap_borrowed if is_borrowed else wrap_same_kind, target, before, after, emits)

    def span(
        self,
        target: str,
        name: str,
        args: Describe | None = None,
        late_args: Describe | None = None,
        *,
        flow_out: Key | None = None,
        flow_in: Key | None = None,
        each_item: bool = False,
        reads: tuple[str, ...] = (),
    ) -> None:
        """Make every call of `target` a span.

        Args:
            target: "module:Class.attr".
            name: Of the span.
            args: Called as `target` is; returns the span's arguments, or None for a call that is no span.
            late_args: Called with the result, then as `target` was; returns what is known only at the end.
            flow_out: Called as `target` is; the key of an arrow that leaves here, None for none.
            flow_in: As `flow_out`, of an arrow that arrives here.
            each_item: Of a generator, make every `next` a span, not its life; the result is the item.
            reads: As of `around`.
        """
        self._note(target, reads, ("described", args), ("described", flow_out), ("described", flow_in))
        self._note(target, reads, ("result", late_args))
        wrap = wrap_each_item if each_item else wrap_same_kind
        before, after = _at_boundaries(*_span_hooks(name, args, late_args, flow_out, flow_in), (name,))
        self._wrap(wrap, target, before, after, (name,))

    def around_items(
        self, target: str, before: Before, after: After, emits: tuple[str, ...] = (), *, reads: tuple[str, ...] = ()
    ) -> None:
        """Call `before` and `after` around every `next` of a generator function; the result is the item, or None.

        Args:
            target: "module:Class.attr".
            before: Called with the (args, kwargs) that made the generator; returns a token.
            after: Called with the token, the item (None behind the last one) and the error (None without one).
            emits: Names of the spans that the two write.
            reads: As of `around`.
        """
        self._note(target, reads, ("call", before))
        self._wrap(wrap_each_item, target, before, after, emits)

    def _note(self, target: str, reads: tuple[str, ...], *readers: Reader) -> None:
        """Note what a hook reads."""
        self.reads.setdefault(target, reads)
        self.readers[target] = (*self.readers.get(target, ()), *readers)

    def _wrap(
        self, wrap: Callable[..., Function], target: str, before: Before, after: After, emits: tuple[str, ...]
    ) -> None:
        self.wrap(target, lambda original, hook: wrap(original, hook, hook.timed(before), hook.timed(after)), emits)

    def arguments(
        self, target: str, change: ChangeArguments, emits: tuple[str, ...] = (), *, reads: tuple[str, ...] = ()
    ) -> None:
        """Let `change(hook, args, kwargs)` replace the arguments of every call of `target`.

        For what is passed in to be called or iterated: a callback, a generator. `change` guards what it puts there by
        `hook.enter` and `hook.leave`, or by `watch_items`. `reads` is as of `around`.
        """
        self._note(target, reads, ("change", change))
        self.wrap(target, lambda original, hook: wrap_arguments(original, hook, change), emits)

    def wrap(
        self,
        target: str,
        make: Callable[[Function, Hook], Function],
        emits: tuple[str, ...] = (),
        *,
        reads: tuple[str, ...] = (),
    ) -> None:
        """Replace `target` by `make(original, hook)` once its module is imported.

        For what `around` cannot express. `make` keeps the kind and the attributes (functools.wraps) itself, and
        guards its own code by `hook.enter` and `hook.leave`. `reads` is as of `around`.
        """
        self._note(target, reads, ("made", make))

        def bind(module: ModuleType, hook: Hook) -> None:
            owner, attr = _find_owner(module, target.partition(":")[2])
            self._patches.append(Patch(owner, attr, hook, lambda original: make(original, hook)))

        self._hook(target, bind, emits)

    def use(
        self,
        target: str,
        register: Callable[[Hook], Callable[[], None]],
        emits: tuple[str, ...] = (),
        *,
        reads: tuple[str, ...] = (),
    ) -> None:
        """Register with a public hook of a framework once its module is imported.

        Args:
            target: "module:function" of the public hook.
            register: Registers, and returns the function that takes it back.
            emits: The names of the spans that the hook writes.
            reads: As of `around`.
        """
        self._note(target, reads)

        def bind(module: ModuleType, hook: Hook) -> None:
            _find_owner(module, target.partition(":")[2])
            self._undos.append((hook, register(hook)))

        self._hook(target, bind, emits)

    def when_imported(self, module: str, function: Callable[[Hook], Callable[[], None] | None]) -> None:
        """Call `function` once `module` is imported: to name hooks that depend on the release, or to watch something.

        It is no hook itself. The Recording names it, by its module, only if it was skipped or failed.

        Args:
            module: Full name.
            function: Called with what its own wrappers are gated by; returns what takes back what it did, or None.
        """

        def bind(_module: ModuleType, awaited: Hook) -> None:
            if (take_back := function(awaited)) is not None:
                self._undos.append((awaited, take_back))

        self.awaiting.append((module, function))
        awaited = AwaitedImport(self.instrumentation, module, register=self._register)
        self._awaited.append(awaited)
        self._when_imported(awaited, bind)

    def _hook(self, target: str, bind: Callable[[ModuleType, Hook], None], emits: tuple[str, ...]) -> None:
        if any(hook.target == target for hook in self.hooks):
            return
        hook = Hook(self.instrumentation, target, emits, self._register)
        self.hooks.append(hook)
        self._when_imported(hook, bind)

    def _when_imported(self, hook: Hook, bind: Callable[[ModuleType, Hook], None]) -> None:
        if self._refused is not None:
            hook.report("skipped", self._refused)
            return
        register_post_import_hook(functools.partial(self._bind, bind, hook), hook.target.partition(":")[0])

    def _bind(self, bind: Callable[[ModuleType, Hook], None], hook: Hook, module: ModuleType) -> None:
        """Bind one hook to the module that was just imported; never raises into the import."""
        if self._closed:
            return
        try:
            if reason := unmet_support(self.supports, binding.known().versions):
                hook.report("skipped", reason)
                return
            remark = self._look(hook, module)
            # Live before it is in place, so that no call slips through uncounted.
            hook.bind(True)
            bind(module, hook)
            hook.report("installed", remark)
        except UntouchableError as reason:
            hook.report("skipped", str(reason))
        except own_failure() as error:
            hook.bind(False)
            hook.failed(error)

    def _look(self, hook: Hook, module: ModuleType) -> str | None:
        """Look at what a hook is about to be put around; return why it is unverified.

        Raises:
            UntouchableError: It is not what the hook was written for.
        """
        if isinstance(hook, AwaitedImport):
            return None
        _require_imported(module)
        owner, attr = _find_owner(module, hook.target.partition(":")[2])
        with _inspecting():
            original = inspect.getattr_static(owner, attr)
            return binding.look(self.instrumentation, hook.target, self.reads.get(hook.target, ()), original)

    def undo(self) -> list[str]:
        """Take every hook back.

        Returns:
            The targets that somebody has patched since: their patch stays, ours beneath it does nothing any more.
        """
        self._closed = True
        left = [patch.hook.target for patch in reversed(self._patches) if not patch.undo()]
        for _, take_back in reversed(self._undos):
            take_back()
        for hook in (*self._awaited, *self.hooks):
            if hook.bound:
                hook.report(
                    "undone", "patched by other code since: left in place, inactive" if hook.target in left else None
                )
        self._patches.clear()
        self._undos.clear()
        return left
