"""One rank makes the others wait, because it begins late or computes slowly; it may always be the same rank or not.

Where ranks exchange shards all the time, all of them take equally long. Then the culprit is the rank that waits least
in the collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.engine_requests import Balance, balanced, surplus_of
from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.engine_requests import engine_requests
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError, interval_of
from rltrace.analysis.findings.run import Run
from rltrace.analysis.findings.uneven_batches import is_uneven, tokens_of
from rltrace.analysis.findings.uneven_engines import GENERATE, has_uneven_work
from rltrace.analysis.gpu_work import GATHERS_AND_SCATTERS
from rltrace.analysis.intervals import Intervals, cut, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import once
from rltrace.analysis.phases import in_order

NAME = "slow_rank"

ALWAYS = 0.8
"""Share of the steps in which one rank must be the slowest to count as always the same. Of two ranks that are alike,
one is the slowest in 8 of 10 steps or more by chance in 11 % of the cases; the interval must be above 0 as well."""

FEWEST_STEPS = 3
"""With fewer steps nobody can say whether it is always the same rank."""

NOISE = 0.1
"""Steps on shared hosts differ by 5 to 10 % from one to the next (docs/measurements/index.md). Some rank is the slowest
in each step, and of 4 ranks with such noise it is 10 % behind their mean (the expected largest of 4 normal values)."""

OVER_NOISE = 1.5
"""The factor by which the slowest rank must exceed that if it changes."""

FEWEST_RANKS_IN_TURNS = 3
"""Of two ranks one is always slower, and noise alone makes it the other one next time."""

LEAST_SHARE_IN_TURNS = 0.02
"""The share of a step that it must cost as well: short phases differ by more than long ones."""

FEWEST_RANKS_OF_A_HOST = 3
"""Of two, the median is moved by either."""

LATE_SECONDS = 0.001
"""Ray's way to a worker takes longer than that (docs/measurements/verl_8b.md), so that a shorter delay is none."""

SETTINGS = (Setting("your cluster", "compare this rank's clocks, power, PCIe link and processors with the others'"),)
IN_TURNS = (
    Setting("your cluster", "no rank is to blame: look for what interrupts each of them now and then, beside the run"),
)
"""What to change where it is another rank each time."""

BALANCED = "trainer.balance_batch"
"""verl's setting that gives each rank as many tokens; its default is True (verl's ppo_trainer.yaml)."""
EVEN_TOKENS = Setting("verl", f"{BALANCED}=True: as many tokens for each rank")
MAYBE_UNEVEN = Setting(
    "your program", "if the ranks have uneven numbers of tokens, which this run did not record: share them out evenly"
)


class Slowness(NamedTuple):
    """How slow each rank is in one phase, of shape (ranks, steps), in seconds."""

    phase: str
    lanes: list[Lane]
    took: NDArray[np.float64]
    """How long the phase took, lateness included; where ranks wait for one another, how much less the rank waited."""
    late: NDArray[np.float64]
    """How much later than the others the rank began, by its own fault."""
    waited: NDArray[np.float64] | None
    """The seconds in collectives, if these tell which rank is behind."""
    mean_seconds: float


def judge(run: Run) -> list[Finding]:
    """Price in each phase how far the slowest rank is behind the median of the others."""
    if len(run.ranks) < 2:
        raise UnjudgeableError("there is one rank at most")
    if not len(run.steps):
        return []
    run.require_one_time()
    names = in_order(name for lane in run.ranks for name in run.phases[lane])
    return [found for name in names for found in _of_phase(run, name)]


def _of_phase(run: Run, name: str) -> Iterator[Finding]:
    balance = _balance(run) if name == GENERATE else None
    if balance is not None and has_uneven_work(balance):
        return  # another finding has that
    tokens = tokens_of(run, name)
    if tokens is not None and is_uneven(tokens.waiting_share(len(run.steps))):
        return  # and that
    slow = slowness_of(run).get(name)
    if slow is None or slow_host_of(run, slow) is not None:
        return
    times = np.bincount(slow.took.argmax(axis=0), minlength=len(slow.lanes))
    most = int(times.argmax())
    behind = behind_others(slow.took)[most]
    interval = interval_of(behind.tolist())
    is_same = len(run.steps) >= FEWEST_STEPS and times[most] >= ALWAYS * len(run.steps)
    if is_same and interval is not None and interval.least > 0:
        title = f"{slow.lanes[most].name} {{how}} in {name} in {times[most]} of {len(run.steps)} steps: {{by}}"
        yield _finding(run, slow, np.maximum(behind, 0), [most], times, title, balance)
        return
    if len(slow.lanes) < FEWEST_RANKS_IN_TURNS:
        return
    apart = slow.took.max(axis=0) - slow.took.mean(axis=0)
    least = NOISE * OVER_NOISE * max(_largest_of(len(slow.lanes)) / _largest_of(4), 1)
    if apart.mean() >= least * slow.mean_seconds and apart.mean() >= LEAST_SHARE_IN_TURNS * run.step_seconds.mean():
        who = np.flatnonzero(times).tolist()
        title = f"In {name} one rank {{how}} ({_counted(slow, times.tolist())} of {len(run.steps)} steps): {{by}}"
        if len(who) == 1:
            title = f"In {name} {slow.lanes[most].name} {{how}} in all {len(run.steps)} steps: {{by}}"
        yield _finding(run, slow, apart, who, times, title, balance)


