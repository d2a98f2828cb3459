"""One rank makes the others wait: it begins late or computes slowly, and is always the same or changes.

Where ranks exchange shards all the time, all of them take equally long, and the culprit is the one that waits least in
the collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.findings.engine_requests import engine_requests
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError, interval_of
from rltrace.analysis.findings.run import Run
from rltrace.analysis.findings.uneven_engines import GENERATE, balanced, has_uneven_work
from rltrace.analysis.gpu_work import GATHERS_AND_SCATTERS
from rltrace.analysis.intervals import EMPTY, Intervals, cut, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.phases import in_order

NAME = "slow_rank"

ALWAYS = 0.8
"""Share of the steps in which a rank must be the slowest to be called always the same. Of two ranks that are alike one
is so in 5 of 5 steps by chance in 6 % of the cases, and of eight in none that counts."""

FEWEST_STEPS = 3
"""Fewer steps say nothing about always."""

LEAST_IN_TURNS = 0.1
"""Share of the phase by which the slowest must be slower if it is another one in each step: the slowest of several is
always slower than the others, and steps on shared hosts differ by 5 to 10 % (docs/measurements/index.md)."""

SETTINGS = (
    Setting("your cluster", "compare this rank's clocks, power, PCIe link and processors with the others'"),
    Setting("verl", "trainer.balance_batch=True and actor_rollout_ref.actor.use_dynamic_bsz=True: even tokens"),
)


class Slowness(NamedTuple):
    """Of one phase, by how much each rank is behind the median of the others, of shape (ranks, steps), in seconds."""

    phase: str
    lanes: list[Lane]
    behind: NDArray[np.float64]
    late: NDArray[np.float64]
    """The part of it that passed before the rank began."""
    waited: NDArray[np.float64] | None
    """Seconds in collectives, if these tell who is behind."""
    mean_seconds: float


def judge(run: Run) -> list[Finding]:
    """Price in each phase how far the slowest rank is behind the median of the others."""
    if len(run.ranks) < 2:
        raise UnjudgeableError("there is one rank at most")
    if not len(run.steps):
        return []
    names = in_order(name for lane in run.ranks for name in run.phases[lane])
    return [found for name in names for found in _of_phase(run, name)]


def _of_phase(run: Run, name: str) -> Iterator[Finding]:
    if name == GENERATE and _has_uneven_work(run):
        return  # another finding has that
    slow = slowness(run, name)
    if slow is None:
        return
    slowest = slow.behind.argmax(axis=0)
    times = np.bincount(slowest, minlength=len(slow.lanes))
    always = int(times.argmax())
    steps = len(run.steps)
    of_always = np.maximum(slow.behind[always], 0)
    interval = interval_of(slow.behind[always].tolist())
    is_same = steps >= FEWEST_STEPS and times[always] >= ALWAYS * steps
    is_always = is_same and interval is not None and interval.least > 0
    price = of_always if is_always else np.maximum(slow.behind.max(axis=0), 0)
    if not is_always and price.mean() < LEAST_IN_TURNS * slow.mean_seconds:
        return
    yield _finding(run, slow, price, [always] if is_always else np.flatnonzero(times).tolist(), times.tolist())


def _finding(
    run: Run, slow: Slowness, price: NDArray[np.float64], who: list[int], times: list[int]
) -> Finding:  # fmt: skip
    steps = len(run.steps)
    worst = int(price.argmax())
    culprit = who[0] if len(who) == 1 else int(slow.behind[:, worst].argmax())
    lane = slow.lanes[culprit]
    late = float(np.maximum(slow.late[culprit] if len(who) == 1 else slow.late[culprit, worst], 0).mean())
    is_late = late >= float(price[worst] if len(who) > 1 else price.mean()) / 2
    how = "begins late" if is_late else "is slow"
    by = (
        f"{price.mean():.2f} s behind the others" if slow.waited is None else f"others wait {price.mean():.2f} s for it"
    )
    title = f"{lane.name} {how} in {slow.phase} in {times[culprit]} of {steps} steps: {by}"
    if len(who) > 1:
        title = f"In {slow.phase} one rank {how}, another in each step: {by.replace('for it', 'for one')}"
    facts = [f"slowest: {_counted(slow, times)} of {steps} steps; {late:.3f} s of it pass before the phase begins"]
    if slow.waited is not None:
        waits = slow.waited[:, worst]
        facts.append(
            f"all ranks take as long, because each waits for all in the collectives; step {run.numbers[worst]}: "
            f"{lane.name} is {waits[culprit]:.3f} s in them, the median rank {np.median(waits):.3f} s"
        )
    return run.finding(
        NAME,
        title,
        facts,
        per_step=price,
        less_because="with this rank as fast as the others, the second slowest is waited for",
        basis="measured" if slow.waited is None else "modelled",
        figures={"late_seconds": late, "phase_seconds": slow.mean_seconds},
        ranks=[lane.rank] if lane.rank is not None and len(who) == 1 else _ranks(slow, who),
        phases=[slow.phase],
        settings=SETTINGS,
        moment=run.moment(worst, lane.rank),
    )


def _ranks(slow: Slowness, who: list[int]) -> list[int]:
    return [rank for at in who if (rank := slow.lanes[at].rank) is not None]


def _counted(slow: Slowness, times: list[int]) -> str:
    most = sorted(range(len(times)), key=lambda at: -times[at])[:3]
    return ", ".join(f"{slow.lanes[at].name} in {times[at]}" for at in most if times[at])


def _has_uneven_work(run: Run) -> bool:
    try:
        return has_uneven_work(balanced(engine_requests(run), len(run.steps)))
    except UnjudgeableError:
        return False


def slowness(run: Run, name: str) -> Slowness | None:
    """Return who is behind in a phase; None if fewer than two ranks have it in every step."""
    lanes = [lane for lane in run.ranks if name in run.phases[lane]]
    spans = [_Spans(run, lane, name) for lane in lanes]
    whole = [at for at, span in enumerate(spans) if span.seconds.all()]
    lanes, spans = [lanes[at] for at in whole], [spans[at] for at in whole]
    if len(lanes) < 2:
        return None
    # Who begins no later than the others was not late, however long it had waited for them.
    late = np.minimum(_behind(_of(spans, "late")), np.maximum(_behind(_of(spans, "begins")), 0))
    own = _behind(_of(spans, "seconds")) + np.maximum(late, 0)
    mean_seconds = float(np.mean([span.seconds for span in spans]))
    collectives = [_collectives(run, lane) for lane in lanes]
    if all(map(len, collectives)):
        rows = [cut(union(of), run.phases[lane][name])[0] for of, lane in zip(collectives, lanes, strict=True)]
        waited = np.array([run.seconds_in(of) for of in rows])
        before = _behind(_of(spans, "before"))  # who came late from another phase is known there
        coupled = _behind(-waited) - np.maximum(before, 0)
        if waited.any() and coupled.max(axis=0).mean() > own.max(axis=0).mean():
            return Slowness(name, lanes, coupled, late, waited, mean_seconds)
    return Slowness(name, lanes, own, late, None, mean_seconds)


class _Spans:
    """A phase of one rank in each step."""

    def __init__(self, run: Run, lane: Lane, name: str) -> None:
        rows = run.phases[lane][name]
        self.seconds = run.seconds_in(rows)
        others = [of for other, of in run.phases[lane].items() if other != name]
        ends_ns = np.sort(np.concatenate([np.zeros(1, np.int64), *(of[:, 1] for of in others)]))
        pieces, step, _ = cut(rows, run.steps)
        begins_ns = run.steps[:, 1].copy()
        np.minimum.at(begins_ns, step, pieces[:, 0])
        ended_ns = ends_ns[np.searchsorted(ends_ns, begins_ns, side="right") - 1]
        ended_ns = np.maximum(ended_ns, run.steps[:, 0])
        self.before = (ended_ns - run.steps[:, 0]) / 1e9
        """From the beginning of the step to the end of the phase before."""
        self.begins = (begins_ns - run.steps[:, 0]) / 1e9
        """From the beginning of the step to that of the phase."""
        self.late = (begins_ns - ended_ns) / 1e9
        """From the end of the phase before to the beginning of this one."""


def _of(spans: list[_Spans], name: str) -> NDArray[np.float64]:
    return np.array([getattr(span, name) for span in spans])


def _behind(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how much more each rank has than the median of the others."""
    ranks = len(seconds)
    in_order = np.sort(seconds, axis=0)
    place = np.argsort(np.argsort(seconds, axis=0, kind="stable"), axis=0, kind="stable")
    low, high = (ranks - 2) // 2, (ranks - 1) // 2  # of the ranks - 1 others
    # Without the value at `place`, the value at `at` is the next one from that place on.
    without = [np.take_along_axis(in_order, np.where(place <= at, at + 1, at), axis=0) for at in (low, high)]
    return seconds - (without[0] + without[1]) / 2


def _collectives(run: Run, lane: Lane) -> Intervals:
    """Return when a rank was in collectives: on its GPU's streams if these were timed, else in its calls.

    On a GPU a call returns at once, so that its length says nothing.
    """
    on_gpu = [kept.rows(run.seen.end_ns) for process in run.members[lane] for name, kept in process.device_spans.items()
              if name in GATHERS_AND_SCATTERS]  # fmt: skip
    if on_gpu or not _is_cpu(lane):
        return np.concatenate(on_gpu) if on_gpu else EMPTY
    calls = [
        kept.rows(run.seen.end_ns)
        for process in run.members[lane]
        for (name, _), kept in process.automatic_spans.items()
        if name in GATHERS_AND_SCATTERS
    ]
    return np.concatenate(calls) if calls else EMPTY


def _is_cpu(lane: Lane) -> bool:
    return lane.device is None or lane.device.startswith("cpu")
