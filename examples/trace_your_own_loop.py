"""Trace a training loop of your own: spans, phases, a counter and an arrow between two processes.

python examples/trace_your_own_loop.py [FOLDER]
rltrace view FOLDER
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time

import rltrace


@rltrace.traced("reward.score")
def score(samples: list[int]) -> float:
    """A reward function of your own: every call is a span."""
    time.sleep(0.002)
    return sum(samples) / len(samples)


async def sample(request: int) -> int:
    """One of several requests in flight: each asyncio task has a row of its own."""
    async with rltrace.span("sample", request=request) as span:
        await asyncio.sleep(0.001 * (request + 1))
        span.set(tokens=request + 1)
    return request


async def generate(requests: int) -> list[int]:
    """Sample all requests at once."""
    return await asyncio.gather(*(sample(request) for request in range(requests)))


def trainer(samples: list[int], step: int) -> None:
    """Another process: it joins the Recording, and the arrow from the driver arrives here."""
    rltrace.start(role="trainer", rank=0)
    with rltrace.phase("actor.update", step=step):
        rltrace.flow(f"batch {step}", "in")
        time.sleep(0.005)
    rltrace.stop()


def main() -> None:
    """Three steps."""
    folder = rltrace.start(sys.argv[1] if len(sys.argv) > 1 else None, role="driver")
    processes = multiprocessing.get_context("spawn")
    for step in range(3):
        with rltrace.span("step", step=step):
            samples = asyncio.run(generate(4))
            with rltrace.phase("reward"):
                rltrace.counter("reward_mean", score(samples))
            with rltrace.span("send", step=step):
                rltrace.flow(f"batch {step}", "out")
                worker = processes.Process(target=trainer, args=(samples, step))
                worker.start()
            worker.join()
    rltrace.stop()
    print(f"rltrace view {folder}")


if __name__ == "__main__":
    main()
