"""Tools and environments run while the engines have nothing to do."""

from __future__ import annotations

import numpy as np

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.intervals import EMPTY
from rltrace.events import REQUEST, TOOLS

NAME = "slow_tools"

SETTINGS = (
    Setting("your program", "more trajectories at once, and a time limit for each call"),
    Setting(
        "verl",
        "actor_rollout_ref.rollout.agent.num_workers: a call that blocks stops its worker's others",
        since="0.5.0",
    ),
)


def judge(run: Run) -> list[Finding]:
    """Price the time in which a tool runs and no request is in an engine."""
    rows = run.spans_named(*TOOLS)
    inside = rows[run.step_of(rows[:, 0]) >= 0]
    if not len(inside):
        raise UnjudgeableError(f"no call of a tool or an environment was recorded in a steady step ({TOOLS[1]})")
    run.require_one_time()
    served = [process.passed[REQUEST] for process in run.seen.processes if REQUEST in process.passed]
    requests = np.concatenate([EMPTY, *(kept.rows(run.seen.end_ns) for kept in served)])
    price = run.seconds_in(inside, requests) - run.seconds_in(requests)
    seconds = (inside[:, 1] - inside[:, 0]) / 1e9
    return [
        run.finding(
            NAME,
            f"For {as_text(price.mean())} of a step tools run while no request is in an engine",
            [
                f"{len(seconds):,} calls: median {as_text(np.median(seconds))}, p95 "
                f"{as_text(np.quantile(seconds, 0.95))}, longest {as_text(seconds.max())}"
            ],
            per_step=price,
            less_because="with more trajectories the engine has work meanwhile, but not beside the last ones",
            phases=["rollout.generate"],
            settings=SETTINGS,
        )
    ]
