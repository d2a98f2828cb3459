"""`rltrace run` on the real run: what a user gives it, sees, and finds afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from test_summary_screen import SCREEN_LINES, WIDTHS, figures_in, screen

from rltrace.analysis import Summary, summarize
from rltrace.errors import RecordingError
from rltrace.recording import Process, Recording

LAPTOP = Path(__file__).parents[2] / "examples" / "laptop.yaml"
RLTRACE = [sys.executable, "-c", "from rltrace.cli import main; main(prog_name='rltrace')"]


def config_file(folder: Path, **changes: object) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(LAPTOP.read_text()) | changes))
    return file


def rltrace_(*words: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*RLTRACE, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"setps": 3}, "setps: unknown key"),
        ({"steps": "many"}, "steps: "),
        ({"ranks": 3}, "32 prompts do not divide over ranks: 3"),
    ],
)
def test_a_wrong_config_is_refused_before_anything_is_made(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    file = config_file(tmp_path, **changes)
    done = rltrace_("run", file, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"rltrace: {file}: ")
    assert said in line
    assert not (tmp_path / "run").exists()


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    done = rltrace_("run", tmp_path / "no.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    """Packages that Python does not find are those the run would not find."""
    program = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('ray', 'torch') else find(name, *a)\n"
        "from rltrace.cli import main; main(prog_name='rltrace')"
    )
    command = [sys.executable, "-c", program, "run", str(LAPTOP), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert done.stderr == (
        "rltrace: `rltrace run` needs torch, ray, not installed here: pip install 'rltrace-toolkit[run]'\n"
    )


def test_another_system_is_told_what_works_there(tmp_path: Path) -> None:
    program = "import sys; sys.platform = 'darwin'\nfrom rltrace.cli import main; main(prog_name='rltrace')"
    for words in (["run", str(LAPTOP)], ["exec", "--", "true"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert "needs Linux, this is darwin" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Three steps on two ranks."""
    folder = tmp_path_factory.mktemp("finished")
    return folder / "run", rltrace_("run", config_file(folder, steps=3), "--out", folder / "run")


@pytest.mark.run
class TestFinishedRun:
    def test_it_ends_with_a_step_table_and_the_commands_to_go_on_with(
        self, finished: tuple[Path, subprocess.CompletedProcess[str]]
    ) -> None:
        folder, done = finished
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert f"rltrace view {folder}" in lines[-2]
        assert f"rltrace summary {folder}" in lines[-1]
        at = lines.index("Steps")
        assert [line.split()[0] for line in lines[at + 3 : at + 6]] == ["0", "1", "2"]

    def test_its_phases_tile_each_ranks_step(self, finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
        summary = summarize(Recording.open(finished[0]))
        ranks = [row for row in summary.phases if row.rank is not None and row.step is not None]
        assert [(row.step, row.rank) for row in ranks] == [(step, rank) for step in range(3) for rank in range(2)]
        for row in ranks:
            assert row.overlap_seconds == 0, row.overlaps
            assert sum(part.seconds for part in row.phases.values()) == pytest.approx(row.seconds)
            assert {"weight_sync", "rollout.generate", "actor.update", "wait.driver"} <= row.phases.keys()

    def test_it_is_complete_and_every_hook_is_accounted_for(
        self, finished: tuple[Path, subprocess.CompletedProcess[str]]
    ) -> None:
        summary = summarize(Recording.open(finished[0]))
        assert summary.complete
        assert summary.open_spans == []
        assert summary.lost_events == 0
        assert {hook.instrumentation for hook in summary.hooks if hook.never_fired} == {"fsdp1"}, "it is FSDP2's"
        assert [hook.target for hook in summary.hooks if hook.state == "failed"] == []
        without_parent = {(process.role, process.rank) for process in summary.processes if process.parent is None}
        assert without_parent == {("driver", None), ("sampler", None)}
        assert sorted((process.role, process.rank) for process in summary.processes if process.rank is not None) == [
            ("engine", 0), ("engine", 1), ("worker", 0), ("worker", 1),
        ]  # fmt: skip

    def test_its_sync_and_its_memory_have_figures(
        self, finished: tuple[Path, subprocess.CompletedProcess[str]]
    ) -> None:
        summary = summarize(Recording.open(finished[0]))
        assert {(sync.step, sync.rank) for sync in summary.weight_sync if sync.step is not None} == {
            (step, rank) for step in range(3) for rank in range(2)
        }
        for sync in summary.weight_sync:
            assert sync.bytes > 0
            assert sync.buckets > 0
            assert sync.stages["weight_sync.send"].gigabytes_per_second
        for device in summary.memory:
            assert device.peak_bytes >= 64 << 20
            assert sum(device.at_peak_bytes.values()) == device.peak_bytes
            assert device.owner_peaks["actor.grads"].phase == "actor.update"

    @pytest.mark.parametrize("width", WIDTHS)
    def test_its_summary_cuts_no_figure(
        self, finished: tuple[Path, subprocess.CompletedProcess[str]], width: int
    ) -> None:
        recording = Recording.open(finished[0])
        for whole in (False, True):
            lines = screen(recording, width, whole=whole)
            assert max(map(len, lines)) <= width
            assert figures_in(lines) <= figures_in(screen(recording, 1000, whole=whole))
        first = screen(recording, width)[:SCREEN_LINES]
        assert any(line.startswith("actor.update ") for line in first)
        assert any(line.startswith("unexplained ") for line in first)

    def test_its_rewards_are_those_that_the_run_printed(
        self, finished: tuple[Path, subprocess.CompletedProcess[str]]
    ) -> None:
        folder, done = finished
        steps = json.loads(rltrace_("summary", folder, "--json").stdout)["steps"]
        assert len(steps) == 3
        for step in steps:
            assert f"step {step['step']:3}  reward {step['reward_mean']:.3f}" in done.stdout
            assert step["tokens_per_second"] > 0

    def test_a_second_run_into_its_folder_is_refused(
        self, finished: tuple[Path, subprocess.CompletedProcess[str]]
    ) -> None:
        before = sorted(path.stat().st_mtime_ns for path in finished[0].rglob("*"))
        done = rltrace_("run", LAPTOP, "--out", finished[0])
        assert done.returncode == 3
        assert "holds a Recording already; name another folder with --out" in done.stderr
        assert sorted(path.stat().st_mtime_ns for path in finished[0].rglob("*")) == before


@pytest.fixture
def going_on(tmp_path: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[str], Path]]]:
    """Starts a run and returns when its first step is over."""
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], Path]:
        folder = tmp_path / "run"
        command = [*RLTRACE, "run", str(LAPTOP), "--out", str(folder)]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        started.append(run)
        while not _has_ended_a_step(folder):
            assert run.poll() is None, run.communicate()
            time.sleep(0.3)
        return run, folder

    yield start
    for run in started:
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
            run.communicate()


