"""Memory is looked at where a phase of TRL's trainer begins and ends, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rltrace.hooks import boundaries
from rltrace.instrument.trl import StepPhases


@pytest.fixture
def told() -> Iterator[list[tuple[str, str]]]:
    """Every edge, as it was told."""
    found: list[tuple[str, str]] = []
    unwatch = boundaries.watch(lambda edge: found.append(("end" if edge.is_end else "begin", *edge.names)))  # type: ignore[arg-type]
    yield found
    unwatch()


def profile(step: StepPhases, name: str) -> None:
    context = SimpleNamespace(name=f"GRPOTrainer.{name}")
    step.begin_generate((context,), {})
    step.end_generate((context,), {})


def test_a_generation_has_an_edge_on_both_sides_and_other_profiles_have_none(told: list[tuple[str, str]]) -> None:
    step = StepPhases()
    profile(step, "_prepare_inputs")
    assert told == []
    profile(step, "vLLM.generate")
    assert told == [("begin", "rollout.generate"), ("end", "rollout.generate")]


def test_log_probs_are_a_phase_of_a_batch_and_a_part_of_a_loss(told: list[tuple[str, str]]) -> None:
    step, trainer = StepPhases(), SimpleNamespace(ref_model="ref", model=SimpleNamespace(training=False))
    for model in ("actor", "ref"):
        step.begin_log_prob((trainer, model), {})
        step.end_log_prob(None, None, None)
    assert told == []
    step.begin_batch((trainer,), {})
    for model in ("actor", "ref"):
        step.begin_log_prob((trainer, model), {})
        step.end_log_prob(None, None, None)
    phases = ("actor.old_log_prob", "ref.log_prob")
    assert told == [(side, phase) for phase in phases for side in ("begin", "end")]


def test_an_update_is_one_phase_however_many_losses_it_has(told: list[tuple[str, str]]) -> None:
    step, trainer = StepPhases(), SimpleNamespace(model=SimpleNamespace(training=True))
    step.begin((None, None, SimpleNamespace(global_step=0)), {})
    for _ in range(3):
        step.begin_update((trainer,), {})
        step.end_micro_batch(None, None, None)
    step.end(None, None, None)
    assert told == [("begin", "actor.update"), ("end", "actor.update")]


def test_what_ended_a_phase_is_said_at_its_end() -> None:
    step, errors = StepPhases(), []
    unwatch = boundaries.watch(lambda edge: errors.append(edge.error))
    step.begin_reward((), {"inputs": []})
    step.end_reward(None, None, error := ValueError())
    unwatch()
    assert errors == [None, error]
