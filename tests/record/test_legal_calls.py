"""Whatever a program may write, every reader reads; what it may not write is refused where it is written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import rltrace
from rltrace.analysis.summary import Summary, summarize
from rltrace.cli import main
from rltrace.events import Span
from rltrace.read.recording import Process, Recording
from rltrace.record import announcement, spans

READERS = (
    ["summary"], ["summary", "--all"], ["summary", "--json"],
    ["export", "--output", "out.pftrace"], ["export", "--output", "out.zip"], ["export", "--output", "out.html"],
)  # fmt: skip


def everything_reads(folder: Path) -> Summary:
    """By every reader, and what was summed up."""
    for command, *options in READERS:
        arguments = [str(folder.parent / option) if option.startswith("out.") else option for option in options]
        done = CliRunner().invoke(main, [command, str(folder), *arguments])
        nothing_to_draw = done.exit_code == 7 and options[-1] == "out.html"
        if not (done.exit_code == 0 or nothing_to_draw):
            raise AssertionError(f"{command} {options}: {done.output}") from done.exception
    archived = summarize(Recording.open(folder.parent / "out.zip"))
    summary = summarize(Recording.open(folder))
    assert archived.lost_events == summary.lost_events
    return summary


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = {"a": value} if level % 2 else [value]
    return value


def _send(size_bytes: Any) -> None:
    for _ in range(2):
        with rltrace.span("step", step=1), rltrace.phase("weight_sync"):
            with rltrace.span("weight_sync.send", bytes=size_bytes, tensors=size_bytes):
                pass
            with spans.automatic_span("gpu.fsdp.all_gather", bytes=size_bytes, ranks=size_bytes, queued_ns=size_bytes):
                pass


def _count(*values: Any) -> None:
    names = ("reward_mean", "tokens", "own", "actor.params_bytes", "actor.grads_bytes", "resident_bytes")
    names += ("allocated_peak_bytes", "allocations.actor.params_bytes", "allocations.reserved_bytes")
    with rltrace.span("step", step=1), rltrace.phase("actor.update"):
        for name in names:
            for value in values:
                rltrace.counter(name, value)


def _run_out(**asked: Any) -> None:
    with (
        rltrace.span("step", step=1),
        rltrace.phase("actor.update"),
        spans.automatic_span("memory.out_of_memory", **asked),
    ):
        pass


def _step(number: Any) -> None:
    with rltrace.span("step", step=number):
        pass


CALLS: dict[str, Callable[[], object]] = {
    "bytes of 64 bits": lambda: _send(10**19),
    "bytes of 63 bits": lambda: _send(2**63 - 1),
    "bytes below zero": lambda: _send(-(2**63)),
    "bytes of a float": lambda: _send(1e300),
    "bytes that are text": lambda: _send("a"),
    "bytes that are none": lambda: _send(float("nan")),
    "large counters": lambda: _count(1e308, 1e308),
    "counters of 64 bits": lambda: _count(2**64 - 1, -(2**63)),
    "no number": lambda: _count(float("nan"), 1.0),
    "infinite": lambda: _count(float("inf"), float("-inf")),
    "asked for text": lambda: _run_out(asked_bytes="a", free_bytes=[1], limit_bytes={}),
    "asked for no number": lambda: _run_out(asked_bytes=float("nan")),
    "asked for infinity": lambda: _run_out(asked_bytes=float("inf")),
    "asked for 64 bits": lambda: _run_out(asked_bytes=10**19, ledger=nested(400)),
    "step of text": lambda: _step("a"),
    "step of 64 bits": lambda: _step(2**64 - 1),
    "step of infinity": lambda: _step(float("inf")),
    "step of a list": lambda: _step([1]),
    "330 deep": lambda: rltrace.span("deep", value=nested(330)).__enter__(),
    "900 deep": lambda: rltrace.span("deep", value=nested(900)).__enter__(),
    "5000 deep": lambda: rltrace.span("deep", value=nested(5000)).__enter__(),
    "task of 63 bits": lambda: rltrace.span_at("c", 1, 2, lane=2**63 - 1),
    "the last time": lambda: rltrace.span_at("c", 2**63 - 2, 2**63 - 1),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("role", ["driver", "worker"])
def test_what_may_be_written_is_read(folder: Path, call: str, role: str) -> None:
    """By the summary in all its forms, and by every exporter."""
    rltrace.start(folder, role=role, rank=None if role == "driver" else 0)
    CALLS[call]()
    rltrace.stop()
    assert everything_reads(folder).lost_events == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: rltrace.span_at("c", 2**63, 2**63 + 5),
        lambda: rltrace.span_at("c", -1, 5),
        lambda: rltrace.span_at("c", 5, 4),
        lambda: rltrace.span_at("c", 1.5, 4),  # type: ignore[arg-type]
        lambda: rltrace.span_at("c", "1", 4),  # type: ignore[arg-type]
        lambda: rltrace.span_at("c", 1, 2, lane=2**63),
        lambda: rltrace.span_at("c", 1, 2, lane=10**30),
        lambda: rltrace.record.spans.counter_at("c", 2**63, 1),
        lambda: rltrace.record.spans.counter_at("c", -1, 1),
    ],
)
def test_impossible_time_is_lost(folder: Path, call: Callable[[], object]) -> None:
    """A time that no clock can show counts as lost.

    Counted where it is written, and nothing else is lost for it.
    """
    rltrace.start(folder)
    with rltrace.span("kept"):
        call()
    rltrace.stop()
    summary = everything_reads(folder)
    assert (summary.lost_events, [process.spans for process in summary.processes]) == (1, [1])
    assert summary.losses[0].misfit_records == summary.losses[0].torn_records == 0


REFUSED = {
    "rank": ["worker-1", float("inf"), 1.0, True, 2**63],
    "role": [5, ["a"]],
    "name": [5, {}],
    "device": ["gpu", 3],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values])
@pytest.mark.parametrize("by", ["start", "identify"])
def test_wrong_identity_is_ignored(
    folder: Path, capsys: pytest.CaptureFixture, field: str, value: Any, by: str
) -> None:
    """An identity of the wrong type is ignored.

    With a line that says so, and with what else is said kept.
    """
    announcement.complain_once.cache_clear()
    if by == "start":
        rltrace.start(folder, **{"role": "worker", field: value})
    else:
        rltrace.start(folder, role="worker")
        rltrace.identify(**{field: value, "other": 1})
    with rltrace.span("a"):
        pass
    rltrace.stop()
    assert capsys.readouterr().err.startswith(f"rltrace: ignored: {field} must be ")
    (process,) = Recording.open(folder).processes
    assert (process.rank, process.device) == (None, None)
    assert process.role == ("process" if (field, by) == ("role", "start") else "worker")
    everything_reads(folder)


def test_numpy_identity_is_kept(folder: Path) -> None:
    """An identity of numpy's types is kept.

    Numbers of numpy are numbers, and what a device has is text.
    """
    numpy = pytest.importorskip("numpy")
    rltrace.start(folder, rank=numpy.int64(3), device={"host": "h", "uuid": numpy.str_("u"), 1: numpy.float32(2)})
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    assert (process.rank, process.device) == (3, {"host": "h", "uuid": "u", "1": "2.0"})


def test_wrong_bound_is_ignored(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """A bound that is no number is ignored.

    Nothing is lost for it.
    """
    announcement.complain_once.cache_clear()
    rltrace.start(folder, max_bytes="1 GB")  # type: ignore[arg-type]
    for n in range(4000):
        with rltrace.span("a", n=n, filler="x" * 500):
            pass
    rltrace.stop()
    assert "ignored: max_bytes must be a whole number, not '1 GB'" in capsys.readouterr().err
    assert Recording.open(folder).lost_events == 0


SURROGATES = """
import sys, threading, rltrace
bad = sys.argv[2]
assert bad == "a\\udcff"
rltrace.start(sys.argv[1], role=bad, name=bad, device={bad: bad, "uuid": bad}, config={bad: bad})
rltrace.identify(name=bad + "!")

