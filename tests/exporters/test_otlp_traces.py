"""Traces of spans that overlap, arrive late, name each other and end in any order, as damaged Recordings have them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from rltrace_exporters.otlp.traces import Traces

from rltrace.events import AGENT_REQUEST, REQUEST, SERVER_REQUEST, STEP, Span
from rltrace.read.recording import Process

NAMES = (
    STEP,
    "reward",
    "work",
    "trajectory",
    AGENT_REQUEST,
    SERVER_REQUEST,
    REQUEST,
    "tool",
    "memory.edge",
    "ray.call",
)
ROUND_NS = 1_000


def process(key: str, role: str, rank: int | None) -> Process:
    said = {"host": "h", "pid": 1, "start_ns": 0, "identity": {}, "world_size": None, "device_uuid": None, "hooks": []}
    ended = {"killed_by": None, "end_ns": 10**6, "gone_ns": None}
    return cast(Process, SimpleNamespace(key=key, role=role, rank=rank, name=key, **said, **ended))


def any_span(draw: random.Random, since_ns: int) -> Span:
    name = draw.choice(NAMES)
    start_ns = draw.randint(since_ns, since_ns + ROUND_NS)
    end_ns = start_ns + draw.choice([0, 1, draw.randint(0, 300), draw.randint(0, 2 * ROUND_NS)])
    args: dict[str, Any] = {"request_id": str(draw.randint(0, 5)), "trajectory": str(draw.randint(0, 3))}
    args |= {"step": draw.randint(0, 3)} if name == STEP and draw.random() < 0.7 else {}
    args |= {"error": "ValueError"} if draw.random() < 0.05 else {}
    arrows = [tuple(f"arrow {draw.randint(0, 9)}" for _ in range(draw.random() < 0.2)) for _ in range(2)]
    lane = draw.choice([0, 0, 0, 1, None])
    return Span(name, draw.randint(1, 2), draw.choice([0, 0, 5]), start_ns, end_ns, args, *arrows, lane)


def sent(draw: random.Random) -> Iterator[ReadableSpan]:
    """What is sent of some processes, at once or in turns."""
    traces = Traces("run", Resource({}))
    roles = [(draw.choice(["driver", "worker", "engine", "process"]), draw.choice([None, 0, 1])) for _ in range(3)]
    is_live = draw.random() < 0.5
    for turn in range(draw.randint(1, 3)):
        for number, (role, rank) in enumerate(roles):
            source = traces.process(process(f"{role}-{number}-0", role, rank), 1_000)
            spans = [any_span(draw, turn * ROUND_NS) for _ in range(draw.randint(0, 60))]
            for span in sorted(spans, key=lambda span: span.end_ns or 0):
                traces.add(source, span)
        if is_live:
            yield from traces.over(turn * ROUND_NS + 900)
            if not traces.has_steps_to_send:
                yield from traces.special(turn * ROUND_NS + 500, {})
    yield from traces.rest()


@pytest.mark.parametrize("seed", range(4))
def test_every_span_is_in_a_tree(seed: int) -> None:
    """Whatever was recorded, each span's parent is sent in the same trace, below a root, and all of it encodes."""
    for case in range(40):
        spans = list(sent(random.Random(f"{seed} {case}")))
        by_id = {(span.context.trace_id, span.context.span_id): span for span in spans}
        for span in spans:
            above, seen = span, set()
            while above.parent is not None:
                assert above.context.span_id not in seen
                seen.add(above.context.span_id)
                assert above.parent.trace_id == above.context.trace_id
                above = by_id[above.parent.trace_id, above.parent.span_id]
        assert encode_spans(spans).SerializeToString()


def test_what_is_read_late_is_in_its_step() -> None:
    """A span that a hook writes after its step was sent is below the phase that it lies in."""
    traces = Traces("run", Resource({}))
    source = traces.process(process("driver-1-0", "driver", None), 0)
    traces.add(source, Span("reward", 1, 0, 20, 60, {"phase": True}))
    traces.add(source, Span(STEP, 1, 0, 10, 90, {"step": 0}))
    step, reward = traces.over(100)
    traces.add(source, Span("host.work", 1, 1, 30, 40, {}, lane=None))
    (late,) = traces.over(200)
    assert (late.name, late.parent.span_id, late.context.trace_id) == (
        "host.work",
        reward.context.span_id,
        step.context.trace_id,
    )
