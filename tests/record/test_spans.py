"""The recorder's promises to the traced program: never raise, never mix up, never lose silently."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import AsyncGenerator, Callable, Generator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rltrace
from rltrace.events import Counter, Span
from rltrace.hooks import wrapping
from rltrace.hooks.hook import Hook
from rltrace.host import clock
from rltrace.read.recording import Process, Recording
from rltrace.record import cluster, lifecycle, native, segment, spans

Spans = Callable[..., list[Span]]
ReadProcess = Callable[[Path], Process]

pytestmark = pytest.mark.usefixtures("recording_way")


once = pytest.mark.parametrize("recording_way", ["native"], indirect=True)
"""What is recorded in processes of a test is recorded their own way."""


# ---------------------------------------------------------------- spans, counters, flows


def test_times_are_those_of_the_clock(
    folder: Path, spans_of: Spans, monkeypatch: pytest.MonkeyPatch, recording_way: str
) -> None:
    ticks = itertools.count(1000, 10)
    monkeypatch.setattr(spans, "_now_ns", lambda: next(ticks))
    if recording_way == "native":
        pytest.skip("it asks the system's clock itself")
    rltrace.start(folder)
    first = next(ticks) + 10  # a thread's first record asks whether the disk was full: let it pass
    with rltrace.span("warm"):
        pass
    with rltrace.span("outer"), rltrace.span("inner"):
        pass
    rltrace.stop()
    outer, inner = spans_of(folder)[1:]
    assert first < outer.start_ns
    assert (inner.start_ns - outer.start_ns, inner.end_ns - inner.start_ns, outer.end_ns - inner.end_ns) == (10, 10, 10)


def test_late_arguments_win(folder: Path, spans_of: Spans) -> None:
    """Arguments of the end replace those of the beginning."""
    rltrace.start(folder)
    with rltrace.span("a", bytes=1, kept=True) as span:
        span.set(bytes=2)
        span.set(tokens=3)
    early = rltrace.span("b")
    early.set(self="no clash with the method's own argument")
    with early:
        pass
    rltrace.stop()
    a, b = spans_of(folder)
    assert a.args == {"bytes": 2, "kept": True, "tokens": 3}
    assert b.args == {"self": "no clash with the method's own argument"}


def test_typed_span_of_many_fields(folder: Path, spans_of: Spans) -> None:
    """A typed span may have more fields than a short array has room for."""
    fields = {f"field_{number}": int for number in range(20)}
    many = rltrace.typed_span("many", **fields)
    rltrace.start(folder)
    for _ in range(2):
        with many(*range(20)):
            pass
    rltrace.stop()
    assert [span.args for span in spans_of(folder)] == [dict(zip(fields, range(20), strict=True))] * 2


def test_exception_passes_and_is_named(folder: Path, spans_of: Spans) -> None:
    """An exception passes through and is named."""
    rltrace.start(folder)
    error = ValueError("mine")
    with pytest.raises(ValueError) as caught, rltrace.span("a", bytes=1):
        raise error
    rltrace.stop()
    assert caught.value is error
    assert spans_of(folder)[0].args == {"bytes": 1, "error": "ValueError", "error_message": "mine"}


def test_phase_is_marked(folder: Path, spans_of: Spans) -> None:
    """A phase says that it is one."""
    rltrace.start(folder)
    with rltrace.phase("my.phase", step=1), rltrace.span("my.phase"):
        pass
    rltrace.stop()
    assert [span.is_phase for span in spans_of(folder)] == [True, False]


def test_typed_span_reads_like_others(folder: Path, spans_of: Spans) -> None:
    """A typed span reads like any other."""
    before = rltrace.typed_span("declared.before", bytes=int, task=str, args=str, ok=bool)
    rltrace.start(folder)
    after = rltrace.typed_span("declared.after")
    with before(1, "t", "a", False) as span, after():
        span.set(bytes=2)
    rltrace.stop()
    first, second = spans_of(folder)
    assert (first.name, first.args) == ("declared.before", {"bytes": 2, "task": "t", "args": "a", "ok": False})
    assert (second.name, second.args) == ("declared.after", {})
    assert second.start_ns >= first.start_ns and second.end_ns <= first.end_ns


@pytest.mark.parametrize("recording", [False, True])
def test_typed_span_wrong_arguments(folder: Path, recording: bool) -> None:
    """A typed span with the wrong number of arguments is refused at once.

    Like any call with the wrong arguments, and not only once somebody records.
    """
    gather = rltrace.typed_span("gather", bytes=int)
    if recording:
        rltrace.start(folder)
    for wrong in ((), (1, 2, 3, 4, 5, 6)):
        with pytest.raises(TypeError):
            gather(*wrong)
    rltrace.stop()


def test_samples_and_flows_arrive(folder: Path, process_of: ReadProcess) -> None:
    rltrace.start(folder)
    rltrace.counter("allocated_bytes", 7)
    rltrace.counter("kv_ratio", 0.5)
    with rltrace.span("outer"), rltrace.span("inner"):
        rltrace.flow("bucket 1", "out")
        rltrace.flow("bucket 0", "in")
    rltrace.flow("nowhere", "out")
    rltrace.span_at("request", 10, 20, lane=3, tokens=5)
    rltrace.stop()
    process = process_of(folder)
    events = list(process.events())
    assert [(e.name, e.value) for e in events if isinstance(e, Counter)] == [("allocated_bytes", 7), ("kv_ratio", 0.5)]
    spans = {e.name: e for e in events if isinstance(e, Span)}
    assert (spans["inner"].flows_out, spans["inner"].flows_in) == (("bucket 1",), ("bucket 0",))
    assert (spans["outer"].flows_out, spans["outer"].flows_in) == ((), ())
    request = spans["request"]
    assert (request.task, request.start_ns, request.end_ns, request.args) == (3, 10, 20, {"tokens": 5})
    assert process.orphans == process.stray_flows == 1, "the flow outside of every span"


class Scalar:
    """Like a tensor of one element."""

    def item(self) -> float:
        return 2.5


class Bad:
    def __str__(self) -> str:
        raise RuntimeError("cannot be said")


def test_arguments_of_any_kind_are_recorded(folder: Path, spans_of: Spans) -> None:
    rltrace.start(folder)
    with rltrace.span("before"):
        pass
    with rltrace.span(
        "a",
        scalar=Scalar(),
        small=np.float32(0.5),
        number=np.int64(7),
        text=np.str_("x" * 300),
        array=np.zeros(3),
        kind=Decimal,
        nested={"list": [1, {"deep": (2.0, None)}]},
        odd={1: "one", (2, 3): "pair", None: "none"},
        raw=b"\x00\xff",
    ):
        pass
    with rltrace.span("after"):
        pass
    rltrace.stop()
    before, a, after = spans_of(folder)
    assert a.args["scalar"] == 2.5 and a.args["small"] == 0.5 and a.args["number"] == 7
    assert a.args["text"] == "x" * 300
    assert a.args["array"] == "[0. 0. 0.]" and a.args["kind"] == "<class 'decimal.Decimal'>"
    assert a.args["nested"] == {"list": [1, {"deep": [2.0, None]}]}
    assert set(a.args["odd"].values()) == {"one", "pair", "none"} and all(isinstance(k, str) for k in a.args["odd"])
    assert a.args["raw"] == b"\x00\xff"
    assert (before.name, after.name) == ("before", "after")


@pytest.mark.parametrize(
    ("value", "said"),
    [(10**30, "1" + "0" * 30), ("\udc80", "?"), (Bad(), "<Bad>"), ([2**70] * 200, str([2**70] * 200)[:256])],
    ids=["huge int", "no text", "raises", "a list of huge ints"],
)
def test_refused_argument_becomes_text(folder: Path, process_of: ReadProcess, value: Any, said: str) -> None:
    """An argument that msgpack refuses becomes text, and its span is kept."""
    declared = rltrace.typed_span("typed", value=object, bytes=int)
    rltrace.start(folder)
    with rltrace.span("first", value=value, kept=1), rltrace.span("late") as late:
        late.set(value=value, kept=1)
    with declared(value, 1):
        pass
    rltrace.span_at("afterwards", 1, 2, value=value, kept=1)
    rltrace.stop()
    process = process_of(folder)
    spans = {event.name: event for event in process.events() if isinstance(event, Span)}
    assert spans.keys() == {"first", "late", "typed", "afterwards"}
    assert all(span.end_ns is not None for span in spans.values())
    assert spans["typed"].args == {"value": said, "bytes": 1}
    assert all(spans[name].args == {"value": said, "kept": 1} for name in ("first", "late", "afterwards"))
    assert process.lost_events == process.orphans == process.torn == 0


@pytest.mark.parametrize("value", [None, "a", [1], {"a": 1}, b"a", object()])
def test_bad_sample_is_lost(folder: Path, process_of: ReadProcess, value: Any) -> None:
    """A sample that is no number is counted as lost, not as torn."""
    rltrace.start(folder)
    rltrace.counter("before", 1)
    rltrace.counter("a", value)
    rltrace.counter("after", 1)
    rltrace.stop()
    process = process_of(folder)
    assert [event.name for event in process.events()] == ["before", "after"]
    assert (process.lost_events, process.misfits, process.torn, process.orphans) == (1, 1, 0, 0)


@pytest.mark.parametrize("name", [5, -0.5, None, b"a", ["a"]])
def test_bad_name_is_lost(folder: Path, process_of: ReadProcess, name: Any) -> None:
    """A name that is no text is counted as lost, once for each event."""
    rltrace.start(folder)
    with rltrace.span("outer"), rltrace.span(name):
        rltrace.counter(name, 1)
        rltrace.flow(name, "out")
    rltrace.span_at(name, 1, 2)
    rltrace.stop()
    process = process_of(folder)
    assert [event.name for event in process.events()] == ["outer"]
    assert (process.lost_events, process.misfits, process.torn, process.orphans) == (4, 4, 0, 0)


def test_bad_declared_name_is_refused() -> None:
    """A name that is no text is refused where it is declared once."""
    with pytest.raises(TypeError, match="the name of a span must be text, not 5"):
        rltrace.typed_span(5)  # type: ignore[arg-type]


def test_any_number_arrives(folder: Path, process_of: ReadProcess) -> None:
    """A sample of any number arrives as that number."""
    values = [True, np.bool_(False), np.int32(3), np.float64(0.5), Scalar(), float("inf")]
    rltrace.start(folder)
    for value in values:
        rltrace.counter("a", value)  # type: ignore[arg-type]
    rltrace.stop()
    process = process_of(folder)
    found = [event.value for event in process.events() if isinstance(event, Counter)]
    assert found == [1, 0, 3, 0.5, 2.5, float("inf")] and not any(isinstance(value, bool) for value in found)
    assert process.lost_events == process.torn == 0


@pytest.mark.parametrize(
    "value", ["x" * (2 << 20), "x" * (segment.NEXT_BYTES - 256)], ids=["2 MiB", "as large as a segment"]
)
def test_unrecordable_argument_is_counted(folder: Path, process_of: ReadProcess, value: Any) -> None:
    """An argument that cannot be recorded is counted and does not raise."""
    rltrace.start(folder)
    rltrace.counter("before", 1)
    with rltrace.span("a", value=value):
        pass
    rltrace.span_at("b", 1, 2, value=value)
    with rltrace.span("c") as span:
        span.set(value=value)
    rltrace.counter("after", 1)
    assert len(list(folder.glob("processes/*/*.seg"))) == 1, "no segment is made for what fits none"
    rltrace.stop()
    process = process_of(folder)
    events = list(process.events())
    assert [event.name for event in events] == ["before", "after", "c"]
    assert process.lost_events == 3
    assert process.orphans == 1, "the end of the first, whose beginning was lost"
    assert process.torn == 0


# ---------------------------------------------------------------- threads, tasks, generators


def test_many_short_threads_cost_little(folder: Path, process_of: ReadProcess, spans_of: Spans) -> None:
    """Three hundred threads with one span each cost little.

    Alive together they have a small segment each; those of dead threads are used again.
    """
    rltrace.start(folder)
    for generation in range(3):
        gate = threading.Barrier(300)

        def work(n: int, gate: threading.Barrier = gate, generation: int = generation) -> None:
            gate.wait()
            with rltrace.span("work", n=n, generation=generation):
                gate.wait()
            rltrace.counter("left", n)

        threads = [threading.Thread(target=work, args=(n,), name=f"worker {n}") for n in range(300)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    segments = list(folder.glob("processes/*/*.seg"))
    assert len(segments) == 300
    assert sum(path.stat().st_size for path in segments) == 300 * segment.FIRST_BYTES
    rltrace.stop()

    process = process_of(folder)
    spans = [event for event in process.events() if isinstance(event, Span)]
    assert {(s.args["n"], s.args["generation"]) for s in spans} == set(itertools.product(range(300), range(3)))
    assert len(spans) == 900 and all(span.end_ns for span in spans)
    for generation in range(3):
        assert len({span.thread for span in spans if span.args["generation"] == generation}) == 300
    assert {process.threads[s.thread] for s in spans} == {f"worker {n}" for n in range(300)}
    left = [(process.threads[event.thread], event.value) for event in process.events() if isinstance(event, Counter)]
    assert sorted(left) == sorted((f"worker {n}", n) for n in range(300) for _ in range(3))
    assert sum(path.stat().st_size for path in segments) < 300 * 1024, "cut behind the last record"


def test_threads_share_a_segment(folder: Path, spans_of: Spans) -> None:
    """Threads one after another share a segment."""

    def work(n: int) -> None:
        with rltrace.span("work", n=n):
            pass

    rltrace.start(folder)
    for n in range(100):
        thread = threading.Thread(target=work, args=(n,))
        thread.start()
        thread.join()
    rltrace.stop()
    assert [span.args["n"] for span in spans_of(folder)] == list(range(100))
    assert len(list(folder.glob("processes/*/*.seg"))) == 1


def test_large_first_record(folder: Path, process_of: ReadProcess) -> None:
    """A thread's first record may be larger than its first segment.

    Also where a dead thread has left it one with less room than that.
    """

    def work(size_bytes: int) -> None:
        with rltrace.span("work", filler="x" * size_bytes):
            pass

    sizes_bytes = (segment.FIRST_BYTES // 2, segment.FIRST_BYTES * 3 // 4, 2 * segment.FIRST_BYTES)
    rltrace.start(folder)
    for size_bytes in sizes_bytes:
        thread = threading.Thread(target=work, args=(size_bytes,))
        thread.start()
        thread.join()
    rltrace.stop()
    process = process_of(folder)
    found = [len(event.args["filler"]) for event in process.events()]
    assert sorted(found) == sorted(sizes_bytes)
    assert process.lost_events == 0


def test_oddly_named_thread(folder: Path, process_of: ReadProcess) -> None:
    """A thread with an odd name is recorded."""

    def work() -> None:
        rltrace.counter("c", 1)

    rltrace.start(folder)
    for name in ("\udcff", "x" * (3 << 20), "прогон ✓"):
        thread = threading.Thread(target=work, name=name)
        thread.start()
        thread.join()
    rltrace.stop()
    process = process_of(folder)
    assert len(list(process.events())) == 3
    assert process.lost_events == 0
    assert list(process.threads.values())[-1] == "прогон ✓"


def test_tasks_in_one_span(folder: Path, spans_of: Spans) -> None:
    """asyncio tasks in the same span keep their own identity."""

    async def child(n: int) -> None:
        async with rltrace.span("child", n=n):
            await asyncio.sleep(0)
            with rltrace.span("inside", n=n):
                await asyncio.sleep(0)

    async def main() -> None:
        asyncio.get_running_loop().call_soon(rltrace.span_at, "callback", 1, 2)
        asyncio.get_running_loop().call_soon(lambda: rltrace.span("in callback").__enter__())
        await asyncio.gather(*(child(n) for n in range(50)))

    rltrace.start(folder)
    with rltrace.span("outside"):
        asyncio.run(main())
    with rltrace.span("afterwards"):
        pass
    rltrace.stop()
    task_of = {span.args["n"]: span.task for span in spans_of(folder, "child")}
    assert len(set(task_of.values())) == 50 and 0 not in task_of.values()
    assert {span.args["n"]: span.task for span in spans_of(folder, "inside")} == task_of
    for name in ("outside", "afterwards", "in callback"):
        assert spans_of(folder, name)[0].task == 0
    assert len(spans_of(folder)) == 104


def test_the_first_recording_begins_in_a_task(folder: Path, spans_of: Spans) -> None:
    """A process that imports asyncio after rltrace, and starts to record inside of a task, records whose spans are."""
    code = """
