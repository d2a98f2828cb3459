"""Where a rank's idle seconds are, and what went on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recordings import Written, hook, sample, span, two_ranks, two_workers
from test_summary_screen import screen

from rltrace.analysis import Summary, summarize
from rltrace.analysis.idle import FIRST_STEP, RUN, STARTUP, STEADY_STEP, IdleGap
from rltrace.analysis.phases import RankStep
from rltrace.read.recording import Recording


def gaps(summary: Summary, of: str, lane: str = "rank 0") -> dict[tuple[str | None, str | None], IdleGap]:
    """By the phases they are between."""
    return {(gap.after, gap.before): gap for gap in summary.idle if gap.of == of and gap.lane == lane}


def loop(folder: Path) -> Recording:
    """Three steps of 10 s, the first of 20, of a driver, two ranks with an engine, and an agent loop."""
    written = Written(folder, ranks=2)
    begins = [(10, 20), (30, 10), (40, 10)]
    driver = [span("main", 0, 51), span("start", 0, 10)]
    for number, (begin, length) in enumerate(begins):
        driver.append(span("step", begin, begin + length, step=number))
        driver.append(span("plan", begin, begin + length - 0.5))
        driver.append(span("ray.call", begin + 5, begin + 7, method="Trainer.fit"))
        driver.append(span("reward", begin + 7, begin + 8))
    written.process("driver", *driver, role="driver", ended_s=51)
    for rank in range(2):
        device = {"host": "here", "uuid": f"GPU-{rank}"}
        worker, engine = [span("actor.build", 1, 4)], []
        for begin, _ in begins:
            engine += [span("rollout.generate", begin + 1, begin + 4 + rank), span("server.request", begin, begin + 6)]
            worker += [span("actor.update", begin + 8, begin + 9)]
        written.process(f"worker-{rank}", *worker, role="worker", rank=rank, device=device, ended_s=51)
        written.process(f"engine-{rank}", *engine, role="engine", rank=rank, device=device, ended_s=51)
    agent = [span("agent_loop.run", begin, begin + 6.5) for begin, _ in begins]
    written.process("agent", *agent, sample("tokens", 4, 1), ended_s=51)
    return written.read()


def test_idle_lies_between_two_phases(tmp_path: Path) -> None:
    """Each idle second lies between two phases, and other ranks say whom it waits for."""
    found = gaps(summarize(loop(tmp_path / "run")), STEADY_STEP)
    assert {between: (gap.seconds, gap.others_seconds, gap.count) for between, gap in found.items()} == {
        (None, "rollout.generate"): (1, 0, 1),
        ("rollout.generate", "reward"): (3, 1, 1),
        ("actor.update", None): (1, 0, 1),
    }
    assert next(iter(found)) == ("rollout.generate", "reward"), "what took most first"


def test_opened_last_in_the_gap(tmp_path: Path) -> None:
    """Each gap says what driver, rank and the rest had opened last."""
    found = gaps(summarize(loop(tmp_path / "run")), STEADY_STEP)["rollout.generate", "reward"]
    assert found.driver_seconds == {"Trainer.fit": 2, "plan": 1}
    assert found.own_seconds == {"server.request": 2}, "and then nothing"
    assert found.elsewhere_seconds == {"agent_loop.run": 2.5}


def test_earlier_spans_are_no_answer(tmp_path: Path) -> None:
    """What was open before the step is no answer."""
    found = gaps(summarize(loop(tmp_path / "run")), STEADY_STEP)["actor.update", None]
    assert (found.seconds, found.driver_seconds) == (1, {"plan": 0.5})


def test_phases_count_as_opened(tmp_path: Path) -> None:
    """Phases count among what was opened, and a rank is never elsewhere."""
    written = Written(tmp_path / "run")
    saves = [span("step", 0, 10, step=0), span("fit", 0, 10), span("checkpoint", 5, 9, phase=True)]
    written.process("driver", *saves, role="driver", ended_s=11)
    written.process("w", span("actor.update", 0, 4), span("write", 6, None), role="worker", rank=0, ended_s=11)
    written.process("server", span("server.request", 4, 9), rank=1, ended_s=11)
    written.process("scores", span("serve", 4, 10), span("reward_model.score", 5, 8, phase=True), ended_s=11)
    found = gaps(summarize(written.read()), STEADY_STEP)["actor.update", None]
    assert list(found.driver_seconds.items()) == [("checkpoint", 4), ("fit", 2)], "what took most first"
    assert found.own_seconds == {"write": 4}, "it was never over"
    assert found.elsewhere_seconds == {"serve": 3, "reward_model.score": 3}


def test_start_up_and_first_step(tmp_path: Path) -> None:
    """Start-up and first step have their own gaps."""
    summary = summarize(loop(tmp_path / "run"))
    startup, first = gaps(summary, STARTUP), gaps(summary, FIRST_STEP)
    assert {between: gap.seconds for between, gap in startup.items()} == {
        ("actor.build", None): 6,
        (None, "actor.build"): 1,
    }
    assert startup["actor.build", None].driver_seconds == {"start": 6}
    assert first["actor.update", None].seconds == 11
    assert not gaps(summary, RUN)


def odd_steps(folder: Path) -> Recording:
    """One step that was not recorded, one aborted, one that overlaps the next, and one that is open."""
    steps = [
        span("step", 10, 20, step=0, recorded=False),
        span("step", 20, 30, step=1, error="ValueError"),
        span("step", 30, 45, step=2),
        span("step", 40, 50, step=3),
        span("step", 50, None, step=4),
    ]
    phases = [span("actor.update", at, at + 4) for at in (1, 21, 27, 31, 41, 51)]
    written = Written(folder).process("driver", *steps, span("reward", 46, 48), role="driver", ended_s=60)
    written.process("w", *phases, span("rollout.sleep", 48, 48), span("rollout.generate", 58, None), rank=0, ended_s=61)
    return written.read()


def one_step(folder: Path, **args: Any) -> Recording:
    """The only one, and after it something else."""
    step = [span("step", 2, 10, step=0, **args), span("actor.update", 3, 4), span("actor.update", 11, 12)]
    return Written(folder).process("w", *step, rank=0, ended_s=13).read()


def aborted(folder: Path) -> Recording:
    return one_step(folder, error="ValueError")


def paused(folder: Path) -> Recording:
    return one_step(folder, recorded=False)


def no_driver(folder: Path) -> Recording:
    return two_workers(folder).read()


def driver_alone(folder: Path) -> Recording:
    """A driver whose reward is a phase, and nobody else has any."""
    work = [span("step", 0, 10, step=0), span("reward", 2, 5), span("plan", 5, 9)]
    return Written(folder).process("driver", *work, role="driver", ended_s=11).read()


def of_two_ranks(folder: Path) -> Recording:
    return two_ranks(folder).read()


RECORDED = [loop, of_two_ranks, odd_steps, one_step, aborted, paused, no_driver, driver_alone]


def in_no_phase(row: RankStep) -> float:
    """Seconds of a lane's step."""
    return sum(row.phases[name].seconds for name in ("start-up", "unlabelled", "idle") if name in row.phases)


