"""`--record-steps` and `--record-ranks`: in full only what is asked, and phases, memory and errors always."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import rltrace
from rltrace.analysis.summary import summarize
from rltrace.events import Counter as Sample
from rltrace.events import Span
from rltrace.read.recording import Recording
from rltrace.record import chosen_steps, spans
from rltrace.record.step_numbers import numbers

Spans = Callable[..., list[Span]]


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("3", {3}),
        ("3,10", {3, 10}),
        ("10-12", {10, 11, 12}),
        ("every:20", {0, 20, 40}),
        ("1-2,every:25", {0, 1, 2, 25, 50}),
    ],
)
def test_steps_are_read(text: str, chosen: set[int]) -> None:
    """Numbers, ranges and periods, and all that they name."""
    assert {number for number in range(51) if numbers(text, has_periods=True).has(number)} == chosen


@pytest.mark.parametrize("text", ["", "x", "3-1", "every:0", "1-", "-4", "every:x"])
def test_nonsense_is_refused(text: str) -> None:
    """What names no steps is refused, with an example."""
    with pytest.raises(ValueError, match=r"write 3, 100-110, every:50 or"):
        numbers(text, has_periods=True)
    with pytest.raises(ValueError, match=r"'every:3' is neither a number nor a range; write 3, 100-110 or 1,5-7"):
        numbers("every:3")


def work(steps: int, typed: Callable[..., spans.TypedSpan]) -> None:
    """Some steps, each with everything that can be recorded."""
    for step in range(steps):
        with rltrace.span("step", step=step) as whole, rltrace.phase("actor.update"):
            with rltrace.span("own"), typed(7) as span:
                span.set(late=1)
                rltrace.counter("loss", 0.5)
                rltrace.flow("arrow", "out")
            rltrace.counter("actor.params_bytes", 100)
            now_ns = rltrace.now_ns() if hasattr(rltrace, "now_ns") else 10**9
            rltrace.span_at("at", now_ns, now_ns)
            with spans.automatic_span("memory.edge"):
                pass
            for failing in (lambda: rltrace.span("fails", n=1), lambda: typed(8)):
                try:
                    with failing() as span:
                        span.set(late=2)
                        raise KeyError("why")
                except KeyError:
                    pass
            whole.set(tokens=5)


def test_only_chosen_steps_are_full(folder: Path, monkeypatch: pytest.MonkeyPatch, spans_of: Spans) -> None:
    """Spans, samples and arrows of other steps are not recorded; phases, memory and errors are."""
    monkeypatch.setenv(chosen_steps.STEPS_VARIABLE, "2,every:5")
    rltrace.start(folder, role="driver")
    work(8, rltrace.typed_span("typed", n=int))
    rltrace.stop()
    found = spans_of(folder)
    whole = Counter(span.name for span in found if "error" not in span.args)
    assert whole == {"step": 8, "actor.update": 8, "memory.edge": 8, "own": 3, "typed": 3, "at": 3}
    failed = [span for span in found if "error" in span.args]
    assert Counter(span.name for span in failed) == {"fails": 8, "typed": 8}
    assert all(span.args["late"] == 2 and span.args["error"] == "KeyError" for span in failed)
    assert {span.args["n"] for span in failed} == {1, 8}
    (process,) = Recording.open(folder).processes
    events = list(process.events())
    assert Counter(event.name for event in events if isinstance(event, Sample)) == {
        "actor.params_bytes": 8,
        "loss": 3,
    }
    assert process.orphans == process.torn == process.lost_events == 0
    summary = summarize(Recording.open(folder))
    assert [step.step for step in summary.steps if not step.brief] == [0, 2, 5]
    assert summary.steady is not None and summary.steady.steps == [2, 5]
    assert len([row for row in summary.phases if row.step is not None]) == 8


def test_everything_after_it_is_as_before(folder: Path, monkeypatch: pytest.MonkeyPatch, spans_of: Spans) -> None:
    """A recording that asks for nothing gets everything, after one in the same process that did not."""
    typed = rltrace.typed_span("typed", n=int)
    monkeypatch.setenv(chosen_steps.STEPS_VARIABLE, "100")
    rltrace.start(folder.with_name("brief"))
    work(2, typed)
    between = typed(3)
    between.__enter__()
    rltrace.stop()
    monkeypatch.delenv(chosen_steps.STEPS_VARIABLE)
    rltrace.start(folder)
    between.__exit__(None)
    work(2, typed)
    rltrace.stop()
    assert spans._make_span is spans.LiveSpan
    assert Counter(span.name for span in spans_of(folder)) == {
        "step": 2, "actor.update": 2, "memory.edge": 2, "own": 2, "typed": 4, "at": 2, "fails": 2,
    }  # fmt: skip
    (process,) = Recording.open(folder).processes
    assert process.orphans == 0, "the end of a span whose beginning was not recorded"


def test_ranks_are_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch, spans_of: Spans) -> None:
    """Of a rank that is not chosen nothing is in full, whichever step it is."""
    monkeypatch.setenv(chosen_steps.RANKS_VARIABLE, "0,8-15")
    for rank in (0, 1, 9):
        rltrace.start(folder.with_name(f"rank {rank}"), rank=rank)
        work(2, rltrace.typed_span("typed", n=int))
        rltrace.stop()
    own = [len(spans_of(folder.with_name(f"rank {rank}"), "own")) for rank in (0, 1, 9)]
    assert own == [2, 0, 2]


def test_tasks_are_brief_too(folder: Path, monkeypatch: pytest.MonkeyPatch, spans_of: Spans) -> None:
    """`async with` of a span that is not recorded works as of any other."""
    monkeypatch.setenv(chosen_steps.STEPS_VARIABLE, "100")

    async def main() -> None:
        async with rltrace.span("quiet"):
            await asyncio.sleep(0)
        with pytest.raises(KeyError):
            async with rltrace.span("fails"):
                raise KeyError(1)

    rltrace.start(folder)
    asyncio.run(main())
    rltrace.stop()
    assert [span.name for span in spans_of(folder)] == ["fails"]


def test_other_processes_follow(tmp_path: Path) -> None:
    """A process without steps of its own records in full while a chosen step of another one runs."""
    worker = (
        "import sys, rltrace\n"
        "for line in sys.stdin:\n"
        "    with rltrace.phase('actor.update'):\n"
        "        with rltrace.span('own', step=int(line)): pass\n"
        "    print(flush=True)\n"
    )
    driver = (
        "import subprocess, sys, rltrace\n"
        "worker = subprocess.Popen([sys.executable, 'worker.py'], stdin=-1, stdout=-1, text=True)\n"
        "for step in range(6):\n"
        "    with rltrace.span('step', step=step):\n"
        "        print(step, file=worker.stdin, flush=True)\n"
        "        worker.stdout.readline()\n"
        "worker.stdin.close()\n"
        "worker.wait()\n"
    )
    (tmp_path / "worker.py").write_text(worker)
    (tmp_path / "driver.py").write_text(driver)
    command = [sys.executable, "-m", "rltrace", "exec", "--out", "run", "--sample", "0", "--record-steps", "1,3-4"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLTRACE_")}
    subprocess.run([*command, "--", sys.executable, "driver.py"], cwd=tmp_path, check=True, env=environment)
    processes = Recording.open(tmp_path / "run").processes
    events = [event for process in processes for event in process.events() if isinstance(event, Span)]
    assert [event.args["step"] for event in events if event.name == "own"] == [1, 3, 4]
    assert len([event for event in events if event.name == "actor.update"]) == 6
