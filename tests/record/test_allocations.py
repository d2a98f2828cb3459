"""Every allocation of a chosen part of a program: replayed to the byte, on the Recording's clock within the bound."""

from __future__ import annotations

import gc
import io
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from allocator import BLOCK_BYTES, DEVICE, SEGMENT_BYTES, TEXTS, Allocator
from hypothesis import given
from hypothesis import strategies as st
from recordings import Written, sample, span
from rich.console import Console
from traced_runs import run_traced

import rltrace
from rltrace.analysis import summarize
from rltrace.cli.tables.memory import allocation_table
from rltrace.events import ALLOCATIONS, ALLOCATIONS_KEPT, ALLOCATIONS_RESERVED, UNATTRIBUTED, Span
from rltrace.events import Counter as Sample
from rltrace.host import clock
from rltrace.instrument.vllm.allocations import CUMEM, CumemPools
from rltrace.read.recording import Process, Recording
from rltrace.record.torch import allocations
from rltrace.record.torch.allocation_replay import Change, Naming, Reserved, Timeline, replay
from rltrace.record.torch.allocations import MARK_BYTES, MARKS, PoolHistory, reserved_together, together

SCOPES = ("actor.params", "actor.grads", "actor.activations", "", "the program's own text")

Action = tuple[str, int, str]
"""What is done, a size or the place of a block among those there are, and the text that is set."""

actions = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "free", "ask", "complete", "empty"]), st.integers(1, 5000), st.sampled_from(SCOPES)
    ),
    max_size=60,
)


def act(allocator: Allocator, wanted: list[Action]) -> None:
    """Do each of them, where there is something to do it to."""
    for what, number, text in wanted:
        used = [address for address in allocator.blocks if address not in allocator.pending]
        if what == "allocate":
            allocator.allocate(number, text)
        elif what == "complete" and allocator.pending:
            allocator.complete_free(allocator.pending[number % len(allocator.pending)])
        elif what == "free" and used:
            allocator.free(used[number % len(used)])
        elif what == "empty":
            allocator.empty_cache()
        elif what == "ask" and used:
            allocator.ask_to_free(used[number % len(used)])


def balances_of(timeline: Timeline) -> list[tuple[int, dict[str, int]]]:
    """What each owner held, at first and after every change."""
    held = Counter(timeline.start_bytes)
    found = [(0, dict(+held))]
    for balance in timeline.balances:
        held[balance.owner] = balance.bytes
        found.append((balance.ts_ns, dict(+held)))
    return found


# ---- replaying ----------------------------------------------------------------------------------------------------


@given(before=actions, inside=actions)
def test_history_leads_back_to_every_level(before: list[Action], inside: list[Action]) -> None:
    """A history leads back to what every owner held after every change."""
    allocator = Allocator()
    act(allocator, [(what, size, "") for what, size, _ in before])  # nobody said then whose they are
    stats = allocator.start()
    act(allocator, inside)
    history = allocator.history(stats)
    timeline = together(history, [], [])
    found = balances_of(timeline)
    assert [held for _, held in found] == [held for _, held in allocator.truth]
    assert all(balance.bytes >= 0 for balance in timeline.balances)
    sums = [sum(held.values()) for _, held in allocator.truth]
    assert timeline.peak_bytes == max(sums) == sum(timeline.at_peak_bytes.values())
    assert Counter(timeline.end_bytes) == Counter(allocator.held())
    assert (history.lost, history.unaccounted_bytes, timeline.mismatches) == (0, 0, 0)
    assert [level.bytes for level in reserved_together(history, [], 0)] == allocator.reserved


