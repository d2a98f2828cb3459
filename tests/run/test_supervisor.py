"""A supervised run: who died is named, nothing stays behind, the Recording stays readable."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recordings import Written, span

from rltrace.analysis import Summary, summarize
from rltrace.host import clock
from rltrace.read.ending import Ending
from rltrace.read.recording import Process, Recording
from rltrace.record import manifest
from rltrace.run.supervisor import POLL_SECONDS, _Supervisor, _Watch

TOY = Path(__file__).parents[1] / "toy_run.py"


class Run:
    """A toy run under its supervisor."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder = folder
        command = [sys.executable, TOY, "supervise", folder, mode]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def everybody(self) -> dict[str, Process]:
        """The five processes by name, once each of them is inside a span.

        A process has a folder before it says its role, so names are read again after everybody's first span.
        """
        while True:
            time.sleep(0.05)
            assert self.process.poll() is None, self.process.communicate()
            if (self.folder / "manifest.json").exists():
                processes = Recording.open(self.folder).processes
                if len(processes) == 5 and all(list(process.events()) for process in processes):
                    return {process.name: process for process in Recording.open(self.folder).processes}

    def end(self) -> tuple[int, str]:
        """Exit code and standard error."""
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors

    def summary(self) -> Summary:
        """What was recorded; every process of it must be gone."""
        found = summarize(Recording.open(self.folder))
        assert not [process.name for process in found.processes if process.state == "alive"]
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    runs: list[Run] = []

    def start(mode: str) -> Run:
        runs.append(Run(tmp_path / "run", mode))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


@pytest.mark.parametrize("name", ["rank 1 worker", "rank 0 engine", "driver"])
def test_killed_process_ends_the_run(start: Callable[[str], Run], name: str) -> None:
    """A killed process is named, and the run ends."""
    run = start("notice")
    victim = run.everybody()[name]
    os.kill(victim.pid, signal.SIGKILL)
    code, errors = run.end()
    assert code == 4
    assert f"{name} (pid {victim.pid}) " in errors.splitlines()[-1]
    found = run.summary()
    states = {process.name: process.state for process in found.processes}
    assert states.pop(name) == "died"
    assert set(states.values()) <= {"ended", "stopped"}
    assert name in {span.process for span in found.open_spans}


def test_unaware_run_is_ended(start: Callable[[str], Run]) -> None:
    """A run that does not notice a death is ended."""
    run = start("deaf")
    victim = run.everybody()["rank 0 worker"]
    os.kill(victim.pid, signal.SIGKILL)
    code, errors = run.end()
    assert code == 4
    assert f"rank 0 worker (pid {victim.pid}) was killed by SIGKILL; the run was stopped" in errors.splitlines()[-1]
    run.summary()


def test_good_run_says_nothing(start: Callable[[str], Run]) -> None:
    """A run that ends well says nothing."""
    run = start("end")
    code, errors = run.end()
    assert (code, errors) == (0, "")
    assert run.summary().complete
    assert (run.summary().run.exit_code, run.summary().run.interrupted_by) == (0, None)


def test_drivers_error_blames_nobody(start: Callable[[str], Run]) -> None:
    """A driver's own error is not blamed on the processes that end with it."""
    code, errors = start("fail").end()
    assert code == 1
    assert errors.splitlines()[0] == "the driver's own error"
    assert "exit code 1" in errors.splitlines()[-1]
    assert "pid" not in errors


@pytest.mark.parametrize(
    ("mode", "number", "name"),
    [
        ("deaf", signal.SIGINT, "SIGINT (Ctrl-C)"),
        ("deaf", signal.SIGTERM, "SIGTERM"),
        ("deaf", signal.SIGHUP, "SIGHUP"),
        ("shutdown", signal.SIGTERM, "SIGTERM"),
    ],
)
def test_interrupt_blames_nobody(start: Callable[[str], Run], mode: str, number: int, name: str) -> None:
    """An interrupted run leaves nothing behind, and nobody is blamed for its end.

    Neither who is ended by us, nor an engine that the run's own shutdown kills.
    """
    run = start(mode)
    run.everybody()
    os.kill(run.process.pid, number)
    code, errors = run.end()
    assert code == 128 + number
    assert f"rltrace: interrupted by {name}" in errors.splitlines()[-1]
    found = run.summary()
    assert found.run.interrupted_by == signal.Signals(number).name
    states = {process.name: process.state for process in found.processes}
    assert set(states.values()) <= {"ended", "stopped"}
    assert states["rank 0 engine"] == states["rank 1 engine"] == "stopped"
    assert not found.complete


