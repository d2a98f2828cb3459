from __future__ import annotations

import json
import signal

import pytest
from recordings import SECOND, Written, span

from rltrace.analysis.summary import Summary, summarize


def rank(written: Written, number: int, begins: int, steps: int, *, killed_s: float | None = None) -> None:
    """Add a rank that learns for 8 of the 10 s of each step, from its first phase at `begins` on."""
    updates = [span("actor.update", 10 * n, min(10 * n + 8, killed_s or 99)) for n in range(1, steps + 1)]
    build = [span("actor.build", begins, begins + 2)]
    own = [span("step", 10 * n, 10 * (n + 1), step=n - 1) for n in range(1, 6)] if number == 0 else []
    ended_s = None if killed_s is not None else 60
    who = {"role": "worker", "rank": number, "pid": 100 + number}
    written.process(f"w{number}", *build, *updates, *own, ended_s=ended_s, start_ns=SECOND, **who)
    if killed_s is not None:
        exit_ns = {"kind": "exit", "end_ns": int(killed_s * SECOND)}
        line = json.dumps({**exit_ns, "killed_by": int(signal.SIGKILL), "was_stopped": False}) + "\n"
        with (written.folder / "processes" / f"w{number}" / "process.jsonl").open("a") as lines:
            lines.write(line)


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Two ranks, five steps; rank 1 is killed in the middle of the third."""
    written = Written(tmp_path_factory.mktemp("run") / "run")
    rank(written, 0, 4, 5)
    rank(written, 1, 6, 3, killed_s=35)
    return summarize(written.read())


def test_a_dead_rank_is_not_idle(summary: Summary) -> None:
    """After its end a rank has no steps, the one in which it died ends with it, and no idle time follows."""
    rows = [row for row in summary.phases if row.rank == 1 and row.step is not None]
    assert [(row.step, row.seconds, row.steady) for row in rows] == [(0, 10, False), (1, 10, True), (2, 5, False)]
    assert [row.phases["idle"].seconds for row in rows] == [2, 2, 0]
    assert sum(gap.seconds for gap in summary.idle if gap.rank == 1 and gap.of == "steady_step") == 2


def test_shares_are_of_ranks_that_lived(summary: Summary) -> None:
    """The mean of a rank is over the steps that it lived in."""
    assert summary.steady is not None
    assert [(lane.lane, lane.phases["idle"].share) for lane in summary.steady.lanes] == [
        ("rank 0", pytest.approx(0.2)),
        ("rank 1", pytest.approx(0.2)),
    ]


def test_start_up_is_not_idle(summary: Summary) -> None:
    """Until its first phase a rank starts up; after that it is idle between phases."""
    startup = {row.rank: row.phases for row in summary.phases if row.step is None}
    assert {rank: phases["start-up"].seconds for rank, phases in startup.items()} == {0: 3, 1: 5}
    assert {rank: phases["idle"].seconds for rank, phases in startup.items()} == {0: 4, 1: 2}
