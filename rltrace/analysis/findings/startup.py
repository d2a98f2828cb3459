"""The start-up takes a notable part of the run."""

from __future__ import annotations

from collections import defaultdict

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Moment, Setting, UnjudgeableError
from rltrace.analysis.findings.first_step import LEAST_SHARE
from rltrace.analysis.findings.run import Run
from rltrace.analysis.phases import IDLE, STARTING, UNLABELLED

NAME = "startup"

LEAST_SECONDS = 1.0
"""A shorter start-up is not told: up to a second nobody's train of thought is interrupted (J. Nielsen, Usability
Engineering, 1993, chapter 5), so there is nothing to gain."""

SAID = 4
"""How many parts are named."""

CALLED = {
    STARTING: "processes start and import",
    IDLE: "idle between phases",
    UNLABELLED: "computing outside of any phase (imports, loading)",
}

SETTINGS = (
    Setting("your cluster", "checkpoints and Python packages on a local disk; processes that start at the same time"),
    Setting("vLLM", "enforce_eager=True, or fewer cudagraph_capture_sizes, if rollout.capture is among the parts"),
)


def judge(run: Run) -> list[Finding]:
    """Say what the time before the first step goes to, as a mean over the ranks."""
    run.require_first_step()
    if run.seen.recording.steps_are_chosen:
        raise UnjudgeableError("steps were chosen, and the start-up is not among them")
    rows = [row for row in run.summary.phases if row.step is None and row.rank is not None]
    begin_ns, end_ns = run.windows.windows[0].tolist()
    seconds = (end_ns - begin_ns) / 1e9
    if seconds < max(LEAST_SECONDS, LEAST_SHARE * run.summary.run.seconds):
        return []
    parts = defaultdict[str, float](float)
    for row in rows:
        for name, share in row.phases.items():
            parts[name] += share.seconds / len(rows)
    longest = sorted(parts.items(), key=lambda item: -item[1])[:SAID]
    said = [f"{CALLED.get(name, name)} {as_text(length)}" for name, length in longest if length]
    return [
        run.finding(
            NAME,
            f"{as_text(seconds)} pass before the first step" + (f"; the largest part is: {said[0]}" if said else ""),
            [f"mean of {len(rows)} ranks: {', '.join(said)}"] if said else [],
            once=seconds,
            when="startup",
            less_because="a model has to be loaded in any case",
            figures={f"{name}_seconds": length for name, length in longest},
            phases=[name for name, length in longest if length and name not in CALLED],
            about=(),
            settings=SETTINGS,
            moment=Moment(
                step=None,
                rank=None,
                start_seconds=0.0,
                end_seconds=seconds,
                command=run.view("--time", f":{seconds:.3f}"),
            ),
        )
    ]
