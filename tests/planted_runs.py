"""Recordings of a colocated run that is well, and of the same run with one fault in it whose price is known."""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from recordings import Written, hook, sample, span

from rltrace.analysis.findings import Why, why
from rltrace.analysis.findings.finding import Finding
from rltrace.analysis.summary import analyse

STEP_SECONDS = 10.0
"""About as long as a step without a fault."""

TWO_PERCENT = 0.02 * STEP_SECONDS

SECONDS = {
    "rollout.wake_weights": 0.2,
    "weight_sync": 1.0,
    "rollout.wake_kv_cache": 0.2,
    "rollout.generate": 3.0,
    "rollout.sleep": 0.2,
    "reward": 0.02,
    "actor.old_log_prob": 1.0,
    "ref.log_prob": 1.0,
    "actor.update": 3.3,
}
"""The phases of a step."""

ENGINES = frozenset({"rollout.generate"})
CALL_SECONDS = 0.005
STARTUP_SECONDS = 0.5
WEIGHTS_BYTES = 16 * 10**9
REQUESTS = 32
CARD_BYTES = 80 * 10**9
CONTEXT_BYTES = 10**8
HOOKS = (
    hook(1, "gc:callbacks", emits=["python.gc"]),
    hook(2, "torch:empty_cache", emits=["allocator.empty_cache"]),
    hook(3, "vllm:step", emits=["engine.step"]),
    hook(4, "verl:request", emits=["agent_loop.request", "agent_loop.tool_call"], instrumentation="verl"),
    hook(5, "torch:fully_shard", emits=["fsdp.all_gather", "fsdp.forward"]),
    hook(6, "torch:Module.__call__", emits=["model.forward"]),
)

Extra = Callable[[int], float]