def _has_ended_a_step(folder: Path) -> bool:
    try:
        return any(step.end_seconds for step in summarize(Recording.open(folder)).steps)
    except RecordingError:  # not made yet
        return False


def _everything_is_gone(folder: Path) -> Summary:
    summary = summarize(Recording.open(folder))
    assert [process.name for process in summary.processes if process.state == "alive"] == []
    return summary


def test_a_run_says_what_it_does_before_the_long_start_and_what_interrupted_it(tmp_path: Path) -> None:
    """Into a pipe too."""
    folder = tmp_path / "run"
    command = [*RLTRACE, "run", str(LAPTOP), "--out", str(folder)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline().startswith(f"recording into {folder}; starting 2 ranks on ")
    while not Recording.open(folder).processes:
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate()
    assert run.returncode == 143
    assert errors.splitlines()[-1] == "rltrace: interrupted by SIGTERM"
    assert {process.state for process in _everything_is_gone(folder).processes} <= {"ended", "stopped"}


@pytest.mark.run
@pytest.mark.parametrize(("role", "rank"), [("worker", 1), ("engine", 0), ("driver", None)])
def test_a_run_ends_and_names_who_was_killed(
    going_on: Callable[[], tuple[subprocess.Popen[str], Path]], role: str, rank: int | None
) -> None:
    run, folder = going_on()
    victim = next(p for p in Recording.open(folder).processes if (p.role, p.rank) == (role, rank))
    doing = _stopped_at_work(folder, victim)
    began = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    _, errors = run.communicate()
    assert time.monotonic() - began < 30
    assert run.returncode == 4
    assert errors.splitlines()[-1].startswith(f"rltrace: {victim.place} (pid {victim.pid}) ")
    summary = _everything_is_gone(folder)
    assert next(p.state for p in summary.processes if p.pid == victim.pid) == "died"
    assert doing <= {span.name for span in summary.open_spans if span.process == victim.place}


def _stopped_at_work(folder: Path, victim: Process) -> set[str]:
    """Halts a process in the middle of its work (an engine sleeps through half of a step); what it was doing."""
    while True:
        os.kill(victim.pid, signal.SIGSTOP)
        spans = summarize(Recording.open(folder)).open_spans
        if doing := {span.name for span in spans if span.process == victim.place}:
            return doing
        os.kill(victim.pid, signal.SIGCONT)
        time.sleep(0.05)


@pytest.mark.run
def test_a_run_that_is_told_to_end_does_and_leaves_nothing(
    going_on: Callable[[], tuple[subprocess.Popen[str], Path]],
) -> None:
    run, folder = going_on()
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate()
    assert run.returncode == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "rltrace: interrupted by SIGINT (Ctrl-C)"
    states = {process.name: process.state for process in _everything_is_gone(folder).processes}
    assert set(states.values()) <= {"ended", "stopped"}, states