def test_death_before_interrupt_is_named(start: Callable[[str], Run]) -> None:
    """A process that died before the interrupt is still named."""
    run = start("deaf")
    victim = run.everybody()["rank 0 worker"]
    os.kill(victim.pid, signal.SIGKILL)
    while Process(victim.folder).killed_by is None:
        time.sleep(0.02)
    time.sleep(0.2)  # the grace for the driver is 2 s
    os.kill(run.process.pid, signal.SIGINT)
    code, errors = run.end()
    assert code == 130
    assert errors.splitlines()[-1] == (
        f"rltrace: interrupted by SIGINT (Ctrl-C), after rank 0 worker (pid {victim.pid}) was killed by SIGKILL"
    )
    assert {process.name for process in run.summary().processes if process.state == "died"} == {"rank 0 worker"}


def test_ctrl_c_reaches_the_command_once(tmp_path: Path) -> None:
    """A terminal sends it to the whole group: forwarding it too would interrupt the command's cleaning up."""
    program = "import time\ntry:\n print('ready', flush=True)\n time.sleep(60)\n"
    program += "except KeyboardInterrupt:\n time.sleep(1)\n print('cleaned up')\n"
    command = exec_command(tmp_path / "run", program)
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execv(command[0], command)
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    while True:
        try:
            seen += os.read(terminal, 1000)
        except OSError:  # the terminal's other end is closed
            break
    assert b"cleaned up" in seen
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


CLI = "from rltrace.cli import main; main()"
# Prints the number of each signal that it gets, until it has had a SIGHUP and nothing more has come for a while.
TELLS = """
import os, signal, time
told = {1, 2, 3, 10, 12, 15}
signal.pthread_sigmask(signal.SIG_BLOCK, told)
%s
print("ready", flush=True)
number = None
while number != signal.SIGHUP:
    number = signal.sigwait(told)
    print(int(number), flush=True)
time.sleep(0.5)
for more in signal.sigpending() & told:
    print(int(more), flush=True)
"""


def exec_command(folder: Path, program: str) -> list[str]:
    """`rltrace exec` of a program."""
    return [sys.executable, "-c", CLI, "exec", "--out", str(folder), "--", sys.executable, "-c", program]


@pytest.mark.parametrize(
    ("sent", "before"),
    [
        pytest.param((os.kill,), "", id="to us"),
        pytest.param((os.killpg,), "", id="to the group"),
        pytest.param((os.kill, os.killpg), "", id="to us and to the group, as timeout does"),
        pytest.param((os.kill,), "os.setpgid(0, 0)", id="to us, and the command is in a group of its own"),
        pytest.param((os.killpg,), "os.setpgid(0, 0)", id="to our group, and the command is in one of its own"),
    ],
)
def test_each_signal_arrives_once(tmp_path: Path, sent: tuple[Callable[[int, int], None], ...], before: str) -> None:
    """A command receives each signal as often as it was sent, however it was sent.

    And nobody is ended by force who was only asked twice, as one that leaves a prompt by Ctrl-C is not.
    """
    command = exec_command(tmp_path / "run", TELLS % before)
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    for number in (2, 2, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP):
        for send in sent:
            send(run.pid, number)
        assert run.stdout.readline() == f"{int(number)}\n"
        time.sleep(0.3)  # one that came twice would be read as the next
    assert (run.stdout.read(), run.wait()) == ("", 0)


@pytest.mark.parametrize("first", [os.kill, os.killpg])
def test_simultaneous_signals_are_told_apart(tmp_path: Path, first: Callable[[int, int], None]) -> None:
    """Signals that arrive together are told apart.

    Also where the first is to us alone and the other to the group.
    """
    command = exec_command(tmp_path / "run", TELLS % "")
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    first(run.pid, signal.SIGTERM)
    os.killpg(run.pid, signal.SIGINT)
    assert sorted(run.stdout.readline() for _ in range(2)) == ["15\n", "2\n"]
    os.killpg(run.pid, signal.SIGHUP)
    assert (run.stdout.read(), run.wait()) == ("1\n", 0)