@given(before=actions, inside=actions, ring=st.integers(3 * MARKS, 100))
def test_full_ring_counts_what_it_dropped(before: list[Action], inside: list[Action], ring: int) -> None:
    """What a full ring has dropped is counted, and the rest is exact."""
    allocator = Allocator(ring=ring)
    act(allocator, [(what, size, "") for what, size, _ in before])
    stats = allocator.start()
    act(allocator, [(what, size, "") for what, size, _ in inside])
    history = allocator.history(stats)
    timeline = together(history, [], [])
    found = balances_of(timeline)
    left = len(found)
    assert [held for _, held in found] == [held for _, held in allocator.truth[-left:]]
    assert timeline.peak_bytes == max(sum(held.values()) for _, held in allocator.truth[-left:])
    dropped = allocator.entries[:-ring]
    assert history.lost == sum(entry["action"] in ("alloc", "free_requested") for entry in dropped)
    assert timeline.mismatches == 0
    levels = [level.bytes for level in reserved_together(history, [], 0)]
    assert levels == allocator.reserved[-len(levels) :]


def test_address_names_what_is_there() -> None:
    """An address names what is there at that time, for as long as it is there."""
    changes = [
        Change(10, 1, 100, "actor.activations"),
        Change(20, 2, 7, "actor.activations"),
        Change(30, 1, 100, None),
        Change(40, 1, 50, "actor.activations"),
        Change(50, 9, 30, None),
    ]
    namings = [Naming(0, {9: "actor.optimizer", 8: "actor.params"}), Naming(45, {1: "actor.grads", 8: "ref.params"})]
    timeline = replay(changes, {1: 50, 2: 7, 8: 1000, 7: 5}, namings)
    assert timeline.start_bytes == {"actor.optimizer": 30, "ref.params": 1000, UNATTRIBUTED: 5}
    assert [tuple(balance) for balance in timeline.balances] == [
        (10, "actor.activations", 100),
        (20, "actor.activations", 107),
        (30, "actor.activations", 7),
        (40, "actor.grads", 50),
        (50, "actor.optimizer", 0),
    ]
    assert timeline.mismatches == 0


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        ([Change(1, 1, 8, "actor.params"), Change(2, 1, 8, "actor.params")], {1: 8}),
        ([Change(1, 1, 8, "actor.params")], {}),
        ([Change(1, 1, 8, None), Change(2, 1, 8, None)], {}),
        ([Change(1, 1, 8, None)], {1: 8}),
    ],
    ids=["given out twice", "gone without a free", "freed twice", "there after its free"],
)
def test_contradictions_are_counted(changes: list[Change], alive: dict[int, int]) -> None:
    """Entries that contradict each other are counted."""
    assert replay(changes, alive).mismatches == 1


def test_memory_given_to_torch_counts_once() -> None:
    """What a pool gave torch counts as the pool's, and once."""
    allocator = Allocator()
    own = allocator.allocate(100)
    pooled = allocator.allocate(400)
    stats = allocator.start()
    in_pool = allocator.allocate(20, "rollout.activations")
    allocator.allocate(30, "rollout.activations")
    end = in_pool + 8192
    asleep, awake = (Change(allocator.host_ns, pooled, end - pooled, owner) for owner in (None, "rollout.weights"))
    pools = PoolHistory([asleep, awake], {pooled: end - pooled}, [(pooled, end)])
    names = Naming(0, {pooled: "rollout.weights", own: "rollout.graphs"})
    timeline = together(allocator.history(stats), [pools], [names])
    assert timeline.start_bytes == {"rollout.weights": 16384, "rollout.graphs": 100}
    assert [balance.bytes for balance in timeline.balances] == [30, 0, 16384]
    assert timeline.peak_bytes == 16384 + 100 + 30
    assert timeline.mismatches == 0
    history = allocator.history(stats)
    levels = [level.bytes for level in reserved_together(history, [pools], 0)]
    two = 2 * SEGMENT_BYTES  # the last allocation needed another one
    assert levels == [16384 + SEGMENT_BYTES, 16384 + two, two, 16384 + two]


