"""Beside a run, the oldest steps are made brief before the disk budget is spent, and totals stay exact."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import budgeted_runs
import long_run
import pytest

import rltrace
from rltrace.analysis.summary import Summary, summarize
from rltrace.events import Counter as Sample
from rltrace.events import Span
from rltrace.host import clock
from rltrace.read import removed
from rltrace.read.recording import Recording
from rltrace.record import disk_budget, spans
from rltrace.record.disk_account import DiskAccount
from rltrace.run import disk_keeper
from rltrace.run.brief import DamagedError, Form, Steps, brief
from rltrace.run.disk_keeper import Keeper

MIB = 1 << 20
BUDGET = 6 * MIB
STEPS = 200


def record(folder: Path, steps: int, look: Callable[[], None], *, per_step: int = 200) -> None:
    """Record steps with all that stays and much that goes, and look at the budget after each."""
    rltrace.start(folder, role="driver")
    work = spans.automatic_typed_span("fsdp.forward", module=str)
    for step in range(steps):
        with rltrace.span("step", step=step, tokens=100 + step):
            with rltrace.phase("weight_sync"), spans.automatic_span("weight_sync.gather", bytes=64, tensors=2):
                rltrace.flow(f"sync {step}", "out")
            with rltrace.phase("actor.update"):
                for n in range(per_step):
                    with work(f"layers.{n}" * 20), rltrace.span("own", n=n):
                        rltrace.counter("loss", n / 2)
            now_ns = clock.now_ns()
            spans.automatic_span_at("rollout.request", now_ns - 500, now_ns, lane=3, tokens=7)
            with spans.automatic_span("memory.edge"):
                rltrace.counter("actor.params_bytes", 5000 + step)
            try:
                with rltrace.span("fails"):
                    raise KeyError(step)
            except KeyError:
                pass
        look()
    rltrace.stop()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that wrote three times its budget, with a keeper beside it."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(disk_budget.VARIABLE, str(BUDGET))
        keepers: list[Keeper] = []

        def look() -> None:
            if not keepers:
                keepers.append(Keeper(folder, DiskAccount(folder, "keeper-1-1")))
            keepers[0].look()
            assert budgeted_runs.disk_bytes(folder) <= BUDGET

        record(folder, STEPS, look)
    return folder


@pytest.fixture(scope="module")
def summary(kept: Path) -> Summary:
    return summarize(Recording.open(kept))


def test_nothing_is_lost(summary: Summary) -> None:
    """The processes themselves dropped nothing, and readers find nothing damaged."""
    assert summary.losses == [] and summary.complete


def test_totals_are_exact(summary: Summary) -> None:
    """The number of spans of each name is what it was, whatever went."""
    count = {span.name: span.count for span in [*summary.own_spans, *summary.hook_spans]}
    assert count == {"own": 200 * STEPS, "fails": STEPS, "fsdp.forward": 200 * STEPS, "rollout.request": STEPS}
    (gone,) = summary.removed
    assert 10_000 < gone.spans < 400 * STEPS and gone.samples > 1000 and gone.first_step == 0


def test_kept_steps_are_whole(kept: Path, summary: Summary) -> None:
    """A step is there with every span, or is said to be brief; the newest are whole, and only those are steady."""
    (process,) = Recording.open(kept).processes
    events = list(process.events())
    steps = {e.args["step"]: e for e in events if isinstance(e, Span) and e.name == "step"}
    own = Counter(
        next(number for number, step in steps.items() if step.start_ns <= e.start_ns < (step.end_ns or 0))
        for e in events
        if isinstance(e, Span) and e.name == "own"
    )
    is_brief = {step.step: step.brief for step in summary.steps}
    assert len(is_brief) == STEPS and 20 < sum(is_brief.values()) < STEPS
    assert all(own[step] == 200 for step, short in is_brief.items() if not short)
    assert sum(own[step] for step in range(10)) < 10, "the oldest are brief, but for spans over two segments"
    assert summary.steady is not None and summary.steady.steps == [n for n, short in is_brief.items() if not short]


def test_what_figures_need_stays(kept: Path, summary: Summary) -> None:
    """Of a brief step there are its phases, its memory at the boundaries, its sync, its requests and its errors."""
    assert len({row.step for row in summary.phases if row.step is not None}) == STEPS
    assert len(summary.requests_by_step) == STEPS and len(summary.weight_sync) == STEPS
    assert sum(error.count for error in summary.errors) == STEPS
    (process,) = Recording.open(kept).processes
    events = list(process.events())
    assert len([e for e in events if isinstance(e, Sample) and e.name == "actor.params_bytes"]) == STEPS
    assert len([e for e in events if isinstance(e, Span) and e.name == "memory.edge"]) == STEPS
    assert [step.tokens for step in summary.steps] == [100 + step for step in range(STEPS)]


def test_old_totals_are_merged(folder: Path, monkeypatch: pytest.MonkeyPatch, summary: Summary, tmp_path: Path) -> None:
    """What is a day old becomes totals of a hundred steps, of phases and errors too, and no total changes."""
    monkeypatch.setenv(disk_budget.VARIABLE, str(BUDGET))
    monkeypatch.setattr(disk_keeper, "MERGED_AFTER_NS", 0)
    monkeypatch.setattr(disk_keeper, "MOST_LINES_BYTES", 1)
    keepers: list[Keeper] = []

    def look() -> None:
        if not keepers:
            keepers.append(Keeper(folder, DiskAccount(folder, "keeper-1-1")))
        keepers[0].look()
        assert budgeted_runs.disk_bytes(folder) <= BUDGET

    record(folder, STEPS, look)
    merged = summarize(Recording.open(folder))
    of = {span.name: span.count for span in [*summary.own_spans, *summary.hook_spans]}
    assert {span.name: span.count for span in [*merged.own_spans, *merged.hook_spans] if span.name in of} == of
    (process,) = Recording.open(folder).processes
    totals = process.removed.totals
    assert {(group.first_step, group.last_step) for group in totals if group.name == "step"} >= {(0, 99)}
    errors = sum(total.many for group, total in totals.items() if group.error == "KeyError")
    assert errors + sum(error.count for error in merged.errors) == STEPS
    assert len(merged.steps) + sum(total.many for group, total in totals.items() if group.name == "step") == STEPS
    assert (process.folder / removed.FILE).stat().st_size < 100_000


def test_a_line_that_did_not_come_true_does_not_count(kept: Path, tmp_path: Path) -> None:
    """If the keeper was killed before it replaced a segment, what it wrote down does not count."""
    (process,) = Recording.open(kept).processes
    whole = [path for path in sorted(process.folder.glob("*.seg")) if path.name not in process.removed.segments][-1]
    lines = process.folder / removed.FILE
    before = lines.read_bytes()
    disk_keeper._append(
        lines,
        {
            "segment": whole.name,
            "bytes": 17,
            "crc32": 1,
            "spans": [[0, 0, "own", None, False, None, 5, 5, 1]],
            "samples": 1,
            "flows": 0,
        },
    )
    try:
        again = Recording.open(kept).processes[0].removed
        assert again.totals == process.removed.totals and again.samples == process.removed.samples
    finally:
        lines.write_bytes(before)


@pytest.mark.parametrize("form", list(Form))
def test_damage_is_left_alone(form: Form) -> None:
    """A segment with something else than records in it is not made brief."""
    with pytest.raises(DamagedError):
        brief(b"\x95\xa1a\x00\x01\xc0\xc3garbage", {}, Steps([], [], []), 100, form)


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("content", [b"", bytes(4096)])
def test_nothing_is_left_of_nothing(content: bytes, form: Form) -> None:
    """A segment that is gone, or in which no record is, is empty in brief."""
    made = brief(content, {}, Steps([], [], []), 100, form)
    assert (made.content, made.totals, made.samples, made.flows) == (b"", {}, 0, 0)


def test_a_segment_may_go_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may drop a segment that the keeper has just listed; the keeper goes on with the others."""
    monkeypatch.setenv(disk_budget.VARIABLE, str(BUDGET))
    list_closed = Keeper._closed

    def list_and_drop(keeper: Keeper) -> object:
        found = list_closed(keeper)
        if not dropped:
            dropped.append(keeper._account.remove(found[0].path))
        return found

    dropped: list[int | None] = []
    keepers: list[Keeper] = []

    def look() -> None:
        if not keepers:
            keepers.append(Keeper(folder, DiskAccount(folder, "keeper-1-1")))
        keepers[0].look()

    monkeypatch.setattr(Keeper, "_closed", list_and_drop)
    record(folder, 200, look)
    summary = summarize(Recording.open(folder))
    assert [loss.dropped_bytes for loss in summary.losses] == dropped and summary.removed


