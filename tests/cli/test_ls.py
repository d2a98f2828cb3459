"""`rltrace ls` says which runs there are, from manifests and little else; and the help has commands by purpose."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from inferred_loops import HOOK, learn
from recordings import Written, span, two_ranks
from shipped import RECORDINGS

from rltrace.analysis import listing, summarize
from rltrace.cli import main
from rltrace.read import ending
from rltrace.read.recording import Recording
from rltrace.record import manifest


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="rltrace")


def runs(folder: Path) -> list[dict[str, Any]]:
    done = call("ls", folder, "--json")
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_archives_say_what_their_summary_says() -> None:
    """Of the Recordings that ship, though their segments are looked through and not read; the newest is last."""
    found = runs(RECORDINGS)
    assert [Path(run["path"]).stem for run in found] == [
        "qwen3_8b_4gpu_other_host", "qwen3_8b_4gpu", "verl_8b_4gpu",
    ]  # fmt: skip
    for run in found:
        whole = summarize(Recording.open(run["path"]))
        assert whole.steady is not None
        assert (run["steps"], run["all_steps_seen"], run["ranks"]) == (len(whole.steps), True, 4)
        assert run["mean_step_seconds"] == pytest.approx(whole.steady.seconds.mean_seconds)
        assert (run["command"], run["processes"]) == (whole.run.command, len(whole.processes))
        assert (run["state"], run["size_bytes"]) == ("ended", os.path.getsize(run["path"]))


@pytest.mark.parametrize(
    "made", ["rltrace.span('step', step=n)", "spans.automatic_span('step', step=n)", "typed(n, .5)"]
)
def test_real_and_failed_run(tmp_path: Path, made: str) -> None:
    """A real run and a failed one are listed.

    Steps that end in a later segment, are aborted, or are open are told apart as the summary does, whether a program or
    a hook marks them, and as typed spans too.
    """
    program = tmp_path / "train.py"
    program.write_text(
        "import rltrace, sys, contextlib, os\n"
        "from rltrace.record import spans\n"
        "other, typed = rltrace.typed_span('other', a=int), rltrace.typed_span('step', step=int, loss=float)\n"
        f"def made(n): return {made}\n"
        "for step in range(5):\n"
        "    with contextlib.suppress(KeyError), other(step), made(step):\n"
        "        for number in range(60_000):\n"
        "            rltrace.counter('work', number)\n"
        "        if step == 3: raise KeyError\n"
        "span = made(5)\n"
        "span.__enter__()\n"
        "sys.stdout.flush(); os._exit(7)\n"
    )
    command = [sys.executable, "-m", "rltrace", "exec", "--sample", "0", "--out", tmp_path / "runs" / "one", "--"]
    done = subprocess.run([*command, sys.executable, program], check=False, capture_output=True, timeout=60)
    assert done.returncode == 7, done.stderr
    (run,) = runs(tmp_path / "runs")
    whole = summarize(Recording.open(tmp_path / "runs" / "one"))
    assert len(list((tmp_path / "runs" / "one").rglob("*.seg"))) > 1 and whole.steady is not None
    assert whole.steady.steps == [1, 2, 4]
    assert (run["steps"], run["state"], run["exit_code"]) == (6, "failed", 7)
    assert run["mean_step_seconds"] == pytest.approx(whole.steady.seconds.mean_seconds)
    assert "exit 7" in call("ls", tmp_path / "runs").stdout


def test_inferred_steps_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that nobody marks are counted as the summary does, of a folder and of an archive."""
    process = Written(tmp_path / "loop").process("p", learn(0), learn(10), learn(20), hooks=(HOOK,), ended_s=30)
    process.process("other", role="worker", ended_s=30)
    assert call("export", tmp_path / "loop", "-o", tmp_path / "loop.zip").exit_code == 0
    whole = summarize(Recording.open(tmp_path / "loop"))
    assert len(whole.steps) == 3 and whole.steady is not None
    for run in runs(tmp_path):
        assert (run["steps"], run["all_steps_seen"]) == (3, True)
        assert run["mean_step_seconds"] == pytest.approx(whole.steady.seconds.mean_seconds)
    monkeypatch.setattr(listing, "MOST_INFERRED_BYTES", 1)
    assert {(run["steps"], run["all_steps_seen"]) for run in runs(tmp_path)} == {(0, False)}


def test_states(tmp_path: Path) -> None:
    two_ranks(tmp_path / "well")
    Written(tmp_path / "dead").process("one", span("step", 1, 2), role="main")
    alive = Written(tmp_path / "alive", owner="one")
    alive.process("one", role="main", pid=os.getpid(), start_ticks=manifest.started_ticks(os.getpid()))
    for name, code, signal in (("stopped", 130, 2), ("fine", 0, None)):
        Written(tmp_path / name).process("one", role="main")
        ending.write(tmp_path / name, ending.Ending(code, signal))
    # Made by this process, which lives: none of them is this process's own but `alive`.
    for name in ("well", "dead"):
        file = tmp_path / name / manifest.FILE
        said = json.loads(file.read_text())
        file.write_text(json.dumps({key: said[key] for key in said if key not in ("sum", "owner_pid")}))
    assert {Path(run["path"]).name: run["state"] for run in runs(tmp_path)} == {
        "well": "ended", "dead": "incomplete", "alive": "running", "stopped": "interrupted", "fine": "ended",
    }  # fmt: skip


def test_others_are_not_listed(tmp_path: Path) -> None:
    """Other folders and files are not listed.

    A folder or zip file of something else is none; a damaged run is named.
    """
    two_ranks(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other.zip").write_bytes(b"PK")
    damaged = two_ranks(tmp_path / "damaged").folder / manifest.FILE
    damaged.write_text("{")
    done = call("ls", tmp_path)
    assert done.exit_code == 0 and "run" in done.stdout and "other" not in done.stdout
    assert [line.partition(": damaged")[0] for line in done.stderr.splitlines() if "damaged" in line] == [
        f"rltrace: not listed: {damaged}"
    ]


def test_one_run_and_none(tmp_path: Path) -> None:
    assert [run["steps"] for run in runs(two_ranks(tmp_path / "run").folder)] == [2]
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "missing"):
        done = call("ls", tmp_path / folder)
        assert (done.exit_code, done.stdout) == (3, "")
        assert "no Recording here; make one with `rltrace exec -- COMMAND`" in done.stderr


def test_more_segments_than_are_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that were seen are the least that there are, and the table says so."""
    run = Written(tmp_path / "run").process("one", span("step", 1, 2), role="driver", ended_s=3).folder
    segment = run / "processes" / "one" / "000001.seg"
    (segment.parent / "000002.seg").write_bytes(segment.read_bytes())
    monkeypatch.setattr(listing, "MOST_LOOKED_BYTES", segment.stat().st_size)
    (found,) = runs(run)
    assert (found["steps"], found["all_steps_seen"]) == (1, False)
    assert re.search(r" 1\+ ", call("ls", run).stdout)


def test_help_has_commands_by_purpose() -> None:
    said = call("--help").stdout
    sections = re.findall(r"^(\w+):\n((?:  +\S.*\n)+)", said, re.MULTILINE)
    found = {title: re.findall(r"^  (\w+) ", rows, re.MULTILINE) for title, rows in sections if title != "Options"}
    assert found == {
        "Run": ["exec", "run", "doctor", "plan"],
        "See": ["summary", "why", "view", "report", "ls"],
        "Compare": ["diff", "check", "overhead"],
        "Data": ["sql", "export", "collect"],
    }
    assert {name for names in found.values() for name in names} == set(main.commands)
