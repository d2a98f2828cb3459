"""A Ray driver with actors of both kinds, tasks, streams and errors; it dies of an actor's exception."""

import asyncio

import ray
from shown_errors import show_error


class Plain:
    def __init__(self, base):
        self.base = base

    def add(self, a, b=1):
        return self.base + a + b

    def fail(self, message):
        raise KeyError(message)

    def two(self):
        return 1, 2

    def stream(self, n):
        for i in range(n):  # noqa: UP028 - Ray sends into it
            yield i
        raise OverflowError(n)


class Asynchronous:
    async def add(self, a):
        await asyncio.sleep(0)
        return a + 1

    async def fail(self):
        raise ValueError("asynchronous")


@ray.remote(num_cpus=0)
def task(a):
    if a < 0:
        raise ArithmeticError(a)
    return a * 2


def attempt(get):
    """Whatever comes of a call."""
    try:
        print(get())
    except Exception as error:
        show_error(error)


ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
plain = ray.remote(num_cpus=0)(Plain).remote(10)
attempt(lambda: ray.get(plain.add.remote(1, b=2)))
attempt(lambda: ray.get(plain.two.options(num_returns=2).remote()))
attempt(lambda: ray.get(plain.fail.remote("theirs")))
attempt(lambda: plain.add.remote(1, 2, 3, 4))
stream = plain.stream.options(num_returns="streaming").remote(2)
attempt(lambda: [ray.get(reference) for reference in stream])
asynchronous = ray.remote(num_cpus=0)(Asynchronous).remote()
attempt(lambda: ray.get([asynchronous.add.remote(i) for i in range(3)]))
attempt(lambda: ray.get(asynchronous.fail.remote()))
attempt(lambda: ray.get([task.remote(i) for i in range(3)]))
attempt(lambda: ray.get(task.remote(-1)))
ray.get(plain.fail.remote("the last"))
