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


class HttpContext:
    """The context of a trace in HTTP requests."""

    name = "http_context"
    supports = ("Python >= 3.10",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        if reason := context.refusal():
            patches.refuse(reason)
        for sending in (
            "requests.sessions:Session.send",
            "httpx._client:Client.send",
            "httpx._client:AsyncClient.send",
        ):
            patches.around(sending, add_to_request, nothing_after)
        patches.around("aiohttp.client_reqrep:ClientRequest.__init__", keep_self, add_to_made)


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
