"""Finds what bounds a step, what it costs, and what to change: one file per finding.

In: a Recording's figures and its spans (`run.py`). Out: findings in the order of their price, and what could not be
judged. `finding.py` has what a finding says, and how a price gets its interval and its confidence; `programs.py` which
settings a run has; `amounts.py` how seconds and bytes are written. `doubts.py` says what makes all of it less certain,
and `critical_path.py` what a step waited for. Which findings there are is a table in `rltrace/plugins.py`.

To add a finding, write a file with a function from a `Run` to a list of `Finding`, which raises `UnjudgeableError`
where the Recording lacks what it needs, and name it in that table. Every threshold says where it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rltrace import plugins
from rltrace.analysis.findings import busy_processors
from rltrace.analysis.findings.critical_path import CriticalPath, critical_path
from rltrace.analysis.findings.doubts import doubts
from rltrace.analysis.findings.finding import Finding, UnjudgeableError, Unjudged
from rltrace.analysis.findings.run import Run
from rltrace.analysis.summary import Analysed

__all__ = ["LEAST_SHARE", "NOTABLE_SHARE", "Why", "notable", "why"]

VERSION = 1
"""Version of the JSON: it is raised when a key is removed or changes its meaning, not for a new key."""

LEAST_SHARE = 0.005
"""Share of a step below which a price is not told: it is our goal for what recording costs
(docs/measurements/cost_8b.md), so that a lower price may be our own."""


NOTABLE_SHARE = 0.01
"""Share of a step from which on a summary opens with a finding: recording itself cost 1.0 % of a step where its
bookkeeping was read (docs/measurements/cost_8b.md), so that what costs less is no answer to what bounds a step."""


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds the steps of a Recording."""

    version: int
    """Version of this format. It is raised when a key goes or changes its meaning; a new key does not raise it."""
    path: str
    """The Recording that was judged."""
    steps: list[int]
    """Numbers of the steady steps, which prices are means over; empty if no step has ended."""
    step_seconds: float | None
    """Mean length of these; None if there are none."""
    findings: list[Finding]
    """What every step pays comes first, by its seconds; then what the run pays once; then what costs bytes only."""
    nothing: list[str]
    """Ids of the findings that were judged and would cost less than 0.5 % of a step."""
    unjudged: list[Unjudged]
    """What could not be judged, and why."""
    critical_path: CriticalPath | None
    """What a step waited for, from its beginning to its end; None if that is not known."""
    no_path: str | None
    """Why the path is not known; None if it is."""
    doubts: list[str]
    """What makes all of it less certain: a run that goes on or died, lost parts, one step only, missing ranks, clocks
    that were never compared. Empty if nothing does."""


def why(analysed: Analysed) -> Why:
    """Return what bounds the steps of a Recording, and what could not be judged."""
    run = Run(*analysed)
    found: list[Finding] = []
    nothing: list[str] = []
    unjudged: list[Unjudged] = []
    for name, reference in plugins.findings().items():
        try:
            priced = [one for one in plugins.load(reference)(run) if _is_worth_telling(one)]
        except UnjudgeableError as lacking:
            unjudged.append(Unjudged(name, str(lacking)))
        except Exception as error:  # one of another distribution must not stop the others
            unjudged.append(Unjudged(name, f"it failed: {type(error).__name__}: {error}"))
        else:
            found += priced
            nothing += [] if priced else [name]
    steady = analysed.summary.steady
    left = busy_processors.absorb(run, found)
    path, no_path = _path(run)
    nothing += sorted({one.id for one in found} - {one.id for one in left})
    return Why(
        version=VERSION,
        path=analysed.summary.run.path,
        steps=[] if steady is None else steady.steps,
        step_seconds=None if steady is None else steady.seconds.mean_seconds,
        findings=in_order(left),
        nothing=nothing,
        unjudged=unjudged,
        critical_path=path,
        no_path=no_path,
        doubts=doubts(run),
    )


def _path(run: Run) -> tuple[CriticalPath | None, str | None]:
    """Return the critical path, or why there is none."""
    try:
        return critical_path(run), None
    except UnjudgeableError as lacking:
        return None, str(lacking)
    except Exception as error:  # findings are worth reading without it
        return None, f"it failed: {type(error).__name__}: {error}"


def notable(found: Why) -> list[Finding]:
    """Return those that a summary opens with: what costs less of a step than `NOTABLE_SHARE` is left to `why`."""
    return [one for one in found.findings if one.share is None or one.share >= NOTABLE_SHARE]


def in_order(found: Iterable[Finding]) -> list[Finding]:
    """Return findings by what they cost: each step, then once, then bytes."""
    return sorted(found, key=lambda one: (-(one.seconds_per_step or 0), -(one.once_seconds or 0), -(one.bytes or 0)))


def _is_worth_telling(one: Finding) -> bool:
    return one.share is None or one.share >= LEAST_SHARE
