"""Spans that are written when they end: their records, and what interrupts their hooks; in C, and in Python."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bytecode_tracer
import pytest
from bytecode_tracer import in_a_thread

import rltrace
from rltrace.events import Span
from rltrace.hooks.hook import Hook
from rltrace.read.recording import Recording
from rltrace.record import repeated, spans
from rltrace.record.repeated import PlainStretch, Said
from rltrace.record.writer import HookCount

OURS = str(Path(rltrace.__file__).parent)


FIRST = itertools.repeat(-1).__next__


class LateError(Exception):
    """The timeout of a program."""


@pytest.fixture(scope="module")
def interrupter(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bytecode_tracer.build(tmp_path_factory.mktemp("interrupter"))


@pytest.fixture
def hook() -> Hook:
    hook = Hook("ours", "ours:repeated")
    hook.bind(True)
    return hook


@pytest.fixture(params=["native", "plain"], autouse=True)
def way_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(repeated, "NATIVE", None)
        monkeypatch.setattr(repeated, "Stretch", PlainStretch)
    elif repeated.NATIVE is None:
        pytest.skip("the library is not built: make native")
    return str(request.param)


def said(is_second: bool) -> Said:
    return Said("repeated", {"module": "layers.3", "second": is_second})


def calls(hook: Hook, kinds: Callable[[], int] = FIRST) -> tuple[Callable[[], None], Callable[[], None]]:
    before, after = repeated.around_calls(hook, said, lambda: True, kinds)
    return lambda: before(None, ()), lambda: after(None, (), None)


def stretch(hook: Hook, parts: int = 1) -> tuple[Callable[[], None], Callable[[], None]]:
    one, known = repeated.Stretch(said(False), parts), dict[int, PlainStretch]()
    known[id(one)] = one
    begin = repeated.beginning(hook, known, lambda _: None, lambda _: False)
    end = repeated.ending(hook, known)
    return lambda: begin(one), lambda: end(one)


def read(folder: Path) -> list[Span]:
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    assert process.lost_events == process.orphans == process.torn == 0
    return sorted((e for e in process.events() if isinstance(e, Span)), key=lambda span: span.start_ns)


def test_spans_of_calls(folder: Path, hook: Hook) -> None:
    """Calls have spans that nest in those around them and say of which kind they are, from the first one on."""
    kinds = itertools.cycle([-1, 0])
    rltrace.start(folder)
    before, after = calls(hook, kinds.__next__)
    for _ in range(4):
        with rltrace.span("around"):
            before()
            with rltrace.span("inside"):
                pass
            after()
    found = read(folder)
    assert [span.name for span in found] == ["around", "repeated", "inside"] * 4
    for around, inner, inside in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert around.end_ns and inner.end_ns and inside.end_ns
        assert around.start_ns <= inner.start_ns <= inside.start_ns
        assert inside.end_ns <= inner.end_ns <= around.end_ns
        assert (inner.thread, inner.task, inner.args["module"]) == (around.thread, around.task, "layers.3")
    assert [span.args["second"] for span in found[1::3]] == [False, True] * 2
    assert hook.failures == 0


def test_full_segments(folder: Path, hook: Hook) -> None:
    """None is lost where a segment ends."""
    rltrace.start(folder)
    before, after = calls(hook)
    begin, end = stretch(hook)
    for _ in range(1000):
        before()
        after()
        begin()
        end()
    assert len(read(folder)) == 2000


def test_task(folder: Path, hook: Hook) -> None:
    """What an asyncio task calls is in its lane."""

    async def work() -> None:
        with rltrace.span("around"):
            before()
            after()

    rltrace.start(folder)
    before, after = calls(hook)
    for _ in range(3):
        asyncio.run(work())
    found = read(folder)
    assert all(inner.task == around.task != 0 for around, inner in zip(found[::2], found[1::2], strict=True))


def test_brief_recording(folder: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """While only some spans are recorded, these are not."""
    monkeypatch.setattr(spans, "_is_typed_brief", False)
    for name in ("__enter__", "__exit__", "end_interrupted", "set"):  # which ask from then on: not in the next tests
        monkeypatch.setattr(spans.TypedSpan, name, getattr(spans.TypedSpan, name))
    rltrace.start(folder)
    before, after = calls(hook)
    begin, end = stretch(hook)
    for always in (None, frozenset[str](), None):
        spans.be_brief(always)
        for of_one in (before, after, begin, end):
            of_one()
    assert len(read(folder)) == 4


def test_pause(folder: Path, hook: Hook) -> None:
    """A call in which recording was paused, or taken up, has no span, and those behind it have theirs."""
    rltrace.start(folder)
    before, after = calls(hook)
    for on in (True, False, True, True):
        before()
        hook.hold(on)
        spans.hold(on)
        after()
    for on in (False, False):
        before()
        hook.hold(on)
        spans.hold(on)
        after()
    assert len(read(folder)) == 1


def test_fork(folder: Path, hook: Hook) -> None:
    """A forked child writes into a segment of its own, and its parent goes on in its own."""
    rltrace.start(folder)
    before, after = calls(hook)
    for _ in range(3):
        before()
        after()
    if not (child := os.fork()):
        before()
        after()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    before()
    after()
    rltrace.stop()
    spans_of = {process.pid: len(list(process.events())) for process in Recording.open(folder).processes}
    assert spans_of == {os.getpid(): 4, child: 1}


def test_parts(folder: Path, hook: Hook) -> None:
    """A stretch ends with its last part; one that nothing ended ends as an error where the next one begins."""
    rltrace.start(folder)
    begin, end = stretch(hook, parts=2)
    begin()
    end()
    begin()
    end()
    end()
    end()
    found = read(folder)
    assert [span.args.get("error") for span in found] == ["RuntimeError", None]
    assert found[0].end_ns is not None and found[0].end_ns <= found[1].start_ns


@pytest.mark.parametrize("make", [calls, stretch])
def test_counts(folder: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Each is counted, and the count is not written each time."""
    settled: list[HookCount] = []
    settle = HookCount.settle
    monkeypatch.setattr(HookCount, "settle", lambda row: (settled.append(row), settle(row)))
    rltrace.start(folder)
    with rltrace.span("first"):  # the thread has a segment
        pass
    hook = Hook("ours", "ours:repeated", (), spans.current())
    hook.report("installed")
    for of_one in make(hook) * 20:
        of_one()
    assert len(settled) <= 4
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    (said,) = process.hooks
    assert said["fired"] == (20 if make is calls else 40)  # a stretch has two hooks, which are one here


