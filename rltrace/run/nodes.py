"""The nodes of a Ray cluster: reads their clocks, and fetches what was recorded on them, from beside a traced run.

This is a Ray job of its own, in a process of its own, with one small actor per node. The traced program neither runs it
nor waits for it, and it needs no port besides Ray's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rltrace.errors import MissingExtraError, RltraceError
from rltrace.host import clock
from rltrace.host.clock import Domain
from rltrace.read.recording import Process
from rltrace.record import allocation_steps, clock_readings, cluster
from rltrace.record.manifest import PROCESSES, host_name
from rltrace.record.step_numbers import numbers
from rltrace.run.abridgement import NOTHING, Given, StepRow, abridge, by_clock
from rltrace.run.process_files import ProcessFiles

EXCHANGES = 50
"""Exchanges in one round; only the shortest is kept."""
CALL_SECONDS = 20.0
"""How long a node may take to answer; one that was switched off never does."""
ABRIDGE_SECONDS = 3600.0
"""How long a node may take to make columns of its segments; 10**8 records take some minutes."""
ABRIDGED = "abridged"
"""Folder of what was made for a collection, beside the processes on a node."""
START_SECONDS = 120.0
"""How long a node may take to start a Python process and import Ray."""


class NodeError(Exception):
    """A node that does not answer, or is gone."""


class Agent:
    """The actor that runs on a node."""

    def __init__(self, run_id: str) -> None:
        self.spool = cluster.spool(run_id)
        self.files = ProcessFiles(self.spool / PROCESSES)

    def whoami(self) -> tuple[str, Domain]:
        """Return the host and its clock domain."""
        return host_name(), clock.own_domain()

    def now_ns(self) -> int:
        """Return the time by the node's clock."""
        return clock.now_ns()

    def digests(self) -> dict[str, str]:
        """Return a digest of every file that processes of the run wrote here, by its path below `processes/`."""
        return self.files.digests()

    def read(self, path: str) -> bytes:
        """Return the content of one of these files."""
        return self.files.read(path)

    def segment_bytes(self) -> int:
        """Return how many bytes of segments processes of the run wrote here."""
        return sum(process.segment_bytes() for process in self._processes())

    def abridge(self, steps: list[StepRow], chosen: str, here: dict[str, list[str]]) -> tuple[str, Given]:
        """Have the files of processes be those with only some steps whole, until `forget`; return where all is, and
        what is given of it.

        Args:
            steps: Of the run, by this node's clock.
            chosen: Which of them stay whole.
            here: By process, the segments that are files where they go.
        """
        self.forget()
        made = self.spool / ABRIDGED / secrets.token_hex(8)
        known, numbers_, given = by_clock(steps, lambda time_ns: time_ns), numbers(chosen, has_periods=True), NOTHING
        for process in self._processes():
            own = known if process.clock_domain == clock.own_domain() else None
            given += abridge(process, own, numbers_, made / process.key, frozenset(here.get(process.key, ())))
        self.files = ProcessFiles(made)
        return str(self.spool), given

    def forget(self) -> None:
        """Remove what `abridge` made, and give whole files again."""
        shutil.rmtree(self.spool / ABRIDGED, ignore_errors=True)
        self.files = ProcessFiles(self.spool / PROCESSES)

    def _processes(self) -> list[Process]:
        folders = sorted((self.spool / PROCESSES).glob("*/"))
        return [process for folder in folders if (process := Process(folder)).is_identified]

    def tell_steps(self, told: list[str]) -> list[str]:
        """Add what processes of other nodes said about chosen steps; return all that is known here."""
        return allocation_steps.merge(self.spool, told) if (self.spool / PROCESSES).exists() else []


