"""What a process says of a GPU adds up to what the driver counts, and each source that is missing shows as itself.

The GPU is simulated here: a driver, torch's allocator and an engine's pools that count as the real ones were seen to.
tests/gpu/test_gpu_memory.py asks real ones.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from recordings import Written, sample, span

import rltrace
from rltrace import edges
from rltrace.analysis import summarize
from rltrace.analysis.ledger import ledgers
from rltrace.analysis.memory import DeviceMemory
from rltrace.analysis.observations import Observations
from rltrace.edges import Edge
from rltrace.events import Counter, Span
from rltrace.instrument import cuda_ledger
from rltrace.instrument.cuda_ledger import CudaLedger, Reserved
from rltrace.instrument.cuda_memory import EagerConnections, FirstCollectives, Loading, name_hooks
from rltrace.nvml import Memory, UnavailableError
from rltrace.patching import PatchSet
from rltrace.recording import Recording

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
        return Reserved(self.reserved.reserved_bytes, self.reserved.allocated_bytes, self.changes)

    def pools(self, addresses: Collection[int]) -> tuple[Reserved, Reserved]:
        self.listed += 1
        return self.in_pools

    def allocate(self, size_bytes: int, cached_bytes: int = 0) -> None:
        reserved, allocated, _ = self.reserved
        self.reserved = Reserved(reserved + size_bytes + cached_bytes, allocated + size_bytes)
        self.changes += 1


class SleepingPools:
    """Weights and cache of an engine, in segments of torch's allocator that may sleep."""

    def __init__(self, gpu: Simulated, weights_bytes: int, kv_cache_bytes: int) -> None:
        self._gpu = gpu
        self._bytes = {"rollout.weights_bytes": weights_bytes, "rollout.kv_cache_bytes": kv_cache_bytes}
        total_bytes = weights_bytes + kv_cache_bytes
        gpu.allocate(total_bytes)
        gpu.in_pools = Reserved(total_bytes, total_bytes), Reserved(0, 0)

    def sleep(self) -> None:
        self._gpu.asleep_bytes = sum(self._bytes.values())

    def bytes_by_owner(self) -> dict[str, int]:
        return dict.fromkeys(self._bytes, 0) if self._gpu.asleep_bytes else dict(self._bytes)

    def addresses(self) -> Collection[int]:
        return (1,)


@pytest.fixture
def gpu() -> Simulated:
    return Simulated()


