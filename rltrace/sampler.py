"""`python -m rltrace.sampler RECORDING`: one process a host that samples it while a run goes on.

A process of its own, so that no thread of a traced one ever waits for NVML or walks its pages. It joins the Recording
as any process does, ends when it is told to (SIGTERM) or when whoever started it is gone, and touches no other process.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rltrace import recorder
from rltrace.events import SAMPLER

if TYPE_CHECKING:
    from rltrace.host import Host
    from rltrace.nvml import Gpu

INTERVAL_SECONDS = 1.0
LOOK_SECONDS = 0.5
"""How often it looks whether its parent is still there."""


def start(recording: Path, interval_s: float) -> int | None:
    """Start the sampler of this host.

    Args:
        recording: Folder of the Recording.
        interval_s: Between two samples.

    Returns:
        Its pid, for the caller to reap; None if it cannot be started, which is said and keeps nothing from running.
    """
    command = [sys.executable, "-m", "rltrace.sampler", str(recording), "--interval", str(interval_s)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLTRACE_")}
    environment["PYTHONSAFEPATH"] = "1"  # a module of the user's folder must not stand in for one of Python's
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    except OSError as error:
        print(f"rltrace: this host is not sampled: {error}", file=sys.stderr)
        return None
    process.returncode = 0  # the supervisor reaps it, with all other children
    return process.pid


def main(arguments: list[str] | None = None) -> int:
    """Sample until the end of the run."""
    parser = argparse.ArgumentParser(prog="python -m rltrace.sampler", description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--interval", type=float, default=INTERVAL_SECONDS, help="seconds between two samples")
    options = parser.parse_args(arguments)
    parent = os.getppid()
    # Ctrl-C is for the run: the sampler is told when that is over.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    if recorder.join(options.recording, role=SAMPLER) is None:
        return 1
    sampler = Sampler(options.recording)
    due_s = time.monotonic()
    while not _is_told_to_end(parent, due_s):
        sampler.sample()
        due_s = max(due_s + options.interval, time.monotonic())
    recorder.stop()
    return 0


def _is_told_to_end(parent: int, due_s: float) -> bool:
    """Wait for the next sample's time, or for the end."""
    while True:
        rest_s = max(0.0, due_s - time.monotonic())
        if signal.sigtimedwait({signal.SIGTERM}, min(rest_s, LOOK_SECONDS)) is not None:
            return True
        if os.getppid() != parent:
            return True
        if rest_s <= LOOK_SECONDS:
            return False


class Sampler:
    """What this host can be asked; what it cannot is said once, with the reason."""

    def __init__(self, recording: Path) -> None:
        self._unavailable: set[str] = set()
        self._host = self._open_host(recording)
        self._gpus = self._open_gpus()

    def _open_host(self, recording: Path) -> Host | None:
        try:
            from rltrace.host import Host
        except ImportError:
            self._say("host", "the package psutil is not installed")
            return None
        return Host(recording)

    def _open_gpus(self) -> list[Gpu]:
        from rltrace import nvml

        try:
            return nvml.gpus()
        except nvml.UnavailableError as reason:
            self._say("gpu", str(reason))
            return []

    def _say(self, what: str, reason: str) -> None:
        current = recorder.current()
        if what not in self._unavailable and current is not None:
            self._unavailable.add(what)
            current.append("unavailable", what=what, reason=reason)

    def sample(self) -> None:
        """Write one sample of everything; what fails is said once and tried again."""
        try:
            for name, value in self._samples():
                recorder.counter(name, value)
            recorder.counter("sampler.cpu_seconds", time.process_time())
        except Exception as error:
            self._say("sample", f"{type(error).__name__}: {error}")

    def _samples(self) -> Iterator[tuple[str, float]]:
        if self._host is not None:
            yield from self._host.sample()
        keys = {} if self._host is None else self._host.keys_by_pid()
        for gpu in self._gpus:
            yield from gpu.sample(keys)
            for what, reason in gpu.unavailable.items():
                self._say(f"{what}/{gpu.uuid}", reason)


if __name__ == "__main__":
    sys.exit(main())