@pytest.mark.parametrize("recorded", RECORDED)
def test_gaps_add_up_to_idle(tmp_path: Path, recorded: Callable[[Path], Recording]) -> None:
    """Gaps add up to the idle time of every lane."""
    summary = summarize(recorded(tmp_path / "run"))
    lanes = {row.lane for row in summary.phases if row.lane != "driver"} or {"driver"}
    assert {gap.lane for gap in summary.idle} == lanes
    for lane in lanes:
        rows = [row for row in summary.phases if row.lane == lane]
        over = [row for row in rows if row.step is not None and row.finished]
        steady = [in_no_phase(row) for row in over if row.steady]
        expected = {
            STARTUP if summary.steps else RUN: in_no_phase(rows[0]),
            FIRST_STEP: sum(in_no_phase(row) for row in over if not row.steady),
            STEADY_STEP: sum(steady) / len(steady) if steady else 0,
        }
        for of, seconds in expected.items():
            assert sum(gap.seconds for gap in gaps(summary, of, lane).values()) == pytest.approx(seconds, abs=1e-9)


def test_rankless_processes(tmp_path: Path) -> None:
    """Processes without a rank have gaps in steps of their own."""
    summary = summarize(two_workers(tmp_path / "run").read())
    of = {gap.lane: (gap.after, gap.before, gap.seconds) for gap in summary.idle if gap.of == STEADY_STEP}
    assert sorted(of.values()) == [("act", None, 2.0), ("act", None, 5.0)]


