"""All ranks wait while the driver computes rewards or advantages."""

from __future__ import annotations

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.intervals import union
from rltrace.events import DRIVER_PHASES

NAME = "driver_phases"

SETTINGS = (
    Setting("verl", "reward.num_workers: more", since="0.7.0"),
    Setting("verl", "reward_model.launch_reward_fn_async=True: beside the log-probs", until="0.7.0"),
    Setting("TRL", "GRPOTrainer(reward_funcs=...): asynchronous functions run side by side"),
    Setting("your program", "score each sample when it is done, while others are generated"),
)


def judge(run: Run) -> list[Finding]:
    """Price the driver's own phases while no rank is in a phase."""
    if not run.ranks:
        raise UnjudgeableError("no rank has a phase")
    if not run.driver_phases:
        raise UnjudgeableError(f"the driver has no phase of its own ({', '.join(sorted(DRIVER_PHASES))})")
    run.require_one_time()
    ranks = union(*(rows for lane in run.ranks for rows in run.phases[lane].values()))
    busy = run.seconds_in(ranks)
    alone = {name: run.seconds_in(rows, ranks) - busy for name, rows in run.driver_phases.items()}
    most = max(alone, key=lambda name: float(alone[name].mean()))
    return [
        run.finding(
            NAME,
            f"All ranks wait for the driver's {most} for {as_text(alone[most].mean())} of a step",
            [", ".join(f"{name}: {as_text(seconds.mean())} of a step" for name, seconds in alone.items())],
            per_step=run.seconds_in(*run.driver_phases.values(), ranks) - busy,
            less_because="what needs the rewards cannot begin before they are there",
            phases=[most],
            about=(),
            settings=SETTINGS,
        )
    ]
