"""Nothing computes between two phases: the driver prepares a batch, data is loaded, or calls are on their way."""

from __future__ import annotations

from collections import defaultdict

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import PerStep, Run
from rltrace.analysis.idle import STEADY_STEP
from rltrace.analysis.intervals import cut, outside, union
from rltrace.analysis.lanes import Lane
from rltrace.events import REQUEST

NAME = "between_phases"

SHORT_NS = 10_000_000
"""A shorter gap may be a call's way through Ray: of verl's calls that is 4 to 18 ms (docs/measurements/verl_8b.md:
26 to 38 ms less the trainer's own 15 to 20; 4 ms in the new trainer)."""

NAMED, MEANWHILE = 3, 2
"""How many gaps are named, and how many spans that were open in each."""

LEAST_SECONDS = 0.001
"""Shorter ones are not named."""

SETTINGS = (
    Setting("your program", "do what the driver does to a batch on the ranks, or beside their work"),
    Setting("PyTorch", "DataLoader(num_workers=..., prefetch_factor=...), if the gap is one of loading data"),
)

Between = tuple["str | None", "str | None"]


def judge(run: Run) -> list[Finding]:
    """Price the time in which no rank and no driver is in a phase, no request is in an engine, and nothing computes."""
    lanes = run.ranks or [lane for lane in run.phases if not lane.is_driver] or list(run.phases)
    if not lanes:
        raise UnjudgeableError('no phase is marked; `with rltrace.phase("train")` marks one')
    run.require_one_time()
    run.require_spans()
    price = _price(run, lanes)
    gaps = _named(run, {lane.name for lane in lanes})
    most = f": most {gaps[0]}" if gaps else ""
    return [
        run.finding(
            NAME,
            f"For {as_text(price.mean())} of a step nothing computes between two phases{most}",
            gaps[1:],
            per_step=price,
            less_because="calls and copies of a batch take some time in any case",
            settings=SETTINGS,
        )
    ]


def _price(run: Run, lanes: list[Lane]) -> PerStep:
    """Return the seconds of all gaps that are longer than a call."""
    requests = [
        process.passed[REQUEST].rows(run.seen.end_ns) for process in run.seen.processes if REQUEST in process.passed
    ]
    phases = [rows for lane in run.phases for rows in run.phases[lane].values()]
    gaps, _ = outside(union(*phases, *run.driver_phases.values(), *requests), run.steps)
    computing = [cut(run.computing[lane], gaps)[0] for lane in lanes if lane in run.computing]
    gaps, _ = outside(union(*computing), gaps)
    return run.seconds_in(gaps[gaps[:, 1] - gaps[:, 0] >= SHORT_NS])


def _named(run: Run, lanes: set[str]) -> list[str]:
    """Return the longest gaps, as means over the lanes, each with the spans that were open meanwhile."""
    seconds: dict[Between, float] = defaultdict(float)
    meanwhile: dict[Between, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for gap in run.summary.idle:
        own = gap.seconds - gap.others_seconds - gap.unlabelled_seconds
        if gap.of != STEADY_STEP or gap.lane not in lanes or own <= 0:
            continue
        key = gap.after, gap.before
        seconds[key] += own / len(lanes)
        for who, spans in (("driver", gap.driver_seconds), ("own", gap.own_seconds)):
            for name, length in spans.items():
                meanwhile[key][f"{who} {name}"] += length / len(lanes)
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:NAMED]
    return [_gap(key, length, meanwhile[key]) for key, length in longest if length >= LEAST_SECONDS]


def _gap(key: Between, seconds: float, names: dict[str, float]) -> str:
    longest = sorted(names.items(), key=lambda item: -item[1])[:MEANWHILE]
    said = ", ".join(f"{name} {as_text(length)}" for name, length in longest if length >= LEAST_SECONDS)
    return f"{key[0] or 'step begins'} → {key[1] or 'step ends'} {as_text(seconds)}" + (f" ({said})" if said else "")
