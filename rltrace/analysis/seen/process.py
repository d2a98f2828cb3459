"""What is kept of one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from rltrace.analysis.lanes import Lane
from rltrace.analysis.seen.compact import together
from rltrace.analysis.seen.looked import Looked
from rltrace.analysis.seen.samples import Balances, Samples
from rltrace.analysis.seen.spans import (
    DeviceSpans,
    EngineSteps,
    Forwards,
    Intervalled,
    Passed,
    Stages,
    ToolCalls,
    Trajectories,
)
from rltrace.events import Span
from rltrace.read.recording import Process

SpanName = tuple[str, str | None]
"""Name of a span; of a call also what was called."""


class Seen:
    """What was kept of one process."""

    def __init__(self, process: Process, lane: Lane) -> None:
        self.process = process
        self.lane = lane
        self.first_ns = 0
        self.last_ns = 0
        """When it began, and when its last event was."""
        self.last_span_ns = 0
        """When one of its spans last began or ended."""
        self.spans = 0
        self.samples = 0
        self.steps: list[Span] = []
        self.phases: defaultdict[str, Intervalled] = defaultdict(Intervalled)
        self.inferred: dict[tuple[str, str], None] = {}
        """Names of steps and phases that were inferred, each with the reason."""
        self.stages: defaultdict[str, Stages] = defaultdict(Stages)
        self.device_spans: defaultdict[str, DeviceSpans] = defaultdict(DeviceSpans)
        """Spans by kind of work: their names after `gpu.`."""
        self.owners: defaultdict[str, Samples] = defaultdict(Samples)
        self.on_host: defaultdict[str, Samples] = defaultdict(Samples)
        """Bytes of owners that lie in the host's memory, beside a GPU."""
        self.pinned: defaultdict[str, Samples] = defaultdict(Samples)
        """The page-locked ones among them; `unattributed` is what else torch has page-locked."""
        self.resident = Samples()
        """Bytes of the whole process in the host's memory."""
        self.used = Samples()
        """The total of its device, each time that it was read."""
        self.allocated_peak = Samples()
        """The most that torch's allocator had handed out at once, each time that this changed."""
        self.figures: defaultdict[str, Samples] = defaultdict(Samples)
        self.sampled: defaultdict[str, Samples] = defaultdict(Samples)
        """All counters of a host's sampler."""
        self.open_spans: list[Span] = []
        self.balances = Balances()
        self.reserved = Samples()
        """What its allocators have from the driver, each time that this changed; from the same histories as
        `balances`."""
        self.allocations_kept: list[Span] = []
        """Spans in which every allocation is in `balances`."""
        self.looks = Looked()
        """When it measured what it owns, at phase boundaries and in between, with the totals that it read."""
        self.moves: list[Span] = []
        """Sleeps and wake-ups, and the mappings inside them."""
        self.out_of_memory: list[Span] = []
        self.errors: defaultdict[tuple[int, int, str, str], Intervalled] = defaultdict(Intervalled)
        """Spans that an exception left, by thread, task, exception and name, without steps and moves, which have their
        own."""
        self.messages: dict[tuple[str, str], tuple[int, str]] = {}
        """When the first exception of a type left a span of a name, and what it said, by type and name."""
        self.own_spans: defaultdict[SpanName, Intervalled] = defaultdict(Intervalled)
        """All other spans that the program made itself."""
        self.automatic_spans: defaultdict[SpanName, Intervalled] = defaultdict(Intervalled)
        """All other spans that hooks made."""
        self.engine_steps = EngineSteps()
        """Those among the automatic spans that are an engine's steps."""
        self.forwards = Forwards()
        """Those that are a model's forwards."""
        self.passed: defaultdict[str, Passed] = defaultdict(Passed)
        """Those that join a request's way, by name: its own ones, and Ray's where a server is asked for tokens."""
        self.trajectories = Trajectories()
        """Those that are trajectories."""
        self.tool_calls = ToolCalls()
        """Those that are calls of tools."""

    def intervalled(self) -> Iterator[Intervalled]:
        """Yield all columns of spans."""
        for kept in vars(self).values():
            for one in kept.values() if isinstance(kept, dict) else [kept]:
                if isinstance(one, Intervalled):
                    yield one

    def finish(self) -> None:
        """Put the samples of each counter in order, and what there is much of into as few bytes as it takes."""
        by_name = (self.owners, self.on_host, self.pinned, self.figures, self.sampled)
        named = (samples for of_kind in by_name for samples in of_kind.values())
        for samples in (*named, self.resident, self.used, self.allocated_peak, self.reserved):
            samples.sort()
        places: list[tuple[Any, str]] = [place for kept in self.intervalled() for place in kept.compacted()]
        columns = together([getattr(of, name) for of, name in places])
        for (of, name), column in zip(places, columns, strict=True):
            setattr(of, name, column)