@given(inside=actions, ring=st.integers(3 * MARKS, 60))
def test_dropped_levels_are_not_written(inside: list[Action], ring: int) -> None:
    """For what a full ring has dropped no level is written, and none of a pool from before."""
    allocator = Allocator(ring=ring)
    start_ns = allocator.host_ns
    stats = allocator.start()
    pool = Change(allocator.host_ns, 1 << 40, 4096, "rollout.weights")
    act(allocator, inside)
    history = allocator.history(stats)
    since_ns = history.whole_since(start_ns)
    beside = allocations.PoolHistory([pool], {pool.address: 4096}).since(since_ns)
    oldest_ns = min((one.ts_ns for one in (*history.changes, *history.reservations)), default=start_ns)
    assert since_ns == (max(start_ns, oldest_ns) if history.lost else start_ns)
    assert bool(beside.changes) == (pool.ts_ns >= since_ns)
    levels = reserved_together(history, [beside], since_ns)
    timeline = together(history, [beside], [Naming(start_ns, {pool.address: "rollout.weights"})])
    assert all(one.ts_ns >= since_ns for one in (*levels, *timeline.balances))
    assert levels[-1].bytes == allocator.reserved_bytes() + 4096
    assert timeline.end_bytes["rollout.weights"] == 4096


def test_gap_shows_as_unaccounted() -> None:
    """What is missing in the middle shows as unaccounted bytes."""
    allocator = Allocator()
    allocator.allocate(100)
    stats = allocator.start()
    address = allocator.allocate(700)
    del allocator.entries[-1]
    allocator.free(address)
    history = allocator.history(stats)
    assert (history.unaccounted_bytes, history.lost) == (-700, 1)


# ---- the clock ----------------------------------------------------------------------------------------------------


