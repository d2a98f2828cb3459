"""Asks a server over HTTP with each client, and prints as JSON what it got: `trace_context.py none|sdk|own URL`.

none: the program has no OpenTelemetry. sdk: it has a span of the SDK's. own: it sends a context itself.
"""

import asyncio
import json
import sys

import aiohttp
import httpx
import requests

MODE, URL = sys.argv[1:]


def ask():
    """Ask with each client, one after the other."""
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"} if MODE == "own" else {}
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


def main():
    if MODE == "sdk":
        from opentelemetry import baggage, context, trace
        from opentelemetry.sdk.trace import TracerProvider

        trace.set_tracer_provider(TracerProvider())
        context.attach(baggage.set_baggage("user", "somebody"))
        with trace.get_tracer("agent").start_as_current_span("trajectory") as span:
            known = span.get_span_context()
            print(json.dumps([f"00-{known.trace_id:032x}-{known.span_id:016x}-{known.trace_flags:02x}", dict(ask())]))
    else:
        print(json.dumps([None, dict(ask())]))


main()
