"""The nodes of a Ray cluster, seen from beside a traced run: reads their clocks and fetches what was recorded there.

This is a Ray job of its own with one small actor a node, in a process of its own. The traced program neither runs it
nor waits for it, and nothing of it needs a port that Ray does not have.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rltrace.errors import MissingExtraError, RltraceError
from rltrace.host import clock, regular_file
from rltrace.read import alignment
from rltrace.read.alignment import Domain
from rltrace.record import allocation_steps, cluster
from rltrace.record.manifest import PROCESSES, host_name

EXCHANGES = 50
"""Of one round: only the shortest is kept."""
CALL_SECONDS = 20.0
"""For a node to answer; one that was switched off does not say so."""
START_SECONDS = 120.0
"""For a node to start a Python process and import Ray."""


class NodeError(Exception):
    """One node that does not answer, or is gone."""


class Agent:
    """What runs on a node."""

    def __init__(self, run_id: str) -> None:
        self.folder = cluster.spool(run_id) / PROCESSES

    def whoami(self) -> tuple[str, Domain]:
        """Host and clock domain."""
        return host_name(), _domain()

    def now_ns(self) -> int:
        """The node's clock."""
        return clock.now_ns()

    def digests(self) -> dict[str, str]:
        """Every file that processes of the run wrote here, by its path below `processes/`."""
        files = sorted(path for path in self.folder.glob("*/*") if path.is_file())
        return {str(path.relative_to(self.folder)): digest(content(path)) for path in files}

    def read(self, path: str) -> bytes:
        """One of these files."""
        return content(self.folder / path)

    def tell_steps(self, told: list[str]) -> list[str]:
        """Add what processes of other nodes said of chosen steps; returns all that is known here."""
        return allocation_steps.merge(self.folder.parent, told) if self.folder.exists() else []


class Node:
    """A node and the agent on it."""

    def __init__(self, node_id: str, host: str, agent: Any) -> None:
        self.node_id, self.host, self.agent = node_id, host, agent
        self.domain: Domain | None = None
        """Once it has answered."""

    def call(self, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """What the agent's method returns.

        Raises:
            NodeError: the node is gone, does not answer, or has no rltrace.
        """
        import ray

        try:
            return ray.get(getattr(self.agent, method).remote(*arguments), timeout=seconds)
        except ray.exceptions.RayError as error:
            raise NodeError(f"node {self.host}: {_why(error)}") from None

    def exchange(self) -> tuple[int, int, int]:
        """One look at the node's clock: sent, read there, received.

        Raises:
            NodeError: as of `call`.
        """
        sent_ns = clock.now_ns()
        read_ns = self.call("now_ns")
        return sent_ns, read_ns, clock.now_ns()


class Nodes:
    """The nodes of a cluster, as long as the job lasts."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.known: dict[str, Node] = {}
        self._silent: set[str] = set()
        """Ids of those that did not answer when they were told of steps."""

    def alive(self) -> list[Node]:
        """Every node that is up, those that joined since the last call too."""
        import ray

        found = []
        for row in ray.nodes():
            if row["Alive"]:
                node_id = str(row["NodeID"])
                if node_id not in self.known:
                    self.known[node_id] = self._join(node_id, str(row["NodeManagerHostname"]))
                found.append(self.known[node_id])
        return found

    def lost(self) -> list[Node]:
        """Nodes that were up once and are not any more."""
        up = {node.node_id for node in self.alive()}
        return [node for node in self.known.values() if node.node_id not in up]

    def read_clocks(self, recording: Path) -> list[str]:
        """Append a reading of every clock that is not ours to the Recording.

        Returns:
            What is wrong, one line a node that did not answer.
        """
        failures = []
        for node in self.alive():
            try:
                text = self._reading(node)
            except NodeError as error:
                failures.append(str(error))
                continue
            if text:
                with (recording / alignment.FILE).open("a") as file:
                    file.write(text)
        return failures

    def tell_steps(self, recording: Path) -> None:
        """Let every process of the run know which chosen steps run, whichever node they run on.

        A node that does not answer is left out from then on: the others must not wait for it.
        """
        known = allocation_steps.lines(recording)
        for node in self.known.values():
            if node.node_id in self._silent:
                continue
            try:
                known = allocation_steps.merge(recording, node.call("tell_steps", known))
            except NodeError:
                self._silent.add(node.node_id)
            except OSError:  # a full disk here: the clocks and the segments are still to be read
                return

    def _reading(self, node: Node) -> str | None:
        if node.domain is None:
            node.host, node.domain = node.call("whoami", seconds=START_SECONDS)
        if node.domain == _domain():
            return None
        shortest = min((node.exchange() for _ in range(EXCHANGES)), key=lambda times: times[2] - times[0])
        assert node.domain is not None
        return alignment.line(_domain(), node.domain, shortest, host=node.host, exchanges=EXCHANGES)

    def _join(self, node_id: str, host: str) -> Node:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
        agent = ray.remote(num_cpus=0)(Agent).options(scheduling_strategy=pinned).remote(self.run_id)
        return Node(node_id, host, agent)


@contextlib.contextmanager
def join(address: str, run_id: str, authentication: str | None = None) -> Iterator[Nodes]:
    """Be a job of the cluster for a while.

    Args:
        address: `host:port`, or "auto" for the one of this machine.
        run_id: Of the run.
        authentication: As the run's driver did, where our own environment says nothing of that: to who names an address
            Ray does not look for a token by itself.

    Raises:
        RltraceError: nothing answers there, or it is no Ray cluster.
        MissingExtraError: Ray is not installed.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # read when Ray is imported: one line of ours is enough
    if authentication is not None:
        os.environ.setdefault(cluster.AUTHENTICATION_VARIABLE, authentication)  # likewise
    try:
        import ray
    except ImportError:
        raise MissingExtraError(
            "other hosts are reached through Ray, not installed here",
            "run",
            ", or run this where Ray is; of a run on one host all is here already",
        ) from None
    _require_listener(address)
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    try:
        ray.init(address=address, namespace=f"rltrace-{run_id}", log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise RltraceError(f"{address}: cannot join this Ray cluster: {_why(error)}; {_NEXT_STEP}") from None
    try:
        yield Nodes(run_id)
    finally:
        ray.shutdown()


_NEXT_STEP = "give the address that `ray start --head` printed with --address, as long as the cluster is up"


def _require_listener(address: str) -> None:
    """Ray itself takes half a minute to find that nobody is there.

    Raises:
        RltraceError: nobody is there.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RltraceError(f"{address}: not an address of a Ray cluster, which is host:port; {_NEXT_STEP}")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise RltraceError(f"{address}: no Ray cluster answers there: {error}; {_NEXT_STEP}") from None


def content(path: Path) -> bytes:
    """A file of a process; of a segment, what was written into it."""
    data = regular_file.read(path)
    return data.rstrip(b"\0") if path.suffix == ".seg" else data  # a record never ends in a zero


def digest(data: bytes) -> str:
    """Tells two contents of one file apart."""
    return blake2b(data, digest_size=16).hexdigest()


def _domain() -> Domain:
    said = clock.domain()
    return said["boot_id"], said["time_namespace"]


def _why(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}" if words else type(error).__name__
