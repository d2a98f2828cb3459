"""`rltrace run` on the real run: what it refuses, and how it ends when it is interrupted or somebody is killed.

What is found after a run that ended well is in test_laptop_run.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from recordings import Written
from reference_runs import LAPTOP, TINY, children, reaper_of, wait_until_gone, write_config

from rltrace.analysis import Summary, summarize
from rltrace.cli import main
from rltrace.cli.run import report
from rltrace.errors import RunError
from rltrace.read.recording import Process, Recording
from rltrace.run.supervisor import Death, Outcome

RLTRACE = [sys.executable, "-c", "from rltrace.cli import main; main(prog_name='rltrace')"]
KILLED = Death("rank 1 worker", 7, signal.SIGKILL)
ALSO_KILLED = Death("rank 0 worker", 8, signal.SIGKILL)


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
def test_wrong_config_is_refused_early(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    """A wrong configuration is refused before anything is made."""
    file = write_config(tmp_path, **changes)
    done = CliRunner().invoke(main, ["run", str(file), "--out", str(tmp_path / "run")], prog_name="rltrace")
    assert done.exit_code == 2
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
    assert done.stderr.startswith("rltrace: `rltrace run` needs torch, ray, not installed here: pip install ")
    assert "'torch>=" in done.stderr and "'ray>=" in done.stderr and len(done.stderr.splitlines()) == 1


def test_collect_without_ray(tmp_path: Path) -> None:
    """Collecting without Ray says what to do, and that one host needs nothing."""
    folder = Written(tmp_path / "run").process("p", ended_s=1).folder
    program = "import sys; sys.modules['ray'] = None\nfrom rltrace.cli import main; main(prog_name='rltrace')"
    command = [sys.executable, "-c", program, "collect", str(folder), "--address", "127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 6
    said, command, otherwise = re.split("(?: \\(the extra \\[run\\]\\)|: (?=pip))", done.stderr)
    assert said == "rltrace: rltrace reaches other hosts through Ray, which is not installed here"
    assert command.startswith("pip install ") and "'ray>=" in command
    assert otherwise == (", or run this where Ray is installed; a run on a single host is complete without it\n")


def test_other_system_is_told(tmp_path: Path) -> None:
    """Another system is told what works there."""
    program = "import sys; sys.platform = 'darwin'\nfrom rltrace.cli import main; main(prog_name='rltrace')"
    for words in (["run", str(LAPTOP)], ["exec", "--", "true"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert "needs Linux, and this is darwin" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("streams", "said"),
    [
        ("1>/dev/full", "rltrace: this screen is incomplete: [Errno 28] No space left on device\n"),
        ("1>&-", ""),
        ("2>/dev/full >&2", None),
    ],
)
def test_display_keeps_exit_code(streams: str, said: str | None) -> None:
    """What is shown of a run does not change its exit code."""
    program = "import sys; from rltrace.cli.runs import show; show(print, 'a table'); sys.exit(4)"
    words = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (4, said or "")


@pytest.fixture
def going_on(tmp_path: Path) -> Iterator[Callable[[int], tuple[subprocess.Popen[str], Path]]]:
    """Starts a run of so many ranks and returns when its first step is over."""
    started: list[subprocess.Popen[str]] = []

    def start(ranks: int) -> tuple[subprocess.Popen[str], Path]:
        folder = tmp_path / "run"
        config = write_config(tmp_path, ranks=ranks, steps=1000, **TINY)
        command = [*RLTRACE, "run", str(config), "--out", str(folder)]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(run)
        assert run.stdout is not None
        assert any(line.startswith("step   0 ") for line in run.stdout), run.communicate()
        return run, folder

    yield start
    for run in started:
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
            run.communicate()


def _everything_is_gone(folder: Path) -> Summary:
    summary = summarize(Recording.open(folder))
    assert [process.name for process in summary.processes if process.state == "alive"] == []
    return summary


def test_long_start_and_interrupt_are_told(tmp_path: Path) -> None:
    """A run says what it does before the long start, and what interrupted it.

    Into a pipe too.
    """
    folder = tmp_path / "run"
    command = [*RLTRACE, "run", str(LAPTOP), "--out", str(folder)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    first = run.stdout.readline()
    assert first.startswith(f"recording into {folder}, at most ") and "; starting 2 ranks on " in first
    while not Recording.open(folder).processes:
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate()
    assert run.returncode == 143
    assert errors.splitlines()[-1] == "rltrace: interrupted by SIGTERM"
    assert {process.state for process in _everything_is_gone(folder).processes} <= {"ended", "stopped"}


@pytest.mark.run
@pytest.mark.parametrize(("role", "rank"), [("worker", 1), ("driver", None)])
def test_killed_run_is_one_line(
    going_on: Callable[[int], tuple[subprocess.Popen[str], Path]], role: str, rank: int | None
) -> None:
    """A run in which a process was killed ends with one line that names it and where to look, and leaves nobody.

    A killed engine is in tests/reference_run/test_reference_death.py, without rltrace, and in tests/hostile.
    """
    run, folder = going_on(2 if role == "worker" else 1)
    kill_one(run, folder, role, rank)


def kill_one(run: subprocess.Popen[str], folder: Path, role: str, rank: int | None) -> None:
    """Kills a process of a run while it works, and checks what is said and what is left."""
    victim = next(p for p in Recording.open(folder).processes if (p.role, p.rank) == (role, rank))
    others = children(run)
    temporary = Path(reaper_of(others).cmdline()[-1])
    doing = _stopped_at_work(folder, victim)
    os.kill(victim.pid, signal.SIGKILL)
    out, errors = run.communicate(timeout=120)
    wait_until_gone(others)
    assert not temporary.exists()
    assert run.returncode == 4
    (line,) = errors.splitlines()
    assert line.startswith(f"rltrace: {victim.place} (pid {victim.pid}) ")
    assert line.endswith(f"`rltrace summary {folder}`")
    assert f"(pid {victim.pid})" not in line.removeprefix(f"rltrace: {victim.place} (pid {victim.pid})")
    assert "raylet" not in out, "Ray says nothing that is not in this line"
    summary = _everything_is_gone(folder)
    assert next(p.state for p in summary.processes if p.pid == victim.pid) == "died"
    assert doing <= {span.name for span in summary.open_spans if span.process == victim.place}


@pytest.mark.parametrize(
    ("deaths", "said", "line"),
    [
        ([KILLED], "worker of rank 1 (pid 7) died: killed by SIGKILL", f"{KILLED}; the run was stopped."),
        ([ALSO_KILLED, KILLED], "worker of rank 1 (pid 7) died: killed by SIGKILL", f"{KILLED}; the run was stopped."),
        (
            [KILLED],
            "worker of rank 1 (pid 7) died: killed by SIGKILL; it said: ImportError: no flashinfer",
            f"{KILLED}; it said: ImportError: no flashinfer; the run was stopped.",
        ),
        ([KILLED], "connection closed", f"{KILLED} (the driver said: connection closed); the run was stopped."),
        ([], "model.norm.weight did not arrive", "model.norm.weight did not arrive; what it did before:"),
        ([], "", "the run ended with exit code 4, see above; what it did before:"),
    ],
)
def test_failure_reason_is_one_line(deaths: list[Death], said: str, line: str) -> None:
    """The reason why a run failed is one line that leaves nothing out."""
    with pytest.raises(RunError) as raised:
        report(Path("run"), Outcome(4, tuple(deaths)), said)
    assert str(raised.value).startswith(line)
    assert str(raised.value).endswith("`rltrace summary run`")


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
def test_told_to_end_leaves_nothing(
    going_on: Callable[[int], tuple[subprocess.Popen[str], Path]],
) -> None:
    """A run that is told to end does so and leaves nothing."""
    run, folder = going_on(1)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate()
    assert run.returncode == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "rltrace: interrupted by SIGINT (Ctrl-C)"
    states = {process.name: process.state for process in _everything_is_gone(folder).processes}
    assert set(states.values()) <= {"ended", "stopped"}, states