import sys, rltrace
with rltrace.span("before"): pass
import asyncio
async def work():
    with rltrace.span("work"): await asyncio.sleep(0)
async def main():
    rltrace.start(sys.argv[1])
    await asyncio.gather(work(), work())
asyncio.run(main())
with rltrace.span("behind"): pass
"""
    assert _python(code, str(folder)).code == 0
    tasks = {span.task for span in spans_of(folder, "work")}
    assert len(tasks) == 2 and 0 not in tasks
    assert spans_of(folder, "before") == [] and spans_of(folder, "behind")[0].task == 0


def test_callback_has_no_task(folder: Path, spans_of: Spans) -> None:
    """A callback of a loop has no task even if another thread's loop runs one."""
    running, recorded = threading.Event(), threading.Event()

    async def task() -> None:
        with rltrace.span("in task"):
            running.set()
            recorded.wait()

    def callback(loop: asyncio.AbstractEventLoop) -> None:
        with rltrace.span("in callback"):
            loop.stop()

    rltrace.start(folder)
    thread = threading.Thread(target=lambda: asyncio.run(task()))
    thread.start()
    running.wait()
    loop = asyncio.new_event_loop()
    try:
        loop.call_soon(callback, loop)
        loop.run_forever()
    finally:
        recorded.set()
        thread.join()
        loop.close()
    rltrace.stop()
    assert {span.name: span.task == 0 for span in spans_of(folder)} == {"in task": False, "in callback": True}


