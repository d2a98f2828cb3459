"""What a process says of a GPU adds up to what the driver counts, and each source that is missing shows as itself.

The GPU is simulated here: a driver, torch's allocator and an engine's pools that count as the real ones were seen to.
tests/gpu/test_gpu_memory.py asks real ones.
"""

from __future__ import annotations

import functools
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from recordings import Written, sample, since_of, span

import rltrace
from rltrace.analysis import summarize
from rltrace.analysis.host_memory import HostMemory
from rltrace.analysis.ledger import ledgers
from rltrace.analysis.memory import DeviceMemory
from rltrace.analysis.observations import Observations
from rltrace.analysis.used_memory import used_memory
from rltrace.cli import main
from rltrace.events import ALLOCATED_PEAK, Counter, Span, Turn
from rltrace.hooks import boundaries
from rltrace.hooks.boundaries import Boundary
from rltrace.hooks.hook import Hook
from rltrace.hooks.patching import PatchSet
from rltrace.host.nvml import Gpu, Memory, UnavailableError
from rltrace.instrument import memory
from rltrace.instrument.memory import cuda_ledger
from rltrace.instrument.memory.cards import open_device, open_engines_card
from rltrace.instrument.memory.cuda_ledger import CONTEXT, CudaLedger, Reserved
from rltrace.instrument.memory.cuda_memory import eager_connections, first_collectives, name_hooks
from rltrace.instrument.memory.growth import Growth
from rltrace.instrument.memory.turn_hooks import loading
from rltrace.instrument.memory.turns import Turns
from rltrace.instrument.memory.work import Work
from rltrace.instrument.torch import devices
from rltrace.instrument.verl import worker as verl_worker
from rltrace.instrument.vllm import engine
from rltrace.read.recording import Recording

MIB = 1 << 20
DRIVER_BYTES, CARD_BYTES = 600 * MIB, 100_000 * MIB
ENGINE_PID = 1 << 23
"""Of nobody."""


class Simulated:
    """A GPU, this process's part of torch's allocator, and another process."""

    uuid = "GPU-1"

    def __init__(self) -> None:
        self.context_bytes = 500 * MIB
        self.reserved = Reserved(0, 0)
        self.in_pools = Reserved(0, 0), Reserved(0, 0)
        self.asleep_bytes = 0
        self.other_bytes = 0
        self.answers: str | None = None
        self.changes = 0
        self.moved_bytes = 0
        self.peak_bytes = 0
        self.pinned: int | str = 0
        """What torch's allocator of pinned memory has, or why nobody knows."""
        self.asked = 0
        """How often what each process holds was asked for."""
        self.listed = 0
        """How often all segments were."""

    def card(self) -> Memory:
        if self.answers:
            raise UnavailableError(self.answers)
        used_bytes = sum(self._held().values())
        return Memory(used_bytes, DRIVER_BYTES, CARD_BYTES - used_bytes - DRIVER_BYTES)

    def _held(self) -> dict[int, int]:
        mine_bytes = self.context_bytes + self.reserved.reserved_bytes - self.asleep_bytes
        return {os.getpid(): mine_bytes, ENGINE_PID: self.other_bytes}

    def held(self) -> dict[int, int]:
        self.asked += 1
        return {} if self.answers else self._held()

    def torch(self) -> Reserved:
        return self.reserved._replace(changes=self.changes, peak_bytes=self.peak_bytes, moved_bytes=self.moved_bytes)

    def pools(self, addresses: Collection[int]) -> tuple[Reserved, Reserved]:
        self.listed += 1
        return self.in_pools

    def pinned_bytes(self) -> int:
        if isinstance(self.pinned, str):
            raise UnavailableError(self.pinned)
        return self.pinned

    def allocate(self, size_bytes: int, cached_bytes: int = 0) -> None:
        reserved, allocated, *_ = self.reserved
        self.reserved = Reserved(reserved + size_bytes + cached_bytes, allocated + size_bytes)
        self.peak_bytes = max(self.peak_bytes, self.reserved.allocated_bytes)
        self.changes += 1
        self.moved_bytes += abs(size_bytes + cached_bytes)

    def free(self, size_bytes: int) -> None:
        """Into the cache."""
        self.allocate(-size_bytes, cached_bytes=size_bytes)


class SleepingPools:
    """Weights and cache of an engine, in segments of torch's allocator that may sleep."""

    def __init__(self, gpu: Simulated, weights_bytes: int, kv_cache_bytes: int) -> None:
        self._gpu = gpu
        self._bytes = {"rollout.weights_bytes": weights_bytes, "rollout.kv_cache_bytes": kv_cache_bytes}
        total_bytes = weights_bytes + kv_cache_bytes
        gpu.allocate(total_bytes)
        gpu.in_pools = Reserved(total_bytes, total_bytes), Reserved(0, 0)
        self.on_host: dict[str, int] = {}
        self.moves = 0

    def sleep(self) -> None:
        self._gpu.asleep_bytes = sum(self._bytes.values())
        self.moves += 1

    def bytes_by_owner(self) -> dict[str, int]:
        awake = dict.fromkeys(self._bytes, 0) if self._gpu.asleep_bytes else self._bytes
        return awake | self.on_host

    def addresses(self) -> Collection[int]:
        return (1,)


@pytest.fixture
def gpu() -> Simulated:
    return Simulated()


@pytest.fixture
def ledger(gpu: Simulated) -> CudaLedger:
    return CudaLedger(lambda: gpu)


@contextmanager
def calling(growth: Growth, *call: object) -> Iterator[None]:
    """A call that may be watched."""
    before_bytes = growth.begin(*call)
    yield
    growth.end(before_bytes)


def growing(ledger: CudaLedger, owner: str) -> AbstractContextManager[None]:
    """A call in which what the process grows by has an owner."""
    return calling(Growth(ledger, owner))


Screens = Callable[[Path], list[str]]