@pytest.mark.parametrize("make", [calls, stretch])
@pytest.mark.parametrize("way", ["handler", "thread"])
def test_interruptions(folder: Path, interrupter: Any, hook: Hook, way: str, make: Any, way_of: str) -> None:
    """Wherever an error from outside comes, the program gets it, and no later call has a span that is not its own.

    A stretch whose end was interrupted ends, as an error, where the next one begins.
    """
    rltrace.start(folder)
    in_a_thread(lambda: interrupt_everywhere(make(hook), interrupter, way))
    found = read(folder)
    around = [span for span in found if span.name == "around"]
    inner = [span for span in found if span.name == "repeated" and span.args.get("error") != "RuntimeError"]
    assert len(around) > (40 if way_of == "plain" else 2), "nothing comes inside of C"
    assert all(any(one.start_ns <= s.start_ns and s.end_ns <= one.end_ns for one in around) for s in inner)
    assert len(inner) > len(around) / 2
    assert hook.failures == 0


@pytest.mark.parametrize("make", [calls, stretch])
def test_both_ways_write_the_same(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Records in C and in Python have the same bytes but for the times, in the same number of segments."""
    written = []
    for way in (repeated.NATIVE, None):
        monkeypatch.setattr(repeated, "NATIVE", way)
        monkeypatch.setattr(repeated, "Stretch", PlainStretch if way is None else way.Stretch)
        rltrace.start(tmp_path / str(way is None))
        before, after = make(hook)
        for _ in range(500):
            before()
            after()
        rltrace.stop()
        (process,) = Recording.open(tmp_path / str(way is None)).processes
        contents = [process.segment(name) for name in process.segment_names]
        assert len(contents) > 1
        written.append([re.sub(rb"\xcf\x00.{7}", b"time", content, flags=re.DOTALL) for content in contents])
    assert written[0] == written[1]


def test_known_hooks_die_with_their_module(hook: Hook) -> None:
    """A module's hooks are freed with it, whatever they refer to."""
    gone: list[bool] = []

    class Told:
        def __call__(self) -> bool:
            return True

        def __del__(self) -> None:
            gone.append(True)

    hooks = repeated.around_calls(hook, said, Told(), FIRST)
    del hooks
    gc.collect()
    assert gone == [True]


def interrupt_everywhere(hooks: tuple[Callable[[], None], Callable[[], None]], interrupter: Any, way: str) -> None:
    def ring(_number: int, _frame: Any) -> None:
        raise LateError

    def call() -> None:
        try:
            hooks[0]()
        finally:  # as torch calls what is always to be called
            hooks[1]()

    with rltrace.span("around"):
        call()
    for n in itertools.count(1):
        has_raised = False
        with rltrace.span("around"):
            try:
                interrupter.start(OURS, n, ring, LateError if way == "thread" else None)
                call()
                for _ in range(2):  # what another thread sets comes where a function begins or a loop goes on
                    pass
            except LateError:
                has_raised = True
            is_over = not interrupter.stop()
        with rltrace.span("around"):
            call()
        if is_over:
            break
        assert has_raised, f"swallowed at bytecode {n}"