def test_flow_belongs_to_its_task(folder: Path, spans_of: Spans) -> None:
    """A flow belongs to its own task."""

    async def child(n: int) -> None:
        with rltrace.span("child", n=n):
            await asyncio.sleep(0)
            rltrace.flow(f"flow {n}", "out")
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(child(n) for n in range(20)))

    rltrace.start(folder)
    asyncio.run(main())
    rltrace.stop()
    assert all(span.flows_out == (f"flow {span.args['n']}",) for span in spans_of(folder))


def test_interleaved_generators(folder: Path, spans_of: Spans) -> None:
    """Spans inside interleaved generators end where they end."""

    def numbers(key: str) -> Generator[int, None, None]:
        with rltrace.span("generator", key=key):
            for n in range(3):
                with rltrace.span("item", key=key, n=n):
                    yield n

    rltrace.start(folder)
    a, b = numbers("a"), numbers("b")
    assert [next(a), next(b), next(a), next(a), next(b)] == [0, 0, 1, 2, 1]
    assert next(a, None) is None
    rltrace.flow("to b", "out")
    b.close()
    rltrace.stop()
    whole = {span.args["key"]: span for span in spans_of(folder, "generator")}
    assert whole["a"].start_ns < whole["b"].start_ns < whole["a"].end_ns < whole["b"].end_ns
    items = [(span.args["key"], span.args["n"]) for span in spans_of(folder, "item")]
    assert items == [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("b", 1)]
    assert all("error" not in span.args for span in spans_of(folder)), "closing a generator is no error"
    assert spans_of(folder, "item")[-1].flows_out == ("to b",)