def test_handled_notice_is_no_interrupt(tmp_path: Path) -> None:
    """A notice that the program handles is no interruption."""
    program = """
import os, signal, time
noticed = []
signal.signal(signal.SIGUSR1, lambda *_: noticed.append("noticed"))
os.kill(os.getppid(), signal.SIGUSR1)
while not noticed:
    time.sleep(0.01)
print(*noticed)
"""
    command = exec_command(tmp_path / "run", program)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "noticed\n")
    assert "interrupted" not in done.stderr
    assert Recording.open(tmp_path / "run").ending == Ending(exit_code=0, interrupted_by=None)


def test_stopped_run_goes_on(tmp_path: Path) -> None:
    """Ctrl-Z and `fg` are no signal to the command, however long it takes between them."""
    command = exec_command(tmp_path / "run", "import sys; print('ready', flush=True); sys.exit(len(input()))")
    run = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, start_new_session=True)
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    for _ in range(3):
        run.send_signal(signal.SIGSTOP)
        time.sleep(3 * POLL_SECONDS)
        run.send_signal(signal.SIGCONT)
        time.sleep(POLL_SECONDS / 2)
    _, errors = run.communicate("seven..\n", timeout=60)
    assert run.returncode == 7, errors
    assert Recording.open(tmp_path / "run").ending == Ending(exit_code=7, interrupted_by=None)


def test_closed_terminal_reaches_command(tmp_path: Path) -> None:
    """The command hears that its terminal goes away.

    The kernel tells only the session's leader, which is us.
    """
    command = exec_command(tmp_path / "run", TELLS % f"os.dup2(os.open({str(tmp_path / 'told')!r}, 65), 1)")
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execv(command[0], command)
    while not (tmp_path / "told").exists() or "ready" not in (tmp_path / "told").read_text():
        time.sleep(0.02)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "told").read_text() == "ready\n1\n"


def test_group_watcher_reports_once() -> None:
    """A group watcher reports each signal once, and ends with its starter."""
    program = """
import os, signal, time
from rltrace.run.group_watcher import GroupWatcher
signal.pthread_sigmask(signal.SIG_BLOCK, {1, 2, 15})
group_watcher = GroupWatcher()
for asked in ((1,), (2, 15), (1,)):
    for number in asked:
        os.kill(group_watcher.pid, number)
    had = []
    while len(had) < len(asked):
        had += [number for number in (1, 2, 15) if group_watcher.had(number)]
    time.sleep(0.2)  # one that came twice would be seen now
    print([sorted(had), [number for number in (1, 2, 15) if group_watcher.had(number)]])
print(group_watcher.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    *told, pid = done.stdout.splitlines()
    assert told == ["[[1], []]", "[[2, 15], []]", "[[1], []]"], done.stderr
    for _ in range(3000):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{pid} is still there")


def test_group_watcher_without_a_processor() -> None:
    """A group watcher needs no processor to report a signal: on a busy machine it may have none for a while."""
    program = """
import os, signal
from rltrace.run.group_watcher import GroupWatcher
signal.pthread_sigmask(signal.SIG_BLOCK, {1, 2, 15})
group_watcher = GroupWatcher()
os.kill(group_watcher.pid, signal.SIGSTOP)
os.waitpid(group_watcher.pid, os.WUNTRACED)
os.kill(group_watcher.pid, 15)
print([number for number in (1, 2, 15) if group_watcher.had(number)])
group_watcher.let_end()
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[15]\n", done.stderr


def test_asked_to_end_is_not_the_cause(tmp_path: Path) -> None:
    """Of deaths seen at once, a process that was asked to end is not the cause."""
    written = Written(tmp_path / "run")
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for key, child in zip("ab", children, strict=True):
        written.process(key, span("engine.step", 0, 1), role="engine", rank=0, pid=child.pid)
    watch = _Watch(tmp_path / "run")
    for child, number in zip(children, (signal.SIGTERM, signal.SIGKILL), strict=True):
        child.send_signal(number)
        child.wait()
    died = watch.died({child.pid: child.returncode for child in children})
    assert [death.signal for death in died] == [signal.SIGKILL, signal.SIGTERM]


