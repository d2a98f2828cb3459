"""Python collects garbage inside of steps."""

from __future__ import annotations

import numpy as np

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import PerStep, Run, rows_of
from rltrace.analysis.lanes import Lane
from rltrace.events import COLLECTION, SAMPLER

NAME = "garbage_collection"
HOOKS = "python_gc"

SETTINGS = (
    Setting("your program", "gc.collect(); gc.freeze() after set-up, in each process: what lives on is not looked at"),
    Setting("your program", "gc.disable() in the steps, and gc.collect() where the GPU is busy anyway"),
)


def judge(run: Run) -> list[Finding]:
    """Price the collections of the role whose processes spend most time in them."""
    by_role: dict[str, dict[Lane, PerStep]] = {}
    for lane, members in run.members.items():
        for role in {process.process.role for process in members} - {SAMPLER}:
            rows = rows_of((process for process in members if process.process.role == role), COLLECTION, run)
            if len(rows):
                by_role.setdefault(role, {})[lane] = run.seconds_in(rows)
    if not by_role and not run.records(COLLECTION):
        raise UnjudgeableError("collections were not recorded: the instrumentation `python_gc` was not in the run")
    if not len(run.steps) or not by_role:
        return []
    means = {role: np.mean(list(lanes.values()), axis=0) for role, lanes in by_role.items()}
    role = max(means, key=lambda one: float(means[one].mean()))
    lanes, price = by_role[role], means[role]
    most = max(lanes, key=lambda lane: float(lanes[lane].sum()))
    anybody = run.seconds_in(rows_of((process for process in run.seen.processes), COLLECTION, run))
    where = run.most_in(most, rows_of(run.members[most], COLLECTION, run))
    return [
        run.finding(
            NAME,
            f"Garbage collections take {price.mean() / run.step_seconds.mean():.1%} of a step in each {role}, most in "
            f"{most.name}{f' in {where[0]}' if where else ''}",
            [
                f"{as_text(price.mean())} of a step in the mean of {len(lanes)}, {as_text(lanes[most].mean())} in "
                f"{most.name}, {as_text(max(map(np.max, lanes.values())))} in the worst step",
                f"for {as_text(anybody.mean())} of a step at least one process of the run collects",
            ],
            per_step=price,
            bound=float(anybody.mean()),
            less_because="a collection while the GPU is busy, or while others are waited for, delays nobody",
            figures={"any_process_seconds": float(anybody.mean()), "most_seconds": float(lanes[most].mean())},
            ranks=[] if most.rank is None else [most.rank],
            phases=where,
            about=(),
            settings=SETTINGS,
        )
    ]
