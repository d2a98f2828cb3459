"""`python -m rltrace.sampler RECORDING`: one process per host, which samples the host while a run goes on.

It is a process of its own, so that no thread of a traced process ever waits for NVML or walks its pages. It joins the
Recording as any process does, and touches no other process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rltrace.events import SAMPLER
from rltrace.host.machine import machine
from rltrace.record import lifecycle, spans
from rltrace.record.announcement import complain
from rltrace.run.sidecar import Sidecar, is_over

if TYPE_CHECKING:
    from rltrace.host.nvml import Gpu
    from rltrace.run.host_usage import Host

INTERVAL_SECONDS = 1.0


def start(recording: Path, interval_s: float) -> Sidecar | None:
    """Start the sampler of this host.

    Args:
        recording: Folder of the Recording.
        interval_s: Seconds between two samples.

    Returns:
        The sampler; None if it cannot be started, which is reported and stops nothing else.
    """
    try:
        return Sidecar("rltrace.run.sampler", str(recording), "--interval", str(interval_s))
    except OSError as error:
        complain(f"this host is not sampled: {error}")
        return None


def main(arguments: list[str] | None = None) -> int:
    """Sample until the run ends."""
    parser = argparse.ArgumentParser(prog="python -m rltrace.sampler", description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--interval", type=float, default=INTERVAL_SECONDS, help="seconds between two samples")
    options = parser.parse_args(arguments)
    if lifecycle.join(options.recording, role=SAMPLER) is None:
        return 1
    lifecycle.identify(machine=machine())
    sampler = Sampler(options.recording)
    due_s = time.monotonic()
    while not is_over(max(0.0, due_s - time.monotonic())):
        sampler.sample()
        due_s = max(due_s + options.interval, time.monotonic())
    lifecycle.stop()
    return 0


class Sampler:
    """The sources that this host has; one that is not available is reported once, with the reason."""

    def __init__(self, recording: Path) -> None:
        self._unavailable: set[str] = set()
        self._host = self._open_host(recording)
        self._gpus = self._open_gpus()

    def _open_host(self, recording: Path) -> Host | None:
        try:
            from rltrace.run.host_usage import Host
        except ImportError:
            self._say("host", "the package psutil is not installed")
            return None
        return Host(recording)

    def _open_gpus(self) -> list[Gpu]:
        from rltrace.host import nvml

        try:
            return nvml.gpus()
        except nvml.UnavailableError as reason:
            self._say("gpu", str(reason))
            return []

    def _say(self, what: str, reason: str) -> None:
        if what not in self._unavailable and spans.current() is not None:
            self._unavailable.add(what)
            lifecycle.unavailable(what, reason)

    def sample(self) -> None:
        """Write one sample of everything; a failure is reported once, and tried again the next time."""
        try:
            for name, value in self._samples():
                spans.counter(name, value)
            spans.counter("sampler.cpu_seconds", time.process_time())
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
