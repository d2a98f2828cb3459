"""A worker and an engine, two processes on one simulated card: all moments are known, and each hidden source shows.

The engine never waits: it uses processor time all along, and moves memory where nobody looks. So nothing but the stamps
of its samples says which of them belong to the worker's boundaries.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from test_cuda_ledger import DRIVER_BYTES, MIB, Simulated, SleepingPools

import rltrace
from rltrace.analysis import summarize
from rltrace.analysis.ledger import Ledger, ledgers
from rltrace.analysis.looks import CONSISTENT_NS
from rltrace.analysis.observations import Observations
from rltrace.hooks.boundaries import Boundary
from rltrace.instrument.memory.cuda_ledger import CudaLedger
from rltrace.read.recording import Recording

pytestmark = pytest.mark.run

HELD = struct.Struct("qq")


class OneCard(Simulated):
    """The same card as two processes see it, each with an allocator of its own."""

    def __init__(self, shared: mmap.mmap, place: int) -> None:
        super().__init__()
        self._shared, self._place = shared, place

    def _held(self) -> dict[int, int]:
        pid, held_bytes = os.getpid(), self.context_bytes + self.reserved.reserved_bytes - self.asleep_bytes
        HELD.pack_into(self._shared, self._place * HELD.size, pid, held_bytes)
        return dict(HELD.iter_unpack(self._shared[: 2 * HELD.size]))

    def publish(self) -> None:
        """Let the other process's totals have what this one has moved."""
        self._held()


class Engine:
    """An engine's process and what it does; the bytes of the hidden rows are in no row."""

    def __init__(self, gpu: OneCard, hidden: str | None) -> None:
        self.gpu, self.ledger = gpu, CudaLedger(lambda: gpu)
        self.ledger.sample()
        self.pools = SleepingPools(gpu, weights_bytes=1000 * MIB, kv_cache_bytes=2000 * MIB)
        if hidden is not None:
            by_owner = self.pools.bytes_by_owner
            self.pools.bytes_by_owner = lambda: by_owner() | {f"{hidden}_bytes": 0}  # type: ignore[method-assign]
        self.ledger.engine = self.pools
        self.ledger.sample()

    def do(self, what: str) -> None:
        """Do it, work for a while, and see that the card knows."""
        getattr(self, what)()
        self.gpu.publish()
        until_ns = time.process_time_ns() + 2 * CONSISTENT_NS
        while time.process_time_ns() < until_ns:
            """Looks for requests."""

    def unmap(self) -> None:
        self.ledger.reached(Boundary(("cumem.unmap",), is_end=False))
        self.pools.sleep()
        self.ledger.reached(Boundary(("cumem.unmap",)))

    def map(self) -> None:
        self.ledger.reached(Boundary(("cumem.map",), is_end=False))
        self.gpu.asleep_bytes = 0
        self.pools.moves += 1
        self.ledger.reached(Boundary(("cumem.map",)))

    def load(self) -> None:
        self.gpu.allocate(300 * MIB)

    def look(self) -> None:
        """As before it maps its cache."""
        self.ledger.reached(Boundary(("cumem.map",), is_end=False))

    def generate(self) -> None:
        self.gpu.allocate(-290 * MIB)

    def poll(self) -> None:
        """Nothing."""


@contextmanager
def engine_process(shared: mmap.mmap, hidden: str | None) -> Iterator[OneCard]:
    """Run an engine beside this process; returns the card as this one sees it, which can `ask` the engine."""
    commands, answers = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(commands[1])
        try:
            engine = Engine(OneCard(shared, 1), hidden)
            os.write(answers[1], b".")
            while command := os.read(commands[0], 64).decode():
                engine.do(command)
                os.write(answers[1], b".")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)  # as Ray ends its workers: it says no last word
    os.close(commands[0])
    os.close(answers[1])

    class Asking(OneCard):
        def ask(self, what: str) -> None:
            self.publish()
            os.write(commands[1], what.encode())
            assert os.read(answers[0], 1) == b"."

    assert os.read(answers[0], 1) == b"."
    try:
        yield Asking(shared, 0)
    finally:
        os.close(commands[1])
        os.waitpid(pid, 0)


