"""Nothing computes between two phases: the driver prepares a batch, data is loaded, or calls are on their way."""

from __future__ import annotations

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting
from rltrace.analysis.findings.gaps import longest_gaps
from rltrace.analysis.findings.run import PerStep, Run
from rltrace.analysis.idle import IdleGap, shown_lanes
from rltrace.analysis.intervals import Intervals, cut, outside, union
from rltrace.analysis.observations import once
from rltrace.events import REQUEST

NAME = "between_phases"

SHORT_NS = 10_000_000
"""A shorter gap may be a call's way through Ray: of verl's calls that is 4 to 18 ms (docs/measurements/verl_8b.md:
26 to 38 ms less the trainer's own 15 to 20; 4 ms in the new trainer)."""

UNSEEN = (
    "a reward function may run there: a function of the program that is in no phase is only seen if it computes for as "
    "long as the sampler's interval"
)
"""What is said of a gap in which samples may be scored."""

SETTINGS = (
    Setting("your program", "do what the driver does to a batch on the ranks, or beside their work"),
    Setting("PyTorch", "DataLoader(num_workers=..., prefetch_factor=...), if the gap is one of loading data"),
)


def judge(run: Run) -> list[Finding]:
    """Price the time in which no rank and no driver is in a phase, no request is in an engine, and nothing computes."""
    lanes = shown_lanes(run.phases)
    price = gap_seconds(run)
    gaps = longest_gaps(run, {lane.name for lane in lanes}, _alone)
    most = f": most {gaps[0].words}" if gaps else ""
    return [
        run.finding(
            NAME,
            f"For {as_text(price.mean())} of a step no phase runs and nothing is seen to compute{most}",
            [*(UNSEEN for gap in gaps[:1] if gap.may_be_reward), *(gap.words for gap in gaps[1:])],
            per_step=price,
            less_because="calls and copies of a batch take some time in any case",
            settings=[*(gap.mark for gap in gaps[:1] if gap.may_be_reward), *SETTINGS],
        )
    ]


def _alone(gap: IdleGap) -> float:
    """Return how much of a gap nobody computes in."""
    return gap.seconds - gap.others_seconds - gap.unlabelled_seconds


def gap_seconds(run: Run) -> PerStep:
    """Return the seconds in each step of all gaps that are longer than a call; raises as `gaps_of`."""
    return run.seconds_in(gaps_of(run))


@once
def gaps_of(run: Run) -> Intervals:
    """Return all gaps of the steady steps that are longer than a call.

    Raises:
        UnjudgeableError: it cannot be known when nothing computed.
    """
    lanes = shown_lanes(run.phases)
    run.require_phases(lanes)
    run.require_one_time()
    run.require_spans()
    requests = [
        process.passed[REQUEST].rows(run.seen.end_ns) for process in run.seen.processes if REQUEST in process.passed
    ]
    phases = [rows for lane in run.phases for rows in run.phases[lane].values()]
    gaps, _ = outside(union(*phases, *run.driver_phases.values(), *requests), run.steps)
    computing = [cut(run.computing[lane], gaps)[0] for lane in lanes if lane in run.computing]
    gaps, _ = outside(union(*computing), gaps)
    return gaps[gaps[:, 1] - gaps[:, 0] >= SHORT_NS]
