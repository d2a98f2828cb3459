"""What became of one run of several that are compared, from its Recording alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from rltrace import Recording
from rltrace.errors import RunError
from rltrace.events import Span
from rltrace_reference.recorded_run import Ending, RecordedRun

KV_CACHE, INTERPRETER = "rollout.kv_cache", "interpreter"
SWITCHES = frozenset(
    {"rollout.wake_weights", "weight_sync", "rollout.wake_kv_cache", "rollout.sleep", "allocator.empty_cache"}
    | {"actor.offload", "actor.onload", "engine.end"}
)
"""Spans of a worker that neither generate nor train."""


class Moment(msgspec.Struct, frozen=True):
    """Who held the device's bytes: a part of the moments of `rltrace summary --json`."""

    phase: str | None
    step: int | None
    used_bytes: int
    bytes: dict[str, int]

    @property
    def held(self) -> dict[str, int]:
        """Bytes by owner, without what the processes held before there were models, on a CPU."""
        return {owner: size for owner, size in self.bytes.items() if owner != INTERPRETER}

    @property
    def held_bytes(self) -> int:
        """Return the sum of these."""
        return self.used_bytes - self.bytes.get(INTERPRETER, 0)


class Failure(msgspec.Struct, frozen=True):
    """An out-of-memory error, as the Recording tells it."""

    process: str
    asked_bytes: int | None
    free_bytes: int | None
    bound: str | None
    moment: Moment | None
    changes: list[str]


class Device(msgspec.Struct, frozen=True):
    """The memory of one rank."""

    phases: list[Moment]
    boundaries: list[Moment]


class Step(msgspec.Struct, frozen=True):
    """A step."""

    step: int
    seconds: float
    error: str | None
    tokens_per_second: float | None = None
    figures: dict[str, float] = {}


class Summary(msgspec.Struct, frozen=True):
    """What is read of `rltrace summary --json`."""

    memory: list[Device]
    steps: list[Step]
    out_of_memory: list[Failure]


class Rollout(msgspec.Struct, frozen=True):
    """One `rollout.generate`."""

    step: int
    engine: int
    """Process of the engine."""
    addresses: str
    """Digest of where its weights and its KV cache lay."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has ended."""

    name: str
    limit_bytes: int
    predicted_phase: str | None
    """The phase that was said to have no room; None if all have."""
    failed_phase: str | None
    """The phase in which memory ran out; None if it did not."""
    failure: Failure | None
    """The out-of-memory report."""
    error: str
    """What else ended the run; empty if nothing did."""
    phases: list[Moment]
    """The fullest moment of each phase of the steps."""
    peak_bytes: int
    peak_phase: str | None
    step_seconds: float | None
    """Mean of the steps after the first that came to their end."""
    tokens_per_second: float | None
    """The same of the tokens generated in each second of a step."""
    switch_seconds: float | None
    """Mean of what these lost between training and rollout."""
    kv_room_bytes: int | None
    """The largest KV cache beside what else was held while there was one; None if there never was."""
    rollouts: list[Rollout]
    captures: int
    """How often CUDA graphs were captured."""
    log_probs_off: float | None
    """The most that the engine's log-probs of its own samples differ from the actor's, over all steps."""

    @property
    def engines(self) -> int:
        """Return how many processes generated."""
        return len({rollout.engine for rollout in self.rollouts})

    @property
    def places(self) -> int:
        """Return at how many sets of addresses the weights and the KV cache lay."""
        return len({(rollout.engine, rollout.addresses) for rollout in self.rollouts})


def read(run: RecordedRun, ending: Ending, predicted_phase: str | None) -> Figures:
    """Read a run's Recording.

    Raises:
        RunError: it cannot be read.
    """
    summary = msgspec.json.decode(run.summary(), type=Summary)
    spans = list(_spans(Recording.open(run.recording)))
    if not summary.memory:
        raise RunError(f"{run.name}: it ended before it held anything: {ending.said or 'nobody said why'}")
    device = summary.memory[0]
    failure = next(iter(summary.out_of_memory), None)
    phases = [moment for moment in device.phases if moment.step is not None] or device.phases
    fullest = max(phases, key=lambda moment: moment.held_bytes)
    limit_bytes = ending.limit_bytes or 0
    done = [step.step for step in summary.steps if step.error is None]
    steady = done[1:] or done
    rollouts = [
        Rollout(span.args["step"], span.args["engine"], span.args["addresses"])
        for _, span in spans
        if span.name == "rollout.generate" and "addresses" in span.args
    ]
    off = [step.figures.get("logprob_abs_diff_max", 0.0) for step in summary.steps if step.error is None]
    return Figures(
        name=run.name,
        limit_bytes=limit_bytes,
        predicted_phase=predicted_phase,
        failed_phase=None if failure is None or failure.moment is None else failure.moment.phase,
        failure=failure,
        error="" if failure is not None else ending.said,
        phases=phases,
        peak_bytes=fullest.held_bytes,
        peak_phase=fullest.phase,
        step_seconds=_mean([step.seconds for step in summary.steps if step.step in steady]),
        tokens_per_second=_mean([step.tokens_per_second or 0.0 for step in summary.steps if step.step in steady]),
        switch_seconds=_mean([_lost_seconds(spans, step) for step in steady]),
        kv_room_bytes=_kv_room_bytes([*phases, *device.boundaries], failure, limit_bytes),
        rollouts=rollouts,
        captures=sum(span.name == "rollout.capture" for _, span in spans),
        log_probs_off=max(off, default=None),
    )


def _kv_room_bytes(moments: Iterable[Moment], failure: Failure | None, limit_bytes: int) -> int | None:
    """Return what a KV cache could have had: the memory less what else was held, at the fullest moment with one."""
    others = [
        moment.held_bytes - moment.held[KV_CACHE]
        for moment in moments
        if moment.step is not None and moment.held.get(KV_CACHE)
    ]
    if failure is not None and failure.moment is not None and failure.moment.held.get(KV_CACHE):
        held = failure.moment.held_bytes - failure.moment.held[KV_CACHE]
        others.append(held + (failure.asked_bytes or 0))
    return max(0, limit_bytes - max(others)) if others and limit_bytes else None


def _spans(recording: Recording) -> Iterator[tuple[str, Span]]:
    """Yield every span with the role of its process."""
    for process in recording.processes:
        for event in process.events():
            if isinstance(event, Span):
                yield str(process.identity.get("role")), event


def _lost_seconds(spans: list[tuple[str, Span]], step: int) -> float:
    """Return the time of a step in which the worker neither generated nor trained, counting no moment twice."""
    windows = [span for role, span in spans if role == "driver" and span.name == "step" and span.args["step"] == step]
    window = windows[0]
    lost: list[tuple[int, int]] = [
        (max(span.start_ns, window.start_ns), min(span.end_ns or 0, window.end_ns or 0))
        for role, span in spans
        if role == "worker" and span.name in SWITCHES
    ]
    total_ns = until_ns = 0
    for start_ns, end_ns in sorted(lost):
        total_ns += max(0, end_ns - max(start_ns, until_ns))
        until_ns = max(until_ns, end_ns)
    return total_ns / 1e9


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
