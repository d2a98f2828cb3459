"""What SGLang on a CPU has not: several groups of ranks, adapters, broadcasts; real engines run in tests/frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rltrace
from rltrace.hooks import boundaries
from rltrace.instrument.sglang.buckets import Keys, handles_of
from rltrace.instrument.sglang.control import ControlRequests, source_of
from rltrace.instrument.sglang.requests import SchedulerRequests
from rltrace.instrument.sglang.scheduler import IN_FLIGHT, Batches, scheduler_name


@pytest.fixture
def idle() -> Iterator[list[boundaries.Boundary]]:
    """Every edge of an engine that has nothing to do."""
    found: list[boundaries.Boundary] = []
    unwatch = boundaries.watch(lambda edge: None if edge.names else found.append(edge))
    yield found
    unwatch()


class Result:
    """Of a batch."""


@dataclass
class Request:
    """Of a user: with so many tokens to make."""

    left: int

    def finished(self) -> bool:
        return self.left == 0


@dataclass
class Batch:
    """As SGLang's, of requests that decode."""

    reqs: list[Request]
    forward_mode: Any = None

    def batch_size(self) -> int:
        return len(self.reqs)


@dataclass
class Scheduler:
    """As SGLang's."""

    waiting_queue: list[Request] = field(default_factory=list)
    running_batch: Any = None
    spec_algorithm: Any = field(default_factory=lambda: SimpleNamespace(is_none=lambda: True))


def run(batches: Batches, scheduler: Scheduler, batch: Batch) -> Result:
    """A batch is launched."""
    token, result = batches.begin((scheduler, batch), {}), Result()
    batches.keep_result(token, result, None)
    return result


def process(batches: Batches, scheduler: Scheduler, batch: Batch, result: Result) -> None:
    """Its result is processed: each of its requests has a token more."""
    token = batches.find_result((scheduler, batch, result), {})
    for request in batch.reqs:
        request.left -= 1
    batches.end(token, None, None)


def test_idle_after_the_last_batch(idle: list[boundaries.Boundary]) -> None:
    """An engine is idle only after its last batch."""
    batches, scheduler, last = Batches(SchedulerRequests()), Scheduler(), Request(2)
    batch = Batch([last])
    process(batches, scheduler, batch, run(batches, scheduler, batch))
    assert idle == [], "it has a token to go"
    process(batches, scheduler, batch, run(batches, scheduler, batch))
    assert len(idle) == 1


@pytest.mark.parametrize("elsewhere", ["waiting", "decoding", "in flight"])
def test_not_idle_with_requests(elsewhere: str, idle: list[boundaries.Boundary]) -> None:
    """An engine is not idle while it has another request anywhere."""
    batches, other = Batches(SchedulerRequests()), Request(1)
    scheduler = Scheduler([other] if elsewhere == "waiting" else [])
    if elsewhere == "decoding":
        scheduler.running_batch = Batch([other])
    kept = run(batches, scheduler, Batch([other])) if elsewhere == "in flight" else None
    batch = Batch([Request(1)])
    process(batches, scheduler, batch, run(batches, scheduler, batch))
    assert idle == []
    del kept  # its batch ends where nobody looks, and the engine is not busy with it for ever
    scheduler = Scheduler()
    batch = Batch([Request(1)])
    process(batches, scheduler, batch, run(batches, scheduler, batch))
    assert len(idle) == 1


def test_unprocessed_results_are_no_steps(folder: Path, spans_of: Any) -> None:
    """Results that nobody processes are neither kept nor steps."""
    rltrace.start(folder)
    batches, scheduler, batch = Batches(SchedulerRequests()), Scheduler(), Batch([Request(1000)])
    unprocessed = [run(batches, scheduler, batch) for _ in range(IN_FLIGHT)]
    process(batches, scheduler, batch, run(batches, scheduler, batch))
    process(batches, scheduler, batch, unprocessed[0])  # forgotten when the one above began
    process(batches, scheduler, batch, unprocessed[1])
    rltrace.stop()
    assert len(spans_of(folder, "engine.step")) == 2
    assert len({step.task for step in spans_of(folder, "engine.step")}) == 2


@pytest.mark.parametrize(
    ("sizes", "name"),
    [({}, "scheduler 3"), ({"dp_size": 2}, "scheduler 3 DP1"), ({"dp_size": 2, "pp_size": 4}, "scheduler 3 DP1 PP2")],
)
def test_scheduler_has_its_ranks_in_its_name(sizes: dict[str, int], name: str) -> None:
    """A scheduler is named by all that tells it from others."""
    assert scheduler_name(SimpleNamespace(**sizes), {"tp_rank": 3, "dp_rank": 1, "pp_rank": 2}) == name


@pytest.mark.parametrize(
    ("request_name", "source"),
    [
        ("UpdateWeightsFromTensorReqInput", "tensor"),
        ("UpdateWeightFromDiskReqInput", "disk"),
        ("UpdateWeightsFromDistributedReqInput", "distributed"),
        ("LoadLoRAAdapterFromTensorsReqInput", "lora"),
        ("UpdateWeightsFromTensorReqOutput", None),
        ("UpdateWeightVersionReqInput", None),
        ("TokenizedGenerateReqInput", None),
    ],
)
def test_only_weights_are_an_update(request_name: str, source: str | None) -> None:
    """Only a request that brings weights is an update."""
    assert source_of(request_name) == source


def load(requests: ControlRequests, request: Any, *tensors: Any) -> None:
    """An update that arrives as an adapter's tensors."""
    token = requests.begin((None, request), {})
    if tensors:
        requests.count_adapter((None, "adapter", dict(enumerate(tensors))), {})
    requests.end(token, None, None)


def test_update_says_its_bytes(folder: Path, spans_of: Any) -> None:
    """An update says its bytes, however it comes."""
    rltrace.start(folder)
    requests = ControlRequests()
    requests.is_scheduler = True
    broadcast = type("UpdateWeightsFromDistributedReqInput", (), {})()
    broadcast.dtypes, broadcast.shapes = ["bfloat16", torch.float32], [[3, 4], [5]]
    load(requests, broadcast)
    adapter = type("LoadLoRAAdapterFromTensorsReqInput", (), {"serialized_tensors": "QUJD"})()
    load(requests, adapter, torch.zeros(2, 8), torch.zeros(4, dtype=torch.bfloat16))
    requests.count_unwrapped(None, torch.zeros(3), None)  # of no update
    load(requests, type("UpdateWeightFromDiskReqInput", (), {})())
    rltrace.stop()
    said = [(span.args["source"], span.args.get("tensors"), span.args.get("bytes")) for span in spans_of(folder)]
    assert said == [("distributed", 2, 3 * 4 * 2 + 5 * 4), ("lora", 2, 2 * 8 * 4 + 4 * 2), ("disk", None, None)]
    assert ["bucket" in span.args for span in spans_of(folder)] == [False, True, False]


def test_both_ends_name_a_bucket_alike() -> None:
    """Both ends name a bucket alike, whether it went as bytes or as text."""
    sender, receiver = Keys(), Keys()
    sent = SimpleNamespace(serialized_named_tensors=[b"ABC", b"of another rank"])
    arrived = SimpleNamespace(serialized_named_tensors=["QUJD", "b2Y="])
    for _ in range(2):
        handles = handles_of(sent), handles_of(arrived)
        assert sender.of(handles[0]) == receiver.of(handles[1])  # type: ignore[arg-type]
    assert handles_of(SimpleNamespace(serialized_named_tensors=None)) is None
    assert handles_of(SimpleNamespace(serialized_tensors="QUJD")) == "QUJD"
