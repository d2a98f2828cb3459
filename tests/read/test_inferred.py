"""Steps and phases that are inferred: from literal spans, of loops that the real ones in `test_any_loop` are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from inferred_loops import CRITIC, HOOK, REF, forward, generate, learn
from recordings import Written, span

from rltrace.analysis.summary import Summary, summarize


def read(folder: Path, *records, ended_s: float | None = 100, **others) -> Summary:
    return summarize(Written(folder / "run").process("p", *records, hooks=(HOOK,), ended_s=ended_s, **others).read())


def steps(summary: Summary) -> list[tuple[float, float | None]]:
    return [(step.start_seconds, step.end_seconds) for step in summary.steps]


def phases(summary: Summary, step: int | None) -> dict[str, float]:
    (row,) = [row for row in summary.phases if row.step == step]
    return {name: round(part.seconds, 6) for name, part in row.phases.items() if part.seconds}


def on_gpu(launched: float, start: float, end: float):
    """An optimizer's step as the GPU makes it."""
    return span("gpu.optimizer.step", start, end, stream=1, error_ns=0, behind_host_ns=int((start - launched) * 1e9))


def test_update_lasts_until_the_gpu_is_through(tmp_path: Path) -> None:
    """An update is over when the GPU has stepped, or when the program begins something else; so is its step."""
    one = [learn(0), on_gpu(2.5, 3.5, 5)]
    two = [learn(10), on_gpu(12.5, 13.5, 17), learn(16)]  # the next one begins before
    found = read(tmp_path, *one, *two)
    assert steps(found) == [(0, 5), (5, 16), (16, 19)]
    assert [phases(found, step)["actor.update"] for step in range(3)] == [5, 6, 3]


def test_step_begins_with_its_generation(tmp_path: Path) -> None:
    """From one generation to the next is a step, with all optimizers between."""
    one = [generate(0, 4), forward(4, 5), forward(5, 6, REF), learn(6), learn(9, 2, (CRITIC,), model=CRITIC)]
    two = [generate(20, 24), generate(25, 27), learn(27), learn(30)]
    found = read(tmp_path, *one, *two)
    assert steps(found) == [(0, 20), (20, 33)]
    assert all(step.inferred for step in found.steps)
    assert phases(found, 0) == {
        "rollout.generate": 4, "actor.old_log_prob": 1, "ref.log_prob": 1, "actor.update": 6, "idle": 8,
    }  # fmt: skip
    assert phases(found, 1) == {"rollout.generate": 7, "actor.update": 6}
    assert [row.phases["actor.update"].inferred for row in found.phases if row.step is not None] == [True, True]


def test_step_is_in_brief_by_what_ran_in_it(tmp_path: Path) -> None:
    """A process is told of its next step before it generates again, however long it waits in between."""
    briefs = [span("recording.detail", at, at, full=full) for at, full in ((0, False), (8, True), (28, False))]
    found = read(tmp_path, *briefs, *[part for at in (1, 20, 60) for part in (generate(at, at + 4), learn(at + 4))])
    assert steps(found) == [(1, 20), (20, 60), (60, 67)]
    assert [step.brief for step in found.steps] == [True, False, True]


def test_step_ends_with_the_rarest_optimizer(tmp_path: Path) -> None:
    """Without a generation a step ends with its accumulation, of the optimizer that steps least."""
    rounds = [learn(start + at, number, (number,)) for start in (0, 20, 40) for at, number in ((0, 1), (3, 1), (6, 2))]
    assert steps(read(tmp_path, *rounds)) == [(0, 9), (9, 29), (29, 49)]


def test_steps_of_groups_are_one(tmp_path: Path) -> None:
    """An optimizer that steps once for each group of parameters, as DeepSpeed's, has made one step."""
    again = [span("optimizer.step", at, at + 1, optimizer="AdamW", tensors=1, number=1, models=[]) for at in (3, 13)]
    assert steps(read(tmp_path, learn(0, 1, ()), again[0], learn(10, 1, ()), again[1])) == [(0, 4), (4, 14)]


def test_ref_is_what_no_optimizer_holds(tmp_path: Path) -> None:
    """A model that no optimizer holds is the ref; one that learns and does not generate, the critic; names tell a
    reward."""
    asked = [forward(4, 5, REF), forward(5, 6, CRITIC), forward(6, 7, 4, module="QwenForSequenceClassification")]
    found = read(tmp_path, generate(0, 4), *asked, learn(7), learn(10, 2, (CRITIC,), model=CRITIC))
    assert phases(found, 0) == {
        "rollout.generate": 4, "reward": 1, "ref.log_prob": 1, "critic.values": 1, "actor.update": 6,
    }  # fmt: skip


def test_optimizer_that_holds_no_model(tmp_path: Path) -> None:
    """Where an optimizer's parameters are no model's, as those of ZeRO, the models with gradients learn."""
    found = read(tmp_path, forward(0, 1, REF), forward(1, 2), learn(2, 1, ()))
    assert phases(found, 0) == {"ref.log_prob": 1, "actor.old_log_prob": 1, "actor.update": 3}


def test_sampling_by_hand_is_a_generation(tmp_path: Path) -> None:
    """Forwards of one token more each are a generation."""
    sampled = [[forward(start + at, start + at + 1, columns=9 + at) for at in range(6)] for start in (0, 20)]
    found = read(tmp_path, *sampled[0], learn(6), *sampled[1], learn(26))
    assert steps(found) == [(0, 20), (20, 29)]
    assert phases(found, 1) == {"rollout.generate": 6, "actor.update": 3}