def work():
    with rltrace.span(bad, **{bad: bad}) as span:
        span.set(**{bad: {bad: bad}})
        rltrace.counter(bad, 1)
        rltrace.flow(bad, "out")
    rltrace.span_at(bad, 1, 2, **{bad: bad})
    with rltrace.typed_span(bad, **{bad: str})(bad): pass
    rltrace.unavailable(bad, bad)

thread = threading.Thread(target=work, name=bad)
thread.start()
thread.join()
rltrace.stop()
"""


def test_broken_text_gets_a_mark(folder: Path, process_of: Callable[[Path], Process]) -> None:
    """Text that cannot be decoded is read with a replacement mark.

    Bytes that are no UTF-8, as file names have: in roles, names, threads, command lines, spans and keys.
    """
    subprocess.run([sys.executable, "-c", SURROGATES, str(folder), b"a\xff"], check=True)
    summary = everything_reads(folder)
    assert summary.lost_events == 0 and summary.processes[0].spans == 3
    process = process_of(folder)
    spans = [event for event in process.events() if isinstance(event, Span)]
    assert [(span.name, span.args) for span in spans] == [
        ("a?", {"a?": "{'a\\udcff': 'a\\udcff'}"}), ("a?", {"a?": "a?"}), ("a?", {"a?": "a?"})
    ]  # fmt: skip
    assert (process.name, process.role, process.device) == ("a?!", "a?", {"a?": "a?", "uuid": "a?"})
    json.dumps(process.identity, ensure_ascii=False).encode()
    json.dumps(Recording.open(folder).manifest, ensure_ascii=False).encode()


NEW_HOST = ["unshare", "--user", "--map-root-user", "--uts"]


@pytest.mark.skipif(
    subprocess.run([*NEW_HOST, "true"], capture_output=True, check=False).returncode != 0,
    reason="no host name of its own can be given here",
)
def test_a_host_may_have_any_name(folder: Path) -> None:
    """The kernel takes any bytes for one; its processes are known to be alive and ended there all the same."""
    program = (
        "import ctypes, sys, rltrace\n"
        "assert ctypes.CDLL(None).sethostname(b'h\\xff', 2) == 0\n"
        f"rltrace.start({str(folder)!r})\n"
        "with rltrace.span('a'): pass\n"
        "from rltrace.read.recording import Recording\n"
        f"recording = Recording.open({str(folder)!r})\n"
        "assert recording.is_live and recording.processes[0].is_alive, recording.processes[0].host\n"
        "rltrace.stop()\n"
    )
    subprocess.run([*NEW_HOST, sys.executable, "-c", program], check=True)
    assert everything_reads(folder).processes[0].host == "h?"