@pytest.mark.parametrize("order", ["ends in a later segment", "ends in an earlier segment"])
def test_span_ends_in_another_thread(folder: Path, process_of: ReadProcess, spans_of: Spans, order: str) -> None:
    """A span may end in another thread."""
    rltrace.start(folder)
    if order == "ends in an earlier segment":  # of two segments the main thread's is read first
        rltrace.counter("first", 1)
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(rltrace.span("wandering", n=1).__enter__()))
    thread.start()
    thread.join()
    box[0].set(end=2)
    box[0].__exit__(None, None, None)
    rltrace.stop()
    (span,) = spans_of(folder)
    assert (span.args, span.end_ns is None, span.thread) == ({"n": 1, "end": 2}, False, thread.native_id)
    assert process_of(folder).orphans == 0


def test_signal_handlers_may_record(folder: Path, process_of: ReadProcess) -> None:
    """Whatever they interrupt: here the main thread's own records, segment changes included."""
    handled, is_over = 0, False

    def handler(*_: object) -> None:
        nonlocal handled
        with rltrace.span("handler", n=handled, filler="x" * 20_000):
            handled += 1
        if not is_over:
            signal.setitimer(signal.ITIMER_REAL, 0.0005)

    rltrace.start(folder)
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005)
    done = 0
    try:
        while done < 2000 or handled < 200:
            with rltrace.span("main", filler="x" * 20_000):
                done += 1
    finally:
        is_over = True  # first: a handler that comes in the next line would set the timer again
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    rltrace.stop()
    process = process_of(folder)
    names = [event.name for event in process.events() if isinstance(event, Span) and event.end_ns]
    assert (names.count("main"), names.count("handler")) == (done, handled)
    assert process.lost_events == process.torn == 0


# ---------------------------------------------------------------- traced


@rltrace.traced
def plain(a: int, *, b: int = 2) -> int:
    """Adds."""
    return a + b


@rltrace.traced("named", kind="coroutine")
async def coroutine(a: int) -> int:
    await asyncio.sleep(0)
    return a


@rltrace.traced()
def generator(n: int) -> Generator[int, str, str]:
    got = []
    for i in range(n):
        try:
            got.append((yield i))
        except KeyError:
            got.append("caught")
    return ",".join(map(str, got))


closed: list[str] = []


@rltrace.traced
async def async_generator(n: int) -> AsyncGenerator[Any, Any]:
    try:
        for i in range(n):
            try:
                sent = yield i
                if sent is not None:
                    yield f"sent {sent}"
            except KeyError:
                yield "caught"
    finally:
        closed.append("closed")


def test_traced_keeps_kind_and_signature() -> None:
    """`traced` keeps the kind, the name and the signature."""
    assert inspect.isfunction(plain) and inspect.iscoroutinefunction(coroutine)
    assert inspect.isgeneratorfunction(generator) and inspect.isasyncgenfunction(async_generator)
    assert str(inspect.signature(plain)) == "(a: 'int', *, b: 'int' = 2) -> 'int'"
    assert (plain.__name__, plain.__doc__) == ("plain", "Adds.")


