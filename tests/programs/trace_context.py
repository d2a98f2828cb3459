"""Asks a server over HTTP with each client, and prints what it got: `trace_context.py URL none|sdk|own …`.

none: the program has no OpenTelemetry. sdk: it has a span of the SDK's. own: it sends a context itself.
Each has a line of JSON.
"""

import asyncio
import json
import sys

import aiohttp
import httpx
import requests

URL, *MODES = sys.argv[1:]


def ask(headers):
    """Ask with each client, one after the other."""
    with requests.Session() as session:
        yield "requests", session.get(URL, headers=headers).json()
    with httpx.Client() as client:
        yield "httpx", client.post(URL, headers=headers, json={"prompt": 1}).json()
    yield from asyncio.run(ask_at_once(headers)).items()


async def ask_at_once(headers):
    async with httpx.AsyncClient() as client, aiohttp.ClientSession(headers={"x-session": "1"}) as session:
        answer = await client.get(URL, headers=headers)
        # A redirect makes a second request.
        async with session.get(f"{URL}redirect", headers=headers) as response:
            return {"async httpx": answer.json(), "aiohttp": await response.json()}


def ask_in_a_span():
    """Ask within a span of the SDK's; return its context too."""
    from opentelemetry import baggage, context, trace
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())
    context.attach(baggage.set_baggage("user", "somebody"))
    with trace.get_tracer("agent").start_as_current_span("trajectory") as span:
        known = span.get_span_context()
        return [f"00-{known.trace_id:032x}-{known.span_id:016x}-{known.trace_flags:02x}", dict(ask({}))]


def main():
    own = {"none": {}, "own": {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}}
    for mode in MODES:
        print(json.dumps(ask_in_a_span() if mode == "sdk" else [None, dict(ask(own[mode]))]))


main()
