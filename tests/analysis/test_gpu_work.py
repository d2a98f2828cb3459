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


def test_a_layer_is_a_part_of_its_model_and_counts_neither_twice_nor_as_a_pass(tmp_path: Path) -> None:
    passes = layers(FORWARD, 1, 4, (1.5, 2), (2, 4)) + layers(FORWARD, 4, 6, (4, 5.5))
    row = rows(written(tmp_path / "run", passes))[0, "fsdp.forward", None]
    assert (row.seconds, row.count) == (5, 2)


def test_layers_of_a_model_that_is_not_sharded_itself_are_counted(tmp_path: Path) -> None:
    alone = [span(FORWARD, 1 + n, 2 + n, module=f"layers.{n}") for n in range(3)]
    row = rows(written(tmp_path / "run", alone))[0, "fsdp.forward", None]
    assert (row.seconds, row.count) == (3, 3)


def test_gpu_work_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    """An optimizer step that the GPU ends, or even begins, in the next step of the program counts whole and once."""
    steps = ((0, 10, True), (10, 20, True), (20, 30, True), (30, 40, False))
    behind_s = 1.5  # the GPU begins after the program's step is over
    work = [span(OPTIMIZER, n + 0.5, n + 2, behind_host_ns=int(behind_s * SECOND)) for n in (10, 20, 30)]
    row = rows(written(tmp_path / "run", work, steps=steps))[0, "optimizer.step", None]
    assert (row.seconds, row.count) == (1.5, 1)
    work = [span(OPTIMIZER, n - 1, n + 2, behind_host_ns=1000) for n in (10, 20, 30)]
    row = rows(written(tmp_path / "later", work, steps=steps))[0, "optimizer.step", None]
    assert (row.seconds, row.count) == (3, 1)


def test_collectives_at_once_take_their_time_once_and_are_counted_each(tmp_path: Path) -> None:
    """Of three gathers, one of them within another, and of a gather and a reduce-scatter."""
    gathers = [span(GATHER, 1, 3, stream=2), span(GATHER, 2, 4, stream=3), span(GATHER, 2.5, 3.5, stream=4)]
    work = [*gathers, span(SCATTER, 3.5, 5, stream=5)]
    found = rows(written(tmp_path / "run", work))
    figures = {name: (row.seconds, row.count) for (_, name, _), row in found.items()}
    assert figures == {"fsdp.all_gather": (3, 3), "fsdp.reduce_scatter": (1.5, 1), "collectives": (4, 4)}


def test_the_first_step_and_steps_that_were_not_recorded_are_left_out(tmp_path: Path) -> None:
    steps = ((0, 10, True), (10, 20, True), (20, 30, False), (30, 40, True))
    work = [span(OPTIMIZER, start + 1, start + 1 + length) for start, length in ((0, 8), (10, 1), (20, 5), (30, 2))]
    row = rows(written(tmp_path / "run", work, steps=steps))[0, "optimizer.step", None]
    assert (row.seconds, row.count) == (1.5, 1)


def test_work_belongs_to_the_phase_in_which_the_gpu_did_it(tmp_path: Path) -> None:
    """Also to the one of another process on that GPU; it is counted where it begins."""
    phases = [span("actor.old_log_prob", 1, 3), span("actor.update", 3, 6)]
    recording = written(tmp_path / "run", [*phases, span(FORWARD, 2, 5, module="")])
    figures = {phase: (row.seconds, row.count) for (_, _, phase), row in rows(recording).items()}
    assert figures == {None: (3, 1), "actor.old_log_prob": (1, 1), "actor.update": (2, 0)}


# ---- bytes and queues ---------------------------------------------------------------------------------------------


