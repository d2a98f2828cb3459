"""The last requests of a rollout run alone, while the engines are nearly empty."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.engine_requests import engine_requests
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import PerStep, Run
from rltrace.analysis.lanes import Lane

NAME = "rollout_tail"

TAIL = 0.05
"""The share of requests that end last. Latencies are quoted as p95 and p99; vLLM's benchmark prints p99 by default
(0.26, vllm/benchmarks/serve.py), which an engine with fewer than 100 requests in a step does not have."""

LEAST_REQUESTS = 20
"""An engine needs this many requests to have one in the last 5 %."""

LEAST_SHARE = 2 * TAIL
"""Share of the rollout that the tail must take. If requests ended evenly, it would take half of this."""

SETTINGS = (
    Setting("verl", "data.max_response_length: a lower limit cuts the tail"),
    Setting("TRL", "GRPOConfig(max_completion_length=...): a lower limit cuts the tail"),
    Setting("your program", "oversample, and go on without the slowest"),
    Setting("your program", "an asynchronous rollout keeps the engine busy with the next batch"),
)


class Tails(NamedTuple):
    """The end of each step's rollout, from which on only the slowest 5 % of the requests run."""

    seconds: PerStep
    rollout_seconds: PerStep
    slowest: list[tuple[Lane, int]]
    """The engine of the last request, and its tokens; -1 if nobody said how many."""


def tails_of(run: Run) -> Tails:
    """Return when only the slowest 5 % run in the engine that ends last.

    Only the requests of that engine are compared, because another finding tells that an engine is behind the others.

    Raises:
        UnjudgeableError: a step has too few requests in an engine.
    """
    requests = engine_requests(run)
    run.require_one_time()
    tails, wholes, slowest = [], [], []
    for place in range(len(run.steps)):
        of_step = requests.of_step(place)
        if not len(of_step.ends):
            raise UnjudgeableError(f"step {run.numbers[place]} has no requests")
        last = int(of_step.ends.argmax())
        ends = of_step.ends[of_step.engine == of_step.engine[last]]
        if len(ends) < LEAST_REQUESTS:
            raise UnjudgeableError(f"an engine has {len(ends)} requests in a step, of {LEAST_REQUESTS} that it takes")
        tails.append((int(ends.max()) - int(np.quantile(ends, 1 - TAIL, method="lower"))) / 1e9)
        wholes.append((int(ends.max()) - int(of_step.starts.min())) / 1e9)
        slowest.append((of_step.engines[of_step.engine[last]], int(of_step.tokens[last])))
    return Tails(np.array(tails), np.array(wholes), slowest)


def judge(run: Run) -> list[Finding]:
    """Price the time from which on only the slowest 5 % run in the engine that ends last."""
    tail, whole, slowest = tails_of(run)
    if tail.mean() < LEAST_SHARE * whole.mean():
        return []
    worst = int(tail.argmax())
    engine, tokens = slowest[worst]
    ranks = sorted({lane.rank for lane, _ in slowest if lane.rank is not None})
    return [
        run.finding(
            NAME,
            f"The slowest 5 % of the requests run alone for {as_text(tail.mean())} of a rollout of "
            f"{as_text(whole.mean())}",
            [
                f"without the slowest 5 % the rollout would have taken {as_text((whole - tail).mean())}",
                f"step {run.numbers[worst]}: the last request ends {as_text(tail[worst])} after 95 % of them, in "
                f"{engine.name}" + (f", with {tokens:,} tokens" if tokens >= 0 else ""),
            ],
            per_step=tail,
            less_because="samples that are cut or left out are missing from the batch, which changes what is learned",
            figures={"rollout_seconds": float(whole.mean())},
            ranks=ranks,
            phases=["rollout.generate"],
            settings=SETTINGS,
        )
    ]
