"""The ledger of a real actor, its real sender and its real engine adds up to what the kernel counts, and it can fail.

Beside it an independent sampler, a process that has nothing to do with rltrace, reads the kernel's own division of
shared pages (smaps_rollup).
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recordings import Written, sample, span
from rltrace_reference.shared_memory import SharedMemory
from traced_runs import ROOT, TracedRun, run_traced

import rltrace
from rltrace.analysis import summarize
from rltrace.analysis.ledger import Ledger, ledgers
from rltrace.analysis.memory import Residual
from rltrace.analysis.observations import Observations
from rltrace.host import memory
from rltrace.instrument.memory.process_ledger import ProcessLedger
from rltrace.instrument.reference.memory import CudaBuckets, Sampler
from rltrace.read.recording import Recording

MIB = 1 << 20
NOISE_BYTES = MIB
"""What a process allocates while it is being looked at: Python's objects, a page here and there."""

COMMON = f"""
    import ctypes, gc, json, os, socket, subprocess, sys
    import torch
    import torch.distributed as dist
    from msgspec.structs import replace
    import rltrace
    from rltrace.instrument.reference import memory as reference_memory
    from rltrace_reference import config as configuration, task
    from rltrace_reference.actor import Actor
    from rltrace_reference.engine.engine import Engine
    from rltrace_reference.rollout import Rollout
    from rltrace_reference.shared_memory import SharedMemory
    from rltrace_reference.sharding_manager import ShardingManager

    MIB = 1 << 20
    CONFIG = replace(
        configuration.load({str(ROOT / "examples" / "laptop_memory.yaml")!r}, vocabulary=task.VOCABULARY), ranks=1
    )
    PROMPTS = [[1, 2, 3, 4, 5]] * 2
    torch.set_num_threads(1)
    rltrace.start(role="worker", rank=0, device={{"host": socket.gethostname(), "uuid": "cpu-0"}})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def filled(size_bytes):
        return torch.ones(size_bytes, dtype=torch.uint8)

    def sampler():
        (found,) = [known for known in gc.get_objects() if type(known) is reference_memory.Sampler]
        return found
"""

WITNESS = """
import re, sys
for pid in sys.argv[1:]:
    text = open(f"/proc/{pid}/smaps_rollup").read() + open(f"/proc/{pid}/status").read()
    kib = {name: int(size) for name, size in re.findall(r"^(\\w+):\\s+(\\d+) kB", text, re.M)}
    print((kib["Pss_Anon"] + kib["Pss_Shmem"] + kib["RssFile"]) * 1024)
"""
"""What the kernel counts of processes, each shared page divided by those that map it."""

PLANTED_ENGINE = """
import mmap, sys
from wrapt import register_post_import_hook

def plant(module):
    sleep = module.Engine.sleep

    def planted(engine, level):
        if level == 48:  # a pool that nobody reckoned with
            engine.pool.reserve("graphs", 48 << 20).fill_(1)
        elif level == 32:  # the second side of a mapping
            with open("/dev/shm/%s", "r+b") as file:
                engine.second_side = mmap.mmap(file.fileno(), 32 << 20)
            sum(engine.second_side[:: mmap.PAGESIZE])
        else:
            return sleep(engine, level)
        return {}

    module.Engine.sleep = planted

register_post_import_hook(plant, "rltrace_reference.engine.engine")
"""


def rows(run: TracedRun) -> Ledger:
    """The ledger of the run's only device."""
    (ledger,) = ledgers(Observations(run.recording)).values()
    return ledger


