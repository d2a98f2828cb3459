"""What the GPUs did in a step: overlaps once, each GPU by itself, and nothing called exposed that nobody can know."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from recordings import SECOND, Written, span
from rich.console import Console

from rltrace.analysis import summarize
from rltrace.analysis.gpu_work import GpuWork
from rltrace.cli.tables import show
from rltrace.read.recording import Recording

Records = list[list[Any]]
GATHER, SCATTER = "gpu.fsdp.all_gather", "gpu.fsdp.reduce_scatter"
FORWARD, BACKWARD, OPTIMIZER = "gpu.fsdp.forward", "gpu.fsdp.backward", "gpu.optimizer.step"
LOG_PROBS, WHOLE_BACKWARD = "gpu.micro_batch.log_probs", "gpu.autograd.backward"


def written(
    folder: Path, *ranks: list[Records], steps: tuple[tuple[float, float, bool], ...] = ((0, 10, True),)
) -> Any:
    """A driver with its steps (start, end, recorded), and a worker on a GPU of its own for each rank."""
    driver = [span("step", start, end, step=n, recorded=kept) for n, (start, end, kept) in enumerate(steps)]
    run = Written(folder).process("driver", *driver, role="driver", ended_s=steps[-1][1])
    for rank, records in enumerate(ranks):
        device = {"host": "here", "uuid": f"GPU-{rank}"}
        run.process(f"w{rank}", *records, role="worker", rank=rank, device=device, ended_s=steps[-1][1])
    return run.read()


def rows(recording: Recording) -> dict[tuple[int | None, str, str | None], GpuWork]:
    return {(row.rank, row.work, row.phase): row for row in summarize(recording).gpu_work}


def exposed(row: GpuWork) -> tuple[float | None, float | None]:
    return row.least_exposed_seconds, row.most_exposed_seconds


def printed(recording: Recording, *, whole: bool, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    show(summarize(recording), console, whole=whole)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def layers(name: str, start: float, end: float, *parts: tuple[float, float]) -> list[Records]:
    """A pass of a model and of the layers in it."""
    inner = [span(name, *part, module=f"layers.{n}") for n, part in enumerate(parts)]
    return [span(name, start, end, module=""), *inner]


# ---- seconds and times --------------------------------------------------------------------------------------------


def test_layer_is_part_of_its_model(tmp_path: Path) -> None:
    """A layer is a part of its model: neither is counted twice, and a layer is no pass."""
    passes = layers(FORWARD, 1, 4, (1.5, 2), (2, 4)) + layers(FORWARD, 4, 6, (4, 5.5))
    row = rows(written(tmp_path / "run", passes))[0, "fsdp.forward", None]
    assert (row.seconds, row.count) == (5, 2)


def test_layers_of_unsharded_model(tmp_path: Path) -> None:
    """Layers of a model that is not sharded itself are counted."""
    alone = [span(FORWARD, 1 + n, 2 + n, module=f"layers.{n}") for n in range(3)]
    row = rows(written(tmp_path / "run", alone))[0, "fsdp.forward", None]
    assert (row.seconds, row.count) == (3, 3)


def test_gpu_work_is_of_its_launching_step(tmp_path: Path) -> None:
    """GPU work counts in the step that launched it.

    An optimizer step that the GPU ends, or even begins, in the next step of the program counts whole and once.
    """
    steps = ((0, 10, True), (10, 20, True), (20, 30, True), (30, 40, False))
    behind_s = 1.5  # the GPU begins after the program's step is over
    work = [span(OPTIMIZER, n + 0.5, n + 2, behind_host_ns=int(behind_s * SECOND)) for n in (10, 20, 30)]
    row = rows(written(tmp_path / "run", work, steps=steps))[0, "optimizer.step", None]
    assert (row.seconds, row.count) == (1.5, 1)
    work = [span(OPTIMIZER, n - 1, n + 2, behind_host_ns=1000) for n in (10, 20, 30)]
    row = rows(written(tmp_path / "later", work, steps=steps))[0, "optimizer.step", None]
    assert (row.seconds, row.count) == (3, 1)


def test_simultaneous_collectives(tmp_path: Path) -> None:
    """Simultaneous collectives share their time, and each is counted.

    Of three gathers, one of them within another, and of a gather and a reduce-scatter.
    """
    gathers = [span(GATHER, 1, 3, stream=2), span(GATHER, 2, 4, stream=3), span(GATHER, 2.5, 3.5, stream=4)]
    work = [*gathers, span(SCATTER, 3.5, 5, stream=5)]
    found = rows(written(tmp_path / "run", work))
    figures = {name: (row.seconds, row.count) for (_, name, _), row in found.items()}
    assert figures == {"fsdp.all_gather": (3, 3), "fsdp.reduce_scatter": (1.5, 1), "collectives": (4, 4)}


def test_first_and_unrecorded_steps_are_out(tmp_path: Path) -> None:
    """The first step and steps that were not recorded are left out."""
    steps = ((0, 10, True), (10, 20, True), (20, 30, False), (30, 40, True))
    work = [span(OPTIMIZER, start + 1, start + 1 + length) for start, length in ((0, 8), (10, 1), (20, 5), (30, 2))]
    row = rows(written(tmp_path / "run", work, steps=steps))[0, "optimizer.step", None]
    assert (row.seconds, row.count) == (1.5, 1)


def test_work_belongs_to_its_phase(tmp_path: Path) -> None:
    """Work belongs to the phase in which the GPU did it.

    Also to the one of another process on that GPU; it is counted where it begins.
    """
    phases = [span("actor.old_log_prob", 1, 3), span("actor.update", 3, 6)]
    recording = written(tmp_path / "run", [*phases, span(FORWARD, 2, 5, module="")])
    figures = {phase: (row.seconds, row.count) for (_, _, phase), row in rows(recording).items()}
    assert figures == {None: (3, 1), "actor.old_log_prob": (1, 1), "actor.update": (2, 0)}


# ---- bytes and queues ---------------------------------------------------------------------------------------------


def test_bytes_of_one_rank(tmp_path: Path) -> None:
    """Bytes are what one rank receives or sends.

    Three of four parts: its own one it has.
    """
    work = [span(GATHER, 1, 2, bytes=4 * 10**9, ranks=4), span(SCATTER, 2, 4, bytes=8 * 10**9, ranks=4)]
    found = rows(written(tmp_path / "run", work))
    rates = {name: (row.bytes, row.gigabytes_per_second) for (_, name, _), row in found.items()}
    assert rates["fsdp.all_gather"] == (3 * 10**9, 3)
    assert rates["fsdp.reduce_scatter"] == (6 * 10**9, 3)
    assert rates["collectives"] == (9 * 10**9, 3)


def test_queued_collective_is_apart(tmp_path: Path) -> None:
    """Waiting behind another collective is beside its seconds."""
    work = [span(SCATTER, 1, 2), span(GATHER, 2, 3, queued_ns=SECOND // 4), span(GATHER, 4, 5, queued_ns=SECOND // 2)]
    recording = written(tmp_path / "run", work)
    gather = rows(recording)[0, "fsdp.all_gather", None]
    assert (gather.seconds, gather.queued_seconds) == (2, 0.75)
    (line,) = [line.split() for line in printed(recording, whole=True).splitlines() if "fsdp.all_gather " in line]
    assert line == ["fsdp.all_gather", "2.000", "2", "0.750"]


# ---- exposed ------------------------------------------------------------------------------------------------------


def test_collective_between_layers(tmp_path: Path) -> None:
    """A collective between two layers is exposed even if the model goes on."""
    work = [*layers(FORWARD, 1, 6, (1, 3), (4, 6)), span(GATHER, 2, 3.5)]
    assert exposed(rows(written(tmp_path / "run", work))[0, "fsdp.all_gather", None]) == (0.5, 0.5)


def test_collective_around_layers(tmp_path: Path) -> None:
    """A collective before or after a model's layers may be exposed.

    There it may compute its embedding and its head, or wait.
    """
    work = [*layers(FORWARD, 1, 8, (3, 5)), span(GATHER, 0, 2), span(GATHER, 6, 9)]
    assert exposed(rows(written(tmp_path / "run", work))[0, "fsdp.all_gather", None]) == (2, 5)


def test_optimizer_exposes_nothing(tmp_path: Path) -> None:
    """Beside an optimizer step nothing is exposed."""
    work = [span(FORWARD, 0, 1, module="layers.0"), span(OPTIMIZER, 2, 4), span(GATHER, 3, 5)]
    assert exposed(rows(written(tmp_path / "run", work))[0, "collectives", None]) == (1, 1)


def test_backward_may_have_waited(tmp_path: Path) -> None:
    """A layer's backward may have waited for an earlier reduce-scatter until that ends."""
    backward = layers(BACKWARD, 1, 9, (1, 4), (4, 9))
    work = [*backward, span(SCATTER, 4, 7), span(GATHER, 5, 8), span(SCATTER, 9, 9.5)]
    found = rows(written(tmp_path / "run", work))
    assert exposed(found[0, "fsdp.reduce_scatter", None]) == (0.5, 3.5)
    assert exposed(found[0, "fsdp.all_gather", None]) == (0, 2), "behind it the layer surely computed"


