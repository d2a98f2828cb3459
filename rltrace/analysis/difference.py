"""`rltrace diff`: two runs side by side, phase by phase and owner by owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from rltrace.analysis.finding_changes import FindingChange, finding_changes
from rltrace.analysis.findings import Why
from rltrace.analysis.lanes import DRIVER_ROLE
from rltrace.analysis.ledger import FREE
from rltrace.analysis.machines import described
from rltrace.analysis.noise import Change, change
from rltrace.analysis.phases import RankStep, in_order
from rltrace.analysis.series import (
    BySteps,
    of_driver,
    of_ranks,
    phase_seconds,
    stage_seconds,
    steady_syncs,
    step_seconds,
)
from rltrace.analysis.steady import Spread, lanes, spread, together
from rltrace.analysis.summary import Run, Summary
from rltrace.events import DRIVER_PHASES, OWNERS, STEP
from rltrace.read.command_line import PYTHON, words_of_program

VERSION = 2
"""Version of the JSON, raised like that of `Summary`."""
LEAST_STEPS = 2
"""Steps of a run that are needed to know how much its steps vary."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs."""

    run: Run
    """The run."""
    steps: list[int]
    """Numbers of the steps that are compared: those of `steady`."""
    is_first: bool
    """Whether the first step, which includes warm-up, is the only one that has ended."""
    ranks: int
    """How many ranks it has."""


class Setting(msgspec.Struct, frozen=True):
    """A setting that differs between the runs."""

    name: str
    """`gpus`, `driver` or `processors`; a package; a key of the configuration; or of the command the name of a word
    `name=value`, an option, or `argument 1`."""
    a: str | None
    """Its value in A; None if A has nothing of that name."""
    b: str | None
    """Its value in B; None if B has nothing of that name."""


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """A length in both runs, over the steps of each; a step's length is the mean of its ranks."""

    name: str
    """Name of the phase or stage."""
    a: Spread | None
    """Over the steps of A, where a step's length is the mean of its ranks; None if no step of A has it."""
    b: Spread | None
    """The same of B."""
    difference_seconds: float | None
    """Mean of B minus mean of A; a run without it counts as 0. None if a run has no step that has ended."""
    ratio: float | None
    """Mean of B divided by mean of A; None if one lacks it."""
    overlapping: bool | None
    """Whether some step of one run lies among those of the other, so that the difference may be chance. None if fewer
    than two steps of a run are compared."""


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """All spans of one name, over the whole of both runs."""

    name: str
    """Name of the spans; that of a phase too."""
    a_seconds: float | None
    """Sum over the spans of A that have ended; for a phase, its seconds as the mean of the ranks. None if A has
    none."""
    b_seconds: float | None
    """The same of B."""
    a_count: int | None
    """How many spans of A have ended; None if A has none, and for a phase."""
    b_count: int | None
    """The same of B."""


class Work(msgspec.Struct, frozen=True):
    """What the GPUs spent on a kind of work in a step: the mean of the ranks over the steps."""

    name: str
    """Name of the work, as in `GpuWork`."""
    a_seconds: float | None
    """Seconds per step in A, the mean of the ranks; None if none of its GPUs was timed at it."""
    b_seconds: float | None
    """The same of B."""


class Bytes(msgspec.Struct, frozen=True):
    """The most that an owner held on any device."""

    owner: str
    """Name of the owner."""
    a_bytes: int | None
    """The most that it held on any device of A; None if A has none, or it is unknown."""
    b_bytes: int | None
    """The same of B."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs side by side; `a` is the one to compare with."""

    version: int
    """Version of this format; it is raised like that of `Summary`."""
    a: Side
    """The run to compare with."""
    b: Side
    """The other run."""
    same_program: bool
    """Whether both have a configuration, or run the same script, module or command. If not, `settings` has only the
    machine and the packages."""
    settings: list[Setting]
    """One item per thing that differs: the machine, packages, the configuration, the command line."""
    step_change: Change | None
    """By how much the steps of B are longer, and whether that may be chance; None if a run has no step."""
    findings: list[FindingChange]
    """Findings that are gone, new, or cost more or less; empty if nothing changed or nobody looked."""
    step: Seconds | None
    """The whole step; None if neither run has one that has ended."""
    phases: list[Seconds]
    """One item per phase of the ranks, in the order of a step, then `wait.driver` and `idle`."""
    driver: list[Seconds]
    """The driver's own phases, unless they are in `phases` already. A phase that the driver runs in one run and the
    ranks in the other is in both."""
    weight_sync: list[Seconds]
    """One item per stage of the weight sync; overlapping spans of one rank count once."""
    weight_sync_bytes: Bytes | None
    """Bytes sent to one rank's engine in a sync; None if neither run syncs."""
    totals: list[Totals]
    """One item per name of phases and spans, over whole runs, the longest first; empty if both runs have a step that
    has ended."""
    gpu_work: list[Work]
    """One item per kind of GPU work, by the GPUs' own clocks."""
    peak: Bytes | None
    """The fullest device, all owners together; None if neither run sampled memory."""
    memory: list[Bytes]
    """One item per owner, each at its own peak."""


