"""The driver's side of the workers: Ray starts one per rank; a call is dispatched, executed and collected."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rltrace.errors import RunError
from rltrace_reference import garbage, process_exit
from rltrace_reference.config import Config
from rltrace_reference.reaper import Reaper
from rltrace_reference.worker import Worker

OBJECT_STORE_BYTES = 80 << 20
SETTLE_SECONDS = 3.0
"""How long a failed call waits to learn whether a process died: its peers' broken collectives are reported first."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # Ray would start a process per CPU that no actor of ours ever uses
    "OMP_NUM_THREADS": "1",  # results must not depend on the machine's cores
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Address of a run on this machine only."""


class WorkerGroup:
    """One worker per rank, each in a bundle of its own of one placement group; a context manager."""

    def __init__(self, config: Config, run_id: str, on_call: Callable[[str], None] = lambda method: None) -> None:
        """Start Ray and the workers and set them up.

        Args:
            config: The run.
            run_id: Unique, for what must be unique beyond this run.
            on_call: Called with the method of each call.
        """
        self.config, self.on_call = config, on_call
        self.temp_folder = tempfile.mkdtemp(prefix="rlt-", dir="/tmp")  # short: it holds Unix sockets
        self.workers: list[Any] = []
        self.watches: list[Any] = []
        self.pids: list[dict[str, Any]] = []
        self.pidfds: list[int | None] = []
        """Pidfds of the workers on this host."""
        self.reaper = Reaper(self.temp_folder)
        try:
            _start_ray(config, self.temp_folder)
            self._start_workers(run_id)
        except BaseException:
            self.close()
            raise

    def _start_workers(self, run_id: str) -> None:
        ranks = range(self.config.ranks)
        gpus = int(self.config.device == "cuda")
        group = placement_group([{"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}] * len(ranks), strategy="PACK")
        # `watch` needs a thread beside the one that the other methods run on. A GPU of one's own: Ray lets a worker,
        # and the engine it starts, see no other.
        remote = ray.remote(num_cpus=1, num_gpus=gpus, concurrency_groups={"watch": 1})(Worker)
        self.workers = [
            remote.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            ).remote(rank, self.config, run_id)
            for rank in ranks
        ]
        self.watches = [worker.watch.options(concurrency_group="watch").remote() for worker in self.workers]
        self.pids = self.call("pids", [() for _ in ranks])
        self.pidfds = [os.pidfd_open(of_rank["worker"]) if _is_here(of_rank) else None for of_rank in self.pids]
        (store,) = self.collect(self.execute([self.workers[0].open_store.remote()]))
        self.call("setup", [store for _ in ranks])
        garbage.freeze()

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run a method on every rank.

        Args:
            method: Name of a method of `Worker`.
            arguments: Arguments of each rank.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RunError: a rank failed or a process died; says which.
        """
        self.on_call(method)
        return self.collect(self.execute(self.dispatch(method, arguments)))

    @contextlib.contextmanager
    def recording(self, what: str, wanted: bool) -> Iterator[None]:
        """Record every one of something during what is called inside, if that is wanted.

        Args:
            what: "kernels" (operators too) or "allocations".
            wanted: If False, nothing is called.
        """
        if wanted:
            self.call(what, [(True,)] * self.config.ranks)
        yield
        if wanted:
            self.call(what, [(False,)] * self.config.ranks)

    def dispatch(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send each rank its call; return one reference per rank."""
        return [
            getattr(worker, method).remote(*of_rank) for worker, of_rank in zip(self.workers, arguments, strict=True)
        ]

    def execute(self, references: list[Any]) -> list[Any]:
        """Wait until every rank is done.

        Raises:
            RunError: as soon as the first one fails, or a worker or an engine dies, whatever it was doing.
        """
        pending = list(references)
        while pending:
            try:
                done, _ = ray.wait(pending + self.watches, num_returns=1)
            except SystemExit:
                raise SystemExit(_exit_code) from None  # Ray makes 1 of what a signal handler raises while it waits
            for reference in done:
                self._check(reference)
                pending.remove(reference)
        return references

    def collect(self, references: list[Any]) -> list[Any]:
        """Return the results of each rank, in rank order."""
        results: list[Any] = ray.get(references)
        return results

    def _check(self, reference: Any) -> None:
        """Raise a RunError if what has ended here is a process, or a call that failed."""
        if reference in self.watches:
            raise RunError(self._death(reference))
        try:
            ray.get(reference)
        except RayError as error:
            ended, _ = ray.wait(self.watches, num_returns=1, timeout=SETTLE_SECONDS)
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, RunError) or not ended:
                raise RunError(_one_line(cause)) from None
            raise RunError(self._death(ended[0])) from None

    def _death(self, watch: Any) -> str:
        """Return who died, from the watch that ended."""
        rank = self.watches.index(watch)
        try:
            return str(ray.get(watch))
        except RayActorError:
            if not self.pids:
                return f"worker of rank {rank} died while it started"
            pid, pidfd = self.pids[rank]["worker"], self.pidfds[rank]
            code = None if pidfd is None else process_exit.exit_code(pidfd)
            where = "" if pidfd is not None else f" on {self.pids[rank]['host']}"
            return f"worker of rank {rank} (pid {pid}{where}) died: {process_exit.in_words(code)}"
        except RayTaskError as error:
            return f"worker of rank {rank}: {_one_line(error.cause)}"

    def close(self) -> None:
        """End every process of the run: gently while all are well, then with Ray itself."""
        ray.shutdown()
        self.reaper.close()
        for pidfd in self.pidfds:
            if pidfd is not None:
                os.close(pidfd)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.watches = []  # from here on an engine may end
            self.call("close", [()] * self.config.ranks)
            self._end_workers()
        self.close()

    def _end_workers(self) -> None:
        """Let the workers run their exit handlers, which Ray's shutdown does not wait for."""
        for worker in self.workers:
            worker.__ray_terminate__.remote()
        end = time.monotonic() + 5
        while time.monotonic() < end and any(_alive(of_rank["worker"]) for of_rank in self.pids if _is_here(of_rank)):
            time.sleep(0.02)


def _start_ray(config: Config, temp_folder: str) -> None:
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    if config.ray_address is None:
        _start_private_ray(config, temp_folder)
    else:
        _join_cluster(config, config.ray_address)
    signal.signal(signal.SIGTERM, _leave)  # Ray's own handler prints its stack and ends nothing gently


def _join_cluster(config: Config, address: str) -> None:
    """Become a job of an existing Ray cluster; the workers get this run's environment wherever they are.

    Raises:
        RunError: nobody answers there, or the cluster is smaller than the run.
    """
    own = {name: value for name, value in os.environ.items() if name.startswith(("GLOO_", "NCCL_"))}
    try:
        _require_listener(address)
        ray.init(
            address=address,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": {**ENVIRONMENT, **own}},
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(f"ray_address: cannot join a Ray cluster at {address}: {_one_line(error)}") from None
    kind = "GPU" if config.device == "cuda" else "CPU"
    there = int(ray.cluster_resources().get(kind, 0))
    if there < config.ranks:
        raise RunError(f"ranks: {config.ranks}, and the cluster at {address} has {there} {kind}s; use ranks: {there}")


def _require_listener(address: str) -> None:
    """Ask once whether somebody listens there; Ray itself waits forever.

    Raises:
        OSError: nobody does.
        ValueError: the address is not `host:port`.
    """
    if address != "auto":
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()


def _start_private_ray(config: Config, temp_folder: str) -> None:
    """Start a private, quiet Ray on this machine; its processes inherit this one's environment and die with it."""
    for name, value in (ENVIRONMENT | LOOPBACK).items():
        os.environ.setdefault(name, value)
    ray.init(
        address="local",
        num_cpus=config.ranks,
        num_gpus=config.ranks if config.device == "cuda" else 0,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=temp_folder,
        _node_ip_address="127.0.0.1",
    )


_exit_code: int | None = None
"""Exit code of a driver that was told to end."""


def _leave(number: int, frame: FrameType | None) -> None:
    """End the driver by way of every `finally`, with the exit code of a shell."""
    global _exit_code
    _exit_code = 128 + number
    sys.exit(_exit_code)


def _is_here(of_rank: dict[str, Any]) -> bool:
    return bool(of_rank["host"] == socket.gethostname())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, RunError) else f"{type(error).__name__}: {text[:500]}"