class PlantedRun:
    """A driver, and ranks of one worker and one engine each; steps and phases differ by some per cent.

    The driver begins a phase when all ranks are done with the one before, 5 ms later.
    """

    def __init__(self, folder: Path, *, ranks: int = 4, steps: int = 9, gpu: bool = True) -> None:
        self.ranks, self.steps = ranks, steps
        self.longer: dict[tuple[str, int], Extra] = {}
        """By phase and rank, by how much a phase is longer in each step."""
        self.late: dict[tuple[str, int], float] = {}
        """By how much a rank begins a phase late."""
        self.gap: dict[str, float] = {}
        """By how much longer the driver takes before a phase."""
        self.gap_in: dict[tuple[str, int], float] = {}
        """The same in one step."""
        self.first = 0.0
        """By how much longer the first step's update is."""
        self.work = [1.0] * ranks
        """Of each engine, its share of the requests; it takes as long."""
        self.tail = 0.0
        """By how much the last request of each engine is longer."""
        self.stages = {"gather": 0.3, "send": 0.35, "load": 0.34}
        """Seconds of stages of the weight sync."""
        self.gathers = 1
        self.sync_every = 1
        """Every how many steps the weights are synced."""
        self.sent_bytes = WEIGHTS_BYTES
        self.device = "GPU" if gpu else "cpu"
        self.ranks_of_a_host = ranks
        self.more: dict[str, Callable[[PlantedRun, int, int, float, float], list[Any]]] = {}
        """By phase, records of a worker in it: of the run, the rank, the step, and when the phase begins and ends."""
        self.engine_more: Callable[[PlantedRun, int, int, float, float], list[Any]] | None = None
        self.elsewhere: Callable[[PlantedRun, int, float, float], list[Any]] | None = None
        """The same of a process without a rank, in the generation."""
        self._folder = folder
        self._random = random.Random(0)
        self._driver: list[Any] = []
        self._workers: defaultdict[int, list[Any]] = defaultdict(list)
        self._engines: defaultdict[int, list[Any]] = defaultdict(list)
        self._agents: list[Any] = []

    def judge(self) -> Why:
        """Write it, read it, and judge it."""
        return why(analyse(self.write().read()))

    def found(self, name: str) -> list[Finding]:
        """Return the findings of one id."""
        return [finding for finding in self.judge().findings if finding.id == name]

    def write(self) -> Written:
        """Write the Recording."""
        for rank in range(self.ranks):
            self._workers[rank].append(span("actor.build", 0.1, 0.4))
            self._engines[rank].append(sample("rollout.weights_bytes", 0.3, WEIGHTS_BYTES))
        now = STARTUP_SECONDS
        for step in range(self.steps):
            now = self._step(step, now) + 0.001
        written = Written(self._folder)
        written.process("driver", *self._driver, role="driver", pid=10, ended_s=now + 1, hooks=HOOKS)
        for rank in range(self.ranks):
            device = {"host": f"node-{rank // self.ranks_of_a_host}", "uuid": f"{self.device}-{rank}"}
            who: dict[str, Any] = {"rank": rank, "device": device, "ended_s": now + 1, "hooks": HOOKS}
            written.process(f"w{rank}", *self._workers[rank], role="worker", pid=100 + rank, **who)
            written.process(f"e{rank}", *self._engines[rank], role="engine", pid=200 + rank, **who)
        if self._agents:
            written.process("agents", *self._agents, role="agents", pid=300, ended_s=now + 1, hooks=HOOKS)
        return written

    def _step(self, step: int, begin: float) -> float:
        now = begin
        pace = self._random.gauss(1, 0.02)
        for phase, seconds in SECONDS.items():
            if phase == "weight_sync" and step % self.sync_every:
                continue
            now += CALL_SECONDS + self.gap.get(phase, 0.0) + self.gap_in.get((phase, step), 0.0)
            if phase == "reward":
                length = seconds + self.longer.get((phase, -1), lambda _: 0.0)(step)
                self._driver.append(span(phase, now, now + length))
                now += length
                continue
            first = self.first if step == 0 and phase == "actor.update" else 0.0
            now = max(self._phase(phase, rank, step, now, seconds * pace + first, pace) for rank in range(self.ranks))
        self._driver.append(span("step", begin, now + CALL_SECONDS, step=step))
        return now + CALL_SECONDS

    def _phase(self, phase: str, rank: int, step: int, now: float, seconds: float, pace: float) -> float:
        begin = now + self.late.get((phase, rank), 0.0)
        length = seconds * self._random.gauss(1, 0.002) + self.longer.get((phase, rank), lambda _: 0.0)(step)
        if phase == "rollout.generate":
            length = length * self.work[rank] + self.tail
        if phase == "weight_sync":
            length += sum(self.stages.values()) - SECONDS[phase] * pace
        end = begin + length
        records = self._engines if phase in ENGINES else self._workers
        records[rank].append(span(phase, begin, end))
        if phase == "rollout.generate":
            self._engines[rank] += self._requests(rank, step, begin, end - self.tail)
            if self.engine_more is not None:
                self._engines[rank] += self.engine_more(self, rank, step, begin, end)
            if self.elsewhere is not None and rank == 0:
                self._agents += self.elsewhere(self, step, begin, end)
        if phase == "weight_sync":
            self._workers[rank] += self._stages(begin)
        if phase in self.more:
            self._workers[rank] += self.more[phase](self, rank, step, begin, end)
        return end

    def _requests(self, rank: int, step: int, begin: float, end: float) -> list[Any]:
        """Return requests that end evenly over the last half of the generation, and the last one after its tail."""
        many = round(REQUESTS * self.work[rank])
        records = []
        for place in range(many):
            part = 0.5 + 0.5 * (place + 1) / many
            until = begin + (end - begin) * part + (self.tail if place == many - 1 else 0.0)
            records.append(
                span("rollout.request", begin, until, request_id=f"{rank}-{step}-{place}", tokens=round(part * 999))
            )
        return records

    def _stages(self, begin: float) -> list[Any]:
        """Return the stages of a weight sync, one after another; the gather in as many parts as it is told."""
        records, now = [], begin
        for stage, seconds in self.stages.items():
            many = self.gathers if stage == "gather" else 1
            for part in range(many):
                at = now + seconds * part / many
                size = {} if stage == "wait" else {"bytes": self.sent_bytes // many, "tensors": 400 // many}
                records.append(span(f"weight_sync.{stage}", at, at + seconds / many, **size))
            now += seconds
        return records


CLOSE = 0.2
"""How far a price may be from what was planted, as a share of it."""

Plant = Callable[[PlantedRun], None]


@cache
def _found_without_a_fault(**run: Any) -> set[str]:
    with tempfile.TemporaryDirectory() as folder:
        return {finding.id for finding in PlantedRun(Path(folder) / "well", **run).judge().findings}


def planted(folder: Path, name: str, plant: Plant, **run: Any) -> Finding:
    """The finding of a fault; the same run without the fault must not have it."""
    assert name not in _found_without_a_fault(**run)
    faulty = PlantedRun(folder / "faulty", **run)
    plant(faulty)
    (finding,) = faulty.found(name)
    return finding


def has_price(finding: Finding, seconds: float) -> None:
    """Its price is what was planted, and so says its interval."""
    assert finding.seconds_per_step == pytest.approx(seconds, rel=CLOSE)
    interval = finding.interval_seconds
    assert interval is not None and interval.least <= finding.seconds_per_step <= interval.most
    assert finding.bound_seconds is not None and finding.bound_seconds >= finding.seconds_per_step * 0.999


def look(at_s: float, **held_bytes: float) -> list[Any]:
    """A look at a card: what each owner holds (`actor__params` for `actor.params`), and what is free."""
    used = sum(held_bytes.values()) + CONTEXT_BYTES
    totals = {"used": used, "driver.reserved": 0}
    return [
        *(sample(f"{owner.replace('__', '.')}_bytes", at_s - 0.0005, size) for owner, size in held_bytes.items()),
        span("memory.edge", at_s - 0.001, at_s, totals=totals, free_bytes=CARD_BYTES - used),
    ]
