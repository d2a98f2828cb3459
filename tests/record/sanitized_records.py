"""Writes spans and samples through the native hot ways of `rltrace/record`, built with AddressSanitizer and
UndefinedBehaviorSanitizer.

Each segment lies in memory of exactly its size and has room for a few records. It is closed, forgotten or given to
another thread at any moment. What is written is compared with what should be.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import random
import sys
import threading
from asyncio import _get_running_loop, current_task
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import sanitized

from rltrace.host.native_library import RECORDS
from rltrace.record.encoding import encode

TIMES_BYTES = 18
VALUES = [0, 127, 128, -1, -33, 2**32, -(2**63), 2**63, 2**70, 0.5, "text", "x" * 200, "\ud800", True, False, [1], b"x"]
"""Of arguments: with the last ones, and with numbers or texts that are too large, a record is left to Python."""
TIME = object()
"""Stands for a time that a test does not know."""


class Enterable:
    """What gets the native methods."""

    __slots__ = ()


class Span(Enterable, msgspec.Struct, array_like=True, gc=False, tag=0):
    """A span as hooks make them."""

    name: str
    task: int
    start_ns: int
    args: dict[str, Any] | None
    ok: bool = True


class Program:
    """A program whose threads write spans: what the library is told of it, and what it should have written."""

    def __init__(self, native: Any, seed: int) -> None:
        self.native, self.chance, self.said = native, random.Random(seed), Counter[str]()
        self.spans: Any = ModuleType("spans")
        self.spans._always, self.spans._current_tasks, self.spans._local = None, {}, threading.local()
        self.spans._recorder, self.spans.newest = self, None
        self.spans._make_automatic_span, self.spans._encode_sample = Span, encode
        native.use(self.spans, _get_running_loop, current_task)
        self.left = list[Any]()
        plain = (self.left.append, self.leave_to_python, None, self.leave_to_python, self.leave_to_python)
        made = native.standing_for(Enterable, {Span: (b"\x96\x00", ("name",))}, None, encode, plain)
        Enterable.__enter__, Enterable.__exit__, self.make, self.write, self.count = made
        self.begin_segment()

    def leave_to_python(self, *told: Any, **more: Any) -> None:
        """Take what the library leaves to Python."""
        self.left.append((told, more))

    def begin_segment(self) -> None:
        """Give this thread a segment with little room, and forget the one before it, or not."""
        room_bytes = self.chance.choice([0, 1, 17, 18, 19, 60, 400])
        self.memory = (ctypes.c_char * room_bytes)()
        self.writer = self.native.Writer(self.memory, ctypes.addressof(self.memory), room_bytes)
        self.room_bytes, self.parts = room_bytes, list[tuple[bytes, bytes]]()
        self.spans._local.write = self.writer.write
        self.is_known = self.chance.random() < 0.9
        if self.is_known:
            self.native.forget()

    def end_segment(self) -> None:
        """Compare what it has with what was written: of a span, only its times are not known."""
        found, at = self.memory.raw[: self.writer.used_bytes], 0
        for head, tail in self.parts:
            behind = at + len(head) + (TIMES_BYTES if tail else 0)
            assert found[at : at + len(head)] == head and found[behind : behind + len(tail)] == tail, (
                found,
                head,
                tail,
            )
            at = behind + len(tail)
        assert at == len(found) <= self.room_bytes, (at, len(found))

    def write_bytes(self) -> None:
        """Append what other ways have encoded."""
        data = self.chance.randbytes(self.chance.choice([0, 1, 30, 500]))
        fits = len(data) <= self.room_bytes - self.writer.used_bytes
        try:
            self.writer.write(data)
            self.parts.append((data, b""))
        except ValueError:
            self.said["refused"] += 1
            assert not fits
            return
        assert fits

    def ends(self) -> tuple[bytes, bytes]:
        """Return what precedes the times of a span, and what follows them."""
        sizes = (self.chance.choice([1, 5, 40, 300]) for _ in range(2))
        head, tail = map(self.chance.randbytes, sizes)
        return head, tail

    def spanned(self, written: Callable[[], bool], head: bytes, tail: bytes) -> None:
        """Write a span, and note whether it was, or was left to Python."""
        before = self.writer.used_bytes
        is_written = written()
        many = len(head) + TIMES_BYTES + len(tail)
        assert self.writer.used_bytes - before in (0, many)
        if self.writer.used_bytes > before:
            self.parts.append((head, tail))
        self.said["spans" if is_written else "left to Python"] += 1

    def calls(self) -> None:
        """Calls of a module that nest, of two kinds, of which some have no span."""
        left = list[int]()
        starts_ns = [self.chance.choice([0, 1, 2**40, 2**62]) for _ in range(self.chance.randrange(4))]
        kind = self.chance.choice([-1, 0])
        gate = SimpleNamespace(live=self.chance.random() < 0.9)
        calls = self.native.Calls(gate, starts_ns, lambda: kind, 0, left.append)
        head, first = self.ends()
        second = self.chance.randbytes(9)
        if self.chance.random() < 0.9:
            calls.know(head, first, second, encode)  # an argument is missing: what fails in it is forgotten
        tail = first if kind == -1 else second

        def after() -> bool:
            many = len(left)
            calls.after()
            return len(left) == many

        for _ in range(len(starts_ns) + self.chance.randrange(2)):
            self.spanned(after, head, tail)

    def stretches(self) -> None:
        """Stretches of one or two parts, of objects that are known or not."""
        left, (head, tail) = list[Any](), self.ends()
        known: dict[int, Any] = {}
        begin = self.native.StretchEnd(known, left.append)
        end = self.native.StretchEnd(known, lambda *told: left.append(told))
        stretch = self.native.Stretch(SimpleNamespace(around_times=lambda: (head, tail)), self.chance.randrange(1, 3))
        if self.chance.random() < 0.8:
            known[id(stretch)] = stretch
        if self.chance.random() < 0.1:
            known[id(stretch)] = self  # not one of the library's
        for way in (begin, end):
            if self.chance.random() < 0.9:
                way.know(gc.isenabled)
        begin.begin(stretch)
        begin.begin(stretch)  # as after an error

        def end_part() -> bool:
            many = len(left)
            end.end(stretch)
            return len(left) == many

        for _ in range(3):
            self.spanned(end_part, head, tail)

    def recorded(self, write: Callable[[], object], *expected: Any) -> None:
        """Write a record, and compare it with what is expected."""
        before, many = self.writer.used_bytes, len(self.left)
        write()
        data = self.memory.raw[before : self.writer.used_bytes]
        is_left = len(self.left) > many
        assert is_left != bool(data) or not (self.is_known or data)  # the segment before may have had room for it
        self.said["spans" if data else "left to Python"] += 1
        if data:
            self.parts.append((data, b""))
            found = msgspec.msgpack.decode(data)
            pairs = list(zip(found, expected, strict=True))
            assert all(isinstance(value, int) for value, wanted in pairs if wanted is TIME)
            assert data == encode([value if wanted is TIME else wanted for value, wanted in pairs])

    def spans_and_samples(self) -> None:
        """A span, one that is over, and a sample, with arguments of all kinds."""
        name, value = self.chance.choice(["a", "é" * 20, "x" * 300, "x" * 600]), self.chance.choice(VALUES)
        many = self.chance.choice([0, 1, 3, 17])
        args = {f"{number}{name[:40]}": self.chance.choice(VALUES) for number in range(many)}
        span = self.make(name, **args)
        self.recorded(span.__enter__, 0, name, 0, TIME, args, True)
        if self.chance.random() < 0.5:
            span.args = args
        self.recorded(lambda: span.__exit__(None), TIME, TIME, span.args, True)
        self.recorded(lambda: self.write(name, 5, 2**40, lane=7, **args), 0, name, 7, 5, 2**40, args, True)
        self.recorded(lambda: self.count(name, value), name, TIME, value, True)
        self.left.clear()

    def in_another_thread(self) -> None:
        """Write in a thread that has a segment of its own, and ends with it or without having forgotten it."""
        of_this, parts, memory, room_bytes = self.writer, self.parts, self.memory, self.room_bytes
        is_known = self.is_known

        def work() -> None:
            self.begin_segment()
            self.calls()
            self.end_segment()
            if self.chance.random() < 0.5:
                self.native.forget()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self.writer, self.parts, self.memory, self.room_bytes = of_this, parts, memory, room_bytes
        self.is_known = is_known

    def close(self) -> None:
        """Let go of the memory, which is there no longer, and go on."""
        self.end_segment()
        self.writer.close()
        for write in (self.calls, self.stretches):
            used_bytes, parts = self.writer.used_bytes, len(self.parts)
            write()
            assert (self.writer.used_bytes, len(self.parts)) == (used_bytes, parts)
        self.begin_segment()

    def record_less(self) -> None:
        """Record some spans only, as at a pause: all of them are left to Python."""
        self.spans._always = frozenset[str]()
        parts = len(self.parts)
        self.calls()
        assert len(self.parts) == parts
        self.spans._always = None

    def run(self, many: int) -> None:
        """Write until so many spans were written or left to Python."""
        ways = [self.write_bytes, self.calls, self.calls, self.stretches, self.stretches, self.spans_and_samples]
        rare = [self.in_another_thread, self.close, self.record_less, gc.collect]
        while self.said["spans"] + self.said["left to Python"] < many:
            if self.room_bytes - self.writer.used_bytes < 60 or self.chance.random() < 0.1:
                self.end_segment()
                self.begin_segment()
            self.chance.choice(rare if self.chance.random() < 0.05 else ways)()
        self.end_segment()


def write_with(library: Path, many: int, seed: int) -> Counter[str]:
    """Write with the library, which is a module of Python's; return how much of what was done."""
    spec = importlib.util.spec_from_file_location("records", library)
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    program = Program(native, seed)
    program.run(many)
    return program.said


if __name__ == "__main__":
    sys.exit(sanitized.main(RECORDS, __doc__, "spans", write_with))
