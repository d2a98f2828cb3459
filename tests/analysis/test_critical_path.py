"""What a step waited for: paths that are known, a rank that is slowed down, and steps that have no one path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from planted_runs import CLOSE, PlantedRun
from recordings import Written, span
from shipped import VERL, why_of

from rltrace.analysis.findings import Why, why
from rltrace.analysis.findings.critical_path import CriticalPath
from rltrace.analysis.summary import analyse
from rltrace.cli import main

INJECTED = 0.5


def path_of(judged: Why) -> CriticalPath:
    assert judged.critical_path is not None, judged.no_path
    return judged.critical_path


def bound(path: CriticalPath, what: str) -> float:
    (found,) = [one.bound_seconds for one in path.what_ifs if one.what.startswith(what)]
    return found


def written(folder: Path, driver: list[Any], *ranks: list[Any], ended_s: float = 40) -> Why:
    run = Written(folder).process("d", *driver, role="driver", ended_s=ended_s)
    for rank, records in enumerate(ranks):
        run.process(f"w{rank}", *records, role="worker", rank=rank, pid=rank + 2, ended_s=ended_s)
    return why(analyse(run.read()))


def test_known_path(tmp_path: Path) -> None:
    """The path goes through the rank that is done last, the driver, and what nobody marked; it is the whole step."""
    steps = [span("step", 10 * n, 10 * n + 10, step=n) for n in range(3)]
    reward = [span("reward", 10 * n + 5, 10 * n + 6) for n in range(3)]
    first = [record for n in range(3) for record in (
        span("rollout.generate", 10 * n + 1, 10 * n + 4), span("actor.update", 10 * n + 6.5, 10 * n + 9))]  # fmt: skip
    second = [record for n in range(3) for record in (
        span("rollout.generate", 10 * n + 1, 10 * n + 5), span("actor.update", 10 * n + 6.5, 10 * n + 8))]  # fmt: skip
    path = path_of(written(tmp_path / "run", [*steps, *reward], first, second))
    assert [(one.phase, one.after, one.before, one.seconds, one.lanes) for one in path.parts] == [
        (None, None, "rollout.generate", 1.0, {}),
        ("rollout.generate", None, None, 4.0, {"rank 1": 2}),
        ("reward", None, None, 1.0, {"driver": 2}),
        (None, "reward", "actor.update", 0.5, {}),
        ("actor.update", None, None, 2.5, {"rank 0": 2}),
        (None, "actor.update", None, 1.0, {}),
    ]
    assert [(one.start_seconds, one.end_seconds, one.lane) for one in path.segments] == [
        (20, 21, None), (21, 25, "rank 1"), (25, 26, "driver"), (26, 26.5, None), (26.5, 29, "rank 0"), (29, 30, None),
    ]  # fmt: skip
    slack = {one.phase: (one.most_seconds, one.most_lane) for one in path.slack}
    assert slack == {"rollout.generate": (1.0, "rank 0"), "actor.update": (1.0, "rank 1")}
    assert bound(path, "nothing between two phases") == 2.5


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_parts_add_up(tmp_path: Path, ranks: int) -> None:
    """Phases and gaps add up to the step, and those of the step that is shown to that one."""
    judged = PlantedRun(tmp_path / "run", ranks=ranks).judge()
    path = path_of(judged)
    assert sum(part.seconds for part in path.parts) == pytest.approx(path.seconds, abs=1e-9)
    assert path.seconds == pytest.approx(judged.step_seconds)
    joined = zip(path.segments, path.segments[1:], strict=False)
    assert all(one.end_seconds == after.start_seconds for one, after in joined)


def test_injected_delay(tmp_path: Path) -> None:
    """Half a second more on one rank is on the path, is what the others have to spare, and is what could be gained."""
    well = path_of(PlantedRun(tmp_path / "well").judge())
    run = PlantedRun(tmp_path / "faulty")
    run.longer["actor.update", 2] = lambda step: INJECTED
    path = path_of(run.judge())
    (part,) = [one for one in path.parts if one.phase == "actor.update"]
    assert part.lanes == {"rank 2": 8}
    assert bound(path, "rank 2 as fast") == pytest.approx(INJECTED, rel=CLOSE)
    gained = bound(path, "the slowest rank of each") - bound(well, "the slowest rank of each")
    assert gained == pytest.approx(INJECTED, rel=CLOSE)
    (slack,) = [one for one in path.slack if one.phase == "actor.update"]
    assert slack.median_seconds == pytest.approx(INJECTED, rel=CLOSE) and slack.most_lane != "rank 2"


def test_culprit_of_collectives_is_on_the_path(tmp_path: Path) -> None:
    """Where all ranks take as long, the path names the one that waits least in the collectives."""
    run = PlantedRun(tmp_path / "run")
    run.more["actor.update"] = lambda run, rank, step, begin, end: [
        span("gpu.fsdp.all_gather", begin, begin + (0.1 if rank == 3 else 0.1 + INJECTED))
    ]
    path = path_of(run.judge())
    (part,) = [one for one in path.parts if one.phase == "actor.update"]
    assert part.lanes == {"rank 3": 8}
    assert bound(path, "rank 3 as fast") == pytest.approx(INJECTED, rel=CLOSE)


def test_ranks_without_a_driver_follow_themselves(tmp_path: Path) -> None:
    """Of ranks that nobody holds together the path stays on the one that is done last, whatever ends on others."""
    ends, ranks = ((6.0001, 8), (6.0, 9)), []
    for middle, end in ends:
        records = [span("step", 10 * n, 10 * n + 10, step=n) for n in range(3)]
        records += [span("forward", 10 * n, 10 * n + middle, phase=True) for n in range(3)]
        records += [span("backward", 10 * n + 6.0002, 10 * n + end, phase=True) for n in range(3)]
        ranks.append(records)
    run = Written(tmp_path / "run")
    for rank, records in enumerate(ranks):
        run.process(f"w{rank}", *records, role="worker", rank=rank, pid=rank + 2, ended_s=40)
    path = path_of(why(analyse(run.read())))
    assert {part.phase: list(part.lanes) for part in path.parts if part.phase} == {
        "forward": ["rank 1"], "backward": ["rank 1"],
    }  # fmt: skip


def test_tail_is_a_bound(tmp_path: Path) -> None:
    """What the slowest 5 % of the requests cost is among what could be gained."""
    run = PlantedRun(tmp_path / "run")
    run.tail = 1.5
    assert bound(path_of(run.judge()), "no request among the slowest") == pytest.approx(1.5, rel=CLOSE)


def test_overlapping_steps_have_no_path(tmp_path: Path) -> None:
    """Steps of an asynchronous run overlap: it is said, and nothing is summed."""
    steps = [span("step", 8 * n, 8 * n + 10, step=n) for n in range(4)]
    judged = written(tmp_path / "run", steps, [span("actor.update", 8 * n + 1, 8 * n + 7) for n in range(4)])
    assert judged.critical_path is None
    assert judged.no_path == "3 steps begin before the one before has ended: such steps have no one path"


@pytest.mark.parametrize("records", [[], [span("step", 0, 5, step=0)], [span("step", 0, None, step=0)]])
def test_no_path_has_a_reason(tmp_path: Path, records: list[Any]) -> None:
    """Without a step or a phase there is no path, and the reason is told."""
    judged = written(tmp_path / "run", records)
    assert judged.critical_path is None and judged.no_path


def test_path_of_verl() -> None:
    """In the shipped run of verl rank 0's rollout and rank 3's reference model are waited for in each step."""
    path = path_of(why_of(VERL))
    lanes = {part.phase: part.lanes for part in path.parts if part.phase}
    assert lanes["rollout.generate"] == {"rank 0": 3} and lanes["ref.log_prob"] == {"rank 3": 3}
    assert sum(part.seconds for part in path.parts) == pytest.approx(path.seconds)


def test_screen(tmp_path: Path) -> None:
    """`why` shows the path as a table that adds up, with what could be gained."""
    PlantedRun(tmp_path / "run").write()
    done = CliRunner().invoke(main, ["why", str(tmp_path / "run")], prog_name="rltrace")
    said = done.output[done.output.index("What a step waits for") :]
    assert "actor.update" in said and "of 8 steps" in said
    words = " ".join(said.split())
    assert (
        "A step would take less, by at most: with " in words
        and "the slowest rank of each phase as fast as the median of the others: " in words
    )
