"""Runs a command traced, watches every process that records, and leaves none of them behind. Linux only.

The Recording says who lives and who died: a process died if its pid is gone and its folder has no `end` line. The
supervisor is the subreaper of all processes it starts, so that it also finds daemons whose parent died, such as Ray's
raylet. The command stays in the supervisor's process group: Ctrl-C, Ctrl-Z, `timeout` and standard input work as
without rltrace. If a command makes a group of its own, the supervisor forwards to it what was sent to the supervisor's
group.

The command comes first. Waiting for it and forwarding signals needs no file, no other process and no Recording.
Everything else only watches; if a step of that fails, it is reported once and the command runs on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rltrace.errors import RltraceError, RunError
from rltrace.hooks.environment import traced_environment
from rltrace.host import clock
from rltrace.host.awaited_signals import take_signal
from rltrace.host.parents import running_parent_of
from rltrace.read import ending
from rltrace.read.recording import Process
from rltrace.record import allocation_steps, chosen_steps, cluster, disk_account, trackers
from rltrace.record.announcement import complain
from rltrace.record.manifest import LINES, PROCESSES
from rltrace.record.process import append_exit
from rltrace.run import live_export, sampler
from rltrace.run.group_watcher import GroupWatcher
from rltrace.run.sidecar import Sidecar
from rltrace.run.untraced import ProcessTree

POLL_SECONDS = 0.1
GROUP_SECONDS = 0.1
"""The same signal twice within this time counts as one: `timeout` sends a signal to its child first and then to the
whole group."""
DEATH_GRACE_SECONDS = 12.0
"""How long the command may take to end by itself after one of its processes died."""
TERMINATE_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""
COLLECT_SECONDS = 300.0
"""How long collecting what other hosts recorded may take."""
STEP_TOTALS = "rltrace.run.step_totals"
"""What adds up steps for trackers. It imports all of the analysis, so it is started and not imported here."""
TELL_SECONDS = 1.0
"""How long the process that adds up steps may take to end."""
SEND_SECONDS = live_export.FLUSH_SECONDS + 5.0
"""How long sending the rest to a collector may take."""
LEAVE_SECONDS = 10.0
"""How long daemons may take to end by themselves after a command that ended well; then they are told to."""

DISK_SECONDS = 0.5
"""Time between two looks at the disk budget."""
KEEPER_SHARE = 0.3
"""Share of the disk budget above which a process of ours gets ready to make old steps brief."""

FILES_LEFT = 64
"""Files that pidfds must leave free of those we may open; there is one pidfd per process that records."""

WATCHED_ROLES = frozenset({"driver", "worker", "engine"})
"""Roles that a run needs; other processes may come and go."""

COMMAND_NOT_RUN = 126
COMMAND_NOT_FOUND = 127
_INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (*_INTERRUPTING, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are forwarded. The program decides what the others mean: a job queue's notice, a dump of its stacks."""
_AWAITED = frozenset({*_FORWARDED, signal.SIGCHLD})
_NO_ROOM = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Death:
    """A process that is gone without having ended its part of the Recording."""

    name: str
    pid: int
    signal: int | None
    """The signal that killed it; None if only its parent was told, or if it exited by itself."""

    def __str__(self) -> str:
        if self.signal is None:
            return f"{self.name} (pid {self.pid}) died without reporting why (killed, out of memory, or crashed)"
        return f"{self.name} (pid {self.pid}) was killed by {signal.Signals(self.signal).name}"

    @property
    def is_certain(self) -> bool:
        """Whether it was killed for certain. Otherwise it may have exited by itself, and this kernel cannot tell."""
        return self.signal is not None


@dataclass(frozen=True)
class Outcome:
    """How a supervised command ended."""

    exit_code: int
    """The command's exit code; 128 + the signal's number if a signal killed it."""
    deaths: tuple[Death, ...] = field(default=())
    """Processes that died while the command was running, in the order in which we saw it."""
    interrupted_by: int | None = None
    """SIGINT, SIGTERM or SIGHUP, if the user stopped it."""


