"""What a host and the run's processes on it take: processor, memory, resident pages. Values out, nothing is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from rltrace.events import subject
from rltrace.read.recording import Process
from rltrace.record.manifest import LINES, PROCESSES, host_name

SHARE_OF_TIME = 0.002
"""Of a processor, that looking through the pages of all processes may take: 60 ms for every 4 GiB of small pages."""


class Host:
    """This host, and the processes on it that record into one Recording."""

    def __init__(self, recording: Path) -> None:
        self._run = RunProcesses(recording)
        self._pages_due_s = 0.0
        self._met: set[str] = set()
        """Asked once: from then on there is an interval that a share of a processor is of."""
        psutil.cpu_percent()

    def sample(self) -> Iterator[tuple[str, float]]:
        """Counters with their values now; of a process that is gone meanwhile, none."""
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
        """The processes of the last sample."""
        return self._run.keys_by_pid()

    def _pages(self, processes: dict[str, psutil.Process]) -> Iterator[tuple[str, float]]:
        """Pages by who shares them: the kernel walks them all, so the longer it took, the later it is asked again."""
        before_s = time.thread_time()
        for key, process in processes.items():
            yield from _quietly(_own_pages(key, process))
        self._pages_due_s = time.monotonic() + (time.thread_time() - before_s) / SHARE_OF_TIME


def _totals(key: str, process: psutil.Process, *, has_interval: bool) -> Iterator[tuple[str, float]]:
    cpu_percent = process.cpu_percent()
    if has_interval:
        yield subject("process.cpu_percent", key), cpu_percent
    if resident_bytes := process.memory_info().rss:  # 0: it has just ended
        yield subject("process.resident_bytes", key), resident_bytes


def _own_pages(key: str, process: psutil.Process) -> Iterator[tuple[str, float]]:
    pages = process.memory_full_info()
    if not pages.rss:  # it has just ended
        return
    yield subject("process.pss_bytes", key), pages.pss
    yield subject("process.uss_bytes", key), pages.uss


def _quietly(samples: Iterator[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Up to where the process is gone, or another user's."""
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
        """By key; who has joined since the last call is among them."""
        for folder in self._folder.iterdir():
            if folder.name not in self._known and (folder / LINES).exists():
                self._meet(folder)
        self._alive = {key: process for key, process in self._alive.items() if process.is_running()}
        return self._alive

    def keys_by_pid(self) -> dict[int, str]:
        """Who was alive at the last call of `alive`."""
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