def test_outer_module_waits(tmp_path: Path) -> None:
    """A module that others lie in waits between them."""
    nested = [span(FORWARD, 1, 6, module="a"), span(FORWARD, 1, 2, module="a.b"), span(FORWARD, 5, 6, module="a.c")]
    found = rows(written(tmp_path / "run", [*nested, span(GATHER, 3, 4)]))
    assert exposed(found[0, "fsdp.all_gather", None]) == (0, 1)


def test_reduce_scatters_by_their_end(tmp_path: Path) -> None:
    """Reduce-scatters count in the order in which they end, not in which they were written.

    Streams are resolved one after the other.
    """
    backward = layers(BACKWARD, 1, 5, (1, 3), (3, 5))
    scatters = [span(SCATTER, 3.5, 4.5, stream=2), span(SCATTER, 1, 2, stream=3)]
    found = rows(written(tmp_path / "run", [*backward, *scatters, span(GATHER, 1, 5, stream=4)]))
    assert found[0, "fsdp.all_gather", None].most_exposed_seconds == 4 - 1 - 0.5


@pytest.mark.parametrize(
    ("parts", "most_exposed_s"),
    [
        ([(1, 3), (2.9, 5)], 0),  # one after the other, by what their ends are uncertain
        ([(1, 5), (1, 4.9)], 0.1),  # one in the other, though they began at once
        ([(1, 5), (1, 2), (2, 4)], 1),
    ],
)
def test_outer_modules_by_overlap(tmp_path: Path, parts: list[tuple[float, float]], most_exposed_s: float) -> None:
    """Which modules hold others is told by where most of them lies."""
    work = [*layers(FORWARD, 0.5, 5.5, *parts), span(GATHER, 1, 5, stream=4)]
    found = rows(written(tmp_path / "run", work))
    assert found[0, "fsdp.all_gather", None].most_exposed_seconds == pytest.approx(most_exposed_s)