def test_traced_calls_behave_alike(folder: Path, spans_of: Spans) -> None:
    """Traced calls return, yield and raise what the function does."""
    rltrace.start(folder)
    assert plain(1, b=3) == 4
    assert asyncio.run(coroutine(5)) == 5
    with pytest.raises(TypeError):
        plain("a")  # type: ignore[arg-type]

    running = generator(3)
    assert next(running) == 0 and running.send("x") == 1 and running.throw(KeyError()) == 2
    with pytest.raises(StopIteration) as stopped:
        running.send("y")
    assert stopped.value.value == "x,caught,y"
    with pytest.raises(OSError):
        failing = generator(3)
        next(failing)
        failing.throw(OSError())
    rltrace.stop()
    assert [(span.name, span.args) for span in spans_of(folder)] == [
        ("plain", {}),
        ("named", {"kind": "coroutine"}),
        ("plain", {"error": "TypeError", "error_message": 'can only concatenate str (not "int") to str'}),
        ("generator", {}),
        ("generator", {"error": "OSError"}),
    ]


def test_traced_async_generator(folder: Path, spans_of: Spans) -> None:
    """A traced async generator takes asend, athrow and aclose."""

    async def main() -> None:
        assert [item async for item in async_generator(3)] == [0, 1, 2]
        running = async_generator(3)
        assert await running.__anext__() == 0
        assert await running.asend("x") == "sent x"
        assert await running.__anext__() == 1
        assert await running.athrow(KeyError()) == "caught"
        await running.aclose()
        failing = async_generator(1)
        await failing.__anext__()
        with pytest.raises(OSError):
            await failing.athrow(OSError())

    closed.clear()
    rltrace.start(folder)
    asyncio.run(main())
    rltrace.stop()
    assert closed == ["closed"] * 3, "the wrapped generator is closed with its wrapper"
    assert [span.args for span in spans_of(folder)] == [{}, {}, {"error": "OSError"}]
    assert all(span.end_ns for span in spans_of(folder))


def test_traced_takes_methods_and_partials(folder: Path, spans_of: Spans) -> None:
    import functools

    class Engine:
        @rltrace.traced
        def step(self) -> str:
            return "stepped"

        @staticmethod
        @rltrace.traced
        def fixed() -> str:
            return "fixed"

        @rltrace.traced
        @staticmethod
        def beneath() -> str:
            return "beneath"

        @rltrace.traced("named", more=1)
        @classmethod
        def of_class(cls) -> str:
            return cls.__name__

    rltrace.start(folder)
    assert Engine().step() == "stepped" and Engine.fixed() == "fixed"
    assert (Engine().beneath(), Engine.beneath(), Engine().of_class()) == ("beneath", "beneath", "Engine")
    assert rltrace.traced(functools.partial(int, "7"))() == 7
    rltrace.stop()
    names = [span.name.rpartition(".")[2] for span in spans_of(folder)]
    assert names == ["step", "fixed", "beneath", "beneath", "named", "partial"]


@pytest.mark.parametrize("decorated", [int, property(str), 3])
def test_traced_refuses_at_once(decorated: Any) -> None:
    """`traced` says at once what it cannot decorate."""
    with pytest.raises(TypeError, match="not a function; decorate its methods"):
        rltrace.traced(decorated)
    with pytest.raises(TypeError, match="not a function"):
        rltrace.traced("name")(decorated)


# ---------------------------------------------------------------- start and stop


def test_nothing_started_nothing_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded while nothing is started."""
    monkeypatch.chdir(tmp_path)
    with rltrace.span("a", b=1) as span, rltrace.phase("p"), rltrace.typed_span("t", x=int)(1):
        span.set(c=2)
        rltrace.counter("c", 1)
        rltrace.flow("f", "out")
        rltrace.span_at("s", 1, 2)
        rltrace.identify(role="nobody")
    rltrace.stop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("main", "own", "named"),
    [
        ("ray::Worker.step", "ray::Worker.wat", "thread"),
        ("python3.11", "python3.11", "thread"),
        ("python3", "autograd_0", "autograd_0"),
    ],
)
def test_foreign_thread_name(folder: Path, main: str, own: str, named: str) -> None:
    """A foreign thread's name is its own and not its process's."""
    program = f"""
import _thread, pathlib, threading, sys, rltrace
def rename(name):
    pathlib.Path(f"/proc/self/task/{{threading.get_native_id()}}/comm").write_text(name)
def foreign():
    rename({own!r})
    with rltrace.span("a"):
        pass
    done.release()
rename({main!r})
rltrace.start({str(folder)!r})
done = _thread.allocate_lock()
done.acquire()
_thread.start_new_thread(foreign, ())
done.acquire()
rltrace.stop()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    (process,) = Recording.open(folder).processes
    assert [event.name for event in process.events()] == ["a"]
    assert list(process.threads.values()) == [named]


def test_start_stop_start_makes_two_recordings(folder: Path, spans_of: Spans, capsys: pytest.CaptureFixture) -> None:
    """A folder that holds a finished Recording is left alone, and a numbered one beside it is said."""
    paths = []
    for n in range(3):
        paths.append(rltrace.start(folder))
        with rltrace.span("run", n=n):
            pass
        rltrace.stop()
    assert [path.name for path in paths] == ["run", "run-2", "run-3"]
    assert [span.args["n"] for path in paths for span in spans_of(path)] == [0, 1, 2]
    assert all(Recording.open(path).is_complete for path in paths)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"rltrace: {folder} holds another run already; recording into {path}" for path in paths[1:]]


def test_quiet_about_taken_folder(folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """RLTRACE_QUIET suppresses the notice that a folder was taken."""
    monkeypatch.setenv("RLTRACE_QUIET", "1")
    for name in ("run", "run-2"):
        path = rltrace.start(folder)
        rltrace.stop()
        assert path is not None and path.name == name
    assert capsys.readouterr().err == ""
    (folder / "file").touch()
    assert rltrace.start(folder / "file") is None
    assert capsys.readouterr().err.startswith("rltrace: not recording: "), "that is an error"


def test_second_process_joins(folder: Path, spans_of: Spans) -> None:
    """A second process joins a run that goes on."""
    rltrace.start(folder, role="driver")
    code = "import rltrace, sys; rltrace.start(sys.argv[1], role='worker', rank=1)\nwith rltrace.span('theirs'): pass"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}  # it does not know of our run
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env=environment)
    with rltrace.span("ours"):
        pass
    rltrace.stop()
    assert [process.name for process in Recording.open(folder).processes] == ["driver", "rank 1 worker"]
    assert len(spans_of(folder, "theirs", role="worker")) == len(spans_of(folder, "ours", role="driver")) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["run"]