@pytest.mark.parametrize(
    ("role", "code", "ended_s", "is_death"),
    [
        ("worker", -signal.SIGKILL, None, True),
        ("helper", -signal.SIGKILL, None, False),  # it may come and go
        ("worker", 1, None, False),  # it left by itself, as Ray's do when their driver has ended
        ("worker", -signal.SIGKILL, 2, False),  # it had ended its part
    ],
)
def test_only_signals_kill(tmp_path: Path, role: str, code: int, ended_s: float | None, is_death: bool) -> None:
    """A process that is gone counts as dead only if a signal killed it before its end and the run needs it."""
    child = subprocess.Popen(["true"])
    written = Written(tmp_path / "run")
    written.process("p", span("actor.update", 0, 1), role=role, rank=0, pid=child.pid, ended_s=ended_s)
    child.wait()
    died = _Watch(tmp_path / "run").died({child.pid: code})
    assert [death.pid for death in died] == ([child.pid] if is_death else [])
    process = Process(tmp_path / "run" / "processes" / "p")
    assert process.killed_by == (-code if code < 0 and ended_s is None else None)


@pytest.mark.parametrize("ran", [True, False])
def test_killed_with_its_cluster_is_not_dead(tmp_path: Path, ran: bool) -> None:
    """A process that is killed with the cluster that its driver has left did not die.

    Ray kills the workers that take longer than it likes; one that was gone before is why the driver left, maybe.
    """
    written = Written(tmp_path / "run")
    us = {"pid": os.getpid(), "start_ticks": manifest.started_ticks(os.getpid())}
    written.process("d", span("ray.get", 0, 1), role="driver", **us)
    written.process("w", span("actor.update", 0, 1), role="worker", parent="d", **us)
    child = subprocess.Popen(["sleep", "60"])
    written.process("e", span("engine.step", 0, 1), role="engine", pid=child.pid, parent="w")
    watch = _Watch(tmp_path / "run")
    with (tmp_path / "run/processes/d/process.jsonl").open("a") as lines:
        lines.write(json.dumps({"kind": "left", "running": ["d", "w", *(["e"] if ran else [])]}) + "\n")
    child.kill()
    child.wait()
    assert [death.name for death in watch.died({child.pid: -signal.SIGKILL})] == ([] if ran else ["engine"])
    process = Process(tmp_path / "run/processes/e")
    assert (process.killed_by, process.end_ns is None) == ((None, False) if ran else (signal.SIGKILL, True))


def test_untold_end_is_when_it_was_seen(tmp_path: Path) -> None:
    """A process whose end nobody can tell ended when it was seen to be gone.

    And not with the supervisor, though only then is it known that the run ended well.
    """
    child = subprocess.Popen(["true"])
    child.wait()
    Written(tmp_path / "run").process("p", span("work", 0, 1), pid=child.pid)
    watch = _Watch(tmp_path / "run")
    before_ns = clock.now_ns()
    watch.died({})
    seen_ns = clock.now_ns()
    watch.close({}, ended_well=True)
    end_ns = Process(tmp_path / "run" / "processes" / "p").end_ns
    assert end_ns is not None and before_ns <= end_ns <= seen_ns


def test_parent_and_command_come_first(tmp_path: Path) -> None:
    """Of deaths seen at once, the parent and then the command come first."""
    children = [subprocess.Popen(["true"]) for _ in range(2)]
    written = Written(tmp_path / "run")
    for child, key, parent in zip(children, ("a", "b"), ("b", None), strict=True):
        written.process(key, span("actor.update", 0, 1), role="worker", rank=0, pid=child.pid, parent=parent)
        child.wait()
    died = _Watch(tmp_path / "run").died({child.pid: -signal.SIGKILL for child in children})
    assert [death.pid for death in died] == [children[1].pid, children[0].pid]
    supervisor = _Supervisor(os.getpid(), tmp_path / "run", is_our_run=True)
    supervisor.deaths = died
    supervisor._command_was_killed(signal.SIGSEGV)
    assert [death.name for death in supervisor.deaths] == ["the command", "rank 0 worker", "rank 0 worker"]