def test_uncertain_passes_are_two(tmp_path: Path) -> None:
    """Two passes that seem to overlap by their uncertainty are two."""
    passes = [span(FORWARD, 1, 3, module=""), span(FORWARD, 2.9, 5, module="")]
    row = rows(written(tmp_path / "run", passes))[0, "fsdp.forward", None]
    assert (row.count, row.seconds) == (2, 4)


def test_model_without_layers(tmp_path: Path) -> None:
    """A model without layers beside one that has them may have computed all along."""
    work = [*layers(FORWARD, 1, 3, (1, 3)), span(FORWARD, 6, 8, module=""), span(GATHER, 6, 8, stream=4)]
    assert exposed(rows(written(tmp_path / "run", work))[0, "fsdp.all_gather", None]) == (0, 2)


def test_bytes_of_a_step_and_worst_error(tmp_path: Path) -> None:
    """Bytes are those of a step, and errors those of the worst span."""
    work = [
        one
        for step_s in (10, 20)
        for one in (
            span(GATHER, step_s + 1, step_s + 2, bytes=100, ranks=2, error_ns=5000),
            span(SCATTER, step_s + 3, step_s + 4, bytes=60, ranks=2, error_ns=9000),
        )
    ]
    steps = ((0, 10, True), (10, 20, True), (20, 30, True))
    row = rows(written(tmp_path / "run", work, steps=steps))[0, "collectives", None]
    assert (row.bytes, row.count, row.largest_error_seconds) == (80, 2, 9e-6)


@pytest.mark.parametrize("whole", [True, False])
def test_whole_models_leave_exposure_unknown(tmp_path: Path, whole: bool) -> None:
    """With whole models only, what was exposed is unknown, and the screen says so."""
    recording = written(tmp_path / "run", [span(FORWARD, 1, 5, module=""), span(GATHER, 0, 3)])
    assert exposed(rows(recording)[0, "collectives", None]) == (None, None)
    text = " ".join(printed(recording, whole=whole).split())
    assert ("how much was exposed is unknown: layers were not timed" in text) is whole
    assert ("exposed" in text) is whole


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_each_gpu_has_its_own_clock(tmp_path: Path, shift: float) -> None:
    """Each GPU is compared with itself, however far off its clock is.

    By a second, the other one's layer would lie beside what is exposed here.
    """

    def work(by: float) -> list[Records]:
        return [*layers(FORWARD, 1 + by, 4 + by, (1 + by, 2 + by), (3 + by, 4 + by)), span(GATHER, 1.5 + by, 2.5 + by)]

    found = rows(written(tmp_path / "run", work(0), work(shift)))
    for rank in (0, 1):
        assert exposed(found[rank, "collectives", None]) == (0.5, 0.5)


