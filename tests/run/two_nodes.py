"""A Ray cluster of two nodes on one machine whose clocks differ as those of two hosts do, by a known function.

The second node is in namespaces of its own: time (its CLOCK_MONOTONIC is `OFFSET_NS` ahead), UTS (its host name), and
pid. A time namespace cannot drift, so Python's own `time.monotonic_ns` is wrapped in that node's processes, before
rltrace is imported: what is under test knows nothing of it and has no switch for it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest

import rltrace

ROOT = Path(rltrace.__file__).parents[1]
SECOND = 1_000_000_000
OFFSET_NS = 12_345 * SECOND
DRIFT_PPM = -900
"""As far as two clocks may be apart whose drift nobody measured, and slow: what it times seems too early."""

NAMESPACES = ["unshare", "--time", "--monotonic", str(OFFSET_NS // SECOND), "--uts", "--pid", "--mount-proc", "--fork"]

DRIFTING = """
import time

true_ns = time.monotonic_ns


def monotonic_ns():
    now_ns = true_ns()
    return now_ns + (now_ns - {zero_ns}) * {ppm} // 1_000_000


time.monotonic_ns = monotonic_ns
"""


@dataclass(frozen=True)
class Cluster:
    """Two nodes: this host's and `second`."""

    address: str
    environment: dict[str, str]
    """For what talks to it."""
    zero_ns: int
    """What the second node's clock showed when it began to drift."""
    second: subprocess.Popen[bytes]
    spool: Path
    """Where the second host keeps temporary files."""

    def true_ns(self, shown_ns: int) -> Fraction:
        """This host's clock when the second one's showed this, to a nanosecond."""
        return self.zero_ns + Fraction((shown_ns - self.zero_ns) * 1_000_000, 1_000_000 + DRIFT_PPM) - OFFSET_NS

    def kill_second(self) -> None:
        """Power off: nothing of that node runs any more, nothing was said."""
        os.killpg(self.second.pid, signal.SIGKILL)
        self.second.wait()


@contextmanager
def two_nodes(folder: Path) -> Iterator[Cluster]:
    """Start it; one CPU a node."""
    tried = subprocess.run([*NAMESPACES, "true"], check=False, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no time namespaces here: {tried.stderr.strip()}")
    path = [ROOT, ROOT / "exporters", ROOT / "reference_run"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RLTRACE_", "RAY_"))}
    environment = kept | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # a head that is told to end waits for 30 s for its own node
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),  # others on this machine have clusters too
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
    }
    zero_ns = time.monotonic_ns() + OFFSET_NS
    drifting, spool = folder / "drifting", folder / "spool"
    for made in (drifting, spool):
        made.mkdir()
    (drifting / "sitecustomize.py").write_text(DRIFTING.format(zero_ns=zero_ns, ppm=DRIFT_PPM))
    theirs = environment | {
        "PYTHONPATH": os.pathsep.join([str(drifting), environment["PYTHONPATH"]]),
        "TMPDIR": str(spool),
    }
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--object-store-memory=80000000"]
    sockets = tempfile.mkdtemp(prefix="rlt-", dir="/tmp")  # short: it holds Unix sockets
    head = [*ray, "--head", "--port=0", "--include-dashboard=false", f"--temp-dir={sockets}", "--block"]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        nodes.append(_start(head, environment, folder / "head.log"))
        address = re.search(r"--address='([^']+)'", _until(nodes[0], folder / "head.log", "runtime started"))
        assert address is not None
        renamed = [*NAMESPACES, "--kill-child", "sh", "-c", 'hostname second && exec "$@"', "second"]
        nodes.append(_start([*renamed, *ray, f"--address={address[1]}", "--block"], theirs, folder / "second.log"))
        _until(nodes[1], folder / "second.log", "runtime started")
        yield Cluster(address[1], environment, zero_ns, nodes[1], spool)
    finally:
        for node in reversed(nodes):
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGTERM if node is nodes[0] else signal.SIGKILL)
                node.wait()
        shutil.rmtree(sockets, ignore_errors=True)


def _start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def _until(node: subprocess.Popen[bytes], log: Path, words: str) -> str:
    """The log of a node once it says so."""
    while words not in log.read_text():
        assert node.poll() is None, log.read_text()
        time.sleep(0.1)
    return log.read_text()