@pytest.mark.parametrize("is_our_run", [True, False])
def test_second_interrupt_hurries(tmp_path: Path, is_our_run: bool) -> None:
    """A second interrupt ends the run at once.

    The first time the command is given time to leave; the second time none. A program of one's own may go on.
    """
    Written(tmp_path / "run")
    command = subprocess.Popen(["sleep", "60"])
    supervisor = _Supervisor(command.pid, tmp_path / "run", is_our_run=is_our_run)
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    deadlines = []
    try:
        for _ in range(2):
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            supervisor._take_signal(5)
            deadlines.append(supervisor.deadline)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        command.kill()
        command.wait()
    assert supervisor.interrupted_by == signal.SIGTERM
    if is_our_run:
        assert deadlines[0] is not None and deadlines[0] > time.monotonic() - 60
        assert deadlines[1] == 0.0
    else:
        assert deadlines == [None, None]


def shell(line: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a line of shell; its 9 is the stdout that it was started with."""
    words = ["bash", "-c", f"exec 9>&1; {line}"]
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=60, **options)


def exec_line(folder: Path, *command: str | Path, options: str = "") -> str:
    """A line of shell that runs a command under `rltrace exec`."""
    words = [sys.executable, "-c", CLI, "exec", *options.split(), "--out", folder, "--", *command]
    return shlex.join(map(str, words))


# Everything that only watches, and what is said in the end.
ALL_BROKEN = """
import rltrace.cli.exec, rltrace.run.supervisor as s
def broken(*_, **__):
    raise ZeroDivisionError("a bug of ours")
s.ProcessTree.look = s.ProcessTree.write = s.GroupWatcher.__init__ = s.sampler.start = s._adopt_orphans = broken
s._Watch.died = s._Watch.close = s._Watch.name = s.ending.write = rltrace.cli.exec._say = broken
s._Supervisor._collect_from_cluster = s._Supervisor._finish = s._Supervisor._clear = broken
"""


@pytest.mark.parametrize(("end", "code"), [("exit 4", 4), ("kill -9 $$", 137)])
def test_own_bugs_keep_signals_and_code(tmp_path: Path, end: str, code: int) -> None:
    """Our own bugs change neither the signals nor the exit code of a command.

    Every step but waiting and handing on fails; it is said once, and once more of what is said in the end.
    """
    command = exec_command(tmp_path / "run", "")[:-3]
    command[2] = ALL_BROKEN + CLI
    script = f'trap "echo noticed; {end}" USR1; echo ready; while :; do sleep 0.05; done'
    run = subprocess.Popen([*command, "sh", "-c", script], stdout=-1, stderr=-1, text=True, start_new_session=True)
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    time.sleep(0.3)  # the watching has failed by now
    run.send_signal(signal.SIGUSR1)
    out, errors = run.communicate(timeout=60)
    assert (run.returncode, out) == (code, "noticed\n")
    assert errors.splitlines()[1:] == [  # the first one says where it is recorded
        "rltrace: the command runs on, but rltrace cannot watch all of it: ZeroDivisionError: a bug of ours",
        "rltrace: this screen is incomplete: a bug of ours",
    ]


# Writes down which files it has in the places of stdin, stdout and stderr, and leaves.
STREAMS = """
import os, signal, sys
def place(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}").partition(":")[0]
    except OSError:
        return None
places = [place(number) for number in range(3)]
with open(sys.argv[1], "w") as told:
    print(places, file=told)
os.kill(os.getpid(), signal.SIGTERM) if sys.argv[2] == "killed" else sys.exit(4)
"""


@pytest.mark.parametrize("streams", ["1>&-", "0<&- 1>&- 2>&-", "2>/dev/full"])
@pytest.mark.parametrize(("end", "code"), [("exit", 4), ("killed", 143)])
def test_bad_streams_keep_exit_code(tmp_path: Path, streams: str, end: str, code: int) -> None:
    """Closed and full streams do not change the exit code.

    And the command's own are as they were: nothing of ours is in the place of one that is closed.
    """
    words = (sys.executable, "-ISc", STREAMS, str(tmp_path / "streams"), end)
    seen = []
    for line in (exec_line(tmp_path / "run", *words, options="--sample 0.2"), shlex.join(words)):
        done = shell(f"{line} {streams}; echo $? >&9", stdin=subprocess.DEVNULL)
        seen.append((done.stdout, (tmp_path / "streams").read_text()))
    assert seen[0] == seen[1]
    assert Recording.open(tmp_path / "run").ending == Ending(exit_code=code, interrupted_by=None)


@pytest.mark.parametrize(("end", "code"), [("sys.exit(4)", 4), ("os.kill(os.getpid(), 9)", 137)])
def test_a_command_may_delete_its_recording(tmp_path: Path, end: str, code: int) -> None:
    program = """
import os, shutil, signal, sys, time
import rltrace
with rltrace.span("before"):
    while len(os.listdir(os.environ["RLTRACE_DIR"] + "/processes")) < 2:  # until the sampler is there too
        time.sleep(0.01)
    shutil.rmtree(os.environ["RLTRACE_DIR"])
with rltrace.span("after"):
    noticed = []
    signal.signal(signal.SIGUSR1, lambda *_: noticed.append("noticed"))
    time.sleep(0.3)
    os.kill(os.getppid(), signal.SIGUSR1)
    while not noticed:
        time.sleep(0.01)
print(*noticed, flush=True)
"""
    command = exec_command(tmp_path / "run", program + end)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "noticed\n")
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    for said in (
        "recording into",
        "cannot watch all of it",
        "no such file or folder",
        *(["SIGKILL"] if code != 4 else []),
    ):
        assert len([line for line in lines if said in line]) == 1, (said, done.stderr)
    assert all(line.startswith("rltrace: ") for line in lines) and len({*lines}) == len(lines), lines


def test_more_processes_than_files(tmp_path: Path) -> None:
    """More processes than files may be open are watched."""
    program = """
import os, sys
import rltrace
at_work, tell = os.pipe()
go_on, release = os.pipe()
children = []
for number in range(100):
    if (child := os.fork()) == 0:
        with rltrace.span("child"):
            os.write(tell, b"x")
            os.read(go_on, 1)
        os._exit(0)
    children.append(child)
told = b""
while len(told) < 100:
    told += os.read(at_work, 100)
os.write(release, b"x" * 100)
print([os.waitpid(child, 0)[1] for child in children] == [0] * 100)
sys.exit(5)
"""
    line = exec_line(tmp_path / "run", sys.executable, "-c", program, options="--sample 0")
    done = shell(f"ulimit -n 80; {line}")
    assert (done.returncode, done.stdout) == (5, "True\n"), done.stderr
    assert done.stderr.splitlines()[1].startswith("rltrace: recorded in ")
    assert len(Recording.open(tmp_path / "run").processes) == 101


@pytest.mark.parametrize(
    ("before", "command", "code"),
    [
        pytest.param("ulimit -n 6", "exit 4", 4, id="no file left for the sampler"),
        pytest.param("trap '' CHLD", "exit 4", 4, id="nobody is told of children"),
        pytest.param("trap '' CHLD", "kill -9 $$", 137, id="nobody is told of children, and it is killed"),
        pytest.param("ulimit -f 4", "exit 4", 4, id="no room for what processes say"),
        pytest.param("exec >&-", "(sleep 0.2 &); exit 4", 4, id="a daemon is left"),
    ],
)
def test_shortage_keeps_exit_code(tmp_path: Path, before: str, command: str, code: int) -> None:
    """Whatever is short, a command keeps its own exit code."""
    line = exec_line(tmp_path / "run", "sh", "-c", command, options="--sample 0.2")
    done = shell(f"{before}; {line}")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_script_without_interpreter(tmp_path: Path) -> None:
    """A script that names no interpreter runs as a shell runs it."""
    script = tmp_path / "script"
    script.write_text("echo $1; exit 6\n")
    script.chmod(0o755)
    done = shell(exec_line(tmp_path / "run", script, "word"))
    assert (done.returncode, done.stdout) == (6, "word\n"), done.stderr


def test_unrunnable_program_is_one_line(tmp_path: Path) -> None:
    """A program that cannot be run is one line, after the one that says where it is recorded."""
    script = tmp_path / "script"
    script.write_text("#!/there/is/no/such/interpreter\n")
    script.chmod(0o755)
    done = shell(exec_line(tmp_path / "run", script))
    assert done.returncode == 126
    assert done.stderr.splitlines()[1:] == [f"rltrace: {script}: cannot be run: No such file or directory"]


def test_deleted_recording_keeps_end(start: Callable[[str], Run]) -> None:
    """A run whose Recording is deleted ends as it would otherwise."""
    run = start("told")
    everybody = run.everybody()
    shutil.rmtree(run.folder, ignore_errors=True)
    for rank in range(2):
        os.kill(everybody[f"rank {rank} engine"].pid, signal.SIGUSR1)
    code, errors = run.end()
    assert code == 0
    assert len(errors.splitlines()) == 1
