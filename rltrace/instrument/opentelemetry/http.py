"""The context of a trace crosses HTTP requests, by the headers that W3C names.

In: requests of aiohttp, httpx and requests, which agents and trainers ask their servers with. Out: `traceparent` in
those that have none, and an arrow from the span that asks. OpenTelemetry's own instrumentations of these clients
replace it by theirs, or have put it there before.

Source read: aiohttp 3.8 and 3.14, httpx 0.28, requests 2.34.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from rltrace.hooks.arguments import argument, keep_self
from rltrace.hooks.patching import PatchSet, nothing_after
from rltrace.instrument.opentelemetry import context


class RequestsContext:
    """The context of a trace in requests of `requests`."""

    name = "requests_context"
    supports = ("requests >= 2.25",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        refuse_if_asked(patches)
        patches.around("requests.sessions:Session.send", add_to_request, nothing_after, context.JOINS)


class HttpxContext:
    """The context of a trace in requests of httpx."""

    name = "httpx_context"
    supports = ("httpx >= 0.23",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        refuse_if_asked(patches)
        for client in ("Client", "AsyncClient"):
            patches.around(f"httpx._client:{client}.send", add_to_request, nothing_after, context.JOINS)


class AiohttpContext:
    """The context of a trace in requests of aiohttp."""

    name = "aiohttp_context"
    supports = ("aiohttp >= 3.8",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        refuse_if_asked(patches)
        patches.around("aiohttp.client_reqrep:ClientRequest.__init__", keep_self, add_to_made, context.JOINS)


def refuse_if_asked(patches: PatchSet) -> None:
    """Bind no hook if no context is to be sent."""
    if reason := context.refusal():
        patches.refuse(reason)


def add_to_request(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add the current context to a request that is about to be sent."""
    add(argument("request", 1, args, kwargs).headers)


def add_to_made(request: Any, _result: Any, error: BaseException | None) -> None:
    """Add it to one that was just made to be sent."""
    if error is None:
        add(request.headers)


def add(headers: MutableMapping[str, str]) -> None:
    """Add the current context to headers that have none."""
    if context.TRACEPARENT in headers:
        return
    told = context.to_send()
    if told is not None:
        headers.update(told)
        context.leave(told)
