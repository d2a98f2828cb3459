"""Spans that hooks made and the program's own are told apart by their records, whatever their names are."""

from __future__ import annotations

import asyncio
import colorsys
import json
from pathlib import Path

import pytest
from recordings import Written, hook, span

import rltrace
from rltrace.analysis.summary import summarize
from rltrace.events import Span
from rltrace.hooks.patching import PatchSet
from rltrace.read.recording import Process, Recording
from rltrace.record import manifest, spans
from rltrace.record.encoding import encode_anyhow

NAMES = ("fsdp.forward", "memory.edge", "gpu.fsdp.forward", "kernel.mm", "rollout.request")


@pytest.fixture
def recorded(tmp_path: Path) -> Process:
    """A program whose spans have the names that hooks give, with a hook at work in it."""
    folder = tmp_path / "run"
    rltrace.start(folder)
    recorder = spans.current()
    assert recorder is not None
    patches = PatchSet("mine", recorder)
    patches.span("colorsys:rgb_to_hsv", "fsdp.forward", lambda *_, **__: {"by": "hook"})
    own, of_hook = rltrace.typed_span("fsdp.forward", by=str), spans.automatic_typed_span("fsdp.forward", by=str)
    try:
        for name in NAMES:
            with rltrace.span(name, by="program"):
                colorsys.rgb_to_hsv(1, 1, 1)
            rltrace.span_at(name, 10, 20, by="program")
            spans.automatic_span_at(name, 10, 20, lane=3, by="hook")
        with own("program"), of_hook("hook"):
            pass
        asyncio.run(_in_task())
        rltrace.span("is open", by="program").__enter__()
        spans.automatic_span("is open", by="hook").__enter__()
    finally:
        patches.undo()
        rltrace.stop()
    (process,) = Recording.open(folder).processes
    return process


async def _in_task() -> None:
    async with spans.automatic_span("fsdp.forward", by="hook"), rltrace.span("fsdp.forward", by="program"):
        await asyncio.sleep(0)


def made(process: Process) -> list[Span]:
    return [event for event in process.events() if isinstance(event, Span)]


def test_the_record_says_who_made_a_span(recorded: Process) -> None:
    """Of spans, typed ones, finished ones, those of tasks and open ones alike."""
    found = made(recorded)
    assert len(found) == 4 * len(NAMES) + 2 + 2 + 2
    assert {(span.is_automatic, span.args["by"]) for span in found} == {(True, "hook"), (False, "program")}
    assert recorded.misfits == recorded.torn == recorded.orphans == recorded.unfit == 0
    assert {span.task != 0 for span in found[-4:-2]} == {True}


def test_own_span_with_a_hooks_name(recorded: Process) -> None:
    """A program's span that has the name of a hook's is the program's own."""
    summary = summarize(Recording.open(recorded.folder.parents[1]))
    own = {made.name: made.count for made in summary.own_spans}
    assert own == {**dict.fromkeys(NAMES, 2), "fsdp.forward": 4, "is open": 0}
    of_hooks = {made.name: made.count for made in summary.hook_spans}
    assert of_hooks == {"fsdp.forward": 8, "rollout.request": 1, "is open": 0}


def test_what_msgpack_refuses_costs_no_mark(tmp_path: Path) -> None:
    rltrace.start(tmp_path / "run")
    with spans.automatic_span("a", big=2**70):
        pass
    rltrace.stop()
    (found,) = made(Recording.open(tmp_path / "run").processes[0])
    assert (found.is_automatic, found.args) == (True, {"big": str(2**70)})
    assert encode_anyhow(spans.AutomaticSpan("a", 0, 1, {"b": 2}))[:3] == b"\x96\x00\xa1"


def test_damage_before_a_marked_record(tmp_path: Path) -> None:
    """Damage before a record of a hook costs no more than before another one."""
    rltrace.start(tmp_path / "run")
    for n in range(20):
        with spans.automatic_span("a", n=n):
            pass
    rltrace.stop()
    (process,) = Recording.open(tmp_path / "run").processes
    (segment,) = process.folder.glob("*.seg")
    content = bytearray(segment.read_bytes())
    content[content.index(b"\x96\x00\xa1a", 200)] = 0xC1
    segment.write_bytes(content)
    assert len([span for span in made(process) if span.is_automatic]) == 19
    assert process.torn == 1


def test_names_tell_where_no_record_is_marked(tmp_path: Path) -> None:
    """In a Recording that is older than the marks, names tell which spans hooks made."""
    hooks = (hook(1, "m:f", emits=["theirs"]),)
    events = [span(name, at, at + 1) for at, name in enumerate(("theirs", "mine", "gpu.fsdp.forward"))]
    written = Written(tmp_path / "run").process("one", *events, role="main", hooks=hooks, ended_s=9)
    written.process("two", *events, role="main", ended_s=9)
    for segment in written.folder.rglob("*.seg"):  # as it was: without a mark
        segment.write_bytes(segment.read_bytes().replace(b"\x97\x00", b"\x96"))
    file = written.folder / manifest.FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 1}))
    for process in Recording.open(written.folder).processes:
        assert [found.is_automatic for found in made(process)] == [True, False, True], process.key
    summary = summarize(Recording.open(written.folder))
    assert [(found.name, found.count) for found in summary.hook_spans] == [("theirs", 2)]
    assert [(found.name, found.count) for found in summary.own_spans] == [("mine", 2)]
