"""Findings of a Recording that is damaged, short, of a run that goes on, of some ranks, or of clocks that are apart."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from planted_runs import PlantedRun
from recordings import Written, sample, span
from shipped import VERL, why_of

from rltrace.analysis.findings import Why, why
from rltrace.analysis.selected import selected
from rltrace.analysis.summary import analyse
from rltrace.cli import main
from rltrace.read.recording import Recording
from rltrace.read.selection import Numbers, Range, Selection
from rltrace.record import manifest

STEPS = [span("step", 10 * n, 10 * n + 9, step=n) for n in range(4)]
ACROSS = {"slow_rank", "between_phases", "driver_phases"}
"""Findings that compare times of different processes."""


def judge(recording: Recording) -> Why:
    return why(analyse(recording))


def test_whole_run_has_no_doubt(tmp_path: Path) -> None:
    """A run that is whole leaves nothing to doubt."""
    assert PlantedRun(tmp_path / "run").judge().doubts == []


def test_processes_that_ray_let_go_are_no_doubt() -> None:
    """Workers that Ray ended when the driver of a whole run left its cluster are not said to have died."""
    assert why_of(VERL).doubts == []


def test_run_that_goes_on(tmp_path: Path) -> None:
    """A run that goes on is judged by what there is, and it is said."""
    alive = {"pid": os.getpid(), "start_ticks": manifest.started_ticks(os.getpid())}
    written = Written(tmp_path / "run").process("d", *STEPS, role="driver", **alive)
    judged = judge(written.read())
    assert judged.doubts == ["the run still goes on: what comes later is not in it"]
    assert judged.steps == [1, 2, 3]


def test_run_that_died(tmp_path: Path) -> None:
    """Of a run in which a process died, it is said whose work is missing."""
    written = Written(tmp_path / "run").process("d", *STEPS, role="driver", ended_s=40)
    written.process("w", span("actor.update", 1, None), role="worker", rank=0)
    judged = judge(written.read())
    assert judged.doubts == ["rank 0 worker died: what they had not finished is missing"]
    assert not [one for one in judged.unjudged if "it failed" in one.reason]


def test_damaged_recording(tmp_path: Path) -> None:
    """A Recording with a damaged segment is judged by the rest, and it is said that parts are lost."""
    run = PlantedRun(tmp_path / "run")
    run.longer["actor.update", 1] = lambda step: 0.5
    run.write()
    file = tmp_path / "run" / "processes" / "w2" / "000001.seg"
    whole = bytearray(file.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 40] = b"\xc1" * 40
    file.write_bytes(whole)
    judged = judge(Recording.open(tmp_path / "run"))
    assert any("lost or damaged" in doubt for doubt in judged.doubts)
    assert not [one for one in judged.unjudged if "it failed" in one.reason]


def test_one_step_has_no_interval(tmp_path: Path) -> None:
    """Of one step nothing has an interval, no rank is always slow, and it is said."""
    run = PlantedRun(tmp_path / "run")
    run.longer["actor.update", 1] = lambda step: 3.0
    part = selected(run.write().read(), Selection(steps=Numbers((Range(4, 4),))))
    judged = judge(part)
    assert "it is one step: no price has an interval" in judged.doubts
    assert all(one.interval_seconds is None and one.confidence != "high" for one in judged.findings)
    assert not any("1 of 1 steps" in one.title and "is slow in" in one.title[:20] for one in judged.findings)


def test_only_the_first_step(tmp_path: Path) -> None:
    """A run whose first step alone has ended is judged by it, and it is said that it includes warm-up."""
    judged = PlantedRun(tmp_path / "run", steps=1).judge()
    assert judged.doubts == ["only the first step has ended, which includes warm-up"]
    assert "first_step" in [one.id for one in judged.unjudged]


def test_missing_ranks(tmp_path: Path) -> None:
    """A rank between others that left no record is named: it may be the one that they wait for."""
    written = Written(tmp_path / "run").process("d", *STEPS, role="driver", ended_s=40)
    for rank in (0, 1, 3):
        written.process(f"w{rank}", span("actor.update", 1, 5), role="worker", rank=rank, pid=rank + 2, ended_s=40)
    (doubt,) = judge(written.read()).doubts
    assert doubt.startswith("rank 2 of 4 is not in it")


def far(folder: Path, *, aligned: bool) -> Why:
    """Rank 1 runs on another host, whose clock is the run's or one that nobody compared with it; it is slow."""
    written = Written(folder).process("d", *STEPS, span("reward", 7, 8), role="driver", ended_s=40)
    for rank in range(2):
        phases = [span("actor.update", 10 * n + 1, 10 * n + 5 + rank) for n in range(4)]
        who: dict[str, Any] = {"host": f"node-{rank}", "device": {"host": f"node-{rank}", "uuid": f"GPU-{rank}"}}
        if rank and not aligned:
            who |= {"boot_id": "another", "time_namespace": "1"}
        written.process(f"w{rank}", *phases, role="worker", rank=rank, pid=rank + 2, ended_s=40, **who)
    return judge(written.read())


def test_clocks_that_nobody_compared(tmp_path: Path) -> None:
    """Of processes whose clocks were never compared nothing is said that compares their times, and the reason is."""
    assert {"slow_rank", "between_phases"} <= {one.id for one in far(tmp_path / "aligned", aligned=True).findings}
    judged = far(tmp_path / "apart", aligned=False)
    assert not ACROSS & {one.id for one in judged.findings}
    reasons = {one.id: one.reason for one in judged.unjudged}
    assert {reasons[name] for name in ACROSS} == {"the clock of node-1 is not aligned (docs/hosts.md)"}
    assert any("the clock of node-1 was never compared" in doubt for doubt in judged.doubts)


@pytest.mark.parametrize("words", [["why"], ["check", "--max", "step=1s"], ["summary"]])
def test_newer_format_is_refused(tmp_path: Path, words: list[str]) -> None:
    """A Recording of a newer format is refused in one line, by every command that judges it."""
    Written(tmp_path / "run").process("d", *STEPS, sample("x", 1, 2), role="driver", ended_s=40)
    file = tmp_path / "run" / "manifest.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "version": 99}))
    done = CliRunner().invoke(main, [words[0], str(tmp_path / "run"), *words[1:]], prog_name="rltrace")
    assert done.exit_code == 3 and "written in format 99" in done.output and len(done.output.splitlines()) == 1


def test_doubts_are_on_the_screen(tmp_path: Path) -> None:
    """`why` prints doubts before findings."""
    PlantedRun(tmp_path / "run", steps=1).write()
    done = CliRunner().invoke(main, ["why", str(tmp_path / "run")], prog_name="rltrace")
    said = " ".join(done.output.split())
    assert "Doubt: only the first step has ended" in said.partition("Not judged")[0]