def supervise(
    command: Sequence[str],
    recording: Path,
    *,
    is_our_run: bool,
    sample_seconds: float = 0.0,
    otlp: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a command under a Recording and wait for it.

    Args:
        command: Program and arguments.
        recording: Folder with a manifest.
        is_our_run: If True, the whole run is ended when one of its drivers, workers or engines died, and its daemons
            get time to end after it. If False, we only watch: a user's program may survive a death, and leave daemons.
        sample_seconds: Seconds between two samples of this host by the sampler's process; 0 for none.
        otlp: Variables of a process that sends the Recording to a collector; None for none.

    Raises:
        RltraceError: there is no such program, or it cannot be run.
    """
    require_program(command[0])
    recording = recording.absolute()
    tried = _Tried()
    tried(_adopt_orphans)
    with _own_signals() as give_back:
        group_watcher = tried(GroupWatcher)
        try:
            pid = _start(command, recording, give_back)
        except OSError as error:
            if group_watcher is None or error.errno not in _NO_ROOM:
                raise _not_run(command, error) from None
            group_watcher.let_end()  # its place is the command's
            os.waitpid(group_watcher.pid, 0)
            group_watcher = None
            try:
                pid = _start(command, recording, give_back)
            except OSError as again:
                raise _not_run(command, again) from None
        sampling = tried(sampler.start, recording, sample_seconds) if sample_seconds else None
        sending = None if otlp is None else tried(live_export.start, recording, otlp)
        telling = tried(Sidecar, STEP_TOTALS, str(recording)) if trackers.are_wanted(os.environ) else None
        return _Supervisor(pid, recording, is_our_run, sampling, group_watcher, tried, sending, telling).wait()


class _Tried:
    """Runs steps that only watch: the first failure is reported, and none of them keeps the command waiting."""

    def __init__(self) -> None:
        self._is_said = False

    def __call__(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Run a step and return what it returns; None if it fails."""
        try:
            return step(*arguments)
        except Exception as error:
            if not self._is_said:
                self._is_said = True
                complain(f"the command runs on, but rltrace cannot watch all of it: {type(error).__name__}: {error}")
            return None


@contextlib.contextmanager
def _own_signals() -> Iterator[Callable[[], None]]:
    """Block signals so that we take them when we ask; yield a function that restores a child's original signals."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    # Whoever ignores it, as our starter may, is never told how a child ended.
    of_children = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL

    def give_back() -> None:
        signal.signal(signal.SIGCHLD, of_children)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        yield give_back
    finally:
        while take_signal(_FORWARDED, 0) is not None:  # too late for the command, and not for us
            pass
        give_back()


def require_program(name: str) -> None:
    """Refuse a program that does not exist.

    Raises:
        RltraceError: the shell would not find it either.
    """
    if shutil.which(name) is None:
        error = RltraceError(
            f"{name}: no such program, or it is not executable; give one that is on the PATH, or its path"
        )
        error.exit_code = COMMAND_NOT_FOUND
        raise error


def _start(command: Sequence[str], recording: Path, give_back: Callable[[], None]) -> int:
    """Start the command with the signals that we were started with, and return its pid.

    Raises:
        OSError: it cannot be run, or there is no room for a process.
    """
    environment = traced_environment(recording, os.environ)
    try:
        process = subprocess.Popen(command, env=environment, preexec_fn=give_back)  # noqa: PLW1509
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        in_shell = ["/bin/sh", _script(command), *command[1:]]
        process = subprocess.Popen(in_shell, env=environment, preexec_fn=give_back)  # noqa: PLW1509
    process.returncode = 0  # we reap it ourselves, with all other children
    return process.pid


def become(command: Sequence[str]) -> NoReturn:
    """Run the command in place of this process, as it would run without us.

    Raises:
        RltraceError: it cannot be run.
    """
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise _not_run(command, error) from None
    os.execv("/bin/sh", ["/bin/sh", _script(command), *command[1:]])


def _script(command: Sequence[str]) -> str:
    """Return the path of a script without `#!`, which a shell runs."""
    return shutil.which(command[0]) or command[0]


def _not_run(command: Sequence[str], why: OSError) -> RltraceError:
    error = RltraceError(f"{command[0]}: cannot be run: {why.strerror or why}")
    error.exit_code = COMMAND_NOT_RUN
    return error


class _Supervisor:
    def __init__(
        self,
        pid: int,
        recording: Path,
        is_our_run: bool,
        sampling: Sidecar | None = None,
        group_watcher: GroupWatcher | None = None,
        tried: _Tried | None = None,
        sending: Sidecar | None = None,
        telling: Sidecar | None = None,
    ) -> None:
        self.pid = pid
        self.recording = recording
        self.is_our_run = is_our_run
        self.watch = _Watch(recording)
        self.sampling = sampling
        self.sending = sending
        """The sidecar that sends the Recording to a collector."""
        self.telling = telling
        """The sidecar that adds up steps for trackers."""
        self.collecting: Sidecar | None = None
        """The sidecar that reads the clocks of a cluster's nodes and collects from them, if the driver joined a
        cluster."""
        self.keeping: Sidecar | None = None
        """The sidecar that keeps to the disk budget, if so much was recorded."""
        self.look_at_disk_s = 0.0
        self.group_watcher = group_watcher
        """None if there is none: then every signal that reaches us is forwarded."""
        self.tried = tried or _Tried()
        beside = [ours.pid for ours in (group_watcher, sampling, sending, telling) if ours is not None]
        self.tree = ProcessTree(os.getpid(), recording, apart=beside)
        self.exit_codes: dict[int, int] = {}
        """Exit codes of children and adopted orphans that are gone; a negative one is a signal."""
        self.deaths: list[Death] = []
        self.interrupted_by: int | None = None
        self.deadline: float | None = None
        """When the command is ended by force."""

    def wait(self) -> Outcome:
        """Wait until the command and everything it started are over."""
        while self.pid not in self.exit_codes:
            self.tried(self.tree.look)
            self._take_signal(POLL_SECONDS)
            self._reap()
            self.tried(self._look_for_deaths)
            self.tried(self._collect_from_cluster)
            self.tried(self._keep_to_budget)
            if self.deadline is not None and time.monotonic() > self.deadline:
                break
        code = self.exit_codes.get(self.pid)
        if code is not None and code < 0 and self.interrupted_by is None:
            self._command_was_killed(-code)
        self.tried(self._finish, self.collecting, COLLECT_SECONDS)
        self.tried(self._finish, self.sampling, TERMINATE_SECONDS)
        self.tried(self._finish, self.keeping, TERMINATE_SECONDS)
        self.tried(self._finish, self.telling, TELL_SECONDS)
        self.tried(self._dismiss_bystander)
        self.tried(self._clear, code == 0)
        self.tried(self.watch.close, self.exit_codes, code == 0)
        self.tried(self._finish, self.sending, SEND_SECONDS)
        self.tried(self.tree.write)
        code = self.exit_codes.get(self.pid, -signal.SIGKILL) if code is None else code
        outcome = Outcome(128 - code if code < 0 else code, tuple(self.deaths), self.interrupted_by)
        self.tried(ending.write, self.recording, ending.Ending(outcome.exit_code, outcome.interrupted_by))
        return outcome

    def _take_signal(self, seconds: float) -> None:
        number = take_signal(_AWAITED, seconds)
        if number is None or number == signal.SIGCHLD:
            return
        is_over = self.pid in self.exit_codes
        if number in _INTERRUPTING:
            self._interrupt(number, is_over)
        if not is_over and not self._has_had(number):
            _send(self.pid, number)

    def _interrupt(self, number: int, is_over: bool) -> None:
        """Handle the user's request to stop the run."""
        if self.interrupted_by is not None and (self.is_our_run or is_over):  # asked twice: now
            self.deadline = 0.0
        self.interrupted_by = number
        self.watch.is_stopping = True  # whoever is killed now, by us or by the command's own shutdown
        if self.is_our_run and self.deadline is None:
            self.deadline = time.monotonic() + LEAVE_SECONDS

    def _has_had(self, number: int) -> bool:
        """Return whether the command received a signal of ours too, because it was sent to the whole process group."""
        time.sleep(GROUP_SECONDS)
        take_signal({number}, 0)  # sent to us, then to the group: it is the same one
        is_to_group = self.group_watcher is not None and self.tried(self.group_watcher.had, number)
        return bool(is_to_group) and os.getpgid(self.pid) == os.getpgrp()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.exit_codes[pid] = os.waitstatus_to_exitcode(status)

    def _look_for_deaths(self) -> None:
        died = self.watch.died(self.exit_codes)
        if self.interrupted_by is not None:
            return
        self.deaths += [death for death in died if death.pid != self.pid]
        if self.is_our_run and self.deaths and self.deadline is None:
            self.deadline = time.monotonic() + DEATH_GRACE_SECONDS
            self.watch.is_stopping = True

    def _collect_from_cluster(self) -> None:
        """Start the sidecar that collects, once the driver has said that it joined a cluster."""
        if self.collecting is None and (self.recording / cluster.FILE).exists():
            variables = allocation_steps.VARIABLE, allocation_steps.KERNELS_VARIABLE, chosen_steps.STEPS_VARIABLE
            chosen = next(filter(None, (os.environ.get(name) for name in variables)), "")
            self.collecting = Sidecar("rltrace.run.cluster_sidecar", str(self.recording), chosen)
            self.exit_codes.pop(self.collecting.pid, None)  # of an earlier process

    def _keep_to_budget(self) -> None:
        """Start the sidecar that makes old steps brief, once enough of the disk budget is spent."""
        if self.keeping is not None or time.monotonic() < self.look_at_disk_s:
            return
        self.look_at_disk_s = time.monotonic() + DISK_SECONDS
        if disk_account.share_used(self.recording) > KEEPER_SHARE:
            self.keeping = Sidecar("rltrace.run.disk_keeper", str(self.recording))
            self.tree.leave_out(self.keeping.pid)
            self.exit_codes.pop(self.keeping.pid, None)  # of an earlier process

    def _finish(self, sidecar: Sidecar | None, seconds: float) -> None:
        """Let a sidecar end within this time, or within `TERMINATE_SECONDS` once the user is in a hurry."""
        if sidecar is None:
            return
        sidecar.let_end()
        began = time.monotonic()
        while sidecar.pid not in self.exit_codes:
            if time.monotonic() - began > (TERMINATE_SECONDS if self.deadline == 0.0 else seconds):
                _send(sidecar.pid, signal.SIGKILL)
            self._take_signal(POLL_SECONDS)
            self._reap()

    def _dismiss_bystander(self) -> None:
        if (
            self.group_watcher is not None and self.group_watcher.pid not in self.exit_codes
        ):  # or its pid may be another's
            self.group_watcher.let_end()

    def _command_was_killed(self, number: int) -> None:
        """Put the command first among the deaths, whatever else was seen to die in the same moment."""
        name = self.tried(self.watch.name, self.pid) or "the command"
        self.deaths.insert(0, Death(name, self.pid, number))

    def _clear(self, is_well: bool) -> None:
        """Leave no process behind."""
        if not self.is_our_run and is_well:
            return
        if is_well:
            self._until_gone(LEAVE_SECONDS)
        self.tried(self.watch.died, self.exit_codes)  # who went before it is told to
        self.watch.is_stopping = True
        for number, seconds in ((signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, TERMINATE_SECONDS)):
            for pid in self._others():
                _send(pid, number)
                _send(pid, signal.SIGCONT)
            if self._until_gone(seconds):
                return

    def _others(self) -> list[int]:
        """Return what runs below us, without the sidecar that is still sending."""
        sending = None if self.sending is None else self.sending.pid
        return [pid for pid in descendants(os.getpid()) if pid != sending]

    def _until_gone(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            self._reap()
            if not self._others():
                return True
            if time.monotonic() > deadline:
                return False
            self._take_signal_in_end()

    def _take_signal_in_end(self) -> None:
        take_signal(_AWAITED, POLL_SECONDS)


class _Watch:
    """The processes of a Recording that run on this host."""

    def __init__(self, recording: Path) -> None:
        self.folder = recording / PROCESSES
        self.known: set[str] = set()
        self.running: dict[str, tuple[Process, int | None]] = {}
        """Running processes by key. Each has a pidfd while there is room for files: it says how the process ended even
        if somebody else is its parent."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.pidfds_left = (1 << 20 if files == resource.RLIM_INFINITY else files) - FILES_LEFT
        self.pids: dict[int, str] = {}
        """The folder of each pid's last interpreter."""
        self.unexplained: list[tuple[Process, int]] = []
        """Processes that are gone without this kernel saying how, each with the time when we saw it."""
        self.is_stopping = False
        """Whether a process that is killed now dies because another one died, or because the user stopped the run."""

    def died(self, exit_codes: Mapping[int, int]) -> list[Death]:
        """Return who is gone since the last call without having ended its part; the likeliest cause and parents come
        first.

        A process that exited by itself is not among them: a Ray worker exits with status 1 when its driver has ended.
        Nor is one that Ray ended with its cluster, even by SIGKILL.
        """
        self._find_new()
        gone = [key for key, (process, _) in self.running.items() if not process.is_alive]
        deaths = []
        for key in sorted(gone):
            process, pidfd = self.running.pop(key)
            code = _exit_code(process.pid, pidfd, exit_codes)
            self._close(pidfd)
            last = Process(process.folder)  # it may have said more since: its role, its end
            if last.end_ns is not None:
                continue
            if code != 0 and self._was_left_running(last):
                code = 0
            if code is not None or self.is_stopping:
                self._note(last, code or 0, clock.now_ns())
            else:
                self.unexplained.append((last, clock.now_ns()))
            if last.role in WATCHED_ROLES and (code is None or code < 0):
                deaths.append((last, Death(last.name, last.pid, None if code is None else -code)))
        keys = {process.key for process, _ in deaths}
        # Of those seen at once, one that was asked to end by SIGTERM was so because another had died.
        return [
            death
            for _, death in sorted(deaths, key=lambda item: (item[1].signal == signal.SIGTERM, item[0].parent in keys))
        ]

    def close(self, exit_codes: Mapping[int, int], ended_well: bool) -> None:
        """Look for the last time. In a run that ended well nobody died, even if this kernel could not tell."""
        self.died(exit_codes)
        for process, gone_ns in self.unexplained if ended_well else ():
            self._note(process, 0, gone_ns)
        for _, pidfd in self.running.values():
            self._close(pidfd)

    def _open(self, pid: int) -> int | None:
        """Return a pidfd; None if the process is gone, or if there is no room for one."""
        if self.pidfds_left <= 0:
            return None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        self.pidfds_left -= 1
        return pidfd

    def _close(self, pidfd: int | None) -> None:
        if pidfd is not None:
            self.pidfds_left += 1
            os.close(pidfd)

    def _note(self, process: Process, code: int, gone_ns: int) -> None:
        killed_by = -code if code < 0 else None
        append_exit(process.folder, end_ns=gone_ns, killed_by=killed_by, was_stopped=self.is_stopping)

    def _was_left_running(self, process: Process) -> bool:
        """Return whether it still ran when its driver left its Ray cluster, which then ends its workers."""
        met, above = {process.key}, process.parent
        while above and above not in met:
            met.add(above)
            parent = Process(self.folder / above)
            if process.key in parent.left_running:
                return True
            above = parent.parent
        return False

    def name(self, pid: int) -> str | None:
        """Return what the process with this pid is called in the Recording."""
        self._find_new()
        key = self.pids.get(pid)
        return Process(self.folder / key).name if key else None

    def _find_new(self) -> None:
        for entry in os.scandir(self.folder):
            if entry.name in self.known or not Path(entry.path, LINES).exists():
                continue
            process = Process(Path(entry.path))
            if not process.pid:  # its first line is not written yet
                continue
            self.known.add(entry.name)
            if process.host == os.uname().nodename:
                self.running[entry.name] = process, self._open(process.pid)
                self.pids[process.pid] = entry.name


def descendants(root: int) -> list[int]:
    """Return the pids of all running processes below a process, without itself."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            parent = running_parent_of(int(entry.name))
            if parent is not None:
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


# PIDFD_GET_INFO, Linux 6.15 and newer: include/uapi/linux/pidfd.h
_PIDFD_INFO = struct.Struct("QQ" + 11 * "I" + "i")
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3


def _exit_code(pid: int, pidfd: int | None, exit_codes: Mapping[int, int]) -> int | None:
    """Return how a process ended that is gone, negative for a signal; None if only its parent was told."""
    if pid in exit_codes:
        return exit_codes[pid]
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().split()[-1])  # its parent has not asked yet
        return os.waitstatus_to_exitcode(status)
    except (OSError, ValueError):
        pass
    if pidfd is None:
        return None
    asked = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *([0] * 13)))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, asked)
    except OSError:
        return None
    answered, *_, status = _PIDFD_INFO.unpack(asked)
    return os.waitstatus_to_exitcode(status) if answered & _PIDFD_INFO_EXIT else None


def _adopt_orphans() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise RunError(f"the system does not let rltrace adopt orphaned processes: {os.strerror(ctypes.get_errno())}")
