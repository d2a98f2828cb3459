"""Sleeps that free nothing or find one tag asleep, wake-ups without room, leaks: each provoked on the real engine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from recordings import Written, sample, span
from test_memory_ledger import COMMON, MIB
from traced_runs import TracedRun, run_traced

from rltrace.analysis import Summary, summarize
from rltrace.analysis.transactions import Leak
from rltrace.cli.tables.sync import leak_lines

PLANTED_ENGINE = """
import mmap, os, torch
from wrapt import register_post_import_hook

class NoRoom:
    def fill_(self, value):
        torch.empty(1 << 50, dtype=torch.uint8)

def plant(module):
    sleep, wake_up, forward = module.Engine.sleep, module.Engine.wake_up, module.Engine._forward

    def planted_sleep(engine, level):
        if getattr(engine, "is_like_vllm", False) and len(engine.pool.awake) == 1:
            return {}  # "Executor is already sleeping": it does nothing, and says nothing
        return sleep(engine, level)

    def planted_wake_up(engine, tags):
        if tags == ["leak"]:
            engine.__dict__.setdefault("leaked", []).append(torch.ones(4 << 20, dtype=torch.uint8))
        elif tags == ["shared mapping"]:  # on which MADV_DONTNEED frees nothing
            region = engine.pool.regions["kv_cache"]
            page = mmap.PAGESIZE
            region._map = mmap.mmap(-1, region.size_bytes + 2 * page, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
            region.bytes = torch.frombuffer(region._map, dtype=torch.uint8)[page : page + region.size_bytes]
            region.address = region.bytes.data_ptr()
            region.bytes.fill_(1)
        elif tags == ["no room"]:
            engine.pool.regions["kv_cache"].bytes = NoRoom()
        elif tags == ["a mistake"]:
            engine.pool.regions.pop("kv_cache")
        elif tags == ["like vllm"]:
            engine.is_like_vllm = True
        elif tags == ["like a compiler"]:
            engine.compiled = {}
        else:
            wake_up(engine, tags)

    def planted_forward(engine, batch, new):
        if hasattr(engine, "compiled"):
            back = max(len(request.prompt) + len(request.tokens) for request in batch)
            shape = len(batch), max(map(len, new)), back
            engine.compiled.setdefault(shape, torch.ones(1 << 20, dtype=torch.uint8))
        return forward(engine, batch, new)

    module.Engine.sleep, module.Engine.wake_up, module.Engine._forward = planted_sleep, planted_wake_up, planted_forward

register_post_import_hook(plant, "rltrace_reference.engine.engine")
"""

RUN = """
    rollout = Rollout(CONFIG, 0)
    rollout.start()

    def step(number, *, wake=("weights", "kv_cache"), before_sleep=()):
        with rltrace.span("step", step=number):
            rollout.wake_up(list(wake))
            for planted in before_sleep:
                rollout.wake_up([planted])
            rollout.sleep(2)
"""


def run_engine(folder: Path, body: str) -> TracedRun:
    """Run a program whose engine does what the test planted in it."""
    (folder / "sitecustomize.py").write_text(PLANTED_ENGINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        return run_traced(folder, COMMON + RUN + body, timeout_s=240, imported="torch")


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Steps of an engine of which some go wrong."""
    body = """
    rollout.sleep(2)
    step(0)
    step(1, wake=["weights"])
    for number in range(2, 7):
        step(number, before_sleep=["leak"])
    rollout.wake_up(["like vllm"])
    step(7, wake=["weights"])
    step(8, before_sleep=["shared mapping"])
    rollout.close()
    dist.destroy_process_group()
    """
    run = run_engine(tmp_path_factory.mktemp("sleeps"), body)
    assert run.returncode == 0, run.err
    return summarize(run.recording)


def sleep_of(summary: Summary, step: int) -> tuple[str, str]:
    (sleep,) = [sleep for sleep in summary.sleeps if sleep.step == step and sleep.name == "rollout.sleep"]
    return sleep.verdict, sleep.reason


def test_good_sleep(summary: Summary) -> None:
    """A good sleep frees what was expected, and the kernel agrees."""
    (sleep,) = [sleep for sleep in summary.sleeps if sleep.step == 0 and sleep.name == "rollout.sleep"]
    assert (sleep.verdict, sleep.reason, sleep.level, sum(sleep.left_bytes.values())) == ("ok", "", 2, 0)
    assert sleep.expected_bytes == sleep.moved_bytes
    assert sleep.expected_bytes["kv_cache"] == 128 * MIB
    assert sleep.changed_bytes == pytest.approx(sum(sleep.expected_bytes.values()), abs=2 * MIB)
    assert sleep.gigabytes_per_second is not None


def test_wake_up_takes_what_sleep_gave(summary: Summary) -> None:
    """Waking up takes what sleeping gave back."""
    woken = [move for move in summary.sleeps if move.step == 0 and move.name == "cumem.map"]
    assert [list(move.moved_bytes) for move in woken] == [["weights"], ["kv_cache"]]
    assert [move.expected_bytes for move in woken] == [move.moved_bytes for move in woken]


def test_partly_awake_sleep(summary: Summary) -> None:
    """A sleep while partly awake is named with what slept."""
    verdict, reason = sleep_of(summary, 1)
    assert verdict == "partly awake"
    assert reason == "kv_cache slept already; the rest was freed"


def test_partly_awake_sleep_does_nothing(summary: Summary) -> None:
    """A sleep that silently does nothing while partly awake is named.

    What vLLM 0.26 does.
    """
    verdict, reason = sleep_of(summary, 7)
    assert verdict == "partly awake"
    assert "the call did nothing: 24.0 MiB are still awake" in reason


def test_sleep_that_frees_nothing(summary: Summary) -> None:
    """A sleep that frees nothing is named with the owner that kept the memory."""
    verdict, reason = sleep_of(summary, 8)
    assert verdict == "freed nothing"
    assert "rollout.kv_cache 128.0 MiB" in reason


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    """An engine without room, then without its KV cache, which leaks from there on."""
    body = """
    rollout.sleep(2)
    for number, planted in enumerate(["no room", "a mistake"]):
        with rltrace.span("step", step=number):
            rollout.wake_up([planted])
            try:
                rollout.wake_up(["weights", "kv_cache"])
            except Exception as error:
                print(error)
            rollout.sleep(2)
    for number in range(2, 7):
        step(number, wake=["weights"], before_sleep=["leak"])
    rollout.close()
    dist.destroy_process_group()
    """
    run = run_engine(tmp_path_factory.mktemp("failing"), body)
    assert run.returncode == 0, run.err
    return run


def test_leak_over_steps(failing: TracedRun) -> None:
    """A leak that grows over steps is named with its size."""
    (leak,) = summarize(failing.recording).leaks
    assert (leak.lane, leak.owner, leak.sleeps) == ("rank 0", "unattributed", 3)
    assert leak.bytes_per_sleep == pytest.approx(4 * MIB, rel=0.05)
    assert leak.last_bytes == pytest.approx(5 * 4 * MIB, abs=3 * MIB)


def test_kernels_compiled_every_step(tmp_path: Path) -> None:
    """Kernels that an engine compiles at every step are reported with their rate.

    Each step has two shapes that the engine has not seen, which leave 2 MiB and what its library really compiles.

    Code that it compiles it maps itself, outside of the heap, which no row has: 0.2 MiB a step where it has AMX.
    """
    body = """
    rollout.sleep(1)
    rollout.wake_up(["like a compiler"])
    for number in range(10):
        with rltrace.span("step", step=number):
            rollout.wake_up(["weights", "kv_cache"])
            rollout.generate([[1] * (6 + number)] * 2, 7, number)
            rollout.sleep(1)
    rollout.close()
    dist.destroy_process_group()
    """
    run = run_engine(tmp_path, body)
    assert run.returncode == 0, run.err
    found = {leak.owner: leak for leak in summarize(run.recording).leaks}
    assert found.keys() <= {"library.kernels", "allocator.cached", "unaccounted"}
    leak = found["library.kernels"]
    assert (leak.lane, leak.sleeps) == ("rank 0", 8)
    assert 2 * MIB <= leak.bytes_per_sleep <= leak.last_bytes / 10
    assert "unaccounted" not in found or found["unaccounted"].bytes_per_sleep < leak.bytes_per_sleep / 20


def leaks_of(folder: Path, rows: dict[str, list[float]], unexplained: list[float]) -> list[Leak]:
    """Of a device whose rows had so many MiB after each sleep, and whose total was that much more."""
    written, device = Written(folder / "run"), {"host": socket.gethostname(), "uuid": "cpu-0"}
    records = []
    for at in range(len(unexplained)):
        total = int((sum(held[at] for held in rows.values()) + unexplained[at]) * MIB)
        records += [
            span("rollout.sleep", at, at + 0.1, level=2),
            *(sample(f"{owner}_bytes", at + 0.2, held[at] * MIB) for owner, held in rows.items()),
            span("memory.edge", at + 0.2, at + 0.3, totals={"1": total}, cpu_ns={"1": at}),
        ]
    written.process("engine", *records, role="engine", rank=0, device=device, pid=1, ended_s=len(unexplained) + 1)
    return summarize(written.read()).leaks


@pytest.mark.parametrize(("freed_mib", "verdict"), [(0, "ok"), (70, "ok"), (-1, "took less")])
def test_wake_up_beside_other_moves(tmp_path: Path, freed_mib: int, verdict: str) -> None:
    """A wake-up is judged by what the engine moved, even if others move memory meanwhile.

    12 MiB are mapped while a trainer gives some of its cache back; -1: they are said to be mapped, and are not.
    """
    written, device = Written(tmp_path / "run"), {"host": socket.gethostname(), "uuid": "cpu-0"}
    cached = [100 * MIB, (100 - max(0, freed_mib)) * MIB]
    weights = [0, 12 * MIB if freed_mib >= 0 else 0]
    records = [
        span("rollout.wake_weights", 1, 2),
        span("cumem.map", 1.1, 1.9, bytes=12 * MIB, tags={"weights": 12 * MIB}),
    ]
    for moment, at in enumerate((0.5, 2.1)):
        records += [
            sample("allocator.cached_bytes", at, cached[moment]),
            sample("rollout.weights_bytes", at, weights[moment]),
            span("memory.edge", at, at + 0.1, totals={"1": cached[moment] + weights[moment]}, cpu_ns={"1": 0}),
        ]
    written.process("engine", *records, role="engine", rank=0, device=device, pid=1, ended_s=4)
    (wake,) = summarize(written.read()).sleeps
    assert wake.verdict == verdict
    assert wake.changed_bytes == weights[1]


@pytest.mark.parametrize(
    ("handed_out_mib", "stays_mib", "verdict"), [(0, 0, "ok"), (113, 0, "ok"), (0, 113, "freed less than it said")]
)
def test_cache_hand_out_is_no_shortfall(tmp_path: Path, handed_out_mib: int, stays_mib: int, verdict: str) -> None:
    """What an engine's own cache hands out meanwhile is no shortfall of its sleep.

    An engine of SGLang's makes its list of free pages anew as it falls asleep: 113 MiB for 15 million of them.
    """
    written, device = Written(tmp_path / "run"), {"host": socket.gethostname(), "uuid": "cpu-0"}
    moved = 500 * MIB
    rows = {
        "rollout.kv_cache": (moved, 0),
        "allocator.cached": (120 * MIB, (120 - handed_out_mib) * MIB),
        "rollout.activations": (10 * MIB, (10 + handed_out_mib) * MIB),
        "unaccounted": (0, stays_mib * MIB),
    }
    records = [
        span("rollout.sleep", 1, 2, level=2),
        span("cumem.unmap", 1.1, 1.9, bytes=moved, tags={"kv_cache": moved}),
    ]
    for moment, at in enumerate((0.9999, 2.0001)):
        records += [
            sample(f"{owner}_bytes", at, held[moment]) for owner, held in rows.items() if owner != "unaccounted"
        ]
        total = sum(held[moment] for held in rows.values())
        records += [span("memory.edge", at, at, totals={"1": total}, cpu_ns={"1": 0})]
    written.process("engine", *records, role="engine", rank=0, device=device, pid=1, ended_s=4)
    (sleep,) = summarize(written.read()).sleeps
    assert (sleep.verdict, sleep.changed_bytes) == (verdict, moved - stays_mib * MIB)


def test_trainers_cache_hides_nothing(tmp_path: Path) -> None:
    """A trainer that empties its cache meanwhile does not hide a sleep that frees nothing.

    The engine says that 500 MiB are unmapped, and as much of the device's total goes; but it was the trainer's.
    """
    written, device = Written(tmp_path / "run"), {"host": socket.gethostname(), "uuid": "cpu-0"}
    moved = 500 * MIB
    records = [
        span("rollout.sleep", 1, 2, level=2),
        span("cumem.unmap", 1.1, 1.9, bytes=moved, tags={"kv_cache": moved}),
    ]
    for at, cached, held in ((0.9999, 600 * MIB, moved), (2.0001, 100 * MIB, 0)):
        records += [sample("allocator.cached_bytes", at, cached), sample("rollout.kv_cache_bytes", at, held)]
        records += [sample("rollout.activations_bytes", at, 10 * MIB)]
        records += [span("memory.edge", at, at, totals={"1": cached + moved + 10 * MIB}, cpu_ns={"1": 0})]
    written.process("engine", *records, role="engine", rank=0, device=device, pid=1, ended_s=4)
    (sleep,) = summarize(written.read()).sleeps
    assert (sleep.verdict, sleep.changed_bytes) == ("freed nothing", 0)


def test_unlooked_sleep_leaves_nothing_known(tmp_path: Path) -> None:
    """If nobody looked after a sleep, nothing is known to be left.

    Its process was killed as soon as it slept.
    """
    records = [
        sample("rollout.weights_bytes", 0.9, 12 * MIB),
        span("memory.edge", 0.9, 0.95, totals={"1": 12 * MIB}, cpu_ns={"1": 0}),
        span("rollout.sleep", 1, 2, level=2),
        span("cumem.unmap", 1.1, 1.9, bytes=12 * MIB, tags={"weights": 12 * MIB}),
    ]
    written = Written(tmp_path / "run").process("engine", *records, role="engine", rank=0, pid=1, ended_s=3)
    (sleep,) = summarize(written.read()).sleeps
    assert (sleep.verdict, sleep.left_bytes, sleep.changed_bytes) == ("ok", {}, None)


@pytest.mark.parametrize(
    ("owner", "held", "found"),
    [
        ("unattributed", [5, 6, 7, 8], (3, 1.0)),
        ("unattributed", [5, 6, 7], None),  # of three sleeps only two have one before them
        ("library.kernels", [5, 6, 7, 8], None),  # a cache that fills
        ("library.kernels", [5, 25, 30, 34, 37, 39, 41, 42, 43], (8, 4.75)),
        ("library.kernels", [5, 25, 30, 34, 37, 39, 41, 41, 42], None),  # it was full once
        ("library.kernels", [30, 32, 32.02, 32.04, 34, 34.02, 34.04, 34.06, 34.08], None),  # two last shapes, and noise
        ("unattributed", [1, 5, 9, 13, 17, 21, 21.1, 21.2, 21.3], None),  # it leaks no more
        ("allocator.cached", [n * 0.3 for n in range(9)], (8, 0.3)),
        ("unattributed", [n * 0.3 for n in range(9)], (8, 0.3)),
        ("unattributed", [n * 0.1 for n in range(9)], None),  # 0.8 MiB are noise
        ("unattributed", [1, 5, 4, 8, 7, 11, 10, 14, 13], None),  # up and down
        ("interpreter", [n * 2.0 for n in range(9)], None),  # pages of files: there are only so many
    ],
)
def test_growth_without_end_is_told(
    tmp_path: Path, owner: str, held: list[float], found: tuple[int, float] | None
) -> None:
    """Growth without a known end is reported, and noise is not."""
    leaks = leaks_of(tmp_path, {owner: held, "rollout.weights": [7.0] * len(held)}, [0.0] * len(held))
    assert [(leak.owner, leak.sleeps, leak.bytes_per_sleep) for leak in leaks] == (
        [] if found is None else [(owner, found[0], pytest.approx(found[1] * MIB, abs=1))]
    )


def test_unaccounted_growth_is_told(tmp_path: Path) -> None:
    """Growth that no row explains is reported."""
    (leak,) = leaks_of(tmp_path, {"rollout.weights": [7.0] * 9}, [3.0 + n / 4 for n in range(9)])
    assert (leak.owner, leak.sleeps, leak.bytes_per_sleep) == ("unaccounted", 8, MIB // 4)


def test_last_sleep_keeps_last_look(tmp_path: Path) -> None:
    """A last sleep after which nobody looked is as the last look found it."""
    records = [span("rollout.sleep", 9, 9.1, level=2)]
    for at in range(4):
        held = at * 2 * MIB
        records += [
            span("rollout.sleep", at, at + 0.1, level=2),
            sample("unattributed_bytes", at + 0.2, held),
            span("memory.edge", at + 0.2, at + 0.3, totals={"1": held}, cpu_ns={"1": 0}),
        ]
    written = Written(tmp_path / "run").process("engine", *records, role="engine", rank=0, pid=1, ended_s=10)
    assert summarize(written.read()).leaks == []


def test_alike_growth_is_one_line() -> None:
    """What grows alike is one line over all devices with the largest rates."""

    def leak(rank: int, owner: str, sleeps: int, mib: int) -> Leak:
        return Leak(
            lane=f"rank {rank}", rank=rank, owner=owner, sleeps=sleeps, bytes_per_sleep=mib * MIB, last_bytes=99 * MIB
        )

    found = [leak(rank, "library.kernels", 8, 9 + rank) for rank in (0, 1)]
    found += [leak(0, "unattributed", 3, 4), *(leak(rank, "allocator.cached", 8, 2) for rank in (0, 1))]
    assert list(leak_lines(found)) == [
        "Possible leak (or a cache still filling): grew across the last 8 sleeps: library.kernels 10.0 MiB, "
        "allocator.cached 2.0 MiB a sleep (ranks 0-1)",
        "Possible leak: grew across the last 3 sleeps: unattributed 4.0 MiB a sleep (rank 0)",
    ]


def test_good_steps_leak_nothing(summary: Summary) -> None:
    assert summary.leaks == []  # the last steps leaked no more


def test_killed_wake_up_had_no_room(tmp_path: Path, memory_group: Path) -> None:
    """A wake-up without room is named even if the kernel killed the engine.

    The kernel's limit leaves room for the weights, not for the KV cache: SIGKILL inside the wake-up.
    """
    body = f"""
    rollout.sleep(2)
    pid = rollout.process.pid
    open({str(memory_group.parent / "cgroup.procs")!r}, "w").write(str(pid))
    open({str(memory_group)!r}, "w").write(str(80 << 20))
    with rltrace.span("step", step=0):
        try:
            rollout.wake_up(["weights", "kv_cache"])
        except Exception as error:
            print(error)
    dist.destroy_process_group()
    """
    run = run_engine(tmp_path, body)
    assert "killed by SIGKILL" in run.out or "SIGKILL" in run.out, run.out + run.err
    moves = [move for move in summarize(run.recording).sleeps if move.step == 0]
    assert [(move.name, move.verdict) for move in moves][-1] == ("cumem.map", "never ended")
    assert (
        moves[-1].reason.startswith("cumem.map of kv_cache was still under way") and "out of memory" in moves[-1].reason
    )


def test_only_memory_errors_mean_no_room(failing: TracedRun) -> None:
    """Only a wake-up that ran out of memory had no room; another error is named."""
    assert "tried to allocate 1125899906842624 bytes" in failing.out and "KeyError: 'kv_cache'" in failing.out
    found = summarize(failing.recording)
    woken = [(move.step, move.verdict, move.reason) for move in found.sleeps if move.name == "cumem.map"]
    failed = [(step, verdict) for step, verdict, reason in woken if "kv_cache failed" in reason]
    assert failed == [(0, "no room"), (1, "failed: KeyError")]
    assert [step for step, verdict, _ in woken if verdict == "ok" and step in (0, 1)] == [0, 1], "the weights came back"
    (told,) = found.out_of_memory
    assert (told.process, told.asked_bytes) == ("rank 0 engine", 1 << 50)


@pytest.mark.parametrize(("left_mib", "verdict"), [(0, "ok"), (12, "freed nothing")])
def test_overlapping_sleeps_are_one(tmp_path: Path, left_mib: int, verdict: str) -> None:
    """Overlapping sleeps of one device are one, and judged when the last is over.

    Two servers name the device as theirs, as verl's did; one of them was ready while the device's engine was not.
    """
    written, device = Written(tmp_path / "run"), {"host": socket.gethostname(), "uuid": "cpu-0"}
    who = {"rank": 0, "device": device, "ended_s": 9}
    written.process("other", span("rollout.sleep", 1, 1.2, level=2), role="server", **who)
    written.process("server", span("rollout.sleep", 1.1, 2, level=2), role="server", **who)
    held = ((0.5, 12), (1.3, 12), (2.1, left_mib))
    engine = [sample("rollout.weights_bytes", at, size * MIB) for at, size in held]
    engine += [span("cumem.unmap", 1.1, 1.9, bytes=12 * MIB, tags={"weights": 12 * MIB})]
    written.process("engine", *engine, role="engine", **who)
    (sleep,) = summarize(written.read()).sleeps
    assert (sleep.at_seconds, sleep.seconds, sleep.verdict) == (1, 1, verdict)


def test_sleep_without_bytes_is_not_wrong(tmp_path: Path) -> None:
    """A sleep whose bytes nobody reported is not called wrong."""
    written = Written(tmp_path / "run")
    for at in (1, 3):
        moves = [
            span("rollout.sleep", at, at + 1, level=2),
            *(span("cumem.unmap", at, at + 0.5, tag=tag, bytes=1 << 30) for tag in ("weights", "kv_cache")),
        ]
        written.process(f"engine{at}", *moves, role="engine", rank=0, ended_s=5)
    assert [sleep.verdict for sleep in summarize(written.read()).sleeps] == ["ok", "ok"]
