"""Where a rank's idle seconds are, and what went on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recordings import Written, sample, span, two_ranks, two_workers
from test_summary_screen import screen

from rltrace.analysis import Summary, summarize
from rltrace.analysis.idle import FIRST_STEP, RUN, STARTUP, STEADY_STEP, IdleGap
from rltrace.recording import Recording


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


def test_each_idle_second_lies_between_two_phases_and_others_say_whom_it_waits_for(tmp_path: Path) -> None:
    found = gaps(summarize(loop(tmp_path / "run")), STEADY_STEP)
    assert {between: (gap.seconds, gap.others_seconds, gap.count) for between, gap in found.items()} == {
        (None, "rollout.generate"): (1, 0, 1),
        ("rollout.generate", "reward"): (3, 1, 1),
        ("actor.update", None): (1, 0, 1),
    }
    assert next(iter(found)) == ("rollout.generate", "reward"), "what took most first"


def test_each_gap_says_what_driver_rank_and_the_rest_had_opened_last(tmp_path: Path) -> None:
    found = gaps(summarize(loop(tmp_path / "run")), STEADY_STEP)["rollout.generate", "reward"]
    assert found.driver_seconds == {"Trainer.fit": 2, "plan": 1}
    assert found.own_seconds == {"server.request": 2}, "and then nothing"
    assert found.elsewhere_seconds == {"agent_loop.run": 2.5}


def test_what_was_open_before_the_step_is_no_answer(tmp_path: Path) -> None:
    found = gaps(summarize(loop(tmp_path / "run")), STEADY_STEP)["actor.update", None]
    assert (found.seconds, found.driver_seconds) == (1, {"plan": 0.5})


def test_start_up_and_first_step_have_their_own(tmp_path: Path) -> None:
    summary = summarize(loop(tmp_path / "run"))
    startup, first = gaps(summary, STARTUP), gaps(summary, FIRST_STEP)
    assert {between: gap.seconds for between, gap in startup.items()} == {
        ("actor.build", None): 6,
        (None, "actor.build"): 1,
    }
    assert startup["actor.build", None].driver_seconds == {"start": 6}
    assert first["actor.update", None].seconds == 11
    assert not gaps(summary, RUN)


@pytest.mark.parametrize("recorded", [loop, lambda folder: two_ranks(folder).read()], ids=["loop", "two ranks"])
def test_they_add_up_to_the_idle_of_every_rank(tmp_path: Path, recorded: Callable[[Path], Recording]) -> None:
    summary = summarize(recorded(tmp_path / "run"))
    assert summary.steady is not None
    for lane in (lane for lane in summary.steady.lanes if lane.rank is not None):
        total = sum(gap.seconds for gap in gaps(summary, STEADY_STEP, lane.lane).values())
        assert total == pytest.approx(lane.phases["idle"].mean_seconds, abs=1e-9)
        startup = sum(gap.seconds for gap in gaps(summary, STARTUP, lane.lane).values())
        (before,) = [row for row in summary.phases if row.step is None and row.lane == lane.lane]
        assert startup == pytest.approx(before.phases["idle"].seconds, abs=1e-9)


def test_processes_without_a_rank_have_theirs_in_steps_of_their_own(tmp_path: Path) -> None:
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


def test_all_of_it_is_a_table_for_steady_steps_the_first_and_the_start_up(tmp_path: Path) -> None:
    lines = screen(loop(tmp_path / "run"), whole=True)
    for steps in ("steady steps", "step 0", "start-up"):
        assert lines.count(f"Idle, {steps}: mean of 2 ranks") == 1
    at = lines.index("Idle, steady steps: mean of 2 ranks")
    rows = [" ".join(line.split()) for line in lines[at + 1 : at + 9]]
    assert rows[0] == "idle between seconds of it others meanwhile"
    assert rows[2].startswith("rollout.generate → reward 2.500 0.500 driver Trainer.fit 2.000, plan 0.500")


def test_the_first_screen_says_where_most_of_a_notable_idle_time_is(tmp_path: Path) -> None:
    lines = screen(loop(tmp_path / "run"))
    assert lines.count("Idle in a step 2.500 of 4.500 s from rollout.generate to reward") == 1
    busy = Written(tmp_path / "busy")
    busy.process(
        "w", span("step", 0, 10, step=0), span("actor.update", 0.1, 9.8), role="worker", rank=0, ended_s=11
    )  # 3 % of it
    assert not [line for line in screen(busy.read()) if line.startswith("Idle")]