def test_bytes_are_what_one_rank_receives_or_sends(tmp_path: Path) -> None:
    """Three of four parts: its own one it has."""
    work = [span(GATHER, 1, 2, bytes=4 * 10**9, ranks=4), span(SCATTER, 2, 4, bytes=8 * 10**9, ranks=4)]
    found = rows(written(tmp_path / "run", work))
    rates = {name: (row.bytes, row.gigabytes_per_second) for (_, name, _), row in found.items()}
    assert rates["fsdp.all_gather"] == (3 * 10**9, 3)
    assert rates["fsdp.reduce_scatter"] == (6 * 10**9, 3)
    assert rates["collectives"] == (9 * 10**9, 3)


def test_waiting_behind_another_collective_is_beside_its_seconds(tmp_path: Path) -> None:
    work = [span(SCATTER, 1, 2), span(GATHER, 2, 3, queued_ns=SECOND // 4), span(GATHER, 4, 5, queued_ns=SECOND // 2)]
    recording = written(tmp_path / "run", work)
    gather = rows(recording)[0, "fsdp.all_gather", None]
    assert (gather.seconds, gather.queued_seconds) == (2, 0.75)
    (line,) = [line.split() for line in printed(recording, whole=True).splitlines() if "fsdp.all_gather " in line]
    assert line == ["fsdp.all_gather", "2.000", "2", "0.750"]


# ---- exposed ------------------------------------------------------------------------------------------------------


def test_a_collective_between_two_layers_is_exposed_though_the_model_goes_on(tmp_path: Path) -> None:
    work = [*layers(FORWARD, 1, 6, (1, 3), (4, 6)), span(GATHER, 2, 3.5)]
    assert exposed(rows(written(tmp_path / "run", work))[0, "fsdp.all_gather", None]) == (0.5, 0.5)


def test_a_collective_before_or_behind_a_models_layers_may_be_exposed(tmp_path: Path) -> None:
    """There it may compute its embedding and its head, or wait."""
    work = [*layers(FORWARD, 1, 8, (3, 5)), span(GATHER, 0, 2), span(GATHER, 6, 9)]
    assert exposed(rows(written(tmp_path / "run", work))[0, "fsdp.all_gather", None]) == (2, 5)


def test_beside_an_optimizer_step_nothing_is_exposed(tmp_path: Path) -> None:
    work = [span(FORWARD, 0, 1, module="layers.0"), span(OPTIMIZER, 2, 4), span(GATHER, 3, 5)]
    assert exposed(rows(written(tmp_path / "run", work))[0, "collectives", None]) == (1, 1)


def test_until_an_earlier_reduce_scatter_ends_a_layers_backward_may_have_waited_for_it(tmp_path: Path) -> None:
    backward = layers(BACKWARD, 1, 9, (1, 4), (4, 9))
    work = [*backward, span(SCATTER, 4, 7), span(GATHER, 5, 8), span(SCATTER, 9, 9.5)]
    found = rows(written(tmp_path / "run", work))
    assert exposed(found[0, "fsdp.reduce_scatter", None]) == (0.5, 3.5)
    assert exposed(found[0, "fsdp.all_gather", None]) == (0, 2), "behind it the layer surely computed"


def test_a_module_that_others_lie_in_waits_between_them(tmp_path: Path) -> None:
    nested = [span(FORWARD, 1, 6, module="a"), span(FORWARD, 1, 2, module="a.b"), span(FORWARD, 5, 6, module="a.c")]
    found = rows(written(tmp_path / "run", [*nested, span(GATHER, 3, 4)]))
    assert exposed(found[0, "fsdp.all_gather", None]) == (0, 1)


def test_reduce_scatters_count_in_the_order_in_which_they_end_not_in_which_they_were_written(tmp_path: Path) -> None:
    """Streams are resolved one after the other."""
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
def test_which_modules_hold_others_is_told_by_where_most_of_them_lies(
    tmp_path: Path, parts: list[tuple[float, float]], most_exposed_s: float
) -> None:
    work = [*layers(FORWARD, 0.5, 5.5, *parts), span(GATHER, 1, 5, stream=4)]
    found = rows(written(tmp_path / "run", work))
    assert found[0, "fsdp.all_gather", None].most_exposed_seconds == pytest.approx(most_exposed_s)


def test_two_passes_that_seem_to_overlap_by_their_uncertainty_are_two(tmp_path: Path) -> None:
    passes = [span(FORWARD, 1, 3, module=""), span(FORWARD, 2.9, 5, module="")]
    row = rows(written(tmp_path / "run", passes))[0, "fsdp.forward", None]
    assert (row.count, row.seconds) == (2, 4)


def test_a_model_without_layers_beside_one_that_has_them_may_have_computed_all_along(tmp_path: Path) -> None:
    work = [*layers(FORWARD, 1, 3, (1, 3)), span(FORWARD, 6, 8, module=""), span(GATHER, 6, 8, stream=4)]
    assert exposed(rows(written(tmp_path / "run", work))[0, "fsdp.all_gather", None]) == (0, 2)


def test_bytes_are_those_of_a_step_and_errors_those_of_the_worst_span(tmp_path: Path) -> None:
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
def test_with_whole_models_only_nobody_knows_what_was_exposed_and_that_is_said(tmp_path: Path, whole: bool) -> None:
    recording = written(tmp_path / "run", [span(FORWARD, 1, 5, module=""), span(GATHER, 0, 3)])
    assert exposed(rows(recording)[0, "collectives", None]) == (None, None)
    text = " ".join(printed(recording, whole=whole).split())
    assert ("how much was exposed is unknown: layers were not timed" in text) is whole
    assert ("exposed" in text) is whole


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_each_gpu_is_compared_with_itself_however_its_clock_is_off(tmp_path: Path, shift: float) -> None:
    """By a second, the other one's layer would lie beside what is exposed here."""

    def work(by: float) -> list[Records]:
        return [*layers(FORWARD, 1 + by, 4 + by, (1 + by, 2 + by), (3 + by, 4 + by)), span(GATHER, 1.5 + by, 2.5 + by)]

    found = rows(written(tmp_path / "run", work(0), work(shift)))
    for rank in (0, 1):
        assert exposed(found[rank, "collectives", None]) == (0.5, 0.5)


# ---- the screens --------------------------------------------------------------------------------------------------


def test_gpus_are_one_row_with_their_least_and_most_and_who_has_none_has_zero(tmp_path: Path) -> None:
    recording = written(
        tmp_path / "run", [span(OPTIMIZER, 1, 3), span(FORWARD, 3, 4, module="")], [span(FORWARD, 3, 4, module="")]
    )
    lines = printed(recording, whole=True).splitlines()
    assert next(line.split() for line in lines if line.startswith("optimizer")) == [
        "optimizer.step", "1.000", "0.000-2.000", "rank", "0", "0.5",
    ]  # fmt: skip


def test_the_first_screen_has_one_line_of_it_and_all_has_the_rest(tmp_path: Path) -> None:
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
def test_kinds_of_work_in_one_line_have_the_unit_of_all_or_each_its_own(
    optimizer_s: float, said: str, tmp_path: Path
) -> None:
    work = [span(FORWARD, 1, 2, module=""), span(OPTIMIZER, 3, 3 + optimizer_s)]
    lines = printed(written(tmp_path / "run", work), whole=False).splitlines()
    assert f"GPU in a step {said}" in [" ".join(line.split()) for line in lines]


def test_a_backward_from_the_loss_on_stands_for_the_models_in_the_one_line(tmp_path: Path) -> None:
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


def test_a_recording_without_gpu_spans_shows_nothing_of_it(tmp_path: Path) -> None:
    recording = written(tmp_path / "run", [span("fsdp.forward", 1, 2), span("actor.update", 1, 3)])
    assert summarize(recording).gpu_work == []
    assert "GPU " not in printed(recording, whole=True) + printed(recording, whole=False)


def test_without_a_step_that_is_over_there_is_no_mean_of_one(tmp_path: Path) -> None:
    run = Written(tmp_path / "run").process("w", span("step", 0, None), span(OPTIMIZER, 1, 2), role="driver")
    assert summarize(run.read()).gpu_work == []
