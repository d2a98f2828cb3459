"""Memory ran out, or much of it is free: the settings to change, each with what `rltrace plan` says it gives."""

from __future__ import annotations

import shlex

from rltrace.analysis.findings.capacity import NOT_MEASURED
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.programs import EXAMPLE
from rltrace.analysis.findings.run import Run
from rltrace.analysis.memory import OutOfMemory
from rltrace.analysis.plan import asked
from rltrace.analysis.plan.changes import Change, making_room, using_room
from rltrace.analysis.plan.measured import Measured, of_summary
from rltrace.analysis.plan.settings import Settings
from rltrace.analysis.plan.shapes import UnknownModelError
from rltrace.errors import ConfigError

NAME = "planned_settings"
UNKNOWN = "plan does not know its settings"

ROOM = 0.25
"""Share of the card that is free at its fullest moment, from which on larger settings are named. It is half of what
`small_micro_batches` asks for, because plan has computed what fits."""

TAKEN = 0.5
"""Share of the KV cache that has to be taken at some time, for a larger one to be named: the finding `kv_cache` says so
of one that is far too large."""

PROGRAMS = {"rltrace_reference": EXAMPLE, "verl": "verl", "TRL": "TRL"}


def judge(run: Run) -> list[Finding]:
    """Name what makes room if memory ran out, or what uses the room if much is free."""
    known = of_summary(run.summary.run.path, run.summary)
    if known is None:
        raise UnjudgeableError(NOT_MEASURED)
    settings, known = _settings(run, known)
    if run.summary.out_of_memory:
        return _out_of_memory(run, settings, known, run.summary.out_of_memory[0])
    return _free(run, settings, known)


def _settings(run: Run, known: Measured) -> tuple[Settings, Measured]:
    """Return the settings of the run, and what it measured by them.

    Raises:
        UnjudgeableError: plan does not know them.
    """
    nothing_else = asked.Wanted(gpu=None, ranks=None, model=None, shape="")
    try:
        manifest = run.seen.recording.manifest
        found = asked.of_manifest(manifest, "its command", (), nothing_else, known)
        return found.settings, found.known or known
    except UnknownModelError as lacking:
        command = shlex.join(["rltrace", "plan", run.summary.run.path, "--model"])
        remedy = f"{command} FOLDER says what fits, with the folder or config.json of such a checkpoint"
        raise UnjudgeableError(f"{UNKNOWN}: {lacking.reason}; {remedy}") from None
    except ConfigError as lacking:
        raise UnjudgeableError(f"{UNKNOWN}: {lacking}") from None


def _out_of_memory(run: Run, settings: Settings, known: Measured, failure: OutOfMemory) -> list[Finding]:
    phase = failure.moment.phase if failure.moment is not None else None
    changes = making_room(settings, known, phase)
    if not changes:
        return []
    first = next((one for one in changes if one.makes_it_fit), changes[0])
    fits = "by plan it then fits" if first.makes_it_fit else "by plan that alone is not enough"
    return [
        run.finding(
            NAME,
            f"Memory ran out in {phase or 'no phase'}: {first.setting}: {first.then} instead of {first.now} leaves "
            f"{first.gives}, and {fits}",
            [_fact(one) for one in changes],
            size_bytes=first.gives_bytes,
            less_because="",
            basis="modelled",
            figures={"missing_bytes": float((failure.asked_bytes or 0) - (failure.free_bytes or 0))},
            phases=[] if phase is None else [phase],
            about=["out of memory"],
            settings=[_setting(settings, one) for one in changes],
        )
    ]


def _free(run: Run, settings: Settings, known: Measured) -> list[Finding]:
    fullest = max(run.summary.memory, key=lambda device: device.peak_bytes)
    free_bytes = known.card.total_bytes - fullest.peak_bytes
    if free_bytes < ROOM * known.card.total_bytes:
        return []
    spare = _most_taken(run) < TAKEN
    changes = [one for one in using_room(settings, known) if not (spare and one.setting == settings.names.utilization)]
    if not changes:
        return []
    first = changes[0]
    return [
        run.finding(
            NAME,
            f"{free_bytes / 2**30:.0f} of {known.card.total_bytes / 2**30:.0f} GiB of a card are never used: by plan "
            f"{first.setting} fits with {first.then} instead of {first.now} ({first.gives})",
            [_fact(one) for one in changes],
            size_bytes=free_bytes,
            less_because="",
            basis="modelled",
            figures={"free_bytes": float(free_bytes), "capacity_bytes": float(known.card.total_bytes)},
            phases=[] if fullest.peak_phase is None else [fullest.peak_phase],
            about=["room"],
            settings=[_setting(settings, one) for one in changes],
        )
    ]


def _most_taken(run: Run) -> float:
    """Return how full the KV cache was at most; 1 if no engine said."""
    usage = [share for process in run.seen.processes for share in process.engine_steps.kv_usage if share >= 0]
    return max(usage, default=1.0)


def _fact(change: Change) -> str:
    return f"by plan, {change.setting} {change.then} instead of {change.now} means: {change.gives}"


def _setting(settings: Settings, change: Change) -> Setting:
    return Setting(PROGRAMS[settings.names.framework], f"{change.setting}: {change.then} instead of {change.now}")
