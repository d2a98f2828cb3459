"""The phase `rollout.generate` of a server that answers many requests at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rltrace.events import SERVER_REQUEST
from rltrace.hooks import boundaries
from rltrace.hooks.patching import end_span
from rltrace.record import spans

GENERATE = "rollout.generate"


class Serving:
    """A server generates while at least one request is in flight.

    Only the first and the last request are boundaries: a server answers hundreds in one thread.
    """

    EMITS = (GENERATE, SERVER_REQUEST)

    def __init__(self, args_of: Callable[..., dict[str, Any]], late_args_of: Callable[[Any], dict[str, Any]]) -> None:
        """Make the phase of one server.

        Args:
            args_of: Called as the request is; describes it.
            late_args_of: Called with what the request returned.
        """
        self._args_of, self._late_args_of = args_of, late_args_of
        self._in_flight = 0
        self._phase: Any = None

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a request; the first one begins the phase."""
        known = self._args_of(*args, **kwargs)  # first: what it may raise must not leave a request in flight
        if not self._in_flight:
            boundaries.reached(boundaries.Boundary((GENERATE,), is_end=False))
            self._phase = spans.automatic_span(GENERATE).__enter__()
        self._in_flight += 1
        return spans.automatic_span(SERVER_REQUEST, **known).__enter__()

    def end(self, opened: Any, result: Any, error: BaseException | None) -> None:
        """End a request whose tokens leave, or that is cancelled; the last one ends the phase."""
        self._in_flight -= 1
        try:
            opened.set(**self._late_args_of(result))
        finally:
            end_span(opened, result, error)
            if self._in_flight == 0:
                self._phase.__exit__(None)
                boundaries.reached(boundaries.Boundary((GENERATE,), error=error))