def difference(
    a: Summary,
    b: Summary,
    settings: Sequence[Setting] = (),
    *,
    same_program: bool = True,
    whys: tuple[Why, Why] | None = None,
) -> Difference:
    """Compare two runs.

    Args:
        a: The figures of the run to compare with.
        b: The figures of the other run.
        settings: The result of `settings`; differences between their machines are put before it.
        same_program: The result of `same_program`.
        whys: What bounds the steps of both.
    """
    rows = [of_ranks(summary) for summary in (a, b)]
    phases = [phase_seconds(of_ranks) for of_ranks in rows]
    driver = [phase_seconds(of_driver(summary)) for summary in (a, b)]
    only_drivers = {name for own, above in zip(driver, phases, strict=True) for name in own if name not in above}
    stages = [stage_seconds(summary) for summary in (a, b)]
    steps = [step_seconds(summary, of_ranks) for summary, of_ranks in zip((a, b), rows, strict=True)]
    work = [_work(summary) for summary in (a, b)]
    held = [_held(summary) for summary in (a, b)]
    have_steps = all(summary.steady is not None for summary in (a, b))
    names = {*phases[0], *driver[0]}, {*phases[1], *driver[1]}
    return Difference(
        version=VERSION,
        a=_side(a),
        b=_side(b),
        same_program=same_program,
        settings=[*_of_machines(a.run, b.run), *settings],
        step_change=change(*steps),
        findings=[] if whys is None else finding_changes(*whys, phases=names),
        step=_seconds(STEP, *steps, have_steps=have_steps) if any(steps) else None,
        phases=_by_name(phases, have_steps),
        driver=[own for own in _by_name(driver, have_steps) if own.name in only_drivers],
        weight_sync=_by_name(stages, have_steps),
        weight_sync_bytes=_bytes("weight_sync", [_sent(summary) for summary in (a, b)]),
        totals=[] if have_steps else _totals(a, b),
        gpu_work=[Work(name, *(of_run.get(name) for of_run in work)) for name in dict.fromkeys((*work[0], *work[1]))],
        peak=_bytes("all", [_peak(summary) for summary in (a, b)]),
        memory=[
            Bytes(owner, *(of_run.get(owner) for of_run in held))
            for owner in OWNERS
            if any(of_run.get(owner) for of_run in held)
        ],
    )


def _side(summary: Summary) -> Side:
    ranks = {row.rank for row in summary.processes if row.rank is not None}
    found = summary.steady
    is_first = found is not None and found.has_first
    return Side(run=summary.run, steps=found.steps if found is not None else [], is_first=is_first, ranks=len(ranks))


# ---- seconds ----------------------------------------------------------------------------------------------------


def _work(summary: Summary) -> dict[str, float]:
    """Return seconds of a whole step by kind of work."""
    of_kind: dict[str, list[float]] = {}
    for work in summary.gpu_work:
        if work.phase is None:
            of_kind.setdefault(work.work, []).append(work.seconds)
    return {kind: fmean(seconds) for kind, seconds in of_kind.items()}


def _by_name(runs: Sequence[BySteps], have_steps: bool) -> list[Seconds]:
    names = in_order(name for run in runs for name in run)
    return [_seconds(name, *(run.get(name, ()) for run in runs), have_steps=have_steps) for name in names]


def _seconds(name: str, a: Sequence[float], b: Sequence[float], *, have_steps: bool) -> Seconds:
    mean_a, mean_b = (fmean(seconds) if seconds else 0.0 for seconds in (a, b))
    return Seconds(
        name=name,
        a=spread(a) if a else None,
        b=spread(b) if b else None,
        difference_seconds=mean_b - mean_a if have_steps else None,
        ratio=mean_b / mean_a if mean_a and b else None,
        overlapping=min(a) <= max(b) and min(b) <= max(a) if min(len(a), len(b)) >= LEAST_STEPS else None,
    )


# ---- whole runs -------------------------------------------------------------------------------------------------

_Total = tuple[float, int | None]
"""Seconds, and the number of spans."""


