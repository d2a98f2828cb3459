"""Phases of TRL's trainer and of its engine, and where memory is looked at: where one begins and ends, nowhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rltrace
from rltrace.events import Span
from rltrace.hooks import boundaries
from rltrace.instrument.trl import ColocatedEngine, StepPhases
from rltrace.read.recording import Process


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


@pytest.fixture
def spans_of(folder: Path, process_of: Callable[[Path], Process]) -> Callable[[Callable[[], None]], list[Span]]:
    """Record some work, and give its spans by their start."""

    def record(work: Callable[[], None]) -> list[Span]:
        rltrace.start(folder, role="worker", rank=0)
        work()
        rltrace.stop()
        found = [event for event in process_of(folder).events() if isinstance(event, Span)]
        return sorted(found, key=lambda span: span.start_ns)

    return record


class Tensor:
    """Of two megabytes."""

    def numel(self) -> int:
        return 1_000_000

    def element_size(self) -> int:
        return 2


def sync(engine: ColocatedEngine, generation: Any, *, merges: bool = False) -> None:
    """What TRL does in `sync_weights`, for two parameters."""
    engine.begin_sync((generation,), {})
    engine.begin_wake((None,), {"tags": ["weights"]})
    engine.end_wake(None, None, None)
    for item in (("a", Tensor()), ("b", Tensor()), None):
        token = engine.begin_gather((generation,), {})
        if merges and (item is None or item[0] == "a"):
            engine.begin_merge((), {})
            engine.end_merge(None, None, None)
        engine.end_gather(token, item, None)
    engine.begin_reset((), {})
    engine.end_reset(None, None, None)
    engine.end_sync(None, None, None)


def test_wake_up_interrupts_sync(told: list[tuple[str, str]]) -> None:
    """The phases of a rank do not overlap, and each is looked at from both sides."""
    engine, generation = ColocatedEngine(), SimpleNamespace(mode="colocate")
    engine.meet((generation,), {})
    sync(engine, generation)
    engine.begin_sleep((None,), {"level": 2})
    engine.end_sleep(None, None, None)
    phases = ("weight_sync", "rollout.wake_weights", "weight_sync", "rollout.sleep")
    assert told == [(side, phase) for phase in phases for side in ("begin", "end")]


def test_stages_of_sync(spans_of: Callable[[Callable[[], None]], list[Span]]) -> None:
    """What is between two parameters is the loading of the first one; adapters are merged at both ends, and the engine
    forgets its prefixes last."""
    engine, generation = ColocatedEngine(), SimpleNamespace(mode="colocate")
    engine.meet((generation,), {})
    stages = spans_of(lambda: sync(engine, generation, merges=True))
    stages = [span for span in stages if span.name.startswith("weight_sync.")]
    gather, load, merge = "weight_sync.gather", "weight_sync.load", "weight_sync.merge"
    names = [gather, merge, gather, load, gather, load, gather, merge, gather, "weight_sync.reset_cache"]
    assert [span.name for span in stages] == names
    assert all(span.end_ns is not None and span.end_ns <= after.start_ns for span, after in pairwise(stages))
    assert [(span.args["tensor"], span.args["bytes"]) for span in stages if span.name == load] == [
        ("a", 2_000_000),
        ("b", 2_000_000),
    ]


def test_parameters_sent_to_server(spans_of: Callable[[Callable[[], None]], list[Span]]) -> None:
    """A server has to know all names first: nothing is sent then."""

    def twice() -> None:
        engine, generation = ColocatedEngine(), SimpleNamespace(mode="server", _weight_metadata=None)
        engine.meet((generation,), {})
        sync(engine, generation)
        generation._weight_metadata = ["a", "b"]
        sync(engine, generation)
        engine.begin_sleep((None,), {})
        engine.end_sleep(None, None, None)

    names = [span.name for span in spans_of(twice)]
    assert names.count("weight_sync.gather") == 6
    assert names.count("weight_sync.send") == 2
    assert "weight_sync.load" not in names
    assert not {"rollout.wake_weights", "rollout.sleep"} & set(names), "this process has no engine"


def test_step_ends_where_next_begins(spans_of: Callable[[Callable[[], None]], list[Span]]) -> None:
    """What the trainer does between two steps is a part of the first; an error ends what it leaves open."""

    def train() -> None:
        step, trainer = StepPhases(), SimpleNamespace(model=SimpleNamespace(training=True))
        for number in range(3):
            step.begin((None, None, SimpleNamespace(global_step=number)), {})
            step.begin_update((trainer,), {})
            if number < 2:
                step.end_update(None, None, None)
            time.sleep(0.002)  # it logs, and fetches the next batch
        step.end_training(None, None, ValueError())

    spans = spans_of(train)
    steps = [span for span in spans if span.name == "step"]
    updates = [span for span in spans if span.name == "actor.update"]
    assert [span.args.get("error") for span in steps] == [None, None, "ValueError"]
    assert updates[-1].args["error"] == "ValueError"
    apart_ns = [after.start_ns - span.end_ns for span, after in pairwise(steps) if span.end_ns is not None]
    assert len(apart_ns) == 2 and min(apart_ns) >= 0
    assert min(apart_ns) < 1_000_000  # of two, because the machine may do something else in between
    assert all(
        update.end_ns and step.end_ns and update.end_ns <= step.end_ns
        for update, step in zip(updates, steps, strict=True)
    )
