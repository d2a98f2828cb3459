"""What a host and the run's processes on it use: processor, memory, resident pages. Values go out, nothing is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from rltrace.events import WAITED_FOR_PROCESSOR, subject
from rltrace.read.recording import Process
from rltrace.record.manifest import LINES, PROCESSES, host_name

SHARE_OF_TIME = 0.002
"""The share of one processor that walking the pages of all processes may take; 4 GiB of small pages take 60 ms."""


class Host:
    """This host, and the processes on it that record into one Recording."""

    def __init__(self, recording: Path) -> None:
        self._run = RunProcesses(recording)
        self._pages_due_s = 0.0
        self._met: set[str] = set()
        """Processes that were sampled before: a share of a processor needs an interval to be a share of."""
        psutil.cpu_percent()

    def sample(self) -> Iterator[tuple[str, float]]:
        """Yield the counters with their values now, without those of processes that ended meanwhile."""
        cpu_percent = psutil.cpu_percent()
        if self._met:
            yield "host.cpu_percent", cpu_percent
        yield "host.available_bytes", psutil.virtual_memory().available
        processes = self._run.alive()
        for key, process in processes.items():
            yield from _quietly(_totals(key, process, has_interval=key in self._met))
        self._met = {*processes}
        if time.monotonic() >= self._pages_due_s:
            yield from self._pages(processes)

    def keys_by_pid(self) -> dict[int, str]:
        """Return the keys of the processes of the last sample, by pid."""
        return self._run.keys_by_pid()

    def _pages(self, processes: dict[str, psutil.Process]) -> Iterator[tuple[str, float]]:
        """Yield pages by who shares them. The kernel walks them all: the longer that takes, the later we ask again."""
        before_s = time.thread_time()
        for key, process in processes.items():
            yield from _quietly(_own_pages(key, process))
        self._pages_due_s = time.monotonic() + (time.thread_time() - before_s) / SHARE_OF_TIME


def _totals(key: str, process: psutil.Process, *, has_interval: bool) -> Iterator[tuple[str, float]]:
    cpu_percent = process.cpu_percent()
    if has_interval:
        yield subject("process.cpu_percent", key), cpu_percent
    if (waited_s := waited_for_processor_s(process.pid)) is not None:
        yield subject(WAITED_FOR_PROCESSOR, key), waited_s
    if resident_bytes := process.memory_info().rss:  # 0: it has just ended
        yield subject("process.resident_bytes", key), resident_bytes


def waited_for_processor_s(pid: int) -> float | None:
    """Return how long a process's main thread has waited in a run queue; None if the kernel does not count that.

    The second number of the file (Documentation/scheduler/sched-stats.rst).
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def _own_pages(key: str, process: psutil.Process) -> Iterator[tuple[str, float]]:
    pages = process.memory_full_info()
    if not pages.rss:  # it has just ended
        return
    yield subject("process.pss_bytes", key), pages.pss
    yield subject("process.uss_bytes", key), pages.uss


def _quietly(samples: Iterator[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Yield samples until the process is gone, or turns out to be another user's."""
    try:
        yield from samples
    except psutil.Error:
        return


class RunProcesses:
    """The processes of a run that are alive on this host, by their folders in the Recording."""

    def __init__(self, recording: Path) -> None:
        self._folder = recording / PROCESSES
        self._known: set[str] = set()
        self._alive: dict[str, psutil.Process] = {}

    def alive(self) -> dict[str, psutil.Process]:
        """Return them by key, including those that joined since the last call."""
        for folder in self._folder.iterdir():
            if folder.name not in self._known and (folder / LINES).exists():
                self._meet(folder)
        self._alive = {key: process for key, process in self._alive.items() if process.is_running()}
        return self._alive

    def keys_by_pid(self) -> dict[int, str]:
        """Return the keys of the processes that were alive at the last call of `alive`, by pid."""
        return {process.pid: key for key, process in self._alive.items()}

    def _meet(self, folder: Path) -> None:
        process = Process(folder)
        if not process.pid:  # its first line is not written yet
            return
        self._known.add(process.key)
        if process.host == host_name() and process.is_alive:
            try:
                self._alive[process.key] = psutil.Process(process.pid)
            except psutil.NoSuchProcess:
                pass
