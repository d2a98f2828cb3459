"""What tracing costs is told honestly: a cost that is there is found, and no figure stands on too little."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from recordings import SECOND, Written, sample, span
from rich.console import Console

from rltrace.analysis import overhead
from rltrace.analysis.overhead import (
    LEAST_PAIRS,
    Arm,
    Measurement,
    TimedStep,
    bookkept_cost,
    bootstrap_interval,
    compare,
    process_costs,
    read_overhead,
    run_pairs,
    step_pairs,
)
from rltrace.cli import main
from rltrace.cli.overhead import plan
from rltrace.cli.tables.overhead import show, verdict_line
from rltrace.errors import RecordingError
from rltrace.events import MEMORY_EDGE
from rltrace.limits import LIMITS


def write_measurement(folder: Path, steps: list[TimedStep]) -> None:
    """A folder as `rltrace overhead` leaves it, of one traced run whose Recording is gone."""
    arm = Arm(round=1, times="1.jsonl", recording="run", load_before=0.0)
    measured = Measurement(config="c", command=[], host="h", cores=2, created_unix_ns=0, arms=[arm])
    (folder / overhead.FILE).write_bytes(msgspec.json.encode(measured))
    (folder / arm.times).write_bytes(b"\n".join(map(msgspec.json.encode, steps)))


def test_large_recording_needs_no_limits(tmp_path: Path) -> None:
    """A large Recording is read with --no-limits.

    `--no-limits` reaches the Recordings of a measurement, as it does those of other commands.
    """
    write_measurement(tmp_path, [])
    written = Written(tmp_path / "run").process("d", span("step", 0, 2, recorded=True), role="driver", ended_s=2)
    written.process("p", span("act", 0, 1), role="worker", ended_s=2)
    lines = written.folder / "processes" / "p" / "process.jsonl"
    with lines.open("a") as file:
        file.write(json.dumps(COSTS) + "\n")
    os.truncate(written.folder / "processes" / "p" / "000001.seg", LIMITS.segment_bytes + 1)
    spans = {}
    for option in ((), ("--no-limits",)):
        done = CliRunner().invoke(main, ["overhead", str(tmp_path), "--json", *option])
        assert done.exit_code == 0, done.output
        spans[option] = sum(cost["spans"] for cost in json.loads(done.stdout)["bookkeeping"])
    assert spans == {(): 0, ("--no-limits",): 1}


def pairs_of(cost: float, count: int, *, noise: float, seed: int) -> list[tuple[float, float]]:
    """Steps of 0.7 s that drift, each timed with an error of its own; recording makes one of a pair longer."""
    random = np.random.default_rng(seed)
    base = 0.7 * (1 + 0.05 * random.standard_normal(count))
    traced, plain = (base * (1 + noise * random.standard_normal(count)) for _ in range(2))
    return [*zip(traced * (1 + cost), plain, strict=True)]


@pytest.mark.parametrize("cost", [0.0, 0.02])
def test_interval_coverage(cost: float) -> None:
    """The interval holds the true cost as often as it says."""
    held = [
        low <= cost <= high
        for seed in range(200)
        for low, high in [bootstrap_interval(*zip(*pairs_of(cost, 20, noise=0.02, seed=seed), strict=True), seed)]
    ]
    assert 0.90 <= np.mean(held) <= 0.99


def test_interval_is_skewed_to_the_rare_side() -> None:
    """The interval reaches further to the side of rare values.

    Two pairs in twenty that took long may well be four; an interval with its ends confused reaches the other way.
    """
    pairs = [(0.7 + 0.001 * (n % 3), 0.7) for n in range(18)] + [(0.9, 0.7), (0.95, 0.7)]
    low, high = bootstrap_interval(*zip(*pairs, strict=True))
    cost = sum(traced for traced, _ in pairs) / sum(plain for _, plain in pairs) - 1
    assert 0 < 2 * (cost - low) < high - cost


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.01, 0.005, "established"),
        (-0.01, 0.006, "inconclusive"),
        (0.005, 0.006, "inconclusive"),
        (0.0051, 0.006, "exceeded"),
    ],
)
def test_whole_interval_decides(monkeypatch: pytest.MonkeyPatch, low: float, high: float, verdict: str) -> None:
    """Only a whole interval keeps or exceeds a limit."""
    monkeypatch.setattr(overhead, "bootstrap_interval", lambda *_: (low, high))
    assert compare("steps", "pair", 2, [(0.7, 0.7)] * 2, limit=0.005).verdict == verdict


def test_two_percent_is_found() -> None:
    """A cost of two percent is found."""
    found = compare("steps", "pair of steps", LEAST_PAIRS, pairs_of(0.02, 40, noise=0.005, seed=3), limit=0.005)
    assert found.low is not None and found.high is not None
    assert found.low < 0.02 < found.high and found.high - found.low < 0.01
    assert found.verdict == "exceeded"
    assert "at least +1." in verdict_line(found, 0.005)


def test_no_cost_is_around_zero() -> None:
    """No cost gives an interval around zero, and its upper end is what is claimed."""
    found = compare("steps", "pair of steps", LEAST_PAIRS, pairs_of(0.0, 40, noise=0.002, seed=4), limit=0.005)
    assert found.low is not None and found.high is not None
    assert found.low < 0 < found.high < 0.005
    assert found.verdict == "established"
    assert f"at most {100 * found.high:+.2f} %" in verdict_line(found, 0.005)


def test_noise_establishes_nothing() -> None:
    """If noise hides the cost, nothing is established."""
    found = compare("steps", "pair of steps", LEAST_PAIRS, pairs_of(0.0, 20, noise=0.1, seed=5), limit=0.005)
    assert found.verdict == "inconclusive"
    assert "inconclusive: too noisy to confirm 0.50%" in verdict_line(found, 0.005)


@pytest.mark.parametrize("count", [1, 3, LEAST_PAIRS - 1])
def test_few_pairs_establish_nothing(count: int) -> None:
    """Few pairs establish nothing, however alike they are."""
    found = compare("steps", "pair of steps", LEAST_PAIRS, [(0.7, 0.7)] * count, limit=0.005)
    assert (found.low, found.high, found.verdict) == (None, None, "inconclusive")
    assert f"{LEAST_PAIRS} are needed" in verdict_line(found, 0.005)


def test_unpaired_steps_are_not_compared() -> None:
    """A step without its partner and a step of the warm-up are not compared."""
    steps = [
        TimedStep(0, 9.0, True, None),
        TimedStep(1, 2.0, False, 0),
        TimedStep(2, 3.0, True, 0),
        TimedStep(3, 9.0, True, 1),
    ]
    assert step_pairs(steps) == [(3.0, 2.0)]


def test_cost_of_one_phase(tmp_path: Path) -> None:
    """A cost that lies in one phase is found there and in no other."""
    generator = np.random.default_rng(3)
    steps = []
    for pair in range(20):
        for recorded in (True, False):
            rollout_s, update_s = generator.normal(1, 0.001), generator.normal(2, 0.1) * (1.2 if recorded else 1)
            phases = {"rollout": rollout_s, "update": update_s}
            steps.append(TimedStep(len(steps), rollout_s + update_s, recorded, pair, phases))
    write_measurement(tmp_path, steps)
    rollout, update = read_overhead(tmp_path, limit=0.005).phases
    assert (rollout.what, rollout.verdict) == ("rollout", "established")
    assert (update.what, update.verdict) == ("update", "exceeded")
    assert update.low is not None and update.high is not None and update.low < 0.2 < update.high
    screen = Console(width=120, record=True, file=io.StringIO())
    show(read_overhead(tmp_path, limit=0.005), screen)
    rows = {row.split("  ")[1]: row for row in screen.export_text().splitlines() if row.startswith("  ")}
    assert " 20 " in rows["rollout"] and f"{100 * update.low:+.2f} % to {100 * update.high:+.2f} %" in rows["update"]


def test_no_phases_said_no_phases(tmp_path: Path) -> None:
    """A measurement whose steps did not name their phases has none."""
    write_measurement(tmp_path, [TimedStep(0, 1.0, True, 0), TimedStep(1, 1.0, False, 0)])
    assert read_overhead(tmp_path, limit=0.005).phases == []


def test_round_compares_same_steps() -> None:
    """A round compares the same steps of both runs, as far as both got."""

    def arm(number: int, recording: str | None) -> Arm:
        return Arm(round=number, times="", recording=recording, load_before=0.0)

    traced = [TimedStep(0, 9.0, True, None), *(TimedStep(n, 3.0 + n, n % 2 == 0, n // 2) for n in range(1, 7))]
    stopped = [TimedStep(0, 9.0, True, None), *(TimedStep(n, 2.0 + n, n % 2 == 0, n // 2) for n in range(1, 5))]
    arms = [arm(1, "1-traced"), arm(1, None), arm(2, None)]
    assert list(run_pairs(arms, [traced, stopped, stopped])) == [(6.0, 5.0)]
    assert list(run_pairs(arms[:1], [traced])) == []


def test_half_the_rounds_begin_traced() -> None:
    """Half the rounds begin with the traced run, and without rounds there is one alone."""
    assert plan(2) == [(1, True), (1, False), (2, False), (2, True)]
    assert plan(0) == [(1, True)]


def test_bookkeeping_of_recorded_steps(tmp_path: Path) -> None:
    """Bookkeeping counts what lies in recorded steps, times what each process measured."""
    written = Written(tmp_path / "run")
    steps = [span("step", at_s, at_s + 10, recorded=at_s == 10) for at_s in (10, 20, 30)]
    another_trainers = span("step", 40, 50)  # which says nothing of recording
    written.process("driver", *steps, another_trainers, role="driver", ended_s=60)
    written.process("of-a-rank", span("step", 12, 48), role="worker", rank=2, ended_s=60)
    for rank, events in enumerate((3, 5)):
        inside = [span("fsdp.forward", 11 + n, 11.5 + n) for n in range(events)]
        outside = [span("fsdp.forward", 5, 6), span("fsdp.forward", 25, 26)]
        edge = span(MEMORY_EDGE, 18, 18.25)
        samples = [sample("resident_bytes", at_s, 1) for at_s in (1, 12, 13, 45)]
        on_gpu = [span("gpu.fsdp.forward", 12, 13)] * rank
        written.process(
            f"worker-{rank}", *inside, *outside, *on_gpu, edge, *samples, role="worker", rank=rank, ended_s=60
        )
    for folder in (tmp_path / "run" / "processes").iterdir():
        with (folder / "process.jsonl").open("a") as lines:
            costs = {"span": 1000.0, "counter": 100.0, "flow": 10.0, "device_span": 9000.0}
            lines.write(json.dumps({"kind": "cost"} | costs) + "\n")

    found = {cost.process: cost for cost in process_costs(written.read())}
    slower = found["rank 1 worker"]
    assert (slower.spans, slower.device_spans, slower.samples, slower.arrows) == (6 / 2, 1 / 2, 3 / 2, 0), "of a step"
    assert slower.events_seconds == pytest.approx((6 * 1e-6 + 9e-6 + 3 * 1e-7) / 2)
    assert slower.looks_seconds == pytest.approx(0.25 / 2)
    expected_s = slower.seconds + found["driver"].seconds
    assert bookkept_cost([*found.values()], 10.0) == pytest.approx(expected_s / 10)


def test_unmeasured_process_is_left_out(tmp_path: Path) -> None:
    """A process that measured no cost is left out, and no share is made up."""
    written = Written(tmp_path / "run")
    written.process("driver", span("step", 10, 20, recorded=True), role="driver", ended_s=50)
    assert process_costs(written.read()) == []
    assert bookkept_cost([], 10.0) is None


COSTS = {"kind": "cost", "span": 1000.0, "counter": 100.0, "flow": 10.0}


def test_worker_with_another_clock(tmp_path: Path) -> None:
    """A worker with another clock is counted in the steps of the run.

    Its own is 5 s ahead: what it calls 17 s is 12 s of the run's.
    """
    written = Written(tmp_path / "run")
    step = span("step", 10, 20, recorded=True)
    written.process("driver", step, role="driver", realtime_ns=100 * SECOND, ended_s=50)
    far = [span("fsdp.forward", at_s, at_s + 0.1) for at_s in (11, 17, 22, 24)]
    written.process("worker", *far, role="worker", rank=0, boot_id="another", realtime_ns=95 * SECOND, ended_s=50)
    with (tmp_path / "run" / "processes" / "worker" / "process.jsonl").open("a") as lines:
        lines.write(json.dumps(COSTS) + "\n")
    assert [cost.spans for cost in process_costs(written.read())] == [3]


def test_bookkept_share_of_last_run(tmp_path: Path) -> None:
    """The last run's bookkeeping is a share of a step that was not recorded."""
    arms = [
        Arm(round=number, times=f"{number}.jsonl", recording=f"run-{number}", load_before=0.0) for number in (1, 2, 3)
    ]
    for arm, spans in zip(arms[:2], (1, 2), strict=True):  # the third was stopped before its first step
        steps = [TimedStep(0, 0.004, True, 0), TimedStep(1, 0.002, False, 0)]
        (tmp_path / arm.times).write_bytes(b"\n".join(map(msgspec.json.encode, steps)))
        written = Written(tmp_path / f"run-{arm.round}")
        inside = [span("reward", 11, 12)] * spans
        written.process("driver", span("step", 10, 20, recorded=True), *inside, role="driver", ended_s=50)
        with (tmp_path / f"run-{arm.round}" / "processes" / "driver" / "process.jsonl").open("a") as lines:
            lines.write(json.dumps(COSTS) + "\n")
    measured = Measurement(config="c", command=[], host="h", cores=2, created_unix_ns=0, arms=arms)
    (tmp_path / overhead.FILE).write_bytes(msgspec.json.encode(measured))
    found = read_overhead(tmp_path, limit=0.005)
    assert [cost.spans for cost in found.bookkeeping] == [3], "a step and what is in it"
    assert found.bookkept_cost == pytest.approx(3 * 1e-6 / 0.002)
    assert [(comparison.count, comparison.verdict) for comparison in found.comparisons] == [
        (2, "inconclusive"),
        (0, "inconclusive"),
    ]


def test_no_measurement_says_what_to_do(tmp_path: Path) -> None:
    """A folder without a measurement says how to make one."""
    with pytest.raises(
        RecordingError, match=r"no measurement of overhead here.*make one with `rltrace overhead CONFIG`"
    ):
        read_overhead(tmp_path, limit=0.005)
