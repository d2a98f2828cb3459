"""The overhead measurement switches recording off in every process of a real run, and says in which steps."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from reference_runs import RLTRACE, TINY, write_config
from rltrace_reference import measure_overhead

from rltrace.analysis import summarize
from rltrace.analysis.overhead import FILE, read_overhead
from rltrace.events import STEP, Counter, Span
from rltrace.read.recording import Recording

PAIRS = 2

pytestmark = [pytest.mark.run, pytest.mark.timeout(900)]  # two whole runs: minutes each on a machine that others use


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One round: a traced run and one without hooks."""
    folder = tmp_path_factory.mktemp("overhead")
    config = write_config(folder, ranks=1, **TINY)
    command = ["overhead", str(config), "--out", str(folder / "out"), "--rounds", "1", "--pairs", str(PAIRS)]
    done = subprocess.run([*RLTRACE, *command], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "inconclusive: 2 pairs of steps, but 20 are needed" in done.stdout
    return folder / "out"


def test_switched_off_step_is_unrecorded(measured: Path) -> None:
    """No process records in a step that is switched off, and all do in the others."""
    recording = Recording.open(measured / "1-traced")
    events = {process: [*process.events()] for process in recording.processes if process.role != "sampler"}
    steps = [event for of_process in events.values() for event in of_process if event.name == STEP]
    off = [step for step in steps if step.args["recorded"] is False]
    on = [step for step in steps if step.args["recorded"] is True]
    assert (len(off), len(on)) == (PAIRS, PAIRS + measure_overhead.WARM_UP_STEPS)
    recorded = {process for process in events if process.role in ("driver", "worker", "engine")}
    assert sorted(process.role for process in recorded) == ["driver", "engine", "worker"]
    for process in recorded:
        assert len(process.pauses) == PAIRS
        for begin_ns, end_ns in process.pauses:
            inside = [event for event in events[process] if begin_ns < _at_ns(event) < end_ns]
            assert inside == [], process.name
        for step in on:
            inside = [event for event in events[process] if step.start_ns < _at_ns(event) < step.end_ns]
            assert inside, process.name
    work = {"fsdp.forward", "engine.step", "optimizer.step", "weight_sync.pack", "reward"}
    for step in off:
        during = {e.name for of in events.values() for e in of if step.start_ns < _at_ns(e) < step.end_ns}
        assert not during & work
    assert summarize(recording).complete
    assert recording.lost_events == 0


def test_unrecorded_steps_are_no_zeros(measured: Path) -> None:
    """Readers say which steps were not recorded, and make no zeros of them."""
    summary = summarize(Recording.open(measured / "1-traced"))
    off = {step.step for step in summary.steps if not step.recorded}
    assert len(off) == PAIRS
    assert not off & {row.step for row in summary.phases}
    assert all(row.phases["actor.update"].seconds > 0 for row in summary.phases if row.rank == 0 and row.step)


def test_every_process_measured_its_costs(measured: Path) -> None:
    """Every process measured its own costs, and the run without hooks recorded nothing."""
    found = read_overhead(measured, limit=0.005)
    assert {cost.process for cost in found.bookkeeping} == {"driver", "rank 0 worker", "rank 0 engine"}
    assert all(cost.spans > 0 and cost.span_ns > 0 for cost in found.bookkeeping)
    assert found.bookkept_cost is not None and 0 < found.bookkept_cost < 1
    assert [comparison.verdict for comparison in found.comparisons] == ["inconclusive"] * 2
    assert not (measured / "1-bare").exists()
    lines = (measured / "1-bare.jsonl").read_bytes().splitlines()
    assert len([msgspec.json.decode(line) for line in lines]) == 2 * PAIRS + measure_overhead.WARM_UP_STEPS


def test_unrecorded_phases_are_timed(measured: Path) -> None:
    """The phases of a step that is not recorded are timed too, and add up to it."""
    phases = ["rollout", "reward", "actor.old_log_prob", "ref.log_prob", "advantage", "actor.update"]
    for times in ("1-traced.jsonl", "1-bare.jsonl"):
        for step in map(msgspec.json.decode, (measured / times).read_bytes().splitlines()):
            assert list(step["phases"]) == phases
            assert step["seconds"] * 0.5 < sum(step["phases"].values()) <= step["seconds"]
    assert [row.what for row in read_overhead(measured, limit=0.005).phases] == phases


def test_whole_pairs_of_a_stopped_run(measured: Path, tmp_path: Path) -> None:
    """The whole pairs of a measurement that was stopped count."""
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    shutil.copy(measured / FILE, stopped)
    (stopped / "1-traced.jsonl").write_bytes(b"".join((measured / "1-traced.jsonl").read_bytes().splitlines(True)[:-1]))
    found = read_overhead(stopped, limit=0.005)
    assert [comparison.count for comparison in found.comparisons] == [PAIRS - 1, 0]
    assert (found.comparisons[1].cost, found.bookkept_cost) == (None, None)
    done = subprocess.run([*RLTRACE, "overhead", str(stopped)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "inconclusive: 1 pair of steps, but 20 are needed" in done.stdout
    assert "inconclusive: 0 rounds of runs, but 6 are needed" in done.stdout


def test_order_of_pairs_is_drawn() -> None:
    """Both kinds of step come first equally often, in an order that is drawn."""
    plan = measure_overhead.plan(20, seed=0)
    pairs = [tuple(on for pair, on in plan if pair == number) for number in range(20)]
    assert sorted(pairs) == [(False, True)] * 10 + [(True, False)] * 10
    assert pairs != [(True, False), (False, True)] * 10
    assert plan == measure_overhead.plan(20, seed=0) != measure_overhead.plan(20, seed=1)


def _at_ns(event: Span | Counter) -> int:
    return event.ts_ns if isinstance(event, Counter) else event.start_ns