def test_a_recording_without_steps_is_one(tmp_path: Path) -> None:
    written = Written(tmp_path / "run")
    written.process("w", span("act", 1, 2, phase=True), span("act", 5, 6, phase=True), rank=0, ended_s=8)
    summary = summarize(written.read())
    assert {between: gap.seconds for between, gap in gaps(summary, RUN).items()} == {
        (None, "act"): 1,
        ("act", "act"): 3,
        ("act", None): 2,
    }
    assert {gap.of for gap in summary.idle} == {RUN}


def table(recording: Recording, title: str) -> list[str]:
    """The lines of a table of `--all` from its title to its caption, spaces as one."""
    lines = [" ".join(line.split()) for line in screen(recording, 150, whole=True)]
    at = lines.index(title)
    return [line for line in lines[at : lines.index("", at)] if not line.startswith("─")]


def test_all_shows_three_tables(tmp_path: Path) -> None:
    """`--all` shows tables for steady steps, the first step and the start-up."""
    recording = loop(tmp_path / "run")
    assert table(recording, "Idle and unlabelled, steady steps: mean of 2 ranks") == [
        "Idle and unlabelled, steady steps: mean of 2 ranks",
        "in no phase between seconds others busy meanwhile",
        "rollout.generate → reward 2.500 0.500 driver Trainer.fit 2.000, plan 0.500; rank server.request 1.500; "
        "elsewhere agent_loop.run 2.000",
        "step begins → rollout.generate 1.000 driver plan 1.000; rank server.request 1.000; "
        "elsewhere agent_loop.run 1.000",
        "actor.update → step ends 1.000 driver plan 0.500",
        "in no phase 4.500",
        "others busy: another rank was in a phase; "
        "meanwhile: the span, or the actor's method, that each had opened last in the step",
    ]
    assert table(recording, "Idle and unlabelled, step 0: mean of 2 ranks")[2].startswith(
        "actor.update → step ends 11.000 driver plan 10.500"
    )
    assert table(recording, "Idle and unlabelled, start-up: mean of 2 ranks")[-2:] == [
        "in no phase 7.000",
        "meanwhile: the span, or the actor's method, that each had opened last in the step",
    ]


def test_table_sums_small_gaps(
    tmp_path: Path,
) -> None:
    """A table names two of those that took a tenth, and adds up what took less than a millisecond."""
    spans = [span("act", 0, 1, phase=True), span("act", 2, 3, phase=True), span("act", 3.0004, 4, phase=True)]
    spans += [span("think", 3.0001, 3.0002), span("act", 4.0003, 5, phase=True), span("rest", 5.0002, 6, phase=True)]
    own = [span("a", 1, 1.3), span("b", 1.3, 1.5), span("c", 1.5, 2)]
    recording = Written(tmp_path / "run").process("w", *spans, *own, role="worker", pid=7, ended_s=6).read()
    assert table(recording, "Idle and unlabelled: mean of 1 process") == [
        "Idle and unlabelled: mean of 1 process",
        "in no phase between seconds meanwhile",
        "act → act 1.001 itself c 0.500, a 0.300",
        "1 shorter 200 µs",
        "in no phase 1.001",
        "meanwhile: the span, or the actor's method, that each had opened last in the step",
    ]
    slightly = [span("a", 0, 0.91), span("b", 0.91, 1), span("act", 1, 9, phase=True)]
    one = Written(tmp_path / "one").process("w", *slightly, role="worker", pid=7, ended_s=9)
    assert table(one.read(), "Idle and unlabelled: mean of 1 process")[2:4] == [
        "run begins → act 1.000 itself a 0.910",
        "in no phase 1.000",
    ]


