"""A second host on this machine, whose clock differs from this one's by a known function.

It is in namespaces of its own: time (its CLOCK_MONOTONIC is `OFFSET_NS` ahead), UTS (its host name), and pid. A time
namespace neither drifts nor jumps, so Python's own `time.monotonic_ns` is wrapped in that host's processes, before
rltrace is imported: what is under test knows nothing of it and has no switch for it.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest

SECOND = 1_000_000_000
OFFSET_NS = 12_345 * SECOND

_NAMESPACES = ["unshare", "--time", "--monotonic", str(OFFSET_NS // SECOND), "--uts", "--pid", "--mount-proc", "--fork"]
RENAMED = [*_NAMESPACES, "--kill-child", "sh", "-c", 'hostname second && exec "$@"', "second"]
"""In front of a command that runs on the second host."""

_WRAPPED = """
import time

true_ns = time.monotonic_ns
jumps_at_ns = None if {jump_ns} else float("inf")


def monotonic_ns():
    global jumps_at_ns
    now_ns = true_ns()
    if jumps_at_ns is None:
        try:
            with open({jump_file!r}) as file:
                jumps_at_ns = int(file.read())
        except OSError:
            pass
    jumped_ns = 0 if jumps_at_ns is None or now_ns < jumps_at_ns else {jump_ns}
    return now_ns + (now_ns - {zero_ns}) * {ppm} // 1_000_000 + jumped_ns


time.monotonic_ns = monotonic_ns
"""
"""Its `sitecustomize`. When it jumps stands in a file, so that all processes of the host jump at once."""


@dataclass(frozen=True)
class OtherClock:
    """What the second host's clock shows."""

    folder: Path
    zero_ns: int
    """When it began to drift, by the clock of its time namespace."""
    ppm: int
    jump_ns: int

    @classmethod
    def begin(cls, folder: Path, *, ppm: int, jump_ns: int = 0) -> OtherClock:
        """Make it; `folder` belongs first on the PYTHONPATH of the second host."""
        folder.mkdir()
        made = cls(folder, time.monotonic_ns() + OFFSET_NS, ppm, jump_ns)
        source = _WRAPPED.format(zero_ns=made.zero_ns, ppm=ppm, jump_ns=jump_ns, jump_file=str(made.jump_file))
        (folder / "sitecustomize.py").write_text(source)
        return made

    @property
    def jump_file(self) -> Path:
        """Has the time, by the clock of the time namespace, when it jumps."""
        return self.folder / "jumps_at_ns"

    def jump(self) -> None:
        """Let it jump in a moment, for all processes at once."""
        unfinished = self.folder / "unfinished"
        unfinished.write_text(str(time.monotonic_ns() + OFFSET_NS + SECOND // 2))
        unfinished.rename(self.jump_file)

    def true_ns(self, shown_ns: int) -> Fraction:
        """This host's clock when the second one's showed this, to a nanosecond."""
        if self.jump_file.exists():
            jumps_at_ns = int(self.jump_file.read_text())
            if shown_ns >= self._drifted_ns(jumps_at_ns) + self.jump_ns:
                shown_ns -= self.jump_ns
        return self.zero_ns + Fraction((shown_ns - self.zero_ns) * 1_000_000, 1_000_000 + self.ppm) - OFFSET_NS

    def _drifted_ns(self, now_ns: int) -> int:
        return now_ns + (now_ns - self.zero_ns) * self.ppm // 1_000_000


def require_namespaces() -> None:
    """Skip a test where there are none."""
    tried = subprocess.run([*_NAMESPACES, "true"], check=False, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no time namespaces here: {tried.stderr.strip()}")