@given(
    offset_us=st.integers(-(10**9), 2 * 10**15),
    drift=st.floats(-1e-4, 1e-4),
    inside=actions,
)
def test_times_are_the_hosts(offset_us: int, drift: float, inside: list[Action]) -> None:
    """Every time is the host's, within the stated bound."""
    allocator = Allocator(realtime_us=lambda host_ns: offset_us + 10**10 + int(host_ns * (1 + drift)) // 1000)
    stats = allocator.start()
    act(allocator, inside)
    allocator.host_ns += 10**9
    act(allocator, inside)
    history = allocator.history(stats)
    assert history.error_ns < 3000  # a mark's window is 1.4 µs wide, and a tick 1 µs
    expected = [when for when, _ in allocator.truth[1:]]
    for change, when in zip(history.changes, expected, strict=True):
        assert abs(change.ts_ns - when) <= history.error_ns
    spent_ns = allocator.windows[-1][0] - allocator.windows[0][0]
    assert abs(history.drift_ns + drift * spent_ns) <= 2 * history.error_ns


@pytest.mark.parametrize("pause_ns", [10**6, 10**9])
def test_bound_grows_without_first_marks(pause_ns: int) -> None:
    """Without the first marks, a time is less well known the further back it is."""
    allocator = Allocator(ring=3 * MARKS + 4, realtime_us=lambda host_ns: 10**12 + int(host_ns * (1 + 2e-5)) // 1000)
    stats = allocator.start()
    allocator.allocate(5)
    allocator.host_ns += pause_ns
    allocator.free(allocator.allocate(6))
    history = allocator.history(stats)
    times_ns = [change.ts_ns for change in history.changes]
    truth_ns = [when for when, _ in allocator.truth[-3:]]
    assert len(times_ns) == 3 and history.lost > 0
    assert all(abs(found - true) <= history.error_ns for found, true in zip(times_ns, truth_ns, strict=True))
    assert history.error_ns > 3e-5 * pause_ns


def test_no_mark_is_an_error() -> None:
    """A history without a mark is an error and no guess."""
    allocator = Allocator()
    stats = allocator.start()
    allocator.entries.clear()
    with pytest.raises(ValueError, match="clock marks"):
        allocations.History.of(allocator.snapshot(), 1, allocator.windows, stats, allocator.memory_stats())


# ---- in a process -------------------------------------------------------------------------------------------------


def test_without_a_recording_nothing_is_kept() -> None:
    rltrace.start_allocations()
    assert allocations._keeping is None
    rltrace.stop_allocations()


def test_no_gpu_gives_a_reason(folder: Path, process_of: Callable[[Path], Process]) -> None:
    """If no GPU is used, the reason is recorded and the program runs on."""
    rltrace.start(folder)
    rltrace.start_allocations()
    rltrace.stop_allocations()
    rltrace.stop()
    assert process_of(folder).unavailable["allocations"] == "RuntimeError: this process uses no GPU"


def test_full_ring_begins_at_oldest_entry(
    folder: Path, process_of: Callable[[Path], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written of a full ring begins at its oldest entry, with what was there."""
    allocator = Allocator(ring=3 * MARKS + 30, host_ns=clock.now_ns())
    start_ns, stats = allocator.host_ns, allocator.start()
    weights = Change(allocator.host_ns, 1 << 40, 4096, "rollout.weights")
    act(allocator, [("allocate", 700, "actor.grads"), ("free", 0, "")] * 20)
    gone = Change(allocator.host_ns, weights.address, 4096, None)
    act(allocator, [("allocate", 50, "ref.params")])
    allocator.mark()
    keeping = allocations._Keeping(None, DEVICE, stats, start_ns, allocator.windows)
    keeping.namings = [Naming(start_ns, dict.fromkeys((0, BLOCK_BYTES, 2 * BLOCK_BYTES), "actor.optimizer"))]
    pools = [allocations.PoolHistory([weights, gone])]
    stopped = keeping, allocator.snapshot(), pools, allocator.memory_stats()
    rltrace.start(folder)
    allocations._write(*stopped)
    rltrace.stop()
    events = list(process_of(folder).events())
    (whole,) = (event for event in events if isinstance(event, Span))
    left = [entry for entry in allocator.entries[-allocator.ring :] if entry["size"] != MARK_BYTES]
    changes = sum(entry["action"] in ("alloc", "free_completed") for entry in left)
    since_ns, _ = allocator.truth[-changes]
    assert whole.args["lost"] > 0 and whole.args["mismatches"] == 0
    assert abs(whole.start_ns - since_ns) <= whole.args["error_ns"] < since_ns - start_ns
    first = {event.name: event.value for event in reversed(events) if isinstance(event, Sample) and event.value}
    assert first["allocations.rollout.weights_bytes"] == 4096, "mapped before it, unmapped behind it"
    assert "allocations.actor.optimizer_bytes" not in first, "what that was is long gone"


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("error", [None, RuntimeError("the device is lost")])
def test_no_collection_while_writing(monkeypatch: pytest.MonkeyPatch, collects: bool, error: Exception | None) -> None:
    """While allocations are written nothing is collected; then the collector is as it was."""
    seen = []

    def write() -> None:
        seen.append(gc.isenabled())
        if error is not None:
            raise error

    monkeypatch.setattr(allocations, "_keeping", object())
    monkeypatch.setattr(allocations, "_switches", [])
    monkeypatch.setattr(allocations, "_stop", lambda _keeping: ())
    monkeypatch.setattr(allocations, "_write", write)
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        said = allocations.end()
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        (gc.enable if before else gc.disable)()
    assert said == (None if error is None else "RuntimeError: the device is lost")


def test_one_counter_per_owner(folder: Path, process_of: Callable[[Path], Process]) -> None:
    """What was kept is written as one counter per owner, which no reader takes for a sample."""
    allocator = Allocator()
    allocator.allocate(100)
    stats = allocator.start()
    act(allocator, [("allocate", 300, "actor.grads"), ("allocate", 50, "ref.params"), ("free", 1, "")])
    history = allocator.history(stats)
    timeline = together(history, [], [])
    rltrace.start(folder)
    start_ns = clock.now_ns()
    levels = [Reserved(start_ns, 4096), Reserved(start_ns + 1, 8192)]
    allocations.write(timeline, levels, history, start_ns, start_ns + 10**9)
    rltrace.stop()
    events = list(process_of(folder).events())
    (whole,) = [event for event in events if isinstance(event, Span)]
    assert whole.name == ALLOCATIONS_KEPT
    assert {key: whole.args[key] for key in ("start_bytes", "peak_bytes", "end_bytes", "lost")} == {
        "start_bytes": 100,
        "peak_bytes": 450,
        "end_bytes": 150,
        "lost": 0,
    }
    assert whole.args["error_ns"] == history.error_ns
    values: dict[str, list[float]] = {}
    for event in events:
        if isinstance(event, Sample):
            values.setdefault(event.name, []).append(event.value)
    assert values == {
        "allocations.unattributed_bytes": [100, 0],
        "allocations.actor.grads_bytes": [0, 300, 0, 0],
        "allocations.ref.params_bytes": [0, 50, 0],
        "allocations.reserved_bytes": [4096, 8192, 0],
    }
    assert summarize(Recording.open(folder)).memory == []


@pytest.mark.parametrize("says_reserved", [True, False])
def test_summary_has_exact_peak(folder: Path, says_reserved: bool) -> None:
    """The summary has the exact peak of all processes of a device beside the sampled one."""

    def owned(owner: str, at_s: float, size: float) -> list[list[Any]]:
        return sample(f"{ALLOCATIONS}{owner}_bytes", at_s, size)

    device = {"host": "node", "uuid": "GPU-1"}
    worker = [
        span(ALLOCATIONS_KEPT, 19, 31, error_ns=4000, lost=0),
        *(owned("actor.params", at_s, size) for at_s, size in ((19, 100), (31, 0))),
        *(owned("actor.grads", at_s, size) for at_s, size in ((19, 0), (22, 40), (22, 70), (22, 30), (29, 0), (31, 0))),
        sample("actor.params_bytes", 21, 100),
        sample("actor.grads_bytes", 23, 30),
    ]
    engine = [
        span(ALLOCATIONS_KEPT, 19.5, 30.5, error_ns=9000, lost=3),
        *(owned("rollout.weights", at_s, size) for at_s, size in ((19.5, 0), (21, 500), (25, 0), (30.5, 0))),
    ]
    if says_reserved:
        worker += [
            sample(ALLOCATIONS_RESERVED, at_s, size)
            for at_s, size in ((19, 150), (24, 400), (25.5, math.inf), (26, 100), (31, 0))
        ]
        engine += [
            sample(ALLOCATIONS_RESERVED, at_s, size) for at_s, size in ((19.5, 0), (21, 500), (25, 50), (30.5, 0))
        ]
    written = Written(folder).process(
        "driver", span("step", 10, 20, step=0), span("step", 20, 30, step=1), role="driver"
    )
    written.process("worker", *worker, role="worker", rank=0, device=device, ended_s=32)
    written.process("engine", *engine, role="engine", rank=0, device=device, ended_s=32)
    (peak,) = summarize(written.read()).allocations
    assert (peak.lane, peak.device, peak.step) == ("rank 0", "GPU-1", 1)
    assert (peak.peak_bytes, peak.peak_at_seconds) == (670, 22)
    assert peak.at_peak_bytes == {"actor.params": 100, "actor.grads": 70, "rollout.weights": 500}
    assert peak.sampled_peak_bytes == 130
    assert peak.reserved_peak_bytes == (900 if says_reserved else None), "400 and 500, as 24 s began"
    assert (peak.error_seconds, peak.lost) == (9e-6, 3)
    table = Console(width=100, file=io.StringIO())
    table.print(allocation_table([peak]))
    shown = table.file.getvalue()  # type: ignore[attr-defined]
    assert "670 B" in shown and "130 B" in shown and "9 µs" in shown and "rollout.weights" in shown
    assert ("reserved" in shown and "900 B" in shown) == says_reserved


def test_peak_lies_in_its_step(folder: Path) -> None:
    """The peak of a step lies in the step, however long its processes went on.

    An engine keeps its allocations until its first phase in the next step, awake and with more than in this one.
    """

    def engine(*levels: tuple[float, float]) -> list[list[Any]]:
        owned = [sample(f"{ALLOCATIONS}rollout.weights_bytes", at_s, size) for at_s, size in levels]
        return [*owned, *(sample(ALLOCATIONS_RESERVED, at_s, 2 * size) for at_s, size in levels)]

    steps = [span("step", at_s, at_s + 10, step=step) for step, at_s in enumerate((10, 20, 30))]
    written = Written(folder).process("driver", *steps, role="driver")
    kept = span(ALLOCATIONS_KEPT, 15, 35, error_ns=0, lost=0, step=1)
    levels = engine((15, 900), (18, 300), (24, 200), (33, 700), (35, 0))
    written.process("engine", kept, *levels, role="engine", rank=0, ended_s=40)
    (peak,) = summarize(written.read()).allocations
    assert (peak.step, peak.peak_bytes, peak.reserved_peak_bytes) == (1, 300, 600)
    assert peak.peak_at_seconds == 20, "it began with them"


# ---- owners -------------------------------------------------------------------------------------------------------

TRAIN = (
    TEXTS
    + """
    import json
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from rltrace.record import spans
    from rltrace.record.torch import allocations
    from rltrace.instrument.memory.allocation_owners import Allocations, name_hooks
    from rltrace.hooks.patching import PatchSet

    for kind in (collectives.DefaultAllGather, collectives.DefaultReduceScatter):
        def allocate(self, *args, _original=kind.allocate, _where=kind.__name__, **kwargs):
            see(_where)
            return _original(self, *args, **kwargs)
        kind.allocate = allocate

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        def forward(self, x):
            return Observed.apply(self.down(Observed.apply(self.up(x))))

    class Watched(torch.optim.SGD):
        def _init_group(self, *args):
            see("optimizer")
            return super()._init_group(*args)

    def work(rank, folder):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        name_hooks(PatchSet("allocations", spans.current(), Allocations.supports))
        models = Model(), Model().requires_grad_(False)
        actor, ref = (fully_shard(model, reshard_after_forward=True) for model in models)
        optimizer = Watched(actor.parameters(), lr=0.1)

        def step():
            seen.clear()
            with torch.no_grad():
                ref(torch.ones(4, 8))
            of_ref = dict(seen)
            seen.clear()
            loss = Observed.apply(actor(torch.ones(4, 8)).sum())
            see("outside")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            see("outside")
            return {"ref": of_ref, "actor": dict(seen), "hooks": [len(module._forward_hooks) for module in models]}

        silent = step()
        assert sets == [], sets
        allocations._keep(allocations._Keeping(torch.cuda.memory, 0, {}))
        kept = step()
        allocations._keep(None)
        after = step()
        if rank == 0:
            print(json.dumps({"silent": silent, "kept": kept, "after": after}))
        dist.destroy_process_group()

    if __name__ == "__main__":
        import os
        torch.multiprocessing.start_processes(work, (os.getcwd(),), nprocs=2, start_method="fork")
"""
)


def test_owners_only_on_chosen_step(tmp_path: Path) -> None:
    """Owners are set where their bytes come into being, and only on the chosen step."""
    run = run_traced(tmp_path, TRAIN, imported="torch")
    assert run.returncode == 0, run.err
    said = json.loads(run.out.splitlines()[-1])

    def texts(step: str, model: str) -> dict[str, set[str]]:
        return {where: set(texts) for where, texts in said[step][model].items()}

    assert texts("kept", "ref") == {"DefaultAllGather": {"ref.params"}, "forward": {"actor.activations"}}
    assert texts("kept", "actor") == {
        "DefaultAllGather": {"actor.params"},
        "forward": {"actor.activations", ""},  # the loss is no module's: nobody has said whose it is
        "backward": {"actor.activations"},
        "DefaultReduceScatter": {"actor.grads"},
        "optimizer": {"actor.optimizer"},
        "outside": {""},
    }
    assert said["silent"]["hooks"] == said["after"]["hooks"] == [count - 1 for count in said["kept"]["hooks"]]
    for step in ("silent", "after"):
        assert set().union(*texts(step, "ref").values(), *texts(step, "actor").values()) == {""}


class Segment:
    """What vLLM's allocator knows of one: `AllocationData`."""

    def __init__(self, address: int, size_bytes: int, tag: str) -> None:
        self.handle, self.tag = (0, size_bytes, address, 1), tag


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> tuple[CumemPools, dict[int, Segment]]:
    """The pools of a process whose vLLM has two segments, and a history that is being kept."""
    segments = {4096: Segment(4096, 100, "weights"), 8192: Segment(8192, 50, "kv_cache")}
    allocator = SimpleNamespace(instance=SimpleNamespace(pointer_to_data=segments))
    monkeypatch.setitem(sys.modules, CUMEM, SimpleNamespace(CuMemAllocator=allocator))  # type: ignore[arg-type]
    monkeypatch.setattr(allocations, "_keeping", allocations._Keeping(None, 0, {}))
    kept = CumemPools()
    kept.begin()
    return kept, segments


def test_each_mapping_has_its_time(pools: tuple[CumemPools, dict[int, Segment]]) -> None:
    """Each mapping of a pool has its own time."""
    kept, segments = pools
    times_ns = []
    for change in (kept.unmapped, kept.mapped):
        for segment in segments.values():
            before_ns = clock.now_ns()
            change(kept.handle((segment.handle,), {}), None, None)
            times_ns.append((before_ns, clock.now_ns()))
    history = kept.end()
    assert all(begin <= change.ts_ns <= end for change, (begin, end) in zip(history.changes, times_ns, strict=True))
    timeline = replay(history.changes, history.alive, [Naming(0, kept.owners())])
    assert timeline.start_bytes == {"rollout.weights": 100, "rollout.kv_cache": 50}
    assert [(balance.owner, balance.bytes) for balance in timeline.balances] == [
        ("rollout.weights", 0),
        ("rollout.kv_cache", 0),
        ("rollout.weights", 100),
        ("rollout.kv_cache", 50),
    ]
    assert (timeline.peak_bytes, timeline.mismatches) == (150, 0)
    assert history.ranges == [(4096, 4196), (8192, 8242)]


def test_unmapped_once(
    pools: tuple[CumemPools, dict[int, Segment]],
) -> None:
    """A segment that torch gives back is unmapped once, and one that could not be mapped is not there."""
    kept, segments = pools
    freed = kept.freed_handle((None, 4096), {})
    del segments[4096]
    kept.unmapped(freed, None, None)
    kept.unmapped(kept.handle((freed,), {}), None, None)  # as `use_memory_pool` does
    new = Segment(16384, 7, "kv_cache")
    segments[16384] = new
    kept.mapped(kept.new_handle((None, new.handle), {}), None, None)
    kept.unmapped(kept.handle((segments[8192].handle,), {}), None, None)
    kept.mapped(kept.handle((segments[8192].handle,), {}), None, RuntimeError("CUDA Error: out of memory"))
    history = kept.end()
    assert [(change.address, change.owner) for change in history.changes] == [
        (4096, None),
        (16384, "rollout.kv_cache"),
        (8192, None),
    ]
    assert history.alive == {16384: 7}
