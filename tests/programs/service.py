"""A framework of the kind that hooks are put on: a function of every kind, and each of them can fail."""

import contextlib
import sys


class Service:
    """Serves numbers."""

    def __init__(self):
        self.log = []

    def add(self, a, b=1):
        """A plain function; it looks whether somebody's exception is being handled."""
        if b < 0:
            raise ValueError(f"{b} is negative, handling {sys.exc_info()[1]!r}")
        return a + b

    @classmethod
    def named(cls, name):
        return f"{cls.__name__}:{name}"

    @staticmethod
    def doubled(value):
        return value * 2

    async def fetch(self, key):
        if key is None:
            raise KeyError("no key")
        return {"key": key}

    def fetch_later(self, key):
        """A plain function that returns a coroutine."""
        return self.fetch(key)

    def count(self, n):
        got = []
        for i in range(n):
            got.append((yield i))
        if n > 3:
            raise OverflowError(n)
        return got

    def items(self, n):
        """As `count`; each item is watched."""
        return (yield from self.count(n))

    async def stream(self, n):
        for i in range(n):
            try:
                sent = yield i
            except LookupError as error:
                yield f"caught {error!r}"
            else:
                if sent is not None:
                    yield f"sent {sent}"
        if n > 3:
            raise OverflowError(n)

    @contextlib.contextmanager
    def opened(self, name):
        self.log.append(f"open {name}")
        try:
            yield name
        except LookupError as error:
            self.log.append(f"swallowed {error!r}")
        finally:
            self.log.append(f"closed {name}")

    @contextlib.asynccontextmanager
    async def connected(self, name):
        self.log.append(f"connect {name}")
        try:
            yield name
        finally:
            self.log.append(f"disconnect {name}")