@pytest.mark.parametrize(("parent", "joined"), [("elsewhere-1-2", "run"), (None, "run-2")])
def test_run_from_elsewhere_is_joined(
    folder: Path, monkeypatch: pytest.MonkeyPatch, parent: str | None, joined: str
) -> None:
    """A run that began on another host is joined even if its owner cannot be seen.

    On another host, or in a container with pids of its own; `RLTRACE_DIR` alone is a wish of the user's.
    """
    rltrace.start(folder)
    rltrace.stop()
    monkeypatch.setenv(cluster.DIR_VARIABLE, str(folder))
    if parent is not None:
        monkeypatch.setenv(cluster.PARENT_VARIABLE, parent)
    assert rltrace.start() == folder.with_name(joined)
    rltrace.stop()


def test_run_of_killed_owner_is_not_joined(folder: Path) -> None:
    """A run whose owner was killed is not joined.

    Not even while the dead process waits to be reaped, nor when its pid is used again.
    """
    code = "import rltrace, sys, time; rltrace.start(sys.argv[1]); print('ready', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    assert Recording.open(folder).is_live and Recording.open(folder).processes[0].is_alive
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert not Recording.open(folder).is_live and not Recording.open(folder).processes[0].is_alive
    assert rltrace.start(folder) == folder.with_name("run-2")
    rltrace.stop()
    child.communicate()


def test_reused_pid_is_another_process(folder: Path) -> None:
    """A pid that is used again is another process."""
    rltrace.start(folder)
    try:
        manifest = folder / "manifest.json"
        assert Recording.open(folder).is_live
        ticks = Recording.open(folder).manifest["owner_start_ticks"]
        manifest.write_text(manifest.read_text().replace(str(ticks), str(ticks - 1)))
        assert not Recording.open(folder).is_live
    finally:
        rltrace.stop()


def test_stop_leaves_spans_open(folder: Path, process_of: ReadProcess) -> None:
    """`stop` leaves open spans open."""
    rltrace.start(folder)
    with rltrace.span("open"), rltrace.typed_span("typed open")():
        with rltrace.span("over"):
            pass
        rltrace.stop()
    process = process_of(folder)
    assert {event.name: event.end_ns is None for event in process.events()} == {
        "open": True,
        "typed open": True,
        "over": False,
    }
    assert process.end_ns is not None and process.lost_events == 0


def test_span_outlives_its_recording(folder: Path, process_of: ReadProcess) -> None:
    """A span that outlives its Recording does not disturb the next one."""
    rltrace.start(folder)
    with rltrace.span("of the first"):
        rltrace.stop()
        second = rltrace.start(folder.with_name("second"))
        rltrace.counter("c", 1)
    rltrace.stop()
    process = process_of(second)
    assert [event.name for event in process.events()] == ["c"]
    assert process.orphans == 1


def test_stop_cuts_nothing_off(folder: Path, spans_of: Spans) -> None:
    """`stop` while threads record cuts nothing off.

    A span that was left before `stop` was called is there; a thread that goes on is not disturbed.
    """
    for n in range(10):
        path = folder.with_name(f"run {n}")
        left: list[int] = []
        over = threading.Event()

        def work(left: list[int] = left, over: threading.Event = over) -> None:
            while not over.is_set():
                with rltrace.span("work", k=len(left)):
                    pass
                left.append(len(left))

        rltrace.start(path)
        thread = threading.Thread(target=work)
        thread.start()
        while len(left) < 100:
            time.sleep(0.001)
        until = len(left)
        rltrace.stop()
        over.set()
        thread.join()
        seen = {span.args["k"] for span in spans_of(path) if span.end_ns}
        assert set(left[:until]) <= seen and seen <= set(range(len(left)))


def test_record_while_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record written while its segment is closed is not cut off.

    By another thread, between the look at where the last record ends and the end of the mapping. The native library
    lets nobody write after that look.
    """
    monkeypatch.setattr(native, "LIBRARY", None)
    written = segment.Segment(tmp_path / "1.seg", segment.FIRST_BYTES)
    written.write(b"first")
    mapping = written.map

    class Raced:
        closed = False

        def tell(self) -> int:
            end = mapping.tell()
            mapping.write(b"second")
            return end

        def close(self) -> None:
            mapping.close()

    written.map = Raced()
    written.close()
    assert written.path.read_bytes() == b"firstsecond"


def test_late_line_stays_out_of_other_files(folder: Path, tmp_path: Path) -> None:
    """A late line does not go into another file of the program.

    Which is given the number of the file that was closed.
    """
    rltrace.start(folder)
    late = spans.current()
    rltrace.stop()
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context((tmp_path / str(n)).open("w")) for n in range(8)]
        late.append("process", role="late")
    assert [Path(file.name).read_text() for file in files] == [""] * 8


def test_identity_says_who_and_whose_clock(folder: Path, process_of: ReadProcess) -> None:
    import socket

    rltrace.start(folder, role="worker", rank=0, device={"host": "h", "uuid": "GPU-1"})
    rltrace.identify(name="the worker", rank=1)
    rltrace.stop()
    process = process_of(folder)
    assert (process.name, process.role, process.rank) == ("rank 1 worker", "worker", 1)
    assert process.identity["name"] == "the worker", "readers call a rank by its place"
    assert process.device == {"host": "h", "uuid": "GPU-1"}
    assert (process.host, process.pid) == (socket.gethostname(), os.getpid())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert process.clock_domain == (boot, os.readlink("/proc/self/ns/time"))
    now = time.time_ns() - time.monotonic_ns()
    assert abs(process.unix_offset_ns - now) < 1_000_000_000


def test_real_time_in_narrowest_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real time is read in the middle of the narrowest of five windows."""
    widths_ns = [900, 800, 40, 700, 600]
    before_ns = [1_000 * place for place in range(5)]
    monotonic = (ns for begin, width in zip(before_ns, widths_ns, strict=True) for ns in (begin, begin + width))
    real = iter(range(50, 55))
    monkeypatch.setattr(clock, "now_ns", lambda: next(monotonic))
    monkeypatch.setattr(time, "time_ns", lambda: next(real))
    assert clock.anchor() == {"monotonic_ns": 2_000 + 20, "realtime_ns": 52, "anchor_width_ns": 40}


