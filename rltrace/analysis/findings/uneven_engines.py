"""Engines get uneven numbers of prompts or tokens, and those that finish first wait."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.engine_requests import Balance, balanced, surplus_of
from rltrace.analysis.findings.amounts import as_text, between_as_text
from rltrace.analysis.findings.engine_requests import engine_requests
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run

NAME = "uneven_engines"
GENERATE = "rollout.generate"

LEAST_SURPLUS = 0.05
"""The share of the mean by which the busiest engine must have more. Equal steps on one host differ by 5 to 10 %
(docs/measurements/index.md), so less could not be told from noise."""

SETTINGS = (
    Setting(
        "verl", "actor_rollout_ref.rollout.agent.num_workers: fewer workers, if each balances alone", since="0.5.0"
    ),
    Setting("your program", "send the next request to the engine with the fewest open tokens"),
)


def judge(run: Run) -> list[Finding]:
    """Price by how much the slowest engine outlasts the mean, as far as the work that it has more explains that."""
    requests = engine_requests(run)
    run.require_one_time()
    if len(requests.engines) < 2:
        raise UnjudgeableError("there is one engine, and nothing to balance")
    balance = balanced(requests, len(run.steps))
    surplus = surplus_of(balance)
    late = balance.seconds.max(axis=1) - balance.seconds.mean(axis=1)
    if not has_uneven_work(balance):
        return []
    price = np.minimum(late, _explained(balance))
    busiest = np.bincount(balance.seconds.argmax(axis=1), minlength=len(requests.engines))
    slowest = [requests.engines[at] for at in np.flatnonzero(busiest)]
    worst = int(price.argmax())
    names, ranks = [lane.name for lane in slowest], [lane.rank for lane in slowest if lane.rank is not None]
    work, seconds = balance.work[worst], balance.seconds[worst]
    return [
        run.finding(
            NAME,
            f"Engines share the {balance.unit} unevenly: the last one is done {as_text(late.mean())} after the mean, "
            f"with {1 + surplus.mean():.2f} times its {balance.unit}",
            [
                f"step {run.numbers[worst]}: {work.min():,.0f} to {work.max():,.0f} {balance.unit} an engine, done "
                f"after {between_as_text(seconds.min(), seconds.max())}",
                f"last to end: {_said(names, busiest[busiest > 0].tolist(), len(run.steps))}",
            ],
            per_step=price,
            bound=float(late.mean()),
            less_because="twice the sequences take less than twice as long, and lengths are not known before",
            figures={"most_over_mean": 1 + float(surplus.mean())},
            ranks=ranks,
            phases=[GENERATE],
            settings=SETTINGS,
        )
    ]


def _explained(balance: Balance) -> NDArray[np.float64]:
    """Return in each step how much sooner the slowest engine would be done with the mean work, at its own speed."""
    slowest = balance.seconds.argmax(axis=1)
    steps = np.arange(len(slowest))
    share = 1 - balance.work.mean(axis=1) / np.maximum(balance.work[steps, slowest], 1)
    return np.asarray(np.maximum(share, 0) * balance.seconds[steps, slowest])


def _said(names: list[str], times: list[int], steps: int) -> str:
    pairs = sorted(zip(times, names, strict=True), reverse=True)[:3]
    return ", ".join(f"{name} in {many} of {steps} steps" for many, name in pairs)


def has_uneven_work(balance: Balance) -> bool:
    """Return whether the work is uneven, and engines with more of it take longer."""
    slowest = balance.seconds.argmax(axis=1)
    works_more = balance.work[np.arange(len(slowest)), slowest] >= balance.work.mean(axis=1)
    return bool(surplus_of(balance).mean() >= LEAST_SURPLUS and works_more.mean() > 0.5)