@pytest.fixture
def ledger(gpu: Simulated) -> CudaLedger:
    return CudaLedger(lambda: gpu)


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
def test_without_a_source_its_bytes_have_no_owner(
    source: str, size_bytes: int, folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    def work() -> None:
        ledger.sample()
        actor(gpu, ledger)
        del ledger.tensors[source]
        ledger.sample()

    rows = recorded(folder, work)
    assert rows["unattributed"] == 7 * MIB + size_bytes
    assert "unexplained" not in rows


def test_communicators_are_what_the_process_grew_while_they_were_made(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    def work() -> None:
        ledger.sample()
        actor(gpu, ledger)
        with ledger.growth("nccl"):
            gpu.context_bytes += 558 * MIB
            gpu.allocate(20 * MIB)  # of torch's allocator, which knows it by itself
        gpu.context_bytes += 3 * MIB  # by somebody whom nobody watches
        ledger.sample()

    rows = recorded(folder, work)
    assert rows["nccl"] == 558 * MIB
    assert rows["unattributed"] == 27 * MIB
    assert rows["unexplained"] == 3 * MIB


def test_kernels_that_first_calls_load_stay_with_the_context_and_communicators_made_in_them_do_not(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    loading = Loading(ledger)

    def forward(grown_bytes: int, **args: bool) -> None:
        with loading.span("forward", **args):
            gpu.context_bytes += grown_bytes
            with ledger.growth("nccl"):
                gpu.context_bytes += 10 * MIB

    def work() -> None:
        forward(1 * MIB, gradients=False)  # nobody has seen a GPU yet: all of it is the context that is met then
        ledger.sample()
        for grown_bytes in (70 * MIB, 0, 2 * MIB):
            forward(grown_bytes, gradients=False)
        forward(30 * MIB, gradients=True)
        asked = gpu.asked
        with loading.span("forward", gradients=False):  # one too many to be looked at
            gpu.context_bytes += 5 * MIB
        assert gpu.asked == asked
        ledger.sample()

    rows = recorded(folder, work)
    assert rows["cuda.context"] == (500 + 1 + 70 + 2 + 30) * MIB
    assert rows["nccl"] == 5 * 10 * MIB
    assert rows["unexplained"] == 5 * MIB


def test_an_engines_segments_are_listed_again_only_if_there_are_more_than_ever(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
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
    name_hooks(patches, ledger, on_device)
    yield ledger, made
    dist.destroy_process_group()
    assert patches.undo() == []


class Register:
    """Of hooks, whose reports nobody asks for here."""

    def hook(self, *_: object) -> Register:
        return self

    def fired(self) -> None:
        """One of them was called."""


def test_communicators_that_are_made_at_once_are_not_taken_for_the_context(
    folder: Path, gpu: Simulated, eager: tuple[CudaLedger, list[str]]
) -> None:
    """That of a group bound to its device, of a later one beside it, and one that is split from it."""
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
    assert "unexplained" not in rows


def test_a_group_that_is_not_bound_to_a_gpu_gives_nobody_a_context(
    gpu: Simulated, eager: tuple[CudaLedger, list[str]]
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    dist.all_reduce(torch.ones(1))
    assert gpu.context_bytes == 0
    assert not eager[1]


def test_an_engine_asleep_holds_its_context_its_graphs_and_its_inputs(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    def work() -> None:
        ledger.sample()
        pools = SleepingPools(gpu, weights_bytes=1000 * MIB, kv_cache_bytes=2000 * MIB)
        ledger.engine = pools
        with ledger.growth("rollout.graphs"):
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


def test_what_a_forward_leaves_is_the_actors_activations_until_the_next_edge(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    def forward() -> None:
        ledger.sample()
        actor(gpu, ledger)
        ledger.reached(Edge())
        gpu.allocate(90 * MIB)
        ledger.end_forward()

    def backward() -> None:
        gpu.allocate(-90 * MIB)
        ledger.reached(Edge(("actor.update",)))

    assert without_free(recorded(folder, forward)) == ACTOR | {"actor.activations": 90 * MIB}
    assert without_free(recorded(folder.with_name("second"), backward)) == ACTOR


def test_the_next_micro_batch_is_looked_at_only_if_it_has_more(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    rltrace.start(folder, role="worker", rank=0)
    ledger.sample()
    ledger.reached(Edge())
    for size_bytes in (90 * MIB, 90 * MIB, 95 * MIB):
        gpu.allocate(size_bytes)
        ledger.end_forward()
        gpu.allocate(-size_bytes, cached_bytes=size_bytes)
    rltrace.stop()
    (found,) = ledgers(Observations(Recording.open(folder))).values()
    assert [size for size in found.row("actor.activations") if size] == [90 * MIB, 95 * MIB]


def test_where_a_phase_begins_as_another_ends_is_one_edge(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    rltrace.start(folder, role="worker", rank=0)
    ledger.reached(Edge(("actor.old_log_prob",)))
    ledger.reached(Edge(("ref.log_prob",), is_end=False))
    gpu.allocate(MIB)
    ledger.reached(Edge(("ref.log_prob",), is_end=False))
    rltrace.stop()
    (found,) = ledgers(Observations(Recording.open(folder))).values()
    assert list(found.row("unattributed")) == [0, MIB]


def test_a_process_without_a_gpu_is_looked_at_once_a_second_and_for_sure_where_it_has_one(gpu: Simulated) -> None:
    found: list[Simulated | None] = [None, gpu]
    looks = iter(found)
    ledger = CudaLedger(lambda: next(looks))
    assert [ledger.device(), ledger.device(), ledger.device(is_sure=True), ledger.device()] == [None, None, gpu, gpu]


def test_processes_are_asked_for_again_only_if_another_one_has_moved(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
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


def test_memory_that_moves_within_a_phase_is_said_once_and_the_card_is_not_asked(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    rltrace.start(folder, role="engine", rank=0)
    ledger.sample()
    ledger.engine = pools = SleepingPools(gpu, weights_bytes=1000 * MIB, kv_cache_bytes=2000 * MIB)
    asked = gpu.asked
    ledger.reached(Edge())
    ledger.reached(Edge())  # nothing has changed
    pools.sleep()
    ledger.reached(Edge())
    rltrace.stop()
    assert gpu.asked == asked
    (process,) = Recording.open(folder).processes
    moved = [event.args for event in process.events() if isinstance(event, Span)][1:]
    assert [list(args) for args in moved] == [["cpu_ns"], ["cpu_ns"]]


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
def test_what_the_others_hold_together_tells_whether_their_last_word_still_holds(
    others_bytes: int, settled: list[bool], tmp_path: Path
) -> None:
    found = two_processes(tmp_path / "run", others_bytes=others_bytes)
    assert [edge.is_settled for edge in found.edges if edge.edge == "end"] == settled
    assert {edge.bytes["rollout.weights"] for edge in found.edges} == {500 * MIB}


def test_the_next_word_of_a_process_is_taken_only_of_the_same_moment(tmp_path: Path) -> None:
    """An engine that has not run since: what it says first, a second later, is of memory that it has just woken."""
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
    (end,) = (edge for edge in found.edges if edge.edge == "end")
    assert end.bytes["rollout.weights"] == 0
    assert end.is_settled


def test_of_a_process_that_has_said_nothing_yet_all_is_context_and_of_a_stranger_unexplained(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    gpu.other_bytes = 70 * MIB
    assert recorded(folder, ledger.sample)["unexplained"] == 70 * MIB


def test_a_driver_that_does_not_answer_leaves_rows_unknown_with_the_reason(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
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
    assert found.unknown["unexplained"] == "NVML: Driver Not Loaded"


def test_an_error_about_memory_is_in_the_recording_before_it_goes_on(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    rltrace.start(folder, role="worker", rank=0)
    actor(gpu, ledger)
    error = RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:62")
    free_bytes = gpu.card().free_bytes
    gpu.context_bytes += 50 * MIB  # a wake-up maps what it can, and so less is free when it fails
    ledger.out_of_memory(error, free_bytes + 9 * MIB, free_bytes, ["rollout.kv_cache"])
    ledger.reached(Edge(error=error))
    rltrace.stop()
    (failure,) = summarize(Recording.open(folder)).out_of_memory
    assert (failure.asked_bytes, failure.free_bytes) == (free_bytes + 9 * MIB, free_bytes)
    assert "a smaller KV cache" in failure.changes[0]
    assert failure.moment is not None and failure.moment.bytes["actor.optimizer"] == 600 * MIB
    assert any("offload the optimizer" in change for change in failure.changes)


def test_an_error_that_ends_a_phase_says_itself_what_was_asked_for(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    rltrace.start(folder, role="worker", rank=0)
    ledger.sample()
    for error in (KeyError("of no concern"), RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")):
        ledger.reached(Edge(("actor.update",), error=error))
    rltrace.stop()
    (failure,) = summarize(Recording.open(folder)).out_of_memory
    assert (failure.asked_bytes, failure.free_bytes) == (20 * MIB, gpu.card().free_bytes)


def edges_of(folder: Path) -> list[dict[str, object]]:
    """What the samples of the only process say beside its rows."""
    (process,) = Recording.open(folder).processes
    return [event.args for event in process.events() if isinstance(event, Span)]


def test_where_the_engine_moves_nobody_asks_who_holds_what_and_behind_it_the_next_phase_does(
    folder: Path, gpu: Simulated, ledger: CudaLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the next begins in the same moment, and this process has moved nothing."""
    monkeypatch.setattr(cuda_ledger, "now_ns", lambda: 10**9)
    gpu.other_bytes = 50 * MIB
    rltrace.start(folder, role="worker", rank=0)
    ledger.reached(Edge(("actor.update",)))
    asked = gpu.asked
    gpu.other_bytes = 900 * MIB
    gpu.allocate(MIB)  # so that it is an edge of its own
    ledger.reached(Edge(("rollout.wake_weights",)))
    assert gpu.asked == asked
    ledger.reached(Edge(("actor.old_log_prob",), is_end=False))
    ledger.reached(Edge(("actor.old_log_prob",), is_end=False))  # nothing has changed since
    rltrace.stop()
    assert gpu.asked == asked + 1
    held = [edge.get("held_bytes", {}).get(str(ENGINE_PID)) for edge in edges_of(folder)]
    assert held == [50 * MIB, None, 900 * MIB], "what was held before is not said of what moved since"


def test_an_edge_is_looked_at_again_once_the_last_look_is_old(
    folder: Path, ledger: CudaLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_ns = [10**9]
    monkeypatch.setattr(cuda_ledger, "now_ns", lambda: at_ns[0])
    rltrace.start(folder, role="worker", rank=0)
    for passed_ns in (0, cuda_ledger.SAME_NS - 1, cuda_ledger.SAME_NS):
        at_ns[0] += passed_ns
        ledger.reached(Edge(("actor.update",)))
    rltrace.stop()
    assert len(edges_of(folder)) == 2


def test_tensors_are_asked_for_again_when_any_has_come_or_gone_and_not_else(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
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


def test_what_lies_in_host_memory_is_no_part_of_the_card_and_told_once_it_was_anything(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    host_bytes = [0]
    ledger.tensors["params"] = lambda: {"actor.params_bytes": 9 * MIB, "actor.params_host_bytes": host_bytes[0]}
    rltrace.start(folder, role="worker", rank=0)
    gpu.allocate(9 * MIB)
    for host_bytes[0] in (0, 70 * MIB, 0):
        gpu.allocate(0)
        ledger.sample()
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    told = [(event.name, event.value) for event in process.events() if isinstance(event, Counter)]
    assert [value for name, value in told if name == "actor.params_host_bytes"] == [70 * MIB, 0]
    assert {value for name, value in told if name == "unattributed_bytes"} == {0}
    assert {value for name, value in told if name == "used_bytes"} == {gpu.card().used_bytes + DRIVER_BYTES}


def test_a_process_that_trains_beside_its_engine_has_no_activations_of_the_engine(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    def work() -> None:
        ledger.engine = SleepingPools(gpu, weights_bytes=10 * MIB, kv_cache_bytes=20 * MIB)
        ledger.trains = lambda: True
        gpu.allocate(7 * MIB)
        ledger.sample()

    rows = recorded(folder, work)
    assert (rows["unattributed"], rows.get("rollout.activations")) == (7 * MIB, None)


def test_what_sleeps_while_a_communicator_is_made_is_not_taken_from_it_and_nothing_shrinks_below_zero(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    def work() -> None:
        ledger.sample()
        ledger.engine = pools = SleepingPools(gpu, weights_bytes=1000 * MIB, kv_cache_bytes=2000 * MIB)
        with ledger.growth("nccl"):
            pools.sleep()
            gpu.context_bytes += 100 * MIB
        with ledger.growth("rollout.graphs"):
            gpu.context_bytes -= 30 * MIB
        ledger.sample()

    rows = recorded(folder, work)
    assert (rows["nccl"], rows.get("rollout.graphs"), rows["unexplained"]) == (100 * MIB, None, -30 * MIB)


def test_a_device_that_a_process_was_told_stays_its_device(folder: Path, ledger: CudaLedger) -> None:
    told = {"host": "here", "uuid": "GPU-of-its-rank"}
    rltrace.start(folder, role="worker", rank=0, device=told)
    ledger.sample()
    rltrace.stop()
    assert Recording.open(folder).processes[0].device == told


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_group_of_the_host_is_not_looked_at_and_its_first_gpu_tensor_is(
    gpu: Simulated, ledger: CudaLedger, device: torch.device | None
) -> None:
    eager_connections = EagerConnections(ledger, lambda _: pytest.fail("nobody asked for a context"))
    assert eager_connections.begin((None, device), {}) is None
    first, group = FirstCollectives(ledger), SimpleNamespace(group_name="0")
    on_gpu = SimpleNamespace(is_cuda=True)
    assert first.begin((group, [torch.ones(1)]), {}) is None
    assert first.begin((group, [[on_gpu]]), {}) is not None
    assert first.begin((group, [[on_gpu]]), {}) is None


def test_every_phase_is_an_edge_on_both_sides_and_other_spans_are_none(folder: Path) -> None:
    told: list[Edge] = []
    undo = edges.watch(told.append)
    rltrace.start(folder)
    patches = PatchSet("test", rltrace.recorder.current())
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
    assert told == [Edge(("actor.update",), is_end, error) for is_end, error in ends]


def test_who_may_take_time_at_an_edge_is_told_after_those_that_sample() -> None:
    told: list[str] = []
    undo = [
        edges.watch(lambda _: told.append("slow"), is_last=True),
        edges.watch(lambda _: told.append("sample")),
        edges.watch(lambda _: told.append("slow too"), is_last=True),
    ]
    try:
        edges.reached(Edge())
    finally:
        for take_back in undo:
            take_back()
    assert told == ["sample", "slow", "slow too"]


def test_an_edges_sample_lies_just_outside_of_its_phase_and_belongs_to_it(
    folder: Path, gpu: Simulated, ledger: CudaLedger
) -> None:
    rltrace.start(folder, role="worker", rank=0)
    ledger.sample()
    with rltrace.phase("actor.update"):
        actor(gpu, ledger)
    ledger.sample()
    rltrace.stop()
    assert of_device(folder).peak_phase == "actor.update"
