"""Engine steps of vLLM's schedulers that name no preempted request; real ones run in tests/frameworks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rltrace
from rltrace.instrument.vllm import Steps


class Scheduler:
    """As vLLM 0.11 writes it: whom it preempts leaves `running`."""

    def __init__(self, requests: int) -> None:
        self.running = [SimpleNamespace(status=SimpleNamespace(name="RUNNING")) for _ in range(requests)]
        self.waiting: list[Any] = []
        self.kv_cache_manager = SimpleNamespace(usage=0.5)

    def schedule(self, preempted: tuple[int, ...], arriving: int) -> Any:
        for request in [self.running[at] for at in preempted]:
            self.running.remove(request)
            request.status.name = "PREEMPTED"
            self.waiting.append(request)
        self.running += Scheduler(arriving).running
        return SimpleNamespace(total_num_scheduled_tokens=len(self.running))


@pytest.mark.parametrize(("preempted", "arriving"), [((), 0), ((), 2), ((3,), 0), ((0, 2), 0), ((1,), 2)])
def test_a_step_says_how_many_requests_it_took_the_place_of(
    preempted: tuple[int, ...], arriving: int, folder: Path, spans_of: Any
) -> None:
    rltrace.start(folder)
    scheduler, steps = Scheduler(4), Steps()
    token = steps.begin((scheduler,), {})
    output = scheduler.schedule(preempted, arriving)
    steps.keep_output(token, output, None)
    steps.end(steps.find_output((scheduler, output), {}), None, None)
    rltrace.stop()
    (step,) = spans_of(folder, "engine.step")
    assert step.args["preempted"] == len(preempted)
    assert step.args["running"] == 4 - len(preempted) + arriving
