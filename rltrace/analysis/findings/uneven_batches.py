"""Ranks get uneven numbers of tokens, and wait for the one with the most in each micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.findings.uneven_engines import GENERATE, LEAST_SURPLUS
from rltrace.analysis.intervals import Intervals, holding
from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import once
from rltrace.analysis.phases import in_order

NAME = "uneven_batches"

SETTINGS = (
    Setting("verl", "trainer.balance_batch=True and actor_rollout_ref.actor.use_dynamic_bsz=True: even tokens"),
    Setting("your program", "sort the samples by length, and share them out so that each rank has as many tokens"),
)


class Tokens(NamedTuple):
    """The tokens of each forward of a phase: the same number of forwards on each rank, in order."""

    lanes: list[Lane]
    step: NDArray[np.intp]
    """The place of the steady step of each forward."""
    tokens: NDArray[np.float64]
    """Of shape (ranks, forwards)."""

    def waiting_share(self, steps: int) -> NDArray[np.float64]:
        """Return in each step by what share fewer tokens a forward would take with even ones: all wait for the most."""
        most, mean = (np.bincount(self.step, of, steps) for of in (self.tokens.max(axis=0), self.tokens.mean(axis=0)))
        return np.asarray(1 - mean / np.maximum(most, 1))


def judge(run: Run) -> list[Finding]:
    """Price in each phase what the forwards with the most tokens take beyond the mean ones."""
    if len(run.ranks) < 2:
        raise UnjudgeableError("there is one rank at most")
    names = [name for name in in_order(name for lane in run.ranks for name in run.phases[lane]) if name != GENERATE]
    known = {name: tokens for name in names if (tokens := tokens_of(run, name)) is not None}
    if not known:
        raise UnjudgeableError("no forward of a model said how many tokens it has (`model.forward`)")
    return [found for name, tokens in known.items() for found in _of_phase(run, name, tokens)]


def _of_phase(run: Run, name: str, tokens: Tokens) -> Iterator[Finding]:
    share = tokens.waiting_share(len(run.steps))
    if not is_uneven(share):
        return
    seconds = np.max([run.phase_seconds(name)[lane] for lane in tokens.lanes], axis=0)
    price = share * seconds
    by_rank = np.array([np.bincount(tokens.step, of, len(run.steps)) for of in tokens.tokens])
    times = np.bincount(by_rank.argmax(axis=0), minlength=len(tokens.lanes))
    worst, most = int(price.argmax()), tokens.lanes[int(times.argmax())]
    yield run.finding(
        NAME,
        f"Ranks have uneven tokens in {name}: it would take {as_text(price.mean())} less with even ones",
        [
            f"step {run.numbers[worst]}: {by_rank[:, worst].min():,.0f} to {by_rank[:, worst].max():,.0f} tokens "
            f"a rank; the forward that is waited for has {1 / (1 - share.mean()):.2f} times the mean tokens",
            f"{most.name} has the most in {times.max()} of {len(run.steps)} steps",
        ],
        per_step=price,
        less_because="a forward of fewer tokens takes less than its share of the time where launches bound it",
        basis="modelled",
        figures={"most_over_mean": 1 / (1 - float(share.mean()))},
        ranks=[rank for at in np.flatnonzero(times).tolist() if (rank := tokens.lanes[at].rank) is not None],
        phases=[name],
        settings=SETTINGS,
    )


def is_uneven(share: NDArray[np.float64]) -> bool:
    """Return whether those with the most tokens have so many more than the mean that it is no noise."""
    return bool((1 / (1 - share) - 1).mean() >= LEAST_SURPLUS)


def tokens_of(run: Run, name: str) -> Tokens | None:
    """Return the tokens of a phase's forwards; None if not all ranks that have the phase say as many of them."""
    lanes = [lane for lane in run.ranks if name in run.phases[lane]]
    found = [_forwards(run)[lane].inside(run.phases[lane][name]) for lane in lanes]
    if len(lanes) < 2 or len({len(of.step) for of in found}) != 1 or not len(found[0].step):
        return None
    return Tokens(lanes, found[0].step, np.array([of.tokens for of in found], np.float64))


class _Forwards(NamedTuple):
    """Forwards of one rank in order."""

    start_ns: NDArray[np.int64]
    step: NDArray[np.intp]
    tokens: NDArray[np.int64]

    def inside(self, rows: Intervals) -> _Forwards:
        """Return those that began in some intervals."""
        chosen = holding(rows, self.start_ns) >= 0
        return _Forwards(self.start_ns[chosen], self.step[chosen], self.tokens[chosen])


@once
def _forwards(run: Run) -> dict[Lane, _Forwards]:
    """Return the forwards of each rank in the steady steps that say how many tokens they have."""
    return {lane: _of_lane(run, lane) for lane in run.ranks}


def _of_lane(run: Run, lane: Lane) -> _Forwards:
    kept = [process.forwards for process in run.members[lane]]
    start_ns = np.concatenate([np.empty(0, np.int64), *(np.array(of.starts, np.int64) for of in kept)])
    tokens = np.concatenate([np.empty(0, np.int64), *(np.array(of.tokens, np.int64) for of in kept)])
    step = run.step_of(start_ns)
    chosen = np.flatnonzero((step >= 0) & (tokens > 0))
    chosen = chosen[np.argsort(start_ns[chosen], kind="stable")]
    return _Forwards(start_ns[chosen], step[chosen], tokens[chosen])