@pytest.fixture
def screens(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Screens:
    """What `rltrace summary` shows of a Recording, at first and with `--all`."""
    monkeypatch.setenv("COLUMNS", "200")

    def shown(folder: Path, *options: str) -> str:
        main(["summary", *options, str(folder)], standalone_mode=False)
        return capsys.readouterr().out

    return lambda folder: [shown(folder), shown(folder, "--all")]


def recorded(folder: Path, work: Callable[[], None]) -> dict[str, int]:
    """Who held what at the last edge of some work; all rows together are the whole card."""
    rltrace.start(folder, role="worker", rank=0)
    work()
    rltrace.stop()
    (found,) = ledgers(Observations(Recording.open(folder))).values()
    last = found.at(-1)
    assert sum(last.values()) == CARD_BYTES
    return {owner: size for owner, size in last.items() if size}


def of_device(folder: Path) -> DeviceMemory:
    (found,) = summarize(Recording.open(folder)).memory
    return found


def actor(gpu: Simulated, ledger: CudaLedger) -> None:
    """Parameters, an optimizer, and something that nobody names; 5 MiB of it all are cached."""
    gpu.allocate((300 + 600 + 7) * MIB, cached_bytes=5 * MIB)
    ledger.tensors["params"] = lambda: {"actor.params_bytes": 300 * MIB}
    ledger.tensors["optimizer"] = lambda: {"actor.optimizer_bytes": 600 * MIB}


ACTOR = {
    "actor.params": 300 * MIB,
    "actor.optimizer": 600 * MIB,
    "allocator.cached": 5 * MIB,
    "unattributed": 7 * MIB,
    "cuda.context": 500 * MIB,
    "driver.reserved": DRIVER_BYTES,
}


def without_free(rows: dict[str, int]) -> dict[str, int]:
    return {owner: size for owner, size in rows.items() if owner != "free"}


def test_the_rows_of_a_worker_add_up_to_the_card(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    def work() -> None:
        ledger.sample()  # the first look, at a context and nothing else
        actor(gpu, ledger)
        ledger.sample()

    assert without_free(recorded(folder, work)) == ACTOR


@pytest.mark.parametrize(("source", "size_bytes"), [("params", 300 * MIB), ("optimizer", 600 * MIB)])
def test_without_a_source_bytes_have_no_owner(
    source: str, size_bytes: int, folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    """If a source is missing, its bytes have no owner."""

    def work() -> None:
        ledger.sample()
        actor(gpu, ledger)
        del ledger.tensors[source]
        ledger.sample()

    rows = recorded(folder, work)
    assert rows["unattributed"] == 7 * MIB + size_bytes
    assert "unaccounted" not in rows


def test_torch_counts_between_boundaries(folder: Path, gpu: Simulated, ledger: CudaLedger, screens: Screens) -> None:
    """Torch's own count says what was allocated between two phase boundaries."""

    def phase(name: str, transient_bytes: int) -> None:
        ledger.reached(Boundary((name,)))
        with rltrace.phase(name):
            gpu.allocate(transient_bytes)
            gpu.free(transient_bytes)
        ledger.reached(Boundary((name,), is_end=True))

    def work() -> None:
        ledger.sample()
        actor(gpu, ledger)
        with rltrace.span("step", step=7):
            phase("actor.old_log_prob", 100 * MIB)
            phase("actor.update", 5_000 * MIB)
        with rltrace.span("step", step=8):
            phase("actor.update", 4_000 * MIB)

    assert recorded(folder, work)["allocator.cached"] == (5 + 100 + 5_000 + 4_000) * MIB
    (peak,) = of_device(folder).allocated_peaks
    assert (peak.process, peak.bytes) == ("rank 0 worker", (907 + 5_000) * MIB)
    assert (peak.step, peak.phase) == (7, "actor.update")
    (process,) = Recording.open(folder).processes
    said = [event.value for event in process.events() if isinstance(event, Counter) and event.name == ALLOCATED_PEAK]
    assert said == [907 * MIB, 1007 * MIB, 5907 * MIB], "only when it changes"
    _, whole = screens(folder)
    assert (
        "torch in rank 0 worker had handed out 5.77 GiB at its peak, in actor.update, step 7: unattributed 4.89 GiB, "
        "actor.optimizer 600.0 MiB, actor.params 300.0 MiB" in whole.splitlines()
    ), whole
    of_steps = [(one.step, one.bytes, one.at_most_bytes) for one in of_device(folder).allocated_steps]
    most = (907 + 5_000) * MIB
    assert of_steps == [(7, most, most), (8, 907 * MIB, most)], "of the second step torch's count tells a bound only"


@pytest.mark.parametrize(("phase", "owner"), [("ref.log_prob", "actor.activations"), ("weight_sync", "unattributed")])
def test_what_came_and_went_in_log_probs(
    folder: Path, gpu: Simulated, ledger: CudaLedger, phase: str, owner: str
) -> None:
    """What the last look of a phase finds to have come and gone was activations where log-probs were computed."""
    turns = Turns(ledger, Work())
    rltrace.start(folder, role="worker", rank=0)
    ledger.sample()
    actor(gpu, ledger)
    ledger.reached(Boundary((phase,), is_end=False))
    with rltrace.phase(phase):
        turns.begin_forward(has_gradients=False)
        gpu.allocate(90 * MIB)
        turns.beat()
        turns.end_forward(has_gradients=False)
        gpu.allocate(500 * MIB)
        gpu.free(590 * MIB)
    ledger.reached(Boundary((phase,)))
    rltrace.stop()
    (peak,) = of_device(folder).allocated_peaks
    held = {"actor.params": 300 * MIB, "actor.optimizer": 600 * MIB, "actor.activations": 90 * MIB}
    assert peak.bytes == (907 + 590) * MIB
    assert peak.at_peak_bytes[owner] == held.get(owner, 7 * MIB) + 500 * MIB


def test_peaks_of_passes_that_nobody_looks_at(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """A step whose passes are not looked at has the peak that torch counts, though its program resets the count."""

    def step(number: int, transient_bytes: int) -> None:
        with rltrace.span("step", step=number):
            gpu.peak_bytes = gpu.reserved.allocated_bytes  # the program's own reset
            gpu.allocate(transient_bytes)
            gpu.free(transient_bytes)
            ledger.say_peak()

    rltrace.start(folder, role="worker", rank=0)
    ledger.sample()
    actor(gpu, ledger)
    gpu.allocate(90 * MIB)
    ledger.look(Turn.FORWARD_END, activations="actor.activations")
    gpu.free(90 * MIB)
    ledger.look(Turn.BACKWARD_END)
    for number, transient_bytes in enumerate((500 * MIB, 300 * MIB, 400 * MIB)):
        step(number, transient_bytes)
    rltrace.stop()
    of_steps = of_device(folder).allocated_steps
    assert [one.bytes for one in of_steps] == [one.at_most_bytes for one in of_steps]
    assert [one.bytes for one in of_steps] == [(907 + more) * MIB for more in (500, 300, 400)]
    held = {"actor.params": 300 * MIB, "actor.optimizer": 600 * MIB}
    assert of_steps[1].at_peak_bytes == held | {"actor.activations": (7 + 300) * MIB}


def test_earlier_allocations_are_not_the_phases(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """What was allocated before a phase does not count for the phase."""

    def work() -> None:
        ledger.sample()
        with rltrace.span("step", step=3):
            gpu.allocate(900 * MIB)
            gpu.free(900 * MIB)
            ledger.reached(Boundary(("rollout.generate",), is_end=False))
            with rltrace.phase("rollout.generate"):
                pass
            ledger.reached(Boundary(("rollout.generate",)))

    recorded(folder, work)
    (peak,) = of_device(folder).allocated_peaks
    assert (peak.bytes, peak.phase, peak.step) == (900 * MIB, None, None)


def test_engine_count_is_not_told(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """An engine's count is not told, because its sleeping pools are in it."""

    def work() -> None:
        ledger.engine = SleepingPools(gpu, 1_000 * MIB, 2_000 * MIB)
        ledger.sample()

    recorded(folder, work)
    assert gpu.peak_bytes == 3_000 * MIB and of_device(folder).allocated_peaks == []


def test_communicators_are_the_growth(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """A communicator's bytes are what the process grew by while it was made."""

    def work() -> None:
        ledger.sample()
        actor(gpu, ledger)
        with growing(ledger, "nccl"):
            gpu.context_bytes += 558 * MIB
            gpu.allocate(20 * MIB)  # of torch's allocator, which knows it by itself
        gpu.context_bytes += 3 * MIB  # by somebody whom nobody watches
        ledger.sample()

    rows = recorded(folder, work)
    assert rows["nccl"] == 558 * MIB
    assert rows["unattributed"] == 27 * MIB
    assert rows["unaccounted"] == 3 * MIB


def test_first_calls_grow_the_context(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """Kernels that a first call loads are the context's, and a communicator that is made in it is not."""
    whose = Work()
    kernels = loading(ledger, whose)

    def forward(grown_bytes: int, *, gradients: bool) -> None:
        with calling(kernels, "forward", gradients):
            gpu.context_bytes += grown_bytes
            with growing(ledger, "nccl"):
                gpu.context_bytes += 10 * MIB

    def work() -> None:
        forward(1 * MIB, gradients=False)  # nobody has seen a GPU yet: all of it is the context that is met then
        ledger.sample()
        for grown_bytes in (70 * MIB, 0, 2 * MIB):
            forward(grown_bytes, gradients=False)
        forward(30 * MIB, gradients=True)
        before = whose.begin("critic")  # another model, with kernels of its own
        forward(7 * MIB, gradients=False)
        whose.end(before)
        asked = gpu.asked
        with calling(kernels, "forward", False):  # one too many to be looked at
            gpu.context_bytes += 5 * MIB
        assert gpu.asked == asked
        ledger.sample()

    rows = recorded(folder, work)
    assert rows["cuda.context"] == (500 + 1 + 70 + 2 + 30 + 7) * MIB
    assert rows["nccl"] == 6 * 10 * MIB
    assert rows["unaccounted"] == 5 * MIB


def test_verl_startup_grows_the_context(
    folder: Path, gpu: Simulated, ledger: CudaLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that verl's start-up loads are the context's, and what was there before is not."""
    monkeypatch.setattr(verl_worker, "KERNELS", Growth(ledger, "cuda.context"))

    def work() -> None:
        ledger.sample()
        gpu.context_bytes += 300 * MIB  # somebody's, as an engine's in the same process
        opened = verl_worker.begin_startup("actor.shard")
        gpu.context_bytes += 90 * MIB
        with growing(ledger, "nccl"):
            gpu.context_bytes += 10 * MIB
        verl_worker.end_startup(opened, None, None)
        gpu.context_bytes += 5 * MIB
        ledger.sample()

    rows = recorded(folder, work)
    assert rows["cuda.context"] == (500 + 90) * MIB
    assert rows["nccl"] == 10 * MIB
    assert rows["unaccounted"] == 305 * MIB


def test_segments_are_listed_when_they_grow(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """An engine's segments are listed again only if there are more than ever before."""

    def work() -> None:
        ledger.engine = SleepingPools(gpu, weights_bytes=1000 * MIB, kv_cache_bytes=2000 * MIB)
        ledger.sample()
        listed = gpu.listed
        for _ in range(3):
            gpu.allocate(-11 * MIB)
            ledger.sample()
            gpu.allocate(11 * MIB)
            ledger.sample()
        assert gpu.listed == listed
        gpu.in_pools = gpu.in_pools[0], Reserved(32 * MIB, 30 * MIB)
        gpu.allocate(30 * MIB, cached_bytes=2 * MIB)
        ledger.sample()
        assert gpu.listed == listed + 1

    assert recorded(folder, work)["rollout.graphs"] == 32 * MIB


@pytest.fixture
def eager(gpu: Simulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CudaLedger, list[str]]]:
    """A ledger whose hooks are on real torch, in a process without a context; communicators take 100 MiB each.

    Gloo plays NCCL's part, as the backend of a GPU that torch is told of.
    """
    gpu.context_bytes = 0
    made: list[str] = []

    def connect(name: str) -> Callable[..., None]:
        def make(*_: object) -> None:
            made.append(name)
            give_context()
            gpu.context_bytes += 100 * MIB

        return make

    def give_context() -> None:
        gpu.context_bytes = gpu.context_bytes or 500 * MIB

    @contextmanager
    def on_device(_device: object) -> Iterator[None]:
        give_context()
        yield

    monkeypatch.setattr(dist._Backend, "eager_connect_single_device", connect("at once"))
    monkeypatch.setattr(dist.ProcessGroup, "split_group", connect("split"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    ledger = CudaLedger(lambda: gpu if gpu.context_bytes else None)
    patches = PatchSet("test", Register())
    name_hooks(patches, ledger, Turns(ledger, Work()), on_device)
    yield ledger, made
    dist.destroy_process_group()
    assert patches.undo() == []


class Register:
    """Of hooks, whose reports nobody asks for here."""

    def hook(self, *_: object) -> Register:
        return self

    def fired(self) -> None:
        """One of them was called."""


def test_eager_communicators_are_no_context(folder: Path, gpu: Simulated, eager: tuple[CudaLedger, list[str]]) -> None:
    """Communicators that are made with their group are not taken for the context.

    That of a group bound to its device, of a later one beside it, and one that is split from it.
    """
    ledger, made = eager
    device = torch.device("cuda", 0)

    def work() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        dist.new_group([0])
        assert dist.group.WORLD is not None
        dist.group.WORLD.split_group([0])
        ledger.sample()

    rows = recorded(folder, work)
    assert made == ["at once", "at once", "split"]
    assert (rows["cuda.context"], rows["nccl"]) == (500 * MIB, 300 * MIB)
    assert "unaccounted" not in rows


@pytest.mark.usefixtures("eager")
def test_communicators_are_looked_at(folder: Path, gpu: Simulated) -> None:
    """Memory is looked at where a communicator has been made: what follows may be seconds of imports."""
    looked: list[int] = []

    def work() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
        looked.append(gpu.context_bytes)
        dist.new_group([0])
        looked.append(gpu.context_bytes)

    recorded(folder, work)
    (process,) = Recording.open(folder).processes
    assert looked == [600 * MIB, 700 * MIB]
    said = [event.value for event in process.events() if isinstance(event, Counter) and event.name == "nccl_bytes"]
    assert said == [100 * MIB, 200 * MIB]


def test_unbound_group_makes_no_context(gpu: Simulated, eager: tuple[CudaLedger, list[str]]) -> None:
    """A group that is bound to no GPU gives no process a context."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    dist.all_reduce(torch.ones(1))
    assert gpu.context_bytes == 0
    assert not eager[1]


def test_sleeping_engine_holds_the_rest(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """An engine that sleeps holds its context, its graphs and its inputs."""

    def work() -> None:
        ledger.sample()
        pools = SleepingPools(gpu, weights_bytes=1000 * MIB, kv_cache_bytes=2000 * MIB)
        ledger.engine = pools
        with growing(ledger, "rollout.graphs"):
            gpu.allocate(30 * MIB, cached_bytes=2 * MIB)
            gpu.in_pools = gpu.in_pools[0], Reserved(32 * MIB, 30 * MIB)
            gpu.context_bytes += 8 * MIB
        gpu.allocate(11 * MIB, cached_bytes=1 * MIB)
        ledger.sample()
        assert ledger.rows(gpu, ledger.state(gpu))["rollout.weights_bytes"] == 1000 * MIB
        pools.sleep()
        ledger.sample()

    assert without_free(recorded(folder, work)) == {
        "rollout.graphs": 40 * MIB,
        "rollout.activations": 11 * MIB,
        "allocator.cached": 1 * MIB,
        "cuda.context": 500 * MIB,
        "driver.reserved": DRIVER_BYTES,
    }


def test_forward_leaves_activations(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """What a forward leaves is the actor's activations until the next phase boundary."""

    def forward() -> None:
        ledger.sample()
        actor(gpu, ledger)
        ledger.reached(Boundary())
        gpu.allocate(90 * MIB)
        ledger.look(Turn.FORWARD_END, activations="actor.activations")

    def backward() -> None:
        gpu.allocate(-90 * MIB)
        ledger.reached(Boundary(("actor.update",)))

    assert without_free(recorded(folder, forward)) == ACTOR | {"actor.activations": 90 * MIB}
    assert without_free(recorded(folder.with_name("second"), backward)) == ACTOR


def test_critics_forward_leaves_its_activations(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """What a forward leaves while the critic acts is the critic's."""

    def forward(owner: str, size_bytes: int) -> None:
        ledger.reached(Boundary())
        gpu.allocate(size_bytes)
        ledger.look(Turn.FORWARD_END, activations=owner)
        gpu.allocate(-size_bytes)

    rltrace.start(folder, role="worker", rank=0)
    ledger.sample()
    forward("critic.activations", 90 * MIB)
    forward("actor.activations", 70 * MIB)
    ledger.reached(Boundary(("actor.update",)))
    rltrace.stop()
    (found,) = ledgers(Observations(Recording.open(folder))).values()
    assert [size for size in found.row("critic.activations") if size] == [90 * MIB]
    assert [size for size in found.row("actor.activations") if size] == [70 * MIB]
    assert not found.row("critic.activations")[-1] and not found.row("actor.activations")[-1]
    assert not any(found.row("unattributed"))


def test_looks_of_several_threads(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """Looks of autograd's thread, in the middle of a backward, are in order with those of the main thread."""

    def look(turn: Turn) -> None:
        ledger.look(turn, activations="actor.activations")

    rltrace.start(folder, role="worker", rank=0)
    ledger.sample()
    for number in range(4):
        gpu.allocate(10 * MIB)
        if number % 2:
            look(Turn.FORWARD_END)
        else:
            thread = threading.Thread(target=look, args=(Turn.BEAT,))
            thread.start()
            thread.join()
    rltrace.stop()
    (found,) = ledgers(Observations(Recording.open(folder))).values()
    assert (found.row("actor.activations") / MIB).tolist() == [0, 10, 20, 30, 40]
    assert found.row("unaccounted").tolist() == [0, 0, 0, 0, 0]


def test_activations_end_with_their_backward(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """Activations are what came since the forward began; what the program keeps of them stays theirs, and no more."""
    kept_bytes, data_bytes = 7 * MIB, 5 * MIB

    def micro_batch(size_bytes: int) -> None:
        ledger.settle()
        gpu.allocate(size_bytes)
        ledger.look(Turn.FORWARD_END, activations="actor.activations")
        gpu.allocate(11 * MIB)  # of the loss
        ledger.look(Turn.BACKWARD_BEGIN, activations="actor.activations")
        gpu.allocate(kept_bytes - size_bytes - 11 * MIB)
        ledger.look(Turn.BACKWARD_END)

    rltrace.start(folder, role="worker", rank=0)
    ledger.sample()
    micro_batch(90 * MIB)
    gpu.allocate(data_bytes - kept_bytes)  # the logits go, and the next batch comes
    micro_batch(70 * MIB)
    gpu.allocate(3 * MIB)
    ledger.reached(Boundary(("actor.update",)))
    rltrace.stop()
    (found,) = ledgers(Observations(Recording.open(folder))).values()
    in_mib = (found.row("actor.activations") / MIB).tolist()
    assert in_mib == [0, 90, 101, 7, 75, 86, 12, 0], in_mib
    assert (found.row("unattributed") / MIB).tolist() == [0, 0, 0, 0, 0, 0, 0, 15]


def test_logits_of_an_inference_are_its_activations(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """What a forward without a backward returns came in it, and so has an owner."""
    turns = Turns(ledger, cast(Work, SimpleNamespace(owner_of=lambda _: "actor.activations")))
    rltrace.start(folder, role="worker", rank=0)
    gpu.allocate(0, cached_bytes=90 * MIB)
    ledger.sample()
    turns.begin_forward(has_gradients=False)
    gpu.allocate(4 * MIB)
    turns.beat()
    gpu.allocate(90 * MIB, cached_bytes=-90 * MIB)
    turns.end_forward(has_gradients=False)
    gpu.free(90 * MIB)  # log-probs are left of them
    ledger.reached(Boundary(("ref.log_prob",)))
    rltrace.stop()
    (found,) = ledgers(Observations(Recording.open(folder))).values()
    assert (found.row("actor.activations") / MIB).tolist()[-3:] == [4, 94, 0]
    assert (found.row("unattributed") / MIB).tolist()[-3:] == [0, 0, 4]


def test_what_is_computed_from_logits_goes_with_them(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """Entropies are computed behind the forward; in a phase of log-probs they are activations, until it ends."""
    turns = Turns(ledger, Work())
    boundary = Boundary(("actor.old_log_prob",), is_end=False)
    rltrace.start(folder, role="worker", rank=0)
    ledger.reached(boundary)
    turns.pass_boundary(boundary)
    turns.begin_forward(has_gradients=False)
    gpu.allocate(90 * MIB)
    turns.end_forward(has_gradients=False)
    gpu.allocate(80 * MIB)
    turns.turn()
    gpu.free(165 * MIB)  # log-probs are left
    ledger.reached(boundary._replace(is_end=True))
    turns.pass_boundary(boundary._replace(is_end=True))
    gpu.allocate(20 * MIB)
    turns.turn()
    rltrace.stop()
    (found,) = ledgers(Observations(Recording.open(folder))).values()
    assert (found.row("actor.activations") / MIB).tolist() == [0, 90, 170, 0, 0]
    assert (found.row("unattributed") / MIB).tolist() == [0, 0, 0, 5, 25]


@pytest.fixture
def one_moment(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how old a look is, time stands still; the list has what it is."""
    at_ns = [10**9]
    monkeypatch.setattr(cuda_ledger, "now_ns", lambda: at_ns[0])
    return at_ns


@pytest.mark.usefixtures("one_moment")
def test_adjacent_phases_share_a_boundary(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """Where a phase begins as another one ends, there is one boundary."""
    rltrace.start(folder, role="worker", rank=0)
    ledger.reached(Boundary(("actor.old_log_prob",)))
    ledger.reached(Boundary(("ref.log_prob",), is_end=False))
    gpu.allocate(MIB)
    ledger.reached(Boundary(("ref.log_prob",), is_end=False))
    rltrace.stop()
    (found,) = ledgers(Observations(Recording.open(folder))).values()
    assert list(found.row("unattributed")) == [0, MIB]


@pytest.mark.parametrize(("look_ns", "again_ns"), [(2_000, 200_000), (3_000_000, 300_000_000), (50_000_000, 10**9)])
def test_process_without_a_gpu_is_asked_less(
    gpu: Simulated, monkeypatch: pytest.MonkeyPatch, look_ns: int, again_ns: int
) -> None:
    """A process without a GPU is asked a hundredth of the time, at least once a second; one that has one, no more."""
    at_ns = 0
    found: list[Simulated | None] = [None, None, gpu]
    looks = iter(found)

    def look() -> Simulated | None:
        nonlocal at_ns
        at_ns += look_ns
        return next(looks)

    monkeypatch.setattr(cuda_ledger, "now_ns", lambda: at_ns)
    ledger = CudaLedger(look)
    assert ledger.device() is None
    at_ns += again_ns - 1
    assert ledger.device() is None and at_ns == look_ns + again_ns - 1, "it is too soon"
    at_ns += 1
    assert ledger.device() is None and at_ns == 2 * look_ns + again_ns
    assert [ledger.device(), ledger.device(is_sure=True), ledger.device()] == [None, gpu, gpu]
    assert next(looks, None) is None


def test_processes_are_asked_when_others_move(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """The card's processes are asked for again only if another one's memory has moved."""
    gpu.other_bytes = 50 * MIB
    rltrace.start(folder, role="worker", rank=0)
    ledger.sample()
    asked = gpu.asked
    actor(gpu, ledger)
    ledger.sample()
    assert gpu.asked == asked
    gpu.other_bytes = 40 * MIB
    ledger.sample()
    assert gpu.asked == asked + 1
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    edges_ = [event for event in process.events() if isinstance(event, Span)]
    mine = [500 * MIB, (500 + 300 + 600 + 7 + 5) * MIB, (500 + 300 + 600 + 7 + 5) * MIB]
    assert [edge.args["held_bytes"][str(os.getpid())] for edge in edges_] == mine
    assert [edge.args["held_bytes"][str(ENGINE_PID)] for edge in edges_] == [50 * MIB, 50 * MIB, 40 * MIB]


@pytest.mark.usefixtures("one_moment")
def test_moves_within_a_phase(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """Memory that moves within a phase is sampled on both sides, with the card's total, and no process is asked for.

    So what the engine says as it begins to sleep tells of a generation too that its server ended before.
    """
    rltrace.start(folder, role="engine", rank=0)
    ledger.sample()
    ledger.engine = pools = SleepingPools(gpu, weights_bytes=1000 * MIB, kv_cache_bytes=2000 * MIB)
    gpu.other_bytes += 10 * MIB
    asked, used_bytes = gpu.asked, gpu.card().used_bytes
    ledger.reached(Boundary(("cumem.unmap",), is_end=False))
    ledger.reached(Boundary(("cumem.unmap",), is_end=False))  # nothing has changed
    pools.sleep()
    ledger.reached(Boundary(("cumem.unmap",)))
    rltrace.stop()
    assert gpu.asked == asked
    (process,) = Recording.open(folder).processes
    before, behind = [event.args for event in process.events() if isinstance(event, Span)][1:]
    assert before["totals"]["used"] == used_bytes
    assert behind["totals"]["used"] == gpu.card().used_bytes == used_bytes - 3000 * MIB


def test_total_between_two_looks(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """A total that was recorded alone is a point of the used memory, once for each change, and no boundary."""
    rltrace.start(folder, role="worker", rank=0)
    ledger.sample()
    assert not ledger.has_moved()
    gpu.allocate(700 * MIB)
    for _ in range(2):
        assert ledger.has_moved(), "as long as nobody has looked"
        ledger.say_used()
    rltrace.stop()
    seen = Observations(Recording.open(folder))
    ((lane, found),) = ledgers(seen).items()
    line = used_memory(seen, lane).looked()
    assert line.bytes.tolist() == [500 * MIB + DRIVER_BYTES, 1200 * MIB + DRIVER_BYTES]
    assert len(found.times_ns) == 1


@pytest.mark.usefixtures("one_moment")
def test_a_move_that_ends_its_phase(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """The sample behind a move holds for the phase that ends with it: a scheduler of SGLang's has both."""
    rltrace.start(folder, role="engine")
    ledger.engine = pools = SleepingPools(gpu, weights_bytes=1000 * MIB, kv_cache_bytes=2000 * MIB)
    ledger.reached(Boundary(("rollout.sleep",), is_end=False))
    pools.sleep()
    ledger.reached(Boundary(("cumem.unmap",)))
    ledger.reached(Boundary(("rollout.sleep",)))
    ledger.reached(Boundary(("rollout.sleep",)))  # nothing has changed
    used_bytes = gpu.card().used_bytes
    rltrace.stop()
    begin, moved = edges_of(folder)
    assert moved["totals"]["used"] == used_bytes < begin["totals"]["used"]


def test_samples_say_since_when_they_hold(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """A stamp reaches back to when the process's part of the card became what it is, though it changed and changed
    back, or moved within the allocator's cache."""

    def grow(size_bytes: int) -> None:
        gpu.allocate(size_bytes)

    def cache() -> None:
        gpu.free(9 * MIB)

    def come_and_go() -> None:
        grow(50 * MIB)
        grow(-50 * MIB)

    def connect() -> None:
        with growing(ledger, "nccl"):
            gpu.context_bytes += 3 * MIB

    rltrace.start(folder, role="worker", rank=0)
    ledger.engine = pools = SleepingPools(gpu, weights_bytes=1000 * MIB, kv_cache_bytes=2000 * MIB)
    gpu.allocate(9 * MIB)
    changes = [lambda: None, lambda: None, cache, lambda: grow(MIB), come_and_go, connect, pools.sleep, lambda: None]
    for change in changes:
        change()
        ledger.sample()
    rltrace.stop()
    assert since_of(folder) == [0, 0, 0, 3, 4, 5, 6, 6]


def test_a_move_is_looked_at_before_it_begins(
    folder: Path, gpu: Simulated, ledger: CudaLedger, one_moment: list[int]
) -> None:
    """So that its pools are known to have been as they were until then; where they were just looked at they are."""
    rltrace.start(folder, role="engine", rank=0)
    ledger.engine = pools = SleepingPools(gpu, weights_bytes=1000 * MIB, kv_cache_bytes=2000 * MIB)
    ledger.sample()
    pools.sleep()
    ledger.reached(Boundary(("cumem.unmap",)))
    one_moment[0] += 2 * cuda_ledger.SAME_NS
    ledger.reached(Boundary(("cumem.map",), is_end=False))
    ledger.reached(Boundary(("cumem.map",), is_end=False))
    rltrace.stop()
    assert since_of(folder) == [0, 1, 1]


def two_processes(folder: Path, *, others_bytes: int) -> DeviceMemory:
    """A worker's edges at 1, 2 and 3 s, beside an engine that said what it holds at 0.998 s and works ever since."""
    written = Written(folder)
    device = {"host": "here", "uuid": "GPU-1"}
    at_edge = [(1.0, 500 * MIB), (2.0, 500 * MIB), (3.0, others_bytes)]
    edges_ = [
        span(
            "memory.edge",
            at,
            at + 0.001,
            totals={"used": 100 * MIB + others, "driver.reserved": 7 * MIB},
            others_bytes=others,
            cpu_ns={"1": 0, "2": int(at * 1e9)},
        )
        for at, others in at_edge
    ]
    written.process(
        "worker", *edges_, sample("actor.params_bytes", 0.5, 100 * MIB), pid=1, rank=0, device=device, ended_s=4
    )
    said = [
        sample("rollout.weights_bytes", 0.997, 500 * MIB),
        span("memory.edge", 0.997, 0.998, cpu_ns={"2": int(0.998e9)}),
    ]
    phases = [span("actor.update", at, at + 0.001) for at, _ in at_edge]
    written.process("engine", *said, pid=2, rank=0, device=device, ended_s=4)
    written.process("phases", *phases, pid=3, rank=0, device=device, ended_s=4)
    (found,) = summarize(written.read()).memory
    return found


@pytest.mark.parametrize(
    ("others_bytes", "settled"),
    [(500 * MIB, [True, True, True]), (502 * MIB, [True, True, True]), (503 * MIB, [True, True, False])],
)
def test_others_total_keeps_their_samples(others_bytes: int, settled: list[bool], tmp_path: Path) -> None:
    """What the others hold together tells whether their last samples still hold."""
    found = two_processes(tmp_path / "run", others_bytes=others_bytes)
    assert [edge.is_consistent for edge in found.boundaries if edge.side == "end"] == settled
    assert {edge.bytes["rollout.weights"] for edge in found.boundaries} == {500 * MIB}


def test_next_sample_of_the_same_moment(tmp_path: Path) -> None:
    """The next sample of a process is used only if it is of the same moment.

    An engine that has not run since: what it says first, a second later, is of memory that it has just woken.
    """
    written = Written(tmp_path / "run")
    device = {"host": "here", "uuid": "GPU-1"}

    def edge(at: float, engine_cpu_ms: float, **totals: dict[str, int]) -> Span:
        return span("memory.edge", at, at + 0.001, cpu_ns={"1": 0, "2": int(engine_cpu_ms * 1e6)}, **totals)

    of_card = {"used": 100 * MIB, "driver.reserved": 0}
    worker = [span("actor.update", 1.0, 2.0005), edge(1.002, 9, totals=of_card), edge(2.0, 9, totals=of_card)]
    params = sample("actor.params_bytes", 0.5, 100 * MIB)
    written.process("worker", *worker, params, role="worker", pid=1, rank=0, device=device, ended_s=4)
    asleep, awake = sample("rollout.weights_bytes", 1.0, 0), sample("rollout.weights_bytes", 3.0, 500 * MIB)
    said = [asleep, edge(1.0, 0), awake, edge(3.0, 12)]
    written.process("engine", *said, role="engine", pid=2, rank=0, device=device, ended_s=4)
    (found,) = summarize(written.read()).memory
    (end,) = (edge for edge in found.boundaries if edge.side == "end")
    assert end.bytes["rollout.weights"] == 0
    assert end.is_consistent


def test_silent_process_and_stranger(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """All bytes of a process that has not sampled yet are its context; those of a stranger are unaccounted."""
    gpu.other_bytes = 70 * MIB
    assert recorded(folder, ledger.sample)["unaccounted"] == 70 * MIB


def test_silent_driver_leaves_rows_unknown(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """If the driver does not answer, rows are unknown, with the reason."""
    gpu.answers = "NVML: Driver Not Loaded"
    rltrace.start(folder, role="worker", rank=0)
    actor(gpu, ledger)
    for _ in range(3):
        ledger.sample()
    rltrace.stop()
    (lines,) = folder.glob("processes/*/process.jsonl")
    assert lines.read_text().count("Driver Not Loaded") == 1, "said once"
    found = of_device(folder)
    assert found.residual is None
    assert found.unknown["cuda.context"] == "NVML does not say what this process holds"
    assert found.unknown["unaccounted"] == "NVML: Driver Not Loaded"


def test_memory_error_is_written_first(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """An out-of-memory error is in the Recording before the program sees it."""
    rltrace.start(folder, role="worker", rank=0)
    actor(gpu, ledger)
    error = RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:62")
    free_bytes = gpu.card().free_bytes
    gpu.context_bytes += 50 * MIB  # a wake-up maps what it can, and so less is free when it fails
    ledger.out_of_memory(error, free_bytes + 9 * MIB, free_bytes, ["rollout.kv_cache"])
    ledger.reached(Boundary(error=error))
    rltrace.stop()
    (failure,) = summarize(Recording.open(folder)).out_of_memory
    assert (failure.asked_bytes, failure.free_bytes) == (free_bytes + 9 * MIB, free_bytes)
    assert "a smaller KV cache" in failure.changes[0]
    assert failure.moment is not None and failure.moment.bytes["actor.optimizer"] == 600 * MIB
    assert any("offload the optimizer" in change for change in failure.changes)


def test_error_of_a_phase_says_what_was_asked(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """An error that ends a phase says how much memory was asked for."""
    rltrace.start(folder, role="worker", rank=0)
    ledger.sample()
    for error in (KeyError("of no concern"), RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")):
        ledger.reached(Boundary(("actor.update",), error=error))
    rltrace.stop()
    (failure,) = summarize(Recording.open(folder)).out_of_memory
    assert (failure.asked_bytes, failure.free_bytes) == (20 * MIB, gpu.card().free_bytes)


def edges_of(folder: Path) -> list[dict[str, object]]:
    """What the samples of the only process say beside its rows."""
    (process,) = Recording.open(folder).processes
    return [event.args for event in process.events() if isinstance(event, Span)]


@pytest.mark.usefixtures("one_moment")
def test_nobody_asks_while_the_engine_moves(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """While the engine moves memory nobody asks who holds what; the next phase does.

    Though the next begins in the same moment, and this process has moved nothing.
    """
    gpu.other_bytes = 50 * MIB
    rltrace.start(folder, role="worker", rank=0)
    ledger.reached(Boundary(("actor.update",)))
    asked = gpu.asked
    gpu.other_bytes = 900 * MIB
    gpu.allocate(MIB)  # so that it is an edge of its own
    ledger.reached(Boundary(("rollout.wake_weights",)))
    assert gpu.asked == asked
    ledger.reached(Boundary(("actor.old_log_prob",), is_end=False))
    ledger.reached(Boundary(("actor.old_log_prob",), is_end=False))  # nothing has changed since
    rltrace.stop()
    assert gpu.asked == asked + 1
    held = [edge.get("held_bytes", {}).get(str(ENGINE_PID)) for edge in edges_of(folder)]
    assert held == [50 * MIB, None, 900 * MIB], "what was held before is not said of what moved since"


def test_old_look_is_repeated(folder: Path, ledger: CudaLedger, one_moment: list[int]) -> None:
    """A boundary is looked at again if the last look is old."""
    rltrace.start(folder, role="worker", rank=0)
    for passed_ns in (0, cuda_ledger.SAME_NS - 1, cuda_ledger.SAME_NS):
        one_moment[0] += passed_ns
        ledger.reached(Boundary(("actor.update",)))
    rltrace.stop()
    assert len(edges_of(folder)) == 2


def test_tensors_are_asked_when_they_change(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """Tensors are asked for again only if one has come or gone."""
    asked: list[int] = []

    def params() -> dict[str, int]:
        asked.append(gpu.changes)
        return {"actor.params_bytes": gpu.reserved.allocated_bytes}

    def work() -> None:
        ledger.tensors["params"] = params
        gpu.allocate(100 * MIB)
        ledger.sample()
        ledger.sample()
        gpu.allocate(30 * MIB)
        ledger.sample()

    assert recorded(folder, work)["actor.params"] == 130 * MIB
    assert asked == [1, 2]


def test_host_memory_is_no_part_of_the_card(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """What is in host memory is no part of the card, and is told from the moment when there is any."""
    host_bytes = [0]
    ledger.tensors["params"] = lambda: {
        "actor.params_bytes": 9 * MIB,
        "actor.params_host_bytes": host_bytes[0],
        "actor.params_pinned_bytes": host_bytes[0] // 7,
        "ref.params_host_bytes": host_bytes[0],
        "ref.params_pinned_bytes": 0,
    }
    rltrace.start(folder, role="worker", rank=0)
    gpu.allocate(9 * MIB)
    for host_bytes[0] in (0, 70 * MIB, 0):
        gpu.allocate(0)
        ledger.sample()
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    told = [(event.name, event.value) for event in process.events() if isinstance(event, Counter)]
    assert [value for name, value in told if name == "actor.params_host_bytes"] == [70 * MIB, 0]
    assert [value for name, value in told if name == "actor.params_pinned_bytes"] == [10 * MIB, 0]
    assert [value for name, value in told if name == "ref.params_pinned_bytes"] == [0, 0], "pageable, and it is said"
    assert {value for name, value in told if name == "unattributed_bytes"} == {0}
    assert {value for name, value in told if name == "used_bytes"} == {gpu.card().used_bytes + DRIVER_BYTES}


def pinned(folder: Path) -> HostMemory:
    (found,) = summarize(Recording.open(folder)).host_memory
    return found


def test_pinned_memory_without_an_owner(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """Pinned memory of torch that has no owner is in each sample, with torch's cache of it.

    A ref of 90 MiB was moved there, for which torch has taken 128; it goes, and torch keeps them.
    """
    ref_bytes = [0]
    ledger.tensors["ref"] = lambda: {
        "ref.params_host_bytes": ref_bytes[0],
        "ref.params_pinned_bytes": ref_bytes[0],
        "weight_sync.bucket_host_bytes": 500 * MIB,  # pinned where they lie: not of torch's allocator
        "weight_sync.bucket_pinned_bytes": 500 * MIB,
    }
    rltrace.start(folder, role="worker", rank=0)
    gpu.allocate(MIB)
    for gpu.pinned, ref_bytes[0] in ((0, 0), (128 * MIB, 90 * MIB), (128 * MIB, 0)):
        gpu.allocate(0)
        ledger.sample()
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    told = [event for event in process.events() if isinstance(event, Counter)]
    assert [event.value for event in told if event.name == "unattributed_pinned_bytes"] == [0, 38 * MIB, 128 * MIB]
    found = pinned(folder)
    assert found.peak_owner_pinned_bytes == {
        "weight_sync.bucket": 500 * MIB,
        "ref.params": 90 * MIB,
        "unattributed": 128 * MIB,
    }
    assert found.peak_pinned_bytes == 628 * MIB, "not 90 MiB twice, as owner's and as cached"
    assert found.pinned_unknown == {}


def test_uncounted_pinned_memory_is_unknown(folder: Path, gpu: Simulated, ledger: CudaLedger, screens: Screens) -> None:
    """Where torch does not count pinned memory, what of it has no owner is unknown, with the reason."""
    gpu.pinned = "this torch does not"
    ledger.tensors["ref"] = lambda: {"ref.params_host_bytes": 9 * MIB, "ref.params_pinned_bytes": 9 * MIB}
    rltrace.start(folder, role="worker", rank=0)
    for _ in range(3):
        gpu.allocate(MIB)
        ledger.sample()
    rltrace.stop()
    found = pinned(folder)
    assert found.pinned_unknown == {"unattributed": "this torch does not"}
    assert found.peak_owner_pinned_bytes == {"ref.params": 9 * MIB, "unattributed": None}
    (lines,) = folder.glob("processes/*/process.jsonl")
    assert lines.read_text().count("this torch does not") == 1
    _, whole = screens(folder)
    text = " ".join(whole.split())
    assert "≥ 9.0 MiB unknown 9.0 MiB 9.0 MiB" in text, "of the process, of nobody, of the ref and pinned"
    assert "pinned: unknown, this torch does not: unattributed" in text


@pytest.mark.parametrize(
    ("stats", "size_bytes"),
    [
        # 2.7 to 2.9, and 2.10 to 2.12, which count what is handed out wrongly once it is given back
        ({"allocated_bytes": {"current": 4}, "reserved_bytes": {"current": 8}}, 8),
        ({"allocated_bytes": {"current": 8}, "active_bytes": {"current": 12}}, 8),
    ],
)
def test_pinned_memory_by_release(stats: dict[str, dict[str, int]], size_bytes: int) -> None:
    """Pinned memory is read by the names of torch's release."""
    assert memory.cards.pinned_bytes(stats) == size_bytes


def test_uncounted_pinned_memory_is_no_zero() -> None:
    """Where torch does not count pinned memory, it is unknown and not zero."""
    assert torch.cuda.host_memory_stats_as_nested_dict() == {}, "here there is no CUDA"
    with pytest.raises(UnavailableError, match="does not count the pinned memory"):
        memory.cards.pinned_bytes(torch.cuda.host_memory_stats_as_nested_dict())


def connect_asleep(gpu: Simulated, ledger: CudaLedger, on_host: dict[str, int] | None = None) -> None:
    """A communicator of 100 MiB is made while an engine goes to sleep, and leaves this in the host's memory."""
    ledger.sample()
    ledger.engine = pools = SleepingPools(gpu, weights_bytes=1000 * MIB, kv_cache_bytes=2000 * MIB)
    with growing(ledger, "nccl"):
        pools.sleep()
        pools.on_host = on_host or {}
        gpu.context_bytes += 100 * MIB


def test_host_copy_is_not_subtracted(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """A copy in host memory is not subtracted from what the card holds."""

    def work() -> None:
        copy = {"rollout.weights_host_bytes": 1000 * MIB, "rollout.weights_pinned_bytes": 1000 * MIB}
        connect_asleep(gpu, ledger, copy)
        ledger.sample()

    assert recorded(folder, work)["nccl"] == 100 * MIB


def test_trainer_has_no_engine_activations(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """A process that trains beside its engine has no activations of the engine."""

    def work() -> None:
        ledger.engine = SleepingPools(gpu, weights_bytes=10 * MIB, kv_cache_bytes=20 * MIB)
        ledger.trains = lambda: True
        gpu.allocate(7 * MIB)
        ledger.sample()

    rows = recorded(folder, work)
    assert (rows["unattributed"], rows.get("rollout.activations")) == (7 * MIB, None)


@contextmanager
def acting(ledger: CudaLedger, phase: str) -> Iterator[None]:
    """A phase of an engine in the trainer's process, looked at from both sides."""
    ledger.reached(Boundary((phase,), is_end=False))
    with rltrace.phase(phase):
        yield
        time.sleep(0.002)  # so that both sides are told apart
    ledger.reached(Boundary((phase,)))


def test_engine_in_the_trainers_process(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """An engine in the trainer's process has what it allocated, and nothing else.

    A policy that was there before is named, what the trainer left is nobody's, and a workspace is the engine's.
    """

    def work() -> None:
        ledger.sample()
        gpu.allocate(7_000 * MIB)
        ledger.tensors["policy"] = lambda: {"actor.params_bytes": 6_900 * MIB}
        ledger.trains = lambda: True
        ledger.sample()
        with acting(ledger, "rollout.load"):
            ledger.engine = SleepingPools(gpu, weights_bytes=1000 * MIB, kv_cache_bytes=2000 * MIB)
        with acting(ledger, "rollout.profile"):
            gpu.allocate(77 * MIB)
        gpu.allocate(50 * MIB)  # the trainer's
        with acting(ledger, "rollout.generate"):
            gpu.allocate(5 * MIB)
        with acting(ledger, "rollout.sleep"):
            gpu.allocate(-5 * MIB)
            assert isinstance(ledger.engine, SleepingPools)
            ledger.engine.sleep()
        with acting(ledger, "actor.update"):
            gpu.allocate(40 * MIB)  # beside no engine that acts

    rows = recorded(folder, work)
    assert (rows["actor.params"], rows["rollout.activations"]) == (6_900 * MIB, 77 * MIB)
    assert rows["unattributed"] == (100 + 50 + 40) * MIB
    assert "unaccounted" not in rows
    device = of_device(folder)
    assert device.owner_peaks["rollout.activations"].bytes == (77 + 5) * MIB
    nameless = [(boundary.phase, boundary.bytes["unattributed"] // MIB) for boundary in device.boundaries]
    assert nameless == [
        *[("rollout.load", 100), ("rollout.load", 100), ("rollout.profile", 100), ("rollout.profile", 100)],
        *[("rollout.generate", 150), ("rollout.generate", 150), ("rollout.sleep", 150), ("rollout.sleep", 150)],
        *[("actor.update", 150), ("actor.update", 190)],
    ]


def test_peak_of_a_backward_is_not_the_engines(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """An engine that sleeps beside its trainer keeps more than the trainer's last look at activations saw."""

    def work() -> None:
        ledger.sample()
        ledger.trains = lambda: True
        actor(gpu, ledger)
        ledger.engine = SleepingPools(gpu, weights_bytes=10 * MIB, kv_cache_bytes=20 * MIB)
        ledger.sample()
        with acting(ledger, "rollout.profile"):
            gpu.allocate(77 * MIB)
        gpu.allocate(5 * MIB)
        ledger.look(Turn.FORWARD_END, activations="actor.activations")
        gpu.free(5 * MIB)
        ledger.look(Turn.BACKWARD_END)
        gpu.allocate(700 * MIB)
        gpu.free(700 * MIB)
        ledger.say_peak()

    recorded(folder, work)
    (peak,) = of_device(folder).allocated_peaks
    assert peak.at_peak_bytes["actor.activations"] > 600 * MIB
    assert peak.at_peak_bytes.get("rollout.activations", 0) <= 77 * MIB


@pytest.mark.parametrize("trains", [False, True], ids=["own process", "beside a trainer"])
def test_kernels_of_an_engines_inputs(
    folder: Path, gpu: Simulated, ledger: CudaLedger, monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    """What vLLM loads while it makes its inputs is its context; what a trainer has held before is not."""
    monkeypatch.setattr(engine, "LEDGER", ledger)
    monkeypatch.setattr(engine, "KERNELS", Growth(ledger, CONTEXT))

    def work() -> None:
        if trains:
            ledger.sample()
            gpu.context_bytes += 33 * MIB
        before_bytes = engine.begin_inputs((), {})
        ledger.sample()
        gpu.context_bytes += 162 * MIB
        engine.end_inputs(before_bytes, None, None)

    rows = recorded(folder, work)
    assert (rows["cuda.context"], rows.get("unaccounted", 0)) == (662 * MIB, 33 * MIB * trains)


def test_freed_engine_memory_is_not_its_own(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """What an engine has freed is not its own when others allocate it.

    As an engine that is deleted, outside of any phase of its own.
    """

    def work() -> None:
        ledger.sample()
        ledger.trains = lambda: True
        ledger.engine = SleepingPools(gpu, weights_bytes=10 * MIB, kv_cache_bytes=20 * MIB)
        ledger.sample()
        with acting(ledger, "rollout.profile"):
            gpu.allocate(77 * MIB)
        gpu.allocate(-77 * MIB)
        ledger.sample()
        gpu.allocate(60 * MIB)
        ledger.sample()

    rows = recorded(folder, work)
    assert (rows["unattributed"], rows.get("rollout.activations")) == (60 * MIB, None)


def test_pool_in_freed_trainer_memory(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """A pool that is made in what the trainer has freed has its owner.

    The allocator has had more before, so that the most it ever had does not show the pool.
    """

    def work() -> None:
        ledger.trains = lambda: True
        ledger.engine = SleepingPools(gpu, weights_bytes=10 * MIB, kv_cache_bytes=0)
        gpu.allocate(9_000 * MIB)
        ledger.sample()
        gpu.allocate(-9_000 * MIB)
        ledger.engine.addresses = lambda: (1, 2)  # type: ignore[method-assign]
        ledger.engine._bytes["rollout.kv_cache_bytes"] = 2_000 * MIB
        gpu.allocate(2_000 * MIB)
        gpu.in_pools = Reserved(2_010 * MIB, 2_010 * MIB), Reserved(0, 0)
        ledger.sample()

    rows = recorded(folder, work)
    assert (rows["rollout.kv_cache"], rows.get("unattributed")) == (2_000 * MIB, None)


def test_trainer_peak_without_the_pools(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """The peak of a trainer beside its engine does not have the pools in it."""

    def work() -> None:
        ledger.trains = lambda: True
        ledger.engine = SleepingPools(gpu, weights_bytes=1000 * MIB, kv_cache_bytes=2000 * MIB)
        ledger.sample()
        ledger.engine.sleep()
        ledger.reached(Boundary(("actor.update",), is_end=False))
        with rltrace.span("step", step=1), rltrace.phase("actor.update"):
            gpu.allocate(700 * MIB)
            gpu.free(700 * MIB)
        ledger.reached(Boundary(("actor.update",)))

    recorded(folder, work)
    (peak,) = of_device(folder).allocated_peaks
    assert (peak.bytes, peak.phase) == (700 * MIB, "actor.update")


def test_sleep_while_a_communicator_is_made(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """What goes to sleep while a communicator is made is not subtracted from it, and no row falls below zero."""

    def work() -> None:
        connect_asleep(gpu, ledger)
        with growing(ledger, "rollout.graphs"):
            gpu.context_bytes -= 30 * MIB
        ledger.sample()

    rows = recorded(folder, work)
    assert (rows["nccl"], rows.get("rollout.graphs"), rows["unaccounted"]) == (100 * MIB, None, -30 * MIB)


def test_server_looks_at_its_engines_card(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """A server without GPU memory looks at its engine's card at the boundaries of its phases.

    The engine's rows are those that it wrote itself: here both are this process, one after the other.
    """
    looks: list[Simulated | None] = [None, gpu]
    server = CudaLedger(lambda: None, lambda: looks.pop(0) if looks else pytest.fail("it has one"))

    def work() -> None:
        ledger.engine = SleepingPools(gpu, 300 * MIB, 200 * MIB)
        ledger.sample()
        for name, is_end in (("rollout.generate", False), ("rollout.generate", False), ("rollout.sleep", True)):
            server._engines_card.next_ns = 0
            server.reached(Boundary((name,), is_end=is_end))
        server.reached(Boundary(("actor.update",), is_end=True))
        server.reached(Boundary(("cumem.unmap",), is_end=True))

    rltrace.start(folder, role="worker", rank=0)
    work()
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    sampled = [event for event in process.events() if isinstance(event, Span) and event.name == "memory.edge"]
    assert len(sampled) == 1 + 2, "the first look found no card; no engine's memory moves in the others"
    (found,) = ledgers(Observations(Recording.open(folder))).values()
    assert found.at(-1) == found.at(0) and found.is_consistent.all()
    assert found.at(-1)["rollout.kv_cache"] == 200 * MIB


def test_told_device_stays(folder: Path, ledger: CudaLedger) -> None:
    """The device that a process was told stays its device."""
    told = {"host": "here", "uuid": "GPU-of-its-rank"}
    rltrace.start(folder, role="worker", rank=0, device=told)
    ledger.sample()
    rltrace.stop()
    assert Recording.open(folder).processes[0].device == told


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_host_group_is_not_measured(
    gpu: Simulated, ledger: CudaLedger, device: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The making of a host's group is not measured, and its first collective of a GPU tensor is."""
    eager = eager_connections(ledger, Turns(ledger, Work()), lambda _: pytest.fail("nobody asked for a context"))
    assert eager.begin((None, device), {}) is None
    ledger.device(is_sure=True)
    looked: list[str] = []
    monkeypatch.setattr(ledger, "give", lambda owner, _: looked.append(owner))
    hook, on_gpu = Hook("test", "a:b"), SimpleNamespace(device=torch.device("cuda"))
    hook.bind(True)
    send = first_collectives(ledger, Turns(ledger, Work()))(lambda group, tensors: (group.group_name, tensors), hook)
    group, other, later = (SimpleNamespace(group_name=name) for name in "012")
    assert send(group, [cpu := torch.ones(1)]) == ("0", [cpu]) and looked == []
    assert send(group, [[on_gpu]]) == ("0", [[on_gpu]]) and looked == ["nccl"]
    assert send(group, [[on_gpu]]) == ("0", [[on_gpu]]) and looked == ["nccl"]
    assert send(other, tensors=[on_gpu]) == ("1", [on_gpu]) and looked == ["nccl"] * 2
    options = dist.BarrierOptions()
    options.device = torch.device("cpu")
    assert send(barred := SimpleNamespace(group_name="3"), options) == ("3", options) and looked == ["nccl"] * 2
    options.device = torch.device("cuda", 0)
    assert send(barred, options) == ("3", options) and looked == ["nccl"] * 3
    hook.bind(False)
    assert send(later, [on_gpu]) == ("2", [on_gpu]) and looked == ["nccl"] * 3


def test_failing_first_collective(gpu: Simulated, ledger: CudaLedger) -> None:
    """A first collective that fails raises its own error."""
    hook = Hook("test", "a:b")
    hook.bind(True)
    fail = first_collectives(ledger, Turns(ledger, Work()))(lambda group, tensors: 1 // 0, hook)
    with pytest.raises(ZeroDivisionError):
        fail(SimpleNamespace(group_name="0"), [SimpleNamespace(device=torch.device("cuda"))])
    assert hook.failures == 0


def test_phases_are_boundaries(folder: Path) -> None:
    """Each phase has a boundary on both sides, and other spans have none."""
    told: list[Boundary] = []
    undo = boundaries.watch(told.append)
    rltrace.start(folder)
    patches = PatchSet("test", rltrace.record.spans.current())
    patches.span("textwrap:dedent", "actor.update")
    patches.span("textwrap:indent", "work")
    try:
        textwrap.dedent("a")
        textwrap.indent("a", "b")
        with pytest.raises(TypeError) as raised:
            textwrap.dedent(1)  # type: ignore[arg-type]
    finally:
        patches.undo()
        undo()
        rltrace.stop()
    ends = [(False, None), (True, None), (False, None), (True, raised.value)]
    assert told == [Boundary(("actor.update",), is_end, error) for is_end, error in ends]


def test_samplers_are_closest_to_the_phase() -> None:
    """Watchers that sample are told of a boundary closest to its phase, and those that take time further off."""
    told: list[str] = []
    undo = [
        boundaries.watch(lambda _: told.append("slow"), is_last=True),
        boundaries.watch(lambda _: told.append("sample")),
        boundaries.watch(lambda _: told.append("slow too"), is_last=True),
    ]
    try:
        boundaries.reached(Boundary(is_end=False))
        boundaries.reached(Boundary())
    finally:
        for take_back in undo:
            take_back()
    assert told == ["slow too", "slow", "sample", "sample", "slow", "slow too"]


def test_sample_is_just_outside_its_phase(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """The sample of a boundary is just outside of its phase, and belongs to it."""
    rltrace.start(folder, role="worker", rank=0)
    ledger.sample()
    with rltrace.phase("actor.update"):
        actor(gpu, ledger)
    ledger.sample()
    rltrace.stop()
    assert of_device(folder).peak_phase == "actor.update"


# ---------------------------------------------------------------- what the driver does not tell


def cells(text: str, owner: str) -> set[str]:
    """What stands beside an owner in the tables."""
    rows = [line.split()[1:] for line in text.splitlines() if line.split()[:1] == [owner]]
    return {" ".join(row) for row in rows}


class Refusing(Simulated):
    """Its card's totals are told; what each process holds is not, with a reason or without."""

    why: str | None = None

    def held(self) -> dict[int, int]:
        if self.why is not None:
            raise UnavailableError(self.why)
        return {}


UNTOLD = "NVML does not say what this process holds"


@pytest.mark.parametrize(("why", "reason"), [(None, UNTOLD), ("NVML: No Permission", "NVML: No Permission")])
def test_context_is_unknown_without_processes(why: str | None, reason: str, folder: Path, screens: Screens) -> None:
    """Where the driver has totals and names no process, a context is unknown and not zero."""
    gpu = Refusing()
    gpu.why = why
    ledger = CudaLedger(lambda: gpu)

    def work() -> None:
        actor(gpu, ledger)
        ledger.reached(Boundary(("actor.update",)))
        with rltrace.span("actor.update"):
            pass
        with growing(ledger, "nccl"):
            gpu.context_bytes += 9 * MIB
        ledger.sample()

    assert recorded(folder, work)["unaccounted"] == 509 * MIB, "the total is known"
    found = of_device(folder)
    assert found.residual is not None
    not_looked_at = {"actor.activations": "no forward and no backward was looked at"}
    assert found.unknown == dict.fromkeys(cuda_ledger.OUTSIDE, reason) | not_looked_at
    assert not found.unknown.keys() & found.at_peak_bytes.keys()
    for text in screens(folder):
        assert f"unknown, {reason}: rollout.graphs, cuda.context, nccl" in text.splitlines()
        for owner in found.unknown:
            assert {cell.split()[0] for cell in cells(text, owner)} == {"unknown"}


def test_partly_known_row_is_a_bound(folder: Path, screens: Screens) -> None:
    """A row of which only a part is known is at least that part.

    Graphs: torch knows their pools, and only the driver knows what they take besides.
    """
    gpu = Refusing()
    ledger = CudaLedger(lambda: gpu)
    ledger.engine = SleepingPools(gpu, weights_bytes=100 * MIB, kv_cache_bytes=0)
    gpu.in_pools = gpu.in_pools[0], Reserved(32 * MIB, 30 * MIB)
    gpu.allocate(30 * MIB, cached_bytes=2 * MIB)

    def work() -> None:
        ledger.reached(Boundary(("actor.update",)))
        with rltrace.span("actor.update"):
            pass

    assert recorded(folder, work)["rollout.graphs"] == 32 * MIB
    whole = screens(folder)[1]
    assert {cell[:6] for cell in cells(whole, "rollout.graphs")} == {"≥ 32.0"}


def test_unmeasured_context_is_unknown(tmp_path: Path) -> None:
    """A context that no process measured is unknown beside a total."""
    written = Written(tmp_path / "run")
    totals = {"used": 100 * MIB, "driver.reserved": 0}
    said = [sample("actor.params_bytes", 1, 90 * MIB), span("memory.edge", 1, 1.001, totals=totals)]
    written.process("w", *said, pid=1, rank=0, device={"host": "here", "uuid": "GPU-1"}, ended_s=2)
    (found,) = summarize(written.read()).memory
    assert found.unknown == {"cuda.context": "no process of the run measured it"}


@pytest.mark.parametrize("before_it_ended", [[], [span("memory.edge", 1.5, None)]])
def test_unmeasured_process_leaves_the_card(before_it_ended: list[Any], tmp_path: Path) -> None:
    """A process that never measured itself leaves the card to those that did.

    Where the driver names no process: rows without an edge, as of a program that was killed in its first one.
    """
    written = Written(tmp_path / "run")
    device = {"host": "here", "uuid": "GPU-1"}
    totals = {"used": 100 * MIB, "driver.reserved": 0}
    edge = span("memory.edge", 2, 2.001, totals=totals)
    written.process("w", sample("actor.params_bytes", 1, 60 * MIB), edge, pid=1, rank=0, device=device, ended_s=3)
    said = [sample("rollout.weights_bytes", 1, 30 * MIB), *before_it_ended]
    written.process("engine", *said, pid=2, rank=0, device=device, ended_s=3)
    (found,) = ledgers(Observations(written.read())).values()
    assert (found.row("actor.params")[-1], found.row("unaccounted")[-1]) == (60 * MIB, 40 * MIB)


def nvml_of(*cards: dict[str, Any]) -> Any:
    """A module as pynvml, of cards by what they answer: `uuid`, whether they are `divided`, `pids` with bytes."""

    class NVMLError(Exception):
        value = 3

    def mig_mode(card: dict[str, Any]) -> tuple[int, int]:
        if "divided" not in card:
            raise NVMLError("Not Supported")
        return int(card["divided"]), 0

    def processes(card: dict[str, Any]) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in card.get("pids", {}).items()]

    def init() -> None:
        asked.append("init")
        if not cards:
            raise NVMLError("NVML Shared Library Not Found")

    asked: list[str] = []
    total = SimpleNamespace(used=7 * MIB, reserved=DRIVER_BYTES, free=MIB)
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlMemory_v2=2,
        asked=asked,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=lambda at: cards[at],
        nvmlDeviceGetUUID=lambda card: card["uuid"],
        nvmlDeviceGetMigMode=mig_mode,
        nvmlDeviceGetMemoryInfo=lambda _card, version: total,
        nvmlDeviceGetComputeRunningProcesses=processes,
    )


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give this process a CUDA of torch's with so many bytes on the device GPU-mine."""

    def allocate(size_bytes: int) -> None:
        stats = {
            "reserved_bytes": {"all": {"current": size_bytes, "allocated": size_bytes, "freed": 0}},
            "allocated_bytes": {"all": {"current": size_bytes, "peak": size_bytes}},
            "allocation": {"all": {"allocated": 1, "freed": 0}},
        }
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _at: SimpleNamespace(uuid="mine"))
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _at=None: stats)
        pinned = {"allocated_bytes": {"current": 3 * MIB}, "active_bytes": {"current": 9 * MIB}}
        monkeypatch.setattr(torch.cuda.memory, "host_memory_stats_as_nested_dict", lambda: pinned)

    return allocate


NO_LIBRARY = "NVML: NVML Shared Library Not Found"
A_PART = "GPU-mine is a MIG slice, but NVML's totals are of the whole card; use a GPU without MIG"
NOT_SHOWN = "NVML does not show GPU-mine here; it shows GPU-other, GPU-more"
OF_TOTAL = ("driver.reserved", "unaccounted", "free")


@pytest.mark.parametrize(
    ("cards", "reason"),
    [
        ([], NO_LIBRARY),
        ([{"uuid": "GPU-whole", "divided": True}], A_PART),
        ([{"uuid": "GPU-mine", "divided": True, "pids": {os.getpid(): 5}}], A_PART),
        ([{"uuid": "GPU-other", "divided": False}, {"uuid": "GPU-more"}], NOT_SHOWN),
    ],
)
def test_without_nvml_torch_is_sampled(
    cards: list[dict[str, Any]],
    reason: str,
    folder: Path,
    allocated: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    screens: Screens,
) -> None:
    """Without NVML what torch knows is sampled, and the rest is unknown, with the reason."""
    nvml = nvml_of(*cards)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    allocated(300 * MIB)
    ledger = CudaLedger(open_device, open_engines_card)
    ledger.tensors["params"] = lambda: {"actor.params_bytes": 290 * MIB}
    rltrace.start(folder, role="worker", rank=0)
    for _ in range(3):
        ledger.sample()
        assert ledger.free_bytes() is None
    with rltrace.span("actor.update"):
        pass
    rltrace.stop()
    assert len(nvml.asked) == 1, "once it has not answered it is not asked again"
    (lines,) = folder.glob("processes/*/process.jsonl")
    assert lines.read_text().count('"unavailable"') == 4, "each row's reason is said once"
    found = of_device(folder)
    assert (found.device, found.residual) == ("GPU-mine", None)
    assert {owner: size for owner, size in found.at_peak_bytes.items() if size} == {
        "actor.params": 290 * MIB,
        "unattributed": 10 * MIB,
    }
    not_sampled = {"actor.activations": "no process of the run measured it"}
    assert found.unknown == dict.fromkeys((*OF_TOTAL, *cuda_ledger.OUTSIDE), reason) | not_sampled
    for text in screens(folder):
        rows = "rollout.graphs, cuda.context, nccl, driver.reserved, free, unaccounted"
        assert f"unknown, {reason}: {rows}" in " ".join(text.split())
        assert all(cells(text, owner) == {"unknown"} for owner in ("cuda.context", "free", "unaccounted")), text


def test_nvml_is_opened_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVML is opened once for a GPU's UUID, however often a process says its own."""
    nvml = nvml_of({"uuid": "GPU-0"}, {"uuid": "GPU-1"})
    nvml.nvmlShutdown = lambda: None
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(devices, "_uuid_of", functools.cache(devices._uuid_of.__wrapped__))
    for shown, uuids in (("1,0", ["GPU-1", "GPU-0", "GPU-1"]), ("0,1", ["GPU-0", "GPU-1", "GPU-0"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert [devices.gpu_uuid(), devices.gpu_uuid(1), devices.gpu_uuid()] == uuids
    assert nvml.asked.count("init") == 2


def test_unnamed_device_is_ours_with_memory(allocated: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of which the driver names no process is ours as soon as torch has memory there.

    As in many a container; without memory of torch's it may be that no context was made yet.
    """
    monkeypatch.setitem(sys.modules, "pynvml", nvml_of({"uuid": "GPU-mine"}))
    allocated(0)
    assert open_device() is None
    allocated(MIB)
    device = open_device()
    assert device is not None and device.card().used_bytes == 7 * MIB
    assert device.held() == {}


@pytest.mark.parametrize("cards", [[], [{"uuid": "GPU-mine", "divided": True, "pids": {1: 5}}]])
def test_server_without_totals_says_nothing(
    cards: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server says nothing about its engine's card if it cannot have the card's totals."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml_of(*cards))
    monkeypatch.setattr(memory.cards, "is_below", lambda *_: True)
    monkeypatch.setattr(Gpu, "_is_certain", lambda *_: True)
    ledger = CudaLedger(lambda: None, open_engines_card)
    rltrace.start(folder, role="server")
    ledger.reached(Boundary(("rollout.generate",)))
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    assert process.unavailable == {}
    assert edges_of(folder) == []


def test_strangers_are_named(folder: Path, gpu: Simulated, ledger: CudaLedger, screens: Screens) -> None:
    """Strangers that hold memory of a card are named beside what is unaccounted."""

    def work() -> None:
        ledger.sample()
        gpu.context_bytes += 3 * MIB  # of nobody whom we know, and no stranger's
        for gpu.other_bytes in (70 * MIB, 900 * MIB, 0):
            ledger.sample()

    recorded(folder, work)
    others = of_device(folder).others
    assert others is not None
    assert (others.unaccounted_bytes, others.held_bytes) == (903 * MIB, {str(ENGINE_PID): 900 * MIB})
    line = f"900.0 MiB belong to processes outside of this Recording: pid {ENGINE_PID} 900.0 MiB"
    for text in screens(folder):
        assert "Of 903.0 MiB unaccounted at " in text
        assert line in text


def test_of_many_strangers_the_largest_are_named(tmp_path: Path, screens: Screens) -> None:
    written = Written(tmp_path / "run")
    held = {str(pid): pid * MIB for pid in (11, 13, 12, 10, 14, 15)}
    card = {"totals": {"used": 80 * MIB, "driver.reserved": 0}, "held_bytes": held | {"1": 5 * MIB, "16": 0}}
    said = [sample("actor.params_bytes", 1, 5 * MIB), span("memory.edge", 1, 1.001, **card)]
    written.process("w", *said, pid=1, rank=0, device={"host": "here", "uuid": "GPU-1"}, ended_s=2)
    line = (
        "Of 75.0 MiB unaccounted at 1.0 s, 75.0 MiB belong to processes outside of this Recording: "
        "pid 15 15.0 MiB, pid 14 14.0 MiB, pid 13 13.0 MiB, pid 12 12.0 MiB, and 2 more"
    )
    for text in screens(written.folder):
        assert line in text


def test_process_of_the_run_is_no_stranger(tmp_path: Path) -> None:
    """A process of the Recording is no stranger on another rank's card."""
    written = Written(tmp_path / "run")

    def rank(number: int) -> None:
        card = {"totals": {"used": 100, "driver.reserved": 0}, "held_bytes": {"1": 60, "2": 40}}
        said = [sample("actor.params_bytes", 1, 50), span("memory.edge", 1, 1.001, **card)]
        device = {"host": "here", "uuid": f"GPU-{number}"}
        written.process(f"w{number}", *said, pid=number, rank=number, device=device, ended_s=2)

    rank(1)
    rank(2)
    assert [found.others for found in summarize(written.read()).memory] == [None, None]
