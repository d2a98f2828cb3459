"""Hooks on torch's modules: the forward of each, on whatever thread it runs, and a module's path in its model."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rltrace.hooks.hook import Function, Hook
from rltrace.host.interruption import own_failure
from rltrace.instrument.torch.autograd import NO_TASK, address_of_task_id
from rltrace.instrument.torch.dynamo import outside_graphs
from rltrace.record import repeated, spans

OpenForward = Callable[[str, bool], Any]
"""Opens what is around a forward of the module at a path; the second argument says whether it is a recomputation."""


class Forwards:
    """The open forward spans of each thread, innermost last.

    A step has a thousand of them, and may wait for its host, so the hooks are written out by hand.
    """

    def __init__(self, hook: Hook, opens: OpenForward, *, root_only: bool = False, waits: bool = True) -> None:
        self._hook = hook
        self._opens = opens
        self._root_only = root_only
        self._waits = waits
        self._of_thread = OpenForwards()

    def attach(self, modules: Iterable[Any], path: Callable[[], str]) -> list[Any]:
        """Register the hooks on modules that are sharded together; returns what removes them.

        Args:
            modules: All of them.
            path: Returns their path in the model, which is known from their first forward on.
        """
        handles: list[Any] = []
        return self._register(modules, *self._hooks(handles, path), handles)

    def _register(self, modules: Iterable[Any], before: Function, after: Function, handles: list[Any]) -> list[Any]:
        before, after = outside_graphs(before), outside_graphs(after)
        with undone_on_error(handles):
            for module in modules:
                # After a forward it runs behind FSDP's own hook, which reshards; before a forward on either side of it.
                handles.append(module.register_forward_pre_hook(before, prepend=self._waits))
                handles.append(module.register_forward_hook(after, always_call=True))
        return handles

    def attach_to_all(self, chosen: Callable[[Any], bool]) -> list[Any]:
        """Register the hooks on all modules of the process, for those that are chosen; returns what removes them.

        Args:
            chosen: Called before each forward of any module.
        """
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        handles: list[Any] = []
        before, after = map(outside_graphs, self._hooks(handles, str, chosen))
        with undone_on_error(handles):
            handles.append(register_module_forward_pre_hook(before))
            handles.append(register_module_forward_hook(after, always_call=True))
        return handles

    def _hooks(
        self, handles: list[Any], path: Callable[[], str], chosen: Callable[[Any], bool] | None = None
    ) -> tuple[Function, Function]:
        """Return the hooks that are called before and after a forward."""
        import torch

        hook, of_thread, in_backward = self._hook, self._of_thread, torch._C._current_graph_task_id
        known = ""

        def before(module: Any, _args: Any) -> None:
            nonlocal known
            if not hook.live:
                return
            newest = spans.newest
            try:
                if chosen is not None and not chosen(module):
                    return
                hook.row.fired()
                known = known or path()
                if known and self._root_only:
                    remove(handles)
                else:
                    of_thread.stack.append((module, self._opens(known, in_backward() != NO_TASK)))
            except own_failure() as error:
                hook.failed(error)
            except BaseException as interruption:
                spans.end_lost(newest, interruption)
                raise

        def after(module: Any, _args: Any, _result: Any) -> None:
            if of_thread.stack:
                try:
                    close(of_thread.stack, module)
                except own_failure() as error:
                    hook.failed(error)

        return hook.timed(before), hook.timed(after)


class ForwardSpans(Forwards):
    """Forwards that are spans, and nothing else."""

    def __init__(self, hook: Hook) -> None:
        super().__init__(hook, lambda *_: None)

    def attach(self, modules: Iterable[Any], path: Callable[[], str]) -> list[Any]:
        """Register the hooks on modules that are sharded together; returns what removes them."""
        import torch

        known = ""

        def said(is_repeated: bool) -> repeated.Said:
            nonlocal known
            known = known or path()
            return repeated.Said("fsdp.forward", {"module": known} | ({"recompute": True} if is_repeated else {}))

        before, after = repeated.around_calls(
            self._hook, said, lambda: bool(known), torch._C._current_graph_task_id, address_of_task_id()
        )
        return self._register(modules, self._hook.timed(before), self._hook.timed(after), [])


class OpenForwards(threading.local):
    """The open forwards of each thread."""

    def __init__(self) -> None:
        self.stack: list[tuple[Any, Any]] = []


def close(stack: list[tuple[Any, Any]], module: Any) -> None:
    """End the span of a module, and those inside it that an exception left open."""
    if stack[-1][0] is not module and all(entry[0] is not module for entry in stack):
        return
    inner = None
    while inner is not module:
        inner, opened = stack.pop()
        opened.__exit__(None)


@contextlib.contextmanager
def undone_on_error(handles: list[Any]) -> Iterator[None]:
    """Remove the hooks if not all of them can be registered, because the caller gets none to remove."""
    try:
        yield
    except BaseException:
        remove(handles)
        raise


def remove(handles: list[Any]) -> None:
    """Remove hooks from modules."""
    while handles:
        handles.pop().remove()


@functools.cache
def without_wrappers(path: str) -> str:
    """Return a module's path as the model's author knows it, without checkpoint and compile wrappers."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})