def said(run: TracedRun) -> Any:
    """What the program printed as JSON."""
    assert run.returncode == 0, run.err
    return json.loads(run.out.splitlines()[-1])


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Actor, ref, sender and engine in one process: its rows, and what had no owner with each source hidden in turn.

    Hidden is what measures it: an owner's function, what the allocator says that it keeps, what was frozen before the
    model existed with the pages of files, what a library kept, and of a second, equal micro-batch the forward.
    """
    body = """
    from contextlib import ExitStack, nullcontext
    from unittest.mock import patch
    from rltrace.host import memory
    from rltrace_reference import grpo
    from rltrace_reference.actor import Ref
    from rltrace_reference.batch import Batch

    actor = Actor(CONFIG, 0)
    ref = Ref(CONFIG, 0)
    actor.optimizer.step()
    for parameter in actor.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    actor.optimizer.step()
    engine = Engine(CONFIG, 0, 11)
    engine.start()
    with torch.no_grad():
        for parameter in engine.parameters.values():
            parameter.normal_(std=0.02)
    engine.generate(PROMPTS, 7, 0)

    class Sender:
        buffers = [SharedMemory().create(8 * MIB)]

    Sender.buffers[0].bytes.fill_(1)
    watched = sampler()
    sender = Sender()
    watched.meet(sender)
    ledger = watched.ledger

    def ownerless(hiding=nullcontext):
        with hiding():
            rows = ledger.rows()
        unattributed = rows.pop("unattributed_bytes", 0)
        return unattributed, ledger.totals()[os.getpid()] - sum(rows.values()) - unattributed

    def without(sources, kind, name):
        source = sources[kind]
        less = lambda: {key: size for key, size in source().items() if key != name}
        return lambda: patch.dict(sources, {kind: less})

    heap, resident = memory.heap, ledger._process.resident

    def without_cached():
        ledger._asked = None  # what the allocator said last is as good to the ledger
        return patch.object(memory, "heap", lambda *known: heap(*known)._replace(cached_bytes=0))

    def without_interpreter():
        stack = ExitStack()
        stack.enter_context(patch.object(ledger._frozen, "anonymous_bytes", 0))
        no_files = lambda: resident()._replace(file_bytes=0)
        stack.enter_context(patch.object(ledger._process, "resident", no_files))
        return stack

    hidings = {
        "allocator.cached_bytes": without_cached,
        "interpreter_bytes": without_interpreter,
        "library.kernels_bytes": lambda: patch.object(ledger, "_kernel_bytes", 0),
    }
    for sources in (ledger.in_heap, ledger.mapped):
        for kind, source in sources.items():
            hidings |= {name: without(sources, kind, name) for name in source()}

    found = {}
    for name, hiding in hidings.items():
        size, before, after = ledger.rows().get(name, 0), ownerless(), ownerless(hiding)
        ledger._asked = None
        found[name] = {"bytes": size, "before": before, "after": after}

    def after_a_forward():
        # What its activations are said to be, and what has no owner while they wait for the backward.
        seen, loss = [], grpo.clipped_loss

        def look(*args):
            seen.append((ledger.activation_bytes, ownerless()))
            return loss(*args)

        with patch.object(grpo, "clipped_loss", look):
            actor.micro_batch(BATCH, torch.tensor(512.0))
        return seen[0]

    zeros = torch.zeros(8, 64)
    BATCH = Batch(zeros.long() + 3, zeros == 0, zeros, zeros, zeros, torch.zeros(8))
    after_a_forward()  # what the libraries keep of it
    watched.most_inside.clear()  # a new phase: its largest forward is sampled
    size, before = after_a_forward()
    hidden_size, after = after_a_forward()  # an equal one is not
    assert hidden_size == 0
    found["actor.activations_bytes"] = {"bytes": size, "before": before, "after": after}
    dist.destroy_process_group()
    print(json.dumps(found))
    """
    return said(run_traced(tmp_path_factory.mktemp("hidden"), COMMON + body, timeout_s=240))


@pytest.mark.parametrize(
    ("owner", "least_mib", "row"),
    [
        ("actor.params", 20, 0),
        ("actor.grads", 20, 0),
        ("actor.optimizer", 40, 0),
        ("actor.activations", 4, 0),
        ("ref.params", 20, 0),
        ("library.kernels", 0.5, 0),
        ("weight_sync.bucket", 8, 1),
        ("rollout.weights", 20, 1),
        ("rollout.kv_cache", 128, 1),
        ("allocator.cached", 1, 1),
        ("interpreter", 100, 1),
    ],
)
def test_hidden_source_has_no_owner(hidden: dict[str, Any], owner: str, least_mib: float, row: int) -> None:
    """Bytes whose source is hidden have no owner.

    What the heap handed out becomes unattributed (row 0), everything else unexplained (row 1).
    """
    found = hidden[f"{owner}_bytes"]
    assert found["bytes"] >= least_mib * MIB, "nothing to hide"
    rise = [after - before for after, before in zip(found["after"], found["before"], strict=True)]
    assert rise[row] == pytest.approx(found["bytes"], abs=NOISE_BYTES // 4)
    assert rise[1 - row] == pytest.approx(0, abs=NOISE_BYTES // 4)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[TracedRun, list[dict[str, int]]]:
    """Known allocations, one after the other, and what an independent process read beside each."""
    folder = tmp_path_factory.mktemp("planted")
    name = f"rltrace-test-{folder.name}-{id(folder)}"
    (folder / "witness.py").write_text(WITNESS)
    (folder / "sitecustomize.py").write_text(PLANTED_ENGINE % name)
    body = f"""
    rollout = Rollout(CONFIG, 0)
    actor = Actor(CONFIG, 0)
    rollout.start()
    manager = ShardingManager(actor, rollout, "test")
    manager.sync_weights()
    rollout.generate(PROMPTS, 7, 0)
    kept = []

    def witness(*pids):
        quiet = {{key: value for key, value in os.environ.items() if not key.startswith(("RLTRACE", "PYTHON"))}}
        command = [sys.executable, "-S", {str(folder / "witness.py")!r}, *map(str, pids)]
        return sum(map(int, subprocess.check_output(command, env=quiet, text=True).split()))

    def look(what):
        rollout.sleep(0)  # the engine says what it holds, then the worker what both hold
        with rltrace.span("looked", what=what, witness=witness(os.getpid(), rollout.process.pid)):
            pass

    ctypes.CDLL(None).malloc_trim(0)  # what is free goes now, and not between two looks
    look("nothing")
    kept.append(filled(64 * MIB))
    look("64 MiB in the worker")
    rollout.sleep(48)
    look("48 MiB in the engine")
    path = "/dev/shm/{name}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.ftruncate(descriptor, 32 * MIB)
        from rltrace_reference.shared_memory import SharedBuffer
        manager.sender.buffers.append(SharedBuffer(descriptor, 32 * MIB))
        manager.sender.buffers[-1].bytes.fill_(1)
        look("32 MiB that the sender may share")
        rollout.sleep(32)
        look("the engine maps them too")
    finally:
        os.unlink(path)
    rollout.close()
    dist.destroy_process_group()
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        run = run_traced(folder, COMMON + body, timeout_s=240)
    assert run.returncode == 0, run.err
    ledger = rows(run)
    looked = []
    for look in run.spans("looked"):
        index = int((ledger.times_ns <= look.start_ns).nonzero()[0][-1])
        looked.append({**ledger.at(index), "used": int(ledger.used[index]), "witness": look.args["witness"]})
    assert len(looked) == 5
    return run, looked