class SlowHost(NamedTuple):
    """A host whose ranks are always behind those of the others in a phase."""

    host: str
    lanes: list[Lane]
    behind: NDArray[np.float64]
    """By how much its median rank is behind that of the median host, in each step."""
    times: int
    """In how many steps it is the slowest host."""


def slow_host_of(run: Run, slow: Slowness) -> SlowHost | None:
    """Return the host that is always the slowest in a phase; a single slow rank does not make its host slow."""
    hosts = sorted({lane.host for lane in slow.lanes if lane.host is not None})
    of_host = [[at for at, lane in enumerate(slow.lanes) if lane.host == host] for host in hosts]
    if len(hosts) < 2 or min(map(len, of_host)) < FEWEST_RANKS_OF_A_HOST or len(run.steps) < FEWEST_STEPS:
        return None
    medians = np.array([np.median(slow.took[places], axis=0) for places in of_host])
    times = np.bincount(medians.argmax(axis=0), minlength=len(hosts))
    most = int(times.argmax())
    behind = behind_others(medians)[most]
    interval = interval_of(behind.tolist())
    if times[most] < ALWAYS * len(run.steps) or interval is None or interval.least <= 0:
        return None
    if behind.mean() < LEAST_SHARE_IN_TURNS * run.step_seconds.mean():
        return None
    return SlowHost(hosts[most], [slow.lanes[at] for at in of_host[most]], np.maximum(behind, 0), int(times[most]))


def _largest_of(many: int) -> float:
    """Return the expected largest of some normal values of deviation 1 (Blom, 1958)."""
    return NormalDist().inv_cdf((many - 0.375) / (many + 0.25))


def _finding(
    run: Run,
    slow: Slowness,
    price: NDArray[np.float64],
    who: list[int],
    times: NDArray[np.intp],
    title: str,
    balance: Balance | None,
) -> Finding:
    worst = int(price.argmax())
    culprit = who[0] if len(who) == 1 else int(slow.took[:, worst].argmax())
    lane = slow.lanes[culprit]
    late = float(slow.late[culprit].mean() if len(who) == 1 else slow.late[culprit, worst])
    how = "begins late" if late >= (price.mean() if len(who) == 1 else price[worst]) / 2 else "is slow"
    by = f"it is done {as_text(price.mean())} after the {'mean rank' if title.startswith('In ') else 'others'}"
    if slow.waited is not None:
        by = f"the others wait {as_text(price.mean())} for it"
    facts = [f"slowest: {_counted(slow, times.tolist())} of {len(run.steps)} steps"]
    if late >= LATE_SECONDS:
        facts[0] += f"; it begins {as_text(late)} late"
    if slow.waited is not None:
        waits = slow.waited[:, worst]
        facts.append(
            f"all ranks take as long, because each waits for all in the collectives; step {run.numbers[worst]}: "
            f"{lane.name} is {as_text(waits[culprit])} in them, the median rank {as_text(np.median(waits))}"
        )
    if balance is not None:
        most = 1 + float(surplus_of(balance).mean())
        facts.append(f"the work is even: the busiest engine of a step has {most:.2f} times the mean {balance.unit}")
    return run.finding(
        NAME,
        title.format(how=how, by=by),
        facts,
        per_step=price,
        less_because="with this rank as fast as the others, the second slowest is waited for",
        basis="measured" if slow.waited is None else "modelled",
        figures={"late_seconds": late, "phase_seconds": slow.mean_seconds},
        ranks=_ranks(slow, who),
        phases=[slow.phase],
        settings=[*_for_tokens(run, slow.phase, balance), *(SETTINGS if len(who) == 1 else IN_TURNS)],
        moment=run.moment(worst, lane.rank),
    )


def _for_tokens(run: Run, phase: str, balance: Balance | None) -> list[Setting]:
    """Return what to change for even tokens; nothing where they are known to be even, or the run evens them out."""
    if balance is not None or tokens_of(run, phase) is not None:
        return []  # uneven ones are another finding
    if "verl" not in run.programs:
        return [MAYBE_UNEVEN]
    is_off = any(word.lstrip("+").lower() == f"{BALANCED}=false" for word in run.summary.run.command)
    return [EVEN_TOKENS] if is_off else []


def _ranks(slow: Slowness, who: list[int]) -> list[int]:
    return [rank for at in who if (rank := slow.lanes[at].rank) is not None]


def _counted(slow: Slowness, times: list[int]) -> str:
    most = sorted(range(len(times)), key=lambda at: -times[at])[:3]
    return ", ".join(f"{slow.lanes[at].name} in {times[at]}" for at in most if times[at])


def _balance(run: Run) -> Balance | None:
    try:
        return balanced(engine_requests(run), len(run.steps))
    except UnjudgeableError:
        return None


