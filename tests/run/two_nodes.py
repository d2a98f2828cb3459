"""A Ray cluster of two nodes on one machine whose clocks differ as those of two hosts do, by a known function."""

from __future__ import annotations

import contextlib
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

from other_clock import RENAMED, OtherClock, require_namespaces

import rltrace

ROOT = Path(rltrace.__file__).parents[1]
DRIFT_PPM = -900
"""As far as two clocks may be apart whose drift nobody measured, and slow: what it times seems too early."""


@dataclass(frozen=True)
class Cluster:
    """Two nodes: this host's and `second`."""

    address: str
    environment: dict[str, str]
    """For what talks to it."""
    clock: OtherClock
    """The second node's."""
    second: subprocess.Popen[bytes]
    spool: Path
    """Where the second host keeps temporary files."""

    def true_ns(self, shown_ns: int) -> Fraction:
        """This host's clock when the second one's showed this, to a nanosecond."""
        return self.clock.true_ns(shown_ns)

    def kill_second(self) -> None:
        """Power off: nothing of that node runs any more, nothing was said."""
        os.killpg(self.second.pid, signal.SIGKILL)
        self.second.wait()


@contextmanager
def two_nodes(folder: Path) -> Iterator[Cluster]:
    """Start it; one CPU a node."""
    require_namespaces()
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
    clock = OtherClock.begin(folder / "drifting", ppm=DRIFT_PPM)
    spool = folder / "spool"
    spool.mkdir()
    theirs = environment | {
        "PYTHONPATH": os.pathsep.join([str(clock.folder), environment["PYTHONPATH"]]),
        "TMPDIR": str(spool),
    }
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--object-store-memory=80000000"]
    ray.append("--include-log-monitor=false")
    sockets = tempfile.mkdtemp(prefix="rlt-", dir="/tmp")  # short: it holds Unix sockets
    head = [*ray, "--head", "--port=0", "--no-monitor", "--include-dashboard=false", f"--temp-dir={sockets}", "--block"]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        address = re.search(r"--address='([^']+)'", _started(nodes, head, environment, folder / "head.log"))
        assert address is not None
        second = [*RENAMED, *ray, f"--address={address[1]}", "--block"]
        _started(nodes, second, theirs, folder / "second.log")
        yield Cluster(address[1], environment, clock, nodes[1], spool)
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


def _started(nodes: list[subprocess.Popen[bytes]], command: list[str], environment: dict[str, str], log: Path) -> str:
    """Add a node, and return its log once it runs; Ray itself gives up after 30 s, which a busy machine may need."""
    for is_last in (False, False, True):
        node = _start(command, environment, log)
        nodes.append(node)
        while "runtime started" not in log.read_text() and node.poll() is None:
            time.sleep(0.1)
        said = log.read_text()
        if node.poll() is None or is_last or "timed out during startup" not in said:
            break
        nodes.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
    assert node.poll() is None, said
    return said
