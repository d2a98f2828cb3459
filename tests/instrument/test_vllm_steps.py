"""Engine steps of vLLM's schedulers, those that name no preempted request too; real ones run in tests/frameworks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rltrace
from rltrace.hooks.request_spans import Requests
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
        self.requests: dict[str, Any] = {}

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
    scheduler, steps = Scheduler(6, is_naming=is_naming), Steps(Requests())
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
    steps = Steps(requests.in_flight)
    for request in (queued, aborted):
        requests.begin(request, None, None)
    begun_ns = []
    for new in ([SimpleNamespace(req_id="queued", num_computed_tokens=3)], []):
        begun_ns.append(now_ns())
        output = SimpleNamespace(total_num_scheduled_tokens=1, scheduled_new_reqs=new, preempted_req_ids=None)
        steps.keep_output((begun_ns[-1], Scheduler(0, is_naming=True), None), output, None)
    for request in (queued, aborted):
        requests.end(request, None, None)
    rltrace.stop()
    waited, never = spans_of(folder, "rollout.request")
    assert waited.start_ns + waited.args["queued_ns"] == begun_ns[0]
    assert waited.args["cached_tokens"] == 3
    assert not {"queued_ns", "cached_tokens"} & never.args.keys()


def test_request_says_when_its_first_token_came(folder: Path, spans_of: Any) -> None:
    """At the end of the step that made it; a prompt in two parts has none after the first."""
    rltrace.start(folder)
    requests = SchedulerRequests()
    steps, scheduler = Steps(requests.in_flight), Scheduler(0, is_naming=True)
    asked = SimpleNamespace(request_id="a", num_prompt_tokens=4, num_output_tokens=0)
    scheduler.requests = {"a": asked}
    requests.begin(asked, None, None)
    ended_ns = []
    for made in (0, 1, 2):
        new = [] if made else [SimpleNamespace(req_id="a", num_computed_tokens=0)]
        output = SimpleNamespace(total_num_scheduled_tokens=1, scheduled_new_reqs=new, preempted_req_ids=None)
        steps.keep_output((now_ns(), scheduler, None), output, None)
        asked.num_output_tokens = made
        found = steps.find_output((scheduler, output), {})
        ended_ns.append(now_ns())
        steps.end(found, None, None)
    requests.end(asked, None, None)
    rltrace.stop()
    (span,) = spans_of(folder, "rollout.request")
    assert ended_ns[1] <= span.start_ns + span.args["first_token_ns"] <= ended_ns[2]


def test_a_single_token_is_the_first(folder: Path, spans_of: Any) -> None:
    """A request that ends in the step that makes its first token had it then; an aborted one had none."""
    rltrace.start(folder)
    requests = SchedulerRequests()
    for name, made in (("done", 1), ("aborted", 0)):
        request = SimpleNamespace(request_id=name, num_prompt_tokens=4, num_output_tokens=made)
        requests.begin(request, None, None)
        requests.in_flight.scheduled(name, now_ns(), 0)
        requests.end(request, None, None)
    rltrace.stop()
    done, aborted = spans_of(folder, "rollout.request")
    assert 0 <= done.args["first_token_ns"] <= done.end_ns - done.start_ns
    assert "first_token_ns" not in aborted.args
    assert not requests.in_flight.without_token