def test_exec_keeps_within_its_budget(tmp_path: Path) -> None:
    """Under `rltrace exec` steps are made brief while the run goes on, and its processes drop nothing.

    The program waits where the keeper is behind, as it may be on a machine that is busy.
    """
    folder = tmp_path / "run"
    program = (
        "import pathlib, sys, time, rltrace\n"
        f"sys.path.append({str(Path(budgeted_runs.__file__).parent)!r})\n"
        "from budgeted_runs import disk_bytes\n"
        "for step in range(75):\n"
        "    with rltrace.span('step', step=step):\n"
        "        for n in range(1500):\n"
        "            with rltrace.span('own', n=n, filler='x' * 60): pass\n"
        "        time.sleep(0.04)\n"
        "    until = time.monotonic() + 60\n"
        f"    while disk_bytes(pathlib.Path({str(folder)!r})) > 6_000_000 and time.monotonic() < until:\n"
        "        time.sleep(0.02)\n"
    )
    command = [sys.executable, "-m", "rltrace", "exec", "--out", str(folder), "--max-disk", "8MB", "--"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLTRACE_")}
    done = subprocess.run(
        [*command, sys.executable, "-c", program], check=False, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and "at most 8 MB (--max-disk)" in done.stderr
    assert "not traced" not in done.stderr and "brief" not in done.stderr
    assert budgeted_runs.disk_bytes(folder) <= 8_000_000
    found = summarize(Recording.open(folder))
    assert {span.name: span.count for span in found.own_spans} == {"own": 75 * 1500}
    assert len(found.steps) == 75 and found.removed and found.losses == []


def test_minutes_of_a_long_run(tmp_path: Path) -> None:
    """Memory, files and descriptors of a traced process stay as they are while old steps become brief.

    So fast that the keeper can follow on two old cores, with other tests beside it: else the process drops segments.
    """
    long_run.check(long_run.simulate(tmp_path / "run", hours=0.6, speed=100, budget_bytes=16 << 20))