# ---- the screens --------------------------------------------------------------------------------------------------


def test_gpus_share_a_row(tmp_path: Path) -> None:
    """GPUs are one row with their least and most, and a GPU without such work counts as zero."""
    recording = written(
        tmp_path / "run", [span(OPTIMIZER, 1, 3), span(FORWARD, 3, 4, module="")], [span(FORWARD, 3, 4, module="")]
    )
    lines = printed(recording, whole=True).splitlines()
    assert next(line.split() for line in lines if line.startswith("optimizer")) == [
        "optimizer.step", "1.000", "0.000-2.000", "rank", "0", "0.5",
    ]  # fmt: skip


def test_gpu_line_and_table(tmp_path: Path) -> None:
    """The first screen has one line about GPU work, and `--all` has the rest."""
    passes = [*layers(FORWARD, 11, 31, (11, 31)), *layers(BACKWARD, 31, 52, (31, 52)), span(OPTIMIZER, 60, 62)]
    phases = [span("ref.log_prob", 0, 31), span("actor.update", 31, 90)]
    work = [*phases, *passes, span(GATHER, 0, 11, error_ns=7_000), span(SCATTER, 70, 85, error_ns=49_000)]
    recording = written(tmp_path / "run", work, steps=((0, 90, True),))
    said = "GPU in a step backward 21.000, forward 20.000 s; meanwhile collectives 26.000 s, exposed 26.000"
    assert " ".join(printed(recording, whole=False).split()).count(said) == 1
    text = printed(recording, whole=True)
    assert text.index("GPU work: ") < text.index("every start and end is off by 49 µs at most")
    assert "each step, GPU work" in " ".join(printed(recording, whole=False).split())


@pytest.mark.parametrize(
    ("optimizer_s", "said"),
    [
        (2, "optimizer.step 2.000, forward 1.000 s"),
        (0.000146, "forward 1.000 s, optimizer.step 146 µs"),
    ],
)
def test_units_in_one_line(optimizer_s: float, said: str, tmp_path: Path) -> None:
    """Kinds of work in one line share a unit or have their own."""
    work = [span(FORWARD, 1, 2, module=""), span(OPTIMIZER, 3, 3 + optimizer_s)]
    lines = printed(written(tmp_path / "run", work), whole=False).splitlines()
    assert f"GPU in a step {said}" in [" ".join(line.split()) for line in lines]


def test_backward_from_the_loss(tmp_path: Path) -> None:
    """A backward from the loss on stands for the model's in the one line."""
    work = [
        span(FORWARD, 1, 2, module=""),
        span(LOG_PROBS, 2, 5),
        span(WHOLE_BACKWARD, 5, 9),
        span(BACKWARD, 7, 9, module=""),
        span(OPTIMIZER, 9, 9.5),
    ]
    recording = written(tmp_path / "run", work)
    said = "GPU in a step backward 4.000, log_probs 3.000 s"
    assert said in [" ".join(line.split()) for line in printed(recording, whole=False).splitlines()]
    text = printed(recording, whole=True)
    places = [text.index(f"\n{kind.removeprefix('gpu.')} ") for kind in (FORWARD, LOG_PROBS, WHOLE_BACKWARD, BACKWARD)]
    assert places == sorted(places)
    assert "autograd.backward: from the loss on, the model's is a part of it" in text


def test_no_gpu_spans_show_nothing(tmp_path: Path) -> None:
    """A Recording without GPU spans shows nothing about GPU work."""
    recording = written(tmp_path / "run", [span("fsdp.forward", 1, 2), span("actor.update", 1, 3)])
    assert summarize(recording).gpu_work == []
    assert "GPU " not in printed(recording, whole=True) + printed(recording, whole=False)


def test_no_finished_step_no_mean(tmp_path: Path) -> None:
    """Without a finished step there is no mean."""
    run = Written(tmp_path / "run").process("w", span("step", 0, None), span(OPTIMIZER, 1, 2), role="driver")
    assert summarize(run.read()).gpu_work == []