@pytest.mark.parametrize(
    ("place", "owner", "mib"),
    [
        (1, "unattributed", 64),
        (2, "rollout.graphs", 48),
        (3, "weight_sync.bucket", 32),
    ],
)
def test_planted_allocation_moves_one_row(
    planted: tuple[TracedRun, list[dict[str, int]]], place: int, owner: str, mib: int
) -> None:
    """An allocation that is planted moves its own row and no other."""
    before, after = planted[1][place - 1 : place + 1]
    moved = {name: size - before.get(name, 0) for name, size in after.items()}
    expected = {name: mib * MIB if name in (owner, "used", "witness") else 0 for name in moved}
    assert moved == {name: pytest.approx(size, abs=NOISE_BYTES) for name, size in expected.items()}


def test_second_mapping_moves_no_row(planted: tuple[TracedRun, list[dict[str, int]]]) -> None:
    """The second mapping of the same memory moves no row."""
    before, after = planted[1][3:5]
    assert after == {name: pytest.approx(size, abs=NOISE_BYTES) for name, size in before.items()}


def test_independent_total_agrees(planted: tuple[TracedRun, list[dict[str, int]]]) -> None:
    """An independent sampler reads the same total."""
    assert [look["used"] for look in planted[1]] == [
        pytest.approx(look["witness"], abs=NOISE_BYTES) for look in planted[1]
    ]


def test_startup_is_within_the_limit(
    planted: tuple[TracedRun, list[dict[str, int]]],
) -> None:
    """At each boundary of the start-up, what is unaccounted is within the limit."""
    (device,) = summarize(planted[0].recording).memory
    found = device.residual
    assert isinstance(found, Residual)
    assert {edge.phase for edge in device.boundaries} >= {
        "actor.build",
        "actor.broadcast",
        "rollout.load",
        "weight_sync",
    }
    assert found.boundaries - found.inconsistent_boundaries >= 8
    startup = [edge for edge in device.boundaries if edge.is_consistent and edge.bytes["weight_sync.bucket"] == 0]
    assert all(abs(edge.bytes["unaccounted"]) + abs(edge.bytes["unattributed"]) <= 10 * MIB for edge in startup[:8])


