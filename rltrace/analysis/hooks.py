"""Hooks over all processes: where they are installed, why not, and which never fired."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rltrace.analysis.observations import Observations
from rltrace.events import CALLS_BY_CHOICE, UNVERIFIED, not_applicable

STATES = ("failed", "installed", "skipped", "undone", "waiting")
"""A hook's state in the run is the first of these that it has in any process."""


class HookFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One hook, over the processes that report it."""

    instrumentation: str
    """Which instrumentation it belongs to, such as `fsdp2`."""
    target: str
    """What it wraps: `module:Class.attribute`."""
    state: str
    """The first of these that it is in any process: `failed`, `installed`, `skipped`, `undone`, or `waiting` for a
    module that no process has imported."""
    reason: str | None
    """Why it is not installed, what failed, or what differs from the source that was read."""
    unverified: bool
    """Whether it is installed in a release that is newer than the last one that was read, and has another source there.
    It found all that it reads."""
    processes: dict[str, int]
    """Number of processes by the hook's state in them."""
    fired: int
    """How many times it was called, over all processes."""
    seconds: float | None
    """How long it held the program up, over all processes: what it does around the call, not the call itself. None
    unless the run was made with RLTRACE_TIME_HOOKS=1."""
    emits: list[str]
    """Names of the spans that it makes."""
    not_applicable: str | None
    """Why its spans cannot be in this run; None if they can."""
    never_fired: bool
    """Whether it is installed and its spans should be in this run, yet nothing called it."""


def made_by(hooks: Iterable[HookFigures]) -> frozenset[str]:
    """Return names of the spans that hooks made."""
    return frozenset(span for hook in hooks if hook.fired for span in hook.emits)


def is_not_needed(hook: HookFigures, made: frozenset[str]) -> bool:
    """Return whether a hook never fired because another one made its spans: a framework has several ways to one."""
    return hook.never_fired and bool(hook.emits) and made.issuperset(hook.emits)


def hooks(seen: Observations) -> list[HookFigures]:
    """Return every hook, by instrumentation in the order in which they report, then by target."""
    reported: dict[tuple[str, str], list[dict[str, object]]] = {}
    for process in seen.processes:
        for hook in process.process.hooks:
            reported.setdefault((str(hook["instrumentation"]), str(hook["target"])), []).append(hook)
    inapplicable = names_not_applicable(seen)
    order = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in reported))}
    return [
        _hook(instrumentation, target, reports, inapplicable)
        for (instrumentation, target), reports in sorted(
            reported.items(), key=lambda item: (order[item[0][0]], item[0][1])
        )
    ]


def names_not_applicable(seen: Observations) -> dict[str, str]:
    """Return names of spans that cannot be in this run, each with the reason."""
    draws = any("actor.draw" in process.phases for process in seen.processes)
    return not_applicable(_device_type(seen), _ranks(seen), draws=draws)


def _hook(
    instrumentation: str, target: str, reports: list[dict[str, object]], inapplicable: dict[str, str]
) -> HookFigures:
    counts: dict[str, int] = {}
    for report in reports:
        counts[str(report["state"])] = counts.get(str(report["state"]), 0) + 1
    state = next((state for state in STATES if state in counts), next(iter(counts)))
    reasons = [str(report["reason"]) for report in reports if report["state"] == state and report.get("reason")]
    fired = sum(int(str(report["fired"])) for report in reports)
    spent_ns = [int(str(report["spent_ns"])) for report in reports if report["spent_ns"] is not None]
    emits = sorted({str(name) for report in reports for name in report.get("emits") or ()})  # type: ignore[attr-defined]
    missing = [inapplicable.get(name) for name in emits]
    inapplicable_reason = missing[0] if missing and all(missing) else None
    return HookFigures(
        instrumentation=instrumentation,
        target=target,
        state=state,
        reason=reasons[0] if reasons else None,
        unverified=state == "installed" and bool(reasons) and reasons[0].startswith(UNVERIFIED),
        processes=counts,
        fired=fired,
        seconds=sum(spent_ns) / 1e9 if spent_ns else None,
        emits=emits,
        not_applicable=inapplicable_reason,
        never_fired=state == "installed" and fired == 0 and inapplicable_reason is None and not _is_by_choice(emits),
    )


def _is_by_choice(emits: list[str]) -> bool:
    """Return whether all its spans are of calls that a program makes or does without."""
    return bool(emits) and all(name.startswith(CALLS_BY_CHOICE) for name in emits)


def _ranks(seen: Observations) -> int:
    return len({process.lane for process in seen.processes if process.lane.rank is not None}) or 1


def _device_type(seen: Observations) -> str:
    """Return `cuda` if a process names a GPU by its UUID."""
    uuids = [process.lane.device or "" for process in seen.processes]
    return "cuda" if any(uuid.startswith(("GPU-", "MIG-")) for uuid in uuids) else "cpu"
