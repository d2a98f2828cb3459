"""Engine steps of vLLM's schedulers, those that name no preempted request too; real ones run in tests/frameworks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rltrace
from rltrace.host.clock import now_ns
from rltrace.instrument.vllm.engine import SchedulerRequests, Steps


class Request:
    """One is no other, though they look alike."""

    def __init__(self) -> None:
        self.status = SimpleNamespace(name="RUNNING")


class Scheduler:
    """As vLLM 0.11 writes it, whom it preempts leaves `running`; later ones name them besides."""

    def __init__(self, requests: int, *, is_naming: bool = False) -> None:
        self.running = [Request() for _ in range(requests)]
        self.waiting: list[Any] = []
        self.kv_cache_manager = SimpleNamespace(usage=0.5)
        self.is_naming = is_naming

    def schedule(self, preempted: tuple[int, ...], arriving: int) -> Any:
        for request in [self.running[at] for at in preempted]:
            self.running.remove(request)
            request.status.name = "PREEMPTED"
            self.waiting.append(request)
        self.running += Scheduler(arriving).running
        named = {"preempted_req_ids": set(map(str, preempted)) or None} if self.is_naming else {}
        return SimpleNamespace(total_num_scheduled_tokens=len(self.running), scheduled_new_reqs=[], **named)


@pytest.mark.parametrize("is_naming", [False, True])
@pytest.mark.parametrize(("preempted", "arriving"), [((), 0), ((), 2), ((3,), 0), ((0, 2), 0), ((1,), 2)])
def test_step_says_what_it_preempted(
    preempted: tuple[int, ...], arriving: int, is_naming: bool, folder: Path, spans_of: Any
) -> None:
    """A step says how many requests it has preempted."""
    rltrace.start(folder)
    scheduler, steps = Scheduler(6, is_naming=is_naming), Steps(lambda *_: None)
    for taken, come in (((5,), 0), ((), 0), ((0,), 0), (preempted, arriving)):
        token = steps.begin((scheduler,), {})
        output = scheduler.schedule(taken, come)
        steps.keep_output(token, output, None)
        steps.end(steps.find_output((scheduler, output), {}), None, None)
    rltrace.stop()
    said = [(step.args["preempted"], step.args["running"]) for step in spans_of(folder, "engine.step")]
    assert said == [(1, 5), (0, 5), (1, 4), (len(preempted), 4 - len(preempted) + arriving)]


def test_request_says_how_long_it_waited(folder: Path, spans_of: Any) -> None:
    """From the queue to the start of the first step that computes it; nothing is said of one that never was."""
    rltrace.start(folder)
    requests = SchedulerRequests()
    queued, aborted = (
        SimpleNamespace(request_id=name, num_prompt_tokens=4, num_output_tokens=2) for name in ("queued", "aborted")
    )
    steps = Steps(requests.scheduled)
    for request in (queued, aborted):
        requests.begin(request, None, None)
    begun_ns = []
    for new in ([SimpleNamespace(req_id="queued")], []):
        begun_ns.append(now_ns())
        output = SimpleNamespace(total_num_scheduled_tokens=1, scheduled_new_reqs=new, preempted_req_ids=None)
        steps.keep_output((begun_ns[-1], Scheduler(0, is_naming=True), None), output, None)
    for request in (queued, aborted):
        requests.end(request, None, None)
    rltrace.stop()
    waited, never = spans_of(folder, "rollout.request")
    assert waited.start_ns + waited.args["queued_ns"] == begun_ns[0]
    assert "queued_ns" not in never.args