def test_every_edge_says_what_it_cost(planted: tuple[TracedRun, list[dict[str, int]]]) -> None:
    ledger = rows(planted[0])
    assert len(ledger.cost_ns) == len(planted[0].spans("memory.edge"))
    assert (ledger.cost_ns > 0).all()


def test_rows_are_unknown_without_the_allocator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the allocator's account rows are unknown and not zero.

    As with musl, or a glibc before 2.33.
    """

    def no_account() -> None:
        raise OSError("the C library has no mallinfo2, which glibc has from 2.33 on")

    monkeypatch.setattr(memory, "_mallinfo", no_account)
    rltrace.start(folder, role="worker", rank=0, device={"host": socket.gethostname(), "uuid": "cpu-0"})
    ledger = ProcessLedger()
    ledger.in_heap["actor"] = lambda: {"actor.params_bytes": 7}
    ledger.freeze()
    ledger.sample()
    rltrace.stop()
    (device,) = summarize(Recording.open(folder)).memory
    assert device.at_peak_bytes == {"actor.params": 7}
    assert device.residual is None
    assert list(device.unknown) == ["unaccounted"]


def test_cpu_time_makes_a_boundary_inconsistent(tmp_path: Path) -> None:
    """A process that has used CPU time since its sample makes the boundary inconsistent.

    The engine's sample is a second old at each edge; at the first it has slept since, at the second worked.
    """
    device = {"host": socket.gethostname(), "uuid": "cpu-0"}
    written = Written(tmp_path / "run")

    def edge(at_s: float, worker_cpu_ms: float, engine_cpu_ms: float) -> Any:
        cpu_ns = {"1": int(worker_cpu_ms * 1e6), "2": int(engine_cpu_ms * 1e6)}
        return span("memory.edge", at_s, at_s + 0.001, totals={"1": 100, "2": 50}, cpu_ns=cpu_ns)

    params, cache = sample("actor.params_bytes", 0.5, 90), sample("rollout.kv_cache_bytes", 0.5, 50)
    phases = [span("ref.log_prob", 2.0005, 2.5), span("actor.update", 2.6, 3.0005)]
    edges = [edge(2, 10, 5), edge(3, 20, 11)]
    written.process("w", *edges, params, *phases, role="worker", rank=0, device=device, pid=1, ended_s=4)
    written.process("e", edge(1, 5, 5), cache, role="engine", rank=0, device=device, pid=2, ended_s=4)
    (found,) = summarize(written.read()).memory
    first, last = (
        edge
        for edge in found.boundaries
        if (edge.phase, edge.side) in (("ref.log_prob", "begin"), ("actor.update", "end"))
    )
    assert (first.is_consistent, first.apart_seconds) == (True, 0)
    assert (last.is_consistent, last.apart_seconds) == (False, 0.006)
    assert first.bytes["unaccounted"] == 10
    assert found.residual is not None and found.residual.inconsistent_boundaries == 3, "between the two nobody looked"


def test_staged_bucket_is_in_host_memory_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A staged bucket is in host memory too, which says itself that it is pinned."""
    host = SharedMemory().create(1 << 16)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() == host.bytes.data_ptr())
    staged = SimpleNamespace(bytes=torch.empty(100, dtype=torch.uint8), host=host)  # its GPU's part, of a CPU's here

    class Sender:
        buffers = (staged,)

    sender = Sender()
    assert CudaBuckets(sender)() == {
        "weight_sync.bucket_bytes": 0,
        "weight_sync.bucket_host_bytes": 100 + (1 << 16),
        "weight_sync.bucket_pinned_bytes": 1 << 16,
    }
    host.close()


def test_gpu_and_host_memory_are_apart(folder: Path) -> None:
    """What a GPU holds is not mixed with the process's own memory.

    Not from the moment on either when a bucket's owner is met, which knows no device.
    """

    class Actor:
        config = SimpleNamespace(device="cuda")

    class Sender:
        buffers: tuple[()] = ()

    sampler, actor, sender = Sampler(), Actor(), Sender()
    sampler.meet(actor)
    sampler.meet(sender)
    assert sampler.ledger.on_gpu
    rltrace.start(folder, role="worker", rank=0)
    sampler.ledger.sample()
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    assert not list(process.events())