def test_hook_counts_its_firings(folder: Path, process_of: ReadProcess) -> None:
    """A hook counts how often it fired.

    From many threads, exactly; a later report of the same place replaces the earlier one.
    """
    rltrace.start(folder)
    current = spans.current()
    current.hook("fsdp2", "m:A.f", "failed", "no such thing")
    hook = current.hook("fsdp2", "m:A.f", "installed", emits=("a", "b"))
    current.hook("vllm", "m:B.g", "skipped", "version 0.1")
    threads = [threading.Thread(target=lambda: [hook.fired() for _ in range(2000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rltrace.stop()
    hook.fired()  # too late, and harmless
    hooks = [(h["target"], h["state"], h["reason"], h["emits"], h["fired"]) for h in process_of(folder).hooks]
    assert hooks == [
        ("m:A.f", "installed", None, ["a", "b"], 16000),
        ("m:B.g", "skipped", "version 0.1", [], 0),
    ]


def test_hook_fires_inside_its_count(folder: Path, process_of: ReadProcess) -> None:
    """A hook that fires inside of its own counting loses no count.

    As in a signal handler, or in two threads of which the later one stores its number first.
    """
    rltrace.start(folder)
    hook = spans.current().hook("fsdp2", "m:A.f", "installed")
    count, inside = hook._next, []

    def interrupted() -> int:
        number = count()
        if not inside:
            inside.append(number)
            hook.fired()
        return number

    hook._next = interrupted
    hook.fired()
    rltrace.stop()
    assert [hook["fired"] for hook in process_of(folder).hooks] == [2]


def test_max_bytes_drops_the_oldest(folder: Path, process_of: ReadProcess, spans_of: Spans) -> None:
    """`max_bytes` drops the oldest segments and says so."""
    limit = 3 << 20
    rltrace.start(folder, max_bytes=limit)
    with rltrace.span("whole"):
        for n in range(10_000):
            with rltrace.span("work", n=n, filler="x" * 900):
                pass
            if n % 1000 == 0:
                kept_bytes = sum(path.stat().st_size for path in folder.glob("processes/*/*.seg"))
                # Full from some 3,000 on: not more is dropped than has to be.
                assert (limit - segment.FIRST_BYTES if n > 5000 else 0) < kept_bytes <= limit
    rltrace.stop()
    process = process_of(folder)
    kept = [event.args["n"] for event in process.events()]
    assert kept == list(range(kept[0], 10_000)) and 0 < kept[0] < 9_000
    assert process.dropped_segments >= 6 and process.dropped_bytes > 5 << 20
    assert process.orphans == 1, "the end of the span whose beginning was dropped"
    assert process.lost_events == process.torn == 0


def test_max_bytes_over_many_threads(folder: Path) -> None:
    """`max_bytes` holds over threads that come and go.

    What a dead thread filled is dropped like anything else.
    """

    def work() -> None:
        for _ in range(20):
            rltrace.span_at("work", 1, 2, filler="x" * 3000)

    limit = 3 << 20
    files_open = os.listdir("/proc/self/fd")
    rltrace.start(folder, max_bytes=limit)
    for _ in range(200):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    total = sum(path.stat().st_size for path in folder.glob("processes/*/*.seg"))
    rltrace.stop()
    assert total <= limit
    assert len(os.listdir("/proc/self/fd")) == len(files_open), "nor is any file left open"


def test_threads_hold_no_file_open(folder: Path, spans_of: Spans) -> None:
    """Recording threads hold no file open.

    A program may come near its limit of open files.
    """
    files_open = len(os.listdir("/proc/self/fd"))
    rltrace.start(folder)
    begun, go_on = threading.Barrier(21), threading.Event()

    def work() -> None:
        with rltrace.span("work"):
            begun.wait()
            go_on.wait()

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    begun.wait()
    held = len(os.listdir("/proc/self/fd")) - files_open
    go_on.set()
    for thread in threads:
        thread.join()
    rltrace.stop()
    assert held == 0
    assert len(spans_of(folder)) == 20


DAEMON = """
import os, sys
import rltrace

rltrace.start(sys.argv[1])
rltrace.counter("before", 1)
os.closerange(3, 100)
own = [open(os.path.join(sys.argv[2], str(n)), "w") for n in range(20)]
for n in range(30_000):
    rltrace.span_at("work", n, n + 1, filler="x" * 100)
rltrace.identify(role="daemon")
rltrace.stop()
for file in own:
    file.write("own")
    file.close()
"""


@once
def test_closed_descriptors_stay_the_programs(tmp_path: Path) -> None:
    """A program that closes all descriptors keeps its own under the same numbers.

    Daemons do so: nothing of ours is written into a file of theirs, nor is one of theirs closed.
    """
    folder, files = tmp_path / "run", tmp_path / "files"
    files.mkdir()
    done = subprocess.run([sys.executable, "-c", DAEMON, folder, files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert {file.read_text() for file in files.iterdir()} == {"own"}
    (process,) = Recording.open(folder).processes
    assert (process.role, process.lost_events, process.end_ns is None) == ("daemon", 0, False)
    assert sum(event.name == "work" for event in process.events()) == 30_000


@pytest.mark.parametrize("work", ["span", "counter", "hook"])
def test_handlers_error_reaches_program(folder: Path, work: str) -> None:
    """An error that a signal handler raises in our code reaches the program.

    As the timeout of a reward does: it was taken for a failure of ours, and the program went on for ever.
    """

    class LateError(Exception):
        pass

    def ring(*_: object) -> None:
        raise LateError

    def span() -> None:
        with rltrace.span("work"):
            pass

    hook = Hook("ours", "json:loads")
    hook.bind(True)
    nothing = wrapping.wrap_function(lambda: None, hook, lambda *_: len(str(hook)), lambda *_: None)
    once = {"span": span, "counter": lambda: rltrace.counter("work", 1), "hook": nothing}[work]
    before = signal.signal(signal.SIGALRM, ring)
    rltrace.start(folder)
    gc.disable()  # an error in a callback of the collector, as hypothesis has one, is lost whoever records
    late = 0
    try:
        for _ in range(100):
            deadline = time.monotonic() + 5
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001)
                while time.monotonic() < deadline:
                    for _ in range(100):
                        once()
            except LateError:
                late += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
        rltrace.stop()
    assert (late, hook.failures) == (100, 0)


@pytest.mark.parametrize("ask", [rltrace.start, lifecycle.join])
def test_max_bytes_of_a_recorded_process(folder: Path, ask: Callable[..., object]) -> None:
    """`max_bytes` bounds a process that records already.

    As one does under `rltrace exec`; and who names no bound leaves the one that there is.
    """
    limit = 2 << 20
    rltrace.start(folder)
    ask(folder, max_bytes=limit)
    ask(folder)
    kept = []
    for n in range(8_000):
        rltrace.span_at("work", 1, 2, filler="x" * 900)
        if n % 500 == 0:
            kept.append(sum(path.stat().st_size for path in folder.glob("processes/*/*.seg")))
    rltrace.stop()
    assert 1 << 20 < max(kept) <= limit


def test_max_bytes_of_a_forked_child(folder: Path) -> None:
    """`max_bytes` bounds a forked child too."""
    limit = 2 << 20
    rltrace.start(folder, max_bytes=limit)
    if (child := os.fork()) == 0:
        for _ in range(8_000):
            rltrace.span_at("work", 1, 2, filler="x" * 900)
        os._exit(0)
    os.waitpid(child, 0)
    rltrace.stop()
    (kept,) = [
        sum(path.stat().st_size for path in process.folder.glob("*.seg"))
        for process in Recording.open(folder).processes
        if process.pid == child
    ]
    assert 1 << 20 < kept <= limit


def test_max_bytes_keeps_live_segments(folder: Path, spans_of: Spans) -> None:
    """`max_bytes` never drops what a thread is writing."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        with rltrace.span("waiting"):
            begun.set()
            go_on.wait()

    rltrace.start(folder, max_bytes=2 << 20)
    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    for _ in range(5000):
        rltrace.span_at("work", 1, 2, filler="x" * 900)
    go_on.set()
    thread.join()
    rltrace.stop()
    assert [span.end_ns is not None for span in spans_of(folder, "waiting")] == [True]
    assert 0 < len(spans_of(folder, "work")) < 5000


# ---------------------------------------------------------------- the program around it


def _python(code: str, *args: str) -> types.SimpleNamespace:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )
    return types.SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


@once
def test_import_is_quick() -> None:
    """`import rltrace` loads no framework, nor asyncio, which only what records needs, and is quick."""
    code = """
import sys, time
before = time.process_time()
import rltrace
spent = time.process_time() - before
foreign = {"asyncio", "torch", "ray", "vllm", "numpy", "msgpack", "rich", "click", "wrapt", "perfetto", "google"}
print(sorted(foreign & set(sys.modules)), spent < 0.25, spent)
"""
    assert _python(code).out.startswith("[] True")


@once
def test_del_and_atexit_may_record(folder: Path, spans_of: Spans) -> None:
    """`__del__` and atexit functions may record to the last."""
    code = """
import atexit, sys, rltrace

class Late:
    def __init__(self, name): self.name = name
    def __del__(self):
        with rltrace.span("del", name=self.name): pass

def at_exit(name):
    with rltrace.span("atexit", name=name): pass

atexit.register(at_exit, "before start")
rltrace.start(sys.argv[1])
atexit.register(at_exit, "after start")
Late("at once")
sys.kept = Late("at the very end")
sys.cycle = [Late("in a cycle")]; sys.cycle.append(sys.cycle)
open_span = rltrace.span("open").__enter__()
"""
    done = _python(code, str(folder))
    assert (done.code, done.err) == (0, "")
    seen = [(span.name, span.args.get("name"), span.end_ns is None) for span in spans_of(folder)]
    assert seen == [("del", "at once", False), ("open", None, True), ("atexit", "after start", False)]
    assert Recording.open(folder).is_complete


@once
def test_two_interpreters_of_one_pid(folder: Path) -> None:
    """Two interpreters of one pid are two processes."""
    code = """
import os, sys, rltrace
rltrace.start(sys.argv[1])
with rltrace.span("interpreter", n=int(sys.argv[2])): pass
if sys.argv[2] == "1":
    os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[2], sys.argv[1], "2"])
"""
    done = _python(code, str(folder), "1")
    assert (done.code, done.err) == (0, "")
    first, second = Recording.open(folder).processes
    assert first.pid == second.pid and first.key != second.key
    assert [event.args["n"] for process in (first, second) for event in process.events()] == [1, 2]
    assert second.parent == first.key