def _totals(a: Summary, b: Summary) -> list[Totals]:
    found = [_of_whole(summary) for summary in (a, b)]
    rows = []
    for name in dict.fromkeys((*found[0], *found[1])):
        (a_seconds, a_count), (b_seconds, b_count) = (of_run.get(name, (None, None)) for of_run in found)
        rows.append(Totals(name=name, a_seconds=a_seconds, b_seconds=b_seconds, a_count=a_count, b_count=b_count))
    return sorted(rows, key=lambda row: -max(row.a_seconds or 0.0, row.b_seconds or 0.0))


def _of_whole(summary: Summary) -> dict[str, _Total]:
    """Return totals by name: phases as the mean of the ranks, then spans. The start-up and open steps count too."""
    found: dict[str, _Total] = {}
    for span in (*summary.own_spans, *summary.hook_spans):
        seconds, count = found.get(span.name, (0.0, 0))
        found[span.name] = seconds + span.seconds, (count or 0) + span.count
    names = {lane.lane for lane in together(lanes(summary.phases))}
    phases = _sums([row for row in summary.phases if row.lane in names], len(names))
    driver = _sums([row for row in summary.phases if row.lane == DRIVER_ROLE], 1)
    return {**found, **{name: driver[name] for name in driver if name in DRIVER_PHASES}, **phases}


def _sums(rows: Sequence[RankStep], lanes: int) -> dict[str, _Total]:
    """Return seconds by phase, as the mean of so many lanes."""
    found: dict[str, float] = {}
    for row in rows:
        for name, share in row.phases.items():
            found[name] = found.get(name, 0.0) + share.seconds / lanes
    return {name: (seconds, None) for name, seconds in found.items()}


# ---- bytes ------------------------------------------------------------------------------------------------------


def _sent(summary: Summary) -> int | None:
    sent = [sync.bytes for sync in steady_syncs(summary)]
    return round(fmean(sent)) if sent else None


def _peak(summary: Summary) -> int | None:
    return max((device.peak_bytes for device in summary.memory), default=None)


def _held(summary: Summary) -> dict[str, int]:
    """Return bytes by owner; free memory has no owner."""
    held: dict[str, int] = {}
    for device in summary.memory:
        peaks = device.at_peak_bytes | {owner: peak.bytes for owner, peak in device.owner_peaks.items()}
        for owner in (owner for owner in peaks if owner != FREE and owner not in device.unknown):
            held[owner] = max(held.get(owner, peaks[owner]), peaks[owner])
    return held


def _bytes(name: str, sizes: Sequence[int | None]) -> Bytes | None:
    return Bytes(name, *sizes) if any(size is not None for size in sizes) else None


# ---- settings ---------------------------------------------------------------------------------------------------


def settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Setting]:
    """Return what differs between two manifests: packages, then the configuration, then what the program was given."""
    found = _differing(_versions(a), _versions(b))
    if same_program(a, b):
        found += [*_differing(_config(a), _config(b)), *_differing(_given(a), _given(b))]
    return found


def same_program(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two manifests are of one program: both have a configuration, or the same script, module or
    command."""
    return bool(_config(a) and _config(b)) or (not (_config(a) or _config(b)) and _program(a) == _program(b))


def _of_machines(a: Run, b: Run) -> list[Setting]:
    """Return the differences between machines; the machine of a run without samples is unknown, which is no
    difference."""
    if not (a.machines and b.machines):
        return []
    return _differing(described(a.machines), described(b.machines))


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[Setting]:
    return [Setting(name, a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]


def _versions(manifest: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(version) for name, version in (manifest.get("versions") or {}).items()}


def _config(manifest: Mapping[str, Any]) -> dict[str, str]:
    return _flat(manifest.get("config") or {})


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return a flat dictionary with keys joined by dots."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = f"{before}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: str(value)}
    return flat


def _program(manifest: Mapping[str, Any]) -> list[str]:
    """Return a command's script, `-m` and its module, or its program."""
    return _parted(manifest)[0]


def _given(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return what the program was given: `name=value`, `--option value`, an option alone, and arguments by their
    number."""
    given: dict[str, str] = {}
    option = None
    arguments = 0
    for word in _parted(manifest)[1]:
        name, equals, value = word.partition("=")
        if option is not None and not equals and not word.startswith("-"):
            given[option] = word
            option = None
        elif equals:
            option = None
            given[name.lstrip("+-")] = value
        elif word.startswith("-"):
            option = word.lstrip("-")
            given[option] = "given"
        else:
            arguments += 1
            given[f"argument {arguments}"] = word
    return given


def _parted(manifest: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    command = [str(word) for word in manifest.get("command") or ()]
    words = words_of_program(command) if command and PYTHON.fullmatch(Path(command[0]).name) else command
    many = 2 if words[:1] == ["-m"] or words[:1] == ["-c"] else 1
    return words[:many], words[many:]
