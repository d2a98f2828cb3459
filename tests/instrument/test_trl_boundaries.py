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


def test_generation(told: list[tuple[str, str]]) -> None:
    """A generation has a boundary on both sides and other profiles have none."""
    step = StepPhases()
    profile(step, "_prepare_inputs")
    assert told == []
    profile(step, "vLLM.generate")
    assert told == [("begin", "rollout.generate"), ("end", "rollout.generate")]


def test_log_probs(told: list[tuple[str, str]]) -> None:
    """Log probs are a phase of a batch and a part of a loss."""
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


def test_update(told: list[tuple[str, str]]) -> None:
    """An update is one phase however many losses it has."""
    step, trainer = StepPhases(), SimpleNamespace(model=SimpleNamespace(training=True))
    step.begin((None, None, SimpleNamespace(global_step=0)), {})
    for _ in range(3):
        step.begin_update((trainer,), {})
        step.end_micro_batch(None, None, None)
    step.end_update(None, None, None)
    assert told == [("begin", "actor.update"), ("end", "actor.update")]


def test_error_at_boundary() -> None:
    """What ended a phase is said at its end."""
    step, errors = StepPhases(), []
    unwatch = boundaries.watch(lambda edge: errors.append(edge.error))
    step.begin_reward((), {"inputs": []})
    step.end_reward(None, None, error := ValueError())
    unwatch()
    assert errors == [None, error]