@once
def slowness_of(run: Run) -> dict[str, Slowness]:
    """Return who is behind in each phase that two ranks have in every step, in the order of a step."""
    names = in_order(name for lane in run.ranks for name in run.phases[lane])
    collectives = {lane: collectives_of(run, lane) for lane in run.ranks}
    found = {name: slowness(run, name, collectives) for name in names}
    return {name: slow for name, slow in found.items() if slow is not None}


def slowness(run: Run, name: str, collectives: Mapping[Lane, Intervals]) -> Slowness | None:
    """Return how far each rank is behind in a phase; None unless two or more ranks have it in every step.

    Args:
        run: The run.
        name: The phase.
        collectives: When each rank was in collectives.
    """
    lanes = [lane for lane in run.ranks if name in run.phases[lane]]
    spans = [_Spans(run, lane, name) for lane in lanes]
    whole = [at for at, span in enumerate(spans) if span.seconds.all()]
    lanes, spans = [lanes[at] for at in whole], [spans[at] for at in whole]
    if len(lanes) < 2:
        return None
    # A rank that begins no later than the others is not late, however long it had waited for them.
    late = np.maximum(np.minimum(behind_others(_of(spans, "late")), behind_others(_of(spans, "begins"))), 0)
    late = np.where(late > run.clock_bound_seconds, late, 0.0)
    took = _of(spans, "seconds") + late
    mean_seconds = float(_of(spans, "seconds").mean())
    if all(len(collectives[lane]) for lane in lanes):
        waited = np.array([run.seconds_in(cut(collectives[lane], run.phases[lane][name])[0]) for lane in lanes])
        # A rank that waits less because it came late from another phase is told in that phase.
        inherited = np.minimum(
            np.maximum(behind_others(_of(spans, "before")), 0), np.maximum(behind_others(-waited), 0)
        )
        coupled = -waited - inherited
        if waited.any(axis=1).all() and _apart(coupled) > _apart(took):
            return Slowness(name, lanes, coupled, late, waited, mean_seconds)
    return Slowness(name, lanes, took, late, None, mean_seconds)


def _apart(took: NDArray[np.float64]) -> float:
    return float((took.max(axis=0) - took.mean(axis=0)).mean())


class _Ends(NamedTuple):
    """When the phases of one rank ended, in order."""

    names: list[str]
    ends_ns: NDArray[np.int64]
    phase: NDArray[np.intp]
    """Which of the names ended; -1 for the beginning of time, which comes before all."""

    def without(self, name: str) -> NDArray[np.int64]:
        """Return when all others ended."""
        others: NDArray[np.int64] = self.ends_ns[self.phase != self.names.index(name)]
        return others


@once
def _ends(run: Run) -> dict[Lane, _Ends]:
    """Return when the phases of each rank ended."""
    return {lane: _ends_of(run.phases[lane]) for lane in run.ranks}


def _ends_of(phases: Mapping[str, Intervals]) -> _Ends:
    ends_ns = np.concatenate([np.zeros(1, np.int64), *(rows[:, 1] for rows in phases.values())])
    phase = np.repeat(np.arange(-1, len(phases)), [1, *map(len, phases.values())])
    in_order = np.argsort(ends_ns, kind="stable")
    return _Ends([*phases], ends_ns[in_order], phase[in_order])


class _Spans:
    """A phase of one rank in each step."""

    def __init__(self, run: Run, lane: Lane, name: str) -> None:
        rows = run.phases[lane][name]
        self.seconds = run.phase_seconds(name)[lane]
        ends_ns = _ends(run)[lane].without(name)
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


def behind_others(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each rank how much more it has than the median of the others."""
    ranks = len(seconds)
    in_order = np.sort(seconds, axis=0)
    place = np.argsort(np.argsort(seconds, axis=0, kind="stable"), axis=0, kind="stable")
    low, high = (ranks - 2) // 2, (ranks - 1) // 2  # of the ranks - 1 others
    # Without the value at `place`, the value at `at` is the next one from that place on.
    without = [np.take_along_axis(in_order, np.where(place <= at, at + 1, at), axis=0) for at in (low, high)]
    return seconds - (without[0] + without[1]) / 2


CALLED_COLLECTIVES = "dist."
"""How the spans of collectives begin that a program calls itself."""


def collectives_of(run: Run, lane: Lane) -> Intervals:
    """Return when a rank was in collectives: on its GPU's streams if these were timed, else in its calls.

    On a GPU a call returns at once, so its length says nothing.
    """
    on_gpu = [kept.rows(run.seen.end_ns) for process in run.members[lane] for name, kept in process.device_spans.items()
              if name in GATHERS_AND_SCATTERS]  # fmt: skip
    if on_gpu or not _is_cpu(lane):
        return union(*on_gpu)
    return union(
        *(
            kept.rows(run.seen.end_ns)
            for process in run.members[lane]
            for (name, _), kept in process.automatic_spans.items()
            if name in GATHERS_AND_SCATTERS or name.startswith(CALLED_COLLECTIVES)
        )
    )


def _is_cpu(lane: Lane) -> bool:
    return lane.device is None or lane.device.startswith("cpu")
