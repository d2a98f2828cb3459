"""Hooks put in place: the only module that replaces attributes of foreign code.

A `PatchSet` belongs to one instrumentation. Each hook names a target ("module:Class.attr"), waits for the module's
import, and puts a closure of the same kind in the attribute's place. A hook that fails is counted and reported; what it
was put around runs on as if it were not there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

from rltrace.dependencies import own
from rltrace.hooks import binding, boundaries, wrapping
from rltrace.hooks.binding import UntouchableError
from rltrace.hooks.hook import After, AwaitedImport, Before, Function, Hook, HookRegister
from rltrace.hooks.hook import nothing_after as nothing_after
from rltrace.hooks.hook import nothing_before as nothing_before
from rltrace.hooks.versions import doubt_of_version, unmet_support
from rltrace.host.interruption import own_failure
from rltrace.record import spans

if TYPE_CHECKING:
    from wrapt import register_post_import_hook
else:
    register_post_import_hook = own("wrapt", "register_post_import_hook").register_post_import_hook

Describe = Callable[..., "dict[str, Any] | None"]
Key = Callable[..., "str | None"]
Reader = tuple[Literal["call", "described", "result", "change", "made"], "Function | None"]
"""A function of ours that is told the arguments of a call, and how: `before`, `args`, `late_args`, `change`, `make`."""


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
        self._wrap(wrapping.wrap_borrowed if is_borrowed else wrapping.wrap_same_kind, target, before, after, emits)

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
        wrap = wrapping.wrap_each_item if each_item else wrapping.wrap_same_kind
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
        self._wrap(wrapping.wrap_each_item, target, before, after, emits)

    def _note(self, target: str, reads: tuple[str, ...], *readers: Reader) -> None:
        """Note what a hook reads."""
        self.reads.setdefault(target, reads)
        self.readers[target] = (*self.readers.get(target, ()), *readers)

    def _wrap(
        self, wrap: Callable[..., Function], target: str, before: Before, after: After, emits: tuple[str, ...]
    ) -> None:
        self.wrap(target, lambda original, hook: wrap(original, hook, before, after), emits)

    def arguments(
        self, target: str, change: wrapping.ChangeArguments, emits: tuple[str, ...] = (), *, reads: tuple[str, ...] = ()
    ) -> None:
        """Let `change(hook, args, kwargs)` replace the arguments of every call of `target`.

        For what is passed in to be called or iterated: a callback, a generator. `change` guards what it puts there by
        `hook.enter` and `hook.leave`, or by `watch_items`. `reads` is as of `around`.
        """
        self._note(target, reads, ("change", change))
        self.wrap(target, lambda original, hook: wrapping.wrap_arguments(original, hook, change), emits)

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
