"""Processes of several engines are told apart by the rank or the GPU that they work for, or by a number."""

from __future__ import annotations

from pathlib import Path

import pytest
from recordings import Written, span
from shipped import VERL, opened

from rltrace.read.recording import Recording, in_order


def names(recording: Recording) -> list[str]:
    return [process.name for process in in_order(recording.processes)]


def test_verls_engines_have_ranks() -> None:
    """Each engine and worker of verl has its rank, beside the processes of that rank.

    Workers are on a rank's GPU; engines have none, and their servers and workers know.
    """
    found = names(opened(VERL))
    parts = ("worker", "server", "EngineCore", "Worker 0")
    assert [name for name in found if name.startswith("rank")] == [
        f"rank {n} {part}" for n in range(4) for part in parts
    ]
    assert not {"EngineCore", "Worker 0"} & set(found)


def written_engines(folder: Path, *, gpus: bool, engines: int) -> Recording:
    written = Written(folder)
    for number in range(engines):
        device = {"host": "h", "uuid": f"GPU-0000000{number}-1111"} if gpus else None
        core, who = f"core-{number}", {"host": "h", "start_ns": number}
        written.process(core, span("engine.step", 0, 1), role="engine", name="EngineCore", **who)
        written.process(
            f"w-{number}", span("a", 0, 1), role="engine_worker", name="Worker 0", parent=core, device=device, **who
        )
    return written.read()


@pytest.mark.parametrize(
    ("gpus", "engines", "expected"),
    [
        (True, 2, {f"{name} on GPU-0000000{number}" for name in ("EngineCore", "Worker 0") for number in range(2)}),
        (False, 2, {f"{name} of engine {number}" for name in ("EngineCore", "Worker 0") for number in range(2)}),
        (True, 1, {"EngineCore", "Worker 0"}),
    ],
)
def test_engines_without_ranks(tmp_path: Path, gpus: bool, engines: int, expected: set[str]) -> None:
    """Without ranks engines say their GPU, or a number where there are several."""
    assert set(names(written_engines(tmp_path / "run", gpus=gpus, engines=engines))) == expected


def test_engine_over_two_ranks(tmp_path: Path) -> None:
    """An engine over two ranks has the lower one, and its workers have their own."""
    written = Written(tmp_path / "run")
    written.process("core", span("engine.step", 0, 1), role="engine", name="EngineCore", parent="core")
    for rank in (1, 0):
        device = {"host": "h", "uuid": f"GPU-{rank}"}
        written.process(f"rank-{rank}", span("a", 0, 1), role="worker", rank=rank, device=device, host="h")
        name = f"Worker {rank}"
        written.process(f"w-{rank}", span("a", 0, 1), role="engine", name=name, parent="core", device=device, host="h")
    assert set(names(written.read())) == {
        "rank 0 worker", "rank 1 worker", "rank 0 EngineCore", "rank 0 Worker 0", "rank 1 Worker 1",
    }  # fmt: skip
