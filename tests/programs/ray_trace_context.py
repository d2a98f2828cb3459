"""Calls actors and tasks within a span, and prints as JSON in which context each of them ran.

`ray_trace_context.py MODE`: sdk, or none for a program that has the API alone.
"""

import asyncio
import json
import sys

import ray
from opentelemetry import trace


def here():
    """Return the current context."""
    context = trace.get_current_span().get_span_context()
    return [f"{context.trace_id:032x}", f"{context.span_id:016x}", str(context.trace_state.to_header())]


@ray.remote
def task(first, *, second=2, **more):
    return [first, second, more, here()]


@ray.remote
def stream(many):
    for number in range(many):  # noqa: UP028 - Ray sends into what it iterates
        yield number


@ray.remote
def fails():
    raise KeyError("theirs")


class Base:
    def inherited(self):
        return here()


@ray.remote
class Plain(Base):
    def __init__(self):
        self.made = here()

    def call(self, first, **more):
        return [first, more, here()]

    def again(self):
        """Call on from here."""
        return ray.get(task.remote(1))

    def stream(self, many):
        for number in range(many):  # noqa: UP028
            yield number

    def made_in(self):
        return self.made


@ray.remote
class Asynchronous:
    async def call(self, number):
        before = here()
        await asyncio.sleep(0.02)
        return [number, before == here(), here()]


def call(plain, asynchronous):
    try:
        ray.get(fails.remote())
    except KeyError as error:
        failed = type(error).__name__
    return {
        "task": ray.get([task.remote(1, third=3), task.remote(2)]),
        "method": ray.get(plain.call.remote(1, second=2)),
        "inherited": ray.get(plain.inherited.remote()),
        "again": ray.get(plain.again.remote()),
        "streams": [[ray.get(one) for one in made] for made in streams(plain)],
        "asynchronous": ray.get([asynchronous.call.remote(number) for number in range(3)]),
        "failed": failed,
    }


def streams(plain):
    return [
        stream.options(num_returns="streaming").remote(2),
        plain.stream.options(num_returns="streaming").remote(2),
    ]


def main():
    if sys.argv[1] == "sdk":
        from opentelemetry.sdk.trace import TracerProvider

        trace.set_tracer_provider(TracerProvider())
    untraced = {"env_vars": {"PYTHONPATH": "", "RLTRACE_DIR": ""}}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    plain, asynchronous = Plain.remote(), Asynchronous.remote()
    with trace.get_tracer("agent").start_as_current_span("trajectory") as span:
        own = span.get_span_context()
        known = [f"{own.trace_id:032x}", f"{own.span_id:016x}", ""]
        within = call(plain, asynchronous)
        created = ray.get(Plain.remote().made_in.remote())
        elsewhere = Plain.options(runtime_env=untraced).remote()
        others = ray.get([elsewhere.call.remote(1), task.options(runtime_env=untraced).remote(1)])
    outside = call(plain, asynchronous)
    print(json.dumps({"own": known, "within": within, "created": created, "untraced": others, "outside": outside}))
    ray.shutdown()


main()
