"""Unmodified verl on GPUs under `rltrace exec`: every phase, bytes that add up, verl's own figures within 2 %."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import verl_run

from rltrace.events import Span

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
    pytest.mark.timeout(1200),
]

PHASES = {
    "rollout.wake_weights",
    "weight_sync",
    "rollout.wake_kv_cache",
    "rollout.generate",
    "rollout.sleep",
    "actor.old_log_prob",
    "ref.log_prob",
    "actor.update",
}
STEPS = 3


@pytest.fixture(scope="module", params=[False, True], ids=["its old trainer", "its new trainer"])
def traced(request, tmp_path_factory):
    """A run of the tiny model on two GPUs: its parameters, its Recording, verl's own figures."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} GPU; the run needs 2")
    folder: Path = tmp_path_factory.mktemp("verl")
    parameters = verl_run.prepare(folder, "tiny")
    return parameters, *verl_run.run(folder, 2, STEPS, request.param)


def test_every_phase_is_on_every_rank(traced):
    _, recording, _ = traced
    phases = {0: set(), 1: set()}
    for process in recording.processes:
        if process.rank in phases:
            phases[process.rank] |= {event.name for event in process.events() if isinstance(event, Span)} & PHASES
    assert phases == {0: PHASES, 1: PHASES}


def test_buckets_add_up_to_the_model_and_each_is_loaded(traced):
    parameters, recording, _ = traced
    spans = verl_run.Spans.of(recording)
    syncs = STEPS + 1  # one before the first step
    for sent in spans.sends.values():
        size_bytes = sum(span.args["bytes"] for span in sent)
        assert size_bytes in (syncs * parameters * 2, syncs * parameters * 4)  # bf16, or fp32 as verl's default is
    leaving = sorted(key for sent in spans.sends.values() for span in sent for key in span.flows_out)
    assert leaving == sorted(key for span in spans.loads for key in span.flows_in)


def test_verls_own_figures_are_matched(traced):
    _, recording, logged = traced
    found = verl_run.differences(recording, logged)
    assert {timer for _, timer in found} == {"step", *verl_run.METHODS}
    wrong = {key: pair for key, pair in found.items() if abs(pair[1] / pair[0] - 1) > 0.02}
    assert wrong == {}