class Node:
    """A node and the agent on it."""

    def __init__(self, node_id: str, host: str, agent: Any) -> None:
        self.node_id, self.host, self.agent = node_id, host, agent
        self.domain: Domain | None = None
        """Its clock domain; None until it has answered."""

    def call(self, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Call a method of the agent, and return what it returns.

        Raises:
            NodeError: the node is gone, does not answer, or has no rltrace.
        """
        import ray

        try:
            return ray.get(getattr(self.agent, method).remote(*arguments), timeout=seconds)
        except ray.exceptions.RayError as error:
            raise NodeError(f"node {self.host}: {_why(error)}") from None

    def digests(self) -> dict[str, str]:
        """Return what its agent's `digests` returns, for a collection; raises as `call` does."""
        return dict(self.call("digests"))

    def read(self, path: str) -> bytes:
        """Return what its agent's `read` returns, likewise."""
        return bytes(self.call("read", path))

    def segment_bytes(self) -> int:
        """Return what its agent's `segment_bytes` returns, likewise."""
        return int(self.call("segment_bytes"))

    def abridge(self, steps: list[StepRow], chosen: str, here: dict[str, list[str]]) -> tuple[str, Given]:
        """Return what its agent's `abridge` returns, likewise; that takes the longer, the more was recorded."""
        where, given = self.call("abridge", steps, chosen, here, seconds=ABRIDGE_SECONDS)
        return str(where), Given(*given)

    def forget(self) -> None:
        """Call its agent's `forget`, likewise."""
        self.call("forget")

    def exchange(self) -> tuple[int, int, int]:
        """Read the node's clock once: when we sent the request, the time there, and when we received the answer.

        Raises:
            NodeError: the node did not answer, as for `call`.
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
        """Ids of the nodes that did not answer when they were told of steps."""

    def alive(self) -> list[Node]:
        """Return every node that is up, including those that joined since the last call."""
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
        """Return the nodes that were up once and are gone now."""
        up = {node.node_id for node in self.alive()}
        return [node for node in self.known.values() if node.node_id not in up]

    def read_clocks(self, recording: Path) -> list[str]:
        """Append a reading of every clock that is not ours to the Recording.

        Returns:
            What went wrong, one line per node that did not answer.
        """
        failures = []
        for node in self.alive():
            try:
                text = self._reading(node)
            except NodeError as error:
                failures.append(str(error))
                continue
            if text:
                clock_readings.append(recording, text)
        return failures

    def tell_steps(self, recording: Path) -> None:
        """Tell the processes of all nodes which chosen steps run, whichever node they run on.

        A node that does not answer is skipped from then on, so that the others need not wait for it.
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
        if node.domain == clock.own_domain():
            return None
        shortest = clock_readings.shortest([node.exchange() for _ in range(EXCHANGES)])
        assert node.domain is not None
        return clock_readings.line(clock.own_domain(), node.domain, shortest, host=node.host, exchanges=EXCHANGES)

    def _join(self, node_id: str, host: str) -> Node:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
        agent = ray.remote(num_cpus=0)(Agent).options(scheduling_strategy=pinned).remote(self.run_id)
        return Node(node_id, host, agent)


@contextlib.contextmanager
def join(address: str, run_id: str, authentication: str | None = None) -> Iterator[Nodes]:
    """Join the cluster as a job for a while.

    Args:
        address: `host:port`, or "auto" for the cluster of this machine.
        run_id: Id of the run.
        authentication: How the run's driver authenticated, used if our own environment does not say. Ray looks for no
            token by itself if it is given an address.

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
            "rltrace reaches other hosts through Ray, which is not installed here",
            "run",
            ", or run this where Ray is installed; a run on a single host is complete without it",
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


_NEXT_STEP = "while the cluster is up, name it with --address, as `ray start --head` printed it"


def _require_listener(address: str) -> None:
    """Check that somebody listens there; Ray itself takes half a minute to find that nobody does.

    Raises:
        RltraceError: nobody listens there.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RltraceError(f"{address}: not the address of a Ray cluster, which has the form host:port; {_NEXT_STEP}")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise RltraceError(f"{address}: no Ray cluster answers there: {error}; {_NEXT_STEP}") from None


def _why(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}" if words else type(error).__name__
