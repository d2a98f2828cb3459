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
MEMORY_SECONDS = 0.1
"""Between two looks at the GPUs' memory, which comes and goes faster than all else, and is cheap to ask for."""


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
    tick_s = min(options.interval, MEMORY_SECONDS) if sampler.has_gpus else options.interval
    due_s = whole_due_s = time.monotonic()
    while not is_over(max(0.0, due_s - time.monotonic())):
        is_whole = due_s >= whole_due_s
        sampler.sample(is_whole=is_whole)
        due_s = max(due_s + tick_s, time.monotonic())
        if is_whole:
            whole_due_s = max(whole_due_s + options.interval, time.monotonic())
    lifecycle.stop()
    return 0


class Sampler:
    """The sources that this host has; one that is not available is reported once, with the reason."""

    def __init__(self, recording: Path) -> None:
        self._unavailable: set[str] = set()
        self._said: dict[str, float] = {}
        """The last samples of the GPUs' memory."""
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

    @property
    def has_gpus(self) -> bool:
        """Whether there is any whose memory comes and goes."""
        return bool(self._gpus)

    def sample(self, *, is_whole: bool = True) -> None:
        """Write one sample; what fails is said once and tried again.

        Args:
            is_whole: Of everything; else of the GPUs' memory, where it has changed.
        """
        try:
            for name, value in self._samples() if is_whole else self._changes():
                spans.counter(name, value)
            if is_whole:
                spans.counter("sampler.cpu_seconds", time.process_time())
        except Exception as error:
            self._say("sample", f"{type(error).__name__}: {error}")

    def _samples(self) -> Iterator[tuple[str, float]]:
        yield from self._memory()
        if self._host is not None:
            yield from self._host.sample()
        keys = {} if self._host is None else self._host.keys_by_pid()
        for gpu in self._gpus:
            yield from gpu.sample(keys)
            for what, reason in gpu.unavailable.items():
                self._say(f"{what}/{gpu.uuid}", reason)

    def _changes(self) -> Iterator[tuple[str, float]]:
        said = dict(self._said)
        return ((name, value) for name, value in self._memory() if said.get(name) != value)

    def _memory(self) -> Iterator[tuple[str, float]]:
        for gpu in self._gpus:
            for name, value in gpu.sample_memory():
                self._said[name] = value
                yield name, value


if __name__ == "__main__":
    sys.exit(main())