def test_every_lane_counts_in_mean(tmp_path: Path) -> None:
    """A lane that is never idle or has another's name counts in the mean."""
    written = Written(tmp_path / "run")
    steps = [span("step", 10 * number, 10 * number + 10, step=number) for number in range(3)]
    written.process("driver", *steps, role="driver", ended_s=31)
    idle_of = {"a": (0, 0), "b": (5, 1), "c": (1, 7.1)}
    for rank, (name, (before, behind)) in enumerate(idle_of.items()):
        phases = [span("actor.update", begin + before, begin + 10 - behind) for begin in (0, 10, 20)]
        device = {"host": "here", "uuid": f"GPU-{rank}"}
        written.process(name, *phases, role="worker", rank=min(rank, 1), device=device, ended_s=31)
    recording = written.read()
    assert "Idle in a step 2.700 of 4.700 s from actor.update to the step's end" in screen(recording)
    assert table(recording, "Idle and unlabelled, steady steps: mean of 3 ranks")[2:5] == [
        "actor.update → step ends 2.700 2.700",
        "step begins → actor.update 2.000 2.000",
        "in no phase 4.700",
    ]


def test_notable_idle_on_first_screen(tmp_path: Path) -> None:
    """The first screen says where most of a notable idle time is."""
    lines = screen(loop(tmp_path / "run"))
    assert lines.count("Idle in a step 2.500 of 4.500 s from rollout.generate to reward") == 1
    busy = Written(tmp_path / "busy").process(
        "w", span("step", 0, 10, step=0), span("actor.update", 0.1, 9.8), role="worker", rank=0, ended_s=11
    )
    assert not [line for line in screen(busy.read()) if line.startswith("Idle")], "3 % of it"


def unlabelled(recording: Recording) -> tuple[float, float]:
    """Of the steady step of rank 0: seconds that are unlabelled, and idle."""
    summary = summarize(recording)
    (row,) = (row for row in summary.phases if row.rank == 0 and row.step is not None)
    assert sum(gap.unlabelled_seconds for gap in summary.idle if gap.of == STEADY_STEP) == pytest.approx(
        row.phases["unlabelled"].seconds
    )
    return row.phases["unlabelled"].seconds, row.phases["idle"].seconds


OF_HOOKS = hook(1, "m:f", emits=["fsdp.forward", "ray.get"], fires=1)


@pytest.mark.parametrize(
    ("work", "expected_s"),
    [
        ([], 0),
        ([span("fsdp.forward", 5, 6), span("fsdp.forward", 5.5, 7)], 2),
        ([span("gpu.fsdp.forward", 5, 8)], 3),
        ([span("fsdp.forward", 2, 3)], 0),  # inside the phase
        ([span("ray.get", 5, 9)], 0),  # it waits
        ([span("mine", 5, 9)], 0),  # nobody knows what it does
    ],
)
def test_unlabelled(tmp_path: Path, work: list[Any], expected_s: float) -> None:
    """Time in no phase in which a hook's span or the GPU says that the rank computed is not idle."""
    records = [span("step", 0, 10, step=0), span("actor.update", 1, 4), *work]
    written = Written(tmp_path / "run").process("w", *records, rank=0, hooks=(OF_HOOKS,), ended_s=10)
    assert unlabelled(written.read()) == pytest.approx((expected_s, 7 - expected_s))


@pytest.mark.parametrize(("percent", "expected_s"), [(100, 4), (50, 4), (49, 0)])
def test_unlabelled_by_processor_time(tmp_path: Path, percent: float, expected_s: float) -> None:
    """Between samples that no phase lies between; what a phase lies in may be the phase's."""
    written = Written(tmp_path / "run")
    written.process("w", span("step", 0, 10, step=0), span("actor.update", 1, 4), rank=0, ended_s=10)
    busy = [sample("process.cpu_percent/w", at, percent) for at in (0, 2, 5, 7, 9)]
    written.process("s", *busy, role="sampler", pid=7, ended_s=10)
    assert unlabelled(written.read()) == pytest.approx((expected_s, 7 - expected_s))
