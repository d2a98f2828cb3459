"""What findings are computed from: a Recording's figures, and its spans, cut into the steady steps."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.computing import computing
from rltrace.analysis.findings.finding import (
    Basis,
    Evidence,
    Finding,
    Moment,
    Setting,
    UnjudgeableError,
    When,
    confidence_of,
    interval_of,
)
from rltrace.analysis.findings.programs import applicable, programs_of
from rltrace.analysis.intervals import EMPTY, Intervals, cut, holding, total_ns, union
from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.observations import Observations
from rltrace.analysis.phases import driver_phases, lane_phases
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.steps import StepWindows
from rltrace.analysis.summary import Summary
from rltrace.analysis.weight_sync import RankSync

PerStep = NDArray[np.float64]
"""One number for each steady step."""


class Run:
    """A Recording as findings see it; `steps` are the steady ones."""

    def __init__(self, seen: Observations, windows: StepWindows, summary: Summary) -> None:
        self.seen = seen
        self.windows = windows
        self.summary = summary
        self._phase_seconds: dict[str, dict[Lane, PerStep]] = {}

    @cached_property
    def steps(self) -> Intervals:
        """When the steady steps were.

        Raises:
            UnjudgeableError: no step has ended.
        """
        self.require_steps()
        if not self.windows.steady:
            raise UnjudgeableError("no step has ended")
        return self.windows.windows[self.windows.steady]

    @cached_property
    def numbers(self) -> list[int]:
        """The number of each steady step."""
        return [number for at in self.windows.steady if (number := self.windows.numbers[at]) is not None]

    @cached_property
    def step_seconds(self) -> PerStep:
        """The length of each steady step."""
        return (self.steps[:, 1] - self.steps[:, 0]) / 1e9

    @cached_property
    def unaligned(self) -> list[str]:
        """Hosts whose clock was never compared with that of the run, so that its error is unknown."""
        return sorted({host for one in self.summary.clocks if not one.aligned for host in one.hosts})

    def require_one_time(self) -> None:
        """Check that times of different processes can be compared.

        Raises:
            UnjudgeableError: a clock was never compared with that of the run.
        """
        if self.unaligned:
            raise UnjudgeableError(f"the clock of {', '.join(self.unaligned)} is not aligned (docs/hosts.md)")

    def require_steps(self) -> None:
        """Check that there are steps.

        Raises:
            UnjudgeableError: there are none; the message says whether there may have been.
        """
        if self.windows.spans:
            return
        if self.summary.earlier_steps_lost:
            raise UnjudgeableError(
                "no step is left: the oldest was dropped to bound the size, and steps may have been in it"
            )
        raise UnjudgeableError('no step is marked; `with rltrace.span("step", step=n)` marks one')

    def require_first_step(self) -> None:
        """Check that the first step here is the run's first.

        Raises:
            UnjudgeableError: there is none, or earlier ones may be gone.
        """
        self.require_steps()
        if self.summary.earlier_steps_lost:
            first = self.windows.numbers[1]
            raise UnjudgeableError(f"steps before step {first} may be gone: the oldest was dropped to bound the size")

    def require_phases(self, lanes: Sequence[Lane]) -> None:
        """Check that there are lanes with phases.

        Raises:
            UnjudgeableError: there are none.
        """
        if not lanes:
            raise UnjudgeableError('no phase is marked; `with rltrace.phase("train")` marks one')

    def require_spans(self) -> None:
        """Check that the spans of the steady steps were kept, so that a gap is one in which nothing computed.

        Raises:
            UnjudgeableError: the steps are in brief.
        """
        if self.are_brief:
            raise UnjudgeableError("the steps are in brief: what shows that something computed was not kept")

    @cached_property
    def are_brief(self) -> bool:
        """Whether of the steady steps only what figures are made of was kept."""
        return any(self.windows.brief[at] for at in self.windows.steady)

    @cached_property
    def clock_bound_seconds(self) -> float:
        """How far apart two times of different processes may really be when they look equal."""
        return sum(sorted(one.bound_seconds or 0.0 for one in self.summary.clocks)[-2:])

    def seconds_in(self, *rows: Intervals) -> PerStep:
        """Return how many seconds of each step some intervals cover; where they overlap they count once."""
        return self._seconds_of(union(*rows))

    def _seconds_of(self, rows: Intervals) -> PerStep:
        """Return the same for intervals that are disjoint."""
        pieces, step, _ = cut(rows, self.steps)
        return np.bincount(step, pieces[:, 1] - pieces[:, 0], len(self.steps)) / 1e9

    def step_of(self, at_ns: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the place of the step that each instant is in; -1 if it is in none."""
        return holding(self.steps, at_ns)

    @cached_property
    def phases(self) -> dict[Lane, dict[str, Intervals]]:
        """When each lane was in each of its phases, for the lanes that take part in these steps."""
        return {lane: of for lane, of in lane_phases(self.seen).items() if self.windows.of(lane) is self.windows}

    @cached_property
    def driver_phases(self) -> dict[str, Intervals]:
        """When the driver was in each of its own phases."""
        return driver_phases(self.seen)

    @cached_property
    def computing(self) -> dict[Lane, Intervals]:
        """When each rank computed in no phase."""
        return computing(self.seen)

    @cached_property
    def ranks(self) -> list[Lane]:
        """The ranks that have phases."""
        return [lane for lane in self.phases if lane.rank is not None]

    @cached_property
    def members(self) -> dict[Lane, list[Seen]]:
        """The processes of each lane; the driver is first, then ranks by number."""
        found: dict[Lane, list[Seen]] = {}
        for process in self.seen.processes:
            found.setdefault(process.lane, []).append(process)
        return {lane: found[lane] for lane in sorted(found, key=order)}

    def phase_seconds(self, name: str) -> Mapping[Lane, PerStep]:
        """Return the seconds of a phase in each step, by rank; ranks without it are left out."""
        if name not in self._phase_seconds:
            self._phase_seconds[name] = {
                lane: self._seconds_of(self.phases[lane][name]) for lane in self.ranks if name in self.phases[lane]
            }
        return self._phase_seconds[name]

    @cached_property
    def programs(self) -> set[str]:
        """The programs whose hooks are in the run."""
        return programs_of(self.summary.hooks)

    def records(self, span: str) -> bool:
        """Return whether a hook of the run would have recorded spans of a name."""
        return any(span in hook.emits and hook.processes.get("installed") for hook in self.summary.hooks)

    def most_in(self, lane: Lane, rows: Intervals) -> list[str]:
        """Return the phase of a lane with the most of some intervals in the steady steps; none if no phase has any."""
        inside = cut(rows, self.steps)[0]
        of_lane = {name: total_ns(cut(inside, where)[0]) for name, where in self.phases.get(lane, {}).items()}
        most = max(of_lane, key=lambda name: of_lane[name], default=None)
        return [] if most is None or not of_lane[most] else [most]

    def steady_syncs(self) -> dict[int, list[RankSync]]:
        """Return the weight syncs of each steady step, by the step's number.

        Raises:
            UnjudgeableError: there is none.
        """
        numbers = set(self.numbers) if len(self.steps) else set()
        found: dict[int, list[RankSync]] = {}
        for sync in self.summary.weight_sync:
            if sync.step is not None and sync.step in numbers:
                found.setdefault(sync.step, []).append(sync)
        if not found:
            raise UnjudgeableError("no weight sync was recorded in a steady step")
        return found

    def spans_named(self, *names: str) -> Intervals:
        """Return all spans of some names, whoever made them."""
        kept = [
            spans
            for process in self.seen.processes
            for of in (process.own_spans, process.automatic_spans)
            for (name, _), spans in of.items()
            if name in names
        ]
        kept += [process.phases[name] for name in names for process in self.seen.processes if name in process.phases]
        return np.concatenate([EMPTY, *(spans.rows(self.seen.end_ns) for spans in kept)])

    def moment(self, place: int, rank: int | None = None) -> Moment:
        """Return the moment of a steady step, by the step's place."""
        start_ns, end_ns = self.steps[place].tolist()
        of_rank = [] if rank is None else ["--ranks", str(rank)]
        return Moment(
            step=self.numbers[place],
            rank=rank,
            start_seconds=(start_ns - self.seen.start_ns) / 1e9,
            end_seconds=(end_ns - self.seen.start_ns) / 1e9,
            command=self.view("--steps", str(self.numbers[place]), *of_rank),
        )

    def view(self, *options: str) -> str:
        """Return the command that shows a part of the run in the timeline, for a shell."""
        return shlex.join(["rltrace", "view", self.summary.run.path, *options])

    def finding(
        self,
        name: str,
        title: str,
        facts: Iterable[str],
        *,
        per_step: Sequence[float] | PerStep | None = None,
        mean: float | None = None,
        once: float | None = None,
        when: When = "step",
        size_bytes: float | None = None,
        bound: float | None = None,
        less_because: str,
        basis: Basis = "measured",
        figures: Mapping[str, float] | None = None,
        ranks: Sequence[int] = (),
        phases: Sequence[str] = (),
        settings: Sequence[Setting] = (),
        moment: Moment | None = None,
        steps: Sequence[int] | None = None,
        about: Sequence[str] | None = None,
    ) -> Finding:
        """Return a finding with the mean of its price, its interval, its share of a step, and its confidence.

        Args:
            name: Its id.
            title: One sentence.
            facts: What it rests on, in words.
            per_step: What it costs in each steady step, in seconds.
            mean: What it costs in a steady step where only the mean is known.
            once: What it costs the run once.
            when: When it is paid.
            size_bytes: The bytes that it is about.
            bound: The most to gain; the price if it is left out.
            less_because: Why the gain may be less.
            basis: Whether spans have the seconds themselves.
            figures: What it rests on, by name.
            ranks: Ranks that it is about.
            phases: Phases that it is about.
            settings: What to change; those of programs that are not in the run are left out.
            steps: Steps that it was seen in; those that it costs something if they are left out.
            moment: Where it shows; the step that it costs most if it is left out.
            about: What it is the price of; the phases if it is left out. Name it where phases only say where it shows.
        """
        values = [] if per_step is None else [float(value) for value in per_step]
        price = fmean(values) if values else mean
        interval = interval_of(values)
        numbers = [number for number, value in zip(self.numbers, values, strict=True) if value > 0] if values else []
        if moment is None and values:
            moment = self.moment(int(np.argmax(values)), ranks[0] if len(ranks) == 1 else None)
        return Finding(
            id=name,
            title=title,
            when=when,
            seconds_per_step=price,
            interval_seconds=interval,
            once_seconds=once,
            bytes=None if size_bytes is None else int(size_bytes),
            share=None if price is None else price / float(self.step_seconds.mean()),
            bound_seconds=bound if bound is not None else price if price is not None else once,
            less_because=less_because,
            confidence=confidence_of(basis, interval),
            evidence=Evidence(
                facts=list(facts),
                figures=dict(figures or {}),
                ranks=list(ranks),
                phases=list(phases),
                steps=numbers if steps is None else list(steps),
                moment=moment,
            ),
            settings=applicable(settings, self.programs, self.summary.run.versions),
            about=sorted(set(phases if about is None else about)),
        )


def rows_of(processes: Iterable[Seen], name: str, run: Run) -> Intervals:
    """Return the automatic spans of one name of some processes."""
    found = [process.automatic_spans[name, None] for process in processes if (name, None) in process.automatic_spans]
    return np.concatenate([kept.rows(run.seen.end_ns) for kept in found]) if found else EMPTY