def run(folder: Path, hidden: str | None = None, *, looks_before_generating: bool = True) -> Ledger:
    """Two steps of both; a row of one of them may be hidden."""
    rltrace.start(folder, role="worker", rank=0)
    with engine_process(mmap.mmap(-1, 4096), hidden) as gpu:
        ledger = CudaLedger(lambda: gpu)

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            ledger.reached(Boundary((name,), is_end=False))
            with rltrace.phase(name):
                yield
            ledger.reached(Boundary((name,)))

        grads = {"actor.grads_bytes": 0}
        ledger.sample()
        ledger.tensors["grads"] = lambda: dict(grads)
        gpu.allocate(600 * MIB)
        ledger.tensors["params"] = lambda: {"actor.params_bytes": 0 if hidden == "actor.params" else 600 * MIB}
        with phase("rollout.sleep"):
            gpu.ask("unmap")
        for step in range(2):
            with rltrace.span("step", step=step):
                with phase("rollout.wake_weights"):
                    gpu.ask("map")
                with phase("weight_sync"):
                    gpu.ask("load")
                if looks_before_generating:
                    with phase("rollout.wake_kv_cache"):
                        gpu.ask("look")
                with phase("rollout.generate"):
                    gpu.ask("generate")
                with phase("rollout.sleep"):
                    gpu.ask("unmap")
                with phase("actor.update"):
                    grads["actor.grads_bytes"] = 50 * MIB
                    gpu.allocate(50 * MIB)
                    gpu.ask("poll")
                with phase("ref.log_prob"):
                    grads["actor.grads_bytes"] = 0
                    gpu.allocate(-50 * MIB)
                    gpu.ask("poll")
    rltrace.stop()
    (found,) = ledgers(Observations(Recording.open(folder))).values()
    return found


def test_all_moments_are_known(folder: Path) -> None:
    """Though one process is always busy, and moves memory where nobody looks."""
    found = run(folder)
    assert found.is_consistent.all()
    assert len(found.times_ns) >= 2 + 2 * 8
    assert not found.row("unaccounted").any()
    assert not found.row("unattributed")[2:].any()
    assert set(found.row("rollout.kv_cache")) == {0, 2000 * MIB}


def test_what_nobody_saw_is_not_judged(folder: Path) -> None:
    """Where a process moves memory twice, and nobody looks in between, nobody knows what it held there."""
    found = run(folder, looks_before_generating=False)
    used_mib = found.used // MIB - DRIVER_BYTES // MIB
    behind_load = np.isin(used_mib, [4900, 4910])
    assert 2 <= behind_load.sum() <= 4, "one or two looks in each step"
    assert found.is_consistent.tolist() == (~behind_load).tolist()
    assert not found.row("unaccounted")[found.is_consistent].any()


@pytest.mark.parametrize(
    ("hidden", "row"),
    [("actor.params", "unattributed"), ("rollout.weights", "unaccounted"), ("rollout.kv_cache", "unaccounted")],
)
def test_hidden_source(hidden: str, row: str, folder: Path) -> None:
    """Its bytes have no owner wherever they are there, and that is judged."""
    shown = run(folder.with_name("shown"))
    (size_bytes,) = {size for size in shown.row(hidden) if size}
    found = run(folder, hidden)
    assert found.is_consistent.all()
    assert not found.row(hidden).any()
    assert set(found.row(row)) == {0, size_bytes}
    (judged,) = summarize(Recording.open(folder)).memory
    assert judged.residual is not None
    assert judged.residual.boundaries_over_limit >= 6
    assert judged.residual.worst_bytes == size_bytes
