"""One hook on foreign code: whether it works, what it counts, and what happens when it fails."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, Protocol

from rltrace.host import clock
from rltrace.host.interruption import own_failure
from rltrace.record import spans
from rltrace.record.announcement import complain

TIME_VARIABLE = "RLTRACE_TIME_HOOKS"
"""Environment variable: 1 has hooks around calls and forwards measure how long they hold their program up.

`rltrace.measure_cost` measures spans in a loop; it sees neither what a hook finds out for their arguments nor what a
cold cache adds.
"""

Function = Callable[..., Any]
Before = Callable[[tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[Any, Any, "BaseException | None"], None]


def nothing_before(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Do nothing: a `before` where all is done afterwards."""


def nothing_after(_token: Any, _result: Any, _error: BaseException | None) -> None:
    """Do nothing: an `after` where all was done before."""


class HookRow(Protocol):
    """A hook's counters in `counts.u64`."""

    @property
    def fired(self) -> Callable[[], object]:
        """A function to call each time that the hook runs."""

    def spent(self, spent_ns: int, /) -> None:
        """Add the time that the hook took; only timed hooks call this."""


class Nobody:
    """The counters of a hook that reports to nobody count nothing."""

    fired = itertools.repeat(None).__next__
    """In C, as that of a hook that counts."""

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
        """Return the function; where hooks are timed, return one that also keeps the time that it takes.

        The wrappers of `wrapping.py` ask for this themselves; only what is given to `enter` and `leave` has to. What
        does nothing is not timed: that would measure the timing.
        """
        if os.environ.get(TIME_VARIABLE) != "1" or function in (nothing_before, nothing_after):
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
            end_token(token, interruption)
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
            end_token(token, error)
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


def end_token(token: Any, interruption: BaseException) -> None:
    """End what an error from outside has kept `after` from ending: what in a token has `end_interrupted`."""
    for part in token if isinstance(token, tuple) else (token,):
        if hasattr(part, "end_interrupted"):
            part.end_interrupted(interruption)
