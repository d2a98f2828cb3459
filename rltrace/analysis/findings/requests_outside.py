"""Requests wait before and after the engine: in the agent loop, in Ray's calls, at the server."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.intervals import EMPTY, Intervals
from rltrace.analysis.requests import IN_ENGINE
from rltrace.events import AGENT_REQUEST, REQUEST, SERVER_REQUEST

NAME = "requests_outside"

SETTINGS = (
    Setting(
        "verl", "actor_rollout_ref.rollout.agent.num_workers: more, if agent loops are the longest part", since="0.5.0"
    ),
    Setting("your program", "nothing that blocks in the event loops of agents and servers"),
)


def judge(run: Run) -> list[Finding]:
    """Price the time in which requests are under way and none of them is in an engine."""
    outer = _all(run, (AGENT_REQUEST, SERVER_REQUEST))
    inner = _all(run, (REQUEST,))
    if not len(outer) or not len(inner):
        missing = "agent loops and servers" if not len(outer) else "engines"
        raise UnjudgeableError(f"no request was recorded by {missing}")
    run.require_one_time()
    alone = run.seconds_in(outer, inner) - run.seconds_in(inner)
    joined = [requests for requests in run.summary.requests if requests.mean_seconds and requests.count]
    outside = {
        name: stage.mean_seconds
        for requests in joined
        for name, stage in requests.stages.items()
        if name not in IN_ENGINE
    }
    share = max((sum(s.share for n, s in r.stages.items() if n not in IN_ENGINE) for r in joined), default=0.0)
    longest = sorted(outside.items(), key=lambda item: -item[1])[:3]
    facts = [f"a request spends {share:.0%} of its time outside of the engine"]
    if longest:
        facts.append("mean of a request: " + ", ".join(f"{name} {as_text(seconds)}" for name, seconds in longest))
    return [
        run.finding(
            NAME,
            f"For {as_text(alone.mean())} of a step requests are under way and none is in an engine",
            facts,
            per_step=alone,
            bound=float((share * run.seconds_in(outer)).mean()) if share else None,
            less_because="an engine that gets its requests sooner computes more of them at once, and each takes longer",
            figures={"outside_share": share},
            phases=["rollout.generate"],
            settings=SETTINGS,
        )
    ]


def _all(run: Run, names: Iterable[str]) -> Intervals:
    kept = [process.passed[name] for name in names for process in run.seen.processes if name in process.passed]
    return np.concatenate([EMPTY, *(spans.rows(run.seen.end_ns) for spans in kept)])
