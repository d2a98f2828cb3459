"""A phase that a program marks itself is an edge of its memory, as those of hooks are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_cuda_ledger import MIB, Simulated, actor, of_device

import rltrace
from rltrace.analysis import summarize
from rltrace.hooks import boundaries
from rltrace.hooks.boundaries import Boundary
from rltrace.instrument.memory.cuda_ledger import CudaLedger
from rltrace.read.recording import Recording


@pytest.fixture
def told() -> Iterator[list[Boundary]]:
    edges_told: list[Boundary] = []
    undo = boundaries.watch(edges_told.append)
    yield edges_told
    undo()


@pytest.fixture
def ledger(folder: Path) -> Iterator[CudaLedger]:
    """Of a simulated GPU, told of every edge of a Recording."""
    gpu = Simulated()
    ledger = CudaLedger(lambda: gpu)
    actor(gpu, ledger)
    undo = boundaries.watch(ledger.reached)
    rltrace.start(folder, role="trainer", rank=0)
    yield ledger
    undo()


def test_boundaries_outside(folder: Path, told: list[Boundary]) -> None:
    """Both of its boundaries are told outside of it."""
    rltrace.start(folder)
    with rltrace.phase("think", tokens=3) as phase:
        assert told == [Boundary(("think",), is_end=False, is_own=True)]
        phase.set(thoughts=2)
    assert told[1:] == [Boundary(("think",), is_end=True, is_own=True)]

    async def later() -> None:
        async with rltrace.phase("rest"):
            pass

    asyncio.run(later())
    assert [edge.names for edge in told[2:]] == [("rest",), ("rest",)]
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    think, rest = process.events()
    assert (think.name, think.is_phase, think.args) == ("think", True, {"phase": True, "tokens": 3, "thoughts": 2})
    assert (rest.name, rest.is_phase) == ("rest", True)


def test_nothing_recorded(told: list[Boundary]) -> None:
    """Nobody is told where nothing is recorded."""
    with rltrace.phase("think"):
        pass
    assert told == []


def test_ledger_at_boundaries(folder: Path, ledger: CudaLedger) -> None:
    """A ledger of its device is at each boundary whatever it is called."""
    with rltrace.phase("think"):
        pass
    rltrace.stop()
    device = of_device(folder)
    assert [(edge.phase, edge.side, edge.is_consistent) for edge in device.boundaries] == [
        ("think", "begin", True),
        ("think", "end", True),
    ]
    assert device.boundaries[1].bytes["actor.params"] == 300 * MIB
    assert device.residual is not None and device.residual.boundaries_over_limit == 0


def test_out_of_memory(folder: Path, ledger: CudaLedger) -> None:
    """Memory that runs out in it is told."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(torch.OutOfMemoryError), rltrace.phase("think"):
        raise error
    rltrace.stop()
    (failure,) = summarize(Recording.open(folder)).out_of_memory
    assert failure.asked_bytes == 2 << 30
    assert failure.moment is not None and failure.moment.bytes["actor.optimizer"] == 600 * MIB


def test_failing_watcher(folder: Path) -> None:
    """Who fails at a boundary disturbs nobody and is said once."""

    def fail(_edge: Boundary) -> None:
        raise ValueError("no such device")

    undo = boundaries.watch(fail)
    rltrace.start(folder)
    for _ in range(3):
        with rltrace.phase("think"):
            pass
    rltrace.stop()
    undo()
    (process,) = Recording.open(folder).processes
    assert process.unavailable == {"memory at think": "ValueError: no such device"}
    assert sum(event.name == "think" for event in process.events()) == 3