def test_log_probs_belong_to_their_forward(tmp_path: Path) -> None:
    """What the process computes behind a forward, as long as it keeps the output, is the same phase."""
    work = span("host.work", 5, 8, gap_ns=5 * 10**9, output_ns=2 * 10**9)
    found = read(tmp_path, generate(0, 4), forward(4, 5), work, learn(10))
    assert phases(found, 0) == {
        "rollout.generate": 4, "actor.old_log_prob": 3, "actor.update": 3, "unlabelled": 1, "idle": 2,
    }  # fmt: skip


def test_forwards_within_an_update_are_its_own(tmp_path: Path) -> None:
    """A ref that is asked between two mini-batches is a part of the update."""
    found = read(tmp_path, generate(0, 4), learn(4), forward(7, 8, REF), learn(8))
    assert phases(found, 0) == {"rollout.generate": 4, "actor.update": 7}


def test_copies_into_what_generates_are_a_sync(tmp_path: Path) -> None:
    """Weights that are copied into a model that generates and does not learn, or into an engine, are a sync."""
    loads = [span("model.load_weights", 7, 8, model=5, by="torch"), span("model.load_weights", 8, 10, by="vLLM")]
    into_the_ref = span("model.load_weights", 10, 11, model=REF, by="torch")
    found = read(tmp_path, generate(0, 4, 5), learn(4), *loads, into_the_ref)
    assert phases(found, 0) == {"weight_sync": 3, "rollout.generate": 4, "actor.update": 3, "unlabelled": 1}


@pytest.mark.parametrize("ended_s", [100, None])
def test_last_step_of_a_dead_process_is_open(tmp_path: Path, ended_s: float | None) -> None:
    """The last step ends with its process's part; one that was killed in it leaves it open."""
    found = read(tmp_path, generate(0, 4), learn(4), generate(10, 14), learn(14), ended_s=ended_s)
    assert steps(found) == [(0, 10), (10, 17 if ended_s else None)]


def test_generation_that_a_kill_cut_off_is_open(tmp_path: Path) -> None:
    """A process that died while it generated died in that phase of the step."""
    found = read(tmp_path, generate(0, 4), learn(4), generate(10, None), ended_s=None)
    assert steps(found) == [(0, 10), (10, None)]
    assert {span.name for span in found.open_spans} == {"model.generate", "rollout.generate", "step"}


def test_evaluation_at_the_end_is_no_step(tmp_path: Path) -> None:
    """What is generated at last, and learned from no more, is no step."""
    assert steps(read(tmp_path, generate(0, 4), learn(4), generate(10, 14))) == [(0, 10)]


def test_own_steps_win(tmp_path: Path) -> None:
    """Nothing is inferred where the program marks it: steps of another process, a phase of its own."""
    own = [span("step", 0, 20, step=7), span("reward", 2, 3, phase=True)]
    written = Written(tmp_path / "run").process("main", *own, role="driver", ended_s=30)
    ran = [generate(0, 4), learn(5), generate(20, 24), learn(25)]
    written.process("p", *ran, span("mine", 1, 3, phase=True), hooks=(HOOK,), role="worker", rank=0, ended_s=30)
    found = summarize(written.read())
    assert [(step.lane, step.step, step.inferred) for step in found.steps] == [("driver", 7, False)]
    (row,) = [row for row in found.phases if row.lane == "rank 0" and row.step == 7]
    marked = {name: (round(part.seconds, 6), part.inferred) for name, part in row.phases.items() if part.seconds}
    assert marked == {
        "mine": (2, False), "rollout.generate": (2, True), "actor.update": (3, True), "idle": (13, False),
    }  # fmt: skip


def test_known_trainer_wins(tmp_path: Path) -> None:
    """Nothing is inferred in a run whose trainer a hook knows, whichever process that is."""
    trainer = {**HOOK, "instrumentation": "trl", "target": "trl:step", "emits": ["step", "actor.update"]}
    written = Written(tmp_path / "run").process("t", span("actor.update", 0, 9), hooks=(trainer,), ended_s=30)
    written.process("p", generate(0, 4), learn(5), generate(20, 24), learn(25), hooks=(HOOK,), ended_s=30)
    found = summarize(written.read())
    assert found.inferred == [] and found.steps == []


def test_process_that_only_infers_has_no_phases(tmp_path: Path) -> None:
    """Forwards without gradient alone, as of a server, are no phases."""
    found = read(tmp_path, *(forward(at, at + 1) for at in range(0, 20, 2)))
    assert found.inferred == [] and found.phases == []


def test_coverage_is_shares_of_a_step(tmp_path: Path) -> None:
    """Phases, unlabelled time and idle time are the whole step."""
    found = read(tmp_path, generate(0, 4), learn(4), span("host.work", 7, 8), generate(10, 14), learn(14))
    assert found.steady is not None and found.steady.coverage is not None
    assert found.steady.coverage.phases == pytest.approx(1.0)
    first = read(tmp_path / "first", generate(0, 4), learn(4), span("host.work", 7, 8), generate(10, 14))
    assert first.steady is not None and first.steady.coverage is not None
    coverage = first.steady.coverage
    assert (coverage.phases, coverage.unlabelled, coverage.idle) == pytest.approx((0.7, 0.1, 0.2))
